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
from sartor.checks import PLAIN, dispatch_modes, sides, watched
from sartor.guards import each_once, guard
from sartor.kernels.native import Single
from sartor.kernels.small import Small
from sartor.node import Native
from sartor.problem import Call, extra_key, tensors_read

Tensor = torch.Tensor
ALIKE = 8  # calls kept of one key, which differ in shapes, strides, dtypes, what requires a gradient


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, mask: Any, score: Any, alibi_slopes: Any, causal: Any, window: Any,
    softmax_scale: Any, softcap: float, layout: Any, kernel: Any,
) -> Tensor | None:  # fmt: skip
    """out, in `layout`, or None of a call that goes the way of all others: whatever is wrong with it is said there."""
    if q.__class__ not in PLAIN or causal.__class__ not in (bool, str):
        return None
    if dispatch_modes():
        return None
    tensors: tuple[Any, ...] = q, k, v
    extras: tuple[Any, ...] = ()
    on_gpu, alone = q.is_cuda, bias is None and mask is None and score is None and alibi_slopes is None
    if not (bias is None and alibi_slopes is None if on_gpu else q.is_cpu):
        return None
    try:
        if on_gpu:
            extras = _place(q, k, v)
            if not alone:
                extras += _of_numbers(mask), _of_numbers(score)
        elif not alone:
            for x in (bias, mask, score, alibi_slopes):
                extras += (x if x is None else _key(x),)
                if x.__class__ in PLAIN:
                    tensors += (x,)
        twice: tuple[int, ...] = ()
        if q is k or q is v or k is v:
            tensors, twice = each_once(tensors)
        key = (
            q.numel(), k.numel(), causal, None if window is None else sides(window), softmax_scale,
            softmax_scale.__class__, softcap, layout, kernel, extras, q.is_nested or k.is_nested or v.is_nested, twice,
        )  # fmt: skip
        seen: Any = ops.PREPARED.get(key, ())
    except (TypeError, AttributeError, RuntimeError, ValueError):  # said by name in the long way
        return None
    for same, plain in seen:  # noqa: B007 - one is broken off with; a nested tensor here would end the process
        if same(*tensors):
            break
    else:
        call = Call(
            q, k, v, bias, mask, score, alibi_slopes, None, causal, window, softmax_scale, softcap, kernel=kernel,
            layout=layout,
        )  # fmt: skip
        plain = _learned(call, tensors, key, seen)
    if plain is None:
        return None
    if on_gpu:
        return plain.attend(q, k, v)  # type: ignore[no-any-return]
    read = [] if alone else tensors_read(mask, score, alibi_slopes, bias, q.dtype)
    if layout == "bhsd":
        return plain.attend(q, k, v, read)  # type: ignore[no-any-return]
    out = plain.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), read)
    return None if out is None else out.transpose(1, 2)


def _learned(call: Call, tensors: tuple[Any, ...], key: Any, seen: tuple[Any, ...]) -> Any:
    """How such a call is computed, kept for the next one; None of one that goes the way of all others."""
    on_gpu = call.q.is_cuda
    if watched() or not all(t.__class__ in PLAIN and (t.is_cuda if on_gpu else t.is_cpu) for t in tensors):
        return None
    if on_gpu:
        plain: Any = Native.of(call, key[2:])
    else:
        prepared = ops.prepare(call)
        plan = prepared.forward, prepared.template
        plain = Single.of(*plan) or Small.of(*plan)
    same = guard(tensors)
    ops.PREPARED.add(key, ((same, plain), *seen[: ALIKE - 1]))
    return plain


def _place(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """What else a plan for a GPU depends on: alignment, and what PyTorch was told of determinism."""
    return q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15, torch.are_deterministic_algorithms_enabled()


def _of_numbers(mod: Any) -> Any:
    """What names a mask or score that reads no tensor; for anything else this raises."""
    if mod is None:
        return None
    if mod.tensors:
        raise TypeError
    return mod.handle


def _key(x: Any) -> Any:
    """Of an argument besides q, k and v; what is unusual raises. Guards tell of a tensor what else there is to tell."""
    if x.__class__ in PLAIN and not (x.requires_grad or x.is_nested):
        return x.numel()
    if isinstance(x, Tensor) or any(t.requires_grad for t in x.tensors):
        raise TypeError
    return extra_key(x)
