"""Packed sequences and caches on a GPU: tables by a kernel, values in range and out of it, in every setting."""

from __future__ import annotations

import time

import pytest
import torch

import judged
import sartor
from sartor import mods
from sartor.lengths import intervals, values
from sartor.lengths.intervals import NO_SIDE, Cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.judges(*judged.NARROW),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOKENS, PLACES = 300, 70
ENDS = [0, 0, 90, 91, 290]
WRONG_ENDS = {
    "late": ([0, 0, 90, 91, 999], "cu_seqlens_q must end at the number of tokens, 300, or before, got 999"),
    "negative": ([0, -7, 90, 91, 290], "cu_seqlens_q must begin with 0 and never fall, got -7 after 0"),
    "falls": ([0, 0, 90, 33, 290], "cu_seqlens_q must begin with 0 and never fall, got 33 after 90"),
    "begins": ([5, 5, 90, 91, 290], "cu_seqlens_q must begin with 0 and never fall, got 5 first"),
}
WRONG_LENGTHS = {
    "late": (
        [3, PLACES + 1, 0],
        f"cache_seqlens must be between 0 and the {PLACES} places there are, got {PLACES + 1}",
    ),
    "negative": ([3, -2, 0], f"cache_seqlens must be between 0 and the {PLACES} places there are, got -2"),
}


@pytest.fixture(autouse=True)
def nothing_wrong():
    """Before and after each test; and the context is alive."""
    sartor.check()
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    sartor.check()
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.fixture
def no_waiting():
    """A call that waits for the device is an error, once the returned function was called."""
    return lambda: torch.cuda.set_sync_debug_mode("error")


def cuda(ends, dtype=torch.int32):
    return torch.tensor(ends, dtype=dtype, device="cuda")


def tokens(gradient=False, heads=4):
    make = torch.Generator("cuda").manual_seed(heads)
    return [
        torch.randn(TOKENS, heads, 64, device="cuda", dtype=torch.float16, generator=make).requires_grad_(gradient)
        for _ in "qkv"
    ]


def varlen(q, k, v, cu, cu_k=None, **options):
    return sartor.flash_attn_varlen_func(q, k, v, cu, cu if cu_k is None else cu_k, 199, 199, causal=True, **options)


def cached(new=0):
    """q, two caches of three items, and new keys and values."""
    make = torch.Generator("cuda").manual_seed(new)
    shapes = (1, 8), (PLACES, 2), (PLACES, 2), (new, 2), (new, 2)
    found = [torch.randn(3, n, h, 64, device="cuda", dtype=torch.float16, generator=make) for n, h in shapes]
    return found if new else [*found[:3], None, None]


# ---- values in range


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int16])
def test_tables_are_those_of_a_cpu(dtype):
    for ends in ([0], [0, 0], [0, 200], ENDS[:3], list(range(0, 201, 2)), [0] * 300 + [7] * 300):
        cu, others = torch.tensor(ends, dtype=dtype), torch.tensor(ends, dtype=torch.int64)
        strided = torch.stack([others, others], 1).cuda()[:, 1]
        for sides in ((NO_SIDE, NO_SIDE), (NO_SIDE, 0), (20, 7)):
            found = intervals.packed_intervals(cu.cuda(), strided, (TOKENS, TOKENS + 3), sides, "cu_seqlens_k")
            want = intervals.packed_intervals(cu, others, (TOKENS, TOKENS + 3), sides, "cu_seqlens_k")
            assert all(torch.equal(a.cpu(), b) for a, b in zip(found, want, strict=True)), (ends, sides)
        places = intervals.packed_places(cu.cuda(), strided, TOKENS)
        assert torch.equal(places.cpu(), intervals.packed_places(cu, others, TOKENS)), ends


@pytest.mark.parametrize("batch", [1, 3, 300])
def test_the_table_of_a_cache_is_that_of_a_cpu(batch):
    lengths = torch.arange(batch) % PLACES
    for given, added in ((lengths, 0), (lengths.int(), 1), (5, 2)):
        cache = Cache(batch, 2, PLACES, added)
        want = intervals.cached_table(lengths, given, (9, 0), cache)
        found = intervals.cached_table(lengths.cuda(), given if isinstance(given, int) else given.cuda(), (9, 0), cache)
        assert torch.equal(found.cpu(), want)


