"""Masks that leave holes in their rows, by block lists (`kernels/blocks.py`), against pairs taken one by one."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

import sartor
from sartor import kernels, mods, nvrtc, ops, testing
from sartor.device import Device
from sartor.kernels import blocks
from sartor.kernels.spec import Operands, Plan
from sartor.plan import choose
from sartor.problem import Call, Problem, aux_values

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and not nvrtc.missing()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and NVRTC"),
    pytest.mark.judges("hopper_forward"),
]
SPEC = kernels.load("hopper_forward") if HOPPER else None
DEVICE = Device.of(torch.device("cuda")) if HOPPER else None
WIDTH = 20  # of an image


def natten(b, h, q, kv):
    return ((q // WIDTH - kv // WIDTH).abs() <= 3) & ((q % WIDTH - kv % WIDTH).abs() <= 3)


HOLES = {
    "natten": mods.Mask(natten),
    "dilated": mods.Mask(lambda b, h, q, kv: ((q - kv).abs() <= 200) & ((q - kv) % 4 == 0)),
    "blocks": mods.Mask(lambda b, h, q, kv: (q // 128 + kv // 128) % 3 == 0),  # full tiles, and empty ones
    "scattered": mods.Mask(lambda b, h, q, kv: (q * 7 + kv * 13) % 257 < 2),  # late first keys, rows without any
    "items": mods.Mask(lambda b, h, q, kv: ((q + kv + 64 * b) % 256 < 40) & (kv >= 30 * b)),
    "heads": mods.Mask(lambda b, h, q, kv: ((kv // 64) % (h + 2) == 0) & (kv <= q)),
    "numbers": mods.Mask(lambda b, h, q, kv, aux: ((q // aux[0]) % 2 == (kv // aux[0]) % 2) & (q != kv), (96,)),
}


def listed(call, groups=None):
    """out and lse of a plan that walks a list of key tiles, and the list."""
    p = Problem.of(call)
    tile = choose(p, DEVICE).tile
    if groups:
        tile = replace(tile, block_m=64 * groups, warps=4 * (groups + 1), num_splits=1)
    plan = Plan(SPEC, p, DEVICE, tile, "test")
    x = Operands(call.q, call.k, call.v, call.sinks, aux_values(call), lse=True)
    out, lse = plan.kernel.run(plan, x)
    for again in (plan.kernel.run(plan, x) for _ in range(2)):
        torch.testing.assert_close(again, (out, lse), rtol=0, atol=0, equal_nan=True)
    launched = plan.cache["bshd"].row.parts[0].kernel.fixed
    (found,) = [made for made in blocks._KEPT.values() if made.starts.data_ptr() == launched["starts"]]
    return out, lse, found


@pytest.mark.parametrize("lengths", [(700, 700), (300, 1000), (1000, 130)], ids=str)
@pytest.mark.parametrize("name", HOLES)
@pytest.mark.parametrize("dim", [64, 128])
def test_key_tiles(dim, name, lengths):
    mask = HOLES[name]
    for groups, heads, dtype in ((1, (4, 4), torch.bfloat16), (2, (6, 2), torch.float16), (3, (6, 2), torch.bfloat16)):
        q, k, v = testing.make_inputs(2, *heads, *lengths, dim, None, dtype, "cuda", "bshd", 0)
        out, lse, _ = listed(Call(q, k, v, mask=mask), groups)
        testing.check_all({"out": out, "lse": lse}, q, k, v, mask=mask)


@pytest.mark.parametrize("name", ["natten", "heads"])
@pytest.mark.parametrize("dim", [64, 128])
def test_with_other_features(dim, name):
    q, k, v = testing.make_inputs(2, 6, 2, 500, 500, dim, None, torch.bfloat16, "cuda", "bshd", 0)
    table = torch.randn(6, 999, device="cuda")
    mask = HOLES[name]
    for options in (
        {"sinks": torch.randn(6, device="cuda")}, {"softcap": 5.0}, {"softmax_scale": -0.3}, {"causal": True},
        {"score": mods.Score(lambda s, b, h, q, kv: s + table[h, q - kv + 499])}, {"window": (200, 100)},
    ):  # fmt: skip
        out, lse, _ = listed(Call(q, k, v, mask=mask, **options))
        testing.check_all({"out": out, "lse": lse}, q, k, v, mask=mask, **options)
    out, lse, _ = listed(Call(q, k, v, mask=mask, out_dtype=torch.float32))
    testing.check_all({"out": out, "lse": lse}, q, k, v, mask=mask)


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_when_guesses_are_wrong(dim, scale):
    q, k, v = testing.make_inputs(1, 2, 2, 700, 700, dim, None, torch.bfloat16, "cuda", "bshd", 0)
    q, k = q * scale, k * torch.linspace(0.1, 4, 700, device="cuda").flip(0)[None, :, None, None].to(k.dtype)
    for mask in HOLES.values():
        out, lse, _ = listed(Call(q, k, v, mask=mask))
        testing.check_all({"out": out, "lse": lse}, q, k, v, mask=mask)


@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("name", ["natten", "dilated", "blocks"])
def test_hide_what_is_not_a_number(name, what):
    """In a key of a listed tile that some rows see: it reaches these alone."""
    q, k, v = testing.make_inputs(1, 2, 2, 700, 700, 128, None, torch.bfloat16, "cuda", "bshd", 0)
    mask = HOLES[name]
    clean, clean_lse, _ = listed(Call(q, k, v, mask=mask))
    changed = {"k": k.clone(), "v": v.clone()}
    changed[what][:, 333] = torch.nan
    out, lse, _ = listed(Call(q, changed["k"], changed["v"], mask=mask))
    sees = mask.materialize(1, 1, 700, 700, "cuda")[0, 0, :, 333]
    assert out[:, sees].isnan().all()
    out[:, sees], lse[:, :, sees] = clean[:, sees], clean_lse[:, :, sees]
    testing.check_all({"out": out, "lse": lse}, q, k, v, mask=mask)


def test_skip_empty_tiles():
    q, k, v = testing.make_inputs(1, 2, 2, 2048, 2048, 64, None, torch.bfloat16, "cuda", "bshd", 0)
    mask = mods.Mask(lambda b, h, q, kv: (q // 512) % 2 == (kv // 512) % 2)
    out, lse, found = listed(Call(q, k, v, mask=mask))
    assert str(found) == "256 of 512 tiles, 256 of them full"
    testing.check_all({"out": out, "lse": lse}, q, k, v, mask=mask)
    assert any("256 of 512" in note for note in sartor.explain(q, k, v, mask=mask).notes)


def test_and_graphs():
    """A graph whose capture makes the first call walks no list; one after it does, and outlives the plan."""
    q, k, v = testing.make_inputs(1, 2, 2, 640, 640, 64, None, torch.bfloat16, "cuda", "bshd", 0)
    sartor.attention(q, k, v, mask=mods.document(torch.zeros(1, 640, dtype=torch.int32, device="cuda")))
    for step in (5, 6):
        mask = mods.Mask(lambda b, h, q, kv, step=step: (q - kv) % step == 0)
        if step == 6:
            sartor.attention(q, k, v, mask=mask)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = sartor.attention(q, k, v, mask=mask)
        ops.PREPARED.clear()
        gc.collect()
        torch.empty(2**26, device="cuda").fill_(torch.nan)
        q.normal_()
        graph.replay()
        testing.check_all({"out": out}, q, k, v, mask=mask)


def test_in_compiled_calls():
    q, k, v = testing.make_inputs(1, 2, 2, 640, 640, 64, None, torch.bfloat16, "cuda", "bshd", 0)
    mask = mods.Mask(lambda b, h, q, kv: (q - kv) % 7 == 0)
    attend = torch.compile(lambda q, k, v: sartor.attention(q, k, v, mask=mask), fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        out = attend(q, k, v).clone()
    testing.check_all({"out": out}, q, k, v, mask=mask)


@pytest.mark.parametrize("lengths", [(700, 700), (300, 1000), (1000, 130)], ids=str)
@pytest.mark.parametrize("name", HOLES)
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.judges("hopper_backward")
def test_in_gradients(dim, name, lengths):
    """Queries without any key, keys without any query, heads that share keys, and blocks that share heads."""
    q, k, v = testing.make_inputs(2, 6, 2, *lengths, dim, None, torch.bfloat16, "cuda", "bshd", 0)
    testing.verify(q, k, v, mask=HOLES[name])


@pytest.mark.parametrize("name", ["natten", "blocks"])
@pytest.mark.judges("hopper_backward")
def test_gradients_hide_what_is_not_a_number(name):
    q, k, v = testing.make_inputs(1, 2, 2, 700, 700, 64, None, torch.bfloat16, "cuda", "bshd", 0)
    mask = HOLES[name]
    pairs = mask.materialize(1, 1, 700, 700, "cuda")[0, 0]
    sees = pairs[:, 333]
    beside = pairs[sees].any(0)  # keys that share a query with it, whose gradients it reaches
    dout = testing.make_like(q).masked_fill(sees[None, :, None, None], 0)
    lost = v.clone()
    lost[:, 333] = torch.nan
    (dq, dk, dv), clean = (gradients(q, k, values, dout, mask) for values in (lost, v))
    for changed, right, hit in zip((dq, dk, dv), clean, (sees, beside, beside), strict=True):
        changed[:, hit] = right[:, hit]
    testing.check_all({"dq": dq, "dk": dk, "dv": dv}, q, k, v, dout, None, mask=mask)


def gradients(q, k, v, dout, mask):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(sartor.attention(*leaves, mask=mask), leaves, dout)
