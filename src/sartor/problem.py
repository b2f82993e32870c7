"""Problem: one attention call without its data. It is the only thing that is validated, and it is validated once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any, TypeVar

import torch

from sartor.checks import (
    LAYOUTS,
    PLAIN,
    boolean,
    dense,
    known_layout,
    of_heads,
    real,
    seed,
    sides,
    slopes,
    slopes_without_gradient,
)  # fmt: skip
from sartor.mods import masks, scores
from sartor.mods.core import Mask, Mod, Score, unnamed
from sartor.mods.program import Program
from sartor.mods.recent import Recent
from sartor.mods.tracing import AuxValue, four_dims, resolve

T = TypeVar("T")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_DIM = 512
FARTHEST = 2**24  # elements from row to row, with up to 128 rows in a tile
LEAST, LARGEST = 2.0**-149, 2.0**127  # of a factor in float32, with room for log2(e) beside it
PRECISIONS = ("ieee", "tf32")
ALIGNMENTS = ("bottom_right", "top_left")
Template = tuple[int | float | None, ...]  # the aux values of equal calls: numbers, and None for a tensor of the call


@dataclass(slots=True)
class Call:
    """One call as the user made it. `key` is all of it but the data."""

    q: torch.Tensor  # (b, sq, hq, d); here and below in layout bshd
    k: torch.Tensor  # (b, skv, hkv, d)
    v: torch.Tensor  # (b, skv, hkv, dv)
    bias: torch.Tensor | None = None  # broadcastable to (b, hq, sq, skv)
    mask: torch.Tensor | Mask | None = None  # the same
    score: Score | None = None
    alibi_slopes: torch.Tensor | None = None  # (hq,) or (b, hq)
    sinks: torch.Tensor | None = None  # (hq,)
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    deterministic: bool = False
    out_dtype: torch.dtype | None = None
    kernel: str = "auto"
    precision: str = "ieee"
    layout: str = "bshd"  # of q, k and v: one of LAYOUTS
    bias_gradient: bool | None = None  # whether the bias' is wanted; None: where bias requires one
    table_gradients: tuple[int, ...] | None = None  # of the score's tensors, by number; None: of those that require one
    dropout_p: float = 0.0
    dropout_seed: torch.Tensor | None = None  # int64 of 1, 5 or 7 numbers; see kernels/dropout.py

    def __post_init__(self) -> None:
        """On every call, since keys do not tell them apart: True and 1, 1 and 1.0, a tensor and what it holds."""
        causal = self.causal
        if causal is not False and causal is not True and (not isinstance(causal, str) or causal not in ALIGNMENTS):
            raise ValueError(f"causal must be False, True, 'bottom_right' or 'top_left', got {causal!r}")
        if self.window is not None:
            left, right = self.window = sides(self.window)
            if left is None and (right is None or right == 0 or causal):  # a causal mask, or none, by another name
                self.causal, self.window = causal or right == 0, None
        if self.softmax_scale is not None:
            self.softmax_scale = real("softmax_scale", self.softmax_scale)
        if type(self.softcap) is not float:
            self.softcap = real("softcap", self.softcap)
        if type(self.dropout_p) is not float:
            self.dropout_p = real("dropout_p", self.dropout_p)
        if self.deterministic is not False:
            boolean("deterministic", self.deterministic)
        if self.bias_gradient is None:
            bias = self.bias
            self.bias_gradient = bias is not None and isinstance(bias, torch.Tensor) and bias.requires_grad
        if self.alibi_slopes is not None:
            slopes_without_gradient(self.alibi_slopes)
        if self.table_gradients is None:
            tables = () if self.score is None else getattr(self.score, "tensors", ())
            self.table_gradients = tuple([i for i, t in enumerate(tables) if t.requires_grad]) if tables else ()

    def key(self) -> tuple[Any, ...]:
        """Equal keys mean equal problems and equal plans; made on every call, so it only reads attributes."""
        q, k, v = self.q, self.k, self.v
        bias, mask, score, slopes, sinks = self.bias, self.mask, self.score, self.alibi_slopes, self.sinks
        plain = bias is None and mask is None and score is None and slopes is None and sinks is None
        return (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),  # LENGTHS_TO
            q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15,
            None if plain else tuple(extra_key(x) for x in (bias, mask, score, slopes, sinks)),
            self.causal, self.window, self.softmax_scale, self.softcap, self.bits_repeat,
            self.out_dtype, self.kernel, self.precision, self.layout, self.bias_gradient,
            self.table_gradients, self.dropout_p, None if self.dropout_seed is None else extra_key(self.dropout_seed),
        )  # fmt: skip

    def bshd(self) -> Call:
        """The call in layout bshd. Raises TypeError or ValueError where q, k or v alone is wrong."""
        _check_each(self)
        return self.transposed()

    def transposed(self) -> Call:
        """The call in layout bshd, whose q, k and v are known to be right."""
        if self.layout == "bshd":
            return self
        q, k, v = (t.transpose(1, 2) for t in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, layout="bshd")

    @property
    def bits_repeat(self) -> bool:
        """Whether results must have the same bits from run to run: asked for here, or of all of PyTorch."""
        return self.deterministic or torch.are_deterministic_algorithms_enabled()

    @property
    def needs_gradient(self) -> bool:
        """Whether autograd follows one of the inputs."""
        bias, sinks = self.bias, self.sinks
        return (
            self.q.requires_grad or self.k.requires_grad or self.v.requires_grad
            or (bias is not None and bias.requires_grad) or (sinks is not None and sinks.requires_grad)
            or bool(self.table_gradients)
        )  # fmt: skip


def extra_key(x: Any) -> Any:
    """Of an argument besides q, k and v, what a plan depends on."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15
    return (x.handle, tuple(extra_key(t) for t in x.tensors)) if isinstance(x, Mod) else x


