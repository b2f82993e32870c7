"""Attention gives the same values in every setting that users run it in, on a GPU."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import judged
import sartor
import settings
from sartor import ops
from sartor.kernels.cuda import host
from sartor.mods.recent import Recent

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

CALLS = settings.calls("cuda")
SETTINGS = settings.SETTINGS | {
    "default_device_cuda": settings.within(lambda: torch.device("cuda")),
    "default_device_cpu": settings.within(lambda: torch.device("cpu")),
}
COMPILED = settings.COMPILED | {"reduce_overhead": settings.compiled(mode="reduce-overhead", dynamic=False)}
of_any_dtype, of_16_bits = (pytest.mark.judges(*judged.by(dtype, dim=64)) for dtype in (None, torch.bfloat16))


@pytest.fixture
def plans(monkeypatch):
    """No plan from before: those made in a setting are what is looked at."""
    monkeypatch.setattr(ops, "PREPARED", Recent(2048))


@of_any_dtype
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_setting(setting, call, dtype, plans):
    leaves = settings.inputs("cuda", dtype)
    found = SETTINGS[setting](CALLS[call], leaves)
    assert settings.same(found, settings.results(CALLS[call], leaves))


@of_16_bits
@pytest.mark.parametrize("first", ["compiled first", "eager first"])
@pytest.mark.parametrize("call", ["full", "causal", "document", "packed", "cached"])
@pytest.mark.parametrize("setting", COMPILED)
def test_compiled(setting, call, first, plans):
    leaves = settings.inputs("cuda", torch.bfloat16)
    if first == "eager first":
        settings.results(CALLS[call], leaves)
    found = COMPILED[setting](CALLS[call], leaves)
    assert settings.same(found, settings.results(CALLS[call], leaves))


@of_16_bits
@pytest.mark.parametrize("call", CALLS)
def test_graph(call, plans):
    """Captured by hand, forward and backward, and replayed on other data."""
    leaves = settings.inputs("cuda", torch.bfloat16)
    other = tuple(t.detach().flip(1).contiguous() for t in leaves)
    want = settings.results(CALLS[call], tuple(t.requires_grad_() for t in (t.clone() for t in other)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        settings.results(CALLS[call], leaves)  # autograd's own first use of a stream is outside of the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = settings.results(CALLS[call], leaves)
    torch.cuda.synchronize()
    with torch.no_grad():
        for leaf, t in zip(leaves, other, strict=True):
            leaf.copy_(t)
    graph.replay()
    assert settings.same(found, want)


@of_16_bits
@pytest.mark.parametrize("call", CALLS)
def test_streams(call, plans):
    """Calls on many streams at once, the first of each included."""
    leaves = settings.inputs("cuda", torch.bfloat16)
    want = settings.results(CALLS[call], leaves)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(settings.results(CALLS[call], leaves))
    torch.cuda.synchronize()
    assert all(settings.same(f, want) for f in found)


@of_16_bits
def test_memory_of_a_stream_that_grew_is_not_free_for_others(plans, monkeypatch):
    """Launches that are queued still count in the smaller workspace."""
    monkeypatch.setattr(host, "_WORKSPACES", {})
    small, large = (
        [torch.randn(1, n, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)] for n in (256, 4096)
    )
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        want = sartor.attention(*small, causal=True)
        torch.cuda._sleep(10**9)
        found = sartor.attention(*small, causal=True)
        sartor.attention(*large, causal=True)
    others = [torch.full((2**i,), 10**6, dtype=torch.int32, device="cuda") for i in range(5, 12) for _ in range(16)]
    torch.cuda.synchronize()
    assert torch.equal(found, want)
    assert all((t == 10**6).all() for t in others)


@of_16_bits
@pytest.mark.parametrize("call", CALLS)
def test_autocast(call):
    leaves = settings.inputs("cuda", torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        out = CALLS[call](*leaves)
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out.float().sum(), leaves)
    assert {g.dtype for g in gradients} == {torch.float32}


@of_any_dtype
def test_a_module_with_a_mask_is_moved():
    layer, x = settings.Layer(), torch.randn(2, 20, 64)
    want = layer(x)
    there = pickle.loads(pickle.dumps(copy.deepcopy(layer).to("cuda")))
    assert {t.device.type for t in there.mask.tensors} == {"cuda"}
    assert torch.allclose(there(x.cuda()).cpu(), want, rtol=1e-4, atol=1e-5)
    assert torch.allclose(there.to("cpu")(x), want, rtol=1e-5)


@of_any_dtype
def test_data_parallel_modules(tmp_path):
    settings.data_parallel("cuda", "cpu:gloo,cuda:nccl", str(tmp_path / "store"))


@of_16_bits
def test_in_one_thread():
    """What docs/notes/host.md advises for loops of small steps."""
    leaves = settings.inputs("cuda", torch.bfloat16)
    with torch.autograd.set_multithreading_enabled(False):
        found = settings.results(CALLS["causal"], leaves)
    assert settings.same(found, settings.results(CALLS["causal"], leaves))


@of_any_dtype
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_calls_of_q_k_and_v_have_pytorchs_node(layout, dtype, plans):
    leaves = settings.inputs("cuda", dtype)
    if layout == "bhsd":
        leaves = tuple(t.detach().transpose(1, 2).contiguous().requires_grad_() for t in leaves)
    for options in ({"causal": True}, {"window": (9, 2), "softcap": 5.0}):
        out = sartor.attention(*leaves, layout=layout, **options)
        assert out.grad_fn.name() == "ScaledDotProductFlashAttentionForCpuBackward0"
        with_lse = sartor.attention(*leaves, layout=layout, return_lse=True, **options)[0]
        assert settings.same((out.detach(),), (with_lse.detach(),))
        both = (torch.autograd.grad(t, leaves, out.detach(), retain_graph=True) for t in (out, with_lse))
        assert settings.same(*both)
        (dq,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            torch.autograd.grad(dq.sum(), leaves[1])
