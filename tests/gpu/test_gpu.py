"""Triton's kernels and those "auto" takes on CUDA, forward and backward, within budgets of the float64 reference.

Problems share dims, dtypes and programs wherever the test allows it: each new combination is a few compilations.
"""

from __future__ import annotations

import math
import sys
import threading
import time

import pytest
import torch

import dialects
import judged
import sartor
from sartor import mods, ops, testing
from sartor.kernels.hopper import forward as hopper_forward
from sartor.kernels.hopper import schedule
from sartor.plan import choose

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

NAN, INF = math.nan, math.inf
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DIMS = (1, 8, 17, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 512)
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 1000, 1024)
ALIGNS = (True, "top_left")
family = "triton"  # the kernels under test


PORTABLE = ("triton_forward", "triton_backward")
OTHERS = (name for name in judged.NARROW if name not in PORTABLE)
FAMILIES = [
    pytest.param("triton", marks=pytest.mark.judges(*PORTABLE)),
    pytest.param("auto", marks=pytest.mark.judges(*OTHERS)),
]


@pytest.fixture(autouse=True, params=FAMILIES)
def of_every_family(request, monkeypatch):
    """Every test runs on the portable kernels, and on those made for this GPU; there with the tiles of large problems,
    on which several warpgroups work. What small problems are given is in test_gpu_random.py."""
    if request.param == "auto" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("auto takes the portable kernels here")
    monkeypatch.setattr(sys.modules[__name__], "family", request.param)
    monkeypatch.setattr(hopper_forward.Config, "suited", lambda m, dev: m.tile)
    monkeypatch.setattr(schedule, "LONG", 1)
    monkeypatch.setattr(hopper_forward, "_config", hopper_forward.Config.of)  # none is kept that knows another LONG
    forget_plans()
    yield
    forget_plans()


def forget_plans():
    """Plans are kept by what they depend on, which a patched function does not belong to."""
    choose.cache_clear(), ops.PREPARED.clear()


def inputs(b=2, hq=4, hkv=2, sq=130, skv=190, d=64, dv=None, dtype=BF16, seed=0, **rest):
    """q, k, v in layout (batch, seqlen, heads, dim) on the GPU."""
    return testing.make_inputs(b, hq, hkv, sq, skv, d, dv, dtype, "cuda", "bshd", seed, **rest)


def verify(*qkv, **options):
    return testing.verify(*qkv, kernel=family, **options)


def forward_and_gradients(q, k, v, dout=None, **options):
    """out, lse, dq, dk, dv."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = sartor.attention(*leaves, return_lse=True, kernel=family, **options)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out) if dout is None else dout)
    return (out.detach(), lse.detach(), *grads)


def equal(a, b):
    """Same bits, NaN included."""
    return len(a) == len(b) and all(
        torch.equal(x.nan_to_num(7e7), y.nan_to_num(7e7)) for x, y in zip(a, b, strict=True)
    )


def normal(*shape, seed=3, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


# ---- shapes


@judged.WIDE
@pytest.mark.parametrize("dim", DIMS)
def test_dims(dim):
    verify(*inputs(d=dim))


@pytest.mark.parametrize(("dtype", "dim"), [(FP16, 64), (FP16, 80), (FP32, 17), (FP32, 64), (FP32, 128), (FP32, 256)])
def test_dtypes(dtype, dim):
    verify(*inputs(d=dim, dtype=dtype), through_lse=True)


@judged.WIDE
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 128), (192, 128), (40, 17), (17, 512)])
def test_dim_v(dim, dim_v):
    verify(*inputs(d=dim, dv=dim_v))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("causal", [False, *ALIGNS])
def test_lengths(n, causal):
    for sq, skv in ((n, n), (n, 129), (65, n)):
        verify(*inputs(b=1, hq=2, hkv=1, sq=sq, skv=skv), causal=causal)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_groups(group):
    verify(*inputs(hq=2 * group, hkv=2), causal=True, through_lse=True)


def test_tf32():
    """The cheaper products of float32 inputs have at most PyTorch's error with them."""
    q, k, v = inputs(dtype=FP32)
    out = sartor.attention(q, k, v, precision="tf32", kernel=family)
    exact, _ = testing.reference(q, k, v)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        lowp, _ = testing.low_precision(q, k, v)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert testing.measure(out, exact).max <= testing.FORWARD_FACTOR * testing.measure(lowp, exact).max


