"""Code that imports `flash_attn` or `flash_attn_interface` gets Sartor's functions: `install()`, before it does."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from sartor.compat import flash_attn as two
from sartor.compat import flash_attn_3 as three

Tensor = torch.Tensor
VERSION = "2.8.3+sartor"  # of flash-attn, whose functions these are
_REPLACED: dict[str, ModuleType | None] = {}  # what was there before, by name


def install(force: bool = False) -> None:
    """Put the modules `flash_attn`, `flash_attn.flash_attn_interface`, `flash_attn.bert_padding` (flash-attn 2) and
    `flash_attn_interface` (FlashAttention-3) into `sys.modules`.

    Args:
        force: also where the real ones are installed. Names that were imported from them before stay theirs.

    Raises:
        RuntimeError: a real one is installed, and `force` is False.
    """
    if _REPLACED:
        return
    found = [name for name in ("flash_attn", "flash_attn_interface") if _is_installed(name)]
    if found and not force:
        raise RuntimeError(f"{' and '.join(found)} must not be installed, or force be True: got a package of that name")
    for module in _modules():
        _REPLACED[module.__name__] = sys.modules.get(module.__name__)
        sys.modules[module.__name__] = module


def uninstall() -> None:
    """Take them out again, and put back what was there."""
    for name, module in _REPLACED.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
    _REPLACED.clear()


def _is_installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _modules() -> list[ModuleType]:
    names = [n for n in vars(two) if n.startswith("flash_attn_") and n.endswith(("_func", "_with_kvcache"))]
    functions = {n: getattr(two, n) for n in names}
    interface = _module("flash_attn.flash_attn_interface", **functions)
    padding = _module("flash_attn.bert_padding", **{f.__name__: f for f in PADDING})
    package = _module("flash_attn", __version__=VERSION, flash_attn_interface=interface, bert_padding=padding)
    package.__dict__.update(functions, __path__=[])
    names = [n for n in vars(three) if n.startswith("flash_attn_") and n in functions]
    return [package, interface, padding, _module("flash_attn_interface", **{n: getattr(three, n) for n in names})]


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name, "Sartor's functions with the signatures of flash-attn.")
    module.__spec__ = ModuleSpec(name, None, origin="sartor", is_package=name == "flash_attn")
    module.__dict__.update(contents)
    return module


# ---- flash_attn.bert_padding


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows input[indices]: (n, ...) of (rows, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with `values` (n, ...) in the rows `indices`."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens that a mask marks, one after another.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: bool or integers (batch, seqlen), nonzero = a token.
        unused_mask: the same, of tokens that keep a place but are not used.

    Returns:
        The tokens (total, ...), their places (total,) in (batch * seqlen), cu_seqlens int32 (batch + 1,), the longest
        sequence's length, and the used tokens of each sequence int32 (batch,). Waits for the device.
    """
    kept = attention_mask.bool() if unused_mask is None else attention_mask.bool() | unused_mask.bool()
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.bool().sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, ends, int(lengths.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...) from the tokens (total, ...) and their places, zero elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *hidden_states.shape[1:])


PADDING = (index_first_axis, index_put_first_axis, unpad_input, pad_input)
