"""The tiled algorithm in torch: linear memory, any device, every feature. On a CPU its products are BLAS's.

Forward (Dao 2023, algorithm 1): for a block of queries, walk over the tiles of keys its mask reaches,

    m' = max(m, rowmax(s))    p = exp(s - m')    l = exp(m - m') l + rowsum(p)    acc = exp(m - m') acc + p v

and out = acc / l, lse = m + log(l). The backward (algorithm 2) walks over the same tiles and recomputes
p = exp(s - lse). A sink is the state that the walk starts in: m = sink, l = 1. The mask's `rows` cut the walk into
tiles that are skipped, tiles that need no predicate, and tiles that do. Heads that share keys are rows of one product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sartor.device import Device
from sartor.kernels.algebra import attended, finite, reach, sink_gradient, spoiled, working_dtype
from sartor.kernels.spec import Gradients, Operands, Plan, Saved, Tile, allocate_out
from sartor.mods.core import BIG
from sartor.mods.expr import evaluate
from sartor.problem import Problem

Tensor = torch.Tensor
TILE = Tile(256, 512)  # the fastest on two AVX2 cores for 2 to 32 heads; the same for any batch, so that bits are too
ITEM = 2**21  # scores of a batch item from which items are taken one by one: their tiles alone fill the caches


@dataclass(frozen=True, slots=True)
class Part:
    """Some batch items in the working dtype. n counts (item, key head) pairs; g query heads share each."""

    p: Problem
    items: slice
    q: Tensor  # (n, g, sq, d), times softmax_scale
    k: Tensor  # (n, skv, d)
    v: Tensor  # (n, skv, dv)
    sinks: Tensor | None  # (hq,)
    aux: tuple[Any, ...]
    clean: bool  # nothing is infinite or NaN: 0 times it is 0

    @property
    def batch(self) -> int:
        """How many items."""
        return int(self.items.stop - self.items.start)

    def rows(self, x: Tensor, i: slice) -> Tensor:
        """Rows `i` of x (n, g, sq, width), heads that share keys after one another: (n, g * rows, width)."""
        return x[:, :, i].reshape(x.shape[0], -1, x.shape[3])

    def by_head(self, x: Tensor) -> Tensor:
        """A tile (n, g * rows, keys) as (batch, hq, rows, keys): the same memory."""
        return x.view(self.batch, self.p.heads_q, -1, x.shape[2])


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `i`, the keys they reach, and the tiles of keys in which no predicate is needed."""

    i: slice
    lo: int
    full_lo: int
    full_hi: int
    hi: int

    def tiles(self, block_n: int) -> Iterator[tuple[slice, bool]]:
        """(keys, whether the mask must be evaluated)."""
        pieces = ((self.lo, self.full_lo, True), (self.full_lo, self.full_hi, False), (self.full_hi, self.hi, True))
        for start, stop, partial in pieces:
            for j in range(start, stop, block_n):
                yield slice(j, min(j + block_n, stop)), partial


def parts(p: Problem, x: Operands, others: tuple[Tensor, ...] = ()) -> Iterator[Part]:
    """The call, some batch items at a time. `others` count for `clean`."""
    step = 1 if p.heads_q * p.seqlen_q * p.seqlen_kv >= ITEM else p.batch
    clean = all(map(finite, (x.q, x.k, x.v, *others)))
    for first in range(0, p.batch, max(step, 1)):
        items = slice(first, first + step)
        q = heads_first(x.q[items], p, p.heads_kv) * p.softmax_scale
        k, v = (heads_first(t[items], p, p.heads_kv)[:, 0] for t in (x.k, x.v))
        aux = tuple(a[items] if isinstance(a, Tensor) and a.shape[0] > 1 else a for a in x.aux)
        yield Part(p, items, q, k, v, x.sinks, aux, clean)


