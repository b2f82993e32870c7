"""Kernels of ours for `torch.nn.attention.varlen.varlen_attn`, by the registry of its operators (torch 2.10)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from sartor import ops
from sartor.api import attention
from sartor.mods import packed
from sartor.problem import Call

Tensor = torch.Tensor
DEVICES = ("cpu", "cuda")
_OFF = ExitStack()  # open while our kernels are registered and turned off
_KNOWN: list[Any] = []  # the operators that have our kernels


def enable() -> ExitStack:
    """Let varlen_attn use our kernels until the stack is closed."""
    global _OFF
    try:
        from torch.nn.attention import varlen
    except ImportError:  # an older torch
        return ExitStack()
    if _KNOWN:
        _OFF.close()
    else:
        _register(varlen._varlen_attn, _forward)
        _register(varlen._varlen_attn_backward, _backward)
    stack = ExitStack()
    stack.callback(_disable)
    return stack


def _disable() -> None:
    global _OFF
    _OFF = ExitStack()
    for operator in _KNOWN:
        for device in DEVICES:
            _OFF.enter_context(operator.set_kernel_enabled(device, enabled=False))


def _register(operator: Any, kernel: Any) -> None:
    pytorchs = operator._init_fn

    def run(*args: Any, **kwargs: Any) -> Any:
        return kernel(pytorchs, *args, **kwargs)

    for device in DEVICES:
        operator.register_kernel(device, run)
    _KNOWN.append(operator)


def _mask(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, is_causal: bool, window: Any) -> Any:
    sides = None if window is None else (window[0], window[1])
    return packed(cu_q, cu_k, q.shape[0], k.shape[0], is_causal, sides)


def _forward(
    pytorchs: Any, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Any, max_q: int, max_k: int,
    is_causal: bool = False, scale: float | None = None, window_size: Any = None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out (tokens, heads, dim), lse (heads, tokens), and the state of no random numbers."""
    pages = rest[1:3]  # seqused_k and block_table, after enable_gqa
    if cu_seq_k is None or any(x is not None for x in pages):
        found: tuple[Tensor, Tensor, Tensor] = pytorchs(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size, *rest
        )
        return found
    mask = _mask(query, key, cu_seq_q, cu_seq_k, is_causal, window_size)
    out, lse = attention(query[None], key[None], value[None], mask=mask, softmax_scale=scale, return_lse=True)
    return out[0].contiguous(), lse[0].contiguous(), torch.zeros(2, dtype=torch.uint64, device=query.device)


def _backward(
    pytorchs: Any, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, is_causal: bool, rng_state: Tensor,
    scale: float | None = None, window_size: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv of what `_forward` gave: what it left to PyTorch has none."""
    mask = _mask(query, key, cu_seq_q, cu_seq_k, is_causal, window_size)
    call = Call(query[None], key[None], value[None], mask=mask, softmax_scale=scale)
    found = torch.ops.sartor.attention_backward(
        grad_out[None], None, out[None], lse[None], False, [], *ops.as_operator_arguments(call)
    )
    return found[0][0], found[1][0], found[2][0]
