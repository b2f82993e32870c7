"""The masks: each is a few lines, and the only place its rule is written."""

from __future__ import annotations

import operator
from functools import cache, lru_cache
from typing import Any, Literal

import torch

from sartor.checks import dense, integers, is_integer, needs_operator, sides
from sartor.lengths.intervals import NO_SIDE, Cache, Pair, cached_table, packed_intervals
from sartor.mods.core import BIG, Mask, interval, over
from sartor.mods.expr import minimum, where
from sartor.mods.tracing import four_dims

Align = Literal["bottom_right", "top_left"]
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # that torch sorts and searches


def offset(seqlen_q: int, seqlen_kv: int) -> int:
    """How far bottom-right alignment moves the diagonal: the last query sees the last key."""
    return seqlen_kv - seqlen_q


def _aligned(align: Align) -> Any:
    if align not in ("bottom_right", "top_left"):
        raise ValueError(f"align must be 'bottom_right' or 'top_left', got {align!r}")
    return offset if align == "bottom_right" else 0


def causal(align: Align = "bottom_right") -> Mask:
    """Query i attends to keys up to i (+ seqlen_kv - seqlen_q when bottom-right aligned).

    Args:
        align: "bottom_right", where the last query sees the last key, or "top_left", where the first sees the first.

    Raises:
        ValueError: another `align`.
    """
    return interval(
        rows=lambda b, h, q, aux: (None, q + aux[0] + 1),
        cols=lambda b, h, kv, aux: (kv - aux[0], None),
        aux=(_aligned(align),),
        name="causal",
    )


def everything() -> Mask:
    """Every query attends to every key, which is looked at pair by pair."""
    nowhere = lambda b, h, position: (0, BIG, BIG, 0)  # noqa: E731 - rows and columns alike
    return Mask(lambda b, h, q, kv: kv >= 0, (), nowhere, nowhere, "full")


def window(left: int | None, right: int | None, align: Align = "bottom_right") -> Mask:
    """Query i attends to the keys i-left .. i+right, both included (flash-attn's rule).

    Args:
        left, right: keys to each side, integers >= 0; None or -1 is unbounded.
        align: as for `causal`: "bottom_right" moves i by seqlen_kv - seqlen_q.

    Raises:
        TypeError, ValueError: a side that is no such integer, or another `align`.
    """
    left, right = sides((left, right))
    return interval(
        rows=lambda b, h, q, aux: (
            None if left is None else q + aux[2] - aux[0],
            None if right is None else q + aux[2] + aux[1] + 1,
        ),
        cols=lambda b, h, kv, aux: (
            None if right is None else kv - aux[2] - aux[1],
            None if left is None else kv - aux[2] + aux[0] + 1,
        ),
        aux=(*(min(side or 0, BIG) for side in (left, right)), _aligned(align)),
        name="window",
    )


def prefix(length: int | torch.Tensor) -> Mask:
    """Every query attends to the first `length` keys.

    Args:
        length: an integer, or integers of shape (batch,), one for each item. One that changes from call to call, as in
            decoding, goes in a tensor: each int is planned anew.

    Raises:
        TypeError, ValueError: another type, dtype or shape.
    """
    if isinstance(length, torch.Tensor):
        _check_integers("length", length, "(batch,)", (0, 1))
        size: Any = length.view(-1, 1, 1, 1)
    elif is_integer(length):
        size = max(0, min(operator.index(length), BIG))
    else:
        raise TypeError(f"length must be an integer or a tensor of them, got {type(length).__name__}: {length!r}")
    return interval(
        rows=lambda b, h, q, aux: (None, aux[0]),
        cols=lambda b, h, kv, aux: (None, where(kv < aux[0], BIG, 0)),
        aux=(size,),
        name="prefix",
    )


