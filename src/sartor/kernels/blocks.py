"""Block lists: of a mask that leaves holes in its rows' intervals, the tiles that hold a visible pair, and a bit for
each pair of those that hold a hidden one too.

Kernels that walk a list visit no tile in which nothing is seen, and read a bit where a predicate takes many
instructions. Only a predicate that reads no tensor has one, which says the same as long as lengths and numbers are the
same. It is made on the device by the first call, which waits for it, and kept for good, as a CUDA graph may read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sartor.device import capturing
from sartor.kernels.cuda import host
from sartor.mods.expr import Expr, evaluate
from sartor.mods.recent import Recent
from sartor.problem import Problem

Tensor = torch.Tensor
ROWS = 64  # of a tile: those of a warpgroup's product
FULL, EMPTY = -1, -2  # in place of the number of a tile's bits: all of its pairs are visible, none is
WIDEST = 128  # columns of a tile, of which a thread has a word of bits for each of its two rows
PAIRS, PIECES = 2**23, 2**11  # that are looked at together, and how many times at most
MOST_BITS, MOST_BYTES = 2**26, 2**29  # bytes of a list's bits, and of all lists, each of which counts as LEAST_BYTES
LEAST_BYTES = 2**20

PARAMETERS = {  # of a kernel that walks a list
    "starts": "const int*", "entries": "const Entry*", "bits": "const int*", "plane_batch": "int", "plane_head": "int",
}  # fmt: skip


class Cut(NamedTuple):
    """How a kernel goes over pairs. A backward holds keys and steps over queries (`by_key`), in tiles of `block`. The
    forward holds queries: heads that share keys share its tiles, and a head's first one is the one that is not full.
    `groups` warpgroups, each with 64 of what is held, walk one list."""

    by_key: bool
    block: int
    groups: int


@dataclass(eq=False, frozen=True)
class Blocks:
    """Of each block of a kernel, by (plane, block): its entries [starts[i], starts[i + 1])."""

    starts: Tensor  # int32
    entries: Tensor  # int32 (entries, 4): a tile, and for each warpgroup the number of its bits there, FULL or EMPTY
    bits: Tensor  # int32 (tiles with a hidden pair, 128, 2): a word for each of a thread's two rows
    planes: tuple[int, int]  # from an item, and from a head, to the next plane: 0 where the mask is the same
    counts: tuple[int, int, int]  # of tiles of a warpgroup: in which something is seen, of these all, that there are

    def __str__(self) -> str:
        listed, whole, tiles = self.counts
        return f"{listed} of {tiles} tiles, {whole} of them full"

    @property
    def arguments(self) -> dict[str, int]:
        """By the names of PARAMETERS."""
        return self.named(Tensor.data_ptr)

    def named(self, of_table: Callable[[Tensor], int]) -> dict[str, int]:
        """`arguments`, with what stands for a table in its place."""
        tables = {name: of_table(getattr(self, name)) for name in ("starts", "entries", "bits")}
        return tables | dict(zip(("plane_batch", "plane_head"), self.planes, strict=True))

    @property
    def bytes(self) -> int:
        """In memory, as they are counted."""
        return max(4 * (self.starts.numel() + self.entries.numel() + self.bits.numel()), LEAST_BYTES)


class TooMuch(Exception):
    """Why there is no list."""


_KEPT: dict[Any, Blocks] = {}  # by what they were made of
_REFUSED = Recent(64)  # likewise, why there is none


def serves(p: Problem) -> bool:
    """Whether there may be a list: the mask is no interval, and its predicate reads no tensor, which might change."""
    program, keep = p.program, p.program.keep
    if keep is None or program.is_interval or program.loads or p.dropout_p:
        return False
    return "q" in keep.leaves()  # else all rows are alike


def of(p: Problem, aux: tuple[Any, ...], cut: Cut, device: torch.device) -> Blocks | None:
    """The list of a problem that is served, kept or made now. None where limits leave no room for it, and while a CUDA
    graph is captured, which may not wait, unless it is there."""
    assert p.program.keep is not None
    key = _about(p, cut.by_key), cut, tuple(aux[i] for i in sorted(_reads(p.program.keep))), device
    if key not in _KEPT and key not in _REFUSED and not capturing(device):
        try:
            found = _made(p, aux, cut, device)
            if sum(kept.bytes for kept in list(_KEPT.values())) + found.bytes > MOST_BYTES:
                raise TooMuch(f"all of them take {MOST_BYTES >> 20} MiB")
            _KEPT.setdefault(key, found)
        except TooMuch as why:
            _REFUSED.add(key, f"none, as {why}")
    return _KEPT.get(key)


def told(p: Problem, by_key: bool) -> str:
    """What is known of the list of a problem: what is in the last one, why there is none, or when it will be made."""
    found = [what for key, what in [*_REFUSED.items(), *_KEPT.items()] if key[0] == _about(p, by_key)]
    return f"block list: {found[-1] if found else 'made by the first call, which waits for the device'}"


def _about(p: Problem, by_key: bool) -> tuple[Any, ...]:
    return by_key, p.program.key, p.seqlen_q, p.seqlen_kv, p.group, _planes(p)


def _planes(p: Problem) -> tuple[int, int]:
    """For how many items and heads the mask is another."""
    leaves = p.program.keep.leaves() if p.program.keep is not None else set()
    return p.batch if "b" in leaves else 1, p.heads_q if "h" in leaves else 1


def _reads(e: Expr) -> set[int]:
    """The aux values that an expression reads."""
    return {node.args[0] for node in e.nodes() if node.op == "aux"}


def _made(p: Problem, aux: tuple[Any, ...], cut: Cut, device: torch.device) -> Blocks:
    if device.type != "cuda":  # tensors without data are looked at here
        return _blocks(_Pairs(p, aux, cut, torch.device("cpu")))

    def make() -> Blocks:
        with torch.cuda.device(device):  # not the current one of a new thread
            found = _blocks(_Pairs(p, aux, cut, device))
            torch.cuda.current_stream(device).synchronize()  # the launches that read it are on another stream
        return found

    return host.kept(make)


def _blocks(pairs: _Pairs) -> Blocks:
    p, cut, planes = pairs.p, pairs.cut, pairs.planes
    kinds, bits = pairs.look()
    partial = kinds == 1
    numbers = torch.where(partial, partial.flatten().cumsum(0).view_as(kinds).int() - 1, EMPTY)
    numbers = torch.where(kinds == 2, FULL, numbers)
    if not cut.by_key:  # (item, key head, slices of 64 queries of each of its heads, tiles)
        b, h, s, t = numbers.shape
        alike = numbers.view(b, -1, p.group if h > 1 else 1, s, t).expand(-1, -1, p.group, -1, -1)
        numbers = alike.transpose(2, 3).reshape(b, -1, s * p.group, t)
    strides = numbers.shape[1] if planes[0] > 1 else 0, int(planes[1] > 1)
    listed, whole = (int((kinds >= kind).sum()) for kind in (1, 2))
    return Blocks(*_walked(numbers, cut), bits, strides, (listed, whole, kinds.numel()))


def _walked(numbers: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """starts and entries, of numbers by (item, head, slice, tile)."""
    slices, tiles = numbers.shape[2:]
    missing = -slices % cut.groups
    padded = torch.nn.functional.pad(numbers, (0, 0, 0, missing) if cut.by_key else (0, 0, missing, 0), value=EMPTY)
    padded = padded.reshape(-1, cut.groups, tiles).transpose(1, 2)  # (block, tile, group)
    some = (padded != EMPTY).any(2)
    if not cut.by_key:  # the forward visits a tile where nothing is seen
        some[:, 0] |= ~some.any(1)
    block, tile = some.nonzero().unbind(1)
    entries = torch.full((len(tile), 4), EMPTY, dtype=torch.int32, device=numbers.device)
    entries[:, 0] = tile
    entries[:, 1 : 1 + cut.groups] = padded[block, tile]
    return torch.nn.functional.pad(some.sum(1).cumsum(0), (1, 0)).int(), entries


class _Pairs:
    """Those of a mask, looked at in pieces: some slices of 64 held rows by the tiles that these may see."""

    def __init__(self, p: Problem, aux: tuple[Any, ...], cut: Cut, device: torch.device) -> None:
        self.p, self.aux, self.cut, self.device, self.planes = p, aux, cut, device, _planes(p)
        self.held, self.stepped = (p.seqlen_kv, p.seqlen_q) if cut.by_key else (p.seqlen_q, p.seqlen_kv)
        self.slices, self.tiles = -(-self.held // ROWS), -(-self.stepped // cut.block)

    def look(self) -> tuple[Tensor, Tensor]:
        """int8 (items, heads, slices, tiles), each 1 where there is more than one: 0 nothing is seen, 1 some, 2 all;
        and the bits of the partial ones, in the same order."""
        step = PAIRS // (ROWS * self.tiles * self.cut.block)
        if step == 0 or math.prod(self.planes) * -(-self.slices // step) > PIECES:
            raise TooMuch("there are too many pairs to look at")
        kinds = torch.zeros(*self.planes, self.slices, self.tiles, dtype=torch.int8, device=self.device)
        bits = [torch.zeros(1, 2 * ROWS, 2, dtype=torch.int32, device=self.device)]  # comes last: there is always one
        for b in range(self.planes[0]):
            for h in range(self.planes[1]):
                for first in range(0, self.slices, step):
                    bits.insert(-1, self._look(kinds[b, h, first : first + step], (b, h), first * ROWS))
                    if 4 * sum(t.numel() for t in bits) > MOST_BITS:
                        raise TooMuch(f"its bits take more than {MOST_BITS >> 20} MiB")
        return kinds, torch.cat(bits)

    def _look(self, kinds: Tensor, plane: tuple[int, int], first: int) -> Tensor:
        """The bits of partial tiles of the slices from a row on, whose kinds (slices, tiles) are set."""
        held = torch.arange(first, first + ROWS * len(kinds), dtype=torch.int64, device=self.device)
        real, block = held < self.held, self.cut.block
        begin, end = self._seen(plane, held[real])
        stepped = torch.arange(begin * block, end * block, dtype=torch.int64, device=self.device)
        assert self.p.program.keep is not None
        kept = self._evaluate(self.p.program.keep, plane, held[:, None], stepped)
        kept = kept & real[:, None] & (stepped < self.stepped)  # (held, stepped)
        tiles, whole = (
            t.view(len(kinds), ROWS, end - begin, block).transpose(1, 2) for t in (kept, kept | ~real[:, None])
        )
        kinds[:, begin:end] = tiles.any(3).any(2).to(torch.int8) + whole.all(3).all(2)
        return _packed(tiles[kinds[:, begin:end] == 1])

    def _seen(self, plane: tuple[int, int], held: Tensor) -> tuple[int, int]:
        """Tiles [begin, end) outside which rows see nothing, if no tensor says so, which might change."""
        program = self.p.program
        spans = program.cols if self.cut.by_key else program.rows
        if spans is None or any(program.aux[i].dtype for e in spans for i in _reads(e)):
            return 0, self.tiles
        lo, hi = (self._evaluate(e, plane, held).expand_as(held).clamp(0, self.stepped) for e in spans[:2])
        some = lo < hi
        begin, end = int(torch.where(some, lo, self.stepped).min()), int(torch.where(some, hi, 0).max())
        return begin // self.cut.block, max(-(-end // self.cut.block), begin // self.cut.block)

    def _evaluate(self, e: Expr, plane: tuple[int, int], held: Tensor, stepped: Tensor | None = None) -> Tensor:
        own, other = ("kv", "q") if self.cut.by_key else ("q", "kv")
        item, head = (
            torch.tensor(i, dtype=torch.int64, device=self.device) for i in plane
        )  # Python's ~ of a bool is none
        at = {"b": item, "h": head, own: held, other: stepped}
        return torch.as_tensor(evaluate(e, at, self.aux, torch.float32), device=self.device)


def _packed(tiles: Tensor) -> Tensor:
    """Bools (tiles, 64, columns) as each of 128 threads has them, int32 (tiles, 128, 2): of its rows, eight apart, bit
    2 * i + e is column 8 * i + 2 * (thread % 4) + e."""
    n, _, columns = tiles.shape
    of_threads = tiles.view(n, 4, 2, 8, columns // 8, 4, 2).permute(0, 1, 3, 5, 2, 4, 6)
    of_threads = of_threads.reshape(n, 2 * ROWS, 2, columns // 4)
    words = (of_threads.long() << torch.arange(columns // 4, dtype=torch.int64, device=tiles.device)).sum(3)
    return torch.where(words < 2**31, words, words - 2**32).int()
