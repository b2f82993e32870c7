"""verify: run the GPU tests and the accuracy rows of the kernels that changed, and write down the fingerprints of what
passed, beside those of earlier runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sartor.device import ARCHITECTURES, Device
from sartor.lab.evidence import wanted
from sartor.lab.evidence.evidence import Evidence, Run, cases
from sartor.lab.measure import check, fingerprint
from sartor.lab.measure.fingerprint import Case, Found
from sartor.lab.measure.records import environment

LIMIT_S = 9.5 * 60  # unless told otherwise
COMPARE_S = 180  # that fingerprints may take, where they say what is to be tested
AFTER_TESTS_S = 120  # that accuracy and fingerprints may take, side by side
STOP_AT = 20  # failures: what was not run by then is not known


def verify(
    root: Path, out: Path, device: torch.device, tell: Callable[[str], None], names: Sequence[str] | None = None,
    limit_s: float = LIMIT_S,
) -> Run:  # fmt: skip
    """Judge these kernels, by default those whose fingerprints are not what passed. The run, which is also put into
    `<out>/<device>/evidence.json`, in the place of what earlier ones said of its cases; empty where all is what passed.
    `root` is the checkout whose tests are run.
    """
    if device.type != "cuda":
        raise ValueError(f"verify needs an NVIDIA GPU, whose tests are skipped elsewhere, got {device}")
    start, facts = time.monotonic(), environment(device)
    folder = out / str(facts["device"])
    evidence, now = Evidence.load(folder), dict[str, Found]()
    if names is None:
        tell("fingerprints of today")
        now = fingerprints(device, start + COMPARE_S, tell)
        names = wanted.changed(evidence, now)
        if not names:
            return {}
    tell(f"GPU tests of {', '.join(names)}")
    whole = set(names) == set(wanted.KERNELS)
    left = start + limit_s - AFTER_TESTS_S - time.monotonic()
    tests = run_tests(root, left, () if whole else names, tell=tell)
    tell("accuracy, and fingerprints beside it")
    own = None if whole else wanted.cases_of(names, Device.of(device))
    with ThreadPoolExecutor(1) as beside:
        printing = beside.submit(lambda: now or fingerprints(device, start + limit_s - 20, tell, own))
        only = None if own is None else {fingerprint.key(*case) for case in own}
        rows = check.run(device, only=only, deadline=start + limit_s)
        now = printing.result()
    judged, passed = wanted.judged(evidence, now, names), sound(tests, rows, names)
    against = set(names) - set(passed)
    good = [key for key in sorted(judged) if not wanted.kernels_of(now[key].plan) & against]
    run = {
        "kernels": passed,
        "fingerprints": {key: list(now[key]) for key in good},
        **tests,
        "accuracy": [row.as_dict() for row in rows],
        "over_budget": sum(not row.ok for row in rows),
        "seconds": round(time.monotonic() - start, 1),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **facts,
    }  # fmt: skip
    known = {fingerprint.key(*case) for case in cases()}
    text = {"device_name": torch.cuda.get_device_name(device), "runs": evidence.after(run, judged, known)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evidence.json").write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    return run


def fingerprints(
    device: torch.device, deadline: float, tell: Callable[[str], None], of: Iterable[Case] | None = None
) -> dict[str, Found]:
    """Of all that is verified or of some cases, as this machine runs it, or without a GPU as an H200 does."""
    processes = max(1, (os.cpu_count() or 1) - 2)
    where = Device.of(device) if device.type == "cuda" else ARCHITECTURES[90]
    found = fingerprint.every(cases() if of is None else of, where, processes, deadline, tell)
    tell(f"{len(found)} fingerprints")
    return found


def sound(tests: dict[str, Any], rows: list[check.Row], names: Iterable[str]) -> list[str]:
    """Those of the kernels against which tests that ran to their end found nothing; none where no test passed."""
    if not tests["passed"] or tests["failed"] >= STOP_AT:
        return []
    against = {*tests["against"], *(row.plan.split("[")[0] for row in rows if not row.ok)}
    return [name for name in names if name not in against]


def run_tests(
    root: Path, limit_s: float, names: Sequence[str] = (), marker: str = "gpu and not slow",
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Counts of `pytest -m <marker>`, or of those of its tests that judge some kernels; `tell` is told why tests fail.
    A run over its limit counts as one failure, with what it was stopped at."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-m", marker, "-q", f"--maxfail={STOP_AT}", f"--junitxml={xml}"]
        command += ["--kernels", ",".join(names)] if names else []
        if find_spec("xdist"):  # compiling takes most of the time, and it runs on the CPU
            command += ["-n", str(min(14, os.cpu_count() or 1)), "--dist", "worksteal"]
        try:
            done = subprocess.run(command, cwd=root, timeout=limit_s, capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired:
            return _not_run(f"not done after {limit_s:.0f} s")
        if not xml.is_file():
            return _not_run(done.stdout[-2000:])
        tree = ET.parse(xml).getroot()
        for failure in (*tree.iter("failure"), *tree.iter("error")):
            tell((failure.get("message") or "")[:400])
        return counts(tree)


def _not_run(why: str) -> dict[str, Any]:
    return {"passed": 0, "failed": 1, "skipped": 0, "failures": [why], "against": list(wanted.KERNELS), "modules": {}}


def counts(tree: ET.Element) -> dict[str, Any]:
    """passed, failed, skipped, the names of the failures and the kernels they speak against, seconds by module, summed
    over processes, from JUnit XML. That no test ran is a failure, which speaks against all."""
    cases = list(tree.iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    if len(skipped) == len(cases):
        return {**_not_run("no test ran"), "skipped": len(skipped)}
    modules: dict[str, float] = defaultdict(float)
    for c in cases:
        modules[c.get("classname", "").rsplit(".", 1)[-1]] += float(c.get("time", 0))
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "failures": [f"{c.get('classname')}::{c.get('name')}" for c in failed],
        "against": sorted({name for c in failed for name in _judged_by(c)}),
        "modules": {name: round(seconds, 1) for name, seconds in sorted(modules.items())},
    }


def _judged_by(test: ET.Element) -> Sequence[str]:
    """The kernels that a test says it is about (mark `judges`), or all."""
    said = [p.get("value", "") for p in test.iter("property") if p.get("name") == "judges"]
    return said[0].split() if said else wanted.KERNELS
