"""dk and dv: one program per key tile, whose mainloop visits the query tiles of every query head of the group.

S and dP are computed transposed, [N, M], so that P^T and dS^T are operands of the products as they come.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sartor.kernels.triton import launch, marks, products, tiles
from sartor.kernels.triton.bounds import tile_bounds
from sartor.kernels.triton.gradients import SECTION, gradient_tile, load_rows, references, row


@triton.jit
def _mainloop(
    state, lo, hi, full_lo, full_hi, k_base, v_base, k_stride, v_stride, q_base, dout_base, lse_base, delta_base,
    gains, q_stride, dout_stride, units, i_n, aux, b, h, seqlen_q, seqlen_kv, scale, factor,
    KEEP: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, PRESCALE: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SAFE: tl.constexpr, GAINS: tl.constexpr,
):  # fmt: skip
    """The mainloop: add the query tiles in [lo, hi) of one head to state = (dk, dv). S is transposed, [N, M].

    Rows of queries past the end need no mask: their lse is +inf, so their weights are 0.
    """
    dk, dv = state
    o_m, o_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    kv = i_n * BLOCK_N + o_n
    k = products.load(k_base, o_n, k_stride, seqlen_kv - i_n * BLOCK_N, DIM, CHUNKS, True, PRECISION)
    v = products.load(v_base, o_n, v_stride, seqlen_kv - i_n * BLOCK_N, DIM_V, CHUNKS_V, True, PRECISION)
    q_units, k_unit, v_unit, dout_units = units
    for start in tl.range(lo, hi, BLOCK_M, num_stages=1 if SAFE else None):
        first = tl.cast(start, tl.int64)
        left = seqlen_q - start
        q_unit = products.unit_of(q_units, start, PRECISION)
        dout_unit = products.unit_of(dout_units, start, PRECISION)
        q = products.load(q_base + first * q_stride, o_m, q_stride, left, DIM, CHUNKS, BOUNDED, PRECISION)
        s = products.dot_nt(k, q, CHUNKS, PRECISION)  # [N, D] @ [D, M] -> [N, M]
        dout_rows = dout_base + first * dout_stride
        dout = products.load(dout_rows, o_m, dout_stride, left, DIM_V, CHUNKS_V, BOUNDED, PRECISION)
        dp = products.dot_nt(v, dout, CHUNKS_V, PRECISION)  # [N, DV] @ [DV, M] -> [N, M]
        lse, delta = load_rows(lse_base, delta_base, start + o_m, seqlen_q, BOUNDED)
        lse = products.resolved(lse, k_unit, q_unit, scale, DIM, PRECISION)
        gain = gains
        if GAINS is not None:
            if BOUNDED:
                gain = tl.load(gains + start + o_m, mask=start + o_m < seqlen_q, other=1.0)[None, :]
            else:
                gain = tl.load(gains + start + o_m)[None, :]
        partial = (start < full_lo) | (start + BLOCK_M > full_hi) | (MASKED == 2)
        w, ds, draw, keep = gradient_tile(
            s, dp, (k_unit, q_unit, v_unit, dout_unit), lse[None, :], delta[None, :], gain, partial, b, h,
            (start + o_m)[None, :], kv[:, None], aux, seqlen_q, seqlen_kv, scale, factor,
            KEEP, SCORE, DSCORE, PRESCALE, PRECISION, MASKED, BOUNDED, DIM, DIM_V, SAFE, GAINS,
        )  # fmt: skip
        if SAFE:
            dv = tiles.add_attended(
                dv, w, keep, dout_base, start, dout_stride, seqlen_q, BLOCK_M, DIM_V, CHUNKS_V
            )  # fmt: skip
            q = tiles.finite_tile(q, CHUNKS)
        else:
            # [N, M] @ [M, DV] -> [N, DV]
            dv = products.add_dot(dv, w, dout, dout_unit, CHUNKS_V, PRECISION, False)
        dk = products.add_dot(dk, draw, q, q_unit, CHUNKS, PRECISION, False)  # [N, M] @ [M, D] -> [N, D]
    return dk, dv


@triton.jit
def _dkdv_tile(
    tile, q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_log2_ptr, delta_ptr, gain_ptr, bad_kv_ptr, units, aux,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    heads_q, group, seqlen_q, seqlen_kv,
    scale, factor,
    KEEP: tl.constexpr, COLS: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, PRESCALE: tl.constexpr,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SAFE: tl.constexpr, GAINS: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile of one key head: the sum over the query heads of its group."""
    n_tiles = tl.cdiv(seqlen_kv, BLOCK_N)
    i_n, head = tile % n_tiles, tile // n_tiles
    heads_kv = heads_q // group
    b, h_kv = head // heads_kv, head % heads_kv
    b64, h64, first = tl.cast(b, tl.int64), tl.cast(h_kv, tl.int64), tl.cast(i_n * BLOCK_N, tl.int64)
    o_n = tl.arange(0, BLOCK_N)
    left = seqlen_kv - i_n * BLOCK_N
    k_base = k_ptr + (b64 * k_strides[0] + h64 * k_strides[1] + first * k_strides[2]) * UNIT
    v_base = v_ptr + (b64 * v_strides[0] + h64 * v_strides[1] + first * v_strides[2]) * UNIT
    k_stride = products.row_stride(k_strides, UNIT, DIM, PRECISION)
    v_stride = products.row_stride(v_strides, UNIT, DIM_V, PRECISION)
    q_stride = products.row_stride(q_strides, UNIT, DIM, PRECISION)
    dout_stride = products.row_stride(dout_strides, UNIT, DIM_V, PRECISION)
    present = tl.minimum(i_n * BLOCK_N + o_n, seqlen_kv - 1)

    k_units = products.head_units(units, 1, head, seqlen_kv, PRECISION)
    v_units = products.head_units(units, 2, head, seqlen_kv, PRECISION)
    k_unit = products.unit_of(k_units, i_n * BLOCK_N, PRECISION)
    v_unit = products.unit_of(v_units, i_n * BLOCK_N, PRECISION)
    state = tiles.zeros(BLOCK_N, CHUNKS), tiles.zeros(BLOCK_N, CHUNKS_V)
    for g in tl.range(0, group, num_stages=1):
        h = h_kv * group + g
        rows = row(b64 * heads_q + h, seqlen_q)
        q_base = q_ptr + (b64 * q_strides[0] + tl.cast(h, tl.int64) * q_strides[1]) * UNIT
        dout_base = dout_ptr + (b64 * dout_strides[0] + tl.cast(h, tl.int64) * dout_strides[1]) * UNIT
        q_units = products.head_units(units, 0, b * heads_q + h, seqlen_q, PRECISION)
        dout_units = products.head_units(units, 3, b * heads_q + h, seqlen_q, PRECISION)
        lo, hi, full_lo, full_hi = tile_bounds(COLS, b, h, present, aux, seqlen_q, BLOCK_M)
        state = _mainloop(
            state, lo, hi, full_lo, full_hi, k_base, v_base, k_stride, v_stride, q_base, dout_base,
            lse_log2_ptr + rows, delta_ptr + rows, gain_ptr + rows, q_stride, dout_stride,
            (q_units, k_unit, v_unit, dout_units), i_n, aux, b, h, seqlen_q, seqlen_kv, scale, factor,
            KEEP, SCORE, DSCORE, PRESCALE, PRECISION, MASKED, BOUNDED,
            DIM, DIM_V, CHUNKS, CHUNKS_V, BLOCK_M, BLOCK_N, SAFE, GAINS,
        )  # fmt: skip
    dk, dv = state
    dk = tiles.scale_tile(dk, scale, CHUNKS)
    dk_base = dk_ptr + b64 * dk_strides[0] + h64 * dk_strides[1] + first * dk_strides[2]
    dv_base = dv_ptr + b64 * dv_strides[0] + h64 * dv_strides[1] + first * dv_strides[2]
    tiles.store_tile(dk_base, o_n, dk_strides[2], left, dk, DIM, CHUNKS)
    tiles.store_tile(dv_base, o_n, dv_strides[2], left, dv, DIM_V, CHUNKS_V)
    if (KEEP is not None or PRECISION == "pairs") and not SAFE:
        tl.store(bad_kv_ptr + tile, tiles.has_nonfinite(dk, CHUNKS) + tiles.has_nonfinite(dv, CHUNKS_V))


