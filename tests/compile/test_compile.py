"""What the compiler makes of the Triton kernels, read from their machine code on a machine without a GPU.

A spill is a store to or a load from local memory (`STL`, `LDL`): some kernels reserve a few bytes of stack that they
never touch. A tuning row says how much its kernels spill under the Triton it was measured with, and there it must be so
exactly. Other releases allocate registers otherwise: there a row may spill a little, never fall off the cliff (kernels
that do spill a thousand bytes or more).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from importlib.resources import files
from itertools import product
from threading import get_ident

import pytest
import torch

from samples import grid, sample
from sartor import kernels, mods
from sartor.device import ARCHITECTURES
from sartor.kernels.spec import Operands, Plan, Saved, Tile
from sartor.kernels.triton import launch
from sartor.problem import Call, Problem, aux_values
from sartor.tuning import table

if not launch.available() or launch.interpreted():
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from sartor.kernels.triton.lower import compile_for, source_of, trace

BATCH, LENGTH, HEADS = 4, 4096, 16
DTYPES = {16: torch.bfloat16, 32: torch.float32}
HOT = ("forward", "dkdv", "dq")
ROWS = [json.loads(line) for line in (files("sartor.tuning") / "data" / "sm90.jsonl").read_text().splitlines()]
# By bits, head dims whose rows `make test` compiles, those that are of all lengths, and of a backward one
SOME = {16: (128,), 32: (64,)}
OFTEN = {16: (64, 80, 96, 128, 256), 32: (64, 128)}  # those that `make test-all` compiles; `-m slow` the others
MEASURED_WITH = "3.6.0"  # Triton of the rows
ELSEWHERE_BYTES = 512  # what a row may spill, by thread, under another release
# Nobody tuned for these: some of the first legal tiles spill. More than this would be news.
FIRST_TILE_BYTES = {(100, "dkdv", 104, "band"): 8, (100, "dq", 104, "band"): 24}


def call_of(dim, kind="full", dtype=torch.bfloat16, dim_v=None, length=LENGTH, **options):
    """A call on contiguous (b, s, h, d) meta tensors."""
    widths = (dim, dim, dim_v or dim)
    q, k, v = (torch.empty((BATCH, length, HEADS, n), dtype=dtype, device="meta") for n in widths)
    bias = torch.empty((length, length), dtype=dtype, device="meta")
    ids = torch.empty((BATCH, length), dtype=torch.int64, device="meta")
    by_kind = {
        "band": {"causal": True}, "window": {"window": (64, 0)}, "mods": {"mask": mods.document(ids)},
        "tensor": {"bias": bias}, "score": {"softcap": 30.0},
    }  # fmt: skip
    return Call(q, k, v, **options, **by_kind.get(kind, {}))


def launches(kernel, call, tile, arch):
    """Every launch of one call, by name."""
    p, spec = Problem.of(call), kernels.load(kernel)
    plan = Plan(spec, p, ARCHITECTURES[arch], tile, "test")
    x = Operands(call.q, call.k, call.v, call.sinks, aux_values(call), seed=call.dropout_seed)
    out = torch.empty((p.batch, p.seqlen_q, p.heads_q, p.dim_v), dtype=p.out_dtype, device="meta")
    lse = torch.empty((p.batch, p.heads_q, p.seqlen_q), device="meta")
    if kernel.endswith("_forward"):
        steps = spec.launches(plan, x, out, lse)
    else:
        saved = Saved(out, lse, torch.empty_like(out), None)
        steps = spec.launches(plan, x, saved, spec.workspace(p, x, saved))
    return {step.name: step for step in steps}


def compiled(step, arch):
    return compile_for(step.kernel, step.arguments, step.tile, arch)


def spilled(found):
    """Bytes a thread keeps in local memory."""
    return found.spill_bytes if found.count("STL") or found.count("LDL") else 0


def held_rows(step):
    """Rows of the accumulators: of queries, or of keys for dk and dv."""
    return step.tile.block_n if step.name == "dkdv" else step.tile.block_m


def estimate(kernel, call, step):
    """What the model says of a launch's shared memory."""
    p, t = Problem.of(call), step.tile
    sizes = (t.block_n, t.block_m) if step.name == "dq" else (t.block_m, t.block_n)
    warps = (t.warps,) if kernel.endswith("_forward") else ()
    return kernels.load(kernel).smem_bytes(p, *sizes, t.stages, *warps)


