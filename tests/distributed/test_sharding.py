"""Shardings, masks as blocks see them, and the balance of what ranks compute; one process."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import sartor.distributed as context
from sartor import mods
from sartor.distributed import Sharding
from sartor.distributed.balance import TILE, visible_tiles
from sartor.distributed.local import Local
from sartor.distributed.sharding import KINDS, Run, apart, joined_places, together
from sartor.distributed.shift import Frame, shifted, shifted_band
from sartor.distributed.sight import ALIGNED, sight
from sartor.problem import Call, band

ANY = {
    "kind": st.sampled_from(KINDS), "seqlen": st.integers(0, 70), "ranks": st.integers(1, 7), "pad": st.booleans(),
    "multiple": st.integers(1, 5),
}  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(**ANY)
def test_round_trip(kind, seqlen, ranks, pad, multiple):
    s = Sharding.make(kind, seqlen, ranks, pad=pad, multiple=multiple)
    assert Sharding.parse(s.text) == s
    x = torch.arange(2 * seqlen * 3).view(2, seqlen, 3)
    shards = [context.shard(x, s, rank, fill=-100) for rank in range(ranks)]
    assert [t.shape[1] for t in shards] == list(s.sizes)
    assert len(set(s.sizes)) == 1 or not pad
    assert torch.equal(context.unshard(shards, s), x)
    assert sum(s.count(rank) for rank in range(ranks)) == seqlen
    for rank, t in enumerate(shards):
        assert bool((t[:, s.count(rank) :] == -100).all())
        places = context.positions(s, rank)
        assert torch.equal(places[: s.count(rank)], s.tokens(rank))
        assert not places[s.count(rank) :].any()


@settings(deadline=None, max_examples=100)
@given(**ANY, group=st.integers(1, 4))
def test_joined(kind, seqlen, ranks, pad, multiple, group):
    s = Sharding.make(kind, seqlen, ranks * group, pad=pad, multiple=multiple)
    joined = s.joined(group)
    assert Sharding.parse(joined.text) == joined
    for rank in range(ranks):
        members = torch.cat([s.tokens(rank * group + i) for i in range(group)])
        assert torch.equal(members.sort().values, joined.tokens(rank).sort().values)
        places = joined_places(s.text, group, rank)
        whole = together([s.tokens(rank * group + i)[None] for i in range(group)], places)
        assert torch.equal(whole[0], joined.tokens(rank))
        for i, part in enumerate(apart(whole, places)):
            assert torch.equal(part[0], s.tokens(rank * group + i))
    if ranks == 1 and seqlen:
        assert joined.runs == ((joined.runs[0][0],),)
        assert (joined.runs[0][0].first, joined.runs[0][0].step) == (0, 1)


def test_labels_and_gradients():
    s = Sharding.make("zigzag", 10, 2)
    x = torch.randn(1, 10, 2, requires_grad=True)
    context.shard(x, s, 1).sum().backward()
    assert torch.equal(x.grad[0, :, 0].nonzero()[:, 0], s.tokens(1))
    for kind in KINDS:
        s = Sharding.make(kind, 10, 2)
        shards = [torch.randn(1, size, 2, requires_grad=True) for size in s.sizes]
        context.unshard(shards, s)[:, 3].sum().backward()
        found = torch.cat([s.tokens(rank)[t.grad[0, : s.count(rank), 0] != 0] for rank, t in enumerate(shards)])
        assert found.tolist() == [3]
    s = Sharding.make("zigzag", 10, 2)
    labels = context.shard(torch.arange(10), s, 0, dim=0, fill=-100)
    assert labels.tolist() == [0, 1, 2, 9, -100, -100]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sharding.make("ring", 8, 2), "kind must be one of"),
        (lambda: Sharding.make("zigzag", -1, 2), "seqlen must be an integer >= 0"),
        (lambda: Sharding.make("zigzag", 8, 0), "ranks must be an integer >= 1"),
        (lambda: Sharding.of_chunks(8, 2, [[0, 1], [1, 3]]), "each of the 4 chunks once"),
        (lambda: Sharding.of_chunks(8, 0, [[0]]), "chunk must be an integer"),
        (lambda: Sharding.of_chunks(-8, 2, [[]]), "seqlen must be an integer >= 0"),
        (lambda: context.shard(torch.zeros(1, 7), Sharding.make("zigzag", 8, 2), 0), "x must have 8 tokens in dim 1"),
        (lambda: context.shard(torch.zeros(8), Sharding.make("zigzag", 8, 2), 0, dim=1), "dim must be a dim"),
        (lambda: context.unshard([torch.zeros(1, 4)], Sharding.make("zigzag", 8, 2)), "one of each of 2 ranks"),
        (lambda: context.unshard([torch.zeros(1, 4)] * 2, Sharding.make("zigzag", 6, 2)), None),
        (lambda: context.unshard([torch.zeros(1, 3)] * 2, Sharding.make("zigzag", 6, 2)), "shard 0 must have 4"),
    ],
)
def test_refused(make, words):
    if words is None:
        make()
        return
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("rank", [2, 5, -1, 0.5, True])
@pytest.mark.parametrize("call", [context.positions, lambda s, rank: context.shard(torch.zeros(1, 8), s, rank)])
def test_ranks_that_a_sharding_has_not(call, rank):
    with pytest.raises(ValueError, match="rank must be an integer from 0 to 1, got"):
        call(Sharding.make("zigzag", 8, 2), rank)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: context.shard(x, "zigzag", 0),
        lambda x: context.positions("zigzag", 0),
        lambda x: context.unshard([x], "zigzag"),
    ],
)
def test_no_sharding(call):
    with pytest.raises(TypeError, match=r"sharding must be a Sharding, .* got str"):
        call(torch.zeros(1, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind):
    assert Sharding.make(kind, 0, 2, multiple=4).sizes == (0, 0)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


MASKS = {
    "window": lambda n: mods.window(5, 3),
    "documents": lambda n: mods.document(
        (torch.rand(2, n, generator=torch.Generator().manual_seed(1)) < 0.2).cumsum(1)
    ),
    "packed": lambda n: mods.packed(*2 * (torch.tensor([0, 3, 3, n // 2, n - 1]),), n, n, causal=True),
    "or": lambda n: mods.prefix(n // 3) | mods.causal(),
    "function": lambda n: mods.Mask(lambda b, h, q, kv, aux: (q * 2 + kv + h) % 5 != 0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MASKS)
def test_blocks_see_the_mask(name, kind):
    """Every block's mask is what the whole one holds there, its bounds included, and of what is seen none is missed."""
    n, ranks = 30, 3
    mask, s = MASKS[name](n), Sharding.make(kind, n, ranks)
    whole, view = mask.materialize(2, 2, n, n), sight(False, None, mask, s, n)
    for rank in range(ranks):
        for i, q in enumerate(s.runs[rank]):
            for kv in (run for runs in s.runs for run in runs):
                want = whole[:, :, q.tokens, kv.tokens]
                block = shifted(mask, Frame(q, kv, n, n))
                assert torch.equal(block.materialize(2, 2, q.count, kv.count), want)
                start, stop = view.seen(rank, i, kv)
                assert not want[..., :start].any()
                assert not want[..., max(stop, 0) :].any()
                if view.is_full(rank, i, kv):
                    assert bool(want.all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window", [None, (4, 2), (0, None), (None, 3), (3, 0)])
@pytest.mark.parametrize(("sq", "skv"), [(24, 24), (10, 24), (24, 10)])
def test_blocks_see_the_band(kind, causal, window, sq, skv):
    mask = band(causal, window)
    whole = torch.ones(1, 1, sq, skv, dtype=torch.bool) if mask is None else mask.materialize(1, 1, sq, skv)
    queries, keys = Sharding.make(kind, sq, 2), Sharding.make(kind, skv, 2)
    view = sight(causal, window, None, queries, skv)
    for rank in range(2):
        for i, q in enumerate(queries.runs[rank]):
            for kv in (run for runs in keys.runs for run in runs):
                want = whole[:, :, q.tokens, kv.tokens]
                block = shifted_band(causal, window, Frame(q, kv, sq, skv))
                got = torch.ones_like(want) if block is None else block.materialize(1, 1, q.count, kv.count)
                assert torch.equal(got, want)
                start, stop = view.seen(rank, i, kv)
                assert not want[..., :start].any()
                assert not want[..., max(stop, 0) :].any()
                assert bool(want.all()) or not view.is_full(rank, i, kv)


def local(kind, ranks, rank, sq, skv, causal=True, **options):
    q, k = (torch.empty(1, n, 1, 8, device="meta") for n in (sq, skv))
    call = Call(q, k, k, causal=causal, **options)
    return Local(call, Sharding.make(kind, sq, ranks), Sharding.make(kind, skv, ranks), rank)


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(KINDS), st.integers(1, 5), st.sampled_from([True, "top_left", False]),
    st.sampled_from([None, (4, 2), (None, 3)]), st.integers(1, 40), st.integers(1, 40),
)  # fmt: skip
def test_each_pair_is_of_one_rectangle(kind, ranks, causal, window, sq, skv):
    """Of those that the mask allows, whichever cells were joined; no other is of any."""
    mask = band(causal, window)
    whole = torch.ones(sq, skv, dtype=torch.bool) if mask is None else mask.materialize(1, 1, sq, skv)[0, 0]
    for rank in range(ranks):
        here = local(kind, ranks, rank, sq, skv, causal, window=window)
        first = [runs[:1] for runs in here.keys.runs]
        for block in (*here.keys.runs, *first, (Run(0, 0, 1, skv),)):  # the last is what all-gather has
            found = torch.zeros(here.queries.sizes[rank], sum(kv.count for kv in block), dtype=torch.int64)
            for at in here.rectangles(block):
                n, m = at.q.stop - at.q.start, at.kv.stop - at.kv.start
                seen = torch.ones(n, m, dtype=torch.int64)
                if at.causal:
                    seen = seen.tril(0 if at.causal == "top_left" else m - n)
                elif not at.full:
                    seen = here._mask(at.frame).materialize(1, 1, n, m)[0, 0].long()
                found[at.q, at.kv] += seen
            want = torch.zeros_like(found)
            for q in here.queries.runs[rank]:
                for kv in block:
                    want[q.places, kv.places] = whole[q.tokens, kv.tokens].long()
            assert torch.equal(found, want)


