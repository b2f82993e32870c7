"""Host side shared by the Hopper kernels: what they need, how they are compiled, copies' widths and maps, counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from sartor import driver, nvrtc
from sartor.device import Device
from sartor.kernels.cuda import expressions, wgmma
from sartor.kernels.cuda.params import Params
from sartor.kernels.spec import Operands
from sartor.mods.program import Program
from sartor.problem import Problem, name_of
from sartor.symbols import Symbol, SymbolicTensor

FOLDER = Path(__file__).parent.parent
# The shelves that know no macros. They come before a kernel's own, which are named as their templates' parameters are.
SHELVES = tuple(f"cuda/{name}.cuh" for name in ("expressions", "near", "softmax", "split", "wgmma"))
COUNTERS = 4  # two of the scheduler, two of who splits float32
_WORKSPACES: dict[tuple[int, int], torch.Tensor] = {}  # by device and stream
_REPLACED: list[torch.Tensor] = []  # by larger ones: launches that are not done use them, and no allocator knows
_SPARE: dict[int, torch.Tensor] = {}  # by device: for the next graph, as none can be made while it is captured
_OF_GRAPHS: dict[tuple[int, int, int], torch.Tensor] = {}  # by device, capture, stream: a graph's, as long as it lives
MOST_GRAPHS = 256  # with a workspace that was cleared before
Made = TypeVar("Made")


def reasons(p: Problem, dev: Device, capability: int) -> list[str]:
    """What every kernel of this kind needs of the machine, the lengths and what the mods read."""
    why = []
    needed, given = (f"{n // 10}.{n % 10}" for n in (capability, dev.arch))
    if dev.is_cpu:
        why.append(f"needs an NVIDIA GPU of compute capability {needed}, this is a CPU")
    elif dev.arch != capability:
        why.append(f"needs compute capability {needed}, {dev.name} has {given}")
    elif nvrtc.missing():
        why.append(nvrtc.missing())
    if p.empty:
        why.append(f"needs a query and a key, got batch {p.batch}, {p.seqlen_q} queries, {p.seqlen_kv} keys")
    unknown = sorted({a.dtype for a in p.program.aux if a.dtype} - set(expressions.TYPES))
    return [*why, *(f"needs masks and scores that read a dtype CUDA C++ has, got {dtype}" for dtype in unknown)]


class AnyConfig(Protocol):
    """What a kernel is compiled for, whichever it is."""

    @property
    def p(self) -> Problem:
        """The problem."""

    @property
    def near(self) -> tuple[int, ...]:
        """The aux values that are brought to shared memory tile by tile."""

    def defines(self) -> dict[str, Any]:
        """Macros by name."""


def build(
    target: str, m: AnyConfig, dtype: str, file: str, widths: Iterable[int], kernels: tuple[Params, ...]
) -> nvrtc.Binary:
    """Compile `kernels`, of which the first reads the mods of its problem, from `file`, with a config and products of
    `dtype`, which are as wide as `widths` says. What was made in this process is found by these, without a look at the
    texts."""
    half, defines = m.p.dtype.itemsize == 2, m.defines()
    defines = defines if isinstance(defines, Macros) else Macros(defines)
    return _built(target, file, dtype, defines, m.p.program, m.near, half, tuple(widths), kernels)


class Macros(dict[str, Any]):
    """By name. A kernel is found by them, so their hash is made once."""

    _hash: int | None = None

    def __hash__(self) -> int:  # type: ignore[override]
        if self._hash is None:
            self._hash = hash(tuple(self.items()))
        return self._hash


@lru_cache(maxsize=1024)
def _built(
    target: str, file: str, dtype: str, defines: Macros, program: Program, near: tuple[int, ...],
    half: bool, widths: tuple[int, ...], kernels: tuple[Params, ...],
) -> nvrtc.Binary:  # fmt: skip
    (main, *others), includes = kernels, nvrtc.headers(f'#include "{file}.cuh"', FOLDER)
    text = "\n".join([
        *(f'#include "{shelf}"' for shelf in SHELVES if shelf in includes),
        *(f"#define {name} {value}" for name, value in defines.items()),
        expressions.source(program, near, half=half, tiles="cuda/near.cuh" in includes),
        wgmma.wrappers(widths, dtype),
        main.source(),
        *(kernel.macros() for kernel in (expressions.passed(main, program), *others)),
        f'#include "{file}.cuh"',
        main.checks(),
    ])  # fmt: skip
    return nvrtc.compile(text, arch=target, include=FOLDER, name=f"{file}.cu")


def kept(make: Callable[[], Made]) -> Made:
    """What `make` returns: tensors that outlive the call. It runs on a thread of its own, where neither the memory pool
    of a CUDA graph nor inference mode reaches: torch.compile's graphs refuse what stays alive in their pool."""
    if torch.cuda.is_current_stream_capturing():  # another thread's allocation would end the capture
        return make()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def current(device: torch.device) -> bool:
    """Whether launches would be on this device: torch's current one. Tests have none."""
    return device.type != "cuda" or device.index == torch._C._cuda_getDevice()


