"""dbias: dS, summed over the dims that the bias was broadcast along. One program per tile of the bias."""

from __future__ import annotations

import triton
import triton.language as tl

from sartor.kernels.triton import launch, products, tiles
from sartor.kernels.triton.dropout import seed_of, stays
from sartor.kernels.triton.gradients import gradient_tile, load_rows, references, row
from sartor.kernels.triton.groups import Config, Numbers


@triton.jit(do_not_specialize=launch.RUNTIME)
def dbias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dbias_ptr, lse_log2_ptr, delta_ptr, gain_ptr, aux, dropout,
    q_strides, k_strides, v_strides, dout_strides,
    batch, heads_q, group, seqlen_q, seqlen_kv,
    scale, factor,
    KEEP: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, PRESCALE: tl.constexpr, PRECISION: tl.constexpr,
    BOUNDED: tl.constexpr, OVER: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GAINS: tl.constexpr,
    DROPOUT: tl.constexpr,
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
    seed = seed_of(dropout, DROPOUT)
    lse_log2_ptr = references(lse_log2_ptr, gain_ptr, batch, heads_q, seqlen_q, SCORE, GAINS)
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
        start_q, start_kv = tile_m * BLOCK_M, tile_n * BLOCK_N
        stay = stays(seed, dropout, b, h, start_q, start_kv, BLOCK_M, BLOCK_N, False, DROPOUT)
        w, ds, draw, keep = gradient_tile(
            s, dp, (1, 1, 1, 1), lse[:, None], delta[:, None], gain, stay, True,
            (b, h, q_rows[:, None], kv[None, :]),
            Numbers(heads_q=heads_q, group=group, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, scale=scale, factor=factor,
                    aux=aux, dropout=dropout),
            Config(KEEP=KEEP, SPANS=None, SCORE=SCORE, PRESCALE=PRESCALE, PRECISION=PRECISION, MASKED=True,
                   BOUNDED=BOUNDED, DIM=DIM, DIM_V=DIM_V, CHUNKS=CHUNKS, CHUNKS_V=CHUNKS_V, UNIT=UNIT,
                   BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, REPAIR=True, DSCORE=DSCORE, GAINS=GAINS, DROPOUT=DROPOUT),
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
