"""Program: what kernels compile of a mask and a score, as expressions, with the aux values that these read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sartor.mods.core import OF_COLUMN, OF_ROW, OF_SCORE, Mask, Score
from sartor.mods.derivative import diff
from sartor.mods.expr import Expr, where
from sartor.mods.placed import POSITIONS
from sartor.mods.recent import Recent
from sartor.mods.tracing import AuxValue, pattern, traced


@dataclass(frozen=True)
class Aux:
    """One aux value without its data: its pattern, and its dtype when it is a tensor."""

    pattern: str
    dtype: str
    far: bool = False  # of a score: a number that is too large for lse to hold a logarithm beside it

    @property
    def dims(self) -> int:
        """Of a table, by which it is indexed; 0 for what is read at the position."""
        return int(self.pattern[1:]) if self.pattern[0] in "tT" else 0


@dataclass(frozen=True)
class Rise:
    """Where a score reads an aux value, an `aux` or a `gather`, and its derivative by what is read there."""

    read: Expr
    rise: Expr


@dataclass(frozen=True, eq=False)
class Program:
    """What kernels compile of a mask and a score: expressions over one list of aux values. Equal texts are equal."""

    aux: tuple[Aux, ...] = ()
    keep: Expr | None = None
    rows: tuple[Expr, ...] | None = None
    cols: tuple[Expr, ...] | None = None
    score: Expr | None = None
    dscore: Expr | None = None

    @classmethod
    def of(cls, mask: Mask | None, score: Score | None) -> tuple[Program, tuple[AuxValue, ...]]:
        """The program, and the aux values it reads in order: the mask's first."""
        values = (mask.values if mask else ()) + (score.values if score else ())
        n = len(mask.aux) if mask else 0
        tables = {*(mask.tables if mask else ()), *(i + n for i in (score.tables if score else ()))}
        dtypes = [str(v.dtype) if isinstance(v, torch.Tensor) else "" for v in values]
        aux = tuple(
            Aux(pattern(v, i in tables), dtype, i >= n and _is_far(v))
            for i, (v, dtype) in enumerate(zip(values, dtypes, strict=True))
        )
        key = mask and mask.handle, score and score.handle, aux
        if key in _PROGRAMS:
            return _PROGRAMS[key], values
        parts: dict[str, Any] = {}
        if mask:
            parts["keep"] = traced(mask.keep, POSITIONS, values[:n])
            parts["rows"] = traced(mask.rows, OF_ROW, values[:n])  # type: ignore[arg-type]
            parts["cols"] = traced(mask.cols, OF_COLUMN, values[:n])  # type: ignore[arg-type]
        if score:
            shifted = lambda *a: score.fn(*a[:-1], a[-1][n:])  # noqa: E731 - one use
            changed = traced(shifted, OF_SCORE, values)
            if "s" not in changed.leaves():  # kernels take one for every pair of query and key
                s = Expr("sym", ("s",))
                changed = where(s == s, changed, changed)
            parts["score"] = changed
            parts["dscore"] = diff(parts["score"], "s")
        found = cls(aux, **parts)
        _PROGRAMS.add(key, found)
        return found, values

    def rises(self, i: int) -> tuple[Rise, ...]:
        """The derivatives of the score by the aux value i, one for each index it is read by."""
        assert self.score is not None
        read = {}
        for e in self.score.nodes():
            if (e.op == "gather" and e.args[0].args[0] == i) or (e.op == "aux" and e.args[0] == i):
                read[e.text()] = e
        inside = "gather" if self.aux[i].dims else "aux"
        return tuple(Rise(e, diff(self.score, text)) for text, e in read.items() if e.op == inside)

    @cached_property
    def key(self) -> str:
        """Canonical text: what a compiled kernel depends on."""
        spans = [e for span in (self.rows, self.cols) if span for e in span]
        exprs = [self.keep, *spans, self.score, self.dscore]
        read = [f"{a.pattern}:{a.dtype}{':far' * a.far}" for a in self.aux]
        return "; ".join([e.text() if e is not None else "-" for e in exprs] + read)

    @cached_property
    def is_interval(self) -> bool:
        """Whether a row attends to exactly [lo, hi): the interval it attends within is the one it attends to all of."""
        return _exact(self.rows)

    @cached_property
    def is_interval_both_ways(self) -> bool:
        """Whether in addition a column is attended to by exactly one interval of rows."""
        return _exact(self.rows) and _exact(self.cols)

    @cached_property
    def buries(self) -> bool:
        """Whether the score may move a whole row so far that lse cannot hold the logarithm of its sum beside it.

        A bias of -1e9 or finfo.min in place of a mask does. So may what reads a tensor at a query or key, or at an
        index, chooses between values, or has or reads a large number. Floats of batch and head alone count where they
        are added as they are, and not as factors, which ALiBi's slopes are.
        """
        return self.score is not None and any(map(self._moves_far, self.score.nodes()))

    def _moves_far(self, e: Expr) -> bool:
        if e.op == "aux":
            read = self.aux[e.args[0]]
            return read.far or bool({"q", "k"} & set(read.pattern.lower()))
        if e.op == "const":
            return _is_far(e.args[0])
        if e.op in ("+", "-"):
            return any(map(self._is_shift, e.args))
        return e.op in ("gather", "where", "minimum", "maximum")

    def _is_shift(self, e: Expr) -> bool:
        """Whether it is the same for all keys of a row and made of a tensor."""
        leaves = e.leaves()
        read = [self.aux[int(leaf[4:-1])].dtype for leaf in leaves if leaf.startswith("aux[")]
        return not leaves & {"s", "q", "kv"} and any("float" in dtype for dtype in read)

    @cached_property
    def reads_pairs(self) -> bool:
        """Whether the mask reads a tensor anew for every pair of query and key."""
        for e in self.keep.nodes() if self.keep is not None else ():
            if e.op == "aux" and {"q", "k"} <= set(self.aux[e.args[0]].pattern.lower()):
                return True
            if e.op == "gather" and {"q", "kv"} <= set().union(*(a.leaves() for a in e.args[1:])):
                return True
        return False

    @cached_property
    def loads(self) -> bool:
        """Whether the mask reads a tensor."""
        leaves = self.keep.leaves() if self.keep is not None else ()
        return any(leaf.startswith("aux[") and self.aux[int(leaf[4:-1])].dtype for leaf in leaves)

    @cached_property
    def told(self) -> tuple[bool, bool]:
        """Whether tensors tell its rows, and its columns, and the same to all heads."""
        return self._tells(self.rows), self._tells(self.cols)

    def _tells(self, spans: tuple[Expr, ...] | None) -> bool:
        leaves = set().union(*(e.leaves() for e in spans or ()))
        read = [self.aux[int(leaf[4:-1])] for leaf in leaves if leaf.startswith("aux[")]
        by_head = "h" in leaves or any("h" in a.pattern.lower() for a in read)
        return not by_head and any(a.dtype for a in read)

    @cached_property
    def has_lower_end(self) -> bool:
        """Whether what a row attends within may begin after the first key."""
        return self.rows is not None and self.rows[0].text() != "0"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


FAR = 2.0**12  # float32 holds fractions of 2^-11 beside it, which bfloat16's weights do not resolve
_PROGRAMS = Recent(1024)  # by the handles of mask and score, and what they read


def _is_far(value: AuxValue) -> bool:
    return isinstance(value, (int, float)) and abs(value) >= FAR


def _exact(spans: tuple[Expr, ...] | None) -> bool:
    if spans is None:
        return False
    lo, hi, full_lo, full_hi = (e.text() for e in spans)
    return lo == full_lo and hi == full_hi
