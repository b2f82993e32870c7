"""What the compilers make of a rung, for any architecture, on any machine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sartor import nvrtc
from sartor.device import ARCHITECTURES
from sartor.lab.ladder.rung import PARAMS, Rung, meta, module
from sartor.lab.workloads.workload import Workload


@dataclass(frozen=True)
class Build:
    """A kernel's registers a thread, bytes spilled, bytes of shared memory a block; `sass()` is its machine code."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    sass: Callable[[], str]


def build(rung: Rung, w: Workload, arch: int) -> Build:
    """Compile a rung for a problem. Raises CompileError; without Triton ImportError; for products Unsupported."""
    if rung.is_cuda:
        return _cuda(rung.binary(w, f"sm_{arch}"), PARAMS.kernel, rung.geometry(w)["shared"][0])
    if rung.kernel:
        return _product(rung.kernel, w, arch)
    return _triton(*module(rung.path).build(*meta(w), bool(w.pattern.causal), w.dim**-0.5), arch=arch)


def mix(sass: str) -> Counter[str]:
    """How many instructions of each kind machine code has."""
    return Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\w+)", sass, re.MULTILINE))


def _cuda(binary: nvrtc.Binary, kernel: str, dynamic_bytes: int) -> Build:
    found = binary.resources[kernel]
    return Build(
        found.registers, found.spill_bytes, found.shared_bytes + dynamic_bytes, lambda: str(binary.sass(kernel))
    )


def _triton(kernel: Any, arguments: dict[str, Any], warps: int, stages: int, *, arch: int) -> Build:
    from sartor.kernels.spec import Tile
    from sartor.kernels.triton.lower import compile_for

    made = compile_for(kernel, arguments, Tile(0, 0, warps, stages), arch)
    return Build(made.registers, made.spill_bytes, made.shared_bytes, lambda: made.sass)


def _product(family: str, w: Workload, arch: int) -> Build:
    """The kernel of a family on the tile that planning takes."""
    from sartor.kernels.spec import Operands
    from sartor.plan import choose
    from sartor.problem import Call, Problem

    if arch not in ARCHITECTURES:
        raise ValueError(f"the architecture must be among {', '.join(map(str, ARCHITECTURES))}, got {arch}")
    q, k, v = (t.transpose(1, 2) for t in meta(w))
    plan = choose(Problem.of(Call(q, k, v, causal=bool(w.pattern.causal), kernel=family)), ARCHITECTURES[arch])
    spec: Any = plan.kernel
    if hasattr(spec, "compile"):
        binary = spec.compile(plan.problem, plan.tile)
        largest = max(binary.resources, key=lambda name: binary.resources[name].registers)
        return _cuda(binary, largest, spec.shared_bytes(plan))
    out, lse = torch.empty_like(q), q.new_empty((w.batch, w.heads_q, w.seqlen_q), dtype=torch.float32)
    step = next(s for s in spec.launches(plan, Operands(q, k, v), out, lse) if s.name == "forward")
    return _triton(step.kernel, step.arguments, step.tile.warps, step.tile.stages, arch=arch)
