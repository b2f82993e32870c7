"""What `sartor doctor --distributed` measures, and that "auto" goes by it."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch

import sartor.distributed as context
from sartor.distributed import machine
from sartor.distributed.machine import CPU, H200, Machine, file_of, machine_of
from sartor.distributed.transport import Transport
from sartor.lab.measure import context as measured_context
from sartor.lab.measure import links, several
from sartor.lab.measure.records import Record, Run
from sartor.lab.show import report
from sartor.lab.workloads.workload import Workload

SHORT = links.Plan(("float32", "float64"), (32, 64), 64, 1, 8, 1 << 16)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where machines are kept; what was read before is forgotten."""
    monkeypatch.setenv("SARTOR_CACHE", str(tmp_path))
    machine._measured.cache_clear()
    yield tmp_path
    machine._measured.cache_clear()


def measured(groups):
    return links.measure(torch.device("cpu"), SHORT)


def test_all_ranks_measure_the_same(world, folder):
    found = world.run(4, measured)
    assert all(one == found[0] for one in found)
    one = found[0]
    assert one.host_ranks == 4
    assert [n for n, _ in one.forward] == [n for n, _ in one.backward] == [32, 64]
    assert [size for size, _ in one.precisions] == [4, 8]
    assert min(one.near, one.near_latency, one.step, one.memory, *(rate for _, rate in one.forward)) > 0
    assert "by 4 ranks over gloo" in one.source
    cpu = torch.device("cpu")
    assert machine_of(cpu) == CPU
    one.write(file_of(cpu))
    machine._measured.cache_clear()
    assert machine_of(cpu) == one
    assert machine_of(torch.device("meta")) == H200


def test_a_file_that_is_none_is_ignored_aloud(folder):
    path = file_of(torch.device("cpu"))
    for text in ("{", "[]", '{"name": "cpu"}'):
        path.write_text(text)
        machine._measured.cache_clear()
        with pytest.warns(UserWarning, match=re.escape(f"{path} is ignored")):
            assert machine_of(torch.device("cpu")) == CPU
    replace(CPU, near=0.0).write(path)
    with pytest.raises(ValueError, match="rates, ranks and memory > 0"):
        Machine.read(path)


def asked(groups, folder):
    """What "auto" takes by the machine of a folder."""
    before = os.environ.get("SARTOR_CACHE", "")
    os.environ["SARTOR_CACHE"] = folder
    machine._measured.cache_clear()
    q, k, v = (torch.empty(1, 512, 4, 8) for _ in range(3))
    found = context.explain(q, k, v, group=groups[4], causal=True, layout_of_sequence="zigzag")
    os.environ["SARTOR_CACHE"] = before
    machine._measured.cache_clear()
    return found.method, found.machine.source


@pytest.mark.parametrize(("latency", "rate", "method"), [(1e-9, 1e6, "ulysses"), (1.0, 1e12, "allgather")])
def test_auto_goes_by_it(world, folder, latency, rate, method):
    made = replace(CPU, near_latency=latency, near=rate, step=1e-9, source="of this test")
    made.write(file_of(torch.device("cpu")))
    assert set(world.run(4, asked, str(folder))) == {(method, "of this test")}


def bytes_of(groups, w, method, ranks):
    from torch.distributed.device_mesh import DeviceMesh

    where = {"group": groups[ranks]}
    if method == "usp":
        where = {"mesh": DeviceMesh("cpu", torch.arange(ranks).view(2, ranks // 2))}
    run = Run("test", "test", {})
    return [r.counters for r in measured_context.traffic(w, where, method, groups[ranks], run)]


@pytest.mark.parametrize("heads", [(4, 2), (4, 1)])
@pytest.mark.parametrize(
    ("method", "ranks"), [("ring", 3), ("allgather", 4), ("ulysses", 2), ("ulysses", 4), ("usp", 4)]
)
@pytest.mark.parametrize("mask", ["causal", "window64"])
def test_ranks_give_what_the_model_says(world, heads, method, ranks, mask):
    w = Workload(2, *heads, 768, 768, 8, 8, "bfloat16", mask)
    for answer in world.run(ranks, bytes_of, w, method, ranks):
        for counters in answer:
            assert counters["bytes given"] == counters["bytes by the model"] > 0


def transfers_of(groups, method, names):
    """Transfers of a forward and of a backward, at the second call; without and with a gradient from lse."""
    group, counts = groups[2], []
    q, k, v = (torch.randn(1, 8, 4, 16, requires_grad=True) for _ in range(3))
    for with_lse in (False, True):
        for _ in range(2):
            with ExitStack() as stack:
                made = [
                    stack.enter_context(
                        mock.patch.object(Transport, name, autospec=True, side_effect=getattr(Transport, name))
                    )
                    for name in names
                ]
                out, lse = context.attention(q, k, v, group=group, method=method, return_lse=True)
                forward = sum(one.call_count for one in made)
                torch.autograd.grad(out.sum() + lse.sum() if with_lse else out.sum(), (q, k, v))
                both = sum(one.call_count for one in made)
        counts.append((forward, both - forward))
    return counts


@pytest.mark.parametrize(
    ("method", "names", "wanted"),
    [("ulysses", ("all_to_all",), (2, 2)), ("allgather", ("gather", "reduce_scatter"), (1, 2))],
)
def test_what_goes_the_same_way_is_one_transfer(world, method, names, wanted):
    for counts in world.run(2, transfers_of, method, names):
        assert counts == [wanted, wanted]


def timed(groups):
    cpu = torch.device("cpu")
    plan = several.Plan(((4, 2),), (256,), 16, "float32", 2)
    return [r.to_json() for r in several.measure(plan, cpu, Run.start(several.SUITE, cpu))]


def test_several(world, tmp_path):
    """Every method and its transfers, by all ranks; and the table of it, in which what PyTorch refuses is said."""
    lines = world.run(4, timed)[0]
    found = [Record.from_json(line) for line in lines]
    methods = ["ring", "allgather", "ulysses", "usp"]
    names = ["one", *(f"{of}:{method}" for method in methods for of in ("context", "transfers"))]
    assert [(r.mode, r.provider) for r in found] == [(mode, name) for mode in ("fwd", "bwd") for name in names]
    assert all(0 < r.ms_p20 <= r.ms <= r.ms_p80 for r in found)
    assert all(r.errors["out rel"] < 1e-5 for r in found if r.provider.startswith("context"))
    refused = replace(found[0], provider="pytorch:alltoall", ms=None, skipped="NotImplementedError: no such heads")
    (tmp_path / "cpu").mkdir()
    text = "\n".join([*lines, refused.to_json()])
    (tmp_path / "cpu" / "several.jsonl").write_text(text)
    table = report.render("cpu/several/several", tmp_path)
    assert "ms of 4 GPUs / gain over one" in table
    for row in ("| one GPU |", "| ring |", "| usp |", "PyTorch, alltoall, 4 on 2: NotImplementedError: no such heads."):
        assert row in table


def test_doctor_needs_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="must be run by torchrun"):
        next(links.examine())
