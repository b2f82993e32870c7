"""Attention gives the same values in every setting that users run it in, on a GPU."""

from __future__ import annotations

import pytest
import torch

import judged
import sartor
import settings
from sartor import ops
from sartor.mods.recent import Recent

pytestmark = [pytest.mark.gpu, pytest.mark.judges(*judged.NARROW)]
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

CALLS = settings.calls("cuda")
SETTINGS = settings.SETTINGS | {
    "default_device_cuda": settings.within(lambda: torch.device("cuda")),
    "default_device_cpu": settings.within(lambda: torch.device("cpu")),
}
COMPILED = settings.COMPILED | {"reduce_overhead": settings.compiled(mode="reduce-overhead", dynamic=False)}


@pytest.fixture
def plans(monkeypatch):
    """No plan from before: those made in a setting are what is looked at."""
    monkeypatch.setattr(ops, "PREPARED", Recent(2048))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_setting(setting, call, dtype, plans):
    leaves = settings.inputs("cuda", dtype)
    found = SETTINGS[setting](CALLS[call], leaves)
    assert settings.same(found, settings.results(CALLS[call], leaves))


@pytest.mark.parametrize("first", ["compiled first", "eager first"])
@pytest.mark.parametrize("call", ["full", "causal", "document", "packed", "cached"])
@pytest.mark.parametrize("setting", COMPILED)
def test_compiled(setting, call, first, plans):
    leaves = settings.inputs("cuda", torch.bfloat16)
    if first == "eager first":
        settings.results(CALLS[call], leaves)
    found = COMPILED[setting](CALLS[call], leaves)
    assert settings.same(found, settings.results(CALLS[call], leaves))


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


def test_autocast():
    leaves = settings.inputs("cuda", torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        out = sartor.attention(*leaves, causal=True)
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out.float().sum(), leaves)
    assert {g.dtype for g in gradients} == {torch.float32}
