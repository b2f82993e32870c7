"""The Hopper forward, host side: which problems, which measure, tensor maps, launch. The kernel is in the .cuh beside.

A masked key whose value is NaN reaches its row through 0 * NaN. A tile of a masked problem that comes out non-finite is
marked, and a second launch, `hopper_repair.cuh`, computes marked tiles again with care.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sartor import nvrtc
from sartor.device import Device
from sartor.kernels.cuda import expressions, wgmma
from sartor.kernels.parts import launch
from sartor.kernels.spec import Operands, Plan, Tile, allocate_out
from sartor.problem import Problem, name_of

FOLDER = Path(__file__).parent
SHELVES = ("expressions", "softmax", "wgmma")
SIGNATURE = "MMMPPPPqqqiiiiiiiff"  # of the kernel, before the aux values
REPAIR_SIGNATURE = "PqqqPqqqPqqqPPPPqqqiiiiif"
REPAIR_THREADS = 128
MAX_DIM = 256
SECTION_BYTES = 32 << 20  # of keys and values that tiles in flight share, within the L2 cache
MARKS = 4  # where they begin in the workspace, after the scheduler's counters


class HopperForward:
    """See the module."""

    name = "hopper_forward"
    family = "hopper"
    backwards = ("triton_backward",)

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """What TMA, wgmma and the run-time compiler need."""
        why = reasons(p, dev)
        if p.dtype not in (torch.float16, torch.bfloat16):
            why.append(f"needs float16 or bfloat16, got {p.dtype}")
        if max(p.dim, p.dim_v) > MAX_DIM:
            why.append(f"needs head dims up to {MAX_DIM}, got {p.dim} and {p.dim_v}")
        if not p.rows_on_16_bytes and p.dim % 8 == 0 and p.dim_v % 8 == 0:
            why.append("needs rows of q, k and v that start on 16 bytes, got strides or addresses that do not")
        return why

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """Tiles that fit shared memory and registers, best guess first."""
        measures = (Measure.of(p, Tile(64 * g, n, 4 * (g + 1), s)) for g, n, s in _grid(p))
        for m in measures:
            if m.accumulators <= (128 if m.groups == 3 else 192) and m.shared_bytes <= launch.room(dev):
                yield m.tile

    def shared_bytes(self, plan: Plan) -> int:
        """Dynamic shared memory a block takes."""
        assert plan.tile is not None
        return Measure.of(plan.problem, plan.tile).shared_bytes

    def compile(self, p: Problem, tile: Tile) -> nvrtc.Binary:
        """The kernel cut to a problem; needs no GPU."""
        files = ["hopper_forward", "hopper_repair"] if p.program.keep is not None else ["hopper_forward"]
        return build(Measure.of(p, tile), "bf16" if p.dtype == torch.bfloat16 else "f16", files)

    def run(self, plan: Plan, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """out (b, sq, hq, dv) and lse (b, hq, sq)."""
        p = plan.problem
        out = allocate_out(p, x.q)
        lse = torch.empty((p.batch, p.heads_q, p.seqlen_q), dtype=torch.float32, device=x.q.device)
        if x.q.device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(x.q.device):
                self._launch(plan, x, out, lse)
        else:
            self._launch(plan, x, out, lse)
        return out, lse

    def _launch(self, plan: Plan, x: Operands, out: torch.Tensor, lse: torch.Tensor) -> None:
        ready = plan.cache.get("hopper")
        if ready is None:
            ready = plan.cache["hopper"] = Ready.of(self.compile(plan.problem, plan.tile), plan, x, out)  # type: ignore[arg-type]
        assert isinstance(ready, Ready)
        q, k, v = (_padded(t) for t in (x.q, x.k, x.v))
        work = None if ready.repair is None else stream_zeros(ready.spaces, MARKS + ready.measure.marks, x.q.device)
        results = (
            out.data_ptr(), lse.data_ptr(), 0 if x.sinks is None else x.sinks.data_ptr(),
            0 if work is None else work.data_ptr(),
        )  # fmt: skip
        aux = expressions.arguments(x.aux, plan.problem.program) if x.aux else ()
        maps = ready.map("q", q), ready.map("k", k), ready.map("v", v)
        ready.kernel.launch(ready.grid, (*maps, *results, *ready.numbers, *aux))
        if ready.repair is not None:
            places = (q.data_ptr(), *ready.strides[0], k.data_ptr(), *ready.strides[1], v.data_ptr(), *ready.strides[2])
            ready.repair.launch(ready.repair_grid, (*places, *results, *ready.repair_numbers, *aux))


def reasons(p: Problem, dev: Device) -> list[str]:
    """What every kernel of this kind needs of the machine, the lengths and what the mods read."""
    why = []
    if dev.arch != 90:
        why.append(f"needs compute capability 9.0, {dev.name} has {dev.arch // 10}.{dev.arch % 10}")
    elif nvrtc.missing():
        why.append(nvrtc.missing())
    if p.empty:
        why.append(f"needs a query and a key, got batch {p.batch}, {p.seqlen_q} queries, {p.seqlen_kv} keys")
    unknown = sorted({a.dtype for a in p.program.aux if a.dtype} - set(expressions.TYPES))
    return [*why, *(f"needs masks and scores that read a dtype CUDA C++ has, got {dtype}" for dtype in unknown)]


def build(m: Measure, dtype: str, files: list[str]) -> nvrtc.Binary:
    """Compile kernels, `files` in this folder, with a measure, the mods of its problem, and products of `dtype`."""
    text = "\n".join([
        *(f'#include "cuda/{shelf}.cuh"' for shelf in SHELVES),
        *(f"#define {name} {value}" for name, value in m.defines().items()),
        expressions.source(m.p.program),
        wgmma.wrappers((m.block_n, m.dim_v), dtype),
        *(f'#include "{file}.cuh"' for file in files),
    ])  # fmt: skip
    return nvrtc.compile(text, arch="sm_90a", include=FOLDER, name=f"{files[0]}.cu")


def stream_zeros(kept: dict[int, torch.Tensor], size: int, device: torch.device) -> torch.Tensor:
    """int32 zeros that every launch leaves as zeros: one a stream, in `kept`, since launches on different streams may
    overlap. A captured graph has its own, which the graph clears."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(size, dtype=torch.int32, device=device)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if stream not in kept:
        kept[stream] = torch.zeros(size, dtype=torch.int32, device=device)
    return kept[stream]


