"""The faces against what they stand in for."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sartor
from sartor import testing
from sartor.compat import flash_attn


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


SHAPES = {
    "rank4": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4), {}),
    "rank2": ((5, 8), (7, 8), (7, 8), {}),
    "rank3": ((3, 5, 8), (3, 7, 8), (3, 7, 8), {}),
    "rank5": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8), {}),
    "gqa": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    "gqa_rank3": ((4, 5, 8), (2, 7, 8), (2, 7, 8), {"enable_gqa": True, "attn_mask": normal(4, 5, 7) > -0.5}),
    "broadcast": ((2, 4, 5, 8), (2, 1, 7, 8), (1, 4, 7, 8), {}),
    "broadcast_rank": ((2, 3, 5, 8), (3, 7, 8), (2, 3, 7, 4), {}),
    "causal": ((2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"is_causal": True}),
    "causal_wide": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"is_causal": True}),
    "causal_tall": ((2, 3, 9, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"is_causal": True}),
    "scale": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"scale": 0.7}),
    "mask2": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"attn_mask": normal(5, 7) > -0.5}),
    "mask4": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"attn_mask": normal(2, 1, 5, 7) > -0.5}),
    "float": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"attn_mask": normal(3, 5, 7)}),
    "mask_rank3": ((3, 5, 8), (3, 7, 8), (3, 7, 8), {"attn_mask": normal(3, 5, 7)}),
    "mask_rank5": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8), {"attn_mask": normal(2, 1, 1, 5, 7)}),
    "mask_rank5_flat": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8), {"attn_mask": normal(5, 7) > -0.5}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_sdpa(name):
    """Results and gradients are those of PyTorch's math, to the error that it has itself."""
    *shapes, options = SHAPES[name]
    results = {}
    for dtype, function in ((torch.float64, F), (torch.float32, F), (torch.float32, sartor)):
        leaves = [normal(*s, seed=i).to(dtype).requires_grad_() for i, s in enumerate(shapes)]
        own = {
            n: o.to(dtype) if isinstance(o, torch.Tensor) and o.is_floating_point() else o for n, o in options.items()
        }
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = function.scaled_dot_product_attention(*leaves, **own)
        results[dtype, function] = [out.detach(), *torch.autograd.grad(out.sum(), leaves)]
    exact, lowp, ours = results.values()
    for i, (x, low, e) in enumerate(zip(ours, lowp, exact, strict=True)):
        assert x.shape == e.shape
        factor = testing.GRADIENT_FACTOR if i else testing.FORWARD_FACTOR
        # gradients through out.sum() cancel: their terms are as large as the values, whatever their sum
        testing.check(x.flatten(), low.flatten(), e.flatten(), factor, magnitude=8 * torch.ones(e.numel()))


def test_sdpa_dead_rows():
    q, k, v = (normal(1, 1, 3, 4, seed=i) for i in range(3))
    keep = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    got = sartor.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    assert not got[0, 0, 1].any()
    testing.check(got, want, want.double())


def parameters(function):
    return {n: p.default for n, p in inspect.signature(function).parameters.items()}


def test_signatures():
    """transformers and others read them."""
    common = {
        "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
        "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
    }  # fmt: skip
    empty = inspect.Parameter.empty
    qkv = dict.fromkeys(("q", "k", "v"), empty)
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), empty)
    for function, want in (
        (sartor.flash_attn_func, qkv | common),
        (sartor.flash_attn_qkvpacked_func, {"qkv": empty} | common),
        (sartor.flash_attn_kvpacked_func, dict.fromkeys(("q", "kv"), empty) | common),
        (sartor.flash_attn_varlen_func, qkv | lengths | common | {"block_table": None}),
        (
            sartor.scaled_dot_product_attention,
            dict.fromkeys(("query", "key", "value"), empty)
            | {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False},
        ),
    ):
        assert list(parameters(function).items()) == list(want.items())
    assert list(parameters(sartor.flash_attn_with_kvcache))[:5] == ["q", "k_cache", "v_cache", "k", "v"]


def flash_inputs(skv=13):
    return testing.make_inputs(2, 4, 2, 9, skv, 8, dtype=torch.float32, layout="bshd")


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({}, {}),
        ({"causal": True}, {"causal": True}),
        ({"window_size": (3, -1)}, {"window": (3, None)}),
        ({"causal": True, "window_size": (3, 2)}, {"window": (3, 0)}),
        ({"softcap": 2.0, "softmax_scale": 0.3}, {"softcap": 2.0, "softmax_scale": 0.3}),
        ({"alibi_slopes": torch.linspace(0.1, 1, 4)}, {"alibi_slopes": torch.linspace(0.1, 1, 4)}),
    ],
)
def test_flash_attn(options, same):
    q, k, v = flash_inputs()
    out, lse, probabilities = sartor.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    testing.check_all({"out": out, "lse": lse}, q, k, v, **same)
    assert probabilities is None
    assert torch.equal(out, sartor.flash_attn_func(q, k, v, **options))


