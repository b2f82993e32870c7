"""Which keys some queries reach, and what masks and scores say of a tile of them: for the kernels written in torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sartor.kernels import dropout
from sartor.kernels.spec import Operands, Plan
from sartor.mods.core import BIG
from sartor.mods.expr import Expr, evaluate
from sartor.problem import Problem, wide

Tensor = torch.Tensor
KEPT = 2**14  # elements up to which a plan keeps what is added to scores, if no data says what that is
INFINITE = {torch.float32: -(2**23), torch.float64: -(2**52)}  # the bits of -inf as an integer
CPU = torch.device("cpu")
SHOWN = {
    dtype: tuple(torch.tensor(x, dtype=dtype, device=CPU) for x in (0.0, -torch.inf)) for dtype in INFINITE
}  # of a key that a row attends to, and one that it does not
FEW = 2**12  # elements
ITEM = 2**21  # scores of a batch item from which items are taken one by one: their tiles alone fill the caches


@dataclass(frozen=True, slots=True)
class Frame:
    """Some batch items of a call, without q, k and v."""

    p: Problem
    items: slice
    aux: tuple[Any, ...]  # numbers, tensors that broadcast to (items, hq, sq, skv), and tables, which are indexed
    dtype: torch.dtype  # that scores are computed in
    device: torch.device
    cache: dict[object, object]  # of the plan
    seed: Tensor | None = None  # of dropout

    @property
    def batch(self) -> int:
        """How many items."""
        return int(self.items.stop - self.items.start)

    @property
    def reads_data(self) -> bool:
        """Whether masks or scores read a tensor."""
        return any(isinstance(a, Tensor) for a in self.aux)

    def symbols(self, i: slice, j: slice) -> dict[str, Tensor]:
        """b, h, q and kv on a tile, of shapes (batch,1,1,1), (1,hq,1,1), (1,1,rows,1), (1,1,1,keys)."""
        return Symbols({"b": self.items, "h": slice(0, self.p.heads_q), "q": i, "kv": j}, self.device)

    def keep(self, i: slice, j: slice) -> Tensor:
        """The mask on a tile: bool, broadcastable to (batch, hq, rows, keys)."""
        assert self.p.program.keep is not None
        found = self._evaluate(self.p.program.keep, i, j)
        if isinstance(found, Tensor):
            return found
        return torch.tensor(found, dtype=self.dtype if isinstance(found, float) else None, device=self.device)

    def changed(self, s: Any, i: slice, j: slice, slope: bool = False) -> tuple[Any, Any]:
        """The score function's value of s, (batch, hq, rows, keys) or a number, on a tile; its derivative if wanted."""
        program = self.p.program
        assert program.score is not None
        assert program.dscore is not None
        at, aux = self.read(i, j, s)
        if not slope:
            return evaluate(program.score, at, aux, self.dtype), None
        known: dict[int, Any] = {}
        found = evaluate(program.score, at, aux, self.dtype, known)
        rise = evaluate(program.dscore, at, aux, self.dtype, known)
        return found, rise.clone() if rise is found else rise  # of exp; callers change the score in place

    def hidden(self, i: slice, j: slice) -> Tensor:
        """The mask on a tile as what to add to scores: 0 where it keeps a key, else -inf. The plan keeps it where it is
        small and no data says what it is."""
        place = "hidden", self.items.start, i.start, i.stop, j.start, j.stop
        found = self.cache.get(place)
        if isinstance(found, Tensor):
            return found
        if self.reads_data:
            return hidden(self.keep(i, j), self.dtype)
        with torch.inference_mode(False):  # whose tensors autograd could not save in a later call
            term = hidden(self.keep(i, j), self.dtype)
        if term.numel() <= KEPT:
            self.cache[place] = term
        return term

    def dropout(self, i: slice, j: slice) -> Tensor | None:
        """Which weights of a tile stay: bool (batch, hq, rows, keys); None without dropout."""
        if self.seed is None:
            return None
        return dropout.kept(self.p.dropout_p, self.seed, self.items, slice(0, self.p.heads_q), i, j)

    def _evaluate(self, e: Expr, i: slice, j: slice) -> Any:
        return evaluate(e, *self.read(i, j), self.dtype)

    def read(self, i: slice, j: slice, s: Any = None) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """What expressions read on a tile of scores `s`: the symbols, and the aux values, tables whole."""
        symbols: dict[str, Any] = self.symbols(i, j)
        symbols["s"] = s
        of = zip(self.aux, self.p.program.aux, strict=True)
        return symbols, tuple(a if spec.dims else _at(a, i, j) for a, spec in of)

    def spans(self, block_m: int, block_n: int) -> list[Span]:
        """Blocks of queries with what `program.rows` says of them, over all items and heads. A lone tile is not cut: to
        find out what of it is reached takes longer than it does."""
        p = self.p
        sq, skv = p.seqlen_q, p.seqlen_kv
        blocks = [slice(i, min(i + block_m, sq)) for i in range(0, sq, block_m)]
        if p.program.rows is None:
            return [Span(i, 0, 0, skv, skv) for i in blocks]
        if len(blocks) == 1 and skv <= block_n:
            return [Span(blocks[0], 0, skv, skv, skv)]
        place = "spans", self.items.start, block_m
        kept: Any = None if self.reads_data else self.cache.get(place)
        found = self._spans(blocks) if kept is None else kept
        if not self.reads_data:
            self.cache[place] = found
        return found

    def _spans(self, blocks: list[slice]) -> list[Span]:
        p = self.p
        sq, skv = p.seqlen_q, p.seqlen_kv
        assert p.program.rows is not None
        at = self.symbols(slice(0, sq), slice(0, 1))
        shape = (self.batch, p.heads_q, sq, 1)
        lo, hi, full_lo, full_hi = (
            torch.as_tensor(evaluate(e, at, self.aux, self.dtype), device=self.device).expand(shape)
            for e in p.program.rows
        )
        empty = hi <= lo
        lo, hi = torch.where(empty, BIG, lo), torch.where(empty, 0, hi)
        ends = torch.stack([lo.amin((0, 1, 3)), -full_lo.amax((0, 1, 3)), full_hi.amin((0, 1, 3)), -hi.amax((0, 1, 3))])
        found = []
        for i in blocks:
            lows = ends[:, i].amin(1).clamp(-BIG, BIG).tolist()
            first, last = max(0, lows[0]), min(skv, -lows[3])
            full = max(first, -lows[1]), min(last, lows[2])
            full = full if full[0] < full[1] else (last, last)
            found.append(Span(i, first, *full, last))
        return found


