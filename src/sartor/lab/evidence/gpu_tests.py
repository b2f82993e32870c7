"""The GPU tests of some kernels: run, counted, and gone on with where an earlier run of these sources was stopped."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from sartor.lab.evidence import wanted

STOP_AT = 100  # failures: what was not run by then is not known
# What is started in a shell's background ignores Ctrl-C, and so would its children. At its end a run ignores it too, as
# it writes down what was done
PYTEST = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.default_int_handler)
class Ending:
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.exit(pytest.main(sys.argv[1:], plugins=[Ending()]))
"""
END_S = 40  # that pytest may take to write what was done, once it is stopped


def resume(passed: Path, root: Path, facts: Mapping[str, Any]) -> None:
    """Empties the list of the tests that passed, if they did so with other sources or elsewhere. Its first line is a
    hash of `src`, `tests` and these facts; pytest adds a line when a test has passed, so that nothing kills it.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for file in sorted(path for name in ("src", "tests") for path in (root / name).rglob("*") if path.is_file()):
        if "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode() + file.read_bytes())
    if _lines(passed)[:1] != [digest.hexdigest()]:
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.write_text(digest.hexdigest() + "\n", encoding="utf-8")


def _lines(path: Path | None) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path and path.is_file() else []


def run_tests(
    root: Path, limit_s: float, names: Sequence[str] = (), marker: str = "gpu and not slow",
    tell: Callable[[str], None] = lambda text: None, passed: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Counts of `pytest -m <marker>`, or of those of its tests that judge some kernels; `tell` is told why tests fail.
    A run over its limit is stopped: what was done counts, and the kernels of which a test was not done are `open`.
    What the file `passed` names counts, and is not run again."""
    earlier = frozenset(_lines(passed)[1:])
    with tempfile.TemporaryDirectory() as folder:
        xml, planned = Path(folder) / "tests.xml", Path(folder) / "planned.json"
        command = [sys.executable, "-c", PYTEST, "-m", marker, "-q", f"--maxfail={STOP_AT}", f"--junitxml={xml}"]
        command += ["--kernels", ",".join(names)] if names else []
        command += [f"--passed={passed}"] if passed else []  # in one, or its folder is searched for a conftest.py
        command += ["--planned", str(planned)] if (root / "tests" / "conftest.py").is_file() else []
        if find_spec("xdist"):  # compiling takes most of the time, and it runs on the CPU
            processes = max(0, min(14 * (torch.cuda.device_count() or 1), (os.cpu_count() or 3) - 2))
            command += ["-n", str(processes), "--dist", "load", "--maxschedchunk", "1"]
        said = _run(command, root, limit_s)
        if not xml.is_file():
            return _not_run(said[-2000:])
        tree = ET.parse(xml).getroot()
        for failure in (*tree.iter("failure"), *tree.iter("error")):
            tell((failure.get("message") or "")[:400])
        found = counts(tree, json.loads(planned.read_text(encoding="utf-8")) if planned.is_file() else {}, earlier)
        if found["not_done"]:
            begun = [_name(c) for c in tree.iter("testcase") if not _property(c, "done")]
            tell(f"stopped after {limit_s:.0f} s with {found['not_done']} tests to go, in {', '.join(begun)}")
        return found


def _run(command: Sequence[str], root: Path, limit_s: float) -> str:
    """What pytest says. At the limit it is interrupted, as by Ctrl-C: it writes down what was done, and ends.

    A test may start it, in a worker of xdist: the variables of that worker are left out, or each test of this run would
    take itself for a test of a worker.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
    with subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        for seconds, stop in ((limit_s, partial(running.send_signal, signal.SIGINT)), (END_S, running.kill)):
            try:
                return running.communicate(timeout=seconds)[0]
            except subprocess.TimeoutExpired:
                stop()
        return running.communicate()[0]


def _not_run(why: str) -> dict[str, Any]:
    none = {"passed": 0, "skipped": 0, "not_done": 0, "open": [], "modules": {}}
    return {**none, "failed": 1, "failures": [why], "against": list(wanted.KERNELS)}


def counts(
    tree: ET.Element,
    planned: Mapping[str, str | None] = MappingProxyType({}),
    earlier: Collection[str] = (),
) -> dict[str, Any]:
    """passed, failed, skipped, the names of the failures and the kernels they speak against, seconds by module, summed
    over processes, from JUnit XML. That no test ran is a failure, which speaks against all. Of the tests that were
    `planned` (with the kernels that each judges, None: all) those that passed `earlier` are not run again; how many are
    not done, and the kernels they leave open. XML names those that were begun too."""
    cases = [c for c in tree.iter("testcase") if not planned or _property(c, "done")]
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    before = set(planned) & set(earlier)
    if len(skipped) == len(cases) and not before:
        return {**_not_run("no test ran"), "skipped": len(skipped)}
    modules: dict[str, float] = defaultdict(float)
    for c in cases:
        modules[c.get("classname", "").rsplit(".", 1)[-1]] += float(c.get("time", 0))
    done = {*before, *map(_name, cases)}
    left = [judges for name, judges in planned.items() if name not in done]
    return {
        "passed": len(cases) - len(failed) - len(skipped) + len(before),
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
