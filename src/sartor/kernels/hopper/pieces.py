"""In which pieces the wide backward makes the gradients of scores, so that they fit a workspace."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sartor.problem import Problem
from sartor.symbols import opaque

TILE = 64  # queries, and keys
BYTES = 2 * TILE * TILE
LEAST = 256 << 20  # bytes that a workspace may always have
NONE = 1 << 28  # a skew by which every tile of keys is seen by all queries
STEP, STEP_DQ = 4, 2  # time of a block a tile: products of 64x64 with all columns that a step of a kernel has
EDGE, CARRY, LAUNCH = 14, 10, 12  # the same of a block's start and end, of sums' way between launches, of a launch


@dataclass(frozen=True)
class Piece:
    """One pair of launches: heads of keys, flat over batches, and tiles of their keys."""

    first_head: int
    heads: int
    first_tile: int
    tiles: int


@dataclass(frozen=True)
class Shape:
    """What pieces are cut from."""

    heads: int  # of keys, of all batches
    group: int
    queries: int  # tiles
    keys: int
    most: int  # tile of queries with which a block begins at the latest
    skew: int  # the j-th tile of keys is seen by no query before the tile j - skew
    sums: int  # bytes of a tile of queries' float32 sums

    @classmethod
    def of(cls, p: Problem, skew: int) -> Shape:
        """Of a problem."""
        columns = -(-p.dim // 16) * 16
        queries, keys = (-(-n // TILE) for n in (p.seqlen_q, p.seqlen_kv))
        return cls(p.batch * p.heads_kv, p.group, queries, keys, p.seqlen_q // TILE, skew, 4 * TILE * columns)

    def seen(self, j: int) -> int:
        """Tiles of queries that the j-th of keys has room for: `Piece::first_query` in wide.cuh."""
        return _seen(self.queries, self.most, self.skew, j)

    def bytes(self, piece: Piece) -> int:
        """Of the gradients of scores."""
        tiles = _tiles(self.queries, self.most, self.skew, piece.first_tile, piece.tiles)
        return piece.heads * self.group * BYTES * tiles  # type: ignore[no-any-return]

    def carried(self, heads: int) -> int:
        """Bytes of dq on its way between ranges of keys."""
        return heads * self.group * self.queries * self.sums

    def cut(self, heads: int, limit: int) -> list[Piece]:
        """Pieces of so many heads and as many keys as fit, as equal as can be; none where not one tile fits."""
        per_tile = heads * self.group * BYTES
        whole = sum(map(self.seen, range(self.keys)))
        if whole * per_tile > limit:
            limit -= self.carried(heads)
        if self.seen(0) * per_tile > limit:
            return []
        parts = max(1, -(-whole * per_tile // limit))
        ends, tiles, used = [0], 0, 0
        for j in range(self.keys):
            more = self.seen(j)
            full = tiles > 0 and (tiles + more) * per_tile > limit
            if full or (len(ends) < parts and (used + tiles) * parts >= whole * len(ends)):
                ends.append(j)
                used, tiles = used + tiles, 0
            tiles += more
        ranges = list(zip(ends, [*ends[1:], self.keys], strict=True))
        return [
            Piece(first, min(heads, self.heads - first), begin, end - begin)
            for first in range(0, self.heads, heads)
            for begin, end in ranges
        ]

    def time(self, pieces: Sequence[Piece], sms: int) -> int:
        """About how long they take."""
        ranges = [piece for piece in pieces if piece.first_head == 0]
        carried = CARRY * (len(ranges) > 1)
        one = 0
        for piece in ranges:
            seen = [self.seen(j) for j in range(piece.first_tile, piece.first_tile + piece.tiles)]
            blocks = [self.group * STEP * n + EDGE for n in seen for _ in range(piece.heads)]
            pairs = piece.heads * self.group * -(-self.queries // 2)
            work = STEP_DQ * piece.heads * self.group * sum(seen) // 2 + pairs * (EDGE + carried)
            one += _longest(blocks, sms) + -(-pairs // sms) * (work // pairs) + 2 * LAUNCH
        return one * -(-self.heads // ranges[0].heads)


def limit(p: Problem) -> int:
    """Bytes that a workspace may have: as many as q, k, v and out, if those are more than LEAST, and a sixteenth. With
    it a causal head of 16384 queries need not be cut, and a full one only once, with room for its dq."""
    rows = p.heads_q * p.seqlen_q + p.heads_kv * p.seqlen_kv
    return max(LEAST, p.batch * rows * (p.dim + p.dim_v) * p.dtype.itemsize) // 16 * 17


def _seen(queries: int, most: int, skew: int, j: int) -> int:
    return queries - min(max(j - skew, 0), most)


@opaque
def _tiles(queries: int, most: int, skew: int, first: int, count: int) -> int:
    return sum(_seen(queries, most, skew, j) for j in range(first, first + count))


def pieces(shape: Shape, room: int, sms: int) -> tuple[Piece, ...]:
    """The pieces that take the least time of those that fit; none where nothing fits."""
    if _whole(*vars(shape).values(), room, sms):
        return (Piece(0, shape.heads, 0, shape.keys),)
    return _pieces(shape, room, sms)


@opaque
def _whole(*numbers: int) -> bool:
    *of, room, sms = numbers
    shape = Shape(*of)
    return _pieces(shape, room, sms) == (Piece(0, shape.heads, 0, shape.keys),)


@lru_cache(maxsize=256)
def _pieces(shape: Shape, room: int, sms: int) -> tuple[Piece, ...]:
    found: list[list[Piece]] = []
    counts = {-(-shape.heads // parts) for parts in range(1, min(shape.heads, 64) + 1)} | set(range(1, 9))
    for heads in sorted(n for n in counts if n <= shape.heads):
        cut = shape.cut(heads, room)
        if cut:
            found.append(cut)
    if not found:
        return ()
    best: list[Piece] = min(found, key=lambda cut: shape.time(cut, sms))
    return tuple(best)


def _longest(blocks: list[int], sms: int) -> int:
    """When the last block ends, the longest begun first."""
    if len(set(blocks)) == 1:
        return -(-len(blocks) // sms) * blocks[0]
    ends = [0] * sms
    for block in sorted(blocks, reverse=True):
        heapq.heapreplace(ends, ends[0] + block)
    return max(ends)
