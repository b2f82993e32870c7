"""What PyTorch's functions and methods mean of symbolic values, so that a function written for tensors can be traced.

`torch.where(q >= kv, s, 0)`, `(q - kv).abs()` and `torch.logical_and(x, y)` are operators and functions of
`sartor.mods` by other names. A name that is not among them is refused, with those that are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sartor.mods import expr
from sartor.mods.constant import constant
from sartor.mods.expr import Expr, lift, maximum, minimum, where


def _operator(op: str) -> Callable[..., Expr]:
    return lambda a, b: Expr(op, (lift(a), lift(b)))


def _scaled(op: str) -> Callable[..., Any]:
    """`torch.add` and `torch.sub`."""
    return lambda a, b, *, alpha=1: _OPERATORS[op](a, b if alpha == 1 else lift(b) * alpha)


def _divided(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode not in (None, "floor"):
        raise TypeError(f"rounding_mode must be None or 'floor' in a mask or score function, got {rounding_mode!r}")
    return _OPERATORS["/" if rounding_mode is None else "//"](a, b)


def _cast(x: Any, dtype: Any = None, *others: Any, **rest: Any) -> Any:
    """`.to(dtype)`: a float of any width is a float here, an integer of any an integer."""
    if isinstance(dtype, torch.device | str):  # symbolic values lie nowhere
        return x
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"`to` must be given a dtype in a mask or score function, got {dtype!r}")
    if dtype == torch.bool:
        return _OPERATORS["!="](x, 0)
    return _OPERATORS["*"](x, 1.0) if dtype.is_floating_point else expr.truncate(x)


def _filled(x: Any, size: Any = (), value: Any = 0, dtype: torch.dtype | None = None, **rest: Any) -> Any:
    """`new_full`: a number, since a symbolic value is one."""
    if tuple(size):
        raise TypeError(f"size must be () in a mask or score function, whose values are numbers, got {tuple(size)}")
    return lift(value if dtype is None else bool(value) if dtype == torch.bool else value)


def _one_of_two(name: str, chosen: Callable[..., Any]) -> Callable[..., Any]:
    def call(a: Any, *others: Any, **rest: Any) -> Any:
        if len(others) != 1 or rest or not isinstance(others[0], (Expr, torch.Tensor, int, float)):
            raise TypeError(f"`{name}` must be of two values in a mask or score function, got {1 + len(others)}")
        return chosen(a, others[0])

    return call


def _gathered(x: Any, index: Any) -> Any:
    """Where a strict export traces, a tensor's index does not come to the mode of `capture`."""
    return (expr.IN_GRAPH[-1].table(x) if expr.IN_GRAPH and isinstance(x, torch.Tensor) else x)[index]


