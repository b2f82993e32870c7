"""What of a mask and a score is brought to shared memory tile by tile, and what a program says of it.

Tiles are tensors that are read for every pair of query and key; of a bool tensor among them whole words become bits.
Strips are tables that are read at q - kv or kv - q, plus what is the same for all pairs: 16 queries and a tile of keys
read as few elements as there are distances between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from sartor.mods.expr import Expr
from sartor.mods.program import Aux, Program

FLOATS = ("torch.float16", "torch.bfloat16", "torch.float32")
INTEGERS = ("torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64")
WHOLE = frozenset(["+", "-", "*", "neg", "minimum", "maximum"])  # of integers, whose result is one


def size(spec: Aux) -> int:
    """Bytes of an element."""
    dtype: torch.dtype = getattr(torch, spec.dtype.removeprefix("torch."))
    return dtype.itemsize


def is_small(spec: Aux) -> bool:
    """Whether elements have at most 16 bits."""
    return size(spec) <= 2


def swizzled(spec: Aux, keys: int) -> bool:
    """Whether a tile of so many keys lies in chunks of 128 bytes, as the copy engine has them."""
    return is_small(spec) and keys * size(spec) % 128 == 0


def tile_bytes(spec: Aux, keys: int) -> int:
    """Bytes of 16 rows of a tile of so many keys, as `NearTile` in near.cuh has it."""
    row = keys * size(spec)
    return 16 * (row if swizzled(spec, keys) else row + 16)


def tiles(program: Program) -> tuple[int, ...]:
    """The aux values that are tensors read for every pair of query and key, a row's keys side by side."""
    found = enumerate(program.aux)
    return tuple(i for i, a in found if "q" in a.pattern.lower() and a.pattern.endswith("K") and size(a) <= 4)


def strips(program: Program) -> tuple[int, ...]:
    """The aux values that are tables of floats which the score reads at the distance of query and key alone."""
    return tuple(i for i in _gathered(program) if strip(program, i) is not None)


def strip(program: Program, i: int) -> Expr | None:
    """How the score reads table i, if always by the same index: the last one is of the distance, and no other of query
    or key."""
    reads = {e.text(): e for e in _gathers(program) if e.args[0].args[0] == i}
    if len(reads) != 1 or program.aux[i].dtype not in FLOATS:
        return None
    (read,) = reads.values()
    *others, last = read.args[1:]
    if any({"q", "kv", "s"} & e.leaves() for e in others) or "s" in last.leaves():
        return None
    return read if _slopes(last) in ((1, -1), (-1, 1)) else None


def _gathers(program: Program) -> Iterator[Expr]:
    for e in (program.score, program.keep):
        yield from (node for node in (e.nodes() if e is not None else ()) if node.op == "gather")


def _gathered(program: Program) -> list[int]:
    found = program.score.nodes() if program.score is not None else ()
    return sorted({e.args[0].args[0] for e in found if e.op == "gather"})


def _slopes(e: Expr) -> tuple[int, int] | None:
    """By how much an integer grows with the query and with the key, where that is the same everywhere."""
    if not {"q", "kv"} & e.leaves():
        return 0, 0
    if e.op == "sym":
        return (1, 0) if e.args[0] == "q" else (0, 1)
    parts = [_slopes(a) for a in e.args] if e.op in ("+", "-", "neg") else [None]
    if any(part is None for part in parts):
        return None
    first, *rest = [part for part in parts if part is not None]
    if not rest:
        return -first[0], -first[1]
    sign = 1 if e.op == "+" else -1
    return first[0] + sign * rest[0][0], first[1] + sign * rest[0][1]


class Seen(NamedTuple):
    """A mask that is a bool tensor, within limits: a row sees keys of [max(lo), min(hi)) where the tensor is True."""

    tensor: int
    lo: tuple[Expr, ...]
    hi: tuple[Expr, ...]


def seen(program: Program, near: tuple[int, ...]) -> Seen | None:
    """The mask as a bool tensor that is near within limits that integers tell, or None where it is another."""
    tensors: list[int] = []
    lo: list[Expr] = []
    hi: list[Expr] = []
    for e in _all_of(program.keep) if program.keep is not None else ():
        if e.op == "aux" and e.args[0] in near and program.aux[e.args[0]].dtype == "torch.bool":
            tensors.append(e.args[0])
            continue
        is_limit = e.op in ("<", "<=", ">", ">=") and e.args[0].op == "sym" and e.args[0].args[0] == "kv"
        if not is_limit or not _is_whole(e.args[1], program):
            return None
        limit = e.args[1] if e.op in ("<", ">=") else e.args[1] + 1  # type: ignore[operator]
        (hi if e.op[0] == "<" else lo).append(limit)
    return Seen(tensors[0], tuple(lo), tuple(hi)) if len(tensors) == 1 else None


def _all_of(e: Expr) -> Iterator[Expr]:
    if e.op == "&":
        for part in e.args:
            yield from _all_of(part)
    else:
        yield e


def _is_whole(e: Expr, program: Program) -> bool:
    """Whether it is an integer that is the same for all keys."""
    if e.op == "sym":
        return bool(e.args[0] != "kv")
    if e.op == "const":
        return isinstance(e.args[0], int) and not isinstance(e.args[0], bool)
    if e.op == "aux":
        spec = program.aux[e.args[0]]
        return spec.pattern == "n" or (spec.dtype in INTEGERS and "k" not in spec.pattern.lower())
    return e.op in WHOLE and all(_is_whole(a, program) for a in e.args)
