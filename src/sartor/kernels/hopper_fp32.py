"""The Hopper forward of float32 on pairs of float16, host side. The kernel is in the .cuh beside.

Three kinds of launch, as in `fp32_forward`, whose splits and second computations these are: only the launch on pairs is
CUDA C++. It marks the tiles of 64 queries that pairs do not do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sartor import nvrtc
from sartor.device import Device
from sartor.kernels import fp32_forward, hopper_forward
from sartor.kernels.cuda import expressions
from sartor.kernels.parts import launch
from sartor.kernels.spec import Operands, Plan, Tile, allocate_out
from sartor.kernels.triton_forward import Results
from sartor.problem import Problem

if launch.available():
    from sartor.kernels.parts import codegen, products, split

SIGNATURE = "MMMPPPPPPPPqqqiiiiiiifff"  # of the kernel, before the aux values
MAX_DIM_V = 128
SPLITS = 3  # launches before the one on pairs


class HopperFp32:
    """See the module."""

    name = "hopper_fp32"
    family = "fp32"
    backwards = ("fp32_backward",)

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """What TMA, wgmma and the run-time compiler need, beside what pairs do."""
        why = fp32_forward.reasons(p, dev) + hopper_forward.reasons(p, dev)
        if p.dim_v > MAX_DIM_V:
            why.append(f"needs a head dim of v up to {MAX_DIM_V}, twice which registers hold, got {p.dim_v}")
        return why or launch.no_tile(self, p, dev)

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """Tiles that fit shared memory and registers, best guess first."""
        slices = -(-p.seqlen_q // 64) * p.group
        reads = 32 if any(set("qk") & set(a.pattern.lower()) for a in p.program.aux) else 0  # registers, a row or key
        narrow = max(p.dim, p.dim_v) <= 64 and slices > 2 and not reads
        for groups in (1, 2) if slices == 1 else (3, 2, 1) if narrow else (2, 1):
            for block_n in (64, 128, 32, 16):  # a tile's keys share a unit
                for stages in (6, 5, 4, 3, 2):
                    m = Measure.of(p, Tile(64 * groups, block_n, 4 * (groups + 1), stages))
                    fits = m.accumulators + reads <= (128 if groups == 3 else 192)
                    if fits and m.shared_bytes <= launch.room(dev):
                        yield m.tile

    def shared_bytes(self, plan: Plan) -> int:
        """Dynamic shared memory a block takes."""
        assert plan.tile is not None
        return Measure.of(plan.problem, plan.tile).shared_bytes

    def compile(self, p: Problem, tile: Tile) -> nvrtc.Binary:
        """The kernel cut to a problem; needs no GPU."""
        return hopper_forward.build(Measure.of(p, tile), "f16", ["hopper_fp32"])

    def run(self, plan: Plan, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """out (b, sq, hq, dv) and lse (b, hq, sq)."""
        if x.q.device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(x.q.device):
                return self._run(plan, x)
        return self._run(plan, x)

    def notes(self, p: Problem) -> Iterable[str]:
        """Memory that a call takes besides its results."""
        return fp32_forward.SPEC.notes(p)

    def _run(self, plan: Plan, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        p, device = plan.problem, x.q.device
        lse = torch.empty((p.batch, p.heads_q, p.seqlen_q), dtype=torch.float32, device=device)
        marks = torch.empty(p.batch * p.heads_q * -(-p.seqlen_q // 64), dtype=torch.int32, device=device)
        results, pairs = Results(allocate_out(p, x.q), lse, marks), fp32_forward.SPEC.pairs(x)
        ready = plan.cache.get("hopper")
        if ready is None:
            ready = plan.cache["hopper"] = Ready.of(self.compile(p, plan.tile), plan, results.out)  # type: ignore[arg-type]
        assert isinstance(ready, Ready)
        changed: dict[str, Any] = {"q_ptr": x.q, "k_ptr": x.k, "v_ptr": x.v}
        changed |= {"out_ptr": results.out, "lse_ptr": lse, "bad_ptr": marks}
        if x.sinks is not None:
            changed["sinks_ptr"] = x.sinks
        if x.aux:
            changed["aux"] = codegen.aux_arguments(x.aux, p.program)

        def portable() -> list[launch.Launch]:
            return fp32_forward.SPEC.steps(ready.portable, x, results, pairs)

        if not launch.again({}, plan.cache, "splits", launch.own({"q": x.q, "k": x.k, "v": x.v}, pairs)):
            launch.run(portable()[:SPLITS], plan.cache, "splits")
        ready.start(x, results, pairs)
        if not launch.again(changed, plan.cache, "again"):
            launch.run(portable()[SPLITS + 1 :], plan.cache, "again")
        return results.out, lse


class Measure(hopper_forward.Measure):
    """What the kernel is cut to: see the head of `hopper_fp32.cuh`."""

    @classmethod
    def of(cls, p: Problem, tile: Tile) -> Measure:
        """The measure of a problem with a tile; a slice is of one head, whose queries share a unit."""
        return replace(super().of(p, tile), rows=64)  # type: ignore[return-value]

    @property
    def accumulators(self) -> int:
        """Registers a thread: scores, weights twice, output and a tile's share of it."""
        return self.block_n + self.dim_v

    @property
    def q_registers(self) -> bool:
        """Never: pairs take too many."""
        return False

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a row in shared memory, of q and k, and of v."""
        qk, v = super().row_bytes
        return 2 * qk, 2 * v

    def defines(self) -> dict[str, Any]:
        """Macros by name."""
        constants = {"SEGMENT": split.SEGMENT.value, "HUGE_SCORE": f"{products.HUGE.value}f"}
        return super().defines() | constants


@dataclass
class Ready:
    """A compiled kernel with what does not change between calls of one key."""

    kernel: nvrtc.Kernel
    grid: int
    numbers: tuple[Any, ...]
    measure: Measure
    portable: Plan  # of fp32_forward, for the launches that are its
    maps: dict[tuple[str, int], bytes] = field(default_factory=dict)
    counters: dict[int, torch.Tensor] = field(default_factory=dict)  # the scheduler's

    @classmethod
    def of(cls, binary: nvrtc.Binary, plan: Plan, out: torch.Tensor) -> Ready:
        """Everything the launches of a plan need."""
        p, m = plan.problem, Measure.of(plan.problem, plan.tile)  # type: ignore[arg-type]
        tiles_head = -(-(-(-p.seqlen_q // 64) * p.group) // m.groups)
        tiles = tiles_head * p.heads_kv * p.batch
        section = max(1, (32 << 20) // (4 * p.seqlen_kv * (p.dim + p.dim_v)))  # heads whose keys fit the L2 cache
        plain = p.program.score is None and p.softmax_scale > 0
        batch, row, head, _ = out.stride()
        factor = p.softmax_scale * launch.LOG2_E if plain else launch.LOG2_E
        noise = abs(p.softmax_scale) * launch.LOG2_E * products.NOISE.value * p.dim**0.5 / products.RESOLVED.value
        numbers = (
            batch, head, row, p.heads_kv, p.group, p.seqlen_q, p.seqlen_kv, tiles_head, tiles, section,
            factor, p.softmax_scale, noise,
        )  # fmt: skip
        kernel = nvrtc.Kernel(
            binary, "hopper_fp32", SIGNATURE + expressions.signature(p.program), 128 * (m.groups + 1), m.shared_bytes
        )
        portable = replace(plan, kernel=fp32_forward.SPEC, tile=Tile(64, 64, 4, 1), cache={})
        return cls(kernel, min(tiles, plan.device.sm_count or 1), numbers, m, portable)

    def start(self, x: Operands, results: Results, pairs: dict[str, Any]) -> None:
        """The launch on pairs."""
        work = hopper_forward.stream_zeros(self.counters, 4, x.q.device)
        maps = (self.map(name, pair.data) for name, pair in pairs.items())
        units = (pair.units.data_ptr() for pair in pairs.values())
        self.kernel.launch(
            self.grid,
            (
                *maps, *units,
                results.out.data_ptr(), results.lse.data_ptr(), 0 if x.sinks is None else x.sinks.data_ptr(),
                work.data_ptr(), results.bad.data_ptr(), *self.numbers,
                *expressions.arguments(x.aux, self.measure.p.program),
            ),
        )  # fmt: skip

    def map(self, name: str, data: torch.Tensor) -> bytes:
        """The tensor map of pairs, (b, s, h, 2 * pitch), as (columns, s, h, b, 2)."""
        address = data.data_ptr()
        found = self.maps.get((name, address))
        if found is None:
            if len(self.maps) > 4096:
                self.maps.clear()
            b, s, h, columns = data.shape
            width, rows = self.measure.widths[name == "v"], 64 if name == "q" else self.measure.block_n
            strides = (*(2 * data.stride(i) if data.shape[i] > 1 else 16 for i in (1, 2, 0)), columns)
            sizes = (columns // 2, s, h, b, 2)
            found = nvrtc.tensor_map(address, "float16", sizes, strides, (width, rows, 1, 1, 1), 2 * width)
            self.maps[name, address] = found
        return found


SPEC = HopperFp32()
