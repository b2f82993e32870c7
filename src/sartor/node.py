"""Calls on a GPU with PyTorch's own node of autograd behind the result, which is C++: making one of Python's takes the
host as long as everything else that a small forward does.

The node is that of an operator that PyTorch has for CPUs only; here it gets kernels for GPUs. What a call is comes
along as an attribute of an empty tensor, in the place of the operator's mask, which the node keeps as it keeps q, k, v.
"""

from __future__ import annotations

from operator import is_
from threading import Lock
from typing import Any

import torch

from sartor import direct, ops
from sartor.device import capturing
from sartor.guards import each_once, guard
from sartor.kernels.cuda.host import current
from sartor.kernels.native import hooked
from sartor.kernels.once import once
from sartor.kernels.spec import Again, Operands, Saved, made_like
from sartor.replay.calls import BACKWARD, FORWARD, OPERATOR, PYTHONS_FORWARD, Calls, Kernels, why_not
from sartor.replay.lists import Replayed

Tensor = torch.Tensor
ALIKE = 8  # backwards kept of one plan, which differ in what arrives, or in guards


class Work:
    """What the operator's kernels do with a call's tensors, in its layout."""

    __slots__ = ("again", "calls", "gradients", "layouts", "mends", "prepared", "turned", "turns")

    def __init__(self, prepared: ops.Prepared, layout: str) -> None:
        self.prepared, self.turned = prepared, layout != "bshd"
        self.turns = self.turned and not prepared.any_layout  # in the forward too
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

    def _first(self, q: Tensor, k: Tensor, v: Tensor, lse: bool) -> tuple[Tensor, Any]:
        prepared: Any = self.prepared
        if self.turns:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        layout = "bhsd" if self.turned and not self.turns else "bshd"
        x = Operands(q, k, v, None, prepared.template, layout, lse)
        out, found = ops._forward(prepared, x)
        if not self.turns and current(q.device):  # launches are those of one device
            self.again = prepared.forward.kernel.again(prepared.forward, x)
        return (out.transpose(1, 2) if self.turns else out), found

    def followed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The operator: out and lse, which its node saves."""
        out, lse = self.forward(q, k, v, True)
        if not self.layouts:
            self.layouts = tuple(map(ops._layout, (q, k, v, out, lse)))
        again = self.again
        if again is None or not current(q.device):
            return out, lse
        if self.calls is not None and isinstance(again.launches, Replayed):
            if again.shared is None:
                self.calls.add(FORWARD, (q, k, v), (out, lse), again.launches)
            elif not capturing(q.device):  # whose workspace is the graph's
                stream = torch._C._cuda_getCurrentRawStream(q.device.index)
                self.calls.add(FORWARD, (q, k, v), (out, lse), again.launches, again.shared(), stream)
        return out, lse

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
        prepared: Any = self.prepared
        given, kept = (dout, *saved), [*map(ops._laid_out, saved, self.layouts)]
        q, k, v, out, lse = kept
        if self.turned:
            q, k, v, out, dout = (t.transpose(1, 2) for t in (q, k, v, out, dout))
        data = Operands(q, k, v, None, prepared.template), Saved(out, lse, dout, None)
        found = [t.transpose(1, 2) if self.turned else t for t in ops._backward(prepared, *data)[:3]]
        if current(dout.device) and all(map(is_, kept, saved)) and all(map(made_like, found, saved)):
            plan = prepared.backward_plan()
            again = plan.kernel.again(plan, *data)
            if again is not None:
                same = guard(each_once(given)[0])
                self.gradients = (same, kind, again.run), *self.gradients[: ALIKE - 1]
                if self.calls is not None and isinstance(again.launches, Replayed):
                    self.calls.add(BACKWARD, given, [*found, again.space], again.launches)
                    self.mends = self.mends or again.mends
        return tuple(found)


def alone(prepared: ops.Prepared) -> bool:
    """Whether the plan's kernels read q, k and v as they are, and no other tensor."""
    p = prepared.problem
    return not (None in prepared.template or p.sinks or p.dropout_p or p.copies or p.out_dtype != p.dtype)


class Native:
    """A plan of which autograd has to keep q, k, v and the results, and nothing else."""

    __slots__ = ("device", "handle", "operator", "work")

    def __init__(self, prepared: ops.Prepared, layout: str, device: torch.device) -> None:
        self.operator, self.work, self.device = operator(), Work(prepared, layout), device
        self.handle: Any = None  # for C, once autograd follows a call

    @classmethod
    def of(cls, prepared: ops.Prepared, layout: str, device: torch.device) -> Native | None:
        """None of a plan that is not for q, k and v alone."""
        return cls(prepared, layout, device) if alone(prepared) else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """out, for autograd to follow; None where saved tensors have hooks, which may give back something else."""
        if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
            return self.work.forward(q, k, v, False)[0]
        if hooked():
            return None
        if self.handle is None:
            self.handle = self._made((0,) if self.work.calls is None else self.work.calls.shape)
        unseen = self.work.mends and direct.hooked()  # by C, who wants to hear of Triton's launches
        return self.operator(q, k, v, attn_mask=self._made((0,)) if unseen else self.handle)[0]  # type: ignore[no-any-return]

    def _made(self, shape: tuple[int, ...]) -> Any:
        """An empty tensor that brings the work along."""
        with torch.inference_mode(False):  # whose tensors no node may save
            found: Any = torch.empty(shape, dtype=torch.float32, device=self.device)
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
