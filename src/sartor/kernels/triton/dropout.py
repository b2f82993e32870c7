"""Which weights of a tile stay, as sartor/kernels/dropout.py defines it: Philox once for every patch of 4 by 4 pairs.

A tile's patches are decided where they are made, in a layout in which each thread has patches of its own; what goes to
the layout of the scores is a number for each patch, with a bit for each pair.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from sartor.kernels import dropout
from sartor.kernels.spec import Operands
from sartor.problem import Problem

ROUNDS = tl.constexpr(dropout.ROUNDS)
HASH = tl.constexpr(dropout.HASH)


def argument(p: Problem, x: Operands) -> tuple[Any, ...]:
    """What kernels take: the seed, the threshold, so that Triton specialises on none, and the factor; or nothing."""
    return (x.seed, 4 * dropout.threshold(p.dropout_p) + 2, dropout.scale(p.dropout_p)) if p.dropout_p else ()


@triton.jit
def seed_of(dropout, DROPOUT: tl.constexpr):
    """The numbers of the seed, loaded once: DROPOUT is how many there are; nothing without dropout."""
    if DROPOUT == 7:
        return (
            tl.load(dropout[0]), _number(dropout, 1), _number(dropout, 2), _number(dropout, 3), _number(dropout, 4),
            _number(dropout, 5), _number(dropout, 6),
        )  # fmt: skip
    elif DROPOUT == 5:
        return (
            tl.load(dropout[0]), _number(dropout, 1), _number(dropout, 2), 4 * _number(dropout, 3),
            4 * _number(dropout, 4),
        )  # fmt: skip
    elif DROPOUT:
        return tl.load(dropout[0])
    else:
        return 0


@triton.jit
def _number(dropout, i: tl.constexpr):
    return tl.load(dropout[0] + i).to(tl.int32)


@triton.jit
def stays(
    seed, dropout, b, h, q_start, kv_start, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """Whether weights stay: [BLOCK_M, BLOCK_N] from (q_start, kv_start) on, multiples of 16; TRANSPOSED, keys along the
    rows. True without dropout."""
    if DROPOUT == 7:
        return _stay_pair_by_pair(seed, dropout, b, h, q_start, kv_start, BLOCK_M, BLOCK_N, TRANSPOSED)
    elif DROPOUT:
        o_q, o_kv = tl.arange(0, BLOCK_M // 4), tl.arange(0, BLOCK_N // 4)
        q, kv = (tl.cast(q_start, tl.int32) // 4 + o_q)[:, None], (tl.cast(kv_start, tl.int32) // 4 + o_kv)[None, :]
        if TRANSPOSED:
            q, kv = tl.trans(q), tl.trans(kv)
        head, item = tl.cast(h, tl.int32) + kv * 0 + q * 0, tl.cast(b, tl.int32) + kv * 0 + q * 0
        if DROPOUT == 5:
            words = tl.philox(
                seed[0], kv + q * 0 + seed[4], q + kv * 0 + seed[3], head + seed[2], item + seed[1], ROUNDS
            )
        else:
            words = tl.philox(seed, kv + q * 0, q + kv * 0, head, item, ROUNDS)
        bits = _decided(words, (dropout[1] >> 2).to(tl.uint32))
        m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        of_q, of_kv = ((m >> 3) & 1) * 16 + 6 - (m & 1) * 2, ((n >> 3) & 1) * 8 + 1 - (n & 1)
        one = tl.full((BLOCK_M, 1), 1, tl.uint32)
        if TRANSPOSED:
            one = tl.trans(one) << of_q[None, :]
            return (_spread(bits, BLOCK_N, BLOCK_M) & (one << of_kv[:, None])) != 0
        else:
            one = one << of_q[:, None]
            return (_spread(bits, BLOCK_M, BLOCK_N) & (one << of_kv[None, :])) != 0
    else:
        return True


@triton.jit
def _stay_pair_by_pair(
    seed, dropout, b, h, q_start, kv_start, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Of queries and keys in steps: a counter for each pair, sixteen times as many as patches take."""
    q = ((tl.cast(q_start, tl.int32) + tl.arange(0, BLOCK_M)) * seed[4] + seed[3])[:, None]
    kv = ((tl.cast(kv_start, tl.int32) + tl.arange(0, BLOCK_N)) * seed[6] + seed[5])[None, :]
    if TRANSPOSED:
        q, kv = tl.trans(q), tl.trans(kv)
    q, kv = q + kv * 0, kv + q * 0
    head, item = tl.cast(h, tl.int32) + seed[2] + kv * 0, tl.cast(b, tl.int32) + seed[1] + kv * 0
    words = tl.philox(seed[0], (kv >> 4) * 4 + ((kv & 7) >> 1), (q >> 4) * 4 + ((q & 7) >> 1), head, item, ROUNDS)
    place = ((q >> 3) & 1) * 16 + ((kv >> 3) & 1) * 8 + 7 - (q & 1) * 2 - (kv & 1)
    return ((_decided(words, (dropout[1] >> 2).to(tl.uint32)) >> place.to(tl.uint32)) & 1) != 0


@triton.jit
def _decided(words, steps):
    """Of patches, whether pairs stay, as `sartor.kernels.dropout.decided`: in the upper four bits of each byte."""
    stay = tl.where(words[0] * HASH < (steps << 24), 0, 0xFFFFFFFF).to(tl.uint32)
    for half in tl.static_range(2):
        for j in tl.static_range(4):
            lower, upper = (steps >> (8 + j)) & 1, (steps >> (12 + j)) & 1
            zeros = (1 - lower) * 0x0F0F0F0F + (1 - upper) * 0xF0F0F0F0
            stay = (words[j] & zeros) | (stay & (words[j] | zeros))
        if half == 0:
            stay = stay << 4
    return stay


@triton.jit
def _spread(bits, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of each pair of a tile what its patch has: [ROWS / 4, COLUMNS / 4] as [ROWS, COLUMNS]."""
    bits = tl.reshape(bits, (ROWS // 16, 1, 4, 1, COLUMNS // 16, 1, 4, 1))
    bits = tl.broadcast_to(bits, (ROWS // 16, 2, 4, 2, COLUMNS // 16, 2, 4, 2))
    return tl.reshape(bits, (ROWS, COLUMNS))
