"""Training and generation of a tiny model of transformers: records, budgets, what fails or takes too long; a table."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from sartor.lab.measure import models, records
from sartor.lab.show import report
from sartor.lab.workloads.workload import Workload

transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")
masks = pytest.importorskip("transformers.masking_utils")
PLAN = models.Plan(
    Workload(2, 4, 2, 32, 32, 16, 16, "bfloat16", "causal", "fwd_bwd"),
    Workload(3, 4, 2, 1, 16, 16, 16, "bfloat16", "cached", "decode"),
    layers=2, inner=96, vocab=64, curve=4, rounds=1, turn=1, texts=1, tokens=3, first_s=300,
)  # fmt: skip


def no_keys(module, query, key, value, attention_mask, **options):
    """What attention would be whose every query saw its own key alone: wrong, and of the right shape."""
    repeated = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return repeated[:, :, -query.shape[2] :].transpose(1, 2).contiguous(), None


def broken(module, *tensors, **options):
    raise ValueError("no")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """FlexAttention's place is another's: a compiler takes minutes for it on a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(models.IMPLEMENTATIONS, "flex", "broken")
    names = {"broken": broken, "wrong": no_keys}
    for name, function in names.items():
        transformers.AttentionInterface.register(name, function)
        masks.AttentionMaskInterface.register(name, masks.sdpa_mask)
    yield
    for registry in (transformers.AttentionInterface, masks.AttentionMaskInterface):
        for name in (*names, "sartor", "paged|sartor", models.IMPLEMENTATIONS["wider"]):
            registry._global_mapping.pop(name, None)


def test_records_and_their_table(tmp_path: Path) -> None:
    models.main(tmp_path, PLAN)
    found = records.read(tmp_path / "cpu" / "models.jsonl")
    assert [(r.mode, r.provider) for r in found] == [
        (mode, f"model:{name}") for mode in ("fwd_bwd", "decode") for name in models.COUNTED
    ]
    for r in found:
        assert f"transformers {transformers.__version__}, 2 layers" in r.plan
        if r.provider == "model:flex":
            assert r.skipped == "ValueError: no"
            assert r.ms is None
            continue
        assert r.err_max <= r.err_budget
        tokens = 2 * 32 if r.mode == "fwd_bwd" else 3
        assert r.counters["tokens/s"] == pytest.approx(tokens / r.ms * 1e3, rel=1e-3)
    text = report.render("cpu/models/models", tmp_path)
    assert "| training step, B=2, N=32 | Sartor |" in text
    assert "| generated token, B=3, N kv up to 16 | PyTorch SDPA |" in text
    assert "FlexAttention, generated token: ValueError: no" in text


def test_a_wrong_attention_is_over_the_budget(monkeypatch) -> None:
    monkeypatch.setitem(models.IMPLEMENTATIONS, "sartor", "wrong")
    found = list(models.measure(PLAN, torch.device("cpu"), records.Run("r1", "models", {})))
    assert [r.err_max > r.err_budget for r in found if r.ms] == [True, False, True, False]


def test_prompts_are_padded_on_the_left_and_go_on() -> None:
    made = models.Generation(PLAN, "sdpa", torch.device("cpu"))
    assert made.seen.sum(1).tolist() == [6, 10, 13]
    assert made.seen[:, -6:].all()
    assert made.text().shape == (3, 16)
    assert made.logits().shape == (models.ONE_BY_ONE + 1, 3, 64)


def test_what_takes_too_long_is_told() -> None:
    def wrapped() -> None:
        try:
            time.sleep(5)
        except Exception as error:  # as compilers do
            raise RuntimeError("wrapped") from error

    with pytest.raises(TimeoutError, match=r"took more than 0 s"), models.within(0.05):
        wrapped()
    with pytest.raises(ZeroDivisionError), models.within(5):
        _ = 1 / 0
    with models.within(0.01):
        pass
    time.sleep(0.02)


def test_without_what_to_compare_with_nothing_is_measured(monkeypatch) -> None:
    monkeypatch.setitem(models.IMPLEMENTATIONS, "eager", "broken")
    with pytest.raises(RuntimeError, match="nothing to compare with: ValueError: no"):
        next(models.measure(PLAN, torch.device("cpu"), records.Run("r1", "models", {})))
