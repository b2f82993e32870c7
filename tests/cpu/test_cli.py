"""The command line: friendly errors, pure explanations, an ad-hoc bench from end to end."""

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import sartor
from sartor import cache, nvrtc
from sartor.device import ARCHITECTURES
from sartor.kernels.spec import Plan
from sartor.lab.cli.app import app
from sartor.lab.cli.flags import results_folder
from sartor.lab.measure import roofline
from sartor.lab.measure.adhoc import number, pair
from sartor.lab.workloads.workload import Workload
from sartor.tuning import table


def invoke(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_version() -> None:
    assert invoke("--version").strip() == f"sartor {sartor.__version__}"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("bench", "--suite", "nope"), "got 'nope'"),
        (("bench",), "--suite NAME"),
        (("bench", "--dim", "64x"), "got '64x'"),
        (("bench", "--dim", "64", "--providers", "magic"), "got 'magic'"),
        (("bench", "--dim", "64", "--modes", "up"), "got 'up'"),
        (("bench", "--dim", "64", "--mask", "holes"), "got 'holes'"),
        (("bench", "--quick", "--device", "tpu"), "got 'tpu'"),
        (("bench", "--quick", "--device", "cpu:x"), "got 'cpu:x'"),
        (("check", "--device", "cuda:99"), "--device cuda:99: torch sees"),
        (("bench", "--batch", "-1"), "batch must be a positive number, got -1"),
        (("bench", "--suite", "paper", "--batch", "-1"), "--suite NAME"),
        (("bench", "--dim", "16", "--rounds", "-1"), "rounds must be a positive number, got -1"),
        (("bench", "--dim", "16", "--dtype", "int8"), "got 'int8'"),
        (("bench", "--dim", "16", "--mask", "window0"), "got 'window0'"),
        (("explain", "--batch", "1" * 30), "Overflow"),
        (("explain", "--seqlen", "²"), "got '²'"),
        (("explain", "--device", "sm²"), "got 'sm²'"),
        (("explain", "--batch", "-1"), "batch must be a positive number, got -1"),
        (("ladder", "run", "1", "--n", "0"), "seqlen_q must be a positive number, got 0"),
        (("ladder", "show", "1", "--sass", "--arch", "5"), "rung 01 for sm_5: needs sm_"),
        (("ladder", "show", "4", "--sass", "--dim", "3"), "takes head dims 32, 64"),
        (("bench", "--mask", "full", "--causal", "yes"), "--causal is short for --mask"),
        (("bench", "--quick", "--modes", "decode"), "got 'decode'"),
        (("bench", "--dim", "16", "--providers", "sartor:foo"), "got 'sartor:foo'"),
        (("explain", "--seqlen", "64/256", "--mask", "document5"), "got 64 and 256"),
        (("refresh", "--list", "--device", "cpu"), "got 'cpu'"),
        (("plot", "gqa", "--record"), "suite gqa asks for no plot"),
        (("ladder", "show", "16", "--sass", "--arch", "95"), "got 95"),
        (("report", "nowhere.md"), "nowhere.md"),
        (("tune", "--dims", "a"), "--dims must be a positive number"),
        (("tune", "--dtypes", "int8"), "got 'int8'"),
        (("tune", "--kernels", "eager"), "got 'eager'"),
        (("verify", "--device", "cpu"), "needs an NVIDIA GPU"),
        (("explain", "--dtype", "float7"), "got 'float7'"),
        (("explain", "--device", "sm33"), "got 'sm33'"),
        (("explain", "--heads", "8/3"), "multiple"),
        (("plot", "paper", "--out", "nowhere"), "no record"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(args: tuple[str, ...], words: str) -> None:
    output = invoke(*args, code=2)
    assert words in output
    assert output.startswith("error: ")
    assert output.count("\n") == 1


def test_cache_is_shown_bounded_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARTOR_CACHE", str(tmp_path / "kernels"))
    assert "0 files, 0.0 MiB of at most 1024" in invoke("cache")
    for name in "ab":
        cache.write(name * 64, b"x" * 2**20)
    assert "2 files, 2.0 MiB" in invoke("cache")
    assert "removed 1 files" in invoke("cache", "--most-mib", "1.5")
    (tmp_path / "kernels").chmod(0o777)
    assert "is ignored: expected that only its owner may write it" in invoke("cache")
    assert "0 files" in invoke("cache", "--clear")


def test_explain_plans_for_an_architecture_that_is_not_here() -> None:
    output = invoke("explain", "--device", "sm90", "--seqlen", "4k", "--dim", "128", "--mask", "causal")
    assert "H200" in output
    assert "forward:" in output
    assert "the ceilings allow" in output
    assert ("predicted" in output) == ("hopper_forward[" in output)


def test_explain_predicts_what_a_tuned_tile_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its FLOPs at the rate of the row; nothing where the row is another mask's; the ceilings of the records."""
    monkeypatch.setattr(nvrtc, "missing", lambda: "")
    monkeypatch.setattr(Plan, "registers", 168)
    flags = ("--device", "sm90", "--batch", "4", "--seqlen", "4k", "--dim", "128")
    w = Workload(4, 16, 16, 4096, 4096, 128, 128, "bfloat16", "full")
    row = next(r for r in table.rows(90)["hopper_forward", 16, 128, 128, "full"] if r.keys == math.inf)
    output = invoke("explain", *flags)
    assert "168 registers a thread" in output
    reached = w.flops / row.tflops * 1e-9
    assert f"predicted {reached:.3g} ms" in output
    assert f"the ceilings allow {min(reached, roofline.recorded(ARCHITECTURES[90]).ms(w)):.3g} ms" in output
    assert "predicted" not in invoke("explain", *flags, "--mask", "document8")
    assert "predicted" not in invoke("explain", *flags, "--kernel", "triton")


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (("--heads", "32/8", "--seqlen", "1/8k"), False),  # fewer tiles than SMs
        (("--heads", "16", "--batch", "64", "--seqlen", "1/8k"), False),  # enough, but of one row each: bound by bytes
        (("--heads", "16", "--seqlen", "16k", "--dim", "192"), True),  # a rate above the matrix product's
    ],
)
def test_explain_never_predicts_less_than_the_ceilings_allow(
    monkeypatch: pytest.MonkeyPatch, problem: tuple[str, ...], told: bool
) -> None:
    monkeypatch.setattr(nvrtc, "missing", lambda: "")
    monkeypatch.setattr(Plan, "registers", 168)
    output = invoke("explain", "--device", "sm90", *problem)
    floor = float(re.findall(r"the ceilings allow (\S+) ms", output)[0])
    predicted = [float(ms) for ms in re.findall(r"predicted (\S+) ms", output)]
    assert len(predicted) == told
    assert all(ms >= floor for ms in predicted)