def row_id(row):
    length = f"-{row['keys']}" if "keys" in row else ""
    return f"{row['kernel'].removeprefix('triton_')}-{row['bits']}-{row['dim']}-{row['mask']}{length}"


def marked(row):
    others = pytest.mark.thorough if row["dim"] in OFTEN[row["bits"]] else pytest.mark.slow
    some = row["dim"] in SOME[row["bits"]] and "keys" not in row
    some &= row["kernel"].endswith("_forward") or row["mask"] == "band"
    return pytest.param(row, id=row_id(row), marks=() if some else others)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_row_is_legal_and_found(row):
    """A tile the kernel allows, and the one that planning takes."""
    call = call_of(row["dim"], row["mask"], DTYPES[row["bits"]], row["dim_v"], row.get("keys", 4 * LENGTH))
    p, spec = Problem.of(call), kernels.load(row["kernel"])
    tile = Tile.of(row["tile"])
    assert tile in set(spec.tiles(p, ARCHITECTURES[90])) or spec.fits(p, ARCHITECTURES[90], tile)
    found, source = table.lookup(spec, p, ARCHITECTURES[90])
    assert found == tile
    assert source.startswith("from sm90.jsonl:")


TRITON_ROWS = [row for row in ROWS if row["kernel"].startswith(("triton", "fp32"))]
TENSOR_CORES = [row for row in TRITON_ROWS if row["bits"] == 16 or row["kernel"].startswith("fp32")]


@pytest.mark.parametrize("row", [marked(row) for row in TENSOR_CORES])
def test_row_compiles(row):
    """Without spills, with wgmma for every product, within the shared memory that the model foresees."""
    call = call_of(row["dim"], row["mask"], DTYPES[row["bits"]], row["dim_v"])
    steps = launches(row["kernel"], call, Tile.of(row["tile"]), 90)
    total = 0
    for name in HOT:
        if name not in steps:
            continue
        step = steps[name]
        found = compiled(step, 90)
        total += spilled(found)
        assert found.shared_bytes <= estimate(row["kernel"], call, step), name
        assert found.shared_bytes <= ARCHITECTURES[90].smem_bytes, name
        if held_rows(step) >= 64:
            assert found.count("HGMMA") > found.count("WARPGROUP.DEPBAR"), name  # as many where they are serialised
            assert not found.count("HMMA"), name
    if triton.__version__ == MEASURED_WITH:
        assert total == 4 * row["spills"]  # the row counts words
    assert total <= 4 * row["spills"] + ELSEWHERE_BYTES


BANDS = [(arch, d, "band", f"triton_{way}") for arch in (80, 100) for d in (64, 128) for way in ("forward", "backward")]
FULL = [pytest.param(arch, dim, "full", kernel, marks=pytest.mark.slow) for arch, dim, _, kernel in BANDS]
# Little shared memory; head dims that come in several products, and pairs: more sums than tensor memory takes
OTHERS = [
    (86, 512, "full", "triton_backward"), (86, 64, "full", "fp32_backward"),
    (100, 104, "band", "triton_backward"), (100, 240, "full", "triton_forward"), (100, 256, "band", "triton_backward"),
    (100, 64, "full", "fp32_forward"), (100, 64, "band", "fp32_backward"),
]  # fmt: skip
OFTEN_ELSEWHERE = [case for case in BANDS if case[:2] in ((80, 64), (100, 128))] + OTHERS
ELSEWHERE = FULL + sample(
    BANDS + OTHERS, lambda case: case[1] == 64 and case[3] in ("fp32_forward", "triton_forward"), OFTEN_ELSEWHERE
)


