"""The command line: friendly errors, pure explanations, an ad-hoc bench from end to end."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import sartor
from sartor import cache, nvrtc
from sartor.device import ARCHITECTURES
from sartor.kernels.spec import Plan
from sartor.kernels.triton import launch
from sartor.lab.cli import flags, ladder
from sartor.lab.cli.app import app
from sartor.lab.cli.flags import results_folder
from sartor.lab.evidence import refresh
from sartor.lab.ladder import catalogue
from sartor.lab.measure import adhoc, check, doctor, profile, records, roofline
from sartor.lab.measure.adhoc import number, pair
from sartor.lab.measure.bench import Session
from sartor.lab.measure.records import Record
from sartor.lab.show import rungs, views
from sartor.lab.show.table import Table
from sartor.lab.workloads.workload import Workload, dtype_name
from sartor.tuning import table

CPU = torch.device("cpu")


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
        (("bench", "--dim", "16", "--turn-ms", "nan"), "turn_ms must be a finite number, 0 or more, got nan"),
        (("bench", "--dim", "16", "--turn-ms", "-1"), "turn_ms must be a finite number, 0 or more, got -1"),
        (("bench", "--dim", "16", "--lead-ms", "-1"), "lead_ms must be a finite number, 0 or more, got -1"),
        (("bench", "--dim", "16", "--max-seconds", "-1"), "--max-seconds must be a positive number of seconds, got -1"),
        (("bench", "--dim", "16", "--max-seconds", "nan"), "must be a positive number of seconds, got nan"),
        (("verify", "--limit", "nan"), "--limit must be a positive number of seconds, got nan"),
        (("cache", "--most-mib", "nan"), "--most-mib must be a finite number, 0 or more, got nan"),
        (("cache", "--most-mib", "inf"), "--most-mib must be a finite number, 0 or more, got inf"),
        (("cache", "--most-mib", "-1"), "--most-mib must be a finite number, 0 or more, got -1"),
        (("explain", "--batch", "1" * 30), "tensors of less than 2^62 bytes, got fwd bfloat16 B111"),
        (("explain", "--seqlen", "9" * 20), "tensors of less than 2^62 bytes, got fwd bfloat16 B1 H16 N999"),
        (("explain", "--seqlen", "4294967296", "--mask", "bias"), "tensors of less than 2^62 bytes, got fwd"),
        (("explain", "--seqlen", "²"), "got '²'"),
        (("explain", "--device", "sm²"), "got 'sm²'"),
        (("explain", "--batch", "-1"), "batch must be a positive number, got -1"),
        (("ladder", "run", "1", "--n", "0"), "seqlen_q must be a positive number, got 0"),
        (("ladder", "show", "1", "--sass", "--arch", "5"), "rung 01 for sm_5: needs sm_"),
        (("ladder", "show", "4", "--sass", "--dim", "3"), "takes head dims 32, 64"),
        (("bench", "--mask", "full", "--causal", "yes"), "--causal is short for --mask"),
        (("bench", "--quick", "--modes", "fwd_bwd"), "got 'fwd_bwd'"),
        (("bench", "--dim", "16", "--providers", "sartor:foo"), "got 'sartor:foo'"),
        (("explain", "--seqlen", "64/256", "--mask", "document5"), "got 64 and 256"),
        (("refresh", "--list", "--device", "cpu"), "got 'cpu'"),
        (("refresh", "--list", "--device", "../.."), "must be a GPU's folder of results, h200, got '../..'"),
        (("refresh", "--list", "--device", "h200", "--limit", "nan"), "--limit must be a positive number of seconds"),
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


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--only", "verify", "--only", "foo"), "paper, paper:bwd, paper:fwd, profile, small, "),
        (("--only", "paper:up"), "got 'paper:up'"),
        (("--rounds", "-1"), "rounds must be a positive number, got -1"),
    ],
)
def test_refresh_refuses_before_it_compiles(args: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh, "present", lambda tell: pytest.fail("compiled what was not asked for"))
    assert words in invoke("refresh", "--list", "--device", "h200", *args, code=2)


def test_check_fails_where_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Workload(1, 1, 1, 8, 8, 16, 16, "float32", "full")
    monkeypatch.setattr(check, "cases", lambda device: [("sartor", w)])
    said = "no error was measured: none of the problems runs here by kernel 'hopper'"
    assert said in invoke("check", "--device", "cpu", "--kernel", "hopper", code=1)
    assert "no error was measured" not in invoke("check", "--device", "cpu")


def test_profile_without_counters_sends_only_to_what_explain_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to the tiles of PyTorch's kernels."""
    monkeypatch.setattr(profile, "missing", lambda: "none here")
    assert "of sdpa-flash nothing\n" in invoke("profile", "sdpa-flash")
    said = "of sdpa-flash, sartor:hopper nothing; `sartor explain --device sm90` tells the tiles of sartor:hopper\n"
    assert said in invoke("profile", "sdpa-flash", "hopper")


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


def test_explain_ends_with_1_where_nothing_would_run() -> None:
    output = invoke("explain", "--device", "cpu", "--kernel", "hopper", code=1)
    assert "needs an NVIDIA GPU of compute capability 9.0, this is a CPU" in output


@pytest.mark.parametrize("short", ["bf16", "fp16", "fp32"])
def test_dtypes_have_short_names(short: str) -> None:
    """Wherever one is given, and no others."""
    assert f"{dtype_name(short)} on cpu" in invoke("explain", "--device", "cpu", "--dtype", short)
    assert adhoc.suite("", False, CPU, 0, {"dtype": short}).cases[0][0].dtype == dtype_name(short)
    rung = catalogue.find("13")
    assert catalogue.workload(rung, (1, 1, 64), 0, short).dtype == dtype_name(short)
    assert "needs an NVIDIA GPU" in invoke("tune", "--dtypes", short, code=2)


