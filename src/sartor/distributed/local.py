"""What one rank computes: its queries against a block of keys, as dense problems of `sartor.attention`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from sartor import ops
from sartor.distributed.merge import Merged
from sartor.distributed.sharding import Run, Runs, Sharding
from sartor.distributed.shift import Frame, both, shifted, shifted_band
from sartor.distributed.sight import Sight, sight
from sartor.kernels import dropout
from sartor.kernels.spec import Gradients, Saved
from sartor.mods import masks, scores
from sartor.mods.core import Mask, Score
from sartor.mods.tracing import four_dims
from sartor.problem import Call, wide

Tensor = torch.Tensor
Then = Callable[[], None]


def nothing() -> None:
    """Nothing."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Places of queries in the shard, of keys in the block, and the mods of the pairs."""

    q: slice
    kv: slice
    frame: Frame | None = None  # None where no score depends on a pair's position, and a mask at most by `causal`
    full: bool = True  # whether the mask in positions of the sequence allows every pair
    causal: bool | str = False  # whether the mask is causal in these places: True if the last query sees the last key


@dataclass
class Local:
    """A call on one rank. `call` holds the shards in layout bshd; what it says of positions means the sequence's.

    `bias` and a bool tensor as `mask` are (batch, heads, places of this shard, seqlen_kv), sizes of 1 broadcast.
    """

    call: Call
    queries: Sharding
    keys: Sharding
    rank: int
    first_head: int = 0
    heads: int = 0  # of all heads, how many are here from `first_head` on; 0: all

    @cached_property
    def sight(self) -> Sight:
        """What the queries of every rank see."""
        mask = self.call.mask if isinstance(self.call.mask, Mask) else None
        return sight(self.call.causal, self.call.window, mask, self.queries, self.keys.seqlen)

    @cached_property
    def score(self) -> Score | None:
        """The caller's score, then ALiBi, in positions of the sequence."""
        call = self.call
        if call.alibi_slopes is None:
            return call.score
        alibi = scores.alibi(call.alibi_slopes, wide(call.q.dtype))
        return alibi if call.score is None else both(call.score, alibi)

    @cached_property
    def mask(self) -> Mask | None:
        """The caller's mask in positions of the sequence."""
        return self.call.mask if isinstance(self.call.mask, Mask) else None

    @property
    def _causal(self) -> bool:
        """Whether the mask is causal and nothing else."""
        return bool(self.call.causal) and self.call.window is None and self.mask is None

    @property
    def _plain(self) -> bool:
        """Whether a pair that the mask allows is like every other."""
        call = self.call
        return self.score is None and call.bias is None and not isinstance(call.mask, Tensor) and not call.dropout_p

    def rectangles(self, block: Runs) -> Iterator[Rectangle]:
        """The dense problems of a block of keys that are not empty."""
        cells: list[Rectangle] = []
        plain, causal = self._plain, self._causal
        for i, q in enumerate(self.queries.runs[self.rank]):
            row: list[Rectangle] = []
            for kv in block:
                start, stop = self.sight.seen(self.rank, i, kv)
                if start >= stop:
                    continue
                full = self.sight.is_full(self.rank, i, kv)
                if plain and causal and q.step == kv.step:
                    kv = kv.cut(0, stop)
                    if full or self._causal_here(q, kv):
                        row.append(Rectangle(q.places, kv.places, None, full, not full))
                        continue
                frame = Frame(q, kv, self.queries.seqlen, self.keys.seqlen, self.first_head, self.heads)
                row.append(Rectangle(q.places, kv.places, None if full and plain else frame, full))
            cells += _joined(row)
        yield from _stacked(cells)

    def _causal_here(self, q: Run, kv: Run) -> bool:
        """Whether a causal mask is one too of these tokens, of which keys are no fewer: the first query sees all but as
        many keys as there are queries behind it."""
        offset = 0 if self.call.causal == "top_left" else self.keys.seqlen - self.queries.seqlen
        return 0 <= kv.count - q.count == (q.first + offset - kv.first) // kv.step

    def problem(self, at: Rectangle, k: Tensor, v: Tensor) -> Call:
        """One of them as a call."""
        call, seed = self.call, self.call.dropout_seed
        mask = score = bias = None
        if at.frame is not None:
            mask = None if at.full else self._mask(at.frame)
            if isinstance(call.mask, Tensor):
                own = masks.from_tensor(self._pairs(call.mask, at))
                mask = own if mask is None else both(own, mask)
            score = None if self.score is None else shifted(self.score, at.frame)
            bias = None if call.bias is None else self._pairs(call.bias, at)
            if seed is not None:
                q, kv = at.frame.q, at.frame.kv
                seed = dropout.part(seed, (q.first, q.step), (kv.first, kv.step), self.first_head)
        return replace(
            call, q=call.q[:, at.q], k=k[:, at.kv], v=v[:, at.kv], bias=bias, mask=mask, score=score,
            alibi_slopes=None, sinks=None, causal=at.causal, window=None, layout="bshd", dropout_seed=seed,
        )  # fmt: skip

    def _mask(self, frame: Frame) -> Mask | None:
        call = self.call
        band = shifted_band(call.causal, call.window, frame)
        if self.mask is None:
            return band
        own = shifted(self.mask, frame)
        return own if band is None else both(band, own)

    def _pairs(self, table: Tensor, at: Rectangle) -> Tensor:
        """What a table of this shard's queries and all keys holds for a rectangle; a view."""
        return four_dims(table)[self.pairs(table, at)]

    def pairs(self, table: Tensor, at: Rectangle) -> tuple[slice, ...]:
        """Where in a table, taken to have four dims."""
        assert at.frame is not None
        table = four_dims(table)
        every = slice(None)
        return every, every, at.q if table.shape[2] > 1 else every, (
            at.frame.kv.tokens if table.shape[3] > 1 else every
        )  # fmt: skip

    def table_part(self, table: Tensor, number: int, at: Rectangle) -> Tensor:
        """What tensor `number` of the score holds for a rectangle, of a table of its shape; a view."""
        score = self.call.score
        assert score is not None
        assert at.frame is not None
        place = [i for i, a in enumerate(score.values) if isinstance(a, Tensor)][number]
        return table if place in score.tables else at.frame.cut(table)

    def add(self, merged: Merged, block: Runs, k: Tensor, v: Tensor, beside: Then = nothing) -> None:
        """Merge the results over a block of keys. `beside` is called once, before the last of the merging."""
        dtype, cells = wide(self.call.q.dtype), list(self.rectangles(block))
        for number, at in enumerate(cells, 1):
            call = replace(self.problem(at, k, v), out_dtype=dtype)
            out, lse = ops.run(call, True)
            if number == len(cells):
                beside()
            merged.add(at.q, out, lse)
        if not cells:
            beside()

    def gradients(
        self, block: Runs, k: Tensor, v: Tensor, saved: Saved, sums: Sums, beside: Then = nothing
    ) -> None:  # fmt: skip
        """Add what a block of keys and the queries give one another. `saved` is of the softmax over all keys, whose
        probabilities are exp(score - lse) here too: FlashAttention's backward (Dao 2023, algorithm 2) needs no more.
        `beside` is called once, before the last gradients are added."""
        cells = list(self.rectangles(block))
        for number, at in enumerate(cells, 1):
            call = self.problem(at, k, v)
            rows = Saved(
                saved.out[:, at.q].contiguous(), saved.lse[:, :, at.q].contiguous(), saved.dout[:, at.q].contiguous(),
                None if saved.dlse is None else saved.dlse[:, :, at.q].contiguous(),
            )  # fmt: skip
            prepared = ops.prepare(call)
            found = ops._backward(prepared, prepared.operands(call), rows, shared_lse=True)
            if number == len(cells):
                beside()
            sums.add(self, at, found)
        if not cells:
            beside()


