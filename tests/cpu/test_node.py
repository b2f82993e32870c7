"""Calls with PyTorch's own node behind them, as GPUs have them; here on a CPU, in the place of PyTorch's kernel."""

from __future__ import annotations

import gc
import warnings
import weakref
from functools import cache

import pytest
import torch

import sartor
import settings
from sartor import mods, node, ops
from sartor.mods.recent import Recent
from sartor.problem import Call

NUMBERS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (7, 3), "softcap": 5.0, "softmax_scale": 0.3},
    "mask": {"mask": mods.Mask(lambda b, h, q, kv: (q - kv) % 3 == 0), "causal": True},
    "score": {"score": mods.Score(lambda s, b, h, q, kv: s * 2 + h - q / (kv + 1))},
}


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """The operator's kernels serve CPUs meanwhile."""
    monkeypatch.setattr(node, "_SERVED", [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is another kernel
        library = node.serve("CPU", "AutogradCPU")
    yield
    library._destroy()


def attend(options, layout="bshd", kernel="blocked"):
    """Attention of q, k and v, as `front` has it on a GPU."""
    options = {**options, "layout": layout, "kernel": kernel}

    @cache
    def plan(strides, deterministic):
        return node.Native(node.Work(ops.prepare(Call(*strides_of[strides], **options)), layout), torch.device("cpu"))

    strides_of = {}

    def call(*tensors):
        key = tuple((t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors)
        strides_of[key] = tensors
        out = plan(key, torch.are_deterministic_algorithms_enabled()).attend(*tensors)
        return sartor.attention(*tensors, **options) if out is None else out

    return call


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("setting", settings.SETTINGS)
def test_setting(setting, name):
    leaves = settings.inputs("cpu", torch.float32, 16)
    found = settings.SETTINGS[setting](attend(NUMBERS[name]), leaves)
    other = settings.results(lambda *t: sartor.attention(*t, kernel="blocked", **NUMBERS[name]), leaves)
    assert settings.same(found, other)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(layout, dtype):
    """In either, and of other strides: results, and that the node is PyTorch's."""
    call = attend({"causal": True}, layout)
    leaves = settings.inputs("cpu", dtype, 16)
    for turned in (leaves, [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in leaves]):
        given = turned if layout == "bshd" else [t.detach().transpose(1, 2).requires_grad_() for t in turned]
        found = settings.results(call, given)
        other = lambda *t: sartor.attention(*t, causal=True, kernel="blocked", layout=layout)  # noqa: E731
        assert settings.same(found, settings.results(other, given))
        out = call(*given)
        assert out.grad_fn.name() == "ScaledDotProductFlashAttentionForCpuBackward0"
        out.mul_(1)  # no view, so that a caller may change it, and backward says that it was
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_gradients_of_some():
    q, k, v = (t.detach() for t in settings.inputs("cpu", torch.float32, 16))
    call = attend({"causal": True})
    assert not call(q, k, v).requires_grad
    out = call(q, k.requires_grad_(), v)
    other = sartor.attention(q, k, v, causal=True, kernel="blocked")
    assert torch.equal(*(torch.autograd.grad(t.square().sum(), k)[0] for t in (out, other)))


def test_no_second_derivative():
    q, k, v = settings.inputs("cpu", torch.float32, 16)
    out = attend({})(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(dq.sum(), k)


def test_a_graph_outlives_its_plan():
    """The node keeps what its call is, and nothing else does."""
    q, k, v = settings.inputs("cpu", torch.float32, 16)
    native = node.Native(node.Work(ops.prepare(Call(q, k, v, kernel="blocked")), "bshd"), q.device)
    out, kept = native.attend(q, k, v), weakref.ref(native.handle)
    del native
    gc.collect()
    other = sartor.attention(q, k, v, kernel="blocked")
    assert torch.equal(*(torch.autograd.grad(t.square().sum(), q)[0] for t in (out, other)))
    del out
    gc.collect()
    assert kept() is None


def test_errors_are_told_as_they_are(monkeypatch):
    q, k, v = settings.inputs("cpu", torch.float32, 16)
    out = attend({})(q, k, v)

    def fails(*args, **kwargs):
        raise ValueError("of the backward")

    monkeypatch.setattr(ops, "_backward", fails)
    with pytest.raises(ValueError, match="of the backward"):
        out.sum().backward()
    with pytest.raises(NotImplementedError, match="is for CPUs: expected q, k and v there"):
        getattr(torch.ops.aten, node.OPERATOR)(q, k, v)


@pytest.mark.parametrize(
    "options",
    [{"sinks": torch.zeros(4)}, {"mask": torch.ones(96, 96, dtype=torch.bool)}, {"dropout_p": 0.5},
     {"out_dtype": torch.float32}, {"bias": torch.zeros(96, 96)}],
)  # fmt: skip
def test_what_has_more_to_keep_has_a_node_of_ours(options):
    q, k, v = settings.inputs("cpu", torch.bfloat16, 16)
    if "dropout_p" in options:
        options = {**options, "dropout_seed": torch.tensor([3])}
    assert not node.alone(ops.prepare(Call(q, k, v, **options)))


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors that say they are on a GPU, no plan from before, and the calls that go the long way."""
    made = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(ops, "PREPARED", Recent(64))
    monkeypatch.setattr(ops, "run", lambda *a, run=ops.run: made.append(a) or run(*a))
    return made


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_calls_of_q_k_and_v_are_found_by_a_short_key(layout, on_gpu):
    leaves = settings.inputs("cpu", torch.float32, 16)
    if layout == "bhsd":
        leaves = tuple(t.detach().transpose(1, 2).requires_grad_() for t in leaves)
    for options in (*NUMBERS.values(), {"causal": "top_left"}):
        for given in (leaves, [t.detach() for t in leaves]):
            out = sartor.attention(*given, kernel="blocked", layout=layout, **options)
            other = sartor.attention(*given, kernel="blocked", layout=layout, return_lse=True, **options)[0]
            assert torch.equal(out, other)
            assert not out.requires_grad or out.grad_fn.name() == "ScaledDotProductFlashAttentionForCpuBackward0"
            assert len(on_gpu) == 1  # the one that wants lse
            on_gpu.clear()


def test_other_places_and_orders_have_other_plans(on_gpu):
    """What a plan depends on besides shapes is part of the short key too, or seen by its guards."""

    def plans():
        return sum(len(found) if type(found) is tuple else 1 for found in ops.PREPARED.values())

    q, k, v = (t.detach() for t in settings.inputs("cpu", torch.float32, 16))
    for given in ((q, k, v), (settings.shifted(q), k, v), (settings.moved(q), k, v)):
        before = plans()
        sartor.attention(*given, kernel="blocked")
        assert plans() == before + 2  # by the short key, and by the call's
    before = plans()
    with settings.deterministic():
        sartor.attention(q, k, v, kernel="blocked")
    assert plans() == before + 2


def test_hooks_and_masks_of_tensors_go_the_long_way(on_gpu):
    leaves = settings.inputs("cpu", torch.float32, 16)
    with settings.hooked(settings.shifted, settings.moved):
        sartor.attention(*leaves, kernel="blocked")
    sartor.attention(*leaves, mask=torch.ones(96, 96, dtype=torch.bool), kernel="blocked")
    sartor.attention(*leaves, mask=mods.document(torch.zeros(2, 96, dtype=torch.int32)), kernel="blocked")
    assert len(on_gpu) == 3
    with pytest.raises(ValueError, match="window"):
        sartor.attention(*leaves, window=(1, -5), kernel="blocked")
