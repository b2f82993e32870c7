"""verify: run the GPU tests and the accuracy rows of the kernels that changed, and write down the fingerprints of what
passed, beside those of earlier runs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from sartor.device import ARCHITECTURES, Device
from sartor.lab.evidence import wanted
from sartor.lab.evidence.evidence import Evidence, Run, cases
from sartor.lab.evidence.gpu_tests import STOP_AT, resume, run_tests
from sartor.lab.measure import check, fingerprint
from sartor.lab.measure.fingerprint import Case, Found
from sartor.lab.measure.records import environment

LIMIT_S = 9.5 * 60  # unless told otherwise
COMPARE_S = 180  # that fingerprints may take, where they say what is to be tested
AFTER_TESTS_S = 120  # that accuracy and fingerprints may take, side by side


def verify(
    root: Path, out: Path, device: torch.device, tell: Callable[[str], None], names: Sequence[str] | None = None,
    limit_s: float = LIMIT_S,
) -> Run:  # fmt: skip
    """Judge these kernels, by default those whose fingerprints are not what passed. The run, which is also put into
    `<out>/<device>/evidence.json`, in the place of what earlier ones said of its cases; empty where all is what passed.
    `root` is the checkout whose tests are run. Tests that passed with the same sources, in a run that was stopped, are
    not run again: `<out>/<device>/passed.txt` names them.
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
    resume(folder / "passed.txt", root, {name: facts[name] for name in facts.keys() - {"commit", "dirty"}})
    tests = run_tests(root, left, () if whole else names, tell=tell, passed=folder / "passed.txt")
    tell("accuracy, and fingerprints beside it")
    names = [name for name in names if name not in tests["open"]]
    own = None if whole else wanted.cases_of(names, Device.of(device))
    with ThreadPoolExecutor(1) as beside:
        printing = beside.submit(lambda: now or fingerprints(device, start + limit_s - 20, tell, own))
        only = None if own is None else {fingerprint.key(*case) for case in own}
        rows = check.run(device, only=only, deadline=start + limit_s)
        now = printing.result()
    judged, passed = wanted.judged(now, names), sound(tests, rows, names)
    against = set(names) - set(passed)
    good = [key for key in sorted(judged) if wanted.kernel_of(now[key].plan) not in against]
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
