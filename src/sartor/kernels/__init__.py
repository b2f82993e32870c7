"""The kernels: one file each. FORWARD and BACKWARD are the only registry, module names in priority order."""

from __future__ import annotations

import hashlib
import importlib
from functools import cache
from pathlib import Path
from typing import Any

FORWARD = ("hopper_forward", "hopper_fp32", "fp32_forward", "triton_forward", "torch_cpu", "blocked", "reference")
BACKWARD = (
    "hopper_backward", "hopper_fp32_backward", "fp32_backward", "triton_backward", "torch_cpu_backward",
    "blocked_backward", "reference_backward",
)  # fmt: skip
OTHERS = {  # kernels that are made from other kernels' files too
    "hopper_fp32": ("hopper_forward", "fp32_forward", "triton_forward"),
    "fp32_forward": ("triton_forward",),
    "fp32_backward": ("fp32_forward", "triton_backward"),
    "hopper_backward": ("triton_backward",),
    "hopper_fp32_backward": ("hopper_backward", "fp32_backward", "fp32_forward", "triton_backward"),
}


@cache
def load(name: str) -> Any:
    """The KernelSpec called `name`: `SPEC` of its module, or `BACKWARD_SPEC` where both passes share a file."""
    if name in ("torch_cpu_backward", "blocked_backward", "reference_backward"):
        return importlib.import_module(f"sartor.kernels.{name.removesuffix('_backward')}").BACKWARD_SPEC
    return importlib.import_module(f"sartor.kernels.{name}").SPEC


def families() -> tuple[str, ...]:
    """What `kernel=` accepts besides "auto" and single kernels."""
    return tuple(dict.fromkeys(load(name).family for name in FORWARD))


@cache
def source_hash(name: str) -> str:
    """Hash of what a kernel is made from: its own files, what they include, and for GPU kernels the code generators."""
    from sartor import nvrtc

    here = Path(__file__).parent
    own = here / f"{load(name).__module__.rsplit('.', 1)[-1]}.py"
    files, device = [own], own.with_suffix(".cuh")
    if device.is_file():
        files += [here / header for header in sorted(nvrtc.headers(f'#include "{device.name}"', here))]
        files += [*sorted((here / "cuda").glob("*.py")), here.parent / "nvrtc.py"]
    files += [here / f"{other}.py" for other in OTHERS.get(name, ())]
    if name.startswith(("triton", "fp32", "hopper")):
        files += [*sorted((here / "parts").glob("*.py")), here.parent / "mods" / "expr.py"]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
