"""Mask and Score, the "mods": what they are and how they combine. `program.py` has what kernels compile of them.

A mask is a predicate `(b, h, q, kv) -> bool`, True where the query attends to the key. A score is a function
`(score, b, h, q, kv) -> score`. Both are plain Python functions of operators. A tensor that they capture is indexed:
`ids[b, q]`, `table[h, q - kv + n]`. What may change without compiling anew goes through one more argument, `aux`:
numbers, functions of (seqlen_q, seqlen_kv) that return an integer, or tensors, of which the function sees the value at
(b, h, q, kv) where they are broadcastable to (batch, heads_q, seqlen_q, seqlen_kv), and which it may index.

What makes a mask fast is `rows`: for a query, the interval [lo, hi) outside which it attends to nothing and the
interval [full_lo, full_hi) inside which it attends to everything. `cols` says the same for a key. A kernel turns them
into empty, full and partial tiles and evaluates the predicate on partial tiles only. Where they are not given they are
read off the predicate, as far as that can be (`intervals.py`). A mask without them is slow, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import torch

from sartor.mods import graph
from sartor.mods.capture import Capture, Sizes
from sartor.mods.expr import Expr, Traced, evaluate
from sartor.mods.intervals import BIG as BIG
from sartor.mods.intervals import hull, meet, reads, spans
from sartor.mods.placed import POSITIONS, Placed
from sartor.mods.recent import Recent
from sartor.mods.torch_names import name_of
from sartor.mods.tracing import (
    AuxValue,
    aux_value,
    four_dims,
    is_boolean,
    is_real,
    portable,
    resolve,
    text_of,
    trace,
    traced,
)  # fmt: skip

AnyMod = TypeVar("AnyMod", bound="Mod")


class Mod:
    """What masks and scores share. One that is made while torch.compile compiles has its handle and tensors alone."""

    aux: tuple[AuxValue, ...]  # with captured tensors at the end, `Placed` among them: `values` has their views
    name: str
    sizes: Sizes | None
    tables: frozenset[int]  # the aux values that are indexed
    text: str  # of its functions
    handle: str  # text that names all of the mod but the contents of its tensors

    def __post_init__(self) -> None:
        if not isinstance(self.aux, tuple):
            raise TypeError(f"aux must be a tuple of numbers, functions or tensors, got {type(self.aux).__name__}")
        if torch.compiler.is_dynamo_compiling():
            graph.make(self)
            return
        object.__setattr__(self, "aux", tuple(aux_value(i, a) for i, a in enumerate(self.aux)))
        capture = Capture(self.aux)
        with capture.open():
            found = self._traced(len(self.aux))
        self.settle(capture, found)

    @classmethod
    def empty(cls: type[AnyMod], **given: Any) -> AnyMod:
        """A mod of which `settle` is to make what it is."""
        mod = object.__new__(cls)
        for f in fields(cls):  # type: ignore[arg-type]
            object.__setattr__(mod, f.name, given.get(f.name, None if f.default is MISSING else f.default))
        return mod

    def settle(self, capture: Capture, found: list[Any]) -> None:
        """Keep what its functions computed of symbols, over the values that were captured."""
        kind = type(self).__name__.lower()
        found, aux, tables = capture.settle(found, self.sizes)
        object.__setattr__(self, "aux", aux)
        values = self.values
        for e in (e for x in found for e in (x if isinstance(x, tuple) else (x,))):
            portable(e, values)  # or it says what is not
        object.__setattr__(self, "tables", tables)
        object.__setattr__(self, "text", "; ".join([kind, *self._keep(found)]))
        self._register()

    def _register(self) -> None:
        object.__setattr__(self, "handle", "; ".join([self.text, *map(text_of, self.values)]))
        if self.handle not in TEMPLATES and not _UNNAMED.get():
            TEMPLATES.add(self.handle, self)
            TEMPLATES[self.handle] = self.with_tensors([t.detach().to("meta") for t in self.tensors])

    def _traced(self, n_aux: int) -> list[Any]:
        """What its functions compute of symbols."""
        raise NotImplementedError

    def _keep(self, found: list[Any]) -> list[str]:
        """Keep its functions by what they compute; their texts. Raises TypeError where they are none of such a mod."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        derived = getattr(self, "derived", ())  # intervals that are read off the function again, and not given
        names = [f.name for f in fields(self) if f.init]  # type: ignore[arg-type]
        return type(self), tuple(None if name in derived else getattr(self, name) for name in names)

    def __repr__(self) -> str:
        shapes = [f"{t.dtype}{list(t.shape)}" for t in self.tensors]
        return f"{type(self).__name__}({', '.join([self.name, *shapes])})"

    @property
    def values(self) -> tuple[AuxValue, ...]:
        """The aux values, with views of captured tensors as these are now."""
        return tuple([a.view() if isinstance(a, Placed) else a for a in self.aux])

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The aux tensors, in order."""
        return [a for a in self.values if isinstance(a, torch.Tensor)]

    def to(self: AnyMod, device: torch.device | str) -> AnyMod:
        """The same mod with its aux tensors on a device; itself where they are there."""
        moved = [t.to(device) for t in self.tensors]
        return self if all(a is b for a, b in zip(moved, self.tensors, strict=True)) else self.with_tensors(moved)

    @property
    def read(self) -> list[torch.Tensor]:
        """The aux tensors as programs read them: dense tables, others of four dims."""
        values = enumerate(self.values)
        return [
            a.contiguous() if i in self.tables else four_dims(a) for i, a in values if isinstance(a, torch.Tensor)
        ]  # fmt: skip

    def with_tensors(self: AnyMod, tensors: list[torch.Tensor]) -> AnyMod:
        """The same mod over other tensors of the same dtypes; it is not traced again."""
        if not tensors:
            return self
        kinds = list(map(_kind, tensors))
        if kinds == self._kinds:
            return self.filled(tensors)
        known = self._varied.get(key := tuple(kinds))
        if known is not None:
            return known.filled(tensors)
        same = self.filled(tensors)
        same.__dict__.pop("_kinds", None)
        same._remade()
        self._varied[key] = same.filled([t.detach().to("meta") for t in tensors])
        return same

    def filled(self: AnyMod, tensors: Sequence[torch.Tensor]) -> AnyMod:
        """`with_tensors`, where it is known that they vary along the dims that its own vary along."""
        left = iter(tensors)
        same = object.__new__(type(self))
        same.__dict__.update(self.__dict__)
        same.__dict__["aux"] = tuple([next(left) if isinstance(a, (torch.Tensor, Placed)) else a for a in self.aux])
        return same

    @cached_property
    def _kinds(self) -> list[tuple[Any, ...]]:
        return list(map(_kind, self.tensors))

    @cached_property
    def _varied(self: AnyMod) -> dict[tuple[Any, ...], AnyMod]:
        """The same mod where its tensors vary along other dims, over meta tensors: decoding asks at every step."""
        return {}

    def _remade(self) -> None:
        """Once its tensors vary along other dims."""
        self._register()


def _kind(t: torch.Tensor) -> tuple[Any, ...]:
    """What a mod's text has of a tensor, in a form that is quickly made: its dtype, and along which dims it varies."""
    return t.dtype, *[n == 1 for n in t.shape]


