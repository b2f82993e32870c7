"""Functions that Dynamo calls while it traces, whose results are constants of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """The mark of `torch.compiler.assume_constant_result`, which would import Dynamo for it: a second of every process,
    whether it compiles anything or not."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
