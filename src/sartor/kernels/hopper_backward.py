"""The Hopper backward of float16 and bfloat16, host side. The kernels are in the .cuh beside.

It is `triton_backward` with dq, and dk with dv, in CUDA C++. What comes before them, and what computes marked tiles
again, are that kernel's launches.

Where bits may change from run to run, dk, dv and dq come from one sweep (`fused`), and a launch rounds dq. Beyond head
dim 128 registers hold one gradient: dk and dv are two launches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sartor import nvrtc
from sartor.device import Device
from sartor.kernels.algebra import sink_gradient
from sartor.kernels.cuda import expressions, host
from sartor.kernels.parts import launch
from sartor.kernels.spec import Gradients, Operands, Plan, Saved, Tile
from sartor.kernels.triton_backward import TritonBackward
from sartor.problem import Problem, mask_class

if launch.available():
    from sartor.kernels.parts import codegen

SIGNATURE = "MMMMPPPPPPqqqqqqiiiiff"  # of the kernels, before the aux values
ROUND = "PPPqqqiif"  # of `round_dq`
DIMS = range(64, 257, 8)  # registers hold no more; narrower ones leave the tensor cores waiting for exponentials
BOTH = 128  # columns of which registers hold dk and dv
CHANGE = 32  # registers that a change of scores takes
AGAIN = Tile(64, 64, 4, 1, Tile(64, 64, 4, 1))  # of what computes marked tiles again: a mark is for 64 rows


class HopperBackward(TritonBackward):
    """See the module."""

    name = "hopper_backward"
    family = "hopper"

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """What the copy engine, wgmma and the run-time compiler need."""
        why = launch.reasons(p, dev) + reasons(p, dev)
        if p.bias_shape is not None:
            why.append("has no gradient of a bias")
        elif p.program.score is not None and mask_class(p) == "tensor":
            why.append(f"needs scores that read no table of queries and keys, got {p.score_name}")
        if p.dtype not in (torch.float16, torch.bfloat16):
            why.append(f"needs float16 or bfloat16, got {p.dtype}")
        if p.dim != p.dim_v or p.dim not in DIMS:
            why.append(f"needs equal head dims, {DIMS[0]} to {DIMS[-1]}, multiples of 8, got {p.dim} and {p.dim_v}")
        if not p.rows_on_16_bytes:
            why.append("needs rows of q, k and v that start on 16 bytes, got strides or addresses that do not")
        return why

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """One: registers leave little choice."""
        tile = None
        for m in Measure.all(p):
            queries, keys = (m.block, 64 * m.groups) if m.keys else (64 * m.groups, m.block)
            tile = Tile(queries, keys, m.warps, m.stages, tile)
        assert tile is not None
        yield tile

    def fits(self, p: Problem, dev: Device, tile: Tile) -> bool:
        """Whether it is that one."""
        return tile in self.tiles(p, dev)

    def shared_bytes(self, plan: Plan) -> int:
        """Dynamic shared memory that a block takes, of the kernels the one that takes most."""
        return max(m.shared_bytes for m in Measure.all(plan.problem))

    def run(self, plan: Plan, x: Operands, saved: Saved) -> Gradients:
        """dq, dk, dv, dsinks: `prepare`, the launches of CUDA C++, those over what they marked."""
        p = plan.problem
        work = self.workspace(p, x, saved)
        changed = self.changed(x, saved, work)
        if x.aux:
            changed["aux"] = codegen.aux_arguments(x.aux, p.program)
        key = saved.out.stride(), work["dout"].stride(), work["dout"].data_ptr() % 16, saved.dlse is None
        kernels: Any = plan.cache.get(("hopper", key))
        if kernels is None:
            kernels = plan.cache["hopper", key] = [Ready.of(m, x, work) for m in Measure.all(p)]
        self._around(0, plan, x, saved, work, changed, key)
        for kernel in kernels:
            kernel.start(x, work)
        self._around(1, plan, x, saved, work, changed, key)
        return Gradients(work["dq"], work["dk"], work["dv"], dsinks=sink_gradient(x, saved.lse, work["delta"]))

    def sections(
        self, plan: Plan, x: Operands, saved: Saved, work: dict[str, torch.Tensor]
    ) -> tuple[list[launch.Launch], ...]:
        """The launches of `triton_backward` before dq, dk and dv, and after them."""
        steps = self.steps(replace(plan, tile=AGAIN), x, saved, work, {})
        return steps[:1], [step for step in steps if step.name.endswith("repair")]

    def workspace(self, p: Problem, x: Operands, saved: Saved) -> dict[str, torch.Tensor]:
        """As for `triton_backward`, with dout as the copy engine wants it: rows on 16 bytes, none twice. `sums` are
        where one sweep adds up dq, whole tiles of it."""
        work = super().workspace(p, x, saved)
        dout = work["dout"]
        rows = all(dout.stride(i) % 8 == 0 and dout.stride(i) for i in range(3) if dout.shape[i] > 1)
        if not rows or dout.data_ptr() % 16:
            work["dout"] = dout.clone(memory_format=torch.contiguous_format)
        work["sums"] = work["delta"]
        if fused(p):
            work["sums"] = torch.zeros(sums(p), dtype=torch.float32, device=x.q.device)
        return work

    def notes(self, p: Problem) -> Iterable[str]:
        """Memory that a call takes besides its results, and what it is for."""
        if fused(p):
            size = 4 * sums(p) / 2**20
            yield f"the backward adds up dq in any order, in {size:.1f} MiB of float32; deterministic=True spares both"

    def _around(
        self, part: int, plan: Plan, x: Operands, saved: Saved, work: dict[str, torch.Tensor],
        changed: dict[str, Any], key: object,
    ) -> None:  # fmt: skip
        """One of the two sections."""
        if not launch.again(changed, plan.cache, (part, key)):
            launch.run(self.sections(plan, x, saved, work)[part], plan.cache, (part, key))


def reasons(p: Problem, dev: Device) -> list[str]:
    """What every backward of this kind needs of the machine, the lengths and masks."""
    why = host.reasons(p, dev)
    if p.program.keep is not None and not p.program.is_interval_both_ways:
        why.append(f"needs a mask that is one interval of every row and column, got {p.mask_name}")
    return why


def columns(p: Problem) -> int:
    """Of products: a multiple of 16, a step of them."""
    return -(-p.dim // 16) * 16


def change(p: Problem) -> int:
    """Of scores: 0 none, 1 one whose derivative is 1, 2 any."""
    rise = p.program.dscore
    return 0 if rise is None else 1 if rise.text() == "1.0" else 2


def fused(p: Problem) -> bool:
    """Whether one sweep makes dk, dv and dq: its parts of dq are cut to these head dims."""
    return p.dim in (64, 128) and not p.deterministic


def sums(p: Problem) -> int:
    """How many there are, of one sweep."""
    block = Measure.all(p)[0].block
    return p.batch * p.heads_q * -(-p.seqlen_q // block) * block * p.dim


@dataclass(frozen=True)
class Measure:
    """What a kernel is cut to: see the head of the .cuh."""

    p: Problem
    gradients: tuple[str, ...]  # that it makes
    groups: int  # warpgroups that multiply
    block: int  # rows of a tile that is stepped over
    apart: bool = False  # whether y, of which only dp is made, has one stage, of its own
    near = ()  # nothing is read for every pair

    @classmethod
    def of(cls, p: Problem, *gradients: str) -> Measure:
        """The measure of a problem: products as wide as registers hold scores and dp beside the gradients, and shared
        memory two stages of rows, one of y where that is fewer than 64. A third warpgroup must leave 64 rows, or 80
        without dp. In one sweep, as many rows as make 64 by 64 of dq for either warpgroup."""
        dim, count = columns(p), len(gradients)
        if count == 3:
            return cls(p, gradients, 2, 2 * 64 * 64 // dim)
        wider = 2 if gradients == ("dv",) else 1  # there is no dp
        groups = 3 if count == 1 and change(p) < 2 and wider * (128 - dim // 2) >= 48 + 16 * wider else 2
        room = wider * ((128 if groups == 3 else 208) - count * dim // 2)
        room = max(64, room - CHANGE * (change(p) > 0))
        measures = (cls(p, gradients, groups, rows) for rows in (128, 112, 96, 80, 64) if rows <= room)
        return next((m for m in measures if m.stages > 1), cls(p, gradients, groups, 64, apart=True))

    @classmethod
    def all(cls, p: Problem) -> list[Measure]:
        """The measures of the kernels that a problem takes, in the order of their launches."""
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

    @property
    def stages(self) -> int:
        """Pairs of tiles stepped over that shared memory has room for."""
        return max((n for n in (1, 2, 3, 4) if self._bytes(n) <= 227 << 10), default=0)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block: tiles, what goes with rows, barriers, and room to begin on 1024."""
        return self._bytes(self.stages)

    def _bytes(self, stages: int) -> int:
        row = 2 * self.width * -(-self.dim // self.width)
        tile, rows = self.block * row, 8 * self.block if self.keys else 0
        stepped = stages * (tile + rows) + (1 if self.apart else stages) * tile
        slopes = 2 * (128 * self.block * self.groups + 16) if self.fused else 0
        held = 1 if self.gradients == ("dv",) else 2
        return held * self.groups * 64 * row + stepped + slopes + 16 * (1 + stages + self.apart) + 1024

    def defines(self) -> dict[str, Any]:
        """Macros by name."""
        p = self.p
        return {
            "GROUPS": self.groups, "KEYS": int(self.keys), "DX": int(self.gradients != ("dv",)),
            "DY": int("dv" in self.gradients), "FUSED": int(self.fused), "DIM": self.dim, "COLUMNS": p.dim,
            "WIDTH": self.width, "BLOCK": self.block, "STAGES": self.stages, "APART": int(self.apart),
            "MASK": int(p.program.keep is not None), "SCORE": change(p), "BF16": int(p.dtype == torch.bfloat16),
        }  # fmt: skip

    def compile(self) -> nvrtc.Binary:
        """The kernel; needs no GPU."""
        dtype = "bf16" if self.p.dtype == torch.bfloat16 else "f16"
        return host.build(self, dtype, "hopper_backward", {64, self.block, self.dim})


@dataclass
class Ready:
    """One of the kernels, compiled, with what does not change between calls of one key."""

    measure: Measure
    kernel: nvrtc.Kernel
    grid: int
    maps: dict[str, nvrtc.TensorMaps]  # by name: what is held, then what is stepped over
    numbers: tuple[Any, ...]
    round: nvrtc.Kernel | None  # of dq, after a sweep that adds it up

    @classmethod
    def of(cls, m: Measure, x: Operands, work: dict[str, torch.Tensor]) -> Ready:
        """Everything the launches of a plan need."""
        p = m.p
        letters = SIGNATURE + expressions.signature(p.program)
        binary = m.compile()
        kernel = nvrtc.Kernel(binary, "hopper_backward", letters, 32 * m.warps, m.shared_bytes)
        tensors = {"q": x.q, "dout": work["dout"], "k": x.k, "v": x.v}
        names = ("k", "v", "q", "dout") if m.keys else ("q", "dout", "k", "v")
        rows = dict(zip(names, (64, 64, m.block, m.block), strict=True))
        length, heads = (p.seqlen_kv, p.heads_kv) if m.keys else (p.seqlen_q, p.heads_q)
        dx, dy = m.outputs
        return cls(
            m, kernel, p.batch * heads * -(-length // (64 * m.groups)),
            {name: host.maps(tensors[name], (rows[name], 1), m.width) for name in names},
            (
                *launch.strides(work[dx]), *launch.strides(work[dy]), p.heads_kv, p.group, p.seqlen_q, p.seqlen_kv,
                launch.LOG2_E * (1 if change(p) else p.softmax_scale), p.softmax_scale,
            ),
            nvrtc.Kernel(binary, "round_dq", ROUND, 128, 0) if m.fused else None,
        )  # fmt: skip

    def start(self, x: Operands, work: dict[str, torch.Tensor]) -> None:
        """The launch."""
        tensors = {"q": x.q, "dout": work["dout"], "k": x.k, "v": x.v}
        p, (dx, dy), marks = self.measure.p, self.measure.outputs, "bad_kv" if self.measure.keys else "bad_q"
        self.kernel.launch(self.grid, (
            *(maps[tensors[name].data_ptr()] for name, maps in self.maps.items()),
            *(work[name].data_ptr() for name in ("lse_log2", "delta", dx, dy, marks, "sums")), *self.numbers,
            *expressions.arguments(x.aux, p.program),
        ))  # fmt: skip
        if self.round:
            places = (work[name].data_ptr() for name in ("sums", "dq", "bad_q"))
            self.round.launch(p.batch * p.heads_q * -(-p.seqlen_q // 64), (
                *places, *launch.strides(work["dq"]), p.heads_q, p.seqlen_q, p.softmax_scale,
            ))  # fmt: skip


SPEC = HopperBackward()
