"""The Hopper backward beyond head dim 128 as NVRTC compiles it here, and in which pieces it works."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samples import grid
from sartor import kernels, nvrtc, plan
from sartor.device import ARCHITECTURES
from sartor.kernels.hopper import pieces as cutting
from sartor.kernels.hopper.pieces import Shape
from sartor.kernels.spec import Plan
from sartor.kernels.triton import launch
from sartor.problem import Call, Problem

if nvrtc.missing() or not launch.available():
    pytest.skip(nvrtc.missing() or "needs Triton, whose launches stand around it", allow_module_level=True)

from sartor.kernels.hopper.wide_backward import Cuts, OfKeys, OfQueries, skew

DEVICE = ARCHITECTURES[90]
SPEC = kernels.load("hopper_wide_backward")
MASKS = [{}, {"causal": True}, {"window": (90, 30)}]
DIMS = [(136, 136), (160, 160), (192, 192), (224, 224), (256, 256), (192, 128), (128, 192), (64, 256), (256, 72)]


def problem(dim=256, dim_v=None, heads=(4, 4), n=(1000, 1000), batch=2, dtype=torch.bfloat16, **options):
    shapes = ((n[0], heads[0], dim), (n[1], heads[1], dim), (n[1], heads[1], dim_v or dim))
    return Problem.of(Call(*(torch.empty((batch, *s), dtype=dtype, device="meta") for s in shapes), **options))


@pytest.mark.parametrize(
    ("dims", "options", "dtype"),
    grid(
        DIMS, MASKS, [torch.bfloat16, torch.float16],
        kept=lambda case: (case[0], case[2]) == ((192, 128), torch.bfloat16),
    ),
    ids=str,
)  # fmt: skip
def test_kernels(dims, options, dtype):
    """No spill, no product serialised; what C++ asserts of shared memory is what was laid out."""
    p = problem(*dims, dtype=dtype, **options)
    for config, names in ((OfKeys(p), {"wide_dkdv", "preprocess"}), (OfQueries(p), {"wide_dq"})):
        binary = config.compile()
        assert set(binary.resources) == names
        assert all(found.spill_bytes == 0 for found in binary.resources.values())
        assert all(binary.resources[name].registers == 168 for name in names - {"preprocess"})  # as setmaxnreg is told
        assert "C75" not in binary.log  # what ptxas says of wgmma it has to serialise, and of setmaxnreg it leaves out
        assert config.shared_bytes <= launch.smem_limit(DEVICE)


@pytest.mark.parametrize("dims", [(256, 256), (192, 128)], ids=str)
def test_products(dims):
    """Five: two of 64 columns, with as many steps as there are sixteens; four steps of 16 rows for each gradient. Up to
    224 columns both stand twice: the first tile's scores have no gradient beside them, the last gradient no scores."""
    p, (dim, dim_v) = problem(*dims), dims
    try:
        text, of_dq = OfKeys(p).compile().sass("wide_dkdv"), OfQueries(p).compile().sass("wide_dq")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    times = 1 if dim > 224 else 2
    assert text.count("HGMMA.64x64x16.F32.BF16 ") == times * (dim + dim_v) // 16
    each = 4 * times * (1 + (dim == dim_v))
    assert [text.count(f"HGMMA.64x{d}x16.F32.BF16 ") for d in (dim, dim_v)] == [each, each]
    assert of_dq.count(f"HGMMA.64x{dim}x16.F32.BF16 ") == 4
    assert text.count("USETMAXREG") == of_dq.count("USETMAXREG") == 2


def test_reasons():
    """What it does not do is refused in words, and served by the kernel after it."""
    for p, words in (
        (problem(128), "one of them beyond 128, got 128 and 128"),
        (problem(192, 56), "got 192 and 56"),
        (problem(264), "got 264 and 264"),
        (problem(softcap=2.0), "plain scores"),
        (problem(dtype=torch.float32), "got torch.float32"),
        (problem(mask=torch.empty(1000, dtype=torch.bool, device="meta")), "one interval"),
        (problem(batch=1, heads=(1, 1), n=(65536, 65536)), "272 MiB, got 1 heads of 65536 queries"),
        (problem(batch=1, heads=(8, 8), n=(16384, 16384), window=(100, 0)), "whole heads in 272 MiB"),
    ):
        assert any(words in why for why in plan.against(SPEC.name, p, DEVICE)), words
    for options in ({}, {"causal": "top_left"}, {"window": (100, 3)}, {"heads": (6, 2)}, {"deterministic": True}):
        assert plan.against(SPEC.name, problem(**options), DEVICE) == []
        assert plan.choose_backward(problem(**options), DEVICE).kernel.name == SPEC.name
    for options in ({}, {"causal": True}):
        assert plan.against(SPEC.name, problem(batch=1, heads=(8, 8), n=(16384, 16384), **options), DEVICE) == []
    assert plan.choose_backward(problem(softcap=2.0), DEVICE).kernel.name == "hopper_backward"
    assert any("8.0" in why for why in plan.against(SPEC.name, problem(), ARCHITECTURES[80]))


