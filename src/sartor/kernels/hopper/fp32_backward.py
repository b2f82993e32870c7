"""The Hopper backward of float32 on pairs of float16, host side. The kernels are in the .cuh beside.

It is `fp32_backward` with dq, then dk and dv, in CUDA C++. What comes before them, and what computes marked tiles
again, are that kernel's launches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sartor import nvrtc
from sartor.device import Device
from sartor.features import COMMON, DIM_V, F32, PAIRS, UNALIGNED
from sartor.kernels.cuda import expressions, host
from sartor.kernels.cuda.layout import Layout
from sartor.kernels.cuda.pairs import maps, noise
from sartor.kernels.cuda.params import LENGTHS, Params, of_lengths, of_strides, strides
from sartor.kernels.hopper import arch, backward_problem
from sartor.kernels.hopper.arch import REPAIR_TILE
from sartor.kernels.spec import Gradients, KernelSpec, Operands, Plan, Saved, Tile
from sartor.kernels.triton import launch
from sartor.kernels.triton.fp32_backward import Fp32Backward
from sartor.problem import Problem

if launch.available():
    from sartor.kernels.triton import split

PARAMS = Params(
    "hopper_fp32_backward",
    held_x="TensorMap", held_y="TensorMap", x="TensorMap", y="TensorMap",  # pairs
    unit_hx="const float*", unit_hy="const float*", unit_x="const float*", unit_y="const float*",  # their units
    lse="const float*", delta="const float*",  # (batch, heads_q, rows_pitch), lse as log2
    gain="float*",  # the same: 1 over the sum of a row's weights; KEYS reads, else written
    sinks="const float*",
    dx="float*", **strides("dx"), dy="float*", **strides("dy"),
    marks="int*",  # one for 64 held rows of a head
    **LENGTHS, factor="float", scale="float", noise="float",
)  # fmt: skip
DIMS = range(17, 129)  # the wider of the two: registers hold no more, and less is hardly work for a tensor core
ROWS = 128  # that a block holds


class HopperFp32Backward(Fp32Backward):
    """See the module."""

    name = "hopper_fp32_backward"
    features = COMMON | {F32, PAIRS, DIM_V, UNALIGNED}

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """What the copy engine, wgmma and the run-time compiler need, beside what pairs do."""
        why = super().why_not(p, dev) + backward_problem.reasons(p, dev)
        if max(p.dim, p.dim_v) not in DIMS:
            why.append(f"needs head dims of which the wider is {DIMS[0]} to {DIMS[-1]}, got {p.dim} and {p.dim_v}")
        return why

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """One: registers leave no choice of rows, shared memory none of stages."""
        stages = sum(Config(p, True).stages)
        yield Tile(64, ROWS, 12, stages, Tile(ROWS, 64, 12, stages))

    fits = KernelSpec.fits

    def shared_bytes(self, plan: Plan) -> int:
        """Dynamic shared memory that a block of dk and dv takes."""
        return Config(plan.problem, True).shared_bytes

    def run(self, plan: Plan, x: Operands, saved: Saved) -> Gradients:
        """dq, dk, dv, dsinks: Triton's launches in three sections, between which the two of CUDA C++ stand."""
        w = self.begin(plan, x, saved)
        kernels: Any = plan.cache.get("hopper")
        if kernels is None:
            sms = plan.device.sm_count or 1
            kernels = plan.cache["hopper"] = [Ready.of(plan.problem, keys, sms, w.made) for keys in (False, True)]
        for i, kernel in enumerate((*kernels, None)):
            if not launch.repeat(w.changed, plan.cache, (i, w.key), w.own):
                sections = self.sections(replace(plan, tile=REPAIR_TILE), x, w.saved, self.tensors(plan, x, w), w.pairs)
                launch.run(sections[i], plan.cache, (i, w.key))
            if kernel is not None:
                kernel.start(w.pairs, w.changed, expressions.arguments(x.aux, plan.problem.program))
        return self.gradients(plan, x, w)

    def sections(
        self, plan: Plan, x: Operands, saved: Saved, work: dict[str, torch.Tensor], pairs: dict[str, Any]
    ) -> tuple[list[launch.Launch], ...]:
        """The launches of `fp32_backward` before dq, between dq and dk with dv, and after them."""
        steps = self.steps(plan, x, saved, work, pairs)
        dq, dkdv = (next(i for i, step in enumerate(steps) if step.name == name) for name in ("dq", "dkdv"))
        return steps[:dq], steps[dq + 1 : dkdv], steps[dkdv + 1 :]


