"""One test for every row of the fault list that a dense call on a CPU can show, named by the row.

Expectations that hold for any kernel are checked for every kernel that can run the problem.
"""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sartor
from sartor import kernels, mods, testing
from sartor.device import CPU
from sartor.kernels.spec import Operands, Plan, Saved
from sartor.problem import Call, Problem, aux_values

NAN, INF = math.nan, math.inf


def inputs(b=2, hq=4, hkv=2, sq=9, skv=13, d=8, dv=None, dtype=torch.float32, seed=0, **rest):
    """q, k, v in layout (batch, seqlen, heads, dim)."""
    return testing.make_inputs(b, hq, hkv, sq, skv, d, dv, dtype, layout="bshd", seed=seed, **rest)


def able(q, k, v, **options):
    """Families whose kernels can run the problem; the general ones always can."""
    found = [f for f in kernels.families() if sartor.explain(q, k, v, **options, kernel=f).plan]
    assert {"blocked", "reference"} <= set(found)
    return found


def verify_all(q, k, v, **options):
    """Forward and backward of every kernel within its budget; `dout`, `gradients`, `through_lse` as in `verify`."""
    own = {n: options.pop(n) for n in ("dout", "gradients", "through_lse") if n in options}
    for family in able(q, k, v, **options):
        testing.verify(q, k, v, kernel=family, **own, **options)


