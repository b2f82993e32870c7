"""Expressions: a mod is called once on symbols, and what it computes is kept as a small tree.

The tree is what makes one Python function serve every kernel: the reference calls the function itself on index
tensors, Triton kernels get the tree as source text, and the derivative of a score is taken on the tree.
Two mods with the same tree are the same mod, whatever closures they came from, so caches key on the text.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

import torch

LEAVES = frozenset(["sym", "aux", "const"])
FLOATS = frozenset(["exp", "exp2", "log", "sqrt", "tanh", "sigmoid"])  # functions whose value is a float
INFIX = frozenset(["+", "-", "*", "/", "//", "%", "<", "<=", ">", ">=", "==", "!=", "&", "|", "^"])


@dataclass(frozen=True, eq=False)
class Expr:
    """A node: `op` is an infix operator, a function name, `gather`, or one of `sym`, `const`, `aux`.

    `==` builds a node, as every operator does; two expressions are the same when their `text()` is. `gather` has an
    `aux` and an index for each dim of that tensor, which is read there and not at the position.
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

    def __index__(self) -> int:
        raise TypeError(
            f"a symbolic value has no number yet, got {self.text()} where Python wants an integer: index tensors by it"
        )

    def __getitem__(self, index: Any) -> Expr:
        if self.op not in ("aux", "gather"):
            raise TypeError(
                f"a symbolic value is one number, got {self.text()}[...]: index a tensor that the function captures, or"
                " aux[i]"
            )
        found = index if isinstance(index, tuple) else (index,)
        wrong = [i for i in found if isinstance(i, slice) or i is None or i is Ellipsis or isinstance(i, bool)]
        if wrong:
            raise TypeError(
                f"a tensor must be indexed by one integer for each dim, as in table[h, q - kv + n], got {wrong[0]!r}"
            )
        own = (self,) if self.op == "aux" else self.args
        return Expr("gather", (*own, *map(lift, found)))

    def text(self, leaf: Callable[[Expr], str] | None = None, functions: Mapping[str, str] | None = None) -> str:
        """Source text; `leaf` names constants, symbols, aux values and what is gathered, `functions` operators and
        functions that the language written in has under another name."""
        if self.op in LEAVES or (leaf and self.op == "gather"):
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


CAPTURE: ContextVar[Callable[[torch.Tensor], Expr] | None] = ContextVar("capture", default=None)  # of `tracing`
IN_GRAPH: list[Any] = []  # of `capture`, for the same while Dynamo traces, which knows no context variables


def lift(value: object) -> Expr:
    """A Python number as a constant node; an expression as it is; a tensor, while a function is traced, as captured."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, (bool, int, float)):
        return Expr("const", (value,))
    if isinstance(value, numbers.Real):  # NumPy's
        return Expr("const", (int(value) if isinstance(value, numbers.Integral) else float(value),))
    capture = (IN_GRAPH[-1].number if IN_GRAPH else None) if torch.compiler.is_dynamo_compiling() else CAPTURE.get()
    if isinstance(value, torch.Tensor) and capture is not None:
        if value.dim():
            raise TypeError(
                "a mask or score function is one of numbers, got a tensor of shape"
                f" {tuple(value.shape)} in arithmetic: index it by positions, as in table[h, q - kv + n]"
            )
        return capture(value)
    raise TypeError(f"a mask or score function may combine symbols and numbers only, got {type(value).__name__}")


def _binary(op: str, flip: bool = False) -> Callable[[Expr, object], Expr]:
    def build(self: Expr, other: object) -> Expr:
        left, right = (lift(other), self) if flip else (self, lift(other))
        return Expr(op, (left, right))

    return build


for _name, _op in {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "pow", "and": "&",
    "or": "|", "xor": "^",
}.items():  # fmt: skip
    setattr(Expr, f"__{_name}__", _binary(_op))
    setattr(Expr, f"__r{_name}__", _binary(_op, flip=True))
for _name, _op in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items():
    setattr(Expr, f"__{_name}__", _binary(_op))
Expr.__hash__ = object.__hash__  # type: ignore[method-assign]
Expr.__neg__ = lambda self: Expr("neg", (self,))  # type: ignore
Expr.__invert__ = lambda self: Expr("invert", (self,))  # type: ignore
Expr.__abs__ = lambda self: Expr("abs", (self,))  # type: ignore


_DOC = """{says}

For mask and score functions, beside operators; where `torch` has a function of the name, that does as well there.

Args:
    {takes}: symbolic values, which positions and scores are there; or tensors that broadcast to each other, or numbers.

Returns:
    A symbolic value where one was given, else a tensor where one was given, else a number.

Raises:
    TypeError: another number of values than that was given, or one that is none of these.
"""


def _function(name: str, takes: str, on_tensors: Callable[..., Any], on_numbers: Callable[..., Any], says: str) -> Any:
    parameters = [Parameter(p, Parameter.POSITIONAL_ONLY) for p in takes.split(", ")]

    def call(*args: Any) -> Any:
        if len(args) != len(parameters):
            raise TypeError(f"{name} must be given {len(parameters)} values ({takes}), got {len(args)}")
        if any(isinstance(a, Expr) for a in args):
            return Expr(name, tuple(lift(a) for a in args))
        if any(isinstance(a, torch.Tensor) for a in args):
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            device, real = tensors[0].device, next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
            dtypes = (real if isinstance(a, float) else None for a in args)
            return on_tensors(*(torch.as_tensor(a, dtype=t, device=device) for a, t in zip(args, dtypes, strict=True)))
        return on_numbers(*args)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = _DOC.format(says=says, takes=takes)
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return call


def _floats(on_tensors: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of a number, as PyTorch rounds it in float64."""
    return lambda x: on_tensors(torch.tensor(x, dtype=torch.float64, device="cpu")).item()


