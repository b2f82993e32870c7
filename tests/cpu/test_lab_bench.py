"""The bench on small problems: who may run, what agrees, what a record holds, what is printed of it."""

import csv
import itertools
import json
import os
from collections import Counter
from dataclasses import asdict, fields, replace
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest
import torch

from sartor.lab.evidence.evidence import Evidence
from sartor.lab.ladder import catalogue as ladder
from sartor.lab.measure import accuracy, contention, fresh, providers, records, roofline, timing
from sartor.lab.measure.accuracy import Judge
from sartor.lab.measure.bench import Session
from sartor.lab.measure.fingerprint import key as case
from sartor.lab.measure.memory import peak_mib
from sartor.lab.measure.records import CEILINGS, Record, Run, Store
from sartor.lab.measure.timing import Budget
from sartor.lab.show import climb, report, tables, views
from sartor.lab.workloads import suites
from sartor.lab.workloads.suites import Suite
from sartor.lab.workloads.workload import Inputs, Workload

CPU = torch.device("cpu")
MASKS = ["full", "causal", "window8", "document3", "tensor", "bias", "prefix20", "causal+alibi"]
FAST = Budget(rounds=2, turn_ms=0.5, warmup_ms=0.5)
SMALL = Workload(1, 2, 2, 48, 48, 16, 16, "float32", "causal", "fwd")
CONTRACT = [
    "run_id", "suite", "provider", "mode", "dtype", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "dim",
    "dim_v", "mask", "ms", "ms_p20", "ms_p80", "tflops", "gbps", "pct_ceiling", "peak_mem_mib", "host_us",
    "first_call_s", "err_rel", "err_max", "err_budget", "skipped", "plan", "device", "clock_mhz_before",
    "clock_mhz_after", "driver", "cuda", "torch", "triton", "commit", "dirty", "fingerprint", "time",
]  # fmt: skip


@pytest.fixture
def fast_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = roofline.Ceilings({"float32": 0.1}, 10.0)
    monkeypatch.setattr(roofline, "measure", lambda device, dtypes: found)


def measured(suite: Suite, out: Path) -> list[Record]:
    session = Session(Run.start(suite.name, CPU), CPU, FAST)
    store, found = Store(out, session.run), []
    for rows in session.measure(suite):
        store.add(rows)
        found += rows
    store.close(replace=True)
    return found


def suite(*workloads: Workload, who: tuple[str, ...] = ("sartor", "sdpa", "eager", "sdpa-flash")) -> Suite:
    return Suite("tiny", "", "sdpa", tuple((w, who) for w in workloads))


def test_record_keys_are_the_contract() -> None:
    assert [f.name for f in fields(Record)][: len(CONTRACT)] == CONTRACT


