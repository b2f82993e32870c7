"""A copy at the rate of a link: what a transfer between GPUs does to the memory and the SMs of one of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

BLOCKS, WORDS = 16, 16384  # blocks, as NCCL has channels; words of 4 bytes that a block has in flight


@triton.jit
def _paced(source, target, words, nanoseconds, WORDS: tl.constexpr):
    """Copy words so evenly that all of it takes so long: piece i is not over before its time."""
    start = cuda.globaltimer()
    pieces = tl.cdiv(words, WORDS)
    for i in range(tl.program_id(0), pieces, tl.num_programs(0)):
        at = i * WORDS + tl.arange(0, WORDS)
        tl.store(target + at, tl.load(source + at, at < words), at < words)
        due = (nanoseconds * ((i + 1) / pieces)).to(tl.int64)
        while cuda.globaltimer() - start < due:
            pass


def copy(source: torch.Tensor, target: torch.Tensor, seconds: float) -> None:
    """Copy a contiguous tensor on the current stream so that it takes `seconds`, or longer where memory is slower."""
    source, target = (t.view(-1).view(torch.int32) for t in (source, target))
    _paced[(BLOCKS,)](source, target, source.numel(), seconds * 1e9, WORDS, num_warps=16)
