"""The portable backward: recomputation from lse (Dao 2023, algorithm 2) in Triton, without atomics.

Three kernels: `prepare` for delta = rowsum(out * dout) - dlse; then dk and dv, one program per key tile, sweeping query
tiles; then dq, one program per query tile, sweeping key tiles. That is two more products than with atomics, and every
result has the same bits every time. A fourth kernel sums dbias over the dims the bias was broadcast along.

The first tile is for dk and dv: it holds block_n keys and steps over block_m queries. Its `then` is for dq: it holds
block_m queries and steps over block_n keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from sartor.device import Device
from sartor.features import (
    BF16,
    BIAS_GRADIENT,
    DETERMINISTIC,
    DIM_V,
    F16,
    F32,
    GQA,
    MASKS,
    SCORE,
    SINKS,
    TABLE_GRADIENT,
    TF32,
    UNALIGNED,
    WIDE_OUT,
)  # fmt: skip
from sartor.kernels.algebra import sink_gradient
from sartor.kernels.room import Room
from sartor.kernels.spec import Gradients, Operands, Plan, Saved, Tile, legal, length_class
from sartor.kernels.triton import launch
from sartor.kernels.triton import tables as table_gradients
from sartor.problem import Problem, is_copied

if launch.available():
    import triton
    import triton.language as tl

    from sartor.kernels.triton import codegen, marks, products, tiles
    from sartor.kernels.triton.bounds import tile_bounds
    from sartor.kernels.triton.gradients import gradient_tile, load_rows, row
    from sartor.kernels.triton.maths import LOG2_E

    SECTION = tl.constexpr(8)  # heads of which, under a mask, the longest tiles come first

    @triton.jit(do_not_specialize=launch.RUNTIME)
    def prepare_kernel(
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
        lse *= LOG2_E  # may be beyond float32, where all keys that a row sees are biased by the least there is
        lse = tl.where(lse == float("-inf"), float("inf"), lse)  # exp2(score - inf) = 0
        tl.store(lse_log2_ptr + kept, lse, mask=inside)

    @triton.jit
    def _sweep_queries(
        state, lo, hi, full_lo, full_hi, k_base, v_base, k_stride, v_stride, q_base, dout_base, lse_base, delta_base,
        gains, q_stride, dout_stride, units, i_n, aux, b, h, seqlen_q, seqlen_kv, scale, factor,
        KEEP: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, PRESCALE: tl.constexpr, PRECISION: tl.constexpr,
        MASKED: tl.constexpr, BOUNDED: tl.constexpr,
        DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SAFE: tl.constexpr, GAINS: tl.constexpr,
    ):  # fmt: skip
        """Add the query tiles in [lo, hi) of one head to state = (dk, dv). Scores stand transposed, [N, M].

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
            state = _sweep_queries(
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
        """A program a tile; or, AGAIN, a few programs that compute the marked tiles again, SAFE with care for NaN."""
        base, begin, end, step = marks.share(
            tl.cdiv(seqlen_kv, BLOCK_N), heads_q // group * batch, AGAIN, 0 if KEEP is None else SECTION
        )  # fmt: skip
        for i in tl.range(begin, end, step, num_stages=1):
            if marks.wanted(bad_kv_ptr + base + i, AGAIN):
                _dkdv_tile(
                    base + i, q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_log2_ptr, delta_ptr, gain_ptr,
                    bad_kv_ptr, units, aux, q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
                    heads_q, group, seqlen_q, seqlen_kv, scale, factor,
                    KEEP, COLS, SCORE, DSCORE, PRESCALE, MASKED, BOUNDED, PRECISION,
                    DIM, DIM_V, CHUNKS, CHUNKS_V, UNIT, BLOCK_M, BLOCK_N, SAFE, GAINS,
                )  # fmt: skip

    @triton.jit
    def _sweep_keys(
        dq, lo, hi, full_lo, full_hi, q_base, dout_base, q_stride, dout_stride, lse, delta, i_m,
        k_base, v_base, k_stride, v_stride, units, aux, b, h, seqlen_q, seqlen_kv, scale, factor,
        KEEP: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, PRESCALE: tl.constexpr, PRECISION: tl.constexpr,
        MASKED: tl.constexpr, BOUNDED: tl.constexpr,
        DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SAFE: tl.constexpr, GAINS: tl.constexpr,
    ):  # fmt: skip
        """Add the key tiles in [lo, hi) to dq; with it the sum of each row's weights, where GAINS wants it."""
        total = tl.zeros((BLOCK_M,), tl.float32)
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
            w, ds, draw, keep = gradient_tile(
                s, dp, (q_unit, k_unit, dout_unit, v_unit), rows_lse[:, None], delta[:, None], None, partial, b, h,
                q_rows[:, None], (start + o_n)[None, :], aux, seqlen_q, seqlen_kv, scale, factor,
                KEEP, SCORE, DSCORE, PRESCALE, PRECISION, MASKED, BOUNDED, DIM, DIM_V, SAFE, GAINS,
            )  # fmt: skip
            if GAINS is not None:
                total += tl.sum(w, 1)
            if SAFE:
                k = tiles.finite_tile(k, CHUNKS)
            dq = products.add_dot(dq, draw, k, k_unit, CHUNKS, PRECISION, False)  # [M, N] @ [N, D] -> [M, D]
        return dq, total

    @triton.jit
    def _dq_tile(
        tile, q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, lse_log2_ptr, delta_ptr, gain_ptr, sinks_ptr, bad_q_ptr,
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
        dq, total = _sweep_keys(
            tiles.zeros(BLOCK_M, CHUNKS), lo, hi, full_lo, full_hi, q_base, dout_base, q_stride, dout_stride,
            lse, delta, i_m, k_base, v_base, k_stride, v_stride, (q_unit, k_units, v_units, dout_unit), aux, b, h,
            seqlen_q, seqlen_kv, scale, factor,
            KEEP, SCORE, DSCORE, PRESCALE, PRECISION, MASKED, BOUNDED,
            DIM, DIM_V, CHUNKS, CHUNKS_V, BLOCK_M, BLOCK_N, SAFE, GAINS,
        )  # fmt: skip
        if GAINS is not None:
            if GAINS == "with sinks":
                total += tl.exp2(tl.load(sinks_ptr + h).to(tl.float32) * LOG2_E - lse)
            gain = tl.where(total == 0.0, 1.0, 1.0 / total)
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
        """A program a tile; or, AGAIN, a few programs that compute the marked tiles again, SAFE with care for NaN."""
        base, begin, end, step = marks.share(
            tl.cdiv(seqlen_q, BLOCK_M), heads_q * batch, AGAIN, 0 if KEEP is None else SECTION
        )  # fmt: skip
        for i in tl.range(begin, end, step, num_stages=1):
            if marks.wanted(bad_q_ptr + base + i, AGAIN):
                _dq_tile(
                    base + i, q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, lse_log2_ptr, delta_ptr, gain_ptr, sinks_ptr,
                    bad_q_ptr, units, aux, q_strides, k_strides, v_strides, dout_strides, dq_strides,
                    heads_q, group, seqlen_q, seqlen_kv,
                    scale, factor, KEEP, ROWS, SCORE, DSCORE, PRESCALE, MASKED, BOUNDED, PRECISION,
                    DIM, DIM_V, CHUNKS, CHUNKS_V, UNIT, BLOCK_M, BLOCK_N, SAFE, GAINS,
                )  # fmt: skip

    @triton.jit(do_not_specialize=launch.RUNTIME)
    def dbias_kernel(
        q_ptr, k_ptr, v_ptr, dout_ptr, dbias_ptr, lse_log2_ptr, delta_ptr, gain_ptr, aux,
        q_strides, k_strides, v_strides, dout_strides,
        batch, heads_q, group, seqlen_q, seqlen_kv,
        scale, factor,
        KEEP: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, PRESCALE: tl.constexpr, PRECISION: tl.constexpr,
        BOUNDED: tl.constexpr, OVER: tl.constexpr,
        DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
        UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GAINS: tl.constexpr,
    ):  # fmt: skip
        """One tile of dbias, summed over the dims it is broadcast along: OVER says which of (b, h, q, kv)."""
        tiles_m, tiles_n = tl.cdiv(seqlen_q, BLOCK_M), tl.cdiv(seqlen_kv, BLOCK_N)
        pid = tl.cast(tl.program_id(0), tl.int64)
        n_b, n_h, n_m, n_n = 1, 1, 1, 1  # how many of each this program adds up
        i_b, i_h, i_m, i_n = pid * 0, pid * 0, pid * 0, pid * 0
        if tiles.flag(OVER, 3):
            n_n = tiles_n
        else:
            i_n = pid % tiles_n
            pid = pid // tiles_n
        if tiles.flag(OVER, 2):
            n_m = tiles_m
        else:
            i_m = pid % tiles_m
            pid = pid // tiles_m
        if tiles.flag(OVER, 1):
            n_h = heads_q
        else:
            i_h = pid % heads_q
            pid = pid // heads_q
        if tiles.flag(OVER, 0):
            n_b = batch
        else:
            i_b = pid
        o_m, o_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(0, n_b * n_h * n_m * n_n, num_stages=1):
            tile_n = i_n + step % n_n
            tile_m = i_m + step // n_n % n_m
            h = i_h + step // (n_n * n_m) % n_h
            b = i_b + step // (n_n * n_m * n_h)
            q_rows, kv = tl.cast(tile_m * BLOCK_M, tl.int32) + o_m, tl.cast(tile_n * BLOCK_N, tl.int32) + o_n
            q_base = q_ptr + (b * q_strides[0] + h * q_strides[1] + tile_m * BLOCK_M * q_strides[2]) * UNIT
            do_base = dout_ptr + (b * dout_strides[0] + h * dout_strides[1] + tile_m * BLOCK_M * dout_strides[2]) * UNIT
            k_base = k_ptr + (b * k_strides[0] + h // group * k_strides[1] + tile_n * BLOCK_N * k_strides[2]) * UNIT
            v_base = v_ptr + (b * v_strides[0] + h // group * v_strides[1] + tile_n * BLOCK_N * v_strides[2]) * UNIT
            left_m, left_n = seqlen_q - tile_m * BLOCK_M, seqlen_kv - tile_n * BLOCK_N
            q = tiles.load_tile(q_base, o_m, q_strides[2] * UNIT, left_m, DIM, CHUNKS, True)
            dout = tiles.load_tile(do_base, o_m, dout_strides[2] * UNIT, left_m, DIM_V, CHUNKS_V, True)
            k = tiles.load_tile(k_base, o_n, k_strides[2] * UNIT, left_n, DIM, CHUNKS, True)
            v = tiles.load_tile(v_base, o_n, v_strides[2] * UNIT, left_n, DIM_V, CHUNKS_V, True)
            s = products.dot_nt(q, k, CHUNKS, PRECISION)
            dp = products.dot_nt(dout, v, CHUNKS_V, PRECISION)
            rows = row(b * heads_q + h, seqlen_q)
            lse, delta = load_rows(lse_log2_ptr + rows, delta_ptr + rows, q_rows, seqlen_q, True)
            gain = gain_ptr
            if GAINS is not None:
                gain = tl.load(gain_ptr + rows + q_rows, mask=q_rows < seqlen_q, other=1.0)[:, None]
            w, ds, draw, keep = gradient_tile(
                s, dp, (1, 1, 1, 1), lse[:, None], delta[:, None], gain, True, b, h, q_rows[:, None], kv[None, :], aux,
                seqlen_q, seqlen_kv, scale, factor,
                KEEP, SCORE, DSCORE, PRESCALE, PRECISION, True, BOUNDED, DIM, DIM_V, True, GAINS,
            )  # fmt: skip
            total += ds
        _store_dbias(
            dbias_ptr, total, i_b, i_h, i_m * BLOCK_M + o_m, i_n * BLOCK_N + o_n, heads_q, seqlen_q, seqlen_kv, OVER
        )

    @triton.jit
    def _store_dbias(ptr, total, b, h, q, kv, heads_q, seqlen_q, seqlen_kv, OVER: tl.constexpr):
        """Sum the tile along broadcast dims and store it into the contiguous float32 dbias."""
        size_q, size_kv, size_h = seqlen_q, seqlen_kv, heads_q
        if tiles.flag(OVER, 1):
            size_h = 1
        if tiles.flag(OVER, 2):
            size_q = 1
        if tiles.flag(OVER, 3):
            size_kv = 1
        base = ptr + (b * size_h + h) * size_q * size_kv
        if tiles.flag(OVER, 2) and tiles.flag(OVER, 3):
            tl.store(base, tl.sum(tl.sum(total, 1), 0))
        elif tiles.flag(OVER, 2):
            tl.store(base + kv, tl.sum(total, 0), mask=kv < seqlen_kv)
        elif tiles.flag(OVER, 3):
            tl.store(base + q, tl.sum(total, 1), mask=q < seqlen_q)
        else:
            inside = (q[:, None] < seqlen_q) & (kv[None, :] < seqlen_kv)
            tl.store(base + tl.cast(q, tl.int64)[:, None] * seqlen_kv + kv[None, :], total, mask=inside)


def padded_rows(p: Problem) -> int:
    """Elements of a float32 a row, each head's on 64 bytes: see `_row`."""
    return p.batch * p.heads_q * -(-p.seqlen_q // 16) * 16


def rows(room: Room, space: torch.Tensor, name: str, p: Problem) -> torch.Tensor:
    """Such a part of a room as (b, hq, sq)."""
    return room.view(space, name, p.batch, p.heads_q, -(-p.seqlen_q // 16) * 16)[..., : p.seqlen_q]


def dense_like(t: torch.Tensor) -> torch.Tensor:
    """Room for a gradient, laid out as `t` where that leaves its last dim dense: of one that overlaps it may not."""
    room = torch.empty_like(t)
    return room if room.stride(3) == 1 else torch.empty(t.shape, dtype=t.dtype, device=t.device)


OF_PRODUCTS = MASKS | {  # whatever is multiplied
    WIDE_OUT, GQA, DIM_V, SINKS, SCORE, BIAS_GRADIENT, TABLE_GRADIENT, UNALIGNED, DETERMINISTIC,
}  # fmt: skip


@lru_cache(maxsize=1024)
def _alone(spec: TritonBackward, p: Problem, dev: Device) -> frozenset[Tile]:
    """Legal tiles of the first kernel, without the second's; for a class of lengths."""
    return frozenset(Tile(t.block_m, t.block_n, t.warps, t.stages) for t in legal(spec, p, dev))


class Work(NamedTuple):
    """One call: what it reads, what it makes, where."""

    key: tuple[Any, ...]  # of its launches, in the plan's cache
    saved: Saved
    room: Room
    space: torch.Tensor  # the workspace
    made: dict[str, torch.Tensor]  # gradients by name
    pairs: dict[str, Any]
    changed: dict[str, Any]  # for `launch.again`
    own: dict[str, dict[str, Any]]


class TritonBackward:
    """See the module."""

    name = "triton_backward"
    family = "triton"
    features = OF_PRODUCTS | {F16, BF16, F32, TF32}
    gains = False  # whether a row's weights are divided by their sum, which lse is too coarse for where it is large

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """What every Triton kernel needs; this one serves every dense problem."""
        return launch.reasons(p, dev) + table_gradients.reasons(p) or launch.no_tile(self, p, dev)

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """Tiles that fit shared memory and registers, best guess first; the same measure for dk, dv and for dq."""
        d, dv = (16 * -(-n // 16) for n in (p.dim, p.dim_v))
        small = p.dtype == torch.float32
        most = 140 if small else 160 if launch.only_registers(dev) else 200  # there operands are in registers too
        sizes = (64, 32, 16, 128), (128, 64, 32, 16), (8, 4)
        for some, stepped, held, warps in itertools.product(launch.in_turn(dev, 2, 3, 1), *sizes):
            accumulators = held * (d + dv + 2 * stepped) // (32 * warps)  # float32 registers a thread
            if accumulators > most or held < 16 * warps // 4 or (small and stepped * held > 2048):
                continue
            if not launch.sums_fit(dev, held, self.columns(p, stepped)):
                continue
            for stages in some:
                if self.smem_bytes(p, stepped, held, stages) <= launch.room(dev):
                    yield Tile(stepped, held, warps, stages, Tile(held, stepped, warps, stages))

    def fits(self, p: Problem, dev: Device, tile: Tile) -> bool:
        """Whether a tuned pair of tiles is legal: each of them is, for both kernels."""
        alone = _alone(self, length_class(p), dev)
        first = Tile(tile.block_m, tile.block_n, tile.warps, tile.stages)
        turned = tile.then and Tile(tile.then.block_n, tile.then.block_m, tile.then.warps, tile.then.stages)
        return first in alone and turned in alone

    def columns(self, p: Problem, stepped: int) -> int:
        """Of 32 bits, of all that products sum up, chunk by chunk, and of the scores that are multiplied."""
        chunks = [tiles.chunks(n) for n in (p.dim, p.dim_v)]
        gradients = sum(width for both in chunks for _, width in both)
        return sum(map(len, chunks)) * stepped + gradients + 2 * stepped * p.dtype.itemsize // 4

    def smem_bytes(self, p: Problem, stepped: int, held: int, stages: int) -> int:
        """Upper estimate of shared memory: held tiles; stepped tiles and what mods read for every stage; scores."""
        size = p.dtype.itemsize
        d, dv = (16 * -(-n // 16) for n in (p.dim, p.dim_v))
        mods = stages * max(codegen.tile_bytes(p.program, *sides) for sides in ((stepped, held), (held, stepped)))
        scores = 2 * stepped * held * size
        rest = max(scores, mods) if held >= 64 else scores + mods  # wgmma takes scores from registers
        if held < 64 and stages == 1:  # a stepped tile, loaded to registers, is turned in shared memory
            rest = max(rest, size * stepped * min(max(d, dv), 256))
        return size * (d + dv) * (held + stages * stepped) + rest

    def shared_bytes(self, plan: Plan) -> int:
        """Shared memory that a block takes, as `smem_bytes` counts it, of the two kernels the one that takes more."""
        t = plan.tile
        assert t is not None
        assert t.then is not None
        dkdv, dq = (t.block_m, t.block_n, t.stages), (t.then.block_n, t.then.block_m, t.then.stages)
        return max(self.smem_bytes(plan.problem, *sizes) for sizes in (dkdv, dq))

    def launches(self, plan: Plan, x: Operands, saved: Saved, work: dict[str, torch.Tensor]) -> list[launch.Launch]:
        """The launches of one call; `work` is `workspace`. Meta tensors will do, for compiling without a GPU."""
        return self.steps(plan, x, saved, work, self.pairs(x, work["dout"]))

    def steps(
        self, plan: Plan, x: Operands, saved: Saved, work: dict[str, torch.Tensor], pairs: dict[str, Any]
    ) -> list[launch.Launch]:
        """`launches`; `pairs` are for the kernels that split their operands."""
        p, tile = plan.problem, plan.tile
        assert tile is not None
        assert tile.then is not None
        shared = self._shared(plan, x, work["dout"], work)
        steps = [self._prepare(p, saved, work)]
        for step in (self._dkdv(p, tile, shared, work), self._dq(p, tile.then, shared, work)):
            steps += [step, step.careful(plan.device)] if self.marked(p) else [step]
        if p.bias_shape is not None:
            steps.append(self._dbias(p, tile, shared, work))
        return steps + table_gradients.steps(p, tile, shared, work, self.gains)

    def _shared(self, plan: Plan, x: Operands, dout: torch.Tensor, work: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The arguments that every kernel of the backward but `prepare` takes."""
        p, per = plan.problem, launch.unit(x.q, x.k, x.v, dout)
        return launch.common(plan, x) | {
            "q_ptr": x.q, "k_ptr": x.k, "v_ptr": x.v, "dout_ptr": dout,
            "lse_log2_ptr": work["lse_log2"], "delta_ptr": work["delta"], "gain_ptr": work["gain"],
            "q_strides": launch.strides(x.q, per), "k_strides": launch.strides(x.k, per),
            "v_strides": launch.strides(x.v, per), "dout_strides": launch.strides(dout, per),
            "DSCORE": codegen.build(p.program).dscore, "DIM": p.dim, "DIM_V": p.dim_v,
            "CHUNKS": tiles.chunks(p.dim), "CHUNKS_V": tiles.chunks(p.dim_v), "UNIT": per,
        }  # fmt: skip

    def _prepare(self, p: Problem, saved: Saved, work: dict[str, torch.Tensor]) -> launch.Launch:
        block = 32 if max(p.dim_v, 16) > 128 else 64
        arguments = {
            "out_ptr": saved.out, "dout_ptr": work["dout"], "lse_ptr": saved.lse, "dlse_ptr": work["dlse"],
            "delta_ptr": work["delta"], "lse_log2_ptr": work["lse_log2"],
            "out_strides": launch.strides(saved.out), "dout_strides": launch.strides(work["dout"]),
            "heads_q": p.heads_q, "seqlen_q": p.seqlen_q, "DIM_V": p.dim_v, "CHUNKS_V": tiles.chunks(p.dim_v),
            "DLSE": saved.dlse is not None, "BLOCK": block,
        }  # fmt: skip
        grid = p.batch * p.heads_q * -(-p.seqlen_q // block)
        return launch.Launch(
            "prepare", prepare_kernel, grid, launch.in_order(prepare_kernel, arguments), Tile(block, 1)
        )

    def _dkdv(self, p: Problem, tile: Tile, shared: dict[str, Any], work: dict[str, torch.Tensor]) -> launch.Launch:
        uneven = p.seqlen_q % tile.block_m != 0 or p.seqlen_kv % tile.block_n != 0
        arguments = launch.PLAIN | shared | {
            "MASKED": codegen.masking(p.program, p.program.cols, always=True), "BOUNDED": uneven,
            "dk_ptr": work["dk"], "dv_ptr": work["dv"], "bad_kv_ptr": work["bad_kv"],
            "GAINS": "given" if self.gains else None,
            "dk_strides": launch.strides(work["dk"]), "dv_strides": launch.strides(work["dv"]),
            "COLS": codegen.build(p.program).cols, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        }  # fmt: skip
        grid = p.batch * p.heads_kv * -(-p.seqlen_kv // tile.block_n)
        return launch.Launch("dkdv", dkdv_kernel, grid, launch.in_order(dkdv_kernel, arguments), tile)

    def _dq(self, p: Problem, tile: Tile, shared: dict[str, Any], work: dict[str, torch.Tensor]) -> launch.Launch:
        uneven = p.seqlen_kv % tile.block_n != 0
        # beyond 128 columns a branch makes the compiler wait for every single product
        masked = codegen.masking(p.program, p.program.rows, uneven, always=max(p.dim, p.dim_v) > 128)
        arguments = launch.PLAIN | shared | {
            "MASKED": masked, "BOUNDED": uneven or p.seqlen_q % tile.block_m != 0,
            "dq_ptr": work["dq"], "dq_strides": launch.strides(work["dq"]), "bad_q_ptr": work["bad_q"],
            "sinks_ptr": work["sinks"], "GAINS": ("with sinks" if p.sinks else "summed") if self.gains else None,
            "ROWS": codegen.build(p.program).rows, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        }  # fmt: skip
        grid = p.batch * p.heads_q * -(-p.seqlen_q // tile.block_m)
        return launch.Launch("dq", dq_kernel, grid, launch.in_order(dq_kernel, arguments), tile)

    def _dbias(self, p: Problem, tile: Tile, shared: dict[str, Any], work: dict[str, torch.Tensor]) -> launch.Launch:
        assert p.bias_shape is not None
        block_m, block_n = min(tile.block_m, 64), min(tile.block_n, 64)
        over = tuple(n == 1 for n in p.bias_shape)
        uneven = p.seqlen_q % block_m != 0 or p.seqlen_kv % block_n != 0
        arguments = shared | {
            "dbias_ptr": work["dbias"], "BOUNDED": uneven, "OVER": over, "BLOCK_M": block_m, "BLOCK_N": block_n,
            "GAINS": "given" if self.gains else None,
        }  # fmt: skip
        grid = 1
        counts = p.batch, p.heads_q, -(-p.seqlen_q // block_m), -(-p.seqlen_kv // block_n)
        for count, summed in zip(counts, over, strict=True):
            grid *= 1 if summed else count
        return launch.Launch(
            "dbias", dbias_kernel, grid, launch.in_order(dbias_kernel, arguments), replace(tile, stages=1)
        )

    def run(self, plan: Plan, x: Operands, saved: Saved) -> Gradients:
        """dq, dk, dv, dbias, dsinks."""
        w = self.begin(plan, x, saved, "dkdv", "dq")
        if not launch.again(w.changed, plan.cache, w.key, w.own):
            launch.run(self.steps(plan, x, w.saved, self.tensors(plan, x, w), w.pairs), plan.cache, w.key)
        return self.gradients(plan, x, w)

    def begin(self, plan: Plan, x: Operands, saved: Saved, *paired: str) -> Work:
        """Room for one call, and where everything is; `paired` are the launches that take pairs."""
        p, saved = plan.problem, self.tidied(plan.problem, saved)
        room: Any = plan.cache.get("room")
        if room is None:
            room = plan.cache["room"] = self.room(p)
        space, made, pairs = room.allocate(x.q.device), self.made(p, x), self.pairs(x, saved.dout)
        changed = self.changed(x, saved, made)
        for name, address in room.addresses(space).items():
            changed[f"{name}_ptr"] = address
        if any(isinstance(value, torch.Tensor) for value in x.aux):
            changed["aux"] = codegen.aux_arguments(x.aux, p.program)
        own = launch.own({"q": x.q, "k": x.k, "v": x.v, "dout": saved.dout}, pairs, *paired)
        own |= table_gradients.own(p, made)
        return Work(launch.key(saved), saved, room, space, made, pairs, changed, own)

    def tensors(self, plan: Plan, x: Operands, w: Work) -> dict[str, torch.Tensor]:
        """What `steps` takes by name, in the room of a call."""
        return w.made | self.parts(plan.problem, x, w.saved, w.room, w.space)

    def gradients(self, plan: Plan, x: Operands, w: Work) -> Gradients:
        """What a call made."""
        dsinks = None
        if x.sinks is not None:
            dsinks = sink_gradient(x, w.saved.lse, rows(w.room, w.space, "delta", plan.problem))
        dtables = table_gradients.gradients(plan.problem, w.made)
        return Gradients(w.made["dq"], w.made["dk"], w.made["dv"], w.made.get("dbias"), dsinks, dtables)

    def marked(self, p: Problem) -> bool:
        """Whether tiles are marked to be computed again."""
        return p.program.keep is not None

    def pairs(self, x: Operands, dout: torch.Tensor) -> dict[str, Any]:
        """Room for split operands, by name; none here."""
        return {}

    def tidied(self, p: Problem, saved: Saved) -> Saved:
        """With dout as the products want it: the inputs' dtype, dense in the last dim; and dlse dense."""
        dout, dlse = saved.dout, saved.dlse
        dout = dout if dout.dtype == p.dtype else dout.to(p.dtype)
        return saved._replace(
            dout=dout.contiguous() if is_copied(dout) else dout, dlse=None if dlse is None else dlse.contiguous()
        )

    def made(self, p: Problem, x: Operands) -> dict[str, torch.Tensor]:
        """Gradients to fill."""
        made = {"dq": dense_like(x.q), "dk": dense_like(x.k), "dv": dense_like(x.v)}
        if p.bias_shape is not None:
            made["dbias"] = torch.empty(p.bias_shape, dtype=torch.float32, device=x.q.device)
        return made | table_gradients.room(p, x.q.device)

    def room(self, p: Problem) -> Room:
        """For delta, lse in the log2 domain, gains, and a mark a tile, which has 16 rows at least."""
        marks = int(self.marked(p))
        return Room.of(
            delta=padded_rows(p),
            lse_log2=padded_rows(p),
            gain=padded_rows(p) if self.gains else 0,
            bad_q=marks * p.batch * p.heads_q * -(-p.seqlen_q // 16),
            bad_kv=marks * p.batch * p.heads_kv * -(-p.seqlen_kv // 16),
        )

    def changed(self, x: Operands, saved: Saved, made: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The addresses of one call by the names of arguments, but for those in a room."""
        found = {
            "q_ptr": x.q.data_ptr(), "k_ptr": x.k.data_ptr(), "v_ptr": x.v.data_ptr(),
            "out_ptr": saved.out.data_ptr(), "lse_ptr": saved.lse.data_ptr(), "dout_ptr": saved.dout.data_ptr(),
            "dlse_ptr": 0 if saved.dlse is None else saved.dlse.data_ptr(),
            "sinks_ptr": 0 if x.sinks is None else x.sinks.data_ptr(),
        }  # fmt: skip
        for name, tensor in made.items():
            found[f"{name}_ptr"] = tensor.data_ptr()
        return found

    def parts(self, p: Problem, x: Operands, saved: Saved, room: Room, space: torch.Tensor) -> dict[str, torch.Tensor]:
        """What launches take besides gradients, by name, as tensors; delta stands for what they do not read."""
        work = {
            "dout": saved.dout,
            "delta": rows(room, space, "delta", p),
            "lse_log2": rows(room, space, "lse_log2", p),
        }
        delta = work["delta"]
        work["dlse"] = delta if saved.dlse is None else saved.dlse
        work["gain"] = rows(room, space, "gain", p) if self.gains else delta
        work["sinks"] = delta if x.sinks is None else x.sinks
        for name in ("bad_q", "bad_kv"):
            work[name] = room.view(space, name, dtype=torch.int32) if self.marked(p) else delta
        return work

    def workspace(self, p: Problem, x: Operands, saved: Saved) -> dict[str, torch.Tensor]:
        """All tensors that `launches` takes by name, new ones."""
        room, saved = self.room(p), self.tidied(p, saved)
        return self.made(p, x) | self.parts(p, x, saved, room, room.allocate(x.q.device))


SPEC = TritonBackward()
