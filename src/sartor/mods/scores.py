"""The scores: changes of softmax_scale * q.k before the softmax. The order is soft-capping, the caller's own, ALiBi,
bias."""

from __future__ import annotations

import torch

from sartor.checks import integers
from sartor.lengths.intervals import packed_places
from sartor.mods.core import BIG, Score, over
from sartor.mods.expr import tanh
from sartor.mods.masks import offset
from sartor.mods.tracing import four_dims


def softcap(cap: float) -> Score:
    """cap * tanh(score / cap), with cap > 0 (Gemma 2, section 2)."""
    return Score(lambda s, b, h, q, kv, aux: aux[0] * tanh(s / aux[0]), (float(cap),), "softcap")


def alibi(slopes: torch.Tensor, dtype: torch.dtype = torch.float32) -> Score:
    """score - slope * |q + seqlen_kv - seqlen_q - kv| (Press, Smith and Lewis 2022, with flash-attn's symmetric form
    for keys after the query).

    Args:
        slopes: floats of shape (heads_q,) or (batch, heads_q).
        dtype: float32, or float64 beside float64 inputs: what slopes are read as.
    """
    aux = (slopes_table(slopes, dtype), offset)
    return Score(lambda s, b, h, q, kv, aux: s - aux[0] * abs(q + aux[1] - kv), aux, "alibi")


_SLOPES = torch.empty(2, 1, 1, dtype=torch.float32, device="meta")
_OF_PLACES = Score(
    lambda s, b, h, q, kv, aux: s - aux[0] * abs(aux[1] - kv),
    (_SLOPES, torch.empty(2, 1, dtype=torch.int32, device="meta")),
    "alibi",
)
_OF_ITEMS = Score(
    lambda s, b, h, q, kv, aux: s - aux[0] * abs(q + aux[1] - kv),
    (_SLOPES[None], torch.empty(2, 1, 1, 1, dtype=torch.int32, device="meta")),
    "alibi",
)


def cached_alibi(slopes: torch.Tensor, lengths: torch.Tensor, seqlen_q: int) -> Score:
    """`alibi` beside `mods.cached`: distances are those from an item's last query and last key.

    Args:
        slopes: floats of shape (heads_q,) or (batch, heads_q).
        lengths, seqlen_q: as given to `mods.cached`.
    """
    integers(seqlen_q=seqlen_q)
    return alibi_of_cache(slopes, lengths.long().clamp(0, BIG).int().view(-1, 1, 1, 1) - seqlen_q)


def alibi_of_cache(slopes: torch.Tensor, shift: torch.Tensor) -> Score:
    """`alibi` of items whose diagonals are moved by `shift`, int32 (batch, 1, 1, 1): the second of `cached_table`."""
    return over(_OF_ITEMS, slopes_table(slopes, torch.float32), shift)


def packed_alibi(slopes: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor, seqlen_q: int) -> Score:
    """`alibi` beside `mods.packed`: distances are those within a sequence, from its last query and key.

    Args:
        slopes: floats of shape (heads_q,) or (sequences, heads_q).
        cu_seqlens_q, cu_seqlens_kv, seqlen_q: as given to `mods.packed`.
    """
    integers(seqlen_q=seqlen_q)
    number, place = packed_places(cu_seqlens_q, cu_seqlens_kv, seqlen_q).unbind()
    if len(slopes) == 0:
        slopes = slopes.new_zeros(slopes.shape[-1], seqlen_q, 1)
    elif slopes.dim() == 2:
        slopes = slopes.index_select(0, number).T[..., None]
    else:
        slopes = slopes[:, None, None]
    return over(_OF_PLACES, slopes.float(), place[:, None])


def slopes_table(slopes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """ALiBi slopes, (1 or batch, heads_q, 1, 1)."""
    return slopes.to(dtype).view(-1 if slopes.dim() == 2 else 1, slopes.shape[-1], 1, 1)


def bias(table: torch.Tensor) -> Score:
    """score + table, the last term that is added.

    Args:
        table: floats broadcastable to (batch, heads_q, seqlen_q, seqlen_kv).
    """
    return Score(lambda s, b, h, q, kv, aux: s + aux[0], (four_dims(table),), "bias")
