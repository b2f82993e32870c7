"""Calls that read q, k and v alone and differ in sequence lengths and strides alone. The first lengths are planned one
by one. Planning is then traced once with symbols in the place of lengths and strides (`symbols`), and the function
that comes of it gives the launches of further lengths in a sixth of the time that planning takes the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from sartor.device import Device
from sartor.kernels.spec import Again, KernelSpec, Operands, Plan, Saved
from sartor.mods.recent import Recent
from sartor.mods.tracing import resolve
from sartor.plan import choose, choose_backward
from sartor.problem import Call, Problem, changed, is_copied, rows_on_16_bytes, without_gaps
from sartor.replay import library
from sartor.replay.calls import layouts
from sartor.replay.lists import Form, Replayed, form_of
from sartor.symbols import Function, SymbolicTensor, Trace, Untraceable, empty_like

Tensor = torch.Tensor
KNOWN = Recent(256)  # by all that these calls have in common


class SymbolicCall(NamedTuple):
    """A forward or a backward with symbolic tensors."""

    plan: Plan
    data: tuple[Any, ...]  # of the kernel
    given: list[Any]  # of the call, in its layout
    made: list[Any]


@dataclass(frozen=True)
class LaunchFunction:
    """What a trace gave: the launches of a forward or a backward as a function of lengths and strides."""

    function: Function  # numbers of lists, layouts, numbers of `KernelSpec.repeated`, and those of each record
    form: Form
    names: list[str]  # of kernels
    kernel: KernelSpec

    @classmethod
    def traced(cls, values: Sequence[int], described: Callable[..., SymbolicCall]) -> LaunchFunction | None:
        """Trace a pass with symbols of these values; None where its launches need more than lengths and strides."""
        trace = Trace(values)
        plan, data, *tensors = described(trace.inputs)
        found = plan.kernel.symbolic(plan, *data)
        if found is None:
            return None
        row, rest, more = found
        steps, given, made = row.listed(torch._C._cuda_getDevice())
        form = form_of(steps, given, made)
        if form.why:
            return None
        records: list[Any] = [made[i].numbers for i, *_ in form.records]  # type: ignore[union-attr]
        function = trace.function(form.numbers(steps, made), layouts(tensors[0], tensors[1] + more), rest, *records)
        return cls(function, form, [step.name for step in steps], plan.kernel)

    def again(self, values: Sequence[int], device: torch.device) -> Again | None:
        """What makes the launches of these lengths and strides; None where a guard fails."""
        try:
            found = self.function(*values)
        except ArithmeticError:
            return None
        if found is None:
            return None
        numbers, described, rest, *records = found
        launches = Replayed.like(self.form, self.names, numbers, records)
        return self.kernel.repeated(launches, device, *rest)._replace(layouts=described)


def should_trace(planned: int, traced: int) -> bool:
    """Whether to trace once more, after so many lengths were planned since the last of so many traces. The first trace
    waits for a second length, as many calls have one length only. Each further function serves fewer lengths (few
    queries, other tiles, multiples of 16), and a trace takes as long as some plans do."""
    return planned > traced + 1


@dataclass
class Pass:
    """The functions of a forward or of a backward."""

    described: Callable[..., SymbolicCall]
    known: list[LaunchFunction] = field(default_factory=list)
    traced: int = 0  # how often, with or without a function
    planned: int = 0  # lengths, since the last trace

    def again(self, values: Sequence[int], device: torch.device) -> Again | None:
        """As of `LaunchFunction`."""
        known = self.known
        for one in known:
            found = one.again(values, device)
            if found is not None:
                if one is not known[0]:  # the next length may be like this one
                    self.known = [one, *(other for other in known if other is not one)]
                return found
        return None

    def learn(self, values: Sequence[int]) -> None:
        """Count a length that was planned, and trace where it is time to."""
        self.planned += 1
        if not should_trace(self.planned, self.traced):
            return
        self.planned, self.traced = 0, self.traced + 1
        try:
            found = LaunchFunction.traced(values, self.described)
        except Exception:  # whatever it is: the call was made, and plans make others
            return
        self.known = [*self.known, *([] if found is None else [found])]


class DynamicShapes:
    """Calls whose problems are of one kind, with the functions that give their launches.

    Args:
        call: one of them.
        kind: `Problem.kind` of all.
        values: aux values; some are functions of the lengths.
        single: whether there is one query.
    """

    def __init__(self, call: Call, kind: Problem, values: Sequence[Any], single: bool) -> None:
        self.kind, self.values, self.device = kind, values, Device.of(call.q.device)
        self.single = single
        self.call = replace(call, q=None, k=None, v=None)  # type: ignore[arg-type] # its options
        self.place, self.axis = call.q.device, 1 if call.layout == "bshd" else 2
        self.dout: tuple[int, ...] | None = None  # strides of gradients that arrive; None: those of out
        self.forward, self.backward = Pass(self._forward), Pass(self._backward)

    @staticmethod
    def of(call: Call, options: tuple[Any, ...]) -> DynamicShapes | None:
        """Those like a call. `options` are its arguments besides q, k and v, and the alignment of these. None where
        each length is planned, or where Python makes the launches."""
        q, k, v = call.q.shape, call.k.shape, call.v.shape
        if library.why_not() or not len(q) == len(k) == len(v) == 4:
            return None
        at = 1 if call.layout == "bshd" else 2
        if k[at] != v[at]:
            return None
        heads, q_, k_, v_ = 3 - at, call.q, call.k, call.v
        sizes = q[at] == 1, q[0], q[heads], q[3], k[0], k[heads], k[3], v[0], v[heads], v[3]
        key = *options, sizes, q_.dtype, k_.dtype, v_.dtype, q_.device, k_.device, v_.device
        found = KNOWN.get(key)
        if found is None:
            kind = Problem.kind_of(call, call.key())
            if kind is None:
                return None
            problem, values = Problem.of_kind(call, kind)
            found = DynamicShapes(call, problem, values, kind[0])
            if not found.serves(problem):
                return None
            KNOWN.add(key, found)
        return found  # type: ignore[no-any-return]

    @staticmethod
    def serves(p: Problem) -> bool:
        """Whether kernels are given q, k and v as they are, and out is what `empty_like` makes of q."""
        return not p.copies and p.out_like_q and p.rows_on_16_bytes

    def lengths(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
        """Sequence lengths and strides: what a forward is a function of."""
        return q.shape[self.axis], k.shape[self.axis], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]

    def of_backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Any:
        """The same of a backward; None where dout, or what was saved, is not what functions assume: dense in the last
        dim, of the inputs' dtype."""
        dense = q.stride(3) == k.stride(3) == v.stride(3) == out.stride(3) == dout.stride(3) == 1
        if not dense or dout.dtype != q.dtype or not lse.is_contiguous():
            return None
        if torch.are_deterministic_algorithms_enabled() != self.kind.deterministic:
            return None
        of_out, of_dout = out.stride()[:3], dout.stride()[:3]
        self.dout = None if of_out == of_dout else of_dout
        return *self.lengths(q, k, v), *of_out, *of_dout

    def predicted(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple[int, ...]:
        """The same before dout has come, with the strides that the last one had."""
        of_out = out.stride()[:3]
        return *self.lengths(q, k, v), *of_out, *(self.dout or of_out)

    def _problem(self, numbers: Sequence[Any]) -> tuple[Problem, tuple[Any, ...]]:
        sq, skv = 1 if self.single else numbers[0], numbers[1]
        return self.kind.of_lengths(sq, skv), tuple([resolve(value, sq, skv) for value in self.values])

    def _tensors(self, numbers: Sequence[Any]) -> list[Any]:
        """q, k, v and more like q, in the layout of the call. Raises Untraceable where strides make a problem of
        another kind."""
        p, (sq, skv, *strides) = self.kind, numbers
        sq, found = 1 if self.single else sq, []
        for i in range(0, len(strides), 3):
            length, heads = (skv, p.heads_kv) if i in (3, 6) else (sq, p.heads_q)
            shape = (p.batch, length, heads, p.dim) if self.axis == 1 else (p.batch, heads, length, p.dim)
            found.append(SymbolicTensor(shape, (*strides[i : i + 3], 1), p.dtype, self.place))
        for t in found[:3]:
            if is_copied(self._bshd(t)) or not rows_on_16_bytes(self._bshd(t)):
                raise Untraceable
        if not without_gaps(_result_like(found[0])):
            raise Untraceable
        return found

    def _bshd(self, t: Any) -> Any:
        """In layout bshd."""
        return t if self.axis == 1 else t.transpose(1, 2)

    def _lse(self, p: Problem) -> Any:
        rows = p.seqlen_q
        return SymbolicTensor((p.batch, p.heads_q, rows), (p.heads_q * rows, rows, 1), torch.float32, self.place)

    def _forward(self, numbers: Sequence[Any]) -> SymbolicCall:
        p, aux = self._problem(numbers)
        q, k, v = given = self._tensors(numbers)
        x = Operands(q, k, v, aux=aux, layout=self.call.layout)
        plan = changed(choose(p, self.device), cache={})
        return SymbolicCall(plan, (x,), given, [_result_like(q), self._lse(p)])

    def _backward(self, numbers: Sequence[Any]) -> SymbolicCall:
        p, aux = self._problem(numbers)
        lse, tensors = self._lse(p), self._tensors(numbers)
        q, k, v, out, dout = map(self._bshd, tensors)
        data = Operands(q, k, v, aux=aux), Saved(out, lse, dout, None)
        given, made = [tensors[4], *tensors[:4], lse], [*map(_result_like, tensors[:3])]
        return SymbolicCall(changed(choose_backward(p, self.device), cache={}), data, given, made)


def _result_like(t: Any) -> Any:
    """What `empty_like` makes, without a look at the strides where there are no gaps."""
    return t if without_gaps(t) else empty_like(t)
