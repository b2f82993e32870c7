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

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import torch

from sartor.checks import is_integer, real
from sartor.mods.expr import Expr, Traced, diff, evaluate, floor_divide, lift, maximum, minimum, where

COMPARISONS = frozenset(["<", "<=", ">", ">=", "==", "!="])
ARITHMETIC = frozenset(["+", "-", "*", "/", "//", "%", "neg", "abs", "maximum", "minimum", "<", "<=", ">", ">="])
BIG = 2**28  # beyond every position; four of them stay within int32
AuxValue = int | float | torch.Tensor | Callable[[int, int], int]
AnyMod = TypeVar("AnyMod", bound="Mod")

__all__ = ["BIG", "Aux", "Mask", "Program", "Score", "interval", "maximum", "minimum", "resolve", "where"]


def four_dims(t: torch.Tensor) -> torch.Tensor:
    """The tensor with dims of size 1 in front, up to (batch, heads, seqlen_q, seqlen_kv)."""
    return t if t.dim() == 4 else t[(None,) * (4 - t.dim())]


def resolve(value: AuxValue, seqlen_q: int, seqlen_kv: int) -> Any:
    """The aux value of one problem: functions of the lengths are called, tensors get four dims."""
    if isinstance(value, torch.Tensor):
        return four_dims(value)
    if not callable(value):
        return value
    found: Any = value(seqlen_q, seqlen_kv)
    if isinstance(found, (int, torch.SymInt)):
        return found
    if not is_integer(found):
        raise TypeError(
            "a function among the aux values of a mask or score must return an integer for seqlen_q and seqlen_kv,"
            f" {seqlen_q} and {seqlen_kv}, got {type(found).__name__}: {found!r}"
        )
    return operator.index(found)


def pattern(value: AuxValue) -> str:
    """Of which of b, h, q, k (kv) a tensor depends, upper case where its stride is 1; "n" or "f" for a number."""
    if not isinstance(value, torch.Tensor):
        return "f" if isinstance(value, float) else "n"
    letters = "bhqk"[4 - value.dim() :]
    sizes = zip(letters, value.shape, value.stride(), strict=True)
    return "".join(c.upper() if stride == 1 else c for c, size, stride in sizes if size != 1) or "one"


def trace(fn: Callable[..., Any], names: tuple[str, ...], n_aux: int) -> Any:
    """Call `fn` on symbols: an expression, or a tuple of them."""
    aux = tuple(Expr("aux", (i,)) for i in range(n_aux))
    try:
        result = fn(*(Expr("sym", (name,)) for name in names), aux)
    except TypeError as error:
        said = str(error)
        if "positional argument" in said:
            raise TypeError(
                f"a mask or score function must take ({', '.join(names)}, aux), got one where {said}"
            ) from error
        if "Expr" not in said:
            raise
        raise TypeError(
            "a mask or score function must use + - * / // % & | ^ ~, comparisons, abs, and of sartor.mods maximum,"
            f" minimum, tanh and where, got {said.splitlines()[0]}: pass tensors through `aux`, broadcastable to"
            " (batch, heads, seqlen_q, seqlen_kv), and use aux[i] as the value at (b, h, q, kv)"
        ) from error
    return tuple(lift(r) for r in result) if isinstance(result, tuple) else lift(result)


def traced(fn: Callable[..., Any], names: tuple[str, ...], aux: tuple[Any, ...]) -> Any:
    """`trace`, in a form whose value is Python's in every language that kernels are written in."""
    found = trace(fn, names, len(aux))
    return tuple(portable(e, aux) for e in found) if isinstance(found, tuple) else portable(found, aux)


def portable(e: Expr, aux: tuple[AuxValue, ...]) -> Expr:
    """The same value in every language. `//` and `%` round down, as in Python, and not towards 0, as in Triton and C++.
    Where True is counted or ordered it is 1. `~` of a bool is `^ True`: of a Python bool, and of `a & b` in C++, it is
    that of an integer. What cannot differ stays as it is."""
    if e.op in ("sym", "aux", "const"):
        return e
    given, args = e.args, tuple(portable(a, aux) for a in e.args)
    if e.op in ARITHMETIC or (e.op in COMPARISONS and not all(is_boolean(a, aux) for a in args)):
        args = tuple(where(a, 1, 0) if a.op != "const" and is_boolean(a, aux) else a for a in args)
    e = Expr(e.op, args)
    if e.op == "invert" and is_boolean(e, aux):
        return Expr("^", (args[0], lift(True)))
    if e.op not in ("//", "%"):
        return e
    if is_real(e, aux):
        a, b = e.args
        floor = floor_divide(a, b)
        return floor if e.op == "//" else a - b * floor  # type: ignore[no-any-return]
    if all(map(_not_negative, given)):
        return e
    a, b = e.args
    rest = a % b
    low, high = rest < 0, rest > 0
    wrong = low if _not_negative(given[1]) else (low & (b > 0)) | (high & (b < 0))
    right = rest + b if e.op == "%" else Expr("-", (e, lift(1)))
    return where(wrong, right, e)  # type: ignore[no-any-return]