@pytest.mark.parametrize("lengths", [[0, 33, PLACES - 2], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_new_keys_are_written(lengths, transposed):
    q, *caches, k, v = cached(new=2)
    if transposed:
        caches = [c.transpose(1, 2).contiguous().transpose(1, 2) for c in caches]
    want = [c.clone() for c in caches]
    for b, n in enumerate(lengths):
        want[0][b, n : n + 2], want[1][b, n : n + 2] = k[b], v[b]
    versions = [c._version for c in caches]
    out = sartor.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=cuda(lengths), causal=True)
    assert all(map(torch.equal, caches, want))
    assert all(c._version > version for c, version in zip(caches, versions, strict=True))  # autograd sees the change
    mask = mods.cached(cuda(lengths) + 2, 1, PLACES, causal=True)
    assert torch.equal(out, sartor.attention(q, *want, mask=mask))


def test_lengths_of_one_number():
    q, *caches, k, v = cached(new=2)
    own = [c.clone() for c in caches]
    out = sartor.flash_attn_with_kvcache(q, *own, k, v, cache_seqlens=9, causal=True)
    want = sartor.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=cuda([9] * 3), causal=True)
    assert torch.equal(out, want)
    assert all(map(torch.equal, own, caches))


def test_alibi_of_each_sequence():
    slopes = torch.rand(4, 4, device="cuda")
    q, k, v = tokens()
    out = varlen(q, k, v, cuda(ENDS), alibi_slopes=slopes)
    score = mods.packed_alibi(slopes, cuda(ENDS), cuda(ENDS), TOKENS)
    want = mods.packed_alibi(slopes.cpu(), torch.tensor(ENDS), torch.tensor(ENDS), TOKENS)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(score.tensors, want.tensors, strict=True))
    assert out.isfinite().all()


# ---- values out of range


@pytest.mark.parametrize("name", WRONG_ENDS)
def test_a_tensor_is_checked_when_it_is_first_seen(name):
    cu, right = cuda(WRONG_ENDS[name][0]), cuda(ENDS)
    for _ in range(2):  # it is not seen before it is right
        with pytest.raises(ValueError, match="cu_seqlens_q must"):
            varlen(*tokens(), cu, right)
        with pytest.raises(ValueError, match="cu_seqlens_k must"):
            varlen(*tokens(), right, cu)


@pytest.mark.parametrize("name", WRONG_ENDS)
def test_ends_changed_in_place_are_clamped_and_told(name, no_waiting):
    ends, words = WRONG_ENDS[name]
    q, k, v = tokens(gradient=True)
    cu, wrong, right = cuda(ENDS), cuda(ends), cuda(ENDS)
    want = varlen(q, k, v, cu, right)
    torch.autograd.grad(want.sum(), (q, k, v))
    no_waiting()
    cu.copy_(wrong)
    out = varlen(q, k, v, cu, right)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    torch.cuda.set_sync_debug_mode("default")
    assert all(t.isfinite().all() for t in (out, *grads))
    with pytest.raises(ValueError, match=words):
        sartor.check()
    sartor.check()  # once
    cu.copy_(right)
    assert torch.equal(varlen(q, k, v, cu, right), want)


@pytest.mark.parametrize("name", WRONG_LENGTHS)
def test_lengths_changed_in_place_are_clamped_and_told(name, no_waiting):
    wrong, words = WRONG_LENGTHS[name]
    q, *caches, _, _ = cached()
    lengths, later = cuda([3, 5, 0]), cuda(wrong)
    sartor.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)
    want = sartor.attention(q, *caches, mask=mods.cached(later.clamp(0, PLACES), 1, PLACES))
    no_waiting()
    lengths.copy_(later)
    out = sartor.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match=f"{words}.*in an earlier call"):
        sartor.check()


def test_a_later_call_raises_the_error():
    q, *caches, _, _ = cached()
    lengths = cuda([3, 5, 0])
    mods.cached(lengths, 1, PLACES)
    lengths[1] = 999
    mods.cached(lengths, 1, PLACES)
    torch.cuda.synchronize()
    lengths[1] = 5
    with pytest.raises(ValueError, match="lengths must be between 0 and the 70 places there are, got 999"):
        sartor.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)
    sartor.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("wrong", [[3, PLACES, 0], [PLACES - 1, 2**31 - 5, 4], [-1, 3, -99]], ids=str)
