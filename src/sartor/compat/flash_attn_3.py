"""FlashAttention-3's functions (`flash_attn_interface`), names, order and defaults, over those of flash-attn 2.

What the two have in common means the same; see `sartor.compat.flash_attn` for shapes. `num_splits` 1 keeps the keys
whole; `pack_gqa` and `sm_margin` are accepted, and nothing depends on them.
"""

from __future__ import annotations

from typing import Any

import torch

from sartor.compat import flash_attn as two
from sartor.compat.arguments import named

Tensor = torch.Tensor
Window = tuple[int | None, int | None]
Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention with FlashAttention-3's signature.

    Args:
        q: (batch, seqlen_q, heads_q, dim).
        k, v: (batch, seqlen_kv, heads_kv, dim); heads_q is a multiple of heads_kv.
        softmax_scale, causal, window_size, softcap, deterministic: as flash-attn 2's, in `sartor.flash_attn_func`.
        return_attn_probs: return (out, lse); lse (batch, heads_q, seqlen_q), natural log.
        num_splits, pack_gqa, sm_margin: accepted; nothing depends on them.
        qv, q_descale, k_descale, v_descale, attention_chunk: left out; others raise NotImplementedError.

    Returns:
        out (batch, seqlen_q, heads_q, dim), or (out, lse).
    """
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    found = two.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs
    )
    return found[:2] if isinstance(found, tuple) else found


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of sequences packed along one axis, with FlashAttention-3's signature.

    Args:
        q: (total_q, heads_q, dim).
        k, v: (total_k, heads_kv, dim).
        cu_seqlens_q: integers (sequences + 1,), where each sequence's queries begin, from 0 on, and the last one's end.
        cu_seqlens_k: the same for keys.
        max_seqlen_q, max_seqlen_k, num_splits, pack_gqa, sm_margin: accepted; nothing depends on them.
        softmax_scale, causal, window_size, softcap, deterministic: as for `flash_attn_func`, sequence by sequence.
        return_attn_probs: return (out, lse); lse (heads_q, total_q), natural log.
        seqused_q, seqused_k, qv, q_descale, k_descale, v_descale, attention_chunk: left out; others raise
            NotImplementedError.

    Returns:
        out (total_q, heads_q, dim), or (out, lse).
    """
    _refuse(
        seqused_q=seqused_q, seqused_k=seqused_k, qv=qv, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, attention_chunk=attention_chunk,
    )  # fmt: skip
    found = two.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, window_size,
        softcap, None, deterministic, return_attn_probs,
    )  # fmt: skip
    return found[:2] if isinstance(found, tuple) else found


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attention to a cache of keys, to which new ones may be added first, with FlashAttention-3's signature.

    Args:
        q: (batch, seqlen_q, heads_q, dim).
        k_cache, v_cache: (batch, capacity, heads_kv, dim).
        k, v: (batch, seqlen_new, heads_kv, dim), written into the caches from place cache_seqlens[b] on; or None.
        cache_seqlens: an integer, or integers (batch,): places that are filled, before k and v are added. None: all.
        softmax_scale, causal, window_size, softcap, num_splits: as for `sartor.flash_attn_with_kvcache`.
        return_softmax_lse: return (out, lse); lse (batch, heads_q, seqlen_q), natural log.
        rotary_cos, rotary_sin, rotary_interleaved, cache_batch_idx, cache_leftpad: the same.
        page_table: as flash-attn 2's block_table.
        max_seqlen_q, scheduler_metadata, pack_gqa, sm_margin: accepted; nothing depends on them.
        qv, rotary_seqlens, cu_seqlens_q, cu_seqlens_k_new, q_descale, k_descale, v_descale, attention_chunk: left out;
            others raise NotImplementedError.

    Returns:
        out (batch, seqlen_q, heads_q, dim), or (out, lse).
    """
    _refuse(
        qv=qv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_seqlens=rotary_seqlens, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    return _cache_call(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, None, num_splits, return_softmax_lse,
    )  # fmt: skip


_cache_call = named({"block_table": "page_table"})(two.flash_attn_with_kvcache)


def _refuse(**missing: Any) -> None:
    for name, value in missing.items():
        if value is not None and not (isinstance(value, int) and value == 0):
            raise NotImplementedError(f"{name} must be left out, got {type(value).__name__}: it is not supported yet")
