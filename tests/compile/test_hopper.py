"""The Hopper forward as NVRTC compiles it here: no spills, no serialised products."""

from __future__ import annotations

import json
import operator
from dataclasses import replace
from functools import reduce
from importlib.resources import files

import pytest
import torch

import dialects
from samples import grid, sample
from sartor import kernels, mods, nvrtc, plan
from sartor.device import ARCHITECTURES
from sartor.kernels.hopper import arch
from sartor.kernels.hopper.forward import Config, compiled
from sartor.kernels.spec import Plan, Tile
from sartor.plan import choose
from sartor.problem import Call, Problem

if nvrtc.missing():
    pytest.skip(nvrtc.missing(), allow_module_level=True)

DEVICE = ARCHITECTURES[90]
SPEC = kernels.load("hopper_forward")
ROWS = [json.loads(line) for line in (files("sartor.tuning") / "data" / "sm90.jsonl").read_text().splitlines()]
ROWS = [row for row in ROWS if row["kernel"] == SPEC.name]
NAMES = [f"{r['mask']}-{r['dim']}-{r.get('keys', '')}" for r in ROWS]
SAMPLED = (64, "full"), (128, "band"), (128, "tensor"), (256, "band")
SOME = [r for r in ROWS if (r["dim"], r["mask"]) in SAMPLED and "keys" not in r]
BF16, FP16 = torch.bfloat16, torch.float16
LARGEST = arch.SHARED_BYTES


def problem(dim=128, dim_v=None, heads=(4, 4), lengths=(1000, 1000), dtype=BF16, **options):
    shapes = ((2, lengths[0], heads[0], dim), (2, lengths[1], heads[1], dim), (2, lengths[1], heads[1], dim_v or dim))
    return Problem.of(Call(*(torch.empty(s, dtype=dtype, device="meta") for s in shapes), **options))


def check(p, tile, spec=SPEC, spills=0):
    """`spills`: words that may be spilled, and are."""
    binary = spec.compile(p, tile)
    assert set(binary.resources) == {"hopper_forward"}
    for found in binary.resources.values():
        assert found.spill_bytes == 4 * spills, binary.resources
        assert spills or found.stack_bytes == 0, binary.resources
    assert "C75" not in binary.log  # what ptxas says of wgmma it has to serialise
    return binary


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def of_class(mask, dim, n):
    """A problem of a class of masks, n queries and keys."""
    options = {"band": {"causal": True}, "window": {"window": (1023, 0)}, "tensor": {"bias": meta(n, n, dtype=BF16)}}
    options |= {"mods": {"mask": mods.document(meta(2, n, dtype=torch.int64)), "causal": True}}
    options |= {"score": {"causal": True, "alibi_slopes": meta(4)}}  # what takes most registers
    return problem(dim, lengths=(n, n), **options.get(mask, {}))


@pytest.mark.parametrize("row", sample(ROWS, SOME.__contains__), ids=NAMES)
def test_tuning_row(row):
    p = of_class(row["mask"], row["dim"], 4096)
    tile = Tile.of(row["tile"])
    assert tile in list(SPEC.tiles(p, DEVICE))
    check(p, tile, spills=row["spills"])
    if row["dim"] in (64, 128) and row["mask"] != "tensor":  # which may keep a few words aside between query tiles
        check(of_class(row["mask"], row["dim"], 1000), tile)  # keys that fill no tile


