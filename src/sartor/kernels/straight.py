"""A function of the score alone as a few calls of PyTorch, one after another: what `evaluate` computes, and its bits,
without the walk over the tree, which takes as long as the operations do where scores are few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from sartor.mods.expr import Expr, evaluate

METHODS = {"+": "add", "*": "mul", "-": "sub", "/": "div", "neg": "neg", "tanh": "tanh", "sigmoid": "sigmoid"}


def number(value: float, dtype: torch.dtype) -> torch.Tensor:
    """It as a tensor of no dims, which PyTorch multiplies by in half the time that a Python number takes."""
    with torch.inference_mode(False):
        return torch.tensor(float(value), dtype=torch.float64, device="cpu").to(dtype)


def straight(results: tuple[Expr, ...], aux: tuple[Any, ...], dtype: torch.dtype) -> Callable[..., Any] | None:
    """A function of the scores, a tensor of `dtype` that it overwrites, which returns the tuple of `results`; None
    where these read more than the score and numbers, are no more than that, or do what METHODS does not name."""
    lines = _Lines(aux, dtype)
    try:
        for e in results:
            lines.count(e)
        found = [lines.name(e) for e in results]
    except KeyError:
        return None
    if not set(found) <= set(lines.written):
        return None
    exec("\n ".join(["def changed(s):", *lines.written.values(), f"return {', '.join(found)},"]), lines.numbers)
    return lines.numbers["changed"]  # type: ignore[no-any-return]


class _Lines:
    """The lines of such a function while they are written, by the names that they give, and the numbers they read."""

    def __init__(self, aux: tuple[Any, ...], dtype: torch.dtype) -> None:
        self.aux, self.dtype = aux, dtype
        self.written: dict[str, str] = {}
        self.numbers: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self.uses: Counter[int] = Counter()

    def count(self, e: Expr) -> None:
        """How often the value of each node is read; a result is read once more, by who gets it."""
        self.uses[_place(e)] += 1
        if self.uses[_place(e)] == 1 and e.op in METHODS:
            for a in e.args:
                self.count(a)

    def name(self, e: Expr) -> str:
        """That of the value of a node, whose lines are written before. Raises KeyError."""
        if not _place(e):
            return "s"
        if id(e) not in self.names:
            self.names[id(e)] = self.line(e) if "s" in e.leaves() else self.constant(e)
        return self.names[id(e)]

    def line(self, e: Expr) -> str:
        """A call of a method, in place where nobody else reads what it is called on."""
        method, args = METHODS[e.op], [(self.name(a), self.spent(a)) for a in e.args]
        if e.op in "+*" and not args[0][1]:
            args.reverse()
        (first, spent), rest = args[0], ", ".join(name for name, _ in args[1:])
        found = f"x{len(self.written)}"
        self.written[found] = f"{found} = {first}.{method}{'_' * spent}({rest})"
        return found

    def spent(self, e: Expr) -> bool:
        """Whether a value of as many elements as there are scores is read once."""
        return "s" in e.leaves() and self.uses[_place(e)] == 1

    def constant(self, e: Expr) -> str:
        """A number that numbers make."""
        value = evaluate(e, {}, self.aux)
        if not isinstance(value, (int, float)):
            raise KeyError(e.text())
        found = f"n{len(self.numbers)}"
        self.numbers[found] = number(value, self.dtype)
        return found


def _place(e: Expr) -> int:
    """Which values are one: all nodes of the score are."""
    return 0 if e.op == "sym" and e.args[0] == "s" else id(e)
