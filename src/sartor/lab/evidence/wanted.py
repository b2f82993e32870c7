"""Which kernels are to be verified again: those of which a fingerprint of today is not the one that passed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sartor import kernels
from sartor.device import Device
from sartor.lab.evidence.evidence import Evidence, cases
from sartor.lab.ladder import catalogue
from sartor.lab.measure.fingerprint import GPU_KERNELS, Case, Found
from sartor.lab.measure.planned import plan_of
from sartor.lab.workloads.workload import Inputs, Workload

KERNELS = tuple(name for name in (*kernels.FORWARD, *kernels.BACKWARD) if name.startswith(GPU_KERNELS))
Present = Mapping[str, Found]  # fingerprints of today, by key


def named(text: str) -> tuple[str, ...]:
    """Kernels from a comma-separated list; ValueError for what is none, or needs no GPU."""
    names = tuple(dict.fromkeys(text.split(",")))
    if set(names) - set(KERNELS):
        raise ValueError(f"--kernels must be among {', '.join(KERNELS)}, got {text!r}")
    return names


def kernel_of(plan: str) -> str:
    """Its name, from a plan in words: `triton_backward` of `triton_backward[64x64 w4 s2, 64x64 w4 s2]`."""
    return plan.split("[")[0]


def changed(evidence: Evidence, now: Present) -> tuple[str, ...]:
    """The kernels of which a case is not what passed."""
    found = {kernel_of(found.plan) for name, found in now.items() if evidence.passed.get(name) != found}
    return tuple(name for name in KERNELS if name in found)


def judged(now: Present, names: Iterable[str]) -> set[str]:
    """The cases about which tests of some kernels say something."""
    wanted = set(names)
    return {name for name, found in now.items() if kernel_of(found.plan) in wanted}


def cases_of(names: Iterable[str], device: Device) -> list[Case]:
    """The cases that take one of these kernels."""
    wanted = set(names)
    return [case for case in dict.fromkeys(cases()) if _kernel(*case, device) in wanted]


def _kernel(provider: str, w: Workload, device: Device) -> str:
    """The name of the kernel that runs a case; nothing where none can."""
    if provider.startswith("rung:"):
        provider = f"sartor:{catalogue.find(provider.removeprefix('rung:')).kernel}"
    plan = plan_of(provider, w, Inputs.without_data(w), device)
    return plan.kernel.name if plan else ""