def test_out_dtype():
    q, k, v = inputs()
    assert sartor.attention(q, k, v, out_dtype=FP32, kernel=family).dtype == FP32
    verify(q, k, v, out_dtype=FP32)


# ---- features

FEATURES = {
    "window": lambda: {"window": (20, 7)},
    "window_top_left": lambda: {"causal": "top_left", "window": (33, None)},
    "window_wide": lambda: {"window": (None, 3)},
    "softcap": lambda: {"softcap": 2.0},
    "alibi": lambda: {"alibi_slopes": normal(4).abs(), "causal": True},
    "alibi_batch": lambda: {"alibi_slopes": normal(2, 4).abs()},
    "mask": lambda: {"mask": normal(130, 190) > -0.5},
    "mask_batch": lambda: {"mask": normal(2, 1, 1, 190) > -0.5, "causal": True},
    "mask_rows": lambda: {"mask": normal(4, 130, 1) > -0.5},
    "prefix": lambda: {"mask": mods.prefix(100)},
    "prefix_tensor": lambda: {"mask": mods.prefix(torch.tensor([0, 150], device="cuda"))},
    "document": lambda: {
        "mask": mods.document(*(torch.arange(n, device="cuda")[None].expand(2, -1) // 50 for n in (130, 190)))
    },
    "document_scattered": lambda: {
        "mask": mods.document(*(torch.arange(n, device="cuda")[None] % 3 for n in (130, 190))), "causal": True
    },
    "cached": lambda: {"mask": mods.cached(torch.tensor([131, 185], device="cuda"), 130, 190, causal=True)},
    "packed": lambda: {
        "mask": mods.packed(
            *(torch.tensor(ends, device="cuda") for ends in ([0, 0, 70, 71, 126], [0, 9, 131, 180, 185])),
            130, 190, causal=True,
        )
    },
    "user": lambda: {"mask": mods.Mask(lambda b, h, q, kv, aux: (q + kv * h + b) % aux[0] != 1, (3,))},
    "composed": lambda: {"mask": (mods.prefix(9) | mods.window(30, 0)) & ~mods.window(3, 3)},
    "sinks": lambda: {"sinks": normal(4), "causal": True},
    "all": lambda: {
        "causal": True, "window": (90, 0), "softcap": 3.0, "alibi_slopes": normal(4).abs(), "sinks": normal(4),
        "bias": normal(4, 130, 190, dtype=BF16), "mask": normal(190) > -1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_features(name):
    verify(*inputs(), through_lse=True, **FEATURES[name]())


def test_a_score_that_is_infinite_at_0():
    """As which tiles hold what is not there."""
    q, k, v = (t.abs() + 0.5 for t in inputs())
    verify(q, k, v, score=mods.Score(lambda s, b, h, q, kv, aux: 4 / s))


def test_saved_tensors_laid_out_anew():
    """By hooks that keep them elsewhere and give them back dense, before and after a call without."""
    q, k, v = (t.transpose(1, 2) for t in torch.randn(3, 2, 4, 130, 64, device="cuda", dtype=BF16).transpose(2, 3))
    options = {"layout": "bhsd", "bias": normal(130, 130).T, "deterministic": True}
    want = forward_and_gradients(q, k, v, **options)
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            assert equal(forward_and_gradients(q, k, v, **options), want)


@pytest.mark.parametrize("name", dialects.SCORES)
def test_scores_of_every_operator(name):
    score = dialects.scores(4, 130, 190, "cuda")[name]
    verify(*inputs(), causal=True, score=score, through_lse=name not in dialects.OF_PLACES)


@pytest.mark.parametrize("name", dialects.RULES)
def test_a_mask_means_what_it_says_in_python(name):
    mask, _ = dialects.make(130, 190, "cuda")[name]
    verify(*inputs(), mask=mask)


@pytest.mark.parametrize("sinks_dtype", [BF16, FP16])
def test_sinks_of_any_dtype_and_stride(sinks_dtype):
    q, k, v = inputs()
    sinks = normal(4, 2, dtype=sinks_dtype)[:, 0]
    plain = sinks.float().contiguous()
    assert equal(forward_and_gradients(q, k, v, sinks=sinks), forward_and_gradients(q, k, v, sinks=plain))


@pytest.mark.parametrize("bias_dtype", [BF16, FP32])
@pytest.mark.parametrize(("sq", "skv", "d"), [(130, 208, 64), (200, 144, 128), (5, 272, 64)])
def test_tensors_whose_rows_start_on_16_bytes(sq, skv, d, bias_dtype):
    """Masks and biases that can be copied 16 bytes at a time, whole and broadcast."""
    q, k, v = inputs(sq=sq, skv=skv, d=d)
    bias, mask = normal(2, 4, sq, skv, dtype=bias_dtype), normal(1, 1, sq, skv, seed=4) > -0.5
    for options in ({"bias": bias}, {"mask": mask}, {"bias": bias[:1, :1], "mask": mask, "causal": True}):
        verify(q, k, v, **options)


@pytest.mark.parametrize("align", ALIGNS)
def test_window_is_not_compiled_in(align):
    """A new window is a new number to the same kernel."""
    q, k, v = inputs()
    for left, right in ((0, 0), (1, 1), (64, 0), (500, 500)):
        verify(q, k, v, causal=align, window=(left, right), gradients=False)


SHAPES = [(b, h, i, j) for b in (1, 2) for h in (1, 4) for i in (1, 130) for j in (1, 190)]
COMMON = {(2, 4, 130, 190), (1, 4, 130, 190), (1, 1, 130, 190), (2, 1, 1, 190), (1, 4, 1, 1), (1, 1, 1, 1)}


@pytest.mark.parametrize("shape", [s if s in COMMON else pytest.param(s, marks=pytest.mark.slow) for s in SHAPES])
def test_bias(shape):
    verify(*inputs(), bias=normal(*shape, dtype=BF16))


def test_bias_of_float32():
    verify(*inputs(), bias=normal(1, 4, 130, 190))


def test_bias_of_minus_infinity():
    """A bias of -inf masks, and a row full of it is a row without keys."""
    bias = torch.zeros(130, 190, device="cuda", dtype=BF16)
    bias[5], bias[7, 3:] = -INF, -INF
    out, lse, dq, dk, dv = forward_and_gradients(*inputs(), bias=bias)
    assert not out[:, 5].any()
    assert (lse[:, :, 5] == -INF).all()
    assert all(t.isfinite().all() for t in (out, dq, dk, dv))
    verify(*inputs(), bias=bias)


# ---- nothing to attend to


@pytest.mark.parametrize("shape", [(0, 9, 13), (2, 0, 13), (2, 9, 0), (0, 0, 0)])
def test_zero_lengths(shape):
    b, sq, skv = shape
    q, k, v = inputs(b=b, sq=sq, skv=skv)
    for options in ({}, {"causal": True}, {"sinks": normal(4)}):
        out, lse, *grads = forward_and_gradients(q, k, v, **options)
        assert out.shape == q.shape
        assert not out.any()
        if "sinks" in options:
            assert torch.equal(lse, options["sinks"].view(1, -1, 1).expand(lse.shape))
        else:
            assert (lse == -INF).all()
        assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, (q, k, v), strict=True))


DEAD = {
    "causal": (lambda: {"causal": True}, slice(0, 60)),
    "window": (lambda: {"window": (2, 1)}, slice(0, 59)),
    "tensor": (lambda: {"mask": torch.zeros(130, 190, dtype=torch.bool, device="cuda")}, slice(None)),
    "prefix": (lambda: {"mask": mods.prefix(torch.tensor([0, 30], device="cuda"))}, slice(None)),
}


@pytest.mark.parametrize("name", DEAD)
def test_dead_rows(name):
    options, rows = DEAD[name]
    q, k, v = inputs(sq=130, skv=190) if name in ("tensor", "prefix") else inputs(sq=190, skv=130)
    out, lse, dq, dk, dv = forward_and_gradients(q, k, v, **options())
    assert not out[0, rows].any()
    assert (lse[0, :, rows] == -INF).all()
    assert not dq[0, rows].any()
    assert all(g.isfinite().all() for g in (out, dq, dk, dv))
    verify(q, k, v, **options())


# ---- values


def test_G01():
    t = torch.full((1, 200, 2, 64), 133120.0, dtype=BF16, device="cuda")
    for options in ({}, {"causal": True}):
        assert not any(x.isnan().any() for x in forward_and_gradients(t, t, t, **options))


@pytest.mark.parametrize("level", [-1e4, -2.45e5])
def test_G02(level):
    q, k, v = inputs()
    q[..., 0], k[..., 0] = 1.0, level
    for options in ({}, {"causal": True}):
        verify(q, k, v, softmax_scale=1.0, **options)


def test_G03():
    q, k, v = inputs(sq=190)
    q, other = q.abs() + 0.1, k.clone()
    k[:, -1], other[:, -1] = 1e4, 0
    a, b = (sartor.attention(q, t, v, causal=True, kernel=family) for t in (k, other))
    assert torch.equal(a[:, :-1], b[:, :-1])


def test_G04():
    q, k, v = inputs(sq=190)
    q[1, 100, 2, 5] = NAN
    for options in ({}, {"causal": True}):
        out, lse, dq, dk, dv = forward_and_gradients(q, k, v, **options)
        bad = torch.zeros(out.shape[:3], dtype=torch.bool, device="cuda")
        bad[1, 100, 2] = True
        for x in (out, dq):
            assert torch.equal(x.isnan().any(-1), bad)
        assert torch.equal(lse.isnan(), bad.transpose(1, 2))
        seen = torch.zeros(k.shape[:3], dtype=torch.bool, device="cuda")
        seen[1, : 101 if options else None, 1] = True
        for x in (dk, dv):
            assert torch.equal(x.isnan().any(-1), seen)


VISIBLE = {
    "causal": lambda n: {"causal": True},
    "mask": lambda n: {"mask": torch.ones(n, n, device="cuda").tril().bool()},
    "softcap": lambda n: {"causal": True, "softcap": 2.0},
}


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("case", VISIBLE)
def test_G05(case, name, value):
    """A visible key reaches the rows that attend to it and nothing else; what is masked reaches nothing."""
    q, k, v = inputs(sq=190)
    {"k": k, "v": v}[name][1, 77, 1, 3] = value
    out, _, dq, dk, dv = forward_and_gradients(q, k, v, **VISIBLE[case](190))
    touched = torch.zeros(out.shape[:3], dtype=torch.bool, device="cuda")
    touched[1, 77:, 2:] = True
    for x in (out, dq):
        assert x[~touched].isfinite().all()
    if name == "v" or math.isnan(value):
        assert not out[touched].isfinite().all(-1).any()
    for x in (dk, dv):
        assert x[0].isfinite().all()
        assert x[1, :, 0].isfinite().all()


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("case", ["prefix", "mask", "causal"])
def test_masked_keys_reach_nothing(case, value):
    q, k, v = inputs(sq=100)
    last = slice(100, None)
    options = {
        "prefix": {"mask": mods.prefix(100)},
        "mask": {"mask": torch.arange(190, device="cuda") < 100},
        "causal": {"causal": "top_left"},
    }[case]
    clean = forward_and_gradients(q, k, v, **options)
    exact, _ = testing.reference(q, k, v, **options)
    lowp, _ = testing.low_precision(q, k, v, **options)
    k[:, last], v[:, last] = value, value
    spoilt = forward_and_gradients(q, k, v, **options)
    assert all(x.isfinite().all() for x in spoilt)
    testing.check(spoilt[0], lowp, exact)
    for x, y in zip(spoilt, clean, strict=True):  # computed again, in another order
        assert (x - y).norm() <= torch.finfo(BF16).eps * y.norm()


def test_G06():
    q, k, v = inputs(dtype=FP16)
    verify(q * 100, k * 100, v, softmax_scale=1.0, gradients=False)
    assert all(x.isfinite().all() for x in forward_and_gradients(q * 100, k * 100, v, softmax_scale=1.0))


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_G07(scale):
    for options in ({}, {"causal": True}, {"softcap": 2.0}):
        verify(*inputs(), softmax_scale=scale, **options)


def test_G09():
    q, k, v = inputs(hkv=4, dtype=FP32)
    out, _, _, _, dv = forward_and_gradients(q, k, v)
    slack = 4 * torch.finfo(FP32).eps * v.abs().max()
    assert (out <= v.amax(1, keepdim=True) + slack).all()
    assert (out >= v.amin(1, keepdim=True) - slack).all()
    mass = torch.full_like(dv.sum(1), 130)
    testing.check(dv.sum(1), mass, mass.double(), name="mass")


def test_G10():
    q, k, v = inputs()
    halves = [
        sartor.attention(q, k[:, part], v[:, part], return_lse=True, out_dtype=FP32, kernel=family)
        for part in (slice(0, 100), slice(100, None))
    ]
    out, lse = sartor.merge_states(*halves[0], *halves[1])
    testing.check_all({"out": out, "lse": lse}, q, k, v)


def test_G11():
    q, k, v = inputs(dtype=FP32)
    tiny = torch.finfo(FP32).tiny / 8
    assert all(x.isfinite().all() for x in forward_and_gradients(q * tiny, k * tiny, v * tiny))
    one = torch.ones_like(q[:, :130])
    verify(one, one[:, :, :2].contiguous(), one[:, :, :2].contiguous(), causal=True)


# ---- memory


@pytest.mark.parametrize("layout", ["swapped", "packed", "step", "last", "transposed", "offset"])
def test_H01(layout):
    q, k, v = inputs()
    dout = testing.make_like(q)
    strided = forward_and_gradients(*(testing.layouts(t)[layout] for t in (q, k, v)), dout)
    names = ("out", "lse", "dq", "dk", "dv")
    testing.check_all(dict(zip(names, strided, strict=True)), q, k, v, dout)


def test_H01_bhsd():
    q, k, v = (t.transpose(1, 2) for t in inputs())
    verify(q, k, v, layout="bhsd", causal=True)


def test_H01_expanded():
    q, k, v = inputs(hkv=4)
    leaves = [q.requires_grad_(), k[:1, :, :1].clone().requires_grad_(), v[:1, :, :1].clone().requires_grad_()]
    whole = [leaves[0], *(t.expand(2, 190, 4, 64) for t in leaves[1:])]
    out = sartor.attention(*whole, kernel=family)
    dout = testing.make_like(out)
    got = torch.autograd.grad(out, leaves, dout)
    plain = [t.detach().contiguous() for t in whole]
    exact, lowp = (f(*plain, dout) for f in (testing.reference_gradients, testing.low_precision_gradients))
    size, s_max = testing.magnitudes(*plain, dout)
    for name, g in zip(("dq", "dk", "dv"), got, strict=True):
        e, low, noise = (t[name].double().sum_to_size(g.shape) for t in (exact, lowp, size))
        testing.check(g, low.to(g.dtype), e, testing.GRADIENT_FACTOR, magnitude=noise, s_max=s_max, name=name)


def test_H02():
    q, k, v = inputs()
    dout = testing.make_like(q)
    plain = forward_and_gradients(q, k, v, dout)
    one = torch.ones((), device="cuda", dtype=BF16).expand(q.shape)
    cases = [(other, plain) for other in testing.layouts(dout).values()]
    for other, want in [*cases, (one, forward_and_gradients(q, k, v))]:
        for x, y in zip(forward_and_gradients(q, k, v, other), want, strict=True):
            testing.check(x, y, y)


def test_H03():
    q, k, v = inputs()
    bias, mask, sinks = normal(130, 190, dtype=BF16), normal(190) > -1, normal(4)
    before = [t.clone() for t in (q, k, v, bias, mask, sinks)]
    results = forward_and_gradients(q, k, v, bias=bias, mask=mask, sinks=sinks)
    taken = {t.untyped_storage().data_ptr() for t in (q, k, v, bias, mask, sinks)}
    assert not taken & {r.untyped_storage().data_ptr() for r in results}
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v, bias, mask, sinks), strict=True))


