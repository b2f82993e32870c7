"""Pieces of the mathematics that every kernel written in torch shares."""

from __future__ import annotations

import math
from typing import Any

import torch

from sartor.kernels.spec import Operands
from sartor.problem import Problem, wide


def working_dtype(p: Problem) -> torch.dtype:
    """float64 for float64 inputs, else float32: that of the products, of the softmax and of lse."""
    return wide(p.dtype)


def finite(t: torch.Tensor) -> bool:
    """Whether all of it is: by its sum, which is fast, element by element only where that is not."""
    total = t.sum(dtype=torch.promote_types(t.dtype, torch.float32))
    return math.isfinite(total.item()) or bool(t.isfinite().all())


def attended(weights: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """weights @ x, in which x[j] reaches row i only where keep[i, j]; weights are 0 where keep is False."""
    known = x.isfinite()
    result = weights @ torch.where(known, x, 0)
    if known.all():
        return result
    return spoiled(result, *(reach(keep, kind) for kind in (x.isnan(), x == torch.inf, x == -torch.inf)))


def reach(keep: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
    """Bool (..., rows, columns): whether a row attends to any key marked in that column."""
    return (keep.float() @ marked.float()) > 0


def spoiled(x: torch.Tensor, nan: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """x where nothing else was seen; inf, -inf or NaN where they were, and NaN where inf met -inf or x was NaN."""
    found = torch.where(high, torch.inf, torch.where(low, -torch.inf, x))
    return torch.where(nan | (high & low) | x.isnan(), torch.nan, found)


def sink_gradient(x: Operands, lse: torch.Tensor, delta: torch.Tensor) -> Any:
    """d sinks (hq,) = -sum over batch and queries of exp(sink - lse) * delta; lse and delta are (b, hq, sq)."""
    if x.sinks is None:
        return None
    share = torch.exp(x.sinks.to(lse.dtype).view(1, -1, 1) - lse)
    return -torch.where(share > 0, share * delta, 0).sum((0, 2))
