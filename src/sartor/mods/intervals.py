"""Intervals that a mask's predicate stays within, read off its expression: what kernels skip tiles by.

Of a predicate and one of its variables, (lo, hi, full_lo, full_hi): it is False outside [lo, hi), True inside
[full_lo, full_hi). A comparison of integers is solved for the variable where that stands on one side of it, once, under
+, -, abs, minimum, maximum, or a product or quotient by a positive constant: `q - kv < n`, `abs(q - kv) <= n`,
`q // n == kv // n`. `&` meets the intervals of its sides, `|` takes their hull. Of all else nothing is known.
"""

from __future__ import annotations

from typing import Any

from sartor.lengths.intervals import NO_SIDE
from sartor.mods import expr
from sartor.mods.expr import Expr, lift, where
from sartor.mods.tracing import AuxValue, is_real

BIG = NO_SIDE  # beyond every position
Span = tuple[Any, Any, Any, Any]
Ends = tuple[Any, Any]  # [lo, hi)
NOTHING_KNOWN: Span = (0, BIG, BIG, 0)
FLIPPED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
AXES = {"q": 2, "kv": 3}


def spans(keep: Expr, name: str, aux: tuple[AuxValue, ...]) -> tuple[Expr, ...]:
    """The intervals of `keep` in the variable `name`, "q" or "kv"."""
    return tuple(lift(e) for e in _span(keep, _Solver(name, aux)))


def meet(x: Span, y: Span) -> Span:
    """Of what both keep."""
    none = none_full(x) or none_full(y)
    full = (BIG, 0) if none else (_most(x[2], y[2]), _least(x[3], y[3]))
    return _most(x[0], y[0]), _least(x[1], y[1]), *full


def hull(x: Span, y: Span) -> Span:
    """Of what either keeps. Intervals with an end in common are one."""
    lo, hi = 0 if 0 in (_number(x[0]), _number(y[0])) else _least(x[0], y[0]), _most(x[1], y[1])
    if _exact(x) and _exact(y) and (_same(x[0], y[0]) or _same(x[1], y[1])):
        return lo, hi, lo, hi
    if none_full(x) or none_full(y):
        return lo, hi, *(y if none_full(x) else x)[2:]
    longer = (x[3] - x[2]) >= (y[3] - y[2])
    return lo, hi, where(longer, x[2], y[2]), where(longer, x[3], y[3])


def _span(e: Expr, solver: _Solver) -> Span:
    if e.op == "const":
        return (0, BIG, 0, BIG) if e.args[0] else (0, 0, BIG, 0)
    if not solver.reads(e):
        return (*_if(e), *_if(e))
    if e.op in ("&", "|"):
        return (meet if e.op == "&" else hull)(*(_span(a, solver) for a in e.args))
    if e.op == "invert" and e.args[0].op in FLIPPED:
        e = Expr(FLIPPED[e.args[0].op], e.args[0].args)
    if e.op in FLIPPED:
        ends = solver.comparison(e)
        return NOTHING_KNOWN if ends is None else (*ends, *ends)
    return NOTHING_KNOWN


def reads(e: Expr, name: str, aux: tuple[AuxValue, ...]) -> bool:
    """Whether the value of `e` may depend on the variable."""
    return _Solver(name, aux).reads(e)


