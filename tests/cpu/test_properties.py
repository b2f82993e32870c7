"""Random problems over all features: the tiled kernel within its budget of the float64 reference, both passes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mods import BATCH, SIDES, masks

from sartor import testing
from sartor.kernels import blocked
from sartor.kernels.spec import Tile

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
BROADCAST = st.tuples(*[st.booleans()] * 4)


@st.composite
def problems(draw):
    """(q, k, v, options) of `attention`."""
    sq, skv = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    dim, dim_v = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    heads, dtype, layout = heads_kv * group, draw(DTYPES), draw(st.sampled_from(["bshd", "bhsd"]))
    seed = draw(st.integers(0, 2**16))
    q, k, v = testing.make_inputs(BATCH, heads, heads_kv, sq, skv, dim, dim_v, dtype, layout=layout, seed=seed)
    kinds = st.sampled_from(["dense", "step", "swapped", "last"])
    q, k, v = (testing.layouts(t).get(draw(kinds), t) for t in (q, k, v))
    generator = torch.Generator().manual_seed(seed)
    options = {"layout": layout, "causal": draw(st.sampled_from([False, True, "top_left"]))}
    if draw(st.booleans()):
        options["window"] = (draw(SIDES), draw(SIDES))
    if draw(st.booleans()):
        options["mask"] = draw(masks(sq, skv))
        if any(a.shape[1] not in (1, heads) for a in options["mask"].tensors if a.dim() == 4):
            del options["mask"]
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 3.0, 30.0]))
    if draw(st.booleans()):
        options["softmax_scale"] = draw(st.sampled_from([-0.5, 0.0, 0.1, 1.0]))
    if draw(st.booleans()):
        options["alibi_slopes"] = torch.rand(draw(st.sampled_from([(heads,), (BATCH, heads)])), generator=generator)
    if draw(st.booleans()):
        sizes = [n if keep else 1 for n, keep in zip((BATCH, heads, sq, skv), draw(BROADCAST), strict=True)]
        options["bias"] = torch.randn(sizes, generator=generator).to(dtype)
    if draw(st.booleans()):
        options["sinks"] = torch.randn(heads, generator=generator)
    if draw(st.booleans()):
        options["dropout_p"] = draw(st.sampled_from([1e-9, 0.1, 0.5, 0.999]))
        options["dropout_seed"] = torch.tensor([seed])
    return q, k, v, options


@settings(max_examples=120, derandomize=True, deadline=None, database=None)
@given(problems(), st.sampled_from([(16, 16), (8, 32), (64, 64)]), st.booleans())
def test_blocked(problem, tile, through_lse):
    """Small tiles, so that a short sequence has empty, partial and full ones."""
    q, k, v, options = problem
    old = blocked.TILE
    try:
        blocked.TILE = Tile(*tile)
        testing.verify(q, k, v, kernel="blocked", through_lse=through_lse, **options)
    finally:
        blocked.TILE = old