def test_H04():
    x = inputs(hq=4, hkv=4, sq=190)[1]
    leaf = x.clone().requires_grad_()
    out = sartor.attention(leaf, leaf, leaf, causal=True, kernel=family)
    dout = testing.make_like(x)
    (got,) = torch.autograd.grad(out, leaf, dout)
    tables = [f(x, x, x, dout, causal=True) for f in (testing.reference_gradients, testing.low_precision_gradients)]
    size, s_max = testing.magnitudes(x, x, x, dout, causal=True)
    exact, lowp, noise = (t["dq"].double() + t["dk"] + t["dv"] for t in (*tables, size))
    testing.check(got, lowp.to(BF16), exact, testing.GRADIENT_FACTOR, magnitude=noise, s_max=s_max, name="dx")


# ---- repeats


def test_I01():
    q, k, v = inputs(sq=1000, skv=1000)
    first, *rest = (sartor.attention(q, k, v, causal=True, return_lse=True, kernel=family) for _ in range(1000))
    assert all(equal(first, other) for other in rest)


def test_I02():
    q, k, v = inputs(sq=1000, skv=1000)
    first, *rest = (forward_and_gradients(q, k, v, deterministic=True, causal=True) for _ in range(50))
    assert all(equal(first, other) for other in rest)


def test_I03():
    q, k, v = inputs()
    try:
        torch.use_deterministic_algorithms(True)
        assert equal(forward_and_gradients(q, k, v), forward_and_gradients(q, k, v))
    finally:
        torch.use_deterministic_algorithms(False)


