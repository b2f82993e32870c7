"""PyTorch's own attention by Sartor: `activate()`, and unmodified code that calls it uses Sartor.

`torch.nn.functional.scaled_dot_product_attention` is replaced, and with it what `nn.MultiheadAttention` (with
`need_weights=False`), `nn.TransformerEncoderLayer` and models call; `torch.nn.attention.varlen.varlen_attn` gets other
kernels by torch's own registry of them. Jagged nested tensors are packed sequences here. What Sartor refuses goes to
PyTorch, with a warning that says why, once for each reason.
"""

from __future__ import annotations

import re
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _disabled_torch_function_impl
from torch.fx import Proxy
from torch.jit._builtins import _register_builtin
from torch.overrides import _get_current_function_mode_stack, has_torch_function
from torch.utils._device import DeviceContext

from sartor.api import attention
from sartor.compat.torch_sdpa import scaled_dot_product_attention as by_sartor
from sartor.integrations import varlen
from sartor.mods import packed
from sartor.problem import MAX_DIM

Tensor = torch.Tensor
PYTORCHS = torch._C._nn.scaled_dot_product_attention
DIGITS = re.compile(r"\d+")


@dataclass
class _State:
    active: bool = False
    fastpath: bool = True  # of nn.MultiheadAttention, before
    varlen: ExitStack = field(default_factory=ExitStack)
    said: set[str] = field(default_factory=set)


_STATE = _State()


class Activation:
    """Of `activate()`: as a context manager, it deactivates at the end what was not active before."""

    def __init__(self, was_active: bool) -> None:
        self._was_active = was_active

    def __enter__(self) -> Activation:
        return self

    def __exit__(self, *exception: Any) -> None:
        if not self._was_active:
            deactivate()


def activate() -> Activation:
    """Make PyTorch's attention use Sartor, from now on or for a `with` block, in all threads.

    Code that bound PyTorch's function to a name of its own before (`from torch.nn.functional import
    scaled_dot_product_attention`) keeps it. The fused inference path of `nn.MultiheadAttention` and
    `nn.TransformerEncoderLayer`, which calls no Python function, is turned off meanwhile.
    """
    found = Activation(_STATE.active)
    if not _STATE.active:
        _STATE.active, _STATE.fastpath = True, torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
        _register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")  # to torch.jit.script
        _STATE.varlen = varlen.enable()
    return found


def deactivate() -> None:
    """PyTorch's attention as it was."""
    if _STATE.active:
        _STATE.active = False
        torch.backends.mha.set_fastpath_enabled(_STATE.fastpath)
        torch.nn.functional.scaled_dot_product_attention = PYTORCHS
        _STATE.varlen.close()


def is_active() -> bool:
    """Whether PyTorch's attention is Sartor's now."""
    return _STATE.active


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's function, by Sartor where it can."""
    if isinstance(query, Proxy) or _taken():  # while torch.fx traces: PyTorch's function is what its graph is to name
        given = query, key, value, attn_mask, dropout_p, is_causal
        return PYTORCHS(*given, scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]
    reason = _why_not(query, key, value)
    if not reason:
        try:
            if getattr(query, "is_nested", False):
                return _jagged(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            return by_sartor(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        except NotImplementedError as error:
            reason = str(error)
    _say(reason)
    if hasattr(attn_mask, "variant"):  # PyTorch's own CausalBias asks for the function that is replaced
        attn_mask = attn_mask._materialize(query.device)  # type: ignore[union-attr]
    found: Tensor = PYTORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return found


def _taken() -> bool:
    """Whether a mode takes calls of PyTorch's function elsewhere."""
    return any(getattr(mode, "takes_attention", False) for mode in _get_current_function_mode_stack())


def _why_not(query: Tensor, key: Tensor, value: Tensor) -> str:
    """What is known before; a call in which an error is raised and caught cannot be compiled as a whole."""
    three = query, key, value
    if not all(isinstance(t, Tensor) and t.dim() for t in three):
        return ""  # which is said by name
    nested = [t.is_nested for t in three]
    if any(nested) and not (all(nested) and all(t.layout == torch.jagged for t in three)):
        return "query, key and value must be dense tensors, or jagged nested ones all"
    if max(t.shape[-1] for t in three) > MAX_DIM:
        return f"head dims must be at most {MAX_DIM}, got {query.shape[-1]} and {value.shape[-1]}"
    if any(nested) or not has_torch_function(three):
        return ""
    kinds = [type(t) for t in three]
    if any(kind is not Tensor and kind.__torch_function__ is not _disabled_torch_function_impl for kind in kinds):
        return f"query, key and value must be plain tensors, got {', '.join(kind.__name__ for kind in kinds)}"
    modes = [type(mode).__name__ for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]
    return f"a mode is to see calls of PyTorch's functions, got {', '.join(modes)}" if modes else ""


@torch.compiler.assume_constant_result  # which says it while a graph is made, and breaks none
def _say(reason: str) -> bool:
    """Warn, if this was not said before; whether it was not."""
    kind = DIGITS.sub("#", reason)
    if kind in _STATE.said:
        return False
    _STATE.said.add(kind)
    warnings.warn(f"PyTorch computes this attention, as Sartor does not: {reason}", stacklevel=3)
    return True


def _jagged(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    """Nested tensors (batch, heads, sequences' lengths, dim), which lie in memory as packed sequences."""
    if attn_mask is not None:
        raise NotImplementedError("attn_mask must be None for nested tensors, got a tensor")
    flat = [t.transpose(1, 2) for t in (query, key, value)]  # (batch, lengths, heads, dim)
    if any(t._ragged_idx != 1 or t.dim() != 4 for t in flat) or any(t.lengths() is not None for t in flat):
        raise NotImplementedError("nested tensors must be (batch, heads, lengths, dim) without holes")
    if is_causal and query.shape[2] != key.shape[2]:
        raise NotImplementedError("nested tensors must have equal lengths when is_causal is True")
    if key.shape[2] != value.shape[2]:
        raise NotImplementedError("nested key and value must have equal lengths, got lengths that differ")
    if not gqa and query.shape[1] != key.shape[1]:
        raise NotImplementedError(
            f"enable_gqa must be True for heads that differ, got heads {query.shape[1]} and {key.shape[1]}"
        )
    q, k, v = (t.values() for t in flat)
    mask = packed(flat[0].offsets(), flat[1].offsets(), q.shape[0], k.shape[0], bool(is_causal))
    out = attention(q[None], k[None], v[None], mask=mask, softmax_scale=scale, dropout_p=dropout_p)
    assert isinstance(out, Tensor)
    found = torch.nested.nested_tensor_from_jagged(
        out[0], flat[0].offsets(), min_seqlen=query._maybe_min_seqlen, max_seqlen=query._maybe_max_seqlen
    )
    return found.transpose(1, 2)
