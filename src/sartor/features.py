"""Features: what a problem asks of a kernel besides numbers. The planner refuses what a kernel does not name.

Every field of a `Problem`, and of the `Program` of its mask and score, is either read by a rule here or named as one on
which no kernel's result depends by more than its value. A field that is neither fails a test, and a feature that no
kernel names is refused by all of them: a new one is served only where somebody has said so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch

from sartor.problem import Problem, name_of

F16, BF16, F32, F64 = "float16", "bfloat16", "float32", "float64"
TF32 = "tf32"  # products of float32 inputs with 10 bits of mantissa
WIDE_OUT = "wide out"  # out in float32 of 16-bit inputs
GQA = "gqa"  # fewer key heads than query heads
DIM_V = "dim_v"  # another head dim of v
SINKS = "sinks"
INTERVAL = "interval mask"  # rows attend to one interval of keys
PAIRS = "pairwise mask"  # any other mask, evaluated for each query and key
SCORE = "score function"
TABLES = "tables"  # tensors that masks and scores read
INDEXED = "indexed tables"  # such that they read by an index of their own, not at the position
BIAS_GRADIENT = "bias gradient"
TABLE_GRADIENT = "table gradient"  # of tensors that a score reads
UNALIGNED = "unaligned rows"  # of q, k or v: they do not start on 16 bytes
UNALIGNED_TABLES = "unaligned tables"
DETERMINISTIC = "deterministic"
SHARED_LSE = "lse of more keys"  # of a backward whose lse and out are of more keys than it is given
DROPOUT = "dropout"
DROPOUT_PART = "dropout of a part"  # of a larger problem, by a seed of 5 numbers
DROPOUT_STEPS = "dropout in steps"  # of positions that are not next to each other, by one of 7

# Sets by which kernels name several features at once. They do not grow: what is new, each kernel names by itself.
DTYPES = frozenset({F16, BF16, F32, F64, TF32})
BITS_16 = frozenset({F16, BF16, WIDE_OUT})
INTERVALS = frozenset({INTERVAL, TABLES, UNALIGNED_TABLES, INDEXED})
MASKS = INTERVALS | {PAIRS}
COMMON = INTERVALS | {GQA, SINKS, DETERMINISTIC}  # what every GPU kernel serves
GENERAL = COMMON | {PAIRS, SCORE, DIM_V, UNALIGNED}
GRADIENTS = frozenset({BIAS_GRADIENT, TABLE_GRADIENT})  # a forward serves them whose backwards do


def _mask(p: Problem) -> str:
    return "" if p.program.keep is None else INTERVAL if p.program.is_interval else PAIRS


def _tables(p: Problem) -> str:
    if any(a.dims for a in p.program.aux):
        return INDEXED  # whoever serves these serves others
    return TABLES if any(a.dtype for a in p.program.aux) else ""


RULES: dict[str, Callable[[Problem], str]] = {  # by field: the feature that its value asks for, or nothing
    "dtype": lambda p: name_of(p.dtype),
    "out_dtype": lambda p: "" if p.out_dtype == p.dtype else WIDE_OUT,
    "precision": lambda p: TF32 if p.precision == "tf32" and p.dtype == torch.float32 else "",
    "heads_kv": lambda p: GQA if p.group > 1 else "",
    "dim_v": lambda p: "" if p.dim == p.dim_v else DIM_V,
    "sinks": lambda p: SINKS if p.sinks else "",
    "bias_shape": lambda p: "" if p.bias_shape is None else BIAS_GRADIENT,
    "table_shapes": lambda p: TABLE_GRADIENT if p.table_shapes else "",
    "deterministic": lambda p: DETERMINISTIC if p.deterministic else "",
    "shared_lse": lambda p: SHARED_LSE if p.shared_lse else "",
    "dropout_p": lambda p: DROPOUT if p.dropout_p else "",
    "dropout_numbers": lambda p: {5: DROPOUT_PART, 7: DROPOUT_STEPS}.get(p.dropout_numbers, ""),
    "rows_on_16_bytes": lambda p: "" if p.rows_on_16_bytes else UNALIGNED,
    "aux_on_16_bytes": lambda p: "" if p.aux_on_16_bytes else UNALIGNED_TABLES,
    "program.keep": _mask,
    "program.score": lambda p: "" if p.program.score is None else SCORE,
    "program.aux": _tables,
}
NUMBERS = ("batch", "heads_q", "seqlen_q", "seqlen_kv", "dim", "softmax_scale")  # any of them, within `why_not`
DERIVED = ("program.rows", "program.cols", "program.dscore")  # with the mask and the score that they are of
PLANNING = ("device", "kernel", "mask_name", "score_name", "copies", "out_like_q")  # no kernel's result depends on them

WORDS: dict[str, str] = {  # what a kernel without the feature says; fields of `p` by name
    TF32: "needs precision='ieee', got 'tf32'",
    WIDE_OUT: "needs out_dtype {p.dtype}, got {p.out_dtype}",
    GQA: "needs as many key heads as query heads, got {p.heads_kv} and {p.heads_q}",
    DIM_V: "needs equal head dims of q and v, got {p.dim} and {p.dim_v}",
    SINKS: "needs no sinks, got sinks",
    INTERVAL: "needs no mask, got {p.mask_name}",
    PAIRS: "needs a mask that is one interval of every row, got {p.mask_name}",
    SCORE: "needs plain scores, got {p.score_name}",
    TABLES: "needs masks and scores that read no tensor, got {p.mask_name} {p.score_name}",
    INDEXED: "needs masks and scores that index no tensor, got {p.mask_name} {p.score_name}",
    BIAS_GRADIENT: "has no gradient of a bias",
    TABLE_GRADIENT: "has no gradient of the tensors that a score reads, got {p.score_name} with such that require one",
    UNALIGNED: "needs rows of q, k and v that start on 16 bytes, got strides or addresses that do not",
    UNALIGNED_TABLES: "needs rows of what masks and scores read that start on 16 bytes, got others",
    SHARED_LSE: "needs lse of the keys that it is given, got lse of more keys",
    DROPOUT: "has no dropout, got dropout_p={p.dropout_p}",
    DROPOUT_PART: "needs dropout of a whole problem, got a dropout_seed of 5 numbers",
    DROPOUT_STEPS: "needs dropout of positions next to each other, got a dropout_seed of 7 numbers",
    DETERMINISTIC: "has no order of its sums, got deterministic=True",
}


@lru_cache(maxsize=1024)
def of(p: Problem) -> frozenset[str]:
    """The features that a problem asks for."""
    return frozenset(feature for rule in RULES.values() if (feature := rule(p)))


def missing(p: Problem, served: frozenset[str]) -> list[str]:
    """Sentences on the features of a problem that are not among those served; none where all are."""
    return [_sentence(p, feature, served) for feature in sorted(of(p.kind) - served)]


def _sentence(p: Problem, feature: str, served: Iterable[str]) -> str:
    if feature == name_of(p.dtype):
        return f"needs {' or '.join(d for d in (F16, BF16, F32, F64) if d in served)}, got {p.dtype}"
    return WORDS.get(feature, f"does not serve {feature}").format(p=p)
