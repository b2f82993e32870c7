"""The one timer. Candidates are interleaved launch by launch, in an order shuffled anew for every pass.

What runs first rides a cool card and a high clock, and a card at its power cap drifts by several per cent within a
minute, so only times taken between each other's launches may be compared. On a GPU a pass is enqueued behind a
spinning kernel: events then time the work, not the gaps in which the host was still enqueueing it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch

Run = Callable[[], object]
QUEUE = 250  # calls and events enqueued at a time: a stream holds about a thousand launches, a call may make several


@dataclass(frozen=True)
class Budget:
    """How long to measure: `rounds` rounds of about `round_ms`, shared by all candidates, or `max_s` at most.

    Rounds of the first `settle_ms` do not count on a GPU: a card that has rested runs above the clock it can hold.
    """

    rounds: int = 10
    round_ms: float = 40.0
    warmup_ms: float = 25.0
    settle_ms: float = 300.0
    max_s: float = 6.0
    min_samples: int = 3


@dataclass
class Timing:
    """Milliseconds per call: median, 20th and 80th percentile of the samples; host_us to enqueue one call."""

    samples: list[float] = field(default_factory=list)
    host_us: float | None = None

    def at(self, fraction: float) -> float:
        """The sample at a fraction of the sorted samples."""
        ordered = sorted(self.samples)
        return ordered[round(fraction * (len(ordered) - 1))]

    @property
    def ms(self) -> float:
        """The median."""
        return median(self.samples)


def interleave(
    runs: Mapping[str, Run], device: torch.device, budget: Budget = Budget(), cold_l2: bool = False, seed: int = 0
) -> dict[str, Timing]:
    """Time every candidate; a sample is one call, or a small batch of calls that is long enough for the clock."""
    if not runs:
        return {}
    clock: _CudaClock | _HostClock = _CudaClock(device, cold_l2) if device.type == "cuda" else _HostClock()
    warm = {name: clock.warm_up(run, budget.warmup_ms) for name, run in runs.items()}  # ms a call
    calls = {name: 1 if cold_l2 else max(1, min(64, round(clock.sample_ms / ms))) for name, ms in warm.items()}
    pass_ms = sum(warm[name] * n for name, n in calls.items())
    passes = max(1, min(round(budget.round_ms / pass_ms), QUEUE // sum(n + 2 for n in calls.values())))
    timings = {name: Timing() for name in runs}
    shuffle = random.Random(seed).shuffle

    def one_round() -> list[tuple[str, float]]:
        order: list[str] = []
        for _ in range(passes):
            one = list(runs)
            shuffle(one)
            order += one
        return clock.measure([(name, runs[name], calls[name]) for name in order])

    settled = time.perf_counter() + (budget.settle_ms * 1e-3 if device.type == "cuda" else 0.0)
    while time.perf_counter() < settled:
        one_round()
    deadline = time.perf_counter() + budget.max_s
    for done in range(budget.rounds):
        if time.perf_counter() > deadline and done * passes >= budget.min_samples:
            break
        for name, ms in one_round():
            timings[name].samples.append(ms)
    for name, run in runs.items():
        timings[name].host_us = clock.host_us(run, warm[name])
    return timings


class _HostClock:
    """perf_counter around synchronous calls."""

    sample_ms = 0.2

    def warm_up(self, run: Run, warmup_ms: float) -> float:
        """Call for `warmup_ms`, at least twice; milliseconds of a call."""
        times: list[float] = []
        while len(times) < 2 or (sum(times) < warmup_ms and len(times) < 1000):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
            if times[0] > 2e3:
                break
        return max(min(times), 1e-4)

    def measure(self, samples: list[tuple[str, Run, int]]) -> list[tuple[str, float]]:
        """Milliseconds per call of each sample, in order."""
        out = []
        for name, run, calls in samples:
            start = time.perf_counter()
            for _ in range(calls):
                run()
            out.append((name, (time.perf_counter() - start) * 1e3 / calls))
        return out

    def host_us(self, run: Run, ms: float) -> float | None:
        """On a CPU the call is the work: there is nothing to tell apart."""
        return None


class _CudaClock:
    """CUDA events on the current stream, behind a backlog."""

    sample_ms = 0.1

    def __init__(self, device: torch.device, cold_l2: bool) -> None:
        self.device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device=device) if cold_l2 else None
        self.spin_per_ms = self._spin_rate()
        self.enqueue_us: dict[int, float] = {}  # of each candidate, by identity

    def _spin_rate(self) -> float:
        """Cycles of torch's spinning kernel in a millisecond."""
        cycles = 2_000_000
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        start, end = self._event(), self._event()
        start.record()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
        return float(cycles / start.elapsed_time(end))

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def warm_up(self, run: Run, warmup_ms: float) -> float:
        """Call for `warmup_ms`, at least three times; milliseconds of a call as the device sees it."""
        start, end = self._event(), self._event()
        run()
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        start.record()
        for _ in range(2):
            run()
        host_us = (time.perf_counter() - begin) * 0.5e6
        end.record()
        end.synchronize()
        ms = max(float(start.elapsed_time(end)) / 2, 1e-3)
        self.enqueue_us[id(run)] = host_us
        for _ in range(min(int(warmup_ms / ms), 500)):
            run()
        torch.cuda.synchronize(self.device)
        return ms

    def measure(self, samples: list[tuple[str, Run, int]]) -> list[tuple[str, float]]:
        """Milliseconds per call of each sample, in order, all enqueued before the first one starts."""
        events = [(self._event(), self._event()) for _ in samples]
        host_ms = sum((self.enqueue_us[id(run)] * calls + 15) for _, run, calls in samples) * 1e-3
        torch.cuda._sleep(int(self.spin_per_ms * min(1.2 * host_ms + 0.1, 100.0)))  # type: ignore[no-untyped-call]
        for (_, run, calls), (start, end) in zip(samples, events, strict=True):
            if self.flush is not None:
                self.flush.zero_()
            start.record()
            for _ in range(calls):
                run()
            end.record()
        torch.cuda.synchronize(self.device)
        return [
            (name, start.elapsed_time(end) / calls)
            for (name, _, calls), (start, end) in zip(samples, events, strict=True)
        ]

    def host_us(self, run: Run, ms: float) -> float | None:
        """Microseconds to enqueue one call, over 50 calls; for calls short enough that the queue cannot fill."""
        if ms > 1.0:
            return None
        run()
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(50):
            run()
        host_us = (time.perf_counter() - begin) * 2e4
        torch.cuda.synchronize(self.device)
        return host_us
