"""Tracing of Python code that computes numbers of launches: it runs once with symbols in the place of sequence lengths
and strides, and what it does to them becomes a function of these, straight lines of Python.

A symbol has a value, that of the call it was made in. A comparison, or a test whether it is 0, is answered by the value
and becomes a guard: the function returns None for lengths that would be answered otherwise. Whatever else needs the
value (an index, a text, a struct) raises Untraceable, so that no result depends on a length without the function
knowing it.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch

Function = Callable[..., tuple[tuple[Any, ...], ...] | None]
NUMBERS = frozenset({int, float, bool})
_SYMBOLS = re.compile(r"\bx\d+")
_NAMES = itertools.count()  # of symbols, across traces


class Untraceable(Exception):
    """The value of a symbol was asked for."""


class Trace:
    """What code does to symbols, as lines of Python; `values` are those of its inputs."""

    def __init__(self, values: Sequence[int]) -> None:
        self.lines: dict[str, None] = {}
        self.known: dict[str, Symbol] = {}  # by what they are made of
        self.constants: dict[str, Any] = {"inf": math.inf, "nan": math.nan}
        self.inputs = [Symbol(self, f"x{next(_NAMES)}", value) for value in values]

    def made(self, text: str, value: Any) -> Symbol:
        """The symbol of an expression."""
        found = self.known.get(text)
        if found is None:
            found = self.known[text] = Symbol(self, f"x{next(_NAMES)}", value)
            self.lines[f"{found.name} = {text}"] = None
        return found

    def guard(self, text: str, holds: bool) -> bool:
        """Write down that this holds, or does not."""
        self.lines[f"if {'not ' * holds}({text}): return None"] = None
        return holds

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """What an opaque function returns, a number or a tuple of them: it is called again for each length."""
        found = function(*[a.value if isinstance(a, Symbol) else a for a in args])
        text = f"{self._constant(function)}({', '.join(map(self._text, args))})"
        if not isinstance(found, tuple):
            return self.made(text, found)
        whole = self.made(text, found)
        return tuple([self.made(f"{whole.name}[{i}]", value) for i, value in enumerate(found)])

    def function(self, *results: Iterable[Any]) -> Function:
        """Of the inputs, which returns these, as tuples; None where a guard fails. It ends the trace, whose symbols
        caches may keep."""
        given = ", ".join(symbol.name for symbol in self.inputs)
        parts = [f"({''.join(f'{self._text(x)}, ' for x in part)})" for part in results]
        lines, found = [f"return {', '.join(parts)},"], self.constants
        used = {*_SYMBOLS.findall(lines[0])}
        for line in reversed(self.lines):  # what nothing hangs on is left out
            names = _SYMBOLS.findall(line)
            if line.startswith("if ") or names[0] in used:
                used.update(names)
                lines.append(line)
        exec("\n ".join([f"def made({given}):", *reversed(lines)]), found)
        self.lines, self.known, self.constants = {}, {}, {}
        return found["made"]  # type: ignore[no-any-return]

    def _text(self, x: Any) -> str:
        if isinstance(x, Symbol):
            return x.name
        return repr(x) if x.__class__ in NUMBERS else self._constant(x)

    def _constant(self, x: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = x
        return name


def _binary(text: str, of: Callable[[Any, Any], Any], turned: bool = False) -> Any:
    def made(self: Symbol, other: Any) -> Any:
        x, y = (other, self) if turned else (self, other)
        if other.__class__ in NUMBERS or other.__class__ is Symbol:
            return self.trace.made(f"{_name(x)} {text} {_name(y)}", of(_value(x), _value(y)))
        return NotImplemented

    return made


def _comparison(text: str, of: Callable[[Any, Any], bool]) -> Any:
    def asked(self: Symbol, other: Any) -> Any:
        if other.__class__ in NUMBERS or (other.__class__ is Symbol and other.trace is self.trace):
            return self.trace.guard(f"{self.name} {text} {_name(other)}", of(self.value, _value(other)))
        return NotImplemented

    return asked


class Symbol:
    """A number of a trace. As a key it is itself, so that caches keep what is made of it apart from all else."""

    __slots__ = ("name", "trace", "value")

    def __init__(self, trace: Trace, name: str, value: Any) -> None:
        self.trace, self.name, self.value = trace, name, value

    __add__, __radd__ = _binary("+", operator.add), _binary("+", operator.add, turned=True)
    __sub__, __rsub__ = _binary("-", operator.sub), _binary("-", operator.sub, turned=True)
    __mul__, __rmul__ = _binary("*", operator.mul), _binary("*", operator.mul, turned=True)
    __mod__, __rmod__ = _binary("%", operator.mod), _binary("%", operator.mod, turned=True)
    __floordiv__, __rfloordiv__ = (_binary("//", operator.floordiv, turned) for turned in (False, True))
    __truediv__, __rtruediv__ = (_binary("/", operator.truediv, turned) for turned in (False, True))
    __lt__, __le__ = _comparison("<", operator.lt), _comparison("<=", operator.le)
    __gt__, __ge__ = _comparison(">", operator.gt), _comparison(">=", operator.ge)
    _equals, __hash__ = _comparison("==", operator.eq), object.__hash__

    def __eq__(self, other: object) -> Any:
        return self is other or self._equals(other)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __neg__(self) -> Symbol:
        return self.trace.made(f"-{self.name}", -self.value)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __ceil__(self) -> Any:
        return self.trace.call(math.ceil, [self])

    def bit_length(self) -> int:
        """Of integers."""
        found: int = self.value.bit_length()
        self.trace.guard(f"{self.name}.bit_length() == {found}", True)
        return found

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def _refuse(self, *_: Any) -> Any:
        raise Untraceable

    __index__ = __int__ = __float__ = __str__ = __format__ = _refuse


def _name(x: Any) -> str:
    return x.name if x.__class__ is Symbol else f"{x!r}"


def _value(x: Any) -> Any:
    return x.value if x.__class__ is Symbol else x


def opaque(function: Callable[..., Any]) -> Any:
    """A function of numbers that a trace calls as it is, whatever it does inside."""

    @wraps(function)
    def call(*args: Any) -> Any:
        for a in args:
            if a.__class__ is Symbol:
                return a.trace.call(function, args)
        return function(*args)

    return call


class SymbolicTensor:
    """A tensor without data, on 16 bytes, whose sizes and strides may be symbols."""

    is_meta = False

    def __init__(self, shape: tuple[Any, ...], strides: tuple[Any, ...], dtype: torch.dtype, device: Any) -> None:
        self.shape, self.strides, self.dtype, self.device = shape, strides, dtype, device
        self.itemsize = dtype.itemsize

    def stride(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.strides if dim is None else self.strides[dim]

    def element_size(self) -> int:
        """Bytes."""
        return self.itemsize

    def data_ptr(self) -> int:
        """An address on 16 bytes: nothing else is known of it."""
        return 0

    storage_offset = data_ptr

    def is_contiguous(self) -> bool:
        """As of a tensor."""
        step: Any = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != step:
                    return False
                step = step * size
        return True

    def transpose(self, one: int, other: int) -> SymbolicTensor:
        """As of a tensor."""
        turn = [*range(len(self.shape))]
        turn[one], turn[other] = turn[other], turn[one]
        shape, strides = (tuple([x[i] for i in turn]) for x in (self.shape, self.strides))
        return SymbolicTensor(shape, strides, self.dtype, self.device)

    def view(self, dtype: torch.dtype) -> SymbolicTensor:
        """As of a tensor."""
        return SymbolicTensor(self.shape, self.strides, dtype, self.device)

    def to(self, dtype: torch.dtype) -> SymbolicTensor:
        """Itself: nothing is copied."""
        if dtype != self.dtype:
            raise Untraceable
        return self

    def like(self) -> SymbolicTensor:
        """What `torch.empty_like` makes of it: dense, with its dims in the order of their strides. Of two equal
        strides, one must be of a dim of size 1, whose stride is never used."""
        shape, given = self.shape, self.strides
        order = sorted(range(len(shape)), key=lambda dim: (_value(given[dim]), -dim))
        for i, j in itertools.pairwise(order):
            if not (given[i] < given[j] or (given[i] == given[j] and (shape[i] == 1 or shape[j] == 1))):
                raise Untraceable
        strides: list[Any] = [0] * len(order)
        step: Any = 1
        for dim in order:
            strides[dim], step = step, step * self.shape[dim]
        return SymbolicTensor(self.shape, tuple(strides), self.dtype, self.device)


def empty_like(t: torch.Tensor) -> torch.Tensor:
    """torch's, of a symbolic tensor too."""
    return t.like() if isinstance(t, SymbolicTensor) else torch.empty_like(t)  # type: ignore[return-value]
