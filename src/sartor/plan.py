"""choose(problem, device) -> Plan: pure, printable, no tensors, no CUDA.

Every branch of the library is here, in `features` or in a kernel's `why_not`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from sartor import features, kernels, nvrtc
from sartor.device import Device
from sartor.errors import Unsupported
from sartor.kernels.spec import KernelSpec, Plan, length_class
from sartor.problem import Problem
from sartor.replay.calls import told
from sartor.tuning import table


def candidates(p: Problem) -> tuple[str, ...]:
    """Forward kernels that may serve `p`: all, those of the family that was asked for, or the one that was."""
    if p.kernel == "auto":
        return tuple(kernels.FORWARD)
    names = tuple(n for n in kernels.FORWARD if p.kernel in (n, kernels.load(n).family))
    if not names:
        known = ", ".join(repr(f) for f in dict.fromkeys(("auto", *kernels.families(), *kernels.FORWARD)))
        raise ValueError(f"kernel must be one of {known}, got {p.kernel!r}")
    return names


@lru_cache(maxsize=4096)
def choose(p: Problem, dev: Device) -> Plan:
    """The first forward kernel without reasons against it. Raises Unsupported with everybody's reasons."""
    return _first(candidates(p), p, dev)


@lru_cache(maxsize=4096)
def choose_backward(p: Problem, dev: Device) -> Plan:
    """The backward kernel that goes with the forward chosen for `p`."""
    return _first(choose(replace(p, shared_lse=False) if p.shared_lse else p, dev).kernel.backwards, p, dev)


def _first(names: tuple[str, ...], p: Problem, dev: Device) -> Plan:
    alike, missing = length_class(p), nvrtc.missing() if dev.arch == 90 else ""
    for name in names:
        if not _against_class(name, alike, dev, missing):
            spec = kernels.load(name)
            if not spec.why_no_length(p, dev):
                return _plan(spec, p, dev)
    raise Unsupported(p, _walk(names, p, dev)[0])


@lru_cache(maxsize=1024)
def _against_class(name: str, p: Problem, dev: Device, missing: str) -> bool:
    """Whether there are reasons against a kernel for all lengths of a class; `missing` is what the compiler lacks."""
    spec = kernels.load(name)
    return bool(features.missing(p, spec.features) or spec.why_not(p, dev))


def _plan(spec: KernelSpec, p: Problem, dev: Device) -> Plan:
    tile, source = table.lookup(spec, p, dev)
    return Plan(spec, p, dev, tile, source)


def against(name: str, p: Problem, dev: Device) -> list[str]:
    """The reasons against a kernel in words: features that it does not name, else numbers it cannot serve; or none."""
    spec = kernels.load(name)
    return features.missing(p, spec.features) or spec.why_not(p, dev) or spec.why_no_length(p, dev)  # type: ignore[no-any-return]


def _walk(names: tuple[str, ...], p: Problem, dev: Device) -> tuple[dict[str, list[str]], Plan | None]:
    """The reasons against kernels, up to the first one against which there are none; and that one's plan, if any."""
    refused: dict[str, list[str]] = {}
    for name in names:
        why = against(name, p, dev)
        if not why:
            return refused, _plan(kernels.load(name), p, dev)
        refused[name] = why
    return refused, None


def advice(p: Problem, dev: Device, plan: Plan) -> str:
    """What to install so that a faster kernel serves `p`: where the run-time compiler is all that one lacks."""
    why = nvrtc.missing() if dev.arch == 90 and p.kernel == "auto" else ""
    for name in candidates(p) if why else ():
        spec = kernels.load(name)
        if spec is plan.kernel:
            break
        if not features.missing(p, spec.features) and spec.why_not(p, dev) == [why]:
            return f"on {dev.name} a slower kernel runs in place of the Hopper kernels: {why}"
    return ""


@dataclass(frozen=True, repr=False)
class Explanation:
    """The walks of `choose` and `choose_backward` in words; `str()` prints them."""

    problem: Problem
    device: Device
    refused: dict[str, list[str]]
    plan: Plan | None
    refused_backward: dict[str, list[str]]
    backward: Plan | None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [f"{self.problem}", f"device: {self.device.name}"]
        lines += [*_told(self.refused), "  forward:  " + _in_words(self.plan)]
        lines += [*_told(self.refused_backward), "  backward: " + _in_words(self.backward)]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def _told(refused: dict[str, list[str]]) -> list[str]:
    return [f"  {name}: no, {reason}" for name, why in refused.items() for reason in why]


def _in_words(plan: Plan | None) -> str:
    """A plan, its tiles, what a thread holds in registers and a block in shared memory."""
    if plan is None or plan.tile is None:
        return str(plan or "none")
    tiles = [plan.tile]
    while tiles[-1].then:
        tiles.append(tiles[-1].then)
    shapes = [f"{t.block_m} queries x {t.block_n} keys" for t in tiles]
    if not plan.device.is_cpu:
        shapes = [f"{s}, {t.warps} warps, stages {t.stages}" for s, t in zip(shapes, tiles, strict=True)]
    if plan.tile.num_splits > 1:
        shapes.append(f"one more kernel merges the results of {plan.tile.num_splits} KV splits")
    held = {"registers a thread": plan.registers, "bytes of shared memory a block": plan.shared_bytes}
    words = [", then ".join(shapes), *(f"{count} {what}" for what, count in held.items() if count is not None)]
    return f"{plan}\n            {'; '.join(words)}"


def explain(p: Problem, dev: Device) -> Explanation:
    """Why the plan for `p` on `dev` is what it is; never raises Unsupported, the explanation then has no plan."""
    if not dev.is_cpu or p.device in ("meta", "cuda"):  # tensors meant to be there; other devices plan as a CPU does
        p = replace(p, device="cpu" if dev.is_cpu else "cuda")
    refused, plan = _walk(candidates(p), p, dev)
    refused_backward, backward = _walk(plan.kernel.backwards, p, dev) if plan else ({}, None)
    notes = [f"{name} is copied once: its last dim is not dense, or its rows lie too far apart" for name in p.copies]
    if p.precision == "tf32" and p.dtype == torch.float32 and dev.is_cpu:
        notes.append("precision='tf32' changes nothing on a CPU, which computes in all of float32")
    chosen = [one for one in (plan, backward) if one is not None]
    notes += [note for one in chosen for note in one.notes]
    if any(one.kernel.replays for one in chosen):
        notes.append(told())
    return Explanation(p, dev, refused, plan, refused_backward, backward, tuple(notes))
