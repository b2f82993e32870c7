"""Gradients of the tables that a score reads: the part of the portable backward that adds up by atomics.

A kernel for each way that the score reads a table, a program for each query tile of a head. It makes dS as `dq` does,
multiplies it by the score's derivative by what was read, and adds that to the place it was read from; where a tile's
rows or columns read one place, their sum. Many pairs share a place, in no order: bits change from run to run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sartor.kernels.spec import Tile
from sartor.kernels.triton import launch
from sartor.problem import Problem

if launch.available():
    import triton
    import triton.language as tl

    from sartor.kernels.triton import codegen, products, tiles
    from sartor.kernels.triton.bounds import tile_bounds, valid
    from sartor.kernels.triton.dropout import seed_of, stays
    from sartor.kernels.triton.gradients import gradient_tile, load_rows, references, row
    from sartor.kernels.triton.groups import Config, Numbers

    @triton.jit(do_not_specialize=launch.RUNTIME)
    def dtable_kernel(
        q_ptr, k_ptr, v_ptr, dout_ptr, dtable_ptr, lse_log2_ptr, delta_ptr, gain_ptr, aux, dropout,
        q_strides, k_strides, v_strides, dout_strides,
        batch, heads_q, group, seqlen_q, seqlen_kv,
        scale, factor,
        KEEP: tl.constexpr, ROWS: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr,
        RISE: tl.constexpr, PLACE: tl.constexpr, ALONG_Q: tl.constexpr, ALONG_KV: tl.constexpr,
        PRESCALE: tl.constexpr, PRECISION: tl.constexpr, BOUNDED: tl.constexpr,
        DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
        UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GAINS: tl.constexpr,
        DROPOUT: tl.constexpr,
    ):  # fmt: skip
        """dtable[PLACE] += dS * RISE over one query tile; ALONG_Q and ALONG_KV say what the place varies along."""
        n_tiles = tl.cdiv(seqlen_q, BLOCK_M)
        head, i_m = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
        b, h = head // heads_q, head % heads_q
        b64, h64, first = tl.cast(b, tl.int64), tl.cast(h, tl.int64), tl.cast(i_m * BLOCK_M, tl.int64)
        o_m, o_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        q_rows, left = i_m * BLOCK_M + o_m, seqlen_q - i_m * BLOCK_M
        q_base = q_ptr + (b64 * q_strides[0] + h64 * q_strides[1] + first * q_strides[2]) * UNIT
        dout_base = dout_ptr + (b64 * dout_strides[0] + h64 * dout_strides[1] + first * dout_strides[2]) * UNIT
        k_base = k_ptr + (b64 * k_strides[0] + (h64 // group) * k_strides[1]) * UNIT
        v_base = v_ptr + (b64 * v_strides[0] + (h64 // group) * v_strides[1]) * UNIT
        q = tiles.load_tile(q_base, o_m, q_strides[2] * UNIT, left, DIM, CHUNKS, True)
        dout = tiles.load_tile(dout_base, o_m, dout_strides[2] * UNIT, left, DIM_V, CHUNKS_V, True)
        rows = row(head, seqlen_q)
        lse_log2_ptr = references(lse_log2_ptr, gain_ptr, batch, heads_q, seqlen_q, SCORE, GAINS)
        lse, delta = load_rows(lse_log2_ptr + rows, delta_ptr + rows, q_rows, seqlen_q, True)
        gain = gain_ptr
        if GAINS is not None:
            gain = tl.load(gain_ptr + rows + q_rows, mask=q_rows < seqlen_q, other=1.0)[:, None]
        seed = seed_of(dropout, DROPOUT)
        lo, hi, _, _ = tile_bounds(ROWS, b, h, tl.minimum(q_rows, seqlen_q - 1), aux, seqlen_kv, BLOCK_N)
        for start in tl.range(lo, hi, BLOCK_N, num_stages=1):
            kv, rest = start + o_n, seqlen_kv - start
            k_rows = k_base + tl.cast(start, tl.int64) * k_strides[2] * UNIT
            v_rows = v_base + tl.cast(start, tl.int64) * v_strides[2] * UNIT
            k = tiles.load_tile(k_rows, o_n, k_strides[2] * UNIT, rest, DIM, CHUNKS, True)
            v = tiles.load_tile(v_rows, o_n, v_strides[2] * UNIT, rest, DIM_V, CHUNKS_V, True)
            s = products.dot_nt(q, k, CHUNKS, PRECISION)
            dp = products.dot_nt(dout, v, CHUNKS_V, PRECISION)
            stay = stays(seed, dropout, b, h, i_m * BLOCK_M, start, BLOCK_M, BLOCK_N, False, DROPOUT)
            w, ds, draw, keep = gradient_tile(
                s, dp, (1, 1, 1, 1), lse[:, None], delta[:, None], gain, stay, True,
                (b, h, q_rows[:, None], kv[None, :]),
                Numbers(heads_q=heads_q, group=group, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, scale=scale,
                        factor=factor, aux=aux, dropout=dropout),
                Config(KEEP=KEEP, SPANS=ROWS, SCORE=SCORE, PRESCALE=PRESCALE, PRECISION=PRECISION, MASKED=True,
                       BOUNDED=BOUNDED, DIM=DIM, DIM_V=DIM_V, CHUNKS=CHUNKS, CHUNKS_V=CHUNKS_V, UNIT=UNIT,
                       BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, REPAIR=True, DSCORE=DSCORE, GAINS=GAINS, DROPOUT=DROPOUT),
            )  # fmt: skip
            query, key = valid(q_rows, seqlen_q, BOUNDED)[:, None], valid(kv, seqlen_kv, BOUNDED)[None, :]
            change = tl.where(ds == 0.0, 0.0, ds * RISE(s * scale, b, h, query, key, aux))
            place = PLACE(b, h, query, key, aux, heads_q, seqlen_q, seqlen_kv)
            if ALONG_Q and ALONG_KV:
                place = tl.broadcast_to(place, change.shape)
            elif ALONG_Q:
                change = tl.sum(change, 1)[:, None]
            elif ALONG_KV:
                change = tl.sum(change, 0)[None, :]
            else:
                change = tl.sum(tl.sum(change, 1), 0)
            tl.atomic_add(dtable_ptr + place, change, mask=change != 0.0, sem="relaxed")


def reasons(p: Problem) -> list[str]:
    """What the kernel lacks."""
    if p.table_shapes and p.deterministic:
        return ["adds up the gradient of what a score reads in any order, got deterministic=True"]
    return []


def room(p: Problem, device: torch.device) -> dict[str, torch.Tensor]:
    """Zeros that the gradients are added to, by name."""
    return {f"dtable {i}": torch.zeros(shape, dtype=torch.float32, device=device) for i, shape in p.table_shapes}


def gradients(p: Problem, work: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """In the order of the problem."""
    return tuple(work[f"dtable {i}"] for i, _ in p.table_shapes)


def own(p: Problem, work: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Arguments of single launches, for `launch.repeat`."""
    numbered = [(i, j) for i, _ in p.table_shapes for j in range(len(p.program.rises(i)))]
    return {f"dtable {i}.{j}": {"dtable_ptr": work[f"dtable {i}"]} for i, j in numbered}


def steps(
    p: Problem, tile: Tile, shared: dict[str, Any], work: dict[str, torch.Tensor], gains: bool
) -> list[launch.Launch]:
    """A launch for each way that each of the tables is read; `shared` as of the other kernels."""
    block_m, block_n = min(tile.block_m, 64), min(tile.block_n, 64)
    grid = p.batch * p.heads_q * -(-p.seqlen_q // block_m)
    found = []
    for i, _ in p.table_shapes:
        for j, made in enumerate(codegen.rises(p.program, i)):
            arguments = shared | made._asdict() | {
                "dtable_ptr": work[f"dtable {i}"], "ROWS": codegen.build(p.program).rows,
                "BOUNDED": p.seqlen_q % block_m != 0 or p.seqlen_kv % block_n != 0,
                "BLOCK_M": block_m, "BLOCK_N": block_n, "GAINS": "given" if gains else None,
            }  # fmt: skip
            arguments = launch.in_order(dtable_kernel, arguments)
            found.append(launch.Launch(f"dtable {i}.{j}", dtable_kernel, grid, arguments, replace(tile, stages=1)))
    return found
