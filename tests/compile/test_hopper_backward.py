"""The Hopper backward of 16-bit floats as NVRTC compiles it here: no product serialised, no spill."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from samples import grid, sample
from sartor import kernels, mods, nvrtc, plan
from sartor.device import ARCHITECTURES
from sartor.kernels.spec import Operands, Plan, Saved
from sartor.kernels.triton import launch
from sartor.problem import Call, Problem

if nvrtc.missing() or not launch.available():
    pytest.skip(nvrtc.missing() or "needs Triton, whose launches stand around it", allow_module_level=True)

from sartor.kernels.hopper.backward_config import Config, sums
from sartor.kernels.hopper.backward_launches import tidy, tidy_out
from sartor.kernels.hopper.backward_problem import listed, parts

DEVICE = ARCHITECTURES[90]


@pytest.fixture(autouse=True)
def pending_parts(monkeypatch):
    """All are taken; no plan is kept that was made with or without them."""
    monkeypatch.setenv("SARTOR_PENDING", "1")
    for kept in (plan.choose_backward, Config.all):
        kept.cache_clear()
    yield
    for kept in (plan.choose_backward, Config.all):
        kept.cache_clear()


SPEC = kernels.load("hopper_backward")
MASKS = [{}, {"causal": True}, {"window": (90, 30)}]
FROM_TABLES = ["documents", "causal documents", "packed"]  # masks whose intervals are in tables


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def problem(dim=128, dim_v=None, heads=(4, 4), dtype=torch.bfloat16, batch=2, **options):
    shapes = ((batch, 1000, heads[0], dim), (batch, 1000, heads[1], dim), (batch, 1000, heads[1], dim_v or dim))
    return Problem.of(Call(*(meta(*s, dtype=dtype) for s in shapes), **options))


def pairs(*shape, dtype=torch.bool):
    """A tensor of queries and keys in rows of a multiple of 16 keys."""
    return meta(*shape, 1000, 1008, dtype=dtype)[..., :1000]


DISTANCES = mods.Score(lambda s, b, h, q, kv, aux: s + aux[0][h, q - kv + 999], (meta(4, 1999),))  # a table of them


def from_tables(name):
    """Options of such a mask."""
    if name == "packed":
        ends = meta(5, dtype=torch.int32)
        return {"mask": mods.packed(ends, ends, 1000, 1000, causal=True), "batch": 1}
    return {"mask": mods.document(meta(2, 1000, dtype=torch.int32)), "causal": name.startswith("causal")}


def sound(config, spills=0):
    binary = config.compile()
    assert all(found.spill_bytes <= spills for found in binary.resources.values())
    assert "C75" not in binary.log  # what ptxas says of wgmma it has to serialise
    assert config.shared_bytes <= launch.smem_limit(DEVICE)
    assert config.stages >= 2
    assert config.block >= 64  # of fewer, products would wait for the held rows
    return set(binary.resources)


LISTED = {}, {"heads": (8, 2)}, {"dtype": torch.float16}


@pytest.mark.parametrize(
    ("dim", "options"), sample(product([64, 128], LISTED), lambda case: (case[0] == 128) == (case[1] == {})), ids=str
)
def test_lists_of_tiles(dim, options):
    """One sweep over a list of query tiles; others walk none, nor one that tables order."""

    def near(b, h, q, kv, aux=()):
        return ((q // 20 - kv // 20).abs() <= 3) & ((q % 20 - kv % 20).abs() <= 3)

    p = problem(dim, mask=mods.Mask(near), **options)
    assert listed(p)
    assert not listed(replace(p, deterministic=True))
    assert not listed(problem(dim, mask=mods.Mask(near), softcap=20.0))
    ends = meta(2, 1, 1, 1000, dtype=torch.int32)
    assert not listed(problem(dim, mask=mods.Mask(near, (ends,), cols=lambda b, h, kv, aux: (0, aux[0], 0, 0))))
    (config,) = Config.all(p)
    assert sound(replace(config, listed=True)) >= {"hopper_backward", "preprocess", "round_dq"}


DIMS = [64, 72, 80, 96, 112, 128, 136, 160, 176, 192, 224, 256]


@pytest.mark.parametrize(
    ("dim", "options"), sample(product(DIMS, MASKS), [*zip((128, 256, 80), MASKS, strict=True)].__contains__), ids=str
)
def test_kernels(dim, options):
    """No spills, but two words at two head dims without a mask."""
    configs = Config.all(problem(dim, deterministic=True, **options))
    keys = [("dk", "dv")] if dim <= 128 else [("dk",), ("dv",)]  # what registers hold
    assert [m.gradients for m in configs] == [("dq",), *keys]
    spills = 8 if dim in (96, 192) and not options else 0
    for config in configs:
        assert sound(config, spills) == {"hopper_backward", *(["preprocess"] if "dq" in config.gradients else [])}


ONES = [(64, {"causal": True}, torch.float16), (96, {}, torch.bfloat16), (128, {"causal": True}, torch.bfloat16)]
# Bytes spilled, without a mask and with one, by head dim
BETWEEN = {64: (0, 0), 72: (0, 0), 80: (0, 132), 96: (36, 116), 112: (0, 116), 120: (0, 76), 128: (24, 100)}


@pytest.mark.parametrize(
    ("dim", "options", "dtype"),
    grid([64, 128], MASKS, [torch.bfloat16, torch.float16], kept=ONES.__contains__)
    + grid(sorted(BETWEEN.keys() - {64, 128}), MASKS, [torch.bfloat16], kept=ONES.__contains__),
    ids=str,
)
def test_one_sweep(dim, options, dtype):
    """No spills, but a few words between two loops: beyond head dim 64 tiles seen whole have one of their own."""
    (config,) = Config.all(problem(dim, dtype=dtype, **options))
    assert config.whole_apart == (dim > 64 and (dim, options) != (120, {}))
    assert sound(config, BETWEEN[dim][bool(options)]) == {"hopper_backward", "preprocess", "round_dq"}


def test_whole_tiles_apart():
    """In a plain sweep beyond head dim 64, whose intervals come from no tensor."""

    def apart(dim=128, **options):
        return [config.whole_apart for config in Config.all(problem(dim, **options))]

    assert [apart(**options) for options in MASKS] == [[True]] * len(MASKS)
    assert [apart(dim, causal=True) for dim in (64, 72, 112, 120)] == [[False], [True], [True], [True]]
    assert [apart(dim) for dim in (112, 120)] == [[True], [False]]
    tables = map(from_tables, ("packed", "causal documents"))
    for options in ({"softcap": 2.0}, {"dropout_p": 0.1}, {"mask": pairs()}, *tables):
        assert apart(**options) == [False]
    assert not any(apart(causal=True, deterministic=True))


ALL = [8, 16, 24, 32, 40, 48, 56, 72, 80, 88, 96, 104, 112, 120]


@pytest.mark.parametrize("options", sample(MASKS, lambda options: "causal" in options), ids=str)
@pytest.mark.parametrize("dim", sample(ALL, lambda dim: dim in (40, 80, 96)))
def test_one_sweep_of_other_head_dims(dim, options):
    """Of whole steps of columns; where two tiles of queries do not fit, warpgroups share the columns of one."""
    p = problem(dim, heads=(4, 2), **options)
    (config,) = Config.all(p)
    assert sound(config, spills=16 if dim == 8 else 0) >= {"hopper_backward", "preprocess", "round_dq"}
    assert (config.dim, config.block) == (-(-dim // 16) * 16, 128 if dim <= 64 else 64)
    assert plan.choose_backward(p, DEVICE).kernel is SPEC
    assert sums(p) == 2 * 4 * 1024 * dim


OF_ALL = {"documents": 0, "softcap": 140, "alibi": 0, "dropout": 32}  # bytes spilled


@pytest.mark.parametrize("name", OF_ALL)
@pytest.mark.parametrize("dim", sample(ALL, lambda dim: dim in (56, 80)))
def test_features_at_other_head_dims(dim, name):
    slopes = meta(4, dtype=torch.float32)
    options = {"softcap": {"softcap": 2.0}, "alibi": {"alibi_slopes": slopes}, "dropout": {"dropout_p": 0.1}}
    (config,) = Config.all(problem(dim, **(options | {"documents": from_tables("causal documents")})[name]))
    assert sound(config, spills=OF_ALL[name]) >= {"hopper_backward", "preprocess", "round_dq"}


@pytest.mark.parametrize(
    ("dim", "name", "deterministic"),
    grid(
        [64, 96, 128, 256], FROM_TABLES, [False, True],
        kept=[(128, "documents", True), (256, "causal documents", True), (128, "packed", False)].__contains__,
    ),
)  # fmt: skip
def test_intervals_from_tables(dim, name, deterministic):
    """A table says which block begins when. Blocks keep intervals in shared memory where there is room: those that stay
    need it for keys."""
    for config in Config.all(problem(dim, deterministic=deterministic, **from_tables(name))):
        assert "order_blocks" in sound(config, spills=8 if dim == 96 and deterministic else 0)
        assert config.ordered
        assert config.shared_spans == (dim < (256 if deterministic else 96))
        assert config.persistent == (not deterministic and dim < 256)
        assert config.defines()["MASK"] == (1 if name == "packed" else 2)


@pytest.mark.parametrize("dim", sample([64, 96, 128, 256], lambda dim: dim == 128))
def test_pairs(dim):
    """A predicate that is no interval, and intervals of which every head has its own: neither kept nor ordered."""
    lengths = meta(4, 1, 1, dtype=torch.int32)
    for mask in (
        mods.Mask(lambda b, h, q, kv: (q + kv + h) % 5 != 0),
        mods.Mask(lambda b, h, q, kv, aux: kv < aux[0], (lengths,)),
    ):
        for config in Config.all(problem(dim, mask=mask)):
            assert "order_blocks" not in sound(config, spills=32)
            assert not config.shared_spans
            assert not config.whole_apart


SEEN = {
    "alone": ({"mask": pairs(4)}, 2, 56),
    "causal": ({"mask": pairs(2, 1), "causal": True}, 1, 36),
    "capped": ({"mask": pairs(), "softcap": 2.0}, 2, 320),
    "documents": ({"mask": mods.document(meta(2, 1000, dtype=torch.int32)) & mods.from_tensor(pairs())}, 1, 160),
}


@pytest.mark.parametrize(
    ("name", "dim"), sample(product(SEEN, [64, 128, 16, 120]), [("alone", 64), ("causal", 128)].__contains__)
)
def test_bool_tensors(name, dim):
    """Bits of them come to shared memory; a few words are spilled, none of a product."""
    options, seen, spills = SEEN[name]
    (config,) = Config.all(problem(dim, **options))
    assert "hopper_backward" in sound(config, spills)
    assert config.seen == seen
    assert config.stages == 3
    assert not config.persistent


ADDED = {
    "alone": ({}, 0),
    "causal": ({"causal": True}, 8),
    "bool": ({"mask": pairs()}, 28),
    "capped": ({"softcap": 2.0}, 292),  # at head dim 64; none at 128
}


@pytest.mark.parametrize(
    ("name", "dim"), sample(product(ADDED, [64, 128, 16, 120]), [("alone", 64), ("causal", 128)].__contains__)
)
def test_bias_of_pairs(name, dim):
    """The copy engine brings it, a tile at a time."""
    options, spills = ADDED[name]
    (config,) = Config.all(problem(dim, bias=pairs(4, dtype=torch.bfloat16), **options))
    assert {"hopper_backward", "find_highest"} <= sound(config, spills)


@pytest.mark.parametrize(
    ("dim", "batch", "causal"),
    grid([64, 128, 32, 96], [2, 1], [False, True], kept=[(64, 2, False), (128, 1, True)].__contains__),
)
def test_gradient_of_a_bias(dim, batch, causal):
    """Stored, or summed over the items of a batch."""
    bias = pairs(batch, 4, dtype=torch.bfloat16)
    (config,) = Config.all(problem(dim, bias=bias, bias_gradient=True, causal=causal))
    assert {"hopper_backward", "find_highest"} <= sound(config)
    assert config.defines()["DADDED"] == (1 if batch == 2 else 2)


@pytest.mark.parametrize(
    ("dim", "causal"), sample(product([64, 128], [False, True]), [(64, False), (128, True)].__contains__)
)
def test_one_key_head(dim, causal):
    """Where few blocks of keys are left, several share their query heads, and another launch adds up what they made."""
    shared = problem(dim, heads=(32, 1), causal=causal)
    assert parts(shared) == 32  # of two items, 8 blocks each
    assert [parts(problem(dim, heads=heads, batch=n)) for heads, n in (((32, 8), 8), ((32, 2), 8))] == [2, 8]
    assert [parts(problem(dim, heads=heads, batch=9)) for heads in ((32, 32), (32, 8))] == [1, 1]
    assert parts(problem(dim, heads=(32, 1), deterministic=True)) == 1
    (config,) = Config.all(shared)
    assert "round_parts" in sound(config)
    assert not config.whole_apart
    (alone,) = Config.all(problem(dim, causal=causal))
    assert "round_parts" not in sound(alone, spills=96 if dim == 128 else 0)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("dim", sample([64, 96, 128, 256], lambda dim: dim == 96))
def test_scores_that_bury(dim, options):
    """What weights are relative to is found before the sweeps, in the text of the first one."""
    configs = Config.all(problem(dim, bias=meta(2, 1, 1, 1000), causal=True, **options))
    assert ["find_highest" in sound(config, spills=16) for config in configs] == [True] + [False] * (len(configs) - 1)


@pytest.mark.parametrize(
    ("dim", "deterministic", "causal"),
    grid(
        [64, 96, 128, 160, 256], [False, True], [False, True],
        kept=[(128, False, True), (128, True, False)].__contains__,
    ),
)  # fmt: skip
def test_changed_scores(dim, deterministic, causal):
    """No spills where the derivative is 1; else a few words, and more where one sweep holds 64 scores a thread."""
    options = {"causal": causal, "deterministic": deterministic}
    for config in Config.all(problem(dim, alibi_slopes=meta(4, dtype=torch.float32), **options)):
        sound(config)
    for config in Config.all(problem(dim, softcap=30.0, **options)):
        sound(config, spills=176 if dim == 64 and config.fused else 48)


def test_determinism():
    """One sweep adds up in any order: not where bits are to be the same, and only where it fits."""
    for p in (problem(deterministic=True), problem(80, deterministic=True), problem(136), problem(256)):
        assert not any(m.fused for m in Config.all(p))
        assert list(SPEC.notes(p)) == []
    for dim in (40, 80, 96, 128):
        assert [m.fused for m in Config.all(problem(dim, softcap=2.0))] == [True]
        (note,) = SPEC.notes(problem(dim))
        assert f"{dim / 32:.1f} MiB" in note  # 2 x 4 heads, 1024 rows
    torch.use_deterministic_algorithms(True)
    try:
        p = problem()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [m.fused for m in Config.all(p)] == [False, False]


def sass_of(config):
    try:
        return config.compile().sass()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("dtype", "name"),
    sample([(torch.float16, ".F32"), (torch.bfloat16, ".F32.BF16")], lambda case: case[0] == torch.bfloat16),
    ids=str,
)
def test_products(dtype, name):
    """A step for 16 columns of the scores and of dp, which dv alone is without; one for 16 rows of each gradient."""
    for dim in (128, 256):
        for config in Config.all(problem(dim, dtype=dtype, deterministic=True)):
            text, held = sass_of(config), 1 if config.gradients == ("dv",) else 2
            assert text.count(f"HGMMA.64x{config.block}x16{name} ") == held * dim // 16
            assert text.count(f"HGMMA.64x{dim}x16{name} ") == config.block // 16 * len(config.gradients)
    (config,) = Config.all(problem(dtype=dtype))
    text = sass_of(config)  # two loops of tiles; dq has 8 steps in each, in a tile that is stepped over, after the last
    assert text.count(f"HGMMA.64x64x16{name} ") == 2 * 2 * 8 + 4 * 8
    assert text.count(f"HGMMA.64x128x16{name} ") == 2 * 2 * 4


def test_reasons():
    """Each thing the kernel cannot do is said; the portable kernel does it."""
    for p, words in (
        (problem(56, deterministic=True), "64 to 256"),
        (problem(264), "8 to 256"),
        (problem(100), "16 bytes"),
        (replace(problem(100), rows_on_16_bytes=True), "multiples of 8"),
        (problem(128, 64), "equal head dims"),
        (problem(dtype=torch.float32), "got torch.float32"),
        (problem(bias=meta(1000, 1001)[:, 1:]), "table of queries and keys, a float16 or bfloat16 one"),
        (problem(bias=meta(1000, 1001)[:, 1:], bias_gradient=True), "has the gradient of a bias of"),
        (problem(bias=meta(1, 1000), bias_gradient=True), "has the gradient of a bias of"),
        (problem(bias=pairs(dtype=torch.bfloat16), bias_gradient=True, softcap=2.0), "softcap"),
        (problem(mask=meta(1000, 1000, dtype=torch.bool)), "rows that start on 16 bytes"),
        (problem(mask=mods.from_tensor(pairs()) & mods.from_tensor(pairs(4))), "at most one table"),
        (problem(mask=pairs(), deterministic=True), "deterministic=False"),
        (problem(136, mask=pairs()), "head dims up to 128"),
    ):
        assert any(words in why for why in plan.against(SPEC.name, p, DEVICE))
        assert plan.against("triton_backward", p, DEVICE) == []
    for options in ({}, {"causal": "top_left"}, {"window": (100, 3)}, {"sinks": meta(4)}, {"heads": (6, 2)}):
        assert plan.against(SPEC.name, problem(**options), DEVICE) == []
        options["softcap"] = 2.0
        assert plan.against(SPEC.name, problem(**options), DEVICE) == []
    assert any("8.0" in why for why in plan.against(SPEC.name, problem(), ARCHITECTURES[80]))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "hopper_backward"),
        ({"causal": True, "dim": 64, "dtype": torch.float16}, "hopper_backward"),
        ({"dtype": torch.float32}, "hopper_fp32_backward"),
        ({"softcap": 2.0}, "hopper_backward"),
        ({"softcap": 2.0, "dtype": torch.float32}, "fp32_backward"),
        ({"bias": meta(4, 1, 1)}, "hopper_backward"),
        ({"score": DISTANCES}, "hopper_backward"),
        ({"score": DISTANCES, "mask": pairs(4)}, "hopper_backward"),
        ({"score": DISTANCES, "table_gradients": (0,)}, "triton_backward"),
        ({"bias": meta(4, 1, 1000)}, "hopper_backward"),
        ({"bias": pairs(4, dtype=torch.bfloat16)}, "hopper_backward"),
        ({"bias": pairs(4, dtype=torch.float32)}, "triton_backward"),
        ({"bias": pairs(4, dtype=torch.bfloat16), "bias_gradient": True, "causal": True}, "hopper_backward"),
        ({"bias": pairs(4, dtype=torch.float16), "mask": pairs(2, 1), "causal": True}, "hopper_backward"),
        ({"bias": meta(1000, 1001)[:, 1:]}, "triton_backward"),
        ({"mask": meta(1000, 1000, dtype=torch.bool)}, "triton_backward"),
        ({"mask": pairs(4)}, "hopper_backward"),
        ({"mask": meta(1000, dtype=torch.bool)}, "hopper_backward"),
        (from_tables("documents"), "hopper_backward"),
        (from_tables("packed"), "hopper_backward"),
        (from_tables("documents") | {"dtype": torch.float32}, "hopper_fp32_backward"),
        (from_tables("causal documents") | {"softcap": 2.0}, "hopper_backward"),
        ({"dim": 256}, "hopper_wide_backward"),
        ({"dim": 256, "softcap": 2.0}, "hopper_backward"),
        ({"dim": 56}, "hopper_backward"),
        ({"dim": 56, "softcap": 2.0}, "hopper_backward"),
        ({"dim": 56, "deterministic": True}, "triton_backward"),
    ],
    ids=str,
)
def test_choice(options, name):
    """Every gradient it can do comes from it."""
    assert plan.choose_backward(problem(**options), DEVICE).kernel.name == name


@pytest.mark.parametrize(
    ("name", "dtype", "dim"),
    [
        ("hopper_backward", torch.bfloat16, 128),
        ("hopper_backward", torch.bfloat16, 256),
        ("hopper_fp32_backward", torch.float32, 128),
    ],
)
def test_tile(name, dtype, dim):
    p, spec = problem(dim, dtype=dtype), kernels.load(name)
    (tile,) = spec.tiles(p, DEVICE)
    assert spec.fits(p, DEVICE, tile)
    assert not spec.fits(p, DEVICE, replace(tile, block_m=32))
    assert spec.shared_bytes(Plan(spec, p, DEVICE, tile, "test")) <= launch.smem_limit(DEVICE)


def test_repairs():
    """Marked tiles are computed again by the portable kernel; nothing else of it is launched."""
    p = problem(causal=True)
    q = meta(2, 1000, 4, 128)
    x, saved = Operands(q, q, q, aux=(0,)), Saved(q, meta(2, 4, 1000, dtype=torch.float32), q, None)
    (tile,) = SPEC.tiles(p, DEVICE)
    steps = SPEC.repairs(Plan(SPEC, p, DEVICE, tile, "test"), x, saved, SPEC.workspace(p, x, saved))
    assert [step.name for step in steps] == ["dkdv repair", "dq repair"]


@pytest.mark.parametrize("case", ["dense", "of a sum", "a column more", "heads outermost"])
def test_rows_of_dout(case):
    """The copy engine wants them on 16 bytes, each in a place of its own; others are copied."""
    q = meta(2, 1000, 4, 128)
    dout = {
        "dense": q, "of a sum": meta().expand(q.shape), "a column more": meta(2, 1000, 4, 129)[..., :128],
        "heads outermost": meta(2, 4, 1000, 128).transpose(1, 2),
    }[case]  # fmt: skip
    found = tidy(problem(), dout)
    assert (found is dout) == (case in ("dense", "heads outermost"))
    assert found.stride(3) == 1
    assert all(n > 0 and n % 8 == 0 for n in found.stride()[:3])


def test_columns_without_spans_are_not_intervals():
    """Rows that are exact intervals are not enough: keys would take the queries of a wider one."""
    q = torch.empty(2, 64, 4, 128, dtype=torch.bfloat16, device="meta")
    mask = mods.Mask(lambda b, h, q, kv, aux: kv * kv <= q * q, rows=lambda b, h, q, aux: (0, q + 1) * 2)
    p = Problem.of(Call(q, q, q, mask=mask))  # of squares no interval of rows is derived
    assert p.program.is_interval
    assert all(config.defines()["MASK"] == 2 for config in Config.all(p))  # pairs are looked at
    for full in ((5, mods.core.BIG), (0, 5)):  # one end is not exact: the predicate has a say there
        mask = mods.Mask(lambda b, h, q, kv, aux: kv <= q, rows=lambda b, h, q, aux, f=full: (0, mods.core.BIG, *f))
        assert not Problem.of(Call(q, q, q, mask=mask)).program.is_interval


def test_tensors_an_element_further():
    """Their addresses may be off where their strides are not."""
    q = torch.empty(1, 64, 2, 128, dtype=torch.bfloat16)
    off = torch.zeros(q.numel() + 1, dtype=torch.bfloat16)[1:].view(q.shape)
    for found in (tidy(Problem.of(Call(q, q, q)), off), tidy_out(off)):
        assert found.data_ptr() % 16 == 0
    assert tidy_out(q) is q


@pytest.mark.parametrize("options", sample([*MASKS, {"deterministic": True}], lambda options: options == {}), ids=str)
@pytest.mark.parametrize("dim", sample([64, 96, 128, 160], lambda dim: dim == 128))
def test_dropout(dim, options):
    """At head dim 64, of dk and dv made by themselves a few words are kept in local memory over each tile."""
    given = {"dropout_p": 0.1, "dropout_seed": meta(1, dtype=torch.int64)}
    for config in Config.all(problem(dim, **given, **options)):
        assert "hopper_backward" in sound(config, spills=68 if dim == 64 and "deterministic" in options else 0)
