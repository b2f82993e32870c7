"""The masks: each is a few lines, and the only place its rule is written."""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any, Literal

import torch

from sartor.checks import dense, is_integer, sides
from sartor.mods.core import BIG, Mask, interval, over
from sartor.mods.expr import where
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
    """Query i attends to keys up to i (+ seqlen_kv - seqlen_q when bottom-right aligned)."""
    return interval(
        rows=lambda b, h, q, aux: (None, q + aux[0] + 1),
        cols=lambda b, h, kv, aux: (kv - aux[0], None),
        aux=(_aligned(align),),
        name="causal",
    )


def everything() -> Mask:
    """Every query attends to every key, which is looked at pair by pair."""
    return Mask(lambda b, h, q, kv, aux: kv >= 0, name="full")


def window(left: int | None, right: int | None, align: Align = "bottom_right") -> Mask:
    """Query i attends to the keys i-left .. i+right, both included; None or -1 is unbounded (flash-attn's rule)."""
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
    """Every query attends to the first `length` keys: an int, or one per batch item, int (batch,).

    A length that changes from call to call, as in decoding, goes in a tensor: each int is planned anew.
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
    """Queries attend to keys of their own document; ids are int (batch or 1, seqlen), of any value, in any order.

    `kv_ids` are the keys' documents where they differ from the queries'. Documents that lie together in memory cost
    only their own tiles; where one is scattered, its tiles are looked at key by key.
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


_OF_ROWS, _OF_COLUMNS = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((2, 1), 2))
_INTERVALS = interval(
    rows=lambda b, h, q, aux: (aux[0], aux[1]),
    cols=lambda b, h, kv, aux: (aux[2], aux[3]),
    aux=(_OF_ROWS, _OF_ROWS, _OF_COLUMNS, _OF_COLUMNS),
    name="intervals",
)
_FROM_THE_FIRST = interval(  # of which the keys may be taken in parts
    rows=lambda b, h, q, aux: (None, aux[0]),
    cols=lambda b, h, kv, aux: (aux[1], aux[2]),
    aux=(_OF_ROWS, _OF_COLUMNS, _OF_COLUMNS),
    name="intervals",
)


def packed(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    seqlen_q: int,
    seqlen_kv: int,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
) -> Mask:
    """Sequences one after another in a batch of one, of `seqlen_q` queries and `seqlen_kv` keys in all: number n has
    the queries [cu_seqlens_q[n], cu_seqlens_q[n + 1]) and the keys [cu_seqlens_kv[n], cu_seqlens_kv[n + 1]).

    Both are integers of shape (sequences + 1,), from 0 on. `causal` and `window` are those of each sequence, aligned at
    its last query and key, and not given to `attention` besides. What lies past the last sequence sees nothing and is
    seen by none. Values are checked where they are on the CPU: elsewhere that would wait for the device.
    """
    given = ("cu_seqlens_q", cu_seqlens_q, seqlen_q), ("cu_seqlens_kv", cu_seqlens_kv, seqlen_kv)
    for name, t, length in given:
        _check_integers(name, t, "(sequences + 1,)", (1,))
        if t.shape[0] == 0 or t.shape != cu_seqlens_q.shape:
            raise ValueError(
                f"{name} must have one element more than there are sequences, as many as cu_seqlens_q, got"
                f" {t.shape[0]} and {cu_seqlens_q.shape[0]}"
            )
        if t.device != cu_seqlens_q.device:
            raise ValueError(f"{name} must be on the device of cu_seqlens_q, {cu_seqlens_q.device}, got {t.device}")
        _check_ends(name, known(t), length)
    left, right = (None, None) if window is None else sides(window)
    right = 0 if causal else right
    q, kv = cu_seqlens_q.int(), cu_seqlens_kv.int()
    rows, cols = _within(q, kv, seqlen_q, left, right), _within(kv, q, seqlen_kv, right, left)
    return over(_INTERVALS, *(t[:, None] for t in rows), *cols)


