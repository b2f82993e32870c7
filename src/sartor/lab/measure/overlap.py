"""Whether what a ring transfers hides behind what it computes, on one GPU:

    python -m sartor.lab.measure.overlap

One rank of several runs its part of the ring, forward and backward, by the code that `sartor.distributed` runs. Its
transport stands for the others: what is posted is copied at the rate of a link, by a kernel of a few blocks on a stream
of its own, as NCCL would. It is timed so, with the same copies in line with what is computed, and without copies;
events tell when each transfer began and ended, and for how long the rank stood still for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from sartor import testing
from sartor.distributed.local import Local
from sartor.distributed.machine import H200
from sartor.distributed.merge import Merged
from sartor.distributed.ring import Ring
from sartor.distributed.sharding import Sharding
from sartor.distributed.transport import Pending, Transport
from sartor.kernels.spec import Saved
from sartor.lab.measure.records import Record, Run, sm_clock_mhz, write
from sartor.lab.measure.timing import orders, synchronize
from sartor.lab.workloads.workload import Workload
from sartor.problem import Call, wide

Tensor = torch.Tensor
SUITE, FAMILY = "overlap", "transfers"
WAYS = ("none", "overlapped", "in line")  # of doing transfers
LINKS = {"near": (H200.near, H200.near_latency), "far": (H200.far, H200.far_latency)}  # bytes/s, seconds


class Plan(NamedTuple):
    """What is measured: a rank's shard, causal, zigzag."""

    tokens: int = 65536
    ranks: int = 8
    heads: tuple[int, int] = (16, 4)
    dim: int = 128
    dtype: str = "bfloat16"
    rounds: int = 2

    @property
    def workload(self) -> Workload:
        """One rank's queries and the keys of all."""
        return Workload(1, *self.heads, self.tokens, self.tokens * self.ranks, self.dim, self.dim, self.dtype, "causal")


PLAN = Plan()


@dataclass
class Span:
    """When something began and ended; `ms` since an origin, once the device has done it."""

    begin: Any
    end: Any

    def ms(self, origin: Any) -> tuple[float, float]:
        """Milliseconds from the origin to both."""
        return between(origin, self.begin), between(origin, self.end)


def mark(device: torch.device) -> Any:
    """This moment of the current stream; of the host on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def between(begin: Any, end: Any) -> float:
    """Milliseconds."""
    return (end - begin) * 1e3 if isinstance(begin, float) else float(begin.elapsed_time(end))


@dataclass
class Paced(Pending):
    """What was posted; `wait` notes for how long the current stream stands still."""

    done: Any = None
    waits: list[Span] = field(default_factory=list)
    place: Any = None  # the device

    def wait(self) -> list[Tensor]:
        """What was received."""
        if self.done is not None:
            begin = mark(self.place)
            torch.cuda.current_stream().wait_event(self.done)
            self.waits.append(Span(begin, mark(self.place)))
            self.done = None
        return self.received


class Link(Transport):
    """A rank of a ring whose other ranks are a link of one rate: what comes is made of the same numbers each time."""

    def __init__(self, rank: Rank, way: str, link: tuple[float, float]) -> None:
        super().__init__(None)
        self.rank, self.ranks, self.device = rank.local.rank, rank.plan.ranks, rank.device
        self.way, (self.rate, self.latency) = way, link
        device = rank.device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.transfers: list[Span] = []
        self.waits: list[Span] = []
        self.sources = rank.sources

    def post(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[tuple[int, ...], int]], like: Tensor,
        dtype: torch.dtype | None = None,
    ) -> Pending:  # fmt: skip
        """As `Transport.post`. Sending and receiving go on at once: the larger takes its time."""
        kept = [t.contiguous() for t, _ in sends]
        sources = [self._source(i, shape, dtype or like.dtype) for i, (shape, _) in enumerate(receives)]
        count = max(sum(t.numel() * t.element_size() for t in part) for part in (kept, sources))
        if self.way == "none" or not count:
            return Paced(received=sources)
        received = [torch.empty_like(t) for t in sources]
        seconds = self.latency + count / self.rate
        pairs = list(zip(sources, received, strict=True)) or [(t, torch.empty_like(t)) for t in kept]
        if self.stream is None or self.way == "in line":
            self._transfer(pairs, seconds)
            return Paced(received=received)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            done = self._transfer(pairs, seconds)
        return Paced(received=received, kept=[t for pair in pairs for t in pair], done=done, waits=self.waits,
                     place=self.device)  # fmt: skip

    def _source(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Normal numbers, the same for each tensor of that place in a batch."""
        size = torch.Size(shape).numel()
        key = number, dtype
        if key not in self.sources or self.sources[key].numel() < size:
            noise = torch.Generator(self.device).manual_seed(number)
            self.sources[key] = torch.randn(size, generator=noise, dtype=dtype, device=self.device)
        return self.sources[key][:size].view(shape)

    def _transfer(self, pairs: list[tuple[Tensor, Tensor]], seconds: float) -> Any:
        """Copy in so many seconds, on the current stream; its end."""
        begin, total = mark(self.device), sum(t.numel() * t.element_size() for t, _ in pairs)
        for source, target in pairs:
            share = seconds * source.numel() * source.element_size() / total
            if self.device.type == "cuda":
                from sartor.lab.measure import paced  # needs Triton

                paced.copy(source, target, share)
            else:
                target.copy_(source)
                time.sleep(share)
        end = mark(self.device)
        self.transfers.append(Span(begin, end))
        return end


