"""The Hopper forward of float32 on pairs of float16, host side. The kernel is in the .cuh beside.

Two kinds of launch: the one on pairs, in CUDA C++, which splits its operands as it goes and marks the tiles of 64
queries that pairs do not do, and those of `fp32_forward` over what is marked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from sartor import nvrtc
from sartor.device import Device
from sartor.features import F32, GENERAL, GRADIENTS
from sartor.kernels.cuda import brought, expressions, host, pairs
from sartor.kernels.cuda.layout import Layout
from sartor.kernels.cuda.params import LENGTHS, Params, of_lengths, of_strides, strides
from sartor.kernels.hopper import arch
from sartor.kernels.hopper import forward as hopper_forward
from sartor.kernels.spec import KernelSpec, Operands, Plan, Tile, allocate_out
from sartor.kernels.triton import fp32_forward, launch
from sartor.kernels.triton.forward import Results
from sartor.problem import Problem

if launch.available():
    from sartor.kernels.triton import codegen, products, split

PARAMS = Params(
    "hopper_fp32",
    k_map="TensorMap", v_map="TensorMap",  # of pairs
    q="const float*", **strides("q"), k="const float*", **strides("k"), v="const float*", **strides("v"),
    k_pairs="u16*", v_pairs="u16*",  # (batch, heads, seqlen_kv, 2 * pitch)
    units="u64*",  # (batch, heads, key tiles), of k in the low word, of v in the high one; 0 until the pairs are there
    out="void*", lse="float*", sinks="const float*",
    work="int*",  # [next tile, blocks that are done, next item, teams that are done]
    marks="int*",  # one for 64 queries of a head, its last ones first
    **strides("out"), **LENGTHS, tiles_head="int", tiles="int", section="int", first="int",
    factor="float", scale="float", noise="float",
)  # fmt: skip
MAX_DIM_V = 128
FEW_TILES = 8  # a head's query tiles that use up its keys faster than two warps a block split them
SECTION_HEADS = 4  # that are worked on at the same time, at least


class HopperFp32(hopper_forward.HopperForward):
    """See the module."""

    name = "hopper_fp32"
    family = "fp32"
    backwards = ("hopper_fp32_backward", "fp32_backward")
    features = GENERAL | GRADIENTS | {F32}
    any_layout = False

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """What TMA, wgmma and the run-time compiler need, beside what pairs do."""
        why = fp32_forward.reasons(p, dev) + arch.reasons(p, dev)
        if p.dim_v > MAX_DIM_V:
            why.append(f"needs a head dim of v up to {MAX_DIM_V}, twice which registers hold, got {p.dim_v}")
        return why or launch.no_tile(self, p, dev)

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """Tiles that fit shared memory and registers, best guess first."""
        slices = -(-p.seqlen_q // 64) * p.group
        placed = any(set("qk") & set(a.pattern.lower()) or a.dims for a in p.program.aux)
        reads = 32 if placed else 0  # registers, a row or key
        narrow = max(p.dim, p.dim_v) <= 64 and slices > 2 and not reads
        for groups in (1, 2) if slices == 1 else (3, 2, 1) if narrow else (2, 1):
            for block_n in (64, 128, 32, 16):  # a tile's keys share a unit
                for stages in (6, 5, 4, 3, 2):
                    m = Config.of(p, Tile(64 * groups, block_n, 4 * (groups + 1), stages))
                    fits = m.accumulators + reads <= (128 if groups == 3 else 192)
                    if fits and m.shared_bytes <= launch.smem_limit(dev):
                        yield m.tile

    fits = KernelSpec.fits  # of the tiles above, not of the other kernel's

    def config(self, p: Problem, tile: Tile) -> Config:
        """What the kernel is compiled for."""
        return Config.of(p, tile)

    def compile(self, p: Problem, tile: Tile) -> nvrtc.Binary:
        """The kernel compiled for a problem; needs no GPU."""
        m = Config.of(p, tile)
        return arch.build(m, "f16", "hopper/fp32_forward", (m.block_n, m.dim_v), (PARAMS,))

    def run(self, plan: Plan, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """out (b, sq, hq, dv) and lse (b, hq, sq)."""
        p, device = plan.problem, x.q.device
        lse = torch.empty((p.batch, p.heads_q, p.seqlen_q), dtype=torch.float32, device=device)
        marks = torch.empty(p.batch * p.heads_q * -(-p.seqlen_q // 64), dtype=torch.int32, device=device)
        results = Results(allocate_out(p, x.q), lse, marks)
        ready = plan.cache.get("hopper")
        if ready is None:
            binary = self.compile(p, plan.tile)  # type: ignore[arg-type]
            ready = plan.cache["hopper"] = Ready.of(binary, plan, x, results.out)
        assert isinstance(ready, Ready)
        ready.start(x, results)
        if not launch.repeat(codegen.of_call(p, x) | results.addresses(), plan.cache, "marked"):
            launch.run(fp32_forward.SPEC.over_marked(ready.portable, x, results), plan.cache, "marked")
        return results.out, lse

    def notes(self, p: Problem) -> Iterable[str]:
        """Memory that a call takes besides its results."""
        size = sum(split.nbytes(p.batch, p.seqlen_kv, p.heads_kv, d) for d in (p.dim, p.dim_v))
        yield f"the forward splits k and v into pairs of float16: {size / 2**20:.1f} MiB beside them"


class Config(hopper_forward.Config):
    """What the kernel is compiled for: see the head of `fp32_forward.cuh`."""

    @classmethod
    def of(cls, p: Problem, tile: Tile) -> Config:
        """The config of a problem with a tile; a slice is of one head, whose queries share a unit."""
        return replace(super().of(p, tile), rows=64)  # type: ignore[return-value]

    @cached_property
    def near(self) -> tuple[int, ...]:
        """Tensors of pairs, which each warp brings for itself."""
        return brought.tiles(self.p.program) if self.p.aux_on_16_bytes else ()

    @cached_property
    def brings(self) -> bool:
        """No warp of the producer does: they split queries, keys and values."""
        return False

    @property
    def accumulators(self) -> int:
        """Registers a thread: scores, weights twice, output and a tile's share of it."""
        return self.block_n + self.dim_v

    @property
    def section(self) -> int:
        """Heads whose tiles are in flight together: as many as fill 32 MB with keys and values."""
        p = self.p
        fit = (32 << 20) // (4 * p.seqlen_kv * (p.dim + p.dim_v))
        return min(max(SECTION_HEADS, fit), p.batch * p.heads_kv)

    @property
    def held(self) -> int:
        """None: pairs take too many registers."""
        return 0

    @property
    def q_buffers(self) -> int:
        """One: a warpgroup splits its queries when it begins with them."""
        return 1

    def splits_last(self, groups: int) -> bool:
        """Never: few problems would gain."""
        return False

    def num_splits(self, sms: int) -> int:
        """One: who splits float32 does so for all blocks."""
        return 1

    @property
    def keys_once(self) -> int:
        """As many as the tile has: fewer were not timed."""
        return self.block_n

    @property
    def ahead(self) -> bool:
        """Whether the next tile's q is copied beside the last product: a score needs the registers."""
        return self.p.program.score is None

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a row in shared memory, of q and k, and of v."""
        qk, v = super().row_bytes
        return 2 * qk, 2 * v

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of a swizzled chunk of q and k, all of one width, and of v."""
        return host.width(self.p.dim, 96), 0, host.width(self.p.dim_v, 96)

    @property
    def room_bytes(self) -> int:
        """Shared memory in which two warps split a key tile: rows of a power of two columns, or of 128s."""
        wide = max(self.p.dim, self.p.dim_v, 8)
        columns = -(-wide // 128) * 128 if wide > 128 else 1 << (wide - 1).bit_length()
        return max(4 * self.block_n * columns, 1024) + 16

    def laid_out(self, q_buffers: int) -> Layout:
        """With the units of a stage's keys and values, and room for a team that splits."""
        units = -(-8 * self.stages_k // 16) * 16
        spare = 8 * self.stages_k + 16 - units
        return Layout(**super().laid_out(q_buffers).regions, units=units, room=self.room_bytes, spare=spare)

    def defines(self) -> dict[str, Any]:
        """Macros by name."""
        p = self.p
        return super().defines() | {
            "DIM_EXACT": p.dim, "PING_PONG": 0,
            "VECTOR": int(p.rows_on_16_bytes and p.dim % 4 == 0 and p.dim_v % 4 == 0),
            "HUGE_SCORE": f"{products.HUGE.value}f",
        }  # fmt: skip


@dataclass
class Ready:
    """A compiled kernel with what does not change between calls of one key."""

    config: Config
    kernel: nvrtc.Kernel
    grid: int
    maps: tuple[nvrtc.TensorMaps, nvrtc.TensorMaps]  # of the pairs of k, v
    portable: Plan  # of fp32_forward, for the launches that are its

    @classmethod
    def of(cls, binary: nvrtc.Binary, plan: Plan, x: Operands, out: torch.Tensor) -> Ready:
        """Everything the launches of a plan need."""
        p, m = plan.problem, Config.of(plan.problem, plan.tile)  # type: ignore[arg-type]
        sms = plan.device.sm_count or 1
        tiles_head = -(-m.slices // m.groups)
        tiles = tiles_head * p.heads_kv * p.batch
        items = 2 * p.batch * p.heads_kv * -(-p.seqlen_kv // m.block_n)
        first = items if tiles_head < FEW_TILES else min(items, 4 * sms)
        of_k = (p.batch, p.seqlen_kv, p.heads_kv)
        fixed: dict[str, Any] = of_lengths(p)
        for name, t in {"q": x.q, "k": x.k, "v": x.v, "out": out}.items():
            fixed |= of_strides(name, launch.strides(t))
        scaled = fp32_forward.regained(p)
        fixed |= {
            "tiles_head": tiles_head, "tiles": tiles, "section": m.section, "first": first,
            "factor": scaled["factor"], "scale": scaled["scale"], "noise": pairs.noise(p),
        }  # fmt: skip
        params = expressions.passed(PARAMS, p.program)
        kernel = nvrtc.Kernel(binary, params, arch.WARPGROUP * (m.groups + 1), m.shared_bytes, fixed)
        return cls(
            m, kernel, min(sms, max(tiles, items)),
            (pairs.maps(of_k, p.dim, m.block_n, m.widths[0]), pairs.maps(of_k, p.dim_v, m.block_n, m.widths[2])),
            replace(plan, kernel=fp32_forward.SPEC, tile=Tile(64, 64, 4, 1), cache={}),
        )  # fmt: skip

    def start(self, x: Operands, results: Results) -> None:
        """The launch on pairs."""
        p, device = self.config.p, x.q.device
        heads, tiles = p.batch * p.heads_kv, -(-p.seqlen_kv // self.config.block_n)
        k, v = (
            torch.empty(heads * p.seqlen_kv * 2 * split.pitch(d), dtype=torch.float16, device=device)
            for d in (p.dim, p.dim_v)
        )
        units = torch.zeros(heads * tiles, dtype=torch.int64, device=device)
        work = host.workspace(device)
        tensors = {
            "q": x.q, "k": x.k, "v": x.v, "k_pairs": k, "v_pairs": v, "units": units,
            "out": results.out, "lse": results.lse, "work": work, "marks": results.bad,
        }  # fmt: skip
        values: dict[str, Any] = {name: t.data_ptr() for name, t in tensors.items()}
        values |= {"k_map": self.maps[0][values["k_pairs"]], "v_map": self.maps[1][values["v_pairs"]]}
        values["sinks"] = 0 if x.sinks is None else x.sinks.data_ptr()
        self.kernel.launch(self.grid, values | expressions.arguments(x.aux, p.program))


SPEC = HopperFp32()
