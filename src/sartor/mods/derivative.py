"""Derivatives of expressions: of a score by the raw score, and by what it reads of tables that are trained."""

from __future__ import annotations

import math

from sartor.mods.expr import Expr, lift, where

# What rises in steps, or is read
STEPS = frozenset(["<", "<=", ">", ">=", "==", "!=", "&", "|", "^", "invert", "floor_divide", "truncate"])
ZERO, ONE = lift(0.0), lift(1.0)


def diff(e: Expr, name: str) -> Expr:
    """Derivative of `e` by what has the text `name`: a symbol, an aux value or a `gather`. What rises in steps is
    constant, and so are all others of these."""
    if e.op in ("sym", "aux", "gather"):
        return ONE if e.text() == name else ZERO
    if e.op in STEPS or not any(n.op in ("sym", "aux", "gather") and n.text() == name for n in e.nodes()):
        return ZERO
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
    if e.op == "sigmoid":
        return _times(Expr("*", (e, Expr("-", (ONE, e)))), parts[0])
    if e.op == "exp":
        return _times(e, parts[0])
    if e.op == "exp2":
        return _times(Expr("*", (e, lift(math.log(2)))), parts[0])
    if e.op == "log":
        return Expr("/", (parts[0], e.args[0]))
    if e.op == "sqrt":
        return Expr("/", (_times(lift(0.5), parts[0]), e))
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
