"""The Hopper backward of float16 and bfloat16, host side. The kernels are in the .cuh beside.

A call is a few launches of CUDA C++: `preprocess` (delta, lse in the log2 domain), dq, dk with dv. Under a mask, the
kernels of `triton_backward` then compute marked tiles again.

Where bits may change from run to run, dk, dv and dq come from one sweep (`fused`), and a launch rounds dq. Beyond head
dim 128 registers hold one gradient: dk and dv are two launches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch

from sartor import direct, nvrtc, pending
from sartor.device import Device
from sartor.direct import Direct
from sartor.features import (
    BF16,
    BIAS_GRADIENT,
    DETERMINISTIC,
    DROPOUT,
    F16,
    GQA,
    INDEXED,
    INTERVAL,
    PAIRS,
    SCORE,
    SHARED_LSE,
    SINKS,
    TABLES,
    UNALIGNED_TABLES,
    WIDE_OUT,
)
from sartor.kernels import dropout
from sartor.kernels.algebra import sink_gradient
from sartor.kernels.cuda import expressions, host
from sartor.kernels.cuda.layout import Layout
from sartor.kernels.cuda.params import DROPOUT as DROPOUT_NUMBERS
from sartor.kernels.cuda.params import LENGTHS, Params, of_strides, strides
from sartor.kernels.cuda.row import Part, Row
from sartor.kernels.hopper import arch
from sartor.kernels.room import Room
from sartor.kernels.spec import Gradients, Operands, Plan, Saved, Tile, legal
from sartor.kernels.triton import launch
from sartor.kernels.triton.backward import TritonBackward, dense_like, heads, padded_rows, rows
from sartor.problem import Problem, is_copied, rows_on_16_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

if launch.available():
    from sartor.kernels.triton import codegen
    from sartor.kernels.triton import dropout as random

PARAMS = Params(
    "hopper_backward",
    held_x="TensorMap", held_y="TensorMap", x="TensorMap", y="TensorMap",
    lse="const float*", delta="const float*",  # (batch, heads_q, rows_pitch), lse as log2
    dx="u16*", dy="u16*",
    marks="int*",  # one for 64 held rows of a head
    sums="float*",  # dq, unscaled: tiles of heads, in parts that lie as threads have them (FUSED)
    **strides("dx"), **strides("dy"), **LENGTHS, factor="float", scale="float",
)  # fmt: skip
PREPROCESS = Params(
    "preprocess",
    out="const u8*", dout="const u8*", lse="const float*", dlse="const float*",
    delta="float*", lse_log2="float*", sums="float*",
    **strides("out"), **strides("dout"), heads_q="int", seqlen_q="int",
)  # fmt: skip
ROUND = Params(
    "round_dq",
    sums="const float*",
    dq="u16*",
    marks="int*",
    **strides("dq"),
    heads_q="int",
    seqlen_q="int",
    scale="float",
)
# Where tables tell the intervals of held rows, the order of blocks and how many there are
ORDERED = PARAMS.followed_by({"order": "int*", "blocks": "int"})
SECTIONED = PARAMS.followed_by({"section": "int"})  # heads whose blocks begin together, the longest first
DROPPED = {of: of.followed_by(DROPOUT_NUMBERS) for of in (PARAMS, ORDERED, SECTIONED)}  # the same with dropout
ADDS = {"added": "TensorMap", "by_item": "int", "by_head": "int"}  # these 1 or 0, by which its places are multiplied
STORED, SUMMED = {"dadded": "TensorMap"}, {"dsums": "float*", **strides("dsums")}  # its gradient
PARTED = {"partial": "float*", "parts": "int"}  # of several blocks, what is made of their query heads
ROUND_PARTS = Params(
    "round_parts",
    partial="const float*", dk="u16*", dv="u16*", marks="int*",
    **strides("dk"), **strides("dv"), heads_kv="int", seqlen_kv="int", parts="int", scale="float",
)  # fmt: skip
BURIED = {"gain": "const float*", "rows": "i64"}  # of each row its gain, and behind these so many its highest score
HIGHEST = Params(
    "find_highest",
    q="const u16*", k="const u16*", lse="const float*", sinks="const float*", gain="float*", log2_sum="float*",
    **strides("q"), **strides("k"), **LENGTHS, total="i64", scale="float",
)  # fmt: skip
ORDER = Params("order_blocks", order="int*", **LENGTHS, batch="int")
MAPPED = ("held_x", "held_y", "x", "y")  # parameters
DIMS = range(64, 257, 8)  # registers hold no more; narrower ones leave the tensor cores waiting for exponentials
ENOUGH = 4 * arch.SMS  # blocks: of fewer, the last ones leave SMs idle for long, above all under a causal mask
BOTH = 128  # columns of which registers hold dk and dv
CHANGE = BITS = 32  # registers that a change of scores takes, and that dropout does
REPAIR_TILE = Tile(64, 64, 4, 1, Tile(64, 64, 4, 1))  # of what computes marked tiles again: a mark is for 64 rows


class HopperBackward(TritonBackward):
    """See the module."""

    name = "hopper_backward"
    family = "hopper"
    features = frozenset({
        F16, BF16, WIDE_OUT, GQA, SINKS, INTERVAL, PAIRS, SCORE, TABLES, INDEXED, UNALIGNED_TABLES, BIAS_GRADIENT,
        DETERMINISTIC, SHARED_LSE, DROPOUT,
    })  # fmt: skip

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """What the copy engine, wgmma and the run-time compiler need."""
        why = launch.reasons(p, dev) + arch.reasons(p, dev)
        if p.program.reads_pairs and not near(p):
            why.append(f"needs a mask that reads at most one table of queries and keys, {SEEN}, got {p.mask_name}")
        if p.program.score is not None and reads_otherwise(p):
            why.append(f"needs scores that read at most one table of queries and keys, {ADDED}, got {p.score_name}")
        if p.dropout_p and p.program.buries:
            why.append(f"needs scores whose sum lse can tell beside dropout, got {p.score_name}")
        why += pending.refused("hopper_backward dropout") if p.dropout_p else []
        why += why_no_gradient(p) + pending.refused(*unseen(p))
        if p.dim not in DIMS:
            why.append(f"needs head dims {DIMS[0]} to {DIMS[-1]}, multiples of 8, got {p.dim}")
        return why

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """One: registers leave little choice."""
        tile = None
        for m in Config.all(p):
            queries, keys = (m.block, 64 * m.groups) if m.keys else (64 * m.groups, m.block)
            tile = Tile(queries, keys, m.warps, m.stages, tile)
        assert tile is not None
        yield tile

    def fits(self, p: Problem, dev: Device, tile: Tile) -> bool:
        """Whether it is that one."""
        return tile in legal(self, p, dev)

    def shared_bytes(self, plan: Plan) -> int:
        """Dynamic shared memory that a block takes, of the kernels the one that takes most."""
        return max(m.shared_bytes for m in Config.all(plan.problem))

    def run(self, plan: Plan, x: Operands, saved: Saved) -> Gradients:
        """dq, dk, dv, dsinks."""
        key = launch.key(saved)
        ready: Any = plan.cache.get(("hopper", key))
        if ready is None:
            ready = plan.cache["hopper", key] = self.ready(plan, x, saved, key)
        return ready.run(plan, x, saved)  # type: ignore[no-any-return]

    def ready(self, plan: Plan, x: Operands, saved: Saved, key: object) -> Ready:
        """The launches of calls with this key."""
        return Ready.of(plan.problem, x, saved, key, plan.device.sm_count or 1)

    def repairs(self, plan: Plan, x: Operands, saved: Saved, work: dict[str, torch.Tensor]) -> list[launch.Launch]:
        """The launches of `triton_backward` over what was marked."""
        p, shared = plan.problem, self._shared(replace(plan, tile=REPAIR_TILE), x, work["dout"], work)
        marked = self._dkdv(p, REPAIR_TILE, shared, work), self._dq(p, cast(Tile, REPAIR_TILE.then), shared, work)
        return [step.repair(plan.device) for step in marked]

    def notes(self, p: Problem) -> Iterable[str]:
        """Memory that a call takes besides its results, and what it is for."""
        if fused(p):
            size = 4 * sums(p) / 2**20
            yield f"the backward adds up dq in any order, in {size:.1f} MiB of float32; deterministic=True spares both"
        if parts(p) > 1:
            size = 4 * partial_sums(p) / 2**20
            yield f"blocks share the query heads of a key head, and leave dk and dv in {size:.1f} MiB of float32"


ONE_SWEEP = "in rows that start on 16 bytes, at head dims 64 and 128, with deterministic=False"
SEEN, ADDED = f"a bool one {ONE_SWEEP}", f"a float16 or bfloat16 one {ONE_SWEEP}"


def pairs(p: Problem) -> tuple[int, ...]:
    """The aux values that are read for every pair of query and key, tile by tile: a bool one of the mask, one of 16
    bits of the score; none where others are read so."""
    found = expressions.near(p.program) if p.aux_on_16_bytes else ()
    indexed = set() if p.program.keep is None else p.program.keep.leaves()  # by a mask, maybe by both
    read = tuple(
        i for i, a in enumerate(p.program.aux)
        if {"q", "k"} <= set(a.pattern.lower()) or (a.dims and f"aux[{i}]" in indexed)
    )  # fmt: skip
    of_mask, of_score = (
        [(i, p.program.aux[i].dtype) for i in found if e is not None and f"aux[{i}]" in e.leaves()]
        for e in (p.program.keep, p.program.score)
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


def unseen(p: Problem) -> list[str]:
    """What of a problem no GPU has run yet."""
    seen, added = expressions.seen_and_added(p.program, near(p))
    asked = {
        "bool tensors": seen is not None, "biases": added is not None, "bias gradients": p.bias_shape is not None,
        "buried rows": p.program.buries,
    }  # fmt: skip
    return [name for name, wanted in asked.items() if wanted]


def why_no_gradient(p: Problem) -> list[str]:
    """Of a bias."""
    if p.bias_shape is None or (near(p) == (bias(p),) and change(p) == 1):
        return []
    return [f"has the gradient of a bias of queries and keys, {ADDED}, beside no other table nor softcap, got another"]


def tidy(p: Problem, dout: torch.Tensor) -> torch.Tensor:
    """dout as the copy engine wants it: the inputs' dtype, rows on 16 bytes, none twice. Itself, or a copy."""
    dout = dout.to(p.dtype)
    rows = all(dout.stride(i) % 8 == 0 and dout.stride(i) for i in range(3) if dout.shape[i] > 1)
    fine = rows and dout.data_ptr() % 16 == 0 and not is_copied(dout)
    return dout if fine else dout.clone(memory_format=torch.contiguous_format)


