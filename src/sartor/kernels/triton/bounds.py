"""Which tiles a mask makes empty, full or partial: from the intervals of its rows (or columns) to tile bounds."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def valid(positions, length, BOUNDED: tl.constexpr):
    """The positions, with those past the end moved to the last one, where masks and scores can be evaluated."""
    return tl.minimum(positions, length - 1) if BOUNDED else positions


@triton.jit
def tile_bounds(SPANS: tl.constexpr, b, h, positions, aux, length, BLOCK: tl.constexpr):
    """(lo, hi, full_lo, full_hi), in elements along the other axis of `length`.

    Tiles outside [lo, hi) are empty; those inside [full_lo, full_hi) are full; both full bounds and lo are multiples of
    BLOCK. `positions` must be valid ones: clamp the tail before.
    """
    if SPANS is None:
        lo = 0
        hi = length
        full_lo = 0
        full_hi = length // BLOCK * BLOCK
    else:
        row_lo, row_hi, row_full_lo, row_full_hi = SPANS(b, h, positions, aux)
        hi = tl.minimum(tl.maximum(tl.max(row_hi, 0), 0), length)
        lo = tl.minimum(tl.maximum(tl.min(row_lo, 0), 0), hi) // BLOCK * BLOCK
        full_lo = tl.maximum(tl.cdiv(tl.maximum(tl.max(row_full_lo, 0), 0), BLOCK) * BLOCK, lo)
        full_hi = tl.minimum(tl.maximum(tl.min(row_full_hi, 0), 0), length) // BLOCK * BLOCK
    return lo, hi, full_lo, full_hi
