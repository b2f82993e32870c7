"""From a Program to Triton functions: the same expressions the reference evaluates, as source text.

Each generated function takes (b, h, q, kv, aux), loads the aux values it reads at that position, or gathers them,
and returns its expression. Positions may be scalars, vectors or broadcastable tiles; the text does not care. They must
be valid ones: a load without a mask can be as wide as its tensor's alignment allows.
"""

from __future__ import annotations

import hashlib
import linecache
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sartor.kernels.spec import Operands
from sartor.kernels.triton import dropout, maths
from sartor.mods.core import BIG
from sartor.mods.expr import Expr
from sartor.mods.program import Aux, Program
from sartor.mods.tracing import not_negative
from sartor.problem import Problem

_POSITION = {"b": "b", "h": "h", "q": "q", "k": "kv"}
_FUNCTIONS = {"abs": "tl.abs", "maximum": "tl.maximum", "minimum": "tl.minimum", "where": "tl.where"}
_SHARED = {
    "tanh": maths.tanh, "divide": maths.divide, "floor_divide": maths.floor_divide, "exp": maths.exp,
    "exp2": maths.exp2, "log": maths.log, "sqrt": maths.sqrt, "sigmoid": maths.sigmoid, "truncate": maths.truncate,
    "index": maths.index,
}  # fmt: skip
_NARROW = (torch.int8, torch.int16, torch.uint8)  # read as int32, so that arithmetic does not wrap around


class Mods(NamedTuple):
    """Jitted functions, None where the program has none."""

    keep: Any
    rows: Any
    cols: Any
    score: Any
    dscore: Any


class Added(NamedTuple):
    """How a score reads a table: its derivative by the value read, the place, and along which dims that varies."""

    RISE: Any
    PLACE: Any
    ALONG_Q: bool
    ALONG_KV: bool


def source(program: Program) -> str:
    """The generated module, empty for an empty program."""
    blocks = []
    for name in ("keep", "score", "dscore"):
        expr = getattr(program, name)
        if expr is not None:
            first = "" if name == "keep" else "s, "
            same = name == "keep" and not expr.leaves()  # a tensor all the same, for Triton's interpreter
            blocks.append(_function(name, f"{first}b, h, q, kv", (expr,), program, " & (kv == kv)" * same))
    for name, position in (("rows", "q"), ("cols", "kv")):
        exprs = getattr(program, name)
        if exprs is not None:
            blocks.append(_function(name, f"b, h, {position}", exprs, program, f" + {position} * 0"))
    return "\n\n".join(blocks)


def _function(name: str, arguments: str, exprs: tuple[Expr, ...], program: Program, spread: str) -> str:
    functions = (
        _FUNCTIONS if "score" in name or name == "rise" else _FUNCTIONS | {"/": "divide"}
    )  # masks divide exactly
    results = [f"{_text(e, program, functions)}{spread}" for e in exprs]
    return _returning(name, f"{arguments}, aux", exprs, program, ", ".join(results))


def _returning(name: str, arguments: str, exprs: tuple[Expr, ...], program: Program, result: str) -> str:
    """A function that reads what the expressions do and returns what is written as `result`."""
    leaves = {int(leaf[4:-1]) for e in exprs for leaf in e.leaves() if leaf.startswith("aux[")}
    reads = (i for i in sorted(leaves) if not program.aux[i].dims)
    loads = [f"    a{i} = {_load(i, program.aux[i])}" for i in reads]
    return "\n".join(["@triton.jit", f"def {name}({arguments}):", *loads, f"    return {result}"])


def _text(e: Expr, program: Program, functions: Mapping[str, str]) -> str:
    """Of an expression, with what it gathers written out."""

    def gathered(node: Expr) -> str:
        i = node.args[0].args[0]
        return _widened(f"tl.load(aux[{i}][0] + {gather_place(node, program, functions)})", program.aux[i])

    return e.text(lambda leaf: gathered(leaf) if leaf.op == "gather" else _leaf(leaf), functions)


def gather_place(node: Expr, program: Program, functions: Mapping[str, str] = _FUNCTIONS) -> str:
    """Where in its table, which is dense, a `gather` reads."""
    i, place = node.args[0].args[0], ""
    for dim, e in enumerate(node.args[1:]):
        size = f"(aux[{i}][{dim + 1}] >> 2)"
        at = f"index({_text(e, program, functions)}, {size}, {not not_negative(e)})"
        if program.aux[i].pattern[0] == "T":
            at = f"tl.cast({at}, tl.int64)"
        place = f"({place} * {size} + {at})" if place else at
    return place


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
    return _widened(f"tl.load({_place(i, spec.pattern)})", spec)


