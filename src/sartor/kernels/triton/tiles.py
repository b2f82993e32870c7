"""Tiles of a head: a head dim is cut into powers of two (96 = 64 + 32), and a tile is a tuple of such chunks.

CHUNKS is a constexpr tuple of (first column, width). Nothing is padded to the next power of two; the last chunk is
masked where the head dim is no multiple of 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sartor.kernels.triton.maths import finite


def chunks(dim: int, widest: int = 256) -> tuple[tuple[int, int], ...]:
    """(first column, width) of each chunk: greedy powers of two from `widest` down to 16."""
    found, start, left = [], 0, -(-dim // 16) * 16
    for width in (256, 128, 64, 32, 16):
        while left >= width and width <= widest:
            found.append((start, width))
            start, left = start + width, left - width
    return tuple(found)


def wide_chunks(dim: int) -> tuple[tuple[int, int], ...]:
    """Chunks for the columns of a product: 32 + 16 becomes 64, two narrow products cost more than a wider one."""
    full = -(-dim // 16) * 16
    return chunks(full + 16 if full % 64 == 48 else full)


@triton.constexpr_function
def count(CHUNKS):
    """Number of chunks."""
    return len(CHUNKS)


@triton.constexpr_function
def first(CHUNKS, i):
    """First column of chunk i."""
    return CHUNKS[i][0]


@triton.constexpr_function
def width(CHUNKS, i):
    """Columns of chunk i, a power of two."""
    return CHUNKS[i][1]


@triton.constexpr_function
def ragged(CHUNKS, i, DIM):
    """Whether chunk i reaches past the head dim."""
    return CHUNKS[i][0] + CHUNKS[i][1] > DIM


@triton.constexpr_function
def flag(FLAGS, i):
    """Element i of a constexpr tuple."""
    return FLAGS[i]


@triton.jit
def load_tile(base, rows, stride, limit, DIM: tl.constexpr, CHUNKS: tl.constexpr, BOUNDED: tl.constexpr):
    """Rows `rows` (int32 vector) of a (seqlen, dim) matrix at `base`, a chunk each; 0 outside."""
    tile = ()
    for i in tl.static_range(count(CHUNKS)):
        cols = first(CHUNKS, i) + tl.arange(0, width(CHUNKS, i))
        p = base + rows[:, None] * stride + cols[None, :]
        if ragged(CHUNKS, i, DIM):
            if BOUNDED:
                x = tl.load(p, mask=(rows[:, None] < limit) & (cols[None, :] < DIM), other=0.0)
            else:
                x = tl.load(p, mask=(cols[None, :] < DIM) & (rows[:, None] >= 0), other=0.0)
        elif BOUNDED:
            x = tl.load(p, mask=rows[:, None] < limit, other=0.0)
        else:
            x = tl.load(p)
        tile = tile + (x,)
    return tile


@triton.jit
def store_tile(base, rows, stride, limit, tile, DIM: tl.constexpr, CHUNKS: tl.constexpr):
    """The inverse of load_tile, in the dtype of `base`."""
    for i in tl.static_range(count(CHUNKS)):
        cols = first(CHUNKS, i) + tl.arange(0, width(CHUNKS, i))
        p = base + rows[:, None] * stride + cols[None, :]
        x = tile[i].to(base.dtype.element_ty)
        if ragged(CHUNKS, i, DIM):
            tl.store(p, x, mask=(rows[:, None] < limit) & (cols[None, :] < DIM))
        else:
            tl.store(p, x, mask=rows[:, None] < limit)


@triton.jit
def zeros(ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """A float32 tile of zeros."""
    tile = ()
    for i in tl.static_range(count(CHUNKS)):
        tile = tile + (tl.zeros((ROWS, width(CHUNKS, i)), tl.float32),)
    return tile


@triton.jit
def scale_tile(tile, factor, CHUNKS: tl.constexpr):
    """tile * factor, `factor` broadcastable to [ROWS, width]."""
    result = ()
    for i in tl.static_range(count(CHUNKS)):
        result = result + (tile[i] * factor,)
    return result


@triton.jit
def finite_tile(tile, CHUNKS: tl.constexpr):
    """The tile with 0 for NaN and infinities."""
    result = ()
    for i in tl.static_range(count(CHUNKS)):
        result = result + (tl.where(finite(tile[i]), tile[i], tl.zeros_like(tile[i])),)
    return result


@triton.jit
def has_nonfinite(tile, CHUNKS: tl.constexpr):
    """1 when any element is NaN or infinite, else 0."""
    found = 0
    for i in tl.static_range(count(CHUNKS)):
        rows = tl.max(tl.where(finite(tile[i]), 0, 1), 1)
        # of a column and then of one element: Triton 3.6 compiles no plain reduction of these rows for sm_100
        found = tl.maximum(found, tl.max(tl.max(rows[:, None], 0)))
    return found


@triton.jit
def add_attended(acc, w, keep, base, start, stride, limit, N: tl.constexpr, DIM: tl.constexpr, CHUNKS: tl.constexpr):
    """acc + w @ y, in which row j of y reaches only where keep[:, j], by hand instead of by a matrix product.

    0 * NaN is NaN in a matrix product. w and keep are [M, N]; y is the rows `start` .. `start + N` of the matrix at
    `base`. Slow, and run only where a result came out non-finite.
    """
    columns = tl.arange(0, N)
    for j in tl.range(0, N, num_stages=1):
        w_j = tl.sum(tl.where(columns[None, :] == j, w, 0.0), 1)
        keep_j = tl.sum(tl.where((columns[None, :] == j) & keep, 1, 0), 1) > 0
        result = ()
        for i in tl.static_range(count(CHUNKS)):
            cols = first(CHUNKS, i) + tl.arange(0, width(CHUNKS, i))
            inside = (cols < DIM) & (cols * 0 + start + j < limit)
            y = tl.load(base + tl.cast(start + j, tl.int64) * stride + cols, mask=inside, other=0.0).to(tl.float32)
            result = result + (acc[i] + tl.where(keep_j[:, None], w_j[:, None] * y[None, :], 0.0),)
        acc = result
    return acc
