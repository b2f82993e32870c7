"""The kernels: one file each. FORWARD and BACKWARD are the only registry, module names in priority order."""

from __future__ import annotations

import ast
import hashlib
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

FORWARD = ("hopper_forward", "hopper_fp32", "fp32_forward", "triton_forward", "torch_cpu", "blocked", "reference")
BACKWARD = (
    "hopper_backward", "hopper_fp32_backward", "fp32_backward", "triton_backward", "torch_cpu_backward",
    "blocked_backward", "reference_backward",
)  # fmt: skip


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
    """Hash of what a kernel is made from."""
    digest = hashlib.sha256()
    for file in sources(name):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def sources(name: str) -> list[Path]:
    """The files: its own, those of kernels and code generators that it imports, what its device code includes, mods."""
    from sartor import nvrtc

    here = Path(__file__).parent
    own = here / f"{load(name).__module__.rsplit('.', 1)[-1]}.py"
    found, left = set((here.parent / "mods").glob("*.py")), [own]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += _imports(file, here.parent)
    device = own.with_suffix(".cuh")
    if device.is_file():
        found |= {device, *(here / header for header in nvrtc.headers(f'#include "{device.name}"', here))}
    return sorted(found)


def _imports(file: Path, package: Path) -> Iterator[Path]:
    """What a file imports of kernels, wherever in it, and the run-time compiler."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for module in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                path = package.parent / f"{module.replace('.', '/')}.py"
                if path.is_file() and (path.is_relative_to(package / "kernels") or path == package / "nvrtc.py"):
                    yield path
