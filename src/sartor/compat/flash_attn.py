"""flash-attn 2's functions, names, order and defaults, over `sartor.attention`. Layout (batch, seqlen, heads, dim)."""

from __future__ import annotations

from typing import Any

import torch

from sartor import lengths_front
from sartor.api import attention
from sartor.checks import boolean, dense, is_integer, slopes, slopes_without_gradient
from sartor.compat import kvcache
from sartor.compat.arguments import named
from sartor.compat.rotary import rotary_of
from sartor.lengths.append import append
from sartor.lengths.intervals import NO_SIDE, Cache
from sartor.lengths.pages import gather, write_back
from sartor.mods.masks import ends_of, packed_as
from sartor.mods.scores import packed_alibi

Tensor = torch.Tensor
Window = tuple[int | None, int | None]
Result = Tensor | tuple[Tensor, Tensor, None]
NAMES = {"window": "window_size", "return_lse": "return_attn_probs"}
PACKED_NAMES = NAMES | {"cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens"}
CACHE_NAMES = {"window": "window_size", "return_lse": "return_softmax_lse"}

_attend_to_cache = named({"k": "k_cache", "v": "v_cache"})(attention)


@named(NAMES)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention with flash-attn 2's signature.

    Args:
        q: (batch, seqlen_q, heads_q, dim).
        k, v: (batch, seqlen_kv, heads_kv, dim); heads_q is a multiple of heads_kv.
        dropout_p: at least 0 and below 1, drawn from PyTorch's generator of the device; not the bits of flash-attn's.
        softmax_scale: 1 / sqrt(dim) by default.
        causal: bottom-right aligned: query i sees keys up to i + seqlen_kv - seqlen_q.
        window_size: (left, right), both included, aligned as `causal` is; -1 or None is unbounded.
        softcap: with c > 0, scores become c * tanh(score / c).
        alibi_slopes: float32 (heads_q,) or (batch, heads_q).
        deterministic: bit-equal gradients from run to run.
        return_attn_probs: return (out, lse, None). There are no probabilities to return; lse is the natural-log
            logsumexp (batch, heads_q, seqlen_q), float32 (float64 for float64 inputs), and differentiable.

    Returns:
        out (batch, seqlen_q, heads_q, dim).
    """
    result = attention(
        q, k, v, causal=boolean("causal", causal), window=window_size, softmax_scale=softmax_scale, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic, return_lse=return_attn_probs, dropout_p=dropout_p,
    )  # fmt: skip
    return (*result, None) if isinstance(result, tuple) else result


@named(NAMES)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of queries, keys and values in one tensor, with flash-attn 2's signature. They are not copied.

    Args:
        qkv: (batch, seqlen, 3, heads, dim): queries, keys, values, of as many heads.
        dropout_p: at least 0 and below 1, drawn from PyTorch's generator of the device; not the bits of flash-attn's.
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as for
            `flash_attn_func`.

    Returns:
        out (batch, seqlen, heads, dim); with return_attn_probs (out, lse, None), lse (batch, heads, seqlen).
    """
    _check_packed("qkv", qkv, 3)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


