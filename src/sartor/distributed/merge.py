"""Partial results over disjoint keys, merged in float32 (float64 for float64 inputs) by their lse, in place.

`sartor.merge_states` is the same for two results of a caller's own; here one of them is what was merged so far.
"""

from __future__ import annotations

import torch


class Merged:
    """Results over the keys seen so far. The first of all rows are taken as they are, and written to later; a row
    without any has out 0, lse -inf."""

    def __init__(self, q: torch.Tensor, dim_v: int, dtype: torch.dtype) -> None:
        b, sq, hq, _ = q.shape
        self._like, self._shapes = q.new_empty(0, dtype=dtype), ((b, sq, hq, dim_v), (b, hq, sq))
        self._found: tuple[torch.Tensor, torch.Tensor] | None = None  # out and lse
        self._unwritten = [(0, sq)]  # runs of rows, rising

    @property
    def out(self) -> torch.Tensor:
        """(batch, seqlen_q, heads_q, dim_v)."""
        return self._whole[0]

    @out.setter
    def out(self, out: torch.Tensor) -> None:
        self._found = out, self._whole[1]

    @property
    def lse(self) -> torch.Tensor:
        """(batch, heads_q, seqlen_q)."""
        return self._whole[1]

    @property
    def _whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._write(0, self._shapes[0][1])
        return self._room

    @property
    def _room(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._found is None:
            self._found = self._like.new_empty(self._shapes[0]), self._like.new_empty(self._shapes[1])
        return self._found

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Take in the results of some queries over more keys (Dao et al. 2022, section 3.1); nobody else may need them
        as they are."""
        (start, stop), dtype = rows.indices(self._shapes[0][1])[:2], self._like.dtype
        if self._found is None and self._unwritten == [(start, stop)]:
            self._found, self._unwritten = (out.to(dtype), lse.to(dtype)), []
            return
        whole, before = self._room
        before = before[:, :, rows]
        if any(a <= start and stop <= b for a, b in self._unwritten):
            whole[:, rows] = out
            before.copy_(lse)
            self._left(start, stop)
            return
        self._write(start, stop)
        lse = lse.to(dtype)
        both = torch.logaddexp(before, lse)
        base = torch.where(both == -torch.inf, 0, both)
        kept, new = ((part - base).exp_().transpose(1, 2)[..., None] for part in (before, lse))
        whole[:, rows].mul_(kept).addcmul_(out.to(dtype), new)
        before.copy_(both)

    def _write(self, start: int, stop: int) -> None:
        """Make rows of which nothing is written rows without a key."""
        for a, b in self._unwritten:
            rows = slice(max(a, start), min(b, stop))
            if rows.start < rows.stop:
                out, lse = self._room
                out[:, rows], lse[:, :, rows] = 0, -torch.inf
        self._left(start, stop)

    def _left(self, start: int, stop: int) -> None:
        """Something is written of these rows."""
        parts = [part for a, b in self._unwritten for part in ((a, min(b, start)), (max(a, stop), b))]
        self._unwritten = [(a, b) for a, b in parts if a < b]

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """One more logit (heads_q,) in each row's denominator, without a value."""
        out, lse = self._whole
        both = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
        base = torch.where(both == -torch.inf, 0, both)
        self._found = out.mul_((lse - base).exp_().transpose(1, 2)[..., None]), both
