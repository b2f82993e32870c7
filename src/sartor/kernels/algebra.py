"""Pieces of the mathematics that every kernel written in torch shares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from sartor.kernels.spec import Operands
from sartor.mods.expr import evaluate, places
from sartor.mods.program import Rise
from sartor.problem import Problem, wide


def working_dtype(p: Problem) -> torch.dtype:
    """float64 for float64 inputs, else float32: that of the products, of the softmax and of lse."""
    return wide(p.dtype)


def finite(t: torch.Tensor) -> bool:
    """Whether all of it is: by its sum, which is fast, element by element only where that is not."""
    total = t.sum() if t.dtype == torch.float32 else t.sum(dtype=torch.promote_types(t.dtype, torch.float32))
    return math.isfinite(total.item()) or bool(t.isfinite().all())


FEW = 2**12  # elements, from which on a sum takes less time than a comparison


def without_nan(t: torch.Tensor) -> bool:
    """Whether none of it is NaN; False too where something is infinite and there is much of it."""
    return t.equal(t) if t.numel() <= FEW else finite(t.detach())


LARGE = 4096.0  # of an lse: in float32 its rounding is worth 2^-12 of each weight exp(score - lse)


def resolved(lse: torch.Tensor, largest: float = LARGE) -> bool:
    """Whether every row's lse is finite and no larger than that, so that weights can be recomputed from it."""
    least, most = torch.aminmax(lse)
    return max(-least.item(), most.item()) <= largest


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


def new_tables(p: Problem, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Zeros, to which the gradients of tables are added."""
    return tuple(torch.zeros(shape, dtype=working_dtype(p), device=device) for _, shape in p.table_shapes)


def add_to_table(
    total: torch.Tensor, rises: tuple[Rise, ...], ds: torch.Tensor, symbols: Mapping[str, Any], aux: tuple[Any, ...]
) -> None:
    """total += what comes of ds, the gradient of a tile of scores (b, hq, rows, keys), by the places they read.

    `total` is a table; or, of a value at the position, its part for that tile.
    """
    for read, rise in ((r.read, r.rise) for r in rises):
        slope = evaluate(rise, symbols, aux, ds.dtype)
        reached = torch.where(ds != 0, ds * slope, 0)  # where nothing comes of it, whatever the slope
        if read.op == "aux":
            total += reached.sum_to_size(total.shape)
            continue
        at = torch.broadcast_tensors(*places(total, [evaluate(i, symbols, aux, ds.dtype) for i in read.args[1:]]))
        shape = (1,) * (ds.dim() - at[0].dim()) + tuple(at[0].shape)
        total.index_put_(tuple(i.expand(shape) for i in at), reached.sum_to_size(shape), accumulate=True)


def sink_gradient(x: Operands, lse: torch.Tensor, delta: torch.Tensor, gain: torch.Tensor | None = None) -> Any:
    """d sinks (hq,) = -sum over batch and queries of exp(sink - lse) * delta; lse and delta are (b, hq, sq).

    With `gain`, `lse` is a row's highest logit instead, and `gain` 1 over its sum of exponentials relative to that.
    """
    if x.sinks is None:
        return None
    share = torch.exp(x.sinks.to(lse.dtype).view(1, -1, 1) - lse)
    share = share if gain is None else share * gain
    return -torch.where(share > 0, share * delta, 0).sum((0, 2))
