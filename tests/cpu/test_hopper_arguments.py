"""What the Hopper kernels are launched with: each parameter gets the value that its name says, no other of its type."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import sartor
from sartor import mods, nvrtc, ops, plan
from sartor.device import ARCHITECTURES, Device
from sartor.kernels import blocks
from sartor.kernels.cuda import host, pairs, params
from sartor.kernels.cuda.row import Row
from sartor.kernels.hopper import forward
from sartor.kernels.triton import launch
from sartor.mods.recent import Recent
from sartor.problem import Call, Problem

LOG2_E, SCALE = math.log2(math.e), 0.37
LENGTHS = {
    "heads_kv": 3,
    "group": 2,
    "seqlen_q": 70,
    "seqlen_kv": 90,
}  # all different, so that none can stand for another
pytestmark = pytest.mark.skipif(not launch.available(), reason="needs Triton, whose launches stand between")


@pytest.fixture
def launches(monkeypatch) -> Iterator[dict[str, dict[str, Any]]]:
    """The arguments of each kernel's launch by name, after a call. A tensor map is the address that it is of."""
    found: dict[str, dict[str, Any]] = {}
    plan.choose_backward.cache_clear()

    def record(kernel, grid, values):
        found[kernel.name] = kernel.fixed | values
        assert found[kernel.name].keys() == set(kernel.params.types)

    monkeypatch.setattr(nvrtc, "missing", lambda: "")
    monkeypatch.setattr(nvrtc, "tensor_map", lambda address, *facts: address.to_bytes(8, "little"))

    def start(row, values):
        for one in row.named(values):
            record(*one)

    monkeypatch.setattr(nvrtc.Kernel, "launch", record)
    monkeypatch.setattr(Row, "start", start)
    monkeypatch.setattr(host, "_built", lambda *_: None)
    monkeypatch.setattr(launch, "repeat", lambda *_: True)
    monkeypatch.setattr(Device, "of", classmethod(lambda *_: ARCHITECTURES[90]))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(ops, "PREPARED", Recent(2048))
    yield found
    plan.choose_backward.cache_clear()


def inputs(dtype: torch.dtype, dim: int = 64) -> Iterator[torch.Tensor]:
    """q, k, v with different strides in every dim, each within a wider tensor."""
    for i, (n, heads) in enumerate(((70, 6), (90, 3), (90, 3))):
        yield torch.zeros((2, n + i, heads + i, dim + 8 * i), dtype=dtype)[:, :n, :heads, :dim].requires_grad_()


def strides(name: str, t: torch.Tensor) -> dict[str, int]:
    return {f"{name}_batch": t.stride(0), f"{name}_head": t.stride(2), f"{name}_row": t.stride(1)}


def places(**tensors: torch.Tensor) -> dict[str, int]:
    return {name: t.data_ptr() for name, t in tensors.items()}


