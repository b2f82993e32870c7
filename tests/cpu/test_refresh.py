"""Refresh: which records are older than their sources, and what is run to measure them again."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sartor import kernels
from sartor.cli import app
from sartor.lab import refresh, suites
from sartor.lab.records import Record
from sartor.lab.refresh import Stage
from sartor.lab.report import GPU_KERNELS
from sartor.lab.workloads import Workload

NAMES = [name for name in (*kernels.FORWARD, *kernels.BACKWARD) if name.startswith(GPU_KERNELS)]
ENVIRONMENT = {"device": "h200", "driver": "", "cuda": "", "torch": "", "triton": "", "commit": "", "dirty": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a device on which every kernel was verified, and one suite measured: one second for each of its workloads."""
    hashes = {name: kernels.source_hash(name) for name in NAMES}
    (tmp_path / "evidence.json").write_text(json.dumps({"kernels": hashes, "seconds": 300.0}))
    write(tmp_path, suites.load("turns").cases)
    return tmp_path


def write(folder: Path, cases, **changed) -> None:
    plan = {"plan": "hopper_forward[128x128 w12 s6]", "kernel_hash": kernels.source_hash("hopper_forward"), **changed}
    lines = []
    for i, (w, who) in enumerate(cases):
        for name in who:
            r = Record("a", "turns", name, **asdict(w), **ENVIRONMENT, time=f"2026-01-01T00:00:{i:02d}Z")
            lines.append(replace(r, **(plan if name == "sartor" else {})).to_json() + "\n")
    (folder / "turns.jsonl").write_text("".join(lines))


def commands(folder: Path) -> dict[str, float]:
    return {str(stage): stage.seconds for stage in refresh.stages(folder, rounds=3)}


TURNS = "sartor bench --suite turns --modes fwd --rounds 3 --record"


def test_what_was_never_measured_is_named(folder: Path) -> None:
    found = commands(folder)
    assert TURNS not in found
    assert "sartor verify" not in found
    assert found["sartor bench --suite paper --modes bwd --rounds 3 --record"] == refresh.UNKNOWN_S
    assert "sartor ladder --rounds 3 --record" in found
    assert not any("quick" in command for command in found)


def test_other_sources_and_missing_workloads_are_stale(folder: Path) -> None:
    cases = suites.load("turns").cases
    whole = len(cases) + refresh.START_S
    write(folder, cases[: len(cases) // 2])
    assert commands(folder)[TURNS] == whole + refresh.START_S
    write(folder, cases, kernel_hash="of yesterday")
    assert commands(folder)[TURNS] == whole
    evidence = json.loads((folder / "evidence.json").read_text())
    evidence["kernels"]["hopper_forward"] = "of yesterday"  # as after a change of the kernel: neither is of today
    (folder / "evidence.json").write_text(json.dumps(evidence))
    assert next(iter(commands(folder))) == "sartor verify"
    assert TURNS in commands(folder)


def test_stages_are_chosen_by_name(folder: Path) -> None:
    every = refresh.stages(folder)
    names = [stage.name for stage in refresh.chosen(every, ["ladder", "paper:bwd", "head-dims", "paper:bwd"])]
    assert names[:2] == ["ladder", "paper:bwd"]
    assert sorted(names[2:]) == ["head-dims:bwd", "head-dims:fwd"]
    with pytest.raises(ValueError, match=r"--only must be one of .*paper:fwd.*, got 'turns'"):  # of today
        refresh.chosen(every, ["turns"])


def test_first_calls_are_made_ahead() -> None:
    """Of providers that wait for a compiler; one that fails costs no other."""
    w = Workload(1, 2, 2, 32, 32, 16, 16, "float32")
    with refresh.compilers(1) as pool:
        assert refresh.compile_ahead(pool, [(w, ("sartor", "sdpa", "sartor:nothing"))], "cpu") == 1
        assert refresh.compile_ahead(pool, [], "cpu") == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_it_only_lists() -> None:
    runner = CliRunner()
    found = runner.invoke(app, ["refresh"])
    assert found.exit_code == 2
    assert "refresh needs an NVIDIA GPU" in found.output
    assert runner.invoke(app, ["refresh", "--list", "--device", "h200"]).exit_code == 0


def test_commands_run_within_the_limit(tmp_path: Path) -> None:
    """What fails leaves the file as it was; what would take too long is left out, and said to be."""
    file, said = tmp_path / "turns.jsonl", list[str]()
    file.write_text("as it was")
    wanted = [Stage(("--version",), file, 20.0), Stage(("nothing",), file, 20.0), Stage(("doctor",), file, 500.0)]
    assert not refresh.run(wanted, 120.0, said.append)
    assert said[0].startswith("done after")
    assert said[1].startswith("failed (exit code 2")
    assert said[2].startswith("left out, 500 s of 1")
    assert file.read_text() == "as it was"
    assert refresh.run(wanted[:1], 120.0, said.append)


def test_a_command_that_fails_leaves_the_records_as_they_were(tmp_path, monkeypatch):
    """Half a suite must not stand in for the whole one that was there, nor for none."""
    file = tmp_path / "paper.jsonl"
    stage = refresh.Stage(("bench",), file, 1.0)
    for before in (None, b"kept"):
        for outcome, after in (("failed", before), ("", b"half")):
            file.unlink(missing_ok=True) if before is None else file.write_bytes(before)
            monkeypatch.setattr(refresh, "_outcome", lambda *_, said=outcome: file.write_bytes(b"half") and said)
            assert refresh._kept(stage, 1.0) == outcome
            assert (file.read_bytes() if file.is_file() else None) == after
