"""The Hopper backward beyond head dim 128 on CUDA, by budgets of the float64 reference."""

from __future__ import annotations

import pytest
import torch

import sartor
from sartor import kernels, nvrtc, testing
from sartor.device import Device
from sartor.kernels.hopper import pieces
from sartor.kernels.spec import Operands, Plan, Saved
from sartor.mods.core import interval
from sartor.problem import Call, Problem, aux_values

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and not nvrtc.missing()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and NVRTC"),
    pytest.mark.judges("hopper_wide_backward"),
]
BF16, FP16 = torch.bfloat16, torch.float16
MASKS = [{}, {"causal": True}, {"causal": "top_left"}, {"window": (90, 30)}, {"causal": True, "window": (70, 0)}]
DIMS = [(136, 136), (160, 160), (192, 192), (248, 248), (256, 256), (192, 128), (128, 192), (64, 256), (256, 72)]
LENGTHS = [(1, 2), (1, 1), (17, 300), (300, 17), (64, 128), (129, 65), (1000, 500)]


def inputs(b=2, hq=4, hkv=2, sq=600, skv=700, d=256, dv=None, dtype=BF16):
    return testing.make_inputs(b, hq, hkv, sq, skv, d, dv or d, dtype, "cuda", "bshd", 0)


def gradients(q, k, v, dout=None, dlse=None, **options):
    """dq, dk, dv, and dsinks where there are sinks."""
    call = Call(q, k, v, **options)
    p, device, spec = Problem.of(call), Device.of(torch.device("cuda")), kernels.load("hopper_wide_backward")
    assert spec.why_not(p, device) == []
    plan = Plan(spec, p, device, next(iter(spec.tiles(p, device))), "test")
    out, lse = sartor.attention(q, k, v, return_lse=True, **options)
    dout = testing.make_like(out) if dout is None else dout
    return spec.run(plan, Operands(q, k, v, call.sinks, aux_values(call)), Saved(out, lse, dout, dlse)), dout


def check(q, k, v, dout=None, dlse=None, **options):
    """By budget."""
    found, dout = gradients(q, k, v, dout, dlse, **options)
    made = {name: g for name, g in found._asdict().items() if g is not None and name != "dtables"}
    testing.check_all(made, q, k, v, dout, dlse, **options)


def cut_to(monkeypatch, mib):
    """A smaller workspace."""
    monkeypatch.setattr(pieces, "limit", lambda p: mib << 20)


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("dims", [(256, 256), (192, 128)], ids=str)
def test_masks(dims, options):
    check(*inputs(d=dims[0], dv=dims[1]), **options)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(dims, dtype):
    check(*inputs(b=1, d=dims[0], dv=dims[1], dtype=dtype), causal=True)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(lengths, causal):
    check(*inputs(hq=6, sq=lengths[0], skv=lengths[1]), causal=causal)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_many_keys(dtype):
    """Small weights, which float16 has no exponents for."""
    check(*inputs(b=1, hq=1, hkv=1, sq=256, skv=8192, dtype=dtype))


@pytest.mark.parametrize("mib", [2, 6])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": "top_left"}, {"window": (200, 50)}], ids=str)
@pytest.mark.parametrize("lengths", [(1500, 1600), (1600, 1400)], ids=str)
def test_pieces(monkeypatch, mib, options, lengths):
    """Some heads, or some keys of one, at a time: the same bits."""
    x = inputs(hq=3, hkv=3, sq=lengths[0], skv=lengths[1])
    whole, dout = gradients(*x, **options)
    cut_to(monkeypatch, mib)
    found, _ = gradients(*x, dout, **options)
    assert all(map(torch.equal, found[:3], whole[:3]))
    check(*x, dout, **options)


def test_pieces_of_groups(monkeypatch):
    """Heads that share keys, in ranges of those."""
    cut_to(monkeypatch, 6)
    check(*inputs(hq=6, sq=1500, skv=1600), causal=True)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gradient_of_lse_and_sinks(dtype):
    q, k, v = inputs(dtype=dtype)
    check(q, k, v, dlse=torch.randn(2, 4, 600, device="cuda"), causal=True)
    check(q, k, v, sinks=torch.randn(4, device="cuda"))


def test_strides():
    q, k, v = torch.randn(2, 500, 3, 4, 256, device="cuda").to(BF16).unbind(2)
    check(q, k, v, causal=True)
    q, k, v = inputs()
    check(q, k, v, torch.ones(1, dtype=BF16, device="cuda").expand(q.shape))
    check(q, k, v, torch.nn.functional.pad(testing.make_like(q), (1, 0))[..., 1:])


def test_intervals_of_tables():
    """Keys that no query sees lie between those that a tile of queries sees: no block wrote their tiles."""
    q, k, v = inputs(b=1, sq=500, skv=900)
    of_q, of_k = torch.arange(500, device="cuda") // 170, torch.arange(900, device="cuda") // 180
    first = 360 * of_q[None, None, :, None]  # the documents 0, 2 and 4 have queries
    seen = [(170 * n * (of_k % 2 == 0))[None, None, None] for n in (of_k // 2, of_k // 2 + 1)]
    mask = interval(
        lambda b, h, q, aux: (aux[0], aux[0] + 180), lambda b, h, kv, aux: (aux[1], aux[2]),
        tuple(t.int() for t in (first, *seen)), "documents",
    )  # fmt: skip
    check(q, k, v, mask=mask)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_seen_reaches_nothing(value):
    """Marked tiles are computed again."""
    q, k, v = inputs(sq=100, skv=300)
    clean, dout = gradients(q, k, v, causal="top_left")
    k[:, 100:], v[:, 100:] = value, value
    spoilt, _ = gradients(q, k, v, dout, causal="top_left")
    for x, y in zip(spoilt[:3], clean[:3], strict=True):
        assert x.isfinite().all()
        assert (x - y).norm() <= 2 * torch.finfo(BF16).eps * y.norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "dout"])
def test_queries_without_keys_reach_nothing(name, value):
    q, k, v = inputs(sq=300, skv=100)
    clean, dout = gradients(q, k, v, causal=True)
    {"q": q, "dout": dout}[name][:, :200] = value
    spoilt, _ = gradients(q, k, v, dout, causal=True)
    for x, y in zip(spoilt[1:3], clean[1:3], strict=True):
        assert x.isfinite().all()
        assert (x - y).norm() <= 2 * torch.finfo(BF16).eps * y.norm()


@pytest.mark.parametrize("dims", [(256, 256), (192, 128)], ids=str)
def test_bits(dims):
    """Run to run; and of one head of many as of that head alone."""
    q, k, v = inputs(b=4, hq=16, hkv=16, d=dims[0], dv=dims[1])
    first, dout = gradients(q, k, v, causal=True)
    for _ in range(5):
        assert all(map(torch.equal, gradients(q, k, v, dout, causal=True)[0][:3], first[:3]))
    alone, _ = gradients(*(t[1:2, :, 3:4] for t in (q, k, v, dout)), causal=True)
    for found, whole in zip(alone[:3], first[:3], strict=True):
        assert torch.equal(found, whole[1:2, :, 3:4])


def test_it_is_chosen():
    """Through the face, with deterministic=True as well."""
    q, k, v = (t.requires_grad_() for t in inputs())
    for deterministic in (False, True):
        assert sartor.explain(q, k, v, deterministic=deterministic).backward.kernel.name == "hopper_wide_backward"
        out = sartor.attention(q, k, v, deterministic=deterministic)
        dout = testing.make_like(out)
        made = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), strict=True))
        testing.check_all(made, *(t.detach() for t in (q, k, v)), dout)
