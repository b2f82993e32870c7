"""Caches in pages against the same keys and values in one piece."""

from __future__ import annotations

import pytest
import torch

import sartor
from sartor.compat import flash_attn_3
from sartor.lengths import pages

BATCH, PAGES, SIZE = 3, 4, 3  # items, pages of an item, places of a page
pytestmark = pytest.mark.filterwarnings("ignore:.*pages are copied")


def inputs(new=0):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, 2, 4, 8, generator=g)
    k, v = torch.randn(2, BATCH, PAGES * SIZE, 2, 8, generator=g)
    table = torch.randperm(BATCH * PAGES + 2, generator=g)[: BATCH * PAGES].view(BATCH, PAGES).int()
    added = torch.randn(2, BATCH, new, 2, 8, generator=g).unbind() if new else (None, None)
    return q, k, v, table, *added


def in_pages(whole, table):
    """Its places where the table says; the pages of nobody hold NaN."""
    found = torch.full((BATCH * PAGES + 2, SIZE, *whole.shape[2:]), torch.nan)
    found[table.flatten().long()] = whole.view(-1, SIZE, *whole.shape[2:])
    return found


@pytest.mark.parametrize("lengths", [torch.tensor([1, 7, 10]), torch.tensor([0, 10, 3]).int(), 5], ids=str)
@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("three", [False, True])
def test_pages(lengths, new, three):
    q, k, v, table, *added = inputs(new)
    options = {"cache_seqlens": lengths, "causal": True, "window_size": (6, 0), "return_softmax_lse": True}
    dense = k.clone(), v.clone()
    want = sartor.flash_attn_with_kvcache(q, *dense, *added, **options)
    paged = in_pages(k, table), in_pages(v, table)
    face, name = sartor.flash_attn_with_kvcache, "block_table"
    if three:
        face, name = flash_attn_3.flash_attn_with_kvcache, "page_table"
    found = face(q, *paged, *added, **options | {name: table})
    assert all(map(torch.equal, found, want))
    for cache, whole in zip(paged, dense, strict=True):
        torch.testing.assert_close(cache, in_pages(whole, table), rtol=0, atol=0, equal_nan=True)


def test_pages_that_an_item_has_not_got():
    q, k, v, table, *added = inputs(new=2)
    lengths = torch.tensor([1, 4, 7])  # two pages, two pages, three pages with what is added
    want = sartor.flash_attn_with_kvcache(q, k.clone(), v.clone(), *added, cache_seqlens=lengths)
    paged = in_pages(k, table), in_pages(v, table)
    short = table.clone()
    short[0, 1:], short[1, 2:], short[2, 3:] = -1, -1, -1
    assert torch.equal(
        sartor.flash_attn_with_kvcache(q, *paged, *added, cache_seqlens=lengths, block_table=short), want
    )


@pytest.mark.parametrize("lengths", [torch.tensor([0, 0, 0]), 0], ids=str)
@pytest.mark.parametrize("rows", [[[3, 1], [0, -1], [-1, -1]], [[-1, -1], [0, 1], [-1, -1]], [[-1, -1]] * 3], ids=str)
def test_items_without_pages_change_none(lengths, rows):
    q, _, _, _, *added = inputs(new=2)
    added = [t.requires_grad_() for t in added]
    table = torch.tensor(rows)
    paged = torch.zeros(4, SIZE, 2, 8), torch.zeros(4, SIZE, 2, 8)
    sartor.flash_attn_with_kvcache(q, *paged, *added, cache_seqlens=lengths, block_table=table)
    for cache, new in zip(paged, added, strict=True):
        want = torch.zeros_like(cache)
        for row, values in zip(rows, new.detach(), strict=True):
            if row[0] >= 0:
                want[row[0], :2] = values
        assert torch.equal(cache, want)
        found = torch.autograd.grad(cache.sum(), new)[0]  # of each value once
        assert torch.equal(found, torch.tensor([row[0] >= 0 for row in rows])[:, None, None, None].expand(new.shape))


def test_no_items():
    q, _, _, table, *added = (t[:0] for t in inputs(new=2))
    paged = torch.zeros(4, SIZE, 2, 8), torch.zeros(4, SIZE, 2, 8)
    lengths = torch.zeros(0, dtype=torch.int32)
    out = sartor.flash_attn_with_kvcache(q, *paged, *added, cache_seqlens=lengths, block_table=table)
    assert out.shape == q.shape


def test_a_graph():
    q, k, v, table, *added = inputs(new=2)
    torch.compiler.reset()
    step = torch.compile(sartor.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    both = []
    for face in (step, sartor.flash_attn_with_kvcache):
        paged = in_pages(k, table).nan_to_num(), in_pages(v, table).nan_to_num()
        lengths = torch.tensor([1, 7, 10])
        both.append((face(q, *paged, *added, cache_seqlens=lengths, block_table=table, causal=True), *paged))
    assert all(map(torch.equal, *both))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"block_table": torch.zeros(2, 4).int()},
            r"block_table must be .* of shape \(3, pages of an item\), got .*\(2, 4\)",
        ),
        ({"block_table": torch.zeros(3, 4)}, "block_table must be int32 or int64 .*float32"),
        ({"block_table": torch.full((3, 4), 14)}, "block_table must name pages below 14, got 14"),
        ({"block_table": [0]}, "block_table must be a torch.Tensor, got list"),
        ({"cache_seqlens": torch.tensor([0, 13, 3])}, "cache_seqlens must be between 0 and the 12"),
        ({"v_cache": torch.zeros(13, 3, 2, 8)}, "v_cache must have the pages of k_cache"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(change, words):
    q, k, v, table, *_ = inputs()
    given = {
        "q": q,
        "k_cache": in_pages(k, table),
        "v_cache": in_pages(v, table),
        "block_table": table,
        "cache_seqlens": 4,
    }
    with pytest.raises((TypeError, ValueError), match=words):
        sartor.flash_attn_with_kvcache(**given | change)


def test_the_cost_is_said_once():
    q, k, v, table, *_ = inputs()
    pages._say.cache_clear()
    with pytest.warns(UserWarning, match="block_table: pages are copied to a dense cache at every call"):
        sartor.flash_attn_with_kvcache(q, in_pages(k, table), in_pages(v, table), cache_seqlens=4, block_table=table)