def forward_and_gradients(q, k, v, dout=None, **options):
    """out, lse, dq, dk, dv."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = sartor.attention(*leaves, return_lse=True, **options)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out) if dout is None else dout)
    return (out.detach(), lse.detach(), *grads)


def equal(a, b):
    """Same bits, NaN included."""
    return len(a) == len(b) and all(
        torch.equal(x.nan_to_num(7e7), y.nan_to_num(7e7)) for x, y in zip(a, b, strict=True)
    )


# ---- A, B, C: bad input is refused by name


def attend(change=(), **options):
    """attention() on good inputs but for `change`: {name: function of the good tensor}."""
    t = dict(zip("qkv", inputs(), strict=True))
    t |= {name: make(t[name]) for name, make in dict(change).items()}
    return sartor.attention(t["q"], t["k"], t["v"], **options)


def every(make):
    return dict.fromkeys("qkv", make)


def flash(**options):
    return sartor.flash_attn_func(*inputs(), **options)


def sdpa(**options):
    return sartor.scaled_dot_product_attention(*testing.make_inputs(2, 4, 4, 9, 13, 8, dtype=torch.float32), **options)


def of_shape(*shape):
    return lambda t: torch.zeros(shape, dtype=t.dtype)


def nested(dtype=torch.float32):
    return torch.nested.nested_tensor([torch.ones(n, 4, 8, dtype=dtype) for n in (3, 5)])


BAD = {
    "A01": (lambda: attend({"q": lambda t: [1.0, 2.0]}), "q", "list"),
    "A02": (lambda: attend({"k": lambda t: None}), "k", "None"),
    "A03": (lambda: attend({"v": lambda t: t.numpy()}), "v", "ndarray"),
    "A04": (lambda: attend(every(lambda t: t.to(torch.int32))), "dtype", "int32"),
    "A05": (lambda: attend({"k": lambda t: t.half()}), "k", "float16", "float32"),
    "A06": (lambda: attend({"v": lambda t: t.bfloat16()}), "v", "bfloat16", "float32"),
    "A07": (lambda: attend(every(lambda t: t.to(torch.complex64))), "dtype", "complex64"),
    "A08": (lambda: attend(every(lambda t: t.to(torch.float8_e4m3fn))), "dtype", "float8_e4m3fn"),
    "A09": (lambda: attend({"k": lambda t: t.to("meta")}), "k", "meta", "cpu"),
    "A10": (lambda: attend({"q": lambda t: t.to_sparse()}), "q", "sparse"),
    "A10_nested": (lambda: attend(every(lambda t: nested())), "q", "nested"),
    "A10_nested_sdpa": (lambda: sartor.scaled_dot_product_attention(*[nested()] * 3), "query", "nested"),
    "A11": (lambda: attend(every(lambda t: t > 0)), "dtype", "bool"),
    "B01": (lambda: attend({"q": lambda t: t[0]}), "q", "got 3"),
    "B01_bhsd": (lambda: attend({"q": lambda t: t[0]}, layout="bhsd"), "q", "got 3"),
    "B02": (lambda: attend({"k": lambda t: t[None]}), "k", "got 5"),
    "B03": (lambda: attend({"k": of_shape(3, 13, 2, 8), "v": of_shape(3, 13, 2, 8)}), "batch", "3", "2"),
    "B04": (lambda: attend({"v": of_shape(2, 12, 2, 8)}), "v", "seqlen", "12", "13"),
    "B05": (lambda: attend({"v": of_shape(2, 13, 4, 8)}), "v", "heads", "4", "2"),
    "B06": (lambda: attend({"k": of_shape(2, 13, 2, 16)}), "head dim", "16", "8"),
    "B07": (lambda: attend({"k": of_shape(2, 13, 3, 8), "v": of_shape(2, 13, 3, 8)}), "heads", "4", "3"),
    "B08": (lambda: attend({"k": of_shape(2, 13, 0, 8), "v": of_shape(2, 13, 0, 8)}), "heads", "0"),
    "B09": (lambda: attend(every(lambda t: t[..., :0])), "head dim", "got head dim 0"),
    "B10": (lambda: attend({"q": of_shape(2, 9, 4, 513), "k": of_shape(2, 13, 2, 513)}), "head dim", "513", "512"),
    "B10_v": (lambda: attend({"v": of_shape(2, 13, 2, 1024)}), "head dim of v", "1024", "512"),
    "C01": (lambda: flash(dropout_p=-0.1), "dropout_p", "-0.1"),
    "C02": (lambda: flash(dropout_p=1.0), "dropout_p", "1.0"),
    "C03": (lambda: flash(dropout_p=NAN), "dropout_p", "nan"),
    "C01_sdpa": (lambda: sdpa(dropout_p=-0.1), "dropout_p", "-0.1"),
    "C02_sdpa": (lambda: sdpa(dropout_p=1), "dropout_p", "1"),
    "C03_sdpa": (lambda: sdpa(dropout_p="x"), "dropout_p", "x"),
    "C04": (lambda: attend(softmax_scale=NAN), "softmax_scale", "nan"),
    "C05": (lambda: attend(softmax_scale=INF), "softmax_scale", "inf"),
    "C05_large": (lambda: attend(softmax_scale=-3e38), "softmax_scale", r"1\.7e\+38", "-3e"),
    "C11_small": (lambda: attend(softcap=1e-46), "softcap", "1e-46"),
    "C11_large": (lambda: attend(softcap=1e39), "softcap", r"1e\+39"),
    "C05_huge": (lambda: attend(softmax_scale=10**400), "softmax_scale", "finite"),
    "C06": (lambda: attend(softmax_scale="0.5"), "softmax_scale", "0.5"),
    "C06_sdpa": (lambda: sdpa(scale="0.5"), "scale", "0.5"),
    "C07": (lambda: attend(causal="yes"), "causal", "yes"),
    "C07_one": (lambda: attend(causal=1), "causal", "got 1"),
    "C07_tensor": (lambda: attend(causal=torch.tensor(True)), "causal", r"tensor\(True\)"),
    "C07_flash": (lambda: flash(causal="bottom_right"), "causal", "bottom_right"),
    "C07_sdpa": (lambda: sdpa(is_causal="yes"), "is_causal", "yes"),
    "C08": (lambda: flash(window_size=(1,)), "window_size", r"\(1,\)"),
    "C08_three": (lambda: flash(window_size=(1, 2, 3)), "window_size", r"\(1, 2, 3\)"),
    "C08_ours": (lambda: attend(window=5), "window", "5"),
    "C09": (lambda: flash(window_size=(-2, 0)), "window_size", r"\(-2, 0\)"),
    "C10": (lambda: flash(window_size=(1.5, 0)), "window_size", r"\(1.5, 0\)"),
    "C10_ours": (lambda: attend(window=(3.0, 1)), "window", r"\(3.0, 1\)"),
    "C11": (lambda: attend(softcap=-1.0), "softcap", "-1.0"),
    "C12": (lambda: attend(softcap=NAN), "softcap", "nan"),
    "C12_inf": (lambda: attend(softcap=INF), "softcap", "inf"),
    "C13": (lambda: attend(alibi_slopes=torch.ones(3)), "alibi_slopes", r"\(3,\)"),
    "C14": (lambda: attend(alibi_slopes=torch.ones(4, dtype=torch.float16)), "alibi_slopes", "float16"),
    "C15": (lambda: attend(alibi_slopes=torch.ones(4, device="meta")), "alibi_slopes", "meta"),
    "C16": (lambda: attend(sinks=torch.ones(2)), "sinks", r"\(2,\)"),
    "C17": (lambda: attend(not_an_option=1), "not_an_option"),
    "C17_explain": (lambda: sartor.explain(*inputs(), not_an_option=1), "not_an_option"),
    "C17_device": (lambda: sartor.explain(*inputs(), device="cuda"), "device", "'cuda'"),
    "C19": (lambda: sdpa(attn_mask=torch.ones(9, 13).bool(), is_causal=True), "attn_mask", "is_causal"),
    "C20": (lambda: sdpa(attn_mask=torch.ones(9, 12).bool()), "attn_mask", r"\(9, 12\)"),
    "C20_int": (lambda: sdpa(attn_mask=torch.ones(9, 13).int()), "attn_mask", "int32"),
    "C20_gqa": (
        lambda: sartor.scaled_dot_product_attention(*(t.transpose(1, 2) for t in inputs())),
        "enable_gqa",
        "4",
        "2",
    ),
    "mask": (lambda: attend(mask=torch.ones(9, 12).bool()), "mask", r"\(9, 12\)"),
    "mask_dtype": (lambda: attend(mask=torch.ones(9, 13)), "mask", "float32"),
    "bias": (lambda: attend(bias=torch.ones(2, 3, 9, 13)), "bias", r"\(2, 3, 9, 13\)"),
    "mask_nested": (lambda: attend(mask=nested(torch.bool)), "mask", "nested"),
    "bias_sparse": (lambda: attend(bias=torch.ones(9, 13).to_sparse()), "bias", "sparse"),
    "sinks_sparse": (lambda: attend(sinks=torch.ones(4).to_sparse()), "sinks", "sparse"),
    "layout": (lambda: attend(layout="sbhd"), "layout", "sbhd"),
    "layout_list": (lambda: attend(layout=["bshd"]), "layout", r"\['bshd'\]"),
    "kernel": (lambda: attend(kernel="cudnn"), "kernel", "cudnn"),
    "kernel_list": (lambda: attend(kernel=["auto"]), "kernel", r"\['auto'\]"),
    "deterministic": (lambda: attend(deterministic="no"), "deterministic", "bool", "no"),
    "return_lse": (lambda: attend(return_lse="no"), "return_lse", "bool", "no"),
    "return_lse_explain": (lambda: sartor.explain(*inputs(), return_lse="no"), "return_lse", "bool", "no"),
    "return_lse_flash": (lambda: flash(return_attn_probs="no"), "return_attn_probs", "bool", "no"),
    "precision": (lambda: attend(precision="fp8"), "precision", "fp8"),
    "out_dtype": (lambda: attend(out_dtype=torch.float16), "out_dtype", "None or torch.float32", "float16"),
}


@pytest.mark.parametrize("row", BAD)
def test_refused(row):
    call, *words = BAD[row]
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    for word in words:
        assert caught.match(rf"(?<!\w){word}" if word.isalpha() else word)
    testing.verify(*inputs(), causal=True)


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [("causal", 1, True), ("window", (3.0, 1), (3, 1)), ("softmax_scale", True, 1), ("softcap", True, 1.0)],
)
def test_refused_after_an_equal_value(name, bad, good):
    """True == 1 == 1.0, but a plan that was found for one must not admit the other."""
    attend(**{name: good})
    with pytest.raises((TypeError, ValueError), match=name):
        attend(**{name: bad})


def test_a_scale_too_small_for_float32_is_0():
    tiny, none = (forward_and_gradients(*inputs(), softmax_scale=scale) for scale in (1e-46, 0))
    assert equal(tiny, none)
    q, k, v = inputs(dtype=torch.float64)
    want = sartor.attention(q, k, v, softmax_scale=1.0)
    testing.check(sartor.attention(q * 1e30, k * 1e16, v, softmax_scale=1e-46), want, want)


def test_slopes_want_no_gradient():
    """Said on every call, whatever was planned before; without autograd they may be a parameter."""
    slopes = torch.ones(4)
    attend(alibi_slopes=slopes)
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        attend(alibi_slopes=torch.nn.Parameter(slopes))
    with torch.no_grad():
        attend(alibi_slopes=torch.nn.Parameter(slopes))
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        torch.func.jvp(lambda s: sartor.attention(q, k, v, alibi_slopes=s), (slopes,), (slopes,))


@pytest.mark.parametrize("options", [{"causal": 1}, {"window": (3.0, 1)}, {"softmax_scale": True}])
def test_refused_on_meta(options):
    """The operator's route says the same."""
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        attend(every(lambda t: t.to("meta")), **options)


