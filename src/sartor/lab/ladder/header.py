"""A rung's header: TOML at the head of its file, which says what it is, and for CUDA C++ how it is launched."""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HEADER = {".cu": re.compile(r"/\* rung\n(.*?)\*/\n", re.DOTALL), ".py": re.compile(r'"""rung\n(.*?)"""\n', re.DOTALL)}
FACTS = ("number", "title", "idea", "source", "claim", "arch", "dtypes", "dims", "causal", "before", "expect")
LAUNCH = ("block", "grid", "shared", "workspace")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., int]] = {"cdiv": lambda a, b: -(-a // b), "min": min, "max": max}


def read(path: Path) -> tuple[dict[str, Any], str]:
    """The header of a rung's file, complete, and the text after it. ValueError names the file and what is amiss."""
    text = path.read_text(encoding="utf-8")
    match = _HEADER[path.suffix].match(text)
    if match is None:
        raise ValueError(f"{path.name} must begin with a rung header")
    try:
        table = tomllib.loads(match[1])
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path.name}: its header must be TOML: {error}") from None
    needed = {*FACTS, *(LAUNCH if path.suffix == ".cu" else ())}
    lacking, unknown = needed - set(table), set(table) - {*FACTS, *LAUNCH, "parameters", "search", "kernel"}
    if lacking or unknown:
        raise ValueError(f"{path.name}: its header lacks {sorted(lacking)}, has unknown keys {sorted(unknown)}")
    if path.name.split("_")[0] != table["number"]:
        raise ValueError(f"{path.name} must begin with its number, got {table['number']!r}")
    return table, text[match.end() :].lstrip("\n")


def evaluate(expression: str | int, names: Mapping[str, int]) -> list[int]:
    """The integers of an expression such as `[cdiv(N, BM), BH]`; one without brackets gives one.

    It knows + - * // %, cdiv, min, max and `names`; everything else is a ValueError, with the text.
    """

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if name in names:
                return int(names[name])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*map(value, args))
        known = "integers, + - * // %, cdiv, min, max, " + ", ".join(names)
        raise ValueError(f"an expression must be made of {known}, got {text!r}")

    text = str(expression)
    try:
        body = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ValueError(f"an expression must be arithmetic, got {text!r}") from None
    return [value(e) for e in (body.elts if isinstance(body, ast.List) else [body])]
