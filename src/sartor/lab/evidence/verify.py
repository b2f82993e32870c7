"""verify: run the GPU tests and the accuracy table here, and write down the fingerprints of what passed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sartor import kernels
from sartor.device import ARCHITECTURES, Device
from sartor.lab.evidence.evidence import cases
from sartor.lab.measure import check, fingerprint
from sartor.lab.measure.fingerprint import Found
from sartor.lab.measure.records import environment

LIMIT_S = 9.5 * 60  # unless told otherwise
AFTER_TESTS_S = 120  # that accuracy and fingerprints may take, side by side
STOP_AT = 20  # failures: what was not run by then is not known


def verify(
    root: Path, out: Path, device: torch.device, tell: Callable[[str], None], limit_s: float = LIMIT_S
) -> dict[str, Any]:
    """The evidence, also written to `<out>/<device>/evidence.json`. `root` is the checkout whose tests are run."""
    if device.type != "cuda":
        raise ValueError(f"verify needs an NVIDIA GPU, whose tests are skipped elsewhere, got {device}")
    start = time.monotonic()
    tell("GPU tests")
    counts = run_tests(root, limit_s - AFTER_TESTS_S, tell)
    tell("accuracy, and fingerprints beside it")
    with ThreadPoolExecutor(1) as beside:
        printing = beside.submit(fingerprints, device, start + limit_s - 20, tell)
        rows = check.run(device, deadline=start + limit_s)
        found = printing.result()
    names = sound(counts, rows)
    evidence = {
        "kernels": names,
        "fingerprints": {name: list(one) for name, one in sorted(found.items()) if of_sound(one, names)},
        **counts,
        "accuracy": [row.as_dict() for row in rows],
        "over_budget": sum(not row.ok for row in rows),
        "seconds": round(time.monotonic() - start, 1),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device_name": torch.cuda.get_device_name(device),
        **environment(device),
    }
    path = out / str(evidence["device"]) / "evidence.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    return evidence


def fingerprints(device: torch.device, deadline: float, tell: Callable[[str], None]) -> dict[str, Found]:
    """Of all that is verified, as this machine runs it, or without a GPU as an H200 does, in parallel."""
    processes = max(1, (os.cpu_count() or 1) - 2)
    where = Device.of(device) if device.type == "cuda" else ARCHITECTURES[90]
    found = fingerprint.every(cases(), where, processes, deadline, tell)
    tell(f"{len(found)} fingerprints")
    return found


def of_sound(found: Found, names: list[str]) -> bool:
    """Whether the kernels of its plans are among those against which nothing was found."""
    return all(plan.split("[")[0] in names for plan in found.plan.split("; "))


JUDGED = {  # by test module
    "test_gpu_rungs": "rung", "test_gpu_fp32": "fp32", "test_gpu_hopper_fp32": "fp32",
    "test_gpu_hopper_backward": "hopper_backward", "test_gpu_hopper_forward": "hopper_forward",
    "test_gpu_hopper_wide": "hopper_wide_backward",
}  # fmt: skip


def sound(tests: dict[str, Any], rows: list[check.Row]) -> list[str]:
    """The kernels against which tests that ran to their end found nothing; none where no test passed. A failure speaks
    against the kernels its module is about, or all."""
    if not tests["passed"] or tests["failed"] >= STOP_AT:
        return []
    against = [JUDGED.get(name.split("::")[0].rsplit(".", 1)[-1], "") for name in tests["failures"]]
    against += [row.plan.split("[")[0] for row in rows if not row.ok]
    return [name for name in (*kernels.FORWARD, *kernels.BACKWARD) if not any(word in name for word in against)]


def run_tests(
    root: Path, limit_s: float, tell: Callable[[str], None], marker: str = "gpu and not slow"
) -> dict[str, Any]:
    """Counts of `pytest -m <marker>`; `tell` is told why tests fail. A run over its limit counts as one failure, with what
    it was stopped at."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-m", marker, "-q", f"--maxfail={STOP_AT}", f"--junitxml={xml}"]
        if find_spec("xdist"):  # compiling takes most of the time, and it runs on the CPU
            command += ["-n", str(min(14, os.cpu_count() or 1)), "--dist", "worksteal"]
        try:
            done = subprocess.run(command, cwd=root, timeout=limit_s, capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired:
            return {"passed": 0, "failed": 1, "skipped": 0, "failures": [f"not done after {limit_s:.0f} s"]}
        if not xml.is_file():
            return {"passed": 0, "failed": 1, "skipped": 0, "failures": [done.stdout[-2000:]]}
        tree = ET.parse(xml).getroot()
        for failure in (*tree.iter("failure"), *tree.iter("error")):
            tell((failure.get("message") or "")[:400])
        return counts(tree)


def counts(tree: ET.Element) -> dict[str, Any]:
    """passed, failed, skipped and the names of the failures from JUnit XML; that no test ran is a failure."""
    cases = list(tree.iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    idle = len(skipped) == len(cases)
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed) + idle,
        "skipped": len(skipped),
        "failures": [f"{c.get('classname')}::{c.get('name')}" for c in failed] or ["no test ran"] * idle,
    }