def test_what_is_causal_is_one_rectangle():
    """Of a rank's own tokens; of those of others there are no more where they are zigzag."""
    for rank in range(4):
        here = local("zigzag", 4, rank, 4096, 4096)
        for other, block in enumerate(here.keys.runs):
            (at,) = here.rectangles(block)
            assert (at.frame, at.causal) == (None, rank == other)
            assert at.q == (slice(0, 1024) if other <= rank else slice(512, 1024))
            assert at.kv == (slice(0, 512) if other < rank else slice(0, 1024))
        assert [at.causal for at in here.rectangles((Run(0, 0, 1, 4096),))] == [True] * len(here.queries.runs[rank])
        (at,) = here.rectangles(here.keys.runs[rank][:1])
        assert (at.q, at.causal) == (slice(0, 1024), True if rank == 3 else "top_left")
    (at,) = local("contiguous", 4, 2, 4096, 4096).rectangles((Run(0, 0, 1, 4096),))
    assert (at.kv, at.causal) == (slice(0, 3072), True)
    for other in range(4):  # of striped tokens a rank sees one less of those behind its own
        (at,) = local("striped", 4, 2, 4096, 4096).rectangles(Sharding.make("striped", 4096, 4).runs[other])
        assert at.causal == (other <= 2)


def test_what_is_sent():
    """A window sends the end of a shard to the next rank only; a causal mask nothing to ranks before."""
    s = Sharding.make("contiguous", 4096, 4)
    view = sight(True, (200, 0), None, s, 4096)
    assert [[len(view.needed(r, s.runs[o])) for o in range(4)] for r in range(4)] == [
        [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1],
    ]  # fmt: skip
    (number, part), = view.needed(2, s.runs[1])  # fmt: skip
    assert number == 0
    assert (part.first, part.last) == (2048 - 2 * ALIGNED, 2047)
    causal, zigzag = sight(True, None, None, Sharding.make("zigzag", 4096, 4), 4096), Sharding.make("zigzag", 4096, 4)
    assert len(causal.needed(3, zigzag.runs[1])) == 1  # of the second rank's two chunks
    assert len(causal.needed(1, zigzag.runs[3])) == 1  # two chunks of rank 3 that follow one another


