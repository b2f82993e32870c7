"""verify: run the GPU tests and the accuracy rows of the kernels that changed, and write down the fingerprints of what
passed, beside those of earlier runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
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
# What is started in a shell's background ignores Ctrl-C, and so would its children
PYTEST = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(pytest.main(sys.argv[1:]))
"""
END_S = 40  # that pytest may take to write what was done, once it is stopped


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
    names = [name for name in names if name not in tests["open"]]
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
    if judged:
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
    A run over its limit is stopped: what was done counts, and the kernels of which a test was not done are `open`."""
    with tempfile.TemporaryDirectory() as folder:
        xml, planned = Path(folder) / "tests.xml", Path(folder) / "planned.json"
        command = [sys.executable, "-c", PYTEST, "-m", marker, "-q", f"--maxfail={STOP_AT}", f"--junitxml={xml}"]
        command += ["--kernels", ",".join(names)] if names else []
        command += ["--planned", str(planned)] if (root / "tests" / "conftest.py").is_file() else []
        if find_spec("xdist"):  # compiling takes most of the time, and it runs on the CPU
            command += ["-n", str(min(14, os.cpu_count() or 1)), "--dist", "load", "--maxschedchunk", "1"]
        said = _run(command, root, limit_s)
        if not xml.is_file():
            return _not_run(said[-2000:])
        tree = ET.parse(xml).getroot()
        for failure in (*tree.iter("failure"), *tree.iter("error")):
            tell((failure.get("message") or "")[:400])
        found = counts(tree, json.loads(planned.read_text(encoding="utf-8")) if planned.is_file() else {})
        if found["not_done"]:
            begun = [_name(c) for c in tree.iter("testcase") if not _property(c, "done")]
            tell(f"stopped after {limit_s:.0f} s with {found['not_done']} tests to go, in {', '.join(begun)}")
        return found


def _run(command: Sequence[str], root: Path, limit_s: float) -> str:
    """What pytest says. At the limit it is interrupted, as by Ctrl-C: it writes down what was done, and ends."""
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        for seconds, stop in ((limit_s, partial(running.send_signal, signal.SIGINT)), (END_S, running.kill)):
            try:
                return running.communicate(timeout=seconds)[0]
            except subprocess.TimeoutExpired:
                stop()
        return running.communicate()[0]


def _not_run(why: str) -> dict[str, Any]:
    none = {"passed": 0, "skipped": 0, "not_done": 0, "open": [], "modules": {}}
    return {**none, "failed": 1, "failures": [why], "against": list(wanted.KERNELS)}


def counts(tree: ET.Element, planned: Mapping[str, str | None] = MappingProxyType({})) -> dict[str, Any]:
    """passed, failed, skipped, the names of the failures and the kernels they speak against, seconds by module, summed
    over processes, from JUnit XML. That no test ran is a failure, which speaks against all. Of the tests that were
    `planned` (with the kernels that each judges, None: all) how many are not done, and the kernels they leave open; XML
    names those that were begun too."""
    cases = [c for c in tree.iter("testcase") if not planned or _property(c, "done")]
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    if len(skipped) == len(cases):
        return {**_not_run("no test ran"), "skipped": len(skipped)}
    modules: dict[str, float] = defaultdict(float)
    for c in cases:
        modules[c.get("classname", "").rsplit(".", 1)[-1]] += float(c.get("time", 0))
    done = {_name(c) for c in cases}
    left = [judges for name, judges in planned.items() if name not in done]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "failures": [_name(c) for c in failed],
        "against": sorted({name for c in failed for name in _judged_by(c)}),
        "not_done": len(left),
        "open": sorted({name for judges in left for name in _kernels(judges)}),
        "modules": {name: round(seconds, 1) for name, seconds in sorted(modules.items())},
    }


def _name(test: ET.Element) -> str:
    return f"{test.get('classname')}::{test.get('name')}"


def _judged_by(test: ET.Element) -> Sequence[str]:
    return _kernels(_property(test, "judges"))


def _property(test: ET.Element, name: str) -> str | None:
    return next((p.get("value", "") for p in test.iter("property") if p.get("name") == name), None)


def _kernels(judges: str | None) -> Sequence[str]:
    """The kernels that a test says it is about (mark `judges`), or all."""
    return wanted.KERNELS if judges is None else judges.split()
