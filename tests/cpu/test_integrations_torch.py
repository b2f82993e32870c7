"""PyTorch's attention with `sartor.integrations.torch` active against PyTorch's own."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

import sartor
from sartor.integrations import torch as ours


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The calls that reach Sartor; nothing is active before or after."""
    found = []

    def spied(face):
        def call(*args, **kwargs):
            result = face(*args, **kwargs)
            found.append(args)
            return result

        return call

    monkeypatch.setattr(ours, "by_sartor", spied(ours.by_sartor))
    monkeypatch.setattr(ours, "_jagged", spied(ours._jagged))
    monkeypatch.setattr(ours._STATE, "said", set())
    assert not ours.is_active()
    yield found
    ours.deactivate()


def qkv(*shape, requires_grad=True):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=g).requires_grad_(requires_grad) for _ in range(3)]


def with_gradients(run, tensors):
    out = run()
    return [out, *torch.autograd.grad(out.square().sum(), tensors)]


def assert_same(run, tensors):
    want = with_gradients(run, tensors)
    with ours.activate():
        found = with_gradients(run, tensors)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


MASK = torch.tril(torch.ones(5, 5, dtype=torch.bool))


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"attn_mask": MASK}, {"attn_mask": MASK.float()}, {"scale": 0.3}],
    ids=["plain", "causal", "bool", "float", "scale"],
)
def test_function(options, calls):
    tensors = qkv(2, 4, 5, 8)
    assert_same(lambda: F.scaled_dot_product_attention(*tensors, **options), tensors)
    assert len(calls) == 1


def test_activation_ends():
    original = F.scaled_dot_product_attention
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with ours.activate():
        assert ours.is_active()
        with ours.activate():
            pass
        assert ours.is_active()
        assert F.scaled_dot_product_attention is not original
    assert F.scaled_dot_product_attention is original
    assert torch.backends.mha.get_fastpath_enabled() is fastpath
    ours.activate()
    assert ours.is_active()
    ours.deactivate()
    ours.deactivate()
    assert F.scaled_dot_product_attention is original


def test_modules(calls):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16, requires_grad=True)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    heads = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    assert_same(lambda: layer(x, src_key_padding_mask=padding), [x, *layer.parameters()])
    assert_same(lambda: heads(x, x, x, need_weights=False)[0], [x, *heads.parameters()])
    assert len(calls) == 2
    layer.eval()
    with torch.no_grad():
        want = layer(x, src_key_padding_mask=padding)
        with ours.activate():
            found = layer(x, src_key_padding_mask=padding)
    assert len(calls) == 3  # its fused path is off
    torch.testing.assert_close(found[~padding], want[~padding])


def test_what_is_not_there_is_pytorchs_and_said_once(calls):
    q, k, v = qkv(1, 2, 5, 8)
    wide = qkv(1, 1, 2, 520)
    with ours.activate():
        with pytest.warns(UserWarning, match="head dims must be at most 512, got 520"):
            found = F.scaled_dot_product_attention(*wide)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            F.scaled_dot_product_attention(*qkv(1, 1, 2, 530))
        with pytest.warns(UserWarning, match="functorch"):
            torch.func.vmap(F.scaled_dot_product_attention)(q[None], k[None], v[None])
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*wide))
    assert not calls


def test_dropout(calls):
    """In a function and in a layer: a mask of the generator's, and none in evaluation."""
    q, k, v = qkv(1, 2, 50, 8)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.5, batch_first=True)
    torch.manual_seed(0)
    want = sartor.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(0)
    with ours.activate():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), want)
        x = torch.randn(2, 5, 16, requires_grad=True)
        layer(x).sum().backward()
        assert len(calls) == 2
        assert torch.equal(layer.eval()(x), layer(x))
    assert not torch.equal(want, sartor.scaled_dot_product_attention(q, k, v))


