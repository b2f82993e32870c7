"""flash-attn 2's functions, names, order and defaults, over `sartor.attention`. Layout (batch, seqlen, heads, dim)."""

from __future__ import annotations

import operator
from typing import Any

import torch

from sartor import lengths_front
from sartor.api import attention
from sartor.checks import boolean, dense, is_integer, needs_operator, slopes, slopes_without_gradient
from sartor.compat.arguments import named
from sartor.lengths.append import append
from sartor.lengths.intervals import Cache, cached_table, look_at_filled
from sartor.lengths.pages import check_table, gather, write_back
from sartor.mods.core import Mask, Score
from sartor.mods.masks import ends_of, of_cache, of_filled, packed_as
from sartor.mods.scores import alibi_of_cache, packed_alibi

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
        cache_seqlens: an integer, or integers (batch,): places that are filled, before k and v are added. None: all.
            `sartor.check` says when values are looked at; of new keys past the end only those that fit are written.
            Layers that share lengths spare time with `sartor.mods.cached`.
        softmax_scale, softcap: as for `flash_attn_func`.
        causal, window_size: aligned at an item's last query and its last key.
        alibi_slopes: float32 (heads_q,) or (batch, heads_q).
        num_splits: 1 keeps the keys whole, so that what else is in the batch changes no bit; with 0 or more than 1
            they are taken in as many parts as suit the GPU.
        rotary_interleaved: accepted; nothing depends on it.
        return_softmax_lse: return (out, lse), lse (batch, heads_q, seqlen_q).
        block_table: int32 or int64 (batch, pages of an item): then the caches are (pages, page_size, heads_kv, dim), of
            any page size, and row b names the pages that item b's places lie in, -1 where there is none. Pages are
            copied to a dense cache for the call, which costs a read and a write of all places that the table spans:
            make it no wider than the longest item needs.
        rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad: None; others raise NotImplementedError.

    Returns:
        out (batch, seqlen_q, heads_q, dim).
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
    missing = {
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
    }  # fmt: skip
    for name, value in missing.items():
        if value is not None:
            raise NotImplementedError(f"{name} must be None, got {type(value).__name__}: it is not supported yet")
    _check_dims("batch, seqlen, heads, dim", q=q, k_cache=k_cache, v_cache=v_cache)
    pages = k_cache, v_cache
    if block_table is not None:
        check_table("block_table", block_table, q.shape[0], k_cache, v_cache)
        k_cache, v_cache = (gather("block_table", t, block_table) for t in pages)
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
    if cache_seqlens is None and k is None and v is None:
        return _attend_to_cache(
            q, k_cache, v_cache, causal=causal, window=window_size, alibi_slopes=alibi_slopes, **options
        )
    before = _cache_lengths(cache_seqlens, q)
    added = 0 if k is None and v is None else _check_new(k_cache, v_cache, k, v)
    ends = ends_of(causal, window_size)
    cache = Cache(q.shape[0], q.shape[1], k_cache.shape[1], added, "cache_seqlens")
    mask, score = _cache_mask(q, before, ends, cache, alibi_slopes, (k_cache, v_cache, k, v))
    if k is not None and v is not None:  # the caches are written to when all else that is looked at here is right
        append(k_cache, v_cache, k, v, before, cache.name)
        if block_table is not None:
            write_back(pages[0], block_table, k_cache, before, added)
            write_back(pages[1], block_table, v_cache, before, added)
    result = _attend_to_cache(q, k_cache, v_cache, mask=mask, score=score, **options)
    if isinstance(kept, lengths_front.New):
        kept.keep(lengths_front.cached(tensors, ends, cache, softmax_scale, softcap, num_splits == 1))
    return result


def _cache_mask(
    q: Tensor, lengths: int | Tensor, ends: tuple[int, int], cache: Cache, alibi_slopes: Tensor | None, others: Any
) -> tuple[Mask, Score | None]:
    """The mask of a cache, and what slopes change of its scores. The mask reads the lengths themselves where nothing
    needs them later."""
    follows = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, *others))
    if isinstance(lengths, Tensor) and alibi_slopes is None and not follows and not needs_operator(q):
        look_at_filled(lengths, cache)
        return of_filled(lengths, cache.added, ends), None
    table = cached_table(q, lengths, ends, cache)
    if alibi_slopes is None:
        return of_cache(table, ends), None
    slopes(alibi_slopes, q.shape[2], q.shape[0], q.device)
    slopes_without_gradient(alibi_slopes)
    return of_cache(table, ends), alibi_of_cache(alibi_slopes, table[1])


def _cache_lengths(given: int | Tensor | None, q: Tensor) -> int | Tensor:
    if is_integer(given):
        return operator.index(given)  # type: ignore[arg-type]
    dense("cache_seqlens", given)
    lengths: Tensor = given  # type: ignore[assignment]
    if lengths.dtype not in (torch.int32, torch.int64) or lengths.dim() != 1 or lengths.shape[0] != q.shape[0]:
        found = f"{lengths.dtype} {tuple(lengths.shape)}"
        raise ValueError(f"cache_seqlens must be int32 or int64 of shape {(q.shape[0],)}, got {found}")
    if lengths.device != q.device:
        raise ValueError(f"cache_seqlens must be on the device of q, {q.device}, got {lengths.device}")
    return lengths


def _check_new(k_cache: Tensor, v_cache: Tensor, k: Any, v: Any) -> int:
    """How many keys are added, which have the shape that their caches ask for."""
    for name, t, cache in (("k", k, k_cache), ("v", v, v_cache)):
        dense(name, t)
        want = (cache.shape[0], *k.shape[1:2], *cache.shape[2:])
        if t.shape != want or t.dtype != cache.dtype or t.device != cache.device:
            found = f"{t.dtype} {tuple(t.shape)} on {t.device}"
            raise ValueError(f"{name} must be {cache.dtype} {want}, as its cache is, on {cache.device}, got {found}")
    if k.shape[1] > k_cache.shape[1]:
        raise ValueError(f"k must have at most the {k_cache.shape[1]} places of its cache, got {k.shape[1]}")
    return int(k.shape[1])


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