def test_new_keys_past_the_end(wrong, gradient, no_waiting):
    """What fits is written; once this asserted on the device, which no call survived."""
    q, *caches, k, v = cached(new=2)
    k.requires_grad_(gradient)
    lengths, later = cuda([3, 5, 0]), cuda(wrong)
    sartor.flash_attn_with_kvcache(q, *[c.clone() for c in caches], k, v, cache_seqlens=lengths)
    want = [c.clone() for c in caches]
    for b, n in enumerate(wrong):
        for j in range(2):
            if 0 <= n + j < PLACES:
                want[0][b, n + j], want[1][b, n + j] = k[b, j].detach(), v[b, j]
    no_waiting()
    lengths.copy_(later)
    out = sartor.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths)
    torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all()
    assert all(map(torch.equal, caches, want))
    with pytest.raises(ValueError, match="cache_seqlens must leave room for the new keys: be between 0 and 68, got"):
        sartor.check()


def test_checks_can_be_switched_off(monkeypatch, no_waiting):
    """As SARTOR_CHECKS=0 does: no waiting for new tensors, no error of a call; `check` still tells."""
    q, k, v = tokens()
    wrong, right = cuda(WRONG_ENDS["late"][0]), cuda(ENDS)
    varlen(q, k, v, right)
    monkeypatch.setattr(values, "CHECKS", False)
    no_waiting()
    for _ in range(3):
        varlen(q, k, v, wrong, right)
    torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ValueError, match=WRONG_ENDS["late"][1]):
        sartor.check()


# ---- graphs and compilers