def test_I04():
    q, k, v = inputs(b=3)
    whole = forward_and_gradients(q, k, v, causal=True)
    for i in range(3):
        alone = forward_and_gradients(*(t[i : i + 1] for t in (q, k, v)), causal=True)
        assert equal(alone, [t[i : i + 1] for t in whole])


def test_I05():
    cases = [(inputs(seed=i, sq=60 + i), {"causal": i % 2 == 0}) for i in range(8)]
    alone = [forward_and_gradients(*qkv, **options) for qkv, options in cases]
    found = {}

    def work(i):
        qkv, options = cases[i]
        found[i] = [forward_and_gradients(*qkv, **options) for _ in range(5)]
        torch.cuda.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(equal(result, alone[i]) for i in range(8) for result in found[i])


def test_I06():
    """Work goes to the current stream: behind a long sleep it sees what was written after the sleep."""
    q, k, v = inputs()
    want = forward_and_gradients(q, k, v)
    streams, results, buffers = [torch.cuda.Stream() for _ in range(2)], [], []
    for stream in streams:
        late = [torch.zeros_like(t) for t in (q, k, v)]
        buffers.append(late)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for to, t in zip(late, (q, k, v), strict=True):
                to.copy_(t)
            results.append(forward_and_gradients(*late))
    torch.cuda.synchronize()
    assert all(equal(r, want) for r in results)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_I07():
    q, k, v = (t.to("cuda:1") for t in inputs())
    with torch.cuda.device(0):
        verify(q, k, v, causal=True)


