"""GPU tests rehearsed without a GPU: host errors are found, machine code is compiled, values are not missed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sartor import nvrtc

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
import torch
import sartor
from sartor import testing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

def inputs():
    return testing.make_inputs(1, 2, 1, 200, 300, 64, device="cuda", layout="bshd")

def test_right():
    q, k, v = inputs()
    testing.verify(q, k, v, causal=True, kernel="hopper")
    assert q.device == torch.device("cuda", 0) and not (sartor.attention(q, k, v) == 7).any()

def test_of_a_value():
    assert sartor.attention(*inputs(), kernel="triton").float().sum().item() < 1
    raise AssertionError("not reached")

def test_wrong_argument():
    sartor.attention(*inputs(), causal="sideways")

def test_wrong_fact():
    assert sartor.attention(*inputs(), kernel="triton").dtype == torch.float16

def test_wrong_device():
    q, k, v = inputs()
    sartor.attention(q, k, v, sinks=torch.zeros(2))

def test_a_refusal_that_does_not_come():
    with pytest.raises(ValueError):
        sartor.attention(*inputs(), kernel="triton")
"""
OUTCOMES = {
    "test_right": "PASSED",
    "test_of_a_value": "REHEARSED",
    "test_wrong_argument": "FAILED",
    "test_wrong_fact": "FAILED",
    "test_wrong_device": "FAILED",
    "test_a_refusal_that_does_not_come": "FAILED",
    "test_out_dtype[triton]": "PASSED",
}


@pytest.mark.skipif(bool(nvrtc.missing()), reason="needs NVRTC")
def test_host_errors_are_found_and_kernels_compiled(tmp_path):
    file, cache = tmp_path / "test_some.py", tmp_path / "cache"
    file.write_text(TESTS, encoding="utf-8")
    real = ROOT / "tests" / "gpu" / "test_gpu.py::test_out_dtype[triton]"
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "--rehearse", "-p", "no:cacheprovider"]
    env = os.environ | {"SARTOR_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([*command, str(real), str(file)], cwd=ROOT, env=env, capture_output=True, text=True)
    found = dict(re.findall(r"::(\S+) ([A-Z]+) ", done.stdout))
    assert found == OUTCOMES, done.stdout + done.stderr
    assert len(list(cache.glob("*.cubin"))) >= 3  # of the forward, of what comes before the backward, of the backward
