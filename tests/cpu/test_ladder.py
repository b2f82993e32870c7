"""The ladder without a GPU: headers, launch expressions, what the commands show, what records become."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sartor import testing
from sartor.device import ARCHITECTURES, CPU
from sartor.kernels.triton import launch
from sartor.lab.cli.app import app
from sartor.lab.ladder import catalogue as ladder
from sartor.lab.ladder import header, rung
from sartor.lab.measure import profile
from sartor.lab.measure.records import CEILINGS, Record, Run
from sartor.lab.show import climb, report, views
from sartor.lab.workloads import suites
from sartor.lab.workloads.workload import Workload

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
RUNGS = ladder.load()
CUDA = [r for r in RUNGS if r.is_cuda]
SMALL = Workload(2, 3, 3, 100, 100, 64, 64, "float32")


def by_number(r: rung.Rung) -> str:
    return r.number


def invoke(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


# ---- headers


@pytest.mark.parametrize("r", RUNGS, ids=by_number)
def test_header(r: rung.Rung) -> None:
    numbers = [other.number for other in RUNGS]
    assert numbers.count(r.number) == 1
    assert r.before in ("", *numbers)
    assert r.before < r.number
    assert set(r.dtypes) <= {"float32", "float16", "bfloat16"}
    assert set(r.dims) <= {32, 64, 128}
    assert all((r.title, r.idea, r.source, r.claim, r.expect))
    assert "rung" not in r.code.splitlines()[0]
    assert len(r.source_hash()) == 16


@pytest.mark.parametrize("r", CUDA, ids=by_number)
@pytest.mark.parametrize("n", [1, 63, 4096])
def test_launch_is_legal(r: rung.Rung, n: int) -> None:
    for dim in r.dims:
        size = r.geometry(Workload(2, 3, 3, n, n, dim, dim, r.dtypes[0]))
        assert 32 <= size["block"][0] <= 1024
        assert size["block"][0] % 32 == 0
        assert 1 <= len(size["grid"]) <= 3
        assert min(size["grid"]) >= 1
        assert 0 <= size["shared"][0] <= ARCHITECTURES[90].smem_bytes
        assert size["workspace"][0] >= 0


def test_every_rung_is_measured_by_the_suite() -> None:
    for name in ("ladder", "ladder-quick"):
        measured = {p for _, who in suites.load(name).cases for p in who}
        assert {r.provider for r in RUNGS} <= measured


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[cdiv(N, BM), BH]", [3, 6]),
        ("4 * (D + 1) * 2", [520]),
        (7, [7]),
        ("max(N, D) // 3 % 10", [3]),
        ("N - 1", [99]),
    ],
)
def test_expressions(text: str, values: list[int]) -> None:
    assert header.evaluate(text, {"N": 100, "BM": 40, "BH": 6, "D": 64}) == values


@pytest.mark.parametrize(
    "text", ["__import__('os')", "N.real", "[1, [2]]", "N ** 9", "1.5", "N if N else 1", "x", "cdiv(1, b=2)", "N +"]
)
def test_expressions_are_arithmetic_and_nothing_else(text: str) -> None:
    with pytest.raises(ValueError, match="an expression must be"):
        header.evaluate(text, {"N": 100})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int x;", "must begin with a rung header"),
        ("/* rung\nnumber = \n*/\n", "must be TOML"),
        ('/* rung\nnumber = "99"\nspeed = 1\n*/\n', "lacks.*title.*unknown keys.*speed"),
    ],
)
def test_a_wrong_header_is_named(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "99_x.cu"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"99_x.cu.*{words}"):
        rung.parse(file)


def test_a_rung_says_why_it_cannot_run() -> None:
    r = replace(CUDA[0], arch=80, dtypes=["float32"], dims=[64], causal=False)
    assert r.why_not(SMALL, CPU) == "needs an NVIDIA GPU"
    old = replace(ARCHITECTURES[80], arch=75)
    assert "needs compute capability >= 8.0" in r.why_not(SMALL, old)
    for change, words in (({"dtype": "float16"}, "got float16"), ({"dim": 32, "dim_v": 32}, "got 32"),
                          ({"mask": "causal"}, "got causal"), ({"heads_kv": 1}, "one shape")):  # fmt: skip
        assert words in r.why_not(replace(SMALL, **change), ARCHITECTURES[90])


# ---- commands


def test_list_names_every_rung() -> None:
    words = invoke("ladder", "list").split()
    assert all(r.number in words for r in RUNGS)


def test_diff_shows_the_lesson_without_headers() -> None:
    text = invoke("ladder", "diff", "14", "15")
    assert "+" in text
    assert "tiles" in text
    assert "claim" not in text
    assert "got '99'" in invoke("ladder", "diff", "4", "99", code=2)


def test_show_and_run_and_profile_without_a_gpu() -> None:
    assert "Expected:" in invoke("ladder", "show", "13")
    if not torch.cuda.is_available():
        assert "needs an NVIDIA GPU" in invoke("ladder", "run", "4", "--n", "100", "--device", "cpu", code=2)
        assert "No counters" in invoke("profile", "13")
        assert "got '99'" in invoke("profile", "99", code=2)


@pytest.mark.skipif(not launch.available(), reason="needs Triton")
def test_ladder_without_a_gpu_compiles_what_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "load", lambda: tuple(r for r in RUNGS if r.number in ("04", "08", "13")))
    text = invoke("ladder", "--device", "cpu")
    assert "not run" in text
    assert "FFMA" in text
    assert text.count("08") >= 3


# ---- records


def record(provider: str, ms: float, **changes: object) -> Record:
    run = Run("r1", "ladder", {"device": "h200", "torch": "2"})
    found = Record.of(run, provider, Workload(8, 12, 12, 4096, 4096, 64, 64, "float32"))
    values = {"ms": ms, "tflops": 412.3 / ms, "time": "2026-01-01", "err_max": 1e-7, "err_budget": 2e-7}
    for key, value in (values | changes).items():
        setattr(found, key, value)
    return found


def some() -> list[Record]:
    rungs = [record("sdpa-efficient", 12.0), record("rung:04", 20.0), record("rung:05", 10.0)]
    other = [record(p, 3.0, seqlen_q=1024, seqlen_kv=1024) for p in ("sdpa-efficient", "rung:05")]
    peak = record("ceiling-matmul", 1.0, mode=CEILINGS, dtype=climb.PLAIN, tflops=50.0)
    return [peak, *rungs, *other]


def test_climb_holds_a_rung_against_sdpa_the_ceiling_and_the_rung_before() -> None:
    (table,) = climb.tables(some())
    rows = {row[0].split()[0]: dict(zip(table.headers, row, strict=True)) for row in table.rows}
    assert rows["05"]["of SDPA"] == "120 %"
    assert rows["05"]["vs the rung before"] == "2.00x"
    assert rows["05"]["of the ceiling"] == "82.5 %"
    assert rows["04"]["vs the rung before"] == "-"
    assert climb.sweep("fp32-lengths", some()).rows[0] == ["1024", "3.00 / 137", "3.00 / 137 (100 %)", "-"][:3]


def test_report_writes_the_views_of_the_ladder(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "ladder.jsonl").write_text("".join(r.to_json() + "\n" for r in some()))
    counted = replace(record("rung:05", 10.0), suite="profile", counters={"dram_read_bytes": 2e9, "stall_wait": 3.0})
    (tmp_path / "h200" / "profile.jsonl").write_text(counted.to_json() + "\n")
    assert "rung" in report.render("h200/ladder/climb", tmp_path)
    text = report.render("h200/ladder/05", tmp_path)
    assert "vs rung 04" in text
    assert "wait 3.00" in text
    with pytest.raises(ValueError, match="rung must be one of"):
        report.render("h200/ladder/nonsense", tmp_path)


def test_plots_of_the_ladder(tmp_path: Path) -> None:
    files = views.drawn(some(), tmp_path, ("climb",))
    assert [f.name for f in files] == ["ladder-climb.png"]  # of two lengths there is no curve


def test_profile_adds_up_the_kernels_of_a_call() -> None:
    names = ["ID", "Kernel Name", *profile.ALL.values()]
    blank = [""] * (len(names) - 6)
    first, second = ["0", "0/rung", "1,000", "5", "7", "50.5", *blank], ["1", "0/rung", "3000", "6", "8", "90", *blank]
    rows = [names, [""] * len(names), first, second]
    found = profile.parse([",".join(f'"{cell}"' for cell in row) for row in rows])
    assert found["0"] == {"ns": 4000.0, "dram_read_bytes": 11.0, "dram_write_bytes": 15.0, "l2_hit_pct": 90.0}


def test_profile_keeps_the_newest_of_each(tmp_path: Path) -> None:
    run = Run.start(profile.SUITE, torch.device("cpu"))
    for ms in (1.0, 2.0):
        path = profile.save([record("rung:04", ms), record("rung:05", ms)], tmp_path, run, replace=True)
    assert [json.loads(line)["ms"] for line in path.read_text().splitlines()] == [2.0, 2.0]


# ---- the Triton rungs in Triton's interpreter


@pytest.mark.skipif(INSIDE, reason="runs the cases in another process")
@pytest.mark.skipif(not launch.available(), reason="needs Triton")
def test_triton_rungs_in_the_interpreter() -> None:
    names = [f"{__file__}::{n}" for n in globals() if n.startswith("case_")]
    flags = ["-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "-o", "python_functions=case_*"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *names], env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize("number", ["13", "14", "15"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [64, 150])
def case_triton_rung(number: str, causal: bool, n: int) -> None:
    module = rung.module(ladder.find(number).path)
    if hasattr(module, "CONFIGS"):  # nothing is timed on a CPU: one tile is left to choose from
        module.attend.configs = module.CONFIGS[-1:]
    q, k, v = testing.make_inputs(2, 3, 3, n, n, 32, dtype=torch.float16)
    out = module.run(q, k, v, causal, 32**-0.5)
    testing.check_all({"out": out}, q, k, v, layout="bhsd", causal=causal)


def test_a_target_nobody_knows_is_refused():
    assert [profile.provider(t) for t in ("4", "hopper", "sdpa-flash")] == ["rung:04", "sartor:hopper", "sdpa-flash"]
    with pytest.raises(ValueError, match="'nonsense'"):
        profile.provider("nonsense")
