"""What a rank computes in one step of each context parallel method, on one GPU:

    python -m sartor.lab.measure.scaling

A step is a block of keys, computed and merged by the code that `sartor.distributed` runs, forward and backward. From
the rates that are found here the model of `sartor.distributed.choose` says how long a pass takes on so many GPUs; it
charges transfers at the rates of its links (`sartor.lab.show.scaling`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import log2
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from sartor import testing
from sartor.distributed import choose
from sartor.distributed.local import Local, Sums
from sartor.distributed.machine import Machine, Points
from sartor.distributed.merge import Merged
from sartor.distributed.sharding import Run as Tokens
from sartor.distributed.sharding import Runs, Sharding
from sartor.distributed.sight import sight
from sartor.kernels.spec import Saved
from sartor.lab.measure.records import Record, Run, sm_clock_mhz, write
from sartor.lab.measure.timing import Budget, interleave
from sartor.lab.workloads.workload import FACTORS, Workload
from sartor.problem import Call, wide

SUITE, FAMILY = "scaling", "block"
BUDGET = Budget(rounds=2, turn_ms=20.0, lead_ms=40.0)
RING = {"own": 1, "earlier": 0, "later": 2}  # whose keys: a shard's own, or of one earlier or later in the sequence


class Plan(NamedTuple):
    """What is measured, causal: heads of a rank and tokens."""

    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    dtype: str = "bfloat16"
    ring: tuple[int, ...] = (256, 1024, 4096, 16384, 32768)  # tokens of a rank
    shares: tuple[int, ...] = (2, 8, 32)  # ranks that share heads
    ulysses: tuple[int, ...] = (8192, 65536)  # tokens of all
    usp: tuple[int, ...] = (2048, 16384)  # tokens of a rank of the ring, heads shared by `usp_shares`
    usp_shares: int = 8
    allgather: tuple[tuple[int, int], ...] = ((131072, 8), (131072, 64), (131072, 512))  # tokens of all, ranks


PLAN = Plan()


class Block(NamedTuple):
    """A step: the keys `block` for the queries of `rank`."""

    name: str
    heads: tuple[int, int]
    sharding: str
    rank: int
    owner: int  # whose keys, -1 for all

    @property
    def block(self) -> Runs:
        """The keys, one part after another."""
        shards = Sharding.parse(self.sharding)
        if self.owner < 0:
            return (Tokens(0, 0, 1, shards.seqlen),)
        local = shards.runs[self.owner]
        return local if self.owner == self.rank else tuple(part for _, part in self.seen)

    @property
    def seen(self) -> tuple[tuple[int, Tokens], ...]:
        """What the rank sees of the owner's keys."""
        shards = Sharding.parse(self.sharding)
        return sight(True, None, None, shards, shards.seqlen).needed(self.rank, shards.runs[self.owner])

    @property
    def tokens(self) -> int:
        """Keys of the owner, seen or not."""
        shards = Sharding.parse(self.sharding)
        return shards.seqlen if self.owner < 0 else shards.count(self.owner)

    @property
    def pairs(self) -> float:
        """Query-key pairs of a head that are seen."""
        shards = Sharding.parse(self.sharding)
        view = sight(True, None, None, shards, shards.seqlen)
        owners = range(shards.ranks) if self.owner < 0 else (self.owner,)
        return sum(choose.area(view, shards, shards.runs[owner], self.rank)[0] for owner in owners)


def share(heads: tuple[int, int], ranks: int) -> tuple[int, int]:
    """Heads of a rank of so many that share them; key heads are repeated where ranks would have to share one."""
    return heads[0] // ranks, max(1, heads[1] // ranks)


