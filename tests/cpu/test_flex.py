"""FlexAttention's functions, unchanged: against PyTorch's own, run eagerly, and against autograd over dense scores."""

from __future__ import annotations

import functools
import gc
import runpy
import weakref
from pathlib import Path

import pytest
import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flex_mods
from sartor import mods, testing
from sartor.integrations import flex
from sartor.mods.program import Program

BATCH, HEADS, LENGTH, DIM = 2, 4, 72, 16


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def inputs(dtype=torch.float32, heads_kv=HEADS):
    return testing.make_inputs(BATCH, HEADS, heads_kv, LENGTH, LENGTH, DIM, dtype=dtype, requires_grad=True)


def blocks(mask_mod, size=16):
    return mask_mod and create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=size)


def dense(q, k, v, score_mod, mask_mod):
    """By the functions on index tensors, of which autograd makes the gradients."""
    at = [
        torch.arange(n).view(shape)
        for n, shape in zip((BATCH, HEADS, LENGTH, LENGTH), ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,)), strict=True)
    ]
    s = q @ k.repeat_interleave(HEADS // k.shape[1], 1).mT / DIM**0.5
    s = s if score_mod is None else score_mod(s, *at)
    s = s if mask_mod is None else torch.where(mask_mod(*at), s, -torch.inf)
    return s.softmax(-1) @ v.repeat_interleave(HEADS // v.shape[1], 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", flex_mods.NAMES)
def test_unchanged(name, dtype):
    """Forward, lse, gradients of inputs and of what is captured."""
    score_mod, mask_mod, trained = flex_mods.make(BATCH, HEADS, LENGTH, dtype=dtype)[name]
    q, k, v = inputs(dtype)
    close = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 2e-5}
    if dtype == torch.float64 and name in ("alibi", "bucketed", "trained_alibi"):
        close = {"rtol": 1e-6, "atol": 1e-6}  # PyTorch's integers become float32 there
    block_mask = blocks(mask_mod)
    plain = flex_mods.make(BATCH, HEADS, LENGTH, dtype=dtype, trains=False)[name].score_mod
    want, want_lse = theirs.flex_attention(*(t.detach() for t in (q, k, v)), plain, block_mask, return_lse=True)
    out, lse = flex.flex_attention(q, k, v, score_mod, block_mask, return_lse=True)
    torch.testing.assert_close(out, want, **close)
    torch.testing.assert_close(lse, want_lse.to(lse.dtype), **close)
    dout, leaves = testing.make_like(out), (q, k, v, *trained)
    found = torch.autograd.grad(out, leaves, dout)
    for d, want in zip(found, torch.autograd.grad(dense(q, k, v, score_mod, mask_mod), leaves, dout), strict=True):
        torch.testing.assert_close(d, want, **close)


def test_the_example(capsys):
    path = Path(__file__).parents[2] / "examples" / "flex_mods.py"
    runpy.run_path(str(path), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) == 11
    assert len(path.read_text().splitlines()) < 60


def test_grouped_heads_scale_and_aux():
    q, k, v = inputs(heads_kv=2)
    with pytest.raises(ValueError, match="key must have the heads of query, 4, got 2: enable_gqa=True"):
        flex.flex_attention(q, k, v)
    want, lse = theirs.flex_attention(q.detach(), k.detach(), v.detach(), scale=0.7, enable_gqa=True, return_lse=True)
    request = theirs.AuxRequest(lse=True)
    out, aux = flex.flex_attention(
        q, k, v, scale=0.7, enable_gqa=True, return_aux=request, kernel_options={"BLOCK_M": 64}
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(aux.lse, lse)
    one = flex.flex_attention(q, k[:1], v[:1], enable_gqa=True)
    torch.testing.assert_close(one[1:], flex.flex_attention(q[1:], k[:1], v[:1], enable_gqa=True))
    with pytest.raises(NotImplementedError, match="max_scores"):
        flex.flex_attention(q, k, v, enable_gqa=True, return_aux=theirs.AuxRequest(max_scores=True))


@pytest.mark.parametrize("name", [n for n, m in flex_mods.make(1, 2, 16).items() if m.mask_mod])
@pytest.mark.parametrize("size", [16, (8, 32), 128])
def test_blocks_bound_rows_and_columns(name, size):
    """What they call empty holds no pair, what they call full holds all."""
    mask_mod = flex_mods.make(BATCH, HEADS, LENGTH)[name].mask_mod
    sizes = BATCH, HEADS, LENGTH, LENGTH
    mask = flex.to_mask(blocks(mask_mod, size), sizes)
    keep = mask.materialize(*sizes)
    assert torch.equal(keep, mods.Mask(mask_mod).materialize(*sizes))
    places = torch.arange(LENGTH)
    for spans, of_pairs in ((mask.rows, keep), (mask.cols, keep.mT)):
        at = torch.arange(BATCH).view(-1, 1, 1, 1), torch.arange(HEADS).view(-1, 1, 1), places[:, None]
        ends = [torch.as_tensor(e) for e in spans(*at, mask.values)]
        assert not (of_pairs & ~((places >= ends[0]) & (places < ends[1]))).any()
        assert not (~of_pairs & (places >= ends[2]) & (places < ends[3])).any()


def test_intervals_are_found_in_functions():
    """Those by which the fastest kernels skip tiles, forward and backward; and where a document's hull comes from."""
    made = flex_mods.make(BATCH, HEADS, LENGTH)
    for name, exact in (("causal", True), ("window", True), ("prefix_lm", True), ("natten", False)):
        program = Program.of(mods.Mask(made[name].mask_mod), None)[0]
        assert program.is_interval_both_ways == exact, name
        assert program.rows[1].text() != str(mods.core.BIG)
    sizes = BATCH, HEADS, LENGTH, LENGTH
    document = flex.to_mask(blocks(made["document"].mask_mod), sizes)
    assert document.tables
    assert not flex.to_mask(blocks(made["natten"].mask_mod), sizes).tables  # whose intervals are within its blocks'
    assert not mods.Mask(made["document"].mask_mod).tables


def test_a_block_mask_without_a_function_keeps_its_blocks():
    listed = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    counts = listed.sum(-1, dtype=torch.int32)[None, None]
    indices = torch.argsort(listed.int(), dim=-1, descending=True, stable=True).int()[None, None]
    block_mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=24, seq_lengths=(LENGTH, LENGTH))
    q, k, v = inputs()
    want = dense(q, k, v, None, lambda b, h, q, kv: listed[q // 24, kv // 24])
    torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=block_mask), want)


def test_a_mask_is_traced_once_for_a_block_mask():
    q, k, v = (t.detach() for t in inputs())
    calls = []

    def causal(b, h, q, kv):
        calls.append(q)
        return q >= kv

    block_mask = blocks(causal)
    calls.clear()
    for _ in range(2):
        flex.flex_attention(q, k, v, block_mask=block_mask)
    assert len(calls) == 1
    gone = weakref.ref(block_mask)
    del block_mask
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match=r"lengths of query and key, \(72, 72\), got one for \(64, 64\)"):
        flex.flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, 64, 64, device="cpu"))


