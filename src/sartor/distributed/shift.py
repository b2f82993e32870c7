"""Masks and scores in positions of the whole sequence, as seen from a block of queries and a block of keys.

Query number i of a block is token `first + step * i` of the sequence, and so for keys; head number h is head
`first_head + h`. The functions of a mask are composed with that: they see what they would see on one device. Numbers go
through `aux`, so that another block compiles nothing anew; tensors are cut to what belongs to the block, but for those
that a function indexes, which it reads at positions of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from sartor.distributed.sharding import Run
from sartor.mods import masks
from sartor.mods.core import BIG, AnyMod, Mask, Mod, Score, interval
from sartor.mods.expr import lift
from sartor.mods.tracing import four_dims, resolve, text_of


@dataclass(frozen=True, slots=True)
class Frame:
    """A block: the queries `q` and keys `kv` of sequences of these lengths, heads from `first_head` on, `heads` of
    them; `heads` is 0 where all are there."""

    q: Run
    kv: Run
    seqlen_q: int
    seqlen_kv: int
    first_head: int = 0
    heads: int = 0

    def cut(self, t: torch.Tensor) -> torch.Tensor:
        """What a tensor broadcastable to (batch, heads, seqlen_q, seqlen_kv) holds for the block; a view."""
        t = four_dims(t)
        heads = slice(self.first_head, self.first_head + self.heads) if self.heads and t.shape[1] > 1 else slice(None)
        q = self.q.tokens if t.shape[2] > 1 else slice(None)
        return t[:, heads, q, self.kv.tokens if t.shape[3] > 1 else slice(None)]

    def aux(self, mod: Mod) -> tuple[Any, ...]:
        """What the mod's functions read for the block, and after it what `_Shift` reads."""
        return (
            *(self.cut(a) if isinstance(a, torch.Tensor) and i not in mod.tables else a
              for i, a in enumerate(values(mod, self.seqlen_q, self.seqlen_kv))),
            self.q.first, self.kv.first, self.q.step, self.kv.step, self.first_head,
        )  # fmt: skip


def values(mod: Mod, seqlen_q: int, seqlen_kv: int) -> tuple[Any, ...]:
    """The aux values of a mod for sequences of these lengths: numbers, tensors of four dims, and tables as they are."""
    return tuple(a if i in mod.tables else resolve(a, seqlen_q, seqlen_kv) for i, a in enumerate(mod.values))


def shifted(mod: AnyMod, frame: Frame) -> AnyMod:
    """The mask or score as the block sees it. It is traced once for all blocks."""
    aux = frame.aux(mod)
    kinds = tuple(text_of(a) if isinstance(a, torch.Tensor) else type(a) for a in aux)
    key = (mod.text, kinds, frame.q.step == 1, frame.kv.step == 1, frame.heads > 0)
    if key not in _TEMPLATES:
        _keep(key, _Shift(mod, frame).composed(aux))
    return _with_aux(_TEMPLATES[key], aux)  # type: ignore[no-any-return]


_TEMPLATES: dict[Any, Any] = {}
_MOST_TEMPLATES = 1024


def both(x: AnyMod, y: AnyMod) -> AnyMod:
    """Two masks of which both must allow a pair, or two scores one after the other. They are traced once."""
    aux = (*x.values, *y.values)
    key = (x.text, y.text, tuple(text_of(a) if isinstance(a, torch.Tensor) else type(a) for a in aux))
    if key not in _TEMPLATES:
        made: Any = x & y if isinstance(x, Mask) else x.then(y)  # type: ignore[operator, attr-defined]
        _keep(key, made)
    return _with_aux(_TEMPLATES[key], aux)  # type: ignore[no-any-return]


def _keep(key: Any, made: Any) -> None:
    if len(_TEMPLATES) >= _MOST_TEMPLATES:
        _TEMPLATES.clear()
    _TEMPLATES[key] = made


def _with_aux(template: AnyMod, aux: tuple[Any, ...]) -> AnyMod:
    """The same mod over other aux values of the same kinds. No graph will look it up by its handle."""
    same = object.__new__(type(template))
    handle = "; ".join([template.text, *map(text_of, aux)])
    same.__dict__.update(template.__dict__, aux=aux, handle=handle)
    return same