@pytest.mark.skipif(not launch.available(), reason="compiles what Triton would launch")
def test_explain_lists_the_launches() -> None:
    flags = ("--device", "sm80", "--kernel", "triton", "--seqlen", "256", "--dim", "32", "--dtype", "fp16")
    output = invoke("explain", *flags, "--launches")
    rows = [line.split() for line in output.splitlines() if line.strip().startswith(("fwd", "bwd"))]
    assert [row[:2] for row in rows] == [["fwd", "forward"], ["bwd", "preprocess"], ["bwd", "dkdv"], ["bwd", "dq"]]
    assert all(row[2:7:2][0].isdigit() and int(row[7]) % 32 == 0 for row in rows)
    assert "launches: none" in invoke("explain", "--device", "cpu", "--launches")


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
    assert re.search(r"^spent: ceilings [\d.]+ s, .*timing [\d.]+ s", output, re.MULTILINE)
    assert len((tmp_path / "cpu" / "adhoc.jsonl").read_text().splitlines()) == 2 + 12 * 2
    drawn = invoke("plot", "adhoc", "--out", str(tmp_path)).split()
    assert str(tmp_path / "cpu" / "adhoc-rates.png") in drawn
    assert all(Path(file).is_file() for file in drawn)


AD_HOC = ("bench", "--dim", "16", "--seqlen", "64", "--heads", "2", "--batch", "1", "--causal", "both", "--rounds", "1",
          "--device", "cpu", "--providers", "sartor,sdpa")  # fmt: skip


def interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the second workload."""
    measured, calls = Session.measure_one, []

    def measure_one(*args: Any) -> list[Record]:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measured(*args)

    monkeypatch.setattr(Session, "measure_one", measure_one)


def test_ctrl_c_keeps_what_was_measured_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch)
    output = invoke(*AD_HOC, "--out", str(tmp_path), code=130)
    assert "interrupted: 1 of 2 workloads are measured" in output
    file = tmp_path / "cpu" / "adhoc.jsonl"
    assert f"wrote {file}, {file.with_suffix('.csv')}" in output
    assert [r.mask for r in records.read(file) if r.ms] == ["full", "full"]


def test_ctrl_c_leaves_the_committed_records_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a part would stand for those of the whole."""
    committed, out = tmp_path / "committed", tmp_path / "out"
    monkeypatch.setattr(flags, "results_folder", lambda: committed)
    invoke(*AD_HOC, "--record", "--no-plot")
    before = (committed / "cpu" / "adhoc.jsonl").read_text()
    interrupt(monkeypatch)
    assert str(out / "cpu" / "adhoc.jsonl") in invoke(*AD_HOC, "--record", "--out", str(out), code=130)
    assert (committed / "cpu" / "adhoc.jsonl").read_text() == before
    assert [r.mask for r in records.read(out / "cpu" / "adhoc.jsonl") if r.ms] == ["full", "full"]


def test_ctrl_c_elsewhere_has_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", examine)
    assert "interrupted" in invoke("doctor", code=130)


@pytest.mark.parametrize(
    "command",
    [AD_HOC, ("plot", "adhoc"), ("profile", "4"), ("tune",), ("ladder", "--device", "cuda")],
    ids=lambda command: command[0],
)
def test_a_folder_that_cannot_be_written_is_named_with_its_flag(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(records, "newest", lambda results, *rest: results / "cpu" / "adhoc.jsonl")
    if command[0] == "ladder":
        monkeypatch.setattr(ladder, "device_of", lambda name: torch.device("cuda"))
        monkeypatch.setattr(records, "environment", lambda device: {"device": "cuda"})
    end = "/sm.jsonl" if command[0] == "tune" else ""
    output = invoke(*command, "--out", f"{tmp_path}/file/x{end}", code=2)
    assert output.startswith("error: --out must be a folder that can be written, got")
    assert "Not a directory" in output


def test_doctor_prints_brackets_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = "pip install 'sartor[gpu]' \"cuda-core[cu13]\", " + "and a word " * 20
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("NVRTC", advice, False)])
    assert invoke("doctor", code=1) == f"no NVRTC: {advice}\n"


def test_the_ladder_says_once_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **rest: Any) -> Any:
        raise nvrtc.CompileError("needs NVRTC, which is not here")

    monkeypatch.setattr(nvrtc, "compile", refuse)
    made = rungs.resources(tuple(r for r in catalogue.load() if r.is_cuda))
    assert made.rows == []
    numbers = ", ".join(r.number for r in catalogue.load() if r.is_cuda)
    assert made.notes == [f"rung {numbers}: needs NVRTC, which is not here"]


@pytest.mark.parametrize("wide", [False, True])
def test_a_log_has_no_width(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences and rows stay whole there, whatever COLUMNS says; titles and notes do beside a narrow table."""
    monkeypatch.setenv("COLUMNS", "60")
    made = Table("a title " * 30, ["x" * 40] * 5 if wide else ["x"], [], ["a note " * 40])
    with (console := views.console()).capture() as said:
        console.print(made.rich())
    lines = [line.strip() for line in said.get().splitlines() if line.strip()]
    assert lines[0] == made.title.strip()
    assert lines[-1] == made.notes[0].strip()
    assert lines[1].split() == made.headers


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
