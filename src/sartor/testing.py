"""What tests, the lab and users check attention with: inputs, the float64 oracle, error budgets.

The budget is derived, never typed in. A result may be wrong by `factor` times the error of the same mathematics done
by PyTorch in the inputs' own dtype, plus what cannot be avoided: the rounding of the result's dtype, and the noise of
recomputing exp(s - lse) in float32, a relative error of 2^-22 (1 + |s|max) in each term of a sum. The rule holds for
the largest error and for every row, because a wrong row hides behind another's larger error; over every head the root
mean square may be at most 1.2 times PyTorch's, FlexAttention's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sartor.api import attention
from sartor.kernels.reference import after_dropout, scores, weights
from sartor.kernels.spec import Operands
from sartor.mods.core import Mask, Score, index_tensors
from sartor.mods.expr import evaluate
from sartor.problem import Call, Problem, aux_values

Tensor = torch.Tensor
FORWARD_FACTOR, GRADIENT_FACTOR, RMS_FACTOR = 2.0, 3.0, 1.2
SCORES_AT_ONCE = 2**26  # float64 scores that one piece of the oracle may hold: half a GiB a matrix


def make_inputs(
    batch: int, heads_q: int, heads_kv: int, seqlen_q: int, seqlen_kv: int, dim: int, dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu", layout: str = "bhsd", seed: int = 0,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Standard normal q, k, v: (batch, heads, seqlen, dim), or (batch, seqlen, heads, dim) with `layout="bshd"`."""
    generator = None if torch.device(device).type == "meta" else torch.Generator(device).manual_seed(seed)
    dim_v = dim if dim_v is None else dim_v
    tensors = []
    for heads, seqlen, width in ((heads_q, seqlen_q, dim), (heads_kv, seqlen_kv, dim), (heads_kv, seqlen_kv, dim_v)):
        shape = (batch, heads, seqlen, width) if layout == "bhsd" else (batch, seqlen, heads, width)
        t = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
        tensors.append(t.requires_grad_(requires_grad))
    return tensors[0], tensors[1], tensors[2]


def make_like(t: Tensor, seed: int = 1) -> Tensor:
    """A standard normal tensor of the same shape, dtype and device: a gradient to send back."""
    generator = torch.Generator(t.device).manual_seed(seed)
    return torch.randn(t.shape, generator=generator, device=t.device, dtype=torch.float32).to(t.dtype)


def spread(t: Tensor) -> Tensor:
    """A factor for each column of t, from 1e-6 to 1e6."""
    return torch.logspace(-6, 6, t.shape[-1], device=t.device, dtype=t.dtype)


def _outlier(t: Tensor) -> Tensor:
    t = t.clone()
    t[..., t.shape[-2] // 3, t.shape[-1] // 5] = 1e4
    return t


def _slope(q: Tensor, k: Tensor, v: Tensor, rise: float) -> tuple[Tensor, Tensor, Tensor]:
    """(b, h, s, d) tensors whose scores change by `rise` along the keys, at the default scale."""
    q, k = q.clone(), k.clone()
    q[..., 0] = 1
    steps = torch.linspace(0, rise * k.shape[-1] ** 0.5, k.shape[-2], dtype=torch.float32, device=k.device)
    k[..., 0] = steps.to(k.dtype)
    return q, k, v


DATA: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "normal": lambda q, k, v: (q, k, v),
    "times8": lambda q, k, v: (8 * q, 8 * k, v),  # peaked softmax
    "constant": lambda q, k, v: (torch.full_like(q, 0.7), torch.full_like(k, 0.3), torch.full_like(v, 1.1)),
    "outlier_q": lambda q, k, v: (_outlier(q), k, v),  # one element of 1e4 in each head
    "outlier_k": lambda q, k, v: (q, _outlier(k), v),
    "outlier_v": lambda q, k, v: (q, k, _outlier(v)),
    "rising": lambda q, k, v: _slope(q, k, v, 30.0),  # scores rise by 30 from the first key to the last
    "falling": lambda q, k, v: _slope(q, k, v, -30.0),
    "channels_v": lambda q, k, v: (q, k, v * spread(v)),
    "channels": lambda q, k, v: (q * spread(q), k / spread(k), v * spread(v)),  # scores of ordinary size
}


