"""Keys and values pass from rank to rank while what came before is computed (Liu, Zaharia and Abbeel 2023).

In step t a rank has the keys of rank - t. They come straight from their owner, so that a step that the mask leaves
empty is neither sent nor waited for nor computed, and of what is sent only keys that are seen. Three blocks of keys at
most are in memory, whatever the number of ranks. Results are merged in float32; gradients of keys go back to their
owner in float32 and are added in the order of steps. The last run of a rank's own keys is left to the end of the
backward, behind which the last gradients travel.

An attention kernel on a GPU takes all SMs until it ends, and a transfer needs a few of its own to begin. So transfers
are posted before something that leaves room: those of step t + 2 when the kernels of step t are enqueued, and are
followed by the merging of what they give; gradients before those of an earlier step are added.
"""

from __future__ import annotations

from collections import deque
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
        self.coming: deque[Pending] = deque()  # keys of the steps that come next
        self.posted = 0  # for how many steps

    def forward(self, merged: Merged) -> None:
        """Merge the results over all keys."""
        local = self.local
        self._post_keys()
        local.add(merged, self.own, local.call.k, local.call.v, self._post_keys)
        for step in self.steps:
            pair = self.coming.popleft().wait()
            if pair:
                local.add(merged, step.block, pair[0], pair[1], self._post_keys)
            else:
                self._post_keys()

    def backward(self, saved: Saved) -> tuple[Sums, Tensor, Tensor]:
        """The gradients of queries, and dk and dv of this rank's keys."""
        local, k, v = self.local, self.local.call.k, self.local.call.v
        sums, going, before = Sums(local), Pending(), None
        own = sums.start(k, v)
        early, late = (self.own[:-1], self.own[-1:]) if self.steps and len(self.own) > 1 else (self.own, ())
        self._post_keys()
        local.gradients(early, k, v, saved, sums, self._post_keys)
        for step in self.steps:
            found: tuple[Tensor, ...] = ()
            pair = self.coming.popleft().wait()
            if pair:
                found = sums.start(pair[0], pair[1])
                local.gradients(step.block, pair[0], pair[1], saved, sums, self._post_keys)
            else:
                self._post_keys()
            went, going = going, self._post_gradients(step, found)
            self._add(own, went, before)
            before = step
        sums.resume(own)
        local.gradients(late, k, v, saved, sums)
        self._add(own, going, before)
        return sums, *own

    @property
    def own(self) -> Runs:
        """The runs of this rank's keys."""
        return self.local.keys.runs[self.local.rank]

    def _post_keys(self) -> None:
        """Send and receive k and v of the next step that was not posted; nothing after the last."""
        if self.posted == len(self.steps):
            return
        step, k, v = self.steps[self.posted], self.local.call.k, self.local.call.v
        sends = [(self._taken(x, step), step.reader) for x in (k, v)] if step.given else []
        self.coming.append(self.transport.post(sends, _shapes(step.keys, k, v, step.owner), k))
        self.posted += 1

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
