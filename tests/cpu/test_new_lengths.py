"""Lengths not seen before: planned by what is known of others, they are launched as where nothing is known; and what
the host does of one."""

from __future__ import annotations

import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import sartor
import stubbed
from counted import calls_of
from sartor import direct, driver, dynamic_shapes, features, nvrtc, ops, plan, problem
from sartor.device import ARCHITECTURES
from sartor.direct import Direct
from sartor.kernels import spec
from sartor.kernels.cuda import expressions, host, params
from sartor.kernels.hopper import backward_config, backward_problem, forward, pieces, schedule
from sartor.kernels.triton import launch
from sartor.mods.recent import Recent
from sartor.problem import Call, Problem
from sartor.replay import lists
from sartor.tuning import table

KEEPING = (
    backward_config, backward_problem, driver, dynamic_shapes, expressions, features, forward, host, launch, lists,
    nvrtc, ops, params, pieces, plan, problem, schedule, spec, table,
)  # fmt: skip
LENGTHS = [
    (1, 700), (17, 2048), (64, 64), (70, 70), (300, 1000), (513, 513), (1000, 1000), (1024, 1024), (3000, 3001),
]  # fmt: skip
needs = pytest.mark.skipif(
    not launch.available() or stubbed.COMPILER is None, reason="needs Triton, which repairs, and a C compiler"
)


def forget():
    """All that was found out of problems, configs, kernels and launches."""
    for module in KEEPING:
        of_classes = [x for kind in vars(module).values() if isinstance(kind, type) for x in vars(kind).values()]
        for kept in (*vars(module).values(), *of_classes):
            kept = getattr(kept, "__func__", kept)
            if isinstance(kept, Recent):
                kept.clear()
            elif hasattr(kept, "cache_clear"):
                kept.cache_clear()


def compiled(step):
    """What stands for a kernel that Triton compiled for these arguments."""

    def kind(x, constant):
        if constant:
            return "constexpr"
        if isinstance(x, tuple):
            return tuple(kind(part, False) for part in x)
        letters = {torch.Tensor: "*fp32", float: "fp32"}
        return letters.get(type(x)) or ("i32" if -(2**31) <= x < 2**31 else "i64")

    given = zip(step.arguments.items(), step.kernel.params, strict=True)
    signature = {name: kind(x, p.is_constexpr) for (name, x), p in given}
    facts = SimpleNamespace(name=step.name, num_warps=step.tile.warps, shared=0)
    made = SimpleNamespace(src=SimpleNamespace(signature=signature), metadata=facts, function=1)
    return type("Compiled", (), {**vars(made), "__getitem__": lambda self, grid: lambda *_: None})()


@contextmanager
def launched():
    """What lists of launches are made of, in their order; no kernel is compiled, none launched."""
    found, fill = [], lists.Replayed._fill

    def filled(self, form, names, numbers, records):
        numbers, records = [*numbers], [[*some] for some in records]
        fill(self, form, names, numbers, records)
        for i in range(1, 9 * len(names), 9):
            numbers[i] = None  # where the places of parameters lie: a form's own
        found.append((form.struct.format, [*names], numbers, records))

    with stubbed.stubbed() as stub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists.Replayed, "_fill", filled)
        patch.setattr(launch, "_by_triton", compiled)
        patch.setattr(launch, "compile_together", lambda steps: None)
        patch.setattr(launch, "interpreted", lambda: False)
        patch.setattr(Direct, "serves", staticmethod(lambda *_: True))
        patch.setattr(direct, "hooked", lambda: False)
        stub.library.stub_quiet(1)
        forget()
        try:
            yield found
        finally:
            forget()
            stub.library.stub_quiet(0)


def dense(n, h, dim):
    return torch.zeros(2, n, h, dim, dtype=torch.bfloat16)


WAYS = {
    "dense": dense,
    "turned": lambda n, h, dim: torch.zeros(2, h, n, dim, dtype=torch.bfloat16).transpose(1, 2),
    "cut": lambda n, h, dim: torch.zeros(2, h, 4000, dim, dtype=torch.bfloat16).transpose(1, 2)[:, :n],
    "fused": lambda n, h, dim: torch.zeros(2, n, 3, h, dim, dtype=torch.bfloat16)[:, :, 1],
}


