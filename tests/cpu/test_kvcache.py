"""Rotary positions, left padding and rows of a cache in `flash_attn_with_kvcache`, against plain PyTorch in float64."""

from __future__ import annotations

import warnings

import pytest
import torch

import sartor
from sartor.compat import flash_attn_3
from sartor.compat.rotary import Rotary
from sartor.lengths import pages

BATCH, NEW, CAPACITY, ROWS, DIM, PLACES = 3, 2, 12, 5, 8, 20
face = sartor.flash_attn_with_kvcache
pytestmark = pytest.mark.filterwarnings("ignore:.*are copied to a dense cache")
LENGTHS = torch.tensor([0, 5, 10])
PAD = torch.tensor([0, 3, 11])
INDEX = torch.tensor([4, 0, 2])


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inputs(rows=BATCH, dtype=torch.float64, rotary_dim=4):
    """q, the caches, new keys and values, as many as queries, cos and sin."""
    angles = normal(PLACES, rotary_dim // 2, seed=5)
    made = {
        "q": normal(BATCH, NEW, 4, DIM),
        "k_cache": normal(rows, CAPACITY, 2, DIM, seed=1),
        "v_cache": normal(rows, CAPACITY, 2, DIM, seed=2),
        "k": normal(BATCH, NEW, 2, DIM, seed=3),
        "v": normal(BATCH, NEW, 2, DIM, seed=4),
        "rotary_cos": angles.cos(),
        "rotary_sin": angles.sin(),
    }
    return {name: t.to(dtype) for name, t in made.items()}


def turned(x, cos, sin, places, interleaved):
    """x (tokens, heads, dim), column by column."""
    half = cos.shape[1]
    columns = list(x.unbind(-1))
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = (t[[min(p, len(t) - 1) for p in places], i, None] for t in (cos, sin))
        columns[a], columns[b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return torch.stack(columns, -1)


def plain(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, causal=False, window_size=(-1, -1), rotary_interleaved=True, alibi_slopes=None,
):  # fmt: skip
    """out, lse and the caches after the call, item by item."""
    k_cache, v_cache, outs, lses = k_cache.clone(), v_cache.clone(), [], []
    left, right = window_size
    for b in range(len(q)):
        row = b if cache_batch_idx is None else int(cache_batch_idx[b])
        n = cache_seqlens if not isinstance(cache_seqlens, torch.Tensor) else int(cache_seqlens[b])
        n, end, mine = k_cache.shape[1] if n is None else n, n, q[b]
        if k is None:
            end = n
        else:
            new, end = k[b], n + k.shape[1]
            if rotary_cos is not None:
                tables = rotary_cos, rotary_sin
                new = turned(new, *tables, range(n, end), rotary_interleaved)
                each = causal or max(window_size) >= 0
                places = [n + i * each for i in range(len(mine))]
                mine = turned(mine, *tables, places, rotary_interleaved)
            k_cache[row, n:end], v_cache[row, n:end] = new, v[b]
        i, j = torch.arange(len(mine))[:, None] + end - len(mine), torch.arange(end)
        keep = (j >= (0 if cache_leftpad is None else cache_leftpad[b])).expand(len(i), end)
        if left >= 0:
            keep = keep & (j >= i - left)
        if causal or right >= 0:
            keep = keep & (j <= i + (0 if causal else right))
        keys, values = (t[row, :end].repeat_interleave(2, 1) for t in (k_cache, v_cache))
        scores = torch.einsum("qhd,khd->hqk", mine, keys) * DIM**-0.5
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.double()[:, None, None] * (i - j).abs()
        scores = scores.masked_fill(~keep, -torch.inf)
        weights = scores.softmax(-1).masked_fill(~keep.any(-1)[:, None], 0)
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(lses), k_cache, v_cache


def compare(given, call=face):
    own = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    found = call(**own, return_softmax_lse=True)
    for x, want in zip((*found, own["k_cache"], own["v_cache"]), plain(**given), strict=True):
        torch.testing.assert_close(x, want, rtol=1e-10, atol=1e-10)
    for name in given.keys() - {"k_cache", "v_cache"}:
        if isinstance(own[name], torch.Tensor):
            assert torch.equal(own[name], given[name])


SIGHTS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (4, 1)},
    "left": {"window_size": (3, -1)},
    "both": {"causal": True, "window_size": (2, -1)},
}
sights = pytest.mark.parametrize("sight", SIGHTS.values(), ids=SIGHTS)


@sights
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS.int(), 7], ids=["int64", "int32", "one"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [2, 4, 8])
def test_rotary(sight, lengths, interleaved, rotary_dim):
    compare(inputs(rotary_dim=rotary_dim) | sight | {"cache_seqlens": lengths, "rotary_interleaved": interleaved})


