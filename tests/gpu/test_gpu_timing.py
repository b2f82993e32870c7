"""The timer on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from sartor.lab.measure import timing
from sartor.lab.measure.timing import Budget, interleave, own_stream

# slow: alone on its GPU, which `sartor verify` gives to many tests at a time
pytestmark = [
    pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
]  # fmt: skip


def test_a_slow_host_is_not_in_the_times():
    x = torch.ones(1, device="cuda")

    def run():
        time.sleep(3e-4)
        x.add_(1)

    found = interleave({"": run}, torch.device("cuda"), Budget(rounds=2, turn_ms=20.0, lead_ms=20.0, warmup_ms=1.0))[""]
    assert found.at(0.8) < 0.1  # ms; the host takes three times that
    assert found.host_us > 300


@pytest.mark.parametrize(("size", "host_s"), [(4096, 2e-4), (8192, 1e-3)])
def test_a_slow_host_gives_its_card_no_rest(size, host_s):
    """What draws the power of the cap is not faster where the host takes as long as the device, or long to begin."""
    device = torch.device("cuda")

    def slow():
        until = time.perf_counter() + host_s
        while time.perf_counter() < until:
            pass
        return a @ a

    with own_stream(device):
        a = torch.randn(size, size, dtype=torch.bfloat16, device=device)
        budget = Budget(rounds=12, warmup_ms=1000.0)  # a card that has rested is faster for its first seconds
        found = interleave({"quick": lambda: a @ a, "slow": slow}, device, budget)
    assert size > 4096 or found["slow"].host_us > 150  # of calls beyond a millisecond it is not told
    assert found["slow"].ms == pytest.approx(found["quick"].ms, rel=0.02)


def test_a_backward_is_its_own_backlog():
    device = torch.device("cuda")
    with own_stream(device):
        x = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device, requires_grad=True)
        out = x @ x
        clock = timing._CudaClock(device, cold_l2=False)

        def backward():
            return torch.autograd.grad(out, x, out, retain_graph=True)

        backward()  # its thread makes a handle of cuBLAS, which a capture refuses
        assert clock._captured(backward) is not None
        assert clock._captured(lambda: out.sum().item()) is None  # which waits, and cannot be captured
        assert torch.ones(2, device=device).sum().item() == 2  # and leaves nothing behind
