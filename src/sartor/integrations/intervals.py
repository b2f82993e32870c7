"""Masks of a few tensors: which keys each query sees, as intervals that are computed on the device.

What models ask for (causal, sliding window, chunks, packed sequences, padding, blocks of an image) comes down to one
interval of keys for each query, less the padded keys, more the keys of its own block. `Band` says which; `mask` turns
it into a `sartor.mods.Mask` of O(seqlen) memory. The masks share a few templates, made at import, so that masks can be
made while torch.compile compiles. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sartor.mods.core import BIG, Mask, interval, over
from sartor.mods.masks import _spans

Tensor = torch.Tensor
Span = tuple[Tensor, Tensor]  # lo, hi


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where the queries and keys of a call lie in their sequences."""

    seqlen_q: int
    seqlen_kv: int
    q_offset: int | Tensor  # position of the first query; a tensor of one integer in static caches
    kv_offset: int  # position of the first key
    device: Any

    def own(self) -> Tensor:
        """int32 (1, seqlen_q): among the keys, the place of each query's own."""
        place = torch.arange(self.seqlen_q, dtype=torch.int32, device=self.device)[None]
        return (place + (self.q_offset - self.kv_offset)).int()

    def positions(self) -> Tensor:
        """(1, seqlen_q): of each query in its sequence."""
        return torch.arange(self.seqlen_q, device=self.device)[None] + self.q_offset

    def reaches_all(self, left: int | None) -> bool:
        """Whether keys at most so far before a query are known to be all before it, the last query too."""
        if left is None:
            return True
        if isinstance(self.q_offset, Tensor):  # a static cache holds the queries' own keys
            return left >= self.seqlen_kv - 1
        return left >= self.q_offset + self.seqlen_q - 1 - self.kv_offset

    @property
    def last_is_last(self) -> bool:
        """Whether the last query is known to be the last key's, as `attention` aligns them."""
        if isinstance(self.q_offset, Tensor):
            return False
        return self.q_offset + self.seqlen_q - self.kv_offset == self.seqlen_kv


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """Which keys a query sees, before padding.

    left, right: keys at most so far before and after the query; None is unbounded.
    chunk: only keys of the query's own chunk of so many positions; chunks begin at `chunk_start` (batch,).
    documents: (batch, seqlen) ids that never fall: only keys of the same id. There is no cache then.
    positions: (batch, seqlen) where a query is in its document, from which chunks are counted; no cache either.
    blocks: (batch, at least all keys) ids: besides, all keys of the query's own block; -1 is of no block.
    blocks_are_cut: whether `left` bounds the keys of the own block too.
    """

    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    chunk_start: Tensor | None = None
    documents: Tensor | None = None
    positions: Tensor | None = None
    blocks: Tensor | None = None
    blocks_are_cut: bool = False

    @property
    def is_window(self) -> bool:
        """Whether `causal` and `window` of `attention` say all of it, where the last query is the last key's."""
        return self.chunk is None and self.documents is None and self.blocks is None

    @property
    def is_everything(self) -> bool:
        """Whether every query sees every key."""
        return self.is_window and self.left is None and self.right is None


def _rows(band: Band, place: Place) -> Span:
    """int32 (batch or 1, seqlen_q): the interval of keys of each query; both ends never fall from query to query."""
    own = place.own()
    lo = torch.zeros_like(own) if band.left is None else own - min(band.left, BIG)
    hi = torch.full_like(own, place.seqlen_kv) if band.right is None else own + min(band.right, BIG) + 1
    if band.chunk is not None:
        at = place.positions() if band.positions is None else band.positions
        start = 0 if band.chunk_start is None else band.chunk_start.view(-1, 1)
        first = own - torch.remainder(at - start, band.chunk)
        lo, hi = torch.maximum(lo, first), torch.minimum(hi, first + band.chunk)
    if band.documents is not None:
        ids = band.documents.contiguous()
        lo = torch.maximum(lo, torch.searchsorted(ids, ids, right=False))
        hi = torch.minimum(hi, torch.searchsorted(ids, ids, right=True))
    return lo.int(), hi.int()


def _cols(rows: Span, place: Place) -> Span:
    """int32 (batch or 1, seqlen_kv): the interval of queries that see each key, of intervals whose ends never fall."""
    lo, hi = (t.contiguous() for t in rows)
    keys = torch.arange(place.seqlen_kv, dtype=torch.int32, device=lo.device).expand(lo.shape[0], -1).contiguous()
    return torch.searchsorted(hi, keys, right=True).int(), torch.searchsorted(lo, keys, right=True).int()