@pytest.mark.parametrize("lengths", [LENGTHS, 10], ids=["each", "one"])
def test_places_past_the_tables_take_their_last_row(lengths):
    given = inputs() | {"cache_seqlens": lengths, "causal": True}
    compare(given | {name: given[name][:7] for name in ("rotary_cos", "rotary_sin")})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_is_rounded_once(dtype, interleaved):
    given = inputs(dtype=dtype)
    x, cos, sin = (given[name] for name in ("q", "rotary_cos", "rotary_sin"))
    found = Rotary(cos, sin, interleaved).turn(x, LENGTHS)
    for item, mine, n in zip(found, x.float(), LENGTHS.tolist(), strict=True):
        want = turned(mine, cos.float(), sin.float(), range(n, n + NEW), interleaved)
        assert torch.equal(item, want.to(dtype))


@sights
@pytest.mark.parametrize("lengths", [LENGTHS, 9, None], ids=["each", "one", "whole"])
@pytest.mark.parametrize("new", [False, True])
def test_left_padding(sight, lengths, new):
    given = inputs() | sight | {"cache_seqlens": lengths}
    for name in ("rotary_cos", "rotary_sin", *(() if new else "kv")):
        del given[name]
    if new and lengths is None:
        given["cache_seqlens"] = CAPACITY - NEW
    for pad in (PAD, PAD.int(), torch.stack([PAD, PAD], 1)[:, 0]):
        compare(given | {"cache_leftpad": pad})
    compare(given | {"cache_leftpad": PAD, "alibi_slopes": torch.tensor([0.5, 0.25, 1.0, 0.1])})


def test_what_padding_hides_is_not_read():
    given = inputs()
    q, k, v = (given[name] for name in ("q", "k_cache", "v_cache"))
    k[1, :3], v[1, :3] = torch.nan, torch.inf
    out, lse = face(q, k, v, cache_leftpad=torch.tensor([0, 3, CAPACITY]), return_softmax_lse=True)
    assert out.isfinite().all()
    assert not out[2].any()
    assert (lse[2] == -torch.inf).all()


@sights
@pytest.mark.parametrize("lengths", [LENGTHS, 7, None], ids=["each", "one", "whole"])
@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("rows", [INDEX, INDEX.int()], ids=["int64", "int32"])
def test_rows_of_a_cache(sight, lengths, new, rows):
    given = inputs(ROWS) | sight | {"cache_seqlens": lengths, "cache_batch_idx": rows}
    for name in ("rotary_cos", "rotary_sin", *(() if new else "kv")):
        del given[name]
    if new and lengths is None:
        given["cache_seqlens"] = CAPACITY - NEW
    compare(given)


def test_items_may_read_one_row():
    given = inputs(ROWS)
    q, k, v = (given[name] for name in ("q", "k_cache", "v_cache"))
    compare({"q": q, "k_cache": k[:2], "v_cache": v[:2], "cache_batch_idx": torch.tensor([1, 1, 0])})


def everything(**changes):
    options = {"cache_seqlens": LENGTHS, "cache_batch_idx": INDEX, "cache_leftpad": PAD, "causal": True}
    return inputs(ROWS) | options | {"window_size": (6, -1), "rotary_interleaved": False} | changes


def test_all_together():
    compare(everything())
    compare(everything(), flash_attn_3.flash_attn_with_kvcache)
    compare(everything(alibi_slopes=torch.tensor([0.5, 0.25, 1.0, 0.1]), cache_seqlens=4))


def test_pages_and_padding():
    given = inputs() | {"cache_seqlens": LENGTHS, "cache_leftpad": PAD, "causal": True}
    want = face(**{name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in given.items()})
    for name in ("k_cache", "v_cache"):
        given[name] = given[name].reshape(-1, 4, 2, DIM)
    assert torch.equal(face(**given, block_table=torch.arange(9).view(3, 3)), want)


@pytest.mark.parametrize(
    "options", [{}, {"cache_batch_idx": None}, {"causal": False, "window_size": (-1, -1)}], ids=str
)
def test_gradients(options):
    given = everything(**options)
    if given["cache_batch_idx"] is None:
        del given["cache_batch_idx"]
        given |= {name: given[name][:BATCH] for name in ("k_cache", "v_cache")}
    given["cache_leftpad"] = torch.tensor([0, 3, 2])
    leaves = [given[name].requires_grad_() for name in ("q", "k", "v", "k_cache", "v_cache")]
    both = []
    for f in (face, plain):
        out = f(**given | {name: given[name].clone() for name in ("k_cache", "v_cache")})
        out = out[0] if isinstance(out, tuple) else out
        both.append(torch.autograd.grad(out.square().sum(), leaves))
    for found, want in zip(*both, strict=True):
        assert found.any()
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [(-1, -1), (6, -1)], ids=str)
def test_a_graph(window):
    """It has no breaks, writes to the right rows, and serves other numbers."""
    torch.compiler.reset()
    step = torch.compile(face, fullgraph=True, backend="aot_eager")
    for lengths in (LENGTHS, LENGTHS.flip(0)):
        both = []
        for f in (step, face):
            given = everything(cache_seqlens=lengths, window_size=window)
            both.append((*f(**given, return_softmax_lse=True), given["k_cache"], given["v_cache"]))
        assert all(map(torch.equal, *both))