def frames(plan: Plan, x: Operands) -> Iterator[Frame]:
    """The call, some batch items at a time."""
    p, aux, dtype = plan.problem, x.aux, wide(plan.problem.dtype)
    step = 1 if p.heads_q * p.seqlen_q * p.seqlen_kv >= ITEM else p.batch
    for first in range(0, p.batch, max(step, 1)):
        items = slice(first, first + step)
        own = tuple(
            a[items] if isinstance(a, Tensor) and not spec.dims and a.shape[0] > 1 else a
            for a, spec in zip(aux, p.program.aux, strict=True)
        )
        yield Frame(p, items, own, dtype, x.q.device, plan.cache, x.seed)


def whole(plan: Plan, x: Operands) -> Frame:
    """The call at once."""
    p = plan.problem
    return Frame(p, slice(0, p.batch), x.aux, wide(p.dtype), x.q.device, plan.cache)


def hidden(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `keep`, else -inf: by its bits, as torch.where and masked_fill take ten times as long, without vectors;
    that is three operations, which take longer on few elements."""
    if keep.numel() <= FEW:
        shown, low = SHOWN[dtype]
        return torch.where(keep, shown, low)
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    return (~keep).to(bits).mul_(INFINITE[dtype]).view(dtype)


class Symbols(dict[str, Tensor]):
    """Index tensors of four dims by name, made when they are asked for."""

    def __init__(self, sizes: dict[str, slice], device: torch.device) -> None:
        super().__init__()
        self.sizes, self.device = sizes, device

    def __missing__(self, name: str) -> Tensor:
        shape = tuple(-1 if name == other else 1 for other in self.sizes)
        self[name] = torch.arange(self.sizes[name].start, self.sizes[name].stop, device=self.device).view(shape)
        return self[name]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `i`, the keys they reach, and the tiles of keys in which no predicate is needed."""

    i: slice
    lo: int
    full_lo: int
    full_hi: int
    hi: int

    def tiles(self, block_n: int) -> Iterator[tuple[slice, bool]]:
        """(keys, whether the mask must be evaluated)."""
        pieces = ((self.lo, self.full_lo, True), (self.full_lo, self.full_hi, False), (self.full_hi, self.hi, True))
        for start, stop, partial in pieces:
            for j in range(start, stop, block_n):
                yield slice(j, min(j + block_n, stop)), partial


def _at(a: Any, i: slice, j: slice) -> Any:
    """An aux value on a tile."""
    if not isinstance(a, Tensor):
        return a
    return a[:, :, i if a.shape[2] > 1 else slice(None), j if a.shape[3] > 1 else slice(None)]
