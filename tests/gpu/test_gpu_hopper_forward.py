"""The Hopper forward of 16-bit floats with tiles claimed early or late, fewer queries or splits: no bit may change.

Except with KV splits: then the budgets hold."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

import sartor
from sartor import kernels, mods, nvrtc, ops, testing
from sartor.device import Device
from sartor.kernels.hopper import forward as hopper_forward
from sartor.kernels.hopper import schedule
from sartor.kernels.hopper.schedule import EVERY
from sartor.kernels.spec import Operands, Plan, Tile
from sartor.plan import choose
from sartor.problem import Call, Problem, aux_values
from sartor.tuning import table

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and not nvrtc.missing()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and NVRTC"),
    pytest.mark.judges("hopper_forward"),
]
SPEC = kernels.load("hopper_forward") if HOPPER else None
DEVICE = Device.of(torch.device("cuda")) if HOPPER else None
LENGTHS = [(65, 65), (300, 700), (700, 300), (1000, 1000), (4200, 4100)]


def results(call, tile):
    """out and lse, by a plan of its own: what a plan keeps is of one kind of launch."""
    plan = Plan(SPEC, Problem.of(call), DEVICE, tile, "test")
    operands = Operands(call.q, call.k, call.v, call.sinks, aux_values(call), lse=True)
    return [plan.kernel.run(plan, operands) for _ in range(3)]


def tiles(p):
    """That of large problems, and what this one is given."""
    row = table.find(SPEC, p, DEVICE)
    large = row.tile if row else next(iter(SPEC.tiles(p, DEVICE)))
    return dict.fromkeys((large, SPEC.suited(p, DEVICE, large)))


def same(found):
    """The first of some results, to the bit of which all others must be."""
    for out, lse in found:
        torch.testing.assert_close(out, found[0][0], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(lse, found[0][1], rtol=0, atol=0, equal_nan=True)
    return found[0]


def check(monkeypatch, q, k, v, **options):
    """The bits of tiles that are claimed one ahead, which must come out when they are claimed late."""
    call, found = Call(q, k, v, **{"causal": True, **options}), []
    p = Problem.of(call)
    for rounds in (0, EVERY):
        monkeypatch.setattr(hopper_forward.Config, "late_rounds", rounds)
        for tile in tiles(p):
            found += results(call, tile)
    return same(found)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_claims(dim, lengths, monkeypatch):
    q, k, v = testing.make_inputs(2, 6, 2, *lengths, dim, None, torch.bfloat16, "cuda", "bshd", 0)
    out, lse = check(monkeypatch, q, k, v)
    testing.check_all({"out": out, "lse": lse}, q, k, v, causal=True)


@pytest.mark.parametrize("dims", [(40, 40), (80, 80), (96, 96), (112, 64), (192, 128), (224, 224)], ids=str)
def test_dims(dims, monkeypatch):
    inputs = testing.make_inputs(1, 5, 5, 900, 900, *dims, torch.float16, "cuda", "bshd", 0)
    check(monkeypatch, *inputs, causal="top_left", sinks=torch.randn(5, device="cuda"))


@pytest.mark.parametrize("dim", [64, 128])
def test_prefixes(dim, monkeypatch):
    q, k, v = testing.make_inputs(1, 6, 2, 1000, 1000, dim, None, torch.bfloat16, "cuda", "bshd", 0)
    out, lse = check(monkeypatch, q, k, v, causal=False, mask=mods.prefix(300))
    testing.check_all({"out": out, "lse": lse}, q, k, v, mask=mods.prefix(300))


def test_few_queries(monkeypatch):
    """Heads that share keys share a slice, more tiles than blocks, and a value that is not a number."""
    q, k, v = testing.make_inputs(50, 16, 2, 40, 800, 128, None, torch.bfloat16, "cuda", "bshd", 0)
    v[:, 790] = torch.nan
    out, _ = check(monkeypatch, q, k, v)
    assert not out[:, :30].isnan().any()
    assert out[:, 30:].isnan().all()


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("dim", [96, 128])
def test_neighbours(dim, scale):
    """A row whose guess is wrong in the key tile in which rows beside it see their first keys changes none of them."""
    tile = {96: Tile(192, 112, 16, 6), 128: Tile(192, 80, 16, 6)}[dim]
    first = 3 * tile.block_n  # a slice of 64 rows begins a little before this key, and sees it in its first tile
    top = first // 64 * 64
    q, k, v = testing.make_inputs(1, 2, 2, 700, 700, dim, None, torch.bfloat16, "cuda", "bshd", 0)
    q *= scale
    k[:, first - 1] = 60 * k[:, first - 1].sign()
    row = first + 2
    assert top < first - 2 < row < top + 64
    quiet, loud = q.clone(), q.clone()
    quiet[:, row] = 0
    loud[:, row] = 40 * k[:, first - 1].sign()
    found = [results(Call(x, k, v, causal=True), tile)[0] for x in (quiet, loud)]
    others = [i for i in range(700) if i != row]
    for a, b in zip(*found, strict=True):
        rows = (slice(None), others) if a.ndim == 4 else (slice(None), slice(None), others)
        assert torch.equal(a[rows], b[rows])
    testing.check_all(dict(zip(("out", "lse"), found[1], strict=True)), loud, k, v, causal=True)


@pytest.mark.parametrize("dim", [64, 128])
def test_keys_biased_by_the_least_float32(dim):
    """A row whose first tile holds such keys alone has seen keys, though its largest score is the least there is."""
    q, k, v = testing.make_inputs(1, 2, 2, 200, 230, dim, None, torch.bfloat16, "cuda", "bshd", 0)
    bias = torch.zeros(230, device="cuda")
    bias[128:158] = torch.finfo(torch.float32).min
    call = Call(q, k, v, bias, causal=True)
    for tile in SPEC.tiles(Problem.of(call), DEVICE):
        if (tile.block_n, tile.stages) in ((128, 4), (64, 4)):
            out, lse = results(call, tile)[0]
            testing.check_all({"out": out, "lse": lse}, q, k, v, bias=bias, causal=True)


@pytest.mark.parametrize("scale", [0.1, 1.0, -0.5])
def test_a_loud_key_beside_rows_without_one(scale):
    """Whose bits it does not change: a document that begins within a slice, after rows of another and of none."""
    q, k, v = testing.make_inputs(1, 2, 2, 256, 256, 64, None, torch.bfloat16, "cuda", "bshd", 0)
    ids = torch.arange(256, device="cuda")[None] // 100
    mask = mods.document(torch.where(ids == 1, 7, ids), ids)  # the second one's queries attend to nothing
    loud, found = k.clone(), []
    loud[:, 250] *= 40 / scale
    for keys in (k, loud):
        call = Call(q, keys, v, mask=mask, softmax_scale=scale)
        for tile in tiles(Problem.of(call)):
            out, lse = results(call, tile)[0]
            testing.check_all({"out": out, "lse": lse}, q, keys, v, mask=mask, softmax_scale=scale)
            found.append((out[:, :200], lse[:, :, :200]))
    same(found)


SPLIT = {
    "full": lambda: {},
    "causal": lambda: {"causal": True},
    "sinks": lambda: {"sinks": torch.randn(4, device="cuda") + 3},
    "softcap": lambda: {"softcap": 3.0, "causal": "top_left"},
    "alibi": lambda: {"alibi_slopes": torch.rand(4, device="cuda"), "causal": True},
    "bias": lambda: {"bias": torch.randn(17, 900, device="cuda", dtype=torch.bfloat16)},
    "prefix": lambda: {"mask": mods.prefix(torch.tensor([0, 600], device="cuda"))},
    "cached": lambda: {"mask": mods.cached(torch.tensor([17, 720], device="cuda"), 17, 900, causal=True)},
    "float32": lambda: {"out_dtype": torch.float32},
}


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (36, 20), (192, 256)], ids=str)
def test_kv_splits(dims, name):
    """Merged, whatever is left for the last split, and for rows that see nothing of some splits or of all."""
    for layout, dtype in (("bshd", torch.bfloat16), ("bhsd", torch.float16)):
        q, k, v = testing.make_inputs(2, 4, 2, 17, 900, *dims, dtype, "cuda", layout, 0)
        q, k, v = (t if layout == "bshd" else t.transpose(1, 2) for t in (q, k, v))
        options = {n: x.to(dtype) if n == "bias" else x for n, x in SPLIT[name]().items()}
        call, counts = Call(q, k, v, **options), set()
        if options.get("mask") is not None:  # what a row does not see is not looked at
            v[0, 17:] = float("nan")
        tile = next(t for t in SPEC.tiles(Problem.of(call), DEVICE) if t.block_m == 64)
        tiles = -(-900 // tile.block_n)
        for most in (2, 3, 5, tiles):
            counts.add(-(-tiles // -(-tiles // most)))
        options.pop("out_dtype", None)
        for splits in counts:
            out, lse = same(results(call, replace(tile, num_splits=splits)))
            testing.check_all({"out": out, "lse": lse}, q, k, v, **options)


def test_what_is_not_finite_in_a_split():
    """NaN among the values or keys of one split reaches the rows that it would without splits, and no others."""
    q, k, v = testing.make_inputs(1, 2, 2, 40, 2000, 64, None, torch.bfloat16, "cuda", "bshd", 0)
    for t, what, head in ((v, float("nan"), 0), (v, float("inf"), 1), (k, float("nan"), 1)):
        changed = t.clone()
        changed[:, 1990, head] = what
        for options in ({}, {"causal": True}):
            call = Call(q, *((k, changed) if t is v else (changed, v)), **options)
            tile = next(t for t in SPEC.tiles(Problem.of(call), DEVICE) if t.block_m == 64)
            (out, lse), (whole, whole_lse) = (results(call, replace(tile, num_splits=n))[0] for n in (4, 1))
            torch.testing.assert_close(out.isfinite(), whole.isfinite())
            torch.testing.assert_close(lse.isfinite(), whole_lse.isfinite())


@pytest.mark.parametrize(
    "shape", [(1, 32, 8, 1, 8192), (1, 8, 8, 1, 8191), (3, 4, 1, 17, 5000), (1, 2, 2, 100, 3000)], ids=str
)
def test_kv_splits_as_planned(shape):
    """What is split by itself; with gradients, and from a cache that is longer than what is filled."""
    q, k, v = testing.make_inputs(*shape, 128, None, torch.bfloat16, "cuda", "bshd", 0)
    assert sartor.explain(q, k, v).plan.tile.num_splits > 1
    testing.verify(q, k, v, through_lse=True)
    testing.verify(q, k[:, 7:-100], v[:, 7:-100], gradients=False)


@pytest.mark.parametrize("keys", [300, 8192])
def test_a_graph_outlives_its_plan(keys):
    """The code of a kernel stays loaded when plans are forgotten; with splits there are two."""
    q, k, v = testing.make_inputs(1, 4, 4, 1, keys, 64, None, torch.bfloat16, "cuda", "bshd", 0)
    sartor.attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sartor.attention(q, k, v)
    choose.cache_clear(), ops.PREPARED.clear()
    gc.collect()
    for _ in range(20):
        q.normal_()
        graph.replay()
        torch.testing.assert_close(out, sartor.attention(q, k, v), rtol=0, atol=0)


OPTIONS = {
    "full": lambda: {},
    "window": lambda: {"window": (100, 20)},
    "softcap": lambda: {"softcap": 3.0, "causal": True},
    "document": lambda: {"mask": mods.document(*(torch.arange(n, device="cuda")[None] // 90 for n in (300, 700)))},
}


@pytest.mark.parametrize("name", ["window", "document"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_keys_that_only_others_see(dim, name):
    """More of them than there are stages, at both ends, in narrow tiles and wide ones."""
    q, k, v = testing.make_inputs(2, 40, 8, 700, 700, dim, None, torch.bfloat16, "cuda", "bshd", 0)
    ids = torch.arange(700, device="cuda")[None] // 23
    options = {"window": {"window": (3, 30)}, "document": {"mask": mods.document(ids)}}[name]
    call, found = Call(q, k, v, **options), {}
    for tile in SPEC.tiles(Problem.of(call), DEVICE):
        if (tile.block_n, tile.stages) in ((16, 2), (64, 4)):
            found.setdefault(tile.block_n, []).extend(results(call, tile))
    for some in found.values():
        out, lse = same(some)
        testing.check_all({"out": out, "lse": lse}, q, k, v, **options)
    assert len(found) == 2


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_fewer_queries(dim, name):
    """How many queries a block has changes no bit."""
    q, k, v = testing.make_inputs(1, 4, 2, 300, 700, dim, None, torch.bfloat16, "cuda", "bshd", 0)
    call = Call(q, k, v, **OPTIONS[name]())
    assert len(tiles(Problem.of(call))) == 2
    same([result for tile in tiles(Problem.of(call)) for result in results(call, tile)])


@pytest.mark.parametrize("heads", [20, 70, 140])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], ids=str)
def test_parts(dims, heads, monkeypatch):
    """Nor does it where the last wave is split, to any width, with some slices left of each head."""
    q, k, v = testing.make_inputs(1, heads, heads, 64 * 5 - 9, 200, *dims, torch.bfloat16, "cuda", "bshd", 0)
    call, found, widths = Call(q, k, v, sinks=torch.randn(heads, device="cuda")), [], set()
    monkeypatch.setattr(hopper_forward, "_config", hopper_forward.Config.of)  # none is kept that knows another LONG
    for long in (1 << 30, 1):
        monkeypatch.setattr(schedule, "LONG", long)
        for tile in SPEC.tiles(Problem.of(call), DEVICE):
            config = SPEC.config(Problem.of(call), tile)
            if tile.block_n == 64 and tile.stages == 4:
                assert config.last_wave == (long == 1 and config.groups > 1)
                widths.add(config.assign(DEVICE.sm_count).width)
                found += results(call, tile)
    assert len(widths) > 1
    out, lse = same(found)
    testing.check_all({"out": out, "lse": lse}, q, k, v, sinks=call.sinks)