def document(ids: torch.Tensor, kv_ids: torch.Tensor | None = None) -> Mask:
    """Queries attend to keys of their own document. Documents that lie together in memory cost only their own tiles;
    where one is scattered, its tiles are looked at key by key.

    Args:
        ids: integers of shape (batch or 1, seqlen): the document of each token, of any value, in any order.
        kv_ids: integers of shape (batch or 1, seqlen_kv): the keys' documents, where they differ from the queries'.

    Raises:
        TypeError, ValueError: no tensors, other dtypes or shapes, different devices.
    """
    kv_ids = ids if kv_ids is None else kv_ids
    for name, t in (("ids", ids), ("kv_ids", kv_ids)):
        _check_integers(name, t, "(batch, seqlen)", (2,))
    if ids.device != kv_ids.device:
        raise ValueError(f"kv_ids must be on the device of ids, {ids.device}, got {kv_ids.device}")
    if ids.shape[0] != kv_ids.shape[0]:
        if 1 not in (ids.shape[0], kv_ids.shape[0]):
            raise ValueError(f"kv_ids must have the batch of ids, {ids.shape[0]}, or 1, got batch {kv_ids.shape[0]}")
        batch = kv_ids.shape[0] if ids.shape[0] == 1 else ids.shape[0]
        ids, kv_ids = ids.expand(batch, -1), kv_ids.expand(batch, -1)
    ids, kv_ids = _as_int32(ids, kv_ids)
    rows = [t[:, None, :, None] for t in _spans(ids, kv_ids)]
    cols = [t[:, None, None, :] for t in _spans(kv_ids, ids)]
    return Mask(
        keep=lambda b, h, q, kv, aux: aux[0] == aux[1],
        aux=(ids[:, None, :, None], kv_ids[:, None, None, :], *rows, *cols),
        rows=lambda b, h, q, aux: aux[2:6],
        cols=lambda b, h, kv, aux: aux[6:10],
        name="document",
    )


_OF_ROWS, _OF_COLUMNS, _OF_ITEMS = (
    torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((1, 1, 2, 1), (1, 1, 1, 2), (2, 1, 1, 1))
)
_INTERVALS = interval(
    rows=lambda b, h, q, aux: (aux[0], aux[1]),
    cols=lambda b, h, kv, aux: (aux[2], aux[3]),
    aux=(_OF_ROWS, _OF_ROWS, _OF_COLUMNS, _OF_COLUMNS),
    name="packed",
)


def _cached(length: Any, end: Any, first: Any, aux: tuple[Any, ...]) -> Mask:
    """The mask of a cache by what these three make of aux: an item's length; the end of what query 0 sees without it,
    shift + right + 1; and the first key that query 0 sees, shift - left, or None, where keys may be taken in parts."""

    def rows(b: Any, h: Any, q: Any, aux: Any) -> Any:
        return None if first is None else q + first(aux), minimum(length(aux), q + end(aux))

    def cols(b: Any, h: Any, kv: Any, aux: Any) -> Any:
        past = BIG if first is None else kv - first(aux) + 1
        return kv - end(aux) + 1, where(kv < length(aux), past, 0)

    return interval(rows, cols, aux, "cached")


_LENGTH, _END, _FIRST = map(operator.itemgetter, range(3))  # which a table holds as they are
_FILLED = _cached(_LENGTH, _END, None, (_OF_ITEMS,) * 2)
_FILLED_WINDOW = _cached(_LENGTH, _END, _FIRST, (_OF_ITEMS,) * 3)
_BEHIND = interval(  # aux: the first place that is seen
    rows=lambda b, h, q, aux: (aux[0], None),
    cols=lambda b, h, kv, aux: (None, where(kv < aux[0], 0, BIG)),
    aux=(_OF_ITEMS,),
    name="leftpad",
)
_PADDED, _PADDED_WINDOW = _FILLED & _BEHIND, _FILLED_WINDOW & _BEHIND