def contains(given: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return {name: given[name] for name in wanted} == pytest.approx(wanted)


def test_forward(launches):
    q, k, v = (t.detach() for t in inputs(torch.bfloat16))
    sinks = torch.zeros(6)
    out, lse = sartor.attention(q, k, v, softmax_scale=SCALE, sinks=sinks, causal=True, return_lse=True)
    given = launches["hopper_forward"]
    assert contains(given, LENGTHS | strides("out", out) | places(out=out, lse=lse, sinks=sinks))
    assert contains(given, {"factor": SCALE * LOG2_E, "scale": SCALE})
    for name, t in {"q_map": q, "k_map": k, "v_map": v, "out_map": out}.items():
        assert int.from_bytes(given[name][:8], "little") == t.data_ptr(), name
    rows = forward.INPUTS.unpack(given["inputs"])
    assert rows == tuple(x for t in (q, k, v) for x in (t.data_ptr(), t.stride(0), t.stride(2), t.stride(1)))


def test_schedule(launches):
    q = torch.zeros((1, 64 * 64, 64, 128), dtype=torch.bfloat16)
    sartor.attention(q, q, q)
    given = launches["hopper_forward"]
    numbers = [given[name] for name in ("tiles_head", "tiles", "whole", "splits", "width")]
    assert numbers == [21, 1432, 1320, 48, 2]
    assert given["section"] == 32


def test_merge(launches):
    q, k = (torch.zeros((1, n, 6, 64), dtype=torch.bfloat16)[:, :, ::2] for n in (5, 9000))
    out, lse = sartor.attention(q, k, k, return_lse=True)
    first, given = launches["hopper_forward"], launches["hopper_merge"]
    assert contains(given, places(out=out, lse=lse) | strides("out", out) | {"heads": 3, "seqlen_q": 5, "wide": 0})
    assert (given["outs"], given["sums"], given["num_splits"]) == (first["out"], first["lse"], first["splits"])
    assert contains(first, {"out_batch": 3 * 5 * 64, "out_head": 5 * 64, "out_row": 64})


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward(launches, softcap, deterministic):
    q, k, v = inputs(torch.bfloat16)
    options = {"softmax_scale": SCALE, "softcap": softcap, "causal": True, "deterministic": deterministic}
    out = sartor.attention(q, k, v, **options)
    dout = torch.zeros_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    given, lengths = launches["preprocess"], {"heads_q": 6, "seqlen_q": 70}
    assert contains(given, lengths | strides("out", out) | strides("dout", dout) | places(out=out, dout=dout))
    assert given["lse"] not in (given["delta"], given["lse_log2"], given["sums"])
    sweep = launches["hopper_backward"]  # the last one, of dk and dv
    assert contains(sweep, LENGTHS)
    assert contains(sweep, {"factor": LOG2_E * (1 if softcap else SCALE), "scale": SCALE})
    assert contains(sweep, {"lse": given["lse_log2"], "delta": given["delta"]})
    for name, t in {"held_x": k, "held_y": v, "x": q, "y": dout, "dx": dk, "dy": dv}.items():
        assert int.from_bytes(sweep[name][:8], "little") == t.data_ptr(), name
    if not deterministic:
        given = launches["round_dq"]
        assert contains(given, lengths | places(dq=dq) | strides("dq", dq) | {"scale": SCALE, "sums": sweep["sums"]})
        given = launches["round_parts"]
        assert contains(given, places(dk=dk, dv=dv) | strides("dk", dk) | strides("dv", dv) | {"scale": SCALE})
        assert contains(given, {"heads_kv": 3, "seqlen_kv": 90, "parts": 2, "marks": sweep["marks"]})
        assert contains(sweep, {"parts": 2, "partial": given["partial"]})


@pytest.mark.parametrize("keys", [90, 1])
def test_backward_of_a_bias(launches, keys):
    """What rows that it may bury need; and that of pairs of queries and keys comes by a map."""
    q, k, v = inputs(torch.bfloat16)
    sinks, bias = torch.zeros(6), torch.zeros(6, 70, 96, dtype=torch.bfloat16)[..., :keys]
    out = sartor.attention(q, k, v, softmax_scale=SCALE, bias=bias, sinks=sinks)
    torch.autograd.grad(out, (q, k, v), out)
    rows = {"total": 2 * 6 * 80}  # of each head's 80 where there are 70
    given, sweep, before = launches["find_highest"], launches["hopper_backward"], launches["preprocess"]
    assert contains(given, LENGTHS | rows | strides("q", q) | strides("k", k) | places(q=q, k=k, sinks=sinks, a0=bias))
    assert contains(given, {"scale": SCALE, "lse": before["lse"]})
    assert contains(sweep, {"lse": given["log2_sum"], "gain": given["gain"], "rows": rows["total"], "factor": LOG2_E})
    assert ("added" in sweep) == (keys == 90)
    if keys == 90:
        assert int.from_bytes(sweep["added"][:8], "little") == bias.data_ptr()
    addresses = [sweep[name] for name in ("lse", "delta", "gain", "sums")] + [before["lse_log2"]]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("kind", ["bias", "mask"])
@pytest.mark.parametrize("shape", [(2, 6), (2, 1), (1, 6), (1, 1)])
def test_what_the_copy_engine_brings(launches, shape, kind):
    """A tensor of pairs comes by a map; its places do not change with an item or a head that share it."""
    q, k, v = (t.repeat_interleave(2, 1) for t in inputs(torch.bfloat16))  # too many to share a slice
    whole = torch.ones(*shape, 140, 192, dtype=torch.bfloat16 if kind == "bias" else torch.bool)[..., :180]
    for given, address in ((whole, whole.data_ptr()), (whole[:, :, :1].expand(-1, -1, 140, -1), None)):
        sartor.attention(q, k, v, **{kind: given})
        launched = launches["hopper_forward"]
        at = int.from_bytes(launched["near0"][:8], "little")
        assert address is None or at == address  # of one row, expanded, a copy
        assert contains(launched, {"near0_by_item": int(shape[0] > 1), "near0_by_head": int(shape[1] > 1)})


@pytest.mark.parametrize("shape", [(2, 6), (2, 1), (1, 6), (1, 1)])
def test_backward_under_a_bool_tensor(launches, shape):
    """It comes by a map; its places do not change with an item or a head that share it."""
    q, k, v = inputs(torch.bfloat16)
    mask = torch.ones(*shape, 70, 96, dtype=torch.bool)[..., :90]
    out = sartor.attention(q, k, v, mask=mask)
    torch.autograd.grad(out, (q, k, v), out)
    sweep = launches["hopper_backward"]
    assert int.from_bytes(sweep["seen"][:8], "little") == mask.data_ptr()
    assert contains(sweep, {"seen_by_item": int(shape[0] > 1), "seen_by_head": int(shape[1] > 1)})


@pytest.mark.parametrize("shape", [(2, 6), (2, 1), (1, 6)])
def test_backward_to_a_bias(launches, shape):
    """Its gradient is stored by a map, or added up where it is broadcast: there places do not change."""
    q, k, v = inputs(torch.bfloat16)
    whole = torch.zeros(*shape, 70, 96, dtype=torch.bfloat16, requires_grad=True)
    out = sartor.attention(q, k, v, bias=whole[..., :90])
    (made,) = torch.autograd.grad(out, whole, out)
    assert made.shape == whole.shape
    sweep = launches["hopper_backward"]
    assert contains(sweep, {"by_item": int(shape[0] > 1), "by_head": int(shape[1] > 1)})
    if shape == (2, 6):
        assert sweep["dadded"] != sweep["added"]
    else:
        assert contains(sweep, {"dsums_by_item": int(shape[0] > 1), "dsums_by_head": int(shape[1] > 1)})


def test_block_lists(launches, monkeypatch):
    """Of keys for the forward and of queries for the backward, with planes of items and of heads."""
    monkeypatch.setattr(blocks, "_KEPT", {})
    q, k, v = inputs(torch.bfloat16)
    out = sartor.attention(q, k, v, mask=mods.Mask(lambda b, h, q, kv: (q + kv) % (b + h + 2) == 0))
    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    (of_keys, of_queries), planes = blocks._KEPT.values(), []
    for name, found in (("hopper_forward", of_keys), ("hopper_backward", of_queries)):
        given = launches[name]
        assert contains(given, places(starts=found.starts, entries=found.entries, bits=found.bits))
        planes.append((given["plane_batch"], given["plane_head"]))
    assert planes == [(3, 1), (6, 1)]  # of key heads, whose queries share tiles; of heads


@pytest.mark.parametrize("dims", [(192, 192), (192, 128)])
def test_wide_backward(launches, dims):
    q, k, v = inputs(torch.bfloat16, dims[0])
    v = v[..., : dims[1]].detach().requires_grad_()
    out = sartor.attention(q, k, v, softmax_scale=SCALE, causal=True)
    dout = torch.zeros_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    given = launches["preprocess"]
    assert contains(given, {"heads_q": 6, "seqlen_q": 70} | strides("out", out) | places(out=out, dout=dout))
    first, second = launches["wide_dkdv"], launches["wide_dq"]
    assert contains(first, LENGTHS)
    assert contains(first, {"factor": LOG2_E * SCALE, "scale": SCALE})
    assert contains(first, {"lse": given["lse_log2"], "delta": given["delta"]})
    piece = {"first_head": 0, "first_tile": 0, "tiles": 2, "skew": 1}  # 20 more keys than queries
    assert contains(first, piece)
    assert contains(second, LENGTHS | piece | {"scale": SCALE})
    assert contains(second, {"resumes": 0, "ends": 1, "folds": 1})
    assert contains(second, {name: first[name] for name in ("ds", "written", "zeros")})
    addresses = [first[name] for name in ("lse", "delta", "ds", "written", "zeros", "marks")] + [second["marks"]]
    assert len(set(addresses)) == len(addresses)
    for name, t in {"k": k, "v": v, "q": q, "dout": dout, "dk": dk, "dv": dv}.items():
        assert int.from_bytes(first[name][:8], "little") == t.data_ptr(), name
    assert int.from_bytes(second["dq"][:8], "little") == dq.data_ptr()
    assert second["k"] == first["k"]


def test_forward_of_float32(launches):
    q, k, v = (t.detach() for t in inputs(torch.float32))
    sinks = torch.zeros(6)
    out, lse = sartor.attention(q, k, v, softmax_scale=SCALE, sinks=sinks, return_lse=True, kernel="fp32")
    given = launches["hopper_fp32"]
    tensors = {"q": q, "k": k, "v": v, "out": out}
    assert contains(given, LENGTHS | places(**tensors, lse=lse, sinks=sinks))
    for name, t in tensors.items():
        assert contains(given, strides(name, t))
    for name in ("k", "v"):
        assert int.from_bytes(given[f"{name}_map"][:8], "little") == given[f"{name}_pairs"]
    assert given["scale"] == pytest.approx(SCALE, rel=1e-5)
    assert given["factor"] == pytest.approx(SCALE * LOG2_E, rel=1e-5)
    assert given["noise"] == pytest.approx(pairs.noise(Problem.of(Call(q, k, v, softmax_scale=SCALE))))


def test_backward_of_float32(launches):
    q, k, v = inputs(torch.float32)
    sinks = torch.zeros(6)
    out = sartor.attention(q, k, v, softmax_scale=SCALE, sinks=sinks)
    _, dk, dv = torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    given = launches["hopper_fp32_backward"]  # the last one, of dk and dv
    assert contains(given, LENGTHS | places(dx=dk, dy=dv, sinks=sinks) | strides("dx", dk) | strides("dy", dv))
    assert given["scale"] == SCALE
    assert given["factor"] == pytest.approx(SCALE * LOG2_E, rel=1e-5)
    assert given["noise"] == pytest.approx(pairs.noise(Problem.of(Call(q, k, v, softmax_scale=SCALE))))
    addresses = [given[name] for name in ("unit_hx", "unit_hy", "unit_x", "unit_y", "lse", "delta", "gain", "marks")]
    assert len(set(addresses)) == len(addresses)


def test_a_launch_takes_all_values_and_no_other():
    kernel = nvrtc.Kernel(None, params.Params("f", n="int", scale="float"), 32, fixed={"scale": 1.0})
    for values in ({}, {"n": 1, "scale": 2.0}, {"m": 1}):
        with pytest.raises(TypeError, match="f takes n, got"):
            kernel.launch(1, values)
    with pytest.raises(TypeError, match="n of f must be a pointer or one of"):
        params.Params("f", n="u32")