def test_errors_say_what_was_expected():
    q, k, v = qkv(1, 2, 5, 8)
    with ours.activate(), pytest.raises(ValueError, match="key must have the head dim of query, 8, got head dim 3"):
        F.scaled_dot_product_attention(q, k[:, :, :, :3], v)


@pytest.mark.parametrize(("query", "error"), [(None, TypeError), (torch.tensor(1.0), ValueError)])
def test_errors_name_what_is_no_tensor_of_rows(query, error):
    with ours.activate(), pytest.raises(error, match="query must"):
        F.scaled_dot_product_attention(query, *qkv(1, 2, 5, 8)[1:])


class OneCall(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def test_graphs_of_others_name_pytorchs_function():
    x = torch.randn(1, 2, 3, 8)
    want = OneCall()(x)
    with ours.activate():
        traced, scripted = torch.fx.symbolic_trace(OneCall()), torch.jit.script(OneCall())
    assert "scaled_dot_product_attention" in traced.code
    torch.testing.assert_close(traced(x), want)
    torch.testing.assert_close(scripted(x), want)


def test_pytorchs_causal_bias(calls):
    q = qkv(1, 2, 3, 8)[0]
    _, k, v = qkv(1, 2, 5, 8)
    bias = causal_lower_right(3, 5)
    assert_same(lambda: F.scaled_dot_product_attention(q, k, v, bias), [q, k, v])
    q, (_, k, v) = qkv(1, 2, 3, 520)[0], qkv(1, 2, 5, 520)
    with ours.activate(), pytest.warns(UserWarning, match="head dim"):
        found = F.scaled_dot_product_attention(q, k, v, bias)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, torch.tril(torch.ones(3, 5), 2).bool()))


class Subclass(torch.Tensor):
    """A tensor that has a word in every call."""


def test_other_tensors_are_left_to_themselves(calls):
    q, k, v = qkv(1, 2, 5, 8, requires_grad=False)
    with ours.activate(), pytest.warns(UserWarning, match="Subclass"):
        found = F.scaled_dot_product_attention(q.as_subclass(Subclass), k, v)
    assert type(found) is Subclass
    assert not calls


def test_a_default_device_is_no_reason(fresh, calls):
    """Nor is one said: `torch.set_default_device` is a mode that sees every call."""
    q, k, v = qkv(1, 2, 5, 8, requires_grad=False)
    with ours.activate(), torch.device("cpu"), warnings.catch_warnings():
        warnings.filterwarnings("error", "PyTorch computes this attention")
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(torch.nn.Parameter(q), k, v)
        torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="eager")(q, k, v)
    assert len(calls) == 3