def both(lengths, heads, dim, way=dense, **options):
    """A forward and a backward."""
    given = zip((lengths[0], *lengths[1:] * 2), (heads[0], *heads[1:] * 2), strict=True)
    q, k, v = (way(n, h, dim).requires_grad_() for n, h in given)
    out = sartor.attention(q, k, v, **options)
    torch.autograd.grad(out, (q, k, v), way(lengths[0], heads[0], dim))


@needs
@pytest.mark.parametrize(("dim", "heads"), [(64, (8, 8)), (128, (8, 2)), (192, (4, 4))], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 0)}, {"deterministic": True}], ids=str)
def test_launches_are_those_of_a_fresh_process(options, heads, dim):
    """Of forward and backward, repairs among them, in whichever order lengths come: by plans, and by functions of
    lengths and strides."""
    order = random.Random(dim).sample(LENGTHS, len(LENGTHS))
    with launched() as found:
        made = []
        for fresh in (False, True):
            for lengths in order:
                if fresh:
                    forget()
                found.clear()
                both(lengths, heads, dim, **options)
                # where repairs are not known, the row without them comes between
                made.append((found[0], found[-1]))
    for lengths, known, anew in zip(order, made[: len(order)], made[len(order) :], strict=True):
        assert known == anew, lengths
        masked = "window" in options or ("causal" in options and lengths[0] > 1)
        assert sum("repair" in name for name in anew[1][1]) == 2 * masked


