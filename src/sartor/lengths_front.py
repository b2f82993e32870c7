"""Calls on packed sequences and on caches that are found by what tells them apart, before a mask or a `Call` is made of
them, as `front` finds those on q, k and v alone.

What is kept of one is a list of launches: those that read the lengths, which fill the mask's table, look at them, or
add new keys to a cache, then those of the attention. A call allocates its results and one workspace, and starts the
list. It is kept when an equal call comes for the second time: lengths that change with every call, as the tokens of a
batch do, would have more to do otherwise. Whatever is unusual goes the way of all calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sartor import direct, ops
from sartor.checks import PLAIN, sides, watched
from sartor.device import capturing
from sartor.guards import each_once, guard
from sartor.kernels.cuda import host
from sartor.kernels.spec import Operands, allocate_out
from sartor.lengths import values
from sartor.lengths.intervals import Cache, Pair, rows_and_cols
from sartor.mods.masks import of_filled, packed_over
from sartor.mods.recent import Recent
from sartor.problem import Call

Tensor = torch.Tensor
ALIKE = 8  # calls kept of one key, which differ in shapes, strides, dtypes, what requires a gradient
KEPT = Recent(512)


class New(NamedTuple):
    """Where a call would be kept."""

    key: Any
    others: tuple[Any, ...]
    tensors: tuple[Tensor, ...]

    def keep(self, kept: Kept | None) -> None:
        """From now on; None: such calls go the way of all others."""
        same = guard(self.tensors)
        KEPT.add(self.key, ((same, kept), *self.others[: ALIKE - 1]))


def find(
    face: str, tensors: tuple[Any, ...], causal: Any, window: Any, softmax_scale: Any, softcap: Any, repeats: Any,
    wants_lse: Any,
) -> Kept | New | None:  # fmt: skip
    """What was kept of an equal call, of whose tensors q is the first; None of one that is not to be kept, or not yet:
    whatever is wrong with it is said elsewhere."""
    q = tensors[0]
    if q.__class__ not in PLAIN or not q.is_cuda or watched() or torch._C._is_any_autocast_enabled():
        return None
    if not causal.__class__ is repeats.__class__ is wants_lse.__class__ is bool or softcap.__class__ is not float:
        return None
    once, twice = each_once(tensors)
    try:
        key = (
            face, twice, len(tensors), q.numel(), tensors[1].numel(),
            tuple([-1 if t.is_nested else t.data_ptr() & 15 for t in tensors]),  # which in a guard ends the process
            causal, None if window is None else sides(window), softmax_scale, softmax_scale.__class__, softcap,
            repeats or torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        others: Any = KEPT.get(key)
        if others is None:
            KEPT.add(key, ())
            return None
        for same, kept in others:
            if same(*once):
                return kept  # type: ignore[no-any-return]
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return None
    plain = all(t.__class__ in PLAIN and t.is_cuda for t in tensors)
    return New(key, others, once) if plain and not capturing(q.device) else None


class Kept:
    """A call as its launches. Build with `packed` or `cached`."""

    def __init__(
        self, call: Call, tables: dict[str, Tensor], first: Sequence[tuple[Callable[..., Any], Sequence[str]]],
        more: Sequence[str], looks: Sequence[tuple[Any, ...]], given: Mapping[str, Tensor] = {}, apart: bool = False,
    ) -> None:  # fmt: skip
        """Raises LookupError where there is no such list.

        Args:
            call: one, whose mask reads these tables or what is given.
            tables: by name, dense int32 tensors as the launches fill them.
            first: of each launch its `driver.Step` and what it takes, names of `tables` or `more`.
            more: names of the addresses of the tensors of a call after q, k and v.
            looks: what `values.look` takes of such a tensor: its place among them, its name, the check, and the rest.
            given: of `more`, tensors that the mask reads.
            apart: whether `first` looks at lengths, which are the first of `more`, and does nothing else.
        """
        self.prepared, self.looks = ops.prepare(call), looks
        plan, p = self.prepared.forward, self.prepared.problem
        ready = plan.kernel.behind(plan)
        if ready is None:
            raise LookupError
        self.q_as_out, self.problem, self.marks = p.out_like_q, p, ready.workspace
        self.follows = call.needs_gradient
        at, self.bytes = {}, 0
        for name, t in tables.items():
            at[name] = self.bytes
            self.bytes += -(-t.untyped_storage().nbytes() // 16) * 16
        aux = [a for a in self.prepared.operands(call).aux if isinstance(a, Tensor)]
        names = [f"a{i}" for i, a in enumerate(self.prepared.template) if a is None]
        places = [_inside(a, {**tables, **given}) for a in aux]
        self.read = [(at.get(of, 0) + n, a.shape, a.stride()) for (of, n), a in zip(places, aux, strict=True)]
        filled = {name: ("space", n) for name, n in at.items()}
        for name, (of, n) in zip(names, places, strict=True):
            filled[name] = ("space", at[of] + n) if of in at else (of, n)
        self.row = ready.behind(first, [*more, "space"], filled, apart)
        if self.row is None:
            raise LookupError
        self.alone = ready.behind((), [*more, "space"], filled) if apart else None
        self.merges = ready.merge is not None
        room = ready.merge.size.numel() if self.merges else 0
        size = self.bytes // 4 + room
        self.space = host.like((size,), call.q.device) if size else None
        self.lse = ready.lse

    def attend(self, tensors: tuple[Tensor, ...], wants_lse: bool) -> tuple[Tensor, Tensor | None] | None:
        """out in the shape of q, and lse (batch, heads_q, seqlen_q) if it is wanted; None where Python's way of all
        calls has to make them. Raises ValueError for values that are wrong, as `values` says."""
        q, k, v, *others = tensors
        device = self.lse.device
        if not host.current(device) or direct.hooked():
            return None
        values.flag(device)  # which raises what earlier calls found
        for i, name, check, *rest in self.looks:
            values.look(name, others[i], check, *rest)
        follows = self.follows and torch.is_grad_enabled()
        packed = q.dim() == 3
        if follows and packed:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        if self.q_as_out:
            out = torch.empty_like(q)
        else:
            out = allocate_out(self.problem, q if q.dim() == 4 else q.unsqueeze(0))
        lse = torch.empty_like(self.lse) if wants_lse or follows else None
        space = None if self.space is None else torch.empty_like(self.space)
        at = 0 if space is None else space.data_ptr()
        addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(), 0]
        addresses.append(self.marks().data_ptr())
        if self.merges:
            addresses.append(at + self.bytes)
        row = self.row
        if self.alone is not None and not values.to_look_at(others[0], k.shape[1]):
            row = self.alone
        row.start([*addresses, *[t.data_ptr() for t in others], at])
        if len(others) == 3:  # new keys, which are in the caches now
            torch.autograd.graph.increment_version((k, v))
        if follows and space is not None:
            out, lse = self._followed(q, k, v, out, lse, space)
        return (out.squeeze(0) if packed and out.dim() == 4 else out), lse if wants_lse else None

    def _followed(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Any, space: Tensor) -> tuple[Tensor, Tensor]:
        """Results of a forward that autograd follows."""
        table = space.view(torch.int32)
        left = iter([table.as_strided(shape, strides, n // 4) for n, shape, strides in self.read])
        aux: tuple[Any, ...] = tuple([next(left) if a is None else a for a in self.prepared.template])
        made = ops.Made(Operands(q, k, v, None, aux), out, lse)
        return ops.followed(q, k, v, made, self.prepared)


def _inside(t: Tensor, tables: Mapping[str, Tensor]) -> tuple[str, int]:
    """In which of the tables a tensor lies, and how many bytes after its beginning."""
    for name, table in tables.items():
        n = t.data_ptr() - table.data_ptr()
        if 0 <= n < table.untyped_storage().nbytes():
            return name, n
    raise LookupError


def packed(
    tensors: tuple[Tensor, ...], ends: Pair, name: str, softmax_scale: Any, softcap: float, deterministic: bool
) -> Kept | None:
    """Of calls on packed sequences: q, k, v (tokens, heads, dim), cu_seqlens_q, and that of the keys, called `name`."""
    from sartor.lengths import launches

    q, k, v, cu_q, cu_k = tensors
    lengths = q.shape[0], k.shape[0]
    rows, cols = rows_and_cols(cu_q, cu_k, lengths)
    call = Call(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask=packed_over(rows, cols), softmax_scale=softmax_scale,
        softcap=softcap, deterministic=deterministic,
    )  # fmt: skip
    one = launches.of_intervals((cu_q, cu_k), (rows, cols), lengths, ends, name)
    first = [(one.step, ("cu_q", "cu_k", "rows", "cols"))]
    looks = [(0, "cu_seqlens_q", values.check_ends, lengths[0]), (1, name, values.check_ends, lengths[1])]
    try:
        return Kept(call, {"rows": rows, "cols": cols}, first, ("cu_q", "cu_k"), looks)
    except LookupError:
        return None


def cached(
    tensors: tuple[Tensor, ...], ends: Pair, cache: Cache, softmax_scale: Any, softcap: float, deterministic: bool
) -> Kept | None:
    """Of calls on caches: q, the caches, lengths, and k and v where such are added."""
    from sartor.lengths import launches

    q, k_cache, v_cache, lengths, *new = tensors
    call = Call(
        q, k_cache, v_cache, mask=of_filled(lengths, cache.added, ends), softmax_scale=softmax_scale,
        softcap=softcap, deterministic=deterministic,
    )  # fmt: skip
    if call.needs_gradient or not cache.batch:
        return None
    first: list[tuple[Callable[..., Any], Sequence[str]]]
    if new:
        added = launches.of_append(new[0], new[1], k_cache, v_cache, lengths, cache.name)
        first = [(added.step, ("new_k", "new_v", "k", "v", "lengths"))]
    else:
        first = [(launches.of_filled(lengths, cache).step, ("lengths",))]
    looks = [(0, cache.name, values.check_filled, cache.capacity, cache.added)]
    try:
        more = ("lengths", "new_k", "new_v")[: 1 + len(new)]
        return Kept(call, {}, first, more, looks, {"lengths": lengths}, apart=not new)
    except LookupError:
        return None
