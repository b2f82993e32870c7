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
        (sartor.flash_attn_varlen_qkvpacked_func, dict.fromkeys(("qkv", "cu_seqlens", "max_seqlen"), empty) | common),
        (sartor.flash_attn_varlen_kvpacked_func, dict.fromkeys(("q", "kv"), empty) | lengths | common),
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


ENDS = (
    torch.tensor([0, 0, 7, 8, 20, 20]),
    torch.tensor([0, 3, 3, 12, 30, 30]),
)  # of sequences with no query, key or both


def packed_inputs(past=0):
    """What ENDS says, and some tokens past it."""
    return normal(20 + past, 4, 8), normal(30 + past, 2, 8, seed=1), normal(30 + past, 2, 8, seed=2)


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window_size": (3, 2), "softcap": 2.0}, {"window_size": (2, -1), "causal": True},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 1.0, 0.1]), "causal": True}, {"alibi_slopes": torch.rand(5, 4)},
], ids=["full", "causal", "window", "open", "alibi", "alibi_of_each"])  # fmt: skip
def test_packed_sequences_are_those_one_by_one(options):
    """Outputs, lse and gradients. D15: NaN past the last one reaches nothing; D17: nor does one without tokens."""
    leaves = [t.requires_grad_() for t in packed_inputs(past=3)]
    with torch.no_grad():
        for t, end in zip(leaves, (20, 30, 30), strict=True):
            t[end:] = torch.nan
    out, lse, _ = sartor.flash_attn_varlen_func(*leaves, *ENDS, 12, 18, return_attn_probs=True, **options)
    grads = torch.autograd.grad((out.square().sum() + lse[lse.isfinite()].sum()), leaves)
    assert not out[20:].any()
    assert not any(g[end:].any() for g, end in zip(grads, (20, 30, 30), strict=True))
    parts = zip(*(e.tolist()[i:] for e in ENDS for i in (0, 1)), strict=False)
    for n, (q0, q1, k0, k1) in enumerate(parts):
        own = [t[None, a:b] for t, (a, b) in zip(leaves, ((q0, q1), (k0, k1), (k0, k1)), strict=True)]
        given = dict(options)
        if given.get("alibi_slopes", out[0, 0]).dim() == 2:
            given["alibi_slopes"] = given["alibi_slopes"][n]
        one, one_lse, _ = sartor.flash_attn_func(*own, return_attn_probs=True, **given)
        assert torch.allclose(out[q0:q1], one[0], atol=1e-6)
        assert torch.allclose(lse[:, q0:q1], one_lse[0], atol=1e-6)
        if q0 == q1 or k0 == k1:
            continue
        want = torch.autograd.grad((one.square().sum() + one_lse[one_lse.isfinite()].sum()), leaves)
        for found, expected, (a, b) in zip(grads, want, ((q0, q1), (k0, k1), (k0, k1)), strict=True):
            assert torch.allclose(found[a:b], expected[a:b], atol=1e-5)


@pytest.mark.parametrize(("change", "words"), [
    ({"cu_seqlens_k": ENDS[1].float()}, "cu_seqlens_k must hold integers, got dtype torch.float32"),
    ({"cu_seqlens_q": ENDS[0][None]}, r"cu_seqlens_q must have shape \(sequences \+ 1,\), got 2 dims: \(1, 6\)"),
    ({"cu_seqlens_q": ENDS[0].tolist()}, "cu_seqlens_q must be a torch.Tensor, got list"),
    ({"cu_seqlens_q": ENDS[0][:0]}, "cu_seqlens_q must have one element more .*got 0"),
    ({"cu_seqlens_k": ENDS[1][:3]}, "cu_seqlens_k must have .*got 3 and 6"),
    ({"cu_seqlens_q": ENDS[0] + 1}, "cu_seqlens_q must begin with 0"),
    ({"cu_seqlens_q": torch.tensor([0, 9, 8, 9, 9, 20])}, "cu_seqlens_q must .*never fall"),
    ({"cu_seqlens_q": -ENDS[0]}, "cu_seqlens_q must .*never fall"),
    ({"cu_seqlens_k": ENDS[1] * 2}, "cu_seqlens_k must end at the number of tokens, 30, or before, got 60"),
    ({"cu_seqlens_k": ENDS[1].to("meta")}, "cu_seqlens_k must be on the device of cu_seqlens_q"),
    ({f"cu_seqlens_{x}": ENDS[0].to("meta") for x in "qk"}, "cu_seqlens_q must be on the device of q"),
    ({"q": normal(1, 20, 4, 8)}, "q must have 3 dims"),
    ({"alibi_slopes": torch.rand(3, 4)}, r"alibi_slopes must have shape \(4,\) or \(5, 4\), got \(3, 4\)"),
    ({"window_size": (1,)}, "window_size must be"),
    ({"causal": 1}, "causal must be a bool"),
])  # fmt: skip
def test_bad_packed_sequences(change, words):
    """D02 to D11."""
    names = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"
    given = dict(zip(names, (*packed_inputs(), *ENDS), strict=True)) | {"max_seqlen_q": 12, "max_seqlen_k": 18}
    with pytest.raises((TypeError, ValueError), match=words):
        sartor.flash_attn_varlen_func(**given | change)


