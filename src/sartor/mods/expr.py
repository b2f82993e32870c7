"""Expressions: a mod is called once on symbols, and what it computes is kept as a small tree.

The tree is what makes one Python function serve every kernel: the reference calls the function itself on index
tensors, Triton kernels get the tree as source text, and the derivative of a score is taken on the tree.
Two mods with the same tree are the same mod, whatever closures they came from, so caches key on the text.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

STEPS = frozenset(["<", "<=", ">", ">=", "==", "!=", "&", "|", "^", "invert", "floor_divide"])
INFIX = frozenset(["+", "-", "*", "/", "//", "%", "<", "<=", ">", ">=", "==", "!=", "&", "|", "^"])


@dataclass(frozen=True, eq=False)
class Expr:
    """A node: `op` is an infix operator, a function name, or one of `sym`, `const`, `aux`.

    `==` builds a node, as every operator does; two expressions are the same when their `text()` is.
    """

    op: str
    args: tuple[Any, ...]

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask or score function must use operators only: expected `&`, `|`, `~` or sartor.mods.where,"
            f" got Python's `if`, `and`, `or` or `not` on the symbolic value {self.text()}"
        )

    def __iter__(self) -> Any:
        raise TypeError(f"a symbolic value is one number: expected arithmetic on it, got iteration over {self.text()}")

    def __getitem__(self, index: object) -> Any:
        raise TypeError(
            f"a symbolic value cannot be indexed, got {self.text()}[...]: pass tensors through `aux`, broadcastable to"
            " (batch, heads, seqlen_q, seqlen_kv), and use aux[i] as the value at (b, h, q, kv)"
        )

    def text(self, leaf: Callable[[Expr], str] | None = None, functions: Mapping[str, str] | None = None) -> str:
        """Source text; `leaf` names constants, symbols and aux values, `functions` operators and functions that the
        language written in has under another name."""
        if self.op in ("const", "sym", "aux"):
            return leaf(self) if leaf else (f"aux[{self.args[0]}]" if self.op == "aux" else str(self.args[0]))
        parts, functions = [a.text(leaf, functions) for a in self.args], functions or {}
        if self.op in INFIX and self.op not in functions:
            return f"({parts[0]} {self.op} {parts[1]})"
        if self.op in ("neg", "invert"):
            return f"({'-' if self.op == 'neg' else '~'}{parts[0]})"
        return f"{functions.get(self.op, self.op)}({', '.join(parts)})"

    def nodes(self) -> Iterator[Expr]:
        """All of the tree, the root first."""
        yield self
        for a in self.args:
            if isinstance(a, Expr):
                yield from a.nodes()

    def leaves(self) -> set[str]:
        """Names of the symbols, and `aux[i]` for the aux values, that the expression reads."""
        if self.op in ("sym", "aux"):
            return {self.text()}
        return set().union(*(a.leaves() for a in self.args if isinstance(a, Expr)))


def lift(value: object) -> Expr:
    """A Python number as a constant node; an expression as it is."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, (bool, int, float)):
        return Expr("const", (value,))
    if isinstance(value, numbers.Real):  # NumPy's
        return Expr("const", (int(value) if isinstance(value, numbers.Integral) else float(value),))
    raise TypeError(f"a mask or score function may combine symbols and numbers only, got {type(value).__name__}")


def _binary(op: str, flip: bool = False) -> Callable[[Expr, object], Expr]:
    def build(self: Expr, other: object) -> Expr:
        left, right = (lift(other), self) if flip else (self, lift(other))
        return Expr(op, (left, right))

    return build


for _name, _op in {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "and": "&", "or": "|", "xor": "^",
}.items():  # fmt: skip
    setattr(Expr, f"__{_name}__", _binary(_op))
    setattr(Expr, f"__r{_name}__", _binary(_op, flip=True))
for _name, _op in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items():
    setattr(Expr, f"__{_name}__", _binary(_op))
Expr.__hash__ = object.__hash__  # type: ignore[method-assign]
Expr.__neg__ = lambda self: Expr("neg", (self,))  # type: ignore
Expr.__invert__ = lambda self: Expr("invert", (self,))  # type: ignore
Expr.__abs__ = lambda self: Expr("abs", (self,))  # type: ignore


