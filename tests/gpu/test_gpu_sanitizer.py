"""compute-sanitizer over the CUDA C++ kernels on small problems: no access outside tensors, no unexplained race.

What racecheck names in the other kernels, and why that is ordered, is in docs/notes/sanitizer.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from sartor import nvrtc

SANITIZER = shutil.which("compute-sanitizer")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and not nvrtc.missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (HOPPER and SANITIZER), reason="needs a Hopper GPU, sanitizer")]

FOUND = 9  # the sanitizer's exit code when it finds something
PROGRAM = """
import torch, sartor
from sartor import mods, testing
from sartor.kernels.hopper import forward as hopper_forward
suited = hopper_forward.Config.suited
hopper_forward.Config.suited = lambda m, dev: {suited}  # several warpgroups, as on large problems
hopper_forward.LONG = 1  # parts likewise
dtype, backward = torch.{dtype}, {backward}
for dim in {dims}:
    q, k, v = testing.make_inputs({sizes}, dim, None, dtype, "cuda", "bshd", 0, requires_grad=backward)
    for options in ({{}}, {{"causal": True}}, {{"window": (70, 3)}}{others}):
        print(sartor.explain(q, k, v, **options))
        out = sartor.attention(q, k, v, **options)
        if backward:
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
torch.cuda.synchronize()
print("all done")
"""
TWO_BLOCKS = """
from dataclasses import replace
from sartor.device import Device
of = Device.of
Device.of = staticmethod(lambda device: replace(of(device), sm_count=2))  # each computes many tiles
"""
MASKS = ', {"mask": mods.document(*(torch.arange(n, device="cuda")[None] // 50 for n in (200, 330)))}, {"softcap": 3.0}'
DROPOUT = ', {"dropout_p": 0.2, "dropout_seed": 3}, {"dropout_p": 0.2, "dropout_seed": 3, "causal": True}'
CASES = {
    "hopper_forward": {"dtype": "bfloat16", "dims": (40, 128, 256), "backward": False, "others": MASKS + DROPOUT},
    "hopper_backward": {
        "dtype": "bfloat16",
        "dims": (64, 96, 192),
        "backward": True,
        "others": DROPOUT + ', {"softcap": 3.0}',
    },
    "hopper_wide_backward": {"dtype": "float16", "dims": (136, 256), "backward": True, "others": ""},
    "hopper_fp32": {"dtype": "float32", "dims": (64, 128), "backward": False, "others": MASKS},
    "hopper_fp32_backward": {"dtype": "float32", "dims": (64,), "backward": True, "others": ""},
}


COMMON = {"sizes": "2, 4, 2, 200, 330", "suited": "m.tile"}
SPLITS = {"sizes": "1, 4, 2, 9, 5000", "suited": "suited(m, dev)", "others": ""}  # of the keys, as few queries have it


def sanitize(tool, kernel, before="", **changed):
    """What the sanitizer and the program say; every allocation is one of its own, so that its end is seen."""
    program = before + PROGRAM.format(**COMMON | CASES[kernel] | changed)
    done = subprocess.run(
        [SANITIZER, "--tool", *tool, "--error-exitcode", str(FOUND), sys.executable, "-c", program],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, FOUND), done.stdout[-3000:] + done.stderr[-2000:]
    assert "all done" in done.stdout
    assert re.search(rf"(forward|backward): +{kernel}\[", done.stdout)
    return done


@pytest.mark.parametrize("kernel", [pytest.param(name, marks=pytest.mark.judges(name)) for name in CASES])
def test_memory(kernel):
    done = sanitize(("memcheck", "--report-api-errors", "no"), kernel)  # torch probes the driver
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.judges("hopper_forward")
def test_memory_of_parts():
    done = sanitize(("memcheck", "--report-api-errors", "no"), "hopper_forward", **SPLITS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert re.search(r"forward: +hopper_forward\[.* p\d+\]", done.stdout)


HAZARD = re.compile(r"(\w+) hazard detected .*\n.* Read Thread \((\d+),.*\n.* Write Thread \((\d+),")


def unexplained(said):
    """The hazards but those of a note on a query tile. All lanes of a consumer warp read it; the first then says so for
    all, and the scheduler, which waits for it, writes another note over it. Racecheck orders that lane only."""
    hazards = [(kind, *map(int, numbers)) for kind, *numbers in HAZARD.findall(said)]
    assert len(hazards) == said.count("hazard detected"), said[-3000:]
    assert "RACECHECK SUMMARY" in said
    consumers = [thread for thread in range(128, 512) if thread % 32]
    return [h for h in hazards if not (h[0] == "WAR" and h[1] in consumers and h[2] == 96)]


@pytest.mark.judges("hopper_forward")
@pytest.mark.parametrize(
    ("before", "changed"), [("", {}), (TWO_BLOCKS, {}), ("", SPLITS)], ids=["many", "two", "splits"]
)
def test_races(before, changed):
    """With a block for each tile nothing is written twice: then there is no hazard at all."""
    tool = ("racecheck", "--racecheck-report", "all", "--print-limit", "100000")
    done = sanitize(tool, "hopper_forward", before, **{"dims": (64, 128), "others": ""} | changed)
    assert unexplained(done.stdout) == []
    assert before or (done.returncode == 0 and "hazard detected" not in done.stdout)
