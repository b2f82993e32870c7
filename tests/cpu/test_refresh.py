"""Refresh: which records are older than their sources, and what is run to measure them again."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sartor.lab.cli.app import app
from sartor.lab.evidence import refresh
from sartor.lab.evidence.refresh import Stage
from sartor.lab.measure import records as store
from sartor.lab.measure.fingerprint import Found, key
from sartor.lab.measure.records import Record
from sartor.lab.workloads import suites

PLAN = "hopper_forward[128x128 w12 s6]"
ENVIRONMENT = {"device": "h200", "driver": "", "cuda": "", "torch": "", "triton": "", "commit": "", "dirty": None}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> dict[str, Found]:
    """Fingerprints of today, of one suite."""
    found = {key("sartor", w): Found(PLAN, "of today") for w, _ in suites.load("lengths").cases}
    monkeypatch.setattr(refresh, "present", lambda tell: found)
    return found


@pytest.fixture
def folder(tmp_path: Path, now: dict[str, Found]) -> Path:
    """Of a device on which all of them passed, and one suite was measured."""
    (tmp_path / "evidence.json").write_text(json.dumps({"runs": [{"fingerprints": now, "seconds": 300.0}]}))
    write(tmp_path, suites.load("lengths").cases)
    return tmp_path


def write(folder: Path, cases, **changed) -> None:
    plan = {"plan": PLAN, "fingerprint": "of today", **changed}
    lines = []
    for i, (w, who) in enumerate(cases):
        for name in who:
            r = Record("a", "lengths", name, **asdict(w), **ENVIRONMENT, time=f"2026-01-01T00:00:{i:02d}Z")
            lines.append(replace(r, **(plan if name == "sartor" else {})).to_json() + "\n")
    (folder / "lengths.jsonl").write_text("".join(lines))


def commands(folder: Path) -> dict[str, float]:
    return {str(stage): stage.seconds for stage in refresh.stages(folder, rounds=3)}


LENGTHS = "sartor bench --suite lengths --modes fwd --rounds 3 --record"


def test_what_was_never_measured_is_named(folder: Path) -> None:
    found = commands(folder)
    assert LENGTHS not in found
    assert not any("verify" in command for command in found)
    assert found["sartor bench --suite first --modes bwd --rounds 3 --record"] == refresh.UNKNOWN_S
    assert "sartor ladder --rounds 3 --record" in found
    assert not any("quick" in command for command in found)


def test_other_sources_and_missing_workloads_are_stale(folder: Path) -> None:
    cases = suites.load("lengths").cases
    write(folder, cases[: len(cases) // 2])
    assert LENGTHS in commands(folder)
    write(folder, cases, fingerprint="of yesterday")
    assert LENGTHS in commands(folder)
    evidence = json.loads((folder / "evidence.json").read_text())
    evidence["runs"][0]["fingerprints"][key("sartor", cases[0][0])][1] = (
        "of yesterday"  # as after a change: neither is of today
    )
    (folder / "evidence.json").write_text(json.dumps(evidence))
    assert next(iter(commands(folder))) == "sartor verify --kernels hopper_forward"
    assert LENGTHS in commands(folder)


def test_seconds_follow_rounds_and_what_ran(folder: Path) -> None:
    """Turns of 40 ms that count, here without a lead; two calls in turn where one is longer than that."""
    suite = replace(suites.load("lengths"), lead_ms=0.0, rounds=None)
    (w, who), known = suite.cases[0], store.read(folder / "lengths.jsonl")[: len(suite.cases[0][1])]

    def seconds(*ms: float | None, rounds: tuple[str, ...] = ("--rounds", "5")) -> float:
        for r, given in zip(known, ms, strict=True):
            r.ms = given
        others = refresh.START_S + refresh.ROW_S + refresh.ahead.seconds([(w, who)])
        return refresh._seconds(suite, ((w, who),), known, rounds) - others

    assert len(who) == 6
    assert seconds(*[10.0] * 6) == pytest.approx(5 * 6 * 0.04)
    assert seconds(10.0, *[None] * 4, 500.0) == pytest.approx(5 * (0.04 + 0.5))
    assert seconds(*[10.0] * 6, rounds=()) == pytest.approx(6 * 6 * 0.04)
    assert seconds(*[None] * 6) == 0.0
    assert refresh._unknown_ms(w, "sartor") == refresh.UNKNOWN_MS
    assert refresh._unknown_ms(replace(w, mask="softcap30"), "sdpa") is None


def test_stages_are_chosen_by_name(folder: Path) -> None:
    every = refresh.stages(folder)
    names = [stage.name for stage in refresh.chosen(every, ["ladder", "paper:bwd", "head-dims", "paper:bwd"])]
    assert names[:2] == ["ladder", "paper:bwd"]
    assert sorted(names[2:]) == ["head-dims:bwd", "head-dims:fwd"]
    with pytest.raises(ValueError, match=r"--only must be one of .*paper:fwd.*, got 'lengths'"):  # of today
        refresh.chosen(every, ["lengths"])


def test_what_fits_is_compiled_ahead_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, said = [], list[str]()
    monkeypatch.setattr(refresh.ahead, "prepare", lambda work, *_, **__: asked.append(list(work)) or 2)
    monkeypatch.setattr(refresh, "_kept", lambda stage, limit_s: "")
    a, b, c = suites.load("lengths").cases[:3]
    left = [Stage(("a",), Path(), 60.0, (a,)), Stage(("b",), Path(), 50.0, (b,)), Stage(("c",), Path(), 30.0, (c,))]
    assert refresh.run(left, 100.0, said.append)
    assert asked == [[a, c]], "not of the second, for which there will be no time"
    assert said[1].startswith("2 calls compiled ahead in ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_it_only_lists(now: dict[str, Found]) -> None:
    runner = CliRunner()
    found = runner.invoke(app, ["refresh"])
    assert found.exit_code == 2
    assert "refresh needs an NVIDIA GPU" in found.output
    listed = runner.invoke(app, ["refresh", "--list", "--device", "h200"])
    assert listed.exit_code == (1 if listed.stdout else 0), "1 where something is left, as its help says"


def test_commands_run_within_the_limit(tmp_path: Path) -> None:
    """What fails leaves the file as it was; what would take too long is left out, and said to be."""
    file, said = tmp_path / "lengths.jsonl", list[str]()
    file.write_text("as it was")
    wanted = [Stage(("--version",), file, 20.0), Stage(("nothing",), file, 20.0), Stage(("doctor",), file, 500.0)]
    assert not refresh.run(wanted, 120.0, said.append)
    assert said[0].startswith("done after")
    assert said[1].startswith("failed (exit code 2")
    assert said[2].startswith("left out, 500 s of 1")
    assert file.read_text() == "as it was"
    assert refresh.run(wanted[:1], 120.0, said.append)


def test_ctrl_c_stops_the_command_and_puts_its_records_back(tmp_path, monkeypatch):
    """The terminal tells only this process of it."""
    file, ended = tmp_path / "paper.jsonl", list[int]()
    file.write_bytes(b"kept")

    def communicate(process, **rest):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(refresh.subprocess.Popen, "communicate", communicate)
    kill = refresh.os.killpg
    monkeypatch.setattr(refresh.os, "killpg", lambda pid, signal: ended.append(pid) or kill(pid, signal))
    with pytest.raises(KeyboardInterrupt):
        refresh._kept(refresh.Stage(("bench", "--list"), file, 1.0), 1.0)
    assert len(ended) == 1
    assert file.read_bytes() == b"kept"


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