@named(NAMES)
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention with keys and values in one tensor, with flash-attn 2's signature. They are not copied.

    Args:
        q: (batch, seqlen_q, heads_q, dim).
        kv: (batch, seqlen_kv, 2, heads_kv, dim): keys, values; heads_q is a multiple of heads_kv.
        dropout_p: at least 0 and below 1, drawn from PyTorch's generator of the device; not the bits of flash-attn's.
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as for
            `flash_attn_func`.

    Returns:
        out (batch, seqlen_q, heads_q, dim); with return_attn_probs (out, lse, None), lse (batch, heads_q, seqlen_q).
    """
    _check_packed("kv", kv, 2)
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


@named(NAMES)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention of sequences packed along one axis, with flash-attn 2's signature.

    Args:
        q: (total_q, heads_q, dim).
        k, v: (total_k, heads_kv, dim).
        cu_seqlens_q: integers (sequences + 1,), where each sequence's queries begin, from 0 on, and the last one's end.
        cu_seqlens_k: the same for keys. Lengths may be 0; tokens past the last sequence see and are seen by none.
        max_seqlen_q, max_seqlen_k: accepted; nothing depends on them.
        block_table: None; pages are not supported.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs: as for
            `flash_attn_func`, sequence by sequence.
        alibi_slopes: float32 (heads_q,) or (sequences, heads_q).

    Returns:
        out (total_q, heads_q, dim); with return_attn_probs (out, lse, None), lse (heads_q, total_q).
        The mask is made anew by each call, on a GPU by one small kernel in front of the attention: layers that share
        lengths spare that kernel with `sartor.mods.packed`.

    Raises:
        ValueError: also for values of cu_seqlens that are wrong; `sartor.check` says when they are looked at.
    """
    if block_table is not None:
        raise NotImplementedError("block_table must be None: pages of keys are not supported yet")
    kept, tensors = None, (q, k, v, cu_seqlens_q, cu_seqlens_k)
    if alibi_slopes is None and dropout_p.__class__ is float and dropout_p == 0:
        kept = lengths_front.find(
            "packed", tensors, causal, window_size, softmax_scale, softcap, deterministic, return_attn_probs
        )
        found = kept.attend(tensors, return_attn_probs) if isinstance(kept, lengths_front.Kept) else None
        if found is not None:
            return found[0] if found[1] is None else (found[0], found[1].squeeze(0), None)
    _check_dims("tokens, heads, dim", q=q, k=k, v=v)
    lengths, sides = (q.shape[0], k.shape[0]), ends_of(boolean("causal", causal), window_size)
    mask = packed_as("cu_seqlens_k", cu_seqlens_q, cu_seqlens_k, lengths, sides)
    if cu_seqlens_q.device != q.device:
        raise ValueError(f"cu_seqlens_q must be on the device of q, {q.device}, got {cu_seqlens_q.device}")
    score = None
    if alibi_slopes is not None:
        slopes(alibi_slopes, q.shape[1], cu_seqlens_q.shape[0] - 1, q.device)
        slopes_without_gradient(alibi_slopes)
        score = packed_alibi(alibi_slopes, cu_seqlens_q, cu_seqlens_k, lengths[0])
    result = attention(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask=mask, score=score, softmax_scale=softmax_scale,
        softcap=softcap, deterministic=deterministic, return_lse=return_attn_probs, dropout_p=dropout_p,
    )  # fmt: skip
    if isinstance(kept, lengths_front.New):
        kept.keep(lengths_front.packed(tensors, sides, "cu_seqlens_k", softmax_scale, softcap, deterministic))
    return (result[0].squeeze(0), result[1].squeeze(0), None) if isinstance(result, tuple) else result.squeeze(0)