def _grid(p: Problem) -> Iterable[tuple[int, int, int]]:
    """(consumer warpgroups, keys a tile, stages), best guess first."""
    wide = max(p.dim, p.dim_v)
    slices = -(-p.seqlen_q // 64) * p.group
    groups = (1, 2, 3) if slices == 1 else (3, 2, 1) if wide <= 80 else (2, 1)
    widths = (64, 80, 96, 48, 32, 16) if wide > 176 else (128, 112, 96, 80, 64, 192, 176, 160, 144, 48, 32, 16)
    return ((g, n, s) for g in groups for n in widths for s in (6, 5, 4, 3, 2))


def _padded(t: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dim a multiple of 8: itself, or a copy with up to 7 columns of zeros."""
    missing = -t.shape[3] % 8
    return torch.nn.functional.pad(t, (0, missing)) if missing else t


def _width(dim: int) -> int:
    """Columns of a swizzled chunk, for a head dim: the widest that fills up; the widest of all where many narrow ones
    would be needed, or where rows do not start on 32 bytes, which narrow copies feel most."""
    columns = -(-dim // 16) * 16
    if columns % 64 == 0 or dim % 16 or (columns > 96 and columns % 32):
        return 64
    return 32 if columns % 32 == 0 else 16


@dataclass(frozen=True)
class Measure:
    """What the kernel is cut to, beyond the problem: see the head of `hopper_forward.cuh`. A tile's stages are key and
    value tiles together, the odd one for keys: they stay longer, for tiles that are done again."""

    p: Problem
    tile: Tile
    groups: int
    block_n: int
    dim: int  # rounded up to 16, as dim_v is: products of 8 columns more take as long as of 16, or longer
    dim_v: int
    rows: int
    stages_k: int
    stages_v: int

    @classmethod
    def of(cls, p: Problem, tile: Tile) -> Measure:
        """The measure of a problem with a tile."""
        rows = 64  # fewer queries than half of that: heads that share keys share a slice
        while p.group > 1 and rows >= 2 * max(p.seqlen_q, 1) and 64 // rows < p.group:
            rows //= 2
        return cls(
            p, tile, tile.block_m // 64, tile.block_n, -(-p.dim // 16) * 16, -(-p.dim_v // 16) * 16, rows,
            -(-tile.stages // 2), tile.stages // 2,
        )  # fmt: skip

    @property
    def marks(self) -> int:
        """Tiles that may need repair: 64 queries of a head each."""
        return self.p.batch * self.p.heads_q * -(-self.p.seqlen_q // 64)

    @property
    def steps(self) -> int:
        """Products of 16 columns in q k^T."""
        return self.dim // 16

    @property
    def accumulators(self) -> int:
        """Registers a thread: scores, weights, output."""
        return self.block_n // 2 + self.block_n // 4 + self.dim_v // 2

    @property
    def q_registers(self) -> bool:
        """Whether q is kept in registers."""
        return self.groups < 3 and self.accumulators + 4 * self.steps <= 192

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of a swizzled chunk, of q and k, and of v."""
        return _width(self.p.dim), _width(self.p.dim_v)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a row in shared memory, of q and k, and of v."""
        w, wv = self.widths
        return 2 * w * -(-self.dim // w), 2 * wv * -(-self.dim_v // wv)

    @property
    def q_buffers(self) -> int:
        """Two where the next tile's q would have to wait for this one's products, and there is room."""
        two = not self.q_registers and self._bytes(2) <= 227 << 10
        return 2 if two else 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block: tiles, barriers, jobs, and room to begin on 1024 bytes."""
        return self._bytes(self.q_buffers)

    def _bytes(self, q_buffers: int) -> int:
        qk, v = self.row_bytes
        tiles = q_buffers * 64 * self.groups * qk + self.block_n * (self.stages_k * qk + self.stages_v * v)
        pairs = self.stages_k + self.stages_v + 2 + q_buffers * self.groups
        return tiles + 16 * pairs + 2 * (16 + 16 * self.groups) + 1024

    def defines(self) -> dict[str, Any]:
        """Macros by name."""
        p, program = self.p, self.p.program
        mask = 0 if program.keep is None else 1 if expressions.is_interval(program) else 2
        return {
            "DIM": self.dim, "DIM_V": self.dim_v, "DIM_EXACT": -(-p.dim // 8) * 8, "COLUMNS": p.dim_v,
            "WIDTH": self.widths[0], "WIDTH_V": self.widths[1],
            "GROUPS": self.groups, "BLOCK_N": self.block_n, "STAGES_K": self.stages_k, "STAGES_V": self.stages_v,
            "Q_BUFFERS": self.q_buffers, "Q_REGISTERS": int(self.q_registers), "ROWS": self.rows,
            "MASK": mask, "LOWER": int(mask == 2 or expressions.has_lower_end(program)), "MARK": int(mask > 0),
            "SCORE": int(program.score is not None), "PRESCALE": int(p.softmax_scale <= 0), "SINKS": int(p.sinks),
            "BALANCED": int(mask > 0), "RAGGED": int(p.seqlen_kv % self.block_n != 0),
            "TURNS": int(self.groups > 1 and not self.q_registers),
            "BF16": int(p.dtype == torch.bfloat16), "WIDE": int(p.out_dtype == torch.float32),
        }  # fmt: skip


@dataclass
class Ready:
    """Compiled kernels with what does not change between calls of one key."""

    measure: Measure
    kernel: nvrtc.Kernel
    grid: int
    numbers: tuple[Any, ...]
    repair: nvrtc.Kernel | None
    repair_grid: int
    repair_numbers: tuple[Any, ...]
    strides: tuple[tuple[int, int, int], ...]  # of q, k, v: batch, head, row
    maps: dict[tuple[str, int], bytes] = field(default_factory=dict)
    spaces: dict[int, torch.Tensor] = field(default_factory=dict)  # the scheduler's counters and the marks

    @classmethod
    def of(cls, binary: nvrtc.Binary, plan: Plan, x: Operands, out: torch.Tensor) -> Ready:
        """Everything the launches of a plan need."""
        p, m = plan.problem, Measure.of(plan.problem, plan.tile)  # type: ignore[arg-type]
        slices = -(-p.seqlen_q // m.rows) * -(-p.group // (64 // m.rows))
        tiles_head = -(-slices // m.groups)
        tiles = tiles_head * p.heads_kv * p.batch
        head_bytes = 2 * p.seqlen_kv * (p.dim + p.dim_v)
        section = p.heads_kv * p.batch if p.dim > 128 else max(1, SECTION_BYTES // head_bytes)
        plain = p.program.score is None and p.softmax_scale > 0
        factor = p.softmax_scale * launch.LOG2_E if plain else launch.LOG2_E
        shape = (*launch.strides(out), p.heads_kv, p.group, p.seqlen_q, p.seqlen_kv)
        letters, sms = expressions.signature(p.program), plan.device.sm_count or 1
        kernel = nvrtc.Kernel(binary, "hopper_forward", SIGNATURE + letters, 128 * (m.groups + 1), m.shared_bytes)
        repair = None
        if p.program.keep is not None:
            repair = nvrtc.Kernel(binary, "hopper_repair", REPAIR_SIGNATURE + letters, REPAIR_THREADS)
        return cls(
            m, kernel, min(tiles, sms), (*shape, tiles_head, tiles, section, factor, p.softmax_scale),
            repair, min(m.marks, 4 * sms), (*shape, m.marks, p.softmax_scale),
            tuple(launch.strides(_padded(t)) for t in (x.q, x.k, x.v)),
        )  # fmt: skip

    def map(self, name: str, t: torch.Tensor) -> bytes:
        """The tensor map of an operand; its shape and strides are the plan's, so its address names it."""
        address = t.data_ptr()
        found = self.maps.get((name, address))
        if found is None:
            if len(self.maps) > 4096:
                self.maps.clear()
            found = self.maps[name, address] = self._encode(name, t)
        return found

    def _encode(self, name: str, t: torch.Tensor) -> bytes:
        m = self.measure
        b, s, h, d = t.shape
        width = m.widths[name == "v"]
        rows, heads = (m.rows, 64 // m.rows) if name == "q" else (m.block_n, 1)
        strides = tuple(2 * t.stride(i) if t.shape[i] > 1 else 16 for i in (1, 2, 0))
        return nvrtc.tensor_map(
            t.data_ptr(), name_of(t.dtype), (d, s, h, b), strides, (width, rows, heads, 1), 2 * width
        )  # fmt: skip


SPEC = HopperForward()
