"""What no GPU has run is refused in words, and named where the evidence lies."""

from __future__ import annotations

import pytest

from sartor import pending
from sartor.lab.workloads.suites import checkout


def test_what_is_pending_is_named_beside_the_evidence() -> None:
    root = checkout()
    if root is None:
        pytest.skip("records lie in a checkout")
    path = root / "benchmarks/results/h200/pending.md"
    said = path.read_text(encoding="utf-8") if path.is_file() else ""
    assert [part for part in pending.PARTS.values() if part not in said] == []


def test_a_pending_part_is_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pending.PARTS, "x", "the x of a kernel")
    monkeypatch.delenv("SARTOR_PENDING", raising=False)
    assert pending.refused("x") == [
        "the x of a kernel: no GPU has run its tests yet (SARTOR_PENDING=1 takes it all the same)"
    ]
    monkeypatch.setenv("SARTOR_PENDING", "1")
    assert pending.refused("x") == []
