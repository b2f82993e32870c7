"""Kernels that need a GPU were verified on one from exactly their present sources, rungs measured, or are pending; the
tables beside the records are made of them."""

import json
import re
from pathlib import Path

import pytest

from sartor import kernels
from sartor.lab import ladder, records
from sartor.lab.report import GPU_KERNELS
from sartor.lab.rung import Rung
from sartor.lab.suites import checkout

ROOT = checkout()
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*/*.jsonl")) if ROOT else []
NAMES = [n for n in (*kernels.FORWARD, *kernels.BACKWARD) if n.startswith(GPU_KERNELS)]


def evidence() -> dict[str, set[str]]:
    """Hashes of each kernel against which a machine that ran all GPU tests found nothing."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "benchmarks" / "results").glob("*/evidence.json"):
        run = json.loads(path.read_text())
        if run["passed"]:
            for name, digest in run["kernels"].items():
                found.setdefault(name, set()).add(digest)
    return found


def pending() -> set[str]:
    """Kernels named in a pending.md, with a reason."""
    texts = (path.read_text() for path in (ROOT / "benchmarks" / "results").glob("*/pending.md"))
    return {name for text in texts for name in re.findall(r"^- (\w+): \S", text, re.MULTILINE)}


def measured_rungs() -> set[tuple[str, str]]:
    """(rung, hash) of the records of the ladder that are within their error budgets."""
    files = (ROOT / "benchmarks" / "results").glob("*/ladder.jsonl")
    found = [r for path in files for r in records.read(path) if r.err_max is not None and r.kernel_hash]
    return {(r.provider, r.kernel_hash) for r in found if r.err_max <= r.err_budget}


@pytest.mark.skipif(ROOT is None, reason="evidence lies in a checkout")
@pytest.mark.parametrize("rung", ladder.load(), ids=lambda r: r.number)
def test_rung_has_a_record_or_is_pending(rung: Rung) -> None:
    assert f"rung{rung.number}" in pending() or (rung.provider, rung.source_hash()) in measured_rungs(), (
        f"rung {rung.number} changed since it was measured: run `sartor ladder --record` on a GPU, or name it in"
        f" pending.md as rung{rung.number}, with the reason"
    )


@pytest.mark.skipif(ROOT is None, reason="evidence lies in a checkout")
@pytest.mark.parametrize("name", NAMES)
def test_kernel_has_evidence_or_is_pending(name: str) -> None:
    assert name in pending() or kernels.source_hash(name) in evidence().get(name, set()), (
        f"{name} changed since it was verified: run `sartor verify` on a GPU, or name it in pending.md with the reason"
    )


@pytest.mark.skipif(ROOT is None, reason="records lie in a checkout")
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_csv_is_of_its_records(path: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.csv"
    records.write_csv(made, records.read(path))
    assert path.with_suffix(".csv").read_text() == made.read_text()
