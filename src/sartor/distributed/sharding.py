"""Which tokens of a sequence lie on which rank, and tensors cut and put together accordingly.

A sharding is made of chunks of tokens dealt to ranks, or of every ranks-th token. What a rank holds is described by
runs: tokens in steps of equal size. A block of queries and a block of keys that are one run each are one dense problem
whose mask and score are shifted (`shift.py`); that is all that the methods know of a sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from sartor.checks import at_least, is_integer

KINDS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True, slots=True)
class Run:
    """The tokens first, first + step, ... of a sequence, `count` of them, which lie in a shard from `place` on."""

    place: int
    first: int
    step: int
    count: int

    @property
    def places(self) -> slice:
        """Where in the shard."""
        return slice(self.place, self.place + self.count)

    @property
    def tokens(self) -> slice:
        """Where in the sequence."""
        return slice(self.first, self.first + self.step * (self.count - 1) + 1, self.step)

    @property
    def last(self) -> int:
        """The last token."""
        return self.first + self.step * (self.count - 1)

    def cut(self, start: int, stop: int, place: int | None = None) -> Run:
        """The tokens number `start` to `stop` of it, at `place`, or where they are."""
        place = self.place + start if place is None else place
        return Run(place, self.first + self.step * start, self.step, stop - start)


Runs = tuple[Run, ...]


@dataclass(frozen=True)
class Sharding:
    """A sequence of `seqlen` tokens over some ranks: `runs[r]` of them lie on rank r, in a shard of `sizes[r]` places,
    of which those past the tokens are padding. `text` names it: `Sharding.parse(sharding.text)` is equal to it.
    """

    text: str
    seqlen: int
    runs: tuple[Runs, ...]
    sizes: tuple[int, ...]

    @classmethod
    def make(cls, kind: str, seqlen: int, ranks: int, *, pad: bool = True, multiple: int = 1) -> Sharding:
        """One of three kinds.

        Args:
            kind: "contiguous": rank r has the r-th of `ranks` chunks. "zigzag": of 2 * ranks chunks it has number r and
                number 2 * ranks - 1 - r, which makes a causal mask's work equal. "striped": it has the tokens r,
                r + ranks, r + 2 * ranks, ... (Brandon et al. 2023), which makes that of any band equal.
            seqlen: tokens of the sequence, 0 or more.
            ranks: how many, 1 or more.
            pad: whether all shards are as long as the longest one, with padding at their ends, as what runs over
                parameters sharded by FSDP needs; otherwise the last ones are shorter, or empty.
            multiple: chunks are a multiple of that many tokens.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
        for name, value, least in (("seqlen", seqlen, 0), ("ranks", ranks, 1), ("multiple", multiple, 1)):
            at_least(name, value, least)
        return cls.parse(f"{kind} {seqlen} over {ranks} by {multiple} {'padded' if pad else 'ragged'}")

    @classmethod
    def of_chunks(cls, seqlen: int, chunk: int, owners: Sequence[Sequence[int]], *, pad: bool = True) -> Sharding:
        """Chunks of `chunk` tokens, of which rank r has those whose numbers are in `owners[r]`, in rising order.

        Raises ValueError unless every chunk of the sequence has one owner.
        """
        at_least("seqlen", seqlen, 0)
        at_least("chunk", chunk, 1)
        given, wanted = sorted(chain.from_iterable(owners)), list(range(-(-seqlen // chunk)))
        if given != wanted:
            raise ValueError(f"owners must hold each of the {len(wanted)} chunks once, got {given[:20]}")
        dealt = " | ".join(" ".join(map(str, sorted(own))) for own in owners)
        return cls.parse(f"chunks {seqlen} over {len(owners)} by {chunk} {'padded' if pad else 'ragged'}: {dealt}")

    @classmethod
    def parse(cls, text: str) -> Sharding:
        """The sharding that a text names."""
        return _parse(text)

    @property
    def ranks(self) -> int:
        """How many shards there are."""
        return len(self.runs)

    def count(self, rank: int) -> int:
        """Tokens of a rank, without padding; they come first in its shard."""
        return sum(run.count for run in self.runs[rank])

    def tokens(self, rank: int) -> torch.Tensor:
        """int64 (count,): the token at each place of a shard that is no padding."""
        parts = [torch.arange(run.count, device="cpu") * run.step + run.first for run in self.runs[rank]]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")

    def joined(self, group: int) -> Sharding:
        """The sharding in which each `group` ranks that follow one another are one: what they have together."""
        return self if group == 1 else Sharding.parse(f"{self.text}; joined by {group}")


@lru_cache(maxsize=1024)
def _parse(text: str) -> Sharding:
    if "; joined by " in text:
        base, group = text.rsplit("; joined by ", 1)
        return _join(_parse(base), int(group), text)
    head, _, dealt = text.partition(": ")
    kind, seqlen, _, ranks, _, unit, pad = head.split()
    if kind == "striped":
        return _striped(text, int(seqlen), int(ranks), int(unit), pad == "padded")
    if kind == "chunks":
        owners = [tuple(map(int, own.split())) for own in dealt.split("|")]
        return _chunks(text, int(seqlen), int(unit), owners, pad == "padded")
    n = int(ranks)
    owners = [(r,) if kind == "contiguous" else (r, 2 * n - 1 - r) for r in range(n)]
    chunks = sum(map(len, owners))
    chunk = -(-int(seqlen) // (chunks * int(unit))) * int(unit)
    return _chunks(text, int(seqlen), chunk, owners, pad == "padded")


def _striped(text: str, seqlen: int, ranks: int, unit: int, pad: bool) -> Sharding:
    counts = [max(0, -(-(seqlen - r) // ranks)) for r in range(ranks)]
    longest = -(-max(counts) // unit) * unit
    runs = tuple((Run(0, r, ranks, n),) if n else () for r, n in enumerate(counts))
    return Sharding(text, seqlen, runs, (longest,) * ranks if pad else tuple(counts))


def _chunks(text: str, seqlen: int, chunk: int, owners: Sequence[Sequence[int]], pad: bool) -> Sharding:
    runs = tuple(tuple(_chunk_runs(own, seqlen, chunk)) for own in owners)
    counts = [sum(run.count for run in own) for own in runs]
    longest = max(len(own) for own in owners) * chunk
    return Sharding(text, seqlen, runs, (longest,) * len(runs) if pad else tuple(counts))


def _chunk_runs(chunks: Sequence[int], seqlen: int, size: int) -> Iterator[Run]:
    """Runs of whole chunks, those that follow one another in one."""
    place, run = 0, None
    for number in chunks:
        first, count = number * size, min((number + 1) * size, seqlen) - number * size
        if count <= 0:
            continue
        if run is not None and run.last + 1 == first:
            run = replace(run, count=run.count + count)
        else:
            if run is not None:
                yield run
            run = Run(place, first, 1, count)
        place += count
    if run is not None:
        yield run


def _join(base: Sharding, group: int, text: str) -> Sharding:
    members = [base.runs[i : i + group] for i in range(0, base.ranks, group)]
    runs = tuple(_joined(tuple(chain.from_iterable(shards))) for shards in members)
    return Sharding(text, base.seqlen, runs, tuple(sum(run.count for run in own) for own in runs))


def _joined(runs: Runs) -> Runs:
    """What several shards have, in the order that leaves fewest runs: by tokens, or one shard after another."""
    if not runs:
        return ()
    first, count = min(run.first for run in runs), sum(run.count for run in runs)
    if max(run.last for run in runs) - first + 1 == count:  # nothing is missing between them
        return (Run(0, first, 1, count),)
    chunks = all(run.step == 1 for run in runs)
    ordered = sorted(runs, key=lambda run: run.first) if chunks else runs
    found: list[Run] = []
    place = 0
    for run in ordered:
        if found and run.step == found[-1].step == 1 and found[-1].last + 1 == run.first:
            found[-1] = replace(found[-1], count=found[-1].count + run.count)
        else:
            found.append(replace(run, place=place))
        place += run.count
    return tuple(found)


def shard(x: torch.Tensor, sharding: Sharding, rank: int, dim: int = 1, fill: float = 0.0) -> torch.Tensor:
    """The shard of one rank of a tensor that is whole: q, token ids, labels, ... Differentiable.

    Args:
        x: has `sharding.seqlen` entries along `dim`. Labels are shifted by one token before they are cut.
        sharding: which tokens are whose.
        rank: whose to give.
        dim: the dim of tokens.
        fill: what padding is filled with: 0, or what the loss ignores, as -100 for labels.

    Returns:
        The tensor with `sharding.sizes[rank]` entries along `dim`.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    _check(sharding, rank)
    dim = _dim(x, dim)
    if x.shape[dim] != sharding.seqlen:
        raise ValueError(f"x must have {sharding.seqlen} tokens in dim {dim}, got {x.shape[dim]}: {tuple(x.shape)}")
    pieces = [x[(slice(None),) * dim + (run.tokens,)] for run in sharding.runs[rank]]
    empty = sharding.sizes[rank] - sharding.count(rank)
    if empty or not pieces:
        pieces.append(x.new_full((*x.shape[:dim], empty, *x.shape[dim + 1 :]), fill))
    return torch.cat(pieces, dim)


def unshard(shards: Sequence[torch.Tensor], sharding: Sharding, dim: int = 1) -> torch.Tensor:
    """The whole tensor from the shards of all ranks; `gather` fetches them first. Differentiable."""
    _check(sharding)
    if len(shards) != sharding.ranks:
        raise ValueError(f"shards must be one of each of {sharding.ranks} ranks, got {len(shards)}")
    dim = _dim(shards[0], dim)
    for rank, x in enumerate(shards):
        if x.shape[dim] != sharding.sizes[rank]:
            raise ValueError(
                f"shard {rank} must have {sharding.sizes[rank]} places in dim {dim}, got {x.shape[dim]}:"
                f" {tuple(x.shape)}"
            )
    return together(shards, joined_places(sharding.text, sharding.ranks, 0), dim)


Places = tuple[tuple[tuple[slice, slice], ...], ...]  # of each run of each part: where it is in the part, in the whole


@lru_cache(maxsize=256)
def joined_places(text: str, group: int, number: int) -> Places:
    """Of what each of `group` ranks holds, where it is in shard `number` of `Sharding.joined`."""
    base = Sharding.parse(text)
    shard_runs = base.joined(group).runs[number]

    def within(run: Run) -> slice:
        at = next(j for j in shard_runs if j.first <= run.first <= j.last and (run.first - j.first) % j.step == 0)
        return Run(0, at.place + (run.first - at.first) // at.step, run.step // at.step, run.count).tokens

    members = base.runs[number * group : (number + 1) * group]
    return tuple(tuple((run.places, within(run)) for run in own) for own in members)


def together(parts: Sequence[torch.Tensor], places: Places, dim: int = 1) -> torch.Tensor:
    """One tensor of the parts that lie at these places of it. Differentiable."""
    pieces = [(to, x[(slice(None),) * dim + (at,)]) for x, runs in zip(parts, places, strict=True) for at, to in runs]
    if all(to.step == 1 for to, _ in pieces):
        return torch.cat(
            [x for _, x in sorted(pieces, key=lambda piece: piece[0].start)] or [parts[0].narrow(dim, 0, 0)], dim
        )
    count = sum(x.shape[dim] for _, x in pieces)
    whole = parts[0].new_empty((*parts[0].shape[:dim], count, *parts[0].shape[dim + 1 :]))
    for to, x in pieces:
        whole[(slice(None),) * dim + (to,)] = x
    return whole


def apart(whole: torch.Tensor, places: Places) -> list[torch.Tensor]:
    """The parts of (batch, tokens, ...) that lie at these places of it; views where one run is all."""
    found = []
    for runs in places:
        pieces = [whole[:, to] for _, to in runs] or [whole[:, :0]]
        found.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1))
    return found


def positions(sharding: Sharding, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 (places,): the position in the sequence of each place of a rank's shard, as rotary embeddings need them;
    0 for padding."""
    _check(sharding, rank)
    return shard(torch.arange(sharding.seqlen, device=device), sharding, rank, dim=0)


def _check(sharding: Any, rank: Any = 0) -> None:
    """Raise TypeError unless it is a Sharding, ValueError unless it has a shard for the rank."""
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding must be a Sharding, as Sharding.make gives, got {type(sharding).__name__}")
    if not is_integer(rank) or not 0 <= rank < sharding.ranks:
        raise ValueError(f"rank must be an integer from 0 to {sharding.ranks - 1}, got {rank!r}")


def _dim(x: torch.Tensor, dim: int) -> int:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be a dim of a tensor of {x.dim()} dims, got {dim}")
    return dim % x.dim()
