"""Which cases of a grid `make test` runs; the others are marked `thorough`, for `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sample(cases: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """Values for `parametrize`, of one parameter or, as tuples, of several. `kept` says whether each run takes one."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if kept(case) else pytest.mark.thorough)
        for case in cases
    ]