def test_K09():
    """Every check stands under `python -O`."""
    lines = (
        "import sys; sys.path.insert(0, sys.argv[1])",
        "import test_reliability as t",
        "for row, (call, *_) in t.BAD.items():",
        "    try: call()",
        "    except (TypeError, ValueError): continue",
        "    sys.exit(row)",
    )
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-O", "-c", "\n".join(lines), here], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_A12():
    verify_all(*inputs(dtype=torch.float64), causal=True, through_lse=True)
    verify_all(*inputs(dtype=torch.float64, sq=13), causal=True)


def test_A12_slopes():
    """They are read as float64 too."""
    q, k, v = inputs(dtype=torch.float64)
    slopes = torch.linspace(0.1, 1, 4, dtype=torch.float64)
    _, lse = sartor.attention(q, k, v, alibi_slopes=slopes, return_lse=True)
    away = (torch.arange(9)[:, None] + 4 - torch.arange(13)).abs()
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 8**0.5 - slopes.view(-1, 1, 1) * away
    assert (lse - s.logsumexp(-1)).abs().max() < 1e-14


def test_A13():
    q, k, v = (t.to("meta") for t in inputs(dv=5, dtype=torch.bfloat16))
    out, lse = sartor.attention(q, k, v, return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == ((2, 9, 4, 5), torch.bfloat16, "meta")
    assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)


def test_B11():
    verify_all(*inputs(d=8, dv=5))
    verify_all(*inputs(d=5, dv=40), causal=True)


@pytest.mark.parametrize("dim", [1, 3, 17, 59, 111, 203, 255, 257, 512])
def test_B12(dim):
    verify_all(*inputs(d=dim))


@pytest.mark.parametrize("group", range(1, 17))
def test_B13(group):
    verify_all(*inputs(hq=2 * group, hkv=2))


def test_C18():
    slopes, sinks = torch.rand(4), torch.randn(4)
    verify_all(*inputs(), causal=True, window=(5, 3), softcap=2.0, alibi_slopes=slopes, sinks=sinks, through_lse=True)


