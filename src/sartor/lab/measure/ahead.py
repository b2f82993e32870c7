"""First calls made ahead, in several processes at once: afterwards no call of a bench waits long for a compiler.

What they leave on disk is what counts: Sartor's machine code, Triton's, Inductor's graphs, and the fingerprints of what
is measured. What fails here is told by the bench, which calls it again.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context

import torch

from sartor import cache as disk
from sartor.device import Device
from sartor.lab.ladder import catalogue as ladder
from sartor.lab.measure import fingerprint, providers
from sartor.lab.measure.fingerprint import Case
from sartor.lab.measure.fresh import CACHES
from sartor.lab.measure.timing import synchronize
from sartor.lab.workloads.workload import Inputs, Workload

COMPILED = ("sartor", "sartor-varlen", "sartor-kvcache", "sartor-kvcache-new", "tf32", "rung", "flex")
MOST_PROCESSES = 12  # each holds a context and a workload's tensors on the GPU
WORTH = 6  # groups of calls from which on the start of the processes is made up for
START_S, GROUP_S = 8.0, 4.0  # about what it takes: of the processes' start, and of a group of calls
Work = Iterable[tuple[Workload, tuple[str, ...]]]
Tell = Callable[[str], None]


def prepare(
    work: Work, device: torch.device, tell: Tell = lambda text: None, processes: int = 0, worth: int = WORTH,
    deadline: float = float("inf"),
) -> int:  # fmt: skip
    """Make the first calls of a suite's cases, those that wait for a compiler; how many were made.

    A call that was made before from the same sources is left out; nothing is made where what is left is not `worth` it,
    nor after the deadline (`time.monotonic`). `processes`: by default three of four CPUs, `MOST_PROCESSES` at most.
    """
    groups = grouped(left(work, device))
    if len(groups) < worth:
        return 0
    processes = min(processes or workers(), len(groups))
    calls, made, done = sum(map(len, groups)), 0, 0
    tell(f"compiling ahead: {calls} calls, {processes} processes")
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_alone) as pool:
        futures = {pool.submit(_calls, group, str(device), deadline): len(group) for group in groups}
        try:
            for future in as_completed(futures):
                made, done = made + future.result(), done + futures[future]
                tell(f"compiling ahead: {done} of {calls} calls, {processes} processes")
        except BrokenProcessPool:
            tell("compiling ahead: a process died; the rest is compiled when it is called")
        finally:  # after Ctrl-C none is begun
            for future in futures:
                future.cancel()
    return made


def seconds(work: Work) -> float:
    """About how long the calls take where none was made before, on a machine with CPUs for all processes."""
    groups = len(grouped(compiled(work)))
    return START_S + GROUP_S * groups / min(MOST_PROCESSES, groups) if groups >= WORTH else GROUP_S * groups


def workers() -> int:
    """Processes that compile on this machine."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_PROCESSES, cpus * 3 // 4))


def left(work: Work, device: torch.device) -> list[Case]:
    """The calls that wait for a compiler and were not made yet, each once. Nor is one made whose fingerprint was
    computed, with all of its machine code."""
    here = Device.of(device)
    cases = (case for case in compiled(work) if disk.read(_mark(*case, here)) is None)
    return [case for case in cases if not fingerprint.on_disk(*case, here)]


def compiled(work: Work) -> list[Case]:
    """The calls that wait for a compiler, each once."""
    return list(dict.fromkeys((name, w) for w, who in work for name in who if name.split(":")[0] in COMPILED))


def grouped(cases: Sequence[Case]) -> list[list[Case]]:
    """Calls that share machine code are one process's; those that take longest come first. FlexAttention's share none:
    its lengths are constants."""
    groups: dict[object, list[Case]] = {}
    for name, w in cases:
        own = (w.batch, w.heads_q, w.seqlen_q, w.seqlen_kv) if name == "flex" else ()
        key = (name, w.mode, w.dtype, w.dim, w.dim_v, w.mask, w.data, own)
        groups.setdefault(key, []).append((name, w))

    def quick(group: list[Case]) -> tuple[bool, ...]:
        name, w = group[0]
        return w.mode not in ("bwd", "fwd_bwd"), name != "flex", w.dtype != "float32"

    return sorted(groups.values(), key=quick)


def _alone() -> None:
    """Without processes of their own: Inductor would start as many again for each."""
    from torch._inductor import config

    config.compile_threads = 1
    torch.set_num_threads(1)


def _calls(group: Sequence[Case], device: str, deadline: float) -> int:
    """In a process of its own: make the calls of a group, one after the other; how many succeeded."""
    made, where = 0, torch.device(device)
    for case in group:
        if time.monotonic() > deadline:
            break
        try:
            made += _call(*case, where)
        except Exception:  # a fact about the provider, which the bench finds again and records
            continue
        finally:
            gc.collect()
            if where.type == "cuda":
                torch.cuda.empty_cache()  # the memory is the others' now
    return made


def _call(name: str, w: Workload, device: torch.device) -> bool:
    """All that the bench calls of a provider before it times it, once."""
    provider, here = providers.get(name), Device.of(device)
    if provider.why_not(w, device):
        return False
    x = Inputs.make(w, device)
    providers.runner(provider.make(w, x), w, x)()
    providers.lse(name, w, x)
    synchronize(device)
    fingerprint.attempt(name, w, here)
    disk.write(_mark(name, w, here), b"")
    return True


def _mark(name: str, w: Workload, device: Device) -> str:
    """Under which the disk cache knows that a call was made, with what compilers leave in the folders named today."""
    places = [os.environ.get(place) for place in CACHES]
    rung = ladder.find(name.removeprefix("rung:")).source_hash() if name.startswith("rung:") else ""
    facts = ["ahead", fingerprint.sources(), torch.__version__, places, rung, name, asdict(w), asdict(device)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