class Mode(TorchFunctionMode):
    """Sees every call of PyTorch's functions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen = func
        return func(*args, **(kwargs or {}))


def test_modes_of_others_see_pytorchs_function(calls):
    q, k, v = qkv(1, 2, 5, 8, requires_grad=False)
    with ours.activate(), Mode() as mode, pytest.warns(UserWarning, match="a mode is to see .* got Mode"):
        F.scaled_dot_product_attention(q, k, v)
    assert mode.seen is ours.PYTORCHS
    assert not calls


# ---- nested tensors and packed sequences


def nested(lengths, heads=2, dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, heads, dim, generator=g) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


@pytest.mark.parametrize("causal", [False, True])
def test_jagged(causal, calls):
    """Against each sequence alone."""
    q = nested([3, 5, 1])
    k, v = (torch.nested.nested_tensor_from_jagged(torch.randn(9, 2, 8), q.offsets()) for _ in range(2))
    with ours.activate():
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal)
    assert len(calls) == 1
    assert out.shape == q.transpose(1, 2).shape
    loss = out.transpose(1, 2).values().square().sum()
    (dq,) = torch.autograd.grad(loss, [q])
    for i, found in enumerate(out.unbind()):
        parts = [t.detach().unbind()[i].transpose(0, 1)[None].requires_grad_() for t in (q, k, v)]
        want = F.scaled_dot_product_attention(*parts, is_causal=causal)
        torch.testing.assert_close(found, want[0])
        (one,) = torch.autograd.grad(want.square().sum(), parts[:1])
        torch.testing.assert_close(dq.unbind()[i], one[0].transpose(0, 1))


def test_jagged_of_other_lengths(calls):
    q, kv = nested([3, 2]), nested([1, 4], seed=1)
    with ours.activate():
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, kv, kv)))
        with pytest.warns(UserWarning, match="equal lengths"), pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, kv, kv)), is_causal=True)
        other = nested([4, 1], seed=2)
        with pytest.warns(UserWarning, match="key and value must have equal lengths"), pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, kv, other)))
        one = nested([3, 2], heads=1)
        with pytest.warns(UserWarning, match="enable_gqa must be True"), pytest.raises((RuntimeError, ValueError)):
            F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (nested([3, 2]), one, one)))
    parts = [t.unbind()[1].transpose(0, 1)[None] for t in (q, kv, kv)]
    torch.testing.assert_close(out.unbind()[1], F.scaled_dot_product_attention(*parts)[0])
    assert len(calls) == 1


def test_strided_nested_tensors_are_pytorchs(calls):
    x = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    want = F.scaled_dot_product_attention(x, x, x)
    with ours.activate(), pytest.warns(UserWarning, match="jagged nested ones all"):
        found = F.scaled_dot_product_attention(x, x, x)
    for a, b in zip(found.unbind(), want.unbind(), strict=True):
        torch.testing.assert_close(a, b)
    assert not calls


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0)])
def test_varlen(window):
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")
    q, k, v = qkv(9, 4, 8)
    shared = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
    k, v = (t[:, : 2 if shared else 4].detach().requires_grad_() for t in (k, v))
    ends = torch.tensor([0, 6, 9], dtype=torch.int32)

    def run():
        return varlen.varlen_attn(q, k, v, ends, ends, 6, 6, window_size=window, **shared)

    with ours.activate():
        found = with_gradients(run, [q, k, v])
        _, lse = varlen.varlen_attn(q, q, q, ends, ends, 6, 6, return_aux=varlen.AuxRequest(lse=True))
    assert lse.shape == (4, 9)
    i = torch.arange(9)
    same = (i[:, None] < 6) == (i < 6)
    far = i[:, None] - i
    keep = same & (far >= (0 if window[1] == 0 else -9)) & (far <= (9 if window[0] < 0 else window[0]))

    def alone():
        batch = [t.transpose(0, 1)[None] for t in (q, k, v)]
        return F.scaled_dot_product_attention(*batch, attn_mask=keep, enable_gqa=True)[0].transpose(0, 1)

    for a, b in zip(found, with_gradients(alone, [q, k, v]), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises((NotImplementedError, RuntimeError)):  # PyTorch's own kernel is there again, for GPUs only
        run()
    with ours.activate():
        torch.testing.assert_close(run(), found[0])


# ---- torch.compile


@pytest.fixture
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_compiled_whole(fresh, calls):
    tensors = qkv(2, 4, 5, 8)

    def run(q, k, v):
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(a, k, v, attn_mask=MASK, scale=0.5)

    want = with_gradients(lambda: run(*tensors), tensors)
    with ours.activate():
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        found = with_gradients(lambda: compiled(*tensors), tensors)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_with_dropout(fresh):
    q, k, v = qkv(1, 2, 5, 8, requires_grad=False)
    with ours.activate():
        compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="eager")
        first, second = (compiled(q, k, v, dropout_p=0.5) for _ in range(2))
    assert first.shape == q.shape
    assert not torch.equal(first, second)


def test_compiled_jagged(fresh):
    q = nested([3, 5, 1])

    def run(x):
        return F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3, is_causal=True).transpose(1, 2).values()

    with ours.activate():
        want = with_gradients(lambda: run(q), [q])
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        found = with_gradients(lambda: compiled(q), [q])
    torch.testing.assert_close(found[0], want[0])
    torch.testing.assert_close(found[1].values(), want[1].values())
