"""Evidence: what passed the tests on a GPU, and which records it covers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sartor.device import ARCHITECTURES, Device
from sartor.lab.ladder import catalogue
from sartor.lab.measure import check
from sartor.lab.measure.fingerprint import GPU_KERNELS, Case, Found, key
from sartor.lab.measure.records import Record
from sartor.lab.workloads import suites

ELSEWHERE = ("quick-cpu", "quick-gpu", "ladder-quick")  # suites of which nothing is recorded of a GPU


@dataclass(frozen=True)
class Evidence:
    """What `sartor verify` wrote: plans and fingerprints that passed, by the key of their case; where from."""

    passed: dict[str, Found] = field(default_factory=dict)
    commit: str = ""
    device: Device | None = None  # if this package knows its architecture

    @classmethod
    def load(cls, folder: Path) -> Evidence:
        """From a results folder; nothing when it was never written, or before there were fingerprints."""
        path = folder / "evidence.json"
        if not path.is_file():
            return cls()
        found = json.loads(path.read_text(encoding="utf-8"))
        known = (d for d in ARCHITECTURES.values() if d.name == found.get("device_name"))
        passed = {name: Found(*pair) for name, pair in found.get("fingerprints", {}).items()}
        return cls(passed, found.get("commit", ""), next(known, None))

    def covers(self, r: Record) -> bool:
        """Whether a record is of what passed: of the machine code, launched alike, or of a kernel that needs no GPU."""
        return _holds(r, self.passed)


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
    found = known.get(key(r.provider, r.workload))
    return r.plan is None or (found is not None and found.fingerprint == r.fingerprint)


def cases() -> Iterator[Case]:
    """Everything of ours that is verified: what suites measure, rungs that show our kernels, the accuracy table."""
    for name in suites.available():
        if name not in ELSEWHERE:
            for w, who in suites.load(name).cases:
                for provider in who:
                    if provider.split(":")[0] == "sartor" or provider in _products():
                        yield provider, w
    for w in check.cases(torch.device("cuda")):
        yield "sartor", w


def _products() -> tuple[str, ...]:
    return tuple(rung.provider for rung in catalogue.load() if rung.kernel)
