"""The example trains by torchrun, and its losses are those of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "long_context.py"


def losses(*command):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, *command, str(EXAMPLE), "--float64", "--steps", "4", "--seqlen", "101"],
        capture_output=True, text=True, env=env, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.mark.slow
def test_losses_are_those_of_one_process():
    one = losses()
    many = losses("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    assert len(one) == 4
    assert many == pytest.approx(one, abs=1e-10)
