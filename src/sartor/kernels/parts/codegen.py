"""From a Program to Triton functions: the same expressions the reference evaluates, as source text.

Each generated function takes (b, h, q, kv, aux), loads the aux values it reads at that position
and returns its expression. Positions may be scalars, vectors or broadcastable tiles; the text does not care. They must
be valid ones: a load without a mask can be as wide as its tensor's alignment allows.
"""

from __future__ import annotations

import hashlib
import linecache
import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sartor.kernels.parts import maths
from sartor.mods.core import BIG, Aux, Program
from sartor.mods.expr import Expr

_POSITION = {"b": "b", "h": "h", "q": "q", "k": "kv"}
_FUNCTIONS = {"abs": "tl.abs", "maximum": "tl.maximum", "minimum": "tl.minimum", "where": "tl.where"}
_SHARED = {"tanh": maths.tanh, "divide": maths.divide, "floor_divide": maths.floor_divide}
_NARROW = (torch.int8, torch.int16, torch.uint8)  # read as int32, so that arithmetic does not wrap around


class Mods(NamedTuple):
    """Jitted functions, None where the program has none."""

    keep: Any
    rows: Any
    cols: Any
    score: Any
    dscore: Any


def source(program: Program) -> str:
    """The generated module, empty for an empty program."""
    blocks = []
    for name in ("keep", "score", "dscore"):
        expr = getattr(program, name)
        if expr is not None:
            first = "" if name == "keep" else "s, "
            blocks.append(_function(name, f"{first}b, h, q, kv", (expr,), program, ""))
    for name, position in (("rows", "q"), ("cols", "kv")):
        exprs = getattr(program, name)
        if exprs is not None:
            blocks.append(_function(name, f"b, h, {position}", exprs, program, f" + {position} * 0"))
    return "\n\n".join(blocks)


def _function(name: str, arguments: str, exprs: tuple[Expr, ...], program: Program, spread: str) -> str:
    reads = sorted({int(leaf[4:-1]) for e in exprs for leaf in e.leaves() if leaf.startswith("aux[")})
    lines = ["@triton.jit", f"def {name}({arguments}, aux):"]
    lines += [f"    a{i} = {_load(i, program.aux[i])}" for i in reads]
    functions = _FUNCTIONS if "score" in name else _FUNCTIONS | {"/": "divide"}  # masks divide exactly
    results = [f"{e.text(_leaf, functions)}{spread}" for e in exprs]
    return "\n".join([*lines, f"    return {', '.join(results)}"])


def _leaf(e: Expr) -> str:
    if e.op == "aux":
        return f"a{e.args[0]}"
    value = e.args[0]
    if e.op == "sym" or isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    return str(value) if abs(value) < 2**31 else f"tl.full([], {value}, tl.int64)"


def _load(i: int, spec: Aux) -> str:
    if spec.pattern == "f":
        return f"aux[{i}]"
    if spec.pattern == "n":
        return f"(aux[{i}] >> 2)"  # see aux_arguments
    dtype: torch.dtype = getattr(torch, spec.dtype.removeprefix("torch."))
    kind = "float32" if dtype.is_floating_point else "int32" if dtype in _NARROW else ""
    return f"tl.load({_place(i, spec.pattern)})" + (f".to(tl.{kind})" if kind else "")


def _place(i: int, pattern: str) -> str:
    """Where the value at (b, h, q, kv) lies."""
    if pattern == "one":
        return f"aux[{i}][0]"
    # strides times positions in 64 bits, a bias alone may have more than 2^31 elements; one at a time, in the order
    # b, h, q, kv: what varies least is added up first, for the whole tile or for a row of it
    steps, strides = f"aux[{i}][0]", 0
    for c in pattern:
        strides += c.islower()
        position = _POSITION[c.lower()]
        steps += f" + tl.cast({position}, tl.int64) * aux[{i}][{strides}]" if c.islower() else f" + {position}"
    return steps


@cache
def _strided(pattern: str) -> tuple[int, ...]:
    """Which of the four dims go with a stride."""
    return () if pattern == "one" else tuple("bhqk".index(c) for c in pattern if c.islower())


def masking(program: Program, spans: tuple[Expr, ...] | None, uneven: bool = False, always: bool = False) -> int:
    """Which tiles look at the mask: 0 none, 1 the partial ones, 2 all, where `spans` never say that a tile is full.

    Without a branch, what the mask loads is part of the pipeline. `always` takes all tiles as well where the mask is
    arithmetic only: for kernels that a branch costs more.
    """
    if program.keep is None or spans is None:
        return int(uneven)
    full_lo, full_hi = (e.args[0] if e.op == "const" else None for e in spans[2:])
    never = (full_lo is not None and full_lo >= BIG) or (full_hi is not None and full_hi <= 0)
    loads = any(leaf.startswith("aux[") and program.aux[int(leaf[4:-1])].dtype for leaf in program.keep.leaves())
    return 2 if never or (always and not loads) else 1


def tile_bytes(program: Program, block_m: int, block_n: int) -> int:
    """Bytes of the aux values that one tile of scores reads: what a pipeline stage holds of them."""
    extent = {"q": block_m, "k": block_n}
    total = 0
    for a in program.aux:
        if a.dtype:
            size = getattr(torch, a.dtype.removeprefix("torch.")).itemsize
            total += size * math.prod(extent.get(c, 1) for c in a.pattern.lower())
    return total


@cache
def build(program: Program) -> Mods:
    """Jitted functions of a program. Equal programs share them, so Triton's cache keys on the text alone."""
    text = source(program)
    header = "import triton\nimport triton.language as tl\n\n\n"
    filename = f"<sartor mods {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[filename] = (len(header + text), None, (header + text).splitlines(True), filename)
    namespace: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "sartor.generated"} | _SHARED
    exec(compile(header + text, filename, "exec"), namespace)
    return Mods(*(namespace.get(name) for name in Mods._fields))


def aux_arguments(aux: tuple[Any, ...], program: Program) -> tuple[Any, ...]:
    """Aux values as kernel arguments: numbers, and (pointer, strides of the dims the pattern names in lower case).

    An integer n goes as 4n + 2, which Triton specialises on neither as 1 nor as a multiple of 16: a new window size
    finds the kernel compiled. Strides of 1 stay out for the same reason, and because 3.6 loses them in nested tuples.
    """
    result: list[Any] = []
    for value, spec in zip(aux, program.aux, strict=True):
        if spec.pattern == "n":
            result.append(4 * value + 2)
        elif spec.pattern == "f":
            result.append(value)
        else:
            strides = value.stride()
            result.append((value, *[strides[i] for i in _strided(spec.pattern)]))
    return tuple(result)