def known(t: torch.Tensor) -> list[int]:
    """Its values; none where looking at them would wait for the device, or break a graph."""
    return t.tolist() if t.device.type == "cpu" and not torch.compiler.is_compiling() else []


def _check_ends(name: str, ends: list[int], length: int) -> None:
    if not ends:
        return
    if ends[0] != 0 or any(b < a for a, b in pairwise(ends)):
        raise ValueError(f"{name} must begin with 0 and never fall, got {ends[:20]}")
    if ends[-1] > length:
        raise ValueError(f"{name} must end at the number of tokens, {length}, or before, got {ends[-1]}")


def cached(
    lengths: torch.Tensor,
    seqlen_q: int,
    seqlen_kv: int,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
) -> Mask:
    """Of `seqlen_kv` places in a cache, the first lengths[b] are keys of batch item b, its last query's among them.

    `lengths` are integers (batch,). `causal` and `window` are aligned at an item's last query and last key, and not
    given to `attention` besides. Values are checked where they are on the CPU: elsewhere that would be a wait.
    """
    _check_integers("lengths", lengths, "(batch,)", (1,))
    wrong = [n for n in known(lengths) if not 0 <= n <= seqlen_kv]
    if wrong:
        raise ValueError(f"lengths must be between 0 and the {seqlen_kv} places there are, got {wrong[0]}")
    left, right = (None, None) if window is None else sides(window)
    right = 0 if causal else right
    before = lengths.int().view(-1, 1, 1, 1) - seqlen_q
    q = torch.arange(seqlen_q, dtype=torch.int32, device=lengths.device)[:, None] + before
    kv = torch.arange(seqlen_kv, dtype=torch.int32, device=lengths.device) - before
    hi, first = (before + seqlen_q).expand_as(q), torch.zeros_like(kv)
    last = torch.where(kv < seqlen_q, seqlen_q, 0).int()
    if right is not None:
        hi, first = torch.minimum(hi, q + min(right, BIG) + 1), kv - min(right, BIG)
    if left is None:
        return over(_FROM_THE_FIRST, hi, first, last)
    return over(_INTERVALS, q - min(left, BIG), hi, first, torch.minimum(last, kv + min(left, BIG) + 1))


def diagonal(own: torch.Tensor, others: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each of `length` places among packed sequences, the number of its sequence, and where among the other ones the
    place lies that is as far from its sequence's end."""
    place = torch.arange(length, dtype=torch.int32, device=own.device)
    number = torch.searchsorted(own[1:].contiguous(), place, right=True)
    after = (number + 1).clamp(max=own.shape[0] - 1)
    return number, others[after] - own[after] + place


def _within(
    own: torch.Tensor, others: torch.Tensor, length: int, before: int | None, after: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each place, the interval of places in the other's sequence that it goes with; empty past the last one."""
    number, place = diagonal(own, others, length)
    end = (number + 1).clamp(max=own.shape[0] - 1)
    lo, hi = others[end - 1], others[end]  # for no sequence at all, the last element twice: none
    if before is not None:
        lo = torch.maximum(lo, place - min(before, BIG))
    if after is not None:
        hi = torch.minimum(hi, place + min(after, BIG) + 1)
    return lo, torch.where(number < own.shape[0] - 1, hi, lo)


def _check_integers(name: str, t: Any, shape: str, dims: tuple[int, ...]) -> None:
    dense(name, t)
    if t.dtype not in INTEGERS or t.dim() not in dims:
        raise ValueError(f"{name} must be integers of shape {shape}, got {t.dtype} {tuple(t.shape)}")


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
    """A bool tensor broadcastable to (batch, heads_q, seqlen_q, seqlen_kv), True where the query attends."""
    dense("mask", keep)
    if keep.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor (True = attend), got dtype {keep.dtype}")
    return Mask(lambda b, h, q, kv, aux: aux[0], (four_dims(keep),), name="tensor")
