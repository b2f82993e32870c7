"""Two timers on a small problem, their records and their table."""

import time
from pathlib import Path

import pytest
import torch

from sartor.lab.measure import outside, providers, records
from sartor.lab.measure.timing import Budget
from sartor.lab.show import report
from sartor.lab.workloads.workload import Workload

SMALL = Workload(1, 2, 2, 32, 32, 16, 16, "float32", "causal")


def test_rows_are_those_of_suite_paper() -> None:
    assert [(w.mode, w.mask, w.dim, w.seqlen_q) for w in outside.rows()] == list(outside.ROWS)


def test_both_timers_see_the_same_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Providers that take 2 and 4 ms of a clock that only they move."""
    now = [0.0]

    def taking(name: str, ms: float) -> providers.Provider:
        def call(*_: torch.Tensor) -> None:
            now[0] += ms * 1e-3

        return providers.Provider(name, lambda w, x: call, lambda *_: "")

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(providers, "get", lambda name: taking(name, {"sartor": 2.0, "sdpa": 4.0}[name]))
    budget = Budget(rounds=2, turn_ms=5.0, warmup_ms=1.0)
    outside.main(tmp_path, outside.Plan((SMALL,), ("sartor", "sdpa"), block_ms=8.0, blocks=3, budget=budget))
    ours, sdpa = records.read(tmp_path / "cpu" / "outside.jsonl")
    assert (ours.provider, sdpa.provider) == ("timers:sartor", "timers:sdpa")
    for record, ms in ((ours, 2.0), (sdpa, 4.0)):
        assert record.ms == pytest.approx(ms)
        assert record.counters["outside ms"] == pytest.approx(ms)
    text = report.render("cpu/outside/timers", tmp_path)
    assert "| pass | mask | N | D | Sartor ms | other timer | PyTorch SDPA ms | other timer |" in text
    ratios = [float(cell.strip(" x")) for cell in text.splitlines()[4].split("|")[9:11]]
    assert ratios[0] == pytest.approx(sdpa.ms / ours.ms, abs=1e-3)
    assert ratios[1] == pytest.approx(sdpa.counters["outside ms"] / ours.counters["outside ms"], abs=1e-3)


def test_a_block_is_led_by_as_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    plan = outside.Plan(block_ms=30.0, blocks=2)
    outside.blocks({"a": lambda: calls.append("a")}, {"a": 10.0}, torch.device("cpu"), plan)
    assert len(calls) == 2 * (3 + 3)
