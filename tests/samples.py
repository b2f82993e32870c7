"""Which cases of a grid `make test` runs, and which of the others `make test-all` does, by the mark `thorough`; what is
left is marked `slow`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import product
from typing import Any

import pytest


def sample(cases: Iterable[Any], kept: Callable[[Any], bool], often: Collection[Any] | None = None) -> list[Any]:
    """Values for `parametrize`, of one parameter or, as tuples, of several. `kept` says whether each run takes one;
    `make test-all` takes those in `often` too, or all."""

    def marks(case: Any) -> Any:
        if kept(case):
            return ()
        return pytest.mark.thorough if often is None or case in often else pytest.mark.slow

    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks(case)) for case in cases]


def grid(*axes: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """A sample of all combinations. `make test-all` takes one for each combination of the axes before the last, whose
    values take turns."""
    *others, last = map(list, axes)
    often = [
        (*(value for _, value in case), last[sum(i for i, _ in case) % len(last)])
        for case in product(*map(enumerate, others))
    ]
    return sample(product(*others, last), kept, often)
