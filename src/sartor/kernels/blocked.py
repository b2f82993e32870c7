"""The tiled algorithm in torch: linear memory, any device, every feature. On a CPU its products are BLAS's.

Forward (Dao 2023, algorithm 1): for a block of queries, walk over the tiles of keys its mask reaches,

    m' = max(m, rowmax(s))    p = exp(s - m')    l = exp(m - m') l + rowsum(p)    acc = exp(m - m') acc + p v

and out = acc / l, lse = m + log(l). The backward (algorithm 2) walks over the same tiles and recomputes
p = exp(s - lse), or p = exp(s - m) / l after one more walk where lse cannot hold log(l) beside m: where m is -1e9 or
finfo.min, as in rows that an additive mask hides all keys from. A sink is the state that the walk starts in: m = sink,
l = 1. The mask's `rows` cut the walk into tiles that are skipped, tiles that need no predicate, and tiles that do.
Heads that share keys are rows of one product.

Where nothing given is infinite or NaN, masks are added to scores, which is fast, as 0 and -inf. That is wrong where a
masked score is infinite or NaN, and then so is the result: it is computed again with every masked value replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from sartor.device import Device
from sartor.features import DROPOUT, DROPOUT_PART, DROPOUT_STEPS, DTYPES, GENERAL, GRADIENTS, SHARED_LSE, WIDE_OUT
from sartor.kernels import dropout
from sartor.kernels.algebra import (
    add_to_table,
    attended,
    finite,
    new_tables,
    reach,
    resolved,
    sink_gradient,
    spoiled,
    working_dtype,
)  # fmt: skip
from sartor.kernels.spans import Frame, Span, frames
from sartor.kernels.spec import Gradients, KernelSpec, Operands, Plan, Saved, Tile, allocate_out
from sartor.problem import Problem

Tensor = torch.Tensor
FEATURES = GENERAL | DTYPES | {WIDE_OUT, SHARED_LSE, DROPOUT, DROPOUT_PART, DROPOUT_STEPS}
LOG2_E = math.log2(math.e)
FEW = 2**18  # scores, beyond which a walk over tiles takes no longer than all at once
TILE = Tile(256, 512)  # the fastest on two AVX2 cores for 2 to 32 heads; the same for any batch, so that bits are too


@dataclass(frozen=True, slots=True)
class Part:
    """Some batch items in the working dtype. n counts (item, key head) pairs; g query heads share each."""

    frame: Frame
    q: Tensor  # (n, g, sq, d), times softmax_scale
    k: Tensor  # (n, skv, d)
    v: Tensor  # (n, skv, dv)
    sinks: Tensor | None  # (hq,)
    clean: bool  # nothing is infinite or NaN: 0 times it is 0

    @property
    def p(self) -> Problem:
        """Of the whole call."""
        return self.frame.p

    def rows(self, x: Tensor, i: slice) -> Tensor:
        """Rows `i` of x (n, g, sq, width), heads that share keys after one another: (n, g * rows, width)."""
        return x[:, :, i].reshape(x.shape[0], -1, x.shape[3])

    def by_head(self, x: Tensor) -> Tensor:
        """A tile (n, g * rows, keys) as (batch, hq, rows, keys): the same memory."""
        return x.view(self.frame.batch, self.p.heads_q, -1, x.shape[2])


def few(p: Problem) -> bool:
    """Whether `small` computes the problem: few scores, in one tile, whose bits then are the same; gradients of q, k
    and v alone; and no kernel asked for."""
    more = p.sinks or p.copies or p.bias_shape is not None or p.table_shapes or p.out_dtype != p.dtype or p.dropout_p
    scores = p.batch * p.heads_q * p.seqlen_q * p.seqlen_kv
    tile = p.seqlen_q <= TILE.block_m and p.seqlen_kv <= TILE.block_n
    return 0 < scores <= FEW and tile and not more and p.kernel == "auto"


def parts(plan: Plan, x: Operands, clean: bool) -> Iterator[Part]:
    """The call, some batch items at a time."""
    p = plan.problem
    for frame in frames(plan, x):
        q = heads_first(x.q[frame.items], p, p.heads_kv) * p.softmax_scale
        k, v = (heads_first(t[frame.items], p, p.heads_kv)[:, 0] for t in (x.k, x.v))
        yield Part(frame, q, k, v, x.sinks, clean)


def heads_first(t: Tensor, p: Problem, heads_kv: int) -> Tensor:
    """(batch, seqlen, heads, width) in the working dtype as (batch * heads_kv, heads // heads_kv, seqlen, width)."""
    b, seqlen, heads, width = t.shape
    return t.transpose(1, 2).to(working_dtype(p)).reshape(b * heads_kv, heads // heads_kv, seqlen, width)


def heads_last(t: Tensor, batch: int) -> Tensor:
    """The inverse of `heads_first`, or of its [:, 0]: (batch, seqlen, heads, width)."""
    return t.reshape(batch, t.shape[:-2].numel() // batch, *t.shape[-2:]).transpose(1, 2)


def scores(
    part: Part, q: Tensor, i: slice, j: slice, partial: bool, derivative: bool = False
) -> tuple[Tensor, Tensor | None, Any]:
    """A tile of scores (n, g * rows, keys), -inf where masked; the mask, where it is needed and not all is clean; the
    score's derivative, if it is wanted."""
    program = part.p.program
    s, slope = torch.bmm(q, part.k[:, j].transpose(1, 2)), None
    if program.score is not None:
        raw = part.by_head(s)
        new, slope = part.frame.changed(raw, i, j, derivative)
        s = new.to(s.dtype).expand(raw.shape).reshape(s.shape)
    if not partial or program.keep is None:
        return s, None, slope
    if part.clean:
        part.by_head(s).add_(part.frame.hidden(i, j))
        return s, None, slope
    keep = part.frame.keep(i, j)
    part.by_head(s).masked_fill_(~keep, -torch.inf)
    return s, keep, slope


def after_dropout(part: Part, weights: Tensor, stay: Tensor | None) -> Tensor:
    """Weights of a tile (n, g * rows, keys), or gradients of them, where they stay; all, and as they are, for None."""
    if stay is None:
        return weights
    return dropout.applied(part.p.dropout_p, part.by_head(weights), stay).view(weights.shape)


class State:
    """The softmax of some rows as far as it has been walked."""

    def __init__(self, part: Part, q: Tensor, i: slice) -> None:
        n, rows, _ = q.shape
        self.part, self.i = part, i
        self.fresh = part.sinks is None  # nothing is in it
        self.m = q.new_full((n, rows, 1), -torch.inf)
        self.l = q.new_zeros((n, rows, 1))
        self.acc = q.new_zeros((n, rows, part.v.shape[2]))
        self.seen: list[Tensor] = []
        if part.sinks is not None:
            part.by_head(self.m).copy_(part.sinks.view(1, -1, 1, 1))
            self.l = torch.where(self.m == -torch.inf, 0.0, 1.0).to(q.dtype)

    def add(self, s: Tensor, keep: Tensor | None, j: slice) -> None:
        """Take a tile of scores in; `s` is overwritten."""
        m = s.amax(2, keepdim=True)
        m = m if self.fresh else torch.maximum(self.m, m)
        base = _base(m)
        p = _exp(s.sub_(base))
        v = self.part.v[:, j]
        if not self.part.clean:
            self._see(v, keep, s.shape)
            v = torch.where(v.isfinite(), v, 0)
        total = p.sum(2, keepdim=True)
        p = after_dropout(self.part, p, self.part.frame.dropout(self.i, j))
        if self.fresh:
            self.l, self.acc = total, torch.bmm(p, v)
        else:
            alpha = _exp(self.m.sub_(base))
            self.l = self.l.mul_(alpha).add_(total)
            self.acc.mul_(alpha).baddbmm_(p, v)
        self.m, self.fresh = m, False

    def _see(self, v: Tensor, keep: Tensor | None, shape: torch.Size) -> None:
        keep = _like(self.part, keep, shape, v.device)
        found = [reach(keep, kind) for kind in (v.isnan(), v == torch.inf, v == -torch.inf)]
        self.seen = [a | b for a, b in zip(self.seen, found, strict=True)] if self.seen else found

    @classmethod
    def of(cls, part: Part, q: Tensor, span: Span, block_n: int) -> State:
        """That of some rows after all their tiles."""
        state = cls(part, q, span.i)
        for j, partial in span.tiles(block_n):
            s, keep, _ = scores(part, q, span.i, j, partial)
            state.add(s, keep, j)
        return state

    @property
    def normalizer(self) -> tuple[Tensor, Tensor]:
        """base and total (n, rows, 1), of which weights are exp(s - base) / total, NaN beside infinite scores."""
        total = torch.where(self.l == 0, 1, self.l)
        return _base(self.m), torch.where(self.m == torch.inf, torch.nan, total)

    def result(self) -> tuple[Tensor, Tensor]:
        """out (n, rows, dv) and lse (n, rows, 1)."""
        if not self.seen:
            out = self.acc / self.l
            if finite(out):  # and so is each row's m, and its l is not 0
                return out, torch.log(self.l).add_(self.m)
        base, total = self.normalizer
        out = self.acc / total
        lse = base + torch.log(torch.where(self.l == 0, 0, total))
        return spoiled(out, *self.seen) if self.seen else out, lse


def _exp(x: Tensor) -> Tensor:
    """e^x in place of x: by exp2, as MKL's exp takes 7 times as long for -inf and 30 times where the result underflows.
    Rounding its argument adds an error of |x| e^x roundings: less than one rounding of 1."""
    return x.mul_(LOG2_E).exp2_()


def whole(part: Part, q: Tensor, span: Span, block_n: int) -> tuple[Tensor, Tensor] | None:
    """What `State.result` would be of rows that reach one tile, in fewer steps. None of other rows, and where something
    is not finite."""
    tiles = list(span.tiles(block_n))
    if len(tiles) != 1 or part.sinks is not None or not part.clean:
        return None
    ((j, partial),) = tiles
    s, _, _ = scores(part, q, span.i, j, partial)
    p = s.softmax(2)
    top = p.amax(2, keepdim=True)
    if part.p.dropout_p and not finite(top):  # of a row without keys, whose NaNs dropout would make zeros
        return None
    out = torch.bmm(after_dropout(part, p, part.frame.dropout(span.i, j)), part.v[:, j])
    return (out, s.amax(2, keepdim=True) - top.log_()) if finite(out) else None


def _base(m: Tensor) -> Tensor:
    """What rows subtract from their scores: their largest, or what is nearest to it where that is infinite."""
    most = torch.finfo(m.dtype).max
    return m.clamp(-most, most)


def _like(part: Part, keep: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor:
    """The mask of a tile as bool (n, g * rows, keys)."""
    if keep is None:
        return torch.ones((), dtype=torch.bool, device=device).expand(shape)
    rows = shape[0] * shape[1] // (part.frame.batch * part.p.heads_q)
    return keep.expand(part.frame.batch, part.p.heads_q, rows, shape[2]).reshape(shape)


class Blocked(KernelSpec):
    """See the module."""

    name = "blocked"
    family = "blocked"
    backwards = ("blocked_backward",)
    features = FEATURES | GRADIENTS

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """One."""
        return (TILE,)

    def notes(self, p: Problem) -> Iterable[str]:
        """What small calls get instead."""
        if p.device == "cpu" and few(p):
            scores = p.batch * p.heads_q * p.seqlen_q * p.seqlen_kv
            yield (
                f"{scores} scores are so few that they are computed at once, where lse is not asked for, and a backward"
                " reads their weights"
            )

    def run(self, plan: Plan, x: Operands) -> tuple[Tensor, Tensor]:
        """out and lse."""
        p, tile = plan.problem, plan.tile or TILE
        out = allocate_out(p, x.q)
        lse = torch.empty((p.batch, p.heads_q, p.seqlen_q), dtype=working_dtype(p), device=x.q.device)
        if out.numel() == 0:
            return out, lse
        for part in parts(plan, x, all(map(finite, (x.q, x.k, x.v)))):
            for span in part.frame.spans(tile.block_m, tile.block_n):
                q = part.rows(part.q, span.i)
                found = whole(part, q, span, tile.block_n) or State.of(part, q, span, tile.block_n).result()
                rows, rows_lse = found
                if part.clean and p.program.keep is not None and not finite(rows):
                    rows, rows_lse = State.of(replace(part, clean=False), q, span, tile.block_n).result()
                out[part.frame.items, span.i] = part.by_head(rows).transpose(1, 2).to(out.dtype)
                lse[part.frame.items, :, span.i] = part.by_head(rows_lse)[..., 0]
        return out, lse


class BlockedBackward(KernelSpec):
    """dV = P^T dO, dP = dO V^T, dS = P (dP - delta), dQ = dS K, dK = dS^T Q, tile by tile with P from lse."""

    name = "blocked_backward"
    family = "blocked"
    features = FEATURES | GRADIENTS

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """One, as in the forward."""
        return (TILE,)

    def run(self, plan: Plan, x: Operands, saved: Saved) -> Gradients:
        """Gradients of everything; those of scores and of sinks only where they are asked for."""
        clean = all(map(finite, (x.q, x.k, x.v, saved.dout)))
        found = self._walk(plan, x, saved, clean)
        if clean and plan.problem.program.keep is not None and not all(map(finite, found[:3])):
            return self._walk(plan, x, saved, False)
        return found

    def _walk(self, plan: Plan, x: Operands, saved: Saved, clean: bool) -> Gradients:
        p, tile = plan.problem, plan.tile or TILE
        dtype = working_dtype(p)
        dq, dk, dv = (torch.zeros_like(t) for t in (x.q, x.k, x.v))
        dbias = None if p.bias_shape is None else torch.zeros(p.bias_shape, dtype=dtype, device=x.q.device)
        dtables = new_tables(p, x.q.device)
        delta = (saved.dout.to(dtype) * saved.out.to(dtype)).sum(3).transpose(1, 2)  # (b, hq, sq)
        if saved.dlse is not None:
            delta = delta - saved.dlse.to(dtype)
        base, gain = saved.lse.to(dtype, copy=True), torch.ones_like(delta)
        if saved.out.numel():
            for part in parts(plan, x, clean):
                sums = Sums(part, saved, delta, dbias, dtables)
                for span in part.frame.spans(tile.block_m, tile.block_n):
                    sums.add(span, tile.block_n)
                for whole, d in ((dq, sums.dq), (dk, sums.dk), (dv, sums.dv)):
                    whole[part.frame.items] = heads_last(d, part.frame.batch).to(whole.dtype)
                if x.sinks is not None:
                    for whole, d in ((base, sums.base), (gain, sums.gain)):
                        whole[part.frame.items] = d.view(whole[part.frame.items].shape)
        return Gradients(dq, dk, dv, dbias, sink_gradient(x, base, delta, gain), dtables)


class Sums:
    """The gradients of one part, as far as they have been walked."""

    def __init__(
        self, part: Part, saved: Saved, delta: Tensor, dbias: Tensor | None, dtables: tuple[Tensor, ...]
    ) -> None:
        p, items = part.p, part.frame.items
        self.part, self.dbias, self.dtables = part, dbias, dtables
        self.dout = heads_first(saved.dout[items], p, p.heads_kv)  # (n, g, sq, dv)
        shape = (*self.dout.shape[:3], 1)
        lse = saved.lse[items].reshape(shape).to(self.dout.dtype)
        self.base, self.delta = torch.where(lse == -torch.inf, 0, lse), delta[items].reshape(shape)
        self.gain = torch.ones_like(self.base)  # 1 over the sum of exp(s - base)
        self.dq, self.dk, self.dv = (torch.zeros_like(t) for t in (part.q, part.k, part.v))

    def add(self, span: Span, block_n: int) -> None:
        """One block of queries."""
        part = self.part
        q, dout, base, delta = (part.rows(t, span.i) for t in (part.q, self.dout, self.base, self.delta))
        total = None
        if not part.p.shared_lse and not resolved(base):
            base, total = State.of(part, q, span, block_n).normalizer
            shape = self.base[:, :, span.i].shape
            self.base[:, :, span.i], self.gain[:, :, span.i] = base.view(shape), (1 / total).view(shape)
        dq = torch.zeros_like(q)
        for j, partial in span.tiles(block_n):
            s, keep, slope = scores(part, q, span.i, j, partial, True)
            p = _exp(s.sub_(base))  # [rows, keys]
            if total is not None:
                p.div_(total)
            self._mask(p, keep)
            stay = part.frame.dropout(span.i, j)
            self._into(self.dv[:, j], after_dropout(part, p, stay).transpose(1, 2), dout, keep, True)
            dp = after_dropout(part, torch.bmm(dout, part.v[:, j].transpose(1, 2)), stay)
            ds = dp.sub_(delta).mul_(p)
            self._mask(ds, keep)
            if self.dbias is not None:
                share = self._on_tile(self.dbias, span.i, j)
                share += part.by_head(ds).sum_to_size(share.shape)
            if self.dtables:
                self._add_tables(part.by_head(ds), q, span.i, j)
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

    def _on_tile(self, total: Tensor, i: slice, j: slice) -> Tensor:
        """The part of a gradient, of four dims, that a tile of scores adds to."""
        places = (self.part.frame.items, slice(None), i, j)
        return total[tuple(s if size > 1 else slice(None) for s, size in zip(places, total.shape, strict=True))]

    def _add_tables(self, ds: Tensor, q: Tensor, i: slice, j: slice) -> None:
        part, program = self.part, self.part.p.program
        raw = part.by_head(torch.bmm(q, part.k[:, j].transpose(1, 2)))
        at, aux = part.frame.read(i, j, raw)
        for (number, _), whole in zip(part.p.table_shapes, self.dtables, strict=True):
            total = whole if program.aux[number].dims else self._on_tile(whole, i, j)
            add_to_table(total, program.rises(number), ds, at, aux)


SPEC = Blocked()
BACKWARD_SPEC = BlockedBackward()


def gradients(plan: Plan, x: Operands, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a call whose out and lse nobody kept."""
    out, lse = SPEC.run(plan, x)
    found = BACKWARD_SPEC.run(plan, x, Saved(out, lse, dout, None))
    return found.dq, found.dk, found.dv
