"""`sartor.nn`: the module against PyTorch's operators, with a cache, packed, copied and compiled."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from sartor import mods
from sartor.nn import Attention, MaskBuffers, rotate


def made(**options):
    torch.manual_seed(0)
    layer = Attention(32, 4, 2, **options)
    if layer.sinks is not None:
        torch.nn.init.normal_(layer.sinks)
    return layer, torch.randn(2, 9, 32)


def plain(layer, x):
    """The same by eager operators."""
    q, k, v = layer.qkv(x).unflatten(-1, (8, 8)).split((4, 2, 2), 2)
    at = torch.arange(x.shape[1])[None]
    q, k = (rotate(t, at, layer.rotary_base) if layer.rotary_base else t for t in (q, k))
    k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    far = at.T - at
    keep = torch.ones(9, 9, dtype=torch.bool)
    if layer.window is not None:
        left, right = layer.window
        keep = (far <= (99 if left is None else left)) & (far >= -(99 if right is None else right))
    scores = scores.masked_fill(~keep, -torch.inf)
    if layer.sinks is not None:
        scores = torch.cat([scores, layer.sinks[:, None, None].expand(2, 4, 9, 1)], -1)
    weights = scores.softmax(-1)[..., :9]
    return layer.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


@pytest.mark.parametrize(
    "options", [{}, {"window": (3, 0)}, {"window": None}, {"sinks": True}, {"rotary_base": 0.0}], ids=str
)
def test_module(options):
    layer, x = made(**options)
    want, found = plain(layer, x), layer(x)
    torch.testing.assert_close(found, want)
    for a, b in zip(
        torch.autograd.grad(found.square().sum(), layer.parameters()),
        torch.autograd.grad(want.square().sum(), layer.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(a / b.abs().max(), b / b.abs().max())


@pytest.mark.parametrize("options", [{}, {"window": (3, 0)}, {"sinks": True}], ids=str)
@torch.no_grad()
def test_cache(options):
    """A prompt and then token by token, in two sequences of different lengths, is each sequence at once."""
    layer, x = made(**options)
    want = layer(x)
    cache = layer.new_cache(2, 12)
    parts = [layer(x[:, :4], cache=cache)]
    parts += [layer(x[:, i : i + 1], cache=cache) for i in range(4, 9)]
    torch.testing.assert_close(torch.cat(parts, 1), want)
    assert cache.lengths.tolist() == [9, 9]
    cache = layer.new_cache(2, 12)
    layer(x[:, :5], cache=cache)
    cache.lengths[1] = 3  # of the second, two tokens are forgotten
    next_ = torch.stack([x[0, 5:6], x[1, 3:4]])
    found = layer(next_, cache=cache)
    torch.testing.assert_close(found[0, 0], want[0, 5])
    torch.testing.assert_close(found[1, 0], want[1, 3])


def test_cache_in_autocast():
    layer, x = made()
    cache = layer.new_cache(2, 12)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = layer(x, cache=cache)
    assert cache.k.dtype == torch.float32
    torch.testing.assert_close(found.float(), layer(x), atol=0.05, rtol=0.05)


def test_gradients_through_a_cache():
    layer, x = made()
    cache = layer.new_cache(2, 12)
    layer(x[:, :4], cache=cache)
    for a, b in zip(
        torch.autograd.grad(layer(x[:, 4:], cache=cache).square().sum(), layer.parameters()),
        torch.autograd.grad(layer(x)[:, 4:].square().sum(), layer.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(a / b.abs().max(), b / b.abs().max())


@torch.no_grad()
def test_a_full_cache():
    layer, x = made()
    cache = layer.new_cache(2, 12)
    layer(x, cache=cache)
    with pytest.raises(ValueError, match=r"cache.lengths must leave room for 9 more of 12 places, got 9"):
        layer(x, cache=cache)


def test_rotation_of_float64():
    x, angles = torch.randn(1, 1, 1, 8, dtype=torch.float64), 997 * 1e4 ** -torch.arange(0, 1, 0.25).double()
    turned = torch.polar(torch.ones_like(angles), angles) * torch.complex(*x.chunk(2, -1))
    torch.testing.assert_close(rotate(x, torch.tensor([[997]]), 1e4), torch.cat((turned.real, turned.imag), -1))


def test_packed():
    layer, x = made()
    ends, at = torch.tensor([0, 5, 9]), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    found = layer(x[:1], at, mods.packed(ends, ends, 9, 9, causal=True))
    torch.testing.assert_close(found, torch.cat([layer(x[:1, :5]), layer(x[:1, 5:])], 1))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = MaskBuffers(mods.causal() & mods.document(torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1]])))
        self.layer = Attention(32, 4, 2)

    def forward(self, x):
        return self.layer(x, mask=self.mask())


def test_masks_as_buffers():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 9, 32)
    want = model(x)
    alone = model.layer(x[:, :5])
    torch.testing.assert_close(want[:, :5], alone)
    names = {n for n in model.state_dict() if n.startswith("mask.")}
    assert names
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    other = Model()
    other.mask.aux1.zero_()
    file.seek(0)
    other.load_state_dict(torch.load(file))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other, model.to("cpu")):
        assert torch.equal(twin(x), want)
    double = copy.deepcopy(model).double()
    torch.testing.assert_close(double(x.double()).float(), want)
    assert model.to("meta").mask().tensors[0].device.type == "meta"


def test_compiled_whole():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 9, 32)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))


def test_a_mask_is_not_for_a_cache():
    layer, x = made()
    with pytest.raises(ValueError, match="mask must be None with a cache"):
        layer(x, mask=mods.causal(), cache=layer.new_cache(2, 12))


def test_bad_sizes():
    with pytest.raises(ValueError, match="multiple of heads"):
        Attention(33, 4)
    with pytest.raises(ValueError, match="heads of heads_kv"):
        Attention(32, 4, 3)
    for heads in ((0,), (-2,), (4, -2)):
        with pytest.raises(ValueError, match="both positive"):
            Attention(32, *heads)
    with pytest.raises(ValueError, match="dim / heads must be even with a rotary_base, got 15 / 3"):
        Attention(15, 3)
    assert Attention(15, 3, rotary_base=0)(torch.randn(1, 4, 15)).shape == (1, 4, 15)
