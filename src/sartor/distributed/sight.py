"""Which keys the queries of a run see at all, and which they all see: from the mask's `rows`, once for each mask.

Ranks decide by it what to compute and what to send, so it is made of what all of them have: the mask in positions of
the whole sequence, and the sharding. Where a mask has no `rows`, everything may be seen: slow, never wrong.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from sartor.distributed.sharding import Run, Runs, Sharding
from sartor.distributed.shift import Window, band, both, sides_of, values
from sartor.mods.core import BIG, Mask
from sartor.mods.expr import evaluate
from sartor.mods.tracing import traced

ALIGNED = 128  # keys are sent in multiples of that many, so that lengths are few and rows of tiles whole
Span = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Sight:
    """`spans[rank][i]` of a rank's run number i: (lo, hi, full_lo, full_hi), its queries see keys within [lo, hi) at
    most, and each of them sees all of [full_lo, full_hi)."""

    spans: tuple[tuple[Span, ...], ...]
    digest: str

    def seen(self, rank: int, i: int, kv: Run) -> tuple[int, int]:
        """The keys number start to stop of a run within which all are that run i of the rank sees; stop <= start for
        none."""
        lo, hi, _, _ = self.spans[rank][i]
        start, stop = (-((kv.first - end) // kv.step) for end in (lo, hi))  # rounded up
        return max(0, start), min(kv.count, stop)

    def is_full(self, rank: int, i: int, kv: Run) -> bool:
        """Whether each query of the run sees every key."""
        _, _, lo, hi = self.spans[rank][i]
        return lo <= kv.first and kv.last < hi

    def needed(self, rank: int, keys: Runs) -> tuple[tuple[int, Run], ...]:
        """What the rank sees of runs of keys: (number of the run, the part of it), parts one after another."""
        found, place = [], 0
        for number, kv in enumerate(keys):
            ends = [self.seen(rank, i, kv) for i in range(len(self.spans[rank]))]
            ends = [(start, stop) for start, stop in ends if start < stop]
            if not ends:
                continue
            start = min(start for start, _ in ends) // ALIGNED * ALIGNED
            stop = min(-(-max(stop for _, stop in ends) // ALIGNED) * ALIGNED, kv.count)
            found.append((number, kv.cut(start, stop, place)))
            place += stop - start
        return tuple(found)


def sight(
    causal: bool | str, window: Window, mask: Mask | None, queries: Sharding, seqlen_kv: int,
) -> Sight:  # fmt: skip
    """The sight of a mask, found again where the mask, its tensors and the sharding are the same."""
    if mask is None:
        return _of_band(causal, window, queries, seqlen_kv)
    key = (causal, window, mask.handle, queries.text, seqlen_kv)
    known = _KNOWN.get(key)
    if known is not None and known[0] == _versions(mask) and _same(known[1], mask.tensors):
        return known[2]
    found = _of_mask(causal, window, mask, queries, seqlen_kv)
    if len(_KNOWN) >= 256:
        _KNOWN.clear()
    _KNOWN[key] = (_versions(mask), [weakref.ref(t) for t in mask.tensors], found)
    return found


_KNOWN: dict[Any, tuple[Any, list[Any], Sight]] = {}


def _versions(mask: Mask) -> list[int]:
    """What counts in-place changes; never equal where nothing counts them."""
    return [id(object()) if t.is_inference() else t._version for t in mask.tensors]


def _same(kept: list[Any], tensors: list[torch.Tensor]) -> bool:
    return len(kept) == len(tensors) and all(r() is t for r, t in zip(kept, tensors, strict=True))


@lru_cache(maxsize=256)
def _of_band(causal: bool | str, window: Window, queries: Sharding, seqlen_kv: int) -> Sight:
    sides = sides_of(causal, window, queries.seqlen, seqlen_kv)
    lo, hi = (None, None) if sides is None else sides

    def span(run: Run) -> Span:
        return (
            0 if lo is None else max(0, run.first + lo),
            seqlen_kv if hi is None else max(0, min(seqlen_kv, run.last + hi + 1)),
            0 if lo is None else run.last + lo,
            seqlen_kv if hi is None else run.first + hi + 1,
        )

    return _sight(tuple(tuple(map(span, runs)) for runs in queries.runs))


def _of_mask(causal: bool | str, window: Window, mask: Mask, queries: Sharding, seqlen_kv: int) -> Sight:
    sides = sides_of(causal, window, queries.seqlen, seqlen_kv)
    ends = rows(mask if sides is None else both(band(*sides), mask), queries.seqlen, seqlen_kv)

    def span(run: Run) -> Span:
        lo, hi, full_lo, full_hi = (end[run.tokens] for end in ends)
        return (
            max(0, int(lo.min())), min(seqlen_kv, int(hi.max())), int(full_lo.max()), int(full_hi.min()),
        )  # fmt: skip

    return _sight(tuple(tuple(map(span, runs)) for runs in queries.runs))


def _sight(spans: tuple[tuple[Span, ...], ...]) -> Sight:
    return Sight(spans, hashlib.sha256(repr(spans).encode()).hexdigest()[:16])


def rows(mask: Mask, seqlen_q: int, seqlen_kv: int) -> tuple[torch.Tensor, ...]:
    """(lo, hi, full_lo, full_hi), int64 (seqlen_q,) each, on the CPU: over all batch items and heads, the hull of the
    keys a query sees and what it sees all of. A query that sees nothing has lo = BIG and hi = 0."""
    aux = tuple(a.cpu() if isinstance(a, torch.Tensor) else a for a in values(mask, seqlen_q, seqlen_kv))
    placed = [a for i, a in enumerate(aux) if isinstance(a, torch.Tensor) and i not in mask.tables]
    batch, heads = (max((a.shape[dim] for a in placed), default=1) for dim in (0, 1))
    assert mask.rows is not None  # read off the predicate where it was not given
    found = traced(mask.rows, ("b", "h", "q"), mask.values)
    reads = set().union(*(e.leaves() for e in found))
    if {"b", "h"} & reads:  # of the call's own items and heads, whose numbers the ranks of a group share
        return _everything(seqlen_q, seqlen_kv)
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    at = {"q": torch.arange(seqlen_q, device="cpu").view(1, 1, -1, 1), "b": zero, "h": zero}
    shape = (batch, heads, seqlen_q, 1)
    lo, hi, full_lo, full_hi = (
        torch.as_tensor(evaluate(e, at, aux, torch.float32), device="cpu").expand(shape).long()[..., 0] for e in found
    )
    empty = hi <= lo
    lo, hi = torch.where(empty, BIG, lo), torch.where(empty, 0, hi)
    return lo.amin((0, 1)), hi.amax((0, 1)), full_lo.amax((0, 1)), full_hi.amin((0, 1))


def _everything(seqlen_q: int, seqlen_kv: int) -> tuple[torch.Tensor, ...]:
    """Every key may be seen, none is known to be."""
    nothing = torch.zeros(seqlen_q, dtype=torch.int64, device="cpu")
    return nothing, nothing + seqlen_kv, nothing + BIG, nothing
