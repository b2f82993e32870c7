"""Evidence: what is counted of a test run, and what a run that did not happen counts as."""

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from sartor.lab.evidence import gpu_tests, verify, wanted
from sartor.lab.evidence.evidence import Evidence, cases
from sartor.lab.measure import check
from sartor.lab.measure.fingerprint import Found
from sartor.lab.show import tables
from sartor.lab.workloads.suites import checkout
from sartor.lab.workloads.workload import Workload

ABOUT = '<properties><property name="judges" value="{}"/></properties>'
JUNIT = f"""<testsuites><testsuite>
<testcase classname="t.a" name="ok" time="2"/>
<testcase classname="t.b" name="no" time="3">{ABOUT.format("hopper_forward")}<failure/></testcase>
<testcase classname="t.a" name="bad" time="1">{ABOUT.format("")}<error/></testcase>
<testcase classname="t.a" name="not"><skipped/></testcase>
</testsuite></testsuites>"""

DONE = """<testsuites><testsuite>
<testcase classname="t.a" name="ok"><properties><property name="done" value="yes"/></properties></testcase>
<testcase classname="t.b" name="no"><properties><property name="done" value="yes"/></properties><failure/></testcase>
<testcase classname="t.a" name="begun"/>
</testsuite></testsuites>"""


def test_counts_of_a_test_run() -> None:
    found = gpu_tests.counts(ET.fromstring(JUNIT))
    assert found == {
        "passed": 1, "failed": 2, "skipped": 1, "failures": ["t.b::no", "t.a::bad"], "against": ["hopper_forward"],
        "modules": {"a": 3.0, "b": 3.0}, "not_done": 0, "open": [],
    }  # fmt: skip


def test_kernels_with_a_test_that_was_not_done_are_open() -> None:
    planned = {"t.a::ok": None, "t.b::no": "hopper_forward", "t.b::late": "hopper_backward triton_backward"}
    found = gpu_tests.counts(ET.fromstring(DONE), planned)
    assert (found["passed"], found["not_done"], found["open"]) == (1, 1, ["hopper_backward", "triton_backward"])
    found = gpu_tests.counts(ET.fromstring(DONE), planned, ["t.b::late", "t.b::of another kernel"])
    assert (found["passed"], found["not_done"], found["open"]) == (2, 0, [])
    found = gpu_tests.counts(ET.fromstring("<testsuites/>"), planned, planned)
    assert (found["passed"], found["failed"], found["not_done"]) == (3, 0, 0)
    found = gpu_tests.counts(ET.fromstring(DONE), {"t.a::begun": None})
    assert (found["passed"], found["not_done"], found["open"]) == (1, 1, sorted(wanted.KERNELS))


def test_a_failure_of_what_is_about_no_kernel_in_particular_speaks_against_all() -> None:
    xml = "<testsuites><testcase classname='a' name='no'><failure/></testcase><testcase name='b'/></testsuites>"
    assert gpu_tests.counts(ET.fromstring(xml))["against"] == sorted(wanted.KERNELS)


def test_a_run_without_tests_is_a_failure() -> None:
    skipped = "<testsuites><testcase classname='a' name='not'><skipped/></testcase></testsuites>"
    for xml in ("<testsuites/>", skipped):
        found = gpu_tests.counts(ET.fromstring(xml))
        assert (found["passed"], found["failed"], found["failures"]) == (0, 1, ["no test ran"])


def test_nothing_is_written_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="verify needs an NVIDIA GPU"):
        verify.verify(tmp_path, tmp_path / "results", torch.device("cpu"), print)
    assert not list(tmp_path.iterdir())


