"""Calls on a GPU with PyTorch's own node of autograd behind the result, which is C++: making one of Python's takes the
host as long as everything else that a small forward does.

The node is that of an operator that PyTorch has for CPUs only; here it gets kernels for GPUs. What a call is comes
along as an attribute of an empty tensor, in the place of the operator's mask, which the node keeps as it keeps q, k, v.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from operator import is_
from threading import Lock
from typing import Any

import torch

from sartor import direct, ops
from sartor.device import capturing
from sartor.dynamic_shapes import DynamicShapes
from sartor.guards import each_once, guard
from sartor.kernels.cuda.host import current, like
from sartor.kernels.native import hooked
from sartor.kernels.once import once
from sartor.kernels.spec import Again, Operands, Saved, made_like
from sartor.problem import Call
from sartor.replay.calls import BACKWARD, FORWARD, OPERATOR, PYTHONS_FORWARD, Calls, Kernels, layouts, why_not
from sartor.replay.lists import Replayed

Tensor = torch.Tensor
ALIKE = 8  # backwards kept of one plan, which differ in what arrives, or in guards


class Work:
    """What the operator's kernels do with a call's tensors, in its layout."""

    __slots__ = ("again", "calls", "dynamic", "gradients", "layouts", "mends", "prepared", "turned", "turns")

    def __init__(self, prepared: ops.Prepared | None, layout: str, dynamic: DynamicShapes | None = None) -> None:
        self.prepared, self.dynamic, self.turned = prepared, dynamic, layout != "bshd"
        self.turns = self.turned and prepared is not None and not prepared.any_layout  # in the forward too
        self.layouts: tuple[Any, ...] = ()  # of what the node saves: for all calls of the plan
        self.again: Again | None = None  # of the forward
        # of backwards: guards, whether results repeat and which tensors come twice, `Again.run`
        self.gradients: tuple[Any, ...] = ()
        self.calls = Calls() if any(library.in_c for library in _SERVED) else None  # that C makes
        self.mends = False  # whether Triton's kernels are among what C launches

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lse: bool) -> tuple[Tensor, Any]:
        """out, and lse if it is wanted."""
        found = None if self.again is None else self.again.run(q, k, v, lse)
        return self._first(q, k, v, lse) if found is None else found

    def _planned(self, q: Tensor, k: Tensor, v: Tensor) -> ops.Prepared:
        assert self.dynamic is not None
        self.prepared = found = ops.prepare(replace(self.dynamic.call, q=q, k=k, v=v))
        return found

    def _first(self, q: Tensor, k: Tensor, v: Tensor, lse: bool) -> tuple[Tensor, Any]:
        dynamic, numbers = self.dynamic, () if self.dynamic is None else self.dynamic.lengths(q, k, v)
        if dynamic is not None and current(q.device):
            self.again = dynamic.forward.again(numbers, q.device)
            found = None if self.again is None else self.again.run(q, k, v, lse)
            if found is not None:
                return found  # type: ignore[no-any-return]
        prepared: Any = self.prepared or self._planned(q, k, v)
        if self.turns:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        layout = "bhsd" if self.turned and not self.turns else "bshd"
        x = Operands(q, k, v, None, prepared.template, layout, lse)
        out, found = ops._forward(prepared, x)
        if not self.turns and current(q.device):  # launches are those of one device
            self.again = prepared.forward.kernel.again(prepared.forward, x)
            if dynamic is not None and self.again is not None:
                dynamic.forward.learn(numbers)
        return (out.transpose(1, 2) if self.turns else out), found

    def followed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The operator: out and lse, which its node saves."""
        out, lse = self.forward(q, k, v, True)
        if not self.layouts:
            self.layouts = tuple(map(ops._layout, (q, k, v, out, lse)))
        if self.again is not None and self._replayable(self.again) and current(q.device):
            self._register(self.again, layouts((q, k, v), (out, lse)), q.device)
        return out, lse

    def _replayable(self, again: Again) -> bool:
        return self.calls is not None and again.space is None and isinstance(again.launches, Replayed)

    def _register(self, again: Again, described: Sequence[int], device: torch.device) -> None:
        """C of a forward."""
        calls: Any = self.calls
        if again.shared is None:
            calls.add(FORWARD, described, device, again.launches)
        elif not capturing(device):  # whose workspace is the graph's
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            calls.add(FORWARD, described, device, again.launches, again.shared(), stream)

    def register_forward(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Tell C of a forward before the first call, where a function gives its launches; whether one does."""
        dynamic = self.dynamic
        if dynamic is None or self.again is not None or not current(q.device):
            return False
        self.again = again = dynamic.forward.again(dynamic.lengths(q, k, v), q.device)
        if again is None or not self._replayable(again):
            return False
        self._register(again, again.layouts, q.device)
        return True

    def register_backward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """The same of its backward, after the forward: of a dout with the strides that others had."""
        dynamic: Any = self.dynamic
        rows, heads = out.shape[dynamic.axis], out.shape[3 - dynamic.axis]
        self.layouts = (*map(ops._layout, (q, k, v, out)), ((heads * rows, rows, 1), 0))
        again = dynamic.backward.again(dynamic.predicted(q, k, v, out), q.device)
        if again is None or not isinstance(again.launches, Replayed) or (again.mends and direct.hooked()):
            return
        self.calls.add(BACKWARD, again.layouts, q.device, again.launches)  # type: ignore[union-attr]
        self.mends = self.mends or again.mends

    def backward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """dq, dk, dv. Given are dout, and q, k, v, out and lse, which the caller may have moved since."""
        tensors, twice = each_once(given)
        kind = torch.are_deterministic_algorithms_enabled(), twice
        for same, of, again in self.gradients:
            if of == kind and same(*tensors):
                found = again(*given)
                if found is not None:
                    return found  # type: ignore[no-any-return]
        return self._first_backward(kind, *given)

    def _first_backward(self, kind: tuple[Any, ...], dout: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        given, kept = (dout, *saved), [*map(ops._laid_out, saved, self.layouts)]
        dynamic, numbers = self.dynamic, None
        if dynamic is not None and current(dout.device) and all(map(is_, kept, saved)):
            numbers = dynamic.of_backward(*given)
            again = None if numbers is None else dynamic.backward.again(numbers, dout.device)
            made = None if again is None else again.run(*given)
            if made is not None:
                self._keep(kind, given, made, again)
                return made  # type: ignore[no-any-return]
        q, k, v, out, lse = kept
        prepared: Any = self.prepared or self._planned(q, k, v)
        if self.turned:
            q, k, v, out, dout = (t.transpose(1, 2) for t in (q, k, v, out, dout))
        data = Operands(q, k, v, None, prepared.template), Saved(out, lse, dout, None)
        found = [t.transpose(1, 2) if self.turned else t for t in ops._backward(prepared, *data)[:3]]
        if current(dout.device) and all(map(is_, kept, saved)) and all(map(made_like, found, saved)):
            plan = prepared.backward_plan()
            again = plan.kernel.again(plan, *data)
            if again is not None:
                self._keep(kind, given, found, again)
                if dynamic is not None and numbers is not None:
                    dynamic.backward.learn(numbers)
        return tuple(found)

    def _keep(self, kind: tuple[Any, ...], given: tuple[Tensor, ...], found: Sequence[Tensor], again: Any) -> None:
        """What repeats a backward of given tensors, for calls like it."""
        self.gradients = (guard(each_once(given)[0]), kind, again.run), *self.gradients[: ALIKE - 1]
        if self.calls is not None and isinstance(again.launches, Replayed):
            device = found[0].device
            described = again.layouts or layouts(given, [*found, like((again.space,), device)])
            self.calls.add(BACKWARD, described, device, again.launches)
            self.mends = self.mends or again.mends


def alone(prepared: ops.Prepared) -> bool:
    """Whether the plan's kernels read q, k and v as they are, and no other tensor."""
    p = prepared.problem
    return not (None in prepared.template or p.sinks or p.dropout_p or p.copies or p.out_dtype != p.dtype)


def work_of(call: Call, options: tuple[Any, ...]) -> Work | None:
    """None of a plan that is not for q, k and v alone. Where launches of other lengths are known, it is to be seen
    whether this call needs a plan. `options` as of `DynamicShapes`."""
    dynamic = DynamicShapes.of(call, options) if call.q.is_cuda else None
    if dynamic is not None and dynamic.forward.known:
        return Work(None, call.layout, dynamic)
    prepared = ops.prepare(call)
    return Work(prepared, call.layout, dynamic) if alone(prepared) else None


class Native:
    """A plan of which autograd has to keep q, k, v and the results, and nothing else."""

    __slots__ = ("device", "handle", "operator", "work")

    def __init__(self, work: Work, device: torch.device) -> None:
        self.operator, self.work, self.device = operator(), work, device
        self.handle: Any = None  # for C, once autograd follows a call

    @classmethod
    def of(cls, call: Call, options: tuple[Any, ...]) -> Native | None:
        """None where there is no work, see `work_of`."""
        operator()  # it is served before there is work, which asks whether C makes calls
        work = work_of(call, options)
        return None if work is None else cls(work, call.q.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """out, for autograd to follow; None where saved tensors have hooks, which may give back something else."""
        if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
            return self.work.forward(q, k, v, False)[0]
        if hooked():
            return None
        work, registered = self.work, False
        if self.handle is None:
            self.handle = self._made((0,) if work.calls is None else work.calls.shape)
            registered = work.register_forward(q, k, v)
        unseen = work.mends and direct.hooked()  # by C, who wants to hear of Triton's launches
        out: Tensor = self.operator(q, k, v, attn_mask=self._made((0,)) if unseen else self.handle)[0]
        if registered:
            work.register_backward(q, k, v, out)
        return out

    def _made(self, shape: tuple[int, ...]) -> Any:
        """An empty tensor that brings the work along."""
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            found: Any = torch.empty(shape, dtype=torch.float32, device=self.device)  # which a node saves
        found.of_sartor = self.work
        return found


def operator() -> Any:
    """The operator, with kernels for GPUs."""
    with _SERVING:  # first calls of two threads
        if not _SERVED:
            serve("CUDA", "AutogradCUDA")
    return getattr(torch.ops.aten, OPERATOR).default._op


def serve(backend: str, autograd: str) -> Any:
    """Give the operator kernels under a dispatch key, and its backward under that of autograd too, where a gradient is
    told that it has none: in C where that can be."""
    library: Any = torch.library.Library("aten", "IMPL")
    library.in_c = not why_not()
    library.impl(OPERATOR, _forward, PYTHONS_FORWARD if library.in_c else backend)
    library.impl(f"{OPERATOR}_backward", _backward, backend)
    if library.in_c:  # until the library goes
        library._registration_handles.append(Kernels(backend, autograd))
    else:
        library.impl(f"{OPERATOR}_backward", _backward, autograd)
    _SERVED.append(library)  # which lasts as long as this
    return library


_SERVED: list[Any] = []
_SERVING = Lock()


def _work(handle: Any) -> Work:
    found: Work | None = getattr(handle, "of_sartor", None)
    if found is None:
        raise NotImplementedError(f"aten::{OPERATOR} is for CPUs: expected q, k and v there, got them on a GPU")
    return found


def _forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, attn_mask: Any = None, scale: Any = None) -> Any:
    return _work(attn_mask).followed(q, k, v)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *_: Any, attn_mask: Any = None,
    scale: Any = None,
) -> Any:  # fmt: skip
    work = _work(attn_mask)
    if torch.is_grad_enabled():
        return once(lambda: work.backward(dout, q, k, v, out, lse), dout, q, k, v)
    return work.backward(dout, q, k, v, out, lse)
