"""All keys on every rank: one all-gather of k and v, one reduce-scatter of their gradients in float32 (Dubey et al.
2024, section 3.3.2). For keys that are few, and for masks by which everything is seen from everywhere."""

from __future__ import annotations

import torch

from sartor.distributed.local import Local, Sums
from sartor.distributed.merge import Merged
from sartor.distributed.sharding import Run, apart, joined_places, together
from sartor.distributed.transport import Transport
from sartor.kernels.spec import Saved

Tensor = torch.Tensor


class Gathered:
    """One pass over all keys at once, in the order of the sequence."""

    def __init__(self, local: Local, transport: Transport) -> None:
        self.local, self.transport = local, transport
        self.block = (Run(0, 0, 1, local.keys.seqlen),) if local.keys.seqlen else ()
        self.places = joined_places(local.keys.text, local.keys.ranks, 0)
        self.counts = [local.keys.count(rank) for rank in range(transport.ranks)]

    def forward(self, merged: Merged) -> None:
        """Merge the results over all keys."""
        self.local.add(merged, self.block, *self._all_keys())

    def backward(self, saved: Saved) -> tuple[Sums, Tensor, Tensor]:
        """The gradients of queries, and dk and dv of this rank's keys."""
        sums = Sums(self.local)
        k, v = self._all_keys()
        found = sums.start(k, v)
        self.local.gradients(self.block, k, v, saved, sums)
        parts = list(zip(*(apart(total, self.places) for total in found), strict=True))
        dk, dv = (torch.zeros_like(x, dtype=sums.dtype) for x in (self.local.call.k, self.local.call.v))
        for d, own in zip((dk, dv), self.transport.reduce_scatter(parts), strict=True):
            d[:, : own.shape[1]] = own
        return sums, dk, dv

    def _all_keys(self) -> tuple[Tensor, Tensor]:
        """k and v of the whole sequence."""
        both, count = (self.local.call.k, self.local.call.v), self.counts[self.transport.rank]
        shapes = [[(x.shape[0], n, *x.shape[2:]) for x in both] for n in self.counts]
        ks, vs = zip(*self.transport.gather([x[:, :count] for x in both], shapes), strict=True)
        return together(ks, self.places), together(vs, self.places)
