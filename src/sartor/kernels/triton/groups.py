"""The arguments of a kernel in groups, as the functions that it calls take them: `x` the tensors, `n` the numbers, `c`
what it is compiled for.

A kernel lists its arguments one by one, as a launch passes them. Triton makes a tensor of a constant that is assigned
to a name: a `Config` is therefore made where it is passed on, and has no name before. Triton's cache of compiled
kernels does not see these classes: fields are given by name, so that their order means nothing, and those that are
left out are None.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Tensors(NamedTuple):
    """What a program reads and writes, as far as its kernel has it, and the strides of batch, head and row."""

    q: Any
    k: Any
    v: Any
    bad: Any  # marks, one a tile
    units: Any  # of pairs: see split.py
    q_strides: Any
    k_strides: Any
    v_strides: Any
    sinks: Any = None
    out: Any = None
    lse: Any = None
    out_strides: Any = None
    dout: Any = None
    lse_log2: Any = None
    delta: Any = None
    gain: Any = None  # of rows, with GAINS
    high: Any = None  # the rows' highest scores, with GAINS
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dout_strides: Any = None
    dq_strides: Any = None
    dk_strides: Any = None
    dv_strides: Any = None


class Numbers(NamedTuple):
    """The numbers of a call, and what its masks and score functions read."""

    heads_q: Any
    group: Any  # query heads that share a key head
    seqlen_q: Any
    seqlen_kv: Any
    scale: Any
    factor: Any  # of scores, in the exponent of 2
    aux: Any
    dropout: Any = None  # see dropout.py


class Config(NamedTuple):
    """What a kernel is compiled for. The last four are of a forward (SINKS, OUT_UNIT) or of a backward."""

    KEEP: Any  # the mask, None for none
    SPANS: Any  # the interval of each row, or column; None where every one sees everything
    SCORE: Any  # the score function, None for none
    PRESCALE: Any  # whether scores are scaled before the score function, not in the exponent
    PRECISION: Any  # of products: see products.py
    MASKED: Any  # which tiles look at the mask: see codegen.masking
    BOUNDED: Any  # whether a tile may reach past the end
    DIM: Any
    DIM_V: Any
    CHUNKS: Any  # of a head dim: see tiles.py
    CHUNKS_V: Any
    UNIT: Any  # elements that strides count
    BLOCK_M: Any
    BLOCK_N: Any
    REPAIR: Any  # whether what the mask hides is left out, NaN and all: the NaN repair
    DROPOUT: Any
    SINKS: Any = None
    OUT_UNIT: Any = None
    DSCORE: Any = None  # the score function's derivative, None where it is 1
    GAINS: Any = None  # what rows are divided by besides: "given", or found by dq; see TritonBackward.gains
