"""The operator of calls that read q, k and v alone, as torch.compile has them: few arguments, which take the dispatcher
2 us where those of `sartor::attention` take 20 to 60, and few lines of Python, each of which costs every call of the
compiled function guards.

Autograd's part of it is `plain`. What it puts into graphs, `plain_forward` and `plain_backward`, has none: a compiled
graph calls them past autograd, with plans found as `front` finds its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from sartor import ops
from sartor.checks import PLAIN, sides
from sartor.guards import each_once, guard
from sartor.kernels.once import once
from sartor.node import work_of
from sartor.problem import Call, Problem, heads_outermost, wide

Tensor = torch.Tensor
ALIKE = 8  # plans kept of one key, which differ in shapes, strides or dtypes
SETTINGS = "float? softmax_scale, float softcap, str causal, int[]? window, str kernel"
_LIBRARY = torch.library.Library("sartor", "FRAGMENT")
for _name in ("plain", "plain_forward"):
    _LIBRARY.define(f"{_name}(Tensor q, Tensor k, Tensor v, {SETTINGS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "plain_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    f" {SETTINGS}) -> (Tensor, Tensor, Tensor)"
)


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: Any, window: Any, softmax_scale: Any, softcap: float, layout: Any,
    kernel: Any,
) -> Tensor | None:  # fmt: skip
    """out, in `layout`, where torch.compile compiles the call; None of one that is unusual, or wrong."""
    if (
        type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN
        or not q.dim() == k.dim() == v.dim() == 4
        or layout not in ("bshd", "bhsd") or type(kernel) is not str or type(causal) not in (bool, str)
        or not (softmax_scale is None or type(softmax_scale) is float)
    ):  # fmt: skip
        return None
    if window is not None:
        window = [-1 if side is None else side for side in sides(window)]
    if type(causal) is bool:
        causal = "bottom_right" if causal else ""
    if layout == "bshd":
        return torch.ops.sartor.plain(q, k, v, softmax_scale, softcap, causal, window, kernel)[0]  # type: ignore[no-any-return]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out: Tensor = torch.ops.sartor.plain(q, k, v, softmax_scale, softcap, causal, window, kernel)[0]
    return out.transpose(1, 2)


def call_of(q: Tensor, k: Tensor, v: Tensor, scale: Any, softcap: float, causal: str, window: Any, kernel: str) -> Call:
    """The call that the operators' arguments say."""
    window = None if window is None else tuple(window)
    return Call(q, k, v, causal=causal or False, window=window, softmax_scale=scale, softcap=softcap, kernel=kernel)


def _found(q: Tensor, k: Tensor, v: Tensor, scale: Any, softcap: Any, causal: str, window: Any, kernel: str) -> Any:
    """How such a call is computed; None of one whose plan needs more than q, k and v as they are."""
    tensors, twice = each_once((q, k, v))
    options = (
        "plain", twice, scale, softcap, causal, None if window is None else tuple(window), kernel,
        q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15, torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    key = q.numel(), k.numel(), *options
    seen: Any = ops.PREPARED.get(key, ())
    for same, work in seen:
        if same(*tensors):
            return work
    work = work_of(call_of(q, k, v, scale, softcap, causal, window, kernel), options)
    same = guard(tensors)
    ops.PREPARED.add(key, ((same, work), *seen[: ALIKE - 1]))
    return work


def _placed(t: Tensor, like: Tensor) -> Tensor:
    """In the memory order that the fakes promise of what goes with `like`."""
    return t.transpose(1, 2).contiguous().transpose(1, 2) if heads_outermost(like) else t.contiguous()


def _empty(like: Tensor, dim: Any) -> Tensor:
    """What `_placed` gives, with another head dim."""
    b, s, h = like.shape[:3]
    if heads_outermost(like):
        return like.new_empty((b, h, s, dim)).transpose(1, 2)
    return like.new_empty((b, s, h, dim))


@torch.library.impl(_LIBRARY, "plain_forward", "CompositeExplicitAutograd")
def _forward(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    work = _found(q, k, v, *settings)
    if work is None:
        return ops._attention(*ops.as_operator_arguments(call_of(q, k, v, *settings)))  # type: ignore[no-any-return]
    out, lse = work.followed(q, k, v)
    return _placed(out, q), lse


@torch.library.impl(_LIBRARY, "plain_backward", "CompositeExplicitAutograd")
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *settings: Any
) -> tuple[Tensor, ...]:
    work = _found(q, k, v, *settings)
    if work is None:
        arguments = ops.as_operator_arguments(call_of(q, k, v, *settings))
        found = ops._attention_backward(dout, None, out, lse, False, [], *arguments)[:3]
    else:
        # hooks may have moved them off 16 bytes
        out, lse = (t.clone() if t.data_ptr() & 15 else t for t in (out, lse))
        work.layouts = work.layouts or tuple(map(ops._layout, (q, k, v, out, lse)))
        found = work.backward(dout, q, k, v, out, lse)
    return tuple(map(_placed, found, (q, k, v)))


@torch.library.register_fake("sartor::plain_forward", lib=_LIBRARY)
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    Problem.of(call_of(q, k, v, *settings))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide(q.dtype))
    return _empty(q, v.shape[3]), lse


@torch.library.register_fake("sartor::plain_backward", lib=_LIBRARY)
def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(_empty(t, t.shape[3]) for t in (q, k, v))


class _Plain(torch.autograd.Function):
    """Autograd's part."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.sartor.plain_forward(q, k, v, *settings)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = settings
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
        saved, settings = ctx.saved_tensors, ctx.settings
        found = once(lambda: torch.ops.sartor.plain_backward(dout, *saved, *settings), dout, *saved[:3])
        return *found, *[None] * len(settings)


@torch.library.impl(_LIBRARY, "plain", "Autograd")
def _plain(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Any:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Plain.apply(q, k, v, *settings)
    return torch.ops.sartor.plain_forward(q, k, v, *settings)


_LIBRARY.impl("plain", lambda *args: torch.ops.sartor.plain_forward(*args), "CompositeExplicitAutograd")
for _name in ("plain_forward", "plain_backward"):
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")


@register_flop_formula(torch.ops.sartor.plain_forward)
def _forward_flops(q: Any, k: Any, v: Any, *settings: Any, out_shape: Any = None, **_: Any) -> int:
    """Useful FLOPs of the forward."""
    return ops.useful_flops(q, k, v, settings[2])


@register_flop_formula(torch.ops.sartor.plain_backward)
def _backward_flops(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *settings: Any, **_: Any) -> int:
    """Useful FLOPs of the backward: 2.5 times the forward's."""
    return int(2.5 * ops.useful_flops(q, k, v, settings[2]))
