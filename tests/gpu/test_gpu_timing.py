"""The timer on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from sartor.lab.measure.timing import Budget, interleave

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