@pytest.mark.parametrize(("arch", "dim", "mask", "kernel"), ELSEWHERE)
def test_first_tile_of_other_architectures(arch, dim, mask, kernel):
    """What a GPU without a tuning table runs: tensor cores, within its shared memory and its tensor memory."""
    dtype = torch.float32 if kernel.startswith("fp32") else torch.bfloat16
    call, device = call_of(dim, mask, dtype), ARCHITECTURES[arch]
    assert not kernels.load(kernel).why_not(Problem.of(call), device)
    tile = next(iter(kernels.load(kernel).tiles(Problem.of(call), device)))
    for name, step in launches(kernel, call, tile, arch).items():
        found = compiled(step, arch)
        assert found.shared_bytes <= device.smem_bytes, name
        assert found.tensor_columns <= launch.TENSOR_COLUMNS, name
        if name in HOT:
            assert found.count("HMMA") or (arch == 100 and found.count("UTCHMMA")), name
            assert spilled(found) <= FIRST_TILE_BYTES.get((arch, name, dim, mask), 0), name
            if arch == 80:
                assert found.shared_bytes <= estimate(kernel, call, step), name


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


MODS = {
    "softcap": lambda: {"softcap": 30.0},
    "alibi": lambda: {"alibi_slopes": meta(HEADS)},
    "bias": lambda: {"bias": meta(BATCH, HEADS, LENGTH, LENGTH).requires_grad_()},
    "mask": lambda: {"mask": meta(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)},
    "document": lambda: {"mask": mods.document(meta(BATCH, LENGTH, dtype=torch.int32))},
    "prefix": lambda: {"mask": mods.prefix(1000) | mods.causal()},
    "sinks": lambda: {"sinks": meta(HEADS), "mask": mods.causal()},
}


SOME_MODS = [("bias", "triton_backward"), ("softcap", "triton_forward")]


@pytest.mark.parametrize(
    ("name", "kernel"), grid(MODS, ["triton_forward", "triton_backward"], kept=SOME_MODS.__contains__)
)
def test_float32_with_mods(name, kernel):
    """Every mod compiles in float32, on the tile that planning takes; the products are not in tf32 unasked."""
    call = call_of(64, dtype=torch.float32, **MODS[name]())
    tile, _ = table.lookup(kernels.load(kernel), Problem.of(call), ARCHITECTURES[90])
    steps = launches(kernel, call, tile, 90)
    assert ("dbias" in steps) == (name == "bias" and kernel == "triton_backward")
    for launch_name in (*HOT, "dbias"):
        if launch_name in steps:
            found = compiled(steps[launch_name], 90)
            assert found.shared_bytes <= ARCHITECTURES[90].smem_bytes, launch_name
            assert found.count("FFMA"), launch_name
            assert not found.count("HMMA"), launch_name
            assert not found.count("HGMMA"), launch_name


@pytest.mark.parametrize(
    ("name", "kernel", "arch"),
    grid(
        ["bias", "sinks"], ["fp32_forward", "fp32_backward"], [90, 80], kept=[("bias", "fp32_forward", 90)].__contains__
    ),
)
def test_pairs_with_mods(name, kernel, arch):
    """float32 in pairs is on tensor cores, and so is the second computation, by triples of bfloat16."""
    call = call_of(64, dtype=torch.float32, **MODS[name]())
    tile, _ = table.lookup(kernels.load(kernel), Problem.of(call), ARCHITECTURES[arch])
    steps = launches(kernel, call, tile, arch)
    assert any(step.startswith("split ") for step in steps)
    for launch_name in HOT:
        if launch_name in steps:
            first, again = (compiled(steps[n], arch) for n in (launch_name, f"{launch_name} exact"))
            assert ".BF16" not in first.sass, launch_name
            assert ".BF16" in again.sass, launch_name
            for found in (first, again):
                assert found.count("HGMMA" if arch == 90 else "HMMA"), launch_name
                assert found.shared_bytes <= ARCHITECTURES[arch].smem_bytes, launch_name


