"""Workload: what is measured, as data. Useful FLOPs, bytes, and the tensors it is run on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from sartor.lab.workloads import scattered
from sartor.problem import DTYPES, name_of

MODES = ("fwd", "bwd", "fwd_bwd", "decode", "graph")
FORWARD = ("fwd", "decode", "graph")  # those without gradients; of the last two the L2 cache is cold
SIZES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "dim", "dim_v")
FACTORS = dict.fromkeys(FORWARD, 1.0) | {"bwd": 2.5, "fwd_bwd": 3.5}  # matrix products: 2, 5, 7
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
PARTS = re.compile(
    r"full|causal|causal_top_left|window(?P<window>\d+)|document(?P<document>\d+)|lognormal(?P<lognormal>\d+)"
    r"|prefix(?P<prefix>\d+)|softcap(?P<softcap>\d+)|alibi|bias|learned|tensor|relative|cached"
    r"|natten(?P<natten>\d+)|dilated(?P<dilated>\d+)|windows(?P<windows>\d+)"
)


@dataclass(frozen=True)
class Pattern:
    """A workload's `mask` text, parsed: parts joined by "+", as in `causal+document8` or `causal+softcap30`."""

    causal: str = ""  # "", "bottom_right" or "top_left"
    window: int = 0  # keys a query sees, itself the last of them
    document: int = 0  # documents in the sequence, of unequal lengths
    lognormal: bool = False  # whether these are as unequal as texts are
    prefix: int = 0  # keys that every query sees, and no others
    softcap: float = 0.0
    alibi: bool = False
    bias: bool = False
    learned: bool = False  # a bias that wants its gradient
    tensor: bool = False
    cached: bool = False  # places of a cache, of which each batch item has filled some
    relative: bool = False  # a table of each head and distance, added to the scores
    natten: int = 0  # width of the neighbourhood in a square image
    dilated: int = 0  # from each key that is seen to the next
    windows: int = 0  # keys to either side: of heads in turns so many, a half, a quarter and an eighth

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """The pattern of `text`; ValueError names the part that is unknown."""
        found: dict[str, Any] = {}
        for part in text.split("+"):
            match = PARTS.fullmatch(part)
            if match is None:
                known = (
                    "full, causal, causal_top_left, windowN, documentN, lognormalN, prefixN, nattenN, dilatedN,"
                    " windowsN, softcapN, alibi, relative, bias, learned, tensor, cached"
                )
                raise ValueError(f"mask part must be one of {known}, got {part!r}")
            numbers = {k: int(v) for k, v in match.groupdict().items() if v is not None}
            if 0 in numbers.values():
                raise ValueError(f"mask part must have a positive number, as in window1024, got {part!r}")
            if "lognormal" in numbers:
                numbers = {"document": numbers["lognormal"], "lognormal": True}
            found |= numbers
            if part.startswith("causal"):
                found["causal"] = "top_left" if part.endswith("left") else "bottom_right"
            if part in ("alibi", "bias", "learned", "tensor", "relative", "cached"):
                found[part] = True
            if part == "learned":
                found["bias"] = True
        return cls(**found)

    @property
    def mask(self) -> Pattern:
        """What of it says who sees whom."""
        return replace(self, softcap=0.0, alibi=False, bias=False, learned=False, relative=False)

    def scattered(self, seqlen: int) -> Callable[..., Any] | None:
        """The part of it that is no interval of keys, as a function of FlexAttention's."""
        if self.natten:
            return scattered.natten(self.natten, seqlen)
        return scattered.dilated(self.dilated) if self.dilated else None

    @property
    def plain(self) -> bool:
        """Nothing but, at most, causality."""
        return replace(self, causal="") == Pattern()


SPREAD = 0.75  # standard deviation of the logarithm of lengths: of 63 the longest is 4.6 times the mean


def document_ids(p: Pattern, seqlen: int) -> np.ndarray:
    """Document of every position: lengths 1 : 2 : 3 : 1 : 2 : 3 ... of the sequence, so that they are unequal; or those
    of a lognormal distribution at evenly spaced probabilities, shuffled alike each time."""
    places = np.arange(p.document)
    weights = places % 3 + 1.0
    if p.lognormal:
        shuffled = np.random.default_rng(0).permutation(places)
        weights = np.exp([SPREAD * NormalDist().inv_cdf((i + 0.5) / p.document) for i in shuffled])
    ends = np.cumsum(weights) * seqlen // weights.sum()
    ends[-1] = seqlen  # however sums were rounded
    return np.searchsorted(ends, np.arange(seqlen), side="right").astype(np.int32)


def sides(p: Pattern, heads: int) -> np.ndarray:
    """Keys to either side of a query that each head sees, where windows differ by head."""
    return (p.windows >> np.arange(heads) % 4).astype(np.int32)