def blocks(plan: Plan) -> Iterator[Block]:
    """The steps of a plan."""
    for n in plan.ring:
        text = Sharding.make("zigzag", 3 * n, 3).text
        for name, owner in RING.items():
            yield Block(f"ring:{name}", plan.heads, text, 1, owner)
    for n in plan.usp:
        text = Sharding.make("zigzag", 3 * n, 3).text
        for name, owner in RING.items():
            yield Block(f"usp{plan.usp_shares}:{name}", share(plan.heads, plan.usp_shares), text, 1, owner)
    for ranks in plan.shares:
        for n in plan.ulysses:
            yield Block(f"ulysses{ranks}", share(plan.heads, ranks), Sharding.make("contiguous", n, 1).text, 0, 0)
    for n, ranks in plan.allgather:
        yield Block(f"allgather{ranks}", plan.heads, Sharding.make("zigzag", n, ranks).text, ranks // 2, -1)


@dataclass
class Job:
    """A block with its tensors."""

    at: Block
    plan: Plan
    device: torch.device

    def __post_init__(self) -> None:
        p, shards = self.plan, Sharding.parse(self.at.sharding)
        rows, keys = shards.sizes[self.at.rank], sum(part.count for part in self.at.block)
        dtype = getattr(torch, p.dtype)
        q, self.k, self.v = testing.make_inputs(
            1, *self.at.heads, rows, keys, p.dim, p.dim, dtype, self.device, layout="bshd", seed=0
        )
        self.local = Local(Call(q, self.k, self.v, causal=True), shards, shards, self.at.rank)
        self.merged = Merged(q, p.dim, wide(dtype))
        self.sums = Sums(self.local)
        self.dout = torch.randn_like(q)

    @property
    def workload(self) -> Workload:
        """Queries and keys of the step."""
        p, full = self.plan, self.at.pairs == self.local.call.q.shape[1] * self.k.shape[1]
        return Workload(
            1, *self.at.heads, self.local.call.q.shape[1], self.k.shape[1], p.dim, p.dim, p.dtype,
            "full" if full else "causal",
        )  # fmt: skip

    def forward(self) -> None:
        """The step of a forward, merged into what was there."""
        self.local.add(self.merged, self.at.block, self.k, self.v)

    @cached_property
    def saved(self) -> Saved:
        """What a forward over these keys alone leaves."""
        merged = Merged(self.local.call.q, self.plan.dim, self.merged.out.dtype)
        self.local.add(merged, self.at.block, self.k, self.v)
        return Saved(merged.out.to(self.k.dtype), merged.lse, self.dout, None)

    def backward(self) -> None:
        """The step of a backward, added to what was there."""
        self.sums.start(self.k, self.v)
        self.local.gradients(self.at.block, self.k, self.v, self.saved, self.sums)


def measure(plan: Plan, device: torch.device, run: Run) -> Iterator[Record]:
    """A record of each block and pass."""
    for at in blocks(plan):
        job = Job(at, plan, device)
        todo: tuple[tuple[str, Callable[[], None]], ...] = (("fwd", job.forward), ("bwd", job.backward))
        for mode, step in todo:
            before = sm_clock_mhz(device)
            timing = interleave({at.name: step}, device, BUDGET)[at.name]
            record = Record.of(run, f"{FAMILY}:{at.name}", replace(job.workload, mode=mode))
            record.ms, record.ms_p20, record.ms_p80 = timing.ms, timing.at(0.2), timing.at(0.8)
            record.host_us = timing.host_us
            record.tflops = 4 * at.heads[0] * plan.dim * at.pairs * FACTORS[mode] / timing.ms * 1e-9
            record.counters = {"pairs": at.pairs, "fraction": at.pairs / record.seqlen_q / at.tokens}
            record.clock_mhz_before, record.clock_mhz_after = before, sm_clock_mhz(device)
            yield record


def machine(records: list[Record], base: Machine) -> Machine:
    """A machine with the rates of the steps of ring and all-gather and the host time of short ones; its links, and what
    else was not measured, are those of `base`. Records of whole calls without a mask (suite `paper`) tell rates too."""
    steps = [r for r in records if r.provider.startswith((f"{FAMILY}:ring:", f"{FAMILY}:allgather"))]
    plain = [r for r in records if (r.provider, r.mask, r.dim, r.dim_v) == ("sartor", "full", PLAN.dim, PLAN.dim)]

    def points(mode: str) -> Points:
        rates: dict[int, list[tuple[float, float]]] = {}  # TFLOP and ms, were all of the device busy
        for r in steps or plain:
            late = (r.host_us or 0.0) * 1e-3 > (r.ms or 0.0)  # the host was: that is in `step`
            if r.mode == mode and r.tflops and r.ms and not late:
                rows = r.seqlen_q if mode == "fwd" else r.seqlen_kv
                busy = min(1.0, r.batch * rows * r.heads_q / base.rows)
                rates.setdefault(2 ** round(log2(seen(r) / rows)), []).append((r.tflops * r.ms, r.ms * busy))
        return tuple((n, sum(x for x, _ in at) / sum(ms for _, ms in at)) for n, at in sorted(rates.items()))

    host = [r.host_us * 1e-6 for r in steps if r.host_us]
    return replace(base, forward=points("fwd"), backward=points("bwd"), step=median(host) if host else base.step)


def seen(r: Record) -> float:
    """Query-key pairs of a head that are seen."""
    return r.counters["pairs"] if r.counters else r.workload.pairs


def modelled(r: Record, machine: Machine) -> float:
    """Seconds that the model gives what a record measured."""
    size = r.workload.torch_dtype.itemsize
    work = choose.Work(r.batch, r.heads_q, r.heads_kv, r.dim, r.dim_v, size, "", "", 1, 1, True, None, False, True)
    return choose.compute(work, machine, r.mode == "bwd", 1, (seen(r), r.seqlen_q, r.seqlen_kv))


def main(results: Path | None = None, plan: Plan = PLAN) -> None:
    """Measure, and write the records."""
    write(SUITE, partial(measure, plan), results)


if __name__ == "__main__":
    main()