def packed(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    seqlen_q: int,
    seqlen_kv: int,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
) -> Mask:
    """Sequences one after another in a batch of one: each attends to itself. On a GPU one kernel makes the mask, once
    for all layers that are given it.

    Args:
        cu_seqlens_q: integers of shape (sequences + 1,), from 0 on and never falling: sequence n has the queries
            [cu_seqlens_q[n], cu_seqlens_q[n + 1]). What lies past the last one sees nothing.
        cu_seqlens_kv: the same for keys. What lies past the last one is seen by none.
        seqlen_q, seqlen_kv: queries and keys in all.
        causal: whether each query of a sequence sees keys up to its own, aligned at the sequence's last query and key.
        window: (left, right) within each sequence, aligned likewise. Neither is given to `attention` besides.

    Raises:
        TypeError, ValueError: other dtypes or shapes; values that are wrong, when `sartor.check` says that they are
            looked at, else they are clamped.
    """
    integers(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    return packed_as("cu_seqlens_kv", cu_seqlens_q, cu_seqlens_kv, (seqlen_q, seqlen_kv), ends_of(causal, window))


def packed_as(name: str, cu_q: torch.Tensor, cu_kv: torch.Tensor, lengths: Pair, sides: Pair) -> Mask:
    """`packed`, with the name of cu_kv in errors."""
    for own, t in (("cu_seqlens_q", cu_q), (name, cu_kv)):
        if own == name and t is cu_q:
            break
        _check_integers(own, t, "(sequences + 1,)", (1,))
        if t.shape[0] == 0 or t.shape[0] != cu_q.shape[0]:
            raise ValueError(
                f"{own} must have one element more than there are sequences, as many as cu_seqlens_q, got"
                f" {t.shape[0]} and {cu_q.shape[0]}"
            )
        if t.device != cu_q.device:
            raise ValueError(f"{own} must be on the device of cu_seqlens_q, {cu_q.device}, got {t.device}")
    return packed_over(*packed_intervals(cu_q, cu_kv, lengths, sides, name))


def packed_over(rows: torch.Tensor, cols: torch.Tensor) -> Mask:
    """The mask over tables of `packed_intervals`."""
    return _over(_INTERVALS, (*rows.unbind(), *cols.unbind()), (2, rows.shape[3], cols.shape[4]))


def ends_of(causal: bool, window: tuple[int | None, int | None] | None) -> Pair:
    """How far a query sees to the left and to the right of the diagonal, as tables are made for."""
    left, right = (None, None) if window is None else sides(window)
    right = 0 if causal else right
    return NO_SIDE if left is None else min(left, NO_SIDE), NO_SIDE if right is None else min(right, NO_SIDE)


def cached(
    lengths: torch.Tensor,
    seqlen_q: int,
    seqlen_kv: int,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
) -> Mask:
    """A cache of keys, of which each batch item has filled the first places.

    Args:
        lengths: integers of shape (batch,): the first lengths[b] places hold keys of item b, its last query's among
            them.
        seqlen_q: queries of an item.
        seqlen_kv: places in the cache.
        causal: whether each query sees keys up to its own, aligned at an item's last query and last key.
        window: (left, right), aligned likewise. Neither is given to `attention` besides.

    Raises:
        TypeError, ValueError: other dtypes or shapes; values that are wrong, when `sartor.check` says that they are
            looked at, else they are clamped.
    """
    _check_integers("lengths", lengths, "(batch,)", (1,))
    integers(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    ends = ends_of(causal, window)
    return of_cache(cached_table(lengths, lengths, ends, Cache(lengths.shape[0], seqlen_q, seqlen_kv)), ends)


def of_filled(lengths: torch.Tensor, added: int, ends: Pair) -> Mask:
    """The mask of a cache that reads lengths (batch,), int32 or int64, when it is used, where `of_cache` has a copy of
    them: for a call that attends at once. It counts the keys that are added, and sees no more than there are."""
    return _filled(lengths.dtype, added, *ends).with_tensors([lengths.view(-1, 1, 1, 1)])


@lru_cache(maxsize=64)
def _filled(dtype: torch.dtype, added: int, left: int, right: int) -> Mask:
    aux: list[Any] = [torch.empty(2, 1, 1, 1, dtype=dtype, device="meta"), added]
    aux += [lambda _, seqlen_kv: seqlen_kv, lambda seqlen_q, _: right + 1 - seqlen_q]
    if left != NO_SIDE:
        aux.append(lambda seqlen_q, _: -left - seqlen_q)

    def length(aux: Any) -> Any:  # capacity twice: or else the sum may leave 32 bits
        return minimum(minimum(aux[0], aux[2]) + aux[1], aux[2])

    first = None if left == NO_SIDE else lambda aux: length(aux) + aux[4]
    return _cached(length, lambda aux: length(aux) + aux[3], first, tuple(aux))


def of_cache(table: torch.Tensor, ends: Pair, leftpad: torch.Tensor | None = None) -> Mask:
    """The mask over a table of `cached_table`, which was made with these ends. leftpad: int32 or int64 (batch,): places
    before them are seen by none."""
    length, _, first, end = table.unbind()
    used, windowed = [length, end], ends[0] != NO_SIDE
    if windowed:
        used.append(first)
    if leftpad is None:
        template = _FILLED_WINDOW if windowed else _FILLED
    else:
        template = _PADDED_WINDOW if windowed else _PADDED
        used.append(leftpad.clamp(0, BIG).int().view(-1, 1, 1, 1))
    return _over(template, tuple(used), (table.shape[1], 2, 2))


def _over(template: Mask, tensors: tuple[torch.Tensor, ...], sizes: tuple[int, int, int]) -> Mask:
    """`over`, in a third of its time, for tensors of as many items, queries and keys, where they vary along these."""
    if needs_operator(tensors[0]):  # what is kept must be made of plain tensors
        return over(template, *tensors)
    items, queries, keys = sizes
    return _varying(template, items == 1, queries == 1, keys == 1).filled(tensors)


@cache
def _varying(template: Mask, item: bool, query: bool, key: bool) -> Mask:
    """The template over tensors that do not vary along the dims of which there is but one."""
    single = item, True, query, key
    shapes = [[1 if one else n for one, n in zip(single, t.shape, strict=True)] for t in template.tensors]
    return template.with_tensors([torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes])


def _check_integers(name: str, t: Any, shape: str, dims: tuple[int, ...]) -> None:
    dense(name, t)
    if t.dim() not in dims:
        raise ValueError(f"{name} must have shape {shape}, got {t.dim()} dims: {tuple(t.shape)}")
    if t.dtype not in INTEGERS:
        raise ValueError(f"{name} must hold integers, got dtype {t.dtype}")


def _as_int32(ids: torch.Tensor, kv_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 ids that are equal where these are. int64 ones may not fit: theirs are their ranks, without a host sync."""
    if torch.int64 not in (ids.dtype, kv_ids.dtype):
        return ids.int(), kv_ids.int()
    ids, kv_ids = ids.long().contiguous(), kv_ids.long().contiguous()
    ordered = torch.cat([ids, kv_ids], 1).sort(1).values
    return torch.searchsorted(ordered, ids, out_int32=True), torch.searchsorted(ordered, kv_ids, out_int32=True)


def _spans(ids: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """For each id, the hull [lo, hi) of its places in `others`, and the same again where it fills its hull, else empty.

    Sorting and searching stay on the device: no host sync.
    """
    if others.shape[1] == 0:
        empty = torch.zeros_like(ids, dtype=torch.int32)
        return empty, empty, empty, empty
    ordered, place = torch.sort(others, dim=1, stable=True)
    first = torch.searchsorted(ordered, ids.contiguous(), right=False)
    last = torch.searchsorted(ordered, ids.contiguous(), right=True)
    found = last > first
    lo = place.gather(1, first.clamp(max=others.shape[1] - 1)) * found
    hi = (place.gather(1, (last - 1).clamp(min=0)) + 1) * found
    together = (hi - lo) == (last - first)
    return lo.int(), hi.int(), lo.int(), torch.where(together, hi, lo).int()


def from_tensor(keep: torch.Tensor) -> Mask:
    """Any mask, read pair by pair.

    Args:
        keep: bool, broadcastable to (batch, heads_q, seqlen_q, seqlen_kv), True where the query attends.

    Raises:
        TypeError: no tensor, or another dtype.
    """
    dense("mask", keep)
    if keep.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor (True = attend), got dtype {keep.dtype}")
    return Mask(lambda b, h, q, kv, aux: aux[0], (four_dims(keep),), name="tensor")
