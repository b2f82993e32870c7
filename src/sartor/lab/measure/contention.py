"""What other processes take of a machine while something is measured on it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from sartor.lab.measure.records import Record

STAT = Path("/proc/stat")
LEAST_S = 0.2  # the counts tick every 10 ms
MOST = 0.1  # of the CPUs that are wanted, from which on a time is marked
SPREAD = 1.5  # between the 20th and the 80th percentile of samples, from which on it is


class Counts(NamedTuple):
    """Seconds so far: of the clock; that the CPUs which we may use were busy; that this process used them."""

    clock: float
    busy: float
    own: float


@dataclass(frozen=True)
class Contention:
    """Of the time since `begin`, on a device that keeps so many CPUs of the host busy."""

    begin: Counts | None
    wanted: int

    @classmethod
    def watch(cls, device: torch.device) -> Contention:
        """From now on: a CPU works with all of torch's threads, a GPU with the one that launches."""
        return cls(counts(), torch.get_num_threads() if device.type == "cpu" else 1)

    def share(self) -> float | None:
        """The share of the CPUs wanted that others have kept busy; None where the system does not tell, or too soon."""
        end = counts()
        if self.begin is None or end is None or end.clock - self.begin.clock < LEAST_S:
            return None
        passed, busy, own = (b - a for a, b in zip(self.begin, end, strict=True))
        lacking = max(busy - own, 0.0) / passed + self.wanted - len(os.sched_getaffinity(0))
        return min(max(lacking / self.wanted, 0.0), 1.0)


def counts() -> Counts | None:
    """Now, on Linux."""
    try:
        lines = STAT.read_text().splitlines()
    except OSError:
        return None
    busy, ours = 0, {f"cpu{i}" for i in os.sched_getaffinity(0)}
    for name, user, nice, system, _, _, irq, softirq, steal, *_ in map(str.split, lines[1 : 1 + (os.cpu_count() or 0)]):
        busy += (name in ours) * sum(map(int, (user, nice, system, irq, softirq, steal)))
    return Counts(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), time.process_time())


def disturbed(r: Record) -> bool:
    """Whether a time is not to be trusted: others took the machine, or samples lie far apart."""
    apart = r.ms_p20 is not None and r.ms_p80 is not None and r.ms_p80 > SPREAD * r.ms_p20
    return apart or (r.contention or 0.0) > MOST


def verdict(records: list[Record]) -> str:
    """A sentence on the times that are not to be trusted, or nothing."""
    timed = [r for r in records if r.ms is not None]
    marked = [r for r in timed if disturbed(r)]
    if not marked:
        return ""
    taken = max((r.contention or 0.0 for r in marked), default=0.0)
    why = f"other processes took up to {100 * taken:.0f} % of its CPUs" if taken > MOST else "samples lie far apart"
    return (
        f"This machine was too busy to measure on: {len(marked)} of {len(timed)} times are marked ~, as {why};"
        " run again when it is idle"
    )
