"""Launches of the kernels of this package, each with as little time of the host as there can be."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton import knobs

from sartor import direct, driver
from sartor.direct import version
from sartor.lengths import kernels, values
from sartor.lengths.intervals import Cache, Pair

Tensor = torch.Tensor
Tensors = tuple[Tensor, Tensor]
BLOCK = 128  # places, items or units of memory of one program
UNITS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # by bytes

NOTHING = None, None
_COMPILED: dict[Any, tuple[Any, direct.Open | None]] = {}


class Launch(NamedTuple):
    """One, of as many programs as its grid says."""

    kernel: Any
    grid: int
    tensors: tuple[Tensor, ...]
    numbers: tuple[int, ...]
    constants: tuple[Any, ...] = ()

    @property
    def key(self) -> Any:
        """What it is compiled for."""
        return (self.kernel.__name__, self.tensors[0].device, *[t.dtype for t in self.tensors], *self.constants)

    def step(self, given: tuple[int, ...]) -> driver.Step | None:
        """The launch as one of a list, with these numbers; `given` are the places of its tensors' addresses among the
        values of a call. None where it was not made yet, or Triton had better make it."""
        opened = _COMPILED.get(self.key, NOTHING)[1]
        if opened is None:
            return None
        (step,), count = opened.launches.steps, len(self.tensors)
        fixed = {count + i: n for i, n in enumerate(self.numbers)} | dict(step.fixed)
        return step._replace(fixed=fixed, given=given, grid=(self.grid, 1, 1))


def launch(one: Launch) -> None:
    """Launch on the current stream of the device of the tensors.

    Triton compiles once for the tensors' dtypes. After that the driver starts the compiled kernel over addresses:
    Triton's own way to it looks at every argument and takes several times as long.
    """
    kernel, grid, tensors, numbers, constants = one
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return launch(one)
    compiled, opened = _COMPILED.get(one.key, NOTHING)
    if compiled is None:
        compiled = kernel[(grid,)](*tensors, *numbers, *constants, BLOCK)
        if not knobs.runtime.interpret:
            _COMPILED[one.key] = compiled, direct.Open.of(compiled, version())
    elif opened is None or direct.hooked():
        compiled[(grid, 1, 1)](*[t.data_ptr() for t in tensors], *numbers, *constants, BLOCK)
    else:
        opened.start(grid, [t.data_ptr() for t in tensors], numbers, direct.current_stream())
    return None


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def intervals(ends: Tensors, tables: Tensors, lengths: Pair, sides: Pair, name: str) -> None:
    """Fill the tables of `intervals.packed_intervals`. Raises ValueError for what an earlier launch found wrong."""
    values.flag(ends[0].device)
    launch(of_intervals(ends, tables, lengths, sides, name))


def of_intervals(ends: Tensors, tables: Tensors, lengths: Pair, sides: Pair, name: str) -> Launch:
    """The launch of `intervals`."""
    (q, kv), (rows, cols), (m, n) = ends, tables, lengths
    numbers = (
        q.stride(0), kv.stride(0), q.shape[0] - 1, m, n, *sides, rows.stride(0), cols.stride(0),
        values.address(q.device), values.WORDS["cu_seqlens_q"], values.WORDS[name],
    )  # fmt: skip
    return Launch(kernels.intervals_kernel, _blocks(m) + _blocks(n) or 1, (q, kv, rows, cols), numbers)


def places(ends: Tensors, table: Tensor) -> None:
    """Fill the table of `intervals.packed_places`."""
    (q, kv), n = ends, table.shape[1]
    if n:
        numbers = q.stride(0), kv.stride(0), q.shape[0] - 1, n, table.stride(0)
        launch(Launch(kernels.places_kernel, _blocks(n), (q, kv, table), numbers))


def cached(table: Tensor, lengths: Tensor | None, uniform: int, sides: Pair, cache: Cache) -> None:
    """Fill the table of `intervals.cached_table`. Raises ValueError for what an earlier launch found wrong."""
    if cache.batch:
        values.flag(table.device)
        launch(of_cached(table, lengths, uniform, sides, cache))


def of_cached(table: Tensor, lengths: Tensor | None, uniform: int, sides: Pair, cache: Cache) -> Launch:
    """The launch of `cached`."""
    batch, seqlen_q, capacity, added, name = cache
    numbers = (
        0 if lengths is None else lengths.stride(0), uniform, batch, added, capacity, seqlen_q, *sides,
        table.stride(0), values.address(table.device), values.WORDS[name] + (4 if added else 3),
    )  # fmt: skip
    return Launch(kernels.cached_kernel, _blocks(batch), (table if lengths is None else lengths, table), numbers)


def filled(lengths: Tensor, cache: Cache) -> None:
    """Look at lengths (batch,) that a mask reads itself. Raises ValueError for what an earlier launch found wrong."""
    values.flag(lengths.device)
    launch(of_filled(lengths, cache))


def of_filled(lengths: Tensor, cache: Cache) -> Launch:
    """The launch of `filled`."""
    device = lengths.device
    numbers = lengths.stride(0), cache.batch, cache.capacity, values.address(device), values.WORDS[cache.name] + 3
    return Launch(kernels.filled_kernel, 1, (lengths,), numbers, (_overlaps(device),))


@cache
def _overlaps(device: torch.device) -> bool:
    """Whether a launch may begin before one of Triton's has ended."""
    if device.type != "cuda" or knobs.runtime.interpret or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return hasattr(tl.extra.cuda, "gdc_launch_dependents") and driver.overlaps()


def append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, name: str) -> None:
    """Write k and v (batch, added, heads, dim) into their caches from place lengths[b] on, as far as they fit there.
    Errors call the lengths `name`. Raises ValueError for what an earlier launch found wrong."""
    values.flag(k.device)
    one = of_append(k, v, k_cache, v_cache, lengths, name)
    if one.grid:
        launch(one)


def of_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, name: str) -> Launch:
    """The launch of `append`, of no program where nothing is added."""
    b, added, heads, dim = k.shape
    size = k.element_size()
    strides = [*k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride()]
    tensors = k, v, k_cache, v_cache
    unit = size
    if all(t.stride(3) == 1 for t in tensors):  # then by the largest unit that every row begins and ends on
        rows = [n for i, n in enumerate(strides) if i % 4 != 3]
        unit = math.gcd(8, *[t.data_ptr() for t in tensors], *[n * size for n in (*rows, dim, v.shape[3])])
        strides = [1 if i % 4 == 3 else n * size // unit for i, n in enumerate(strides)]
    widths = dim * size // unit, v.shape[3] * size // unit
    grid = sum(_blocks(b * added * heads * width) for width in widths)
    told = values.address(k.device), values.WORDS[name] + 4
    numbers = lengths.stride(0), b, added, heads, *widths, k_cache.shape[1], *told, *strides
    return Launch(kernels.append_kernel, grid, (*tensors, lengths), numbers, (UNITS[unit],))