@triton.jit(do_not_specialize=launch.RUNTIME)
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_log2_ptr, delta_ptr, gain_ptr, bad_kv_ptr, units, aux,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    batch, heads_q, group, seqlen_q, seqlen_kv,
    scale, factor,
    KEEP: tl.constexpr, COLS: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, PRESCALE: tl.constexpr,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AGAIN: tl.constexpr, SAFE: tl.constexpr,
    GAINS: tl.constexpr,
):  # fmt: skip
    """One program per tile. With AGAIN, a few programs compute the marked tiles again, with SAFE to repair NaN."""
    base, begin, end, step = marks.share(
        tl.cdiv(seqlen_kv, BLOCK_N), heads_q // group * batch, AGAIN, 0 if KEEP is None else SECTION
    )  # fmt: skip
    lse_log2_ptr = references(lse_log2_ptr, gain_ptr, batch, heads_q, seqlen_q, SCORE, GAINS)
    for i in tl.range(begin, end, step, num_stages=1):
        if marks.wanted(bad_kv_ptr + base + i, AGAIN):
            _dkdv_tile(
                base + i, q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_log2_ptr, delta_ptr, gain_ptr,
                bad_kv_ptr, units, aux, q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
                heads_q, group, seqlen_q, seqlen_kv, scale, factor,
                KEEP, COLS, SCORE, DSCORE, PRESCALE, MASKED, BOUNDED, PRECISION,
                DIM, DIM_V, CHUNKS, CHUNKS_V, UNIT, BLOCK_M, BLOCK_N, SAFE, GAINS,
            )  # fmt: skip
