"""What every kernel of a backward computes first: lse and delta of the rows, P and dS of a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from sartor.kernels.triton import products
from sartor.kernels.triton.bounds import valid

SECTION = tl.constexpr(8)  # heads whose tiles are interleaved under a mask, so that the longest tiles come first


@triton.jit
def row(head, seqlen_q):
    """Where a head's rows begin in delta and lse_log2: on 64 bytes, so that loads can be wide."""
    return tl.cast(head, tl.int64) * (tl.cdiv(seqlen_q, 16) * 16)


@triton.jit
def load_rows(lse_base, delta_base, rows, seqlen_q, BOUNDED: tl.constexpr):
    """lse (log2) and delta; rows past the end get lse = +inf, which makes their weights 0."""
    if BOUNDED:
        inside = rows < seqlen_q
        lse = tl.load(lse_base + rows, mask=inside, other=float("inf"))
        return lse, tl.load(delta_base + rows, mask=inside, other=0.0)
    return tl.load(lse_base + rows), tl.load(delta_base + rows)


@triton.jit
def score_tile(s, units, partial, at, n, c):
    """(raw scores, scores, factor to log2, keep) of a tile whose place is `at`, (b, h, q, kv), broadcastable to it.

    `units` are those of the factors of s. `keep` is looked at where `partial`.
    """
    b, h, q, kv = at
    factor = n.factor
    if c.PRESCALE:
        s = products.times_regained(s, units[0], units[1], c.DIM, c.PRECISION) * n.scale
    else:
        factor = products.times_regained(factor, units[0], units[1], c.DIM, c.PRECISION)
    x = s
    query, key = valid(q, n.seqlen_q, c.BOUNDED), valid(kv, n.seqlen_kv, c.BOUNDED)
    if c.SCORE is not None:
        x = c.SCORE(s, b, h, query, key, n.aux)
    keep = (q < n.seqlen_q) & (kv < n.seqlen_kv)
    if c.REPAIR:
        if c.KEEP is not None:
            keep = keep & c.KEEP(b, h, query, key, n.aux)
        x = tl.where(keep, x, float("-inf"))
    elif c.MASKED:
        if partial:
            if c.KEEP is None:
                keep = (q < n.seqlen_q) & (kv < n.seqlen_kv)
            else:
                keep = tl.broadcast_to(c.KEEP(b, h, query, key, n.aux), s.shape)
                if c.BOUNDED:
                    keep = keep & (q < n.seqlen_q) & (kv < n.seqlen_kv)
            x = tl.where(keep, x, float("-inf"))
    return s, x, factor, keep


@triton.jit
def gradients_of(scores, dp, units, lse, delta, gain, stay, at, n, c):
    """(weights, d score, d raw score, keep) of what `score_tile` found, to which lse, delta and gain are broadcastable.

    `units` are those of the factors of dp. REPAIR also takes NaN out of what the mask hides. Weights are those before
    dropout, which leaves what `stay` tells.
    """
    s, x, factor, keep = scores
    b, h, q, kv = at
    query, key = valid(q, n.seqlen_q, c.BOUNDED), valid(kv, n.seqlen_kv, c.BOUNDED)
    if c.GAINS is not None and c.SCORE is not None:  # lse is the highest score: a difference of large ones is exact
        w = tl.exp2((x - lse) * factor)
    else:
        # a weight is at most 1, however lse was rounded; where a gain corrects it, it may be a little more before
        most = 0.0 if c.GAINS is None else 1.0
        w = tl.exp2(tl.minimum(x * factor - lse, most, propagate_nan=tl.PropagateNan.ALL))
    if c.GAINS == "given":
        w = w * gain
    dp = products.times_regained(dp, units[0], units[1], c.DIM_V, c.PRECISION)
    if c.DROPOUT:
        dp = tl.where(stay, dp * n.dropout[2], 0.0)
    ds = w * (dp - delta)
    draw = ds
    if c.DSCORE is not None:
        draw = ds * c.DSCORE(s, b, h, query, key, n.aux)
    if c.REPAIR:
        keep = tl.broadcast_to(keep, w.shape)
        w, ds, draw = tl.where(keep, w, 0.0), tl.where(keep, ds, 0.0), tl.where(keep, draw, 0.0)
    return w, ds, draw, keep


@triton.jit
def gradient_tile(s, dp, units, lse, delta, gain, stay, partial, at, n, c):
    """`gradients_of` the scores of a tile; `units` are those of the factors of s, then of dp."""
    scores = score_tile(s, (units[0], units[1]), partial, at, n, c)
    return gradients_of(scores, dp, (units[2], units[3]), lse, delta, gain, stay, at, n, c)


@triton.jit
def references(lse_log2_ptr, gain_ptr, batch, heads_q, seqlen_q, SCORE: tl.constexpr, GAINS: tl.constexpr):
    """What weights are relative to: lse (log2), or behind the gains each row's highest score, as dq has found it."""
    if GAINS is not None and SCORE is not None:
        return gain_ptr + row(batch * heads_q, seqlen_q)
    return lse_log2_ptr
