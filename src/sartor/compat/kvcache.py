"""What a call on a cache is given, as what it stands for: lengths, new keys, whose the rows or pages are, the mask."""

from __future__ import annotations

import operator
from typing import Any

import torch

from sartor.checks import dense, is_integer, needs_operator, slopes, slopes_without_gradient
from sartor.lengths.intervals import Cache, cached_table, look_at_filled
from sartor.lengths.pages import Table, check_table
from sartor.lengths.values import check_filled, look
from sartor.mods.core import Mask, Score
from sartor.mods.masks import of_cache, of_filled
from sartor.mods.scores import alibi_of_cache

Tensor = torch.Tensor


def table_of(block_table: Any, cache_batch_idx: Any, batch: int, k_cache: Tensor, v_cache: Tensor) -> Table | None:
    """The table that says where in the caches each item's places are, if there is one: rows are pages of which an item
    has one."""
    if cache_batch_idx is None:
        return None if block_table is None else check_table("block_table", block_table, batch, k_cache, v_cache)
    if block_table is not None:
        raise ValueError(f"cache_batch_idx must be None beside block_table, got {type(cache_batch_idx).__name__}")
    return check_table("cache_batch_idx", cache_batch_idx, batch, k_cache, v_cache, rows=True)


def lengths_of(given: int | Tensor | None, q: Tensor) -> int | Tensor:
    """cache_seqlens, checked."""
    if is_integer(given):
        return operator.index(given)  # type: ignore[arg-type]
    _check_of_items("cache_seqlens", given, q)
    return given  # type: ignore[return-value]


def _check_of_items(name: str, t: Any, q: Tensor) -> None:
    """Integers (batch,) on the device of q."""
    dense(name, t)
    if t.dtype not in (torch.int32, torch.int64) or t.dim() != 1 or t.shape[0] != q.shape[0]:
        found = f"{t.dtype} {tuple(t.shape)}"
        raise ValueError(f"{name} must be int32 or int64 of shape {(q.shape[0],)}, got {found}")
    if t.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {t.device}")


def check_new(k_cache: Tensor, v_cache: Tensor, k: Any, v: Any) -> int:
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


def mask_of(
    q: Tensor, lengths: int | Tensor, ends: tuple[int, int], cache: Cache, leftpad: Tensor | None,
    alibi_slopes: Tensor | None, others: Any,
) -> tuple[Mask, Score | None]:  # fmt: skip
    """The mask of a cache, and what slopes change of its scores. The mask reads the lengths themselves where nothing
    needs them later."""
    operators = needs_operator(q)
    follows = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, *others))
    if isinstance(lengths, Tensor) and leftpad is None and alibi_slopes is None and not follows and not operators:
        look_at_filled(lengths, cache)
        return of_filled(lengths, cache.added, ends), None
    if leftpad is not None:
        _check_of_items("cache_leftpad", leftpad, q)
        if not operators:
            look("cache_leftpad", leftpad, check_filled, cache.capacity, 0)
    table = cached_table(q, lengths, ends, cache)
    mask = of_cache(table, ends, leftpad)
    if alibi_slopes is None:
        return mask, None
    slopes(alibi_slopes, q.shape[2], q.shape[0], q.device)
    slopes_without_gradient(alibi_slopes)
    return mask, alibi_of_cache(alibi_slopes, table[1])
