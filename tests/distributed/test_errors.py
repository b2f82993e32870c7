"""What is wrong on one rank is an error on all, within a time limit."""

from __future__ import annotations

import os
import time

import cases
import pytest
import torch
import torch.distributed as dist
from cases import Case

import sartor.distributed as context
from sartor import mods
from sartor.distributed import Sharding, agreement


def qkv(n=8, heads=2, dim=8, dtype=torch.float32):
    return tuple(torch.ones(1, n, heads, dim, dtype=dtype) for _ in range(3))


def other_length(groups, method):
    context.attention(*qkv(8 if dist.get_rank() else 10), group=groups[3], method=method)


def other_option(groups, method):
    context.attention(*qkv(), group=groups[3], method=method, causal=dist.get_rank() == 1)


def other_dtype(groups, method):
    context.attention(*qkv(dtype=torch.float64 if dist.get_rank() else torch.float32), group=groups[3], method=method)


def wrong_dims(groups, method):
    q, k, v = qkv()
    context.attention(q, k if dist.get_rank() != 2 else k[..., :4], v, group=groups[3], method=method)


def other_gradient(groups, method):
    q, k, v = qkv()
    context.attention(q.requires_grad_(dist.get_rank() == 0), k, v, group=groups[3], method=method)


def other_documents(groups, method):
    ids = torch.zeros(1, 24, dtype=torch.int32)
    ids[:, 10 + 7 * dist.get_rank() :] = 1
    context.attention(*qkv(), group=groups[3], method=method, mask=mods.document(ids))


@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.parametrize(
    "fn",
    [other_length, other_option, other_dtype, wrong_dims, other_gradient, other_documents],
    ids=lambda f: f.__name__,
)
def test_ranks_that_differ(world, fn, method):
    for error, _ in world.answers(3, fn, method):
        assert error is not None
        assert error[0] in ("Disagreement", "ValueError", "TypeError"), error
    assert any("rank" in error[1] for error, _ in world.answers(3, fn, method))


@pytest.mark.parametrize("fn", [other_length, other_dtype], ids=lambda f: f.__name__)
def test_ranks_that_differ_ulysses(world, fn):
    for error, _ in world.answers(2, ulysses_of_two, fn.__name__):
        assert error is not None
        assert error[0] in ("Disagreement", "ValueError", "TypeError"), error
        assert "(batch 1, heads 2, dim 8)" in error[1]


def ulysses_of_two(groups, name):
    rank = dist.get_rank()
    q, k, v = qkv(8 + 2 * rank) if name == "other_length" else qkv(dtype=(torch.float32, torch.float64)[rank])
    context.attention(q, k, v, group=groups[2], method="ulysses")


WRONG = {
    "layout": "xyz", "window": (1, 2, 3), "causal": "top", "method": "rings", "layout_of_sequence": "stripes",
    "dropout_seed": 0.5, "return_lse": 1, "timeout": -1, "q": torch.ones(8, 2, 8), "k": torch.ones(1, 8, 2, 8).int(),
    "bias": torch.ones(8, 8),
}  # fmt: skip


def wrong_on_one(groups, name, method):
    """What is found before the ranks ask each other, and none of them has agreed on before."""
    given = dict(zip("qkv", qkv(), strict=True), method=method, timeout=10.0, softmax_scale=0.123)
    if dist.get_rank() == 1:
        given[name] = WRONG[name]
    where = {"mesh": cases.mesh_of(Case(mesh=(2, 2)))} if method == "usp" else {"group": groups[3]}
    context.attention(given.pop("q"), given.pop("k"), given.pop("v"), **where, **given)


@pytest.mark.parametrize(
    ("name", "method"),
    [*((name, "ring") for name in WRONG if name != "bias"), ("layout", "auto"), ("layout", "allgather"),
     ("layout", "usp"), ("bias", "usp")],
)  # fmt: skip
def test_what_is_wrong_on_one_rank(world, name, method):
    found = [error for error, _ in world.answers(4 if method == "usp" else 3, wrong_on_one, name, method)]
    own = found.pop(1)
    assert own[0] in ("TypeError", "ValueError"), own
    assert all(kind == "Disagreement" for kind, _, _ in found), found
    assert all(f"{own[0]}: " in words for _, words, _ in found)


def of_other_shapes(groups):
    """Of ranks that share heads, one has more tokens: those that pass keys on to it are told, too."""
    given = {"mesh": cases.mesh_of(Case(mesh=(2, 2))), "method": "usp", "timeout": 10.0}
    context.attention(*qkv(10 if dist.get_rank() == 1 else 8), **given, softmax_scale=0.123)


def test_other_shapes_on_one_rank(world):
    found = [error for error, _ in world.answers(4, of_other_shapes)]
    assert [kind for kind, _, _ in found] == ["Disagreement"] * 4, found


def after_the_first(groups):
    """A rank that changes its shapes when others do not: they have agreed before, so that nobody asks."""
    q, k, v = qkv()
    context.attention(q, k, v, group=groups[2], method="ring")
    n = 8 if dist.get_rank() else 16
    begun = time.monotonic()
    try:
        context.attention(*qkv(n), group=groups[2], method="ring", timeout=3)
    except RuntimeError as error:
        return time.monotonic() - begun, str(error)
    return time.monotonic() - begun, ""


