"""Checks of one argument each: the argument as what it stands for, or an error that names it, what was expected and
what came. Kept fast, since some are made on every call."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

import torch

LAYOUTS = {"bshd": "(batch, seqlen, heads, dim)", "bhsd": "(batch, heads, seqlen, dim)"}

ELSEWHERE = {  # what other libraries call it: what is meant here
    "attention_mask": "mask (bool, True = attend) or bias (float, added to the scores)",
    "attn_bias": "bias",
    "attn_mask": "mask (bool, True = attend) or bias (float, added to the scores)",
    "block_mask": "mask (a sartor.mods.Mask; sartor.integrations.flex takes flex_attention's)",
    "dropout": "dropout_p",
    "enable_gqa": "to leave it out, as k and v may have fewer heads",
    "is_causal": "causal ('top_left' for PyTorch's, where q and k differ in length)",
    "generator": "dropout_seed (numbers drawn from it)",
    "logits_soft_cap": "softcap",
    "mask_mod": "mask (a sartor.mods.Mask)",
    "return_attn_probs": "return_lse",
    "return_softmax_lse": "return_lse",
    "s_aux": "sinks",
    "scale": "softmax_scale",
    "score_mod": "score (a sartor.mods.Score)",
    "sliding_window": "window",
    "sm_scale": "softmax_scale",
}


def unexpected(function: str, given: Collection[str], known: Collection[str]) -> TypeError:
    """The error for the first of the keywords given that is not among those known."""
    name = next(n for n in given if n not in known)
    meant = ELSEWHERE.get(name) or next(iter(get_close_matches(name, known, 1)), "")
    hint = f": did you mean {meant}?" if meant else f": expected {', '.join(known)}"
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def boolean(name: str, value: Any) -> bool:
    """`value`, which must be a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}: {value!r}")
    return value


def real(name: str, value: Any) -> float:
    """`value`, which must be a real number, as a float."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}: {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite as a float, got a number beyond its range") from None


def is_integer(value: Any) -> bool:
    """Whether it is an integer of any library; a bool is none."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def at_least(name: str, value: Any, least: int) -> int:
    """`value`, which must be an integer of that size or more."""
    if not is_integer(value) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return operator.index(value)


def integers(**values: Any) -> None:
    """Each an integer, or one that a compiler has a symbol for."""
    for name, value in values.items():
        if not is_integer(value) and not isinstance(value, torch.SymInt):
            raise TypeError(f"{name} must be an integer, got {type(value).__name__}: {value!r}")


def sides(window: Any) -> tuple[int | None, int | None]:
    """(left, right) of a window, each an int >= 0, or None for unbounded, which -1 is too."""
    if type(window) is tuple and len(window) == 2:  # what most calls give
        left, right = window
        if type(left) is int and type(right) is int and left >= -1 <= right:
            return None if left == -1 else left, None if right == -1 else right
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window must be None or a pair (left, right), got {window!r}")
    left, right = window
    for side in (left, right):
        if side is None:
            continue
        if not is_integer(side):
            raise TypeError(f"window (left, right) must hold integers or None, got {window!r}")
        if side < -1:
            raise ValueError(f"window (left, right) must be >= 0, or -1 or None for unbounded, got {window!r}")
    return tuple(None if side in (None, -1) else operator.index(side) for side in window)  # type: ignore[return-value]


def known_layout(layout: Any) -> None:
    """One of LAYOUTS."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout must be {' or '.join(map(repr, LAYOUTS))}, got {layout!r}")


def dense(name: str, t: Any) -> None:
    """A tensor that lies in memory by its strides."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}: {str(t)[:60]}")
    if t.is_nested or t.layout != torch.strided:
        found = "a nested tensor" if t.is_nested else f"layout {t.layout}"
        raise TypeError(f"{name} must be a dense (strided) tensor, got {found}")


def floating(name: str, t: Any) -> None:
    """A dense tensor of floats."""
    dense(name, t)
    if not t.dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating torch.Tensor, got dtype {t.dtype}")


def of_heads(name: str, t: Any, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> None:
    """Floats of one of these shapes, on the device of q."""
    floating(name, t)
    if tuple(t.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(t.shape)}")
    if t.device != device:
        raise ValueError(f"{name} must be on the device of q, {device}, got {t.device}")


def seed(t: Any, device: torch.device) -> None:
    """The numbers that a dropout mask is made of, on the device of q."""
    dense("dropout_seed", t)
    if t.dtype != torch.int64 or t.numel() not in (1, 5, 7):
        raise ValueError(
            f"dropout_seed must be an int, or 1, 5 or 7 numbers of dtype int64, got {tuple(t.shape)} of dtype {t.dtype}"
        )
    if t.device != device:
        raise ValueError(f"dropout_seed must be on the device of q, {device}, got {t.device}")


def slopes(t: Any, heads: int, items: int, device: torch.device) -> None:
    """Slopes of ALiBi, of the heads or of each item's heads."""
    of_heads("alibi_slopes", t, ((heads,), (items, heads)), device)
    if t.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"alibi_slopes must have dtype float32 or float64, got {t.dtype}")


def slopes_without_gradient(t: Any) -> None:
    """That autograd does not follow them."""
    if isinstance(t, torch.Tensor) and t.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("alibi_slopes has no gradient here: expected requires_grad=False, got True")


dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_trace = torch._C._get_tracing_state
PLAIN = (torch.Tensor, torch.nn.Parameter)


def watched() -> bool:
    """Whether a compiler, a tracer, a dispatch mode or a transform wants to see operators."""
    return torch.compiler.is_compiling() or dispatch_modes() > 0 or _transforms() is not None or _trace() is not None


def needs_operator(t: Any) -> bool:
    """Whether something wants to see an operator: a compiler, a tracer, a dispatch mode, a tensor subclass."""
    if watched():
        return True
    return isinstance(t, torch.Tensor) and (type(t) not in PLAIN or t.is_meta)
