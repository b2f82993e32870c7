"""The kernels written in torch, `torch_cpu` and `blocked`, where they have rules of their own."""

from __future__ import annotations

import pytest
import torch

import buried
import sartor
from sartor import mods, testing
from sartor.kernels import blocked, kept, spans, torch_cpu
from sartor.mods.core import interval

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def forward_and_gradients(q, k, v, dout, **options):
    """out, dq, dk, dv."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = sartor.attention(*leaves, **options)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))


# ---- rows that an additive mask hides all keys from


@pytest.mark.parametrize("kernel", ["auto", "blocked"])
@pytest.mark.parametrize("low", buried.LOW)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_rows_that_a_bias_hides_all_keys_from(dtype, low, kernel):
    """lse cannot hold log(13) beside -1e9; weights still sum to 1. In the budget are no rounded scores."""
    bias = buried.bias(low, dtype, 9, 13)
    q, k, v = testing.make_inputs(2, 4, 2, 9, 13, 8, dtype=dtype, layout="bshd")
    dout = testing.make_like(q)
    buried.judge(forward_and_gradients(q, k, v, dout, bias=bias, kernel=kernel), q, k, v, dout, bias=bias)


@pytest.mark.parametrize("low", [-1e9, "least"])
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_gradients_of_a_bias_that_hides_all_keys_and_of_sinks_as_low(dtype, low):
    """Which have a share of such a row's weights, that lse cannot tell."""
    q, k, v = testing.make_inputs(2, 4, 2, 9, 13, 8, dtype=dtype, layout="bshd")
    low = torch.finfo(dtype).min if low == "least" else low
    bias, sinks, dout = (
        torch.full((2, 1, 9, 13), low, dtype=dtype),
        torch.full((4,), low, dtype=dtype),
        testing.make_like(q),
    )
    leaves = [t.clone().requires_grad_() for t in (bias, sinks)]
    out = sartor.attention(q, k, v, bias=leaves[0], sinks=leaves[1], kernel="blocked")
    found = dict(zip(("dbias", "dsinks"), torch.autograd.grad(out, leaves, dout), strict=True))
    buried.judge(found, q, k, v, dout, bias=bias, sinks=sinks)


# ---- PyTorch's kernels with something added to the scores


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


