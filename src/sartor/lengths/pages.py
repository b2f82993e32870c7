"""Caches in pages: (pages, page_size, heads, dim), of which a table (batch, pages of an item) names each item's own.

No kernel here follows a table. Its pages are copied, one after another, to a dense cache for the call: for keys and
values each a read and a write of batch * pages of an item * page_size places, beside the read that attention makes.
A cache of which each item has a row of its own, named by a table, is one of pages as long as the cache.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, NamedTuple

import torch

from sartor.checks import dense, needs_operator

Tensor = torch.Tensor


class Table(NamedTuple):
    """Which pages each item's places lie in: numbers (batch, pages of an item). name, kind: what errors and warnings
    call the table and the pages. Build with `check_table`."""

    name: str
    numbers: Tensor
    kind: str


def check_table(name: str, given: Any, batch: int, k_cache: Tensor, v_cache: Tensor, rows: bool = False) -> Table:
    """The table of integers (batch, pages of an item), on the device of caches of as many pages. rows: of integers
    (batch,), the one page of each item, which is a row of the caches.

    Numbers below 0 stand for pages that an item has not got, which lengths are to hide; a row each has.

    Raises TypeError, ValueError: otherwise; on a CPU also numbers of pages that there are not.
    """
    dense(name, given)
    kind, shape = ("rows", f"({batch},)") if rows else ("pages", f"({batch}, pages of an item)")
    if given.dtype not in (torch.int32, torch.int64) or given.dim() != 2 - rows or given.shape[0] != batch:
        found = f"{given.dtype} {tuple(given.shape)}"
        raise ValueError(f"{name} must be int32 or int64 of shape {shape}, got {found}")
    if given.device != k_cache.device:
        raise ValueError(f"{name} must be on the device of k_cache, {k_cache.device}, got {given.device}")
    if given.numel() and not k_cache.shape[0]:
        raise ValueError(f"k_cache must have {kind} where {name} names some, got {tuple(k_cache.shape)}")
    if k_cache.shape[:2] != v_cache.shape[:2]:
        sizes = f"{tuple(k_cache.shape[:2])} and {tuple(v_cache.shape[:2])}"
        raise ValueError(f"v_cache must have the {kind} of k_cache, and as large ones, got {sizes}")
    if given.device.type == "cpu" and not needs_operator(given) and given.numel():
        if int(given.max()) >= k_cache.shape[0]:
            raise ValueError(f"{name} must name {kind} below {k_cache.shape[0]}, got {int(given.max())}")
        if rows and int(given.min()) < 0:
            raise ValueError(f"{name} must name {kind} from 0 on, got {int(given.min())}")
    return Table(name, given[:, None] if rows else given, kind)


def gather(table: Table, pages: Tensor) -> Tensor:
    """The pages of each item one after another: (batch, pages of an item * page_size, heads, dim). Of numbers that are
    no page, the nearest."""
    numbers = table.numbers
    if not torch.compiler.is_compiling():
        _say(table.name, table.kind)
    found = pages.index_select(0, numbers.flatten().clamp(0, pages.shape[0] - 1))
    return found.view(numbers.shape[0], numbers.shape[1] * pages.shape[1], *pages.shape[2:])


def write_back(table: Table, pages: Tensor, whole: Tensor, lengths: Tensor | int, added: int) -> None:
    """Copy the places from lengths[b] on, as many as were added, from the dense cache to their pages.

    Places that an item has no page for are left out: without a wait for a GPU to tell which, they write once more what
    the first place that has a page does.
    """
    items, device = table.numbers.shape[0], pages.device
    if not items * added:
        return
    if not isinstance(lengths, Tensor):
        lengths = torch.full((items,), lengths, dtype=torch.int64, device=device)
    new = torch.arange(added, dtype=torch.int64, device=device)
    at = lengths.long().clamp(0, whole.shape[1] - added)[:, None] + new
    item = torch.arange(items, dtype=torch.int64, device=device)[:, None]
    page, place = table.numbers.long()[item, at // pages.shape[1]].flatten(), (at % pages.shape[1]).flatten()
    values, there = whole[item, at].flatten(0, 1), page >= 0
    first = there.long().argmax(0, keepdim=True)
    page, place = (torch.where(there, x, x[first]) for x in (page.clamp(0, pages.shape[0] - 1), place))
    again = torch.where(there[first, None, None], values[first], pages[page[first], place[first]])  # if none, as it was
    pages[page, place] = torch.where(there[:, None, None], values, again.detach())  # whose gradient counts once


@cache
def _say(name: str, kind: str) -> None:
    warnings.warn(
        f"{name}: {kind} are copied to a dense cache at every call, which reads and writes each key once more",
        stacklevel=5,  # where the face was called
    )
