"""The kernels: one file each. FORWARD and BACKWARD are the only registry, module names in priority order."""

from __future__ import annotations

import hashlib
import importlib
from functools import cache
from pathlib import Path
from typing import Any

FORWARD = ("fp32_forward", "triton_forward", "torch_cpu", "blocked", "reference")
BACKWARD = ("fp32_backward", "triton_backward", "blocked_backward", "reference_backward")


@cache
def load(name: str) -> Any:
    """The KernelSpec called `name`: `SPEC` of its module, or `BACKWARD_SPEC` where both passes share a file."""
    if name in ("blocked_backward", "reference_backward"):
        return importlib.import_module(f"sartor.kernels.{name.removesuffix('_backward')}").BACKWARD_SPEC
    return importlib.import_module(f"sartor.kernels.{name}").SPEC


def families() -> tuple[str, ...]:
    """What `kernel=` accepts besides "auto"."""
    return tuple(dict.fromkeys(load(name).family for name in FORWARD))


@cache
def source_hash(name: str) -> str:
    """Hash of the sources a kernel is made from: its own file, and for GPU kernels `parts/` and the code generator."""
    here = Path(__file__).parent
    files = [here / f"{load(name).__module__.rsplit('.', 1)[-1]}.py"]
    if name.startswith("fp32"):  # the Triton kernel of the same pass, on split operands
        files.append(here / f"{name.replace('fp32', 'triton')}.py")
    if name.startswith(("triton", "fp32")):
        files += [*sorted((here / "parts").glob("*.py")), here.parent / "mods" / "expr.py"]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