def test_packed_sequences_in_one_tensor():
    qkv, (ends, _), options = normal(20, 3, 4, 8), ENDS, (0.0, 0.3, True, (5, 0), 2.0, torch.rand(4), True, True)
    q, k, v = qkv.unbind(1)
    want = sartor.flash_attn_varlen_func(q, k, v, ends, ends, 12, 12, *options)
    for found in (
        sartor.flash_attn_varlen_qkvpacked_func(qkv, ends, 12, *options),
        sartor.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], ends, ends, 12, 12, *options),
    ):
        assert torch.equal(found[0], want[0])
        assert torch.equal(found[1], want[1])
    with pytest.raises(ValueError, match=r"qkv must have shape \(tokens, 3, heads, dim\), got \(20, 4, 8\)"):
        sartor.flash_attn_varlen_qkvpacked_func(q, ends, 12)
    with pytest.raises(ValueError, match=r"kv must have shape \(tokens, 2, heads, dim\), got \(20, 3, 4, 8\)"):
        sartor.flash_attn_varlen_kvpacked_func(q, qkv, ends, ends, 12, 12)
    with pytest.raises(ValueError, match="cu_seqlens must begin with 0"):
        sartor.flash_attn_varlen_qkvpacked_func(qkv, ends + 1, 12)


def test_packed_sequences_of_any_integers_and_strides():
    """D01, D14, D17."""
    q, k, v = packed_inputs()
    want = sartor.flash_attn_varlen_func(q, k, v, *ENDS, 12, 18, causal=True)
    for ends in ([e.int() for e in ENDS], [torch.stack([e, e], 1)[:, 0] for e in ENDS]):
        assert torch.equal(sartor.flash_attn_varlen_func(q, k, v, *ends, 12, 18, causal=True), want)
    slopes = torch.zeros(0, 4)
    none = sartor.flash_attn_varlen_func(q, k[:0], v[:0], *[torch.zeros(1).int()] * 2, 0, 0, alibi_slopes=slopes)
    assert not none.any()
    for ends in (torch.zeros(1).int(), torch.zeros(4).int()):
        assert sartor.flash_attn_varlen_func(q[:0], k[:0], v[:0], ends, ends, 0, 0).shape == (0, 4, 8)
        assert not sartor.flash_attn_varlen_func(q, k, v, ends, ends, 0, 0).any()


def test_packed_sequences_compile():
    """In one graph, although the mask is made within it, for all lengths."""
    torch._dynamo.reset()
    attend = torch.compile(sartor.flash_attn_varlen_func, fullgraph=True, dynamic=True, backend="aot_eager")
    slopes = torch.rand(2, 4)
    for n in (10, 16, 23):
        q, k, v = (normal(n, 4, 8, seed=i).requires_grad_() for i in range(3))
        ends = torch.tensor([0, 6, n])
        found, want = (
            torch.autograd.grad(
                f(q, k, v, ends, ends, n, n, causal=True, alibi_slopes=slopes).square().sum(), (q, k, v)
            )
            for f in (attend, sartor.flash_attn_varlen_func)
        )
        assert all(map(torch.equal, found, want))


