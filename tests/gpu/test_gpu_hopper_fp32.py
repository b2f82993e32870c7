"""The Hopper kernels of float32 on CUDA: every tile, units that differ from segment to segment, what they mark.

Features, budgets and errors against PyTorch's are in test_gpu_fp32.py, which takes these kernels where they can run.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import documents
from sartor import kernels, nvrtc, testing
from sartor.device import Device
from sartor.kernels.spec import Operands, Plan, Saved, Tile
from sartor.problem import Call, Problem, aux_values

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and not nvrtc.missing()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and NVRTC"),
    pytest.mark.judges("hopper_fp32", "hopper_fp32_backward"),
]

SPEC = kernels.load("hopper_fp32") if HOPPER else None
TILES = [(64, 64, 8, 4), (128, 64, 12, 4), (192, 64, 16, 6), (128, 128, 12, 4), (192, 32, 16, 3), (128, 16, 12, 2)]


def inputs(b=2, hq=4, hkv=2, sq=600, skv=700, d=64, dv=None, seed=0):
    return testing.make_inputs(b, hq, hkv, sq, skv, d, dv, torch.float32, "cuda", "bshd", seed)


def plan_of(call, tile=None):
    p, device = Problem.of(call), Device.of(torch.device("cuda"))
    assert SPEC.why_not(p, device) == []
    return Plan(SPEC, p, device, tile or next(iter(SPEC.tiles(p, device))), "test")


def attend(call, plan=None):
    """out and lse."""
    return SPEC.run(plan or plan_of(call), Operands(call.q, call.k, call.v, call.sinks, aux_values(call)))


def check(call, plan=None, limit=1e-6):
    """Against float64, as relative norms: two roundings of float32 a term, and a score's."""
    out, lse = attend(call, plan)
    options = {"causal": call.causal, "softcap": call.softcap}
    expected = testing.reference(call.q, call.k, call.v, layout="bshd", **options)
    for found, exact in zip((out, lse), expected, strict=True):
        assert (found.double() - exact).norm() <= limit * exact.norm()


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "softcap": 5.0}], ids=str)
def test_tiles(tile, options):
    call = Call(*inputs(), **options)
    check(call, plan_of(call, Tile.of(tile)))


@pytest.mark.parametrize("dims", [(128, 128), (200, 40), (24, 120), (256, 16)], ids=str)
def test_dims(dims):
    check(Call(*inputs(d=dims[0], dv=dims[1]), causal=True))


@pytest.mark.parametrize("dim", [7, 64, 96, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "softcap": 5.0}], ids=str)
def test_blocks_with_many_tiles(dim, options):
    """The next tile's queries are copied while this one ends; the last ones fill no tile, and rows begin anywhere."""
    call = Call(*inputs(b=4, hq=40, hkv=20, sq=330, skv=400, d=dim), **options)
    check(call)
    anywhere = (torch.nn.functional.pad(t, (1, 0))[..., 1:] for t in (call.q, call.k, call.v))
    shifted = Call(*anywhere, **options)
    assert not Problem.of(shifted).rows_on_16_bytes
    assert all(map(torch.equal, attend(shifted), attend(call)))


@pytest.mark.parametrize("dim", [64, 128])
def test_units_differ_from_segment_to_segment(dim):
    """Scores that grow, values that shrink, by a thousand along the keys; 128 keys share a unit."""
    q, k, v = inputs(skv=1000, d=dim)
    grow = torch.logspace(-2, 1, 1000, device="cuda").view(1, -1, 1, 1)
    check(Call(q, k * grow, v), limit=4e-6)
    check(Call(q, k, v / grow))
    check(Call(q * torch.logspace(-3, 1, 600, device="cuda").view(1, -1, 1, 1), k, v), limit=4e-6)


@pytest.mark.parametrize("ends", [(0, 12), (12, 0)], ids=str)
def test_maxima_that_grow_or_fall(ends):
    q, k, v = inputs(sq=300, skv=1000)
    check(Call(q, k * torch.linspace(*ends, 1000, device="cuda").view(1, -1, 1, 1), v), limit=4e-6)


def test_scores_beyond_float16_and_references_beyond_float32():
    """Marked, and computed again: scores of 1e11 are not resolved in pairs."""
    q, k, v = inputs(sq=100, skv=200)
    check(Call(3e5 * q, 3e5 * k, v), limit=1e-4)


def test_streams_share_nothing():
    call = Call(*inputs(), causal=True)
    plan = plan_of(call)
    expected = attend(call, plan)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            found.append(attend(call, plan))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for pair in found for a, b in zip(pair, expected, strict=True))