maximum = _function(
    "maximum", "a, b", torch.maximum, max,
    "The larger of a and b, as in `Score(lambda s, b, h, q, kv: maximum(s, -10.0))`.",
)  # fmt: skip
minimum = _function(
    "minimum", "a, b", torch.minimum, min,
    "The smaller of a and b, as in `Score(lambda s, b, h, q, kv: minimum(s, 10.0))`.",
)  # fmt: skip
where = _function(
    "where", "c, a, b", torch.where, lambda c, a, b: a if c else b,
    "a where the bool c is True, else b, as in `Score(lambda s, b, h, q, kv: where(q - kv < 64, s, 0.5 * s))`. An `if`"
    "\nwould be asked once, when the function is traced.",
)  # fmt: skip
tanh = _function(
    "tanh", "x", torch.tanh, math.tanh,
    "Hyperbolic tangent, to float32 accuracy, as in `Score(lambda s, b, h, q, kv: 30.0 * tanh(s / 30.0))`.",
)  # fmt: skip
sigmoid = _function("sigmoid", "x", torch.sigmoid, _floats(torch.sigmoid), "1 / (1 + exp(-x)).")
exp = _function("exp", "x", torch.exp, _floats(torch.exp), "e to the power x.")
exp2 = _function("exp2", "x", torch.exp2, _floats(torch.exp2), "2 to the power x.")
log = _function("log", "x", torch.log, _floats(torch.log), "Natural logarithm of x; -inf at 0, NaN below.")
sqrt = _function("sqrt", "x", torch.sqrt, _floats(torch.sqrt), "Square root of x, rounded once; NaN below 0.")
truncate = _function(
    "truncate", "x", lambda x: x.long(), int, "x rounded towards 0, as an integer: what `.int()` and `.long()` give."
)
power = _function(
    "pow", "x, y", torch.pow, operator.pow,
    "x ** y. y is an integer constant, for x of either sign; or 0.5, or anything where x is a float >= 0.",
)  # fmt: skip
floor_divide = _function(
    "floor_divide", "a, b", lambda a, b: torch.floor(a / b), lambda a, b: float(a // b), "a // b of floats."
)


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """x within [min, max], which are symbolic values, tensors or numbers as x is; an end that is None is open."""
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


_INFIX_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne, "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = _INFIX_FUNCTIONS | {
    "neg": operator.neg, "invert": operator.invert, "abs": abs, "maximum": maximum, "minimum": minimum,
    "where": where, "tanh": tanh, "sigmoid": sigmoid, "exp": exp, "exp2": exp2, "log": log, "sqrt": sqrt,
    "truncate": truncate, "pow": power, "floor_divide": floor_divide,
}  # fmt: skip


def evaluate(
    e: Expr,
    symbols: Mapping[str, Any],
    aux: Sequence[Any],
    dtype: torch.dtype | None = None,
    known: dict[int, Any] | None = None,
) -> Any:
    """The value of `e` on tensors or numbers: what the kernels written in torch use. Aux tensors are read as every
    kernel does: integers so that they do not wrap around, as Python's, floats in `dtype`, by default their own; what
    becomes a float is of it too, by default float32.
    `known` keeps the values of nodes, by id: expressions that share them, as a score and its derivative do, compute
    them once."""
    if e.op == "const":
        return e.args[0]
    if e.op == "sym":
        return symbols[e.args[0]]
    if e.op == "aux":
        return _read(aux[e.args[0]], dtype)
    if known is not None and id(e) in known:
        return known[id(e)]
    if e.op == "gather":
        table, indices = aux[e.args[0].args[0]], [evaluate(i, symbols, aux, dtype, known) for i in e.args[1:]]
        whole = isinstance(table, torch.Tensor)
        found = _read(table[places(table, indices)], dtype) if whole else table[tuple(indices)]
    else:
        found = _FUNCTIONS[e.op](*_promoted(e.op, [evaluate(a, symbols, aux, dtype, known) for a in e.args], dtype))
    if known is not None:
        known[id(e)] = found
    return found


def _promoted(op: str, args: list[Any], dtype: torch.dtype | None) -> list[Any]:
    """Integers that become floats are of `dtype`, by default float32: torch would take its default dtype, which users
    change. So are numbers beside tensors of integers in functions."""
    dtype = dtype or torch.float32
    if op in FLOATS or op == "/" or (op in _INFIX_FUNCTIONS and float in map(type, args)):
        return [a.to(dtype) if isinstance(a, torch.Tensor) and not a.is_floating_point() else a for a in args]
    if op in _INFIX_FUNCTIONS or dtype == torch.float32:  # which functions take numbers as themselves
        return args
    device = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
    return [torch.tensor(a, dtype=dtype, device=device) if device and type(a) is float else a for a in args]


def _read(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return value
    return value.to(dtype) if value.is_floating_point() else value.long()


def places(table: torch.Tensor, indices: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Where a table is read: negative indices count from the end, and those beyond it are moved to its edge."""
    found = []
    for size, index in zip(table.shape, indices, strict=True):
        i = torch.as_tensor(index, device=table.device)
        found.append(torch.where(i < 0, i + size, i).clamp(0, size - 1))
    return tuple(found)


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
