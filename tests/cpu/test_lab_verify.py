"""Evidence: what is counted of a test run, and what a run that did not happen counts as."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from sartor.lab.evidence import verify
from sartor.lab.measure import check
from sartor.lab.measure.fingerprint import Found
from sartor.lab.show import tables
from sartor.lab.workloads.workload import Workload

JUNIT = """<testsuites><testsuite>
<testcase classname="a" name="ok"/><testcase classname="a" name="no"><failure/></testcase>
<testcase classname="a" name="bad"><error/></testcase><testcase classname="a" name="not"><skipped/></testcase>
</testsuite></testsuites>"""


def test_counts_of_a_test_run() -> None:
    found = verify.counts(ET.fromstring(JUNIT))
    assert found == {"passed": 1, "failed": 2, "skipped": 1, "failures": ["a::no", "a::bad"]}


def test_a_run_without_tests_is_a_failure() -> None:
    skipped = "<testsuites><testcase classname='a' name='not'><skipped/></testcase></testsuites>"
    for xml in ("<testsuites/>", skipped):
        found = verify.counts(ET.fromstring(xml))
        assert (found["passed"], found["failed"], found["failures"]) == (0, 1, ["no test ran"])


def test_nothing_is_written_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="verify needs an NVIDIA GPU"):
        verify.verify(tmp_path, tmp_path / "results", torch.device("cpu"), print)
    assert not list(tmp_path.iterdir())


def test_tests_are_run_and_counted(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_passes(): pass\ndef test_fails(): assert False\n")
    found = verify.run_tests(tmp_path, 60, print, marker="not gpu")
    assert (found["passed"], found["failed"]) == (1, 1)


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_check_judges_a_kernel_by_name(mode: str) -> None:
    row = check.judge(Workload(1, 2, 1, 40, 40, 24, 24, "float32", "causal", mode), torch.device("cpu"), "reference")
    assert row.ok
    assert row.plan.startswith("reference")
    assert tables.checks([row]).rows[0][-1] == "ok"


def outcome(*failures: str, passed: int = 700) -> dict:
    return {"passed": passed, "failed": len(failures), "skipped": 0, "failures": list(failures)}


def test_failures_speak_against_the_kernels_they_are_about():
    everything = set(verify.sound(outcome(), []))
    assert {"triton_forward", "fp32_forward", "hopper_forward"} <= everything
    assert verify.sound(outcome("tests.gpu.test_gpu::test_dims[8]"), []) == []
    assert set(verify.sound(outcome("tests.gpu.test_gpu_rungs::test_budget[09]"), [])) == everything
    left = verify.sound(outcome("tests.gpu.test_gpu_fp32::test_errors"), [])
    assert set(left) == {name for name in everything if "fp32" not in name}
    assert verify.sound(outcome("not done after 390 s"), []) == []


def test_no_kernel_is_sound_by_tests_that_did_not_run():
    assert verify.sound(outcome(passed=0), []) == []
    assert verify.sound(outcome(*["tests.gpu.test_gpu_rungs::test_budget[09]"] * verify.STOP_AT), []) == []


def test_a_plan_is_sound_if_all_its_kernels_are():
    sound = ["hopper_forward", "triton_backward"]
    for plan, ok in (("hopper_forward[128x128 w12 s6]", True), ("hopper_fp32[64x64 w8 s4]", False),
                     ("hopper_forward[64x64 w8 s2]; triton_backward[64x64 w4 s2, 64x64 w4 s2]", True),
                     ("hopper_forward[64x64 w8 s2]; hopper_backward[64x64 w8 s2]", False)):  # fmt: skip
        assert verify.of_sound(Found(plan, "abc"), sound) == ok
