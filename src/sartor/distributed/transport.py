"""Tensors between ranks, by torch.distributed alone: batched point-to-point, all-to-all, all-gather, reduce-scatter.

NCCL runs what is posted on a stream of its own, which waits for what the current stream holds at that moment; `wait`
makes the current stream wait for it. Gloo takes tensors on the CPU: others are copied there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

Tensor = torch.Tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name to 2.12, and
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Pending:
    """Transfers under way. `wait` ends them and gives what was received."""

    works: list[Any] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    device: torch.device | None = None  # where what was received goes, if it did not come there
    kept: list[Tensor] = field(default_factory=list)  # what is being sent
    timeout: timedelta | None = None

    def wait(self) -> list[Tensor]:
        """What was received, once it is there. Raises RuntimeError when a rank is lost, or the time limit is over."""
        for work in self.works:
            work.wait() if self.timeout is None else work.wait(self.timeout)
        self.works, self.kept = [], []
        if self.device is not None:
            self.received = [t.to(self.device) for t in self.received]
        return self.received


class Transport:
    """The ranks of a process group, or this one alone where there is none."""

    def __init__(self, group: Any, timeout: float | None = None) -> None:
        self.group = group
        self.timeout = None if timeout is None else timedelta(seconds=timeout)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.ranks = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def named(cls, name: str, timeout: float = 0.0) -> Transport:
        """That of a group that a graph names; "" is this rank alone, a timeout of 0 the group's own."""
        group = distributed_c10d._resolve_process_group(name) if name else None  # type: ignore
        return cls(group, timeout or None)

    def staged(self, device: torch.device) -> bool:
        """Whether tensors of a device go by way of the CPU."""
        if device.type == "cpu" or self.group is None:
            return False
        for entry in dist.get_backend_config(self.group).split(","):
            kind, _, backend = entry.partition(":")
            if kind == device.type:
                return backend == "gloo"
        return "gloo" in dist.get_backend_config(self.group)

    def post(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[tuple[int, ...], int]], like: Tensor,
        dtype: torch.dtype | None = None,
    ) -> Pending:  # fmt: skip
        """Begin to send (tensor, to rank) and to receive (shape, from rank), in one batch.

        What is received has the device of `like`, and its dtype unless another is given.
        """
        pending = Pending(timeout=self.timeout)
        if not sends and not receives:
            return pending
        staged, device = self.staged(like.device), self._way(like.device)
        pending.device = like.device if staged else None
        pending.kept = [t.contiguous().to(device) for t, _ in sends]
        pending.received = [torch.empty(s, dtype=dtype or like.dtype, device=device) for s, _ in receives]
        ops = [self._op(dist.isend, t, to) for t, (_, to) in zip(pending.kept, sends, strict=True)]
        ops += [self._op(dist.irecv, t, source) for t, (_, source) in zip(pending.received, receives, strict=True)]
        pending.works = dist.batch_isend_irecv(ops)
        return pending

    def _op(self, kind: Any, t: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, t, peer=dist.get_global_rank(self.group, peer), group=self.group)

    def gather(self, xs: Sequence[Tensor], shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[list[Tensor]]:
        """The tensors of every rank, those of rank r of shapes[r]; those of one number are of one dtype. It is one
        transfer, of bytes, as each costs more than what a few thousand tokens take."""
        if self.ranks == 1:
            return [list(xs)]
        device, places = self._way(xs[0].device), [_Places.of(of_rank, xs) for of_rank in shapes]
        longest = max(of.size for of in places)
        mine = places[self.rank].fill(torch.empty(longest, dtype=torch.uint8, device=device), xs)
        found = torch.empty((self.ranks, longest), dtype=torch.uint8, device=device)
        self._finish(_all_gather(found.view(-1), mine, group=self.group, async_op=True))
        return [[t.to(xs[0].device) for t in of.views(row)] for row, of in zip(found, places, strict=True)]

    def reduce_scatter(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The sums over ranks of what each has for this one, in one transfer; the tensors parts[r], all of one dtype,
        are for rank r, and of the same shapes on all ranks."""
        if self.ranks == 1:
            return list(parts[0])
        first = parts[0][0]
        longest = max(sum(t.numel() for t in part) for part in parts)
        sent = torch.empty((self.ranks, longest), dtype=first.dtype, device=self._way(first.device))
        for row, part in zip(sent, parts, strict=True):
            _filled(row, part)
        total = torch.empty_like(sent[0])
        self._finish(_reduce_scatter(total, sent.view(-1), group=self.group, async_op=True))
        own = parts[self.rank]
        sizes = [t.numel() for t in own]
        found = total[: sum(sizes)].split(sizes)
        return [t.view(like.shape).to(first.device) for t, like in zip(found, own, strict=True)]

    def all_to_all(
        self, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """The tensors parts[r] go to rank r; from rank r come as many of shapes[r], in one transfer as `gather`'s."""
        if self.ranks == 1:
            return [list(parts[0])]
        first = parts[0][0]
        device = self._way(first.device)
        leaving = [_Places.of([tuple(t.shape) for t in part], part) for part in parts]
        coming = [_Places.of(of_rank, parts[0]) for of_rank in shapes]
        sizes_out, sizes_in = ([of.size for of in places] for places in (leaving, coming))
        sent, got = (torch.empty(sum(sizes), dtype=torch.uint8, device=device) for sizes in (sizes_out, sizes_in))
        for room, of, part in zip(sent.split(sizes_out), leaving, parts, strict=True):
            of.fill(room, part)
        self._finish(dist.all_to_all_single(got, sent, sizes_in, sizes_out, group=self.group, async_op=True))
        found = zip(got.split(sizes_in), coming, strict=True)
        return [[t.to(first.device) for t in of.views(room)] for room, of in found]

    def _finish(self, work: Any) -> None:
        work.wait() if self.timeout is None else work.wait(self.timeout)

    def _way(self, device: torch.device) -> torch.device:
        """Where tensors of a device are while they travel."""
        return torch.device("cpu") if self.staged(device) else device


@dataclass
class _Places:
    """Where tensors lie one behind the other in bytes, each from a multiple of 16 on, as their dtypes want it."""

    shapes: Sequence[tuple[int, ...]]
    dtypes: list[torch.dtype]
    ends: list[int]  # in bytes

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], like: Sequence[Tensor]) -> _Places:
        """Of tensors of these shapes and the dtypes of others."""
        sizes = [torch.Size(s).numel() * t.dtype.itemsize for s, t in zip(shapes, like, strict=True)]
        return cls(shapes, [t.dtype for t in like], list(accumulate(-(-size // 16) * 16 for size in sizes)))

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.ends[-1]

    def views(self, room: Tensor) -> list[Tensor]:
        """The tensors, in bytes that begin on a multiple of 16."""
        return [
            room[at : at + torch.Size(s).numel() * d.itemsize].view(d).view(s)
            for at, s, d in zip((0, *self.ends[:-1]), self.shapes, self.dtypes, strict=True)
        ]

    def fill(self, room: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The bytes, with these in them."""
        for to, t in zip(self.views(room), tensors, strict=True):
            to.copy_(t)
        return room


def _filled(room: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The room, with the elements of the parts in it, one part behind the other; what is left of it is 0."""
    place = 0
    for part in parts:
        room[place : place + part.numel()].view(part.shape).copy_(part)
        place += part.numel()
    if place < room.numel():
        room[place:] = 0
    return room