def test_tests_are_run_and_counted(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_passes(): pass\ndef test_fails(): assert False\n")
    found = gpu_tests.run_tests(tmp_path, 60, marker="not gpu")
    assert (found["passed"], found["failed"]) == (1, 1)


@pytest.mark.thorough
def test_a_run_that_is_stopped_tells_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is about all kernels is done first; also where Ctrl-C is ignored, as in a shell's background."""
    root = checkout()
    if root is None:
        pytest.skip("tests lie in a checkout")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text((root / "tests" / "conftest.py").read_text())
    (tmp_path / "tests" / "test_one.py").write_text(
        "import pytest, time\n"
        "@pytest.mark.judges('hopper_forward')\n"
        "@pytest.mark.parametrize('i', range(40))\n"
        "def test_late(i): time.sleep(60 if i else 0)\n"
        "def test_of_all(): pass\n"
    )
    monkeypatch.setattr(gpu_tests, "find_spec", lambda name: None)  # processes of its own begin late on a busy machine
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        found = gpu_tests.run_tests(tmp_path, 30, marker="not gpu")
    finally:
        signal.signal(signal.SIGINT, before)
    assert found["passed"] == 2, found
    assert (found["failed"], found["open"]) == (0, ["hopper_forward"]), found
    assert found["not_done"] == 39


@pytest.mark.thorough
def test_a_run_that_is_stopped_at_its_end_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All was done, and processes are being ended, when the limit is reached."""
    (tmp_path / "test_one.py").write_text("def test_passes(): pass\n")
    (tmp_path / "conftest.py").write_text(  # as xdist: called before what writes results
        "import pytest, time\n"
        "class Slow:\n"
        "    def pytest_sessionfinish(self): time.sleep(30)\n"
        "@pytest.hookimpl(trylast=True)\n"
        "def pytest_configure(config): config.pluginmanager.register(Slow())\n"
    )
    monkeypatch.setattr(gpu_tests, "find_spec", lambda name: None)
    found = gpu_tests.run_tests(tmp_path, 20, marker="not gpu")
    assert (found["passed"], found["failed"]) == (1, 0), found


@pytest.mark.thorough
def test_what_passed_before_is_not_run_again(tmp_path: Path) -> None:
    """Nor lost when pytest is killed, nor kept after a change of the sources."""
    root, passed = checkout(), tmp_path / "out" / "passed.txt"
    if root is None:
        pytest.skip("tests lie in a checkout")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text((root / "tests" / "conftest.py").read_text())
    test = tmp_path / "tests" / "test_one.py"
    test.write_text(
        "import os, pytest, time\n"
        "from pathlib import Path\n"
        "def note(text):\n"
        f"    with Path({str(tmp_path / 'ran')!r}).open('a') as file: file.write(text)\n"
        "@pytest.fixture\n"
        "def broken():\n"
        "    yield\n"
        "    assert Path('mended').exists()\n"
        "@pytest.mark.parametrize('i', range(3))\n"
        "def test_passes(i): note('p')\n"
        "def test_after(broken): note('a')\n"
        "@pytest.mark.judges('hopper_forward')\n"
        "def test_kills():\n"
        "    note('k')\n"
        "    if Path('mended').exists(): return\n"
        f"    while len(Path({str(passed)!r}).read_text().splitlines()) < 4: time.sleep(0.1)\n"
        "    os.kill(os.getppid() if 'PYTEST_XDIST_WORKER' in os.environ else os.getpid(), 9)\n"
    )

    def run() -> dict:
        gpu_tests.resume(passed, tmp_path, {"device": "h200"})
        (tmp_path / "ran").write_text("")
        found = gpu_tests.run_tests(tmp_path, 60, marker="not gpu", passed=passed)
        return found | {"ran": "".join(sorted((tmp_path / "ran").read_text()))}

    first = run()
    assert (first["passed"], len(passed.read_text().splitlines())) == (0, 4), first["failures"]
    (tmp_path / "mended").touch()
    found = run()
    assert (found["ran"], found["passed"], found["not_done"], found["failed"]) == ("ak", 5, 0, 0)
    found = run()
    assert (found["ran"], found["passed"], found["not_done"], found["failed"]) == ("", 5, 0, 0)
    test.write_text(test.read_text() + "# another text\n")
    gpu_tests.resume(passed, tmp_path, {"device": "h200"})
    assert len(passed.read_text().splitlines()) == 1


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_check_judges_a_kernel_by_name(mode: str) -> None:
    row = check.judge(Workload(1, 2, 1, 40, 40, 24, 24, "float32", "causal", mode), torch.device("cpu"), "reference")
    assert row.ok
    assert row.plan.startswith("reference")
    assert tables.checks([row]).rows[0][-1] == "ok"


def outcome(*against: str, passed: int = 700, failed: int = 1) -> dict:
    return {
        "passed": passed,
        "failed": failed,
        "skipped": 0,
        "failures": [],
        "against": list(against),
        "not_done": 0,
        "open": [],
    }


def test_a_kernel_is_sound_if_nothing_speaks_against_it() -> None:
    names = ("triton_forward", "hopper_forward")
    assert verify.sound(outcome(failed=0), [], names) == list(names)
    assert verify.sound(outcome("hopper_forward"), [], names) == ["triton_forward"]
    assert verify.sound(outcome("hopper_backward"), [], names) == list(names)


def test_no_kernel_is_sound_by_tests_that_did_not_run() -> None:
    assert verify.sound(outcome(passed=0), [], wanted.KERNELS) == []
    assert verify.sound(outcome(failed=gpu_tests.STOP_AT), [], wanted.KERNELS) == []


FWD, BWD = (f"sartor {mode} bfloat16 B1 H8 N128 D64 full" for mode in ("fwd", "bwd"))
PLANS = {FWD: "hopper_forward[a]", BWD: "hopper_backward[b]"}
ROW = "2x4 bwd"


def passed(commit: str = "old", **changed: str) -> dict:
    """A run in which all cases passed, with these digests."""
    digests = {name: changed.get(name.split()[1], "old") for name in PLANS}
    found = {name: [plan, digests[name]] for name, plan in PLANS.items()}
    return {"commit": commit, "fingerprints": found, "accuracy": [{"workload": ROW, "commit": commit}]}


def today(**changed: str) -> dict[str, Found]:
    return {name: Found(*pair) for name, pair in passed(**changed)["fingerprints"].items()}


@pytest.mark.parametrize(
    ("now", "names"),
    [(today(), ()), (today(fwd="new"), ("hopper_forward",)), (today(bwd="new"), ("hopper_backward",))],
)
def test_kernels_that_changed_are_wanted(now: dict[str, Found], names: tuple[str, ...]) -> None:
    assert wanted.changed(Evidence((passed(),)), now) == names
    assert set(wanted.changed(Evidence(), now)) == {"hopper_forward", "hopper_backward"}


def test_a_kernel_is_judged_by_its_own_cases() -> None:
    assert wanted.judged(today(), ["hopper_backward"]) == {BWD}
    assert {w.mode for _, w in cases()} == {"fwd", "bwd", "decode", "graph"}, "of a step its two parts"


def test_a_run_takes_the_place_of_what_earlier_ones_said_of_its_cases() -> None:
    """What it did not judge keeps the commit at which it passed; what it judged and did not pass has none."""
    old = Evidence((passed("old"),))
    run = {"commit": "new", "fingerprints": {BWD: ["hopper_backward[b]", "new"]}, "accuracy": []}
    runs = old.after(run, {BWD}, PLANS)
    assert [(r["commit"], list(r["fingerprints"])) for r in runs] == [("old", [FWD]), ("new", [BWD])]
    assert runs[0]["accuracy"] == [{"workload": ROW, "commit": "old"}]
    again = {**passed("last"), "fingerprints": {FWD: ["hopper_forward[a]", "new"]}}
    runs = Evidence(runs).after(again, {FWD}, PLANS)
    assert [r["commit"] for r in runs] == ["new", "last"], "nothing is left of the oldest"
    assert [r["commit"] for r in Evidence(runs).after(again, {FWD}, {FWD})] == ["last"], (
        "nor of cases there are no more"
    )


def test_only_what_was_judged_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that needs a GPU is given: the tests are those of the kernel that changed."""
    folder, asked, against = tmp_path / "h200", [], ["hopper_backward"]
    folder.mkdir()
    (folder / "evidence.json").write_text(json.dumps({"runs": [passed("old")]}))

    def run_tests(root, limit_s, names, tell, passed):
        asked.append(names)
        return outcome(*against, failed=len(against)) | {"modules": {}}

    now = today(bwd="new")
    monkeypatch.setattr(verify, "fingerprints", lambda device, deadline, tell, of=None: now)
    monkeypatch.setattr(verify, "run_tests", run_tests)
    monkeypatch.setattr(verify, "cases", lambda: [(name.split()[0], name.partition(" ")[2]) for name in PLANS])
    monkeypatch.setattr(wanted, "cases_of", lambda names, device: [])
    monkeypatch.setattr(verify.Device, "of", lambda device: None)
    monkeypatch.setattr(verify.check, "run", lambda *_, **rest: [])
    monkeypatch.setattr(verify, "environment", lambda device: {"device": "h200", "commit": "new"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    for left in ({FWD: "old"}, {FWD: "old", BWD: "new"}):
        verify.verify(tmp_path, tmp_path, torch.device("cuda"), lambda text: None)
        found = json.loads((folder / "evidence.json").read_text())["runs"]
        assert {name: run["commit"] for run in found for name in run["fingerprints"]} == left
        against.clear()
    assert asked == [("hopper_backward",)] * 2
    assert verify.verify(tmp_path, tmp_path, torch.device("cuda"), lambda text: None) == {}, "all passed"


def collected(tmp_path: Path, *kernels: str) -> list[dict[str, set[str]]]:
    """For each `--kernels` the tests of `pytest -m gpu`, and what each judges; modules that need a GPU to be imported
    are left out."""
    root, paths = checkout(), [tmp_path / f"planned{i}.json" for i in range(len(kernels))]
    if root is None:
        pytest.skip("tests lie in a checkout")
    common = ["-m", "gpu and not slow", "--collect-only", "-q", "tests/gpu"]
    runs = [[*common, f"--kernels={names}", f"--planned={path}"] for names, path in zip(kernels, paths, strict=True)]
    code = f"import pytest, sys; sys.exit(max(map(pytest.main, {runs})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = []
    for path in paths:
        every = {name.removeprefix("tests.gpu."): about for name, about in json.loads(path.read_text()).items()}
        found.append({name: set(wanted.KERNELS if about is None else about.split()) for name, about in every.items()})
    return found


def test_every_kernel_has_tests_of_its_own_and_none_of_another(tmp_path: Path) -> None:
    """A parameter `dtype` or `kernel` tells that a test cannot judge a kernel which does not take it."""
    every, chosen = collected(tmp_path, "", "hopper_backward")
    by = {kernel: {name for name, about in every.items() if kernel in about} for kernel in wanted.KERNELS}
    assert set(chosen) == by["hopper_backward"]
    for kernel in ("triton_backward", "hopper_backward", "fp32_backward"):
        assert {"test_gpu_random", "test_gpu_packed", "test_gpu"} <= {name.split("::")[0] for name in by[kernel]}
    assert any("test_gpu_hopper_backward" in name for name in by["hopper_backward"] - by["triton_backward"])
    assert not any("torch.float16" in name for name in by["fp32_backward"])
    assert not any("torch.float32" in name for name in by["hopper_backward"])
    assert not any("auto" in name for name in by["triton_backward"] if name.startswith("test_gpu::"))
    assert not any("test_gpu_rungs" in name for tests in by.values() for name in tests), (
        "they have evidence of their own"
    )
