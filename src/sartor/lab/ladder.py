"""The ladder: every rung in order, from a naive kernel to the product kernels; what is shown of them, and one run."""

from __future__ import annotations

import difflib
from functools import cache

import torch

from sartor import nvrtc
from sartor.device import Device
from sartor.errors import Unsupported
from sartor.lab import rung as rungs
from sartor.lab.compiled import Build, build, mix
from sartor.lab.rung import Rung
from sartor.lab.tables import NONE, Table, number
from sartor.lab.workloads import Workload

REFUSALS = (nvrtc.CompileError, ImportError, Unsupported, ValueError)  # of `build`


@cache
def load() -> tuple[Rung, ...]:
    """All rungs, in order of their numbers."""
    files = (path for path in rungs.FOLDER.iterdir() if path.suffix in (".cu", ".py") and path.name[:2].isdigit())
    return tuple(rungs.parse(path) for path in sorted(files))


def sources() -> set[tuple[str, str]]:
    """Each rung as records name it, with the hash of its sources."""
    return {(rung.provider, rung.source_hash()) for rung in load()}


def find(number: str) -> Rung:
    """The rung called `4`, `04` or `7a`; ValueError lists the known ones."""
    for rung in load():
        if rung.number in (number, f"0{number}"):
            return rung
    raise ValueError(f"rung must be one of {', '.join(r.number for r in load())}, got {number!r}")


def workload(rung: Rung, sizes: tuple[int, int, int], dim: int = 0, dtype: str = "", causal: bool = False) -> Workload:
    """A problem for a rung: batch, heads and length, and what it takes by default where a flag was not given."""
    batch, heads, n = sizes
    dim = dim or (64 if 64 in rung.dims else max(rung.dims))
    mask = "causal" if causal else "full"
    return Workload(batch, heads, heads, n, n, dim, dim, dtype or rung.dtypes[0], mask)


def overview() -> Table:
    """Number, title, language, what it takes, where it comes from."""
    headers = ["rung", "title", "takes", "needs", "after", "claimed by its source"]
    made = Table("The ladder", headers, [], words=tuple(headers))
    for r in load():
        takes = f"{', '.join(r.dtypes)}; D {', '.join(map(str, r.dims))}{'; causal' if r.causal else ''}"
        needs = f"sm_{r.arch}, {'CUDA C++' if r.is_cuda else 'Triton' if not r.kernel else 'kernel ' + r.kernel}"
        made.rows.append([r.number, r.title, takes, needs, r.before or NONE, r.claim])
    return made


def words(rung: Rung) -> str:
    """A rung's header, to read."""
    facts = (rung.idea, f"Expected: {rung.expect}", f"Source: {rung.source}", f"It claimed: {rung.claim}")
    return "\n\n".join([f"{rung.number}  {rung.title}", *(" ".join(fact.split()) for fact in facts), ""])


def diff(before: Rung, after: Rung) -> str:
    """A unified diff of two rungs' code, headers left out."""
    lines = difflib.unified_diff(
        before.code.splitlines(), after.code.splitlines(), before.path.name, after.path.name, lineterm=""
    )
    return "\n".join(lines)


def resources(shown: tuple[Rung, ...], arch: int = 90) -> Table:
    """What the compiler makes of rungs, for an architecture that need not be here, at every head dim they take."""
    made = Table(
        f"Compiled for sm_{arch}",
        ["rung", "D", "registers", "spilled bytes", "shared, KiB", "instructions", "most frequent"], [],
        words=("most frequent",),
    )  # fmt: skip
    for rung in shown:
        why = _why_not(rung, rung.dims[0], arch)
        if why:
            made.rows.append([rung.number, NONE, why, *[NONE] * 4])
            continue
        for dim in rung.dims:
            try:
                figures = _figures(build(rung, workload(rung, (8, 8, 4096), dim), arch))
            except REFUSALS as error:
                figures = [_reason(error), *[NONE] * 4]
            made.rows.append([rung.number, str(dim), *figures])
    return made


def sass(rung: Rung, w: Workload, arch: int) -> str:
    """Machine code of a rung for a problem. Raises ValueError where there is none."""
    why = _why_not(rung, w.dim, arch)
    if not why:
        try:
            return build(rung, w, arch).sass()
        except REFUSALS as error:
            why = _reason(error)
    raise ValueError(f"rung {rung.number} for sm_{arch}: {why}")


def _why_not(rung: Rung, dim: int, arch: int) -> str:
    """Why a rung is not compiled for an architecture; empty when it may be."""
    if rung.arch > arch:
        return f"needs sm_{rung.arch}"
    return "" if dim in rung.dims else f"takes head dims {', '.join(map(str, rung.dims))}, got {dim}"


def _reason(error: Exception) -> str:
    """The line that says why: the first that speaks of an error, or the last. NVRTC's log ends with a NUL."""
    lines = [line.strip() for line in str(error).replace("\0", "").splitlines() if line.strip()] or [repr(error)]
    return next((line for line in lines if "error" in line), lines[-1])


def _figures(made: Build) -> list[str]:
    try:
        found = mix(made.sass())
        counts = [str(found.total()), ", ".join(f"{name} {n}" for name, n in found.most_common(5))]
    except FileNotFoundError:  # no disassembler
        counts = [NONE, NONE]
    return [str(made.registers), str(made.spill_bytes), f"{made.shared_bytes / 1024:.1f}", *counts]


def run(rung: Rung, w: Workload, device: torch.device) -> tuple[bool, Table]:
    """Whether a rung is within its error budget, and its time beside SDPA. Raises ValueError where it cannot run."""
    from sartor.lab import climb, providers
    from sartor.lab.accuracy import Judge
    from sartor.lab.timing import interleave
    from sartor.lab.workloads import Inputs

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
        made.rows.append([name, number(timing.ms), number(w.flops / timing.ms * 1e-9), *cells])
    return verdict is None or verdict.ok, made