LENGTHS = torch.tensor([[30], [610]])
TABLE = draw(4, 920)
ADDED = {  # options of a call with 2 items, 4 heads, 300 queries, 620 keys
    "causal": {"causal": True},
    "causal_top_left": {"causal": "top_left"},
    "causal_scale_below_0": {"causal": True, "softmax_scale": -0.2},
    "window": {"window": (40, 10)},
    "tensor": {"mask": draw(300, 620) > 0},
    "tensor_of_heads": {"mask": draw(2, 4, 300, 620) > 0},
    "padding": {"mask": torch.arange(620).view(1, 1, 1, 620) < LENGTHS.view(2, 1, 1, 1)},
    "prefix": {"mask": mods.prefix(LENGTHS[:, 0])},
    "nothing_in_one_item": {"mask": mods.prefix(torch.tensor([0, 500]))},
    "documents": {"mask": mods.document(torch.arange(300)[None] // 70, torch.arange(620)[None] // 100)},
    "alibi": {"alibi_slopes": draw(4).abs()},
    "alibi_causal": {"alibi_slopes": draw(2, 4).abs(), "causal": True},
    "bias": {"bias": draw(2, 4, 300, 620)},
    "bias_of_keys": {"bias": draw(1, 1, 1, 620)},
    "bias_of_queries": {"bias": draw(300, 1)},
    "bias_turned": {"bias": draw(620, 300).T},
    "bias_alibi_mask": {"bias": draw(4, 1, 620), "alibi_slopes": draw(4).abs(), "mask": draw(300, 620) > 0},
    "number": {"score": mods.Score(lambda s, b, h, q, kv, aux: s + 2.0)},
    "number_given": {"score": mods.Score(lambda s, b, h, q, kv, aux: s + aux[0], (2.0,))},
    "table": {"score": mods.Score(lambda s, b, h, q, kv: s + TABLE[h, q - kv + 620])},
    "table_bias_mask": {
        "score": mods.Score(lambda s, b, h, q, kv: s + TABLE[h, q - kv + 620]),
        "bias": draw(300, 620),
        "mask": mods.Mask(lambda b, h, q, kv: TABLE[h, kv - q + 300] > 0),
    },
}


@pytest.mark.parametrize("name", ADDED)
def test_added_to_scores(name):
    """Within budget in float32, and in the other dtypes where the kind of mask is another."""
    options = dict(ADDED[name])
    bias = options.pop("bias", None)
    kinds = [torch.float32] if name not in ("window", "bias") else list(DTYPES)
    for dtype in kinds:
        q, k, v = testing.make_inputs(2, 4, 2, 300, 620, 8, dtype=dtype, layout="bshd")
        own = options if bias is None else options | {"bias": bias.to(dtype)}
        found = sartor.attention(q, k, v, return_lse=True, kernel="torch", **own)
        dout = testing.make_like(found[0])
        gradients = forward_and_gradients(q, k, v, dout, kernel="torch", **own)
        gradients |= dict(zip(("out", "lse"), found, strict=True))
        testing.check_all(gradients, q, k, v, dout, **own)


@pytest.mark.parametrize(
    "fn",
    [lambda s, b, h, q, kv: s + s // 1, lambda s, b, h, q, kv: s + TABLE[h, mods.truncate(s)]],
    ids=["steps", "table_indexed_by_the_score"],
)
def test_what_rises_by_1_and_is_no_sum_is_left_to_blocked(fn):
    """PyTorch's kernel would be given the value at a score of 0."""
    q, k, v = testing.make_inputs(2, 4, 2, 30, 40, 8, dtype=torch.float32, layout="bshd")
    options = {"score": mods.Score(fn)}
    assert any("a sum only" in why for why in sartor.explain(q, k, v, **options).refused["torch_cpu"])
    testing.check_all({"out": sartor.attention(q, k, v, **options)}, q, k, v, testing.make_like(q), **options)


def test_a_table_with_a_gradient_has_it_from_blocked():
    table = TABLE.clone().requires_grad_()
    q, k, v = testing.make_inputs(2, 4, 2, 30, 40, 8, dtype=torch.float64, layout="bshd")
    found = {}
    for kernel in ("auto", "reference"):
        options = {"score": mods.Score(lambda s, b, h, q, kv: s + table[h, q - kv + 40]), "kernel": kernel}
        (found[kernel],) = torch.autograd.grad(sartor.attention(q, k, v, **options).square().sum(), table)
    plan = sartor.explain(q, k, v, score=mods.Score(lambda s, b, h, q, kv: s + table[h, q - kv + 40]))
    assert plan.plan.kernel.name == "torch_cpu"
    assert any("gradient" in why for why in plan.refused_backward["torch_cpu_backward"])
    assert torch.allclose(found["auto"], found["reference"], rtol=1e-12, atol=1e-13)


def reached(monkeypatch, **options):
    """(queries, keys) of each call of PyTorch's kernel, of 1024 queries and keys."""
    seen = []
    run = torch_cpu.FORWARD
    monkeypatch.setattr(
        torch_cpu, "FORWARD", lambda q, k, *a, **o: seen.append((q.shape[2], k.shape[2])) or run(q, k, *a, **o)
    )
    q, k, v = testing.make_inputs(1, 2, 2, 1024, 1024, 8, dtype=torch.float32, layout="bshd")
    sartor.attention(q, k, v, **options)
    return seen


def test_what_a_mask_hides_is_not_computed(monkeypatch):
    assert reached(monkeypatch, window=(100, 0)) == [(256, 256), *[(256, 356)] * 3]
    assert reached(monkeypatch, mask=mods.document(torch.arange(1024)[None] // 512)) == [(256, 512)] * 4
    assert reached(monkeypatch, bias=torch.zeros(1024, 1024)) == [(1024, 1024)]


@pytest.mark.parametrize("options", [{"window": (5, 0)}, {"causal": True, "softmax_scale": -1.0}], ids=str)
def test_a_small_mask_is_looked_at_once(options, monkeypatch):
    q, k, v = testing.make_inputs(2, 4, 2, 40, 40, 8, dtype=torch.float32, layout="bshd")
    dout = testing.make_like(q)
    first = forward_and_gradients(q, k, v, dout, **options)
    monkeypatch.setattr(spans, "evaluate", None)
    second = forward_and_gradients(q, k, v, dout, **options)
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_keys_of_any_value(dtype, monkeypatch):
    """Beside rows without a key, whose lse is -inf. What is not finite is left to `blocked`, and only that."""
    left = []
    run = blocked.Blocked.run
    monkeypatch.setattr(blocked.Blocked, "run", lambda *a: left.append(a) or run(*a))
    q, k, v = testing.make_inputs(2, 4, 2, 40, 70, 8, dtype=dtype, layout="bshd")
    mask = torch.rand(40, 70, generator=torch.Generator().manual_seed(0)) > 0.3
    mask[:, 60:], mask[7] = False, False
    dout = testing.make_like(q)
    clean = forward_and_gradients(q, k, v, dout, mask=mask)
    assert not left
    assert not clean["out"][:, 7].any()
    assert not clean["dq"][:, 7].any()
    for place, value in ((k, torch.nan), (k, torch.inf), (k, -torch.inf), (v, torch.nan), (v, -torch.inf)):
        kept = place[:, 60:].clone()
        place[:, 60:] = value
        found = forward_and_gradients(q, k, v, dout, mask=mask)
        testing.check_all(found, q, k, v, dout, mask=mask)
        place[:, 60:] = kept


def test_a_diagonal_of_the_users_own_is_not_taken_for_the_main_one():
    """Its text is that of mods.causal, its number another."""
    one = interval(
        rows=lambda b, h, q, aux: (None, q + aux[0] + 1), cols=lambda b, h, kv, aux: (kv - aux[0], None), aux=(-1,),
        name="mine",
    )  # fmt: skip
    q, k, v = testing.make_inputs(1, 2, 2, 8, 8, 16, layout="bshd")
    testing.verify(q, k, v, mask=one)


# ---- what is fast where nothing is infinite or NaN


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("length", [13, 700])
@pytest.mark.parametrize("kernel", ["auto", "blocked"])
def test_masked_scores_that_are_not_finite_reach_nothing(kernel, length, value):
    """Masks are added to scores; a bias of what a mask hides may be anything, and so may its softcap's."""
    q, k, v = testing.make_inputs(1, 2, 2, length, length, 8, dtype=torch.float32, layout="bshd")
    dout, bias = testing.make_like(q), draw(length, length)
    spoilt = bias.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), value)
    for options in ({"causal": True}, {"causal": True, "softcap": 5.0}):
        expected = forward_and_gradients(q, k, v, dout, bias=bias, kernel=kernel, **options)
        found = forward_and_gradients(q, k, v, dout, bias=spoilt, kernel=kernel, **options)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, msg=name)


def test_a_score_that_is_its_own_derivative():
    """Both come from the same node, and the score is changed in place."""
    q, k, v = testing.make_inputs(1, 2, 2, 30, 40, 8, dtype=torch.float64, layout="bshd")
    dout, score = testing.make_like(q), mods.Score(lambda s, b, h, q, kv: mods.exp(s))
    found = forward_and_gradients(q, k, v, dout, score=score, kernel="blocked")
    expected = forward_and_gradients(q, k, v, dout, score=score, kernel="reference")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tensor_mask_in_blocks_of_queries(monkeypatch, dtype):
    monkeypatch.setattr(torch_cpu, "WHOLE", 7 * 620)
    q, k, v = testing.make_inputs(2, 4, 2, 300, 620, 8, dtype=dtype, layout="bshd")
    options, dout = {"mask": ADDED["tensor"]["mask"]}, testing.make_like(q)
    testing.check_all(forward_and_gradients(q, k, v, dout, **options), q, k, v, dout, **options)


@pytest.mark.parametrize("factor", [1, 100])
@pytest.mark.parametrize("length", [40, 700])
def test_blocked_where_weights_underflow(length, factor):
    """One tile and several; of scores that are thousands apart most weights are 0."""
    q, k, v = testing.make_inputs(1, 2, 2, length, length, 8, dtype=torch.float32, layout="bshd")
    options = {"causal": True, "softmax_scale": float(factor), "kernel": "blocked"}
    out, lse = sartor.attention(q, k, v, return_lse=True, **options)
    dout = testing.make_like(q)
    gradients = forward_and_gradients(q, k, v, dout, **options)
    testing.check_all(gradients | {"lse": lse, "out": out}, q, k, v, dout, causal=True, softmax_scale=float(factor))


# ---- with PyTorch's own node of autograd


NATIVE = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (5, 0)},
    "mask": {"mask": draw(40, 40) > 0},
    "bias": {"bias": draw(40, 40)},
    "bias_and_mask": {"bias": draw(40, 40), "mask": draw(40, 40) > 0},
}


