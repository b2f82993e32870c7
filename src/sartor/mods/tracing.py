"""From a mod's function to an expression that means the same in every language, and what is known of one.

A function is called once, on symbols. Aux values are what it reads besides: numbers, functions of the lengths, tensors.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import traceback
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from sartor.checks import is_integer, real
from sartor.mods.expr import FLOATS, LEAVES, Expr, Traced, exp2, floor_divide, lift, log, sqrt, where
from sartor.mods.placed import Placed
from sartor.mods.recent import Recent
from sartor.mods.torch_names import SAID
from sartor.symbols import Symbol

COMPARISONS = frozenset(["<", "<=", ">", ">=", "==", "!="])
ARITHMETIC = frozenset(["+", "-", "*", "/", "//", "%", "neg", "abs", "maximum", "minimum", "pow", "<", "<=", ">", ">="])
_NOT_ITS_OWN = tuple(os.path.dirname(f) + os.sep for f in (__file__, torch.__file__))
_MOST_FACTORS = 16  # of a power that is written as a product
AuxValue = int | float | torch.Tensor | Callable[[int, int], int]


def four_dims(t: torch.Tensor) -> torch.Tensor:
    """The tensor with dims of size 1 in front, up to (batch, heads, seqlen_q, seqlen_kv)."""
    return t if t.dim() == 4 else t[(None,) * (4 - t.dim())]


def resolve(value: AuxValue, seqlen_q: int, seqlen_kv: int) -> Any:
    """The aux value of one problem: functions of the lengths are called, tensors get four dims."""
    if isinstance(value, torch.Tensor):
        return four_dims(value)
    if not callable(value):
        return value
    found: Any = value(seqlen_q, seqlen_kv)
    if isinstance(found, (int, torch.SymInt, Symbol)):
        return found
    if not is_integer(found):
        raise TypeError(
            "a function among the aux values of a mask or score must return an integer for seqlen_q and seqlen_kv,"
            f" {seqlen_q} and {seqlen_kv}, got {type(found).__name__}: {found!r}"
        )
    return operator.index(found)


def pattern(value: AuxValue, table: bool = False) -> str:
    """Of which of b, h, q, k (kv) a tensor depends, upper case where its stride is 1; "n" or "f" for a number; of a
    table, which is dense, "t" or, of 2^31 elements, "T", and how many dims it has."""
    if not isinstance(value, torch.Tensor):
        return "f" if isinstance(value, float) else "n"
    if table:
        return f"{'t' if value.numel() < 2**31 else 'T'}{value.dim()}"
    letters = "bhqk"[4 - value.dim() :]
    sizes = zip(letters, value.shape, value.stride(), strict=True)
    return "".join(c.upper() if stride == 1 else c for c, size, stride in sizes if size != 1) or "one"


def trace(fn: Callable[..., Any], names: tuple[str, ...], n_aux: int) -> Any:
    """Call `fn` on symbols: an expression, or a tuple of them."""
    if isinstance(fn, Traced) and fn.names == names:
        return fn.found
    symbols = [Expr("sym", (name,)) for name in names]
    if takes_aux(fn, names):
        symbols.append(tuple(Expr("aux", (i,)) for i in range(n_aux)))  # type: ignore[arg-type]
    try:
        result = fn(*symbols)
        return tuple(lift(r) for r in result) if isinstance(result, tuple) else lift(result)
    except (TypeError, AttributeError, IndexError) as error:
        if isinstance(error, TypeError) and not isinstance(fn, Traced) and not _is_ours(error):
            raise
        raise TypeError(f"{_first_line(error)}{_place(fn, error)}") from error


def takes_aux(fn: Callable[..., Any], names: tuple[str, ...]) -> bool:
    """Whether a function asks for aux after the positions: by one more argument without a default, or by any number.
    Raises TypeError where it takes others than these."""
    if torch.compiler.is_dynamo_compiling():  # which does not look into signatures
        code = getattr(fn, "__code__", None)
        return code is not None and code.co_argcount - len(fn.__defaults__ or ()) > len(names)  # type: ignore[attr-defined]
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # of builtins
        return True
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed, any_number = sum(p.default is p.empty for p in placed), any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if needed > len(names) + 1 or (len(placed) < len(names) and not any_number):
        raise TypeError(
            f"a mask or score function must take ({', '.join(names)}) or ({', '.join(names)}, aux), got one that takes"
            f" ({', '.join(p.name for p in placed)})"
        )
    return needed == len(names) + 1 or any_number


def _is_ours(error: TypeError) -> bool:
    """Whether it was raised of symbolic values, and not by something that has nothing to do with them."""
    return "symbolic" in str(error) or "mask or score" in str(error) or "Expr" in str(error) or "table[" in str(error)


def _first_line(error: Exception) -> str:
    """Of its message; where an operator, PyTorch or Python refused a symbolic value, with what to write instead."""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, IndexError):
        return (
            f"a mask or score function must not read beyond what there is, got {said}: is it an aux that was not given?"
        )
    return f"a mask or score function must {SAID}, got {said}" if "Expr" in said else said


def _place(fn: Callable[..., Any], error: BaseException) -> str:
    """The last line of the caller's own that led to an error."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_ITS_OWN)]
    if not own:
        return ""
    return f" (line {own[-1].lineno} of {os.path.basename(own[-1].filename)}: `{own[-1].line}`)"