def test_C21():
    q, k, v = inputs()
    for given, same in (((None, 2), (-1, 2)), ((3, None), (3, -1)), ((None, None), None)):
        a, b = (forward_and_gradients(q, k, v, window=w) for w in (given, same))
        assert equal(a, b)
        assert equal(a[:1], (sartor.flash_attn_func(q, k, v, window_size=given),))


def test_C22():
    q, k, v = inputs()
    plain = forward_and_gradients(q, k, v, softmax_scale=1.0, softcap=2.0, window=(3, 1))
    for scale, cap, window in ((1, 2, [3, 1]), (np.float32(1), np.float64(2), (np.int64(3), 1))):
        assert equal(plain, forward_and_gradients(q, k, v, softmax_scale=scale, softcap=cap, window=window))


# ---- F: nothing to attend to


@pytest.mark.parametrize("shape", [(0, 9, 13), (2, 0, 13), (2, 9, 0), (0, 0, 0)])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}], ids=["plain", "causal"])
def test_F01(shape, options):
    b, sq, skv = shape
    q, k, v = inputs(b=b, sq=sq, skv=skv, dv=5)
    for family in able(q, k, v, **options):
        out, lse, *grads = forward_and_gradients(q, k, v, kernel=family, **options)
        assert out.shape == (b, sq, 4, 5)
        assert lse.shape == (b, 4, sq)
        assert not out.any()
        assert (lse == -INF).all()
        for g, t in zip(grads, (q, k, v), strict=True):
            assert g.shape == t.shape
            assert not g.any()


@pytest.mark.parametrize("sinks", [None, torch.randn(4)], ids=["", "sinks"])
def test_F01_sinks(sinks):
    q, k, v = inputs(skv=0)
    verify_all(q, k, v, sinks=sinks, through_lse=True)


DEAD = {
    "causal": ({"causal": True}, slice(0, 6)),
    "window": ({"window": (2, 1)}, slice(0, 5)),
    "prefix": ({"mask": mods.prefix(torch.tensor([0, 3]))}, slice(None)),
    "tensor": ({"mask": torch.zeros(15, 1, dtype=torch.bool)}, slice(None)),
    "user": ({"mask": mods.Mask(lambda b, h, q, kv, aux: (q > 4) & (kv < 4))}, slice(0, 5)),
}


@pytest.mark.parametrize("case", DEAD)
def test_F02(case):
    options, rows = DEAD[case]
    q, k, v = inputs(sq=15, skv=9)
    for family in able(q, k, v, **options):
        out, lse, dq, dk, dv = forward_and_gradients(q, k, v, kernel=family, **options)
        assert not out[0, rows].any()
        assert (lse[0, :, rows] == -INF).all()
        assert not dq[0, rows].any()
        assert all(g.isfinite().all() for g in (out, dq, dk, dv))
    verify_all(q, k, v, through_lse=False, **options)


def test_F03():
    verify_all(*inputs(b=1, hq=1, hkv=1, sq=1, skv=1, d=1), causal=True)
    q, k, v = inputs(skv=1, hkv=4)
    for family in able(q, k, v):
        out, _, dq, dk, _ = forward_and_gradients(q, k, v, kernel=family)
        assert torch.equal(out, v.expand_as(out))
        noise = testing.magnitudes(q, k, v, torch.ones_like(out)).terms
        for g, n in ((dq, noise["dq"]), (dk, noise["dk"])):
            assert (g.abs() <= n * 4 * torch.finfo(torch.float32).eps).all()


# ---- G: values


def test_G01():
    t = torch.full((1, 64, 2, 32), 133120.0, dtype=torch.bfloat16)
    for options in ({}, {"causal": True}):
        for family in able(t, t, t, **options):
            results = forward_and_gradients(t, t, t, kernel=family, **options)
            assert all(x.isfinite().all() for x in results)
            assert torch.equal(results[0], t)


@pytest.mark.parametrize("level", [-1e4, -2.45e5])
def test_G02(level):
    q, k, v = inputs(d=8)
    q[..., 0], k[..., 0] = 1.0, level
    for options in ({}, {"causal": True}, {"window": (3, 0)}):
        verify_all(q, k, v, softmax_scale=1.0, **options)


def test_G03():
    q, k, v = inputs(sq=13)
    q, k = q.abs() + 0.1, k.clone()
    k[:, -1] = 1e4
    for options in ({"causal": True}, {"mask": torch.arange(13) < 12}):
        for family in able(q, k, v, **options):
            out = sartor.attention(q, k, v, kernel=family, **options)
            k2 = k.clone()
            k2[:, -1] = 0
            assert torch.equal(out[:, :-1], sartor.attention(q, k2, v, kernel=family, **options)[:, :-1])


def test_G04():
    q, k, v = inputs(sq=13)
    q[1, 5, 2] = NAN
    for options in ({}, {"causal": True}):
        for family in able(q, k, v, **options):
            out, lse, dq, dk, dv = forward_and_gradients(q, k, v, kernel=family, **options)
            bad = torch.zeros(out.shape[:3], dtype=torch.bool)
            bad[1, 5, 2] = True
            for x in (out, dq):
                assert torch.equal(x.isnan().any(-1), bad)
            assert torch.equal(lse.isnan(), bad.transpose(1, 2))
            seen = torch.zeros(k.shape[:3], dtype=torch.bool)
            seen[1, : 6 if options else None, 1] = True
            for x in (dk, dv):
                assert torch.equal(x.isnan().any(-1), seen)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["k", "v"])
