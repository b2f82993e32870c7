"""Tables of packed sequences and caches: what they say, what they cost, and values that are wrong.

The `case_*` functions run Triton's interpreter, in a process of their own: see test_triton_interpreter.py.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import test_triton_interpreter as shared
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import sartor
from sartor import mods
from sartor.kernels.triton import launch
from sartor.lengths import append, intervals, values
from sartor.lengths.intervals import NO_SIDE, Cache
from sartor.mods import masks

INSIDE = shared.INSIDE
DTYPES = (torch.int32, torch.int64, torch.uint8)


def literal(cu_q, cu_kv, lengths, sides):
    """Bool (seqlen_q, seqlen_kv): which query attends to which key, pair by pair."""
    keep = torch.zeros(lengths, dtype=torch.bool)
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_kv, cu_kv[1:], strict=False):
        for i in range(q0, q1):
            diagonal = i - q1 + k1
            for j in range(k0, k1):
                keep[i, j] = diagonal - sides[0] <= j <= diagonal + sides[1]
    return keep


def attended(rows, cols):
    """The same from the tables of rows, and from those of columns."""
    q, kv = (torch.arange(t.numel() // 2) for t in (rows, cols))
    (lo, hi), (first, last) = rows.flatten(1), cols.flatten(1)
    by_rows = (kv >= lo[:, None]) & (kv < hi[:, None])
    return by_rows, (q[:, None] >= first) & (q[:, None] < last)


@st.composite
def packings(draw):
    """Ends of queries and keys, of sequences with none, one and many; tokens past the last; and a window."""
    n = draw(st.integers(0, 5))
    sizes = st.lists(st.integers(0, 12), min_size=n, max_size=n)
    ends = [[0, *torch.tensor(draw(sizes), dtype=torch.int64).cumsum(0).tolist()] for _ in "qk"]
    lengths = tuple(e[-1] + draw(st.integers(0, 3)) for e in ends)
    sides = st.one_of(st.just(NO_SIDE), st.integers(0, 9))
    return *ends, lengths, (draw(sides), draw(sides))


def tensor(ends, dtype, strided):
    t = torch.tensor(ends, dtype=dtype)
    return torch.stack([t, t], 1)[:, 1] if strided else t


# ---- what they say


@settings(max_examples=60, deadline=None)
@given(packings(), st.sampled_from(DTYPES), st.booleans())
def test_tables_are_the_literal_mask(packing, dtype, strided):
    *ends, lengths, sides = packing
    cu = [tensor(e, dtype, strided) for e in ends]
    rows, cols = intervals.packed_intervals(*cu, lengths, sides, "cu_seqlens_kv")
    want = literal(*ends, lengths, sides)
    for found in attended(rows, cols):
        assert torch.equal(found, want)


@pytest.mark.parametrize("seqlen_q", [1, 4])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 1)}, {"causal": True, "window": (2, None)}])
@pytest.mark.parametrize("lengths", [[0, 3, 9], [4]])
def test_a_cache_is_the_literal_mask(lengths, options, seqlen_q):
    """Of its rows and of its columns, which the backward reads."""
    mask = mods.cached(torch.tensor(lengths), seqlen_q, 9, **options)
    left, right = options.get("window", (None, None))
    right = 0 if options.get("causal") else right
    found = mask.materialize(len(lengths), 1, seqlen_q, 9)[:, 0]
    cols = [
        torch.as_tensor(t).expand(len(lengths), 1, 1, 9)[:, 0]
        for t in mask.cols(0, 0, torch.arange(9), mask.aux)[:2]
    ]  # fmt: skip
    q = torch.arange(seqlen_q)[:, None]
    assert torch.equal((q >= cols[0]) & (q < cols[1]), found)
    for b, n in enumerate(lengths):
        for i in range(seqlen_q):
            at = i + n - seqlen_q
            lo, hi = 0 if left is None else at - left, n if right is None else min(n, at + right + 1)
            assert found[b, i].tolist() == [lo <= j < hi for j in range(9)]


def test_lengths_of_any_integers_and_strides():
    q, cache = torch.randn(3, 2, 4, 8), torch.randn(3, 12, 2, 8)
    want = sartor.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=torch.tensor([1, 12, 5]), causal=True)
    strided = torch.tensor([[1, 7], [12, 7], [5, 7]], dtype=torch.int32)[:, 0]
    assert torch.equal(sartor.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=strided, causal=True), want)
    for dtype in (torch.uint8, torch.int16):
        mask = mods.cached(torch.tensor([1, 12, 5], dtype=dtype), 2, 12, causal=True)
        assert torch.equal(sartor.attention(q, cache, cache, mask=mask), want)


# ---- Triton's kernels


@pytest.mark.skipif(INSIDE, reason="runs the cases in another process")
@pytest.mark.skipif(not launch.available(), reason="needs Triton")
def test_interpreter():
    shared.run_cases([__file__])


def flagged():
    """The flag of a device that is a CPU."""
    return values._FLAGS.setdefault(None, values.Flag(torch.device("cpu"), pinned=False))


@settings(max_examples=40, deadline=None)
@given(packings(), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 200))
def case_packed(packing, dtype, strided, more):
    """The kernels' tables are those of the operations that CPUs run, in several programs too."""
    from sartor.lengths import launches

    *ends, lengths, sides = packing
    lengths = tuple(n + more for n in lengths)
    cu = tuple(tensor(e, dtype, strided) for e in ends)
    flag = flagged()
    tables = tuple(t.fill_(-7) for t in intervals.rows_and_cols(*cu, lengths))
    launches.intervals(cu, tables, lengths, sides, "cu_seqlens_kv")
    assert all(map(torch.equal, tables, intervals._packed_intervals(*cu, lengths, sides, "cu_seqlens_kv")))
    places = intervals._number_and_place(*cu, lengths[0]).fill_(-7)
    launches.places(cu, places)
    assert torch.equal(places, intervals._packed_places(*cu, lengths[0]))
    assert not flag.words.any()