def cache_inputs(new=0):
    """q, k_cache, v_cache, and as many new keys and values as there are queries."""
    q, k_cache, v_cache = normal(3, 2, 4, 8), normal(3, 12, 2, 8, seed=1), normal(3, 12, 2, 8, seed=2)
    return (q, k_cache, v_cache, *((normal(3, 2, 2, 8, seed=3), normal(3, 2, 2, 8, seed=4)) if new else (None, None)))


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("lengths", [torch.tensor([0, 5, 10]), torch.tensor([1, 2, 9]).int(), 7], ids=str)
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window_size": (3, 1)}, {"causal": True, "window_size": (2, -1), "softcap": 2.0},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 1.0, 0.1])}, {"causal": True, "alibi_slopes": torch.ones(3, 4) / 3},
], ids=["full", "causal", "window", "open", "alibi", "alibi_of_each"])  # fmt: skip
def test_a_cache_is_its_items_one_by_one(options, lengths, new):
    q, k_cache, v_cache, k, v = cache_inputs(new)
    before = k_cache.clone(), v_cache.clone()
    out, lse = sartor.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, return_softmax_lse=True, **options
    )
    for b, n in enumerate(lengths.tolist() if isinstance(lengths, torch.Tensor) else [lengths] * 3):
        keys, values = (t[b : b + 1, :n] for t in before)
        if new:
            keys, values = torch.cat([keys, k[b : b + 1]], 1), torch.cat([values, v[b : b + 1]], 1)
        given = dict(options)
        if given.get("alibi_slopes", q[0, 0, 0]).dim() == 2:
            given["alibi_slopes"] = given["alibi_slopes"][b]
        want, want_lse, _ = sartor.flash_attn_func(q[b : b + 1], keys, values, return_attn_probs=True, **given)
        assert torch.allclose(out[b : b + 1], want, atol=1e-6)
        assert torch.allclose(lse[b : b + 1], want_lse, atol=1e-6)
        for cache, old, whole in zip((k_cache, v_cache), before, (keys, values), strict=True):
            assert torch.equal(cache[b, : whole.shape[1]], whole[0])
            assert torch.equal(cache[b, whole.shape[1] :], old[b, whole.shape[1] :])


def test_a_whole_cache():
    q, k_cache, v_cache, _, _ = cache_inputs()
    found = sartor.flash_attn_with_kvcache(q, k_cache, v_cache, causal=True)
    assert torch.equal(found, sartor.flash_attn_func(q, k_cache, v_cache, causal=True))


@pytest.mark.parametrize("lengths", [None, 7])
def test_one_split_keeps_the_keys_of_a_cache_whole(lengths, monkeypatch):
    found = []
    monkeypatch.setattr(flash_attn, "_attend_to_cache", lambda *_, **options: found.append(options["deterministic"]))
    for splits in (0, 1, 3):
        sartor.flash_attn_with_kvcache(*cache_inputs()[:3], cache_seqlens=lengths, num_splits=splits)
    assert found == [False, True, False]


@pytest.mark.parametrize(("change", "words"), [
    ({"num_splits": -1}, "num_splits must be an integer of at least 0, got -1"),
    ({"num_splits": "one"}, "num_splits must be an integer of at least 0, got 'one'"),
    ({"cache_seqlens": torch.tensor([0, -1, 3])}, "cache_seqlens must be between 0 and the 12 .*got -1"),  # E01
    ({"cache_seqlens": torch.tensor([0, 13, 3])}, "cache_seqlens must be between 0 and the 12 .*got 13"),  # E02
    ({"cache_seqlens": 13}, "cache_seqlens must be between .*got 13"),
    ({"cache_seqlens": torch.tensor([0, 11, 3])} | dict(zip("kv", cache_inputs(True)[3:], strict=True)),
     "cache_seqlens must leave room for 2 more of 12 places, got 11"),  # E03
    ({"cache_seqlens": torch.zeros(3)}, "cache_seqlens must be int32 or int64 .*float32"),
    ({"cache_seqlens": torch.zeros(2).int()}, r"cache_seqlens must be .*shape \(3,\), got .*\(2,\)"),
    ({"cache_seqlens": torch.zeros(3).int().to("meta")}, "cache_seqlens must be on the device of q"),
    ({"cache_seqlens": None, "k": normal(3, 2, 2, 8)}, "cache_seqlens must be a torch.Tensor, got NoneType"),
    ({"k": normal(3, 2, 2, 8)}, "v must be a torch.Tensor, got NoneType"),  # E08
    ({"v": normal(3, 2, 2, 8)}, "k must be a torch.Tensor, got NoneType"),
    ({"k": normal(3, 2, 2, 8), "v": normal(3, 2, 2, 9)}, r"v must be .*\(3, 2, 2, 8\), as its cache"),
    ({"k": normal(3), "v": normal(3)}, "k must be .*as its cache"),
    ({"q": normal(3, 4, 8)}, "q must have 4 dims"),
    ({"q": normal(2, 2, 4, 8)}, "k_cache must have the batch of q, 2, got batch 3"),
    ({"q": normal(3, 2, 4, 16)}, "k_cache must have the head dim of q, 16, got head dim 8"),
    ({"alibi_slopes": torch.rand(4).bfloat16()}, "alibi_slopes must have dtype float32 or float64"),
    ({"alibi_slopes": torch.rand(4).to("meta")}, "alibi_slopes must be on the device of q"),
    ({"window_size": (1,)}, "window_size must be"),
    ({"alibi_slopes": torch.rand(3)}, "alibi_slopes must have shape"),
])  # fmt: skip
def test_bad_caches(change, words):
    given = dict(zip(("q", "k_cache", "v_cache"), cache_inputs()[:3], strict=True)) | {"cache_seqlens": 4}
    with pytest.raises((TypeError, ValueError), match=words):
        sartor.flash_attn_with_kvcache(**given | change)


