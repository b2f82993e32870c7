"""The ladder: every rung in order, from a naive kernel to the product kernels; their words, code and machine code."""

from __future__ import annotations

import difflib
from functools import cache

from sartor import nvrtc
from sartor.errors import Unsupported
from sartor.lab.ladder import rung as rungs
from sartor.lab.ladder.compiled import build
from sartor.lab.ladder.rung import Rung
from sartor.lab.workloads.workload import Workload, dtype_name

REFUSALS = (nvrtc.CompileError, ImportError, Unsupported, ValueError)  # of `build`


@cache
def load() -> tuple[Rung, ...]:
    """All rungs, in order of their numbers."""
    files = (path for path in rungs.FOLDER.iterdir() if path.suffix in (".cu", ".py") and path.name[:2].isdigit())
    return tuple(rungs.parse(path) for path in sorted(files))


def sources() -> set[tuple[str, str]]:
    """Each rung that is no product kernel as records name it, with the hash of its sources."""
    return {(rung.provider, rung.source_hash()) for rung in load() if not rung.kernel}


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
    return Workload(batch, heads, heads, n, n, dim, dim, dtype_name(dtype) or rung.dtypes[0], mask)


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


def sass(rung: Rung, w: Workload, arch: int) -> str:
    """Machine code of a rung for a problem. Raises ValueError where there is none."""
    why = why_not(rung, w.dim, arch)
    if not why:
        try:
            return build(rung, w, arch).sass()
        except REFUSALS as error:
            why = reason(error)
    raise ValueError(f"rung {rung.number} for sm_{arch}: {why}")


def why_not(rung: Rung, dim: int, arch: int) -> str:
    """Why a rung is not compiled for an architecture; empty when it may be."""
    if rung.arch > arch:
        return f"needs sm_{rung.arch}"
    return "" if dim in rung.dims else f"takes head dims {', '.join(map(str, rung.dims))}, got {dim}"


def reason(error: Exception) -> str:
    """The line that says why: the first that speaks of an error, or the last. NVRTC's log ends with a NUL."""
    lines = [line.strip() for line in str(error).replace("\0", "").splitlines() if line.strip()] or [repr(error)]
    return next((line for line in lines if "error" in line), lines[-1])
