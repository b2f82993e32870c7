"""The masks: each is a few lines, and the only place its rule is written."""

from __future__ import annotations

from typing import Any, Literal

import torch

from sartor.mods.core import BIG, Mask, four_dims, interval, where

Align = Literal["bottom_right", "top_left"]


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


def window(left: int | None, right: int | None, align: Align = "bottom_right") -> Mask:
    """Query i attends to the keys i-left .. i+right, both included; None or -1 is unbounded (flash-attn's rule)."""
    for name, side in (("left", left), ("right", right)):
        if isinstance(side, bool) or not (side is None or (isinstance(side, int) and side >= -1)):
            raise ValueError(f"window {name} must be an integer >= 0, or -1 or None for unbounded, got {side!r}")
    reach = tuple(BIG if side in (None, -1) else side for side in (left, right))
    return interval(
        rows=lambda b, h, q, aux: (q + aux[2] - aux[0], q + aux[2] + aux[1] + 1),
        cols=lambda b, h, kv, aux: (kv - aux[2] - aux[1], kv - aux[2] + aux[0] + 1),
        aux=(*reach, _aligned(align)),
        name="window",
    )


def prefix(length: int | torch.Tensor) -> Mask:
    """Every query attends to the first `length` keys: an int, or one per batch item, int (batch,)."""
    size = length.view(-1, 1, 1, 1) if isinstance(length, torch.Tensor) else length
    return interval(
        rows=lambda b, h, q, aux: (None, aux[0]),
        cols=lambda b, h, kv, aux: (None, where(kv < aux[0], BIG, 0)),
        aux=(size,),
        name="prefix",
    )


def document(ids: torch.Tensor, kv_ids: torch.Tensor | None = None) -> Mask:
    """Queries attend to keys of their own document; ids are int (batch or 1, seqlen), in any order.

    `kv_ids` are the keys' documents where they differ from the queries'. Documents that lie together in memory cost
    only their own tiles; where one is scattered, its tiles are looked at key by key.
    """
    kv_ids = ids if kv_ids is None else kv_ids
    for name, t in (("ids", ids), ("kv_ids", kv_ids)):
        if t.dim() != 2 or t.is_floating_point():
            raise ValueError(f"{name} must be integers of shape (batch, seqlen), got {t.dtype} {tuple(t.shape)}")
    if ids.shape[0] != kv_ids.shape[0]:
        batch = max(ids.shape[0], kv_ids.shape[0])
        ids, kv_ids = ids.expand(batch, -1), kv_ids.expand(batch, -1)
    rows = [t[:, None, :, None] for t in _spans(ids, kv_ids)]
    cols = [t[:, None, None, :] for t in _spans(kv_ids, ids)]
    return Mask(
        keep=lambda b, h, q, kv, aux: aux[0] == aux[1],
        aux=(ids.int()[:, None, :, None], kv_ids.int()[:, None, None, :], *rows, *cols),
        rows=lambda b, h, q, aux: aux[2:6],
        cols=lambda b, h, kv, aux: aux[6:10],
        name="document",
    )


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
    if keep.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor (True = attend), got dtype {keep.dtype}")
    return Mask(lambda b, h, q, kv, aux: aux[0], (four_dims(keep),), name="tensor")
