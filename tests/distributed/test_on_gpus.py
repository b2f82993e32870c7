"""Context parallel attention on CUDA tensors: over NCCL where each rank has a GPU, else over gloo with all on one."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from test_context import FEATURES, check

import judged
from sartor.distributed.sharding import KINDS

pytestmark = pytest.mark.gpu
# float64 goes to a kernel that compiles nothing: what is tested is which tensors go where, and in what order
FEW = ("causal_documents", "packed", "indexed", "alibi", "sinks", "bias_broadcast")
CASES = {
    "ring": [Case(f, "ring", KINDS[i % 3], ranks=3 + i % 2) for i, f in enumerate(FEATURES)],
    "allgather": [Case(f, "allgather", KINDS[i % 3], ranks=3) for i, f in enumerate((*FEW, "bias_rows"))],
    "ulysses": [Case(f, "ulysses", "zigzag", ranks=2) for f in FEW],
    "usp": [Case(f, "usp", "zigzag", mesh=(2, 2)) for f in FEW],
    "shapes": [
        Case("causal", "ring", "zigzag", ranks=4, seqlen_q=37),
        Case("window", "ring", "striped", ranks=3, seqlen_q=5, pad=False),
        Case("bias", "ring", "contiguous", ranks=2, seqlen_q=9, seqlen_kv=30, pad=False),
        Case("causal", "ulysses", "striped", ranks=4, seqlen_q=37, pad=False, heads="mqa"),
        Case("window", "ring", "contiguous", ranks=4, seqlen_q=1200, batch=1, heads="mha"),
        Case("causal_documents", "ring", "balanced", ranks=4, seqlen_q=96, chunk=8),
    ],
}  # fmt: skip


def _case(feature, method, kind="zigzag", **given):
    return Case(feature, method, kind, **{"dtype": "bfloat16", "dim": 64, "dim_v": 64, "seqlen_q": 700, **given})


BUDGETS = {
    "ring": [_case("causal", "ring", ranks=4), _case("window", "ring", "striped", ranks=3)],
    "features": [_case("sinks", "ring", "contiguous", ranks=4), _case("causal_documents", "ring", ranks=3)],
    "scores": [_case("score", "ring", "striped", ranks=2), _case("softcap", "allgather", ranks=4)],
    "heads": [_case("causal", "ulysses", ranks=4), _case("causal", "usp", mesh=(2, 2), dim=80, dim_v=80)],
    "allgather": [_case("causal", "allgather", ranks=4, dim=128, dim_v=128), _case("bias_broadcast", "ring", ranks=2)],
    "float32": [_case("causal", "ring", ranks=4, dtype="float32"), _case("alibi", "ring", ranks=2, dtype="float32")],
}


def check_all(world, found):
    """Each of some cases; a failure names its case."""
    for case in found:
        on_gpu = Case(**{**case.__dict__, "device": "cuda"})
        try:
            check(world, on_gpu)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def of_their_dtype(name):
    """Some cases of a dtype, and the kernels that may run it."""
    (dtype,) = {getattr(torch, case.dtype) for case in BUDGETS[name]}
    return pytest.param(BUDGETS[name], marks=pytest.mark.judges(*judged.by(dtype, dim=128)), id=name)


@pytest.mark.judges
@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_float64(gpu_world, cases):
    check_all(gpu_world, cases)


@pytest.mark.parametrize("cases", [of_their_dtype(name) for name in BUDGETS])
def test_budgets(gpu_world, cases):
    check_all(gpu_world, cases)