@named(PACKED_NAMES)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of packed sequences in one tensor, with flash-attn 2's signature. Nothing is copied.

    Args:
        qkv: (total, 3, heads, dim): queries, keys, values, of as many heads.
        cu_seqlens: integers (sequences + 1,), where each sequence begins, from 0 on, and the last one's end.
        max_seqlen: accepted; nothing depends on it.
        dropout_p, softmax_scale, causal, window_size, softcap: as for `flash_attn_varlen_func`.
        alibi_slopes, deterministic, return_attn_probs: the same.

    Returns:
        out (total, heads, dim); with return_attn_probs (out, lse, None), lse (heads, total).
    """
    _check_packed("qkv", qkv, 3, "tokens")
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@named(NAMES)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of packed sequences, keys and values in one tensor, with flash-attn 2's signature. Nothing is copied.

    Args:
        q: (total_q, heads_q, dim).
        kv: (total_k, 2, heads_kv, dim): keys, values; heads_q is a multiple of heads_kv.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as for `flash_attn_varlen_func`.
        dropout_p, softmax_scale, causal, window_size, softcap: the same.
        alibi_slopes, deterministic, return_attn_probs: the same.

    Returns:
        out (total_q, heads_q, dim); with return_attn_probs (out, lse, None), lse (heads_q, total_q).
    """
    _check_packed("kv", kv, 2, "tokens")
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@named(CACHE_NAMES)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a cache of keys, to which new ones may be added first, with flash-attn 2's signature.

    Args:
        q: (batch, seqlen_q, heads_q, dim).
        k_cache, v_cache: (batch, capacity, heads_kv, dim).
        k, v: (batch, seqlen_new, heads_kv, dim), written into the caches from place cache_seqlens[b] on; or None.
        rotary_cos, rotary_sin: floats (seqlen_ro, rotary_dim / 2), where k and v are given: a copy of k is turned by
            rows cache_seqlens[b], cache_seqlens[b] + 1, ... of them before it is written. So is one of q, with
            `causal` or a window; else all queries of an item are turned by row cache_seqlens[b]. Places past the last
            row take that. Computed in float32 (float64 for float64 inputs) and rounded once; columns of a head from
            rotary_dim on stay.
        rotary_interleaved: True turns columns 0 and 1, 2 and 3, ... of a head as pairs; False columns i and
            i + rotary_dim / 2.
        cache_seqlens: an integer, or integers (batch,): places that are filled, before k and v are added. None: all.
            `sartor.check` says when values are looked at; of new keys past the end only those that fit are written.
        cache_leftpad: int32 or int64 (batch,): keys of item b before place cache_leftpad[b] are seen by none. Places
            are counted as without it. Values are looked at as those of cache_seqlens, in compiled graphs not at all.
        cache_batch_idx: int32 or int64 (batch,): then the caches have any number of rows, and row cache_batch_idx[b]
            is that of item b. Rows are copied for the call, as pages are. New keys of items that share a row may come
            from either.
        block_table: int32 or int64 (batch, pages of an item): then the caches are (pages, page_size, heads_kv, dim), of
            any page size, and row b names the pages that item b's places lie in, -1 where there is none. Pages are
            copied to a dense cache for the call, which costs a read and a write of all places that the table spans:
            make it no wider than the longest item needs. Not together with cache_batch_idx.
        softmax_scale, softcap: as for `flash_attn_func`.
        causal, window_size: aligned at an item's last query and its last key.
        alibi_slopes: float32 (heads_q,) or (batch, heads_q).
        num_splits: 1 keeps the keys whole, so that what else is in the batch changes no bit; with 0 or more than 1
            they are taken in as many parts as suit the GPU.
        return_softmax_lse: return (out, lse), lse (batch, heads_q, seqlen_q).

    Returns:
        out (batch, seqlen_q, heads_q, dim).

    Raises:
        TypeError, ValueError: other types, shapes, dtypes or devices, only one of rotary_cos and rotary_sin, or these
            without new keys; on a CPU also numbers of pages or rows that there are not, which elsewhere read the
            nearest.
    """
    kept, tensors = None, (q, k_cache, v_cache, cache_seqlens, *(() if k is None else (k, v)))
    plain = rotary_cos is None and rotary_sin is None and cache_batch_idx is None and cache_leftpad is None
    if plain and block_table is None and alibi_slopes is None and num_splits.__class__ is int and num_splits >= 0:
        kept = lengths_front.find(
            "cached", tensors, causal, window_size, softmax_scale, softcap, num_splits == 1, return_softmax_lse
        )
        found = kept.attend(tensors, return_softmax_lse) if isinstance(kept, lengths_front.Kept) else None
        if found is not None:
            return found[0] if found[1] is None else (found[0], found[1])
    _check_dims("batch, seqlen, heads, dim", q=q, k_cache=k_cache, v_cache=v_cache)
    pages = k_cache, v_cache
    table = kvcache.table_of(block_table, cache_batch_idx, q.shape[0], k_cache, v_cache)
    if table is not None:
        k_cache, v_cache = gather(table, k_cache), gather(table, v_cache)
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
        if t.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have the batch of q, {q.shape[0]}, got batch {t.shape[0]}")
    boolean("causal", causal)
    if not is_integer(num_splits) or num_splits < 0:
        raise ValueError(f"num_splits must be an integer of at least 0, got {num_splits!r}")
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "softcap": softcap, "deterministic": num_splits == 1,
        "return_lse": return_softmax_lse,
    }  # fmt: skip
    new = k is not None or v is not None
    whole = cache_seqlens is None and not new
    before = k_cache.shape[1] if whole else kvcache.lengths_of(cache_seqlens, q)
    added = kvcache.check_new(k_cache, v_cache, k, v) if new else 0
    rotary = rotary_of(rotary_cos, rotary_sin, rotary_interleaved, q, k)
    if whole and cache_leftpad is None:
        return _attend_to_cache(
            q, k_cache, v_cache, causal=causal, window=window_size, alibi_slopes=alibi_slopes, **options
        )
    ends = ends_of(causal, window_size)
    cache = Cache(q.shape[0], q.shape[1], k_cache.shape[1], added, "cache_seqlens")
    mask, score = kvcache.mask_of(q, before, ends, cache, cache_leftpad, alibi_slopes, (k_cache, v_cache, k, v))
    if k is not None and v is not None:  # the caches are written to when all else that is looked at here is right
        if rotary is not None:
            q, k = rotary.turn(q, before, moves=ends != (NO_SIDE, NO_SIDE)), rotary.turn(k, before)
        append(k_cache, v_cache, k, v, before, cache.name)
        if table is not None:
            write_back(table, pages[0], k_cache, before, added)
            write_back(table, pages[1], v_cache, before, added)
    result = _attend_to_cache(q, k_cache, v_cache, mask=mask, score=score, **options)
    if isinstance(kept, lengths_front.New):
        kept.keep(lengths_front.cached(tensors, ends, cache, softmax_scale, softcap, num_splits == 1))
    return result


def _check_dims(dims: str, **tensors: Any) -> None:
    for name, t in tensors.items():
        dense(name, t)
        if t.dim() != dims.count(",") + 1:
            raise ValueError(f"{name} must have {dims.count(',') + 1} dims ({dims}), got {t.dim()}: {tuple(t.shape)}")


def _check_packed(name: str, t: Any, parts: int, lead: str = "batch, seqlen") -> None:
    dense(name, t)
    axis = lead.count(",") + 1
    if t.dim() != axis + 3 or t.shape[axis] != parts:
        raise ValueError(f"{name} must have shape ({lead}, {parts}, heads, dim), got {tuple(t.shape)}")
