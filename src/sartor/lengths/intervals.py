"""Tables of intervals and places, from `cu_seqlens` and lengths: by one launch on GPUs, by a few operations elsewhere.

Each is an operator of torch.library, so that a compiled graph has one node for it; eager calls go past the dispatcher.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from sartor.checks import needs_operator
from sartor.lengths import values

Tensor = torch.Tensor
Pair = tuple[int, int]
NO_SIDE = 2**28  # of a window without this end: beyond every position, and four of them stay within int32


class Cache(NamedTuple):
    """Of `batch` items, with `capacity` places for keys each and `seqlen_q` queries. added: new keys, which lengths are
    to count. name: what errors call the lengths."""

    batch: int
    seqlen_q: int
    capacity: int
    added: int = 0
    name: str = "lengths"


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


def by_kernel(t: Tensor) -> bool:
    """Whether a kernel makes the tables of this tensor."""
    return t.device.type == "cuda" and _triton()


def _room(n: int) -> int:
    """Elements from one row of n to the next, for rows on 16 bytes: kernels are compiled for either."""
    return (n + 3) // 4 * 4


# ---- packed sequences


def packed_intervals(cu_q: Tensor, cu_kv: Tensor, lengths: Pair, sides: Pair, name: str) -> tuple[Tensor, Tensor]:
    """For each query the interval [lo, hi) of keys that it attends to, and for each key that of queries.

    Args:
        cu_q, cu_kv: integers (sequences + 1,) of any strides, on one device: see `mods.packed`.
        lengths: seqlen_q and seqlen_kv, tokens in all.
        sides: left and right of a window aligned at the ends of each sequence; NO_SIDE for none.
        name: of cu_kv, in errors.

    Returns:
        int32 (2, 1, 1, seqlen_q, 1) and (2, 1, 1, 1, seqlen_kv): lo and hi. Wrong values are clamped.

    Raises:
        ValueError: values are wrong; see values.py for when that is known.
    """
    if needs_operator(cu_q):
        found: tuple[Tensor, Tensor] = torch.ops.sartor.packed_intervals(cu_q, cu_kv, lengths, sides, name)
        return found
    return _packed_intervals(cu_q, cu_kv, lengths, sides, name)


def _packed_intervals(cu_q: Tensor, cu_kv: Tensor, lengths: Pair, sides: Pair, name: str) -> tuple[Tensor, Tensor]:
    values.look("cu_seqlens_q", cu_q, values.check_ends, lengths[0])
    if cu_kv is not cu_q or lengths[0] != lengths[1]:
        values.look(name, cu_kv, values.check_ends, lengths[1])
    rows, cols = rows_and_cols(cu_q, cu_kv, lengths)
    if by_kernel(cu_q):
        from sartor.lengths import launches

        launches.intervals((cu_q, cu_kv), (rows, cols), lengths, sides, name)
    else:
        q, kv = _ends(cu_q, lengths[0]), _ends(cu_kv, lengths[1])
        _side(q, kv[1], (sides[0], sides[1]), rows)
        _side(kv, q[1], (sides[1], sides[0]), cols)
    return rows, cols


def rows_and_cols(cu_q: Tensor, cu_kv: Tensor, lengths: Pair, *_: object) -> tuple[Tensor, Tensor]:
    """Room for the tables of `packed_intervals`."""
    m, n = lengths
    p, r = _room(m), _room(n)
    rows = torch.empty_strided((2, 1, 1, m, 1), (p, p, p, 1, 1), dtype=torch.int32, device=cu_q.device)
    return rows, torch.empty_strided((2, 1, 1, 1, n), (r, r, r, r, 1), dtype=torch.int32, device=cu_q.device)


def _ends(cu: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """The ends, clamped; and as the begins and ends of sequences: one before them all, these, and one past them, which
    both are empty."""
    ends = cu.long().clamp(0, limit).int()
    return ends, torch.cat((ends[:1], ends, ends[-1:]))


def _place(own: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Places from 0 on, and the sequence of each, counted from 1.

    All of `own` is searched: Inductor of torch 2.11 loses the offset of `own[1:]` in searchsorted.
    """
    place = torch.arange(length, dtype=torch.int32, device=own.device)
    return place, torch.searchsorted(own, place, right=True, out_int32=True)


def _side(own: tuple[Tensor, Tensor], others: Tensor, sides: Pair, into: Tensor) -> None:
    """For each place, the interval of places in the other's sequence that it goes with; empty past the last one."""
    length = into.numel() // 2
    lo, hi = into.view(2, length)
    place, number = _place(own[0], length)
    torch.index_select(others[:-1], 0, number, out=lo)
    torch.index_select(others[1:], 0, number, out=hi)
    if min(sides) < NO_SIDE:
        diagonal = hi - own[1][1:].index_select(0, number) + place
        torch.maximum(lo, diagonal - sides[0], out=lo)
        torch.minimum(hi, diagonal + (sides[1] + 1), out=hi)