def lengths_for(dim):
    """Of all sizes, of as many queries as keys above all."""
    rng = random.Random(dim)
    some = [int(2 ** rng.uniform(5, 11.9)) for _ in range(50)]
    return [*dict.fromkeys((n, n + rng.choice((0, 0, 1, 64, -n // 2))) for n in some)]


def one(lengths, heads, dim, way=dense, **options):
    """A forward, of one query."""
    q, k, v = (way(n, h, dim) for n, h in zip((1, lengths[1], lengths[1]), (heads[0], *heads[1:] * 2), strict=True))
    sartor.attention(q, k, v, **options)


def compiled_one(lengths, heads, dim, way=dense, causal=False, **_):
    """A forward and a backward, as compiled graphs call them."""
    given = zip((lengths[0], *lengths[1:] * 2), (heads[0], *heads[1:] * 2), strict=True)
    q, k, v = (way(n, h, dim).requires_grad_() for n, h in given)
    out = torch.ops.sartor.plain(q, k, v, None, 0.0, "bottom_right" if causal else "", None, "auto")[0]
    torch.autograd.grad(out, (q, k, v), way(lengths[0], heads[0], dim))


@needs
@pytest.mark.parametrize(
    ("way", "dim", "heads", "options"),
    [
        ("dense", 64, (16, 16), {}), ("turned", 64, (16, 16), {"causal": True}), ("cut", 64, (16, 16), {}),
        ("cut", 96, (4, 2), {"window": (100, 0)}), ("fused", 96, (4, 2), {}), ("cut", 128, (32, 4), {"causal": True}),
        ("turned", 128, (32, 4), {"softcap": 20.0}), ("fused", 256, (4, 4), {"causal": True}), ("cut", 192, (8, 2), {}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("call", [both, one, compiled_one])
def test_functions_of_lengths_say_what_plans_say(call, way, options, heads, dim, monkeypatch):
    """Most lengths are launched by functions; KV splits and all ways in which tensors may lie are among them."""
    used, like = [], lists.Replayed.like.__func__
    some = [*{lengths[call is one :]: lengths for lengths in lengths_for(dim)}.values()]
    monkeypatch.setattr(lists.Replayed, "like", classmethod(lambda *args: used.append(1) or like(*args)))
    monkeypatch.setattr(dynamic_shapes, "should_trace", lambda planned, traced: traced or planned > 1)
    with launched() as found:
        made, by_functions = [], dynamic_shapes.DynamicShapes.of
        for of in (by_functions, lambda *_: None):
            monkeypatch.setattr(dynamic_shapes.DynamicShapes, "of", staticmethod(of))
            ops.PREPARED.clear()
            for lengths in some:
                found.clear()
                call(lengths, heads, dim, WAYS[way], **options)
                made.append((found[0], found[-1]))
    for lengths, known, planned in zip(some, made[: len(some)], made[len(some) :], strict=True):
        assert known == planned, lengths
    assert len(used) > len(some) * (1 if call is one else 2) * 0.4


@pytest.mark.parametrize("dim", [33, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_problems_are_those_of_calls_alone(dim, dtype):
    """Also of tensors with gaps, turned, off 16 bytes, of one query or key, of layouts; masks follow the lengths."""
    problem._PARSED.clear()
    far = problem.FARTHEST + 8
    ways = {
        "dense": lambda b, n, h, d: torch.empty(b, n, h, d, dtype=dtype),
        "turned": lambda b, n, h, d: torch.empty(b, h, n, d, dtype=dtype).transpose(1, 2),
        "gaps": lambda b, n, h, d: torch.empty(b, n, h, 2 * d, dtype=dtype)[..., :d],
        "uneven": lambda b, n, h, d: torch.empty(b, n, h, d + 1, dtype=dtype)[..., :d],
        "cut": lambda b, n, h, d: torch.empty(b, n + 5, h, d, dtype=dtype)[:, :n],
        "fused": lambda b, n, h, d: torch.empty(b, n, 3, h, d, dtype=dtype)[:, :, 1],
        "columns": lambda b, n, h, d: torch.empty(b, n, h, 2 * d, dtype=dtype)[..., ::2],
        "far": lambda b, n, h, d: torch.empty(b, n, far, dtype=dtype)[..., : h * d].unflatten(2, (h, d)),
        "off": lambda b, n, h, d: torch.empty(b * n * h * d + 1, dtype=dtype)[1:].view(b, n, h, d),
    }
    some = [
        (way, n, m, o) for way in ways for n, m in ((0, 3), (1, 3), (3, 1), (3, 3), (4, 7), (5, 5)) for o in range(4)
    ]
    random.Random(dim).shuffle(some)
    for way, n, m, i in some:
        options = ({}, {"causal": True}, {"window": (2, 1)}, {"layout": "bhsd", "softcap": 3.0})[i]
        q, k, v = ways[way](2, n, 4, dim), ways[way](2, m, 2, dim), ways["dense"](2, m, 2, dim)
        if "layout" in options:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        call = Call(q, k, v, **options)
        found, wanted = Problem.parse_kind(call, call.key()), Problem.parse(call)
        assert found == wanted
        assert hash(found[0]) == hash(wanted[0])
        assert found[0].kind == wanted[0].kind
    wrong = Call(q, k, v[:, :, :-1] if "layout" in options else v[:, :-1])
    with pytest.raises(ValueError, match="must have the"):
        Problem.parse_kind(wrong, wrong.key())


@needs
@pytest.mark.parametrize(("options", "most"), [({}, 270), ({"causal": True}, 280)], ids=str)
def test_what_the_host_does_of_a_length(options, most):
    """Calls of functions, of Python and of C, of a forward and a backward with all that is kept for the next ones."""
    with launched(), torch.autograd.set_multithreading_enabled(False):
        for n in range(1012, 1000, -1):
            count = calls_of(lambda: both((n, n), (4, 4), 128, **options))  # noqa: B023 - called here
    assert count <= most


@needs
def test_lengths_beyond_32_bits_are_refused():
    q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device="meta")
    found = sartor.explain(q, *[q.expand(1, 2**31, 1, 64)] * 2, device=ARCHITECTURES[90])
    assert found.plan is None
    assert "hopper_forward: no, needs fewer than 2147483392 queries and keys, got 2147483648" in str(found)


@needs
@pytest.mark.parametrize("causal", [False, True])
def test_tensors_that_come_twice_are_found_again(causal):
    """As k and v that are one: guards want each tensor once."""

    def step(q, k, v):
        out = sartor.attention(q, k, v, causal=causal)
        torch.autograd.grad(out, tuple({q, k, v}), torch.zeros_like(out))

    def calls(*given):
        for _ in range(3):
            step(*given)
        return calls_of(lambda: step(*given))

    with launched(), torch.autograd.set_multithreading_enabled(False):
        q, k, v = (torch.zeros(2, 200, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        alone = calls(q, k, v)
        assert calls(q, k, k) <= alone + 20
        assert calls(q, q, q) <= alone + 20
