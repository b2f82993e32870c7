"""What the kernels of the Hopper backward of float16 and bfloat16 are compiled for, what they take, and the room that a
call's launches share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any

import torch

from sartor import nvrtc
from sartor.kernels import blocks
from sartor.kernels.cuda import expressions, host
from sartor.kernels.cuda.layout import Layout
from sartor.kernels.cuda.params import DROPOUT, LENGTHS, Params, strides
from sartor.kernels.hopper import arch
from sartor.kernels.hopper.backward_problem import (
    change,
    columns,
    dadded,
    from_tables,
    fused,
    mask,
    near,
    parts,
)
from sartor.kernels.room import Room
from sartor.kernels.triton.backward import padded_rows
from sartor.problem import Problem, changed

PARAMS = Params(
    "hopper_backward",
    held_x="TensorMap", held_y="TensorMap", x="TensorMap", y="TensorMap",
    lse="const float*", delta="const float*",  # (batch, heads_q, rows_pitch), lse as log2
    dx="TensorMap", dy="TensorMap",  # of a warp's 16 rows
    marks="int*",  # one for 64 held rows of a head
    sums="float*",  # dq, unscaled: tiles of heads, in parts that lie as threads have them (FUSED)
    **LENGTHS, factor="float", scale="float",
)  # fmt: skip
PREPROCESS = Params(
    "preprocess",
    out="const u8*", dout="const u8*", lse="const float*", dlse="const float*",
    delta="float*", lse_log2="float*", sums="float*",
    **strides("out"), **strides("dout"), heads_q="int", seqlen_q="int",
)  # fmt: skip
CLEARING = PREPROCESS.followed_by({"claimed": "int*"})  # the same, which begins a count of claims
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
L2_ROOM = 40 << 20  # for what a section steps over and adds to: with 100 MB its blocks took 15 % longer, with 34 none
# Heads whose blocks begin together, the longest first; heads in such sections, those that follow are one.
SECTIONED = PARAMS.followed_by({"section": "int", "sectioned": "int"})
DROPPED = {of: of.followed_by(DROPOUT) for of in (PARAMS, ORDERED, SECTIONED)}  # the same with dropout
LISTED = {of: of.followed_by(blocks.PARAMETERS) for of in (PARAMS, SECTIONED)}  # with a block list
SEES = {"seen": "TensorMap", "seen_by_item": "int", "seen_by_head": "int"}  # a bool tensor, and the same of its places
ADDS = {"added": "TensorMap", "by_item": "int", "by_head": "int"}  # these 1 or 0, by which its places are multiplied
STORED = {"dadded": "TensorMap"}  # its gradient
SUMMED = {"dsums": "TensorMap", "dsums_by_item": "int", "dsums_by_head": "int"}  # the same, added up in float32
CLAIMS = {"claimed": "int*", "total": "int"}  # sets of rows claimed beside each block's first, and all
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
BOTH = 128  # columns of which registers hold dk and dv
CHANGE = BITS = 32  # registers that a change of scores takes, and that dropout does
SLICE = 4  # rows of dS that are added to the gradient of a bias at a time


@dataclass(frozen=True)
class Config:
    """What a kernel is compiled for: see the head of the .cuh."""

    p: Problem
    gradients: tuple[str, ...]  # that it makes
    groups: int  # warpgroups that multiply
    block: int  # rows of a tile that is stepped over
    apart: bool = False  # whether y, of which only dp is made, has one stage, of its own
    listed: bool = False  # whether a block list has the tiles of the mask

    @classmethod
    def of(cls, p: Problem, *gradients: str) -> Config:
        """The config of a problem: products as wide as registers hold scores and dp beside the gradients, and shared
        memory two stages of rows, one of y where that is fewer than 64. A third warpgroup must leave 64 rows, or 80
        without dp. In one sweep 128 up to head dim 64, where each warpgroup makes dq of half of them, else 64."""
        dim, count = columns(p), len(gradients)
        if count == 3:
            return cls(p, gradients, 2, 64 if dim > 64 else 128)
        wider = 2 if gradients == ("dv",) else 1  # there is no dp
        groups = 3 if count == 1 and change(p) < 2 and wider * (128 - dim // 2) >= 48 + 16 * wider else 2
        room = wider * ((128 if groups == 3 else 208) - count * dim // 2)
        room = max(64, room - CHANGE * (change(p) > 0) - BITS * (p.dropout_p > 0))
        configs = (cls(p, gradients, groups, rows) for rows in (128, 112, 96, 80, 64) if rows <= room)
        return next((m for m in configs if m.stages > 1), cls(p, gradients, groups, 64, apart=True))

    @classmethod
    @lru_cache(maxsize=256)
    def all(cls, p: Problem) -> list[Config]:
        """The configs of the kernels that a problem takes, in the order of their launches: those of its kind, with what
        is known of them."""
        return [changed(m, p=p) for m in _of_kind(p if p.bias_shape else p.kind, parts(p) > 1)]

    @property
    def keys(self) -> bool:
        """Whether keys and values are held, not queries and dout."""
        return self.gradients != ("dq",)

    @property
    def fused(self) -> bool:
        """Whether one sweep makes all."""
        return len(self.gradients) == 3

    @cached_property
    def dim(self) -> int:
        """Columns of its products."""
        return columns(self.p)

    @property
    def outputs(self) -> tuple[str, str]:
        """Names of what is computed with X's columns and with Y's; one twice, where it is alone."""
        made = self.gradients[:2]
        return made[0], made[-1]

    @cached_property
    def warps(self) -> int:
        """Of a block: those that multiply, and four that load."""
        return 4 * (self.groups + 1)

    @cached_property
    def width(self) -> int:
        """Columns of a swizzled chunk. In one sweep 80 columns are three chunks, as each warpgroup makes 48 of dq."""
        return (32 if self.dim == 80 else 64) if self.fused else host.width(self.p.dim, 64)

    @cached_property
    def stages(self) -> int:
        """Pairs of tiles stepped over that shared memory has room for."""
        return max((n for n in (1, 2, 3, 4) if self.fits(n, self.shared_spans, self.persistent)), default=0)

    @cached_property
    def ordered(self) -> bool:
        """Whether a table says which block begins when."""
        return from_tables(self.p, self.keys)

    @cached_property
    def persistent(self) -> bool:
        """Whether a block holds one set of rows after another, in one sweep: where registers are left for it, which
        with 128 columns looking at pairs, derivatives of scores and dropout need, and where shared memory has room for
        a second set of keys beside three stages, one of which gradients leave through."""
        spares = self.dim < BOTH or (mask(self.p) < 2 and change(self.p) < 2 and not self.p.dropout_p)
        stays = self.fused and not self.near and parts(self.p) == 1 and (spares or self.ordered)
        return stays and self.fits(3, False, True)

    @cached_property
    def claims(self) -> bool:
        """Whether blocks claim these from a count of their own; a table that orders them has one."""
        return self.persistent and not self.ordered

    @cached_property
    def near(self) -> tuple[int, ...]:
        """The aux values that are read for every pair, tile by tile."""
        return near(self.p)

    @cached_property
    def hides(self) -> int | None:
        """The aux value that is a bool tensor, which the mask reads for every pair."""
        return expressions.seen_and_added(self.p.program, self.near)[0]

    @cached_property
    def added(self) -> int | None:
        """The aux value of 16 bits that the score reads for every pair."""
        return expressions.seen_and_added(self.p.program, self.near)[1]

    @cached_property
    def seen(self) -> int:
        """Whether the mask reads a bool tensor; 2 where it is nothing else."""
        alone = self.p.program.keep is not None and self.p.program.keep.op == "aux"
        return 0 if self.hides is None else 1 + alone

    @cached_property
    def sectioned(self) -> bool:
        """Whether a launch says how many heads are in flight: under a mask, of one sweep. They are as few as have a
        block for every SM: what they step over and add to stays in L2."""
        return self.fused and not self.ordered and mask(self.p) > 0 and dadded(self.p) < 2

    @property
    def whole_apart(self) -> bool:
        """Whether tiles that are seen whole have a loop of their own. Code that masks ends a basic block, also where a
        tile jumps over it, and ptxas moves no exponential over that end. Two loops gain nothing elsewhere, lose at 120
        without a mask, and with several parts of heads, or intervals from tensors and no order, ptxas serialises their
        products."""
        p = self.p
        plain = mask(p) < 2 and not (p.program.loads or change(p) or p.dropout_p)
        gains = 64 < p.dim <= 128 and (mask(p) > 0 or p.dim != 120)
        return self.fused and plain and gains and not self.ordered and parts(p) == 1

    def sections(self, heads: int, sms: int) -> dict[str, int]:
        """Of so many heads. The last section is to give every SM three blocks, the shortest at the end: with as few as
        the others have, SMs were idle for 4 to 8 % of a causal launch's time. What it reads and adds to stays in L2
        too."""
        p, blocks = self.p, self.blocks
        section, last = -(-sms // blocks), -(-3 * sms // blocks)
        each = p.batch * p.heads_q * p.seqlen_q * (2 * (p.dim + p.dim_v) + 4 * p.dim)  # times the heads
        fit = L2_ROOM * heads // max(1, each)
        return {"section": section, "sectioned": max(heads - max(section, min(last, fit)), 0)}

    @cached_property
    def shared_spans(self) -> bool:
        """Whether intervals of held rows, which tables tell, are in shared memory: where it leaves stages enough."""
        return self.ordered and self.fits(2 + self.persistent, True, self.persistent)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block: tiles, what goes with rows, barriers, and room to begin on 1024."""
        return self.layout.size

    @cached_property
    def layout(self) -> Layout:
        """Of shared memory."""
        return self.laid_out(self.stages, self.shared_spans, self.persistent)

    def fits(self, *of: Any) -> bool:
        """Whether shared memory has room for this, see `laid_out`."""
        return self.laid_out(*of).size <= arch.SHARED_BYTES

    def laid_out(self, stages: int, spans: bool, persistent: bool) -> Layout:
        """Shared memory with so many stages: held tiles of one set of rows or two (`persistent`), stepped tiles, dS of
        two, what goes with rows, intervals of the held ones (`spans`), barriers."""
        row = 2 * self.width * -(-self.dim // self.width)
        tile, held = self.block * row, 1 if self.gradients == ("dv",) else 2
        barriers = 1 + stages + (2 + (4 + self.groups) * persistent if self.fused else int(self.apart))
        barriers += (self.added is not None) + (self.seen > 0) * self.block // 32
        told = spans * self.groups * 16 * arch.ROWS
        told += persistent * 16 * (1 + self.ordered * (1 + self.groups))  # which rows they are, ranges of tiles
        keys = self.groups * arch.ROWS
        raw, added = (self.seen > 0) * self.block * keys, self.added is not None
        slices = (dadded(self.p) == 2) * 4 * 4 * SLICE * keys
        drawn = self.fused and self.p.dropout_p > 0
        numbers = (8 + 4 * self.p.program.buries + 16 * drawn) * self.block * self.keys
        return Layout(
            held=(held + persistent) * self.groups * arch.ROWS * row, stages=stages * (1 if self.apart else 2) * tile,
            y=tile if self.apart else 0, ds=2 * 2 * arch.ROWS * self.block * self.groups if self.fused else 0,
            added=added * 2 * self.block * keys, raw=raw, slices=slices, rows=stages * (numbers + raw // 8),
            spans=(1 + persistent) * told, barriers=16 * barriers, start=1024,
        )  # fmt: skip

    def defines(self) -> dict[str, Any]:
        """Macros by name."""
        return self.macros

    @cached_property
    def macros(self) -> host.Macros:
        """The same, made once for a kind."""
        p = self.p
        return host.Macros({
            "GROUPS": self.groups, "KEYS": int(self.keys), "DX": int(self.gradients != ("dv",)),
            "DY": int("dv" in self.gradients), "FUSED": int(self.fused),
            "DIM": self.dim, "COLUMNS": p.dim,
            "WIDTH": self.width, "BLOCK": self.block, "STAGES": self.stages, "APART": int(self.apart),
            "SCORE": change(p), "BF16": int(p.dtype == torch.bfloat16),
            "PREPROCESS": int("dq" in self.gradients), "WIDE": int(p.out_dtype == torch.float32),
            "MASK": 3 if self.listed else mask(p), "SHARED_SPANS": int(self.shared_spans), "ORDERED": int(self.ordered),
            "PERSISTENT": int(self.persistent), "SECTIONED": int(self.sectioned), "SEEN": self.seen,
            "WHOLE_APART": int(self.whole_apart),
            "ADDED": int(self.added is not None), "DADDED": dadded(p), "HEAD_PARTS": int(parts(p) > 1),
            "BURIES": int(p.program.buries), "SHARED": int(p.shared_lse),
            **({"DROPOUT": 1} if p.dropout_p else {}),
        } | self.layout.defines())  # fmt: skip

    @property
    def blocks(self) -> int:
        """Of a head: each holds 64 rows a warpgroup."""
        return -(-(self.p.seqlen_kv if self.keys else self.p.seqlen_q) // (arch.ROWS * self.groups))

    @cached_property
    def kernels(self) -> tuple[Params, ...]:
        """What is in the text."""
        program = self.p.program
        sweep = ORDERED if self.ordered else SECTIONED if self.sectioned else PARAMS
        sweep = DROPPED[sweep] if self.p.dropout_p else LISTED[sweep] if self.listed else sweep
        main = swept(sweep, program.buries, self.seen > 0, self.added is not None, dadded(self.p), parts(self.p) > 1)
        main = main.followed_by(CLAIMS) if self.claims else main
        others = [expressions.passed(ORDER, program)] if self.ordered else []
        others += [ROUND_PARTS] if parts(self.p) > 1 else []
        others += [expressions.passed(HIGHEST, program)] if program.buries else []
        return main, CLEARING if self.claims else PREPROCESS, ROUND, *others

    def compile(self) -> nvrtc.Binary:
        """The kernel; needs no GPU."""
        dtype = "bf16" if self.p.dtype == torch.bfloat16 else "f16"
        columns = self.p.dim, self.p.dim - self.width * (self.width == 32)  # of products: see PART
        return arch.build(self, dtype, "hopper/backward", {64, self.block, *columns}, self.kernels)


# Of a kind, with what they are made of
LASTING = "layout", "kernels", "macros", "sectioned", "persistent", "claims", "warps"


@lru_cache(maxsize=256)
def _of_kind(p: Problem, parted: bool) -> list[Config]:
    """The configs of a kind with lengths that stand for others: by nothing else do they differ, but where a bias has a
    gradient. Few keys share their blocks, where heads do; many do not."""
    if p.bias_shape is None:
        p = replace(p, batch=1, seqlen_kv=1 if parted else 2**20)
    keys = [("dk", "dv")] if columns(p) <= BOTH else [("dk",), ("dv",)]  # dv keeps what dk marks
    made = [("dk", "dv", "dq")] if fused(p) else [("dq",), *keys]
    found = [Config.of(p, *gradients) for gradients in made]
    for m in found:
        for name in LASTING:
            getattr(m, name)
    return found


@cache
def swept(sweep: Params, buries: bool, seen: bool, added: bool, gradient: int, parted: bool) -> Params:
    """The parameters of the sweep without those of mods."""
    found = sweep.followed_by(BURIED) if buries else sweep
    found = found.followed_by(PARTED) if parted else found
    found = found.followed_by(SEES) if seen else found
    return found.followed_by(ADDS | ({}, STORED, SUMMED)[gradient]) if added else found


def sums(p: Problem) -> int:
    """How many there are, of one sweep."""
    block = Config.all(p)[0].block
    return p.batch * p.heads_q * -(-p.seqlen_q // block) * block * p.dim


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
        **({"claimed": 1} if Config.all(p)[0].claims else {}),
    )
