"""Calls that are found by what tells them apart before a `Call` is made of them, as the bookkeeping of all others would
take longer than a small problem does: on a CPU those that are one call of PyTorch's kernel, or have few scores; on a
GPU those that read q, k and v alone.

What is found here was validated and planned as any other call, by an equal one. Whatever is unusual is left to that
way: a compiler or a mode that wants to see an operator, hooks, a result to be repaired, an argument that is wrong.
"""

from __future__ import annotations

from typing import Any

import torch

from sartor import ops
from sartor.checks import PLAIN, sides, watched
from sartor.kernels.native import Single
from sartor.kernels.small import Small
from sartor.node import Native
from sartor.problem import Call, extra_key, tensors_read

Tensor = torch.Tensor
_NOT_SEEN = object()


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, mask: Any, score: Any, alibi_slopes: Any, causal: Any, window: Any,
    softmax_scale: Any, softcap: float, layout: Any, kernel: Any,
) -> Tensor | None:  # fmt: skip
    """out, in `layout`, or None of a call that goes the way of all others: whatever is wrong with it is said there."""
    if (
        watched() or q.__class__ not in PLAIN or k.__class__ not in PLAIN or v.__class__ not in PLAIN
        or causal.__class__ not in (bool, str)
    ):  # fmt: skip
        return None
    extras: Any = None
    on_gpu, alone = q.is_cuda, bias is None and mask is None and score is None and alibi_slopes is None
    if not (alone and k.is_cuda and v.is_cuda if on_gpu else q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    try:
        if on_gpu:
            extras = _place(q, k, v)
        elif not alone:
            extras = _key(bias), _key(mask), _key(score), _key(alibi_slopes)
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, causal,
            None if window is None else sides(window), softmax_scale, softmax_scale.__class__, softcap, layout, kernel,
            extras,
        )  # fmt: skip
        found: Any = ops.PREPARED.get(key, _NOT_SEEN)
    except (TypeError, AttributeError, RuntimeError, ValueError):  # said by name in the long way
        return None
    if found is _NOT_SEEN:
        call = Call(
            q, k, v, bias, mask, score, alibi_slopes, None, causal, window, softmax_scale, softcap, kernel=kernel,
            layout=layout,
        )  # fmt: skip
        prepared = ops.prepare(call)
        plan = prepared.forward, prepared.template
        found = Native.of(prepared, layout, q.device) if on_gpu else Single.of(*plan) or Small.of(*plan)
        ops.PREPARED.add(key, found)
    if found is None:
        return None
    if on_gpu:
        return found.attend(q, k, v)  # type: ignore[no-any-return]
    read = [] if extras is None else tensors_read(mask, score, alibi_slopes, bias, q.dtype)
    plain: Single | Small = found
    if layout == "bhsd":
        return plain.attend(q, k, v, read)
    out = plain.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), read)
    return None if out is None else out.transpose(1, 2)


def _place(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """What else a plan for a GPU depends on: devices, alignment, and what PyTorch was told of determinism."""
    return (
        q.device, k.device, v.device, q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def _key(x: Any) -> Any:
    """Of an argument besides q, k and v; what is unusual raises."""
    if x is None:
        return None
    if x.__class__ in PLAIN and x.is_cpu and not x.requires_grad:
        return x.shape, x.stride(), x.dtype
    if isinstance(x, Tensor) or any(t.requires_grad for t in x.tensors):
        raise TypeError
    return extra_key(x)
