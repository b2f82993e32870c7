"""Evidence: what passed the tests on a GPU, and which records it covers."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sartor.device import ARCHITECTURES, Device
from sartor.lab.ladder import catalogue
from sartor.lab.measure import check
from sartor.lab.measure.fingerprint import GPU_KERNELS, JOINS, Case, Found, key
from sartor.lab.measure.records import Record
from sartor.lab.workloads import suites

Run = dict[str, Any]  # as in the file; `verify` says what is in it
ELSEWHERE = ("quick-cpu", "quick-gpu", "ladder-quick")  # suites of which nothing is recorded of a GPU


@dataclass(frozen=True)
class Evidence:
    """What `sartor verify` wrote, run by run. A run names its commit, and holds what passed in it and in none since:
    plans and fingerprints by the key of their case, rows of the accuracy table.
    """

    runs: tuple[Run, ...] = ()
    device: Device | None = None  # if this package knows its architecture

    @classmethod
    def load(cls, folder: Path) -> Evidence:
        """From a results folder; nothing when it was never written."""
        path = folder / "evidence.json"
        if not path.is_file():
            return cls()
        found = json.loads(path.read_text(encoding="utf-8"))
        known = (d for d in ARCHITECTURES.values() if d.name == found.get("device_name"))
        return cls(tuple(found["runs"]), next(known, None))

    @cached_property
    def passed(self) -> dict[str, Found]:
        """Of all runs, by key."""
        return {name: found for run in self.runs for name, found in passed_in(run).items()}

    def after(self, run: Run, judged: Container[str], known: Container[str]) -> tuple[Run, ...]:
        """The runs once one more has judged some cases: a case is in the last run that judged it, or in none where it
        did not pass there. What is not known any more, and runs of which nothing is left, go.
        """
        again = {row["workload"] for row in run["accuracy"]}
        left = []
        for old in self.runs:
            kept = {name: one for name, one in old["fingerprints"].items() if name in known and name not in judged}
            rows = [row for row in old["accuracy"] if row["workload"] not in again]
            left += [{**old, "fingerprints": kept, "accuracy": rows}] if kept else []
        return (*left, run)

    def covers(self, r: Record) -> bool:
        """Whether a record is of what passed: of the machine code, launched alike, or of a kernel that needs no GPU."""
        return _holds(r, self.passed)


def passed_in(run: Run) -> dict[str, Found]:
    """Plans and fingerprints of a run, by key."""
    return {name: Found(*pair) for name, pair in run["fingerprints"].items()}


def of_today(r: Record, present: Mapping[str, Found]) -> bool:
    """Whether a record is of what the package does today; `present` are the fingerprints of today, by key."""
    return _holds(r, present)


def _holds(r: Record, known: Mapping[str, Found]) -> bool:
    if r.base_provider == "rung":
        rung = catalogue.find(r.provider.removeprefix("rung:"))
        if not rung.kernel:
            return r.plan is None or r.fingerprint == rung.source_hash()
    elif r.base_provider != "sartor" or not (r.plan or "").startswith(GPU_KERNELS):
        return True
    found = [known[name].fingerprint for name in (key(r.provider, part) for part in r.workload.parts) if name in known]
    return r.plan is None or r.fingerprint == JOINS.join(found)


def cases() -> Iterator[Case]:
    """Everything of ours that is verified: what suites measure, rungs that show our kernels, the accuracy table. Of a
    training step its forward and its backward, each of which runs one kernel."""
    for name in suites.available():
        if name not in ELSEWHERE:
            for w, who in suites.load(name).cases:
                for provider in who:
                    if provider.split(":")[0] == "sartor" or provider in _products():
                        yield from ((provider, part) for part in w.parts)
    yield from check.cases(torch.device("cuda"))


def _products() -> tuple[str, ...]:
    return tuple(rung.provider for rung in catalogue.load() if rung.kernel)
