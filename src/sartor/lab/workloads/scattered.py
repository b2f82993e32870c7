"""Masks as FlexAttention's users write them: NATTEN and dilated, of which a query sees no one interval of keys, and a
window by head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SIDE = 64  # keys of a dilated window to each side
ROWS = 256  # of a mask that are made at a time


def natten(kernel: int, seqlen: int) -> Callable[..., Any]:
    """A query of a square image sees the kernel * kernel pixels around it, moved inside at the edges (Hassani et al.
    2023). kernel is odd and at most the image's width."""
    width, half = math.isqrt(seqlen), kernel // 2

    def keep(b: Any, h: Any, q: Any, kv: Any) -> Any:
        x, y = (q // width).clamp(half, width - 1 - half), (q % width).clamp(half, width - 1 - half)
        return ((x - kv // width).abs() <= half) & ((y - kv % width).abs() <= half)

    return keep


def dilated(step: int) -> Callable[..., Any]:
    """A query sees every step-th key, SIDE of them to each side (Beltagy et al. 2020, section 3.1)."""

    def keep(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ((q - kv).abs() <= SIDE * step) & ((q - kv) % step == 0)

    return keep


def by_head(windows: torch.Tensor) -> Callable[..., Any]:
    """A query of head h sees windows[h] keys to each side."""

    def keep(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() <= windows[h]

    return keep


def refuse(kernel: int, lengths: tuple[int, int], text: str) -> None:
    """Raise ValueError where a problem has no image for the mask `nattenN`."""
    width = math.isqrt(lengths[0])
    if lengths != (width * width, width * width):
        raise ValueError(f"mask nattenN needs as many queries as keys, a square number, got {lengths} with {text!r}")
    if kernel % 2 == 0 or kernel > width:
        raise ValueError(f"mask nattenN needs an odd N of at most the image's width {width}, got {text!r}")


def hull(keep: Callable[..., Any], sq: int, skv: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Of each query the interval [lo, hi) of keys outside which it sees none; and how many pairs there are."""
    kv, found = torch.arange(skv, device="cpu"), []
    for first in range(0, sq, ROWS):
        seen = keep(0, 0, torch.arange(first, min(first + ROWS, sq), device="cpu")[:, None], kv).to(torch.uint8)
        found.append(torch.stack([seen.argmax(1), skv - seen.flip(1).argmax(1), seen.sum(1)]))
    lo, hi, count = torch.cat(found, 1)
    return lo.numpy(), torch.where(count > 0, hi, lo).numpy(), int(count.sum())
