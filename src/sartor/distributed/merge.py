"""Partial results over disjoint keys, merged in float32 (float64 for float64 inputs) by their lse, in place.

`sartor.merge_states` is the same for two results of a caller's own; here one of them is what was merged so far.
"""

from __future__ import annotations

import torch


class Merged:
    """Results over the keys seen so far. A row's first result is copied; a row without one has out 0, lse -inf."""

    def __init__(self, q: torch.Tensor, dim_v: int, dtype: torch.dtype) -> None:
        b, sq, hq, _ = q.shape
        self._out = torch.empty((b, sq, hq, dim_v), dtype=dtype, device=q.device)
        self._lse = torch.empty((b, hq, sq), dtype=dtype, device=q.device)
        self._unwritten = [(0, sq)]  # runs of rows, rising

    @property
    def out(self) -> torch.Tensor:
        """(batch, seqlen_q, heads_q, dim_v)."""
        self._write(0, self._out.shape[1])
        return self._out

    @out.setter
    def out(self, out: torch.Tensor) -> None:
        self._out = out

    @property
    def lse(self) -> torch.Tensor:
        """(batch, heads_q, seqlen_q)."""
        self._write(0, self._out.shape[1])
        return self._lse

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Take in the results of some queries over more keys (Dao et al. 2022, section 3.1)."""
        before, start, stop = self._lse[:, :, rows], *rows.indices(self._out.shape[1])[:2]
        if any(a <= start and stop <= b for a, b in self._unwritten):
            self._out[:, rows] = out
            before.copy_(lse)
            self._left(start, stop)
            return
        self._write(start, stop)
        lse = lse.to(before.dtype)
        both = torch.logaddexp(before, lse)
        base = torch.where(both == -torch.inf, 0, both)
        kept, new = ((part - base).exp_().transpose(1, 2)[..., None] for part in (before, lse))
        self._out[:, rows].mul_(kept).addcmul_(out.to(self._out.dtype), new)
        before.copy_(both)

    def _write(self, start: int, stop: int) -> None:
        """Make rows of which nothing is written rows without a key."""
        for a, b in self._unwritten:
            rows = slice(max(a, start), min(b, stop))
            if rows.start < rows.stop:
                self._out[:, rows] = 0
                self._lse[:, :, rows] = -torch.inf
        self._left(start, stop)

    def _left(self, start: int, stop: int) -> None:
        """Something is written of these rows."""
        parts = [part for a, b in self._unwritten for part in ((a, min(b, start)), (max(a, stop), b))]
        self._unwritten = [(a, b) for a, b in parts if a < b]

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """One more logit (heads_q,) in each row's denominator, without a value."""
        sinks = sinks.to(self.lse.dtype).view(1, -1, 1)
        both = torch.logaddexp(self.lse, sinks)
        base = torch.where(both == -torch.inf, 0, both)
        self.out.mul_((self.lse - base).exp_().transpose(1, 2)[..., None])
        self._lse = both
