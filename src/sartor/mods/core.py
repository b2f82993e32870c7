"""Mask and Score: what a mod is, how mods combine, and the text a kernel takes from them.

A mask is a predicate `(b, h, q, kv, aux) -> bool`, True where the query attends to the key. A score is a function
`(score, b, h, q, kv, aux) -> score`. Both are plain Python functions of operators. What they depend on besides the
position goes through `aux`: numbers, functions of (seqlen_q, seqlen_kv) that return an integer, or tensors
broadcastable to (batch, heads_q, seqlen_q, seqlen_kv), of which the function sees the value at (b, h, q, kv).

What makes a mask fast is `rows`: for a query, the interval [lo, hi) outside which it attends to nothing and the
interval [full_lo, full_hi) inside which it attends to everything. `cols` says the same for a key. A kernel turns them
into empty, full and partial tiles and evaluates the predicate on partial tiles only. A mask without them is slow,
never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import torch

from sartor.mods.expr import Expr, Traced, diff, evaluate, maximum, minimum, where
from sartor.mods.tracing import AuxValue, aux_value, is_boolean, is_real, pattern, resolve, text_of, trace, traced

BIG = 2**28  # beyond every position; four of them stay within int32
AnyMod = TypeVar("AnyMod", bound="Mod")


def _everywhere(b: Any, h: Any, position: Any, aux: Any) -> tuple[int, int, int, int]:
    return 0, BIG, BIG, 0


class Mod:
    """What masks and scores share. They are made before torch.compile compiles what uses them."""

    aux: tuple[AuxValue, ...]
    name: str
    text: str  # of its functions
    handle: str  # text that names all of the mod but the contents of its tensors

    def __post_init__(self) -> None:
        kind = type(self).__name__.lower()
        if not isinstance(self.aux, tuple):
            raise TypeError(f"aux must be a tuple of numbers, functions or tensors, got {type(self.aux).__name__}")
        object.__setattr__(self, "aux", tuple(aux_value(i, a) for i, a in enumerate(self.aux)))
        if torch.compiler.is_dynamo_compiling():  # a graph finds a mod by a handle that is there before it runs
            raise RuntimeError(
                f"{kind} must be made outside of what torch.compile compiles, and closed over or passed in"
            )
        object.__setattr__(self, "text", "; ".join([kind, *self._trace()]))
        self._register()

    def _register(self) -> None:
        object.__setattr__(self, "handle", "; ".join([self.text, *map(text_of, self.aux)]))
        if self.handle not in _TEMPLATES:
            _TEMPLATES[self.handle] = self
            _TEMPLATES[self.handle] = self.with_tensors([t.to("meta") for t in self.tensors])

    def _trace(self) -> list[str]:
        """Keep its functions by what they compute; their texts. Raises TypeError where they are none of such a mod."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.init)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        shapes = [f"{t.dtype}{list(t.shape)}" for t in self.tensors]
        return f"{type(self).__name__}({', '.join([self.name, *shapes])})"

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The aux tensors, in order."""
        return [a for a in self.aux if isinstance(a, torch.Tensor)]

    def with_tensors(self: AnyMod, tensors: list[torch.Tensor]) -> AnyMod:
        """The same mod over other tensors of the same dtypes; it is not traced again."""
        if not tensors:
            return self
        left = iter(tensors)
        same = object.__new__(type(self))
        same.__dict__.update(
            self.__dict__, aux=tuple(next(left) if isinstance(a, torch.Tensor) else a for a in self.aux)
        )
        if any(text_of(a) != text_of(b) for a, b in zip(self.tensors, tensors, strict=True)):
            same._register()
        return same


_TEMPLATES: dict[str, Mod] = {}  # by handle, for good; over meta tensors, so that none is kept alive


def lookup(handle: str, tensors: Iterator[torch.Tensor]) -> Any:
    """The mod that a compiled graph names by its handle, over the next of the tensors it carries; None for no name."""
    if not handle:
        return None
    found = _TEMPLATES.get(handle)
    if found is None:
        raise RuntimeError(f"this graph runs a mod that this process has not made: make its equal first, got {handle}")
    return found.with_tensors(list(islice(tensors, len(found.tensors))))


class Named:
    """A mod as a graph names it, which can be made while torch.compile compiles."""

    def __init__(self, handle: str, tensors: list[torch.Tensor]) -> None:
        self.handle, self.tensors = handle, tensors


def over(template: AnyMod, *tensors: torch.Tensor) -> AnyMod:
    """The template over these tensors. It is made at import, so that graphs know its handle."""
    if torch.compiler.is_compiling():
        return Named(template.handle, list(tensors))  # type: ignore[return-value]
    return template.with_tensors(list(tensors))


@dataclass(frozen=True, eq=False, repr=False)
class Mask(Mod):
    """Which keys a query attends to.

    keep: `(b, h, q, kv, aux) -> bool`, operators only.
    aux: values the functions read as `aux[0]`, `aux[1]`, ...: numbers, functions of (seqlen_q, seqlen_kv) that give an
        integer, or tensors that broadcast to (batch, heads, seqlen_q, seqlen_kv). Integers have 32 bits on GPUs unless
        a tensor or a constant has 64.
    rows: `(b, h, q, aux) -> (lo, hi, full_lo, full_hi)`, intervals of keys; may read aux that do not depend on kv.
    cols: `(b, h, kv, aux) -> (lo, hi, full_lo, full_hi)`, intervals of queries.
    """

    keep: Callable[..., Any]
    aux: tuple[AuxValue, ...] = ()
    rows: Callable[..., Any] = _everywhere
    cols: Callable[..., Any] = _everywhere
    name: str = "mask"
    text: str = field(init=False, default="")
    handle: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if not callable(self.keep):
            raise TypeError(f"mask must be a function (b, h, q, kv, aux) -> bool, got {type(self.keep).__name__}")
        for name, fn in (("rows", self.rows), ("cols", self.cols)):
            if not callable(fn):
                raise TypeError(f"{name} must be a function of positions and aux, got {type(fn).__name__}")
        super().__post_init__()

    def _trace(self) -> list[str]:
        n, names = len(self.aux), ("b", "h", "q", "kv")
        keep = trace(self.keep, names, n)
        if not is_boolean(keep, self.aux):
            found = keep.text() if isinstance(keep, Expr) else f"{len(keep)} values"
            raise TypeError(
                "mask must be a function that returns a bool, expected a comparison (`<`, `==`, ...), a bool tensor of"
                f" aux, or these combined by `&`, `|`, `~`, got {found}"
            )
        object.__setattr__(self, "keep", Traced(names, keep))
        texts = [keep.text()]
        for name, fn, position in (("rows", self.rows, ("b", "h", "q")), ("cols", self.cols, ("b", "h", "kv"))):
            span = trace(fn, position, n)
            if not isinstance(span, tuple) or len(span) != 4:
                count = len(span) if isinstance(span, tuple) else 1
                raise TypeError(f"{name} must return (lo, hi, full_lo, full_hi), got {count} values")
            real = [e.text() for e in span if is_real(e, self.aux)]
            if real:
                raise TypeError(f"{name} must return integers, got {real[0]}: divide by // instead of /")
            object.__setattr__(self, name, Traced(position, span))
            texts += [e.text() for e in span]
        return texts

    def materialize(self, batch: int, heads: int, seqlen_q: int, seqlen_kv: int, device: Any = None) -> torch.Tensor:
        """Bool (batch, heads, seqlen_q, seqlen_kv): the whole mask, for tests, plots and the reference."""
        b, h, q, kv = index_tensors(batch, heads, seqlen_q, seqlen_kv, device)
        aux = tuple(resolve(a, seqlen_q, seqlen_kv) for a in self.aux)
        found = traced(self.keep, ("b", "h", "q", "kv"), aux)
        keep = torch.as_tensor(evaluate(found, {"b": b, "h": h, "q": q, "kv": kv}, aux, torch.float32), device=device)
        return keep.to(torch.bool).expand(batch, heads, seqlen_q, seqlen_kv)

    def __and__(self, other: Mask) -> Mask:
        def meet(x: Any, y: Any) -> Any:
            return (
                maximum(x[0], y[0]), minimum(x[1], y[1]), maximum(x[2], y[2]), minimum(x[3], y[3])
            )  # fmt: skip

        return _combine(self, other, lambda x, y: x & y, meet, "&")

    def __or__(self, other: Mask) -> Mask:
        def hull(x: Any, y: Any) -> Any:
            longer = (x[3] - x[2]) >= (y[3] - y[2])
            full = where(longer, x[2], y[2]), where(longer, x[3], y[3])
            return minimum(x[0], y[0]), maximum(x[1], y[1]), *full

        return _combine(self, other, lambda x, y: x | y, hull, "|")

    def __invert__(self) -> Mask:
        def keep(*position: Any) -> Any:
            found = self.keep(*position)
            return not found if isinstance(found, bool) else ~found

        return Mask(keep, self.aux, name=f"~{self.name}")


def index_tensors(batch: int, heads: int, seqlen_q: int, seqlen_kv: int, device: Any) -> tuple[torch.Tensor, ...]:
    """b, h, q and kv as index tensors of shapes (b,1,1,1), (1,h,1,1), (1,1,sq,1), (1,1,1,skv)."""
    sizes = (batch, heads, seqlen_q, seqlen_kv)
    shapes = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))
    return tuple(torch.arange(n, device=device).view(s) for n, s in zip(sizes, shapes, strict=True))


def _combine(x: Mask, y: Mask, keep: Callable[..., Any], span: Callable[..., Any], sign: str) -> Mask:
    if not isinstance(y, Mask):
        raise TypeError(f"mask `{sign}` expects another sartor.mods.Mask, got {type(y).__name__}")
    n = len(x.aux)

    def both(f: Callable[..., Any], g: Callable[..., Any], join: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: join(f(*args[:-1], args[-1][:n]), g(*args[:-1], args[-1][n:]))

    return Mask(
        both(x.keep, y.keep, keep), x.aux + y.aux, both(x.rows, y.rows, span), both(x.cols, y.cols, span),
        f"({x.name} {sign} {y.name})",
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

    fn: `(score, b, h, q, kv, aux) -> score`, operators only, in natural-log units. Differentiated by the score on its
        expression; what only rises in steps (`//`, comparisons) counts as constant there, as PyTorch's floor does.
    aux: values the function reads as `aux[0]`, `aux[1]`, ...; tensors of them have no gradient.
    """

    fn: Callable[..., Any]
    aux: tuple[AuxValue, ...] = ()
    name: str = "score"
    text: str = field(init=False, default="")
    handle: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(
                f"score must be a function (score, b, h, q, kv, aux) -> score, got {type(self.fn).__name__}"
            )
        super().__post_init__()

    def _trace(self) -> list[str]:
        names = "s", "b", "h", "q", "kv"
        found = trace(self.fn, names, len(self.aux))
        if not isinstance(found, Expr) or not is_real(found, self.aux):
            got = found.text() if isinstance(found, Expr) else f"{len(found)} values"
            raise TypeError(f"score must be a function that returns a float, got {got}")
        object.__setattr__(self, "fn", Traced(names, found))
        return [found.text()]

    @property
    def is_singular(self) -> bool:
        """Whether it divides by what depends on the score or the position, which may be 0."""
        assert isinstance(self.fn, Traced)
        assert isinstance(self.fn.found, Expr)
        return any(e.args[1].leaves() & {"s", "q", "kv"} for e in self.fn.found.nodes() if e.op in ("/", "//", "%"))

    def then(self, other: Score) -> Score:
        """This score first, the other one on its result."""
        n = len(self.aux)

        def fn(s: Any, b: Any, h: Any, q: Any, kv: Any, aux: Any) -> Any:
            return other.fn(self.fn(s, b, h, q, kv, aux[:n]), b, h, q, kv, aux[n:])

        return Score(fn, self.aux + other.aux, f"{self.name} > {other.name}")