_OPERATORS = {op: _operator(op) for op in (*expr.INFIX, "pow")}
_COMPARED = {
    "<": ("lt", "less"), "<=": ("le", "less_equal"), ">": ("gt", "greater"), ">=": ("ge", "greater_equal"),
    "==": ("eq",), "!=": ("ne", "not_equal"),
}  # fmt: skip
_LOGICAL = {"&": "and", "|": "or", "^": "xor"}
KNOWN: dict[str, Callable[..., Any]] = {
    "add": _scaled("+"), "sub": _scaled("-"), "subtract": _scaled("-"), "rsub": lambda a, b: _OPERATORS["-"](b, a),
    "mul": _OPERATORS["*"], "multiply": _OPERATORS["*"], "div": _divided, "divide": _divided, "true_divide": _divided,
    "floor_divide": _OPERATORS["//"], "floordiv": _OPERATORS["//"], "rfloordiv": lambda a, b: _OPERATORS["//"](b, a),
    "remainder": _OPERATORS["%"], "pow": _OPERATORS["pow"], "rpow": lambda a, b: _OPERATORS["pow"](b, a),
    "rdiv": lambda a, b: _OPERATORS["/"](b, a),
    **dict.fromkeys(("neg", "negative"), lambda x: Expr("neg", (lift(x),))), "abs": abs, "absolute": abs,
    "exp": expr.exp, "exp2": expr.exp2, "log": expr.log, "sqrt": expr.sqrt, "tanh": expr.tanh,
    "sigmoid": expr.sigmoid, "square": lambda x: x * x, "rsqrt": lambda x: 1.0 / expr.sqrt(x),
    "reciprocal": lambda x: 1.0 / x, "floor": lambda x: x // 1, "relu": lambda x: maximum(x, 0),
    "sign": lambda x: where(x > 0, 1, where(x < 0, -1, 0)), "clamp": expr.clamp, "clip": expr.clamp,
    "clamp_min": maximum, "clamp_max": minimum, "maximum": maximum, "minimum": minimum,
    "max": _one_of_two("max", maximum), "min": _one_of_two("min", minimum), "where": where,
    **dict.fromkeys(("logical_not", "bitwise_not", "invert"), lambda x: Expr("invert", (x,))),  # `~` Dynamo lacks
    "float": partial(_cast, dtype=torch.float32), "double": partial(_cast, dtype=torch.float32),
    "half": partial(_cast, dtype=torch.float32), "bfloat16": partial(_cast, dtype=torch.float32),
    "int": expr.truncate, "long": expr.truncate, "trunc": lambda x: _OPERATORS["*"](expr.truncate(x), 1.0),
    "bool": partial(_cast, dtype=torch.bool), "to": _cast, "type": _cast, "clone": lift, "detach": lift,
    "new_ones": partial(_filled, value=1), "new_zeros": _filled, "new_full": _filled,
    "ones_like": lambda x, **rest: _filled(x, value=1, **rest), "zeros_like": lambda x, **rest: _filled(x, **rest),
    "full_like": lambda x, value, **rest: _filled(x, value=value, **rest), "getitem": _gathered,
}  # fmt: skip
KNOWN |= {name: _OPERATORS[op] for op, names in _COMPARED.items() for name in names}
KNOWN |= {f"{kind}{name}": _OPERATORS[op] for op, name in _LOGICAL.items() for kind in ("", "logical_", "bitwise_")}
SAID = (
    "use operators (+ - * / // % ** & | ^ ~, comparisons), indexing of tensors, and of torch or sartor.mods abs, exp,"
    " exp2, log, sqrt, pow, tanh, sigmoid, clamp, minimum, maximum, where"
)


@constant  # where Dynamo traces, functions have no names
def name_of(func: Any) -> str:
    """A function of torch's, without the underlines of its operators."""
    return getattr(func, "__name__", str(func)).strip("_")


def on_symbols(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of torch's on symbolic values and tensors. Raises TypeError where it has no meaning here."""
    name = name_of(func)
    found = KNOWN.get(name)
    if found is None:
        raise TypeError(f"`{name}` is not known in a mask or score function: {SAID}")
    named = {"input": 0, "self": 0, "other": 1, "exponent": 1}  # torch's names of what is here by place
    left = dict(sorted(kwargs.items(), key=lambda item: named.get(item[0], 2)))
    placed = [left.pop(n) for n in list(left) if n in named]
    left.pop("out", None)
    return found(*placed, *args, **left) if "input" in kwargs else found(*args, *placed, **left)


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return on_symbols(func, args, kwargs or {})


def _attribute(self: Expr, name: str) -> Any:
    """A method of tensors."""
    if name in KNOWN:
        return partial(KNOWN[name], self)
    if name == "dtype" and self.op == "sym":
        return torch.float32 if self.args[0] == "s" else torch.int32
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"a symbolic value has no `{name}`: {SAID}")


Expr.__torch_function__ = classmethod(_torch_function)  # type: ignore[attr-defined]
Expr.__getattr__ = _attribute  # type: ignore[attr-defined]