class _Shift:
    """The composition of a mod with a frame, whose numbers come after the mod's own aux values."""

    def __init__(self, mod: Any, frame: Frame) -> None:
        self.mod, self.frame = mod, frame
        self.n = n = len(mod.aux)
        self.at = {"q": (n, n + 2), "kv": (n + 1, n + 3)}

    def composed(self, aux: tuple[Any, ...]) -> Any:
        """The mod in places of the block."""
        mod = self.mod
        if isinstance(mod, Score):
            return Score(lambda s, b, *position: mod.fn(s, b, *self.position(*position)), aux, mod.name)
        return Mask(
            lambda b, *position: mod.keep(b, *self.position(*position)), aux,
            self.spans(mod.rows, "q", "kv"), self.spans(mod.cols, "kv", "q"), mod.name,
        )  # fmt: skip

    def token(self, which: str, i: Any, aux: Any) -> Any:
        """The token of place `i` of the queries or keys."""
        run, (first, step) = getattr(self.frame, which), self.at[which]
        return (i if run.step == 1 else i * aux[step]) + aux[first]

    def head(self, h: Any, aux: Any) -> Any:
        """The head among all."""
        return h + aux[self.n + 4] if self.frame.heads else h

    def place(self, which: str, token: Any, aux: Any) -> Any:
        """How many places of the queries or keys lie before `token`; an end beyond all of them stays that."""
        token = lift(token)
        if token.op == "const" and (token.args[0] <= 0 or token.args[0] >= BIG):
            return token
        run, (first, step) = getattr(self.frame, which), self.at[which]
        token = token - aux[first]
        return token if run.step == 1 else (token + aux[step] - 1) // aux[step]

    def spans(self, fn: Callable[..., Any], of: str, over: str) -> Callable[..., Any]:
        """`rows` or `cols`: intervals of `over` for a place of `of`."""

        def spans(b: Any, h: Any, i: Any, aux: Any) -> Any:
            found = fn(b, self.head(h, aux), self.token(of, i, aux), aux[: self.n])
            return tuple(self.place(over, end, aux) for end in found)

        return spans

    def position(self, h: Any, q: Any, kv: Any, aux: Any) -> tuple[Any, ...]:
        """What a mod is told of a pair, but for its batch item."""
        return self.head(h, aux), self.token("q", q, aux), self.token("kv", kv, aux), aux[: self.n]


Window = tuple[int | None, int | None] | None


def sides_of(causal: bool | str, window: Window, seqlen_q: int, seqlen_kv: int) -> tuple[int | None, int | None] | None:
    """(lo, hi): query i sees keys i + lo .. i + hi of sequences of these lengths, None is unbounded; or None: all."""
    left, right = (None, None) if window is None else window
    right = 0 if causal else right
    if left is None and right is None:
        return None
    offset = 0 if causal == "top_left" else seqlen_kv - seqlen_q
    return None if left is None else offset - left, None if right is None else offset + right


def shifted_band(causal: bool | str, window: Window, frame: Frame) -> Mask | None:
    """`causal` and `window` as the block sees them. Where queries and keys have one step they are a band again."""
    sides = sides_of(causal, window, frame.seqlen_q, frame.seqlen_kv)
    if sides is None:
        return None
    if frame.q.step != frame.kv.step:
        return shifted(band(*sides), frame)
    (lo, hi), ahead, step = sides, frame.q.first - frame.kv.first, frame.q.step
    return band(None if lo is None else -((-lo - ahead) // step), None if hi is None else (ahead + hi) // step)


def band(lo: int | None, hi: int | None) -> Mask:
    """Query i attends to keys i + lo .. i + hi, both included; None is unbounded."""
    if lo is None and hi == 0:
        return _causal()
    limits = tuple(max(-BIG, min(end or 0, BIG)) for end in (lo, hi))
    return _with_aux(_band(lo is not None, hi is not None), limits)


@lru_cache(maxsize=1)
def _causal() -> Mask:
    return masks.causal("top_left")


@lru_cache(maxsize=4)
def _band(bounded_below: bool, bounded_above: bool) -> Mask:
    """Its text is not that of `masks.causal`: kernels that know that one know it without an offset."""
    return interval(
        rows=lambda b, h, q, aux: (q + aux[0] if bounded_below else None, q + 1 + aux[1] if bounded_above else None),
        cols=lambda b, h, kv, aux: (kv - aux[1] if bounded_above else None, kv + 1 - aux[0] if bounded_below else None),
        aux=(0, 0),
        name="band",
    )
