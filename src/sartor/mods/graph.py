"""Mods that are made while torch.compile compiles what uses them.

A graph names a mod by its handle and carries its tensors. Dynamo calls the mod's functions on symbols as it calls all
of a program; what they compute of these goes, as plain tuples, to functions that run while the graph is made. They make
the mod there, over meta tensors, and return its handle, which is a constant of the graph.
"""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from sartor.mods.capture import Capture
from sartor.mods.constant import constant
from sartor.mods.expr import IN_GRAPH, Expr
from sartor.mods.placed import at_positions
from sartor.mods.tracing import aux_value

OPAQUE = torch.__version__ < "2.10"  # Dynamo cannot say what a function takes that is made while it traces
MADE: dict[str, Any] = {}  # by handle, over meta tensors: what graphs name stays as long as they may run
Written = tuple[Any, ...]


def make(mod: Any) -> None:
    """Give a mod that Dynamo is making its handle and its tensors. Raises NotImplementedError where it traces none:
    that breaks the graph, or ends its compilation where there is to be one."""
    if OPAQUE:
        raise NotImplementedError(
            "a mask or score made inside what torch.compile(fullgraph=True) compiles needs torch 2.10,"
            f" got {torch.__version__}: make it before, and close over it or pass it in"
        )
    given = len(mod.aux)
    capture = Capture(mod.aux)
    IN_GRAPH.append(capture)
    with capture:
        found = mod._traced(given)
    IN_GRAPH.pop()
    sizes = mod.sizes or ()
    handle, order = _made(
        type(mod), tuple(write(x) for x in found), tuple(_described(a, sizes) for a in capture.aux), given,
        tuple(name for name in ("rows", "cols") if getattr(mod, name, None) is not None), mod.name,
        tuple(_size(n, sizes) for n in sizes) or None,
    )  # fmt: skip
    tensors = []
    for i, indices in order:
        t: Any = capture.aux[i]
        tensors.append(t if indices is None else at_positions(t, indices))
    fill(mod, handle, tensors)


def fill(mod: Any, handle: str, tensors: list[torch.Tensor]) -> Any:
    """A mod of a graph: its handle, and its tensors alone as aux."""
    for name, value in (("handle", handle), ("aux", tuple(tensors)), ("sizes", None), ("name", "made in a graph")):
        object.__setattr__(mod, name, value)
    for name in ("keep", "fn", "rows", "cols"):
        object.__setattr__(mod, name, _left)
    return mod


def _left(*args: Any) -> Any:
    """In the place of the functions of a mod of a graph, which graphs have no use for."""
    raise RuntimeError(
        "a mask or score that is made inside what torch.compile compiles must be used there: expected it in the same"
        " graph or one that follows, got it outside. Make it before, and close over it or pass it in"
    )


def combine(sign: str, *mods: Any) -> Any:
    """`x & y`, `x | y`, `~x` and `x > y` (`x.then(y)`) of mods of a graph."""
    handle = _combined(sign, tuple(m.handle for m in mods))
    return fill(object.__new__(type(mods[0])), handle, [t for m in mods for t in m.tensors])


def write(found: Any) -> Written:
    """An expression, or a tuple of them, as plain tuples, which Dynamo knows as constants."""
    if isinstance(found, tuple):
        return ("tuple", *[write(e) for e in found])
    return (found.op, *[write(a) if isinstance(a, Expr) else a for a in found.args])


def read(written: Written) -> Any:
    """What was written."""
    op, *args = written
    if op == "tuple":
        return tuple(map(read, args))
    return Expr(op, tuple(read(a) if isinstance(a, tuple) else a for a in args))


def _described(value: Any, sizes: Any) -> Any:
    """A tensor as its dtype and shape, of which no more is told than `_size` does."""
    if not isinstance(value, torch.Tensor):
        return index(value) if type(value) is int else value  # a graph has one number, which Dynamo then guards
    return value.dtype, tuple(_size(n, sizes) for n in value.shape)


def _size(n: Any, sizes: Any) -> int:
    """0 and 1 as they are, others by which of the sizes they equal: a number also of one that Dynamo has a symbol for,
    which it then guards."""
    if n < 2:
        return 1 if n == 1 else 0
    for i, size in enumerate(sizes):
        if n == size:
            return 2 + i
    return 2 + len(sizes)


@constant
def _made(
    cls: Any,
    found: tuple[Written, ...],
    aux: tuple[Any, ...],
    given: int,
    spans: tuple[str, ...],
    name: str,
    sizes: Any,
) -> tuple[str, tuple[tuple[int, Any], ...]]:
    """The handle, and of each tensor which one it is of the captured ones, and by which indices it is a view of it."""
    with _disable_current_modes():
        values = [
            torch.empty(a[1], dtype=a[0], device="meta") if isinstance(a, tuple) else aux_value(i, a)
            for i, a in enumerate(aux)
        ]
        capture = Capture(tuple(values))
        capture.given = given
        mod = cls.empty(name=name, sizes=sizes, **dict.fromkeys(spans, _made))
        mod.settle(capture, [read(x) for x in found])
    MADE[mod.handle] = mod.with_tensors([t.to("meta") for t in mod.tensors])
    kept = (capture.order[i] for i, a in enumerate(mod.values) if isinstance(a, torch.Tensor))
    return mod.handle, tuple(kept)


@constant
def _combined(sign: str, handles: tuple[str, ...]) -> str:
    from sartor.mods.core import template

    with _disable_current_modes():
        x, *others = map(template, handles)
        if sign == "~":
            found = ~x
        elif sign == ">":
            found = x.then(*others)
        else:
            found = x & others[0] if sign == "&" else x | others[0]
    MADE[found.handle] = found
    return str(found.handle)
