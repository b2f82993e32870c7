"""Training steps on a tiny stack: losses within their budget, records, their table."""

import math
from pathlib import Path

import pytest
import torch

from sartor.lab.measure import records, steps
from sartor.lab.show import report
from sartor.lab.workloads.workload import Workload


def plan(dtype: str) -> steps.Plan:
    w = Workload(2, 2, 2, 32, 32, 16, 16, dtype, "causal", "fwd_bwd")
    return steps.Plan(w, layers=2, vocab=64, curve=4, rounds=2, turn=1, compiled=(False,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_become_records_and_a_table(tmp_path: Path, monkeypatch, dtype: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    steps.main(tmp_path, plan(dtype))
    found = records.read(tmp_path / "cpu" / "steps.jsonl")
    assert [r.provider for r in found] == ["step:sartor", "step:sdpa"]
    for r in found:
        assert r.err_max is not None
        assert r.err_max <= r.err_budget
        assert r.counters["tokens/s"] == pytest.approx(64 / r.ms * 1e3, rel=1e-3)
        assert r.counters["loss first"] == pytest.approx(math.log(64), abs=0.5)
    text = report.render("cpu/steps/steps", tmp_path)
    assert "| eager | Sartor |" in text
    assert "last loss" in text


@pytest.mark.thorough
def test_layers_share_what_is_compiled() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    training = steps.Training(plan("float32"), "sartor", torch.device("cpu"), compiled=True)
    plain = steps.Training(plan("float32"), "sartor", torch.device("cpu"))
    for _ in range(3):
        assert float(training.step()) == pytest.approx(float(plain.step()), rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_a_wrong_attention_is_over_the_budget(monkeypatch) -> None:
    wrong = lambda q, k, v: v  # noqa: E731
    monkeypatch.setitem(steps.ATTENTION, "sartor", wrong)
    run = records.Run("r1", "steps", {})
    ours, sdpa = steps.measure(plan("float32"), torch.device("cpu"), run)
    assert ours.err_max > ours.err_budget
    assert sdpa.err_max <= sdpa.err_budget


def test_what_fails_is_told(monkeypatch) -> None:
    class Broken(steps.Training):
        def step(self):
            if self.name == "sartor" and self.turns:
                raise ValueError("no")
            return super().step()

        def __init__(self, plan, name, device, compiled=None, order=0):
            super().__init__(plan, name, device, bool(compiled), order)
            self.name, self.turns = name, compiled is not None

    monkeypatch.setattr(steps, "Training", Broken)
    ours, sdpa = steps.measure(plan("float32"), torch.device("cpu"), records.Run("r1", "steps", {}))
    assert ours.skipped == "ValueError: no"
    assert ours.ms is None
    assert sdpa.ms