def _of_rows(*tensors: Tensor) -> list[Tensor]:
    return [t[:, None, :, None] for t in tensors]


def _of_cols(*tensors: Tensor) -> list[Tensor]:
    return [t[:, None, None, :] for t in tensors]


def hull(seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of bools (..., n): lo and hi, outside which none is set, int32, and whether all are set inside."""
    n = seen.shape[-1]
    marks = seen.to(torch.uint8)
    lo, hi = marks.argmax(-1), n - marks.flip(-1).argmax(-1)
    count = marks.sum(-1)
    hi = torch.where(count > 0, hi, lo)
    return lo.int(), hi.int(), count == hi - lo


_ROW, _COL = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((2, 1, 2, 1), (2, 1, 1, 2)))
_ONE = torch.empty(2, 1, 1, 1, dtype=torch.int32, device="meta")
_SEEN = torch.empty(2, 1, 1, 2, dtype=torch.bool, device="meta")
_INTERVALS = interval(
    rows=lambda b, h, q, aux: (aux[0], aux[1]),
    cols=lambda b, h, kv, aux: (aux[2], aux[3]),
    aux=(_ROW, _ROW, _COL, _COL),
    name="intervals",
)
_FROM_THE_FIRST = interval(  # of which the keys may be taken in parts
    rows=lambda b, h, q, aux: (None, aux[0]),
    cols=lambda b, h, kv, aux: (aux[1], aux[2]),
    aux=(_ROW, _COL, _COL),
    name="intervals",
)
_LAST_ONE = Mask(  # of one query, whose keys begin where they may: [0, 1)
    keep=lambda b, h, q, kv, aux: (kv >= aux[0]) & (kv < aux[1]),
    aux=(_ONE, _ONE),
    rows=lambda b, h, q, aux: (aux[0], aux[1], aux[0], aux[1]),
    name="of_one",
)
_LAST_TO_THE_END = Mask(
    keep=lambda b, h, q, kv, aux: kv >= aux[0],
    aux=(_ONE,),
    rows=lambda b, h, q, aux: (aux[0], BIG, aux[0], BIG),
    name="of_one_to_the_end",
)
_LAST_FROM_THE_FIRST = Mask(  # of which the keys may be taken in parts
    keep=lambda b, h, q, kv, aux: kv < aux[0],
    aux=(_ONE,),
    rows=lambda b, h, q, aux: (0, aux[0], 0, aux[0]),
    name="of_one_from_the_first",
)
_PADDED = Mask(  # the keys [0, 1) of those that are seen, full [2, 3)
    keep=lambda b, h, q, kv, aux: (kv >= aux[0]) & (kv < aux[1]) & aux[4],
    aux=(_ROW, _ROW, _ROW, _ROW, _SEEN, _COL, _COL),
    rows=lambda b, h, q, aux: aux[0:4],
    cols=lambda b, h, kv, aux: (aux[5], aux[6], aux[5], aux[6]),
    name="padded",
)
_BLOCKS = Mask(  # the keys [0, 1), and from 2 on those of the same block, of those that are seen
    keep=lambda b, h, q, kv, aux: (
        (((kv >= aux[0]) & (kv < aux[1])) | ((aux[3] == aux[8]) & (kv >= aux[2]))) & aux[9]
    ),
    aux=(*[_ROW] * 8, _COL, _SEEN, *[_COL] * 4),
    rows=lambda b, h, q, aux: aux[4:8],
    cols=lambda b, h, kv, aux: aux[10:14],
    name="blocks",
)  # fmt: skip
_PAIRS = Mask(  # a bool for each pair, with the hulls of its rows and columns
    keep=lambda b, h, q, kv, aux: aux[0],
    aux=(torch.empty(2, 1, 2, 2, dtype=torch.bool, device="meta"), *[_ROW] * 4, *[_COL] * 4),
    rows=lambda b, h, q, aux: aux[1:5],
    cols=lambda b, h, kv, aux: aux[5:9],
    name="tensor",
)


def of_pairs(keep: Tensor) -> Mask:
    """A bool tensor (batch, 1, seqlen_q, seqlen_kv), True = attend, of which empty and full tiles are not read."""
    spans = []
    for pairs in (keep[:, 0], keep[:, 0].transpose(1, 2)):
        lo, hi, filled = hull(pairs)
        spans.append((lo, hi, lo, torch.where(filled, hi, lo)))
    return over(_PAIRS, keep, *_of_rows(*spans[0]), *_of_cols(*spans[1]))


def mask(band: Band, place: Place, seen: Tensor | None = None, together: bool = False) -> Mask:
    """The band, less the keys that are padding.

    Args:
        seen: bool (batch, seqlen_kv), False where a key is padding; None: there is none.
        together: whether it is known that the keys that an item sees lie together, as with padding at one end or both.
    """
    lo, hi = rows = _rows(band, place)
    cols = _cols(rows, place)
    if band.blocks is not None:
        return _with_blocks(band, place, rows, cols, seen)
    if seen is None:
        if band.left is None and band.chunk is None and band.documents is None:
            return over(_FROM_THE_FIRST, *_of_rows(hi), *_of_cols(*cols))
        return over(_INTERVALS, *_of_rows(lo, hi), *_of_cols(*cols))
    first, end, filled = (t[:, None] for t in hull(seen))
    lo, hi = torch.maximum(lo, first), torch.minimum(hi, end)
    cols = cols[0].expand_as(seen), torch.where(seen, cols[1], cols[0])
    if together:
        return over(_INTERVALS, *_of_rows(lo, hi), *_of_cols(*cols))
    return over(
        _PADDED, *_of_rows(lo, hi, lo, torch.where(filled, hi, lo)), *_of_cols(seen), *_of_cols(*cols)
    )  # fmt: skip


def of_one(band: Band, place: Place, first: Tensor | None, end: int) -> Mask | None:
    """A window of one query, as in every step of generation: `mask` in a few operations on small tensors.

    Args:
        first: int32 (batch, 1, 1, 1), the position of the first key that an item sees; None: all before it.
        end: position after the last key that is seen.

    Returns:
        None where the query is known to see all keys.
    """
    own = place.q_offset - place.kv_offset
    left = None if place.reaches_all(band.left) else band.left
    lo = first if first is None or not place.kv_offset else first - place.kv_offset
    if left is not None:
        least = own - left
        if lo is None:
            lo = _of_one(least, place)
        else:
            lo = torch.maximum(lo, least.int()) if isinstance(least, Tensor) else lo.clamp_min(least)
    last = end - place.kv_offset
    if band.right is None:
        hi = None if last >= place.seqlen_kv else _of_one(last, place)
    elif isinstance(own, Tensor):
        hi = _of_one((own + (band.right + 1)).clamp_max(min(last, place.seqlen_kv)), place)
    else:
        nearest = min(own + band.right + 1, last)
        hi = None if nearest >= place.seqlen_kv else _of_one(nearest, place)
    if lo is None:
        return None if hi is None else over(_LAST_FROM_THE_FIRST, hi)
    return over(_LAST_TO_THE_END, lo) if hi is None else over(_LAST_ONE, lo, hi)


def _of_one(value: int | Tensor, place: Place) -> Tensor:
    """int32 (1, 1, 1, 1)."""
    if isinstance(value, Tensor):
        return value.int().view(1, 1, 1, 1)
    return torch.full((1, 1, 1, 1), value, dtype=torch.int32, device=place.device)


def _with_blocks(band: Band, place: Place, rows: Span, cols: Span, seen: Tensor | None) -> Mask:
    assert band.blocks is not None
    at = torch.arange(place.seqlen_kv, device=place.device) + place.kv_offset
    of_q, of_kv = band.blocks[:, place.positions()[0]].int(), band.blocks[:, at].int()
    of_kv = torch.where(of_kv < 0, -2, of_kv)  # which no query's is
    if seen is None:
        seen = torch.ones_like(of_kv, dtype=torch.bool)
    (lo, hi), (first, last) = rows, cols
    floor = lo if band.blocks_are_cut else torch.zeros_like(lo)
    start, end, filled = (t[:, None] for t in hull(seen))
    lo, hi, last = torch.maximum(lo, start), torch.minimum(hi, end), torch.where(seen, last, first)
    all_lo, all_hi = _around((lo, hi), _spans(of_q, of_kv))
    all_lo, all_hi = torch.maximum(all_lo, torch.maximum(floor, start)), torch.minimum(all_hi, end)
    col_lo, col_hi = _around((first, last), _spans(of_kv, of_q))
    return over(
        _BLOCKS,
        *_of_rows(lo, hi, floor, of_q, all_lo, all_hi, lo, torch.where(filled, hi, lo)),
        *_of_cols(of_kv, seen, col_lo, torch.where(seen, col_hi, col_lo), first, last),
    )


def _around(span: Span, block: tuple[Tensor, ...]) -> Span:
    """What holds an interval and that of a block, where there is one."""
    lo, hi = block[:2]
    found = hi > lo
    lo = torch.where(found, torch.minimum(span[0], lo), span[0])
    return lo, torch.where(found, torch.maximum(span[1], hi), span[1])
