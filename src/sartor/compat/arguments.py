"""What the faces share: errors in the face's own words, and dropout where there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from sartor.checks import real

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


def no_dropout(dropout_p: Any) -> None:
    """Of a sequence on several ranks: accept 0; say that a probability is not supported, and what is none."""
    if not 0 <= real("dropout_p", dropout_p) < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p must be 0, got {dropout_p}: a sequence on several ranks has no dropout yet"
        )
