"""PyTorch's guards on tensors, by which calls like an earlier one are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._C._dynamo.guards import TensorGuards


def guard(tensors: Sequence[Any]) -> Callable[..., bool]:
    """What says in a microsecond whether tensors are of the classes, shapes, strides, dtypes and devices of these,
    whether they require gradients, and whether a transform, a tracer or autocast is on, as is now. It takes each tensor
    once, as `each_once` gives them, and no nested one: to ask one for strides ends the process."""
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def each_once(tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The tensors without repeats, and for each of those given the place where it came first; () where none repeats."""
    ids = [*map(id, tensors)]
    return (tensors, ()) if len({*ids}) == len(ids) else (tuple(dict.fromkeys(tensors)), tuple(map(ids.index, ids)))