def test_portable_form_agrees():
    """The two launches on pairs differ in the order of their sums and in nothing else."""
    call = Call(*inputs(), causal=True)
    out, lse = attend(call)
    spec = kernels.load("fp32_forward")
    plan = plan_of(call)
    plan = replace(plan, kernel=spec, tile=next(iter(spec.tiles(plan.problem, plan.device))), cache={})
    other, other_lse = spec.run(plan, Operands(call.q, call.k, call.v, aux=aux_values(call)))
    assert (out - other).norm() <= 1e-6 * out.norm()
    assert (lse - other_lse).abs().max() <= 4e-6


# ---- the backward


def gradients(q, k, v, dout, name="hopper_fp32_backward", **options):
    """dq, dk, dv, from an exact output."""
    call = Call(q, k, v, **options)
    p, device, spec = Problem.of(call), Device.of(torch.device("cuda")), kernels.load(name)
    assert spec.why_not(p, device) == []
    plan = Plan(spec, p, device, next(iter(spec.tiles(p, device))), "test")
    out, lse = (t.float() for t in testing.reference(q, k, v, layout="bshd", **options))
    return spec.run(plan, Operands(q, k, v, call.sinks, aux_values(call)), Saved(out, lse, dout, None))[:3]


def gradient_like(q, v):
    """A gradient of the output to send back."""
    return testing.make_like(q[..., :1].expand(*q.shape[:3], v.shape[3]))


def check_gradients(q, k, v, limit=1e-6, **options):
    """Against float64, as relative norms."""
    dout = gradient_like(q, v)
    expected = testing.reference_gradients(q, k, v, dout, **options)
    for name, found in zip(("dq", "dk", "dv"), gradients(q, k, v, dout, **options), strict=True):
        assert (found.double() - expected[name]).norm() <= limit * expected[name].norm(), name


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", sorted(documents.masks(300, 300, "cpu")))
def test_intervals_from_tables(name, dim):
    check_gradients(*inputs(d=dim), **documents.masks(600, 700, "cuda")[name])


MASKS = [{}, {"causal": True}, {"causal": "top_left"}, {"window": (90, 30)}, {"causal": True, "window": (70, 0)}]


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_gradients(dim, options):
    check_gradients(*inputs(d=dim), **options)


@pytest.mark.parametrize("lengths", [(1, 2), (17, 300), (300, 17), (64, 128), (129, 65), (2000, 1000)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_lengths(lengths, causal):
    check_gradients(*inputs(hq=6, sq=lengths[0], skv=lengths[1], d=128), causal=causal)


@pytest.mark.parametrize("dims", [(17, 17), (40, 40), (80, 80), (96, 96), (112, 112), (128, 33), (24, 120)], ids=str)
def test_gradients_of_dims(dims):
    check_gradients(*inputs(b=1, d=dims[0], dv=dims[1]), causal=True)


def test_gradients_of_units_that_differ():
    """By a thousand from segment to segment, in what is held and in what is stepped over."""
    q, k, v = inputs(skv=600, d=128)
    grow = torch.logspace(-2, 1, 600, device="cuda").view(1, -1, 1, 1)
    for spread in ((q, k * grow, v), (q, k, v / grow), (q * grow, k, v)):
        check_gradients(*spread, limit=6e-6)


def test_bits_of_gradients():
    """Run to run; and of one head of many, whose blocks hold twice as many rows, as of that head alone."""
    q, k, v = inputs(b=4, hq=16, hkv=16, d=128)
    dout = gradient_like(q, v)
    first = gradients(q, k, v, dout, causal=True)
    for _ in range(5):
        assert all(map(torch.equal, gradients(q, k, v, dout, causal=True), first))
    alone = gradients(*(t[1:2, :, 3:4] for t in (q, k, v, dout)), causal=True)
    for found, whole in zip(alone, first, strict=True):
        assert torch.equal(found, whole[1:2, :, 3:4])


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "dout"])
def test_marked_gradients(which):
    """A row that pairs do not hold marks tiles; the triples' results are as good."""
    q, k, v = inputs(sq=300, skv=300, d=128)
    tensors = (q, k, v, gradient_like(q, v))
    tensors[which][0, 130, 0] *= 1e-7
    expected = testing.reference_gradients(*tensors, causal=True)
    for name, found in zip(("dq", "dk", "dv"), gradients(*tensors, causal=True), strict=True):
        assert (found.double() - expected[name]).norm() <= 1e-6 * expected[name].norm(), name


def test_portable_gradients_agree():
    q, k, v = inputs(d=128)
    dout = gradient_like(q, v)
    others = gradients(q, k, v, dout, "fp32_backward", causal=True)
    for found, other in zip(gradients(q, k, v, dout, causal=True), others, strict=True):
        assert (found - other).norm() <= 1e-6 * other.norm()