def test_G05(name, value):
    """A visible key reaches the rows that attend to it, and nothing else; a masked one reaches nothing."""
    q, k, v = inputs(sq=13)
    t = dict(zip("qkv", (q, k, v), strict=True))
    t[name][1, 7, 1, 3] = value
    lower, bias = torch.ones(13, 13).tril().bool(), torch.randn(13, 13)
    for options in (
        {"causal": True}, {"mask": lower}, {"window": (12, 0)}, {"mask": lower, "bias": bias},
        {"causal": True, "softcap": 3.0},
    ):  # fmt: skip
        for family in able(q, k, v, **options):
            out, _, dq, dk, dv = forward_and_gradients(q, k, v, kernel=family, **options)
            touched = torch.zeros(out.shape[:3], dtype=torch.bool)
            touched[1, 7:, 2:] = True
            assert out[~touched].isfinite().all()
            assert dq[~touched].isfinite().all()
            if name == "v" or math.isnan(value):
                assert not out[touched].isfinite().all(-1).any()
            assert all(x[0].isfinite().all() and x[1, :, 0].isfinite().all() for x in (dk, dv))
    hidden = torch.arange(13) != 7
    for family in able(q, k, v, mask=hidden):
        clean = {n: torch.where(x.isfinite(), x, 0) for n, x in t.items()}
        spoilt = forward_and_gradients(q, k, v, kernel=family, mask=hidden)
        assert all(x.isfinite().all() for x in spoilt)
        found = dict(zip(("out", "lse", "dq", "dk", "dv"), spoilt, strict=True))
        testing.check_all(found, *clean.values(), torch.ones_like(spoilt[0]), mask=hidden)


def test_G06():
    q, k, v = inputs(dtype=torch.float16, d=64)
    for options in ({}, {"causal": True}):
        verify_all(q * 100, k * 100, v, softmax_scale=1.0, gradients=False, **options)
        for family in able(q, k, v, **options):
            results = forward_and_gradients(q * 100, k * 100, v, softmax_scale=1.0, kernel=family, **options)
            assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("scale", [0, 0.0, -0.5, -3])
def test_G07(scale):
    q, k, v = inputs(sq=13)
    for options in ({}, {"causal": True}, {"causal": True, "softcap": 1.0}):
        verify_all(q, k, v, softmax_scale=scale, **options)
    if scale == 0:
        for family in able(q, k, v, softmax_scale=scale):
            out = sartor.attention(q, k, v, softmax_scale=scale, kernel=family)
            mean = v.double().mean(1, keepdim=True).repeat_interleave(2, 2).expand(out.shape)
            testing.check(out, mean.float(), mean)


def test_G08():
    q, k, v = inputs(hkv=4)
    slopes = torch.rand(4)
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * 0.3
    s = 2 * torch.tanh(s / 2) - slopes.double()[:, None, None] * (torch.arange(9)[:, None] + 4 - torch.arange(13)).abs()
    for family in able(q, k, v, softcap=2.0):
        _, lse = sartor.attention(
            q, k, v, softmax_scale=0.3, softcap=2.0, alibi_slopes=slopes, return_lse=True, kernel=family
        )  # fmt: skip
        exact = s.logsumexp(-1)
        testing.check(lse, exact.float(), exact, name="lse", s_max=s.abs().max().item())


def test_G09():
    q, k, v = inputs(hkv=4)
    for family in able(q, k, v):
        out, _, _, _, dv = forward_and_gradients(q, k, v, kernel=family)
        slack = 4 * torch.finfo(out.dtype).eps * v.abs().max()
        assert (out <= v.amax(1, keepdim=True) + slack).all()
        assert (out >= v.amin(1, keepdim=True) - slack).all()
        testing.check(dv.sum(1), torch.full_like(dv.sum(1), 9), torch.full_like(dv.sum(1), 9).double(), name="mass")


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_G10(layout):
    q, k, v = testing.make_inputs(2, 4, 2, 9, 13, 8, dtype=torch.float32, layout=layout)
    axis = 1 if layout == "bshd" else 2
    for family in able(q, k, v, layout=layout):
        halves = [
            sartor.attention(
                q, k.narrow(axis, a, n), v.narrow(axis, a, n), layout=layout, return_lse=True, kernel=family
            )
            for a, n in ((0, 6), (6, 7))
        ]
        out, lse = sartor.merge_states(*halves[0], *halves[1], layout=layout)
        testing.check_all({"out": out, "lse": lse}, q, k, v, layout=layout)


def test_G10_nothing_in_one_half():
    q, k, v = inputs()
    whole = sartor.attention(q, k, v, return_lse=True)
    none = sartor.attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert equal(sartor.merge_states(*whole, *none), whole)
    assert equal(sartor.merge_states(*none, *none), none)


