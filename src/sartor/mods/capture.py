"""Tensors that a mod's function captures: each becomes an aux value, read at the position or, by an index, as a table.

`ids[b, q]` and `bias[h, q, kv]` name positions only: kernels read such tensors as they read every aux value, by the
strides of a view. Any other index, as in `table[h, q - kv + n]`, makes the tensor a table, of which a kernel gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sartor.mods.expr import CAPTURE, Expr, lift
from sartor.mods.placed import POSITIONS, Placed
from sartor.mods.torch_names import on_symbols
from sartor.mods.tracing import AuxValue, is_real

Sizes = tuple[int, int, int, int]  # of batch, heads_q, seqlen_q, seqlen_kv


class Capture(TorchFunctionMode):
    """The aux values of a mod, given ones first, while its functions are called on symbols."""

    def __init__(self, aux: tuple[AuxValue, ...]) -> None:
        super().__init__()
        self.given = len(aux)
        self.aux: list[AuxValue] = list(aux)
        self.order: list[tuple[int, Any]] = []  # of each value that is kept: which it was, and by which indices read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and _has_symbol(args[1]):
            return self.table(args[0])[args[1]]
        if _has_symbol(args) or (kwargs and _has_symbol(tuple(kwargs.values()))):
            return on_symbols(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def table(self, t: torch.Tensor) -> Expr:
        """A tensor that is indexed."""
        for i in range(self.given, len(self.aux)):
            if self.aux[i] is t:
                return Expr("aux", (i,))
        self.aux.append(t)
        return Expr("aux", (len(self.aux) - 1,))

    def number(self, t: torch.Tensor) -> Expr:
        """A tensor without dims. One that lies on the host is the number that it holds."""
        if torch.compiler.is_compiling() or t.device.type != "cpu" or t.requires_grad or type(t) is not torch.Tensor:
            return self.table(t)
        value = t.item()
        if isinstance(value, bool):
            return lift(value)
        self.aux.append(value)
        return Expr("aux", (len(self.aux) - 1,))

    @contextmanager
    def open(self) -> Iterator[None]:
        """While functions are traced. What is computed there of what wants a gradient has one, wherever."""
        token = CAPTURE.set(self.number)
        try:
            with self, torch.inference_mode(False):
                yield
        finally:
            CAPTURE.reset(token)

    def settle(self, found: list[Any], sizes: Sizes | None) -> tuple[list[Any], tuple[AuxValue, ...], frozenset[int]]:
        """The traced expressions, which read captured tensors at the position where they can; the aux values they read;
        which of these are tables.

        Raises TypeError where a tensor is indexed by more or fewer indices than it has dims, or both ways.
        """
        places: dict[str, int] = {}
        views: dict[int, tuple[int, Any]] = {}
        whole: set[int] = set()  # tables of which some index is no position: all are read as such
        nodes = [n for x in found for e in (x if isinstance(x, tuple) else (x,)) for n in e.nodes()]
        for n in (n for n in nodes if n.op == "gather"):
            table = n.args[0].args[0]
            self._check(table, n.args[1:])
            if table < self.given or not self._fits(table, n.args[1:], sizes):
                whole.add(table)

        def settled(e: Expr) -> Expr:
            table, indices = e.args[0].args[0], e.args[1:]
            if table in whole:
                return e
            if e.text() not in places:
                named = tuple((i.op, i.args[0]) for i in indices)
                places[e.text()], views[len(self.aux)] = len(self.aux), (table, named)
                self.aux.append(Placed(self.aux[table], named))  # type: ignore[arg-type]
            return Expr("aux", (places[e.text()],))

        found = [_each(x, lambda e: _rewritten(e, settled)) for x in found]
        nodes = [n for x in found for e in (x if isinstance(x, tuple) else (x,)) for n in e.nodes()]
        tables = {n.args[0].args[0] for n in nodes if n.op == "gather"}
        there = {a.args[0] for n in nodes for a in (n.args[1:] if n.op == "gather" else n.args) if _is_aux(a)}
        there |= {x.args[0] for x in found if _is_aux(x)}
        if there & tables:
            raise TypeError(
                f"aux[{min(there & tables)}] must be read at the position or be indexed, got both: give it twice"
            )
        kept = [i for i in range(len(self.aux)) if i < self.given or i in there | tables]
        self.order = [views.get(i, (i, None)) for i in kept]
        number = {old: new for new, old in enumerate(kept)}
        found = [_each(x, lambda e: _renumbered(e, number)) for x in found]
        return found, tuple(self.aux[i] for i in kept), frozenset(number[i] for i in tables)

    def _check(self, table: int, indices: tuple[Expr, ...]) -> None:
        t = self.aux[table]
        name = f"aux[{table}]" if table < self.given else "a captured tensor"
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"a mask or score function must have tensors indexed only, got {name}, which is {t!r}")
        if len(indices) != t.dim():
            raise TypeError(
                f"a mask or score function must index {name} of shape {tuple(t.shape)} by {t.dim()} integers, got"
                f" {len(indices)}: {', '.join(i.text() for i in indices)}"
            )
        real = [i.text() for i in indices if is_real(i, tuple(self.aux))]
        if real:
            raise TypeError(
                f"a mask or score function must index by integers, got {real[0]}: divide by // instead of /"
            )
        if t.numel() == 0:
            raise ValueError(f"{name} must have an element to be indexed, got shape {tuple(t.shape)}")

    def _fits(self, table: int, indices: tuple[Expr, ...], sizes: Sizes | None) -> bool:
        """Whether the indices are positions, each once, and numbers."""
        names = [i.args[0] for i in indices if i.op == "sym"]
        if len(set(names)) < len(names) or any(i.op not in ("sym", "const") for i in indices):
            return False
        if sizes is None:
            return True
        shape = zip(self.aux[table].shape, indices, strict=True)  # type: ignore[union-attr]
        return all(i.op == "const" or n in (1, sizes[POSITIONS.index(i.args[0])]) for n, i in shape)


def _is_aux(e: Any) -> bool:
    return isinstance(e, Expr) and e.op == "aux"


def _has_symbol(args: Any) -> bool:
    if isinstance(args, (tuple, list)):
        return any(map(_has_symbol, args))
    return isinstance(args, Expr)


def _each(found: Any, change: Callable[[Expr], Expr]) -> Any:
    return tuple(change(e) for e in found) if isinstance(found, tuple) else change(found)


def _rewritten(e: Expr, settled: Callable[[Expr], Expr]) -> Expr:
    """With every gather as `settled` makes it, the inner ones first."""
    if e.op in ("sym", "aux", "const"):
        return e
    e = Expr(e.op, tuple(_rewritten(a, settled) for a in e.args))
    return settled(e) if e.op == "gather" else e


def _renumbered(e: Expr, number: dict[int, int]) -> Expr:
    if e.op == "aux":
        return Expr("aux", (number[e.args[0]],))
    return e if e.op in ("sym", "const") else Expr(e.op, tuple(_renumbered(a, number) for a in e.args))
