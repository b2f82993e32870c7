"""Modules that stand in for flash-attn's."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType

import pytest
import torch

import sartor
from sartor.compat import flash_attn as two
from sartor.compat import flash_attn_3 as three
from sartor.integrations import flash_attn as ours


@pytest.fixture
def installed():
    if ours._is_installed("flash_attn") or ours._is_installed("flash_attn_interface"):
        pytest.skip("flash-attn itself is installed")
    ours.install()
    yield
    ours.uninstall()
    assert "flash_attn" not in sys.modules
    assert "flash_attn.bert_padding" not in sys.modules


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_imports(installed):
    from flash_attn import __version__, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
    from flash_attn.flash_attn_interface import (
        flash_attn_qkvpacked_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from flash_attn_interface import flash_attn_func as of_three

    assert flash_attn_func is sartor.flash_attn_func
    assert flash_attn_varlen_func is sartor.flash_attn_varlen_func
    assert flash_attn_with_kvcache is sartor.flash_attn_with_kvcache
    assert flash_attn_qkvpacked_func is sartor.flash_attn_qkvpacked_func
    assert flash_attn_varlen_kvpacked_func is sartor.flash_attn_varlen_kvpacked_func
    assert flash_attn_varlen_qkvpacked_func is sartor.flash_attn_varlen_qkvpacked_func
    assert of_three is three.flash_attn_func
    assert (index_first_axis, pad_input, unpad_input) == (ours.index_first_axis, ours.pad_input, ours.unpad_input)
    assert __version__.startswith("2.")
    assert importlib.util.find_spec("flash_attn") is not None
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn.layers")
    ours.install()  # twice is once


def test_real_ones_are_kept(monkeypatch):
    real = ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    with pytest.raises(RuntimeError, match=r"flash_attn must not be installed.*force"):
        ours.install()
    assert sys.modules["flash_attn"] is real
    ours.install(force=True)
    assert sys.modules["flash_attn"].flash_attn_func is sartor.flash_attn_func
    ours.uninstall()
    assert sys.modules["flash_attn"] is real


def test_padding():
    x = normal(3, 5, 2, 4).requires_grad_()
    seen = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    flat, indices, ends, longest, used = ours.unpad_input(x, seen)
    assert torch.equal(flat, x[seen.bool()])
    assert ends.tolist() == [0, 2, 6, 7]
    assert (longest, used.tolist(), ends.dtype) == (4, [2, 4, 1], torch.int32)
    back = ours.pad_input(flat, indices, 3, 5)
    assert torch.equal(back, x * seen[..., None, None])
    (dx,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(dx, seen[..., None, None].expand_as(x).float())
    unused = torch.tensor([[0, 0, 1, 0, 0], [0] * 5, [0] * 5])
    flat, _, ends, longest, used = ours.unpad_input(x, seen, unused)
    assert (flat.shape[0], ends.tolist(), longest, used.tolist()) == (8, [0, 3, 7, 8], 4, [2, 4, 1])


def test_unpadded_training_is_padded_training():
    q, k, v = (normal(3, 5, 2, 8) + i for i in range(3))
    seen = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    flat = [ours.unpad_input(t, seen) for t in (q, k, v)]
    _, indices, ends, longest, _ = flat[0]
    out = sartor.flash_attn_varlen_func(*(f[0] for f in flat), ends, ends, longest, longest, causal=True)
    want = sartor.attention(q, k, v, causal=True) * seen[..., None, None]
    torch.testing.assert_close(ours.pad_input(out, indices, 3, 5), want)


# ---- FlashAttention-3's signatures


def test_three():
    q, k, v = normal(2, 5, 4, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 8) + 1
    options = {"causal": True, "window_size": (3, 0), "softcap": 5.0, "softmax_scale": 0.3}
    want, lse, _ = two.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    found = three.flash_attn_func(q, k, v, 0.3, True, window_size=(3, 0), softcap=5.0, return_attn_probs=True)
    assert len(found) == 2
    assert torch.equal(found[0], want)
    assert torch.equal(found[1], lse)
    assert torch.equal(three.flash_attn_func(q, k, v, **options), want)


def test_three_varlen_and_cache():
    q, k = normal(9, 4, 8), normal(9, 2, 8)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    want = two.flash_attn_varlen_func(q, k, k, ends, ends, 5, 5, causal=True)
    assert torch.equal(three.flash_attn_varlen_func(q, k, k, ends, ends, 5, 5, causal=True), want)
    out, lse = three.flash_attn_varlen_func(q, k, k, ends, ends, 5, 5, return_attn_probs=True)
    assert lse.shape == (4, 9)
    new, cache = normal(2, 1, 4, 8), normal(2, 6, 2, 8)
    lengths = torch.tensor([3, 6], dtype=torch.int32)
    want = two.flash_attn_with_kvcache(new, cache, cache, cache_seqlens=lengths, causal=True)
    assert torch.equal(three.flash_attn_with_kvcache(new, cache, cache, cache_seqlens=lengths, causal=True), want)
    out, lse = three.flash_attn_with_kvcache(new, cache, cache, cache_seqlens=lengths, return_softmax_lse=True)
    assert out.shape == new.shape


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"])
def test_three_refuses_what_is_not_there(name):
    face = getattr(three, name)
    q = normal(2, 3, 2, 8)
    tensors = [q] * 3 if name != "flash_attn_varlen_func" else [q[0]] * 3 + [torch.tensor([0, 3])] * 2 + [3, 3]
    for option in set(inspect.signature(face).parameters) & {"qv", "q_descale", "seqused_k"}:
        with pytest.raises(NotImplementedError, match=option):
            face(*tensors, **{option: q})
    with pytest.raises(NotImplementedError, match="attention_chunk"):
        face(*tensors, attention_chunk=4)
