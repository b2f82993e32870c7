"""Chunks dealt to ranks by how much of the mask they see: for documents, packed sequences and prefixes, which no fixed
order of chunks balances."""

from __future__ import annotations

import heapq

import torch

from sartor.checks import at_least
from sartor.distributed.sharding import Sharding
from sartor.distributed.shift import Window, band, both, sides_of
from sartor.distributed.sight import rows
from sartor.mods.core import Mask
from sartor.problem import Call

TILE = 128  # queries and keys of a tile that is counted


def visible_tiles(
    seqlen_q: int, seqlen_kv: int, *, causal: bool | str = False, window: Window = None, mask: Mask | None = None
) -> torch.Tensor:
    """int64 (tiles of queries,): for each tile of 128 queries, how many tiles of 128 keys are not empty by the mask's
    `rows`, which is what a kernel computes. Raises TypeError or ValueError for what `attention` would not take."""
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(f"mask must be a sartor.mods.Mask, got {type(mask).__name__}")
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    call = Call(nothing, nothing, nothing, causal=causal, window=window)  # which reads them as a call does
    sides = sides_of(call.causal, call.window, seqlen_q, seqlen_kv)
    whole = None if sides is None else band(*sides)
    whole = mask if whole is None else whole if mask is None else both(whole, mask)
    tiles = -(-seqlen_q // TILE)
    if whole is None:
        return torch.full((tiles,), -(-seqlen_kv // TILE), dtype=torch.int64, device="cpu")
    lo, hi, _, _ = rows(whole, seqlen_q, seqlen_kv)
    lo, hi = lo.clamp(0, seqlen_kv), hi.clamp(0, seqlen_kv)
    spare = tiles * TILE - seqlen_q
    lo = torch.cat([lo, lo.new_full((spare,), seqlen_kv)]).view(tiles, TILE).amin(1)
    hi = torch.cat([hi, hi.new_zeros(spare)]).view(tiles, TILE).amax(1)
    return torch.where(hi > lo, -(-hi // TILE) - lo // TILE, 0)


def balanced(
    seqlen: int, ranks: int, *, causal: bool | str = False, window: Window = None, mask: Mask | None = None,
    chunk: int | None = None,
) -> Sharding:  # fmt: skip
    """A sharding in which every rank has the same number of chunks, and nearly the same number of visible tiles.

    The longest chunk first goes to the rank with the least so far that has room (Graham 1969), then pairs of chunks are
    swapped between the fullest rank and others as long as that helps. All ranks must pass equal masks.

    Args:
        seqlen: tokens of queries and of keys.
        ranks: how many.
        causal, window, mask: as in `attention`.
        chunk: tokens of a chunk, a multiple of 128 where tiles are not to be cut; by default, the largest such that
            each rank has 16 or more.

    Returns:
        A padded `Sharding`, for `shard`, `unshard` and `attention`.

    Raises:
        TypeError, ValueError: an argument is wrong; the mask must be a `sartor.mods.Mask`.
    """
    at_least("seqlen", seqlen, 0)
    at_least("ranks", ranks, 1)
    if chunk is not None:
        at_least("chunk", chunk, 1)
    else:
        chunk = max(TILE, seqlen // (16 * ranks) // TILE * TILE)
    tiles = visible_tiles(seqlen, seqlen, causal=causal, window=window, mask=mask).double()
    count = -(-seqlen // chunk)
    each = torch.arange(tiles.shape[0], device="cpu") * TILE // chunk
    weights = torch.zeros(count, dtype=torch.float64, device="cpu")
    weights.index_add_(0, each.clamp(max=max(count - 1, 0)), tiles)
    owners = _deal(weights.tolist(), ranks, -(-count // ranks))
    return Sharding.of_chunks(seqlen, chunk, owners)


def _deal(weights: list[float], ranks: int, room: int) -> list[list[int]]:
    owners: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for number in sorted(range(len(weights)), key=lambda n: (-weights[n], n)):
        load, rank = heapq.heappop(loads)
        owners[rank].append(number)
        if len(owners[rank]) < room:
            heapq.heappush(loads, (load + weights[number], rank))
    for _ in range(4 * ranks):
        if not _swap(owners, weights):
            break
    return owners


def _swap(owners: list[list[int]], weights: list[float]) -> bool:
    """One exchange of two chunks that lowers the largest load; False where there is none."""
    loads = [sum(weights[n] for n in own) for own in owners]
    full = max(range(len(owners)), key=lambda r: (loads[r], r))
    best, pair = loads[full], None
    for other in range(len(owners)):
        for i, mine in enumerate(owners[full]):
            for j, yours in enumerate(owners[other]):
                moved = weights[mine] - weights[yours]
                worse = max(loads[full] - moved, loads[other] + moved)
                if moved > 0 and worse < best:
                    best, pair = worse, (other, i, j)
    if pair is None:
        return False
    other, i, j = pair
    owners[full][i], owners[other][j] = owners[other][j], owners[full][i]
    return True