# ---- the machinery of torch


@pytest.mark.parametrize("case", ["plain", "features"])
def test_J02(case):
    torch._dynamo.reset()
    options = {} if case == "plain" else {"causal": True, "softcap": 2.0, "mask": mods.prefix(150)}
    q, k, v = inputs(requires_grad=True)
    call = lambda q, k, v: sartor.attention(q * 1, k, v, return_lse=True, kernel=family, **options)  # noqa: E731
    results = []
    for function in (call, torch.compile(call, fullgraph=True)):
        out, lse = function(q, k, v)
        results.append([out, lse, *torch.autograd.grad([out.float().sum(), lse.sum()], (q, k, v))])
    assert equal(*results)


def test_J03():
    torch._dynamo.reset()
    call = torch.compile(lambda q, k, v: sartor.attention(q, k, v, causal=True, kernel=family), fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=False, recompile_limit=4):
        for n in (64, 65, 100, 129, 200, 333):
            q, k, v = inputs(sq=n, skv=n)
            assert torch.equal(call(q, k, v), sartor.attention(q, k, v, causal=True, kernel=family))


@pytest.mark.parametrize("name", ["window", "all", "prefix_tensor"])
def test_J04(name):
    """Captured once, replayed on new data: the same bits as an eager call on it."""
    options = FEATURES[name]()
    leaves = [t.requires_grad_() for t in inputs()]
    dout = torch.ones_like(leaves[0])

    def step():
        out, lse = sartor.attention(*leaves, return_lse=True, kernel=family, **options)
        return [out, lse, *torch.autograd.grad(out, leaves, dout)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()
    for seed in (1, 2):
        fresh = inputs(seed=seed)
        with torch.no_grad():
            for to, t in zip(leaves, fresh, strict=True):
                to.copy_(t)
            dout.copy_(testing.make_like(dout, seed))
        graph.replay()
        torch.cuda.synchronize()
        assert equal([t.detach() for t in static], forward_and_gradients(*fresh, dout, **options))


def test_J06():
    q, k, v = (t.requires_grad_() for t in inputs(dtype=FP32))
    with torch.autocast("cuda", BF16):
        out = sartor.attention(q, k, v, kernel=family)
    assert out.dtype == BF16
    assert all(g.dtype == FP32 for g in torch.autograd.grad(out.float().sum(), (q, k, v)))


def test_J07():
    q, k, v = inputs()
    plain = forward_and_gradients(q, k, v)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(sartor.attention(q, k, v, kernel=family), plain[0])
    for i in range(3):
        leaves = [t.clone().requires_grad_(i == n) for n, t in enumerate((q, k, v))]
        out = sartor.attention(*leaves, kernel=family)
        (g,) = torch.autograd.grad(out, leaves[i], torch.ones_like(out))
        assert torch.equal(g, plain[2 + i])


def test_J08():
    q, k, v = inputs(requires_grad=True)
    late = k * 1
    out = sartor.attention(q, late, v, kernel=family)
    late.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["window", "all", "document", "prefix_tensor", "mask"])
