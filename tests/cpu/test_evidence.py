"""What needs a GPU passed on one as it is today: plans, machine code, launches; rungs were measured; or it is pending.
The tables beside the records are made of them."""

import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path

import pytest

from sartor import kernels, nvrtc
from sartor.kernels.triton import launch
from sartor.lab.evidence.evidence import Evidence, Run, cases, passed_in
from sartor.lab.evidence.wanted import kernel_of
from sartor.lab.ladder import catalogue as ladder
from sartor.lab.ladder.rung import Rung
from sartor.lab.measure import fingerprint, records
from sartor.lab.measure.fingerprint import GPU_KERNELS, Case, key
from sartor.lab.measure.planned import plan_of
from sartor.lab.workloads.suites import checkout
from sartor.lab.workloads.workload import Inputs

ROOT = checkout()
RESULTS = sorted(p.parent for p in (ROOT / "benchmarks" / "results").glob("*/evidence.json")) if ROOT else []
RUNS = [(folder, run) for folder in RESULTS for run in Evidence.load(folder).runs]
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*/*.jsonl")) if ROOT else []
NAMES = [n for n in (*kernels.FORWARD, *kernels.BACKWARD) if n.startswith(GPU_KERNELS)]
SECONDS = 20  # after which no further fingerprint is begun
TRIES = 8  # ptxas may give the registers of a kernel that spills other numbers from run to run, of one PTX
pytestmark = pytest.mark.skipif(ROOT is None, reason="evidence and records lie in a checkout")
on_devices = pytest.mark.parametrize("folder", RESULTS, ids=lambda folder: folder.name)
needs_compilers = pytest.mark.skipif(bool(nvrtc.missing()) or not launch.available(), reason="needs NVRTC and Triton")


def pending() -> set[str]:
    """Kernels named in a pending.md, with a reason."""
    texts = (path.read_text() for path in (ROOT / "benchmarks" / "results").glob("*/pending.md"))
    return {name for text in texts for name in re.findall(r"^- (\w+): \S", text, re.MULTILINE)}


def is_pending(plan: str) -> bool:
    return kernel_of(plan) in pending()


def sample(of_commit: str = "") -> list[Case]:
    """All cases in an order that is another one every day."""
    order = list(dict.fromkeys(cases()))
    random.Random(f"{date.today()}{of_commit}").shuffle(order)
    return order


@pytest.mark.parametrize("rung", [r for r in ladder.load() if not r.kernel], ids=lambda r: r.number)
def test_rung_has_a_record_or_is_pending(rung: Rung) -> None:
    files = (ROOT / "benchmarks" / "results").glob("*/ladder.jsonl")
    found = [r for path in files for r in records.read(path) if r.err_max is not None and r.provider == rung.provider]
    good = {r.fingerprint for r in found if r.err_max <= r.err_budget}
    assert f"rung{rung.number}" in pending() or rung.source_hash() in good, (
        f"rung {rung.number} changed since it was measured: run `sartor ladder --record` on a GPU, or name it in"
        f" pending.md as rung{rung.number}, with the reason"
    )


@pytest.mark.parametrize("name", NAMES)
def test_kernel_has_evidence_or_is_pending(name: str) -> None:
    plans = [found.plan for folder in RESULTS for found in Evidence.load(folder).passed.values()]
    assert name in pending() or name in map(kernel_of, plans), (
        f"{name} never passed: run `sartor verify` on a GPU, or name it in pending.md with the reason"
    )


@on_devices
def test_plans_are_those_that_passed(folder: Path) -> None:
    """Of every case: kernels and tiles, which need no compiler."""
    evidence = Evidence.load(folder)
    if evidence.device is None or not evidence.passed:
        pytest.skip("nothing passed yet on a device that is known")
    for provider, w in dict.fromkeys(cases()):
        if provider.startswith("rung"):
            continue
        plan = plan_of(provider, w, Inputs.without_data(w), evidence.device)
        text = fingerprint.words(plan) if plan else ""
        if text.startswith(GPU_KERNELS) and not is_pending(text):
            assert key(provider, w) in evidence.passed, f"{key(provider, w)} never passed: run `sartor verify`"
            assert evidence.passed[key(provider, w)].plan == text


