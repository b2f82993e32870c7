"""The Hopper kernel of float32 as NVRTC compiles it here: three products, no spills, none serialised."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

import pytest
import torch

from samples import grid, sample
from sartor import kernels, mods, nvrtc, plan
from sartor.device import ARCHITECTURES
from sartor.kernels.spec import Tile
from sartor.problem import Call, Problem
from sartor.tuning import table

if nvrtc.missing():
    pytest.skip(nvrtc.missing(), allow_module_level=True)

DEVICE = ARCHITECTURES[90]
SPEC = kernels.load("hopper_fp32")
ROWS = [json.loads(line) for line in (files("sartor.tuning") / "data" / "sm90.jsonl").read_text().splitlines()]
ROWS = [row for row in ROWS if row["kernel"] == SPEC.name]
NAMES = [f"{r['mask']}-{r['dim']}-{r.get('keys', '')}" for r in ROWS]


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def problem(dim=128, dim_v=None, heads=(4, 4), lengths=(1000, 1000), **options):
    shapes = ((2, lengths[0], heads[0], dim), (2, lengths[1], heads[1], dim), (2, lengths[1], heads[1], dim_v or dim))
    return Problem.of(Call(*(meta(*s) for s in shapes), **options))


def first_tile(p):
    return next(iter(SPEC.tiles(p, DEVICE)))


def check(p, tile):
    binary = SPEC.compile(p, tile)
    (found,) = binary.resources.values()
    assert (found.spill_bytes, found.stack_bytes) == (0, 0)
    assert "C75" not in binary.log  # what ptxas says of wgmma it has to serialise
    return binary


@pytest.mark.parametrize("row", sample(ROWS, lambda row: (row["dim"], row["mask"]) == (64, "full")), ids=NAMES)
def test_tuning_row(row):
    p = problem(row["dim"], lengths=(4096, 4096), causal=row["mask"] == "band")
    tile = Tile.of(row["tile"])
    assert tile in list(SPEC.tiles(p, DEVICE))
    check(p, tile)
    check(problem(row["dim"], causal=row["mask"] == "band"), tile)  # keys that fill no tile


FEATURES = {
    "window": {"window": (100, 3)},
    "top_left": {"causal": "top_left"},
    "softcap": {"softcap": 20.0, "causal": True},
    "alibi": {"alibi_slopes": meta(4)},
    "document": {"mask": mods.document(meta(2, 1000, dtype=torch.int64))},
    "sinks": {"sinks": meta(4)},
    "negative_scale": {"softmax_scale": -0.5},
    "heads": {"heads": (6, 2), "lengths": (20, 1000)},
    "bias": {"bias": meta(1, 4, 1000, 1000), "causal": True},
    "mask": {"mask": meta(2, 1, 1000, 1000, dtype=torch.bool)},
    "all": {
        "causal": True, "window": (90, 0), "softcap": 3.0, "alibi_slopes": meta(4), "sinks": meta(4),
        "bias": meta(4, 1000, 1000), "mask": meta(1000, dtype=torch.bool),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dim"), grid(FEATURES, [64, 128], kept=[("document", 128), ("all", 128)].__contains__)
)
def test_features(name, dim):
    p = problem(dim, **FEATURES[name])
    check(p, first_tile(p))


@pytest.mark.parametrize("dim", sample([1, 8, 24, 40, 72, 88, 104, 120], lambda dim: dim in (1, 104)))
def test_dims(dim):
    check(problem(dim), first_tile(problem(dim)))


@pytest.mark.parametrize("dim", sample([64, 97, 128], lambda dim: dim == 97))
def test_rows_that_begin_anywhere(dim):
    p = replace(problem(dim, causal=True), rows_on_16_bytes=False)
    check(p, first_tile(p))


DIMS = [(192, 128), (256, 32), (64, 128), (40, 17)]


@pytest.mark.parametrize(("dim", "dim_v"), sample(DIMS, [(256, 32), (64, 128)].__contains__))
def test_dim_v(dim, dim_v):
    p = problem(dim, dim_v, causal=True)
    check(p, first_tile(p))


@pytest.mark.parametrize(
    ("heads", "length", "causal", "rows"),
    [(96, 4096, False, 192), (2, 16384, False, 128), (4, 2048, False, 64), (2, 16384, True, 128), (4, 1024, True, 64)],
)
def test_few_tiles_have_fewer_queries(heads, length, causal, rows):
    """So that no SM idles. Their keys stay, and with them every bit of a result."""
    p = problem(64, heads=(heads // 2, heads // 2), lengths=(length, length), causal=causal)
    tile, _ = table.lookup(SPEC, p, DEVICE)
    assert (tile.block_m, tile.block_n) == (rows, 128 if causal else 64)
    assert tile in list(SPEC.tiles(p, DEVICE))


def test_three_products_in_float16():
    """Per key tile of 64: 3 * 4 for the scores, 3 * 4 for the output, at head dim 64."""
    binary = SPEC.compile(problem(64, lengths=(4096, 4096)), Tile(192, 64, 16, 6))
    try:
        sass = binary.sass()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert sass.count("HGMMA.64x64x16.F32") == 2 * 12 + 2 * 12  # of the first tile, the loop and the last share
    assert "UTMALDG.5D" in sass
    assert not any(word in sass for word in ("STL", "LDL", "BF16"))


def test_reasons():
    """Each thing the kernel cannot do is said, with both sides."""
    p = problem()
    for changed, words in (
        ({"dtype": torch.float16}, "needs float32"), ({"dim": 264}, "<= 256"), ({"dim_v": 136}, "up to 128"),
        ({"precision": "tf32"}, "ieee"),
        ({"seqlen_kv": 0}, "0 keys"),
    ):  # fmt: skip
        assert any(words in why for why in plan.against(SPEC.name, replace(p, **changed), DEVICE))
    assert "8.0" in plan.against(SPEC.name, p, ARCHITECTURES[80])[0]
    assert plan.against(SPEC.name, p, DEVICE) == []
    unaligned = replace(problem(33), rows_on_16_bytes=False)
    assert plan.against(SPEC.name, unaligned, DEVICE) == []  # the pairs are rows of their own
