"""What a figure means: the arithmetic of tables, ceilings and verdicts, and where a record comes from."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_lab_bench import CPU, SMALL, record

from sartor import testing
from sartor.lab.evidence import verify, wanted
from sartor.lab.measure import accuracy, bench, check, providers, records, roofline, timing
from sartor.lab.measure.accuracy import Judge, Verdict
from sartor.lab.measure.bench import Session
from sartor.lab.measure.fingerprint import key
from sartor.lab.measure.records import CEILINGS, Run
from sartor.lab.measure.timing import Timing
from sartor.lab.show import report, tables
from sartor.lab.workloads.workload import Inputs, Workload


@pytest.mark.parametrize(("mode", "wrong", "times", "ok"), [
    ("fwd", "out", 1.9, True), ("fwd", "out", 2.5, False), ("bwd", "dq", 2.5, True), ("bwd", "dq", 3.5, False),
    ("bwd", "dk", 3.5, False), ("bwd", "dv", 3.5, False),
])  # fmt: skip
def test_every_result_is_judged_by_its_own_factor(mode, wrong, times, ok, monkeypatch) -> None:
    """One of three gradients is wrong by so many times PyTorch's error: the verdict says so, whichever it is."""
    w, names = replace(SMALL, mode=mode), ("out",) if mode == "fwd" else ("dq", "dk", "dv")
    exact = {n: torch.zeros(1, 1, 48, 16, dtype=torch.float64) for n in names}
    judge = Judge(w, Inputs.make(w, CPU), exact, {n: t.float() + 0.1 for n, t in exact.items()},
                  testing.Magnitudes({n: t + 1 for n, t in exact.items()}, 0.0))  # fmt: skip
    found = {n: torch.zeros(1, 2, 48, 16) for n in names}
    found[wrong][0, 1, 5, 3] = 0.1 * times
    monkeypatch.setattr(accuracy, "_results", lambda *_: found)
    verdict = judge.judge(lambda q, k, v: q)
    assert verdict.ok == ok
    assert ok or verdict.over.startswith(wrong)
    assert verdict.err_max == pytest.approx(0.1 * times)
    assert verdict.err_budget == pytest.approx(0.2 if mode == "fwd" else 0.3, rel=1e-3)


def test_a_row_over_its_budget_speaks_against_its_kernel() -> None:
    """Tests that pass are not all the evidence: an accuracy table that says otherwise withholds the kernel's hash."""
    rows = [
        check.Row(SMALL, f"{kernel}[64x128 w8 s4] from sm90.jsonl:1", Verdict(1.0, 1.0, 0.1, 1.0, over))
        for kernel, over in (("hopper_forward", ""), ("triton_backward", "dq: too much"))
    ]
    tests = {"passed": 700, "failed": 0, "skipped": 0, "failures": [], "against": []}
    sound = verify.sound(tests, rows, wanted.KERNELS)
    assert "hopper_forward" in sound
    assert "triton_backward" not in sound


@pytest.mark.parametrize("view", ["memory", "accuracy", "host", "errors", "fwd"])
def test_a_table_says_what_of_it_is_unverified(tmp_path: Path, view: str) -> None:
    """One figure of two is of other sources: a table whose cells do not say so says it below."""
    facts = {"ms": 1.0, "peak_mem_mib": 1.0, "host_us": 1.0, "err_rel": 1e-7, "err_max": 1e-7, "err_budget": 1.0,
             "errors": {"out rel": 1e-7, "out max": 1e-7}, "tflops": 1.0}  # fmt: skip
    rows = [
        record(seqlen_q=n, plan="triton_forward[128x64 w4 s2] grid", fingerprint=kept, **facts)
        for n, kept in ((48, "abc"), (49, "old"))
    ]
    folder = tmp_path / "h200"
    folder.mkdir()
    passed = {key(r.provider, r.workload): ["triton_forward[128x64 w4 s2]", "abc"] for r in rows}
    (folder / "evidence.json").write_text(json.dumps({"runs": [{"fingerprints": passed}]}))
    for some, said in ((rows[:1], False), (rows, True)):
        (folder / "tiny.jsonl").write_text("".join(r.to_json() + "\n" for r in some))
        assert ("unverified" in report.render(f"h200/tiny/{view}", tmp_path)) == said


def test_the_arithmetic_of_a_speed_table() -> None:
    """Against the best other of each row, which is no other kernel of ours; a decode is told in GB/s."""
    times = ({"sartor": 2.0, "sartor:triton": 1.0, "sdpa": 3.0, "flex": 8.0},
             {"sartor": 4.0, "sartor:triton": 9.0, "sdpa": 8.0, "flex": 2.0})  # fmt: skip
    rows = [
        record(provider=name, seqlen_q=n, mode="decode", ms=ms, tflops=7.0, gbps=5.0)
        for n, row in enumerate(times, 1) for name, ms in row.items()
    ]  # fmt: skip
    table = tables.speed(rows, "sdpa")
    assert table.headers[-6:] == [
        "Sartor",
        "Sartor (Triton)",
        "PyTorch SDPA",
        "FlexAttention",
        "vs PyTorch SDPA",
        "vs best",
    ]
    assert [row[-2:] for row in table.rows] == [["1.50x", "1.50x"], ["2.00x", "0.50x"]]
    assert table.rows[0][1] == "2.00 / 5.00"
    assert {row: table.headers[column] for row, column in table.best} == {0: "Sartor (Triton)", 1: "FlexAttention"}
    assert "ahead on 1 of 2, geometric mean 0.87x, worst 0.50x, best 1.50x." in table.notes[0]
    assert len(table.notes) == 1