def reasons(p: Problem, dev: Device) -> list[str]:
    """What every backward of this kind needs of the machine, the lengths and masks."""
    why = arch.reasons(p, dev)
    if p.program.reads_pairs:
        why.append(f"needs a mask that reads no table of queries and keys, got {p.mask_name}")
    return why


def parts(p: Problem) -> int:
    """Of the query heads that share a key head, each a block's: 1 where there are blocks enough without, or where
    tables order them."""
    blocks = p.batch * p.heads_kv * -(-p.seqlen_kv // (2 * arch.ROWS))
    if not fused(p) or from_tables(p, keys=True) or dadded(p) == 2 or p.dropout_p or pending.refused("shared heads"):
        return 1
    return next((n for n in range(1, p.group) if p.group % n == 0 and n * blocks >= ENOUGH), p.group)


def mask(p: Problem) -> int:
    """Of the macros of cuda/backward.cuh: 0 none, 1 an interval of every row and column, 2 any."""
    return 0 if p.program.keep is None else 1 if p.program.is_interval_both_ways else 2


def from_tables(p: Problem, keys: bool) -> bool:
    """Whether tables tell the intervals of held rows, to all heads alike."""
    return p.program.told[keys]


def columns(p: Problem) -> int:
    """Of products: a multiple of 16, a step of them."""
    return -(-p.dim // 16) * 16


def change(p: Problem) -> int:
    """Of scores: 0 none, 1 one whose derivative is 1, 2 any."""
    rise = p.program.dscore
    return 0 if rise is None else 1 if rise.text() == "1.0" else 2


def fused(p: Problem) -> bool:
    """Whether one sweep makes dk, dv and dq: its shares of dq have these head dims."""
    return p.dim in (64, 128) and not p.deterministic


def sums(p: Problem) -> int:
    """How many there are, of one sweep."""
    block = Config.all(p)[0].block
    return p.batch * p.heads_q * -(-p.seqlen_q // block) * block * p.dim


@dataclass(frozen=True)
class Config:
    """What a kernel is compiled for: see the head of the .cuh."""

    p: Problem
    gradients: tuple[str, ...]  # that it makes
    groups: int  # warpgroups that multiply
    block: int  # rows of a tile that is stepped over
    apart: bool = False  # whether y, of which only dp is made, has one stage, of its own

    @classmethod
    def of(cls, p: Problem, *gradients: str) -> Config:
        """The config of a problem: products as wide as registers hold scores and dp beside the gradients, and shared
        memory two stages of rows, one of y where that is fewer than 64. A third warpgroup must leave 64 rows, or 80
        without dp. In one sweep, as many rows as make 64 by 64 of dq for either warpgroup."""
        dim, count = columns(p), len(gradients)
        if count == 3:
            return cls(p, gradients, 2, 2 * 64 * 64 // dim)
        wider = 2 if gradients == ("dv",) else 1  # there is no dp
        groups = 3 if count == 1 and change(p) < 2 and wider * (128 - dim // 2) >= 48 + 16 * wider else 2
        room = wider * ((128 if groups == 3 else 208) - count * dim // 2)
        room = max(64, room - CHANGE * (change(p) > 0) - BITS * (p.dropout_p > 0))
        configs = (cls(p, gradients, groups, rows) for rows in (128, 112, 96, 80, 64) if rows <= room)
        return next((m for m in configs if m.stages > 1), cls(p, gradients, groups, 64, apart=True))

    @classmethod
    @lru_cache(maxsize=256)
    def all(cls, p: Problem) -> list[Config]:
        """The configs of the kernels that a problem takes, in the order of their launches."""
        if fused(p):
            return [cls.of(p, "dk", "dv", "dq")]
        keys = [("dk", "dv")] if columns(p) <= BOTH else [("dk",), ("dv",)]  # dv keeps what dk marks
        return [cls.of(p, *gradients) for gradients in [("dq",), *keys]]

    @property
    def keys(self) -> bool:
        """Whether keys and values are held, not queries and dout."""
        return self.gradients != ("dq",)

    @property
    def fused(self) -> bool:
        """Whether one sweep makes all."""
        return len(self.gradients) == 3

    @property
    def dim(self) -> int:
        """Columns of its products."""
        return columns(self.p)

    @property
    def outputs(self) -> tuple[str, str]:
        """Names of what is computed with X's columns and with Y's; one twice, where it is alone."""
        made = self.gradients[:2]
        return made[0], made[-1]

    @property
    def warps(self) -> int:
        """Of a block: those that multiply, and four that load."""
        return 4 * (self.groups + 1)

    @property
    def width(self) -> int:
        """Columns of a swizzled chunk."""
        return host.width(self.p.dim, 64)

    @cached_property
    def stages(self) -> int:
        """Pairs of tiles stepped over that shared memory has room for."""
        return max(
            (n for n in (1, 2, 3, 4) if self.laid_out(n, self.shared_spans).size <= arch.SHARED_BYTES), default=0
        )

    @cached_property
    def ordered(self) -> bool:
        """Whether a table says which block begins when."""
        return from_tables(self.p, self.keys)

    @cached_property
    def persistent(self) -> bool:
        """Whether a block holds one set of rows after another, as the order says."""
        return self.fused and self.ordered and not self.near

    @property
    def near(self) -> tuple[int, ...]:
        """The aux values that are read for every pair, tile by tile."""
        return near(self.p)

    @property
    def added(self) -> int | None:
        """The aux value of 16 bits that the score reads for every pair."""
        return expressions.seen_and_added(self.p.program, self.near)[1]

    @property
    def seen(self) -> int:
        """Whether the mask reads a bool tensor; 2 where it is nothing else."""
        at, _ = expressions.seen_and_added(self.p.program, self.near)
        alone = self.p.program.keep is not None and self.p.program.keep.op == "aux"
        return 0 if at is None else 1 + alone

    @cached_property
    def sectioned(self) -> bool:
        """Whether a launch says how many heads are in flight: under a mask, of one sweep. It is as few as have a block
        for every SM: what they step over and add to stays in L2."""
        return self.fused and not self.ordered and mask(self.p) > 0 and dadded(self.p) < 2

    @cached_property
    def shared_spans(self) -> bool:
        """Whether intervals of held rows, which tables tell, are in shared memory: where it leaves two stages."""
        return from_tables(self.p, self.keys) and self.laid_out(2, True).size <= arch.SHARED_BYTES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block: tiles, what goes with rows, barriers, and room to begin on 1024."""
        return self.layout.size

    @cached_property
    def layout(self) -> Layout:
        """Of shared memory."""
        return self.laid_out(self.stages, self.shared_spans)

    def laid_out(self, stages: int, spans: bool) -> Layout:
        """Shared memory with so many stages: held tiles, stepped tiles, dS of two, what goes with rows, intervals
        of the held ones, barriers."""
        row = 2 * self.width * -(-self.dim // self.width)
        tile, held = self.block * row, 1 if self.gradients == ("dv",) else 2
        barriers = 1 + stages + (2 + 2 * self.persistent if self.fused else int(self.apart)) + (self.added is not None)
        told = spans * self.groups * 16 * arch.ROWS + 16 * self.persistent  # and which rows they are
        keys = self.groups * arch.ROWS
        raw, added = (self.seen > 0) * self.block * keys, self.added is not None
        numbers = (8 + 4 * self.p.program.buries) * self.block * self.keys
        return Layout(
            held=held * self.groups * arch.ROWS * row, stages=stages * (1 if self.apart else 2) * tile,
            y=tile if self.apart else 0, ds=2 * 2 * arch.ROWS * self.block * self.groups if self.fused else 0,
            added=added * 2 * self.block * keys, raw=raw, rows=stages * (numbers + raw // 8),
            spans=(1 + self.persistent) * told, barriers=16 * barriers, start=1024,
        )  # fmt: skip

    def defines(self) -> dict[str, Any]:
        """Macros by name."""
        p = self.p
        return {
            "GROUPS": self.groups, "KEYS": int(self.keys), "DX": int(self.gradients != ("dv",)),
            "DY": int("dv" in self.gradients), "FUSED": int(self.fused), "DIM": self.dim, "COLUMNS": p.dim,
            "WIDTH": self.width, "BLOCK": self.block, "STAGES": self.stages, "APART": int(self.apart),
            "SCORE": change(p), "BF16": int(p.dtype == torch.bfloat16),
            "PREPROCESS": int("dq" in self.gradients), "WIDE": int(p.out_dtype == torch.float32),
            "MASK": mask(p), "SHARED_SPANS": int(self.shared_spans), "ORDERED": int(self.ordered),
            "PERSISTENT": int(self.persistent), "SECTIONED": int(self.sectioned), "SEEN": self.seen,
            "ADDED": int(self.added is not None), "DADDED": dadded(p), "HEAD_PARTS": int(parts(p) > 1),
            "BURIES": int(p.program.buries), "SHARED": int(p.shared_lse),
            **({"DROPOUT": 1} if p.dropout_p else {}),
        } | self.layout.defines()  # fmt: skip

    @property
    def blocks(self) -> int:
        """Of a head: each holds 64 rows a warpgroup."""
        return -(-(self.p.seqlen_kv if self.keys else self.p.seqlen_q) // (arch.ROWS * self.groups))

    @property
    def kernels(self) -> tuple[Params, ...]:
        """What is in the text."""
        program = self.p.program
        sweep = ORDERED if self.ordered else SECTIONED if self.sectioned else PARAMS
        sweep = DROPPED[sweep] if self.p.dropout_p else sweep
        main = swept(sweep, program.buries, self.added is not None, dadded(self.p), parts(self.p) > 1)
        others = [expressions.passed(ORDER, program)] if self.ordered else []
        others += [ROUND_PARTS] if parts(self.p) > 1 else []
        return main, PREPROCESS, ROUND, *others, *([expressions.passed(HIGHEST, program)] if program.buries else [])

    def compile(self) -> nvrtc.Binary:
        """The kernel; needs no GPU."""
        dtype = "bf16" if self.p.dtype == torch.bfloat16 else "f16"
        return arch.build(self, dtype, "hopper/backward", {64, self.block, self.dim}, self.kernels)


@cache
def swept(sweep: Params, buries: bool, added: bool, gradient: int, parted: bool) -> Params:
    """The parameters of the sweep without those of mods."""
    found = sweep.followed_by(BURIED) if buries else sweep
    found = found.followed_by(PARTED) if parted else found
    return found.followed_by(ADDS | ({}, STORED, SUMMED)[gradient]) if added else found


def partial_sums(p: Problem) -> int:
    """How many there are of dk and dv: none where no block shares its keys."""
    block = 2 * arch.ROWS
    return (parts(p) > 1) * parts(p) * p.batch * p.heads_kv * -(-p.seqlen_kv // block) * block * 2 * p.dim


def room(p: Problem) -> Room:
    """Room for the sums of dq, for two numbers a row (see `Task::row`), five where scores may bury it, for a mark for
    64 queries or keys, and for the order of blocks and a counter."""
    marks = int(p.program.keep is not None)
    blocks = max(m.blocks * m.ordered for m in Config.all(p))
    return Room.of(
        sums=sums(p) if fused(p) else 0,
        delta=padded_rows(p),
        lse_log2=padded_rows(p),
        **({"gain": 2 * padded_rows(p), "log2_sum": padded_rows(p)} if p.program.buries else {}),
        bad_q=marks * p.batch * p.heads_q * -(-p.seqlen_q // 64),
        bad_kv=marks * p.batch * p.heads_kv * -(-p.seqlen_kv // 64),
        **({"partial": partial_sums(p)} if parts(p) > 1 else {}),
        **({"order": p.batch * blocks + 1} if blocks else {}),
    )


@dataclass
class Step:
    """One launch: a kernel, and by the names of its parameters the tensors that they are of; of some these are maps."""

    kernel: nvrtc.Kernel
    grid: int
    tensors: dict[str, str]
    maps: dict[str, nvrtc.TensorMaps] = field(default_factory=dict)

    @classmethod
    def preprocess(cls, m: Config, binary: nvrtc.Binary, out: torch.Tensor, dout: torch.Tensor) -> Step:
        """delta, lse in the log2 domain, and zeros to add dq to."""
        p, names = m.p, ("out", "dout", "lse", "dlse", "delta", "lse_log2", "sums")
        rows = m.block if m.fused else 64
        grid = p.batch * p.heads_q * -(-p.seqlen_q // rows) * (rows // 64)
        fixed = (
            of_strides("out", launch.strides(out))
            | of_strides("dout", launch.strides(dout))
            | {"heads_q": p.heads_q, "seqlen_q": p.seqlen_q}
        )
        return cls(nvrtc.Kernel(binary, PREPROCESS, 128, fixed=fixed), grid, {name: name for name in names})

    @classmethod
    def order(cls, m: Config, binary: nvrtc.Binary, aux: tuple[Any, ...]) -> Step:
        """Of the blocks of a sweep, the longest first."""
        fixed = {name: getattr(m.p, name) for name in (*LENGTHS, "batch")} | expressions.arguments(aux, m.p.program)
        reads = {name: name for name in expressions.of_tensors(aux) if fixed.pop(name) is not None}
        params = expressions.passed(ORDER, m.p.program)
        return cls(nvrtc.Kernel(binary, params, 1024, fixed=fixed), 1, {"order": "order"} | reads)

    @classmethod
    def highest(cls, p: Problem, binary: nvrtc.Binary, x: Operands) -> Step:
        """Of what the weights of rows are relative to, where scores may bury them."""
        fixed = {name: getattr(p, name) for name in LENGTHS} | {"total": padded_rows(p), "scale": p.softmax_scale}
        fixed |= of_strides("q", launch.strides(x.q)) | of_strides("k", launch.strides(x.k))
        fixed |= expressions.arguments(x.aux, p.program) | ({} if p.sinks else {"sinks": 0})
        reads = {name: name for name in expressions.of_tensors(x.aux) if fixed.pop(name) is not None}
        reads |= {name: name for name in ("q", "k", "lse", "gain", "log2_sum", *["sinks"] * p.sinks)}
        grid = p.batch * p.heads_q * -(-p.seqlen_q // 64)
        return cls(nvrtc.Kernel(binary, expressions.passed(HIGHEST, p.program), 128, fixed=fixed), grid, reads)

    @classmethod
    def sweep(
        cls, m: Config, binary: nvrtc.Binary, tensors: dict[str, torch.Tensor], aux: tuple[Any, ...], sms: int
    ) -> Step:
        """The kernel of a config; `tensors` are like q, k, v, dout and the gradients."""
        p, (dx, dy) = m.p, m.outputs
        fixed = (
            of_strides("dx", launch.strides(tensors[dx]))
            | of_strides("dy", launch.strides(tensors[dy]))
            | {name: getattr(p, name) for name in LENGTHS}
        )
        fixed |= {"factor": launch.LOG2_E * (1 if change(p) else p.softmax_scale), "scale": p.softmax_scale}
        fixed |= dropout.numbers(p.dropout_p) if p.dropout_p else {}
        fixed |= expressions.arguments(aux, p.program) | ({"blocks": p.batch * m.blocks} if m.ordered else {})
        fixed |= {"section": -(-sms // m.blocks)} if m.sectioned else {}
        fixed |= {"rows": padded_rows(p)} if p.program.buries else {}
        reads = {name: name for name in expressions.of_tensors(aux) if fixed.pop(name) is not None}
        params = expressions.passed(m.kernels[0], p.program)
        grid = p.batch * (p.heads_kv if m.keys else p.heads_q) * m.blocks
        mapped = dict(zip(MAPPED, ("k", "v", "q", "dout") if m.keys else ("q", "dout", "k", "v"), strict=True))
        rows = dict(zip(MAPPED, (64, 64, m.block, m.block), strict=True))
        others = ({"order": "order"} if m.ordered else {}) | ({"seed": "seed"} if p.dropout_p else {})
        others |= {
            "lse": "lse_log2", "delta": "delta", "dx": dx, "dy": dy,
            "marks": "bad_kv" if m.keys else "bad_q", "sums": "sums",
        }  # fmt: skip
        maps = {at: host.maps(tensors[name], (rows[at], 1), m.width) for at, name in mapped.items()}
        if p.program.buries:
            others |= {"gain": "gain", "lse": "log2_sum"}
        if parts(p) > 1:
            others, fixed, grid = others | {"partial": "partial"}, fixed | {"parts": parts(p)}, grid * parts(p)
        if m.added is not None:
            others["added"], (maps["added"], own) = f"a{m.added}", pair_maps(aux[m.added], m.block)
            fixed |= own
        if dadded(p) == 1:
            others["dadded"], (maps["dadded"], _) = "dbias", pair_maps(tensors["dbias"], m.block)
        elif dadded(p) == 2:
            others["dsums"] = "dbias"
            dbias = tensors["dbias"]
            fixed |= of_strides("dsums", [dbias.stride(i) * (dbias.shape[i] > 1) for i in range(3)])
        kernel = nvrtc.Kernel(binary, params, 32 * m.warps, m.shared_bytes, fixed)
        return cls(kernel, min(grid, sms) if m.persistent else grid, mapped | others | reads, maps)

    @classmethod
    def round(cls, p: Problem, binary: nvrtc.Binary, dq: torch.Tensor) -> Step:
        """Of dq, after a sweep that adds it up."""
        fixed = of_strides("dq", launch.strides(dq)) | {
            "heads_q": p.heads_q,
            "seqlen_q": p.seqlen_q,
            "scale": p.softmax_scale * (dropout.scale(p.dropout_p) if p.dropout_p else 1),
        }
        grid = p.batch * p.heads_q * -(-p.seqlen_q // 64)
        return cls(nvrtc.Kernel(binary, ROUND, 128, fixed=fixed), grid, {"sums": "sums", "dq": "dq", "marks": "bad_q"})

    @classmethod
    def round_parts(cls, p: Problem, binary: nvrtc.Binary, dk: torch.Tensor, dv: torch.Tensor) -> Step:
        """Of dk and dv, where several blocks make them."""
        fixed = of_strides("dk", launch.strides(dk)) | of_strides("dv", launch.strides(dv))
        fixed |= {"heads_kv": p.heads_kv, "seqlen_kv": p.seqlen_kv, "parts": parts(p)}
        grid = p.batch * p.heads_kv * -(-p.seqlen_kv // 64)
        names = {"partial": "partial", "dk": "dk", "dv": "dv", "marks": "bad_kv"}
        return cls(nvrtc.Kernel(binary, ROUND_PARTS, 128, fixed=fixed | {"scale": p.softmax_scale}), grid, names)

    def part(self, number: int) -> Part:
        """As one of several launches, of which it is that one: maps have a name of their own."""
        takes = self.tensors | {at: f"{at} of {number}" for at in self.maps}
        return Part(self.kernel, self.grid, takes)


def _steps(p: Problem, x: Operands, saved: Saved, sms: int) -> list[Step]:
    """The launches but for those of Triton, for operands as kernels read them."""
    tensors = {"q": x.q, "k": x.k, "v": x.v, "dout": saved.dout}
    tensors |= {f"d{name}": dense_like(tensors[name]) for name in ("q", "k", "v")}
    tensors |= {} if p.bias_shape is None else {"dbias": empty_bias(p, torch.device("meta"))}
    steps: list[Step] = []
    for m in Config.all(p):
        binary = m.compile()
        if not steps:
            steps.append(Step.preprocess(m, binary, saved.out, saved.dout))
        if m.ordered:
            steps.append(Step.order(m, binary, x.aux))
        if len(steps) == 1 + m.ordered and p.program.buries:
            steps.append(Step.highest(p, binary, x))
        steps.append(Step.sweep(m, binary, tensors, x.aux, sms))
        if m.fused:
            steps.append(Step.round(p, binary, tensors["dq"]))
        if parts(p) > 1:
            steps.append(Step.round_parts(p, binary, tensors["dk"], tensors["dv"]))
    return steps


def pair_maps(t: torch.Tensor, rows: int) -> tuple[nvrtc.TensorMaps, dict[str, int]]:
    """Maps of tensors like `t`, (b, h, q, kv), for so many queries of 64 keys; and what places by item and head are
    multiplied with: 0 where all are alike, as they are along a dim that was expanded."""
    found = {name: int(t.stride(i) > 0 and t.shape[i] > 1) for i, name in enumerate(("by_item", "by_head"))}
    one = t[: t.shape[0] if found["by_item"] else 1, : t.shape[1] if found["by_head"] else 1]
    return host.maps(one.transpose(1, 2), (rows, 1), 64), found


def unexpanded(x: Operands, near: tuple[int, ...]) -> Operands:
    """With a copy of what is near that is one row, expanded to all queries: the copy engine wants each in a place."""
    found = [i for i in near if x.aux[i].stride(2) == 0]  # type: ignore[union-attr]
    if not found:
        return x
    return replace(x, aux=tuple(t.contiguous() if i in found else t for i, t in enumerate(x.aux)))  # type: ignore[union-attr]


def empty_bias(p: Problem, device: torch.device) -> torch.Tensor:
    """Room for the gradient of a bias, in rows of a multiple of 8 keys: zeros where not all of it is stored."""
    assert p.bias_shape is not None
    shape, whole = (*p.bias_shape[:3], -(-p.bias_shape[3] // 8) * 8), dadded(p) == 1 and p.program.keep is None
    make = torch.empty if whole else torch.zeros
    return make(shape, dtype=p.dtype if dadded(p) == 1 else torch.float32, device=device)[..., : p.bias_shape[3]]


def reads_sinks(p: Problem) -> bool:
    """Whether a kernel does: else the sums that lse tells have them."""
    return p.sinks and p.program.buries


CALL = ("q", "k", "v", "dout", "out", "lse", "dlse", "dq", "dk", "dv")  # addresses that come first, in this order


@dataclass
class Ready:
    """The launches of one call key: what is the same in every call."""

    problem: Problem
    key: object  # under which the plan keeps the launches of Triton
    room: Room
    space: torch.Tensor  # one number, expanded to all that is in the room: `empty_like` parses less than `empty`
    row: Row  # takes what CALL says, what is in the room, tensors among aux, maps
    maps: list[tuple[int, nvrtc.TensorMaps]]  # with the place of the address that each is of
    tensors: bool  # whether there are tensors among the aux values
    near: tuple[int, ...]  # those that one sweep reads for every pair
    untidy: tuple[bool, bool]  # whether dout and out are copied
    dense: bool  # whether gradients are what `empty_like` makes of q, k and v
    whole: Row | None = None  # with the launches of Triton, once they are compiled

    @classmethod
    def of(cls, p: Problem, x: Operands, saved: Saved, key: object, sms: int) -> Self:
        """Everything that the launches of a plan need."""
        dout, out, x = tidy(p, saved.dout), tidy_out(saved.out), unexpanded(x, near(p))
        steps, space = _steps(p, x, saved._replace(dout=dout, out=out), sms), room(p)
        return cls.made(p, key, space, steps, x, (dout is not saved.dout, out is not saved.out))

    @classmethod
    def made(
        cls, p: Problem, key: object, space: Room, steps: list[Step], x: Operands, untidy: tuple[bool, bool]
    ) -> Self:  # fmt: skip
        """Of these launches."""
        names = [
            *CALL,
            *["sinks"] * reads_sinks(p),
            *["dbias"] * (p.bias_shape is not None),
            *space.places,
            *([] if x.seed is None else ["seed"]),
            *expressions.of_tensors(x.aux),
        ]
        maps = [(f"{at} of {i}", s.tensors[at], made) for i, s in enumerate(steps) for at, made in s.maps.items()]
        return cls(
            p, key, space, host.like((space.length,), x.q.device),
            Row([*names, *(name for name, _, _ in maps)], [s.part(i) for i, s in enumerate(steps)]),
            [(names.index(tensor), made) for _, tensor, made in maps], bool(expressions.of_tensors(x.aux)), near(p),
            untidy, all(torch.empty_like(t).stride(3) == 1 for t in (x.q, x.k, x.v)),
        )  # fmt: skip

    def run(self, plan: Plan, x: Operands, saved: Saved) -> Gradients:
        """The launches of one call, on the current stream."""
        out, lse, dout, dlse = self.tidied(saved)
        x = unexpanded(x, self.near) if self.near else x
        q, k, v, new = x.q, x.k, x.v, torch.empty_like if self.dense else dense_like
        room, dq, dk, dv = torch.empty_like(self.space), new(q), new(k), new(v)  # calls may overlap: each has its room
        values: list[Any] = [
            q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr(), out.data_ptr(), lse.data_ptr(),
            0 if dlse is None else dlse.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        ]  # fmt: skip
        if x.sinks is not None and reads_sinks(self.problem):
            values.append(x.sinks.data_ptr())
        dbias = None if self.problem.bias_shape is None else empty_bias(self.problem, q.device)
        if dbias is not None:
            values.append(dbias.data_ptr())
        start = room.data_ptr()
        values += [start + place for place in self.room.places.values()]
        if x.seed is not None:
            values.append(x.seed.data_ptr())
        if self.tensors:
            values += [t.data_ptr() for t in x.aux if isinstance(t, torch.Tensor)]
        values += [maps[values[i]] for i, maps in self.maps]
        if self.whole is not None and not direct.hooked():
            self.whole.start(values)
        else:
            self.row.start(values)
            if self.problem.program.keep is not None:
                made = {"dq": dq, "dk": dk, "dv": dv, "room": room}
                self.mend(plan, x, Saved(out, lse, dout, dlse), made | ({} if dbias is None else {"dbias": dbias}))
        dbias = None if dbias is None else dbias.contiguous()
        return Gradients(dq, dk, dv, dbias, None if x.sinks is None else self.dsinks(x, lse, room))

    def dsinks(self, x: Operands, lse: torch.Tensor, room: torch.Tensor) -> Any:
        """The gradient of sinks."""
        p, delta = self.problem, rows(self.room, room, "delta", self.problem)
        if not p.program.buries:
            return sink_gradient(x, lse, delta)
        gain, high = (heads(t, p) for t in self.room.view(room, "gain").split(padded_rows(p)))
        return sink_gradient(x, high, delta, gain)

    def tidied(self, saved: Saved) -> Saved:
        """With copies of what kernels cannot read as it is."""
        of_dout, of_out = self.untidy
        if of_dout:
            saved = saved._replace(dout=tidy(self.problem, saved.dout))
        if of_out:
            saved = saved._replace(out=tidy_out(saved.out))
        if saved.dlse is not None and not saved.dlse.is_contiguous():
            saved = saved._replace(dlse=saved.dlse.contiguous())
        return saved

    def mend(self, plan: Plan, x: Operands, saved: Saved, made: dict[str, torch.Tensor]) -> None:
        """Compute the tiles again that were marked. `made` are the gradients and the workspace."""
        p, room = self.problem, made["room"]
        tensors = {"q": x.q, "k": x.k, "v": x.v, "sinks": x.sinks, **saved._asdict(), **made}
        changed = {f"{name}_ptr": tensors[name] for name in (*CALL, *["sinks"] * reads_sinks(p))} | {
            f"{name}_ptr": address for name, address in self.room.addresses(room).items()
        }
        if x.seed is not None:
            changed["dropout"] = random.argument(p, x)
        if self.tensors:
            changed["aux"] = codegen.aux_arguments(x.aux, p.program)
        if not launch.repeat(changed, plan.cache, self.key):
            work = made | {"dout": saved.dout}
            work |= {name: rows(self.room, room, name, p) for name in ("delta", "lse_log2")}
            work |= {name: self.room.view(room, name, dtype=torch.int32) for name in ("bad_q", "bad_kv")}
            work |= dict.fromkeys(("gain", "sinks", "dlse"), work["delta"])
            work |= {"gain": self.room.view(room, "gain")} if p.program.buries else {}
            work |= {"sinks": x.sinks} if x.sinks is not None and reads_sinks(p) else {}
            steps = cast(HopperBackward, plan.kernel).repairs(plan, x, saved, work)
            launch.run(steps, plan.cache, self.key)
            self.whole = self.joined(x, launch.direct_ones(plan.cache, self.key))

    def joined(self, x: Operands, repairs: list[Direct] | None) -> Row | None:
        """All launches in a row; None where Triton has to launch its own."""
        if not repairs:
            return None
        names = self.row.names
        places: dict[Any, int] = {f"{name}_ptr": i for i, name in enumerate(names)}
        places = dict.fromkeys(("gain_ptr", "sinks_ptr"), places["delta_ptr"]) | places  # where these are not read
        if x.seed is not None:
            places["dropout", 0] = names.index("seed")
        for i, value in enumerate(x.aux):
            if isinstance(value, torch.Tensor):
                places["aux", i, 0] = names.index(f"a{i}")
        return Row(names, self.row.parts, [repair.among(places) for repair in repairs])


def tidy_out(out: torch.Tensor) -> torch.Tensor:
    """out with rows on 16 bytes: itself, or a copy."""
    return out if rows_on_16_bytes(out) and not is_copied(out) else out.clone(memory_format=torch.contiguous_format)


SPEC = HopperBackward()