def case_many_sequences():
    """More than one program looks at."""
    from sartor.lengths import launches

    cu = torch.arange(301).clamp(max=290)
    tables = intervals.rows_and_cols(cu, cu, (290, 290))
    launches.intervals((cu, cu), tables, (290, 290), (NO_SIDE, 0), "cu_seqlens_kv")
    assert all(map(torch.equal, tables, intervals._packed_intervals(cu, cu, (290, 290), (NO_SIDE, 0), "cu_seqlens_kv")))
    assert not flagged().words.any()
    cu[257] = 3
    launches.intervals((cu, cu), tables, (290, 290), (NO_SIDE, 0), "cu_seqlens_kv")
    with pytest.raises(ValueError, match=r"cu_seqlens_q must .*never fall, got 3 after 256.*in an earlier call"):
        sartor.check()
    sartor.check()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=140), st.sampled_from([0, 2]), st.sampled_from([NO_SIDE, 0, 3]))
def case_cached(lengths, added, right):
    from sartor.lengths import launches

    n, cache = torch.tensor(lengths, dtype=torch.int64), Cache(len(lengths), 2, 11, added)
    flag = flagged()
    for given_, uniform in ((n, -1), (None, 5)):
        table = intervals.table_of_cache(n, None, 0, None, cache).fill_(-7)
        launches.cached(table, given_, uniform, (4, right), cache)
        want = intervals.cached_table(n, n if given_ is not None else uniform, (4, right), cache)
        assert torch.equal(table, want)
    assert not flag.words.any()


WRONG = {
    "begins": ([2, 5, 9], "cu_seqlens_q must begin with 0 and never fall, got 2 first"),
    "negative": ([0, -5, 9], "cu_seqlens_q must begin with 0 and never fall, got -5 after 0"),
    "falls": ([0, 7, 3], "cu_seqlens_q must begin with 0 and never fall, got 3 after 7"),
    "late": ([0, 5, 99], "cu_seqlens_q must end at the number of tokens, 9, or before, got 99"),
    "beyond int32": ([0, 5, 2**40], f"cu_seqlens_q must end at the number of tokens, 9, or before, got {2**31 - 1}"),
}


@pytest.mark.parametrize("name", WRONG)
def case_wrong_ends(name):
    """They are told, and clamped."""
    from sartor.lengths import launches

    ends, words = WRONG[name]
    cu = torch.tensor(ends), torch.tensor([0, 5, 9])
    tables = intervals.rows_and_cols(*cu, (9, 9))
    flagged()
    launches.intervals(cu, tables, (9, 9), (NO_SIDE, NO_SIDE), "cu_seqlens_k")
    assert all(((t >= 0) & (t <= 9)).all() for t in tables)
    with pytest.raises(ValueError, match=words):
        sartor.check()