@pytest.mark.parametrize("device", [("--device", "cpu"), ()])
def test_explain_on_a_cpu_says_what_a_call_there_runs(device: tuple[str, ...]) -> None:
    if not device and torch.cuda.is_available():
        pytest.skip("plans for the GPU that is here")
    output = invoke("explain", *device, "--dtype", "float32", "--seqlen", "64", "--dim", "16", "--mask", "causal")
    q = torch.empty(1, 64, 16, 16)
    assert f"forward:  {sartor.explain(q, q, q, causal=True).plan}" in output
    assert "forward:  torch_cpu" in output
    assert "on cpu; causal" in output


def test_bench_lists_its_suites() -> None:
    assert "paper" in invoke("bench", "--list")


def test_bench_writes_records_and_prints_the_command_again(tmp_path: Path) -> None:
    flags = [
        "--dim",
        "16,24",
        "--seqlen",
        "16,32,64",
        "--heads",
        "2",
        "--batch",
        "1",
        "--causal",
        "both",
        "--rounds",
        "1",
    ]
    output = invoke("bench", *flags, "--device", "cpu", "--providers", "sartor,sdpa", "--out", str(tmp_path))
    assert "vs PyTorch" in output
    assert len((tmp_path / "cpu" / "adhoc.jsonl").read_text().splitlines()) == 2 + 12 * 2
    drawn = invoke("plot", "adhoc", "--out", str(tmp_path)).split()
    assert str(tmp_path / "cpu" / "adhoc-rates.png") in drawn
    assert all(Path(file).is_file() for file in drawn)


def test_plot_draws_the_newest_records_of_a_suite(tmp_path: Path) -> None:
    """Wherever they were measured."""
    (tmp_path / "h200").mkdir()
    shutil.copy(results_folder() / "h200" / "head-dims.jsonl", tmp_path / "h200")
    found = invoke("plot", "head-dims", "--out", str(tmp_path)).split()
    assert found == [str(tmp_path / "h200" / "head-dims-tflops.png")]
    assert Path(found[0]).is_file()


@pytest.mark.parametrize(("text", "value"), [("512", 512), ("1k", 1024), ("16K", 16384)])
def test_numbers_may_be_in_k(text: str, value: int) -> None:
    assert number(text, "seqlen") == value
    assert pair(f"{text}/7", "dim") == (value, 7)