FEATURES = {
    "window": {"window": (100, 3)},
    "top_left": {"causal": "top_left"},
    "softcap": {"softcap": 20.0, "causal": True},
    "alibi": {"alibi_slopes": meta(4)},
    "bias": {"bias": meta(1, 4, 1000, 1000, dtype=BF16), "causal": True},
    "mask": {"mask": meta(2, 1, 1000, 1000, dtype=torch.bool)},
    "document": {"mask": mods.document(meta(2, 1000, dtype=torch.int64))},
    "packed": {"mask": mods.packed(*[meta(9, dtype=torch.int32)] * 2, 1000, 1000, causal=True)},
    "user": {"mask": mods.Mask(lambda b, h, q, kv, aux: (q // 3 + kv * h) % aux[0] != 1, (3,))},
    "sinks": {"sinks": meta(4)},
    "negative_scale": {"softmax_scale": -0.5},
    "float32_out": {"out_dtype": torch.float32},
    "float16": {"dtype": FP16},
    "all": {
        "causal": True, "window": (90, 0), "softcap": 3.0, "alibi_slopes": meta(4), "sinks": meta(4),
        "bias": meta(4, 1000, 1000), "mask": meta(1000, dtype=torch.bool),
    },
}  # fmt: skip


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dim", sample([40, 64, 80, 96, 112, 128, 160, 192, 256], lambda dim: dim == 128))
def test_fewer_queries(dim, groups):
    """What few heads are given: the tile of a row, with fewer queries."""
    p = problem(dim, lengths=(4096, 4096), causal=True)
    tile = replace(choose(p, DEVICE).tile, block_m=64 * groups, warps=4 * (groups + 1))
    check(p, tile)


@pytest.mark.parametrize("mask", ["window", "mods"])
@pytest.mark.parametrize("dim", sample([96, 192, 224, 256], lambda dim: dim == 96))
def test_other_masks(dim, mask):
    """What has no row of its own is given the tile of a causal mask's, or one that leaves registers for it."""
    p = of_class(mask, dim, 16384)
    check(p, choose(p, DEVICE).tile)


LISTED = {
    "plain": {},
    "ragged": {"lengths": (4000, 4000)},
    "group": {"heads": (8, 2)},
    "sinks": {"sinks": meta(4)},
    "float16": {"dtype": FP16},
    "float32_out": {"out_dtype": torch.float32},
    "score": {"softcap": 20.0},
    "table": {"score": mods.Score(lambda s, b, h, q, kv, aux: s + aux[0][h, q - kv + 4095], (meta(4, 8191),))},
}


@pytest.mark.parametrize(
    ("name", "dim", "groups"),
    grid(
        LISTED, [64, 128], [1, 2, 3], kept=[("table", 64, 1), ("table", 128, 2), ("table", 64, 3)].__contains__
    ),
)  # fmt: skip
def test_lists_of_key_tiles(name, dim, groups):
    """Of few queries and of many."""
    hole = mods.Mask(lambda b, h, q, kv: ((q // 64 - kv // 64).abs() <= 6) & ((q % 64 - kv % 64).abs() <= 6))
    p = problem(dim, mask=hole, **{"lengths": (4096, 4096), **LISTED[name]})
    tile = SPEC.listed(p, replace(choose(p, DEVICE).tile, block_m=64 * groups, warps=4 * (groups + 1)))
    binary = compiled(replace(SPEC.config(p, tile), listed=True))
    assert "C75" not in binary.log
    assert binary.resources["hopper_forward"].spill_bytes == 0
    assert SPEC.config(p, tile).shared_bytes <= DEVICE.smem_bytes
    assert SPEC.listed(replace(p, program=problem(dim, causal=True).program), tile) is None


@pytest.mark.parametrize("kind", ["bias", "mask"])
@pytest.mark.parametrize("dim", range(16, 136, 8))
def test_the_copy_engine_brings_what_pairs_read(dim, kind):
    """In tiles ahead of the products at every head dim up to 128: lanes take four times as long."""
    pairs = torch.empty(2048, 2048, dtype=BF16 if kind == "bias" else torch.bool, device="meta")
    p = problem(dim, lengths=(2048, 2048), **{kind: pairs})
    config = Config.of(p, choose(p, DEVICE).tile)
    assert config.mapped == (0,)
    assert config.near_stages == 2


@pytest.mark.parametrize("dim", sample([64, 128, 256], lambda dim: dim == 64))
def test_biases_are_brought(dim):
    """Rows that start on 16 bytes are copied to shared memory, which the config makes room for; others are not."""
    for n, width, near in ((4096, 4096, (0,)), (1024, 1025, ())):
        lengths = {"lengths": (n, n)}
        p = problem(dim, bias=meta(1, 4, n, width, dtype=BF16)[..., :n], **lengths)
        tile = choose(p, DEVICE).tile
        config = Config.of(p, tile)
        assert (config.near, config.brings) == (near, bool(near))
        room = 0 if config.block_n % 64 == 0 else 16  # between rows, where pieces do not change places
        stage = 64 * config.groups * (2 * config.block_n + room) + 16 * config.groups  # and its barriers
        more = config.shared_bytes - Config.of(problem(dim, **lengths), tile).shared_bytes
        assert 0 <= more - (config.near_stages * stage if near else 0) < (1024 if near else 1)  # room before tiles
        two = config.shared_bytes + stage * (2 - config.near_stages) <= LARGEST
        assert config.near_stages == (1 + two if near else 0)
        assert config.shared_by == ("batch" if near else "")
        if near:
            check(p, tile)


def relative(n, heads=4):
    table = meta(heads, 2 * n - 1, dtype=BF16)
    return mods.Score(lambda s, b, h, q, kv, aux: s + aux[0][h, q - kv + n - 1], (table,))


@pytest.mark.parametrize("limits", sample([{}, {"causal": True}], lambda limits: not limits), ids=str)
@pytest.mark.parametrize("name", ["tensor", "relative"])
def test_bools_become_bits_and_distances_strips(name, limits):
    """Nothing is read from memory by the consumers' loops, and no registers are spilled."""
    n = 4096
    options = {"tensor": {"mask": meta(n, n, dtype=torch.bool)}, "relative": {"score": relative(n)}}[name]
    p = problem(128, lengths=(n, n), **options, **limits)
    tile = choose(p, DEVICE).tile
    check(p, tile)
    assert len(Config.of(p, tile).near) == 1


@pytest.mark.parametrize("name", sample(FEATURES, ["packed", "float16", "all"].__contains__))
def test_features(name):
    p = problem(64, **FEATURES[name])
    binary = SPEC.compile(p, next(iter(SPEC.tiles(p, DEVICE))))
    assert "C75" not in binary.log


@pytest.mark.parametrize(
    "dim", sample([1, 8, 24, 40, 72, 88, 104, 136, 176, 200, 240, 256], lambda dim: dim in (1, 88))
)
def test_dims(dim):
    check(problem(dim), next(iter(SPEC.tiles(problem(dim), DEVICE))))


@pytest.mark.parametrize(("dim", "dim_v"), sample([(192, 128), (64, 256), (40, 17)], lambda dims: dims != (192, 128)))
def test_dim_v(dim, dim_v):
    p = problem(dim, dim_v)
    check(p, next(iter(SPEC.tiles(p, DEVICE))))


@pytest.mark.parametrize("name", sample(dialects.SCORES, ["of_signs"].__contains__))
def test_scores_of_every_operator(name):
    p = problem(128, score=dialects.scores(4, 1000, 1000, "meta")[name])
    SPEC.compile(p, choose(p, DEVICE).tile)


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"causal": True, "alibi_slopes": meta(4)}], ids=list)
@pytest.mark.parametrize("dim", sample([40, 64, 80, 96, 120, 128, 160, 192, 256], lambda dim: dim == 128))
def test_scores(dim, options):
    p = problem(dim, lengths=(4096, 4096), **options)
    check(p, choose(p, DEVICE).tile)


@pytest.mark.parametrize("part", sample(range(4), lambda part: part == 0))
def test_masks_of_every_operator(part):
    """The text of each alone is run on CPUs; here some are together."""
    mask = reduce(operator.or_, [m for m, _ in dialects.make(100, 100, "meta").values()][part::4])
    p = problem(64, lengths=(100, 100), mask=mask)
    check(p, choose(p, DEVICE).tile)


@pytest.mark.parametrize("seqlen_q", sample([1, 5, 32, 64], lambda seqlen: seqlen == 5))
def test_few_queries_share_a_slice(seqlen_q):
    p = problem(128, heads=(8, 1), lengths=(seqlen_q, 1000))
    check(p, next(iter(SPEC.tiles(p, DEVICE))))


SPLIT = [{}, {"causal": True, "sinks": meta(8)}, {"softcap": 9.0}]


@pytest.mark.parametrize("options", sample(SPLIT, lambda options: "softcap" not in options), ids=list)
@pytest.mark.parametrize("dim", sample([36, 64, 96, 128, 256], lambda dim: dim == 128))
def test_kv_splits(dim, options):
    p = problem(dim, heads=(8, 2), lengths=(5, 9000), **options)
    tile = choose(p, DEVICE).tile
    assert tile.num_splits > 1
    found = SPEC.compile(p, tile).resources
    assert set(found) == {"hopper_forward", "hopper_merge"}
    assert found["hopper_merge"].spill_bytes == 0
    assert found["hopper_forward"].spill_bytes <= (32 if options else 0)  # a few words between query tiles, as without


def test_products_are_wgmma():
    binary = SPEC.compile(problem(), Tile(128, 128, 12, 5))
    try:
        sass = binary.sass()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert "HGMMA.64x128x16.F32.BF16" in sass
    assert "UTMALDG.4D" in sass
    assert not any(word in sass for word in ("STL", "LDL"))


def test_reasons():
    """Each thing the kernel cannot do is said, with both sides."""
    p = problem()
    for changed, words in (
        ({"dtype": torch.float32}, "float16 or bfloat16"), ({"dim": 264}, "up to 256"),
        ({"seqlen_kv": 0}, "0 keys"), ({"rows_on_16_bytes": False}, "16 bytes"),
    ):  # fmt: skip
        assert any(words in why for why in plan.against(SPEC.name, replace(p, **changed), DEVICE))
    assert "8.0" in plan.against(SPEC.name, p, ARCHITECTURES[80])[0]
    assert plan.against(SPEC.name, p, DEVICE) == []
    unaligned = replace(problem(33), rows_on_16_bytes=False)
    assert plan.against(SPEC.name, unaligned, DEVICE) == []  # copied, once, with zeros


def test_registers_are_told():
    p = problem()
    plan = Plan(SPEC, p, DEVICE, next(iter(SPEC.tiles(p, DEVICE))), "")
    assert plan.registers == 168


def test_a_dtype_cuda_has_no_name_for_is_refused():
    table = meta(1, 1, 1, 1000, dtype=torch.uint16)
    p = problem(mask=mods.Mask(lambda b, h, q, kv, aux: aux[0] < 3, (table,)))
    assert any("torch.uint16" in why for why in plan.against(SPEC.name, p, DEVICE))


DROPPED = {
    "full": {}, "band": {"causal": True}, "documents": {"mask": mods.document(meta(2, 1000, dtype=torch.int64))},
    "alibi": {"alibi_slopes": meta(40), "causal": True},
}  # fmt: skip


@pytest.mark.parametrize("name", sample(DROPPED, ("band",).__contains__))
@pytest.mark.parametrize("dim", sample([40, 64, 96, 128, 160], lambda dim: dim == 128))
def test_dropout(dim, name):
    """The first tile that leaves registers for the bits; and none beyond the head dims that have one."""
    given = {"dropout_p": 0.1, "dropout_seed": meta(1, dtype=torch.int64)}
    p = problem(dim, heads=(40, 40), lengths=(1000, 1000), **given, **DROPPED[name])
    chosen = choose(replace(p, device="cuda"), DEVICE)
    assert chosen.kernel is SPEC
    check(p, chosen.tile)
    assert choose(replace(p, dim=192, dim_v=192, device="cuda"), DEVICE).kernel.name == "triton_forward"