@pytest.mark.parametrize("change", [{"window_size": (1,)}, {"alibi_slopes": torch.ones(3)}, {"causal": 1}], ids=str)
def test_a_wrong_call_leaves_the_cache_alone(change):
    q, k_cache, v_cache, k, v = cache_inputs(new=True)
    before = k_cache.clone()
    with pytest.raises((TypeError, ValueError)):
        sartor.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **{"cache_seqlens": 4} | change)
    assert torch.equal(k_cache, before)


def test_slopes_want_no_gradient():
    q, k_cache, v_cache, _, _ = cache_inputs()
    wanted = torch.rand(4, requires_grad=True)
    for call in (
        lambda: sartor.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=4, alibi_slopes=wanted),
        lambda: sartor.flash_attn_varlen_func(*packed_inputs(), *ENDS, 12, 18, alibi_slopes=wanted),
    ):
        with pytest.raises(NotImplementedError, match="alibi_slopes has no gradient here"):
            call()
        with torch.no_grad():
            call()


def test_a_cache_in_a_graph():
    """It is written to, and serves all lengths."""
    torch._dynamo.reset()
    step = torch.compile(sartor.flash_attn_with_kvcache, fullgraph=True, dynamic=True, backend="aot_eager")
    q, k_cache, v_cache, k, v = cache_inputs(new=True)
    for first in (0, 3, 8):
        both = []
        for f in (step, sartor.flash_attn_with_kvcache):
            caches = k_cache.clone(), v_cache.clone()
            both.append((f(q, *caches, k, v, cache_seqlens=torch.tensor([first, 1, 2]), causal=True), *caches))
        assert all(map(torch.equal, *both))


def test_what_is_not_there_says_so():
    q, k, v = flash_inputs()
    pages = torch.zeros(1, 1).int()
    with pytest.raises(NotImplementedError, match="block_table must be None"):
        sartor.flash_attn_varlen_func(q[0], k[0], v[0], *ENDS, 9, 9, block_table=pages)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_biases_of_pytorch(make):
    """They hold no data: what is in their memory must not be read."""
    q, k, v = normal(2, 3, 5, 8), normal(2, 3, 9, 8, seed=1), normal(2, 3, 9, 8, seed=2)
    found = sartor.scaled_dot_product_attention(q, k, v, make(5, 9))
    assert torch.allclose(found, F.scaled_dot_product_attention(q, k, v, make(5, 9)), atol=1e-6)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(4, 9), (5, 8)], ids=str)
def test_causal_biases_of_other_lengths(make, lengths):
    q, k = normal(2, 3, 5, 8), normal(2, 3, 9, 8)
    with pytest.raises(ValueError, match=rf"attn_mask must be .* \(5, 9\), got \({lengths[0]}, {lengths[1]}\)"):
        sartor.scaled_dot_product_attention(q, k, k, make(*lengths))


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
    getattr(flash_attn, name)(*first, 0.25, 0.5, True, (3, 1), 2.0, slopes, True, True)
    assert [found.pop(n).mean().item() for n in "qkv"] == [0, 1, 2]
    assert found.pop("alibi_slopes") is slopes
    assert found == {"softmax_scale": 0.5, "causal": True, "window": (3, 1), "softcap": 2.0, "deterministic": True,
                     "return_lse": True, "dropout_p": 0.25}  # fmt: skip