def test_flash_attn_positions():
    """Options by position, in flash-attn's order."""
    q, k, v = flash_inputs()
    slopes = torch.ones(4)
    by_name = sartor.attention(q, k, v, softmax_scale=0.5, causal=True, window=(3, 0), softcap=2.0, alibi_slopes=slopes)
    assert torch.equal(sartor.flash_attn_func(q, k, v, 0.0, 0.5, True, (3, 0), 2.0, slopes, True), by_name)


def test_packed():
    qkv = normal(2, 9, 3, 4, 8).requires_grad_()
    q, k, v = qkv.detach().unbind(2)
    out = sartor.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(out, sartor.flash_attn_func(q, k, v, causal=True))
    (g,) = torch.autograd.grad(out.sum(), qkv)
    testing.check_all(dict(zip(("dq", "dk", "dv"), g.unbind(2), strict=True)), q, k, v, torch.ones_like(q), causal=True)
    assert torch.equal(sartor.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True), out)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v: sartor.flash_attn_qkvpacked_func(q), r"qkv .*\(2, 9, 4, 8\)"),
        (lambda q, k, v: sartor.flash_attn_kvpacked_func(q, q), r"kv .*\(2, 9, 4, 8\)"),
        (lambda q, k, v: sartor.flash_attn_kvpacked_func(q, None), r"kv .*NoneType"),
        (lambda q, k, v: sartor.flash_attn_func(q, k.half(), v), r"k .*float16"),
        (lambda q, k, v: sartor.scaled_dot_product_attention(q, q.half(), q), r"key .*query.*float16"),
        (lambda q, k, v: sartor.scaled_dot_product_attention([1], k, v), r"query .*list"),
        (lambda q, k, v: sartor.scaled_dot_product_attention(q, k[0, 0, 0], v), r"key .*1: \(8,\)"),
        (lambda q, k, v: sartor.scaled_dot_product_attention(q, q, q, scale=float("nan")), r"scale .*nan"),
        (lambda q, k, v: sartor.scaled_dot_product_attention(q, q, q, mask=None), "argument 'mask'"),
        (lambda q, k, v: sartor.flash_attn_func(q, k, v, window=(1, 1)), "argument 'window'"),
    ],
)
def test_errors_in_the_words_of_the_face(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call(*flash_inputs())


def test_what_is_not_there_says_so():
    q, k, v = flash_inputs()
    lengths = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="cu_seqlens_q"):
        sartor.flash_attn_varlen_func(q[0], k[0], v[0], lengths, lengths, 9, 9)
    with pytest.raises(NotImplementedError, match="k_cache"):
        sartor.flash_attn_with_kvcache(q, k, v)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_biases_of_pytorch(make):
    """They hold no data: what is in their memory must not be read."""
    q, k, v = normal(2, 3, 5, 8), normal(2, 3, 9, 8, seed=1), normal(2, 3, 9, 8, seed=2)
    found = sartor.scaled_dot_product_attention(q, k, v, make(5, 9))
    assert torch.allclose(found, F.scaled_dot_product_attention(q, k, v, make(5, 9)), atol=1e-6)


def test_compiles():
    torch._dynamo.reset()
    q, k, v = (normal(2, 3, 5, 8, seed=i) for i in range(3))
    whole = torch.compile(sartor.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    want = sartor.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(whole(q, k, v, is_causal=True), want)


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"])
def test_every_argument_of_a_face_arrives(name, monkeypatch):
    """By position, as flash-attn's callers pass them: also what changes no value here, as determinism."""
    found = {}
    monkeypatch.setattr(flash_attn, "attention", lambda q, k, v, **options: found.update(options, q=q, k=k, v=v))
    q, k, v = (torch.full((1, 4, 2, 8), float(i)) for i in range(3))
    first = {"flash_attn_func": (q, k, v), "flash_attn_qkvpacked_func": (torch.stack([q, k, v], 2),),
             "flash_attn_kvpacked_func": (q, torch.stack([k, v], 2))}[name]  # fmt: skip
    slopes = torch.ones(2)
    getattr(flash_attn, name)(*first, 0.0, 0.5, True, (3, 1), 2.0, slopes, True, True)
    assert [found.pop(n).mean().item() for n in "qkv"] == [0, 1, 2]
    assert found.pop("alibi_slopes") is slopes
    assert found == {"softmax_scale": 0.5, "causal": True, "window": (3, 1), "softcap": 2.0, "deterministic": True,
                     "return_lse": True}  # fmt: skip