@pytest.mark.parametrize(("lengths", "added", "words"), [
    ([3, 11], 0, "lengths must be between 0 and the 9 places there are, got 11"),
    ([-1, 3], 0, "lengths must be between 0 and the 9 places there are, got -1"),
    ([3, 8], 2, "lengths must leave room for the new keys: be between 0 and 7, got 8"),
    ([3, 2**35], 2, "lengths must leave room"),
])  # fmt: skip
def case_wrong_lengths(lengths, added, words):
    """A later call raises it too, once."""
    from sartor.lengths import launches

    n, cache = torch.tensor(lengths), Cache(2, 1, 9, added)
    flagged()
    table = intervals.table_of_cache(n, None, 0, None, cache)
    launches.cached(table, n, -1, (NO_SIDE, 0), cache)
    assert table[0].flatten().tolist() == [
        min(9, max(0, x) + added if x >= 0 else added - 1) * (x != -1) for x in lengths
    ]
    with pytest.raises(ValueError, match=words):
        launches.cached(table, n.clamp(0, 5), -1, (NO_SIDE, 0), cache)
    launches.cached(table, n.clamp(0, 5), -1, (NO_SIDE, 0), cache)
    sartor.check()


@pytest.mark.parametrize(("lengths", "added", "words"), [
    ([3, 9, 0], 0, None),
    ([3, 7, 0], 2, None),
    ([3, 10, 4], 0, "lengths must be between 0 and the 9 places there are, got 10"),
    ([3, -1, 4], 2, "lengths must leave room for the new keys: be between 0 and 7, got -1"),
    ([3, 8, 4] * 60, 2, "lengths must leave room for the new keys: be between 0 and 7, got 8"),
])  # fmt: skip
def case_lengths_that_a_mask_reads(lengths, added, words):
    """They are looked at by a launch of their own, or by that which adds keys."""
    from sartor.lengths import launches

    n, new = torch.tensor(lengths, dtype=torch.int32), torch.randn(len(lengths), added, 1, 4)
    flagged()
    if added:
        launches.append(new, new, *torch.zeros(2, len(lengths), 9, 1, 4), n, "lengths")
    else:
        launches.filled(n, Cache(len(lengths), 1, 9))
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        if added:  # a later launch tells of it too
            launches.append(new, new, *torch.zeros(2, len(lengths), 9, 1, 4), n.clamp(0, 7), "lengths")
        sartor.check()


@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype"), [(8, 8, torch.float16), (7, 5, torch.float16), (4, 16, torch.float32)]
)
def case_append(dim, dim_v, dtype):
    """What fits is written, in any layout and alignment; nothing else is, which is told."""
    from sartor.lengths import launches

    flagged()
    k, v = torch.randn(4, 3, 2, dim).to(dtype), torch.randn(4, 2, 3, dim_v).to(dtype).transpose(1, 2)
    caches = torch.randn(4, 9, 2, dim).to(dtype), torch.randn(4, 2, 9, dim_v + 1).to(dtype)[..., 1:].transpose(1, 2)
    lengths, want = torch.tensor([-2, 3, 7, 2**40]), [t.clone() for t in caches]
    for b, n in enumerate(lengths.tolist()):
        for j in range(3):
            if 0 <= n + j < 9:
                want[0][b, n + j], want[1][b, n + j] = k[b, j], v[b, j]
    launches.append(k, v, *caches, lengths, "lengths")
    assert all(map(torch.equal, caches, want))
    with pytest.raises(ValueError, match="lengths must leave room for the new keys"):
        sartor.check()


# ---- masks that read lengths themselves


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 12), min_size=1, max_size=3),
    st.sampled_from([0, 2]), st.sampled_from([NO_SIDE, 0, 3]), st.sampled_from([NO_SIDE, 0, 4]),
    st.sampled_from([torch.int32, torch.int64]),
)  # fmt: skip
def test_it_is_that_of_a_table(lengths, added, left, right, dtype):
    """Whatever lengths hold, by pairs and by intervals."""
    n = torch.tensor(lengths, dtype=dtype)
    table = intervals.table_of_cache(n, None, 0, None, Cache(len(lengths), 2, 9, added))
    length = (n.long().clamp(max=9) + added).clamp(0, 9)
    table.view(4, -1).copy_(torch.stack([length, length - 2, length - 2 - left, length - 2 + right + 1]))
    found, want = masks.of_filled(n, added, (left, right)), masks.of_cache(table, (left, right))
    assert torch.equal(found.materialize(len(lengths), 1, 2, 9), want.materialize(len(lengths), 1, 2, 9))


# ---- what they cost


