"""Which tiles a program computes: its own, or with ONLY_MARKED those of its share that an earlier launch has marked.

    base, begin, end, step = marks.share(tiles_head, heads, ONLY_MARKED, SECTION)
    for first in tl.range(begin, end, step * marks.ROUND):
        for i in tl.range(first, marks.last(marks_ptr, first, end, step, ONLY_MARKED), step):
            if marks.wanted(marks_ptr + base + i, ONLY_MARKED):
                ... tile base + i

Without ONLY_MARKED the bounds are constants: the compiler removes loops of one iteration.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUND = tl.constexpr(128)  # marks that one load looks at; mostly none is set


@triton.jit
def share(tiles_head, heads, ONLY_MARKED: tl.constexpr, SECTION: tl.constexpr):
    """(base, begin, end, step) of the program's tiles: base + i for each i in the range.

    Programs take tiles head by head; with SECTION the first tiles of so many heads, then their second tiles, and so on.
    """
    program = tl.program_id(0)
    if ONLY_MARKED:
        return 0, program, tiles_head * heads, tl.num_programs(0)
    else:
        if SECTION:
            first = program // (SECTION * tiles_head) * SECTION
            width, rest = tl.minimum(SECTION, heads - first), program - first * tiles_head
            program = (first + rest % width) * tiles_head + rest // width
        return program, 0, 1, 1


@triton.jit
def last(marks_ptr, first, end, step, ONLY_MARKED: tl.constexpr):
    """Where the ROUND tiles from `first` on end: at `first`, if none of them is marked."""
    if ONLY_MARKED:
        i = first + tl.arange(0, ROUND) * step
        marked = tl.max(tl.load(marks_ptr + i, mask=i < end, other=0), 0) != 0
        return tl.where(marked, tl.minimum(end, first + step * ROUND), first)
    else:
        return end


@triton.jit
def wanted(mark_ptr, ONLY_MARKED: tl.constexpr):
    """Whether to compute the tile of a mark."""
    if ONLY_MARKED:
        return tl.load(mark_ptr) != 0
    else:
        return True