def of_two_groups(groups):
    """Two of three ranks agree on more in a group of their own; what all three agreed on is known to all or none."""
    agreement._MOST_AGREED = 2
    for n, group in ((8, 3), (9, 2), (10, 2), (8, 3)):
        if dist.get_rank() < group:
            context.attention(*qkv(n), group=groups[group], method="ring")


def test_groups_that_overlap(lone_world):
    lone_world(3, timeout=10).run(3, of_two_groups)


def lost(groups):
    q, k, v = qkv(64)
    context.attention(q, k, v, group=groups[3], method="ring")
    if dist.get_rank() == 1:
        os._exit(1)
    context.attention(q, k, v, group=groups[3], method="ring", timeout=3)


def test_time_limit(lone_world):
    made = lone_world(2, timeout=4)
    for error, result in made.answers(2, after_the_first):
        assert error is not None or result[1], (error, result)
        assert result is None or result[0] < 20


def test_a_rank_that_dies(lone_world):
    made = lone_world(3, timeout=4)
    begun = time.monotonic()
    answers = made.answers(3, lost)
    assert time.monotonic() - begun < 60
    assert answers[1][0][0] == "Lost"
    assert answers[0][0] is not None
    assert answers[2][0] is not None


def refused(groups, name):
    q, k, v = qkv()
    table = torch.zeros(8, 16, dtype=torch.bool)
    calls = {
        "method": ({"method": "rings"}, "method must be one of"),
        "kind": ({"layout_of_sequence": "stripes"}, "layout_of_sequence must be one of"),
        "shards": ({"layout_of_sequence": Sharding.make("zigzag", 24, 3)}, "must have 2 shards"),
        "places": ({"layout_of_sequence": Sharding.make("zigzag", 24, 2)}, r"q must be \(batch, 12, heads, dim\)"),
        "both": ({"mesh": object()}, "not be given both"),
        "usp": ({"method": "usp"}, "mesh of 2 dims"),
        "rows": ({"method": "ulysses", "mask": table}, "must not depend on queries"),
        "row": (
            {
                "method": "ulysses",
                "layout_of_sequence": Sharding.make("striped", 2, 2),
                "q": qkv(1)[0],
                "keys": qkv(1)[1:],
                "bias": torch.ones(1, 2),
            },
            "must not depend on queries",
        ),
        "no heads": ({"method": "auto", "keys": qkv(heads=0)[1:]}, "must be a multiple of the heads of k and v"),
        "heads": ({"method": "ulysses", "bias": None, "heads": 3}, "multiple of the 2 ranks"),
        "bias": ({"bias": torch.zeros(8, 8)}, "bias must be broadcastable"),
        "mask": ({"mask": mods.document(torch.zeros(1, 8, dtype=torch.int32))}, "what mask reads"),
        "timeout": ({"timeout": -1}, "timeout must be"),
        "window": ({"window": (1, 2, 3)}, "window must be"),
        "reference": ({"kernel": "reference", "grad": True}, "takes the softmax of all keys"),
        "sinks": ({"sinks": torch.zeros(3)}, "sinks must have shape"),
        "group": ({"group": "all"}, "group must be a ProcessGroup"),
        "mesh": ({"group": None, "mesh": 3}, "mesh must be a torch.distributed.device_mesh.DeviceMesh, got int"),
    }
    given, words = calls[name]
    given = {"group": groups[2], "method": "ring", **given}
    if given.pop("heads", None):
        q, k, v = qkv(heads=3)
    q, (k, v) = given.pop("q", q), given.pop("keys", (k, v))
    if given.pop("grad", None):
        q = q.requires_grad_()
    with pytest.raises((TypeError, ValueError), match=words):
        context.attention(q, k, v, **given)


@pytest.mark.parametrize(
    "name",
    ["method", "kind", "shards", "places", "both", "usp", "rows", "row", "no heads", "heads", "bias", "mask", "timeout",
     "window", "reference", "sinks", "group", "mesh"],
)  # fmt: skip
def test_refused(world, name):
    world.run(2, refused, name)


def test_without_a_group():
    with pytest.raises(ValueError, match="must be initialised"):
        context.attention(*qkv())


def inference(groups):
    """Nothing asks for gradients, in inference mode too."""
    case = Case("causal_documents", "ring", "zigzag", ranks=3)
    plain = cases.run(groups, case, gradients=False)
    with torch.inference_mode():
        again = cases.run(groups, case, gradients=False)
    return all(torch.equal(plain[n], again[n]) for n in plain)


def test_inference_mode(world):
    assert all(world.run(3, inference))


def repeated(groups, method):
    case = Case("everything" if method == "ring" else "causal", method, "zigzag", ranks=2, dtype="float32")
    case = Case(**{**case.__dict__, "extra": {"deterministic": True}})
    first, second = cases.run(groups, case), cases.run(groups, case)
    return all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_the_same_bits(world, method):
    assert all(world.run(2, repeated, method))
