"""Partial results over disjoint keys, merged in float32 (float64 for float64 inputs) by their lse, in place.

`sartor.merge_states` is the same for two results of a caller's own; here one of them is what was merged so far.
"""

from __future__ import annotations

import torch


class Merged:
    """out (batch, seqlen_q, heads_q, dim_v) and lse (batch, heads_q, seqlen_q) over the keys seen so far."""

    def __init__(self, q: torch.Tensor, dim_v: int, dtype: torch.dtype) -> None:
        b, sq, hq, _ = q.shape
        self.out = torch.zeros((b, sq, hq, dim_v), dtype=dtype, device=q.device)
        self.lse = torch.full((b, hq, sq), -torch.inf, dtype=dtype, device=q.device)

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Take in the results of some queries over more keys (Dao et al. 2022, section 3.1)."""
        before = self.lse[:, :, rows]
        lse = lse.to(before.dtype)
        both = torch.logaddexp(before, lse)
        base = torch.where(both == -torch.inf, 0, both)
        kept, new = ((part - base).exp_().transpose(1, 2)[..., None] for part in (before, lse))
        self.out[:, rows].mul_(kept).addcmul_(out.to(self.out.dtype), new)
        before.copy_(both)

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """One more logit (heads_q,) in each row's denominator, without a value."""
        sinks = sinks.to(self.lse.dtype).view(1, -1, 1)
        both = torch.logaddexp(self.lse, sinks)
        base = torch.where(both == -torch.inf, 0, both)
        self.out.mul_((self.lse - base).exp_().transpose(1, 2)[..., None])
        self.lse = both