def like(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A float32 tensor for `empty_like`, which parses fewer arguments than `empty`: one number a device, expanded."""
    if shape[-1].__class__ is Symbol:  # type: ignore[comparison-overlap]
        return SymbolicTensor(shape, (0,) * len(shape), torch.float32, device)  # type: ignore[return-value]
    return _one(device).expand(shape)


@cache
def _one(device: torch.device) -> torch.Tensor:
    return kept(lambda: torch.empty(1, dtype=torch.float32, device=device))


def workspace(device: torch.device, marks: int = 0) -> torch.Tensor:
    """int32: COUNTERS, which every launch leaves as zeros, and room for marks, of which a launch reads only what it
    wrote. One a stream, since launches on different streams may overlap, as large as any wanted and up to twice that:
    lengths that grow make few, each of which waits for the device. A captured graph has its own, for each of its
    streams: one that a call before made, where there is one, so that the graph need not clear it."""
    size, stream = COUNTERS + marks, torch._C._cuda_getCurrentRawStream(device.index)
    if stream and torch.cuda.is_current_stream_capturing():  # the default stream, 0, cannot be captured
        return _of_graph(device, stream, size)
    key = device.index, stream
    found = _WORKSPACES.get(key)
    if found is None or found.numel() < size:
        if found is not None:
            _REPLACED.append(found)  # sizes double: together they are smaller than the last
        found = _WORKSPACES[key] = kept(lambda: _zeros(1 << (size - 1).bit_length(), device))
    spare = _SPARE.get(device.index)
    if (spare is None or spare.numel() < size) and len(_OF_GRAPHS) < MOST_GRAPHS:
        _SPARE[device.index] = kept(lambda: _zeros(1 << (size - 1).bit_length(), device))
    return found


def _of_graph(device: torch.device, stream: int, size: int) -> torch.Tensor:
    key = device.index, driver.capture(stream), stream
    found = _OF_GRAPHS.get(key)
    if found is None and (spare := _SPARE.pop(device.index, None)) is not None:
        found = _OF_GRAPHS[key] = spare
    if found is None or found.numel() < size:
        return torch.zeros(size, dtype=torch.int32, device=device)
    return found


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    zeros = torch.zeros(size, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # the launch that reads them is on another stream
    return zeros


def width(dim: int, few: int) -> int:
    """Columns of a swizzled chunk, for a head dim: the widest that fills up; the widest of all where narrow ones would
    have to fill more than `few` columns, or where rows do not start on 32 bytes, which narrow copies feel most."""
    columns = -(-dim // 16) * 16
    if columns % 64 == 0 or dim % 16 or (columns > few and columns % 32):
        return 64
    return 32 if columns % 32 == 0 else 16


def pair_maps(
    t: torch.Tensor, rows: int, keys: int = 64, swizzled: bool = True
) -> tuple[nvrtc.TensorMaps, dict[str, int]]:
    """Maps of tensors like `t`, (b, h, q, kv), for so many queries and keys; and what places by item and head are
    multiplied with: 0 where all are alike, as they are along a dim that was expanded."""
    found = {name: int(t.stride(i) > 0 and t.shape[i] > 1) for i, name in enumerate(("by_item", "by_head"))}
    one = t[: t.shape[0] if found["by_item"] else 1, : t.shape[1] if found["by_head"] else 1]
    return maps(one.transpose(1, 2), (rows, 1), keys, swizzled=swizzled), found


def unexpanded(x: Operands, near: tuple[int, ...]) -> Operands:
    """With a copy of what is near that is one row, expanded to all queries: the copy engine wants each in a place."""
    found = [i for i in near if x.aux[i].stride(2) == 0]  # type: ignore[union-attr]
    if not found:
        return x
    return replace(x, aux=tuple(t.contiguous() if i in found else t for i, t in enumerate(x.aux)))  # type: ignore[union-attr]


def maps(
    t: torch.Tensor, rows_heads: tuple[int, int], *widths: int, promotion: int = 0, swizzled: bool = True
) -> nvrtc.TensorMaps:
    """Maps of tensors like `t`, (b, s, h, d), for copies of so many rows and heads, in chunks of each of `widths`; with
    an L2 promotion of so many bytes, or by default as a map has it."""
    (b, s, h, d), (of_b, of_s, of_h, _), size = t.shape, t.stride(), t.itemsize
    strides = size * of_s if s > 1 else 16, size * of_h if h > 1 else 16, size * of_b if b > 1 else 16
    more = (promotion,) if promotion else ()
    boxes = [((width, *rows_heads, 1), swizzled * size * width, *more) for width in widths if width]
    return nvrtc.TensorMaps(name_of(t.dtype), (d, s, h, b), strides, *boxes)
