"""Keys and values pass from rank to rank while what came before is computed (Liu, Zaharia and Abbeel 2023).

In step t a rank has the keys of rank - t. They come straight from their owner, so that a step that the mask leaves
empty is neither sent nor waited for nor computed, and of what is sent only keys that are seen. The transfers of step
t + 1 are posted before step t is computed: two blocks of keys are in memory, whatever the number of ranks. Results are
merged in float32; gradients of keys go back to their owner in float32 and are added in the order of steps. The last run
of a rank's own keys is left to the end of the backward, behind which the last gradients travel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sartor.distributed.local import Local, Sums
from sartor.distributed.merge import Merged
from sartor.distributed.sharding import Run, Runs
from sartor.distributed.transport import Pending, Transport
from sartor.kernels.spec import Saved
from sartor.problem import wide

Tensor = torch.Tensor


class Step(NamedTuple):
    """What this rank gets and gives in one step: (number of a run of its owner's, the part of it that is seen)."""

    owner: int  # whose keys come
    keys: tuple[tuple[int, Run], ...]
    reader: int  # who gets this rank's keys
    given: tuple[tuple[int, Run], ...]

    @property
    def block(self) -> Runs:
        """The keys that come, one part after another."""
        return tuple(part for _, part in self.keys)


class Ring:
    """One pass over all blocks of keys."""

    def __init__(self, local: Local, transport: Transport) -> None:
        self.local, self.transport = local, transport
        rank, ranks = transport.rank, transport.ranks
        runs, see = local.keys.runs, local.sight
        self.steps = [
            Step(owner, see.needed(rank, runs[owner]), reader, see.needed(reader, runs[rank]))
            for owner, reader in (((rank - t) % ranks, (rank + t) % ranks) for t in range(1, ranks))
        ]

    def forward(self, merged: Merged) -> None:
        """Merge the results over all keys."""
        local = self.local
        coming = self._post_keys(0)
        local.add(merged, self.own, local.call.k, local.call.v)
        for t, step in enumerate(self.steps):
            pair = coming.wait()
            coming = self._post_keys(t + 1)
            if pair:
                local.add(merged, step.block, pair[0], pair[1])
        coming.wait()

    def backward(self, saved: Saved) -> tuple[Sums, Tensor, Tensor]:
        """The gradients of queries, and dk and dv of this rank's keys."""
        local, k, v = self.local, self.local.call.k, self.local.call.v
        sums = Sums(local)
        coming, going, before = self._post_keys(0), Pending(), None
        own = sums.start(k, v)
        early, late = (self.own[:-1], self.own[-1:]) if self.steps and len(self.own) > 1 else (self.own, ())
        local.gradients(early, k, v, saved, sums)
        for t, step in enumerate(self.steps):
            pair = coming.wait()
            coming = self._post_keys(t + 1)
            found: tuple[Tensor, ...] = ()
            if pair:
                found = sums.start(pair[0], pair[1])
                local.gradients(step.block, pair[0], pair[1], saved, sums)
            self._add(own, going, before)
            going, before = self._post_gradients(step, found), step
        coming.wait()
        sums.resume(own)
        local.gradients(late, k, v, saved, sums)
        self._add(own, going, before)
        return sums, *own

    @property
    def own(self) -> Runs:
        """The runs of this rank's keys."""
        return self.local.keys.runs[self.local.rank]

    def _post_keys(self, t: int) -> Pending:
        """Send and receive k and v of step number t; nothing after the last."""
        if t >= len(self.steps):
            return Pending()
        step, k, v = self.steps[t], self.local.call.k, self.local.call.v
        sends = [(self._taken(x, step), step.reader) for x in (k, v)] if step.given else []
        return self.transport.post(sends, _shapes(step.keys, k, v, step.owner), k)

    def _post_gradients(self, step: Step, found: tuple[Tensor, ...]) -> Pending:
        """Send dk and dv of another's keys to their owner, receive those of this rank's keys from their reader."""
        k, v = self.local.call.k, self.local.call.v
        receives = _shapes(step.given, k, v, step.reader)
        return self.transport.post([(x, step.owner) for x in found], receives, k, wide(k.dtype))

    def _taken(self, x: Tensor, step: Step) -> Tensor:
        """What the reader of a step sees of this rank's keys; a view if that is one piece."""
        places = self._places(step)
        return x[:, places[0]] if len(places) == 1 else torch.cat([x[:, at] for at in places], 1)

    def _places(self, step: Step) -> list[slice]:
        """Where in this rank's shard the keys of a step's reader are."""
        starts = [self.own[number].place + _ahead(part, self.own[number]) for number, part in step.given]
        return [slice(start, start + part.count) for start, (_, part) in zip(starts, step.given, strict=True)]

    def _add(self, own: tuple[Tensor, Tensor], going: Pending, step: Step | None) -> None:
        """Add gradients of this rank's keys that the reader of a step computed, once they are there."""
        for total, came in zip(own, going.wait(), strict=False):
            assert step is not None
            place = 0
            for at in self._places(step):
                count = at.stop - at.start
                total[:, at] += came[:, place : place + count]
                place += count


def _ahead(part: Run, run: Run) -> int:
    """How many tokens of a run come before a part of it."""
    return (part.first - run.first) // run.step


def _shapes(keys: tuple[tuple[int, Run], ...], k: Tensor, v: Tensor, peer: int) -> list[tuple[tuple[int, ...], int]]:
    """(shape, rank) of k and of v for those keys; none for no keys."""
    count = sum(part.count for _, part in keys)
    return [((x.shape[0], count, *x.shape[2:]), peer) for x in (k, v)] if count else []
