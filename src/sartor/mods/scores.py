"""The scores: changes of softmax_scale * q.k before the softmax. The order is soft-capping, the caller's own, ALiBi,
bias."""

from __future__ import annotations

import torch

from sartor.mods.core import Score, over
from sartor.mods.expr import tanh
from sartor.mods.masks import diagonal, offset
from sartor.mods.tracing import four_dims


def softcap(cap: float) -> Score:
    """cap * tanh(score / cap) (Gemma 2, section 2)."""
    return Score(lambda s, b, h, q, kv, aux: aux[0] * tanh(s / aux[0]), (float(cap),), "softcap")


def alibi(slopes: torch.Tensor, dtype: torch.dtype = torch.float32) -> Score:
    """score - slope * |q + seqlen_kv - seqlen_q - kv|; slopes are (heads_q,) or (batch, heads_q), read as `dtype`.

    Press, Smith and Lewis 2022, with flash-attn's symmetric form for keys after the query.
    """
    aux = (slopes_table(slopes, dtype), offset)
    return Score(lambda s, b, h, q, kv, aux: s - aux[0] * abs(q + aux[1] - kv), aux, "alibi")


_OF_PLACES = Score(
    lambda s, b, h, q, kv, aux: s - aux[0] * abs(aux[1] - kv),
    (torch.empty(2, 1, 1, device="meta"), torch.empty(2, 1, dtype=torch.int32, device="meta")),
    "alibi",
)


def cached_alibi(slopes: torch.Tensor, lengths: torch.Tensor, seqlen_q: int) -> Score:
    """`alibi` with the lengths of `mods.cached`; slopes are (heads_q,) or (batch, heads_q)."""
    place = torch.arange(seqlen_q, dtype=torch.int32, device=lengths.device)[:, None] + lengths.int().view(-1, 1, 1, 1)
    return over(_OF_PLACES, slopes_table(slopes, torch.float32), place - seqlen_q)


def packed_alibi(slopes: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor, seqlen_q: int) -> Score:
    """`alibi` of each of the sequences that `packed` keeps apart; slopes are (heads_q,) or (sequences, heads_q)."""
    number, place = diagonal(cu_seqlens_q.int(), cu_seqlens_kv.int(), seqlen_q)
    if len(slopes) == 0:
        slopes = slopes.new_zeros(slopes.shape[-1], seqlen_q, 1)
    elif slopes.dim() == 2:
        slopes = slopes[number.clamp(max=len(slopes) - 1)].T[..., None]
    else:
        slopes = slopes[:, None, None]
    return over(_OF_PLACES, slopes.float(), place[:, None])


def slopes_table(slopes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """ALiBi slopes, (1 or batch, heads_q, 1, 1)."""
    return slopes.to(dtype).view(-1 if slopes.dim() == 2 else 1, slopes.shape[-1], 1, 1)


def bias(table: torch.Tensor) -> Score:
    """score + bias, a float tensor broadcastable to (batch, heads_q, seqlen_q, seqlen_kv); the last term added."""
    return Score(lambda s, b, h, q, kv, aux: s + aux[0], (four_dims(table),), "bias")