def layouts(t: Tensor) -> dict[str, Tensor]:
    """The values of a rank 4 tensor in other memory: axes swapped, packed, every second row, unaligned, ..."""
    step = t.new_zeros(t.shape[0], 2 * t.shape[1], *t.shape[2:])
    step[:, ::2] = t
    off = t.new_zeros(t.numel() + 1)
    off[1:] = t.reshape(-1)
    return {
        "swapped": t.transpose(1, 2).contiguous().transpose(1, 2),
        "packed": torch.stack([t, t, t], 2)[:, :, 1],
        "step": step[:, ::2],
        "last": torch.stack([t, t], -1)[..., 0],
        "transposed": t.transpose(1, 3).contiguous().transpose(1, 3),
        "offset": off[1:].view(t.shape),
    }


# ---- pieces: the oracle runs on a few heads at a time


class Piece(NamedTuple):
    """Some batch items and heads of a call; q, k, v in layout (batch, seqlen, heads, dim)."""

    batch: slice
    heads: slice
    heads_kv: slice
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


def _pieces(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Iterator[Piece]:
    b, sq, hq, _ = q.shape
    skv, hkv = k.shape[1], k.shape[2]
    whole = b * hq * sq * skv <= SCORES_AT_ONCE
    group = hq // hkv
    step = hkv if whole else max(1, SCORES_AT_ONCE // max(1, group * sq * skv))
    for item in [slice(0, b)] if whole else [slice(i, i + 1) for i in range(b)]:
        for first in range(0, hkv, step):
            kv = slice(first, min(first + step, hkv))
            heads = slice(kv.start * group, kv.stop * group)
            part = options if whole else {name: _cut(name, o, item, heads) for name, o in options.items()}
            yield Piece(item, heads, kv, q[item, :, heads], k[item, :, kv], v[item, :, kv], part)


def _cut(name: str, option: Any, batch: slice, heads: slice) -> Any:
    if name == "dropout_seed":
        first = [option.new_tensor([part.start]) for part in (batch, heads)]
        return torch.cat([option.reshape(1), *first])
    if isinstance(option, Mask):
        aux = _cut_aux(option, batch, heads)
        return Mask(
            lambda b, h, q, kv, aux: option.keep(b + batch.start, h + heads.start, q, kv, aux), aux, name=option.name
        )
    if isinstance(option, Score):
        aux = _cut_aux(option, batch, heads)
        return Score(
            lambda s, b, h, q, kv, aux: option.fn(s, b + batch.start, h + heads.start, q, kv, aux), aux, option.name
        )
    if not isinstance(option, Tensor):
        return option
    if name == "sinks":
        return option[heads]
    if name == "alibi_slopes":
        return option[heads] if option.dim() == 1 else option[batch, heads]
    full = option[(None,) * (4 - option.dim())]
    return full[_along(full, batch, heads)]


def _cut_aux(mod: Mask | Score, batch: slice, heads: slice) -> tuple[Any, ...]:
    """What it reads; tables, which are read by the whole problem's positions, as they are."""
    return tuple(a if i in mod.tables else _cut("aux", a, batch, heads) for i, a in enumerate(mod.aux))


def _along(full: Tensor, batch: slice, heads: slice) -> tuple[slice, slice]:
    """The part of a tensor broadcastable to (batch, heads, ...) that a piece sees."""
    return batch if full.shape[0] > 1 else slice(None), heads if full.shape[1] > 1 else slice(None)


def _double(options: dict[str, Any]) -> dict[str, Any]:
    """The options for float64 inputs: floating tensors upcast, kernel choices dropped."""
    dropped = ("kernel", "out_dtype", "return_lse", "precision", "deterministic")
    floats = ("bias", "sinks", "alibi_slopes")
    kept = {n: o for n, o in options.items() if n not in dropped}
    return {n: o.detach().double() if n in floats and o is not None else o for n, o in kept.items()}


def _bshd(layout: str, *tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) if layout == "bhsd" else t for t in tensors]


# ---- the oracle


def reference(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = "bshd", **attention_kwargs: Any
) -> tuple[Tensor, Tensor]:
    """out (in `layout`) and lse (batch, heads_q, seqlen_q) of `attention` in float64, a few heads at a time."""
    q, k, v = _bshd(layout, q.detach(), k.detach(), v.detach())
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=torch.float64)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float64)
    for piece in _pieces(q, k, v, _double(attention_kwargs)):
        parts = _exact(piece.q.double(), piece.k.double(), piece.v.double(), **piece.options)
        out[piece.batch, :, piece.heads], lse[piece.batch, piece.heads] = parts
    return _bshd(layout, out)[0], lse


