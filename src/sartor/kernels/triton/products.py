"""Tile products in every precision: of operands as they are, rounded to tf32, in pairs of float16, triples of bfloat16.

Pairs (split.py): three products of float16 take the place of one, lo times lo being below float32's precision,

    x y  =  lo hi  +  hi lo  +  hi hi         (the small ones first)

The tensor core adds up in float32 but cuts off what it aligns, so a sum over a whole sequence would drift. Scores have
short sums. Sums over keys or queries start from 0 at every tile and are added to the result by an ordinary float32
multiply-add, which also puts the tile's unit in. The same holds for triples, which the compiler makes of float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sartor.kernels.triton.maths import LOG2_E, finite, power_of_two
from sartor.kernels.triton.split import SEGMENT, regained
from sartor.kernels.triton.tiles import count, load_tile, width

# An element of a pair is off by 2^-25 units at most, uniformly, where it is small; its partner is below 2^15. Summed
# in quadrature over a head dim and both operands a score is off by less than NOISE * sqrt(dim) units.
NOISE = tl.constexpr(2.0**-10)
RESOLVED = tl.constexpr(2.0**-22)  # what a score may be off by, or this share of the row's largest score
HUGE = tl.constexpr(1024.0 * 1.4426950408889634)  # a score (log2) of which the last bit of float32 shows in its weight


@triton.constexpr_function
def columns(DIM):
    """Columns of hi, and of lo, with the zeros after them."""
    return -(-DIM // 8) * 8  # split.pitch, which a kernel cannot call


@triton.jit
def row_stride(strides, UNIT: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr):
    """Elements from a row of an operand to the next: in pairs known to the compiler, which saves registers."""
    if PRECISION == "pairs":
        return 2 * columns(DIM)
    else:
        return strides[2] * UNIT


@triton.jit
def load(
    base, rows, stride, limit,
    DIM: tl.constexpr, CHUNKS: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """An operand for the products: a tile; in pairs, the tiles (hi, lo)."""
    if PRECISION == "pairs":
        hi = load_tile(base, rows, stride, limit, columns(DIM), CHUNKS, BOUNDED)
        return hi, load_tile(base + columns(DIM), rows, stride, limit, columns(DIM), CHUNKS, BOUNDED)
    else:
        return load_tile(base, rows, stride, limit, DIM, CHUNKS, BOUNDED)


@triton.constexpr_function
def holds(DIM, DIM_V):
    """Whether hi of a forward's queries stays in registers: it leaves shared memory for a third stage.

    Up to 96 columns there is room for one anyway; beyond 128 there are no registers.
    """
    return 96 < DIM <= 128 and DIM_V <= 128


@triton.jit
def load_queries(
    base, rows, stride, limit,
    DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`load`, for queries that a forward keeps; see `holds`.

    For wgmma Triton takes from registers what a product made, and from shared memory what was loaded: so hi times 1.
    """
    if PRECISION == "pairs" and holds(DIM, DIM_V):
        loaded, hi = load_tile(base, rows, stride, limit, columns(DIM), CHUNKS, True), ()
        for i in tl.static_range(count(CHUNKS)):
            o = tl.arange(0, width(CHUNKS, i))
            one = (o[:, None] == o[None, :]).to(tl.float16)
            hi = hi + (tl.dot(loaded[i], one).to(tl.float16),)
        return hi, load_tile(base + columns(DIM), rows, stride, limit, columns(DIM), CHUNKS, True)
    else:
        return load(base, rows, stride, limit, DIM, CHUNKS, True, PRECISION)


@triton.jit
def head_units(units, i: tl.constexpr, head, length, PRECISION: tl.constexpr):
    """Where the units of a head begin, of the i-th split tensor; nothing without pairs."""
    if PRECISION == "pairs":
        return units[i] + tl.cast(head, tl.int64) * tl.cdiv(length, SEGMENT)
    else:
        return units


