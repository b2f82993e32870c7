"""Caches in pages: (pages, page_size, heads, dim), of which a table (batch, pages of an item) names each item's own.

No kernel here follows a table. Its pages are copied, one after another, to a dense cache for the call: for keys and
values each a read and a write of batch * pages of an item * page_size places, beside the read that attention makes.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch

from sartor.checks import dense, needs_operator

Tensor = torch.Tensor


def check_table(name: str, table: Any, batch: int, k_cache: Tensor, v_cache: Tensor) -> None:
    """Integers (batch, pages of an item) on the device of caches of as many pages.

    Raises TypeError, ValueError: otherwise. What numbers it holds is looked at where `gather` says.
    """
    dense(name, table)
    if table.dtype not in (torch.int32, torch.int64) or table.dim() != 2 or table.shape[0] != batch:
        found = f"{table.dtype} {tuple(table.shape)}"
        raise ValueError(f"{name} must be int32 or int64 of shape ({batch}, pages of an item), got {found}")
    if table.device != k_cache.device:
        raise ValueError(f"{name} must be on the device of k_cache, {k_cache.device}, got {table.device}")
    if table.numel() and not k_cache.shape[0]:
        raise ValueError(f"k_cache must have pages where {name} names some, got {tuple(k_cache.shape)}")
    if k_cache.shape[:2] != v_cache.shape[:2]:
        sizes = f"{tuple(k_cache.shape[:2])} and {tuple(v_cache.shape[:2])}"
        raise ValueError(f"v_cache must have the pages of k_cache, and as large ones, got {sizes}")


def gather(name: str, pages: Tensor, table: Tensor) -> Tensor:
    """The pages of each item one after another: (batch, pages of an item * page_size, heads, dim).

    Numbers below 0 stand for pages that an item has not got, which lengths are to hide. On a CPU others that are no
    page raise ValueError; on a GPU they read the last page.
    """
    most = pages.shape[0] - 1
    if table.device.type == "cpu" and not needs_operator(table) and table.numel() and int(table.max()) > most:
        raise ValueError(f"{name} must name pages below {pages.shape[0]}, got {int(table.max())}")
    if not torch.compiler.is_compiling():
        _say(name)
    found = pages.index_select(0, table.flatten().clamp(0, most))
    return found.view(table.shape[0], table.shape[1] * pages.shape[1], *pages.shape[2:])


def write_back(pages: Tensor, table: Tensor, whole: Tensor, lengths: Tensor | int, added: int) -> None:
    """Copy the places from lengths[b] on, as many as were added, from the dense cache to their pages.

    Places that an item has no page for are left out: without a wait for a GPU to tell which, they write once more what
    the first place that has a page does.
    """
    items, device = table.shape[0], table.device
    if not items * added:
        return
    if not isinstance(lengths, Tensor):
        lengths = torch.full((items,), lengths, dtype=torch.int64, device=device)
    new = torch.arange(added, dtype=torch.int64, device=device)
    at = lengths.long().clamp(0, whole.shape[1] - added)[:, None] + new
    item = torch.arange(items, dtype=torch.int64, device=device)[:, None]
    page, place = table.long()[item, at // pages.shape[1]].flatten(), (at % pages.shape[1]).flatten()
    values, there = whole[item, at].flatten(0, 1), page >= 0
    first = there.long().argmax(0, keepdim=True)
    page, place = (torch.where(there, x, x[first]) for x in (page.clamp(0, pages.shape[0] - 1), place))
    again = torch.where(there[first, None, None], values[first], pages[page[first], place[first]])  # if none, as it was
    pages[page, place] = torch.where(there[:, None, None], values, again.detach())  # whose gradient counts once


@cache
def _say(name: str) -> None:
    warnings.warn(
        f"{name}: pages are copied to a dense cache at every call, which reads and writes each key once more",
        stacklevel=4,
    )
