"""The error budgets themselves: what each rule refuses that the others let pass. A loose one would pass everything."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from sartor import mods, testing
from sartor.api import attention
from sartor.testing import budgets, oracle

UNIT = torch.finfo(torch.bfloat16).eps / 2  # of terms of size 1
ROWS = 256


def at(place, size):
    error = torch.zeros(1, ROWS, 2, 8, dtype=torch.float64)
    error[place] = size
    return error


ONE, ROW, EVERYWHERE = (0, 5, 1, 3), (0, 7), (slice(None),)
RULES = {  # errors, PyTorch's, options, whether they are refused
    "twice PyTorch's largest": (at(ONE, 0.199), 0.1, {}, False),
    "more than twice": (at(ONE, 0.203), 0.1, {}, True),
    "three times, a gradient": (at(ONE, 0.299), 0.1, {"factor": testing.GRADIENT_FACTOR}, False),
    "more than three times, a gradient": (at(ONE, 0.303), 0.1, {"factor": testing.GRADIENT_FACTOR}, True),
    "a row behind another's larger error": (at(ONE, 0.05), at(ROW, 0.1), {}, True),
    "a rounding in a row": (at(ONE, 0.9 * UNIT), at(ROW, 0.1), {}, False),
    "a fifth more everywhere": (at(EVERYWHERE, 0.119), 0.1, {}, False),
    "over a fifth more everywhere": (at(EVERYWHERE, 0.121), 0.1, {}, True),
    "over a fifth more in one head": (at((0, slice(None), 1), 0.121), 0.1, {}, True),
    "more than many rows' luck": (at(ONE, 0.5 * UNIT), 0.0, {}, True),
    "many rows' luck": (at(ONE, 0.9 * ROWS**-0.5 * UNIT), 0.0, {}, False),
    "one row's luck": (at(ONE, 0.5 * UNIT), 0.0, {"independent": 1}, False),
    "NaN for a number": (at(ONE, torch.nan), 0.1, {}, True),
    "behind PyTorch's NaN": (at(ONE, 1.0), at(ONE, torch.nan), {}, True),
    "behind PyTorch's overflow": (at(ONE, 1.0), at(ONE, torch.inf), {}, True),
    "behind a limit that is NaN": (at(ONE, 1.0), 0.1, {"s_max": torch.nan}, True),
}


@pytest.mark.parametrize("rule", RULES)
def test_what_a_budget_refuses(rule):
    """Of bfloat16 results that are 0 and whose terms are 1. A loose rule would pass every kernel."""
    error, lowp, options, refused = RULES[rule]
    exact = torch.zeros(1, ROWS, 2, 8, dtype=torch.float64)
    out, low = (exact + error).float(), (exact + lowp).float()
    with pytest.raises(AssertionError) if refused else nullcontext():
        testing.check(out, low, exact, **{"magnitude": exact + 1, "dtype": torch.bfloat16} | options)


def test_gradients_and_results_have_their_own_factors():
    """`check_all` gives what `docs/numerics.md` says to each: the worst element is moved to 2.5 times its error."""
    q, k, v = testing.make_inputs(1, 2, 2, 64, 64, 32, layout="bshd")
    dout = testing.make_like(q)
    exact = {"out": testing.reference(q, k, v)[0]} | testing.reference_gradients(q, k, v, dout)
    lowp = {"out": testing.low_precision(q, k, v)[0]} | testing.low_precision_gradients(q, k, v, dout)
    for name, times, wrong in (("out", 1.9, False), ("out", 2.5, True), ("dv", 2.5, False), ("dv", 3.5, True)):
        found = lowp[name].double()
        error = found - exact[name]
        place = tuple(torch.unravel_index(error.abs().argmax(), error.shape))
        found[place] = exact[name][place] + times * error[place]
        with pytest.raises(AssertionError, match=name) if wrong else nullcontext():
            testing.check_all({name: found.float()}, q, k, v, dout)


def test_verify_asks_for_the_gradient_through_lse(monkeypatch):
    """A kernel that ignores dlse passes without it, and not with it."""

    def deaf(q, k, v, **options):
        out, lse = attention(q, k, v, **options)
        return (out, lse.detach() + 0 * out.sum()) if options.get("kernel") != "reference" else (out, lse)

    monkeypatch.setattr(budgets, "attention", deaf)
    x = testing.make_inputs(1, 2, 2, 9, 13, 16, dtype=torch.float32, layout="bshd")
    testing.verify(*x)
    with pytest.raises(AssertionError, match=r"dq|dk"):
        testing.verify(*x, through_lse=True)


def test_the_oracle_is_the_same_in_pieces(monkeypatch):
    """Long problems are computed head by head: what depends on item and head is cut to those."""
    q, k, v = testing.make_inputs(2, 4, 2, 9, 13, 16, dtype=torch.float64, layout="bshd")
    dout, dlse = testing.make_like(q), torch.ones(2, 4, 9)
    normal = torch.Generator().manual_seed(3)
    drawn = lambda *shape: torch.randn(shape, generator=normal, dtype=torch.float64)  # noqa: E731
    later = mods.Mask(lambda b, h, q, kv, aux: (kv + b + 2 * h <= q + 9) & aux[0], (drawn(2, 4, 1, 13) > -1,))
    options = {"mask": later, "alibi_slopes": drawn(2, 4).abs(), "sinks": drawn(4), "bias": drawn(2, 1, 9, 13)}

    def everything():
        found = dict(zip(("out", "lse"), testing.reference(q, k, v, **options), strict=True))
        found |= testing.reference_gradients(q, k, v, dout, dlse, **options)
        size, s_max = testing.magnitudes(q, k, v, dout, dlse, **options)
        return found | {f"size of {n}": t for n, t in size.items()} | {"s_max": torch.tensor(s_max)}

    whole = everything()
    monkeypatch.setattr(oracle, "SCORES_AT_ONCE", 1)
    for name, t in everything().items():
        torch.testing.assert_close(t, whole[name], rtol=1e-12, atol=1e-12, equal_nan=True, msg=name)
