"""Which kernels are to be verified again: those of which a fingerprint of today is not the one that passed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from sartor import kernels
from sartor.device import Device
from sartor.lab.evidence.evidence import Evidence, cases
from sartor.lab.ladder import catalogue
from sartor.lab.measure.fingerprint import GPU_KERNELS, Case, Found
from sartor.lab.measure.planned import planned
from sartor.lab.workloads.workload import Inputs

KERNELS = tuple(name for name in (*kernels.FORWARD, *kernels.BACKWARD) if name.startswith(GPU_KERNELS))
Present = Mapping[str, Found]  # fingerprints of today, by key


def named(text: str) -> tuple[str, ...]:
    """Kernels from a comma-separated list; ValueError for what is none, or needs no GPU."""
    names = tuple(dict.fromkeys(text.split(",")))
    if set(names) - set(KERNELS):
        raise ValueError(f"--kernels must be among {', '.join(KERNELS)}, got {text!r}")
    return names


def kernels_of(plan: str) -> set[str]:
    """Names, from plans in words; one is read from `triton_backward[64x64 w4 s2, 64x64 w4 s2]`."""
    return {one.split("[")[0] for one in plan.split("; ")}


def changed(evidence: Evidence, now: Present) -> tuple[str, ...]:
    """The kernels of which a case is not what passed. Where that is a training step, whose kernels are two, and neither
    is known for another case, it is both."""
    found, steps = set[str](), list[set[str]]()
    for name in _not_passed(evidence, now):
        of = kernels_of(now[name].plan)
        found |= of if len(of) == 1 else set()
        steps += [of]
    for of in steps:
        found |= set() if of & found else of
    return tuple(name for name in KERNELS if name in found)


def judged(evidence: Evidence, now: Present, names: Iterable[str]) -> set[str]:
    """The cases about which tests of some kernels say something: those that run no other kernel, but for one that is
    what passed wherever `now` has it alone."""
    sound = {name: found for name, found in now.items() if len(kernels_of(found.plan)) == 1}
    different = {kernel for name in _not_passed(evidence, sound) for kernel in kernels_of(now[name].plan)}
    wanted = set(names)
    every = {name: kernels_of(found.plan) for name, found in now.items()}
    return {name for name, of in every.items() if of & wanted and not (of - wanted) & different}


def cases_of(names: Iterable[str], device: Device) -> list[Case]:
    """The cases that take one of these kernels; and those which tell whether the other kernel of a training step is
    what passed: of its dtype and head dims."""
    wanted, plans = set(names), dict[Case, set[str]]()
    for provider, w in dict.fromkeys(cases()):
        name = f"sartor:{_shown(provider)}" if provider.startswith("rung:") else provider
        forward, backward = planned(name, w, Inputs.without_data(w), device)
        used = {"fwd_bwd": (forward, backward), "bwd": (backward,)}.get(w.mode, (forward,))
        plans[provider, w] = {plan.kernel.name for plan in used if plan}
    steps = {(w.dtype, w.dim, w.dim_v) for (_, w), of in plans.items() if of & wanted and of - wanted}
    beside = {kernel for of in plans.values() if of & wanted for kernel in of - wanted}
    return [
        (provider, w)
        for (provider, w), of in plans.items()
        if of & wanted or (of & beside and (w.dtype, w.dim, w.dim_v) in steps)
    ]


def _shown(provider: str) -> str:
    return catalogue.find(provider.removeprefix("rung:")).kernel


def _not_passed(evidence: Evidence, now: Present) -> Iterator[str]:
    return (name for name, found in now.items() if evidence.passed.get(name) != found)
