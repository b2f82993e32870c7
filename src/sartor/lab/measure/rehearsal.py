"""What the GPU would be told to do for a workload: every launch of a call, on a machine that needs no GPU.

A plan's kernels run on tensors without data while the few functions by which they reach the driver write down what they
are given. Tensors without data lie at address 0, so pointers say nothing, and offsets from them do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib import metadata
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from sartor import nvrtc
from sartor.device import Device
from sartor.kernels.blocks import Blocks
from sartor.kernels.cuda import host
from sartor.kernels.cuda.row import Row
from sartor.kernels.spec import Plan, Saved
from sartor.kernels.triton import launch
from sartor.lab.measure.machine_code import code_hash
from sartor.ops import Prepared, own
from sartor.problem import Call, Problem

WARP = 32


class Launched(NamedTuple):
    """One launch. `name` and `compiler` are for people; the compiler is its name and release."""

    name: str
    compiler: str
    code: str  # hash of the machine code
    grid: tuple[int, int, int]
    block: int
    cluster: int
    shared: int  # bytes of dynamic shared memory
    arguments: tuple[Any, ...]  # in order: numbers, bytes, 0 for addresses


def launches(call: Call, forward: Plan, backward: Plan | None, mode: str) -> list[Launched]:
    """The launches of `mode` (of `workloads.MODES`) for a call on meta tensors, computed as the plans say."""
    problem, template = Problem.parse(call)
    gradients = mode in ("bwd", "fwd_bwd")
    both = Prepared(problem, forward.device, own(forward), template, forward.kernel.any_layout)
    x = both.operands(call.bshd() if gradients else call, lse=gradients)
    with rehearsed(forward.device) as found:
        out, lse = forward.kernel.run(both.forward, x)
        if mode == "bwd":
            found.clear()
        if gradients:
            assert backward is not None
            backward.kernel.run(own(backward), replace(x, lse=True), Saved(out, lse, torch.empty_like(out), None))
    return found


@contextmanager
def rehearsed(device: Device) -> Iterator[list[Launched]]:
    """While it lasts nothing is launched; the list gets what would be. One thread at a time."""
    found: list[Launched] = []

    def cuda(kernel: nvrtc.Kernel, grid: int | tuple[int, int, int], values: Any, stream: Any = None) -> None:
        code = code_hash(kernel.binary.cubin, kernel.name)
        size = (grid, 1, 1) if isinstance(grid, int) else grid
        compiler = f"NVRTC {nvrtc.compiler().split()[0]}"
        arguments = tuple(_plain(_passed(kernel, values)))
        found.append(Launched(kernel.name, compiler, code, size, kernel.block, 1, kernel.shared, arguments))

    def row(launches: Row, values: Any) -> None:
        for one in launches.named(values):
            cuda(*one)

    def triton(steps: Iterable[launch.Launch], cache: Any, key: object = None) -> None:
        found.extend(_of_triton(step, device.arch) for step in steps if step.grid)

    def tensor_map(address: int, *facts: Any) -> bytes:
        return hashlib.sha512(repr((address, *facts)).encode()).digest() * 2

    def workspace(device: torch.device, marks: int = 0) -> torch.Tensor:
        return torch.empty(host.COUNTERS + marks, dtype=torch.int32, device="meta")

    with ExitStack() as seams:
        seams.enter_context(patch.object(nvrtc.Kernel, "launch", cuda))
        seams.enter_context(patch.object(Row, "start", row))
        seams.enter_context(patch.object(nvrtc, "tensor_map", tensor_map))
        seams.enter_context(patch.object(host, "workspace", workspace))
        seams.enter_context(patch.object(Blocks, "arguments", property(lambda found: found.named(_content))))
        seams.enter_context(patch.object(launch, "known", lambda steps: None))
        seams.enter_context(patch.object(launch, "run", triton))
        seams.enter_context(patch.object(launch, "interpreted", lambda: False))
        seams.enter_context(patch.object(torch.cuda, "device", lambda device: nullcontext()))
        seams.enter_context(patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        yield found


def _content(table: torch.Tensor) -> int:
    """What stands for a table that has data even here, whose address is another in every process."""
    return int.from_bytes(hashlib.sha256(table.numpy().tobytes()).digest()[:7], "big")


def _passed(kernel: Any, values: Any) -> Iterable[Any]:
    """What a launch passes, in the order of the parameters."""
    given = {**kernel.fixed, **values}
    return [given[name] for name in kernel.params.types]


def _of_triton(step: launch.Launch, arch: int) -> Launched:
    from sartor.kernels.triton.lower import compiled_for, settled

    made = compiled_for(step.kernel, step.arguments, step.tile, arch)
    facts, constants = made.metadata, {p.name for p in step.kernel.params if p.is_constexpr}
    given = [value for name, value in step.arguments.items() if name not in constants]
    return Launched(
        step.name, f"Triton {metadata.version('triton')}", code_hash(settled(made, arch), facts.name),
        (step.grid, 1, 1), WARP * facts.num_warps, facts.num_ctas, facts.shared, tuple(_plain(given)),
    )  # fmt: skip


def _plain(values: Iterable[Any]) -> Iterator[Any]:
    """Numbers and texts only: 0 for a tensor, what a tuple holds for the tuple; floats with all their bits."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield 0
        elif isinstance(value, tuple | list):
            yield from _plain(value)
        else:
            yield value.hex() if isinstance(value, bytes | float) else value
