"""Rungs of the ladder, shown: which there are, what the compilers make of them, one of them beside SDPA."""

from __future__ import annotations

import torch

from sartor.device import Device
from sartor.lab.ladder import catalogue
from sartor.lab.ladder.compiled import Build, build, mix
from sartor.lab.ladder.rung import Rung
from sartor.lab.measure import providers
from sartor.lab.measure.accuracy import Judge
from sartor.lab.measure.timing import interleave
from sartor.lab.show import climb, names
from sartor.lab.show.table import NONE, Table, number
from sartor.lab.workloads.workload import Inputs, Workload


def overview() -> Table:
    """Number, title, language, what it takes, where it comes from."""
    headers = ["rung", "title", "takes", "needs", "after", "claimed by its source"]
    made = Table("The ladder", headers, [], words=tuple(headers))
    for r in catalogue.load():
        takes = f"{', '.join(r.dtypes)}; D {', '.join(map(str, r.dims))}{'; causal' if r.causal else ''}"
        needs = f"sm_{r.arch}, {'CUDA C++' if r.is_cuda else 'Triton' if not r.kernel else 'kernel ' + r.kernel}"
        made.rows.append([r.number, r.title, takes, needs, r.before or NONE, r.claim])
    return made


def resources(shown: tuple[Rung, ...], arch: int = 90) -> Table:
    """What the compiler makes of rungs, for an architecture that need not be here, at every head dim they take. Reasons
    against some are notes, each said once."""
    made = Table(
        f"Compiled for sm_{arch}",
        ["rung", "D", "registers", "spilled bytes", "shared, KiB", "instructions", "most frequent"], [],
        words=("most frequent",),
    )  # fmt: skip
    reasons = dict[str, list[str]]()
    for rung in shown:
        for dim in rung.dims:
            why = catalogue.why_not(rung, dim, arch)
            try:
                figures = [] if why else _figures(build(rung, catalogue.workload(rung, (8, 8, 4096), dim), arch))
            except catalogue.REFUSALS as error:
                figures, why = [], catalogue.reason(error)
            if why:
                reasons.setdefault(why, []).append(rung.number)
            else:
                made.rows.append([rung.number, str(dim), *figures])
    made.notes = [f"rung {', '.join(dict.fromkeys(numbers))}: {why}" for why, numbers in reasons.items()]
    return made


def _figures(made: Build) -> list[str]:
    try:
        found = mix(made.sass())
        counts = [str(found.total()), ", ".join(f"{name} {n}" for name, n in found.most_common(5))]
    except FileNotFoundError:  # no disassembler
        counts = [NONE, NONE]
    return [str(made.registers), str(made.spill_bytes), f"{made.shared_bytes / 1024:.1f}", *counts]


def run(rung: Rung, w: Workload, device: torch.device) -> tuple[bool, Table]:
    """Whether a rung is within its error budget, and its time beside SDPA. Raises ValueError where it cannot run."""

    why = rung.why_not(w, Device.of(device))
    if why:
        raise ValueError(f"rung {rung.number} {why}")
    x = Inputs.make(w, device)
    base = climb.BASELINES[w.dtype]
    calls = {name: providers.get(name).make(w, x) for name in (base, rung.provider)}
    judge = Judge.make(w, x)
    verdict = judge.judge(calls[rung.provider]) if judge else None
    times = interleave({name: providers.runner(call, w, x) for name, call in calls.items()}, device)
    made = Table(f"rung {rung.number}: {rung.title}; {w}", ["", "ms", "TFLOP/s", "largest error", "budget", ""], [])
    for name, timing in times.items():
        cells = [NONE] * 3
        if name == rung.provider and verdict:
            cells = [f"{verdict.err_max:.1e}", f"{verdict.err_budget:.1e}", verdict.over or "ok"]
        made.rows.append([names.provider(name), number(timing.ms), number(w.flops / timing.ms * 1e-9), *cells])
    return verdict is None or verdict.ok, made
