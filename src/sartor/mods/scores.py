"""The scores: changes of softmax_scale * q.k before the softmax. The order is soft-capping, ALiBi, bias."""

from __future__ import annotations

import torch

from sartor.mods.core import Score, four_dims
from sartor.mods.expr import tanh
from sartor.mods.masks import offset


def softcap(cap: float) -> Score:
    """cap * tanh(score / cap) (Gemma 2, section 2)."""
    return Score(lambda s, b, h, q, kv, aux: aux[0] * tanh(s / aux[0]), (float(cap),), "softcap")


def alibi(slopes: torch.Tensor, dtype: torch.dtype = torch.float32) -> Score:
    """score - slope * |q + seqlen_kv - seqlen_q - kv|; slopes are (heads_q,) or (batch, heads_q), read as `dtype`.

    Press, Smith and Lewis 2022, with flash-attn's symmetric form for keys after the query.
    """
    aux = (slopes_table(slopes, dtype), offset)
    return Score(lambda s, b, h, q, kv, aux: s - aux[0] * abs(q + aux[1] - kv), aux, "alibi")


def slopes_table(slopes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """ALiBi slopes, (1 or batch, heads_q, 1, 1)."""
    return slopes.to(dtype).view(-1 if slopes.dim() == 2 else 1, slopes.shape[-1], 1, 1)


def bias(table: torch.Tensor) -> Score:
    """score + bias, a float tensor broadcastable to (batch, heads_q, seqlen_q, seqlen_kv); the last term added."""
    return Score(lambda s, b, h, q, kv, aux: s + aux[0], (four_dims(table),), "bias")
