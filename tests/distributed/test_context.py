"""Context parallel attention against one process: values and gradients of every method, sharding and feature."""

from __future__ import annotations

import cases
import pytest
import torch
from cases import Case

import sartor.distributed as context
from sartor.distributed.sharding import KINDS
from sartor.testing import check_all, reference, reference_gradients

FEATURES = [
    "full", "causal", "top_left", "window", "sliding", "far", "documents", "causal_documents", "packed", "prefix",
    "per_item", "function", "table", "mask_tensor", "mask_keys", "score", "score_tensor", "indexed", "alibi", "softcap",
    "bias", "bias_broadcast", "bias_rows", "sinks", "dropout", "dropout_full", "everything",
]  # fmt: skip
OF_ROWS = {"mask_tensor", "bias", "bias_rows", "everything"}  # tables of queries, which Ulysses refuses


def joined(case, answers):
    """Results of the whole sequence from those of the ranks."""
    _, (queries, keys) = cases.shardings(case)
    dims = {"out": (queries, 1), "lse": (queries, 2), "dq": (queries, 1), "dk": (keys, 1), "dv": (keys, 1)}
    found = {n: context.unshard([a[n] for a in answers], s, dim) for n, (s, dim) in dims.items() if n in answers[0]}
    if "dsinks" in answers[0]:
        found["dsinks"] = sum(a["dsinks"] for a in answers)
    if "dbias" in answers[0]:
        bias = cases.options(case)["bias"]
        rows = bias.dim() > 1 and bias.shape[-2] != 1
        parts = [a["dbias"] for a in answers]
        found["dbias"] = context.unshard(parts, queries, -2) if rows else sum(parts)
    return found


