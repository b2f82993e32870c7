"""A rank of a ring beside a link that is none: what is measured of transfers and steps, and how it is shown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sartor.distributed.machine import CPU as CPU_MACHINE
from sartor.distributed.machine import H200
from sartor.distributed.ring import Ring
from sartor.distributed.sharding import Sharding
from sartor.lab.measure import overlap, records, scaling
from sartor.lab.show import report, views
from sartor.lab.workloads import suites

ROOT = suites.checkout()
CPU = torch.device("cpu")
RANK = overlap.Plan(tokens=64, ranks=4, heads=(4, 2), dim=8, dtype="float32", rounds=2)
STEPS = scaling.Plan(
    heads=(4, 2), dim=8, dtype="float32", ring=(32, 64), shares=(2,), ulysses=(64,), usp=(32,), usp_shares=2,
    allgather=((256, 4),),
)  # fmt: skip


def test_transfers_take_what_the_link_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(overlap.LINKS, "far", (1e7, 1e-4))
    overlap.main(tmp_path, RANK)
    found = records.read(tmp_path / "cpu" / "overlap.jsonl")
    assert len(found) == 2 * 5
    steps = Ring(overlap.Rank(RANK, CPU).local, overlap.Rank(RANK, CPU).link("none", "far")).steps
    tokens = [max(sum(part.count for _, part in x) for x in (step.keys, step.given)) for step in steps]
    least = [1e3 * (1e-4 + n * 2 * 2 * 8 * 4 / 1e7) for n in tokens]  # ms of k and v, or of their gradients
    assert len(set(least)) == 2
    for r in found:
        transfers = [end - begin for begin, end in views.overlap.spans(r, "transfer")]
        if r.provider == "transfers:none:near":
            assert not transfers
        elif r.provider.endswith("far"):
            order = (0, 1, 2) if r.mode == "fwd" else (0, 1, 2, 0, 1, 2)
            assert all(ms >= least[t] for ms, t in zip(transfers, order, strict=True))
    text = report.render("cpu/overlap/overlap", tmp_path)
    assert "ms of one of 4 ranks with 64 tokens each (H=4 on 2, D=8, float32, causal)" in text
    assert text.count("| InfiniBand, 0.0100 GB/s |") == 2
    pytest.importorskip("matplotlib")
    (file,) = views.drawn(found, tmp_path, views.ALONE["overlap"])
    assert file.name == "overlap-timeline.png"


def test_the_last_gradients_travel_while_something_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, events = overlap.Rank(RANK, CPU), []
    link = rank.link("none", "near")
    rank.forward(link)
    for owner, name in ((rank.local, "gradients"), (link, "post")):
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, n=name, f=inner, **k: (events.append(n), f(*a, **k))[1])
    rank.backward(link)
    assert events == ["post", *["gradients", "post"] * 2, "post", "gradients", "post", "gradients", "post", "gradients"]


def test_a_rank_alone_waits_for_nothing() -> None:
    one = overlap.Rank(RANK._replace(ranks=1), CPU)
    link = one.link("overlapped", "far")
    one.forward(link)
    one.backward(link)
    assert Ring(one.local, link).steps == []
    assert not link.transfers


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of a short plan."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(scaling, "BUDGET", replace(scaling.BUDGET, rounds=1, turn_ms=0.1, warmup_ms=0.0))
    scaling.main(tmp_path, STEPS)
    return tmp_path


def test_steps_hold_the_pairs_that_are_seen(measured: Path) -> None:
    found = records.read(measured / "cpu" / "scaling.jsonl")
    assert len(found) == 2 * len(list(scaling.blocks(STEPS)))
    for at, r in zip(scaling.blocks(STEPS), found[::2], strict=True):
        shards = Sharding.parse(at.sharding)
        owners = range(shards.ranks) if at.owner < 0 else (at.owner,)
        keys = torch.cat([shards.tokens(owner) for owner in owners])
        pairs = (shards.tokens(at.rank)[:, None] >= keys).sum().item()
        assert r.counters["pairs"] == pairs
        assert r.counters["fraction"] == pytest.approx(pairs / len(shards.tokens(at.rank)) / len(keys), rel=1e-5)
        assert r.ms > 0


def test_tables_and_pictures_of_the_forecast(measured: Path) -> None:
    pytest.importorskip("matplotlib")
    text = report.render("cpu/scaling/forecast", measured)
    assert "| 16M | 1024 |" in text
    assert "| ring, own | 4 on 2 | 64 | 64 | 51% |" in report.render("cpu/scaling/blocks", measured)
    (file,) = views.drawn(records.read(measured / "cpu" / "scaling.jsonl"), measured, views.ALONE["scaling"])
    assert file.name == "scaling-forecast.png"


@pytest.mark.skipif(ROOT is None, reason="needs a checkout")
def test_the_built_in_machine_is_that_of_the_records() -> None:
    found = records.latest(records.read(ROOT / "benchmarks" / "results" / "h200" / "scaling.jsonl"))
    made = scaling.machine(found, H200)
    for ours, theirs in ((H200.forward, made.forward), (H200.backward, made.backward)):
        assert [n for n, _ in ours] == [n for n, _ in theirs]
        assert [rate for _, rate in ours] == pytest.approx([rate for _, rate in theirs], rel=1e-5)
    assert H200.step == pytest.approx(made.step, rel=1e-5)
    assert {r.run_id for r in found if r.mode in ("fwd", "bwd")} == set(re.findall(r"\d{8}T\d{6}-\w{4}", H200.source))


def test_few_rows_leave_a_device_idle() -> None:
    full = CPU_MACHINE.rate(False, 512, 1, 2)
    one = replace(CPU_MACHINE, rows=1000)
    assert one.rate(False, 512, 250, 2) == full / 4
    assert one.rate(False, 512, 4000, 2) == full
