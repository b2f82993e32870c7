"""Every rung within the error budgets of the float64 reference: lengths no tile divides, every head dim, causal."""

from __future__ import annotations

import pytest
import torch

from sartor import testing
from sartor.device import Device
from sartor.lab.ladder import catalogue as ladder
from sartor.lab.ladder import rung
from sartor.lab.ladder.rung import Rung
from sartor.lab.workloads.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.judges(),
]
LENGTHS = (1, 63, 257, 1000)
CASES = [
    (r, dim, dtype, causal) for r in ladder.load() for dim in r.dims for dtype in r.dtypes
    for causal in ((False, True) if r.causal else (False,))
]  # fmt: skip


def ids(value: object) -> str:
    return value.number if isinstance(value, Rung) else str(value)


def check(r, n, dim, dtype, causal, scale=1.0):
    w = Workload(2, 3, 3, n, n, dim, dim, dtype, "causal" if causal else "full")
    q, k, v = testing.make_inputs(2, 3, 3, n, n, dim, dtype=w.torch_dtype, device="cuda")
    q = q * scale
    out = r.attend(w)(q, k, v)
    testing.check_all({"out": out}, q, k, v, layout="bhsd", causal=causal)
    return out


@pytest.fixture
def untuned(monkeypatch):
    """One tile for the autotuned rungs: to time five for every length and head dim would take minutes."""
    for r in ladder.load():
        if not r.is_cuda and hasattr(rung.module(r.path), "CONFIGS"):
            monkeypatch.setattr(rung.module(r.path).attend, "configs", rung.module(r.path).CONFIGS[-1:])


def skip_if_it_cannot(r, dim, dtype, causal):
    """A rung of a newer architecture, or one that shows a product kernel, says why it does not run here."""
    w = Workload(2, 3, 3, 257, 257, dim, dim, dtype, "causal" if causal else "full")
    why = r.why_not(w, Device.of(torch.device("cuda")))
    if why:
        pytest.skip(why)


@pytest.mark.parametrize(("r", "dim", "dtype", "causal"), CASES, ids=ids)
@pytest.mark.usefixtures("untuned")
def test_budget(r, dim, dtype, causal):
    skip_if_it_cannot(r, dim, dtype, causal)
    for n in LENGTHS:
        check(r, n, dim, dtype, causal)


@pytest.mark.parametrize("r", [r for r in ladder.load() if not r.kernel], ids=ids)
def test_peaked_scores_and_repetition(r):
    """Scores tens apart move the running maximum; a second call gives the same bits. Products have their own tests."""
    dim, dtype = max(r.dims), r.dtypes[0]
    skip_if_it_cannot(r, dim, dtype, causal=False)
    first, second = (check(r, 515, dim, dtype, False, scale=16.0) for _ in range(2))
    assert torch.equal(first, second)