def test_a_run_becomes_records_csv_and_tables(tmp_path: Path, fast_ceilings: None) -> None:
    found = measured(suite(SMALL, replace(SMALL, mode="bwd")), tmp_path)
    lines = (tmp_path / "cpu" / "tiny.jsonl").read_text().splitlines()
    assert [json.loads(line)["provider"] for line in lines] == [r.provider for r in found]
    with (tmp_path / "cpu" / "tiny.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(lines)
    by_name = {(r.provider, r.mode): r for r in records.read(tmp_path / "cpu" / "tiny.jsonl")}
    ours = by_name["sartor", "fwd"]
    assert ours.ms is not None
    assert ours.ms_p20 <= ours.ms <= ours.ms_p80
    assert ours.err_max <= ours.err_budget
    assert ours.cos_sim == pytest.approx(1.0)
    assert ours.errors["out rel"] == pytest.approx(ours.err_rel)
    assert ours.errors["lse max"] < 1e-5
    assert set(by_name["sdpa", "bwd"].errors) == {f"{n} {what}" for n in ("dq", "dk", "dv") for what in ("rel", "max")}
    assert ours.fingerprint is None  # of a kernel that launches nothing
    assert ours.plan
    flash = by_name["sdpa-flash", "fwd"]
    assert flash.ms is None
    assert flash.skipped == "needs an NVIDIA GPU"
    assert by_name["ceiling-copy", CEILINGS].gbps == 10.0
    text = tables.speed([r for r in found if r.mode == "bwd"], "sdpa").markdown()
    assert "| - |" in text
    assert "PyTorch SDPA (FlashAttention-2): needs an NVIDIA GPU" in text


def test_suite_small_measures_what_a_call_costs(tmp_path: Path, fast_ceilings: None) -> None:
    """Its rows with fewer heads and tokens: each face gives what `attention` with a kept mask gives."""
    cases, sizes = [], {"heads_q": 2, "heads_kv": 2, "dim": 16, "dim_v": 16, "dtype": "float32"}
    for w, who in suites.load("small").cases:
        few = min(w.batch, 3)
        w = replace(w, **sizes, batch=few, seqlen_q=min(w.seqlen_q, 60), seqlen_kv=min(w.seqlen_kv, 60))
        cases.append((w, who)) if (w, who) not in cases else None
    found = measured(replace(suites.load("small"), cases=tuple(cases)), tmp_path)
    told = {(r.provider, r.mode, r.mask): r for r in found if r.mode != CEILINGS}
    assert all(r.err_max <= r.err_budget for r in told.values() if r.ms)
    faces = {name.removeprefix("sartor-") for name, mode, mask in told if "-" in name and told[name, mode, mask].ms}
    assert faces == {"varlen", "kvcache", "kvcache-new"}
    assert {r.skipped for r in told.values() if r.mode == "graph"} >= {"RuntimeError: a CUDA graph needs an NVIDIA GPU"}
    for mode, mask, provider in itertools.product(("fwd", "fwd_bwd"), ("full", "causal"), ("sartor", "sdpa")):
        assert told[provider, mode, mask].unseen_us > 0
    assert told["sartor", "decode", "full"].unseen_us > 0
    assert told["sartor", "decode", "cached"].unseen_us is None  # its lengths are of these places
    half = told["sartor", "decode", "cached"].workload
    assert (half.pairs, half.bytes) == (40, 4 * 3 * 2 * 32 + 4 * 2 * 120 * 32 + 4 * 6)
    text = tables.cost([r for r in found if r.mode == "fwd"], "sdpa").markdown()
    assert "vs PyTorch SDPA | new length | of PyTorch SDPA |" in text
    assert "PyTorch varlen_attn" not in text  # which a CPU has none of


def stat(monkeypatch: pytest.MonkeyPatch, file: Path, *busy: float) -> None:
    """Every CPU is busy for so many seconds more from reading to reading, which lie a second apart."""
    total = itertools.accumulate(busy, initial=0.0)
    seconds = itertools.count()

    def read(path: Path) -> str:
        ticks = round(next(total) * os.sysconf("SC_CLK_TCK"))
        return "\n".join(["cpu"] + [f"cpu{i} {ticks} 0 0 7 0 0 0 0 0 0" for i in range(os.cpu_count() or 1)])

    monkeypatch.setattr(contention, "STAT", SimpleNamespace(read_text=lambda: read(file)))
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)), process_time=lambda: 0.0)
    monkeypatch.setattr(contention, "time", clock)