class _Solver:
    """Comparisons, solved for one variable."""

    def __init__(self, name: str, aux: tuple[AuxValue, ...]) -> None:
        self.name, self.aux = name, aux

    def comparison(self, e: Expr) -> Ends | None:
        """Where it is True, if that is an interval that can be told."""
        x, y = e.args
        if is_real(x, self.aux) or is_real(y, self.aux) or self.reads(x) == self.reads(y):
            return None
        sign = e.op
        if self.reads(y):
            x, y, sign = y, x, {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(sign, sign)
        if sign == "==":
            return _both(self.at_most(x, y), self.at_least(x, y))
        if sign in ("<", "<="):
            return self.at_most(x, y if sign == "<=" else _plus(y, -1))
        return self.at_least(x, y if sign == ">=" else _plus(y, 1)) if sign in (">", ">=") else None

    def reads(self, e: Expr) -> bool:
        """Whether its value may depend on the variable."""
        if e.op == "sym":
            return bool(e.args[0] == self.name)
        if e.op == "aux":
            shape = getattr(self.aux[e.args[0]], "shape", ())
            shape = (1,) * (4 - len(shape)) + tuple(shape)
            return bool(shape[AXES[self.name]] != 1)
        return any(self.reads(a) for a in (e.args[1:] if e.op == "gather" else e.args) if isinstance(a, Expr))

    def at_most(self, e: Expr, k: Any) -> Ends | None:
        """Where e <= k, which does not depend on the variable."""
        if e.op == "sym":
            return 0, _plus(k, 1)
        if e.op == "abs":
            return _both(self.at_most(e.args[0], k), self.at_least(e.args[0], _minus(0, k)))
        if e.op == "maximum":
            return _both(*(self.at_most(a, k) if self.reads(a) else _if(a <= k) for a in e.args))
        if e.op == "minimum":
            return self._either(e, k, self.at_most, lambda fixed: fixed <= k)
        return self._moved(e, k, self.at_most, self.at_least)

    def at_least(self, e: Expr, k: Any) -> Ends | None:
        """Where e >= k."""
        if e.op == "sym":
            return k, BIG
        if e.op == "minimum":
            return _both(*(self.at_least(a, k) if self.reads(a) else _if(a >= k) for a in e.args))
        if e.op == "maximum":
            return self._either(e, k, self.at_least, lambda fixed: fixed >= k)
        return self._moved(e, k, self.at_least, self.at_most)

    def _either(self, e: Expr, k: Any, solve: Any, holds: Any) -> Ends | None:
        """Where one of two does, of which one is the same everywhere."""
        x, fixed = e.args if self.reads(e.args[0]) else e.args[::-1]
        found = None if self.reads(fixed) else solve(x, k)
        return found and (_where(holds(fixed), 0, found[0]), _where(holds(fixed), BIG, found[1]))

    def _moved(self, e: Expr, k: Any, same: Any, opposite: Any) -> Ends | None:
        """Of `same`, e <= k or e >= k: with what does not read the variable brought to the other side."""
        if e.op == "neg":
            return opposite(e.args[0], _minus(0, k))  # type: ignore[no-any-return]
        if e.op not in ("+", "-", "*", "//") or (self.reads(e.args[0]) and self.reads(e.args[1])):
            return None
        x, fixed = e.args if self.reads(e.args[0]) else e.args[::-1]
        if e.op == "+":
            return same(x, _minus(k, fixed))  # type: ignore[no-any-return]
        if e.op == "-":
            return same(x, _plus(k, fixed)) if x is e.args[0] else opposite(x, _minus(fixed, k))  # type: ignore[no-any-return]
        n = fixed.args[0] if fixed.op == "const" and isinstance(fixed.args[0], int) else 0
        if n <= 0 or (e.op == "//" and x is not e.args[0]):
            return None
        least = same == self.at_least
        if e.op == "//":  # x // n <= k where x < (k + 1) n
            return same(x, _times(k, n) if least else _plus(_times(k, n), n - 1))  # type: ignore[no-any-return]
        return same(x, _plus(k, n - 1) // n if least else k // n)  # type: ignore[no-any-return]


def _both(x: Ends | None, y: Ends | None) -> Ends | None:
    return None if x is None or y is None else (_most(x[0], y[0]), _least(x[1], y[1]))


def _if(holds: Any) -> Ends:
    """Everything or nothing."""
    return where(holds, 0, BIG), BIG


def _where(condition: Any, x: Any, y: Any) -> Any:
    return x if _same(x, y) else where(condition, x, y)


def _exact(x: Span) -> bool:
    return _same(x[0], x[2]) and _same(x[1], x[3])


def none_full(x: Span) -> bool:
    return _same(x[2], BIG) and _same(x[3], 0)


def _same(x: Any, y: Any) -> bool:
    return lift(x).text() == lift(y).text()


def _number(x: Any) -> Any:
    """The number that it is, or None."""
    value = x.args[0] if isinstance(x, Expr) and x.op == "const" else x
    return value if isinstance(value, int) else None


def _most(x: Any, y: Any) -> Any:
    """The larger end: 0 is below every other, unless that is known."""
    if _same(x, y) or _number(y) == 0:
        return x
    return y if _number(x) == 0 else expr.maximum(x, y)


def _least(x: Any, y: Any) -> Any:
    if _same(x, y) or _number(y) == BIG:
        return x
    return y if _number(x) == BIG else expr.minimum(x, y)


def _plus(x: Any, y: Any) -> Any:
    """The sum, a constant at its end joined with another."""
    a, b = _number(x), _number(y)
    if a is not None and b is not None:
        return a + b
    if a is not None:
        x, y, b = y, x, a
    if b == 0:
        return x
    if b is None:
        return x + y
    if x.op in ("+", "-") and _number(x.args[1]) is not None:
        n = _number(x.args[1])
        return _plus(x.args[0], (n if x.op == "+" else -n) + b)
    return x + b if b > 0 else x - -b


def _minus(x: Any, y: Any) -> Any:
    n = _number(y)
    if n is not None:
        return _plus(x, -n)
    return -y if _number(x) == 0 else x - y


def _times(x: Any, n: int) -> Any:
    return x if n == 1 else x * n