@on_devices
@needs_compilers
@pytest.mark.parametrize(
    "name", ["sartor bwd bfloat16 B2 H4/2 N1024 D64 causal+alibi", "sartor fwd bfloat16 B2 H4/2 N1024 D64 document5"]
)
def test_shared_heads_and_masks_are_what_passed(folder: Path, name: str) -> None:
    """Every day: a head map or a mask that is off changes the machine code of these, whichever the sample is."""
    evidence = Evidence.load(folder)
    case = next(((p, w) for p, w in cases() if key(p, w) == name), None)
    if evidence.device is None or name not in evidence.passed or case is None or is_pending(evidence.passed[name].plan):
        pytest.skip("it has not passed on this device")
    assert fingerprint.kept(*case, evidence.device) == evidence.passed[name]


@on_devices
@needs_compilers
@pytest.mark.parametrize("turn", ["first", pytest.param("second", marks=pytest.mark.thorough)])
def test_a_sample_of_fingerprints_is_what_passed(folder: Path, turn: str, tmp_path: Path, monkeypatch) -> None:
    """The second turn goes on where the first one stopped: what has been compared is in the disk cache."""
    evidence, start, compared = Evidence.load(folder), time.monotonic(), 0
    if evidence.device is None or not evidence.passed:
        pytest.skip("nothing passed yet on a device that is known")
    for provider, w in sample():
        passed = evidence.passed.get(key(provider, w))
        if passed is None or is_pending(passed.plan):
            continue
        found = fingerprint.kept(provider, w, evidence.device)
        if found is not None and is_pending(found.plan):  # a new kernel takes what another one passed
            continue
        for attempt in range(TRIES):
            if found == passed:
                break
            for cache in ("TRITON_CACHE_DIR", "SARTOR_CACHE"):  # compiled anew
                monkeypatch.setenv(cache, str(tmp_path / f"{cache}{attempt}"))
            found = fingerprint.fingerprint(provider, w, evidence.device)
        monkeypatch.undo()
        assert found == passed, (
            f"{key(provider, w)} is not what passed: run `sartor verify` on a GPU, or name its kernel in pending.md"
        )
        compared += 1
        if time.monotonic() - start > SECONDS:
            break
    print(f"compared {compared} of {len(evidence.passed)}")


@pytest.mark.parametrize(("folder", "run"), RUNS, ids=lambda one: one.name if isinstance(one, Path) else one["commit"])
@needs_compilers
def test_evidence_is_what_its_commit_says(folder: Path, run: Run, tmp_path: Path) -> None:
    """Each run's commit, where history is there: a fingerprint from that commit's sources, computed by them."""
    device, passed, commit = Evidence.load(folder).device, passed_in(run), run["commit"]
    if device is None:
        pytest.skip("the device is not known")
    assert not run.get("dirty"), "evidence must be of a commit, not of changes beside it"
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", commit], capture_output=True, check=False).returncode:
        pytest.skip("the commit is not in this history")
    archive = subprocess.run([*git, "archive", commit, "src"], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=archive, check=True)
    provider, w = next((p, w) for p, w in sample(commit) if key(p, w) in passed)
    command = [sys.executable, "-m", "sartor.lab.measure.fingerprint", json.dumps([provider, asdict(w)])]
    for attempt in range(TRIES):
        caches = {name: str(tmp_path / f"{name}{attempt}") for name in ("TRITON_CACHE_DIR", "SARTOR_CACHE")}
        done = subprocess.run(
            [*command, str(device.arch)], cwd=tmp_path / "src", capture_output=True, text=True, check=False,
            env=os.environ | caches | {"PYTHONPATH": str(tmp_path / "src")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if json.loads(done.stdout) == list(passed[key(provider, w)]):
            return
    pytest.fail(f"{key(provider, w)} is not what its commit, {commit}, tells a GPU to do")


@pytest.mark.parametrize(("folder", "run"), RUNS, ids=lambda one: one.name if isinstance(one, Path) else one["commit"])
def test_a_run_holds_what_it_judged(folder: Path, run: Run) -> None:
    """Fingerprints of kernels that passed in it or before, by tests of which some passed; none that another run has."""
    others = [other for other in Evidence.load(folder).runs if other != run]
    assert run["commit"]
    assert run["passed"] > 0
    assert not set(run["kernels"]) & set(run["against"])
    for name, found in passed_in(run).items():
        assert kernel_of(found.plan) in run["kernels"], name
        assert not any(name in other["fingerprints"] for other in others), name


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_csv_is_of_its_records(path: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.csv"
    records.write_csv(made, records.read(path))
    assert path.with_suffix(".csv").read_text() == made.read_text()
