"""The portable forward of float32 inputs at float32 accuracy on tensor cores: forward.py on pairs of float16.

Three kinds of launch, between which the host waits for nothing. The first writes q, k and v as pairs (split.py). The
second computes every tile from the pairs (products.py), and marks a tile whose result is not finite, or whose
scores the pairs do not resolve. The third computes the marked tiles, mostly none, again from the tensors themselves,
by triples of bfloat16 that the compiler makes: six products instead of three, with the range of float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sartor.device import Device
from sartor.features import F32, GRADIENTS
from sartor.kernels.spec import Operands, Plan, Tile
from sartor.kernels.triton import launch
from sartor.kernels.triton.forward import OF_PRODUCTS, Results, TritonForward
from sartor.problem import Problem

if launch.available():
    from sartor.kernels.triton import codegen, products, split, tiles

MOST_DIM = 256
COLUMNS = 592  # that sums of triples take in tensor memory, at least
MOST_ROWS = 128  # of a tile: no more than a segment of split.py


def reasons(p: Problem, dev: Device) -> list[str]:
    """Why pairs cannot serve a problem, forward or backward."""
    why = launch.reasons(p, dev)
    if p.seqlen_kv == 1:
        why.append("needs more than one key: the output of one is its value, to the bit")
    if max(p.dim, p.dim_v) > MOST_DIM:
        why.append(f"needs head dims <= {MOST_DIM}, got {p.dim} and {p.dim_v}")
    return why


def widest(dim: int) -> int:
    """Most columns of a chunk: a product of pairs has registers of its own besides the sum it is added to."""
    return 128 if dim <= 128 else 64


class Fp32Forward(TritonForward):
    """See the module."""

    name = "fp32_forward"
    family = "fp32"
    backwards = ("fp32_backward",)
    features = OF_PRODUCTS | GRADIENTS | {F32}

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """float32 inputs whose products are to be as accurate, on any GPU that Triton serves."""
        return reasons(p, dev) or launch.no_tile(self, p, dev)

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """Tiles that fit shared memory and registers, best guess first."""
        wide = 16 * -(-max(p.dim, p.dim_v) // 16)
        rows, keys = ((64, 32, 16), (16, 32)) if wide > 128 else ((128, 64, 32, 16), (64, 32, 128, 16))
        for some, block_m, block_n, warps in itertools.product(launch.stage_order(dev, 2, 3, 1), rows, keys, (8, 4)):
            registers = block_m * (wide + min(wide, widest(wide)) + 2 * block_n) // (32 * warps)  # a thread
            if registers > 230 or block_m < 8 * warps:
                continue
            if dev.arch == 90 and block_m < 64:
                continue  # wgmma multiplies 64 rows at a time
            if not launch.sums_fit(dev, block_m, COLUMNS):
                continue
            for stages in some:
                size = self.smem_bytes(p, block_m, block_n, stages, warps) - held_bytes(p, dev, block_m)
                if max(size, exact_bytes(p, p.dim, block_m)) <= launch.smem_limit(dev):
                    yield Tile(block_m, block_n, warps, stages)

    def smem_bytes(self, p: Problem, block_m: int, block_n: int, stages: int, warps: int = 4) -> int:
        """Upper estimate of shared memory: a pair is as large as a float32; and what the marks are reduced in."""
        return super().smem_bytes(p, block_m, block_n, stages, warps) + 1024

    def shared_bytes(self, plan: Plan) -> int:
        """Less what is in registers."""
        assert plan.tile is not None
        return super().shared_bytes(plan) - held_bytes(plan.problem, plan.device, plan.tile.block_m)

    def steps(self, plan: Plan, x: Operands, results: Results, pairs: dict[str, Any]) -> list[launch.Launch]:
        """The launches that write pairs, the one that computes from them, and those over the tiles that it marked."""
        p, tile = plan.problem, plan.tile
        assert tile is not None
        halves = replace(x, q=pairs["q"].data, k=pairs["k"].data, v=pairs["v"].data)
        first = self.step("forward", plan, tile, halves, results)
        chunks = tiles.chunks(p.dim_v, widest(p.dim_v))
        first = first.changed(units=split.units(pairs), PRECISION="pairs", CHUNKS_V=chunks, **regained(p))
        splits = [split.step(name, getattr(x, name), pair, name == "v") for name, pair in pairs.items()]
        return [*splits, first, *self.over_marked(plan, x, results)]

    def over_marked(self, plan: Plan, x: Operands, results: Results) -> list[launch.Launch]:
        """The launches over what was marked."""
        p, tile, dev = plan.problem, plan.tile, plan.device
        assert tile is not None
        step = self.step("forward", plan, exact_tile(p, tile), x, results).over_marked(dev, "exact", **exact(p))
        return [step, step.repair(dev)] if p.program.keep is not None else [step]

    def notes(self, p: Problem) -> Iterable[str]:
        """Memory that a call takes besides its results."""
        size = split.nbytes(p.batch, p.seqlen_q, p.heads_q, p.dim)
        size += sum(split.nbytes(p.batch, p.seqlen_kv, p.heads_kv, d) for d in (p.dim, p.dim_v))
        yield f"the forward splits q, k and v into pairs of float16: {size / 2**20:.1f} MiB beside them"

    def marked(self, p: Problem) -> bool:
        """Always: tiles for which pairs are not accurate enough are computed again."""
        return True

    def pairs(self, x: Operands) -> dict[str, Any]:
        """Room for the pairs of q, k and v."""
        return {"q": split.allocate(x.q), "k": split.allocate(x.k), "v": split.allocate(x.v)}


def regained(p: Problem) -> dict[str, Any]:
    """Arguments of a launch on pairs: the scale of scores, with what tensor cores cut off them."""
    scale = p.softmax_scale * split.regained(p.dim)
    return {"scale": scale, "factor": launch.factor(p, scale)}


def exact(p: Problem) -> dict[str, Any]:
    """Arguments of the second computation: triples, where Triton makes them; few columns to a chunk, see `dot_nt`."""
    from triton.backends.nvidia.compiler import CUDAOptions

    if launch.interpreted() or "bf16x6" not in CUDAOptions.allowed_dot_input_precisions:
        return {}
    most = 32 if max(p.dim, p.dim_v) <= 128 else 64
    return {"PRECISION": "bf16x6", "CHUNKS": tiles.chunks(p.dim, most), "CHUNKS_V": tiles.chunks(p.dim_v, most)}


def held_bytes(p: Problem, dev: Device, rows: int) -> int:
    """Shared memory that hi of the queries does not take, where wgmma reads it from registers."""
    return 2 * rows * p.dim if dev.arch == 90 and products.holds(p.dim, p.dim_v) else 0


def exact_bytes(p: Problem, dims: int, rows: int) -> int:
    """Upper estimate of the second computation's shared memory: triples of what it holds, chunks of what it visits, and
    what mods read."""
    return 6 * 16 * -(-dims // 16) * rows + 8192 + codegen.tile_bytes(p.program, rows, 32)


def exact_tile(p: Problem, tile: Tile) -> Tile:
    """The config of the second computation: the same rows, since marks are by tile, and few keys, to save registers."""
    return Tile(tile.block_m, 16 if p.dim > 128 else 32, max(tile.warps, tile.block_m // 16), 1)


SPEC = Fp32Forward()