def _function(name: str, on_tensors: Callable[..., Any], on_numbers: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if any(isinstance(a, Expr) for a in args):
            return Expr(name, tuple(lift(a) for a in args))
        if any(isinstance(a, torch.Tensor) for a in args):
            device = next(a.device for a in args if isinstance(a, torch.Tensor))
            return on_tensors(*(torch.as_tensor(a, device=device) for a in args))
        return on_numbers(*args)

    call.__name__ = name
    return call


maximum = _function("maximum", torch.maximum, max)
minimum = _function("minimum", torch.minimum, min)
where = _function("where", torch.where, lambda c, a, b: a if c else b)
tanh = _function("tanh", torch.tanh, lambda x: torch.tanh(torch.tensor(x)).item())
floor_divide = _function("floor_divide", lambda a, b: torch.floor(a / b), lambda a, b: float(a // b))  # of floats


_INFIX_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne, "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = _INFIX_FUNCTIONS | {
    "neg": operator.neg, "invert": operator.invert, "abs": abs,
    "maximum": maximum, "minimum": minimum, "where": where, "tanh": tanh, "floor_divide": floor_divide,
}  # fmt: skip


def evaluate(e: Expr, symbols: Mapping[str, Any], aux: Sequence[Any], dtype: torch.dtype | None = None) -> Any:
    """The value of `e` on tensors or numbers: what the kernels written in torch use. Aux tensors are read as every
    kernel does: integers so that they do not wrap around, as Python's, floats in `dtype`, by default their own."""
    if e.op == "const":
        return e.args[0]
    if e.op == "sym":
        return symbols[e.args[0]]
    if e.op == "aux":
        value = aux[e.args[0]]
        if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
            return value
        return value.to(dtype) if value.is_floating_point() else value.long()
    return _FUNCTIONS[e.op](*(evaluate(a, symbols, aux, dtype) for a in e.args))


@dataclass(frozen=True, eq=False)
class Traced:
    """A function by what it computed of symbols when it was traced: what it closes over may change since."""

    names: tuple[str, ...]
    found: Expr | tuple[Expr, ...]

    def __call__(self, *args: Any) -> Any:
        symbols, aux = dict(zip(self.names, args, strict=False)), args[-1]  # aux comes last, where there is any
        if isinstance(self.found, tuple):
            return tuple(evaluate(e, symbols, aux) for e in self.found)
        return evaluate(self.found, symbols, aux)


ZERO, ONE = lift(0.0), lift(1.0)


def diff(e: Expr, name: str) -> Expr:
    """Derivative of `e` with respect to the symbol `name`; what rises in steps and aux values are constants."""
    if name not in e.leaves() or e.op in STEPS:
        return ZERO
    if e.op == "sym":
        return ONE
    if e.op == "where":
        return Expr("where", (e.args[0], *(diff(a, name) for a in e.args[1:])))
    parts = [diff(a, name) for a in e.args]
    if e.op == "neg" or (e.op == "-" and parts[0] is ZERO):
        return Expr("neg", (parts[-1],))
    if e.op in ("+", "-"):
        return parts[0] if parts[1] is ZERO else parts[1] if parts[0] is ZERO else Expr(e.op, tuple(parts))
    if e.op == "*":
        left, right = _times(parts[0], e.args[1]), _times(e.args[0], parts[1])
        return left if right is ZERO else right if left is ZERO else Expr("+", (left, right))
    if e.op == "/":
        falls = _times(e, parts[1])
        rise = parts[0] if falls is ZERO else Expr("-", (parts[0], falls))
        return Expr("/", (rise, e.args[1]))
    if e.op == "tanh":
        return _times(Expr("-", (ONE, Expr("*", (e, e)))), parts[0])
    if e.op == "abs":
        x, rise = e.args[0], parts[0]
        return where(x > 0, rise, where(x < 0, Expr("neg", (rise,)), ZERO))  # type: ignore[no-any-return]
    if e.op in ("maximum", "minimum"):  # of equal ones half of each, as PyTorch has it
        (x, y), (one, other) = e.args, parts if e.op == "maximum" else parts[::-1]
        return where(x > y, one, where(x < y, other, Expr("*", (Expr("+", (one, other)), lift(0.5)))))  # type: ignore[no-any-return]
    raise NotImplementedError(f"no derivative is known for `{e.op}` in {e.text()}")


def _times(a: Expr, b: Expr) -> Expr:
    if a is ZERO or b is ZERO:
        return ZERO
    return b if a is ONE else a if b is ONE else Expr("*", (a, b))