def captured(call):
    """A graph of the call, after it ran twice on a stream beside, and what it returns."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def test_packed_sequences_in_a_cuda_graph():
    q, k, v = tokens()
    cu = cuda(ENDS)
    graph, out = captured(lambda: varlen(q, k, v, cu))
    for ends in (ENDS, [0, 17, 60, 200, 300], [0, 0, 0, 0, 0]):
        cu.copy_(cuda(ends))
        graph.replay()
        assert torch.equal(out, varlen(q, k, v, cuda(ends)))
    for ends, words in WRONG_ENDS.values():
        cu.copy_(cuda(ends))
        graph.replay()
        assert out.isfinite().all()
        with pytest.raises(ValueError, match=words):
            sartor.check()


def test_a_cache_in_a_cuda_graph():
    """A decode loop: the lengths grow in place within the graph, up to the end and past it."""
    q, *caches, k, v = cached(new=1)
    lengths = cuda([0, 3, PLACES - 4])

    def step():
        out = sartor.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True)
        lengths.add_(1)
        return out

    graph, out = captured(step)  # two steps
    for n in range(2):
        before = lengths.clone()
        graph.replay()
        mask = mods.cached(before + 1, 1, PLACES, causal=True)
        assert torch.equal(out, sartor.attention(q, *caches, mask=mask)), n
    sartor.check()
    for _ in range(3):
        graph.replay()
    assert out.isfinite().all()
    with pytest.raises(ValueError, match=f"cache_seqlens must leave room for the new keys: .* {PLACES - 1}, got 7"):
        sartor.check()


def test_lengths_are_looked_at_in_each_graph():
    """Once, for all of its calls, which read the same ones."""
    q, *caches, _, _ = cached()
    lengths = cuda([0, 3, PLACES - 4])
    for _ in range(2):
        attend = lambda: sartor.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)  # noqa: E731 - one use
        graph, out = captured(lambda: [attend() for _ in range(3)])  # noqa: B023 - called at once
        for found, words in WRONG_LENGTHS.values():
            lengths.copy_(cuda(found))
            graph.replay()
            with pytest.raises(ValueError, match=words):
                sartor.check()
        lengths.copy_(cuda([1, 2, 3]))
        graph.replay()
        sartor.check()
        assert all(torch.equal(one, attend()) for one in out)


def test_graphs_do_not_share_a_workspace():
    """Nor clear it: two that run side by side, and the calls of the stream on which they were captured."""
    leaves = [[torch.randn(2, n, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv"] for n in (1500, 2500)]
    runs = [lambda x=x: [sartor.attention(*x, causal=True) for _ in range(3)] for x in leaves]
    with torch.no_grad():
        want = [run()[0] for run in runs]
        graphs = [captured(run) for run in runs]
        streams = [torch.cuda.Stream() for _ in graphs]
        torch.cuda.synchronize()
        for _ in range(20):
            for (graph, _), stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            beside = runs[0]()
        torch.cuda.synchronize()
    for (_, found), right in zip(graphs, want, strict=True):
        assert all(torch.equal(one, right) for one in found)
    assert all(torch.equal(one, want[0]) for one in beside)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=str)
def test_a_cache_that_is_filled_in_part_is_split_by_what_is_filled(queries, heads):
    """Whatever lies beyond, and with so few keys that splits have none."""
    capacity, lengths = 9000, [8999, 4000, 130, 64, 3, 0]
    make = torch.Generator("cuda").manual_seed(0)
    shapes = (queries, heads[0]), (capacity, heads[1]), (capacity, heads[1])
    q, k, v = (
        torch.randn(1, n, h, 128, device="cuda", dtype=torch.bfloat16, generator=make) for n, h in shapes
    )  # fmt: skip
    for n in lengths:
        k[:, n:], v[:, n:] = 7e4, torch.nan
        for causal in (False, True):
            n_keys = cuda([n])
            out, lse = sartor.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=n_keys, causal=causal, return_softmax_lse=True
            )  # fmt: skip
            explained = sartor.explain(q, k, v, mask=mods.cached(n_keys, queries, capacity, causal=causal))
            assert explained.plan.tile.num_splits > 1
            if not n:
                assert not out.any()
                continue
            want = sartor.attention(q, k[:, :n], v[:, :n], causal=causal, return_lse=True, kernel="reference")
            torch.testing.assert_close(out, want[0], atol=4e-3, rtol=2e-2)
            torch.testing.assert_close(lse, want[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_packed_sequences_compiled(mode, dynamic):
    torch._dynamo.reset()
    attend = torch.compile(varlen, fullgraph=True, dynamic=dynamic, mode=mode)
    for ends in ([0, 5, 300], [0, 5, 300], [0, 0, 290], [0, 299, 299]):
        leaves, cu = tokens(gradient=True), cuda(ends)
        found, want = [], []
        for f, results in ((attend, found), (varlen, want)):
            out = f(*leaves, cu, deterministic=True)
            results += [out.clone(), *torch.autograd.grad(out.float().square().sum(), leaves)]
        assert all(map(torch.equal, found, want))
        assert found[0][0].any()
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_cache_compiled(mode):
    torch._dynamo.reset()
    step = torch.compile(sartor.flash_attn_with_kvcache, fullgraph=True, mode=mode)
    q, *caches, k, v = cached(new=2)
    own, lengths = [c.clone() for c in caches], cuda([0, 3, PLACES - 9])
    with torch.no_grad():
        for _ in range(4):
            out = step(q, *own, k, v, cache_seqlens=lengths, causal=True).clone()
            want = sartor.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True)
            assert torch.equal(out, want)
            assert all(map(torch.equal, own, caches))
            lengths += 2
        assert step(q, *own, k, v, cache_seqlens=lengths, causal=True).isfinite().all()  # past the end
    with pytest.raises(ValueError, match="cache_seqlens must leave room"):
        sartor.check()
    torch._dynamo.reset()


# ---- time


@pytest.mark.slow  # alone on its GPU
def test_what_a_mask_made_anew_costs():
    """Printed, of many calls: host time, and wall time, with a kept mask and with one that each call makes."""
    cu = cuda([0, *sorted(torch.randint(1, 16384, (20,), generator=torch.Generator().manual_seed(0)).tolist()), 16384])
    q, k, v = torch.randn(3, 16384, 16, 128, device="cuda", dtype=torch.bfloat16)
    mask = mods.packed(cu, cu, 16384, 16384, causal=True)
    cache = torch.randn(2, 64, 4096, 8, 128, device="cuda", dtype=torch.bfloat16)
    x, new = (torch.randn(64, 1, h, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8))
    lengths = torch.randint(1, 4090, (64,), device="cuda", dtype=torch.int32)
    filled = mods.cached(lengths, 1, 4096)
    calls = {
        "packed, kept mask": lambda: sartor.attention(q[None], k[None], v[None], mask=mask),
        "packed": lambda: sartor.flash_attn_varlen_func(q, k, v, cu, cu, 16384, 16384, causal=True),
        "cache, kept mask": lambda: sartor.attention(x, *cache, mask=filled),
        "cache": lambda: sartor.flash_attn_with_kvcache(x, *cache, cache_seqlens=lengths),
        "cache, new keys": lambda: sartor.flash_attn_with_kvcache(x, *cache, new, new, cache_seqlens=lengths),
    }
    for name, call in calls.items():
        host, wall = [], []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(10):
                call()
            host.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            wall.append(time.perf_counter() - start)
        print(f"{name:20} host {sorted(host)[15] * 1e5:6.1f} us  wall {sorted(wall)[15] * 1e5:6.1f} us")
