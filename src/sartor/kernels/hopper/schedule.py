"""The tile scheduler's cost model: which tiles and how many KV splits end soonest.

Blocks take query tiles in a static order or claim them from a counter, the longest first. In a static order the last
wave may be split: its tiles go to more blocks, some slices to each.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from sartor.device import Device
from sartor.kernels.spec import Tile
from sartor.problem import Problem, mask_class
from sartor.symbols import opaque

LONG = 8  # whole tiles of a head, at least, where the last wave is split
STEP = {1: 1.6, 2: 2.2, 3: 3.0}  # time of a key tile by warpgroups: few leave the tensor cores waiting
STEP_WIDE = STEP | {1: 1.4}  # of head dims beyond 128
STEP_MASKED = {1: 1.8, 2: 2.3, 3: 3.0}  # under a mask, where few warpgroups wait for their own chain of products
EVERY = 1 << 16  # rounds, more than there are
ENDS = 2  # key tiles that the ends of a query tile take as long as
MERGE = 640 << 10  # bytes of keys and values that an SM reads while KV splits are enqueued for merging and merged
SHORTEST = 256  # keys of a KV split
TILE_ONCE = 16 << 10  # bytes of keys that are read once


class Assignment(NamedTuple):
    """What blocks compute, by number: see `share` in cuda/schedule.cuh."""

    tiles_head: int  # whole ones, where the last wave is split
    tiles: int  # numbers in all
    whole: int  # tiles before those that are split
    splits: int  # of the keys, or of the last wave's tiles
    width: int  # key tiles, or slices, of each
    time: float  # until the last is done, in units of STEP


@dataclass(frozen=True)
class Schedule:
    """Of a config: what of it the tile scheduler and the choice of a tile hang on."""

    p: Problem
    tile: Tile
    groups: int  # consumer warpgroups
    block_n: int
    dim: int  # rounded up to 16, a step of q k^T
    dim_v: int  # rounded up to 8, as products can be wide
    rows: int  # queries of a head in a slice
    listed: bool = field(default=False, kw_only=True)  # whether a list has the key tiles of a mask that is no interval

    @cached_property
    def slices(self) -> int:
        """Slices of 64 rows that the queries of a key head's heads make."""
        return -(-self.p.seqlen_q // self.rows) * -(-self.p.group // (64 // self.rows))

    @cached_property
    def section(self) -> int:
        """Heads whose tiles are in flight together: their keys and values stay in L2, which spares power. Few take
        long to end where the last ones are fewer still, and where tiles are short."""
        p = self.p
        room, least = (24, 1) if max(p.dim, p.dim_v) > 128 else (32, 8)
        if not self.band:  # rows see few of the keys
            room, least = 64, 32
        fit = (room << 20) // (2 * p.seqlen_kv * (p.dim + p.dim_v))
        return _section(p.batch * p.heads_kv, max(least, min(fit, 8 * p.seqlen_kv // p.dim)))  # type: ignore[no-any-return]

    @property
    def balanced(self) -> bool:
        """Whether blocks claim tiles from one counter, the longest first; otherwise every so many-th is a block's."""
        return self.mask > 0 and not self.split

    @property
    def split(self) -> bool:
        """Whether there are several KV splits (Dao, Haziza, Massa and Sizov 2023, Flash-Decoding)."""
        return self.tile.num_splits > 1

    @property
    def last_wave(self) -> bool:
        """Whether the last wave is split."""
        return self.splits_last(self.groups)

    def splits_last(self, groups: int) -> bool:
        """Whether it is, of tiles of so many warpgroups: all blocks have equally many tiles before it, heads are so
        long that reading one again for a split costs little, and registers suffice."""
        plain = self.mask == 0 and self.p.program.score is None
        return plain and groups > 1 and self.slices // groups >= LONG

    def assign(self, sms: int, groups: int = 0) -> Assignment:
        """What so many SMs compute, with other tiles if another number of warpgroups is given; the last wave is split
        to the width that ends soonest."""
        groups = groups or self.groups
        heads, wide = self.p.batch * self.p.heads_kv, max(self.dim, self.dim_v) > 128
        step = STEP_WIDE if wide else STEP_MASKED if self.mask else STEP
        tiles_head = -(-self.slices // groups)
        if self.split:
            width = -(-self.key_tiles // self.tile.num_splits)
            tiles = tiles_head * heads * self.tile.num_splits
            return Assignment(
                tiles_head, tiles, tiles, self.tile.num_splits, width, step[groups] * math.ceil(tiles / sms)
            )
        if not self.splits_last(groups):
            tiles, rounds = tiles_head * heads, tiles_head * heads / sms
            rounds = max(rounds * self.mean(tiles_head, groups), 1.0) if self.mask else math.ceil(rounds)
            return Assignment(tiles_head, tiles, tiles, 0, groups, step[groups] * rounds)
        tiles_head, rest = divmod(self.slices, groups)
        left, rests = tiles_head * heads % sms, heads if rest else 0
        width, last = _last_wave(groups, left, rest, rests, sms, tuple(step.items()))
        whole, splits = tiles_head * heads - left, left * -(-groups // width)
        return Assignment(tiles_head, whole + splits + rests, whole, splits, width, step[groups] * whole / sms + last)

    def mean(self, tiles_head: int, groups: int) -> float:
        """Time of a query tile in the mean, as a share of the longest's. Where later rows see more keys, a head's first
        tile is the one that is not full."""
        if not self.band:
            return 0.75  # what is seen is not known here
        keys = self.key_tiles
        seen = 1 - groups * (tiles_head - 1) / (2 * self.slices)  # of the keys
        return (seen * keys + ENDS) / (keys + ENDS)

    def suited(self, dev: Device) -> Tile:
        """The tile with the fewest queries of those that end soonest: with all of them, few tiles would leave SMs idle.
        Its keys stay, and so do all results, unless even so few tiles are left that there are several KV splits."""
        sms = dev.sm_count
        if not sms:
            return self.tile
        if self.slices == 1 and self.block_n > self.keys_once:
            fewer = replace(self.tile, block_n=self.keys_once)
            return replace(self, tile=fewer, block_n=self.keys_once).suited(dev)
        groups = min(range(1, self.groups + 1), key=lambda g: self.assign(sms, g).time)
        splits = self.num_splits(sms) if groups == 1 else 1
        if (groups, splits) == (self.groups, self.tile.num_splits):
            return self.tile
        warps = self.tile.warps - 4 * (self.groups - groups)
        return replace(self.tile, block_m=64 * groups, warps=warps, num_splits=splits)

    @property
    def keys_once(self) -> int:
        """Keys a tile, at most, where each is read once, by one slice: memory is slower where more is under way. Beyond
        head dim 128 tiles have few keys as they are."""
        return self.block_n if max(self.dim, self.dim_v) > 128 else TILE_ONCE // (2 * self.dim) // 16 * 16

    def num_splits(self, sms: int) -> int:
        """For tiles of 64 rows: as many as there are SMs for, if that is worth the merging. Where rows begin to see
        keys anywhere, most splits would be idle. How many there are changes bits, and may change with the batch."""
        most = min(sms // (self.slices * self.p.batch * self.p.heads_kv), self.p.seqlen_kv // SHORTEST)
        if self.lower or self.p.deterministic or most < 2:
            return 1
        width = -(-self.key_tiles // most)
        saved = 2 * (self.key_tiles - width) * self.block_n * (self.dim + self.dim_v)
        return -(-self.key_tiles // width) if saved > MERGE else 1

    @cached_property
    def key_tiles(self) -> int:
        """Of all keys."""
        return -(-self.p.seqlen_kv // self.block_n)

    @cached_property
    def mask(self) -> int:
        """What rows attend to: 0 everything, 1 an interval that the mask's text gives, 2 anything else, 3 what a list
        says of anything else (kernels/blocks.py)."""
        program = self.p.program
        return 0 if program.keep is None else 1 if program.is_interval else 3 if self.listed else 2

    @cached_property
    def band(self) -> bool:
        """Whether rows attend to all keys up to one of them."""
        return mask_class(self.p) == "band"

    @cached_property
    def lower(self) -> bool:
        """Whether what a row attends to may begin after the first key."""
        return self.mask == 2 or (self.mask != 3 and self.p.program.has_lower_end)

    @property
    def late_rounds(self) -> int:
        """Rounds of all blocks, the last ones, in which tiles are claimed late: who holds one back leaves others idle
        in the end. All, under a causal mask, whose longest tiles come first; else the loader is not to wait."""
        return EVERY if self.mask == 1 and not self.lower else 2


@opaque
@lru_cache(maxsize=4096)
def _section(heads: int, most: int) -> int:
    """Heads of a section, at most so many of all, so that the last one is not much smaller. Kept, since other lengths
    ask for the same."""
    most = min(most, heads)
    return min(range(most, most // 2, -1), key=lambda section: -heads % section * 8 // section)


@opaque
@lru_cache(maxsize=4096)
def _last_wave(
    groups: int, left: int, rest: int, rests: int, sms: int, steps: tuple[tuple[int, float], ...]
) -> tuple[int, float]:
    """Of `left` tiles of the last wave and `rests` shares of `rest` slices: how many slices a split has so that they
    end soonest, and how long they take. Kept, since other lengths ask for the same."""
    step = dict(steps)

    def last(width: int) -> float:
        slices = [min(width, groups - i) for i in range(0, groups, width)] * left + [rest] * rests
        times = [step[n] for n in slices]
        ends = times[:sms]  # of each SM; further ones go to the SMs in the same order
        for first in range(sms, len(times), sms):
            wave = times[first : first + sms]
            ends[: len(wave)] = map(operator.add, ends, wave)
        return max(ends, default=0.0)

    width = min(range(groups, 0, -1), key=last)
    return width, last(width)
