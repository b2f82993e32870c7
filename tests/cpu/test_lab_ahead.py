"""What a bench on a GPU compiles ahead, in processes of its own: here by calls on a CPU, which compile nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sartor.device import Device
from sartor.lab.ladder import catalogue as ladder
from sartor.lab.measure import ahead, fingerprint, roofline
from sartor.lab.measure.bench import Session
from sartor.lab.measure.records import Run
from sartor.lab.measure.timing import Budget
from sartor.lab.workloads import suites
from sartor.lab.workloads.suites import Suite
from sartor.lab.workloads.workload import Workload

CPU = torch.device("cpu")
SMALL = Workload(1, 2, 2, 32, 32, 16, 16, "float32")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARTOR_CACHE", str(tmp_path / "cache"))


def test_calls_are_made_once_and_what_fails_costs_no_other() -> None:
    """In two processes: of `sartor` two, of a kernel that there is not none, of who compiles nothing none."""
    long, said = replace(SMALL, seqlen_q=48), list[str]()
    work = [(SMALL, ("sartor", "sdpa", "sartor:nothing", "flex")), (long, ("sartor", "eager")), (SMALL, ("sartor",))]
    assert ahead.prepare(work, CPU, said.append, processes=2, worth=9) == 0
    assert said == []
    assert ahead.prepare(work, CPU, said.append, processes=2, worth=1) == 2
    assert said[0] == "compiling ahead: 4 calls, 2 processes"
    assert said[-1] == "compiling ahead: 4 of 4 calls, 2 processes"
    assert ahead.left(work, CPU) == [("sartor:nothing", SMALL), ("flex", SMALL)], "the others are done"


def test_what_has_its_fingerprint_and_machine_code_on_disk_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "on_disk", lambda name, w, device: name == "sartor")
    assert ahead.left([(SMALL, ("sartor", "sartor:triton"))], CPU) == [("sartor:triton", SMALL)]


def test_a_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(ahead, "_alone", exit)
    assert ahead.prepare([(SMALL, ("sartor",))], CPU, said.append, 1, worth=1) == 0
    assert "a process died" in said[-1]


def test_a_process_that_compiles_starts_no_others() -> None:
    from torch._inductor import config

    threads = torch.get_num_threads()
    try:
        with config.patch(compile_threads=8):
            ahead._alone()
            assert (config.compile_threads, torch.get_num_threads()) == (1, 1)
    finally:
        torch.set_num_threads(threads)


def test_nothing_is_begun_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_call", lambda *_: pytest.fail("it was begun"))
    assert ahead._calls([("sartor", SMALL)], "cpu", deadline=0.0) == 0


def test_a_call_is_left_out_only_where_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Device.of(CPU)
    mark = ahead._mark("rung:01", SMALL, here)
    assert mark == ahead._mark("rung:01", SMALL, here)
    monkeypatch.setattr(type(ladder.find("01")), "source_hash", lambda self: "another")
    assert ahead._mark("rung:01", SMALL, here) != mark
    mark = ahead._mark("sartor", SMALL, here)
    assert ahead._mark("sartor", replace(SMALL, dim=24), here) != mark
    monkeypatch.setattr(fingerprint, "sources", lambda: "others")
    others = ahead._mark("sartor", SMALL, here)
    assert others != mark
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    assert ahead._mark("sartor", SMALL, here) != others


def test_groups_share_machine_code_and_long_ones_come_first() -> None:
    work = suites.load("masks").cases
    groups = ahead.grouped(ahead.compiled(work))
    assert {w.mode for _, w in groups[0]} == {"bwd"}
    assert groups[0][0][0] == "flex"
    assert all(len(group) == 1 for group in groups if group[0][0] == "flex")
    assert any(len(group) == 2 for group in groups), "two lengths of a mask"
    assert not {name for group in groups for name, _ in group} & {"sdpa-cudnn", "sdpa-efficient"}
    known = {name for suite in suites.available() for _, who in suites.load(suite).cases for name in who}
    silent = {name for name in known if name.split(":")[0] not in ahead.COMPILED}
    assert not [name for name in silent if name.startswith(("sartor", "rung", "changed"))]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_bench_on_a_gpu_compiles_ahead_unless_first_calls_are_its_subject(monkeypatch, fresh: bool) -> None:
    """And on a CPU never."""
    asked: list[str] = []
    monkeypatch.setattr(ahead, "prepare", lambda work, device, *_, **__: asked.append(device.type) or 0)
    monkeypatch.setattr(roofline, "measure", lambda *_: roofline.Ceilings({}, 0.0))
    monkeypatch.setattr(Session, "measure_one", lambda *_: asked.append("measured") or [])
    monkeypatch.setattr(Session, "first_calls", lambda *_: asked.append("first") or [])
    suite = Suite("tiny", "", "", ((SMALL, ("sartor",)),), fresh=fresh)
    run = Run.start("tiny", CPU)
    list(Session(run, CPU).measure(suite))
    session = Session(run, torch.device("cuda"))
    list(session.measure(suite))
    assert asked == (["first"] * 2 if fresh else ["measured", "cuda", "measured"])
    assert ("compiling ahead" in session.spent) != fresh


def test_a_session_counts_what_its_time_went_to() -> None:
    session = Session(Run.start("tiny", CPU), CPU, Budget(rounds=1, turn_ms=0.1, warmup_ms=0.1))
    (record,) = session.measure_one(SMALL, ("sartor",))
    assert record.ms is not None
    assert list(session.spent) == ["errors and memory", "first calls", "timing", "fingerprints"]
    assert session.spent["first calls"] >= record.first_call_s


def test_a_record_takes_a_kept_fingerprint_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fingerprint.Found("plan", "0123456789abcdef")
    monkeypatch.setattr(fingerprint, "kept", lambda *_: made)
    assert fingerprint.attempt("sartor", SMALL, Device.of(CPU)) is None
    assert fingerprint.attempt("sartor", SMALL, fingerprint.ARCHITECTURES[90]) == made