def reference_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None, *, layout: str = "bshd",
    **attention_kwargs: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """float64 gradients `dq`, `dk`, `dv` (in `layout`), and `dbias`, `dsinks` where there are bias and sinks."""
    return _gradients(_exact, q, k, v, dout, dlse, layout, _double(attention_kwargs), torch.float64)


def low_precision(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = "bshd", **attention_kwargs: Any
) -> tuple[Tensor, Tensor]:
    """out and lse of the same mathematics in the inputs' own dtype, in plain PyTorch: products, softmax and all.

    Differentiable by autograd. Like PyTorch's math backend it rounds scores and probabilities to the dtype.
    """
    q, k, v = _bshd(layout, q, k, v)
    dropped = ("kernel", "out_dtype", "return_lse")
    call = Call(q, k, v, **{n: o for n, o in attention_kwargs.items() if n not in dropped})
    p = Problem.of(call)
    aux = aux_values(call)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(p.group, 1) for t in (k, v))
    s = q @ (k * p.softmax_scale).transpose(-1, -2)  # (b, h, sq, skv)
    b, h, i, j = index_tensors(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv, s.device)
    symbols = {"b": b, "h": h, "q": i, "kv": j}
    if p.program.score is not None:
        s = evaluate(p.program.score, symbols | {"s": s}, aux)
    if p.program.keep is not None:
        keep = torch.as_tensor(evaluate(p.program.keep, symbols, aux), device=s.device)
        s = s.masked_fill(~keep.to(torch.bool).expand(s.shape), -torch.inf)
    if call.sinks is not None:
        s = torch.cat([s, call.sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    dead = (s == -torch.inf).all(-1, keepdim=True)
    probabilities = torch.softmax(s.masked_fill(dead, 0), -1).masked_fill(dead, 0).to(v.dtype)[..., : v.shape[2]]
    out = after_dropout(p, Operands(q, k, v, seed=call.dropout_seed), probabilities) @ v
    lse = torch.logsumexp(s if s.dtype == torch.float64 else s.float(), -1) if s.shape[-1] else s.sum(-1) - torch.inf
    return _bshd(layout, out.transpose(1, 2))[0], lse


def low_precision_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None, *, layout: str = "bshd",
    **attention_kwargs: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients of `low_precision`, a few heads at a time; keys as in `reference_gradients`."""
    return _gradients(low_precision, q, k, v, dout, dlse, layout, attention_kwargs, q.dtype)


def _exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = attention(q, k, v, kernel="reference", return_lse=True, **options)
    return out, lse


def _gradients(
    fn: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, layout: str, options: dict[str, Any],
    dtype: torch.dtype,
) -> dict[str, Tensor]:  # fmt: skip
    q, k, v, dout = _bshd(layout, q.detach(), k.detach(), v.detach(), dout.detach())
    found = {f"d{name}": torch.zeros_like(t, dtype=dtype) for name, t in (("q", q), ("k", k), ("v", v))}
    for name in ("bias", "sinks"):
        if options.get(name) is not None:
            found[f"d{name}"] = torch.zeros_like(options[name], dtype=torch.promote_types(options[name].dtype, dtype))
    for piece in _pieces(q, k, v, options):
        leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in zip("qkv", piece[3:6], strict=True)}
        own = dict(piece.options)
        for name in ("bias", "sinks"):
            if own.get(name) is not None:
                own[name] = leaves[name] = own[name].detach().clone().requires_grad_()
        out, lse = fn(leaves["q"], leaves["k"], leaves["v"], **own)
        ends, starts = [out], [dout[piece.batch, :, piece.heads].to(out.dtype)]
        if dlse is not None:
            ends, starts = [*ends, lse], [*starts, dlse[piece.batch, piece.heads].to(lse.dtype)]
        parts = torch.autograd.grad(ends, list(leaves.values()), starts, allow_unused=True)
        for name, part in zip(leaves, parts, strict=True):
            if part is not None:
                _place(found, name, part, piece)
    return {n: _bshd(layout, g)[0] if n in ("dq", "dk", "dv") else g for n, g in found.items()}


def _place(found: dict[str, Tensor], name: str, part: Tensor, piece: Piece) -> None:
    whole = found[f"d{name}"]
    if name == "bias":
        full = whole.view((1,) * (4 - whole.dim()) + tuple(whole.shape))
        full[_along(full, piece.batch, piece.heads)] += part.view(*(4 - part.dim()) * (1,), *part.shape)
    elif name == "sinks":
        whole[piece.heads] += part
    else:
        whole[piece.batch, :, piece.heads if name == "q" else piece.heads_kv] = part


# ---- what a sum would be if nothing cancelled in it


class Magnitudes(NamedTuple):
    """The units of rounding: `terms` holds, element by element, the sum of absolute terms behind each result."""

    terms: dict[str, Tensor]  # out, lse, dq, dk, dv, dbias, dsinks, in the shapes of the results
    s_max: float  # largest absolute score that is attended to


def magnitudes(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, dlse: Tensor | None = None, *, layout: str = "bshd",
    **attention_kwargs: Any,
) -> Magnitudes:  # fmt: skip
    """Magnitudes of out and lse, and with `dout` those of the gradients."""
    q, k, v = _bshd(layout, q.detach(), k.detach(), v.detach())
    dout = None if dout is None else _bshd(layout, dout.detach())[0]
    options = _double(attention_kwargs)
    found = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in (("dq", q), ("dk", k), ("dv", v))}
    found["out"] = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=torch.float64)
    found["lse"] = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float64)
    for name in ("bias", "sinks"):
        if options.get(name) is not None:
            found[f"d{name}"] = torch.zeros_like(options[name])
    s_max = 0.0
    for piece in _pieces(q, k, v, options):
        do = None if dout is None else dout[piece.batch, :, piece.heads]
        s_max = max(s_max, _add_magnitudes(found, piece, do, None if dlse is None else dlse[piece.batch, piece.heads]))
    names = ("out", "lse") if dout is None else tuple(found)
    rows = ("out", "dq", "dk", "dv")
    return Magnitudes({n: _bshd(layout, found[n])[0] if n in rows else found[n] for n in names}, s_max)


def _add_magnitudes(found: dict[str, Tensor], piece: Piece, dout: Tensor | None, dlse: Tensor | None) -> float:
    q, k, v = (t.double().nan_to_num(0, 0, 0) for t in piece[3:6])
    call = Call(q, k, v, **piece.options, bias_gradient=True)
    p = Problem.of(call)
    x = Operands(q, k, v, call.sinks, aux_values(call), seed=call.dropout_seed)  # type: ignore[arg-type]
    q, k, v = q.transpose(1, 2), *(t.transpose(1, 2).repeat_interleave(p.group, 1) for t in (k, v))
    s, keep, slope = scores(p, x, q, k)
    probabilities, lse = weights(x, s, keep)
    used = after_dropout(p, x, probabilities)
    out = used @ v.abs()  # (b, h, sq, dv)
    queries = piece.batch, slice(None), piece.heads
    found["out"][queries] = out.transpose(1, 2)
    found["lse"][piece.batch, piece.heads] = 1 + lse.nan_to_num(0, 0, 0).abs()
    if dout is not None:
        do = dout.transpose(1, 2).double().nan_to_num(0, 0, 0).abs()
        delta = (do * out).sum(-1, keepdim=True) + (0 if dlse is None else dlse.double().abs()[..., None])
        ds = probabilities * (after_dropout(p, x, do @ v.abs().transpose(-1, -2)) + delta)
        steep = 1 + abs(slope) if isinstance(slope, Tensor) else 1  # 1 - tanh^2 cancels: its terms are of size 1
        raw = torch.where(keep, ds * steep, 0) * abs(p.softmax_scale)
        found["dq"][queries] = (raw @ k.abs()).transpose(1, 2)
        keys = piece.batch, slice(None), piece.heads_kv
        for name, t in (("dk", raw.transpose(-1, -2) @ q.abs()), ("dv", used.transpose(-1, -2) @ do)):
            found[name][keys] = t.reshape(p.batch, p.heads_kv, p.group, *t.shape[2:]).sum(2).transpose(1, 2)
        if p.bias_shape is not None:
            _place(found, "bias", ds.sum_to_size(p.bias_shape), piece)
        if call.sinks is not None:
            share = torch.exp(call.sinks.view(1, -1, 1) - lse).nan_to_num(0, 0, 0)
            _place(found, "sinks", (share * (1 + delta[..., 0])).sum((0, 2)), piece)
    seen = s[keep & s.isfinite()]
    return seen.abs().max().item() if seen.numel() else 0.0


# ---- errors and budgets


@dataclass(frozen=True)
class Errors:
    """How far a result is off. max: largest absolute error; rel: norm of the error over the exact norm; row: of max."""

    max: float
    rel: float
    row: tuple[int, ...]

    def __str__(self) -> str:
        return f"max {self.max:.1e} at row {self.row}, relative {self.rel:.1e}"


def measure(out: Tensor, exact: Tensor) -> Errors:
    """Errors of `out` against `exact`, of equal shapes; infinite where one is finite and the other is not."""
    error = _error(out, exact)
    if error.numel() == 0:
        return Errors(0.0, 0.0, ())
    place = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
    norm, exact_norm = error.norm().item(), _finite(exact).norm().item()
    return Errors(
        error.max().item(), norm / exact_norm if exact_norm else norm, tuple(place[:3] if len(place) == 4 else place)
    )


def cosine(out: Tensor, exact: Tensor) -> float:
    """Cosine of the angle between two results taken as vectors: 1 when they agree in direction."""
    a, b = _finite(out).flatten(), _finite(exact).flatten()
    product = (a.norm() * b.norm()).item()
    return (a @ b).item() / product if product else 1.0


def _finite(t: Tensor) -> Tensor:
    return t.detach().double().nan_to_num(0, 0, 0)


def _error(out: Tensor, exact: Tensor) -> Tensor:
    """|out - exact|, 0 where both are the same inf or NaN, inf where only one is finite."""
    out, exact = out.detach().double(), exact.detach().double()
    if out.shape != exact.shape:
        raise AssertionError(f"shape {tuple(out.shape)} must be {tuple(exact.shape)}")
    same = (out == exact) | (out.isnan() & exact.isnan())
    return torch.where(same, 0, (out - exact).abs()).nan_to_num(torch.inf, torch.inf, torch.inf)


@dataclass(frozen=True)
class Budget:
    """What a result may be off by, element by element."""

    lowp: Tensor  # error of same-precision PyTorch
    rounding: Tensor  # of the exact result to the result's dtype
    noise: Tensor  # of the working precision
    unit: Tensor  # one rounding of every term to the inputs' dtype

    @classmethod
    def of(
        cls, out: Tensor, lowp: Tensor, exact: Tensor, magnitude: Tensor | None, s_max: float, dtype: torch.dtype
    ) -> Budget:
        """The budget of `out`, whose inputs are of `dtype`."""
        exact = exact.detach().double()
        if magnitude is None:
            magnitude = _finite(exact).abs().max().expand(exact.shape)
        work = torch.float64 if dtype == torch.float64 else torch.float32
        error = _error(lowp, exact)
        return cls(
            torch.where(error.isinf(), 0, error),
            torch.where(exact.isfinite(), (exact.to(out.dtype).double() - exact).abs(), 0).nan_to_num(0, 0, 0),
            # a weight below the smallest normal number is 0 on a GPU: what it would have been multiplied by is lost
            2 * torch.finfo(work).eps * (1 + s_max) * magnitude + torch.finfo(work).tiny / torch.finfo(work).eps,
            torch.finfo(dtype).eps / 2 * magnitude,
        )

    def over(self, reduce: Any, factor: float, luck: float) -> tuple[Tensor, Tensor]:
        """(limit, same-precision error) with each part reduced by `reduce`.

        `luck` units are granted because the same-precision error of few elements may be small by chance.
        """
        lowp = reduce(self.lowp)
        return factor * lowp + reduce(self.rounding) + reduce(self.noise) + luck * reduce(self.unit), lowp


def check(
    out: Tensor, lowp: Tensor, exact: Tensor, factor: float = FORWARD_FACTOR, *, magnitude: Tensor | None = None,
    s_max: float = 0.0, name: str = "out", layout: str = "bshd", dtype: torch.dtype | None = None,
    independent: int | None = None,
) -> Errors:  # fmt: skip
    """Raise AssertionError unless `out` is within the budget that `lowp` and `exact` give; return its errors.

    Args:
        out: what is checked; rank 4 in `layout` is looked at by rows and heads, other ranks element by element.
        lowp: the same by `low_precision` or `low_precision_gradients`.
        exact: the same by `reference` or `reference_gradients`.
        factor: how many times the error of `lowp` is allowed: 2 for results, 3 for gradients.
        magnitude, s_max: as `magnitudes` gives them; without them, the largest exact value and 0.
        name: what to call it in the message.
        layout: as in `attention`.
        dtype: of the inputs, where `out` has another.
        independent: how many rows of a head have errors of their own, where they are fewer than its rows.
    """
    errors = measure(out, exact)
    if out.numel() == 0:
        return errors
    budget = Budget.of(out, lowp, exact, magnitude, s_max, dtype or out.dtype)
    error = _error(out, exact)
    seqlen = 1 if layout == "bshd" else 2
    by_rows = out.dim() == 4 and name != "dbias"
    luck = min(independent or out.numel(), out.shape[seqlen] if by_rows else out.numel()) ** -0.5
    rules: list[tuple[str, Any, float, float]] = [("", lambda t: t.amax(), factor, luck)]
    if by_rows:
        rules.append(("row", lambda t: t.amax(-1), factor, 1.0))
        rules.append(("head", lambda t: t.square().mean((seqlen, 3)).sqrt(), RMS_FACTOR, luck))
    else:
        rules.append(("element", lambda t: t, factor, 1.0))
    for rule, reduce, times, luck in rules:
        limit, low = budget.over(reduce, times, luck)
        _raise_if_over(name, rule, reduce(error), limit, low, errors.row)
    return errors


def _raise_if_over(name: str, rule: str, error: Tensor, limit: Tensor, lowp: Tensor, worst: tuple[int, ...]) -> None:
    excess = torch.where(error <= limit, -torch.inf, error)
    if not (excess > -torch.inf).any():
        return
    at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    where = f"{rule} {at}" if rule else f"row {worst}"
    raise AssertionError(
        f"{name}: error {error[at].item():.1e} exceeds {limit[at].item():.1e}"
        f" (same-precision PyTorch {lowp[at].item():.1e}) at {where}"
    )


def verify(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = "bshd", gradients: bool = True, through_lse: bool = False,
    dout: Tensor | None = None, **attention_kwargs: Any,
) -> dict[str, Errors]:  # fmt: skip
    """Run `attention` on copies of the inputs and check out, lse and every gradient by budget.

    Args:
        gradients: whether to run the backward.
        through_lse: whether a gradient arrives through lse too.
        dout: the gradient of out; drawn by `make_like` when absent.
        **attention_kwargs: as in `attention`, `kernel` included.
    """
    options = {n: o for n, o in attention_kwargs.items() if n != "return_lse"}
    leaves = {n: t.detach().requires_grad_(gradients) for n, t in (("q", q), ("k", k), ("v", v))}
    for name in ("bias", "sinks"):
        if options.get(name) is not None:
            options[name] = leaves[name] = options[name].detach().requires_grad_(gradients)
    result = attention(leaves["q"], leaves["k"], leaves["v"], layout=layout, return_lse=True, **options)  # type: ignore[arg-type]
    found = dict(zip(("out", "lse"), result, strict=True))
    dout = make_like(found["out"]) if dout is None else dout
    dlse = make_like(found["lse"], 2) if through_lse else None
    if gradients:
        ends = [found["out"], found["lse"]] if dlse is not None else [found["out"]]
        starts = [dout, dlse] if dlse is not None else [dout]
        parts = torch.autograd.grad(ends, list(leaves.values()), starts)
        found |= {f"d{n}": g for n, g in zip(leaves, parts, strict=True)}
    plain = {n: o.detach() if isinstance(o, Tensor) else o for n, o in options.items()}
    return check_all(found, q, k, v, dout if gradients else None, dlse, layout=layout, **plain)


def check_all(
    found: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None,
    dlse: Tensor | None = None, *, layout: str = "bshd", **attention_kwargs: Any,
) -> dict[str, Errors]:  # fmt: skip
    """`check` for results in hand: `found` holds some of out, lse, dq, dk, dv, dbias, dsinks."""
    with torch.no_grad():
        exact = dict(zip(("out", "lse"), reference(q, k, v, layout=layout, **attention_kwargs), strict=True))
        lowp = dict(zip(("out", "lse"), _low_precision_pieces(q, k, v, layout, attention_kwargs), strict=True))
        size, s_max = magnitudes(q, k, v, dout, dlse, layout=layout, **attention_kwargs)
    if dout is not None:
        exact |= reference_gradients(q, k, v, dout, dlse, layout=layout, **attention_kwargs)
        lowp |= low_precision_gradients(q, k, v, dout, dlse, layout=layout, **attention_kwargs)
    axis = 1 if layout == "bshd" else 2
    independent = min(q.shape[axis], k.shape[axis])  # a query's rounding reaches the gradients of all its keys
    return {
        n: check(
            t, lowp[n], exact[n], GRADIENT_FACTOR if n[0] == "d" else FORWARD_FACTOR, magnitude=size[n],
            s_max=s_max, name=n, layout=layout, dtype=q.dtype, independent=independent,
        )
        for n, t in found.items()
    }  # fmt: skip


def _low_precision_pieces(
    q: Tensor, k: Tensor, v: Tensor, layout: str, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    q, k, v = _bshd(layout, q.detach(), k.detach(), v.detach())
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.promote_types(q.dtype, torch.float32))
    for piece in _pieces(q, k, v, options):
        parts = low_precision(piece.q, piece.k, piece.v, **piece.options)
        out[piece.batch, :, piece.heads], lse[piece.batch, piece.heads] = parts
    return _bshd(layout, out)[0], lse
