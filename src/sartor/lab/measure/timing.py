"""The one timer. Candidates take turns, a tenth of a second each, in an order shuffled again and again, in which each
follows each other equally often.

A card at its power cap drifts by several per cent within a minute, so only times taken between each other's turns may
be compared. It gives a kernel the clock that its power draw allows, but late: a turn begins with the clock that the one
before has left. So the first part of a turn does not count.

On a GPU the samples of a turn are enqueued behind what is under way: events then time the work, not the gaps in which
the host was still enqueueing it, and nothing rests, which a card at its power cap would pay back as clock. Where the
host is late, the call's own work goes before them, from a CUDA graph.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

import torch

Run = Callable[[], object]
LOOPS, LONGEST_MS = 5, 3.0  # of calls that the host does not enqueue ahead, where one is no longer
LOOP_CALLS, LOOP_MS = (10, 50), 20.0  # calls of a loop, at least and at most, and how long they are to take
LEAST_ROUNDS = 6
LEAST_WORK_MS = 0.05  # of a call that is its own backlog: shorter ones draw no power to speak of
REPLAY_MS = 0.015  # of the host, to launch a CUDA graph
QUEUE = 100  # calls and events enqueued at a time: a stream holds about a thousand launches, a call may make ten


@dataclass(frozen=True)
class Budget:
    """How long to measure: `rounds` rounds, in each of which every candidate has one turn, or `max_s` at most.

    rounds: by default as many as `balanced` says.
    turn_ms: what counts of a turn, one sample at least; by default what the device wants, 40 on a GPU and 5 on a CPU.
    lead_ms: what goes before it and does not count, until the clock is the candidate's own; by default 80 and 0.
    """

    rounds: int | None = None
    turn_ms: float | None = None
    lead_ms: float | None = None
    warmup_ms: float = 25.0
    max_s: float = 6.0

    def __post_init__(self) -> None:
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"rounds must be a positive number, got {self.rounds}")
        for name, ms in (("turn_ms", self.turn_ms), ("lead_ms", self.lead_ms)):
            if ms is not None and not 0 <= ms < math.inf:
                raise ValueError(f"{name} must be a finite number, 0 or more, got {ms}")


@dataclass
class Timing:
    """Milliseconds per call: median, 20th and 80th percentile of the samples; of calls that the host does not enqueue
    ahead, host_us to enqueue one, and wall_us from one to the next."""

    samples: list[float] = field(default_factory=list)
    host_us: float | None = None
    wall_us: float | None = None

    def at(self, fraction: float) -> float:
        """The sample at a fraction of the sorted samples."""
        ordered = sorted(self.samples)
        return ordered[round(fraction * (len(ordered) - 1))]

    def each(self, calls: int) -> Timing:
        """Of a call, where a run makes so many."""
        host, wall = (None if us is None else us / calls for us in (self.host_us, self.wall_us))
        return Timing([ms / calls for ms in self.samples], host, wall)

    @property
    def ms(self) -> float:
        """The median."""
        return median(self.samples)


def interleave(
    runs: Mapping[str, Run], device: torch.device, budget: Budget = Budget(), cold_l2: bool = False
) -> dict[str, Timing]:
    """Time every candidate; a sample is one call, or as many as are long enough for the clock that events read. A run
    that makes several `calls` counts as these."""
    if not runs:
        return {}
    clock: _CudaClock | _HostClock = _CudaClock(device, cold_l2) if device.type == "cuda" else _HostClock()
    turn_ms = clock.turn_ms if budget.turn_ms is None else budget.turn_ms
    lead_ms = clock.lead_ms if budget.lead_ms is None else budget.lead_ms
    warm = {name: clock.warm_up(run, budget.warmup_ms) for name, run in runs.items()}  # ms a call
    timings = {name: Timing() for name in runs}

    def turn(name: str) -> list[float]:
        run, ms = runs[name], warm[name]
        calls = 1 if cold_l2 else max(1, min(64, round(clock.sample_ms / ms)))
        batch = max(1, min(round(0.5 * turn_ms / (calls * ms)), QUEUE // (calls + 2)))  # half a turn, at most
        batch_ms = calls * batch * ms
        ahead = 1 if batch_ms < turn_ms else 0  # batches under way while one is enqueued: nothing rests between them
        begin = time.perf_counter() + (1e-3 * max(lead_ms - ahead * batch_ms, 0.0) if ms < lead_ms else 0.0)
        samples: list[float] = []
        under_way: deque[tuple[bool, Callable[[], list[float]]]] = deque()
        while not samples or time.perf_counter() < begin + turn_ms * 1e-3:
            under_way.append((time.perf_counter() >= begin, clock.enqueue(run, calls, batch)))
            if len(under_way) > ahead:
                counts, read = under_way.popleft()
                found = read()
                samples += found if counts else []
        return samples + [sample for _, read in under_way for sample in read()]

    deadline, rounds = time.perf_counter() + budget.max_s, budget.rounds or balanced(len(runs))
    for done, order in enumerate(islice(orders(list(runs)), rounds)):
        if time.perf_counter() > deadline and done > 2:
            break
        for name in order:
            timings[name].samples += turn(name)
    loops: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for order in islice(orders(list(runs)), LOOPS):
        for name in order:
            loops[name] += clock.loop(runs[name], warm[name])
    for name, found in loops.items():
        if found:
            timings[name].wall_us = median(wall for _, wall in found)
            timings[name].host_us = median(host for host, _ in found) if warm[name] <= 1.0 else None
    return {name: timings[name].each(getattr(run, "calls", 1)) for name, run in runs.items()}


def balanced(names: int, least: int = LEAST_ROUNDS) -> int:
    """The fewest rounds, so many at least, in which each of so many names comes right after each other equally often:
    6 of two, three and six names, 8 of four, 10 of five."""
    square = names if names % 2 == 0 else 2 * names
    return -(-least // square) * square


def seconds(calls_ms: Sequence[float], budget: Budget) -> float:
    """About how long `interleave` takes on a GPU, of candidates whose calls take so many milliseconds."""
    turn_ms = _CudaClock.turn_ms if budget.turn_ms is None else budget.turn_ms
    lead_ms = _CudaClock.lead_ms if budget.lead_ms is None else budget.lead_ms
    if not calls_ms:
        return 0.0
    one = 1e-3 * sum(max(ms, turn_ms + lead_ms if ms < lead_ms else turn_ms) for ms in calls_ms)
    rounds: float = budget.rounds or balanced(len(calls_ms))
    loops = LOOPS * sum(min(LOOP_MS, LOOP_CALLS[1] * ms) for ms in calls_ms if ms <= LONGEST_MS)
    return one * min(rounds, max(3, budget.max_s / one + 1)) + 1e-3 * loops


def orders(names: Sequence[str]) -> Iterator[list[str]]:
    """Orders of the names without end: rows of a balanced Latin square (Williams 1949), its names and rows shuffled.

    In every n of them, or 2 n where n is odd, each name comes right after each other equally often.
    """
    n = len(names)
    there_and_back = [-i // 2 if i % 2 else i // 2 for i in range(n)]  # 0, -1, 1, -2, 2: every step is another one
    square = [[(place + row) % n for place in there_and_back] for row in range(n)]
    if n % 2:
        square += [row[::-1] for row in square]
    while True:
        shuffled = random.sample(names, n)
        for row in random.sample(square, len(square)):
            yield [shuffled[i] for i in row]


class _HostClock:
    """perf_counter around synchronous calls."""

    sample_ms, turn_ms, lead_ms = 0.2, 5.0, 0.0

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

    def enqueue(self, run: Run, calls: int, batch: int) -> Callable[[], list[float]]:
        """Run `batch` samples of so many calls; what says the milliseconds of a call."""
        out = []
        for _ in range(batch):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            out.append((time.perf_counter() - start) * 1e3 / calls)
        return lambda: out

    def loop(self, run: Run, ms: float) -> list[tuple[float, float]]:
        """On a CPU the call is the work: there is nothing to tell apart."""
        return []


class _CudaClock:
    """CUDA events on the current stream, behind a backlog."""

    sample_ms, turn_ms, lead_ms = 0.1, 40.0, 80.0

    def __init__(self, device: torch.device, cold_l2: bool) -> None:
        self.device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device=device) if cold_l2 else None
        self.spin_per_ms = self._spin_rate()
        self.ahead_ms: dict[int, float] = {}  # host time of a call less most of its device time, by the call's identity
        self.backlogs: dict[int, tuple[torch.cuda.CUDAGraph, float]] = {}  # a late host's call, and its milliseconds

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

    def _spin(self, ms: float) -> None:
        """Keep the device busy for so long, 0.1 s at most."""
        torch.cuda._sleep(int(self.spin_per_ms * min(ms, 100.0)))  # type: ignore[no-untyped-call]

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def warm_up(self, run: Run, warmup_ms: float) -> float:
        """Call for `warmup_ms`, at least five times; milliseconds of a call as the device sees it."""
        start, end = self._event(), self._event()
        run()
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(2):
            run()
        host_ms = (time.perf_counter() - begin) * 0.5e3
        self._spin(3.0 * host_ms + 0.1)  # while the next two are enqueued: where the host is slow, gaps are not theirs
        start.record()
        for _ in range(2):
            run()
        end.record()
        end.synchronize()
        ms = max(float(start.elapsed_time(end)) / 2, 1e-3)
        self.ahead_ms[id(run)] = 1.2 * host_ms - 0.8 * ms + 0.02
        graph = self._captured(run) if self.ahead_ms[id(run)] > 0 and ms > LEAST_WORK_MS else None
        if graph is not None:
            self.backlogs[id(run)] = graph, ms
        for _ in range(min(int(warmup_ms / ms), 500)):
            run()
        torch.cuda.synchronize(self.device)
        return ms

    def enqueue(self, run: Run, calls: int, batch: int) -> Callable[[], list[float]]:
        """Enqueue `batch` samples of so many calls, ahead of the device throughout; what waits for them and says the
        milliseconds of a call."""
        events = [(self._event(), self._event()) for _ in range(batch)]
        self._fall_behind(run, max(self.ahead_ms[id(run)], 0.0) * calls * batch)  # 0 where the device is slower
        for start, end in events:
            if self.flush is not None:
                self.flush.zero_()
            start.record()
            for _ in range(calls):
                run()
            end.record()

        def read() -> list[float]:
            events[-1][1].synchronize()
            return [start.elapsed_time(end) / calls for start, end in events]

        return read

    def _fall_behind(self, run: Run, ms: float) -> None:
        """Give the device that much to do before the samples; where it has nothing to do, 0.1 ms more."""
        graph, each_ms = self.backlogs.get(id(run), (None, 0.0))
        if torch.cuda.current_stream(self.device).query():  # the first of a turn
            self._spin(0.1)
        if graph is not None:
            for _ in range(math.ceil(ms / (each_ms - REPLAY_MS))):
                graph.replay()
        elif ms > 0.0:
            self._spin(ms)

    def _captured(self, run: Run) -> torch.cuda.CUDAGraph | None:
        """The call as a CUDA graph; None where L2 is flushed between calls, on the default stream, which cannot be
        captured, and of a call that cannot."""
        stream = torch.cuda.current_stream(self.device)
        if self.flush is not None or stream == torch.cuda.default_stream(self.device):
            return None
        graph, captured = torch.cuda.CUDAGraph(), True
        try:
            with torch.cuda.graph(graph, stream=stream):
                run()
        except RuntimeError:
            captured = False
        torch.cuda.synchronize(self.device)
        return graph if captured else None

    def loop(self, run: Run, ms: float) -> list[tuple[float, float]]:
        """Microseconds a call, over 50 calls or fewer that are long: of the host until all are enqueued, where they are
        short enough that the queue cannot fill, and until all are done."""
        if ms > LONGEST_MS:
            return []
        least, most = LOOP_CALLS
        calls = max(least, min(most, round(LOOP_MS / ms)))
        for _ in range(5):
            run()
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        enqueued = time.perf_counter()
        torch.cuda.synchronize(self.device)
        each = 1e6 / calls
        return [((enqueued - begin) * each, (time.perf_counter() - begin) * each)]


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Meanwhile a GPU has a stream that can be captured: for what makes runs and times them."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.stream(torch.cuda.Stream(device)) if on_gpu else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU to have done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