def check(world, case):
    """The results of the ranks are those of one process."""
    ranks = case.mesh[0] * case.mesh[1] if case.mesh else case.ranks
    found = {n: t.to(case.device) for n, t in joined(case, world.run(ranks, cases.run, case)).items()}
    data, given = cases.inputs(case), cases.options(case)
    q, k, v, dout = (data[n] for n in ("q", "k", "v", "dout"))
    _, lse = reference(q, k, v, **given)
    dlse = torch.where(lse == -torch.inf, 0, data["dlse"]) if case.through_lse else None
    if case.dtype != "float64":
        check_all(found, q, k, v, dout, dlse, **given)
        return
    exact = dict(zip(("out", "lse"), reference(q, k, v, **given), strict=True))
    exact |= reference_gradients(q, k, v, dout, dlse, **given)
    assert set(exact) == set(found)
    for name, t in exact.items():
        torch.testing.assert_close(found[name], t, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_ring(world, feature, kind):
    check(world, Case(feature, "ring", kind, ranks=3 if kind == "striped" else 4))


@pytest.mark.parametrize("feature", FEATURES)
def test_allgather(world, feature):
    check(world, Case(feature, "allgather", "zigzag", ranks=3))


@pytest.mark.parametrize("feature", [f for f in FEATURES if f not in OF_ROWS])
def test_ulysses(world, feature):
    check(world, Case(feature, "ulysses", "zigzag", ranks=2))


SHAPES = [
    Case("causal", "ring", "zigzag", ranks=4, seqlen_q=37),  # padded shards
    Case("causal_documents", "ring", "contiguous", ranks=4, seqlen_q=41, pad=False),
    Case("window", "ring", "striped", ranks=3, seqlen_q=5, pad=False),
    Case("causal", "ring", "contiguous", ranks=4, seqlen_q=2),  # ranks with nothing but padding
    Case("causal", "ring", "zigzag", ranks=3, seqlen_q=20, seqlen_kv=45),
    Case("score", "ring", "striped", ranks=3, seqlen_q=43, seqlen_kv=21),
    Case("bias", "ring", "contiguous", ranks=2, seqlen_q=9, seqlen_kv=30, pad=False),
    Case("causal", "allgather", "striped", ranks=4, seqlen_q=37, pad=False),
    Case("sinks", "allgather", "zigzag", ranks=3, seqlen_q=37),
    Case("causal", "ulysses", "zigzag", ranks=4, seqlen_q=37),
    Case("causal", "ulysses", "striped", ranks=4, seqlen_q=37, pad=False, heads="mqa"),
    Case("score", "ulysses", "contiguous", ranks=2, heads="odd"),
    Case("everything", "ring", "zigzag", ranks=4, heads="odd", dim=5, dim_v=11),
    Case("alibi", "ulysses", "contiguous", ranks=4, heads="odd", dim=5, dim_v=11),
    Case("sinks", "ulysses", "contiguous", ranks=3, heads="odd"),
    Case("bias_broadcast", "ulysses", "zigzag", ranks=4, heads="odd"),
    Case("causal", "ring", "zigzag", ranks=4, layout="bhsd"),
    Case("sliding", "ulysses", "zigzag", ranks=2, layout="bhsd"),
    Case("causal", "ring", "zigzag", ranks=4, kernel="blocked", through_lse=False),
    Case("causal", "auto", "zigzag", ranks=4),
    Case("causal", "auto", "zigzag", ranks=2, batch=0),
    *(Case("causal", "ring", kind, ranks=2, seqlen_q=0) for kind in KINDS),
    Case("causal", "ulysses", "zigzag", ranks=2, seqlen_q=0),
    Case("bias", "auto", "striped", ranks=4, heads="many", seqlen_q=2, seqlen_kv=50, pad=False),  # one row, or none
    Case("causal", "ring", "zigzag", ranks=1),
    Case("score", "usp", "zigzag", mesh=(2, 2)),
    Case("causal_documents", "usp", "contiguous", mesh=(2, 2), seqlen_q=37),
    Case("sinks", "usp", "striped", mesh=(2, 2), seqlen_q=37),
    Case("function", "usp", "zigzag", mesh=(1, 4), heads="mqa"),
    Case("causal", "auto", "zigzag", mesh=(2, 2), heads="odd"),
    Case("causal_documents", "ring", "balanced", ranks=4, seqlen_q=96, chunk=8),
    Case("packed", "ring", "balanced", ranks=3, seqlen_q=50, chunk=4, batch=1),
    Case("window", "ring", "contiguous", ranks=4, seqlen_q=1200, batch=1, heads="mha"),  # parts of shards are sent
    Case("packed", "ring", "zigzag", ranks=4, seqlen_q=1200, batch=1, heads="mha"),
    Case("dropout", "ring", "zigzag", ranks=4, seqlen_q=128),  # which begin on sixteens
    Case("dropout", "usp", "zigzag", mesh=(2, 2), seqlen_q=128),
    Case("dropout_full", "usp", "striped", mesh=(2, 2), seqlen_q=37),
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(world, case):
    check(world, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(method="ring", kind="zigzag", ranks=3, seqlen_q=20),
        Case(method="ring", kind="striped", ranks=4, seqlen_q=21, seqlen_kv=30),
        Case(method="allgather", kind="zigzag", ranks=4, seqlen_q=20),
        Case(method="ulysses", kind="contiguous", ranks=2, seqlen_q=21),
        Case(method="usp", kind="zigzag", mesh=(2, 2), seqlen_q=24),
    ],
    ids=str,
)
def test_gradients_of_what_scores_read(world, case):
    ranks = case.mesh[0] * case.mesh[1] if case.mesh else case.ranks
    answers = world.run(ranks, cases.learned, case)
    for i in range(2):
        found, exact = sum(a[i] for a in answers), answers[0][2 + i]
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [
        Case("causal", "ring", "zigzag", ranks=4, dtype="float32", dim=32, dim_v=32, seqlen_q=96),
        Case("everything", "ring", "contiguous", ranks=3, dtype="float32", dim=16, dim_v=16, seqlen_q=96),
        Case("causal", "ulysses", "zigzag", ranks=2, dtype="float32", dim=32, dim_v=32, seqlen_q=96),
        Case("window", "allgather", "striped", ranks=4, dtype="float32", dim=32, dim_v=32, seqlen_q=96),
        Case("causal", "ring", "zigzag", ranks=4, dtype="bfloat16", dim=32, dim_v=32, seqlen_q=96),
        Case("sinks", "usp", "zigzag", mesh=(2, 2), dtype="bfloat16", dim=32, dim_v=32, seqlen_q=96),
    ],
    ids=str,
)
def test_budgets(world, case):
    check(world, case)
