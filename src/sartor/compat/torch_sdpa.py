"""`torch.nn.functional.scaled_dot_product_attention`, signature and meaning, over `sartor.attention`."""

from __future__ import annotations

from typing import Any

import torch

from sartor.api import Causal, attention
from sartor.checks import boolean, dense
from sartor.compat.arguments import named

Tensor = torch.Tensor
NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask", "softmax_scale": "scale"}


@named(NAMES)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with PyTorch's signature and meaning.

    Args:
        query: (N, ..., H, L, E); rank 2 and 3 as in PyTorch, without heads or without a batch and heads.
        key: (N, ..., H, S, E); with `enable_gqa`, its H may divide the query's. Leading dims broadcast.
        value: (N, ..., H, S, Ev).
        attn_mask: broadcastable to (N, ..., H, L, S): bool, True = attend, or float, added to the scores; or one of
            torch.nn.attention.bias' causal_upper_left and causal_lower_right.
        dropout_p: at least 0 and below 1, drawn from PyTorch's generator of the device; not the bits of PyTorch's own.
        is_causal: query i sees keys up to i, whatever L and S: PyTorch's top-left alignment. Not with `attn_mask`.
        scale: 1 / sqrt(E) by default.
        enable_gqa: needed for key heads that are fewer than query heads.

    Returns:
        (N, ..., H, L, Ev). A row that attends to no key is 0.
    """
    if boolean("is_causal", is_causal) and attn_mask is not None:
        raise ValueError("attn_mask must be None when is_causal is True, got both attn_mask and is_causal")
    boolean("enable_gqa", enable_gqa)
    for name, t in (("query", query), ("key", key), ("value", value)):
        dense(name, t)
        if t.dim() < 2:
            raise ValueError(f"{name} must have at least 2 dims (..., seqlen, dim), got {t.dim()}: {tuple(t.shape)}")
    if enable_gqa and query.dim() == key.dim() == value.dim() == 3:  # its third dim from the end are heads, here too
        return scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        )[0]
    lead, q, k, v = _rank4(query, key, value, enable_gqa)
    causal: Causal = "top_left" if is_causal else False
    variant = getattr(attn_mask, "variant", None)
    if variant is not None:  # torch.nn.attention.bias.CausalBias, which holds no data, and is slow to import
        made, given = (attn_mask.seq_len_q, attn_mask.seq_len_kv), (query.shape[-2], key.shape[-2])  # type: ignore[union-attr]
        if made != given:
            raise ValueError(f"attn_mask must be a causal bias of the lengths of query and key, {given}, got {made}")
        causal = "top_left" if variant.name == "UPPER_LEFT" else "bottom_right"
        attn_mask = None
    out = attention(
        q, k, v, layout="bhsd", causal=causal, softmax_scale=scale, dropout_p=dropout_p,
        **_extra(attn_mask, lead, (q.shape[2], k.shape[2])),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.reshape(*lead, *out.shape[2:])


def _rank4(query: Tensor, key: Tensor, value: Tensor, gqa: bool) -> tuple[torch.Size, Tensor, Tensor, Tensor]:
    """The leading dims of the result, and views of rank 4."""
    leads = [t.shape[:-2] for t in (query, key, value)]
    if len(leads[0]) == 2 and leads[0] == leads[1] == leads[2]:
        return leads[0], query, key, value
    heads = [lead[-1] if len(lead) > 1 else 1 for lead in leads]
    if not gqa and len(set(heads) - {1}) > 1:
        raise ValueError(f"enable_gqa must be True for heads of query, key and value that differ, got heads {heads}")
    try:
        if gqa and min(len(lead) for lead in leads) > 1:
            whole = torch.broadcast_shapes(*(lead[:-1] for lead in leads))  # type: ignore[no-untyped-call]
            wanted = [torch.Size((*whole, h)) for h in heads]
        else:
            wanted = [torch.broadcast_shapes(*leads)] * 3  # type: ignore[no-untyped-call]
    except RuntimeError:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ValueError(f"the batch dims of query, key and value must broadcast, got shapes {shapes}") from None
    views = []
    for t, want in zip((query, key, value), wanted, strict=True):
        t = t.expand(*want, *t.shape[-2:])
        views.append(t if t.dim() == 4 else t.reshape(_batch(want), want[-1] if len(want) > 1 else 1, *t.shape[-2:]))
    return wanted[0], views[0], views[1], views[2]


def _batch(lead: torch.Size) -> int:
    """How many items the leading dims (N, ..., H) hold; rank 3 inputs have no heads."""
    return torch.Size(lead[:-1] if len(lead) > 1 else lead).numel()


def _extra(attn_mask: Any, lead: torch.Size, lengths: tuple[int, int]) -> dict[str, Any]:
    """`attn_mask` as mask or bias of rank 4."""
    if attn_mask is None:
        return {}
    dense("attn_mask", attn_mask)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask must be bool or float, got dtype {attn_mask.dtype}")
    name = "mask" if attn_mask.dtype == torch.bool else "bias"
    if len(lead) == 2 and attn_mask.dim() <= 4:
        return {name: attn_mask}
    full = (*lead, *lengths)
    shape = (1,) * (len(full) - attn_mask.dim()) + tuple(attn_mask.shape)
    if len(shape) != len(full) or any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
        raise ValueError(f"attn_mask must be broadcastable to {full}, got {tuple(attn_mask.shape)}")
    heads = lead[-1] if len(lead) > 1 else 1
    whole = attn_mask.expand(*lead, *shape[-2:]) if any(n != 1 for n in shape[:-2]) else attn_mask
    sizes = (_batch(lead), heads) if whole is not attn_mask else (1, 1)
    return {name: whole.reshape(*sizes, *shape[-2:])}
