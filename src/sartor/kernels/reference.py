"""The definition: attention with the whole score matrix in memory, any device, every feature, float64-capable.

    s = score(softmax_scale * q k^T)      on the keys the mask keeps, -inf elsewhere
    out = softmax(s, sinks) v             a row with no key is 0
    lse = log(sum(exp(s)) + exp(sink))    natural log; -inf for a row with neither key nor sink

With dropout, what multiplies v are the weights of the pairs that `dropout.kept` keeps, scaled; lse is as without.

A key that a query does not attend to contributes nothing to it, not even when it is NaN or infinite; `attended`
is where that is said. The backward is written out rather than left to autograd because 0 * NaN is NaN there.
"""

from __future__ import annotations

from typing import Any

import torch

from sartor.features import DROPOUT, DROPOUT_PART, DROPOUT_STEPS, DTYPES, GENERAL, GRADIENTS, WIDE_OUT
from sartor.kernels import dropout
from sartor.kernels.algebra import add_to_table, attended, new_tables, sink_gradient, working_dtype
from sartor.kernels.spec import Gradients, KernelSpec, Operands, Plan, Saved
from sartor.mods.core import index_tensors
from sartor.mods.expr import evaluate
from sartor.problem import Problem

FEATURES = GENERAL | DTYPES | {WIDE_OUT, DROPOUT, DROPOUT_PART, DROPOUT_STEPS}


def heads_first(x: Operands, p: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as (b, hq, seqlen, dim) in the working dtype, key heads repeated for their group."""
    dtype = working_dtype(p)
    q, k, v = (t.transpose(1, 2).to(dtype) for t in (x.q, x.k, x.v))
    return q, k.repeat_interleave(p.group, 1), v.repeat_interleave(p.group, 1)


def symbols(p: Problem, device: torch.device) -> dict[str, torch.Tensor]:
    """b, h, q and kv, broadcastable to the scores."""
    found = index_tensors(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv, device)
    return dict(zip(("b", "h", "q", "kv"), found, strict=True))


def scores(p: Problem, x: Operands, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Scores with -inf where masked, the mask, and a function giving d(raw score) from d(score)."""
    raw = (q @ k.transpose(-1, -2)) * p.softmax_scale  # (b, h, sq, skv)
    at = symbols(p, raw.device)
    keep = torch.ones((), dtype=torch.bool, device=raw.device)
    if p.program.keep is not None:
        keep = torch.as_tensor(evaluate(p.program.keep, at, x.aux, raw.dtype), device=raw.device)
    keep = keep.expand(raw.shape)
    s, slope = raw, None
    if p.program.score is not None and p.program.dscore is not None:
        s = evaluate(p.program.score, at | {"s": raw}, x.aux, raw.dtype).to(raw.dtype)
        slope = evaluate(p.program.dscore, at | {"s": raw}, x.aux, raw.dtype)
    return torch.where(keep, s, -torch.inf), keep, slope


def normalizer(x: Operands, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's highest logit, 0 without one, and the sum of exponentials relative to it, with the sinks'."""
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:3], 1), -torch.inf)
    sink = None if x.sinks is None else x.sinks.to(s.dtype).view(1, -1, 1, 1)
    top = top if sink is None else torch.maximum(top, sink)
    base = torch.where(top == -torch.inf, 0, top)
    return base, torch.exp(s - base).sum(-1, keepdim=True) + (0 if sink is None else torch.exp(sink - base))


def weights(x: Operands, s: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(s) with the sinks in the denominator, 0 where masked, and lse."""
    base, total = normalizer(x, s)
    p = torch.exp(s - base) / torch.where(total == 0, 1, total)
    return torch.where(keep, p, 0), (base + torch.log(total))[..., 0]


def after_dropout(p: Problem, x: Operands, weights: torch.Tensor) -> torch.Tensor:
    """Weights (b, h, sq, skv), or gradients of them, after dropout."""
    if x.seed is None:
        return weights
    whole = (slice(0, n) for n in weights.shape)
    return dropout.applied(p.dropout_p, weights, dropout.kept(p.dropout_p, x.seed, *whole))


class Reference(KernelSpec):
    """See the module."""

    name = "reference"
    family = "reference"
    backwards = ("reference_backward",)
    features = FEATURES | GRADIENTS

    def run(self, plan: Plan, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse."""
        p = plan.problem
        q, k, v = heads_first(x, p)
        s, keep, _ = scores(p, x, q, k)
        probabilities, lse = weights(x, s, keep)
        out = attended(after_dropout(p, x, probabilities), v, keep)
        return out.transpose(1, 2).to(p.out_dtype), lse.to(working_dtype(p))


class ReferenceBackward(KernelSpec):
    """Gradients by the textbook: dP = dO V^T, dS = P (dP - delta), dQ = dS K, dK = dS^T Q, dV = P^T dO; dropout is of
    the P in dV, and of dP."""

    name = "reference_backward"
    family = "reference"
    features = FEATURES | GRADIENTS

    def run(self, plan: Plan, x: Operands, saved: Saved) -> Gradients:
        """Gradients, from the inputs alone: what the forward saved is recomputed."""
        p = plan.problem
        q, k, v = heads_first(x, p)
        s, keep, slope = scores(p, x, q, k)
        probabilities, _ = weights(x, s, keep)
        dout = saved.dout.transpose(1, 2).to(q.dtype)
        used = after_dropout(p, x, probabilities)
        out = attended(used, v, keep)
        delta = (dout * out).sum(-1)
        if saved.dlse is not None:
            delta = delta - saved.dlse.to(q.dtype)
        dp = after_dropout(p, x, dout @ v.transpose(-1, -2))
        ds = torch.where(keep, probabilities * (dp - delta[..., None]), 0)
        draw = (ds if slope is None else torch.where(keep, ds * slope, 0)) * p.softmax_scale
        dq = attended(draw, k, keep)
        dk = attended(draw.transpose(-1, -2), q, keep.transpose(-1, -2))
        dv = attended(used.transpose(-1, -2), dout, keep.transpose(-1, -2))
        dk, dv = (t.reshape(p.batch, p.heads_kv, p.group, *t.shape[2:]).sum(2) for t in (dk, dv))
        dq, dk, dv = (t.transpose(1, 2).to(p.dtype) for t in (dq, dk, dv))
        dbias = None if p.bias_shape is None else ds.sum_to_size(p.bias_shape)
        dtables = new_tables(p, q.device)
        if dtables:
            at = symbols(p, q.device) | {"s": (q @ k.transpose(-1, -2)) * p.softmax_scale}
            for (i, _), total in zip(p.table_shapes, dtables, strict=True):
                add_to_table(total, p.program.rises(i), ds, at, x.aux)
        base, total = (t[..., 0] for t in normalizer(x, s))
        return Gradients(dq, dk, dv, dbias, sink_gradient(x, base, delta, 1 / total), dtables)


SPEC = Reference()
BACKWARD_SPEC = ReferenceBackward()