@dataclass
class Rank:
    """A rank in the middle of the ring, and what its forward has left for its backward."""

    plan: Plan
    device: torch.device

    def __post_init__(self) -> None:
        p, w = self.plan, self.plan.workload
        q, k, v = testing.make_inputs(
            1, *p.heads, p.tokens, p.tokens, p.dim, p.dim, w.torch_dtype, self.device, layout="bshd", seed=0
        )
        sharding = Sharding.make("zigzag", p.tokens * p.ranks, p.ranks)
        self.local = Local(Call(q, k, v, causal=True), sharding, sharding, p.ranks // 2)
        self.dout = torch.randn_like(q)
        self.saved: Saved | None = None
        self.sources: dict[Any, Tensor] = {}  # what comes over links

    def link(self, way: str, name: str) -> Link:
        """The other ranks."""
        return Link(self, way, LINKS[name])

    def forward(self, link: Link) -> None:
        """All of it, as the operator does it."""
        call = self.local.call
        merged = Merged(call.q, self.plan.dim, wide(call.q.dtype))
        Ring(self.local, link).forward(merged)
        self.saved = Saved(merged.out.to(call.q.dtype), merged.lse, self.dout, None)

    def backward(self, link: Link) -> None:
        """The same of the gradients."""
        assert self.saved is not None
        sums, dk, dv = Ring(self.local, link).backward(self.saved)
        dtype = self.local.call.q.dtype
        _ = sums.dq.to(dtype), dk.to(dtype), dv.to(dtype)


@dataclass
class Sample:
    """One pass: how long it took, and its transfers and waits in ms since its start."""

    ms: float
    transfers: list[tuple[float, float]]
    waits: list[tuple[float, float]]


def sample(run: Callable[[Link], None], link: Link) -> Sample:
    """Run once."""
    link.transfers.clear()
    link.waits.clear()
    synchronize(link.device)
    begin = mark(link.device)
    run(link)
    end = mark(link.device)
    synchronize(link.device)
    spans = [[span.ms(begin) for span in found] for found in (link.transfers, link.waits)]
    return Sample(between(begin, end), *spans)


def measure(plan: Plan, device: torch.device, run: Run) -> Iterator[Record]:
    """A record of each pass, way and link; those of a pass were timed in turns."""
    rank = Rank(plan, device)
    ways = [("none", "near")] + [(way, name) for name in LINKS for way in WAYS[1:]]
    links = {f"{way}:{name}": rank.link(way, name) for way, name in ways}
    for mode, job in (("fwd", rank.forward), ("bwd", rank.backward)):
        found: dict[str, list[Sample]] = {name: [] for name in links}
        for way in WAYS[:2]:
            job(links[f"{way}:near"])  # compiles, and takes memory
        before = sm_clock_mhz(device)
        for order in islice(orders(list(links)), plan.rounds):
            for name in order:
                found[name].append(sample(job, links[name]))
        for name, samples in found.items():
            record = Record.of(run, f"{FAMILY}:{name}", replace(plan.workload, mode=mode))
            fill(record, samples, links[name], plan)
            record.clock_mhz_before, record.clock_mhz_after = before, sm_clock_mhz(device)
            yield record


def fill(record: Record, samples: list[Sample], link: Link, plan: Plan) -> None:
    """Times of all samples; transfers and waits of the median one."""
    ordered = sorted(samples, key=lambda s: s.ms)
    record.ms = median(s.ms for s in samples)
    record.ms_p20, record.ms_p80 = (ordered[round(at * (len(ordered) - 1))].ms for at in (0.2, 0.8))
    usual = ordered[len(ordered) // 2]
    record.counters = {
        "ranks": plan.ranks,
        "rank": link.rank,
        "GB/s": link.rate / 1e9,
        "latency us": link.latency * 1e6,
    }
    for what, spans in (("transfer", usual.transfers), ("wait", usual.waits)):
        for i, (begin, end) in enumerate(spans):
            record.counters |= {f"{what} {i} begin": begin, f"{what} {i} end": end}


def main(results: Path | None = None, plan: Plan = PLAN) -> None:
    """Measure, and write the records."""
    write(SUITE, partial(measure, plan), results)


if __name__ == "__main__":
    main()
