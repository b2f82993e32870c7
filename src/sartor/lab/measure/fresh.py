"""First calls: of a process that finds nothing compiled on disk, then of one that finds what the first has left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

from sartor.lab.measure import providers
from sartor.lab.measure.records import Record
from sartor.lab.measure.timing import synchronize
from sartor.lab.workloads.workload import Inputs, Workload

CACHES = ("SARTOR_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
CODE = """import sys, time, torch
start = time.perf_counter()
from sartor import *
import_s = time.perf_counter() - start
from sartor.lab.measure import fresh
fresh.main(sys.argv[1], import_s)
"""


def measure(record: Record, device: torch.device) -> None:
    """Fill in a record: the first call without caches, then from the disk, of `sartor` its import; or why not."""
    given = json.dumps([record.provider, asdict(record.workload), str(device)])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {key: str(Path(folder) / key) for key in CACHES}
        cold = _process(given, caches)
        disk = cold if "skipped" in cold else _process(given, caches)
    record.skipped = disk.get("skipped")
    record.first_call_s, record.disk_call_s = cold.get("call_s"), disk.get("call_s")
    record.import_s = disk.get("import_s") if record.provider == "sartor" else None


def _process(given: str, caches: dict[str, str]) -> dict[str, Any]:
    """What a process that runs `main` prints; where it breaks, the last line of its complaint as `skipped`."""
    command = [sys.executable, "-c", CODE, given]
    done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"skipped": providers.reason(RuntimeError(f"exit code {done.returncode} {last}"))}
    return cast(dict[str, Any], json.loads(done.stdout.splitlines()[-1]))


def main(given: str, import_s: float) -> None:
    """Runs in the fresh process: prints what was measured, or why it cannot be."""
    name, fields, device = json.loads(given)
    try:
        call_s = first_call(name, Workload(**fields), torch.device(device))
        found: dict[str, Any] = {"call_s": call_s, "import_s": import_s}
    except Exception as error:  # a fact about the provider, as in the bench
        found = {"skipped": providers.reason(error)}
    print(json.dumps(found))


def first_call(name: str, w: Workload, device: torch.device) -> float:
    """Seconds of the first call with what its provider prepares; of a backward, once its forward has been called."""
    x = Inputs.make(w, device)  # a GPU is awake from here on
    if x.q.requires_grad:  # and so is autograd, whose first call imports SymPy
        torch.autograd.grad(x.q.sum(), x.q, torch.ones((), dtype=x.q.dtype, device=device))

    def prepare() -> Callable[[], Any]:
        return providers.runner(providers.get(name).make(w, x), w, x)

    run = prepare() if w.mode == "bwd" else lambda: prepare()()
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start
