"""What Python does to symbols is what the function that is made of it does to other numbers, or it returns None."""

from __future__ import annotations

import math
import random
from bisect import bisect

import pytest
import torch

from sartor.problem import is_copied, without_gaps
from sartor.symbols import Symbol, SymbolicTensor, Trace, Untraceable, empty_like, opaque


@opaque
def collatz(n, most):
    """What no trace could follow."""
    steps = 0
    while n != 1 and steps < most:
        n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
    return steps, n


def everything(x, y):
    """Of all that planning does."""
    tiles = -(-x // 64)
    found = [tiles, x + y, 3 - x, y * 2.5, x / y, 7 // y, 100 % y, divmod(x, 3), -x, math.ceil(x / 7), max(x, y)]
    found += [min(range(1, 4), key=lambda g: -(-tiles // g) * (1 + g)), bisect((1, 3, 8, 24), tiles)]
    found += [x.bit_length() if x < 40 else 0, 5 if x else 6, x == y, 0 in (x - 9, y), 1 << (y > 12), x <= math.inf]
    found += [collatz(x, 30), collatz(5, y), collatz(5, 3), float("nan") if y > 60 else 1.5]
    return [n for part in found for n in (part if isinstance(part, tuple) else (part,))]


def test_functions_compute_what_python_does():
    rng, known = random.Random(1), 0
    functions = []
    for _ in range(60):
        x, y = rng.randrange(1, 400), rng.randrange(1, 90)
        made = [f(x, y) for f in functions]
        for found in made:
            assert found is None or [*map(repr, found[0])] == [*map(repr, everything(x, y))], (x, y)
        known += any(found is not None for found in made)
        trace = Trace([x, y])
        results = everything(*trace.inputs)
        assert [s.value if isinstance(s, Symbol) else s for s in results][:-1] == everything(x, y)[:-1]
        functions.append(trace.function(results))
    assert known > 30


@pytest.mark.parametrize(
    "use",
    [
        range, int, float, str, "{}".format, torch.empty, lambda n: [0, 1, 2][n], math.gcd, round,
        lambda n: torch.empty(3).expand(n, 3), lambda n: (1).__lshift__(n) + 0, lambda n: math.sqrt(n),
    ],
)  # fmt: skip
def test_values_are_not_to_be_had(use):
    """By which a function would be of one length, unseen."""
    with pytest.raises((Untraceable, TypeError)):
        use(Trace([2]).inputs[0])


def test_a_key_is_a_symbol():
    trace = Trace([3, 3])
    x, y = trace.inputs
    found = {(x, 1): 1, (3, 1): 2}
    assert found[x, 1] == 1
    assert found[3, 1] == 2
    assert (y, 1) not in found
    assert x + 1 is x + 1
    assert x == y
    assert x != None  # noqa: E711 - no number
    assert trace.function([])(3, 4) is None  # x == y was asked


def test_symbolic_tensors_lie_as_tensors():
    """Strides, gaps, turns, and what `empty_like` makes."""
    shapes = [(2, 5, 3, 8), (1, 5, 3, 8), (2, 1, 3, 8), (2, 5, 1, 8)]
    for b, s, h, d in shapes:
        tensors = [
            torch.empty(b, s, h, d), torch.empty(b, h, s, d).transpose(1, 2), torch.empty(b, h, s + 2, d)[:, :, :s],
            torch.empty(b, s, 3, h, d)[:, :, 1], torch.empty(b, s, h, 2 * d)[..., :d], torch.empty(s, b, h, d)[:, :b],
        ]  # fmt: skip
        for t in tensors:
            trace = Trace([*t.shape, *t.stride()])
            symbolic = SymbolicTensor(tuple(trace.inputs[:4]), tuple(trace.inputs[4:]), t.dtype, t.device)
            assert symbolic.is_contiguous() == t.is_contiguous()
            assert without_gaps(symbolic) == without_gaps(t)
            assert is_copied(symbolic) == is_copied(t)
            turned = symbolic.transpose(1, 2)
            assert [n.value for n in turned.stride()] == [*t.transpose(1, 2).stride()]
            made = trace.function(empty_like(symbolic).strides)
            again = made(*t.shape, *t.stride())[0]
            wanted = torch.empty_like(t).stride() if not without_gaps(t) or 1 not in t.shape else None
            assert wanted is None or [n for n, size in zip(again, t.shape, strict=True) if size > 1] == [
                n for n, size in zip(wanted, t.shape, strict=True) if size > 1
            ]
    with pytest.raises(Untraceable):
        empty_like(SymbolicTensor((2, 3, 4, 8), (0, 8, 8, 1), torch.float16, "cpu"))
    with pytest.raises(Untraceable):
        SymbolicTensor((2,), (1,), torch.float16, "cpu").to(torch.float32)