def test_a_graph_of_a_padded_cache_alone():
    torch.compiler.reset()
    step = torch.compile(face, fullgraph=True, backend="aot_eager")
    caches = [inputs()[name] for name in ("q", "k_cache", "v_cache")]
    for pad in (PAD, PAD.flip(0)):
        assert torch.equal(step(*caches, cache_leftpad=pad), face(*caches, cache_leftpad=pad))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rotary_sin": None}, "rotary_sin must be given where rotary_cos is, got None"),
        ({"rotary_cos": None}, "rotary_cos must be given where rotary_sin is, got None"),
        ({"k": None, "v": None}, r"rotary_cos must be None where no k and v are added, got shape \(20, 2\)"),
        (
            {"k": None, "v": None, "cache_seqlens": None, "cache_leftpad": None},
            "rotary_cos must be None where no k and v are added",
        ),
        ({"rotary_cos": [1.0]}, "rotary_cos must be a torch.Tensor, got list"),
        ({"rotary_sin": torch.ones(20, 2).int()}, "rotary_sin must be a floating .*int32"),
        ({"rotary_cos": torch.ones(20, 5)}, r"rotary_cos must have shape .* at most 4 columns, got \(20, 5\)"),
        ({"rotary_cos": torch.ones(0, 2)}, r"rotary_cos must have shape .* at least 1 place .*got \(0, 2\)"),
        ({"rotary_cos": torch.ones(20)}, r"rotary_cos must have shape \(seqlen_ro, rotary_dim / 2\), .*got \(20,\)"),
        ({"rotary_sin": torch.ones(9, 2)}, r"rotary_sin must have the shape of rotary_cos, \(20, 2\), got \(9, 2\)"),
        ({"rotary_sin": torch.ones(20, 2).to("meta")}, "rotary_sin must be on the device of q, cpu, got meta"),
        ({"rotary_interleaved": 1}, "rotary_interleaved must be a bool, got int"),
        ({"cache_leftpad": 3}, "cache_leftpad must be a torch.Tensor, got int"),
        ({"cache_leftpad": PAD.float()}, r"cache_leftpad must be int32 or int64 of shape \(3,\), got torch.float32"),
        ({"cache_leftpad": PAD[:2]}, r"cache_leftpad must be .* of shape \(3,\), got torch.int64 \(2,\)"),
        ({"cache_leftpad": PAD.to("meta")}, "cache_leftpad must be on the device of q, cpu, got meta"),
        ({"cache_leftpad": -PAD}, "cache_leftpad must be between 0 and the 12 places there are, got -3"),
        ({"cache_leftpad": PAD + 2}, "cache_leftpad must be between 0 and the 12 places there are, got 13"),
        ({"cache_batch_idx": [0, 1, 2]}, "cache_batch_idx must be a torch.Tensor, got list"),
        ({"cache_batch_idx": INDEX[:2]}, r"cache_batch_idx must be int32 or int64 of shape \(3,\), got .*\(2,\)"),
        ({"cache_batch_idx": INDEX[:, None]}, r"cache_batch_idx must be .* of shape \(3,\), got .*\(3, 1\)"),
        ({"cache_batch_idx": INDEX.float()}, "cache_batch_idx must be int32 or int64 .*float32"),
        ({"cache_batch_idx": INDEX.to("meta")}, "cache_batch_idx must be on the device of k_cache, cpu, got meta"),
        ({"cache_batch_idx": INDEX + 1}, "cache_batch_idx must name rows below 5, got 5"),
        ({"cache_batch_idx": INDEX - 1}, "cache_batch_idx must name rows from 0 on, got -1"),
        ({"v_cache": torch.zeros(4, 12, 2, 8)}, "v_cache must have the rows of k_cache, and as large ones"),
        (dict.fromkeys(("k_cache", "v_cache"), torch.zeros(0, 12, 2, 8)), "k_cache must have rows where cache_batch"),
        ({"block_table": INDEX[:, None]}, "cache_batch_idx must be None beside block_table, got Tensor"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(change, words):
    given = everything(**change)
    before = given["k_cache"].clone()
    with pytest.raises((TypeError, ValueError), match=words):
        face(**given)
    assert torch.equal(given["k_cache"], before)


def test_three_has_names_of_its_own():
    three = flash_attn_3.flash_attn_with_kvcache
    with pytest.raises(ValueError, match="cache_batch_idx must be None beside page_table"):
        three(**everything(page_table=INDEX[:, None]))
    with pytest.raises(NotImplementedError, match="rotary_seqlens must be left out"):
        three(**everything(rotary_seqlens=LENGTHS))


def test_the_cost_is_said_once():
    pages._say.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        face(**everything())
        face(**everything())
    (one,) = told
    assert "cache_batch_idx: rows are copied to a dense cache at every call" in str(one.message)
    assert one.filename == __file__