@pytest.mark.parametrize(("busy", "share"), [(0.0, 0.0), (0.3, 0.3), (1.0, 1.0)])
def test_what_others_take_of_the_cpus_is_told(busy: float, share: float, monkeypatch, tmp_path: Path) -> None:
    cpus = len(os.sched_getaffinity(0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: cpus)
    stat(monkeypatch, tmp_path, busy)
    assert contention.Contention.watch(CPU).share() == pytest.approx(share)
    monkeypatch.setattr(contention, "STAT", tmp_path / "nothing")
    assert contention.Contention.watch(CPU).share() is None


def test_times_of_a_busy_machine_are_marked(fast_ceilings: None, tmp_path: Path, monkeypatch) -> None:
    """In the record, in the table, and by a sentence; and so are samples that lie far apart."""
    monkeypatch.setattr(contention.Contention, "share", lambda self: 0.4)
    found = [r for r in measured(suite(SMALL), tmp_path) if r.mode == "fwd"]
    assert {r.contention for r in found if r.ms} == {0.4}
    text = tables.speed(found, "sdpa").markdown()
    assert text.count("~") == 4  # three times and the note
    assert "ms and GFLOP/s" in text
    assert f"{found[0].tflops * 1e3:.3g}"[:3] in text
    assert "3 of 3 times are marked ~, as other processes took up to 40 %" in contention.verdict(found)
    quiet = [replace(r, contention=0.0, ms_p20=1.0, ms_p80=1.1) for r in found]
    assert "~" not in tables.speed(quiet, "sdpa").markdown()
    assert contention.verdict(quiet) == ""
    assert "samples lie far apart" in contention.verdict([replace(r, ms_p80=2.0) for r in quiet])


def test_ratios_are_of_whom_the_suite_says(tmp_path: Path, fast_ceilings: None) -> None:
    found = [r for r in measured(suite(SMALL, who=("sartor:blocked", "sartor", "sdpa")), tmp_path) if r.mode == "fwd"]
    ms = {r.provider: r.ms for r in found}
    text = tables.speed(found, "sdpa", ours="sartor:blocked").markdown()
    assert f"{ms['sdpa'] / ms['sartor:blocked']:.2f}x" in text.splitlines()[-3]
    assert "how many times as fast Sartor (blocked) is" in text


def test_replacing_keeps_only_the_last_run_of_a_mode(tmp_path: Path, fast_ceilings: None) -> None:
    one = suite(SMALL, who=("eager",))
    measured(one, tmp_path)
    last = measured(one, tmp_path)
    found = records.read(tmp_path / "cpu" / "tiny.jsonl")
    assert {r.run_id for r in found} == {last[0].run_id}


def test_the_newest_records_of_a_suite_are_found(tmp_path: Path) -> None:
    for device, time in (("a100", "2025-12-01"), ("h200", "2026-01-01"), ("l40s", "2024-01-01")):
        (tmp_path / device).mkdir()
        (tmp_path / device / "paper.jsonl").write_text(record(time=time).to_json() + "\n")
    (tmp_path / "cpu").mkdir()
    assert records.newest(tmp_path, "paper") == tmp_path / "h200" / "paper.jsonl"
    assert records.newest(tmp_path, "paper", "a100") == tmp_path / "a100" / "paper.jsonl"
    for suite, device in (("paper", "cpu"), ("small", "")):
        with pytest.raises(ValueError, match="no record"):
            records.newest(tmp_path, suite, device)


def test_ceilings_stay_with_the_run_they_belong_to(tmp_path: Path, fast_ceilings: None) -> None:
    forward = measured(suite(SMALL, who=("eager",)), tmp_path)[0].run_id
    backward = measured(suite(replace(SMALL, mode="bwd"), who=("eager",)), tmp_path)[0].run_id
    found = records.latest(records.read(tmp_path / "cpu" / "tiny.jsonl"))
    assert {r.run_id for r in found if r.mode == CEILINGS} == {forward, backward}


@pytest.mark.parametrize("name", ["eager", "sdpa-math", "sdpa", "sartor"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_providers_compute_the_same(name: str, mask: str, mode: str) -> None:
    w = Workload(2, 4, 2, 32, 32, 16, 16, "float32", mask, mode)
    provider, x = providers.get(name), Inputs.make(w, CPU)
    assert provider.why_not(w, CPU) == ""
    judge = Judge.make(w, x)
    assert judge is not None
    verdict = judge.judge(provider.make(w, x))
    assert verdict.ok, verdict.over


@pytest.mark.parametrize(("sq", "skv"), [(24, 40), (1, 32)])
@pytest.mark.parametrize("name", ["eager", "sdpa", "sartor"])
def test_causal_is_aligned_to_the_bottom_right(name: str, sq: int, skv: int) -> None:
    w = replace(SMALL, seqlen_q=sq, seqlen_kv=skv)
    x = Inputs.make(w, CPU)
    judge = Judge.make(w, x)
    assert judge is not None
    verdict = judge.judge(providers.get(name).make(w, x))
    assert verdict.ok, verdict.over


def test_a_wrong_result_is_over_its_budget() -> None:
    x = Inputs.make(SMALL, CPU)
    judge = Judge.make(SMALL, x)
    assert judge is not None
    right = providers.get("sdpa").make(SMALL, x)
    assert not judge.judge(lambda q, k, v: right(q, k, v) * 1.001).ok


def test_reasons_are_sentences_and_a_kernel_by_name_never_falls_back(tmp_path: Path, fast_ceilings: None) -> None:
    found = measured(suite(replace(SMALL, mask="softcap30"), who=("sdpa", "sartor:triton")), tmp_path)
    skipped = {r.provider: r.skipped for r in found if r.mode != CEILINGS}
    assert skipped["sdpa"] == "SDPA has no softcap"
    assert "triton" in skipped["sartor:triton"]
    with pytest.raises(ValueError, match="got 'sdpb'"):
        providers.get("sdpb")


def test_first_calls_are_those_of_fresh_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two share new folders of caches, which go with them; a provider that cannot run starts none."""
    seen, process = list[dict[str, str]](), fresh._process
    monkeypatch.setattr(fresh, "_process", lambda given, caches: seen.append(caches) or process(given, caches))
    first = replace(suite(replace(SMALL, mode="bwd"), who=("sartor", "sdpa-flash")), fresh=True)
    session = Session(Run.start(first.name, CPU), CPU)
    found = views.run(views.console(), first, session, tmp_path, plot=True, record=tmp_path).records
    views.show(views.console(), found, first, session)
    assert "first call in seconds" in capsys.readouterr().out
    ours, flash = records.read(tmp_path / "cpu" / "tiny.jsonl")
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert not any(Path(folder).exists() for folder in seen[0].values())
    assert min(ours.first_call_s, ours.disk_call_s, ours.import_s) > 0
    assert (ours.ms, ours.skipped, flash.skipped) == (None, None, "needs an NVIDIA GPU")
    assert ours.plan.startswith("torch_cpu_backward")


def test_a_fresh_process_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh.main(json.dumps(["sartor:triton", asdict(SMALL), "cpu"]), 0.1)
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"skipped"}
    assert "triton" in told["skipped"]
    monkeypatch.setattr(fresh, "CODE", "raise SystemExit('in /a/b/c: broken')")
    assert fresh._process("", {}) == {"skipped": "RuntimeError: exit code 1 in c: broken"}


def test_first_calls_are_told_cold_and_from_disk(tmp_path: Path) -> None:
    first = {"ms": None, "first_call_s": 2.345, "disk_call_s": 0.0456}
    found = [
        record(**first, import_s=0.1234),
        record(**first, mode="bwd", import_s=0.2),
        record(provider="flex", ms=None, skipped="no"),
    ]
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "first.jsonl").write_text("".join(r.to_json() + "\n" for r in found))
    text = report.render("h200/first/first", tmp_path)
    assert text.startswith("first call in seconds, cold / from disk (")
    assert "| fwd | 2.35 / 0.0456 | - |" in text
    assert "| bwd | 2.35 / 0.0456 | - |" in text
    assert "import sartor, beyond torch: 0.162 s, at most 0.200 s." in text
    assert "FlexAttention: no" in text
    assert "None" not in tables.speed(found, "sdpa").markdown(), "no time, and nothing to excuse"
    found[0].plan = "triton_forward[128x64 w4 s2] grid"
    assert "0.0456 unverified" in tables.first(found, lambda r: r.plan is None).markdown()


def test_suite_first_measures_first_calls() -> None:
    assert [name for name in suites.available() if suites.load(name).fresh] == ["first"]


def test_a_run_of_several_calls_counts_as_these():
    """As a CUDA graph of them does."""
    run = lambda: sleep(2e-3)  # noqa: E731 - it gets an attribute
    run.calls = 8
    found = timing.interleave({"graph": run}, CPU, Budget(rounds=1, turn_ms=0.0, warmup_ms=0.0))["graph"]
    assert 0.25 <= found.ms < 1.0


def test_timing_gives_every_candidate_a_turn_a_round() -> None:
    calls: list[str] = []
    runs = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    found = timing.interleave(runs, CPU, Budget(rounds=4, turn_ms=0.0, warmup_ms=0.0))
    assert {len(t.samples) for t in found.values()} == {4}
    assert all(t.at(0.2) <= t.ms <= t.at(0.8) for t in found.values())
    turns = [name for name, _ in itertools.groupby(calls)]
    assert len(turns) > 6, "each calls a candidate many times, one after another"
    long = timing.interleave(runs, CPU, Budget(rounds=1, turn_ms=2.0, warmup_ms=0.0))
    assert all(len(t.samples) > 1 for t in long.values())


@pytest.mark.parametrize("n", range(1, 8))
def test_each_candidate_follows_each_other_equally_often(n: int) -> None:
    names, rounds = "abcdefg"[:n], n * (1 + n % 2)
    found = list(itertools.islice(timing.orders(names), 2 * rounds))
    assert all(sorted(order) == list(names) for order in found)
    for half in (found[:rounds], found[rounds:]):
        pairs = Counter(pair for order in half for pair in itertools.pairwise(order))
        assert pairs == dict.fromkeys(itertools.permutations(names, 2), 1 + n % 2)


@pytest.mark.parametrize(("n", "rounds"), [(1, 6), (2, 6), (3, 6), (4, 8), (5, 10), (6, 6), (7, 14)])
def test_rounds_are_whole_squares_by_default(n: int, rounds: int) -> None:
    """So that each comes after each other equally often; as many as are asked for where a number is."""
    runs = {name: (lambda: None) for name in "abcdefg"[:n]}
    assert timing.balanced(n) == rounds
    assert timing.balanced(n, 1) == n * (1 + n % 2)
    quick = Budget(turn_ms=0.0, warmup_ms=0.0)
    assert {len(t.samples) for t in timing.interleave(runs, CPU, quick).values()} == {rounds}
    assert {len(t.samples) for t in timing.interleave(runs, CPU, replace(quick, rounds=3)).values()} == {3}


def test_seconds_are_told_beforehand() -> None:
    """Of turns of 120 ms on a GPU; a call that is as long as a lead has none; at most 6 s and a round, three rounds."""
    assert timing.seconds([4.0, 5.0], Budget()) == pytest.approx(6 * 2 * 0.12)
    assert timing.seconds([4.0, 1000.0], Budget(4)) == pytest.approx(4 * 1.12)
    assert timing.seconds([4.0] * 14, Budget()) == pytest.approx(6.0 + 14 * 0.12)
    assert timing.seconds([9000.0], Budget()) == pytest.approx(27.0)
    assert timing.seconds([1.0], Budget()) == pytest.approx(6 * 0.12 + 5 * 0.02)
    assert timing.seconds([], Budget()) == 0.0


def test_the_lead_of_a_turn_does_not_count() -> None:
    calls: list[str] = []
    runs = {"a": lambda: calls.append("a")}
    found = timing.interleave(runs, CPU, Budget(rounds=2, turn_ms=0.0, warmup_ms=0.0))["a"]
    without = len(calls)
    led = timing.interleave(runs, CPU, Budget(rounds=2, turn_ms=0.0, lead_ms=5.0, warmup_ms=0.0))["a"]
    assert len(led.samples) == len(found.samples) == 2
    assert len(calls) - without > 2 * without


def test_a_batch_is_under_way_while_the_next_one_is_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Clock(timing._HostClock):
        def enqueue(self, run, calls, batch):
            read = super().enqueue(run, calls, batch)
            order.append("enqueue")
            return lambda: (order.append("read"), read())[1]

    monkeypatch.setattr(timing, "_HostClock", Clock)
    timing.interleave({"a": lambda: sleep(1e-3)}, CPU, Budget(rounds=1, turn_ms=20.0, lead_ms=20.0, warmup_ms=0.0))
    assert order[:3] == ["enqueue", "enqueue", "read"]
    assert order[-2:] == ["read", "read"]
    assert order.count("enqueue") == order.count("read") <= 5
    order.clear()
    timing.interleave({"a": lambda: sleep(1e-3)}, CPU, Budget(rounds=1, turn_ms=0.5, warmup_ms=0.0))
    assert order == ["enqueue", "read"]  # a call that is longer than its turn: one


def test_peak_memory_counts_what_is_freed_again() -> None:
    def run() -> torch.Tensor:
        big = torch.ones(1 << 20)  # 4 MiB
        return big.sum() + torch.ones(1 << 18).sum()

    assert 4.9 < peak_mib(run, CPU) < 6.5


def record(**changes: object) -> Record:
    run = Run("r1", "head-dims", {"device": "h200", "torch": "2"})
    found = Record.of(run, "sartor", replace(SMALL, dim=64, dim_v=64))
    for key, value in {"ms": 1.0, "tflops": 1.0, "time": "2026-01-01", **changes}.items():
        setattr(found, key, value)
    return found


def test_head_dims_table_gives_the_line_between_powers_of_two() -> None:
    smem = {"smem_bytes": 96 << 10, "smem_padded_bytes": 128 << 10}
    rows = [record(dim=d, dim_v=d, ms=ms, **smem) for d, ms in ((64, 1.0), (96, 1.6), (128, 2.0))]
    table = tables.head_dims(rows, "sdpa-cudnn")
    cells = dict(zip(table.headers, table.rows[1], strict=True))
    assert cells["D"] == "96"
    assert (cells["FLOPs saved"], cells["smem saved"]) == ("25 %", "25 %")
    assert (cells["time / padded"], cells["time / line"]) == ("0.80", "1.07")


def test_head_dims_table_has_the_ratio_to_every_rival() -> None:
    times = {"sartor": 2.0, "sartor:triton": 3.0, "sdpa-flash": 5.0, "sdpa-cudnn": 3.0}
    table = tables.head_dims([record(provider=name, ms=ms) for name, ms in times.items()], "sdpa-cudnn")
    cells = dict(zip(table.headers, table.rows[0], strict=True))
    ratios = [cell for cell in cells.items() if cell[0].startswith("vs")]
    assert ratios == [("vs PyTorch SDPA (cuDNN)", "1.50x"), ("vs PyTorch SDPA (FlashAttention-2)", "2.50x")]


def test_head_dims_table_says_which_rival_was_wrong() -> None:
    errors = {"sartor": 1e-3, "sdpa-cudnn": 1e-3, "fa4": 1.0}
    rows = [record(provider=name, ms=2.0, err_max=error, err_budget=1e-2) for name, error in errors.items()]
    table = tables.head_dims(rows, "sdpa-cudnn")
    cells = dict(zip(table.headers, table.rows[0], strict=True))
    assert cells["vs PyTorch SDPA (cuDNN)"] == "1.00x"
    assert cells["vs FlashAttention-4"] == "1.00x†"
    assert table.notes[-1] == "†: its largest error is beyond its budget; it counts as no rival."


def test_visited_table_compares_masks_by_the_tiles_they_touch() -> None:
    size = {"seqlen_q": 256, "seqlen_kv": 256, "plan": "hopper_forward[128x128 w12 s6]"}
    rows = [record(mask=mask, tflops=rate, **size) for mask, rate in (("causal", 200.0), ("prefix64", 100.0))]
    table = tables.visited(rows, "flex")
    cells = [dict(zip(table.headers, row, strict=True)) for row in table.rows]
    assert [c["in visited tiles"] for c in cells] == ["75.0 %", "50.0 %"]
    assert [c["of causal's"] for c in cells] == ["100 %", "67 %"]


@pytest.mark.parametrize(("heads", "n", "mode", "gpu"), [
    ((8, 8), 1000, "fwd", (8, 8)), ((8, 8), 1000, "bwd", (8, 8)), ((8, 8), 4096, "fwd", (1, 1)),
    ((8, 2), 4096, "fwd", (1, 1)), ((8, 2), 4096, "bwd", (4, 1)), ((8, 2), 1000, "fwd", (8, 2)),
    ((32, 8), 16384, "bwd", (4, 1)),
])  # fmt: skip
def test_as_many_heads_are_judged_as_are_short(heads, n, mode, gpu) -> None:
    w = Workload(1, *heads, n, n, 64, 64, "float32", "full", mode)
    assert accuracy.judged(w, torch.device("cuda")) == gpu
    assert accuracy.judged(w, CPU)[1] == 1


def test_errors_are_told_result_by_result() -> None:
    """Forward and backward of a problem in one row, with what they are of the baseline's."""
    found = [
        record(provider=name, mode=mode, errors={f"{n} {what}": size for n in names for what in ("rel", "max")})
        for name, size in (("sartor", 2e-7), ("sdpa-efficient", 8e-7))
        for mode, names in (("fwd", ("out", "lse")), ("bwd", ("dq", "dk", "dv")))
    ]
    table = tables.errors(found, "sdpa-efficient")
    assert table.headers == ["out", "lse", "dq", "dk", "dv"]
    assert table.rows == [["2.0e-07 (0.25 / 0.25)"] * 5]
    assert tables.errors(found, "sdpa-math").rows == [["2.0e-07 (- / -)"] * 5]


def test_figures_without_evidence_say_so(tmp_path: Path) -> None:
    folder = tmp_path / "h200"
    folder.mkdir()
    ours = record(plan="triton_forward[128x64 w4 s2] grid", fingerprint="abc")
    (folder / "head-dims.jsonl").write_text(ours.to_json() + "\n")
    assert "unverified" in report.render("h200/head-dims/fwd", tmp_path)
    passed = {case(ours.provider, ours.workload): ["triton_forward[128x64 w4 s2]", "abc"]}
    other = {name: [plan, "abd"] for name, (plan, _) in passed.items()}
    for found, marked in (
        (passed, False),
        ({}, True),
        (other, True),
    ):
        (folder / "evidence.json").write_text(json.dumps({"runs": [{"fingerprints": found}]}))
        assert ("unverified" in report.render("h200/head-dims/fwd", tmp_path)) == marked


def test_report_rewrites_between_markers_only(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- sartor:report h200/paper/fwd -->\nstale\n<!-- /sartor:report -->\nb\n")
    assert not report.update(readme, tmp_path, check=True)
    report.update(readme, tmp_path, check=False)
    assert "stale" not in readme.read_text()
    assert readme.read_text().startswith("a\n")
    assert report.update(readme, tmp_path, check=True)
    with pytest.raises(ValueError, match="DEVICE/SUITE/VIEW"):
        report.rewrite("<!-- sartor:report nonsense -->\n<!-- /sartor:report -->", tmp_path)


def test_every_commit_of_a_table_is_named() -> None:
    rows = [record(), record(), record()]
    for r, commit, dirty in zip(rows, ("a" * 40, "b" * 40, "a" * 40), (False, True, False), strict=True):
        r.commit, r.dirty = commit, dirty
    assert "commit aaaaaaaaaa, bbbbbbbbbb with changes;" in report.provenance(rows, rows)


def test_a_rung_of_other_sources_is_called_unverified() -> None:
    rungs = [ladder.find("01"), ladder.find("02")]
    rows = [record(provider=rung.provider, plan="grid=1", fingerprint=rung.source_hash()) for rung in rungs]
    assert climb.outdated(rows, Evidence().covers) == []
    rows[1].fingerprint = "0" * 16
    (said,) = climb.outdated([*rows, record()], Evidence().covers)
    assert said.endswith(": rung 02.")
