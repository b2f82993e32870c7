"""check: what `sartor.attention` gets wrong on this machine, against float64, problem by problem."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

import sartor
from sartor.errors import Unsupported
from sartor.lab.measure import providers
from sartor.lab.measure.accuracy import Judge, Verdict
from sartor.lab.measure.fingerprint import Case, key
from sartor.lab.workloads.workload import Inputs, Workload


@dataclass(frozen=True)
class Row:
    """One problem: which kernel ran and how it was judged, or why nothing ran."""

    w: Workload
    plan: str
    verdict: Verdict | None
    skipped: str = ""

    @property
    def ok(self) -> bool:
        """Within budget, or not applicable here."""
        return self.verdict is None or self.verdict.ok

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self.verdict) if self.verdict else {"skipped": self.skipped}
        return {"workload": str(self.w), "plan": self.plan, **found}


def cases(device: torch.device) -> Iterator[Case]:
    """Every dtype, then head dims, lengths, grouped heads, masks: small enough for a float64 reference. On a GPU also
    the backward that no suite takes where a faster one runs."""
    gpu = device.type == "cuda"
    for mode in ("fwd", "bwd"):
        for w in _problems(mode, 1024 if gpu else 192, "bfloat16" if gpu else "float32"):
            yield "sartor", w
    if gpu:
        yield "sartor:fp32_forward", Workload(1, 4, 2, 1024, 1024, 64, 64, "float32", "causal", "bwd")


def _problems(mode: str, n: int, dtype: str) -> Iterator[Workload]:
    for each in ("float32", "bfloat16", "float16"):
        for mask in ("full", "causal"):
            yield Workload(2, 4, 4, n, n, 64, 64, each, mask, mode)
    for dim in (16, 40, 72, 96, 128, 192, 256):
        yield Workload(1, 2, 2, n, n, dim, dim, dtype, "causal", mode)
    for sq, skv in ((n - 3, n + 5), (1, n), (n + 7, n // 2)):
        yield Workload(1, 4, 2, sq, skv, 80, 80, dtype, "causal", mode)
    yield Workload(1, 8, 2, n, n, 64, 48, dtype, "full", mode)
    masks = ("window64", "document5", "prefix100", "tensor", "bias", "softcap30")
    for mask in (*masks, "causal+alibi", "causal+document3+softcap20"):
        yield Workload(2, 4, 2, n, n, 64, 64, dtype, mask, mode)


def run(
    device: torch.device, kernel: str = "auto", only: Container[str] | None = None, deadline: float = float("inf")
) -> list[Row]:
    """Judge every case, or those whose key is among `only`; stops at the deadline (`time.monotonic`). A
    kernel other than "auto" computes what "auto" would."""
    rows = []
    for provider, w in cases(device):
        if time.monotonic() > deadline:
            break
        if only is None or key(provider, w) in only:
            rows.append(judge(w, device, provider.partition(":")[2] or kernel))
    return rows


def judge(w: Workload, device: torch.device, kernel: str = "auto") -> Row:
    """Judge one problem."""
    x = Inputs.make(w, device)
    walk = sartor.explain(x.q, x.k, x.v, kernel=kernel, **providers.options(w, x))
    plan = str((walk.backward if w.mode == "bwd" else walk.plan) or "")
    found = Judge.make(w, x)
    if found is None:
        return Row(w, plan, None, "its float64 reference does not fit")
    try:
        return Row(w, plan, found.judge(providers.get(f"sartor:{kernel}").make(w, x)))
    except Unsupported as error:
        return Row(w, plan, None, "; ".join(why[0] for why in error.reasons.values() if why))