def test_sight_is_found_again():
    ids = torch.zeros(1, 64, dtype=torch.int32)
    mask, s = mods.document(ids), Sharding.make("zigzag", 64, 2)
    first = sight(True, None, mask, s, 64)
    assert sight(True, None, mask, s, 64) is first
    assert sight(True, None, mods.document(ids), s, 64) is not first
    for t in mask.tensors[2:]:
        t.zero_()
    assert sight(True, None, mask, s, 64) is not first


def lognormal_ids(seqlen, seed):
    """Documents whose lengths have the mean 2048 and a heavy tail."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.empty(seqlen // 64).log_normal_(7.0, 1.1, generator=generator).long().clamp(16, seqlen)
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)[:seqlen].int()[None]


def imbalance(sharding, tiles):
    """The largest number of visible tiles of a rank over the mean; a cut tile counts by its share."""
    loads = []
    for runs in sharding.runs:
        load = 0.0
        for run in runs:
            numbers, counts = torch.unique((torch.arange(run.count) * run.step + run.first) // TILE, return_counts=True)
            load += float((tiles[numbers] * counts).sum()) / TILE
        loads.append(load)
    return max(loads) * len(loads) / sum(loads)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("seed", range(4))
def test_balance_of_documents(ranks, seed):
    n = 131072
    mask = mods.document(lognormal_ids(n, seed)[:, :n])
    s = context.balanced(n, ranks, causal=True, mask=mask)
    tiles = visible_tiles(n, n, causal=True, mask=mask).double()
    found = imbalance(s, tiles)
    assert found <= 1.05, found
    assert found <= imbalance(Sharding.make("contiguous", n, ranks), tiles)
    assert len(set(s.sizes)) == 1


@pytest.mark.parametrize(
    "given", [{"causal": True}, {"window": (3000, 0)}, {"mask": mods.prefix(20000) | mods.causal()}]
)
def test_balance_of_others(given):
    n, ranks = 65536, 8
    s = context.balanced(n, ranks, **given)
    assert imbalance(s, visible_tiles(n, n, **given).double()) <= 1.05


@pytest.mark.parametrize("given", [{"window": (-1, 0)}, {"window": [None, 0]}, {"causal": True, "window": (-1, 4)}])
def test_balance_of_a_causal_mask_by_another_name(given):
    assert context.balanced(4096, 4, **given) == context.balanced(4096, 4, causal=True)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"seqlen": -1}, ValueError, "seqlen must be an integer >= 0, got -1"),
        ({"ranks": 0}, ValueError, "ranks must be an integer >= 1, got 0"),
        ({"chunk": 0}, ValueError, "chunk must be an integer >= 1, got 0"),
        ({"chunk": -1}, ValueError, "chunk must be an integer >= 1, got -1"),
        ({"window": (1, 2, 3)}, ValueError, "window must be None or a pair"),
        ({"causal": "foo"}, ValueError, "causal must be False, True"),
        ({"mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)}, TypeError, "mask must be a sartor.mods.Mask, got Tensor"),
    ],
)
def test_what_balanced_refuses(given, error, words):
    with pytest.raises(error, match=words):
        context.balanced(**{"seqlen": 8, "ranks": 2, **given})


def test_visible_tiles():
    assert visible_tiles(512, 512, causal=True).tolist() == [1, 2, 3, 4]
    assert visible_tiles(512, 512, window=(0, 0)).tolist() == [1, 1, 1, 1]
    assert visible_tiles(300, 512).tolist() == [4, 4, 4]