def heads_first(t: Tensor, p: Problem, heads_kv: int) -> Tensor:
    """(batch, seqlen, heads, width) in the working dtype as (batch * heads_kv, heads // heads_kv, seqlen, width)."""
    b, seqlen, heads, width = t.shape
    return t.transpose(1, 2).to(working_dtype(p)).reshape(b * heads_kv, heads // heads_kv, seqlen, width)


def heads_last(t: Tensor, batch: int) -> Tensor:
    """The inverse of `heads_first`, or of its [:, 0]: (batch, seqlen, heads, width)."""
    return t.reshape(batch, t.shape[:-2].numel() // batch, *t.shape[-2:]).transpose(1, 2)


def _at(a: Any, i: slice, j: slice) -> Any:
    """An aux value on a tile."""
    if not isinstance(a, Tensor):
        return a
    return a[:, :, i if a.shape[2] > 1 else slice(None), j if a.shape[3] > 1 else slice(None)]


def symbols(part: Part, i: slice, j: slice) -> dict[str, Tensor]:
    """b, h, q and kv on a tile, of shapes (batch,1,1,1), (1,hq,1,1), (1,1,rows,1), (1,1,1,keys)."""
    sizes = {"b": part.items, "h": slice(0, part.p.heads_q), "q": i, "kv": j}
    index = {n: torch.arange(s.start, s.stop, device=part.q.device) for n, s in sizes.items()}
    return {n: t.view(*(-1 if axis == m else 1 for axis in range(4))) for m, (n, t) in enumerate(index.items())}


def spans(part: Part, block_m: int) -> list[Span]:
    """Blocks of queries with what `program.rows` says of them, over all items and heads of the part."""
    p = part.p
    sq, skv = p.seqlen_q, p.seqlen_kv
    blocks = [slice(i, min(i + block_m, sq)) for i in range(0, sq, block_m)]
    if p.program.rows is None:
        return [Span(i, 0, 0, skv, skv) for i in blocks]
    at = symbols(part, slice(0, sq), slice(0, 1))
    shape = (part.batch, p.heads_q, sq, 1)
    device = part.q.device
    lo, hi, full_lo, full_hi = (
        torch.as_tensor(evaluate(e, at, part.aux, part.q.dtype), device=device).expand(shape) for e in p.program.rows
    )
    empty = hi <= lo
    lo, hi = torch.where(empty, BIG, lo), torch.where(empty, 0, hi)
    ends = torch.stack([lo.amin((0, 1, 3)), -full_lo.amax((0, 1, 3)), full_hi.amin((0, 1, 3)), -hi.amax((0, 1, 3))])
    found = []
    for i in blocks:
        lows = ends[:, i].amin(1).clamp(-BIG, BIG).tolist()
        first, last = max(0, lows[0]), min(skv, -lows[3])
        full = max(first, -lows[1]), min(last, lows[2])
        full = full if full[0] < full[1] else (last, last)
        found.append(Span(i, first, *full, last))
    return found


def scores(part: Part, q: Tensor, span: Span, j: slice, partial: bool) -> tuple[Tensor, Tensor | None, Any]:
    """A tile of scores (n, g * rows, keys); the mask, where it is needed; the score's slope."""
    program = part.p.program
    s = torch.bmm(q, part.k[:, j].transpose(1, 2))
    keep = slope = None
    if program.score is None and not partial:
        return s, None, None
    aux = tuple(_at(a, span.i, j) for a in part.aux)
    at = symbols(part, span.i, j)
    if program.score is not None and program.dscore is not None:
        raw = part.by_head(s)
        slope = evaluate(program.dscore, at | {"s": raw}, aux, s.dtype)
        s = evaluate(program.score, at | {"s": raw}, aux, s.dtype).to(s.dtype).expand(raw.shape).reshape(s.shape)
    if partial and program.keep is not None:
        keep = torch.as_tensor(evaluate(program.keep, at, aux, s.dtype), device=s.device).to(torch.bool)
    return s, keep, slope


class State:
    """The softmax of some rows as far as it has been walked."""

    def __init__(self, part: Part, q: Tensor) -> None:
        n, rows, _ = q.shape
        self.part = part
        self.m = q.new_full((n, rows, 1), -torch.inf)
        self.l = q.new_zeros((n, rows, 1))
        self.acc = q.new_zeros((n, rows, part.v.shape[2]))
        self.seen: list[Tensor] = []
        if part.sinks is not None:
            part.by_head(self.m).copy_(part.sinks.view(1, -1, 1, 1))
            self.l = torch.where(self.m == -torch.inf, 0.0, 1.0).to(q.dtype)

    def add(self, s: Tensor, keep: Tensor | None, j: slice) -> None:
        """Take a tile of scores in; `s` is overwritten."""
        if keep is not None:
            self.part.by_head(s).masked_fill_(~keep, -torch.inf)
        m = torch.maximum(self.m, s.amax(2, keepdim=True))
        base = torch.where(m.isinf(), 0, m)
        p = s.sub_(base).exp_()
        alpha = torch.exp(self.m - base)
        self.m = m
        self.l = self.l.mul_(alpha).add_(p.sum(2, keepdim=True))
        v = self.part.v[:, j]
        if not self.part.clean:
            self._see(v, keep, s.shape)
            v = torch.where(v.isfinite(), v, 0)
        self.acc.mul_(alpha).baddbmm_(p, v)

    def _see(self, v: Tensor, keep: Tensor | None, shape: torch.Size) -> None:
        keep = _like(self.part, keep, shape, v.device)
        found = [reach(keep, kind) for kind in (v.isnan(), v == torch.inf, v == -torch.inf)]
        self.seen = [a | b for a, b in zip(self.seen, found, strict=True)] if self.seen else found

    def result(self) -> tuple[Tensor, Tensor]:
        """out (n, rows, dv) and lse (n, rows, 1)."""
        out = self.acc / torch.where(self.l == 0, 1, self.l)
        lse = torch.where(self.m.isinf(), 0, self.m) + torch.log(self.l)
        lse = torch.where(self.m == torch.inf, torch.nan, lse)  # as of a softmax over infinity
        return spoiled(out, *self.seen) if self.seen else out, lse


def _like(part: Part, keep: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor:
    """The mask of a tile as bool (n, g * rows, keys)."""
    if keep is None:
        return torch.ones((), dtype=torch.bool, device=device).expand(shape)
    rows = shape[0] * shape[1] // (part.batch * part.p.heads_q)
    return keep.expand(part.batch, part.p.heads_q, rows, shape[2]).reshape(shape)


class Blocked:
    """See the module."""

    name = "blocked"
    family = "blocked"
    backwards: tuple[str, ...] = ("blocked_backward",)

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """Nothing: it computes all that the reference does."""
        return []

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """One."""
        return (TILE,)

    def run(self, plan: Plan, x: Operands) -> tuple[Tensor, Tensor]:
        """out and lse."""
        p, tile = plan.problem, plan.tile or TILE
        out = allocate_out(p, x.q)
        lse = torch.empty((p.batch, p.heads_q, p.seqlen_q), dtype=working_dtype(p), device=x.q.device)
        if out.numel() == 0:
            return out, lse
        for part in parts(p, x):
            for span in spans(part, tile.block_m):
                q = part.rows(part.q, span.i)
                state = State(part, q)
                for j, partial in span.tiles(tile.block_n):
                    s, keep, _ = scores(part, q, span, j, partial)
                    state.add(s, keep, j)
                rows, rows_lse = state.result()
                out[part.items, span.i] = part.by_head(rows).transpose(1, 2).to(out.dtype)
                lse[part.items, :, span.i] = part.by_head(rows_lse)[..., 0]
        return out, lse


class BlockedBackward:
    """dV = P^T dO, dP = dO V^T, dS = P (dP - delta), dQ = dS K, dK = dS^T Q, tile by tile with P from lse."""

    name = "blocked_backward"
    family = "blocked"

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """Nothing: it computes all that the reference does."""
        return []

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """One, as in the forward."""
        return (TILE,)

    def run(self, plan: Plan, x: Operands, saved: Saved) -> Gradients:
        """Gradients of everything; those of scores and of sinks only where they are asked for."""
        p, tile = plan.problem, plan.tile or TILE
        dtype = working_dtype(p)
        dq, dk, dv = (torch.zeros_like(t) for t in (x.q, x.k, x.v))
        dbias = None if p.bias_shape is None else torch.zeros(p.bias_shape, dtype=dtype, device=x.q.device)
        delta = (saved.dout.to(dtype) * saved.out.to(dtype)).sum(3).transpose(1, 2)  # (b, hq, sq)
        if saved.dlse is not None:
            delta = delta - saved.dlse.to(dtype)
        if saved.out.numel():
            for part in parts(p, x, (saved.dout,)):
                sums = Sums(part, saved, delta, dbias)
                for span in spans(part, tile.block_m):
                    sums.add(span, tile.block_n)
                for whole, d in ((dq, sums.dq), (dk, sums.dk), (dv, sums.dv)):
                    whole[part.items] = heads_last(d, part.batch).to(whole.dtype)
        return Gradients(dq, dk, dv, dbias, sink_gradient(x, saved.lse, delta))


class Sums:
    """The gradients of one part, as far as they have been walked."""

    def __init__(self, part: Part, saved: Saved, delta: Tensor, dbias: Tensor | None) -> None:
        p, items = part.p, part.items
        self.part, self.dbias = part, dbias
        self.dout = heads_first(saved.dout[items], p, p.heads_kv)  # (n, g, sq, dv)
        shape = (*self.dout.shape[:3], 1)
        lse = saved.lse[items].reshape(shape).to(self.dout.dtype)
        self.base, self.delta = torch.where(lse == -torch.inf, 0, lse), delta[items].reshape(shape)
        self.dq, self.dk, self.dv = (torch.zeros_like(t) for t in (part.q, part.k, part.v))

    def add(self, span: Span, block_n: int) -> None:
        """One block of queries."""
        part = self.part
        q, dout, base, delta = (part.rows(t, span.i) for t in (part.q, self.dout, self.base, self.delta))
        dq = torch.zeros_like(q)
        for j, partial in span.tiles(block_n):
            s, keep, slope = scores(part, q, span, j, partial)
            p = s.sub_(base).exp_()  # [rows, keys]
            self._mask(p, keep)
            self._into(self.dv[:, j], p.transpose(1, 2), dout, keep, True)
            ds = torch.bmm(dout, part.v[:, j].transpose(1, 2)).sub_(delta).mul_(p)
            self._mask(ds, keep)
            if self.dbias is not None:
                self._add_bias(part.by_head(ds), span.i, j)
            if slope is not None:  # a number, where it is the same everywhere
                ds = part.by_head(ds).mul(slope).view(ds.shape)
                self._mask(ds, keep)
            self._into(dq, ds, part.k[:, j], keep, False)
            self._into(self.dk[:, j], ds.transpose(1, 2), q, keep, True)
        self.dq[:, :, span.i] = dq.view(part.q.shape[0], part.p.group, -1, dq.shape[2]) * part.p.softmax_scale

    def _mask(self, tile: Tensor, keep: Tensor | None) -> None:
        """0 where masked, whatever was there."""
        if keep is not None:
            self.part.by_head(tile).masked_fill_(~keep, 0)

    def _into(self, total: Tensor, weights: Tensor, x: Tensor, keep: Tensor | None, by_key: bool) -> None:
        """total += weights @ x, in which what is not attended to contributes nothing."""
        if self.part.clean:
            total.baddbmm_(weights, x)
            return
        shape = weights.transpose(1, 2).shape if by_key else weights.shape
        keep = _like(self.part, keep, shape, x.device)
        total += attended(weights, x, keep.transpose(1, 2) if by_key else keep)

    def _add_bias(self, ds: Tensor, i: slice, j: slice) -> None:
        assert self.dbias is not None
        places = (self.part.items, slice(None), i, j)
        where = tuple(s if size > 1 else slice(None) for s, size in zip(places, self.dbias.shape, strict=True))
        total = self.dbias[where]
        total += ds.sum_to_size(total.shape)


SPEC = Blocked()
BACKWARD_SPEC = BlockedBackward()