def test_G10_a_half_without_keys_is_silent():
    """Whatever it holds; and rows without keys in both halves have gradients of zero."""
    q, k, v = inputs()
    out, lse = sartor.attention(q, k, v, return_lse=True)
    dead = torch.full_like(lse, -INF)
    assert equal(sartor.merge_states(out, lse, torch.full_like(out, NAN), dead), (out, lse))
    leaves = [t.requires_grad_() for t in (out.clone(), dead.clone(), torch.full_like(out, NAN), dead.clone())]
    merged = sartor.merge_states(*leaves)
    assert equal([t.detach() for t in merged], (torch.zeros_like(out), dead))
    grads = torch.autograd.grad(merged, leaves, [torch.ones_like(t) for t in merged])
    assert all((g == 0).all() for g in grads)


def test_G10_nan_that_was_attended_to_stays():
    out, lse = (t[:1] for t in sartor.attention(*inputs(), return_lse=True))
    merged = sartor.merge_states(out, lse, out * NAN, lse - 1000)
    assert merged[0].isnan().all()
    assert sartor.merge_states(out, lse, out, lse * NAN)[1].isnan().all()


def test_G11():
    q, k, v = inputs(sq=13)
    tiny = torch.finfo(torch.float32).tiny / 8
    verify_all(q * tiny, k * tiny, v * tiny)
    verify_all(torch.ones_like(q), torch.ones_like(k), torch.ones_like(v), causal=True)


# ---- H: memory


@pytest.mark.parametrize("layout", ["swapped", "packed", "step", "last", "transposed", "offset"])
def test_H01(layout):
    q, k, v = inputs()
    dout = testing.make_like(q)
    for family in able(q, k, v):
        plain = forward_and_gradients(q, k, v, dout, kernel=family)
        strided = forward_and_gradients(*(testing.layouts(t)[layout] for t in (q, k, v)), dout, kernel=family)
        for x, y in zip(strided, plain, strict=True):
            testing.check(x, y, y, name=family)


def test_H01_expanded():
    q, k, v = inputs(hkv=4)
    for shape, index in (((2, 13, 4, 8), (slice(0, 1),)), ((2, 13, 4, 8), (slice(None), slice(None), slice(0, 1)))):
        for family in able(q, k, v):
            leaves = [q.clone(), k[index].clone(), v[index].clone()]
            for t in leaves:
                t.requires_grad_()
            out = sartor.attention(leaves[0], leaves[1].expand(shape), leaves[2].expand(shape), kernel=family)
            got = torch.autograd.grad(out.sum(), leaves)
            whole = forward_and_gradients(q, k[index].expand(shape), v[index].expand(shape), kernel=family)[2:]
            for g, w in zip(got, whole, strict=True):
                w = w.double().sum_to_size(g.shape)
                testing.check(g, w.float(), w, name=family)


def test_H02():
    q, k, v = inputs()
    dout = testing.make_like(q)
    one = torch.ones(())
    for family in able(q, k, v):
        plain = forward_and_gradients(q, k, v, dout, kernel=family)
        for other in testing.layouts(dout).values():
            for x, y in zip(forward_and_gradients(q, k, v, other, kernel=family), plain, strict=True):
                testing.check(x, y, y, name=family)
        plain = forward_and_gradients(q, k, v, torch.ones_like(q), kernel=family)
        assert equal(forward_and_gradients(q, k, v, one.expand(q.shape), kernel=family), plain)


def test_H03():
    tensors = [*inputs(sq=13), torch.randn(4), torch.randn(13, 13), torch.rand(13, 13) > 0.3, torch.rand(4)]
    before = [t.clone() for t in tensors]
    q, k, v, sinks, bias, mask, slopes = tensors
    for options in ({"causal": True}, {"sinks": sinks, "bias": bias, "mask": mask, "alibi_slopes": slopes}):
        for family in able(q, k, v, **options):
            results = forward_and_gradients(q, k, v, kernel=family, **options)
            taken = {t.untyped_storage().data_ptr() for t in tensors}
            assert not taken & {r.untyped_storage().data_ptr() for r in results}
            assert equal(tensors[:5], before[:5])
            assert torch.equal(mask, before[5])


def test_H04():
    x = inputs(hq=3, hkv=3, sq=13)[0]
    for family in able(x, x, x, causal=True):
        leaf = x.clone().requires_grad_()
        (got,) = torch.autograd.grad(sartor.attention(leaf, leaf, leaf, causal=True, kernel=family).sum(), leaf)
        parts = testing.reference_gradients(x, x, x, torch.ones_like(x), causal=True)
        lowp = testing.low_precision_gradients(x, x, x, torch.ones_like(x), causal=True)
        size, s_max = testing.magnitudes(x, x, x, torch.ones_like(x), causal=True)
        exact, low, noise = (t["dq"] + t["dk"] + t["dv"] for t in (parts, lowp, size))
        testing.check(got, low, exact, testing.GRADIENT_FACTOR, magnitude=noise, s_max=s_max, name=family)


def test_H05(poison):
    """The fixture is at work, and every kernel writes all it gives out."""
    q, k, v = inputs(sq=15)
    assert sartor.kernels.spec.allocate_out(Problem.of(Call(q, k, v)), q).isnan().all()
    verify_all(q, k, v, causal=True, through_lse=True)


# ---- I: repeats


def test_I01():
    q, k, v = inputs(sq=33, skv=33)
    for family in able(q, k, v, causal=True):
        first, *rest = (sartor.attention(q, k, v, causal=True, return_lse=True, kernel=family) for _ in range(100))
        assert all(equal(first, other) for other in rest)