TEMPLATES = Recent(4096)  # by handle; over meta tensors, so that none is kept alive
_UNNAMED = ContextVar("_UNNAMED", default=False)


@contextmanager
def unnamed() -> Iterator[None]:
    """Mods that are made inside serve one call: no graph names them, and nothing keeps them. A softcap that changes
    with every step leaves nothing behind."""
    token = _UNNAMED.set(True)
    try:
        yield
    finally:
        _UNNAMED.reset(token)


def lookup(handle: str, tensors: Iterator[torch.Tensor]) -> Any:
    """The mod that a compiled graph names by its handle, over the next of the tensors it carries; None for no name."""
    if not handle:
        return None
    found = template(handle)
    return found.with_tensors(list(islice(tensors, len(found.tensors))))


def tensors_of(handle: str) -> int:
    """How many tensors the mod has that a compiled graph names by its handle."""
    return len(template(handle).tensors) if handle else 0


def template(handle: str) -> Any:
    """The mod of this handle, over meta tensors."""
    found = graph.MADE.get(handle) or TEMPLATES.get(handle)
    if found is None:
        raise RuntimeError(f"this graph runs a mod that this process has not made: make its equal first, got {handle}")
    return found


def over(template: AnyMod, *tensors: torch.Tensor) -> AnyMod:
    """The template over these tensors. It is made at import, so that graphs know its handle."""
    if torch.compiler.is_compiling():
        return graph.fill(object.__new__(type(template)), template.handle, list(tensors))  # type: ignore[no-any-return]
    return template.with_tensors(list(tensors))