@triton.jit
def unit_of(units, start, PRECISION: tl.constexpr):
    """The unit of the tile that begins at row `start` of a head; nothing without pairs."""
    if PRECISION == "pairs":
        return tl.load(units + start // SEGMENT)
    else:
        return units


@triton.jit
def largest_unit(units, lo, hi):
    """The largest unit of the tiles in [lo, hi) of a head."""
    largest = 0.0
    for i in tl.range(lo // SEGMENT, tl.cdiv(hi, SEGMENT), 128, num_stages=1):
        o = i + tl.arange(0, 128)
        largest = tl.maximum(largest, tl.max(tl.load(units + o, mask=o * SEGMENT < hi, other=0.0), 0))
    return largest


@triton.jit
def times(x, unit_x, unit_y, PRECISION: tl.constexpr):
    """x * unit_x * unit_y: powers of two, which no multiply-add that follows rounds."""
    if PRECISION == "pairs":
        return x * (unit_x * unit_y)
    else:
        return x


@triton.jit
def times_regained(x, unit_x, unit_y, DIM: tl.constexpr, PRECISION: tl.constexpr):
    """`times`, and with what the tensor cores cut off a product over DIM columns."""
    if PRECISION == "pairs":
        return x * (unit_x * unit_y * regained(DIM))
    else:
        return x


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """x to the nearest tf32 where the product is in tf32: the tensor cores would cut off the bits instead."""
    if PRECISION == "tf32" and x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True) + 0x1000
        x = tl.where(tl.abs(x) < float("inf"), (bits & 0xFFFFE000).to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def dot_nt(x, y, CHUNKS: tl.constexpr, PRECISION: tl.constexpr):
    """x @ y^T over the chunks of the head dim: [M, D] @ [N, D]^T -> [M, N] float32; of pairs, without their units."""
    if PRECISION == "pairs":
        s = tl.dot(x[1][0], tl.trans(y[0][0]))
        for i in tl.static_range(1, count(CHUNKS)):
            s = tl.dot(x[1][i], tl.trans(y[0][i]), s)
        for i in tl.static_range(count(CHUNKS)):
            s = tl.dot(x[0][i], tl.trans(y[1][i]), s)
        for i in tl.static_range(count(CHUNKS)):
            s = tl.dot(x[0][i], tl.trans(y[0][i]), s)
    elif PRECISION == "bf16x6":  # each chunk from 0: the fewer steps add up on a tensor core, the less is cut off
        s = tl.dot(x[0], tl.trans(y[0]), input_precision=PRECISION)
        for i in tl.static_range(1, count(CHUNKS)):
            s += tl.dot(x[i], tl.trans(y[i]), input_precision=PRECISION)
    else:
        s = tl.dot(rounded(x[0], PRECISION), tl.trans(rounded(y[0], PRECISION)), input_precision=PRECISION)
        for i in tl.static_range(1, count(CHUNKS)):
            s = tl.dot(rounded(x[i], PRECISION), tl.trans(rounded(y[i], PRECISION)), s, input_precision=PRECISION)
    return s


@triton.jit
def halves(w):
    """float32 below 2^16 as a pair of float16."""
    hi = w.to(tl.float16)
    return hi, (w - hi.to(tl.float32)).to(tl.float16)


@triton.jit
def add_dot(acc, w, y, unit, CHUNKS: tl.constexpr, PRECISION: tl.constexpr, WEIGHTS: tl.constexpr):
    """acc + w @ y, chunk by chunk: [M, N] @ [N, D] -> [M, D] float32.

    In pairs `unit` is that of y, and w is split here: WEIGHTS of a forward, of which each row has one near 1, all by
    2^14; others row by row, each by the power of two that its largest element wants: a key may have tiny weights only.
    """
    result = ()
    if PRECISION == "pairs":
        if WEIGHTS:
            hi, lo = halves(w * 16384.0)
            unit = unit * (1.0 / 16384.0)
        else:
            up, down = power_of_two(tl.max(tl.abs(w), 1))
            hi, lo = halves(w * up[:, None])
            unit = (unit * down)[:, None]
        for i in tl.static_range(count(CHUNKS)):
            tile = tl.dot(lo, y[0][i])
            tile = tl.dot(hi, y[1][i], tile)
            tile = tl.dot(hi, y[0][i], tile)
            result = result + (acc[i] + tile * unit,)
    elif PRECISION == "bf16x6":
        for i in tl.static_range(count(CHUNKS)):
            result = result + (acc[i] + tl.dot(w, y[i], input_precision=PRECISION),)
    else:
        for i in tl.static_range(count(CHUNKS)):
            part = rounded(y[i], PRECISION)
            weights = rounded(w.to(y[i].dtype), PRECISION)
            result = result + (tl.dot(weights, part, acc[i], input_precision=PRECISION),)
    return result


@triton.jit
def huge(score):
    """Whether a row's largest score (log2) is finite and beyond 1024, where pairs lack a bit or two of float32."""
    return (tl.abs(score) > HUGE) & finite(score)


@triton.jit
def unresolved(score, unit_x, unit_y, scale, DIM: tl.constexpr):
    """Whether scores of pairs may be off by more than float32 rounds the largest of their row, `score` (log2)."""
    least = unit_x * unit_y * tl.abs(scale) * (LOG2_E * NOISE / RESOLVED * root(DIM))
    return tl.abs(score) < tl.where(least > 1.0, least, 0.0)  # one compare an element


@triton.jit
def resolved(lse, unit_x, unit_y, scale, DIM: tl.constexpr, PRECISION: tl.constexpr):
    """lse (log2), but NaN in rows whose scores pairs do not resolve: what is made of them is then marked."""
    if PRECISION == "pairs":
        lse = tl.where(unresolved(lse, unit_x, unit_y, scale, DIM), float("nan"), lse)
    return lse


@triton.constexpr_function
def root(DIM):
    """Square root of the head dim."""
    return DIM**0.5
