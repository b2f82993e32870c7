"""The plans with which a provider of ours computes a workload."""

from __future__ import annotations

import sartor
from sartor.device import Device
from sartor.kernels.spec import Plan
from sartor.lab.measure import providers
from sartor.lab.workloads.workload import Inputs, Workload


def planned(provider: str, w: Workload, x: Inputs, device: Device | None = None) -> tuple[Plan | None, Plan | None]:
    """Forward and backward of `sartor` or `sartor:KERNEL`: on the inputs' device, or another."""
    base, _, name = provider.partition(":")
    kernel = name if base == "sartor" and name else "auto"
    walk = sartor.explain(x.q, x.k, x.v, kernel=kernel, device=device, **providers.options(w, x))
    return walk.plan, walk.backward


def plan_of(provider: str, w: Workload, x: Inputs, device: Device | None = None) -> Plan | None:
    """Of the two the one that a workload's mode is about."""
    forward, backward = planned(provider, w, x, device)
    return backward if w.mode == "bwd" else forward