def test_I02():
    q, k, v = inputs(sq=33, skv=33)
    for family in able(q, k, v):
        first, *rest = (forward_and_gradients(q, k, v, deterministic=True, kernel=family) for _ in range(50))
        assert all(equal(first, other) for other in rest)


def test_I03():
    q, k, v = inputs()
    try:
        torch.use_deterministic_algorithms(True)
        for family in able(q, k, v):
            assert equal(forward_and_gradients(q, k, v, kernel=family), forward_and_gradients(q, k, v, kernel=family))
    finally:
        torch.use_deterministic_algorithms(False)


def test_I04():
    q, k, v = inputs(b=3, sq=600, skv=900, hq=4, hkv=4)
    whole = sartor.attention(q, k, v, causal=True, return_lse=True, kernel="blocked")
    for i in range(3):
        alone = sartor.attention(
            *(t[i : i + 1] for t in (q, k, v)), causal=True, return_lse=True, kernel="blocked"
        )  # fmt: skip
        assert equal(alone, [t[i : i + 1] for t in whole])


def test_I05():
    found, cases = {}, []
    for i in range(8):
        cases.append((inputs(seed=i, sq=9 + i, d=4 + i), {"causal": i % 2 == 0, "softcap": float(i)}))

    def work(i):
        (q, k, v), options = cases[i]
        found[i] = [forward_and_gradients(q, k, v, **options) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, ((q, k, v), options) in enumerate(cases):
        alone = forward_and_gradients(q, k, v, **options)
        for result in found[i]:
            for x, y in zip(result, alone, strict=True):
                testing.check(x, y, y, name=f"thread {i}")


# ---- J: the machinery of torch


def test_J01():
    q, k, v = inputs(requires_grad=True)
    out = sartor.attention(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(dq.sum() + out.sum(), q)


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (4, 1), "softcap": 2.0}], ids=["plain", "banded"])
def test_J02(options):
    torch._dynamo.reset()
    q, k, v = inputs()
    compiled = torch.compile(
        lambda q, k, v: sartor.attention(q, k, v, return_lse=True, **options), fullgraph=True, backend="aot_eager"
    )
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = compiled(*leaves)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for x, y in zip((out, lse, *grads), forward_and_gradients(q, k, v, **options), strict=True):
        testing.check(x, y, y, name="compiled")


