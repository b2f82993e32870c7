"""Search for tiles on the GPU in front of you, and write tuning rows with their provenance.

Every legal tile of a kernel is compiled (in parallel processes, which fill the disk caches), those that spill are
dropped, the rest are timed by a few calls, the best of them as the bench does, and the fastest becomes a row of
data/sm<arch>.jsonl.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from sartor import kernels, nvrtc
from sartor.device import Device
from sartor.kernels.spec import Operands, Plan, Saved, Tile
from sartor.kernels.triton import launch as launching
from sartor.lab.measure.timing import Budget, interleave
from sartor.problem import Call, Problem, aux_values

DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
DTYPES = ("float16", "bfloat16", "float32")
TRITON = tuple(f"{family}_{pass_}" for family in ("triton", "fp32") for pass_ in ("forward", "backward"))
HOPPER = ("hopper_forward", "hopper_fp32")
KERNELS = (*HOPPER, *TRITON)
FINALISTS = 6  # tiles that are timed at the clock each can hold, which a few calls do not show
SHORT = {"hopper_forward": (1024,), "triton_forward": (512, 2048)}  # lengths for which a forward has rows of its own


@dataclass(frozen=True)
class Job:
    """One tile to find: a launch of a kernel, on one problem."""

    kernel: str
    launch: str  # forward, dkdv or dq
    dim: int
    mask: str  # full, band, tensor or score
    dtype: str = "bfloat16"
    batch: int = 4
    heads: int = 16
    seqlen: int = 4096
    keys: int | None = None  # the row will be for at most so many keys

    def call(self) -> Call:
        """Random tensors of the job's problem, in (b, s, h, d) memory."""
        dtype = getattr(torch, self.dtype)
        shape = (self.batch, self.seqlen, self.heads, self.dim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
        bias = torch.randn(self.seqlen, self.seqlen, device="cuda", dtype=dtype) if self.mask == "tensor" else None
        return Call(q, k, v, bias, causal=self.mask == "band", softcap=30.0 if self.mask == "score" else 0.0)

    @property
    def tflop(self) -> float:
        """10^12 operations the launch must do: 2, 4 or 3 products."""
        products = {"forward": 2, "dkdv": 4, "dq": 3}[self.launch]
        return products * 2e-12 * self.batch * self.heads * self.seqlen**2 * self.dim / (1 + (self.mask == "band"))


@dataclass(frozen=True)
class Trial:
    """A tile, what the compiler made of it, and how long it took."""

    tile: Tile
    spills: int = 0
    ms: float = float("inf")
    failed: str = ""


def jobs(
    dims: Iterable[int] = DIMS, dtypes: Iterable[str] = ("bfloat16", "float32"), names: Iterable[str] = KERNELS
) -> Iterator[Job]:
    """What `sartor tune` fills the table with, of the kernels named."""
    for dtype, dim, kernel in product(dtypes, dims, names):
        narrow = dtype == "float32"
        if kernel in (("hopper_forward",) if narrow else ("hopper_fp32", "fp32_forward", "fp32_backward")):
            continue
        size = (4, 16, 4096) if not narrow else (1, 16, 2048) if kernel.startswith("triton") else (2, 12, 4096)
        for launch, mask in product(("dkdv", "dq") if kernel.endswith("backward") else ("forward",), ("full", "band")):
            yield Job(kernel, launch, dim, mask, dtype, *size)
            for n in () if narrow else SHORT.get(kernel, ()):
                yield Job(kernel, launch, dim, mask, dtype, 16384 // n, 16, n, n)
        for mask in ("tensor", "score") if kernel in ("hopper_forward", "triton_forward") and not narrow else ():
            yield Job(kernel, "forward", dim, mask, dtype)


def runner(job: Job, tile: Tile, call: Call) -> tuple[int, Callable[[], Any]]:
    """Bytes that the job's kernel spills with the tile, and a closure that launches it once."""
    problem = Problem.of(call)
    plan = Plan(kernels.load(job.kernel), problem, Device.of(call.q.device), tile, "tuning")
    x = Operands(call.q, call.k, call.v, aux=aux_values(call))
    spec: Any = plan.kernel
    if job.kernel in HOPPER:
        resources = spec.compile(problem, tile).resources.values()
        return sum(r.spill_bytes for r in resources), lambda: spec.run(plan, x)
    out = torch.randn_like(call.q)
    lse = torch.full((problem.batch, problem.heads_q, problem.seqlen_q), 8.0, dtype=torch.float32, device="cuda")
    if job.launch == "forward":
        steps = spec.launches(plan, x, out, lse)
    else:
        saved = Saved(out, lse, torch.randn_like(out), None)
        work = spec.workspace(problem, x, saved)
        work["gain"].fill_(1.0)
        work["delta"].zero_()
        work["lse_log2"].fill_(8.0)
        steps = spec.launches(plan, x, saved, work)
    launching.run([step for step in steps if step.name.startswith("split ")], {})  # what the launch reads
    (step,) = (step for step in steps if step.name == job.launch)
    launching.run([step], plan.cache)
    ready: Any = plan.cache["ready", None]
    spills = sum(getattr(r.compiled, "n_spills", 0) for r in ready)
    return spills, lambda: launching.repeat(step.arguments, plan.cache)


def candidates(job: Job) -> list[Tile]:
    """Legal tiles worth the GPU's time; what is left out was never near the front."""
    problem, device = Problem.of(replace(job, batch=1).call()), Device.of(torch.device("cuda"))
    spec = kernels.load(job.kernel)
    refused = spec.why_not(problem, device) or spec.why_no_length(problem, device)
    legal = [] if refused else list(spec.tiles(problem, device))
    if job.kernel in HOPPER:
        return hopper_candidates(job, legal)
    tiles = [t.then if job.launch == "dq" and t.then else t for t in legal]
    held = {"forward": "block_m", "dkdv": "block_n", "dq": "block_m"}[job.launch]
    found = []
    for t in tiles:
        rows, stepped = getattr(t, held), (t.block_n if held == "block_m" else t.block_m)
        if job.kernel.startswith("fp32"):
            good = rows == 16 * t.warps if job.dim <= 128 else rows >= 32
            good = good and stepped >= (16 if job.dim >= 128 else 32) and (t.stages > 1 or job.dim >= 128)
        elif job.dtype == "float32":
            good = rows >= 32 and stepped >= 16 and t.stages in (1, 2)
        else:
            per_warp = rows // t.warps
            good = rows >= (32 if job.dim > 160 else 64) and stepped >= 32 and t.stages in (2, 3)
            good = good and (per_warp >= 16 or job.dim > 160)
        if good:
            found.append(t if job.launch != "dkdv" else replace(t, then=replace(t, then=None)))
    return [t if t.then or job.launch == "forward" else replace(t, then=t) for t in found]


def hopper_candidates(job: Job, legal: list[Tile]) -> list[Tile]:
    """Of each shape the two with the most stages."""
    found: dict[tuple[int, int], list[Tile]] = {}
    for t in legal:
        if t.block_n >= (32 if job.dim > 160 else 64) and (t.block_m > 64 or job.keys):
            found.setdefault((t.block_m, t.block_n), []).append(t)
    return [t for tiles in found.values() for t in sorted(tiles, key=lambda t: -t.stages)[:2]]


def compile_tile(job: Job, tile: Tile) -> Trial:
    """Compile and run once; spills, or why it failed."""
    try:
        spills, run = runner(job, tile, replace(job, batch=1).call())
        run()
        torch.cuda.synchronize()
    except Exception as error:
        return Trial(tile, failed=f"{type(error).__name__}: {str(error)[:200]}")
    return Trial(tile, spills)


def measure(job: Job, trials: list[Trial]) -> list[Trial]:
    """The fastest tiles with their median milliseconds at the clock each can hold, after a few calls of all in turn."""
    call = job.call()
    device, runs = call.q.device, {str(t.tile): runner(job, t.tile, call)[1] for t in trials}
    quick = interleave(runs, device, Budget(rounds=5, turn_ms=0.0, lead_ms=0.0, warmup_ms=1.0))
    ahead = sorted(runs, key=lambda name: quick[name].ms)[:FINALISTS]
    found = interleave({name: runs[name] for name in ahead}, device, Budget(rounds=4, warmup_ms=1.0))
    finalists = (replace(t, ms=found[str(t.tile)].ms) for t in trials if str(t.tile) in found)
    return sorted(finalists, key=lambda t: t.ms)


def search(work: Iterable[Job], workers: int, log: Callable[[str], None]) -> Iterator[tuple[Job, list[Trial]]]:
    """Trials of each job, fastest first; compilation of all jobs runs ahead of the timing."""
    work = list(work)
    log(f"{len(work)} rows to find; compiling in {workers} processes")
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        ahead = {}
        for job in work:
            ahead[job] = [pool.submit(compile_tile, job, tile) for tile in candidates(job)]
        done = [(job, [f.result() for f in futures]) for job, futures in ahead.items()]
    for job, trials in done:
        failed = [t for t in trials if t.failed]
        clean = [t for t in trials if not t.failed and t.spills == 0]
        usable = clean or sorted((t for t in trials if not t.failed), key=lambda t: t.spills)[:6]
        log(f"{job}: {len(trials)} tiles, {len(failed)} failed, {len(clean)} without spills")
        if failed:
            log(f"  {failed[0].tile}: {failed[0].failed}")
        if usable:
            yield job, measure(job, usable)


def rows(found: dict[Job, Trial]) -> list[str]:
    """Lines of the tuning table; the backward's two launches share one."""
    lines = []
    for job, best in found.items():
        tiles, spills, ms = [best.tile], best.spills, best.ms
        if job.launch == "dq":
            continue
        if job.launch == "dkdv":
            other = found.get(replace(job, launch="dq"))
            if other is None:  # the search was ended between the two
                continue
            tiles, spills, ms = [best.tile, other.tile], best.spills + other.spills, best.ms + other.ms
        bits = getattr(torch, job.dtype).itemsize * 8
        numbers = [n for t in tiles for n in (t.block_m, t.block_n, t.warps, t.stages)]
        line = {"kernel": job.kernel, "bits": bits, "mask": job.mask, "dim": job.dim, "dim_v": job.dim}
        line |= {"keys": job.keys} if job.keys else {}
        line |= {"tile": numbers, "ms": round(ms, 4)}
        line |= {"tflops": round(job.tflop / ms * 1e3, 1)} if job.launch == "forward" else {}
        lines.append(json.dumps(line | {"spills": spills, "record": provenance(job.kernel)}))
    return lines


def provenance(kernel: str) -> str:
    """Where rows of a kernel made now come from: device, compiler, day."""
    from importlib.metadata import version

    compiler = f"NVRTC {nvrtc.compiler().split()[0]}" if kernel in HOPPER else f"Triton {version('triton')}"
    return f"{torch.cuda.get_device_name()}, {compiler}, {time.strftime('%Y-%m-%d')}"


def write(rows: list[str], path: Path) -> None:
    """Replace the rows of the same key in a table, keep the others, sorted."""

    def key(line: str) -> tuple[Any, ...]:
        r = json.loads(line)
        return *(r[k] for k in ("kernel", "bits", "mask", "dim", "dim_v")), r.get("keys", math.inf)

    table = {key(line): line for line in path.read_text().splitlines()} if path.is_file() else {}
    table |= {key(line): line for line in rows}
    path.write_text("".join(table[k] + "\n" for k in sorted(table)))
