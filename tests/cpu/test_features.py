"""What a kernel does not name it refuses: no field of a problem is without a rule, no feature is served by default."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

import sartor
from sartor import features, kernels, mods, plan
from sartor.device import ARCHITECTURES, CPU
from sartor.mods.program import Program
from sartor.problem import Call, Problem

NAMES = (*kernels.FORWARD, *kernels.BACKWARD)
KNOWN = {value for name, value in vars(features).items() if name.isupper() and isinstance(value, str)}


def problem(dtype=torch.bfloat16, heads=4, dim_v=64, **options):
    shapes = (2, 96, 4, 64), (2, 96, heads, 64), (2, 96, heads, dim_v)
    return Problem.of(Call(*(torch.empty(s, dtype=dtype, device="meta") for s in shapes), **options))


def meta(*shape, dtype=torch.float32, **options):
    return torch.empty(*shape, dtype=dtype, device="meta", **options)


ASKS = {  # by feature, a problem that asks for it beside its dtype, and for nothing else
    features.WIDE_OUT: {"out_dtype": torch.float32},
    features.GQA: {"heads": 2},
    features.DIM_V: {"dim_v": 32},
    features.SINKS: {"sinks": meta(4)},
    features.INTERVAL: {"causal": True},
    features.PAIRS: {"mask": mods.Mask(lambda b, h, q, kv, aux: (q + kv) % 3 > 0)},
    features.SCORE: {"softcap": 20.0},
    features.DETERMINISTIC: {"deterministic": True},
    features.DROPOUT: {"dropout_p": 0.1},
}


def test_every_field_of_a_problem_has_a_rule_or_is_named_as_none():
    """A new field is refused by every kernel until somebody says what it asks for."""
    of_problem = {f.name for f in fields(Problem)} - {"program"}
    of_program = {f"program.{f.name}" for f in fields(Program)}
    groups = [set(features.RULES), set(features.NUMBERS), set(features.DERIVED), set(features.PLANNING)]
    assert set().union(*groups) == of_problem | of_program
    assert sum(map(len, groups)) == len(of_problem | of_program)  # each in one of them


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_names_features_that_there_are(name):
    assert kernels.load(name).features <= KNOWN


def test_sets_that_kernels_share_do_not_grow():
    """A feature added there would be served by all of them, whoever has looked at them or not."""
    masks = {"interval mask", "pairwise mask", "tables", "indexed tables", "unaligned tables"}
    assert masks == features.MASKS
    assert masks - {"pairwise mask"} | {"gqa", "sinks", "deterministic"} == features.COMMON
    assert features.COMMON | {"pairwise mask", "score function", "dim_v", "unaligned rows"} == features.GENERAL
    assert {"float16", "bfloat16", "float32", "float64", "tf32", "wide out"} == features.BITS_16 | features.DTYPES
    assert {"bias gradient", "table gradient"} == features.GRADIENTS


@pytest.mark.parametrize("device", [CPU, ARCHITECTURES[90], ARCHITECTURES[80]], ids=lambda d: d.name)
def test_a_feature_that_no_kernel_names_is_refused_by_all(device, monkeypatch):
    monkeypatch.setitem(features.RULES, "seqlen_q", lambda p: "time travel")
    for dtype in (torch.bfloat16, torch.float32):
        found = plan.explain(problem(dtype, softmax_scale=0.123), device)  # of no other test: what is known is kept
        assert found.plan is None
        assert set(found.refused) == set(kernels.FORWARD)
        assert all(why == ["does not serve time travel"] or "needs" in why[0] for why in found.refused.values())
    q = torch.randn(1, 5, 2, 8)
    with pytest.raises(sartor.Unsupported, match="does not serve time travel"):
        sartor.attention(q, q, q, softmax_scale=0.123)


@pytest.mark.parametrize("feature", ASKS)
def test_a_problem_asks_for_what_it_has(feature):
    assert features.of(problem()) == {"bfloat16"}
    assert features.of(problem(**ASKS[feature])) == {"bfloat16", feature}


def test_a_problem_asks_for_what_its_tensors_have():
    assert features.of(problem(torch.float32, precision="tf32")) == {"float32", "tf32"}
    bias = meta(96, 96, requires_grad=True)
    assert features.of(problem(bias=bias)) == {"bfloat16", "score function", "tables", "bias gradient"}
    table = meta(191, requires_grad=True)
    relative = mods.Score(lambda s, b, h, q, kv: s + table[q - kv + 95])
    assert features.of(problem(score=relative)) == {"bfloat16", "score function", "indexed tables", "table gradient"}
    for numbers, asked in ((1, set()), (5, {"dropout of a part"}), (7, {"dropout in steps"})):
        seed = torch.empty(numbers, dtype=torch.int64, device="meta")
        assert features.of(problem(dropout_p=0.1, dropout_seed=seed)) == {"bfloat16", "dropout"} | asked
    q = meta(2, 96, 4, 68, dtype=torch.bfloat16)[..., :66]
    assert features.UNALIGNED in features.of(Problem.of(Call(q, q, q)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("feature", ASKS)
def test_a_kernel_without_a_feature_says_so(name, feature, monkeypatch):
    """In a sentence of its own, with what came."""
    spec, p = kernels.load(name), problem(**ASKS[feature])
    (sentence,) = features.missing(p, frozenset(features.of(p) - {feature}))
    assert sentence.startswith(("needs", "has no"))
    assert bool(features.missing(p, spec.features)) == (not features.of(p) <= spec.features)