@dataclass(frozen=True)
class Problem:
    """One attention call, without its data.

    Shapes: q (b, sq, hq, d), k (b, skv, hkv, d), v (b, skv, hkv, dv) -> out (b, sq, hq, dv), lse (b, hq, sq).
    """

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    dim: int
    dim_v: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    device: str
    softmax_scale: float
    program: Program = field(default_factory=Program)
    mask_name: str = "full"
    score_name: str = ""
    sinks: bool = False
    bias_shape: tuple[int, ...] | None = None  # of four dims, where the bias' gradient is wanted
    table_shapes: tuple[tuple[int, tuple[int, ...]], ...] = ()  # of aux values whose gradients are wanted, by number
    deterministic: bool = False
    precision: str = "ieee"
    kernel: str = "auto"
    copies: tuple[str, ...] = ()
    out_like_q: bool = False  # out is what `empty_like` makes of q
    rows_on_16_bytes: bool = True  # every row of q, k and v starts on a multiple of 16 bytes
    aux_on_16_bytes: bool = True  # and every row of keys of what masks and scores read
    shared_lse: bool = False  # of a backward: lse and out are of more keys than it is given, as in a ring
    dropout_p: float = 0.0
    dropout_numbers: int = 0  # of the seed, 1, 5 or 7: see kernels/dropout.py; 0 without dropout

    @classmethod
    def of(cls, call: Call) -> Problem:
        """Validate a call. Raises ValueError or TypeError naming the argument, what was expected and what came."""
        return cls.parse(call)[0]

    @classmethod
    def parse(cls, call: Call) -> tuple[Problem, Template]:
        """The problem of a call, and the template of its aux values: the mods are built and traced here, once."""
        return cls._parse(call)[:2]

    @classmethod
    def parse_kind(cls, call: Call, key: tuple[Any, ...]) -> tuple[Problem, Template]:
        """The same of a call with this key; once for all lengths, where q, k and v are all there is."""
        kind = cls.kind_of(call, key)
        if kind is None:
            return cls.parse(call)
        problem, values = _PARSED.get(kind) or cls.of_kind(call, kind)
        at = 1 if call.layout == "bshd" else 2
        sq, skv = call.q.shape[at], call.k.shape[at]
        return problem.of_lengths(sq, skv), tuple([resolve(value, sq, skv) for value in values])

    @classmethod
    def of_kind(cls, call: Call, kind: tuple[Any, ...]) -> tuple[Problem, tuple[AuxValue, ...]]:
        """The problem of `kind_of` a call with lengths that stand for all, and aux values for all lengths."""
        known: tuple[Problem, tuple[AuxValue, ...]] | None = _PARSED.get(kind)
        if known is None:
            problem, _, values = cls._parse(call)
            known = problem.kind, values
            _PARSED.add(kind, known)
        return known

    @staticmethod
    def kind_of(call: Call, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What a call with this key has in common with those of other lengths; None where it is to be looked at alone:
        where q, k and v are not all there is, or where there are no queries or no two keys."""
        q, k, v, at = call.q, call.k, call.v, 1 if call.layout == "bshd" else 2
        plain = q.__class__ in PLAIN and k.__class__ in PLAIN and v.__class__ in PLAIN and q.dim() == k.dim() == 4
        alone = call.bias is None and call.mask is None and call.score is None and call.alibi_slopes is None
        alone = alone and call.sinks is None and call.dropout_seed is None
        # of such head dims rows start on 16 bytes, whatever the lengths are
        if not (plain and alone and v.dim() == 4 and q.shape[3] % 8 == v.shape[3] % 8 == 0):
            return None
        if q.shape[at] < 1 or k.shape[at] < 2 or v.shape[at] != k.shape[at]:
            return None
        # one query sees all keys of a causal mask
        return q.shape[at] == 1, _lies(q, at), _lies(k, at), _lies(v, at), keeps_order(q), *key[LENGTHS_TO:]

    @classmethod
    def _parse(cls, call: Call) -> tuple[Problem, Template, tuple[AuxValue, ...]]:
        call = call.bshd()
        _check_tensors(call)
        b, sq, hq, d = call.q.shape
        skv, hkv, dv = call.k.shape[1], call.k.shape[2], call.v.shape[3]
        _check_options(call)
        _check_extras(call, (b, hq, sq, skv))
        with unnamed():
            mask, score = mods(call)
        program, values = Program.of(mask, score)
        template = tuple(None if isinstance(v, torch.Tensor) else resolve(v, sq, skv) for v in values)
        tensors = [(i, v) for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
        placed = [four_dims(v) for i, v in tensors if not program.aux[i].dims]
        of_score = tensors[len(mask.tensors) if mask else 0 :]  # the caller's come first
        dense = {"q": call.q, "k": call.k, "v": call.v}
        problem = cls(
            b, hq, hkv, sq, skv, d, dv, call.q.dtype, call.out_dtype or call.q.dtype, call.q.device.type,
            _scale(call),
            program, mask.name if mask else "full", score.name if score else "", call.sinks is not None,
            None if call.bias is None or not call.bias_gradient else tuple(four_dims(call.bias).shape),
            tuple((of_score[i][0], tuple(_read(*of_score[i], program).shape)) for i in call.table_gradients or ()),
            call.bits_repeat, call.precision, call.kernel,
            tuple(name for name, t in dense.items() if is_copied(t)),
            call.out_dtype in (None, call.q.dtype) and d == dv and keeps_order(call.q),
            all(rows_on_16_bytes(t) for t in dense.values()),
            all(rows_on_16_bytes(t) for t in placed if t.shape[3] == skv > 1),
            dropout_p=call.dropout_p,
            dropout_numbers=0 if not call.dropout_p else 1 if call.dropout_seed is None else call.dropout_seed.numel(),
        )  # fmt: skip
        return problem, template, values

    @cached_property
    def kind(self) -> Problem:
        """The problem with lengths that stand for all others. What does not depend on them is found once, by this."""
        stands = self.of_lengths(1, 1)
        found: Problem | None = _KINDS.get(stands)
        if found is None:
            _KINDS.add(stands, found := stands)
            stands.__dict__["kind"] = stands
        return found

    def of_lengths(self, seqlen_q: int, seqlen_kv: int) -> Problem:
        """The same problem with other lengths."""
        return changed(self, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, _hash=None)

    def __hash__(self) -> int:
        known = self.__dict__
        found: int | None = known.get("_hash")  # which caches ask for again and again
        if found is None:
            found = known["_hash"] = hash(tuple(map(known.__getitem__, self.__dataclass_fields__)))
        return found

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads_q // self.heads_kv

    @property
    def empty(self) -> bool:
        """Whether there is no score at all."""
        return 0 in (self.batch, self.heads_q, self.seqlen_q, self.seqlen_kv)

    def __str__(self) -> str:
        dims = f"d={self.dim}" if self.dim == self.dim_v else f"d={self.dim}/{self.dim_v}"
        heads = f"h={self.heads_q}" if self.heads_q == self.heads_kv else f"h={self.heads_q}/{self.heads_kv}"
        extras = [
            self.mask_name,
            self.score_name,
            "sinks" if self.sinks else "",
            f"dropout {self.dropout_p:g}" if self.dropout_p else "",
            self.precision * (self.dtype == torch.float32),
        ]
        return (
            f"attention(b={self.batch} {heads} sq={self.seqlen_q} skv={self.seqlen_kv} {dims}"
            f" {name_of(self.dtype)} on {self.device}; {', '.join(e for e in extras if e)})"
        )


LENGTHS_TO = 6  # parts of `Call.key` that hang on lengths, the first ones
_KINDS = Recent(1024)
_PARSED = Recent(256)  # a problem, and aux values for all lengths, by what calls of its kind have in common


def changed(x: T, **fields: Any) -> T:
    """A frozen dataclass with other fields, and with what cached properties found of x; nothing is checked."""
    found = object.__new__(type(x))
    found.__dict__.update(x.__dict__, **fields)
    return found


def mask_class(p: Problem) -> str:
    """`full` without a mask or score, `band` where a row attends to all keys up to one of them, as with a causal mask,
    `window` where it attends to any interval of keys, `tensor` where a bias, mask or table is read for every pair of
    query and key, `score` for other scores, with a mask or without, `mods` for other masks, documents among them."""
    if any({"q", "k"} <= set(a.pattern.lower()) or a.dims for a in p.program.aux):
        return "tensor"
    if p.program.score is not None:
        return "score"
    if p.program.keep is None:
        return "full"
    if not p.program.is_interval:
        return "mods"
    return "window" if p.program.has_lower_end else "band"


def _lies(t: torch.Tensor, at: int) -> tuple[Any, ...]:
    """Of a tensor the dims but for its length, which is at `at`, and what a problem says of how it lies."""
    b, h, d = t.shape[0], t.shape[3 - at], t.shape[3]
    contiguous = t.is_contiguous()
    if contiguous or t.transpose(1, 2).is_contiguous():
        return b, h, d, contiguous
    t = t if at == 1 else t.transpose(1, 2)
    return b, h, d, is_copied(t), rows_on_16_bytes(t)


def without_gaps(t: torch.Tensor) -> bool:
    """Whether t is contiguous as (b, s, h, d) or as (b, h, s, d): `empty_like` then makes a tensor with its strides."""
    return t.is_contiguous() or t.transpose(1, 2).is_contiguous()


def heads_outermost(t: torch.Tensor) -> bool:
    """Whether t (b, s, h, d) lies in memory as (b, h, s, d)."""
    return t.shape[1] > 1 and t.shape[2] > 1 and t.stride(2) > t.stride(1)


def keeps_order(t: torch.Tensor) -> bool:
    """Whether `empty_like` makes of t (b, s, h, d) a tensor without gaps that has the same dim outermost, s or h."""
    if without_gaps(t) or t.__class__ not in PLAIN:  # the strides of others may be no numbers
        return without_gaps(t)
    made = torch.empty_like(t, device="meta")
    return without_gaps(made) and heads_outermost(made) == heads_outermost(t)


def is_copied(t: torch.Tensor) -> bool:
    """Whether kernels are given a dense copy of (b, s, h, d): some add up places within a tile in 32 bits."""
    return (t.stride(3) != 1 and t.shape[3] > 1) or (t.stride(1) > FARTHEST and t.shape[1] > 1)


def rows_on_16_bytes(t: torch.Tensor) -> bool:
    """Of the tensor, or of the dense copy that is made of it."""
    size = t.element_size()
    if is_copied(t):
        return t.shape[3] * size % 16 == 0
    plain = type(t) in (torch.Tensor, torch.nn.Parameter)  # others, fake ones among them, may have no address
    address = t.data_ptr() if plain else int(t.storage_offset()) * size
    return address % 16 == 0 and all(t.stride(i) * size % 16 == 0 for i in range(3) if t.shape[i] > 1)


def wide(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, else float32: that of scores and what is added to them, of the softmax and of lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _read(i: int, t: torch.Tensor, program: Program) -> torch.Tensor:
    """The aux value i as the program reads it."""
    return t if program.aux[i].dims else four_dims(t)


def _scale(call: Call) -> float:
    """The factor of q k^T; 0 where float32 has nothing as small."""
    if call.softmax_scale is None:
        return default_scale(call.q.shape[3])
    return 0.0 if abs(call.softmax_scale) < LEAST and wide(call.q.dtype) == torch.float32 else call.softmax_scale


def default_scale(dim: int) -> float:
    """1 / sqrt(dim)."""
    return 1.0 / math.sqrt(dim)


@cache
def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def mods(call: Call) -> tuple[Mask | None, Score | None]:
    """The mask and the score of a call. Their order here is the order of `aux_tensors`."""
    alone = call.q.shape[1] == 1 and call.causal in (True, "bottom_right") and call.window is None
    parts = [None if alone else band(call.causal, call.window)]  # the last query sees every key
    if isinstance(call.mask, torch.Tensor):
        parts.append(masks.from_tensor(call.mask))
    elif call.mask is not None:
        parts.append(call.mask)
    mask = None
    for part in parts:
        mask = part if mask is None else mask & part if part is not None else mask
    score = None
    steps = (
        scores.softcap(call.softcap) if call.softcap else None,
        call.score,
        None if call.alibi_slopes is None else scores.alibi(call.alibi_slopes, wide(call.q.dtype)),
        None if call.bias is None else scores.bias(_bias(call.bias, call.q.dtype)),
    )
    for step in steps:
        score = step if score is None else score.then(step) if step is not None else score
    if mask is None and score is not None and score.is_singular:
        mask = masks.everything()  # kernels compute what comes out infinite or NaN again with care, if there is a mask
    return mask, score


def _bias(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bias as kernels add it to scores of inputs of `dtype`: float64 beside float64 only."""
    return bias.to(wide(dtype)) if bias.dtype == torch.float64 else bias


@lru_cache(maxsize=256)
def band(causal: bool | str, window: tuple[int | None, int | None] | None) -> Mask | None:
    """The diagonal band that `causal` and `window` ask for together; for all lengths the same one."""
    align: Any = "top_left" if causal == "top_left" else "bottom_right"
    if window is None:
        return masks.causal(align) if causal else None
    left, right = window
    return masks.window(left, 0 if causal else right, align)


def aux_tensors(call: Call) -> list[torch.Tensor]:
    """The tensors among the aux values of a call, in their order, as programs read them; without building its mods."""
    return tensors_read(call.mask, call.score, call.alibi_slopes, call.bias, call.q.dtype)


def tensors_read(mask: Any, score: Any, alibi_slopes: Any, bias: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """`aux_tensors` of a call with these arguments."""
    found: list[torch.Tensor] = []
    if mask is not None:
        found += mask.read if isinstance(mask, Mask) else (four_dims(mask),)
    if score is not None:
        found += score.read
    if alibi_slopes is not None:
        found.append(scores.slopes_table(alibi_slopes, wide(dtype)))
    if bias is not None:
        found.append(four_dims(_bias(bias, dtype)))
    return found


def aux_values(call: Call, template: Template | None = None) -> tuple[int | float | torch.Tensor, ...]:
    """What the program of a call reads, resolved for its lengths: numbers, tables, other tensors of four dims.

    `template` is that of an equal call, and spares the making of a new one.
    """
    template = Problem.parse(call)[1] if template is None else template
    return filled(template, aux_tensors(call) if None in template else [])


def filled(template: Template, read: Sequence[torch.Tensor]) -> tuple[int | float | torch.Tensor, ...]:
    """Aux values: the numbers of a template, and the tensors that a call reads."""
    if not read:
        return template  # type: ignore[return-value]
    left = iter(read)
    return tuple([next(left) if value is None else value for value in template])


def _check_each(call: Call) -> None:
    known_layout(call.layout)
    for name in ("q", "k", "v"):
        t = getattr(call, name)
        dense(name, t)
        if t.dim() != 4:
            raise ValueError(f"{name} must have 4 dims {LAYOUTS[call.layout]}, got {t.dim()}: {tuple(t.shape)}")
        if t.dtype not in DTYPES:
            raise TypeError(f"{name} must have dtype float16, bfloat16, float32 or float64, got dtype {t.dtype}")


def _check_tensors(call: Call) -> None:
    q, k, v = call.q, call.k, call.v
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got dtype {t.dtype}")
        if t.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {t.device}")
        if t.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have the batch of q, {q.shape[0]}, got batch {t.shape[0]}")
    for axis, name in ((1, "seqlen"), (2, "heads")):
        if k.shape[axis] != v.shape[axis]:
            raise ValueError(f"v must have the {name} of k, {k.shape[axis]}, got {name} {v.shape[axis]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have the head dim of q, {q.shape[3]}, got head dim {k.shape[3]}")
    for name, dim in (("q", q.shape[3]), ("v", v.shape[3])):
        if not 1 <= dim <= MAX_DIM:
            raise ValueError(f"the head dim of {name} must be between 1 and {MAX_DIM}, got head dim {dim}")
    if 0 in (q.shape[2], k.shape[2]) or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"heads of q must be a multiple of the heads of k and v, got heads {q.shape[2]} and {k.shape[2]}"
        )


def _check_options(call: Call) -> None:
    single = wide(call.q.dtype) == torch.float32
    for name, value in (("softmax_scale", call.softmax_scale), ("softcap", call.softcap)):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
        if single and value is not None and abs(value) > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST:.3g}, as kernels compute in float32, got {value}")
    if call.softcap < 0:
        raise ValueError(f"softcap must be >= 0 (0 is off), got {call.softcap}")
    if single and 0 < call.softcap < LEAST:
        raise ValueError(
            f"softcap must be 0 (off) or at least {LEAST:.3g}, as kernels compute in float32, got {call.softcap}"
        )
    if not 0 <= call.dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {call.dropout_p}")
    allowed = tuple(dict.fromkeys((None, call.q.dtype, wide(call.q.dtype))))
    if call.out_dtype not in allowed:
        raise TypeError(f"out_dtype must be {' or '.join(map(str, allowed))}, got {call.out_dtype}")
    if not isinstance(call.kernel, str):
        raise TypeError(f"kernel must be a str, got {type(call.kernel).__name__}: {call.kernel!r}")
    if call.precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {call.precision!r}")


