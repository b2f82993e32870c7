"""Search for tiles on the GPU in front of you, and write tuning rows with their provenance.

Every legal tile of a kernel is compiled (in parallel processes, which fill Triton's disk cache), those that spill are
dropped, the rest are timed round-robin, and the fastest becomes a row of data/sm<arch>.jsonl.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from sartor import kernels
from sartor.device import Device
from sartor.kernels.parts import launch as launching
from sartor.kernels.spec import Operands, Plan, Saved, Tile
from sartor.problem import Call, Problem, aux_values

DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
PARTS = tuple(
    (f"{family}_{pass_}", launch)
    for family in ("triton", "fp32")
    for pass_, launch in (("forward", "forward"), ("backward", "dkdv"), ("backward", "dq"))
)
SHORT = (512, 2048)  # lengths for which the forward has rows of its own


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


def jobs(dims: Iterable[int] = DIMS, dtypes: Iterable[str] = ("bfloat16", "float32")) -> Iterator[Job]:
    """What `sartor tune` fills the table with."""
    for dtype in dtypes:
        for dim in dims:
            for mask in ("full", "band"):
                for kernel, launch in PARTS:
                    if kernel.startswith("triton"):
                        size = (1, 16, 2048) if dtype == "float32" else (4, 16, 4096)
                        yield Job(kernel, launch, dim, mask, dtype, *size)
                    elif dtype == "float32":
                        yield Job(kernel, launch, dim, mask, dtype, 2, 12, 4096)
            for mask in ("full", "band", "tensor", "score") if dtype == "bfloat16" else ():
                for length in SHORT if mask in ("full", "band") else (None,):
                    n = length or 4096
                    yield Job("triton_forward", "forward", dim, mask, dtype, 16384 // n, 16, n, length)


def runner(job: Job, tile: Tile, call: Call) -> tuple[dict[object, Any], Callable[[], Any]]:
    """The cache a compiled kernel goes to, and a closure that launches the job's kernel once with the tile."""
    problem = Problem.of(call)
    plan = Plan(kernels.load(job.kernel), problem, Device.of(call.q.device), tile, "tuning")
    x = Operands(call.q, call.k, call.v, aux=aux_values(call))
    out = torch.randn_like(call.q)
    lse = torch.full((problem.batch, problem.heads_q, problem.seqlen_q), 8.0, device="cuda")
    spec: Any = plan.kernel
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
    steps = [step for step in steps if step.name == job.launch]
    launching.run(steps, plan.cache)
    return plan.cache, lambda: launching.again({}, plan.cache)


def candidates(job: Job) -> list[Tile]:
    """Legal tiles worth the GPU's time; what is left out was never near the front."""
    problem = Problem.of(replace(job, batch=1).call())
    legal = list(kernels.load(job.kernel).tiles(problem, Device.of(torch.device("cuda"))))
    tiles = [t.then if job.launch == "dq" and t.then else t for t in legal]
    held = {"forward": "block_m", "dkdv": "block_n", "dq": "block_m"}[job.launch]
    found = []
    for t in tiles:
        rows, stepped = getattr(t, held), (t.block_n if held == "block_m" else t.block_m)
        if job.kernel.startswith("fp32"):
            good = rows == 16 * t.warps if job.dim <= 128 else rows >= 32
            good = good and stepped >= (16 if job.dim >= 128 else 32) and t.stages in (2, 3)
        elif job.dtype == "float32":
            good = rows >= 32 and stepped >= 16 and t.stages in (1, 2)
        else:
            per_warp = rows // t.warps
            good = rows >= (32 if job.dim > 160 else 64) and stepped >= 32 and t.stages in (2, 3)
            good = good and (per_warp >= 16 or job.dim > 160)
        if good:
            found.append(t if job.launch != "dkdv" else replace(t, then=replace(t, then=None)))
    return [t if t.then or job.launch == "forward" else replace(t, then=t) for t in found]


def compile_tile(job: Job, tile: Tile) -> Trial:
    """Compile and run once; spills, or why it failed."""
    try:
        cache, _ = runner(job, tile, replace(job, batch=1).call())
        torch.cuda.synchronize()
    except Exception as error:
        return Trial(tile, failed=f"{type(error).__name__}: {str(error)[:200]}")
    return Trial(tile, spills=sum(getattr(r.compiled, "n_spills", 0) for r in cache["ready", None]))


def measure(job: Job, trials: list[Trial], rounds: int = 7) -> list[Trial]:
    """Median milliseconds of each tile, the tiles taking turns."""
    call = job.call()
    runs = [runner(job, t.tile, call)[1] for t in trials]
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(rounds):
        for run, kept in zip(runs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            run()
            begin.record()
            for _ in range(3):
                run()
            end.record()
            end.synchronize()
            kept.append(begin.elapsed_time(end) / 3)
    return sorted((replace(t, ms=statistics.median(m)) for t, m in zip(trials, times, strict=True)), key=lambda t: t.ms)


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


def rows(found: dict[Job, Trial], record: str) -> list[str]:
    """Lines of the tuning table; the backward's two launches share one."""
    lines = []
    for job, best in found.items():
        tiles, spills, ms = [best.tile], best.spills, best.ms
        if job.launch == "dq":
            continue
        if job.launch == "dkdv":
            other = found[replace(job, launch="dq")]
            tiles, spills, ms = [best.tile, other.tile], best.spills + other.spills, best.ms + other.ms
        bits = getattr(torch, job.dtype).itemsize * 8
        numbers = [n for t in tiles for n in (t.block_m, t.block_n, t.warps, t.stages)]
        line = {"kernel": job.kernel, "bits": bits, "mask": job.mask, "dim": job.dim, "dim_v": job.dim}
        line |= {"keys": job.keys} if job.keys else {}
        lines.append(json.dumps(line | {"tile": numbers, "ms": round(ms, 4), "spills": spills, "record": record}))
    return lines


def provenance() -> str:
    """Where rows made now come from: device, compiler, day."""
    from importlib.metadata import version

    return f"{torch.cuda.get_device_name()}, Triton {version('triton')}, {time.strftime('%Y-%m-%d')}"


def write(rows: list[str], path: Path) -> None:
    """Replace the rows of the same key in a table, keep the others, sorted."""

    def key(line: str) -> tuple[Any, ...]:
        r = json.loads(line)
        return *(r[k] for k in ("kernel", "bits", "mask", "dim", "dim_v")), r.get("keys", math.inf)

    table = {key(line): line for line in path.read_text().splitlines()} if path.is_file() else {}
    table |= {key(line): line for line in rows}
    path.write_text("".join(table[k] + "\n" for k in sorted(table)))
