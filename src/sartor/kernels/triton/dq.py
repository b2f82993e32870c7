"""dq: one program per query tile, whose mainloop visits the key tiles that the mask leaves."""

from __future__ import annotations

import triton
import triton.language as tl

from sartor.kernels.triton import launch, marks, products, tiles
from sartor.kernels.triton.bounds import tile_bounds
from sartor.kernels.triton.dropout import seed_of, stays
from sartor.kernels.triton.gradients import SECTION, gradients_of, load_rows, references, row, score_tile
from sartor.kernels.triton.groups import Config, Numbers, Tensors
from sartor.kernels.triton.maths import LOG2_E


@triton.jit
def _mainloop(dq, bounds, i_m, queries, douts, keys, values, lse, delta, b, h, n, c):
    """The mainloop: add the key tiles in [lo, hi) to dq; returned with the sums of the rows' weights and what these are
    relative to, if GAINS."""
    lo, hi, full_lo, full_hi = bounds
    q_base, q_stride, q_unit = queries
    dout_base, dout_stride, dout_unit = douts
    k_base, k_stride, k_units = keys
    v_base, v_stride, v_units = values
    total = tl.zeros((c.BLOCK_M,), tl.float32)
    high = lse
    if c.GAINS is not None and c.SCORE is not None:
        high = tl.full((c.BLOCK_M,), float("-inf"), tl.float32)  # the rows' highest scores so far
    o_m, o_n = tl.arange(0, c.BLOCK_M), tl.arange(0, c.BLOCK_N)
    seed = seed_of(n.dropout, c.DROPOUT)
    q_rows = i_m * c.BLOCK_M + o_m
    own = n.seqlen_q - i_m * c.BLOCK_M
    q = products.load(q_base, o_m, q_stride, own, c.DIM, c.CHUNKS, True, c.PRECISION)
    dout = products.load(dout_base, o_m, dout_stride, own, c.DIM_V, c.CHUNKS_V, True, c.PRECISION)
    for start in tl.range(lo, hi, c.BLOCK_N, num_stages=1 if c.REPAIR else None):
        first = tl.cast(start, tl.int64)
        left = n.seqlen_kv - start
        k_unit = products.unit_of(k_units, start, c.PRECISION)
        v_unit = products.unit_of(v_units, start, c.PRECISION)
        k_rows = k_base + first * k_stride
        k = products.load(k_rows, o_n, k_stride, left, c.DIM, c.CHUNKS, c.BOUNDED, c.PRECISION)
        s = products.dot_nt(q, k, c.CHUNKS, c.PRECISION)  # [M, D] @ [D, N] -> [M, N]
        v_rows = v_base + first * v_stride
        v = products.load(v_rows, o_n, v_stride, left, c.DIM_V, c.CHUNKS_V, c.BOUNDED, c.PRECISION)
        dp = products.dot_nt(dout, v, c.CHUNKS_V, c.PRECISION)  # [M, DV] @ [DV, N] -> [M, N]
        partial = (start < full_lo) | (start + c.BLOCK_N > full_hi) | (c.MASKED == 2)
        rows_lse = products.resolved(lse, q_unit, k_unit, n.scale, c.DIM, c.PRECISION)
        at = b, h, q_rows[:, None], (start + o_n)[None, :]
        scores = score_tile(s, (q_unit, k_unit), partial, at, n, c)
        if c.GAINS is not None and c.SCORE is not None:
            higher = tl.maximum(high, tl.max(scores[1], 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2((high - base) * n.factor)
            total, dq, high = total * shrink, tiles.scale_tile(dq, shrink[:, None], c.CHUNKS), higher
            rows_lse = tl.where(rows_lse != rows_lse, rows_lse, base)  # NaN where pairs do not resolve the row
        stay = stays(seed, n.dropout, b, h, i_m * c.BLOCK_M, start, c.BLOCK_M, c.BLOCK_N, False, c.DROPOUT)
        w, ds, draw, keep = gradients_of(
            scores, dp, (dout_unit, v_unit), rows_lse[:, None], delta[:, None], None, stay, at, n, c
        )  # fmt: skip
        if c.GAINS is not None:
            total += tl.sum(w, 1)
        if c.REPAIR:
            k = tiles.finite_tile(k, c.CHUNKS)
        dq = products.add_dot(dq, draw, k, k_unit, c.CHUNKS, c.PRECISION, False)  # [M, N] @ [N, D] -> [M, D]
    return dq, total, high


@triton.jit
def _dq_tile(tile, x, n, c):
    """dq of one query tile of one head."""
    n_tiles = tl.cdiv(n.seqlen_q, c.BLOCK_M)
    i_m, head = n_tiles - 1 - tile % n_tiles, tile // n_tiles
    b, h = head // n.heads_q, head % n.heads_q
    b64, h64, first = tl.cast(b, tl.int64), tl.cast(h, tl.int64), tl.cast(i_m * c.BLOCK_M, tl.int64)
    o_m = tl.arange(0, c.BLOCK_M)
    q_rows = i_m * c.BLOCK_M + o_m
    left = n.seqlen_q - i_m * c.BLOCK_M
    q_base = x.q + (b64 * x.q_strides[0] + h64 * x.q_strides[1] + first * x.q_strides[2]) * c.UNIT
    dout_base = x.dout + (b64 * x.dout_strides[0] + h64 * x.dout_strides[1] + first * x.dout_strides[2]) * c.UNIT
    k_base = x.k + (b64 * x.k_strides[0] + (h64 // n.group) * x.k_strides[1]) * c.UNIT
    v_base = x.v + (b64 * x.v_strides[0] + (h64 // n.group) * x.v_strides[1]) * c.UNIT
    rows = row(head, n.seqlen_q)
    lse, delta = load_rows(x.lse_log2 + rows, x.delta + rows, q_rows, n.seqlen_q, True)
    k_stride = products.row_stride(x.k_strides, c.UNIT, c.DIM, c.PRECISION)
    v_stride = products.row_stride(x.v_strides, c.UNIT, c.DIM_V, c.PRECISION)
    q_stride = products.row_stride(x.q_strides, c.UNIT, c.DIM, c.PRECISION)
    dout_stride = products.row_stride(x.dout_strides, c.UNIT, c.DIM_V, c.PRECISION)
    present = tl.minimum(q_rows, n.seqlen_q - 1)
    bounds = tile_bounds(c.SPANS, b, h, present, n.aux, n.seqlen_kv, c.BLOCK_N)

    head_kv = b * (n.heads_q // n.group) + h // n.group
    q_units = products.head_units(x.units, 0, head, n.seqlen_q, c.PRECISION)
    dout_units = products.head_units(x.units, 3, head, n.seqlen_q, c.PRECISION)
    k_units = products.head_units(x.units, 1, head_kv, n.seqlen_kv, c.PRECISION)
    v_units = products.head_units(x.units, 2, head_kv, n.seqlen_kv, c.PRECISION)
    q_unit = products.unit_of(q_units, i_m * c.BLOCK_M, c.PRECISION)
    dout_unit = products.unit_of(dout_units, i_m * c.BLOCK_M, c.PRECISION)
    dq, total, high = _mainloop(
        tiles.zeros(c.BLOCK_M, c.CHUNKS), bounds, i_m,
        (q_base, q_stride, q_unit), (dout_base, dout_stride, dout_unit),
        (k_base, k_stride, k_units), (v_base, v_stride, v_units), lse, delta, b, h, n, c,
    )  # fmt: skip
    if c.GAINS is not None:
        if c.SCORE is not None:
            base = high
            if c.GAINS == "with sinks":
                base = tl.maximum(high, tl.load(x.sinks + h).to(tl.float32))
            base = tl.where(base == float("-inf"), 0.0, base)
            shrink = tl.exp2((high - base) * n.factor)
            total, dq = total * shrink, tiles.scale_tile(dq, shrink[:, None], c.CHUNKS)
            if c.GAINS == "with sinks":
                total += tl.exp2((tl.load(x.sinks + h).to(tl.float32) - base) * LOG2_E)
            tl.store(x.high + rows + q_rows, base, mask=q_rows < n.seqlen_q)
        elif c.GAINS == "with sinks":
            total += tl.exp2(tl.load(x.sinks + h).to(tl.float32) * LOG2_E - lse)
        gain = tl.where(total == 0.0, 1.0, 1.0 / total)
        if c.GAINS == "of more keys":
            gain = tl.exp2(base * LOG2_E - lse)
        tl.store(x.gain + rows + q_rows, gain, mask=q_rows < n.seqlen_q)
        dq = tiles.scale_tile(dq, gain[:, None], c.CHUNKS)
    dq = tiles.scale_tile(dq, n.scale, c.CHUNKS)
    dq_base = x.dq + b64 * x.dq_strides[0] + h64 * x.dq_strides[1] + first * x.dq_strides[2]
    tiles.store_tile(dq_base, o_m, x.dq_strides[2], left, dq, c.DIM, c.CHUNKS)
    if (c.KEEP is not None or c.PRECISION == "pairs") and not c.REPAIR:
        tl.store(x.bad + tile, tiles.has_nonfinite(dq, c.CHUNKS))


@triton.jit(do_not_specialize=launch.RUNTIME)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, lse_log2_ptr, delta_ptr, gain_ptr, sinks_ptr, bad_q_ptr, units, aux,
    dropout, q_strides, k_strides, v_strides, dout_strides, dq_strides,
    batch, heads_q, group, seqlen_q, seqlen_kv,
    scale, factor,
    KEEP: tl.constexpr, ROWS: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, PRESCALE: tl.constexpr,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONLY_MARKED: tl.constexpr, REPAIR: tl.constexpr,
    GAINS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """One program per tile; with ONLY_MARKED a few programs, which compute the marked tiles again."""
    base, begin, end, step = marks.share(
        tl.cdiv(seqlen_q, BLOCK_M), heads_q * batch, ONLY_MARKED, 0 if KEEP is None else SECTION
    )  # fmt: skip
    high_ptr = references(lse_log2_ptr, gain_ptr, batch, heads_q, seqlen_q, SCORE, GAINS)
    for first in tl.range(begin, end, step * marks.ROUND, num_stages=1):
        for i in tl.range(first, marks.last(bad_q_ptr, first, end, step, ONLY_MARKED), step, num_stages=1):
            if marks.wanted(bad_q_ptr + base + i, ONLY_MARKED):
                _dq_tile(
                    base + i,
                    Tensors(q=q_ptr, k=k_ptr, v=v_ptr, dout=dout_ptr, dq=dq_ptr, lse_log2=lse_log2_ptr,
                            delta=delta_ptr, gain=gain_ptr, high=high_ptr, sinks=sinks_ptr, bad=bad_q_ptr, units=units,
                            q_strides=q_strides, k_strides=k_strides, v_strides=v_strides, dout_strides=dout_strides,
                            dq_strides=dq_strides),
                    Numbers(heads_q=heads_q, group=group, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, scale=scale,
                            factor=factor, aux=aux, dropout=dropout),
                    Config(KEEP=KEEP, SPANS=ROWS, SCORE=SCORE, PRESCALE=PRESCALE, PRECISION=PRECISION,
                           MASKED=MASKED, BOUNDED=BOUNDED, DIM=DIM, DIM_V=DIM_V, CHUNKS=CHUNKS, CHUNKS_V=CHUNKS_V,
                           UNIT=UNIT, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, REPAIR=REPAIR, DSCORE=DSCORE, GAINS=GAINS,
                           DROPOUT=DROPOUT),
                )  # fmt: skip