def _not_negative(e: Expr) -> bool:
    """Whether that is certain."""
    if e.op == "const":
        return bool(e.args[0] >= 0)
    if e.op == "sym":
        return bool(e.args[0] != "s")  # the others are positions
    if e.op == "%":
        return _not_negative(e.args[1])
    if e.op in ("+", "*", "//", "minimum"):
        return all(map(_not_negative, e.args))
    if e.op == "maximum":
        return any(map(_not_negative, e.args))
    return e.op == "abs" or (e.op == "where" and all(map(_not_negative, e.args[1:])))


def is_real(e: Any, aux: tuple[AuxValue, ...]) -> bool:
    """Whether what was traced is a float."""
    if e.op == "sym":
        return bool(e.args[0] == "s")
    if e.op == "const":
        return isinstance(e.args[0], float)
    if e.op == "aux":
        value = aux[e.args[0]]
        return value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)
    if e.op in ("/", "tanh", "floor_divide"):
        return True
    args = e.args[1:] if e.op == "where" else e.args
    return e.op not in COMPARISONS and any(is_real(a, aux) for a in args)


def is_boolean(e: Any, aux: tuple[AuxValue, ...]) -> bool:
    """Whether what was traced is True or False everywhere, so that `&`, `|` and `~` of it mean what they say."""
    if not isinstance(e, Expr):
        return False
    if e.op == "aux":
        return getattr(aux[e.args[0]], "dtype", None) == torch.bool
    if e.op == "const":
        return isinstance(e.args[0], bool)
    if e.op in ("&", "|", "^", "invert"):
        return all(is_boolean(a, aux) for a in e.args)
    if e.op == "where":
        return all(is_boolean(a, aux) for a in e.args[1:])
    return e.op in COMPARISONS


def _text_of(value: AuxValue) -> str:
    """An aux value without data: of a tensor its dtype and the dims it varies along, of a function what it computes.
    Of one that could not be traced its address: the mask is kept with it."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}[{', '.join('1' if n == 1 else 'n' for n in value.shape)}]"
    if isinstance(value, Traced):
        return value.found.text()  # type: ignore[union-attr]
    return f"function {id(value)}" if callable(value) else repr(value)


def aux_value(i: int, value: Any) -> AuxValue:
    """One aux value, numbers of other libraries as Python's, functions of the lengths traced where that is possible."""
    if type(value) in (bool, int, float) or isinstance(value, (torch.Tensor, Traced)):
        return value  # type: ignore[no-any-return]
    if callable(value):
        names = "seqlen_q", "seqlen_kv"
        try:
            return Traced(names, lift(value(*(Expr("sym", (name,)) for name in names))))
        except Exception:  # it compares, or asks for more
            return value  # type: ignore[no-any-return]
    try:
        return operator.index(value) if is_integer(value) else real(f"aux[{i}]", value)
    except TypeError:
        raise TypeError(
            f"aux[{i}] must be a number, a tensor or a function of (seqlen_q, seqlen_kv), got"
            f" {type(value).__name__}: {str(value)[:60]}"
        ) from None


def _everywhere(b: Any, h: Any, position: Any, aux: Any) -> tuple[int, int, int, int]:
    return 0, BIG, BIG, 0


class Mod:
    """What masks and scores share. They are made before torch.compile compiles what uses them."""

    aux: tuple[AuxValue, ...]
    name: str
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
        texts = [kind, *self._trace(), *map(_text_of, self.aux)]
        object.__setattr__(self, "handle", "; ".join(texts))
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
        """The same mod over other tensors."""
        if not tensors:
            return self
        left = iter(tensors)
        aux = tuple(next(left) if isinstance(a, torch.Tensor) else a for a in self.aux)
        if any(_text_of(a) != _text_of(b) for a, b in zip(self.tensors, tensors, strict=True)):
            return replace(self, aux=aux)  # type: ignore[type-var]
        same = object.__new__(type(self))  # with its handle, which takes tracing to make
        same.__dict__.update(self.__dict__, aux=aux)
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
