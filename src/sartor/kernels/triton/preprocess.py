"""The preprocess kernel of the portable backward: delta = rowsum(out * dout) - dlse, and lse in the log2 domain."""

from __future__ import annotations

import triton
import triton.language as tl

from sartor.kernels.triton import launch, tiles
from sartor.kernels.triton.gradients import row
from sartor.kernels.triton.maths import LOG2_E


@triton.jit(do_not_specialize=launch.RUNTIME)
def preprocess_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, lse_log2_ptr, out_strides, dout_strides, heads_q, seqlen_q,
    DIM_V: tl.constexpr, CHUNKS_V: tl.constexpr, DLSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """delta (b, hq, sq) = rowsum(out * dout) - dlse, and lse in the log2 domain, +inf for rows without a key."""
    n_tiles = tl.cdiv(seqlen_q, BLOCK)
    pid = tl.program_id(0)
    start, head = pid % n_tiles * BLOCK, pid // n_tiles
    b, h, first = tl.cast(head // heads_q, tl.int64), tl.cast(head % heads_q, tl.int64), tl.cast(start, tl.int64)
    o_m = tl.arange(0, BLOCK)
    out_base = out_ptr + b * out_strides[0] + h * out_strides[1] + first * out_strides[2]
    dout_base = dout_ptr + b * dout_strides[0] + h * dout_strides[1] + first * dout_strides[2]
    out = tiles.load_tile(out_base, o_m, out_strides[2], seqlen_q - start, DIM_V, CHUNKS_V, True)
    dout = tiles.load_tile(dout_base, o_m, dout_strides[2], seqlen_q - start, DIM_V, CHUNKS_V, True)
    delta = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(tiles.count(CHUNKS_V)):
        delta += tl.sum(out[i].to(tl.float32) * dout[i].to(tl.float32), 1)
    rows, kept = tl.cast(head, tl.int64) * seqlen_q + start + o_m, row(head, seqlen_q) + start + o_m
    inside = start + o_m < seqlen_q
    if DLSE:
        delta -= tl.load(dlse_ptr + rows, mask=inside, other=0.0)
    tl.store(delta_ptr + kept, delta, mask=inside)
    lse = tl.load(lse_ptr + rows, mask=inside, other=0.0)
    lse *= LOG2_E  # overflows where all keys that a row sees have a bias of the least float32
    lse = tl.where(lse == float("-inf"), float("inf"), lse)  # exp2(score - inf) = 0
    tl.store(lse_log2_ptr + kept, lse, mask=inside)
