"""dk and dv: one program per key tile, whose mainloop visits the query tiles of every query head of the group.

S and dP are computed transposed, [N, M], so that P^T and dS^T are operands of the products as they come.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sartor.kernels.triton import launch, marks, products, tiles
from sartor.kernels.triton.bounds import tile_bounds
from sartor.kernels.triton.dropout import seed_of, stays
from sartor.kernels.triton.gradients import SECTION, gradient_tile, load_rows, references, row
from sartor.kernels.triton.groups import Config, Numbers, Tensors


@triton.jit
def _mainloop(state, bounds, i_n, keys, values, queries, douts, lse_base, delta_base, gains, b, h, n, c):
    """The mainloop: add the query tiles in [lo, hi) of one head to state = (dk, dv). S is transposed, [N, M].

    Rows of queries past the end need no mask: their lse is +inf, so their weights are 0.
    """
    dk, dv = state
    lo, hi, full_lo, full_hi = bounds
    k_base, k_stride, k_unit = keys
    v_base, v_stride, v_unit = values
    q_base, q_stride, q_units = queries
    dout_base, dout_stride, dout_units = douts
    o_m, o_n = tl.arange(0, c.BLOCK_M), tl.arange(0, c.BLOCK_N)
    seed = seed_of(n.dropout, c.DROPOUT)
    kv = i_n * c.BLOCK_N + o_n
    own = n.seqlen_kv - i_n * c.BLOCK_N
    k = products.load(k_base, o_n, k_stride, own, c.DIM, c.CHUNKS, True, c.PRECISION)
    v = products.load(v_base, o_n, v_stride, own, c.DIM_V, c.CHUNKS_V, True, c.PRECISION)
    for start in tl.range(lo, hi, c.BLOCK_M, num_stages=1 if c.REPAIR else None):
        first = tl.cast(start, tl.int64)
        left = n.seqlen_q - start
        q_unit = products.unit_of(q_units, start, c.PRECISION)
        dout_unit = products.unit_of(dout_units, start, c.PRECISION)
        q_rows = q_base + first * q_stride
        q = products.load(q_rows, o_m, q_stride, left, c.DIM, c.CHUNKS, c.BOUNDED, c.PRECISION)
        s = products.dot_nt(k, q, c.CHUNKS, c.PRECISION)  # [N, D] @ [D, M] -> [N, M]
        dout_rows = dout_base + first * dout_stride
        dout = products.load(dout_rows, o_m, dout_stride, left, c.DIM_V, c.CHUNKS_V, c.BOUNDED, c.PRECISION)
        dp = products.dot_nt(v, dout, c.CHUNKS_V, c.PRECISION)  # [N, DV] @ [DV, M] -> [N, M]
        lse, delta = load_rows(lse_base, delta_base, start + o_m, n.seqlen_q, c.BOUNDED)
        lse = products.resolved(lse, k_unit, q_unit, n.scale, c.DIM, c.PRECISION)
        gain = gains
        if c.GAINS is not None:
            if c.BOUNDED:
                gain = tl.load(gains + start + o_m, mask=start + o_m < n.seqlen_q, other=1.0)[None, :]
            else:
                gain = tl.load(gains + start + o_m)[None, :]
        partial = (start < full_lo) | (start + c.BLOCK_M > full_hi) | (c.MASKED == 2)
        stay = stays(seed, n.dropout, b, h, start, i_n * c.BLOCK_N, c.BLOCK_M, c.BLOCK_N, True, c.DROPOUT)
        w, ds, draw, keep = gradient_tile(
            s, dp, (k_unit, q_unit, v_unit, dout_unit), lse[None, :], delta[None, :], gain, stay, partial,
            (b, h, (start + o_m)[None, :], kv[:, None]), n, c,
        )  # fmt: skip
        if c.DROPOUT:
            w = tl.where(stay, w, 0.0)
        if c.REPAIR:
            dv = tiles.add_attended(
                dv, w, keep, dout_base, start, dout_stride, n.seqlen_q, c.BLOCK_M, c.DIM_V, c.CHUNKS_V
            )  # fmt: skip
            q = tiles.finite_tile(q, c.CHUNKS)
        else:
            # [N, M] @ [M, DV] -> [N, DV]
            dv = products.add_dot(dv, w, dout, dout_unit, c.CHUNKS_V, c.PRECISION, False)
        dk = products.add_dot(dk, draw, q, q_unit, c.CHUNKS, c.PRECISION, False)  # [N, M] @ [M, D] -> [N, D]
    return dk, dv


@triton.jit
def _dkdv_tile(tile, x, n, c):
    """dk and dv of one key tile of one key head: the sum over the query heads of its group."""
    n_tiles = tl.cdiv(n.seqlen_kv, c.BLOCK_N)
    i_n, head = tile % n_tiles, tile // n_tiles
    heads_kv = n.heads_q // n.group
    b, h_kv = head // heads_kv, head % heads_kv
    b64, h64, first = tl.cast(b, tl.int64), tl.cast(h_kv, tl.int64), tl.cast(i_n * c.BLOCK_N, tl.int64)
    o_n = tl.arange(0, c.BLOCK_N)
    left = n.seqlen_kv - i_n * c.BLOCK_N
    k_base = x.k + (b64 * x.k_strides[0] + h64 * x.k_strides[1] + first * x.k_strides[2]) * c.UNIT
    v_base = x.v + (b64 * x.v_strides[0] + h64 * x.v_strides[1] + first * x.v_strides[2]) * c.UNIT
    k_stride = products.row_stride(x.k_strides, c.UNIT, c.DIM, c.PRECISION)
    v_stride = products.row_stride(x.v_strides, c.UNIT, c.DIM_V, c.PRECISION)
    q_stride = products.row_stride(x.q_strides, c.UNIT, c.DIM, c.PRECISION)
    dout_stride = products.row_stride(x.dout_strides, c.UNIT, c.DIM_V, c.PRECISION)
    present = tl.minimum(i_n * c.BLOCK_N + o_n, n.seqlen_kv - 1)

    k_units = products.head_units(x.units, 1, head, n.seqlen_kv, c.PRECISION)
    v_units = products.head_units(x.units, 2, head, n.seqlen_kv, c.PRECISION)
    k_unit = products.unit_of(k_units, i_n * c.BLOCK_N, c.PRECISION)
    v_unit = products.unit_of(v_units, i_n * c.BLOCK_N, c.PRECISION)
    state = tiles.zeros(c.BLOCK_N, c.CHUNKS), tiles.zeros(c.BLOCK_N, c.CHUNKS_V)
    dk_strides, dv_strides = x.dk_strides, x.dv_strides  # after a loop Triton 3.6 has lost those of them that are 1
    for g in tl.range(0, n.group, num_stages=1):
        h = h_kv * n.group + g
        rows = row(b64 * n.heads_q + h, n.seqlen_q)
        q_base = x.q + (b64 * x.q_strides[0] + tl.cast(h, tl.int64) * x.q_strides[1]) * c.UNIT
        dout_base = x.dout + (b64 * x.dout_strides[0] + tl.cast(h, tl.int64) * x.dout_strides[1]) * c.UNIT
        q_units = products.head_units(x.units, 0, b * n.heads_q + h, n.seqlen_q, c.PRECISION)
        dout_units = products.head_units(x.units, 3, b * n.heads_q + h, n.seqlen_q, c.PRECISION)
        bounds = tile_bounds(c.SPANS, b, h, present, n.aux, n.seqlen_q, c.BLOCK_M)
        state = _mainloop(
            state, bounds, i_n, (k_base, k_stride, k_unit), (v_base, v_stride, v_unit),
            (q_base, q_stride, q_units), (dout_base, dout_stride, dout_units),
            x.lse_log2 + rows, x.delta + rows, x.gain + rows, b, h, n, c,
        )  # fmt: skip
    dk, dv = state
    dk = tiles.scale_tile(dk, n.scale, c.CHUNKS)
    if c.DROPOUT:
        dv = tiles.scale_tile(dv, n.dropout[2], c.CHUNKS_V)
    dk_base = x.dk + b64 * dk_strides[0] + h64 * dk_strides[1] + first * dk_strides[2]
    dv_base = x.dv + b64 * dv_strides[0] + h64 * dv_strides[1] + first * dv_strides[2]
    tiles.store_tile(dk_base, o_n, dk_strides[2], left, dk, c.DIM, c.CHUNKS)
    tiles.store_tile(dv_base, o_n, dv_strides[2], left, dv, c.DIM_V, c.CHUNKS_V)
    if (c.KEEP is not None or c.PRECISION == "pairs") and not c.REPAIR:
        tl.store(x.bad + tile, tiles.has_nonfinite(dk, c.CHUNKS) + tiles.has_nonfinite(dv, c.CHUNKS_V))


@triton.jit(do_not_specialize=launch.RUNTIME)
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_log2_ptr, delta_ptr, gain_ptr, bad_kv_ptr, units, aux,
    dropout, q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    batch, heads_q, group, seqlen_q, seqlen_kv,
    scale, factor,
    KEEP: tl.constexpr, COLS: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, PRESCALE: tl.constexpr,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONLY_MARKED: tl.constexpr, REPAIR: tl.constexpr,
    GAINS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """One program per tile; with ONLY_MARKED a few programs, which compute the marked tiles again."""
    base, begin, end, step = marks.share(
        tl.cdiv(seqlen_kv, BLOCK_N), heads_q // group * batch, ONLY_MARKED, 0 if KEEP is None else SECTION
    )  # fmt: skip
    lse_log2_ptr = references(lse_log2_ptr, gain_ptr, batch, heads_q, seqlen_q, SCORE, GAINS)
    for first in tl.range(begin, end, step * marks.ROUND, num_stages=1):
        for i in tl.range(first, marks.last(bad_kv_ptr, first, end, step, ONLY_MARKED), step, num_stages=1):
            if marks.wanted(bad_kv_ptr + base + i, ONLY_MARKED):
                _dkdv_tile(
                    base + i,
                    Tensors(q=q_ptr, k=k_ptr, v=v_ptr, dout=dout_ptr, dk=dk_ptr, dv=dv_ptr, lse_log2=lse_log2_ptr,
                            delta=delta_ptr, gain=gain_ptr, bad=bad_kv_ptr, units=units, q_strides=q_strides,
                            k_strides=k_strides, v_strides=v_strides, dout_strides=dout_strides, dk_strides=dk_strides,
                            dv_strides=dv_strides),
                    Numbers(heads_q=heads_q, group=group, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, scale=scale,
                            factor=factor, aux=aux, dropout=dropout),
                    Config(KEEP=KEEP, SPANS=COLS, SCORE=SCORE, PRESCALE=PRESCALE, PRECISION=PRECISION,
                           MASKED=MASKED, BOUNDED=BOUNDED, DIM=DIM, DIM_V=DIM_V, CHUNKS=CHUNKS, CHUNKS_V=CHUNKS_V,
                           UNIT=UNIT, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, REPAIR=REPAIR, DSCORE=DSCORE, GAINS=GAINS,
                           DROPOUT=DROPOUT),
                )  # fmt: skip