class Counted(TorchDispatchMode):
    """Operations that the dispatcher saw."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})


def test_a_packed_call_is_few_operations():
    """One node and views for a compiler. Before, a mask alone was more than 40 operations."""
    q, cu = torch.randn(20, 4, 8), torch.tensor([0, 3, 20])
    with Counted() as counted:
        sartor.flash_attn_varlen_func(q, q, q, cu, cu, 17, 17, causal=True)
    names = [n for n in counted.names if not n.startswith(("aten.unsqueeze", "aten.squeeze", "aten.unbind"))]
    assert names == ["sartor.packed_intervals.default", "sartor.attention.default"]
    with Counted() as counted:
        intervals._packed_intervals(cu, cu, (20, 20), (NO_SIDE, 0), "cu_seqlens_kv")
    assert len(counted.names) <= 50  # on a CPU, most of them on few elements


@pytest.mark.skipif(not launch.available(), reason="needs Triton")
def test_on_a_gpu_a_table_is_its_memory_and_one_launch(monkeypatch):
    from sartor.lengths import launches

    started = []
    monkeypatch.setattr(intervals, "by_kernel", lambda t: True)
    monkeypatch.setattr(launches, "launch", lambda one: started.append(one.kernel.__name__))
    monkeypatch.setitem(values._FLAGS, None, values.Flag(torch.device("cpu"), pinned=False))
    cu, lengths = torch.tensor([0, 3, 20]), torch.tensor([3, 4])
    with Counted() as counted:
        intervals._packed_intervals(cu, cu, (20, 20), (NO_SIDE, 0), "cu_seqlens_kv")
        intervals._cached_table(lengths, lengths, -1, (NO_SIDE, 0), (2, 1, 9, 1), "lengths")
    assert counted.names == ["aten.empty_strided.default"] * 3
    assert started == ["intervals_kernel", "cached_kernel"]


# ---- values


def test_a_flag_made_in_inference_mode_is_cleared_outside():
    with torch.inference_mode():
        flag = values.Flag(torch.device("cpu"), pinned=False)
    assert flag.errors() == []


def test_kernels_look_once_at_what_does_not_change(monkeypatch):
    """But again in each graph, and where nothing counts changes."""
    now = SimpleNamespace(graph=0)
    monkeypatch.setattr(values, "_graph", lambda _: now.graph)
    n = torch.tensor([3, 4, 5])
    assert [values.to_look_at(n, 9), values.to_look_at(n, 9), values.to_look_at(n, 8)] == [True, False, True]
    assert values.to_look_at(n[1:], 9)
    n[1:] += 1
    assert [values.to_look_at(n, 9), values.to_look_at(n, 9)] == [True, False]
    now.graph = 7
    assert [values.to_look_at(n, 9), values.to_look_at(n, 9)] == [True, False]
    with torch.inference_mode():
        made = torch.tensor([3])
    assert values.to_look_at(made, 9)
    assert values.to_look_at(made, 9)
    address = id(n.untyped_storage())
    assert address in values._LOOKED
    del n
    gc.collect()
    assert address not in values._LOOKED
    monkeypatch.setattr(values, "CHECKS", False)
    assert not values.to_look_at(made, 9)


def test_a_tensor_is_seen_once():
    """Its region of memory, however it is called; what comes later in the same memory is another."""
    t = torch.zeros(9, dtype=torch.int32)
    assert not values._seen(t)
    values._remember(t)
    t[3] = 7
    assert values._seen(t)
    assert values._seen(t[:])
    assert not values._seen(t[1:])
    key = id(t.untyped_storage())
    assert key in values._SEEN
    del t
    gc.collect()
    assert key not in values._SEEN


def test_places_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(values, "MOST_PLACES", 3)
    t = torch.zeros(9, dtype=torch.int32)
    for i in range(9):
        values._remember(t[i:])
        assert values._seen(t[i:])
    assert len(values._SEEN[id(t.untyped_storage())][1]) <= 3


def test_nothing_is_wrong_at_first():
    assert sartor.check() is None


def test_values_beyond_32_bits():
    """They are seen as what they are: as int32 2**32 would be 0."""
    q, cache = torch.randn(20, 4, 8), torch.randn(1, 20, 4, 8)
    cu, far = torch.tensor([0, 20]), torch.tensor([0, 2**32 + 20])
    with pytest.raises(
        ValueError, match="cu_seqlens_k must end at the number of tokens, 20, or before, got 4294967316"
    ):
        sartor.flash_attn_varlen_func(q, q, q, cu, far, 20, 20)
    with pytest.raises(ValueError, match="cache_seqlens must be between 0 and the 20 places there are, got 4294967296"):
        sartor.flash_attn_with_kvcache(cache, cache, cache, cache_seqlens=torch.tensor([2**32]))


def test_more_new_keys_than_places():
    q, cache, new = torch.randn(1, 1, 2, 8), torch.randn(1, 4, 2, 8), torch.randn(1, 5, 2, 8)
    with pytest.raises(ValueError, match="k must have at most the 4 places of its cache, got 5"):
        sartor.flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=0)


# ---- new keys


@pytest.mark.parametrize(
    "lengths", [torch.tensor([0, 3, 5]), torch.tensor([2, -1, 6]), torch.tensor([9, 2**40, -7])], ids=str
)
def test_without_a_kernel_what_fits_is_written(lengths):
    """As compiled graphs and calls with gradients write them."""
    k, v = torch.randn(3, 2, 2, 8), torch.randn(3, 2, 2, 4)
    caches = torch.randn(3, 7, 2, 8), torch.randn(3, 7, 2, 4)
    want = [t.clone() for t in caches]
    for b, n in enumerate(lengths.tolist()):
        for j in range(2):
            if 0 <= n + j < 7:
                want[0][b, n + j], want[1][b, n + j] = k[b, j], v[b, j]
    with Counted():
        append.append(*caches, k, v, lengths, "lengths")
    assert all(map(torch.equal, caches, want))


@pytest.mark.parametrize("lengths", [torch.tensor([0, 3]), 3], ids=str)
@pytest.mark.parametrize("traced", [False, True])
def test_new_keys_have_gradients(lengths, traced):
    q, cache = torch.randn(2, 2, 2, 8), torch.randn(2, 6, 2, 8)
    new = torch.randn(2, 2, 2, 8, requires_grad=True)
    caches = cache.clone(), cache.clone()
    with Counted() if traced else torch.enable_grad():
        append.append(*caches, new, new, lengths, "lengths")
    (caches[0] * 3 + caches[1]).sum().backward()
    assert torch.equal(new.grad, torch.full_like(new, 4))
    caches = cache.clone(), cache.clone()
    out = sartor.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=lengths, causal=True)
    assert torch.autograd.grad(out.sum(), new)[0].any()


# ---- compiled by Inductor


def compiled_and_eager(face, dynamic):
    torch._dynamo.reset()
    return torch.compile(face, fullgraph=True, dynamic=dynamic), face


@pytest.mark.parametrize("dynamic", [False, True])
def test_packed_sequences_by_inductor(dynamic):
    """Inductor of torch 2.11 made zeros of it. Values are looked at within the graph."""
    both = compiled_and_eager(sartor.flash_attn_varlen_func, dynamic)
    for ends in ([0, 5, 45], [0, 0, 45]) if dynamic else ([0, 5, 45],):
        cu = torch.tensor(ends)
        leaves = [torch.randn(45, 4, 8, requires_grad=True) for _ in "qkv"]
        found, want = ([f(*leaves, cu, cu, 45, 45, causal=True)] for f in both)
        for outs in (found, want):
            outs += torch.autograd.grad(outs[0].square().sum(), leaves)
        assert found[0].abs().amax((1, 2)).min() > 0
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, want, strict=True))
    with pytest.raises(ValueError, match="cu_seqlens_q must begin with 0 and never fall"):
        both[0](*leaves, cu + 1, cu, 45, 45, causal=True)
    with pytest.raises(ValueError, match="cu_seqlens_k must end at the number of tokens, 45"):
        both[0](*leaves, cu, cu * 2, 45, 45, causal=True)


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_cache_by_inductor(dynamic):
    both = compiled_and_eager(sartor.flash_attn_with_kvcache, dynamic)
    q, cache, k, v = (torch.randn(3, n, 4 if n == 1 else 2, 8) for n in (1, 12, 2, 2))
    for lengths in (torch.tensor([0, 5, 10]), torch.tensor([7, 7, 1])):
        caches = [[cache.clone(), cache.clone()] for _ in both]
        outs = [f(q, *own, k, v, cache_seqlens=lengths, causal=True) for f, own in zip(both, caches, strict=True)]
        assert torch.allclose(*outs, atol=1e-6)
        assert all(map(torch.equal, *caches))
    with pytest.raises(ValueError, match="cache_seqlens must leave room for 2 more of 12 places, got 11"):
        both[0](q, *caches[0], k, v, cache_seqlens=lengths + 4, causal=True)