def nodes(node):
    """The names of a node and of those behind it."""
    return {node.name()}.union(*(nodes(n) for n, _ in node.next_functions if n is not None))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", NATIVE)
def test_what_pytorch_computes_at_once_has_its_own_node(name, layout):
    """Whatever comes out not finite is computed again, as `blocked` has it; and there is no second derivative."""
    options = NATIVE[name]
    q, k, v = testing.make_inputs(2, 4, 2, 40, 40, 8, dtype=torch.float32, layout=layout, requires_grad=True)
    out = sartor.attention(q, k, v, layout=layout, **options)
    assert "ScaledDotProductFlashAttentionForCpuBackward0" in nodes(out.grad_fn)
    dout = testing.make_like(out)
    rows = dout[:, 30] if layout == "bshd" else dout[:, :, 30]
    for value in (1.0, torch.nan, torch.inf):
        rows.fill_(value)
        found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        other = sartor.attention(q, k, v, layout=layout, kernel="blocked", **options)
        for mine, theirs in zip(found, torch.autograd.grad(other, (q, k, v), dout), strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True)
    (dq,) = torch.autograd.grad(out, q, dout, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(dq.sum(), k)


def test_a_call_to_be_repaired_has_no_node_of_pytorchs():
    """Beside an infinite score, a row without a key, an lse from which no weights come, and a gradient of a bias."""
    q, k, v = testing.make_inputs(1, 2, 2, 40, 40, 8, dtype=torch.float32, layout="bshd", requires_grad=True)
    infinite = k.detach().clone()
    infinite[0, 3] = torch.inf
    none = torch.ones(40, 40, dtype=torch.bool)
    none[3] = False
    bias = torch.zeros(40, 40)
    calls = [((q, infinite, v), {}), ((q, k, v), {"mask": none}), ((q, k, v), {"bias": bias - 1e9})]
    for tensors, options in [*calls, ((q, k, v), {"bias": bias.requires_grad_()})]:
        out = sartor.attention(*tensors, **options)
        assert not any(name.startswith("ScaledDot") for name in nodes(out.grad_fn))


@pytest.mark.parametrize("name", ["slopes", "documents", "table"])
def test_what_was_added_is_made_again_when_its_data_changes(name, monkeypatch):
    """In place too, and past autograd's count of changes; of equal data nothing is evaluated."""
    data = {"slopes": torch.ones(2), "documents": torch.arange(40)[None] // 7, "table": draw(40)}[name]
    made = {
        "slopes": lambda t: {"alibi_slopes": t},
        "documents": lambda t: {"mask": mods.document(t)},
        "table": lambda t: {"score": mods.Score(lambda s, b, h, q, kv: s + t[kv])},
    }[name]
    q, k, v = testing.make_inputs(1, 2, 2, 40, 40, 8, dtype=torch.float32, layout="bshd")
    first = sartor.attention(q, k, v, **made(data))
    data.data.zero_()
    changed = sartor.attention(q, k, v, **made(data))
    assert not torch.equal(first, changed)
    assert torch.allclose(changed, sartor.attention(q, k, v, kernel="reference", **made(data)), atol=1e-5)
    data = data.clone()
    monkeypatch.setattr(spans, "evaluate", None)
    assert torch.equal(sartor.attention(q, k, v, **made(data)), changed)


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(torch_cpu, "_KEPT", torch_cpu.Kept())
    for length in (600, 601, 602, 603, 1025):
        q, k, v = testing.make_inputs(1, 16, 16, 100, length, 8, dtype=torch.float32, layout="bshd")
        sartor.attention(q, k, v, alibi_slopes=torch.ones(16))
    sizes = [size for _, _, size in torch_cpu._KEPT._found.values()]
    assert len(sizes) == 5
    monkeypatch.setattr(kept, "MOST", max(sizes) + 1)
    sartor.attention(q, k, v, alibi_slopes=torch.ones(16), causal=True)
    assert sum(size for _, _, size in torch_cpu._KEPT._found.values()) <= kept.MOST