def _check_extras(call: Call, full: tuple[int, int, int, int]) -> None:
    q = call.q
    b, hq = full[:2]
    for name in ("bias", "mask"):
        t = getattr(call, name)
        if t is None or isinstance(t, Mask):
            continue
        if not isinstance(t, torch.Tensor):
            also = " or a sartor.mods.Mask" if name == "mask" else ""
            wrap = ": wrap it as Mask(function)" if name == "mask" and callable(t) else ""
            raise TypeError(f"{name} must be a torch.Tensor{also}, got {type(t).__name__}{wrap}")
        _check_extra(name, t, q, full)
        if name == "mask" and t.dtype != torch.bool:
            raise TypeError(f"mask must have dtype bool (True = attend), got dtype {t.dtype}; float tensors go to bias")
        if name == "bias" and not t.dtype.is_floating_point:
            raise TypeError(f"bias must have a floating dtype, got dtype {t.dtype}")
    if not isinstance(call.score, (Score, type(None))):
        wrap = ": wrap it as Score(function)" if callable(call.score) else ""
        raise TypeError(f"score must be a sartor.mods.Score, got {type(call.score).__name__}{wrap}")
    for name in ("mask", "score"):
        mod = getattr(call, name)
        for i, t in enumerate(mod.values) if isinstance(mod, Mod) else ():
            if isinstance(t, torch.Tensor):
                _check_extra(name, t, q, None if i in mod.tables else full)
    if call.alibi_slopes is not None:
        slopes(call.alibi_slopes, hq, b, q.device)
    if call.sinks is not None:
        of_heads("sinks", call.sinks, ((hq,),), q.device)
    if call.dropout_seed is not None:
        seed(call.dropout_seed, q.device)


def _check_extra(name: str, t: torch.Tensor, q: torch.Tensor, full: tuple[int, int, int, int] | None) -> None:
    """`full` is what it must be broadcastable to; None for tables."""
    dense(name, t)
    shape = (1,) * (4 - t.dim()) + tuple(t.shape)
    if full and (t.dim() > 4 or any(have not in (1, want) for have, want in zip(shape, full, strict=True))):
        raise ValueError(
            f"{name} must be broadcastable to (batch, heads, seqlen_q, seqlen_kv) = {full}, got {tuple(t.shape)}"
        )
    if t.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {t.device}")