def filled(p: Pattern, batch: int, places: int) -> np.ndarray:
    """Places of a cache that each batch item has filled: all, or from a share to all of them."""
    items = np.arange(1, batch + 1) if p.cached else np.full(batch, batch)
    found: np.ndarray = np.maximum(items * places // batch, 1).astype(np.int32)
    return found


def key_span(p: Pattern, sq: int, skv: int) -> tuple[np.ndarray, np.ndarray]:
    """Interval of keys [lo, hi) outside which each query sees none; inside, all but of scattered patterns."""
    q = np.arange(sq, dtype=np.int64)
    lo, hi = np.zeros(sq, np.int64), np.full(sq, skv, np.int64)
    diagonal = q + (0 if p.causal == "top_left" else skv - sq)
    if p.causal or p.window:
        hi = np.minimum(hi, diagonal + 1)
    if p.window:
        lo = np.maximum(lo, diagonal + 1 - p.window)
    if p.prefix:
        hi = np.minimum(hi, p.prefix)
    if p.windows:  # the widest
        lo, hi = np.maximum(lo, q - p.windows), np.minimum(hi, q + p.windows + 1)
    if p.document:
        keys, queries = document_ids(p, skv), document_ids(p, sq)
        lo = np.maximum(lo, np.searchsorted(keys, queries, side="left"))
        hi = np.minimum(hi, np.searchsorted(keys, queries, side="right"))
    keep = p.scattered(sq)
    if keep is not None:
        first, last, _ = scattered.hull(keep, sq, skv)
        lo, hi = np.maximum(lo, first), np.minimum(hi, last)
    return lo, np.maximum(lo, hi)


def dtype_name(text: str) -> str:
    """As torch and records name it, `bfloat16`; of `bf16` too."""
    return SHORT.get(text, text)


@dataclass(frozen=True)
class Workload:
    """One problem and what is asked of it. Text fields are spelled as records spell them."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    dim: int
    dim_v: int
    dtype: str = "bfloat16"
    mask: str = "full"
    mode: str = "fwd"
    data: str = "normal"  # what the inputs hold: a key of `testing.DATA`

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if getattr(torch, self.dtype, None) not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(name_of, DTYPES))}, got {self.dtype!r}")
        for size in SIZES:
            if getattr(self, size) < 1:
                raise ValueError(f"{size} must be a positive number, got {getattr(self, size)}")
        columns = max(self.dim, self.dim_v, self.seqlen_kv if self.pattern.bias or self.pattern.tensor else 0)
        rows = self.batch * self.heads_q * max(self.seqlen_q, self.seqlen_kv)
        if rows * columns * self.torch_dtype.itemsize >= 2**62:  # torch counts bytes in 64 bits, without data too
            raise ValueError(f"batch, heads, seqlen and dim must make tensors of less than 2^62 bytes, got {self}")
        if self.heads_q % self.heads_kv:
            raise ValueError(f"heads_q must be a multiple of heads_kv, got {self.heads_q} and {self.heads_kv}")
        if self.pattern.document and self.seqlen_q != self.seqlen_kv:
            lengths = f"{self.seqlen_q} and {self.seqlen_kv}"
            raise ValueError(f"mask documentN needs as many queries as keys, got {lengths} with {self.mask!r}")
        p = self.pattern
        if p.natten:
            scattered.refuse(p.natten, (self.seqlen_q, self.seqlen_kv), self.mask)
        if p.scattered(self.seqlen_q) and replace(p.mask, natten=0, dilated=0) != Pattern():
            raise ValueError(f"masks nattenN and dilatedN go with scores alone, got {self.mask!r}")
        if p.windows and replace(p.mask, windows=0) != Pattern():
            raise ValueError(f"mask windowsN goes with scores alone, got {self.mask!r}")
        if 0 < p.windows < 8:
            raise ValueError(
                f"mask windowsN needs an N of at least 8, of which heads take an eighth, got {self.mask!r}"
            )
        if p.cached and replace(p.mask, cached=False) != Pattern():
            raise ValueError(f"mask cached goes with scores alone, got {self.mask!r}")

    @cached_property
    def pattern(self) -> Pattern:
        """The parsed mask."""
        return Pattern.parse(self.mask)

    @property
    def _spans(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """`key_span` of each head; of one where all are alike."""
        p = self.pattern
        of_heads = [replace(p, windows=int(n)) for n in sides(p, self.heads_q)] if p.windows else [p]
        return [key_span(own, self.seqlen_q, self.seqlen_kv) for own in of_heads]

    @cached_property
    def pairs(self) -> float:
        """Query-key pairs of a head, on average, that count as useful: of square causal problems half, as usual."""
        p, sq, skv = self.pattern, self.seqlen_q, self.seqlen_kv
        if p.causal and sq == skv and replace(p.mask, causal="", tensor=False) == Pattern():
            return sq * skv / 2
        keep = p.scattered(sq)
        if keep is not None:
            return float(scattered.hull(keep, sq, skv)[2])
        if p.cached:
            return float(sq * filled(p, self.batch, skv).mean())
        return float(np.mean([(hi - lo).sum() for lo, hi in self._spans]))

    def visited(self, rows: int, keys: int) -> float:
        """Query-key pairs of one head in the tiles of so many rows and keys that hold a visible pair."""
        starts, tiles = np.arange(0, self.seqlen_q, rows), []
        for lo, hi in self._spans:
            first = np.minimum.reduceat(np.where(lo < hi, lo, self.seqlen_kv), starts)
            last = np.maximum.reduceat(np.where(lo < hi, hi, 0), starts)
            tiles.append(np.maximum(-(-last // keys) - first // keys, 0).sum())
        return float(np.mean(tiles)) * rows * keys

    @property
    def parts(self) -> tuple[Workload, ...]:
        """Forward and backward of a training step, each a workload; else itself."""
        return tuple(replace(self, mode=mode) for mode in ("fwd", "bwd")) if self.mode == "fwd_bwd" else (self,)

    @property
    def flops(self) -> float:
        """Useful FLOPs: 2 * batch * heads * pairs * (dim + dim_v) forward, 2.5 times that backward."""
        return 2.0 * self.batch * self.heads_q * self.pairs * (self.dim + self.dim_v) * FACTORS[self.mode]

    @property
    def bytes(self) -> float:
        """Bytes that must move at least once: inputs and outputs of the mode, LSE included."""
        size = self.torch_dtype.itemsize
        q = self.batch * self.heads_q * self.seqlen_q
        kv = self.heads_kv * int(filled(self.pattern, self.batch, self.seqlen_kv).sum())
        forward = size * (q + kv) * (self.dim + self.dim_v) + 4 * q
        backward = size * (2 * (q + kv) * (self.dim + self.dim_v) + q * self.dim_v) + 8 * q
        return {"bwd": backward, "fwd_bwd": forward + backward}.get(self.mode, forward)

    @property
    def score_bytes(self) -> int:
        """Size of one materialised score matrix in the input's dtype."""
        return self.torch_dtype.itemsize * self.batch * self.heads_q * self.seqlen_q * self.seqlen_kv

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def __str__(self) -> str:
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        n = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_kv else f"{self.seqlen_q}/{self.seqlen_kv}"
        d = f"{self.dim}" if self.dim == self.dim_v else f"{self.dim}/{self.dim_v}"
        data = "" if self.data == "normal" else f" {self.data}"
        return f"{self.mode} {self.dtype} B{self.batch} H{heads} N{n} D{d} {self.mask}{data}"


@dataclass
class Inputs:
    """A workload's tensors, all (batch, heads, seqlen, dim) and contiguous, and the extras its mask needs."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    ids: torch.Tensor | None = None  # (1, skv) int32
    slopes: torch.Tensor | None = None  # (hq,) float32, ALiBi's
    bias: torch.Tensor | None = None  # (1, hq, sq, skv)
    keep: torch.Tensor | None = None  # (1, 1, sq, skv) bool
    table: torch.Tensor | None = None  # (hq, sq + skv - 1), read at q - kv + skv - 1
    lengths: torch.Tensor | None = None  # (b,) int32, places of a cache that are filled
    windows: torch.Tensor | None = None  # (hq,) int32, keys that each head sees to either side
    cache: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """What a backward makes gradients of."""
        more = () if self.bias is None or not self.bias.requires_grad else (self.bias,)
        return self.q, self.k, self.v, *more

    def function(self, w: Workload) -> Callable[..., Any] | None:
        """The part of the mask that is a function of FlexAttention's, as Sartor is given it too."""
        return w.pattern.scattered(w.seqlen_q) if self.windows is None else scattered.by_head(self.windows)

    @classmethod
    def without_data(cls, w: Workload) -> Inputs:
        """Tensors on `meta`, of which any size will do."""

        def empty(*shape: int, dtype: torch.dtype = w.torch_dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        q = empty(w.batch, w.heads_q, w.seqlen_q, w.dim)
        k, v = (empty(w.batch, w.heads_kv, w.seqlen_kv, d) for d in (w.dim, w.dim_v))
        self, p = cls(q, k, v, empty(w.batch, w.heads_q, w.seqlen_q, w.dim_v)), w.pattern
        if p.document:
            self.ids = empty(1, w.seqlen_kv, dtype=torch.int32)
        if p.cached:
            self.lengths = empty(w.batch, dtype=torch.int32)
        if p.windows:
            self.windows = empty(w.heads_q, dtype=torch.int32)
        if p.alibi:
            self.slopes = empty(w.heads_q, dtype=torch.float32)
        if p.bias:
            self.bias = empty(1, w.heads_q, w.seqlen_q, w.seqlen_kv).requires_grad_(p.learned and w.mode not in FORWARD)
        if p.tensor:
            self.keep = empty(1, 1, w.seqlen_q, w.seqlen_kv, dtype=torch.bool)
        if p.relative:
            self.table = empty(w.heads_q, w.seqlen_q + w.seqlen_kv - 1)
        return self

    @classmethod
    def make(cls, w: Workload, device: torch.device, seed: int = 0) -> Inputs:
        """Standard normal inputs from a fixed seed, made into what `w.data` says."""
        from sartor.testing import DATA, make_inputs

        grad = w.mode in ("bwd", "fwd_bwd")
        q, k, v = make_inputs(
            w.batch, w.heads_q, w.heads_kv, w.seqlen_q, w.seqlen_kv, w.dim, w.dim_v, w.torch_dtype,
            device, layout="bhsd", seed=seed, requires_grad=grad,
        )  # fmt: skip
        if w.data != "normal":
            with torch.no_grad():
                q, k, v = (t.requires_grad_(grad) for t in DATA[w.data](q, k, v))
        g = torch.Generator(device).manual_seed(seed + 1)
        shape = (w.batch, w.heads_q, w.seqlen_q, w.dim_v)
        dout = torch.randn(shape, generator=g, device=device, dtype=w.torch_dtype)
        self, p = cls(q, k, v, dout), w.pattern
        if p.document:
            self.ids = torch.from_numpy(document_ids(p, w.seqlen_kv))[None].to(device)
        if p.cached:
            self.lengths = torch.from_numpy(filled(p, w.batch, w.seqlen_kv)).to(device)
        if p.windows:
            self.windows = torch.from_numpy(sides(p, w.heads_q)).to(device)
        if p.alibi:  # Press et al. 2022: a geometric sequence down to 2^-8
            heads = torch.arange(1, w.heads_q + 1, device=device, dtype=torch.float32)
            self.slopes = torch.exp2(-8 * heads / w.heads_q)
        if p.bias:
            full = (1, w.heads_q, w.seqlen_q, w.seqlen_kv)
            self.bias = torch.randn(full, generator=g, device=device, dtype=w.torch_dtype)
            self.bias.requires_grad_(p.learned and grad)
        if p.relative:
            distances = (w.heads_q, w.seqlen_q + w.seqlen_kv - 1)
            self.table = torch.randn(distances, generator=g, device=device, dtype=w.torch_dtype)
        if p.tensor:
            self.keep = (
                torch.rand(w.seqlen_q, w.seqlen_kv, generator=g, dtype=torch.float32, device=device)[None, None] < 0.9
            )
        return self

    def visible(self, w: Workload) -> torch.Tensor | None:
        """The whole mask as a bool tensor (1 or batch, 1 or hq, sq, skv), True = attend; None when everything is
        visible."""
        if "visible" not in self.cache:
            lo, hi = (torch.from_numpy(x).to(self.q.device) for x in key_span(w.pattern, w.seqlen_q, w.seqlen_kv))
            key = torch.arange(w.seqlen_kv, device=self.q.device)
            inside = ((key >= lo[:, None]) & (key < hi[:, None]))[None, None]
            keep = self.function(w)
            if keep is not None:
                heads, queries = (torch.arange(n, device=key.device) for n in (w.heads_q, w.seqlen_q))
                inside = inside & keep(0, heads.view(-1, 1, 1), queries[:, None], key)
            if self.lengths is not None:
                inside = inside & (key < self.lengths.view(-1, 1, 1, 1))
            self.cache["visible"] = inside if self.keep is None else inside & self.keep
        if w.pattern.mask == Pattern():
            return None
        return self.cache["visible"]

    def added(self, w: Workload) -> torch.Tensor | None:
        """What is added to the scores, (1, hq, sq, skv) in the inputs' dtype, for who takes nothing smaller."""
        if self.slopes is None and self.table is None:
            return self.bias
        if "added" not in self.cache:
            q, kv = (torch.arange(n, device=self.q.device) for n in (w.seqlen_q, w.seqlen_kv))
            if self.table is not None:
                read = self.table[:, q[:, None] - kv + w.seqlen_kv - 1][None]
                self.cache["added"] = read if self.bias is None else read + self.bias
                return self.cache["added"]
            assert self.slopes is not None
            distance = (q[:, None] + (w.seqlen_kv - w.seqlen_q) - kv).abs()
            alibi = -(self.slopes.view(1, -1, 1, 1) * distance).to(self.q.dtype)
            self.cache["added"] = alibi if self.bias is None else alibi + self.bias
        return self.cache["added"]