@pytest.mark.parametrize("kind", sample(["bias", "bias by head", "bool"], lambda kind: kind == "bias"))
def test_tensors_are_read_in_wide_loads(kind):
    """What mods read for every pair comes 16 bytes at a time, within the shared memory that the model foresees."""
    options = {
        "bias": {"bias": meta(LENGTH, LENGTH, dtype=torch.bfloat16)},
        "bias by head": {"bias": meta(1, HEADS, LENGTH, LENGTH, dtype=torch.bfloat16)},
        "bool": {"mask": meta(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)},
    }
    call = call_of(128, **options[kind])
    for kernel in ("triton_forward", "triton_backward"):
        tile, _ = table.lookup(kernels.load(kernel), Problem.of(call), ARCHITECTURES[90])
        for name, step in launches(kernel, call, tile, 90).items():
            if name in HOT:
                found = compiled(step, 90)
                assert not re.findall(r"ld\.global\S*\.[bu](?:8|16)\b", found.ptx), name
                assert found.shared_bytes <= estimate(kernel, call, step), name


def relative(requires_grad=False):
    table = meta(HEADS, 2 * LENGTH - 1).requires_grad_(requires_grad)
    return mods.Score(lambda s, b, h, q, kv: s + table[h, q - kv + LENGTH - 1])


@pytest.mark.parametrize("arch", sample([80, 90], lambda arch: arch == 90))
def test_gathers_and_their_gradients(arch):
    """A table is read where it lies, and its gradient added up by atomics; the products stay on tensor cores."""
    for kernel in ("triton_forward", "triton_backward"):
        call = call_of(64, causal=True, score=relative(requires_grad=True))
        tile, _ = table.lookup(kernels.load(kernel), Problem.of(call), ARCHITECTURES[arch])
        steps = launches(kernel, call, tile, arch)
        added = [name for name in steps if name.startswith("dtable")]
        assert len(added) == (kernel == "triton_backward")
        for name in (*HOT, *added):
            if name in steps:
                found = compiled(steps[name], arch)
                assert found.count("HGMMA" if arch == 90 else "HMMA"), name
                assert found.shared_bytes <= ARCHITECTURES[arch].smem_bytes, name
                assert bool(re.search(r"(?:red|atom)\S*\.global\S*\.add\.f32", found.ptx)) == (name in added), name


def test_tf32_is_on_tensor_cores():
    call = call_of(64, dtype=torch.float32, precision="tf32")
    tile, _ = table.lookup(kernels.load("triton_forward"), Problem.of(call), ARCHITECTURES[90])
    found = compiled(launches("triton_forward", call, tile, 90)["forward"], 90)
    assert found.count("HMMA") + found.count("HGMMA")


def test_first_tile_fits_where_values_are_widened():
    call, device = call_of(256, dim_v=176), ARCHITECTURES[90]
    tile = next(iter(kernels.load("triton_forward").tiles(Problem.of(call), device)))
    found = compiled(launches("triton_forward", call, tile, 90)["forward"], 90)
    assert found.shared_bytes <= device.smem_bytes


WIDEST = [(344, 344), (352, 352), (64, 504), (64, 512), (256, 512), (512, 112), (512, 128), (384, 320)]
GRID = [*WIDEST, (16, 512), (512, 16), (24, 300), (272, 272), (288, 64), (128, 384), (320, 320), (448, 448), (512, 512)]


def check_fits(kernel, call, arch):
    """Every launch takes at most the shared memory that a block has."""
    device = ARCHITECTURES[arch]
    tile, _ = table.lookup(kernels.load(kernel), Problem.of(call), device)
    for name, step in launches(kernel, call, tile, arch).items():
        assert compiled(step, arch).shared_bytes <= device.smem_bytes, name


@pytest.mark.parametrize(("dim", "dim_v"), sample(WIDEST, [(344, 344), (64, 512), (512, 128)].__contains__))
def test_wide_heads_fit_shared_memory(dim, dim_v):
    """With keys that fill no tile, for which weights change hands in shared memory."""
    check_fits("triton_forward", call_of(dim, dim_v=dim_v, length=1000), 90)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 90, 100])
@pytest.mark.parametrize("kernel", ["triton_forward", "triton_backward", "fp32_forward", "fp32_backward"])
@pytest.mark.parametrize("kind", ["full", "band", "score"])
@pytest.mark.parametrize("length", [1000, 4096])
def test_all_head_dims_fit_shared_memory(kernel, arch, kind, length):
    narrow = torch.float16 if kind == "band" else torch.bfloat16
    dtype = torch.float32 if kernel.startswith("fp32") else narrow
    for dim, dim_v in GRID:
        call = call_of(dim, kind, dtype, dim_v, length)
        if not kernels.load(kernel).why_not(Problem.of(call), ARCHITECTURES[arch]):
            check_fits(kernel, call, arch)