@dataclass(frozen=True)
class Aux:
    """One aux value without its data: its pattern, and its dtype when it is a tensor."""

    pattern: str
    dtype: str


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
        values = (mask.aux if mask else ()) + (score.aux if score else ())
        n = len(mask.aux) if mask else 0
        parts: dict[str, Any] = {}
        if mask:
            parts["keep"] = traced(mask.keep, ("b", "h", "q", "kv"), mask.aux)
            parts["rows"] = traced(mask.rows, ("b", "h", "q"), mask.aux)
            parts["cols"] = traced(mask.cols, ("b", "h", "kv"), mask.aux)
        if score:
            shifted = lambda *a: score.fn(*a[:-1], a[-1][n:])  # noqa: E731 - one use
            changed = traced(shifted, ("s", "b", "h", "q", "kv"), values)
            if "s" not in changed.leaves():  # kernels take one for every pair of query and key
                s = Expr("sym", ("s",))
                changed = where(s == s, changed, changed)
            parts["score"] = changed
            parts["dscore"] = diff(parts["score"], "s")
        aux = tuple(Aux(pattern(v), str(v.dtype) if isinstance(v, torch.Tensor) else "") for v in values)
        return cls(aux, **parts), values

    @cached_property
    def key(self) -> str:
        """Canonical text: what a compiled kernel depends on."""
        spans = [e for span in (self.rows, self.cols) if span for e in span]
        exprs = [self.keep, *spans, self.score, self.dscore]
        return "; ".join(
            [e.text() if e is not None else "-" for e in exprs] + [f"{a.pattern}:{a.dtype}" for a in self.aux]
        )

    @cached_property
    def is_interval(self) -> bool:
        """Whether a row attends to exactly [lo, hi): the interval it attends within is the one it attends to all of."""
        return _exact(self.rows)

    @cached_property
    def is_interval_both_ways(self) -> bool:
        """Whether in addition a column is attended to by exactly one interval of rows."""
        return _exact(self.rows) and _exact(self.cols)

    @cached_property
    def has_lower_end(self) -> bool:
        """Whether what a row attends within may begin after the first key."""
        return self.rows is not None and self.rows[0].text() != "0"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _exact(spans: tuple[Expr, ...] | None) -> bool:
    if spans is None:
        return False
    lo, hi, full_lo, full_hi = (e.text() for e in spans)
    return lo == full_lo and hi == full_hi