def test_J03():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: sartor.attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager", dynamic=True
    )
    with torch._dynamo.config.patch(error_on_recompile=False, recompile_limit=4):
        for sq in (9, 11, 17, 23, 31, 40):
            q, k, v = inputs(sq=sq, skv=sq + 3)
            out = sartor.attention(q, k, v, causal=True)
            testing.check(compiled(q, k, v), out, out, name=f"length {sq}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 3.0}, {"window": (3, 3)}], ids=str)
def test_J06(options, dtype):
    q, k, v = inputs(dtype=dtype)
    for t in (q, k, v):
        t.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = sartor.attention(q, k, v, **options)
        inside = torch.autograd.grad(out.float().sum(), (q, k, v), retain_graph=True)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert all(g.dtype == dtype and g.isfinite().all() for g in grads)
    assert all(map(torch.equal, inside, grads))


def test_J07():
    q, k, v = inputs()
    plain = forward_and_gradients(q, k, v)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            leaf = q.clone().requires_grad_() if not torch.is_inference_mode_enabled() else q
            out = sartor.attention(leaf, k, v)
        assert not out.requires_grad
        assert torch.equal(out, plain[0])
    for i in range(3):
        leaves = [t.clone().requires_grad_(i == n) for n, t in enumerate((q, k, v))]
        out = sartor.attention(*leaves)
        (g,) = torch.autograd.grad(out.sum(), leaves[i], retain_graph=True)
        (again,) = torch.autograd.grad(out.sum(), leaves[i])
        assert torch.equal(g, plain[2 + i])
        assert torch.equal(g, again)


@pytest.mark.parametrize("lengths", [(3, 5), (40, 70)], ids=str)
@pytest.mark.parametrize(
    "options", [{"window": (2, 1)}, {"causal": True}, {"mask": mods.prefix(2)}], ids=["window", "causal", "prefix"]
)
def test_J07_first_in_inference_mode(options, lengths):
    """What a plan keeps of it serves a call that autograd follows."""
    q, k, v = inputs(sq=lengths[0], skv=lengths[1])
    for family in able(q, k, v, **options):
        with torch.inference_mode():
            want = sartor.attention(q, k, v, kernel=family, **options)
        found = sartor.attention(q.clone().requires_grad_(), k, v, kernel=family, **options)
        found.sum().backward()
        assert torch.equal(found, want)


@pytest.mark.parametrize("changed", ["q", "k", "v", "out", "bias"])
def test_J08(changed):
    q, k, v = inputs(requires_grad=True)
    t = {"q": q * 1, "k": k * 1, "v": v * 1, "bias": torch.zeros(9, 13, requires_grad=True) * 1}
    t["out"] = sartor.attention(**t)
    t[changed].add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        t["out"].sum().backward()


@pytest.mark.parametrize("options", [{}, {"layout": "bhsd"}, {"kernel": "reference"}], ids=str)
def test_J08_output_changed_by_the_caller(options):
    """Like any tensor it may be changed in place, where no backward needs it any more."""
    x = inputs(sq=13, hkv=4, requires_grad=True)
    out = sartor.attention(*x, **options)
    expected = 2 * out.detach()
    assert torch.equal(out.mul_(2), expected)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_J09():
    verify_all(*inputs(), causal=True, through_lse=True)
    q, k, v = inputs(requires_grad=True)
    _, lse = sartor.attention(q, k, v, return_lse=True)
    dq, dk = torch.autograd.grad(lse.sum(), (q, k))
    testing.check_all({"dq": dq, "dk": dk}, q, k, v, torch.zeros_like(q), torch.ones(2, 4, 9))


def test_J10():
    q, k, v = inputs()
    stacked = [torch.stack([t, t + 1]) for t in (q, k, v)]
    transforms = (
        lambda: torch.func.grad(lambda q: sartor.attention(q, k, v).sum())(q),
        lambda: torch.func.vmap(sartor.attention)(*stacked),
        lambda: torch.func.jacrev(lambda q: sartor.attention(q, k, v).sum())(q),
    )
    for call in transforms:
        with pytest.raises(NotImplementedError, match="attention has no functorch rules"):
            call()
    with pytest.raises(NotImplementedError, match=r"q must have no tangent.*jvp"):
        torch.func.jvp(lambda q: sartor.attention(q, k, v), (q,), (torch.ones_like(q),))


def test_J11():
    q, k, v = inputs()
    plain = forward_and_gradients(q, k, v)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = checkpoint(sartor.attention, *leaves, use_reentrant=False)
    assert equal(torch.autograd.grad(out.sum(), leaves), plain[2:])
    with torch.autograd.graph.save_on_cpu():
        out = sartor.attention(*leaves)
    assert equal(torch.autograd.grad(out.sum(), leaves), plain[2:])


def test_J14():
    """Import and call where CUDA is hidden; asking for the GPU's kernels says what they need."""
    lines = (
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''",
        "import sartor, torch",
        "q = torch.ones(1, 3, 2, 4)",
        "assert torch.equal(sartor.attention(q, q, q), q)",
        "try: sartor.attention(q, q, q, kernel='triton')",
        "except (sartor.Unsupported, ValueError) as error: print(error)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert "GPU" in done.stdout or "triton" in done.stdout


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is made under it."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor):
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return result


def test_J16_linear():
    largest = []
    for n in (1024, 2048):
        call = Call(*inputs(b=1, hq=1, hkv=1, sq=n, skv=n), causal=True, kernel="blocked")
        p = Problem.of(call)
        x = Operands(call.q, call.k, call.v, None, aux_values(call))
        forward, backward = (kernels.load(name) for name in ("blocked", "blocked_backward"))
        with Largest() as seen:
            out, lse = forward.run(Plan(forward, p, CPU, None, ""), x)
            backward.run(Plan(backward, p, CPU, None, ""), x, Saved(out, lse, out, None))
        largest.append(seen.bytes)
    assert largest[1] <= 2 * largest[0]


def test_J16_flat():
    q, k, v = inputs(sq=33, skv=33)

    def tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    for mask in (None, mods.document(torch.arange(33)[None] // 7)):
        forward_and_gradients(q, k, v, mask=mask)
        before = tensors()
        for _ in range(200):
            forward_and_gradients(q, k, v, mask=mask)
        assert tensors() <= before


@pytest.mark.parametrize("kernel", ["torch", "blocked", "reference"])
def test_a_gradient_that_is_not_finite_reaches_what_was_attended_to_only(kernel):
    """Query 3's: keys after it have their gradients from later queries alone, and other queries their own."""
    q, k, v = testing.make_inputs(1, 2, 2, 9, 9, 16, dtype=torch.float32, layout="bshd", requires_grad=True)
    out = sartor.attention(q, k, v, causal=True, kernel=kernel)
    dout = torch.ones_like(out)
    dout[:, 3] = math.nan
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert dq[:, 3].isnan().all()
    assert torch.cat([dq[:, :3], dq[:, 4:]], 1).isfinite().all()
    for d in (dk, dv):
        assert d[:, :4].isnan().all()
        assert d[:, 4:].isfinite().all()


@pytest.mark.parametrize("kernel", ["blocked", "reference"])
@pytest.mark.parametrize(("mask", "dead"), [(mods.causal(), 2), (mods.prefix(0), 5)], ids=["some", "all"])
def test_a_sink_of_nothing_is_no_sink(kernel, mask, dead):
    """A row without keys whose sink is -inf has no weight at all: lse is -inf, and no gradient is NaN."""
    q, k, v = testing.make_inputs(1, 2, 2, 5, 3, 16, dtype=torch.float32, layout="bshd", requires_grad=True)
    sinks = torch.tensor([-math.inf, 0.5], requires_grad=True)
    out, lse = sartor.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, kernel=kernel)
    assert torch.equal(lse[:, :, :dead], sinks.detach()[None, :, None].expand(1, 2, dead))
    assert not out[:, :dead].any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v, sinks)))
