"""Errors against float64, on one batch item and one key head, or more that are short: the last ones, which a wrong
stride misses first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from sartor import testing
from sartor.lab.measure import providers
from sartor.lab.measure.memory import available_bytes
from sartor.lab.workloads.workload import FORWARD, Inputs, Workload

Tensors = dict[str, torch.Tensor]
FLOAT64_MATRICES = 12  # of scores, that the oracle and its error budget hold at once
SCORES_ON_GPU = 2**24  # of as many key heads as have no more than that, one at least
SCORES_ON_CPU = 2**23  # of one key head: beyond this the float64 reference takes a CPU longer than what it judges


@dataclass(frozen=True)
class Verdict:
    """Errors against float64: the worst over out, or over dq, dk, dv. `over` says which rule was broken, if one was."""

    err_rel: float
    err_max: float
    err_budget: float
    cos_sim: float
    over: str = ""
    each: dict[str, testing.Errors] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every error is within its budget."""
        return not self.over


@dataclass
class Judge:
    """The float64 answer for a slice of a problem, and that of plain PyTorch in the problem's own precision."""

    w: Workload
    x: Inputs
    exact: Tensors  # out and lse, or dq, dk, dv
    lowp: Tensors  # out, or dq, dk, dv
    magnitude: testing.Magnitudes

    @classmethod
    def make(cls, w: Workload, x: Inputs) -> Judge | None:
        """The judge of a workload; None where the slice's float64 scores would not fit easily."""
        part, small = _slice(w, x)
        scores = part.heads_q * w.seqlen_q * w.seqlen_kv
        if 8 * FLOAT64_MATRICES * scores > 0.5 * available_bytes(x.q.device):
            return None
        if x.q.device.type == "cpu" and scores > SCORES_ON_CPU:
            return None
        qkv, options = (small.q, small.k, small.v), providers.options(part, small)
        if _forward(w):
            with torch.no_grad():
                exact = dict(zip(("out", "lse"), testing.reference(*qkv, **options), strict=True))
                lowp = {"out": testing.low_precision(*qkv, **options)[0]}
            return cls(w, x, exact, lowp, testing.magnitudes(*qkv, **options))
        names = ("dq", "dk", "dv")
        exact = testing.reference_gradients(*qkv, small.dout, **options)
        lowp = testing.low_precision_gradients(*qkv, small.dout, **options)
        size = testing.magnitudes(*qkv, small.dout, **options)
        return cls(w, x, {n: exact[n] for n in names}, {n: lowp[n] for n in names}, size)

    def judge(self, attend: providers.Attend, lse: torch.Tensor | None = None) -> Verdict:
        """Run the whole problem and compare the slice; that of lse too, where a provider has it."""
        found = {n: t[-1:, -self.exact[n].shape[1] :] for n, t in _results(self.w, self.x, attend).items()}
        errors = {n: testing.measure(t, self.exact[n]) for n, t in found.items()}
        limits, over = {}, ""
        for n, t in found.items():
            limits[n], broken = self._budget(n, t)
            over = over or broken
        worst = max(found, key=lambda n: errors[n].max / max(limits[n], 1e-300))
        rel = max(e.rel for e in errors.values())
        cos = min(testing.cosine(t, self.exact[n]) for n, t in found.items())
        if lse is not None:
            errors["lse"] = testing.measure(lse[-1:, -self.exact["lse"].shape[1] :], self.exact["lse"])
        return Verdict(rel, errors[worst].max, limits[worst], cos, over, errors)

    def _budget(self, name: str, result: torch.Tensor) -> tuple[float, str]:
        """What the largest error of a result may be, and which of the budget's rules it breaks, if any."""
        factor = testing.FORWARD_FACTOR if name == "out" else testing.GRADIENT_FACTOR
        lowp, exact, (terms, s_max) = self.lowp[name], self.exact[name], self.magnitude
        budget = testing.Budget.of(result, lowp, exact, terms[name], s_max, result.dtype)
        limit = float(budget.over(torch.amax, factor, 0.0)[0])
        try:
            testing.check(result, lowp, exact, factor, magnitude=terms[name], s_max=s_max, name=name, layout="bhsd")
        except AssertionError as error:
            return limit, str(error)
        return limit, ""


def _forward(w: Workload) -> bool:
    return w.mode in FORWARD


def judged(w: Workload, device: torch.device) -> tuple[int, int]:
    """Query and key heads that are compared: all that use a key head, or one where that will do."""
    group = w.heads_q // w.heads_kv
    most = SCORES_ON_GPU // (group * w.seqlen_q * w.seqlen_kv) if device.type == "cuda" else 1
    heads_kv = max(1, min(w.heads_kv, most))
    return (1 if _forward(w) and heads_kv == 1 else group * heads_kv), heads_kv


def _slice(w: Workload, x: Inputs) -> tuple[Workload, Inputs]:
    """The last batch item and its last heads."""
    heads, heads_kv = judged(w, x.q.device)
    q, dout = (t.detach()[-1:, -heads:] for t in (x.q, x.dout))
    k, v = (t.detach()[-1:, -heads_kv:] for t in (x.k, x.v))
    slopes = None if x.slopes is None else x.slopes[-heads:]
    bias = None if x.bias is None else x.bias.detach()[:, -heads:]
    table = None if x.table is None else x.table[-heads:]
    lengths = None if x.lengths is None else x.lengths[-1:]
    windows = None if x.windows is None else x.windows[-heads:]
    changed = {"slopes": slopes, "bias": bias, "table": table, "lengths": lengths, "windows": windows}
    small = replace(x, q=q, k=k, v=v, dout=dout, cache={}, **changed)
    return replace(w, batch=1, heads_q=heads, heads_kv=heads_kv), small


def _results(w: Workload, x: Inputs, attend: providers.Attend) -> Tensors:
    """out, or the three gradients, by name."""
    leaves = (x.q, x.k, x.v)
    if _forward(w):
        with torch.no_grad():
            return {"out": attend(*leaves)}
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(attend(*leaves), leaves, x.dout), strict=True))