def test_what_a_function_closes_over_may_change():
    q, k, v = (t.detach() for t in inputs())
    n = 3
    window = lambda b, h, q, kv: (q >= kv) & (q - kv <= n)  # noqa: E731 - a mask
    for n in (3, 9):
        want = flex.flex_attention(q, k, v, block_mask=mods.window(n, 0))
        torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=window), want)


def test_what_cannot_be_traced_is_refused_with_its_line():
    q, k, v = (t.detach() for t in inputs())
    table = torch.ones(HEADS, LENGTH)
    for score_mod, words in (
        (lambda s, b, h, q, kv: torch.cumsum(s, 0), r"`cumsum` is not known .*minimum.*\(line \d+ of test_flex.py: `"),
        (lambda s, b, h, q, kv: s + table[h], r"index a captured tensor of shape \(4, 72\) by 2 integers, got 1: h"),
        (lambda s, b, h, q, kv: s if q > kv else -s, r"sartor.mods.where.*\(q > kv\).*test_flex.py"),
        (lambda s, b, h, q, kv: s.masked_fill(q < kv, 0.0), r"no `masked_fill`: use operators .*test_flex.py"),
        (lambda s, b, h, q, kv: s + table, r"tensor of shape \(4, 72\) in arithmetic: index it .*test_flex.py"),
        (functools.partial(lambda a, s, b, h, q, kv: s.view(-1) + a, 1), "no `view`"),
    ):
        with pytest.raises(TypeError, match=words):
            flex.flex_attention(q, k, v, score_mod)


def test_positions_read_a_longer_tensor():
    """As a table: FlexAttention reads what it is told to, whatever the tensor's length."""
    q, k, v = (t.detach() for t in inputs())
    ids = torch.arange(2 * LENGTH).repeat(BATCH, 1) // 20
    mask_mod = lambda b, h, q, kv: ids[b, q] == ids[b, kv]  # noqa: E731 - a mask
    torch.testing.assert_close(flex.flex_attention(q, k, v, None, mask_mod), dense(q, k, v, None, mask_mod))
    with pytest.raises(ValueError, match="broadcastable"):
        flex.attention(q, k, v, layout="bhsd", mask=mods.Mask(mask_mod))


def test_gradients_of_what_changes_in_place():
    """A table is trained by steps that change it; and one call's gradients are not the next one's."""
    q, k, v = (t.detach() for t in inputs())
    table = torch.zeros(HEADS, requires_grad=True)
    scaled = lambda s, b, h, q, kv: s * table[h]  # noqa: E731 - a score
    score = mods.Score(scaled)
    for _ in range(3):
        out = flex.flex_attention(q, k, v, score)
        (d,) = torch.autograd.grad(out.square().sum(), table)
        (want,) = torch.autograd.grad(dense(q, k, v, scaled, None).square().sum(), table)
        torch.testing.assert_close(d, want, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            table.add_(d / d.norm())