def test_J15(name):
    """No host-device synchronisation in forward or backward, plans in hand or not."""
    options = FEATURES[name]()
    leaves = [t.requires_grad_() for t in inputs()]
    dout = torch.ones_like(leaves[0])
    try:
        for warm in (True, False):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("default" if warm else "error")
            out = sartor.attention(*leaves, kernel=family, **options)
            torch.autograd.grad(out, leaves, dout)
            with torch.no_grad():
                sartor.attention(*leaves, kernel=family, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def allocated():
    """Bytes allocated, when that has stood still: autograd's thread lets go of gradients when it gets to it."""
    found, since = torch.cuda.memory_allocated(), time.monotonic()
    while time.monotonic() < since + 0.2:
        if torch.cuda.memory_allocated() != found:
            found, since = torch.cuda.memory_allocated(), time.monotonic()
        time.sleep(0.01)
    return found


def test_J16():
    """Peak memory is linear in the length, and 200 calls leave nothing behind."""
    peaks = []
    for n in (8192, 16384):
        q, k, v = inputs(b=1, hq=2, hkv=2, sq=n, skv=n)
        forward_and_gradients(q, k, v, causal=True)
        torch.cuda.synchronize()
        base = allocated()
        torch.cuda.reset_peak_memory_stats()
        forward_and_gradients(q, k, v, causal=True)
        peaks.append(torch.cuda.max_memory_allocated() - base)
    block = 512  # bytes that the allocator rounds each tensor up to; 16 tensors are more than a call makes
    assert peaks[1] <= 2 * peaks[0] + 16 * block
    q, k, v = inputs()
    forward_and_gradients(q, k, v)
    before = allocated()
    for _ in range(200):
        forward_and_gradients(q, k, v)
    assert allocated() == before


def test_refused_by_name_on_the_gpu():
    q, k, v = inputs()
    for call, word in (
        (lambda: sartor.attention(q, k.cpu(), v), r"k .*cpu"),
        (lambda: sartor.attention(q, k, v, alibi_slopes=torch.ones(4)), r"alibi_slopes .*cpu"),
        (lambda: sartor.attention(q, k, v, mask=torch.ones(190).bool()), r"mask .*cpu"),
        (lambda: sartor.attention(q.double(), k.double(), v.double(), kernel="triton"), "float64"),
    ):
        with pytest.raises((ValueError, TypeError, sartor.Unsupported), match=word):
            call()
    verify(q, k, v)


# ---- large


def check_rows(q, k, v, out, lse, rows, dout=None, dq=None):
    """Rows of a call without mask: each is a small problem of its own."""
    found = {"out": out[:, rows], "lse": lse[:, :, rows]} | ({} if dq is None else {"dq": dq[:, rows]})
    testing.check_all(found, q[:, rows], k, v, None if dout is None else dout[:, rows])


@pytest.mark.slow
def test_H06():
    """More than 2^31 elements in q, out, dout and dq."""
    n = 2**22 + 77
    q, k, v = inputs(b=1, hq=4, hkv=4, sq=n, skv=64, d=128)
    assert q.numel() > 2**31
    q.requires_grad_()
    out, lse = sartor.attention(q, k, v, return_lse=True, kernel=family)
    dout = testing.make_like(out[:, :64]).repeat(1, -(-n // 64), 1, 1)[:, :n]
    (dq,) = torch.autograd.grad(out, q, dout)
    for rows in (slice(0, 64), slice(n // 2, n // 2 + 64), slice(n - 64, n)):
        check_rows(q.detach(), k, v, out.detach(), lse.detach(), rows, dout, dq)


@pytest.mark.slow
def test_H07():
    """More than 2^31 elements in k and v: the same keys twice over change nothing but lse, and halve dk and dv."""
    n = 2**22 + 77
    q, k, v = inputs(b=1, hq=2, hkv=2, sq=64, skv=n, d=128)
    twice = [torch.cat([t, t], 1) for t in (k, v)]
    assert twice[0].numel() > 2**31
    dout = testing.make_like(q)
    once = forward_and_gradients(q, k, v, dout, out_dtype=None)
    both = forward_and_gradients(q, *twice, dout)
    testing.check(both[0], once[0], once[0], magnitude=torch.ones_like(once[0], dtype=torch.float64))
    lse = once[1].double() + math.log(2)
    testing.check(both[1], lse.float(), lse, name="lse", s_max=lse.abs().max().item())
    for a, b in zip(both[3:], once[3:], strict=True):
        for part in (a[:, :64], a[:, n - 64 : n], a[:, -64:]):
            where = slice(0, 64) if part.data_ptr() == a.data_ptr() else slice(n - 64, n)
            half = b[:, where].double() / 2
            rounded = half * (1 + torch.finfo(BF16).eps / 2)  # as b itself is
            testing.check(part, rounded, half, dtype=BF16)


@pytest.mark.slow
def test_H08():
    """A batch stride above 2^31 elements."""
    far = 2**31 + 64
    small = inputs(hq=2, hkv=2, sq=130, skv=130)
    results = []
    for t in small:
        pool = torch.zeros(far + t[0].numel(), dtype=BF16, device="cuda")
        view = pool.as_strided(t.shape, (far, *t.stride()[1:]))
        view.copy_(t)
        results.append(view)
    assert equal(forward_and_gradients(*results, causal=True), forward_and_gradients(*small, causal=True))


@pytest.mark.slow
def test_H09():
    """More batch items times heads than a CUDA grid may be high."""
    q, k, v = inputs(b=2**13, hq=9, hkv=3, sq=17, skv=19, d=64)
    assert q.shape[0] * q.shape[2] > 65535
    verify(q, k, v, causal=True)


@pytest.mark.slow
def test_H10():
    """A sequence above 2^17, causal: row i is a problem over its own keys."""
    n = 2**17 + 3
    q, k, v = inputs(b=1, hq=2, hkv=1, sq=n, skv=n)
    q.requires_grad_()
    out, lse = sartor.attention(q, k, v, causal=True, return_lse=True, kernel=family)
    dout = testing.make_like(out)
    (dq,) = torch.autograd.grad(out, q, dout)
    for i in (0, 1, 4095, 2**16, 2**17, n - 1):
        row = slice(i, i + 1)
        check_rows(q.detach(), k[:, : i + 1], v[:, : i + 1], out.detach(), lse.detach(), row, dout, dq)


@pytest.mark.slow
def test_J13():
    """Out of memory is said as such, and the next call works."""
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(int(free * 0.99) // 2**21 * 2**21, dtype=torch.uint8, device="cuda")
    rows = 2 * (free - hog.numel()) // (64 * 4)
    base = torch.zeros(1, 1, 4, 64, dtype=BF16, device="cuda")
    try:
        with pytest.raises(torch.OutOfMemoryError):
            sartor.attention(base.expand(1, rows, 4, 64), base, base, kernel=family)
    finally:
        del hog
        torch.cuda.empty_cache()
    verify(*inputs())