def _widened(loaded: str, spec: Aux) -> str:
    dtype: torch.dtype = getattr(torch, spec.dtype.removeprefix("torch."))
    kind = "float32" if dtype.is_floating_point else "int32" if dtype in _NARROW else ""
    return loaded + (f".to(tl.{kind})" if kind else "")


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
    return 2 if never or (always and not program.loads) else 1


def tile_bytes(program: Program, block_m: int, block_n: int) -> int:
    """Bytes of the aux values that one tile of scores reads: what a pipeline stage holds of them."""
    extent = {"q": block_m, "k": block_n}
    total = 0
    for a in program.aux:
        if a.dtype:
            size = getattr(torch, a.dtype.removeprefix("torch.")).itemsize
            total += size * math.prod(extent.get(c, 1) for c in a.pattern.lower())  # what is gathered is not staged
    return total


@cache
def build(program: Program) -> Mods:
    """Jitted functions of a program. Equal programs share them, so Triton's cache keys on the text alone."""
    namespace = _compiled(source(program))
    return Mods(*(namespace.get(name) for name in Mods._fields))


@cache
def rises(program: Program, i: int) -> tuple[Added, ...]:
    """What a kernel adds to the gradient of the aux value i, for each way that the score reads it."""
    made = []
    for read, rise in ((r.read, r.rise) for r in program.rises(i)):
        indices = read.args[1:]
        place = gather_place(read, program) if indices else _place_in_gradient(program.aux[i].pattern)
        text = _function("rise", "s, b, h, q, kv", (rise,), program, "")
        lengths = "b, h, q, kv, aux, heads_q, seqlen_q, seqlen_kv"
        text += "\n\n" + _returning("place", lengths, indices, program, place)
        leaves = set().union(*(e.leaves() for e in indices or (read,)))
        letters = {
            c for leaf in leaves if leaf.startswith("aux[") for c in program.aux[int(leaf[4:-1])].pattern.lower()
        }
        namespace = _compiled(text)
        along = ("q" in leaves or "q" in letters), ("kv" in leaves or "k" in letters)
        made.append(Added(namespace["rise"], namespace["place"], *along))
    return tuple(made)


def _place_in_gradient(pattern: str) -> str:
    """Of a value at the position, in a dense gradient that has the dims of its pattern."""
    if pattern == "one":
        return "b * 0"
    place = ""
    for c, size in zip("bhqk", ("", "heads_q", "seqlen_q", "seqlen_kv"), strict=True):
        if c in pattern.lower():
            at = f"tl.cast({_POSITION[c]}, tl.int64)"
            place = f"({place} * {size} + {at})" if place else at
    return place


def _compiled(text: str) -> dict[str, Any]:
    """The functions of a generated module, by name."""
    header = "import triton\nimport triton.language as tl\n\n\n"
    filename = f"<sartor mods {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[filename] = (len(header + text), None, (header + text).splitlines(True), filename)
    namespace: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "sartor.generated"} | _SHARED
    exec(compile(header + text, filename, "exec"), namespace)
    return namespace


def of_call(p: Problem, x: Operands) -> dict[str, Any]:
    """What a call does not share with others of its key, by the names of arguments: addresses of inputs, a seed, what
    masks and scores read."""
    found: dict[str, Any] = {
        "q_ptr": x.q.data_ptr(), "k_ptr": x.k.data_ptr(), "v_ptr": x.v.data_ptr(),
        "sinks_ptr": 0 if x.sinks is None else x.sinks.data_ptr(),
    }  # fmt: skip
    if x.seed is not None:
        found["dropout"] = dropout.argument(p, x)
    if any(isinstance(value, torch.Tensor) for value in x.aux):
        found["aux"] = aux_arguments(x.aux, p.program)
    return found


def aux_arguments(aux: tuple[Any, ...], program: Program) -> tuple[Any, ...]:
    """Aux values as kernel arguments: numbers, and (pointer, strides of the dims the pattern names in lower case), of a
    table (pointer, sizes).

    An integer n goes as 4n + 2, which Triton specialises on neither as 1 nor as a multiple of 16: a new window size
    finds the kernel compiled. Strides of 1 stay out for the same reason, and because 3.6 loses them in nested tuples.
    """
    result: list[Any] = []
    for value, spec in zip(aux, program.aux, strict=True):
        if spec.pattern == "n":
            result.append(4 * value + 2)
        elif spec.pattern == "f":
            result.append(value)
        elif spec.dims:
            result.append((value, *(4 * size + 2 for size in value.shape)))
        else:
            strides = value.stride()
            result.append((value, *[strides[i] for i in _strided(spec.pattern)]))
    return tuple(result)