def _joined(row: list[Rectangle]) -> list[Rectangle]:
    """Neighbours of one run of queries that need no mods as one, the last of which may be causal."""
    found: list[Rectangle] = []
    for cell in row:
        last = found[-1] if found else None
        if last is not None and not last.causal and last.frame is cell.frame is None and last.kv.stop == cell.kv.start:
            found[-1] = replace(cell, kv=slice(last.kv.start, cell.kv.stop))
        else:
            found.append(cell)
    return found


def _stacked(cells: list[Rectangle]) -> list[Rectangle]:
    """Those of neighbouring runs of queries that need no mods as one."""
    found: list[Rectangle] = []
    for cell in cells:
        for i, other in enumerate(found):
            causal = _causal_together(other, cell)
            if causal is not None and other.q.stop == cell.q.start:
                found[i] = replace(cell, q=slice(other.q.start, cell.q.stop), causal=causal)
                break
        else:
            found.append(cell)
    return found


def _causal_together(above: Rectangle, below: Rectangle) -> bool | str | None:
    """How the mask of two is causal, as `Rectangle.causal` says it; None where they are not one."""
    if not (above.frame is below.frame is None and above.kv.start == below.kv.start):
        return None
    more = below.kv.stop - above.kv.stop
    if below.causal:  # the last query of each sees its last key
        return True if above.causal is True and more == below.q.stop - below.q.start else None
    square = above.q.stop - above.q.start == above.kv.stop - above.kv.start
    if above.causal and (square or above.causal == "top_left"):
        return None if more else "top_left"
    return None if more or above.causal else False


class Sums:
    """Gradients in float32 (float64 for float64 inputs) as far as they were added: of the queries, the bias and the
    score's tensors of this rank, and of the block of keys that `start` was told of last."""

    def __init__(self, local: Local) -> None:
        call = local.call
        self.dtype = wide(call.q.dtype)
        self.dq = torch.zeros_like(call.q, dtype=self.dtype)
        self.dbias: Any = None
        if call.bias is not None and call.bias_gradient:
            self.dbias = torch.zeros(four_dims(call.bias).shape, dtype=self.dtype, device=call.q.device)
        tables = () if call.score is None else call.score.tensors
        self.dtables = [tables[i].new_zeros(tables[i].shape, dtype=self.dtype) for i in call.table_gradients or ()]

    def start(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """dk and dv of a block, from now on."""
        self.dk, self.dv = (torch.zeros(t.shape, dtype=self.dtype, device=t.device) for t in (k, v))
        return self.dk, self.dv

    def resume(self, block: tuple[Tensor, Tensor]) -> None:
        """Go on with what `start` gave for an earlier block."""
        self.dk, self.dv = block

    def add(self, local: Local, at: Rectangle, g: Gradients) -> None:
        """Take in the gradients of one rectangle."""
        self.dq[:, at.q] += g.dq
        self.dk[:, at.kv] += g.dk
        self.dv[:, at.kv] += g.dv
        if self.dbias is not None and g.dbias is not None:
            total = self.dbias[local.pairs(local.call.bias, at)]  # type: ignore[arg-type]
            total += g.dbias
        for total, i, d in zip(self.dtables, local.call.table_gradients or (), g.dtables, strict=True):
            local.table_part(total, i, at).add_(d)
