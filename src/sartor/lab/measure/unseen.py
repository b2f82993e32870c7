"""Calls of a sequence length that the process has not seen: a plan is made for each, and its kernels are compiled."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import torch

from sartor.lab.measure import providers
from sartor.lab.measure.timing import synchronize
from sartor.lab.workloads.workload import Inputs, Workload

LENGTHS, FIRST = 24, 12  # each one less than the one before; the first compile, or are planned, as no length was yet


def call_us(attend: providers.Attend, w: Workload, x: Inputs, device: torch.device) -> float | None:
    """Microseconds from such a call to its end, the median; None where a workload is of one length: by its extras, its
    graph, or as it is short."""
    short = min(w.seqlen_kv, w.seqlen_q if w.seqlen_q > 1 else w.seqlen_kv) <= LENGTHS
    if not w.pattern.plain or w.mode in ("bwd", "graph") or short:
        return None
    times = []
    for less in range(1, LENGTHS + 1):
        run = providers.runner(attend, w, _shorter(x, w, less))
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        times.append((time.perf_counter() - begin) * 1e6)
    return median(times[FIRST:])


def _shorter(x: Inputs, w: Workload, less: int) -> Inputs:
    """The first queries and keys; of one query all."""
    queries = w.seqlen_q if w.seqlen_q == 1 else w.seqlen_q - less
    q, k, v = (
        t.detach()[:, :, :n].requires_grad_(t.requires_grad)
        for t, n in ((x.q, queries), (x.k, w.seqlen_kv - less), (x.v, w.seqlen_kv - less))
    )
    return replace(x, q=q, k=k, v=v, dout=x.dout[:, :, :queries])
