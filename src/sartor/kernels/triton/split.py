"""float32 tensors split into hi/lo pairs of float16: products of these on tensor cores have float32's accuracy.

    x = (hi + lo) * unit        hi = float16(x / unit)        lo = float16(x / unit - hi)

hi and lo hold eleven bits and a sign each, so that at most 2^-23 of x is lost (Markidis et al. 2018; Ootomo and Yokota
2022). float16 has five bits of exponent only: each segment of SEGMENT rows of a head has a unit of its own, the power
of two that brings the segment's largest element into [2^14, 2^15). Elements below 2^-16 of the largest lose more, but
never more than 2^-25 units, which is 2^-39 of the largest.

Layout of the pairs of a tensor (b, s, h, d):

    pairs   float16 (b, s, h, 2 * pitch), heads outermost in memory: hi in [..., :d], lo in [..., pitch : pitch + d],
            pitch = d rounded up to 8, the rest 0; a row starts on 16 bytes
    units   float32 (b, h, ceil(s / SEGMENT)), dense

A segment that pairs cannot represent has NaN as its unit: one with an infinity, or (`strict`) one in which all elements
of a row or of a column are so small that they lose bits. What is computed from it comes out NaN, is marked, and is
computed again from the float32 tensors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sartor.kernels.spec import Tile
from sartor.kernels.triton import launch
from sartor.kernels.triton.maths import power_of_two

SEGMENT = tl.constexpr(128)  # a multiple of every tile's rows
LEAST = tl.constexpr(2.0**-15)  # of a segment's largest element: rows and columns that reach it lose no bits


class Pairs(NamedTuple):
    """The pairs of a tensor and their units, laid out as the module says."""

    data: torch.Tensor
    units: torch.Tensor


def pitch(dim: int) -> int:
    """Columns from the first of hi to the first of lo."""
    return -(-dim // 8) * 8


@triton.constexpr_function
def regained(dim):
    """The factor by which a product of pairs over `dim` columns makes up for what tensor cores truncate in the mean.

    That is a quarter of float32's last bit for every 16 columns of hi hi': see docs/numerics.md.
    """
    return 1 + -(-dim // 16) * 2.0**-25


def nbytes(b: int, s: int, h: int, d: int) -> int:
    """Size of the pairs of a tensor (b, s, h, d)."""
    return b * s * h * 4 * pitch(d)


def allocate(x: torch.Tensor) -> Pairs:
    """Memory for the pairs of x (b, s, h, d), as large as x where d is a multiple of 8."""
    b, s, h, d = x.shape
    data = torch.empty((b, h, s, 2 * pitch(d)), dtype=torch.float16, device=x.device)
    segments = -(-s // SEGMENT.value)
    return Pairs(data.transpose(1, 2), torch.empty((b, h, segments), dtype=torch.float32, device=x.device))


@triton.jit(do_not_specialize=("heads", "seqlen"))
def split_kernel(
    x_ptr, pairs_ptr, units_ptr, strides, heads, seqlen,
    DIM: tl.constexpr, PITCH: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, STRICT: tl.constexpr,
):  # fmt: skip
    """A program writes one segment of a head. STRICT: rows and columns that would lose bits make its unit NaN."""
    n = tl.cdiv(seqlen, SEGMENT)
    pid = tl.program_id(0)
    head = tl.cast(pid // n, tl.int64)
    first = tl.cast(pid % n * SEGMENT, tl.int64)
    rows, cols = tl.arange(0, SEGMENT), tl.arange(0, WIDTH)
    base = x_ptr + (head // heads * strides[0] + head % heads * strides[1] + first * strides[2]) * UNIT
    inside = (rows[:, None] < seqlen - first) & (cols[None, :] < DIM)
    x = tl.load(base + rows[:, None] * (strides[2] * UNIT) + cols[None, :], mask=inside, other=0.0)

    by_row, by_col = tl.max(tl.abs(x), 1), tl.max(tl.abs(x), 0)
    top = tl.max(by_row, 0)
    up, down = power_of_two(top)
    if STRICT:
        lost_rows = tl.sum(tl.where((by_row > 0) & (by_row < top * LEAST), 1, 0), 0)
        lost_cols = tl.sum(tl.where((by_col > 0) & (by_col < top * LEAST), 1, 0), 0)
        down = tl.where(lost_rows + lost_cols > 0, float("nan"), down)
    tl.store(units_ptr + pid, tl.where(top < float("inf"), down, float("nan")))

    x = x * up
    hi = x.to(tl.float16)
    lo = (x - hi.to(tl.float32)).to(tl.float16)
    target = pairs_ptr + (head * seqlen + first) * (2 * PITCH) + rows[:, None] * (2 * PITCH) + cols[None, :]
    inside = (rows[:, None] < seqlen - first) & (cols[None, :] < PITCH)
    tl.store(target, hi, mask=inside)
    tl.store(target + PITCH, lo, mask=inside)


def step(name: str, x: torch.Tensor, pairs: Pairs, strict: bool) -> launch.Launch:
    """The launch, called `split <name>`, that fills `pairs` from x (b, s, h, d), float32, dense in the last dim."""
    b, s, h, d = x.shape
    per = launch.unit(x)
    width = max(16, 1 << math.ceil(math.log2(pitch(d))))
    arguments = {
        "x_ptr": x, "pairs_ptr": pairs.data, "units_ptr": pairs.units,
        "strides": launch.strides(x, per), "heads": h, "seqlen": s, "DIM": d, "PITCH": pitch(d), "WIDTH": width,
        "UNIT": per, "STRICT": strict,
    }  # fmt: skip
    grid = b * h * -(-s // SEGMENT.value)
    tile = Tile(SEGMENT.value, width, warps=min(16, max(4, width // 16)))
    return launch.Launch(f"split {name}", split_kernel, grid, launch.in_order(split_kernel, arguments), tile)


def units(pairs: dict[str, Pairs]) -> tuple[torch.Tensor, ...]:
    """The units of every tensor, in order."""
    return tuple(pair.units for pair in pairs.values())
