"""doctor: what this machine has, what is missing, and whether attention is right on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

import sartor
from sartor import cache, nvrtc
from sartor.device import Device
from sartor.lab.measure import check
from sartor.lab.workloads.workload import Workload
from sartor.replay import calls


class Finding(NamedTuple):
    """One line. `ok` is None for a plain fact."""

    what: str
    found: str
    ok: bool | None = None


def examine() -> Iterator[Finding]:
    """Facts first, the self-test last."""
    yield Finding("sartor", sartor.__version__)
    yield Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    yield _package("triton", "portable GPU kernels", (3, 5))
    yield _package("cuda-core", "kernels compiled by NVRTC", (0, 7))
    yield Finding("NVRTC", nvrtc.missing() or nvrtc.compiler())
    yield Finding("launches of the Hopper kernels", calls.told())
    for folder in caches():
        closed = "" if os.access(_standing(folder), os.W_OK) else ", which cannot be written"
        yield Finding("cache", f"{_short(folder)}, {_mib(folder):.1f} MiB{closed}", None if not closed else False)
    for ignored in cache.contents().ignored:
        yield Finding("cache", ignored, False)
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    else:
        yield Finding("GPU", "none: the CPU kernels serve")
    for device in devices:
        yield from _device(device)


def _device(device: torch.device) -> Iterator[Finding]:
    d = Device.of(device)
    if device.type == "cuda":
        facts = f"{d.name}, sm_{d.arch}, {d.sm_count} SMs, {d.smem_bytes >> 10} KiB a block, L2 {d.l2_bytes >> 20} MiB"
        yield Finding(str(device), facts, d.arch >= 80)
    for w in (Workload(2, 4, 2, 130, 130, 72, 72, "float32", "causal", mode) for mode in ("fwd", "bwd")):
        row = check.judge(w, device)
        if row.verdict is None:
            yield Finding(f"self-test on {device}", f"{w}: {row.skipped}", False)
        else:
            v = row.verdict
            yield Finding(
                f"self-test on {device}", f"{w}: {row.plan}, error {v.err_max:.1e} of {v.err_budget:.1e}", row.ok
            )


def _package(name: str, purpose: str, least: tuple[int, int]) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, f"not installed ({purpose}; pip install 'sartor[gpu]')")
    numbers = tuple(int(x) for x in found.split(".")[:2])
    return Finding(name, f"{found} ({purpose})", numbers >= least)


def caches() -> list[Path]:
    """Folders of compiled kernels: Triton's and ours."""
    home = Path.home()
    triton = Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))
    return [triton, cache.folder()]


def _mib(folder: Path) -> float:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 2**20 if folder.is_dir() else 0.0


def _standing(folder: Path) -> Path:
    """The folder, or what there is of the way to it."""
    return folder if folder.exists() else _standing(folder.parent)


def _short(folder: Path) -> str:
    return str(folder).replace(str(Path.home()), "~")