def traced(fn: Callable[..., Any], names: tuple[str, ...], aux: tuple[Any, ...]) -> Any:
    """`trace`, in a form whose value is Python's in every language that kernels are written in."""
    found = trace(fn, names, len(aux))
    return tuple(portable(e, aux) for e in found) if isinstance(found, tuple) else portable(found, aux)


def portable(e: Expr, aux: tuple[AuxValue, ...]) -> Expr:
    """The same value in every language. `//` and `%` round down, as in Python, and not towards 0, as in Triton and C++.
    Where True is counted or ordered it is 1. `~` of a bool is `^ True`: of a Python bool, and of `a & b` in C++, it is
    that of an integer. What cannot differ stays as it is."""
    if e.op in LEAVES:
        return e
    given, args = e.args, tuple(portable(a, aux) for a in e.args)
    if e.op == "truncate" and not is_real(given[0], aux):
        return _counted(args[0]) if is_boolean(args[0], aux) else args[0]
    if e.op in FLOATS and is_boolean(args[0], aux):
        args = (_counted(args[0]),)
    if e.op == "gather":  # the table itself stays as it is
        args = (args[0], *(_counted(a) if is_boolean(a, aux) else a for a in args[1:]))
    elif e.op in ARITHMETIC or (e.op in COMPARISONS and not all(is_boolean(a, aux) for a in args)):
        args = tuple(_counted(a) if is_boolean(a, aux) else a for a in args)
    e = Expr(e.op, args)
    if e.op == "pow":
        return _product(e, aux)
    if e.op == "invert" and is_boolean(e, aux):
        return Expr("^", (args[0], lift(True)))
    if e.op not in ("//", "%"):
        return e
    if is_real(e, aux):
        a, b = e.args
        floor = floor_divide(a, b)
        return floor if e.op == "//" else a - b * floor  # type: ignore[no-any-return]
    if all(map(not_negative, given)):
        return e
    a, b = e.args
    rest = a % b
    low, high = rest < 0, rest > 0
    wrong = low if not_negative(given[1]) else (low & (b > 0)) | (high & (b < 0))
    right = rest + b if e.op == "%" else Expr("-", (e, lift(1)))
    return where(wrong, right, e)  # type: ignore[no-any-return]


def _product(e: Expr, aux: tuple[AuxValue, ...]) -> Expr:
    """A power as languages without one have it."""
    x, y = e.args
    n = y.args[0] if y.op == "const" and abs(y.args[0]) <= _MOST_FACTORS else None
    if n is not None and 2 * n == int(2 * n) and (is_real(e, aux) or n >= 0):
        factors = [x] * abs(int(n)) + [sqrt(x)] * (n != int(n))
        found: Any = functools.reduce(operator.mul, factors) if factors else lift(1)
        found = found * 1.0 if isinstance(n, float) and not is_real(found, aux) else found
        return found if n >= 0 else 1.0 / found  # type: ignore[no-any-return]
    if not is_real(e, aux):
        raise TypeError(
            "a power of integers in a mask or score function must have a constant exponent from 0 to"
            f" {_MOST_FACTORS}, got {y.text()}: write 2.0 ** x or sartor.mods.exp2(x)"
        )
    known = x.op == "const" and x.args[0] > 0
    return exp2(y * (math.log2(x.args[0]) if known else log(x) * (1 / math.log(2))))  # type: ignore[no-any-return]