def test_tile():
    p = problem()
    (tile,) = SPEC.tiles(p, DEVICE)
    assert SPEC.fits(p, DEVICE, tile)
    assert not SPEC.fits(p, DEVICE, replace(tile, block_m=32))
    both = OfKeys(p).shared_bytes, OfQueries(p).shared_bytes
    assert SPEC.shared_bytes(Plan(SPEC, p, DEVICE, tile, "test")) == max(both)


@pytest.mark.parametrize(("causal", "mib"), [(False, 16.0), (True, 16.0)])
def test_it_tells_of_its_memory(causal, mib):
    (note,) = SPEC.notes(problem(causal=causal))
    assert f"{mib} MiB" in note  # 2 x 4 heads, 16 x 16 tiles of 8 KiB
    assert "deterministic=True" in note


shapes = st.builds(
    lambda whole, **others: Shape(most=others["queries"] - (not whole), **others), whole=st.booleans(),
    heads=st.integers(1, 40), group=st.integers(1, 4), queries=st.integers(1, 60), keys=st.integers(1, 60),
    skew=st.integers(-70, 70) | st.just(cutting.NONE), sums=st.just(1 << 16),
)  # fmt: skip


@settings(deadline=None)
@given(shape=shapes, room=st.integers(1, 600).map(lambda n: n << 18))
def test_pieces_are_all_and_fit(shape, room):
    """Every tile of keys of every head is in one piece, in order; with room for dq on its way where heads are cut."""
    found = cutting.pieces(shape, room, 132)
    seen = [(h, j) for x in found for h in range(x.first_head, x.first_head + x.heads)
            for j in range(x.first_tile, x.first_tile + x.tiles)]  # fmt: skip
    if not found:
        assert shape.group * (shape.seen(0) * cutting.BYTES + shape.queries * shape.sums) > room
        return
    assert sorted(seen) == [(h, j) for h in range(shape.heads) for j in range(shape.keys)]
    for head in range(shape.heads):
        assert [j for h, j in seen if h == head] == list(range(shape.keys))
    cut = found[0].tiles < shape.keys
    assert max(map(shape.bytes, found)) + cut * shape.carried(found[0].heads) <= room


@settings(deadline=None)
@given(
    dim=st.sampled_from([136, 192, 256]), batch=st.integers(1, 4), heads=st.sampled_from([(1, 1), (8, 8), (16, 2)]),
    n=st.tuples(st.integers(1, 20000), st.integers(1, 20000)), causal=st.booleans(),
)  # fmt: skip
def test_the_workspace_is_bounded(dim, batch, heads, n, causal):
    p = problem(dim, heads=heads, n=n, batch=batch, causal=causal)
    if plan.against(SPEC.name, p, DEVICE):
        return
    cuts = Cuts(p, skew(p, (n[1] - n[0],) if p.program.keep is not None else ()), 132)
    of_rows = 4 * (2 * cuts.room().sizes["delta"] + sum(cuts.room().sizes[name] for name in ("bad_q", "bad_kv")))
    inputs = batch * 2 * 2 * dim * (heads[0] * n[0] + heads[1] * n[1])
    assert 4 * cuts.room().length <= max(256 << 20, inputs) * 17 // 16 + of_rows + (1 << 20)


@given(
    n=st.tuples(st.integers(1, 1000), st.integers(1, 1000)), align=st.sampled_from([True, "top_left"]),
    tile=st.integers(0, 15),
)  # fmt: skip
def test_a_block_begins_where_it_has_room(n, align, tile):
    """`Task::range` of a tile of keys, as C++ has it, begins with the first tile of queries of `Shape.seen`."""
    p, shift = problem(n=n, causal=align), n[1] - n[0] if align is True else 0
    if 64 * tile >= n[1] or p.program.keep is None:
        return
    lo = max(0, min(n[0], *(min(key, n[1] - 1) - shift for key in range(64 * tile, 64 * tile + 64))))
    shape = Shape.of(p, skew(p, (shift,)))
    assert shape.queries - shape.seen(tile) == lo // 64