@dataclass(frozen=True)
class Config:
    """What a kernel is compiled for: see the head of the .cuh. `keys` says that it is the one for dk and dv."""

    p: Problem
    keys: bool
    groups: int = 2  # warpgroups that multiply
    near = ()  # nothing is read for every pair

    @property
    def dims(self) -> tuple[int, int]:
        """Columns of q and k, of v and dout: a multiple of 16, or of 64 where a product of all would be too wide."""
        return tuple(-(-d // 16) * 16 if d <= 96 else 128 for d in (self.p.dim, self.p.dim_v))  # type: ignore[return-value]

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of their swizzled chunks."""
        return tuple(64 if d == 128 else host.width(d, 96) for d in self.dims)  # type: ignore[return-value]

    @property
    def parts(self) -> tuple[int, int]:
        """Products that a gradient is made in."""
        return tuple(2 if d > 96 else 1 for d in self.dims)  # type: ignore[return-value]

    @property
    def stages(self) -> tuple[int, int]:
        """Tiles stepped over in shared memory, of q or k, and of dout or v; the former stay longer."""
        return next(
            (x, y)
            for x, y in ((3, 3), (3, 2), (2, 2), (2, 1))
            if self.laid_out(x, y, self.shared_spans).size <= arch.SHARED_BYTES
        )

    @property
    def shared_spans(self) -> bool:
        """Whether intervals of held rows, which tables tell, are in shared memory: where there is room."""
        return backward_problem.from_tables(self.p, self.keys) and self.laid_out(2, 1, True).size <= arch.SHARED_BYTES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block: tiles, what goes with rows, barriers, and room to begin on 1024."""
        return self.laid_out(*self.stages, self.shared_spans).size

    def laid_out(self, stages_x: int, stages_y: int, spans: bool) -> Layout:
        """Shared memory with so many stages: held tiles, tiles stepped over, what goes with rows, intervals of the held
        ones, barriers."""
        x, y = (4 * arch.ROWS * width * -(-d // width) for d, width in zip(self.dims, self.widths, strict=True))
        return Layout(
            held_x=self.groups * x, held_y=self.groups * y, x=stages_x * x, y=stages_y * y,
            rows=stages_x * (784 if self.keys else 16),
            spans=spans * self.groups * 16 * arch.ROWS, barriers=16 * (1 + stages_x + stages_y), start=1024,
        )  # fmt: skip

    def defines(self) -> dict[str, Any]:
        """Macros by name."""
        p, (dim, dim_v), (width, width_v) = self.p, self.dims, self.widths
        (parts_x, parts_y), (stages_x, stages_y) = self.parts, self.stages
        return {
            "GROUPS": self.groups, "KEYS": int(self.keys), "DIM": dim, "DIM_V": dim_v, "COLUMNS": p.dim,
            "COLUMNS_V": p.dim_v, "WIDTH": width, "WIDTH_V": width_v, "PARTS_X": parts_x, "PARTS_Y": parts_y,
            "STAGES_X": stages_x, "STAGES_Y": stages_y, "MASK": backward_problem.mask(p),
            "SHARED_SPANS": int(self.shared_spans), "ORDERED": 0, "PERSISTENT": 0,
            "SINKS": int(p.sinks), "BLOCK": 64, "REGAINED": f"{split.regained(p.dim_v)!r}f",
        } | self.laid_out(*self.stages, self.shared_spans).defines()  # fmt: skip

    def compile(self) -> nvrtc.Binary:
        """The kernel; needs no GPU."""
        widths = {64, *(d // parts for d, parts in zip(self.dims, self.parts, strict=True))}
        return arch.build(self, "f16", "hopper/fp32_backward", widths, (PARAMS,))


@dataclass
class Ready:
    """One of the two kernels, compiled, with what does not change between calls of one key."""

    config: Config
    kernel: nvrtc.Kernel
    grid: int
    maps: dict[str, nvrtc.TensorMaps]  # of pairs, by name: what is held, then what is stepped over
    outputs: tuple[str, str]  # of X's columns and of Y's

    @classmethod
    def of(cls, p: Problem, keys: bool, sms: int, made: dict[str, torch.Tensor]) -> Ready:
        """Everything the launches of a plan need. Each 64 rows have an SM of their own where there are that many."""
        batch, length, heads = (p.batch, p.seqlen_kv, p.heads_kv) if keys else (p.batch, p.seqlen_q, p.heads_q)
        groups = 1 if batch * heads * -(-length // 64) <= sms else 2
        m = Config(p, keys, groups)
        of_q, of_k = (p.batch, p.seqlen_q, p.heads_q), (p.batch, p.seqlen_kv, p.heads_kv)
        x, y = ((dim, 64, width) for dim, width in zip((p.dim, p.dim_v), m.widths, strict=True))
        tensors = {"q": (of_q, *x), "dout": (of_q, *y), "k": (of_k, *x), "v": (of_k, *y)}
        names = ("k", "v", "q", "dout") if keys else ("q", "dout", "k", "v")
        dx, dy = ("dk", "dv") if keys else ("dq", "dq")
        fixed = of_strides("dx", launch.strides(made[dx])) | of_strides("dy", launch.strides(made[dy]))
        fixed |= of_lengths(p)
        factor = p.softmax_scale * split.regained(p.dim) * launch.LOG2_E
        numbers = {"factor": factor, "scale": p.softmax_scale, "noise": noise(p)}
        params = expressions.passed(PARAMS, p.program)
        kernel = nvrtc.Kernel(m.compile(), params, arch.WARPGROUP * (groups + 1), m.shared_bytes, fixed | numbers)
        grid = batch * heads * -(-length // (64 * groups))
        return cls(m, kernel, grid, {n: maps(*tensors[n]) for n in names}, (dx, dy))

    def start(self, pairs: dict[str, Any], at: dict[str, Any], aux: dict[str, Any]) -> None:
        """The launch; `at` are addresses by the names of Triton's arguments."""
        held_x, held_y, x, y = self.maps
        tensors = {"unit_hx": held_x, "unit_hy": held_y, "unit_x": x, "unit_y": y}
        values: dict[str, Any] = {unit: pairs[name].units.data_ptr() for unit, name in tensors.items()}
        for name, tensor in {"held_x": held_x, "held_y": held_y, "x": x, "y": y}.items():
            values[name] = self.maps[tensor][pairs[tensor].data.data_ptr()]
        (dx, dy), marks = self.outputs, "bad_kv" if self.config.keys else "bad_q"
        named = {name: name for name in ("delta", "gain", "sinks")} | {"lse": "lse_log2", "dx": dx, "dy": dy}
        values |= {name: at[f"{tensor}_ptr"] for name, tensor in (named | {"marks": marks}).items()}
        self.kernel.launch(self.grid, values | aux)


SPEC = HopperFp32Backward()
