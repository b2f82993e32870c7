"""dq: one program per query tile, whose mainloop visits the key tiles that the mask leaves."""

from __future__ import annotations

import triton
import triton.language as tl

from sartor.kernels.triton import launch, marks, products, tiles
from sartor.kernels.triton.bounds import tile_bounds
from sartor.kernels.triton.gradients import SECTION, gradients_of, load_rows, references, row, score_tile
from sartor.kernels.triton.maths import LOG2_E


@triton.jit
def _mainloop(
    dq, lo, hi, full_lo, full_hi, q_base, dout_base, q_stride, dout_stride, lse, delta, i_m,
    k_base, v_base, k_stride, v_stride, units, aux, b, h, seqlen_q, seqlen_kv, scale, factor,
    KEEP: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, PRESCALE: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SAFE: tl.constexpr, GAINS: tl.constexpr,
):  # fmt: skip
    """The mainloop: add the key tiles in [lo, hi) to dq; returned with the sums of the rows' weights and what these are
    relative to, if GAINS."""
    total = tl.zeros((BLOCK_M,), tl.float32)
    high = lse
    if GAINS is not None and SCORE is not None:
        high = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # the rows' highest scores so far
    o_m, o_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    q_rows = i_m * BLOCK_M + o_m
    q = products.load(q_base, o_m, q_stride, seqlen_q - i_m * BLOCK_M, DIM, CHUNKS, True, PRECISION)
    dout = products.load(dout_base, o_m, dout_stride, seqlen_q - i_m * BLOCK_M, DIM_V, CHUNKS_V, True, PRECISION)
    q_unit, k_units, v_units, dout_unit = units
    for start in tl.range(lo, hi, BLOCK_N, num_stages=1 if SAFE else None):
        first = tl.cast(start, tl.int64)
        left = seqlen_kv - start
        k_unit = products.unit_of(k_units, start, PRECISION)
        v_unit = products.unit_of(v_units, start, PRECISION)
        k = products.load(k_base + first * k_stride, o_n, k_stride, left, DIM, CHUNKS, BOUNDED, PRECISION)
        s = products.dot_nt(q, k, CHUNKS, PRECISION)  # [M, D] @ [D, N] -> [M, N]
        v = products.load(v_base + first * v_stride, o_n, v_stride, left, DIM_V, CHUNKS_V, BOUNDED, PRECISION)
        dp = products.dot_nt(dout, v, CHUNKS_V, PRECISION)  # [M, DV] @ [DV, N] -> [M, N]
        partial = (start < full_lo) | (start + BLOCK_N > full_hi) | (MASKED == 2)
        rows_lse = products.resolved(lse, q_unit, k_unit, scale, DIM, PRECISION)
        scores = score_tile(
            s, (q_unit, k_unit), partial, b, h, q_rows[:, None], (start + o_n)[None, :], aux, seqlen_q, seqlen_kv,
            scale, factor, KEEP, SCORE, PRESCALE, PRECISION, MASKED, BOUNDED, DIM, SAFE,
        )  # fmt: skip
        if GAINS is not None and SCORE is not None:
            higher = tl.maximum(high, tl.max(scores[1], 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2((high - base) * factor)
            total, dq, high = total * shrink, tiles.scale_tile(dq, shrink[:, None], CHUNKS), higher
            rows_lse = tl.where(rows_lse != rows_lse, rows_lse, base)  # NaN where pairs do not resolve the row
        w, ds, draw, keep = gradients_of(
            scores, dp, (dout_unit, v_unit), rows_lse[:, None], delta[:, None], None, b, h,
            q_rows[:, None], (start + o_n)[None, :], aux, seqlen_q, seqlen_kv,
            SCORE, DSCORE, PRECISION, BOUNDED, DIM_V, SAFE, GAINS,
        )  # fmt: skip
        if GAINS is not None:
            total += tl.sum(w, 1)
        if SAFE:
            k = tiles.finite_tile(k, CHUNKS)
        dq = products.add_dot(dq, draw, k, k_unit, CHUNKS, PRECISION, False)  # [M, N] @ [N, D] -> [M, D]
    return dq, total, high


@triton.jit
def _dq_tile(
    tile, q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, lse_log2_ptr, delta_ptr, gain_ptr, high_ptr, sinks_ptr, bad_q_ptr,
    units, aux,
    q_strides, k_strides, v_strides, dout_strides, dq_strides,
    heads_q, group, seqlen_q, seqlen_kv,
    scale, factor,
    KEEP: tl.constexpr, ROWS: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, PRESCALE: tl.constexpr,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SAFE: tl.constexpr, GAINS: tl.constexpr,
):  # fmt: skip
    """dq of one query tile of one head."""
    n_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    i_m, head = n_tiles - 1 - tile % n_tiles, tile // n_tiles
    b, h = head // heads_q, head % heads_q
    b64, h64, first = tl.cast(b, tl.int64), tl.cast(h, tl.int64), tl.cast(i_m * BLOCK_M, tl.int64)
    o_m = tl.arange(0, BLOCK_M)
    q_rows = i_m * BLOCK_M + o_m
    left = seqlen_q - i_m * BLOCK_M
    q_base = q_ptr + (b64 * q_strides[0] + h64 * q_strides[1] + first * q_strides[2]) * UNIT
    dout_base = dout_ptr + (b64 * dout_strides[0] + h64 * dout_strides[1] + first * dout_strides[2]) * UNIT
    k_base = k_ptr + (b64 * k_strides[0] + (h64 // group) * k_strides[1]) * UNIT
    v_base = v_ptr + (b64 * v_strides[0] + (h64 // group) * v_strides[1]) * UNIT
    rows = row(head, seqlen_q)
    lse, delta = load_rows(lse_log2_ptr + rows, delta_ptr + rows, q_rows, seqlen_q, True)
    k_stride = products.row_stride(k_strides, UNIT, DIM, PRECISION)
    v_stride = products.row_stride(v_strides, UNIT, DIM_V, PRECISION)
    q_stride = products.row_stride(q_strides, UNIT, DIM, PRECISION)
    dout_stride = products.row_stride(dout_strides, UNIT, DIM_V, PRECISION)
    present = tl.minimum(q_rows, seqlen_q - 1)
    lo, hi, full_lo, full_hi = tile_bounds(ROWS, b, h, present, aux, seqlen_kv, BLOCK_N)

    head_kv = b * (heads_q // group) + h // group
    q_units = products.head_units(units, 0, head, seqlen_q, PRECISION)
    dout_units = products.head_units(units, 3, head, seqlen_q, PRECISION)
    k_units = products.head_units(units, 1, head_kv, seqlen_kv, PRECISION)
    v_units = products.head_units(units, 2, head_kv, seqlen_kv, PRECISION)
    q_unit = products.unit_of(q_units, i_m * BLOCK_M, PRECISION)
    dout_unit = products.unit_of(dout_units, i_m * BLOCK_M, PRECISION)
    dq, total, high = _mainloop(
        tiles.zeros(BLOCK_M, CHUNKS), lo, hi, full_lo, full_hi, q_base, dout_base, q_stride, dout_stride,
        lse, delta, i_m, k_base, v_base, k_stride, v_stride, (q_unit, k_units, v_units, dout_unit), aux, b, h,
        seqlen_q, seqlen_kv, scale, factor,
        KEEP, SCORE, DSCORE, PRESCALE, PRECISION, MASKED, BOUNDED,
        DIM, DIM_V, CHUNKS, CHUNKS_V, BLOCK_M, BLOCK_N, SAFE, GAINS,
    )  # fmt: skip
    if GAINS is not None:
        if SCORE is not None:
            base = high
            if GAINS == "with sinks":
                base = tl.maximum(high, tl.load(sinks_ptr + h).to(tl.float32))
            base = tl.where(base == float("-inf"), 0.0, base)
            shrink = tl.exp2((high - base) * factor)
            total, dq = total * shrink, tiles.scale_tile(dq, shrink[:, None], CHUNKS)
            if GAINS == "with sinks":
                total += tl.exp2((tl.load(sinks_ptr + h).to(tl.float32) - base) * LOG2_E)
            tl.store(high_ptr + rows + q_rows, base, mask=q_rows < seqlen_q)
        elif GAINS == "with sinks":
            total += tl.exp2(tl.load(sinks_ptr + h).to(tl.float32) * LOG2_E - lse)
        gain = tl.where(total == 0.0, 1.0, 1.0 / total)
        if GAINS == "of more keys":
            gain = tl.exp2(base * LOG2_E - lse)
        tl.store(gain_ptr + rows + q_rows, gain, mask=q_rows < seqlen_q)
        dq = tiles.scale_tile(dq, gain[:, None], CHUNKS)
    dq = tiles.scale_tile(dq, scale, CHUNKS)
    dq_base = dq_ptr + b64 * dq_strides[0] + h64 * dq_strides[1] + first * dq_strides[2]
    tiles.store_tile(dq_base, o_m, dq_strides[2], left, dq, DIM, CHUNKS)
    if (KEEP is not None or PRECISION == "pairs") and not SAFE:
        tl.store(bad_q_ptr + tile, tiles.has_nonfinite(dq, CHUNKS))


@triton.jit(do_not_specialize=launch.RUNTIME)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, lse_log2_ptr, delta_ptr, gain_ptr, sinks_ptr, bad_q_ptr, units, aux,
    q_strides, k_strides, v_strides, dout_strides, dq_strides,
    batch, heads_q, group, seqlen_q, seqlen_kv,
    scale, factor,
    KEEP: tl.constexpr, ROWS: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, PRESCALE: tl.constexpr,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AGAIN: tl.constexpr, SAFE: tl.constexpr,
    GAINS: tl.constexpr,
):  # fmt: skip
    """One program per tile. With AGAIN, a few programs compute the marked tiles again, with SAFE to repair NaN."""
    base, begin, end, step = marks.share(
        tl.cdiv(seqlen_q, BLOCK_M), heads_q * batch, AGAIN, 0 if KEEP is None else SECTION
    )  # fmt: skip
    high_ptr = references(lse_log2_ptr, gain_ptr, batch, heads_q, seqlen_q, SCORE, GAINS)
    for i in tl.range(begin, end, step, num_stages=1):
        if marks.wanted(bad_q_ptr + base + i, AGAIN):
            _dq_tile(
                base + i, q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, lse_log2_ptr, delta_ptr, gain_ptr, high_ptr, sinks_ptr,
                bad_q_ptr, units, aux, q_strides, k_strides, v_strides, dout_strides, dq_strides,
                heads_q, group, seqlen_q, seqlen_kv,
                scale, factor, KEEP, ROWS, SCORE, DSCORE, PRESCALE, MASKED, BOUNDED, PRECISION,
                DIM, DIM_V, CHUNKS, CHUNKS_V, UNIT, BLOCK_M, BLOCK_N, SAFE, GAINS,
            )  # fmt: skip
