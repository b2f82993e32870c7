"""Problems that nobody chose, and eight ranks."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from cases import HEADS, Case
from hypothesis import HealthCheck, given, settings
from test_context import FEATURES, OF_ROWS, check

SQUARE = {"documents", "causal_documents", "packed", "everything"}


@st.composite
def problems(draw, most):
    feature = draw(st.sampled_from(FEATURES))
    method = draw(
        st.sampled_from(("ring", "allgather", "ulysses") if feature not in OF_ROWS else ("ring", "allgather"))
    )
    heads = draw(st.sampled_from(sorted(HEADS)))
    fits = [n for n in range(1, most + 1) if method != "ulysses" or HEADS[heads][0] % n == 0]
    sq = draw(st.integers(10, 90))
    return Case(
        feature, method, draw(st.sampled_from(("contiguous", "zigzag", "striped"))), draw(st.sampled_from(fits)),
        seqlen_q=sq, seqlen_kv=None if feature in SQUARE else draw(st.one_of(st.none(), st.integers(1, 90))),
        heads=heads, dim=draw(st.integers(1, 20)), dim_v=draw(st.integers(1, 20)), pad=draw(st.booleans()),
        layout=draw(st.sampled_from(("bshd", "bhsd"))), through_lse=draw(st.booleans()), seed=draw(st.integers(0, 99)),
        dtype=draw(st.sampled_from(("float64", "float64", "float32"))),
    )  # fmt: skip


SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@settings(max_examples=15, **SETTINGS)
@given(case=problems(4))
def test_any_problem(world, case):
    check(world, case)


def test_eight_ranks_in_short(large_world):
    """Each method and kind of shard; one test, so that the ranks are started once."""
    for case in (
        Case("causal", "ring", "zigzag", 8, seqlen_q=75),
        Case("window", "ring", "striped", 8, seqlen_q=75, pad=False),
        Case("causal_documents", "ring", "balanced", 8, seqlen_q=96, chunk=4),
        Case("everything", "allgather", "contiguous", 8, seqlen_q=75),
        Case("alibi", "ulysses", "zigzag", 8, seqlen_q=75, heads="many"),
        Case("sinks", "usp", "zigzag", mesh=(2, 4), seqlen_q=75),
        Case("causal", "usp", "contiguous", mesh=(4, 2), seqlen_q=75, heads="mqa"),
    ):
        check(large_world, case)


@pytest.mark.slow
@settings(max_examples=150, **SETTINGS)
@given(case=problems(8))
def test_any_problem_on_eight_ranks(large_world, case):
    check(large_world, case)


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_eight_ranks(large_world, feature):
    for kind, pad in (("zigzag", True), ("striped", False)):
        check(large_world, Case(feature, "ring", kind, 8, pad=pad, seqlen_q=75))
    if feature not in OF_ROWS:
        case = Case(feature, "usp", "zigzag", mesh=(2, 4), seqlen_q=75)
        for mesh in ((2, 4), (4, 2)):
            check(large_world, replace(case, mesh=mesh))
