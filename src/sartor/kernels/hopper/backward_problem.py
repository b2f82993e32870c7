"""What the Hopper backward of float16 and bfloat16 reads of a problem, and why it refuses one: numbers from which
`backward_config` chooses configs."""

from __future__ import annotations

from functools import lru_cache

from sartor.device import Device
from sartor.kernels import blocks
from sartor.kernels.cuda import brought
from sartor.kernels.hopper import arch
from sartor.mods.program import Program
from sartor.problem import Problem

ENOUGH = 4 * arch.SMS  # blocks: of fewer, the last ones leave SMs idle for long, above all under a causal mask
ONE_SWEEP = "in rows that start on 16 bytes, at head dims up to 128, with deterministic=False"
SEEN, ADDED = f"a bool one {ONE_SWEEP}", f"a float16 or bfloat16 one {ONE_SWEEP}"


def pairs(p: Problem) -> tuple[int, ...]:
    """The aux values that are read for every pair of query and key, tile by tile: a bool one of the mask, one of 16
    bits of the score; none where others are read so."""
    return _pairs(p.program, p.aux_on_16_bytes) if p.program.aux else ()


@lru_cache(maxsize=1024)
def _pairs(program: Program, aligned: bool) -> tuple[int, ...]:
    found = brought.tiles(program) if aligned else ()
    indexed = set() if program.keep is None else program.keep.leaves()  # by a mask, maybe by both
    read = tuple(
        i for i, a in enumerate(program.aux)
        if {"q", "k"} <= set(a.pattern.lower()) or (a.dims and f"aux[{i}]" in indexed)
    )  # fmt: skip
    of_mask, of_score = (
        [(i, program.aux[i].dtype) for i in found if e is not None and f"aux[{i}]" in e.leaves()]
        for e in (program.keep, program.score)
    )
    served = len(of_mask) < 2 and all(dtype == "torch.bool" for _, dtype in of_mask)
    served &= len(of_score) < 2 and all(dtype in ("torch.float16", "torch.bfloat16") for _, dtype in of_score)
    return found if found == read and served else ()


def reads_otherwise(p: Problem) -> bool:
    """Whether beside a changed score something is read for every pair that is not near; what a score reads by an index
    of its own is read in place."""
    of_score = set() if p.program.score is None else p.program.score.leaves()
    tables = any(a.dims and f"aux[{i}]" not in of_score for i, a in enumerate(p.program.aux))
    return not near(p) and (tables or any({"q", "k"} <= set(a.pattern.lower()) for a in p.program.aux))


def near(p: Problem) -> tuple[int, ...]:
    """The same, where one sweep reads them."""
    return pairs(p) if fused(p) and not p.dropout_p else ()


def bias(p: Problem) -> int:
    """The aux value that it is: the last tensor."""
    return max(i for i, a in enumerate(p.program.aux) if a.dtype)


def dadded(p: Problem) -> int:
    """How the gradient of a bias of queries and keys comes about: 0 not at all, 1 stored, 2 added up in float32."""
    if p.bias_shape is None:
        return 0
    alone = p.bias_shape[:2] == (p.batch, p.heads_q)
    return 1 if alone and p.program.aux[bias(p)].dtype == str(p.dtype) else 2


def why_no_gradient(p: Problem) -> list[str]:
    """Of a bias."""
    if p.bias_shape is None or (near(p) == (bias(p),) and change(p) == 1):
        return []
    return [f"has the gradient of a bias of queries and keys, {ADDED}, beside no other table nor softcap, got another"]


def reasons(p: Problem, dev: Device) -> list[str]:
    """What every backward of this kind needs of the machine, the lengths and masks."""
    why = arch.reasons(p, dev)
    if p.program.reads_pairs:
        why.append(f"needs a mask that reads no table of queries and keys, got {p.mask_name}")
    return why


def parts(p: Problem) -> int:
    """Of the query heads that share a key head, each a block's: 1 where there are blocks enough without, or where
    tables order them."""
    if p.group == 1:
        return 1
    blocks = p.batch * p.heads_kv * -(-p.seqlen_kv // (2 * arch.ROWS))
    if not fused(p) or from_tables(p, keys=True) or dadded(p) == 2 or p.dropout_p:
        return 1
    return next((n for n in range(1, p.group) if p.group % n == 0 and n * blocks >= ENOUGH), p.group)


def mask(p: Problem) -> int:
    """Of the macros of cuda/backward.cuh: 0 none, 1 an interval of every row and column, 2 any."""
    return 0 if p.program.keep is None else 1 if p.program.is_interval_both_ways else 2


def from_tables(p: Problem, keys: bool) -> bool:
    """Whether tables tell the intervals of held rows, to all heads alike."""
    return p.program.told[keys]


def listed(p: Problem) -> bool:
    """Whether one sweep walks a list of query tiles, where there is one: where no table says which rows are held when,
    and no score wants registers."""
    return fused(p) and blocks.serves(p) and not from_tables(p, keys=True) and p.program.score is None


def columns(p: Problem) -> int:
    """Of products: a multiple of 16, a step of them."""
    return -(-p.dim // 16) * 16


def change(p: Problem) -> int:
    """Of scores: 0 none, 1 one whose derivative is 1, 2 any."""
    rise = p.program.dscore
    return 0 if rise is None else 1 if rise.text() == "1.0" else 2


def fused(p: Problem) -> bool:
    """Whether one sweep makes dk, dv and dq."""
    return p.dim <= 128 and p.dim % 8 == 0 and not p.deterministic


def reads_sinks(p: Problem) -> bool:
    """Whether a kernel does: else the sums that lse tells have them."""
    return p.sinks and p.program.buries