class NoDevice:
    """What Triton asks of its driver before a launch."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def test_kernels_of_a_call_are_compiled_side_by_side(monkeypatch):
    """And found by the launches that follow."""
    asked = []
    steps = launches("triton_forward", call_of(16, "band"), Tile(64, 32, 4, 2), 90).values()
    for step in steps:
        monkeypatch.setattr(step.kernel, "device_caches", defaultdict(step.kernel.create_binder))
    compile_one = triton.compiler.compile
    monkeypatch.setattr(triton.compiler, "compile", lambda *a, **k: asked.append(get_ident()) or compile_one(*a, **k))
    monkeypatch.setattr(driver, "_active", NoDevice())
    launch.compile_together(list(steps))
    assert len(asked) == len(steps) == 2
    assert get_ident() not in asked
    for step in steps:
        options = launch.compile_options(step.tile)
        assert step.kernel.warmup(*step.arguments.values(), grid=(1,), **options).asm["cubin"]
    assert len(asked) == 2


def test_what_does_not_compile_leaves_later_calls_alone(monkeypatch):
    """The mode in which Triton compiles side by side ends all the same; the error is told by the launch."""
    steps = list(launches("triton_forward", call_of(16, "band"), Tile(64, 32, 4, 2), 90).values())
    compile_one = triton.compiler.compile

    def fails(*args, **kwargs):
        raise ValueError("does not compile")

    for make in (fails, compile_one):
        for step in steps:
            monkeypatch.setattr(step.kernel, "device_caches", defaultdict(step.kernel.create_binder))
        monkeypatch.setattr(triton.compiler, "compile", make)
        monkeypatch.setattr(driver, "_active", NoDevice())
        launch.compile_together(steps)


TABLES = {
    "lengths": lambda table: mods.prefix(table(BATCH)),
    "lengths of heads": lambda table: mods.Mask(lambda b, h, q, kv, aux: kv < aux[0], (table(HEADS, 1, 1),)),
    "starts": lambda table: mods.Mask(lambda b, h, q, kv, aux: kv >= aux[0], (table(BATCH, 1, 1, 1),)),
}


KERNELS = ["triton_forward", "triton_backward", "fp32_forward", "fp32_backward"]
IN_TURN = [*zip((*TABLES, "lengths"), KERNELS, strict=True)]


@pytest.mark.parametrize(("name", "kernel"), sample(product(TABLES, KERNELS), IN_TURN.__contains__))
def test_loops_whose_ends_a_table_tells(name, kernel):
    """Of 64 bits, and so is what a loop computes from where it starts."""
    mask = TABLES[name](lambda *shape: torch.empty(shape, dtype=torch.int64, device="meta"))
    call = call_of(64, dtype=torch.float32 if kernel.startswith("fp32") else torch.bfloat16, mask=mask)
    tile, _ = table.lookup(kernels.load(kernel), Problem.of(call), ARCHITECTURES[90])
    for step in launches(kernel, call, tile, 90).values():
        trace(source_of(step.kernel, step.arguments), step.tile, 90)


@pytest.mark.parametrize(
    ("numbers", "kernel"),
    sample(product([1, 5, 7], KERNELS), [*zip((1, 5, 7, 1), KERNELS, strict=True)].__contains__),
)
def test_dropout(numbers, kernel):
    """By seeds of whole problems, of parts, and of positions in steps: Triton reads them all."""
    seed = torch.empty(numbers, dtype=torch.int64, device="meta")
    dtype = torch.float32 if kernel.startswith("fp32") else torch.bfloat16
    call = call_of(64, "band", dtype, dropout_p=0.1, dropout_seed=seed)
    tile, _ = table.lookup(kernels.load(kernel), Problem.of(call), ARCHITECTURES[90])
    for step in launches(kernel, call, tile, 90).values():
        trace(source_of(step.kernel, step.arguments), step.tile, 90)
