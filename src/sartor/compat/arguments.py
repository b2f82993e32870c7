"""What the faces share: errors in the face's own words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def named(names: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let the errors of a face call the arguments as the face does; `names` maps ours to its."""
    word = re.compile(rf"\b({'|'.join(names)})\b")

    def decorate(face: Callable[P, R]) -> Callable[P, R]:
        @wraps(face)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return face(*args, **kwargs)
            except (TypeError, ValueError) as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is None:  # Python's own, of this call
                    raise
                text = word.sub(lambda found: names[found.group()], str(error))
                raise type(error)(text) from None

        return call

    return decorate
