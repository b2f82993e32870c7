"""Fingerprints: what a plan tells the GPU to do, in 16 digits. Equal ones are of equal machine code, launched alike.

A fingerprint is a hash of every launch of a workload, in order: machine code, grid, block, shared memory, all arguments
that are no addresses, and the release of the compiler. It is computed without a GPU, by `rehearsal`. What a kernel's
sources are called, where they lie and what they say beside the code does not matter to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import cache
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

import sartor
from sartor import cache as disk
from sartor import nvrtc, pending
from sartor.device import ARCHITECTURES, Device
from sartor.kernels.spec import Plan
from sartor.lab.ladder import catalogue
from sartor.lab.measure import providers, rehearsal
from sartor.lab.measure.planned import planned
from sartor.lab.workloads.workload import Inputs, Workload
from sartor.problem import Call

JOINS = "; "
GPU_KERNELS = ("triton", "hopper", "fp32")  # their evidence is made on a GPU; the others' by every test run
Case = tuple[str, Workload]  # a provider, and what it computes
NOT_LAUNCHED = ("lab", "compat", "testing", "cli.py")  # parts of the package that no launch depends on
HERE = ("measure/machine_code.py", "measure/rehearsal.py", "measure/fingerprint.py", "measure/planned.py",
        "measure/providers.py", "workloads/workload.py")  # fmt: skip


class Found(NamedTuple):
    """The plan of a workload in words, without where its tile comes from, and its fingerprint. A training step has two
    of each, joined: its forward's, and its backward's."""

    plan: str
    fingerprint: str


def key(provider: str, w: Workload) -> str:
    """The name of a case in evidence."""
    return f"{provider} {w}"


def fingerprint(provider: str, w: Workload, device: Device) -> Found | None:
    """Of a provider of ours on a workload. None for others, for kernels without launches of their own, and where
    nothing can run it."""
    if w.mode == "fwd_bwd":
        parts = [fingerprint(provider, part, device) for part in w.parts]
        known = [part for part in parts if part]
        return Found(*map(JOINS.join, zip(*known, strict=True))) if len(known) == len(parts) else None
    if provider.startswith("rung:"):
        rung = catalogue.find(provider.removeprefix("rung:"))
        if not rung.kernel:
            return Found(rung.plan(w, device), rung.source_hash())
        provider = f"sartor:{rung.kernel}"
    if provider.split(":")[0] != "sartor":
        return None
    x = Inputs.without_data(w)
    forward, backward = planned(provider, w, x, device)
    plan = backward if w.mode == "bwd" else forward
    if forward is None or plan is None or not plan.kernel.name.startswith(GPU_KERNELS):
        return None
    kernel = provider.partition(":")[2] if provider.startswith("sartor:") else "auto"
    call = Call(x.q, x.k, x.v, kernel=kernel, **providers.options(w, x))
    return Found(words(plan), digest(rehearsal.launches(call, forward, backward, w.mode)))


def words(plan: Plan) -> str:
    """Kernel and tile."""
    return f"{plan.kernel.name}[{plan.tile}]" if plan.tile else plan.kernel.name


def digest(launches: Iterable[rehearsal.Launched]) -> str:
    """The fingerprint of launches; their names are for people only."""
    told = [launched[1:] for launched in launches]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def attempt(provider: str, w: Workload, device: Device) -> Found | None:
    """`kept`; a warning and None where it fails, since no measurement is to be lost for it."""
    try:
        return fingerprint(provider, w, device) if device.is_cpu else kept(provider, w, device)
    except Exception as error:
        warnings.warn(f"no fingerprint of {key(provider, w)}: {providers.reason(error)}", stacklevel=2)
        return None


@cache
def sources() -> str:
    """Hash of everything that a fingerprint depends on but for its case: files of the package, compilers."""
    root = Path(sartor.__file__).parent
    own = (f for f in sorted(root.rglob("*")) if f.suffix in (".py", ".cuh", ".jsonl", ".toml"))
    files = [f for f in own if f.relative_to(root).parts[0] not in NOT_LAUNCHED]
    digest = hashlib.sha256(json.dumps([nvrtc.compiler() if not nvrtc.missing() else "", _triton()]).encode())
    for file in (*files, *(root / "lab" / name for name in HERE)):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def kept(provider: str, w: Workload, device: Device) -> Found | None:
    """`fingerprint`, from the disk cache where it was computed from the same sources by the same compilers, with the
    same parts of kernels refused. Not of a rung in files of its own, whose sources it is the hash of."""
    if provider.startswith("rung:") and not catalogue.find(provider.removeprefix("rung:")).kernel:
        return fingerprint(provider, w, device)
    place = _place(provider, w, device)
    data = disk.read(place)
    if data is not None:
        found = json.loads(data)
        return Found(*found) if found else None
    made = fingerprint(provider, w, device)
    disk.write(place, json.dumps(made).encode())
    return made


def on_disk(provider: str, w: Workload, device: Device) -> bool:
    """Whether what computed a fingerprint that is kept has left all machine code of a case beside it: not that of
    Triton's kernels, which have a cache of their own."""
    data = disk.read(_place(provider, w, device))
    found = json.loads(data) if data is not None else None
    return found is not None and all(plan.startswith("hopper") for plan in Found(*found).plan.split(JOINS))


def _place(provider: str, w: Workload, device: Device) -> str:
    """Where in the disk cache a fingerprint is."""
    facts = [sources(), pending.refused(*pending.PARTS), provider, asdict(w), asdict(device)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def every(
    cases: Iterable[Case], device: Device, processes: int = 0, deadline: float = float("inf"),
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Found]:  # fmt: skip
    """Fingerprints by `key`, computed in parallel; none is begun after the deadline (`time.monotonic`). Cases that have
    none, fail, or come too late are left out, and it is told of the latter two."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for provider, w in dict.fromkeys(cases):  # those that are likely to share machine code are one process's
        groups.setdefault((provider, w.mode, w.dtype, w.dim, w.dim_v, w.mask, w.data), []).append((provider, w))
    work = sorted(groups.values(), key=lambda group: (group[0][1].dtype != "float32", group[0][1].mode == "fwd"))
    found: dict[str, Found] = {}
    with ProcessPoolExecutor(processes or os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(_group, group, device, deadline) for group in work]):
            for name, outcome in future.result():
                if isinstance(outcome, Found):
                    found[name] = outcome
                elif outcome:
                    tell(f"no fingerprint of {name}: {outcome}")
    return found


def _group(group: list[Case], device: Device, deadline: float) -> list[tuple[str, Found | str]]:
    """Fingerprints, or why there are none, by the key of each case."""
    torch.set_num_threads(1)
    found: list[tuple[str, Found | str]] = []
    for provider, w in group:
        name = key(provider, w)
        if time.monotonic() > deadline:
            found.append((name, "too late"))
            continue
        try:
            found.append((name, kept(provider, w, device) or ""))
        except Exception as error:
            found.append((name, providers.reason(error)))
    return found


if __name__ == "__main__":  # of one case, given as JSON, for the architecture after it
    name, fields = json.loads(sys.argv[1])
    print(json.dumps(fingerprint(name, Workload(**fields), ARCHITECTURES[int(sys.argv[2])])))
