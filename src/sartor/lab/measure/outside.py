"""A few rows of suite `paper` by the lab's timer and by another one, in one process:

    python -m sartor.lab.measure.outside

The other one knows nothing of the lab's: 60 ms of calls that do not count, then 60 ms of them in one block between two
events, nothing in between, in turns; the median of seven. So a card is as busy as in a program that never waits. The
lab's samples are short, and between those of half a turn and the next the card rests a moment.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import torch

from sartor.lab.measure import providers
from sartor.lab.measure.records import Record, sm_clock_mhz, write
from sartor.lab.measure.records import Run as Session
from sartor.lab.measure.timing import Budget, Run, interleave, orders, synchronize
from sartor.lab.workloads import suites
from sartor.lab.workloads.workload import Inputs, Workload

SUITE, FAMILY = "outside", "timers"
ROWS = (
    ("fwd", "full", 128, 4096), ("fwd", "full", 128, 16384), ("fwd", "causal", 128, 4096),
    ("bwd", "full", 128, 4096), ("bwd", "causal", 128, 16384),
)  # fmt: skip


def rows() -> tuple[Workload, ...]:
    """The rows, as suite `paper` has them."""
    known = {(w.mode, w.mask, w.dim, w.seqlen_q): w for w, _ in suites.load("paper").cases}
    return tuple(known[row] for row in ROWS)


@dataclass(frozen=True)
class Plan:
    """What is timed, by whom, and how long."""

    work: tuple[Workload, ...] = ()
    who: tuple[str, ...] = ("sartor", "sdpa-cudnn")
    block_ms: float = 60.0  # and as long before it
    blocks: int = 7
    budget: Budget = field(default_factory=Budget)


def blocks(runs: Mapping[str, Run], each_ms: Mapping[str, float], device: torch.device, plan: Plan) -> dict[str, float]:
    """Milliseconds per call of each candidate by the other timer. `each_ms`: about how long a call of it takes."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for order in islice(orders(list(runs)), plan.blocks):
        for name in order:
            found[name].append(_block(runs[name], max(1, round(plan.block_ms / each_ms[name])), device))
    return {name: median(times) for name, times in found.items()}


def _block(run: Run, calls: int, device: torch.device) -> float:
    """Milliseconds per call of so many, after as many that do not count."""
    for _ in range(calls):
        run()
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        return 1e3 * (time.perf_counter() - begin) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        run()
    end.record()
    synchronize(device)
    return float(start.elapsed_time(end)) / calls


def measure(plan: Plan, device: torch.device, session: Session) -> Iterator[Record]:
    """A record of each row and provider: `ms` is the lab's timer's, `outside ms` in its counters the other one's."""
    for w in plan.work or rows():
        x = Inputs.make(w, device)
        runs = {name: providers.runner(providers.get(name).make(w, x), w, x) for name in plan.who}
        before = sm_clock_mhz(device)
        timings = interleave(runs, device, plan.budget)
        others = blocks(runs, {name: timing.ms for name, timing in timings.items()}, device, plan)
        for name, timing in timings.items():
            record = Record.of(session, f"{FAMILY}:{name}", w)
            record.ms, record.ms_p20, record.ms_p80 = timing.ms, timing.at(0.2), timing.at(0.8)
            record.tflops = w.flops / timing.ms * 1e-9
            record.counters = {"outside ms": others[name]}
            record.clock_mhz_before, record.clock_mhz_after = before, sm_clock_mhz(device)
            yield record


def main(results: Path | None = None, plan: Plan | None = None) -> None:
    """Measure, and write the records."""
    write(SUITE, partial(measure, plan or Plan()), results)


if __name__ == "__main__":
    main()