def _counted(e: Expr) -> Expr:
    return lift(int(e.args[0])) if e.op == "const" else where(e, 1, 0)  # type: ignore[no-any-return]


def not_negative(e: Expr) -> bool:
    """Whether that is certain."""
    if e.op == "const":
        return bool(e.args[0] >= 0)
    if e.op == "sym":
        return bool(e.args[0] != "s")  # the others are positions
    if e.op == "%":
        return not_negative(e.args[1])
    if e.op in ("+", "*", "//", "minimum"):
        return all(map(not_negative, e.args))
    if e.op == "maximum":
        return any(map(not_negative, e.args))
    return e.op == "abs" or (e.op == "where" and all(map(not_negative, e.args[1:])))


def is_real(e: Any, aux: tuple[AuxValue, ...]) -> bool:
    """Whether what was traced is a float."""
    if e.op == "sym":
        return bool(e.args[0] == "s")
    if e.op == "const":
        return isinstance(e.args[0], float)
    if e.op == "aux":
        value = aux[e.args[0]]
        return value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)
    if e.op == "gather":
        return is_real(e.args[0], aux)
    if e.op == "truncate":
        return False
    if e.op in FLOATS or e.op in ("/", "floor_divide"):
        return True
    args = e.args[1:] if e.op == "where" else e.args
    return e.op not in COMPARISONS and any(is_real(a, aux) for a in args)


def is_boolean(e: Any, aux: tuple[AuxValue, ...]) -> bool:
    """Whether what was traced is True or False everywhere, so that `&`, `|` and `~` of it mean what they say."""
    if not isinstance(e, Expr):
        return False
    if e.op == "aux":
        return getattr(aux[e.args[0]], "dtype", None) == torch.bool
    if e.op == "const":
        return isinstance(e.args[0], bool)
    if e.op == "gather":
        return is_boolean(e.args[0], aux)
    if e.op in ("&", "|", "^", "invert"):
        return all(is_boolean(a, aux) for a in e.args)
    if e.op == "where":
        return all(is_boolean(a, aux) for a in e.args[1:])
    return e.op in COMPARISONS


def text_of(value: AuxValue) -> str:
    """An aux value without data: of a tensor its dtype and the dims it varies along, of a function what it computes.
    Of one that could not be traced its number."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}[{', '.join('1' if n == 1 else 'n' for n in value.shape)}]"
    if isinstance(value, Traced):
        return value.found.text()  # type: ignore[union-attr]
    return f"function {_number(value)}" if callable(value) else repr(value)


def _number(fn: Callable[..., Any]) -> int:
    """Of a function that is told from others by what it is alone. Its address would serve another one after it, of
    which plans that are kept know nothing."""
    known = _NUMBERS.get(id(fn))
    if known is None or known[0]() is not fn:
        try:
            kept: Any = weakref.ref(fn)
        except TypeError:  # it lives as long as its number is known
            kept = lambda: fn  # noqa: E731 - in the place of a reference
        known = kept, next(_COUNT)
        _NUMBERS.add(id(fn), known)
    return known[1]  # type: ignore[no-any-return]


_NUMBERS, _COUNT = Recent(4096), count()  # by address: a reference, and the number


def aux_value(i: int, value: Any) -> AuxValue:
    """One aux value, numbers of other libraries as Python's, functions of the lengths traced where that is possible."""
    if type(value) in (bool, int, float) or isinstance(value, (torch.Tensor, Traced, Placed)):
        return value  # type: ignore[no-any-return]
    if callable(value):
        names = "seqlen_q", "seqlen_kv"
        try:
            return Traced(names, lift(value(*(Expr("sym", (name,)) for name in names))))
        except Exception:  # it compares, or asks for more
            return value  # type: ignore[no-any-return]
    try:
        return operator.index(value) if is_integer(value) else real(f"aux[{i}]", value)
    except TypeError:
        raise TypeError(
            f"aux[{i}] must be a number, a tensor or a function of (seqlen_q, seqlen_kv), got"
            f" {type(value).__name__}: {str(value)[:60]}"
        ) from None