def packed_places(cu_q: Tensor, cu_kv: Tensor, seqlen_q: int) -> Tensor:
    """Of each query the number of its sequence, and the place of the key that is as far from its sequence's end.

    Returns:
        int32 (2, seqlen_q). Queries past the last sequence have its number. Values are those of `packed_intervals`,
        which looks at them.
    """
    if needs_operator(cu_q):
        found: Tensor = torch.ops.sartor.packed_places(cu_q, cu_kv, seqlen_q)
        return found
    return _packed_places(cu_q, cu_kv, seqlen_q)


def _packed_places(cu_q: Tensor, cu_kv: Tensor, seqlen_q: int) -> Tensor:
    places = _number_and_place(cu_q, cu_kv, seqlen_q)
    if by_kernel(cu_q):
        from sartor.lengths import launches

        launches.places((cu_q, cu_kv), places)
    else:
        q, kv = _ends(cu_q, seqlen_q), _ends(cu_kv, NO_SIDE)
        place, number = _place(q[0], seqlen_q)
        torch.clamp(number - 1, 0, max(0, cu_q.shape[0] - 2), out=places[0])
        torch.add((kv[1] - q[1])[1:].index_select(0, number), place, out=places[1])
    return places


def _number_and_place(cu_q: Tensor, cu_kv: Tensor, seqlen_q: int) -> Tensor:
    size, strides = (2, seqlen_q), (_room(seqlen_q), 1)
    return torch.empty_strided(size, strides, dtype=torch.int32, device=cu_q.device)


# ---- caches


def cached_table(like: Tensor, lengths: Tensor | int, sides: Pair, cache: Cache) -> Tensor:
    """What the mask of a cache reads of each item: its length, with the keys that are added; how far its diagonal is
    moved; and how far the ends of a window are.

    Args:
        like: any tensor on the device of the table.
        lengths: integers (batch,) of any strides, on that device, or one for all.
        sides: left and right of a window aligned at an item's last query and last key; NO_SIDE for none.
        cache: see Cache.

    Returns:
        int32 (4, batch, 1, 1, 1): length; shift = length - seqlen_q; shift - left; shift + right + 1. Lengths are
        clamped to 0 .. capacity.

    Raises:
        ValueError: values are wrong; see values.py for when that is known.
    """
    tensor, uniform = (lengths, -1) if isinstance(lengths, Tensor) else (None, lengths)
    numbers = [cache.batch, cache.seqlen_q, cache.capacity, cache.added]  # Dynamo of torch 2.9 slices to the whole
    if needs_operator(like):
        found: Tensor = torch.ops.sartor.cached_table(like.detach(), tensor, uniform, sides, numbers, cache.name)
        return found
    return _cached_table(like, tensor, uniform, sides, numbers, cache.name)


def look_at_filled(lengths: Tensor, cache: Cache) -> None:
    """Look at lengths (batch,) that a mask reads itself, as `cached_table` would. On a GPU `append` tells what is wrong
    where keys are added, else one small launch, once for all layers."""
    values.look(cache.name, lengths, values.check_filled, cache.capacity, cache.added)
    if cache.batch and not cache.added and by_kernel(lengths) and values.to_look_at(lengths, cache.capacity):
        from sartor.lengths import launches

        launches.filled(lengths, cache)


def _cached_table(like: Tensor, lengths: Tensor | None, uniform: int, sides: Pair, cache: Any, name: str) -> Tensor:
    batch, seqlen_q, capacity, added = cache
    if lengths is None:
        values.check_filled(name, [uniform], capacity, added)
    else:
        values.look(name, lengths, values.check_filled, capacity, added)
    table = table_of_cache(like, lengths, uniform, sides, cache)
    if by_kernel(like):
        from sartor.lengths import launches

        launches.cached(table, lengths, uniform, sides, Cache(batch, seqlen_q, capacity, added, name))
        return table
    length, shift, first, end = table.view(4, batch)
    if lengths is None:
        length.fill_(uniform + added)
    else:
        length.copy_((lengths.long().clamp(max=capacity) + added).clamp_(0, capacity))
    torch.sub(length, seqlen_q, out=shift)
    torch.sub(shift, sides[0], out=first)
    torch.add(shift, sides[1] + 1, out=end)
    return table


def table_of_cache(like: Tensor, lengths: Any, uniform: int, sides: Any, cache: Any, *_: object) -> Tensor:
    """Room for the table of `cached_table`."""
    b = cache[0]
    p = _room(b)
    return torch.empty_strided((4, b, 1, 1, 1), (p, 1, 1, 1, 1), dtype=torch.int32, device=like.device)


# ---- the operators

_LIBRARY = torch.library.Library("sartor", "FRAGMENT")
for _name, _schema, _impl, _fake in (
    (
        "packed_intervals",
        "(Tensor cu_q, Tensor cu_kv, SymInt[2] lengths, SymInt[2] sides, str name) -> (Tensor, Tensor)",
        _packed_intervals,
        rows_and_cols,
    ),
    ("packed_places", "(Tensor cu_q, Tensor cu_kv, SymInt seqlen_q) -> Tensor", _packed_places, _number_and_place),
    (
        "cached_table",
        "(Tensor like, Tensor? lengths, SymInt uniform, SymInt[2] sides, SymInt[4] cache, str name) -> Tensor",
        _cached_table,
        table_of_cache,
    ),
):
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sartor::{_name}", _fake, lib=_LIBRARY)