OF_ROW, OF_COLUMN = ("b", "h", "q"), ("b", "h", "kv")
OF_SCORE = ("s", *POSITIONS)


@dataclass(frozen=True, eq=False, repr=False)
class Mask(Mod):
    """Which keys a query attends to.

    Args:
        keep: `(b, h, q, kv) -> bool` or `(b, h, q, kv, aux) -> bool`: operators, functions of `sartor.mods` and of
            torch by the same names, tensors that it captures, indexed: `ids[b, q] == ids[b, kv]`. An index below 0
            counts from the end; one beyond a tensor reads its edge, where FlexAttention has no rule.
        aux: values the functions read as `aux[0]`, `aux[1]`, ...: numbers, functions of (seqlen_q, seqlen_kv) that give
            an integer, or tensors that broadcast to (batch, heads, seqlen_q, seqlen_kv), or that are indexed. Integers
            have 32 bits on GPUs unless a tensor or a constant has 64.
        rows: `(b, h, q) -> (lo, hi, full_lo, full_hi)`, or with aux: intervals of keys; may read what does not depend
            on kv. None: read off `keep`, where its comparisons have kv on one side.
        cols: `(b, h, kv) -> (lo, hi, full_lo, full_hi)`, or with aux: intervals of queries; None likewise.
        name: what `sartor.explain` calls it.
        sizes: (batch, heads_q, seqlen_q, seqlen_kv) of the calls it is for, where that is known. A captured tensor that
            is indexed by positions alone must fit those of the call, unless these say that it does not: then it is a
            table.
    """

    keep: Callable[..., Any]
    aux: tuple[AuxValue, ...] = ()
    rows: Callable[..., Any] | None = None
    cols: Callable[..., Any] | None = None
    name: str = "mask"
    sizes: Sizes | None = None
    derived: tuple[str, ...] = field(init=False, default=())  # of rows and cols, which are read off `keep`
    tables: frozenset[int] = field(init=False, default=frozenset())
    text: str = field(init=False, default="")
    handle: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if not callable(self.keep):
            raise TypeError(f"mask must be a function (b, h, q, kv) -> bool, got {type(self.keep).__name__}")
        for name, fn in (("rows", self.rows), ("cols", self.cols)):
            if fn is not None and not callable(fn):
                raise TypeError(f"{name} must be a function of positions and aux, got {type(fn).__name__}")
        super().__post_init__()

    def _traced(self, n_aux: int) -> list[Any]:
        keep = trace(self.keep, POSITIONS, n_aux)
        own = ((self.rows, OF_ROW), (self.cols, OF_COLUMN))
        return [keep, *(trace(fn, names, n_aux) for fn, names in own if fn is not None)]

    def _keep(self, found: list[Any]) -> list[str]:
        keep = found[0]
        if not is_boolean(keep, self.values):
            got = keep.text() if isinstance(keep, Expr) else f"{len(keep)} values"
            raise TypeError(
                "mask must be a function that returns a bool, expected a comparison (`<`, `==`, ...), a bool tensor,"
                f" or these combined by `&`, `|`, `~`, got {got}"
            )
        object.__setattr__(self, "keep", Traced(POSITIONS, keep))
        texts, given = [keep.text()], iter(found[1:])
        for name, names, other in (("rows", OF_ROW, "kv"), ("cols", OF_COLUMN, "q")):
            if getattr(self, name) is None:
                span = spans(keep, other, self.values)
                object.__setattr__(self, "derived", (*self.derived, name))
            else:
                span = self._checked(name, next(given))
            object.__setattr__(self, name, Traced(names, span))
            texts += [e.text() for e in span]
        return texts

    def _remade(self) -> None:
        given = {}
        for name, other in (("rows", "kv"), ("cols", "q")):
            span: Any = getattr(self, name)
            lost = any(reads(e, other, self.values) for e in span.found)  # what `&` and `|` made of derived ones may be
            given[name] = None if lost or name in self.derived else span
        self.__dict__.update(Mask(self.keep, self.aux, name=self.name, sizes=self.sizes, **given).__dict__)

    def _checked(self, name: str, span: Any) -> tuple[Expr, ...]:
        if not isinstance(span, tuple) or len(span) != 4:
            count = len(span) if isinstance(span, tuple) else 1
            raise TypeError(f"{name} must return (lo, hi, full_lo, full_hi), got {count} values")
        real = [e.text() for e in span if is_real(e, self.values)]
        if real:
            raise TypeError(f"{name} must return integers, got {real[0]}: divide by // instead of /")
        return span

    def materialize(self, batch: int, heads: int, seqlen_q: int, seqlen_kv: int, device: Any = None) -> torch.Tensor:
        """Bool (batch, heads, seqlen_q, seqlen_kv): the whole mask, for tests, plots and the reference."""
        b, h, q, kv = index_tensors(batch, heads, seqlen_q, seqlen_kv, device)
        aux = tuple(
            a if i in self.tables else resolve(a, seqlen_q, seqlen_kv) for i, a in enumerate(self.values)
        )  # fmt: skip
        found = traced(self.keep, POSITIONS, aux)
        keep = torch.as_tensor(evaluate(found, {"b": b, "h": h, "q": q, "kv": kv}, aux, torch.float32), device=device)
        return keep.to(torch.bool).expand(batch, heads, seqlen_q, seqlen_kv)

    def __and__(self, other: Mask | torch.Tensor) -> Mask:
        return _combine(self, other, lambda x, y: x & y, meet, "&")

    def __or__(self, other: Mask | torch.Tensor) -> Mask:
        return _combine(self, other, lambda x, y: x | y, hull, "|")

    __rand__, __ror__ = __and__, __or__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`torch.logical_and`, `logical_or` and `logical_not`; and operators beside a tensor, where Dynamo traces."""
        name = name_of(func)
        first = args[0] if isinstance(args[0], Mask) else args[1]
        if name in ("and", "rand", "logical_and", "bitwise_and"):
            return first.__and__(args[1] if first is args[0] else args[0])
        if name in ("or", "ror", "logical_or", "bitwise_or"):
            return first.__or__(args[1] if first is args[0] else args[0])
        if name in ("logical_not", "bitwise_not"):
            return first.__invert__()
        raise TypeError(f"a mask goes with `&`, `|`, `~` and torch's functions of these, got `{name}`")

    def __invert__(self) -> Mask:
        if torch.compiler.is_dynamo_compiling():
            return graph.combine("~", self)  # type: ignore[no-any-return]

        def keep(*position: Any) -> Any:
            found = self.keep(*position)
            return not found if isinstance(found, bool) else ~found

        return Mask(keep, self.aux, name=f"~{self.name}", sizes=self.sizes)


def index_tensors(batch: int, heads: int, seqlen_q: int, seqlen_kv: int, device: Any) -> tuple[torch.Tensor, ...]:
    """b, h, q and kv as index tensors of shapes (b,1,1,1), (1,h,1,1), (1,1,sq,1), (1,1,1,skv)."""
    sizes = (batch, heads, seqlen_q, seqlen_kv)
    shapes = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))
    return tuple(torch.arange(n, device=device).view(s) for n, s in zip(sizes, shapes, strict=True))


def _combine(x: Mask, y: Any, keep: Callable[..., Any], span: Callable[..., Any], sign: str) -> Mask:
    if isinstance(y, torch.Tensor) and y.dtype == torch.bool:
        y = Mask(lambda b, h, q, kv, aux: aux[0], (four_dims(y),), name="tensor")
    if not isinstance(y, Mask):
        got = f"one of {y.dtype}" if isinstance(y, torch.Tensor) else type(y).__name__
        raise TypeError(f"mask `{sign}` expects another sartor.mods.Mask or a bool tensor, got {got}")
    if torch.compiler.is_dynamo_compiling():
        return graph.combine(sign, x, y)  # type: ignore[no-any-return]
    n = len(x.aux)

    def both(f: Any, g: Any, join: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: join(f(*args[:-1], args[-1][:n]), g(*args[:-1], args[-1][n:]))

    return Mask(
        both(x.keep, y.keep, keep), x.aux + y.aux, both(x.rows, y.rows, span), both(x.cols, y.cols, span),
        f"({x.name} {sign} {y.name})", x.sizes or y.sizes,
    )  # fmt: skip


def interval(rows: Callable[..., Any], cols: Callable[..., Any], aux: tuple[AuxValue, ...], name: str) -> Mask:
    """A mask in which each query attends to exactly the keys [lo, hi) that `rows` gives, `cols` being its inverse; an
    end that is None is unbounded."""

    def keep(b: Any, h: Any, q: Any, kv: Any, aux: Any) -> Any:
        lo, hi = rows(b, h, q, aux)
        if hi is None:
            return True if lo is None else kv >= lo
        return kv < hi if lo is None else (kv >= lo) & (kv < hi)

    def twice(f: Callable[..., Any]) -> Callable[..., Any]:
        def spans(b: Any, h: Any, position: Any, aux: Any) -> Any:
            lo, hi = f(b, h, position, aux)
            return (0 if lo is None else lo, BIG if hi is None else hi) * 2

        return spans

    return Mask(keep, aux, twice(rows), twice(cols), name)


@dataclass(frozen=True, eq=False, repr=False)
class Score(Mod):
    """A change of the scaled score.

    Args:
        fn: `(score, b, h, q, kv) -> score`, or with aux as the last argument, in natural-log units; as a `Mask`'s
            `keep`. Differentiated by the score, and by the tensors it reads that require a gradient, on its expression;
            what only rises in steps (`//`, comparisons) counts as constant there, as PyTorch's floor does.
        aux: values the function reads as `aux[0]`, `aux[1]`, ...
        name: what `sartor.explain` calls it.
        sizes: as of a `Mask`.
    """

    fn: Callable[..., Any]
    aux: tuple[AuxValue, ...] = ()
    name: str = "score"
    sizes: Sizes | None = None
    tables: frozenset[int] = field(init=False, default=frozenset())
    text: str = field(init=False, default="")
    handle: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"score must be a function (score, b, h, q, kv) -> score, got {type(self.fn).__name__}")
        super().__post_init__()

    def _traced(self, n_aux: int) -> list[Any]:
        return [trace(self.fn, OF_SCORE, n_aux)]

    def _keep(self, found: list[Any]) -> list[str]:
        (changed,) = found
        if not isinstance(changed, Expr) or not is_real(changed, self.values):
            got = changed.text() if isinstance(changed, Expr) else f"{len(changed)} values"
            raise TypeError(f"score must be a function that returns a float, got {got}")
        object.__setattr__(self, "fn", Traced(OF_SCORE, changed))
        return [changed.text()]

    @property
    def is_singular(self) -> bool:
        """Whether it divides by what depends on the score or the position, which may be 0, or takes another function
        that need not be finite."""
        assert isinstance(self.fn, Traced)
        assert isinstance(self.fn.found, Expr)
        at = {"/": 1, "//": 1, "%": 1, "log": 0, "sqrt": 0, "exp": 0, "exp2": 0, "pow": 0}
        nodes = self.fn.found.nodes()
        return any(e.args[at[e.op]].leaves() & {"s", "q", "kv"} for e in nodes if e.op in at)

    def then(self, other: Score) -> Score:
        """This score first, the other one on its result."""
        if not isinstance(other, Score):
            raise TypeError(f"other must be a sartor.mods.Score, got {type(other).__name__}")
        if torch.compiler.is_dynamo_compiling():
            return graph.combine(">", self, other)  # type: ignore[no-any-return]
        n = len(self.aux)

        def fn(s: Any, b: Any, h: Any, q: Any, kv: Any, aux: Any) -> Any:
            return other.fn(self.fn(s, b, h, q, kv, aux[:n]), b, h, q, kv, aux[n:])

        return Score(fn, self.aux + other.aux, f"{self.name} > {other.name}", self.sizes or other.sizes)
