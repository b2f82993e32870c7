"""Launches replayed in C compute what those that Python makes do, bit by bit, wherever calls run."""

from __future__ import annotations

import threading

import pytest
import torch

import judged
import sartor
import settings
from sartor import dynamic_shapes, node, ops
from sartor.kernels.cuda import row
from sartor.mods.recent import Recent
from sartor.replay import calls, library, lists

pytestmark = [pytest.mark.gpu, pytest.mark.judges(*judged.by(torch.bfloat16, dim=64))]
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

CALLS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (30, 4), "softcap": 5.0},
    "sinks": {"sinks": torch.zeros(4, device="cuda"), "causal": True},
}


@pytest.fixture
def by_python(monkeypatch):
    """Calls a function with no plan from before, while Python makes the launches."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(row, "launcher", lists.Launched)
            patch.setattr(ops, "PREPARED", Recent(2048))
            patch.setattr(dynamic_shapes.DynamicShapes, "of", lambda *_: None)
            return function(*args)

    monkeypatch.setattr(ops, "PREPARED", Recent(2048))
    return call


def replayed(monkeypatch):
    """How many lists of launches C has replayed since."""
    started = []
    start = lists.Replayed.start
    monkeypatch.setattr(lists.Replayed, "start", lambda self, *args: started.append(1) or start(self, *args))
    return started


@pytest.fixture(autouse=True)
def deterministic():
    """Bits repeat, and calls of q, k and v alone have PyTorch's node, as calls with deterministic=True do not."""
    with settings.deterministic():
        yield


def attend(options):
    return lambda *qkv: sartor.attention(*qkv, **options)


def equal(found, want):
    return all(map(torch.equal, found, want))


def test_there_is_a_library():
    assert library.why_not() in ("", "needs a C compiler, found none of cc, gcc, clang", "SARTOR_REPLAY=0 is set")


@pytest.mark.parametrize("call", ["full", "causal", "window"])
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_new_lengths(layout, heads_kv, call, by_python, monkeypatch):
    """Launched by functions of lengths, they have the bits of a plan."""
    function, used, like = attend(CALLS[call] | {"layout": layout}), [], lists.Replayed.like.__func__
    monkeypatch.setattr(lists.Replayed, "like", classmethod(lambda *args: used.append(1) or like(*args)))
    monkeypatch.setattr(dynamic_shapes, "KNOWN", Recent(256))
    axis, lengths = 1 if layout == "bshd" else 2, range(700, 640, -7)
    for n in lengths:
        shapes = [(2, 4, n, 64), (2, heads_kv, n + 64, 64), (2, heads_kv, n + 64, 64)]
        leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(2, axis) for shape in shapes]
        leaves = [t.detach().requires_grad_() for t in leaves]
        found = [t.clone() for t in settings.results(function, leaves)]
        assert equal(found, by_python(settings.results, function, leaves)), n
    assert len(used) > len(lengths)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_same_bits(call, dtype, by_python, monkeypatch):
    """At the first call and at later ones, of the same tensors and of others."""
    function, started = attend(CALLS[call]), replayed(monkeypatch)
    leaves = settings.inputs("cuda", dtype)
    others = tuple(t.detach().flip(1).contiguous().requires_grad_() for t in leaves)
    want = [by_python(settings.results, function, given) for given in (leaves, others)]
    assert float(want[0][0].abs().max()) > 0
    assert not started
    for _ in range(3):
        for given, results in zip((leaves, others), want, strict=True):
            assert equal(settings.results(function, given), results)
    assert bool(started) == (library.why_not() == "")


@pytest.mark.parametrize("call", ["full", "causal", "window"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("parts", [False, True], ids=["", "parts"])
def test_later_calls_need_no_python(call, layout, parts, by_python, monkeypatch):
    """Once the first one of a plan was made: bits are as Python's, where results repeat. `parts`: of wider tensors."""
    leaves = [t.detach() for t in settings.inputs("cuda", torch.bfloat16)]
    if layout == "bhsd":
        leaves = [t.transpose(1, 2).contiguous() for t in leaves]
    if parts:
        leaves = [torch.stack([t, -t], 2)[:, :, 0] for t in leaves]
    leaves = tuple(t.requires_grad_() for t in leaves)

    function = attend(CALLS[call] | {"layout": layout})
    want = by_python(settings.results, function, leaves)
    assert float(want[0].abs().max()) > 0
    made, forward, way = [], node.Work.followed, node.Work.backward
    monkeypatch.setattr(node.Work, "followed", lambda self, *given: made.append("forward") or forward(self, *given))
    monkeypatch.setattr(node.Work, "backward", lambda self, *given: made.append("backward") or way(self, *given))
    for _ in range(4):
        assert equal(settings.results(function, leaves), want)
    assert made == ["forward", "backward"] * (1 if calls.why_not() == "" else 4)


@pytest.mark.parametrize("call", ["full", "causal"])
def test_threads_and_streams(call, by_python):
    function, leaves = attend(CALLS[call]), settings.inputs("cuda", torch.bfloat16)
    want, failed = by_python(settings.results, function, leaves), []

    def run():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found = settings.results(function, leaves)
            torch.cuda.current_stream().synchronize()
            failed.append(not equal(found, want))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [False] * 3


def test_what_arrives_may_change(by_python):
    """Strides of what arrives, and whether PyTorch is to be deterministic, from one backward to the next."""
    leaves = settings.inputs("cuda", torch.bfloat16)
    function = attend({"causal": True})

    def gradients(dout):
        return torch.autograd.grad(function(*leaves), leaves, dout)

    out = function(*leaves).detach()
    turned = out.transpose(1, 2).contiguous().transpose(1, 2)
    want = by_python(gradients, out)
    for dout in (out, turned, settings.shifted(out), out, turned):
        assert equal(gradients(dout), want)
    torch.use_deterministic_algorithms(False)
    for _ in range(3):
        assert settings.same(gradients(out), want)
    torch.use_deterministic_algorithms(True)
    assert equal(gradients(out), want)
    total = torch.autograd.grad(function(*leaves).float().sum(), leaves)
    assert equal(total, by_python(gradients, torch.ones_like(out)))
    (dq,) = torch.autograd.grad(function(*leaves).sum(), leaves[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(dq.sum(), leaves[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_device_than_the_current_one(by_python):
    function, leaves = attend({"causal": True}), settings.inputs("cuda", torch.bfloat16)
    there = tuple(t.detach().to("cuda:1").requires_grad_() for t in leaves)
    want = by_python(settings.results, function, leaves)
    for _ in range(3):
        assert equal([t.to("cuda:0") for t in settings.results(function, there)], want)
        assert equal(settings.results(function, leaves), want)
