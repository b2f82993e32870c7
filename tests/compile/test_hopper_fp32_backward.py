"""The Hopper backward of float32 as NVRTC compiles it here: three products, none serialised, hardly a spill."""

from __future__ import annotations

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

from sartor.kernels.hopper.fp32_backward import REPAIR_TILE, Config

DEVICE = ARCHITECTURES[90]
SPEC = kernels.load("hopper_fp32_backward")
MOST_SPILLS = 128  # bytes a thread, stores and loads: a dozen registers, of 232


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def problem(dim=128, dim_v=None, heads=(4, 4), lengths=(1000, 1000), **options):
    shapes = ((2, lengths[0], heads[0], dim), (2, lengths[1], heads[1], dim), (2, lengths[1], heads[1], dim_v or dim))
    return Problem.of(Call(*(meta(*s) for s in shapes), **options))


DIMS = [(17, 17), (64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (128, 40)]
SOME = [((64, 64), False), ((128, 128), True), ((128, 40), True)]


@pytest.mark.parametrize(
    ("dims", "keys", "causal"),
    grid(DIMS, [False, True], [False, True], kept=lambda case: (case[0], case[2]) in SOME),
    ids=str,
)
def test_kernels(dims, keys, causal):
    config = Config(problem(*dims, causal=causal), keys)
    binary = config.compile()
    (found,) = binary.resources.values()
    assert found.spill_bytes <= (MOST_SPILLS if keys else 0)
    assert "C75" not in binary.log  # what ptxas says of wgmma it has to serialise
    assert config.shared_bytes <= launch.smem_limit(DEVICE)


@pytest.mark.parametrize(
    ("dim", "keys"), sample(product([64, 128], [False, True]), [(64, True), (128, False)].__contains__)
)
def test_documents(dim, keys):
    """A block keeps their intervals in shared memory where there is room."""
    config = Config(problem(dim, mask=mods.document(meta(2, 1000, dtype=torch.int32))), keys)
    binary = config.compile()
    (found,) = binary.resources.values()
    assert found.spill_bytes <= (MOST_SPILLS if keys else 0)
    assert "C75" not in binary.log
    assert config.shared_spans == (dim == 64)


def test_three_products_in_float16():
    """Of 8 steps each for the scores and dp; of 4 steps for each half of the columns of a gradient."""
    try:
        sass = Config(problem(128), True).compile().sass()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert sass.count("HGMMA.64x64x16.F32") == 3 * (2 * 8 + 2 * 2 * 4)
    assert "UTMALDG.5D" in sass
    assert "BF16" not in sass


def test_reasons():
    """Each thing the kernel cannot do is said; the portable kernel does it."""
    for p, words in (
        (problem(136), "17 to 128"),
        (problem(16), "17 to 128"),
        (problem(softcap=2.0), "got softcap"),
        (problem(alibi_slopes=meta(4)), "got alibi"),
        (problem(mask=meta(1000, 1000, dtype=torch.bool)), "table of queries and keys"),
    ):
        assert any(words in why for why in plan.against(SPEC.name, p, DEVICE))
        assert plan.against("fp32_backward", p, DEVICE) == []
    for options in ({}, {"causal": "top_left"}, {"window": (100, 3)}, {"sinks": meta(4)}, {"heads": (6, 2)}):
        assert plan.against(SPEC.name, problem(**options), DEVICE) == []
    assert any("8.0" in why for why in plan.against(SPEC.name, problem(), ARCHITECTURES[80]))


@pytest.mark.parametrize("causal", [False, True])
def test_the_launches_around(causal):
    """Splits come before dq; dk and dv, which need the gains, after dq's marked tiles have been computed again."""
    p = problem(causal=causal)
    q, k = meta(2, 1000, 4, 128), meta(2, 1000, 4, 128)
    x, saved = Operands(q, k, k, aux=(0,) if causal else ()), Saved(q, meta(2, 4, 1000), q, None)
    work = SPEC.workspace(p, x, saved)
    plan = Plan(SPEC, p, DEVICE, REPAIR_TILE, "test")
    names = [[step.name for step in part] for part in SPEC.sections(plan, x, saved, work, SPEC.pairs(x, q))]
    repair = ["exact repair"] if causal else []
    assert names[0] == [*(f"split {name}" for name in ("q", "k", "v", "dout")), "preprocess"]
    assert names[1:] == [[f"{pass_} {end}" for end in ("exact", *repair)] for pass_ in ("dq", "dkdv")]