def test_a_wrong_time_is_never_the_best() -> None:
    """It is shown with its mark: whoever wants a right result cannot have it."""
    over = {"err_max": 2.0, "err_budget": 1.0}
    times = {"sartor": (2.0, {}), "sdpa": (3.0, {}), "flex": (1.0, over)}
    rows = [record(provider=name, ms=ms, tflops=7.0, **more) for name, (ms, more) in times.items()]
    table = tables.speed(rows, "sdpa")
    (row,) = table.rows
    assert row[-5:] == ["2.00 / 7.00", "3.00 / 7.00", "1.00 / 7.00†", "1.50x", "1.50x"]
    assert {table.headers[column] for _, column in table.best} == {"Sartor"}
    assert "ahead on 1 of 1" in table.notes[0]
    assert table.notes[-1].startswith("†: ")


def test_ceilings_are_what_takes_longer(monkeypatch) -> None:
    """A problem's least time is that of its products or of its bytes, whichever is more; a share is of that."""
    monkeypatch.setattr(roofline, "_ms", lambda run, device: 2.0)
    found = roofline.measure(CPU, ["float32"])
    assert found.tflops["float32"] == pytest.approx(2 * 1024**3 / 2e-3 * 1e-12)
    assert found.gbps == pytest.approx(2 * 2**27 / 2e-3 * 1e-9)  # read and written
    for flops, gbps in ((1e-3, 1e3), (1e3, 1e-3)):
        ceilings, r = roofline.Ceilings({"float32": flops}, gbps), record(ms=1.0)
        least = max(SMALL.flops / flops * 1e-9, SMALL.bytes / gbps * 1e-6)
        assert ceilings.ms(SMALL) == pytest.approx(least)
        bench._rates(r, SMALL, ceilings)
        assert r.pct_ceiling == pytest.approx(100 * least)


def test_a_backward_holds_its_forward_and_a_decode_is_cold(monkeypatch) -> None:
    """The peak of a backward counts what its forward kept; a decode is timed with nothing in L2, as in use."""
    modes, cold = [], []
    runner = providers.runner
    monkeypatch.setattr(bench, "peak_mib", lambda run, device: 1.0)
    monkeypatch.setattr(providers, "runner", lambda attend, w, x: modes.append(w.mode) or runner(attend, w, x))
    monkeypatch.setattr(bench, "interleave", lambda runs, *_, cold_l2: cold.append(cold_l2) or
                        {name: Timing([1.0, 2.0, 4.0]) for name in runs})  # fmt: skip
    session = Session(Run.start("tiny", CPU), CPU, check=False)
    for mode in ("fwd", "bwd", "decode"):
        (r,) = session.measure_one(replace(SMALL, mode=mode, mask="full"), ("sartor",))
        assert (r.skipped, r.ms, r.ms_p20, r.ms_p80) == (None, 2.0, 1.0, 4.0)
    assert modes == ["fwd", "fwd", "bwd", "fwd_bwd", "decode", "decode"]
    assert cold == [False, False, True]


def test_the_last_run_is_the_one_of_the_latest_time_with_its_own_ceilings() -> None:
    """Whatever the order of a file's lines, as after a merge; peaks of another run stand under no table."""
    rows = [
        record(run_id=run, time=f"2026-01-0{day}T00:00:00Z", dtype="bfloat16", ms=1.0)
        for run, day in (("new", 2), ("old", 1))
    ]
    peaks = [replace(r, mode=CEILINGS, tflops=t) for r, t in zip(rows, (700.0, 111.0), strict=True)]
    kept = records.latest([*rows, *peaks])
    assert {r.run_id for r in kept} == {"new"}
    alone = replace(rows[1], seqlen_q=2 * rows[1].seqlen_q)  # which the newer run, stopped before its end, has not
    assert records.latest([*rows, alone, *peaks]) == kept
    assert {(r.run_id, r.mode) for r in records.latest([*rows, alone, *peaks], by_workload=True) if r not in kept} == {
        ("old", rows[1].mode), ("old", CEILINGS),
    }  # fmt: skip
    assert "700" in report.provenance(rows[:1], peaks)
    assert "111" not in report.provenance(rows[:1], peaks)


def test_changed_sources_are_called_so(tmp_path: Path, monkeypatch) -> None:
    """A figure of sources that no commit holds must not carry a commit's name alone."""
    monkeypatch.delenv("SARTOR_COMMIT", raising=False)
    monkeypatch.setattr(records, "checkout", lambda: tmp_path)
    monkeypatch.setattr(records, "_git", records._git.__wrapped__)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("1")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "a")):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    commit, dirty = records._git()
    assert (len(commit), dirty) == (40, False)
    (tmp_path / "src" / "a.py").write_text("2")
    assert records._git() == (commit, True)


@pytest.mark.parametrize(("sq", "skv"), [(24, 40), (1, 32)])
def test_alibi_is_aligned_to_the_bottom_right(sq: int, skv: int) -> None:
    """As `test_causal_is_aligned_to_the_bottom_right`: providers that add a table add the same one."""
    w = Workload(1, 2, 2, sq, skv, 16, 16, "float32", "causal+alibi", "fwd")
    x = Inputs.make(w, CPU)
    judge = Judge.make(w, x)
    assert judge is not None
    for name in ("eager", "sdpa-math"):
        assert judge.judge(providers.get(name).make(w, x)).ok


def test_a_cold_call_is_timed_alone(monkeypatch) -> None:
    """With L2 flushed before a sample, a second call in it would find warm what the first has read."""
    asked = []
    monkeypatch.setattr(
        timing._HostClock, "enqueue", lambda self, run, calls, batch: asked.append(calls) or (lambda: [1.0])
    )
    for cold in (False, True):
        timing.interleave({"a": lambda: None}, CPU, timing.Budget(rounds=1, turn_ms=0.01), cold_l2=cold)
    assert asked[0] > 1
    assert asked[-1] == 1
