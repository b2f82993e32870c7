"""The backward of fp32_forward.py: backward.py on (hi, lo) pairs of float16.

A first launch writes q, k, v and dout as pairs. dq, then dk and dv are computed from the pairs; dS becomes pairs in
registers, row by row. A tile for which pairs are not accurate enough comes out NaN and is marked; a second launch
computes the marked tiles again from triples of bfloat16. dbias is computed from triples at once: it is as large as a
score matrix in any case.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from sartor.device import Device
from sartor.features import F32
from sartor.kernels.spec import Operands, Plan, Saved, Tile
from sartor.kernels.triton import launch
from sartor.kernels.triton import tables as table_gradients
from sartor.kernels.triton.backward import OF_PRODUCTS, TritonBackward
from sartor.kernels.triton.fp32_forward import COLUMNS, MOST_ROWS, exact, exact_bytes, reasons, widest
from sartor.problem import Problem

if launch.available():
    from sartor.kernels.triton import split, tiles


class Fp32Backward(TritonBackward):
    """See the module."""

    name = "fp32_backward"
    family = "fp32"
    features = OF_PRODUCTS | {F32}

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """As for the forward."""
        return reasons(p, dev) + table_gradients.reasons(p) or launch.no_tile(self, p, dev)

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """Tiles that fit shared memory and registers, best guess first; dk and dv get the same config as dq."""
        d, dv = (16 * -(-n // 16) for n in (p.dim, p.dim_v))
        steps, rows = ((16, 32), (64, 32, 16)) if max(d, dv) > 128 else ((64, 32, 16, 128), (128, 64, 32, 16))
        for some, stepped, held, warps in itertools.product(launch.stage_order(dev, 2, 3, 1), steps, rows, (8, 4)):
            registers = held * (d + dv + min(max(d, dv), 128) + 2 * stepped) // (32 * warps)  # a thread
            if registers > 256 or held < 4 * warps or max(held, stepped) > MOST_ROWS:
                continue
            if dev.arch == 90 and held < 64 and max(d, dv) <= 128:
                continue  # wgmma multiplies 64 rows at a time
            if not launch.sums_fit(dev, held, COLUMNS):
                continue
            for stages in some:
                size = max(self.smem_bytes(p, stepped, held, stages), exact_bytes(p, d + dv, held))
                if size <= launch.smem_limit(dev):
                    yield Tile(stepped, held, warps, stages, Tile(held, stepped, warps, stages))

    def steps(
        self, plan: Plan, x: Operands, saved: Saved, work: dict[str, torch.Tensor], pairs: dict[str, Any]
    ) -> list[launch.Launch]:
        """The launches that write pairs, those that compute from pairs, and those over marked tiles."""
        p, tile, dev = plan.problem, plan.tile, plan.device
        assert tile is not None
        assert tile.then is not None
        sources = {"q": x.q, "k": x.k, "v": x.v, "dout": work["dout"]}
        steps = [split.step(name, sources[name], pair, strict=True) for name, pair in pairs.items()]
        steps.append(self._preprocess(p, saved, work))
        halves = replace(x, q=pairs["q"].data, k=pairs["k"].data, v=pairs["v"].data)
        plain = self._shared(plan, x, work["dout"], work) | exact(p)
        paired = self._shared(plan, halves, pairs["dout"].data, work)
        paired |= {"units": split.units(pairs), "PRECISION": "pairs"}
        for make, fast, slow, most in (  # dq first: it sums the weights that dk and dv are made of
            (self._dq, tile.then, _exact_dq(p, tile.then), widest(p.dim)), (self._dkdv, tile, _exact_dkdv(p, tile), 64)
        ):  # fmt: skip
            first, exact_one = make(p, fast, paired, work), make(p, slow, plain, work).over_marked(dev, "exact")
            steps += [first.changed(CHUNKS=tiles.chunks(p.dim, most), CHUNKS_V=tiles.chunks(p.dim_v, most)), exact_one]
            steps += [exact_one.repair(dev)] if p.program.keep is not None else []
        if p.bias_shape is not None:
            steps.append(self._dbias(p, _exact_dkdv(p, tile), plain, work))
        return steps + table_gradients.steps(p, _exact_dkdv(p, tile), plain, work, self.gains(p))

    def notes(self, p: Problem) -> Iterable[str]:
        """Memory that a call takes besides its results."""
        size = sum(split.nbytes(p.batch, p.seqlen_q, p.heads_q, d) for d in (p.dim, p.dim_v))
        size += sum(split.nbytes(p.batch, p.seqlen_kv, p.heads_kv, d) for d in (p.dim, p.dim_v))
        yield f"the backward splits q, k, v and dout into pairs of float16: {size / 2**20:.1f} MiB beside them"

    def smem_bytes(self, p: Problem, stepped: int, held: int, stages: int) -> int:
        """Upper estimate of shared memory: pairs held and stepped over; score tiles stay in registers."""
        d, dv = (16 * -(-n // 16) for n in (p.dim, p.dim_v))
        return 4 * (d + dv) * (held + stages * stepped) + 8192

    def gains(self, p: Problem) -> bool:
        """Always where the sum of a row's weights over these keys is 1; of more keys lse alone tells it."""
        return p.program.score is not None or not p.shared_lse

    def marked(self, p: Problem) -> bool:
        """Always: tiles for which pairs are not accurate enough are computed again."""
        return True

    def pairs(self, x: Operands, dout: torch.Tensor) -> dict[str, Any]:
        """Room for the pairs of q, k, v and dout."""
        return {name: split.allocate(t) for name, t in (("q", x.q), ("k", x.k), ("v", x.v), ("dout", dout))}


def _exact_dkdv(p: Problem, tile: Tile) -> Tile:
    """The config of the second computation: the same keys, since marks are by tile, and few queries, for registers."""
    return Tile(16, tile.block_n, 8 if tile.block_n >= 128 or max(p.dim, p.dim_v) > 128 else 4, 1)


def _exact_dq(p: Problem, tile: Tile) -> Tile:
    swapped = _exact_dkdv(p, Tile(tile.block_n, tile.block_m))
    return Tile(swapped.block_n, swapped.block_m, swapped.warps, 1)


SPEC = Fp32Backward()
