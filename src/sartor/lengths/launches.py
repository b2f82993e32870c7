"""Launches of the kernels of this package, each with as little time of the host as there can be."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton.language as tl
from triton import knobs

from sartor import direct
from sartor.direct import version
from sartor.lengths import kernels, values
from sartor.lengths.intervals import Cache, Pair

Tensor = torch.Tensor
Tensors = tuple[Tensor, Tensor]
BLOCK = 128  # places, items or units of memory of one program
UNITS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # by bytes

NOTHING = None, None
_COMPILED: dict[Any, tuple[Any, direct.Open | None]] = {}


def launch(kernel: Any, grid: int, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], *constants: Any) -> None:
    """Launch on the current stream of the device of the tensors.

    Triton compiles once for the tensors' dtypes. After that the driver starts the compiled kernel over addresses:
    Triton's own way to it looks at every argument and takes several times as long.
    """
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return launch(kernel, grid, tensors, numbers, *constants)
    key = (kernel.__name__, device, *[t.dtype for t in tensors], *constants)
    compiled, opened = _COMPILED.get(key, NOTHING)
    if compiled is None:
        compiled = kernel[(grid,)](*tensors, *numbers, *constants, BLOCK)
        if not knobs.runtime.interpret:
            _COMPILED[key] = compiled, direct.Open.of(compiled, version())
    elif opened is None or direct.hooked():
        compiled[(grid, 1, 1)](*[t.data_ptr() for t in tensors], *numbers, *constants, BLOCK)
    else:
        opened.start(grid, [t.data_ptr() for t in tensors], numbers, direct.current_stream())
    return None


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def intervals(ends: Tensors, tables: Tensors, lengths: Pair, sides: Pair, name: str) -> None:
    """Fill the tables of `intervals.packed_intervals`. Raises ValueError for what an earlier launch found wrong."""
    (q, kv), (rows, cols), (m, n) = ends, tables, lengths
    numbers = (
        q.stride(0), kv.stride(0), q.shape[0] - 1, m, n, *sides, rows.stride(0), cols.stride(0), values.flag(q.device),
        values.WORDS["cu_seqlens_q"], values.WORDS[name],
    )  # fmt: skip
    launch(kernels.intervals_kernel, _blocks(m) + _blocks(n) or 1, (q, kv, rows, cols), numbers)


def places(ends: Tensors, table: Tensor) -> None:
    """Fill the table of `intervals.packed_places`."""
    (q, kv), n = ends, table.shape[1]
    if n:
        numbers = q.stride(0), kv.stride(0), q.shape[0] - 1, n, table.stride(0)
        launch(kernels.places_kernel, _blocks(n), (q, kv, table), numbers)


def cached(table: Tensor, lengths: Tensor | None, uniform: int, sides: Pair, cache: Cache) -> None:
    """Fill the table of `intervals.cached_table`. Raises ValueError for what an earlier launch found wrong."""
    batch, seqlen_q, capacity, added, name = cache
    if batch:
        numbers = (
            0 if lengths is None else lengths.stride(0), uniform, batch, added, capacity, seqlen_q, *sides,
            table.stride(0), values.flag(table.device), values.WORDS[name] + (4 if added else 3),
        )  # fmt: skip
        launch(kernels.cached_kernel, _blocks(batch), (table if lengths is None else lengths, table), numbers)


def append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> None:
    """Write k and v (batch, added, heads, dim) into their caches from place lengths[b] on, as far as they fit there."""
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
    if grid:
        numbers = lengths.stride(0), b, added, heads, *widths, k_cache.shape[1], *strides
        launch(kernels.append_kernel, grid, (*tensors, lengths), numbers, UNITS[unit])
