"""The portable backward: recomputation from lse (Dao 2023, algorithm 2) in Triton, without atomics. The host side.

Three kernels, each in a file of its own: `preprocess.py`, `dkdv.py`, `dq.py`. Computing dk and dv apart from dq costs
two more products than adding up dq by atomics would, and gives the same bits in every run. `dbias.py` is a fourth
kernel, for calls whose bias requires a gradient, and `tables.py` has those for other tensors that a score reads.

The plan's tile is that of dk and dv: a program holds block_n keys, its mainloop visits block_m queries at a time. The
tile's `then` is that of dq: a program holds block_m queries, its mainloop visits block_n keys at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from sartor.device import Device
from sartor.features import (
    BF16,
    DROPOUT,
    DROPOUT_PART,
    DROPOUT_STEPS,
    F16,
    F32,
    GENERAL,
    GRADIENTS,
    SHARED_LSE,
    TF32,
    WIDE_OUT,
)
from sartor.kernels.algebra import sink_gradient
from sartor.kernels.room import Room
from sartor.kernels.spec import Gradients, KernelSpec, Operands, Plan, Saved, Tile, legal, length_class
from sartor.kernels.triton import launch
from sartor.kernels.triton import tables as table_gradients
from sartor.problem import Problem, is_copied
from sartor.symbols import empty_like

if launch.available():
    from sartor.kernels.triton import codegen, tiles
    from sartor.kernels.triton.dbias import dbias_kernel
    from sartor.kernels.triton.dkdv import dkdv_kernel
    from sartor.kernels.triton.dq import dq_kernel
    from sartor.kernels.triton.preprocess import preprocess_kernel


def padded_rows(p: Problem) -> int:
    """Elements of a float32 a row, each head's on 64 bytes: see `gradients.row`."""
    return p.batch * p.heads_q * -(-p.seqlen_q // 16) * 16


def rows(room: Room, space: torch.Tensor, name: str, p: Problem) -> torch.Tensor:
    """A float32 a row of the workspace, as (b, hq, sq)."""
    return heads(room.view(space, name)[: padded_rows(p)], p)


def heads(flat: torch.Tensor, p: Problem) -> torch.Tensor:
    """The same of a buffer of its own."""
    return flat.view(p.batch, p.heads_q, -(-p.seqlen_q // 16) * 16)[..., : p.seqlen_q]


def dense_like(t: torch.Tensor) -> torch.Tensor:
    """Room for a gradient, laid out as `t` where that leaves its last dim dense: of one that overlaps it may not."""
    room = empty_like(t)
    return room if room.stride(3) == 1 else torch.empty(t.shape, dtype=t.dtype, device=t.device)


OF_PRODUCTS = (
    GENERAL | GRADIENTS | {WIDE_OUT, SHARED_LSE, DROPOUT, DROPOUT_PART, DROPOUT_STEPS}
)  # whatever is multiplied


@lru_cache(maxsize=1024)
def _alone(spec: TritonBackward, p: Problem, dev: Device) -> frozenset[Tile]:
    """Legal tiles of the first kernel, without the second's; for a class of lengths."""
    return frozenset(Tile(t.block_m, t.block_n, t.warps, t.stages) for t in legal(spec, p, dev))


class Work(NamedTuple):
    """One call: what it reads, what it makes, where."""

    key: tuple[Any, ...]  # of its launches, in the plan's cache
    saved: Saved
    room: Room
    space: torch.Tensor  # the workspace
    made: dict[str, torch.Tensor]  # gradients by name
    pairs: dict[str, Any]
    changed: dict[str, Any]  # for `launch.repeat`
    own: dict[str, dict[str, Any]]


class TritonBackward(KernelSpec):
    """See the module."""

    name = "triton_backward"
    family = "triton"
    features = OF_PRODUCTS | {F16, BF16, F32, TF32}

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """What every Triton kernel needs; this one serves every dense problem."""
        return launch.reasons(p, dev) + table_gradients.reasons(p) or launch.no_tile(self, p, dev)

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """Tiles that fit shared memory and registers, best guess first; dk and dv get the same config as dq."""
        d, dv = (16 * -(-n // 16) for n in (p.dim, p.dim_v))
        small = p.dtype == torch.float32
        most = 140 if small else 160 if launch.only_registers(dev) else 200  # there operands are in registers too
        sizes = (64, 32, 16, 128), (128, 64, 32, 16), (8, 4)
        for some, stepped, held, warps in itertools.product(launch.stage_order(dev, 2, 3, 1), *sizes):
            accumulators = held * (d + dv + 2 * stepped) // (32 * warps)  # float32 registers a thread
            if accumulators > most or held < 16 * warps // 4 or (small and stepped * held > 2048):
                continue
            if not launch.sums_fit(dev, held, self.columns(p, stepped)):
                continue
            for stages in some:
                if self.smem_bytes(p, stepped, held, stages) <= launch.smem_limit(dev):
                    yield Tile(stepped, held, warps, stages, Tile(held, stepped, warps, stages))

    def fits(self, p: Problem, dev: Device, tile: Tile) -> bool:
        """Whether a tuned pair of configs is legal: the one for dk and dv, and the one for dq."""
        alone = _alone(self, length_class(p), dev)
        first = Tile(tile.block_m, tile.block_n, tile.warps, tile.stages)
        swapped = tile.then and Tile(tile.then.block_n, tile.then.block_m, tile.then.warps, tile.then.stages)
        return first in alone and swapped in alone

    def columns(self, p: Problem, stepped: int) -> int:
        """Of 32 bits, of all that products sum up, chunk by chunk, and of the scores that are multiplied."""
        chunks = [tiles.chunks(n) for n in (p.dim, p.dim_v)]
        gradients = sum(width for both in chunks for _, width in both)
        return sum(map(len, chunks)) * stepped + gradients + 2 * stepped * p.dtype.itemsize // 4

    def smem_bytes(self, p: Problem, stepped: int, held: int, stages: int) -> int:
        """Upper estimate of shared memory: the tiles that a program holds; for every stage the tiles that its mainloop
        visits and what mask and score functions read; S and dP."""
        size = p.dtype.itemsize
        d, dv = (16 * -(-n // 16) for n in (p.dim, p.dim_v))
        mods = stages * max(codegen.tile_bytes(p.program, *sides) for sides in ((stepped, held), (held, stepped)))
        scores = 2 * stepped * held * size
        rest = max(scores, mods) if held >= 64 else scores + mods  # wgmma reads dS and P from registers
        if held < 64 and stages == 1:  # a visited tile, loaded to registers, is transposed in shared memory
            rest = max(rest, size * stepped * min(max(d, dv), 256))
        return size * (d + dv) * (held + stages * stepped) + rest

    def shared_bytes(self, plan: Plan) -> int:
        """Shared memory that a block takes, as `smem_bytes` counts it, of the two kernels the one that takes more."""
        t = plan.tile
        assert t is not None
        assert t.then is not None
        dkdv, dq = (t.block_m, t.block_n, t.stages), (t.then.block_n, t.then.block_m, t.then.stages)
        return max(self.smem_bytes(plan.problem, *sizes) for sizes in (dkdv, dq))

    def launches(self, plan: Plan, x: Operands, saved: Saved, work: dict[str, torch.Tensor]) -> list[launch.Launch]:
        """The launches of one call; `work` is `workspace`. Meta tensors will do, for compiling without a GPU."""
        return self.steps(plan, x, saved, work, self.pairs(x, work["dout"]))

    def steps(
        self, plan: Plan, x: Operands, saved: Saved, work: dict[str, torch.Tensor], pairs: dict[str, Any]
    ) -> list[launch.Launch]:
        """`launches`; `pairs` are (hi, lo) copies of the operands, for kernels that take them so."""
        p, tile = plan.problem, plan.tile
        assert tile is not None
        assert tile.then is not None
        shared = self._shared(plan, x, work["dout"], work)
        steps = [self._preprocess(p, saved, work)]
        made = [self._dkdv(p, tile, shared, work), self._dq(p, tile.then, shared, work)]
        for step in reversed(made) if self.gains(p) else made:  # dq sums the weights that dk and dv are made of
            steps += [step, step.repair(plan.device)] if self.marked(p) else [step]
        if p.bias_shape is not None:
            steps.append(self._dbias(p, tile, shared, work))
        return steps + table_gradients.steps(p, tile, shared, work, self.gains(p))

    def _shared(self, plan: Plan, x: Operands, dout: torch.Tensor, work: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The arguments that every kernel of the backward but `preprocess` takes."""
        p, per = plan.problem, launch.unit(x.q, x.k, x.v, dout)
        return launch.common(plan, x) | {
            "q_ptr": x.q, "k_ptr": x.k, "v_ptr": x.v, "dout_ptr": dout,
            "lse_log2_ptr": work["lse_log2"], "delta_ptr": work["delta"], "gain_ptr": work["gain"],
            "q_strides": launch.strides(x.q, per), "k_strides": launch.strides(x.k, per),
            "v_strides": launch.strides(x.v, per), "dout_strides": launch.strides(dout, per),
            "DSCORE": codegen.build(p.program).dscore, "DIM": p.dim, "DIM_V": p.dim_v,
            "CHUNKS": tiles.chunks(p.dim), "CHUNKS_V": tiles.chunks(p.dim_v), "UNIT": per,
        }  # fmt: skip

    def _preprocess(self, p: Problem, saved: Saved, work: dict[str, torch.Tensor]) -> launch.Launch:
        block = 32 if max(p.dim_v, 16) > 128 else 64
        arguments = {
            "out_ptr": saved.out, "dout_ptr": work["dout"], "lse_ptr": saved.lse, "dlse_ptr": work["dlse"],
            "delta_ptr": work["delta"], "lse_log2_ptr": work["lse_log2"],
            "out_strides": launch.strides(saved.out), "dout_strides": launch.strides(work["dout"]),
            "heads_q": p.heads_q, "seqlen_q": p.seqlen_q, "DIM_V": p.dim_v, "CHUNKS_V": tiles.chunks(p.dim_v),
            "DLSE": saved.dlse is not None, "BLOCK": block,
        }  # fmt: skip
        grid = p.batch * p.heads_q * -(-p.seqlen_q // block)
        return launch.Launch(
            "preprocess", preprocess_kernel, grid, launch.in_order(preprocess_kernel, arguments), Tile(block, 1)
        )

    def _dkdv(self, p: Problem, tile: Tile, shared: dict[str, Any], work: dict[str, torch.Tensor]) -> launch.Launch:
        uneven = p.seqlen_q % tile.block_m != 0 or p.seqlen_kv % tile.block_n != 0
        arguments = launch.PLAIN | shared | {
            "MASKED": codegen.masking(p.program, p.program.cols, always=True), "BOUNDED": uneven,
            "dk_ptr": work["dk"], "dv_ptr": work["dv"], "bad_kv_ptr": work["bad_kv"],
            "GAINS": "given" if self.gains(p) else None,
            "dk_strides": launch.strides(work["dk"]), "dv_strides": launch.strides(work["dv"]),
            "COLS": codegen.build(p.program).cols, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        }  # fmt: skip
        grid = p.batch * p.heads_kv * -(-p.seqlen_kv // tile.block_n)
        return launch.Launch("dkdv", dkdv_kernel, grid, launch.in_order(dkdv_kernel, arguments), tile)

    def _dq(self, p: Problem, tile: Tile, shared: dict[str, Any], work: dict[str, torch.Tensor]) -> launch.Launch:
        uneven = p.seqlen_kv % tile.block_n != 0
        # beyond 128 columns a branch makes the compiler wait for every single product
        masked = codegen.masking(p.program, p.program.rows, uneven, always=max(p.dim, p.dim_v) > 128)
        arguments = launch.PLAIN | shared | {
            "MASKED": masked, "BOUNDED": uneven or p.seqlen_q % tile.block_m != 0,
            "dq_ptr": work["dq"], "dq_strides": launch.strides(work["dq"]), "bad_q_ptr": work["bad_q"],
            "sinks_ptr": work["sinks"], "GAINS": self._summed(p),
            "ROWS": codegen.build(p.program).rows, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        }  # fmt: skip
        grid = p.batch * p.heads_q * -(-p.seqlen_q // tile.block_m)
        return launch.Launch("dq", dq_kernel, grid, launch.in_order(dq_kernel, arguments), tile)

    def _dbias(self, p: Problem, tile: Tile, shared: dict[str, Any], work: dict[str, torch.Tensor]) -> launch.Launch:
        assert p.bias_shape is not None
        block_m, block_n = min(tile.block_m, 64), min(tile.block_n, 64)
        over = tuple(n == 1 for n in p.bias_shape)
        uneven = p.seqlen_q % block_m != 0 or p.seqlen_kv % block_n != 0
        arguments = shared | {
            "dbias_ptr": work["dbias"], "BOUNDED": uneven, "OVER": over, "BLOCK_M": block_m, "BLOCK_N": block_n,
            "GAINS": "given" if self.gains(p) else None,
        }  # fmt: skip
        grid = 1
        counts = p.batch, p.heads_q, -(-p.seqlen_q // block_m), -(-p.seqlen_kv // block_n)
        for count, summed in zip(counts, over, strict=True):
            grid *= 1 if summed else count
        return launch.Launch(
            "dbias", dbias_kernel, grid, launch.in_order(dbias_kernel, arguments), replace(tile, stages=1)
        )

    def run(self, plan: Plan, x: Operands, saved: Saved) -> Gradients:
        """dq, dk, dv, dbias, dsinks."""
        w = self.begin(plan, x, saved, "dkdv", "dq")
        if not launch.repeat(w.changed, plan.cache, w.key, w.own):
            launch.run(self.steps(plan, x, w.saved, self.tensors(plan, x, w), w.pairs), plan.cache, w.key)
        return self.gradients(plan, x, w)

    def begin(self, plan: Plan, x: Operands, saved: Saved, *paired: str) -> Work:
        """Room for one call, and where everything is; `paired` are the launches that take pairs."""
        p, saved = plan.problem, self.tidied(plan.problem, saved)
        room: Any = plan.cache.get("room")
        if room is None:
            room = plan.cache["room"] = self.room(p)
        space, made, pairs = room.allocate(x.q.device), self.made(p, x), self.pairs(x, saved.dout)
        changed = codegen.of_call(p, x) | self.changed(saved, made)
        changed |= {f"{name}_ptr": address for name, address in room.addresses(space).items()}
        own = launch.own({"q": x.q, "k": x.k, "v": x.v, "dout": saved.dout}, pairs, *paired)
        own |= table_gradients.own(p, made)
        return Work(launch.key(saved), saved, room, space, made, pairs, changed, own)

    def tensors(self, plan: Plan, x: Operands, w: Work) -> dict[str, torch.Tensor]:
        """What `steps` takes by name, in the room of a call."""
        return w.made | self.buffers(plan.problem, x, w.saved, w.room, w.space)

    def gradients(self, plan: Plan, x: Operands, w: Work) -> Gradients:
        """What a call made."""
        dsinks = None
        if x.sinks is not None:
            dsinks = self._dsinks(plan.problem, x, w)
        dtables = table_gradients.gradients(plan.problem, w.made)
        return Gradients(w.made["dq"], w.made["dk"], w.made["dv"], w.made.get("dbias"), dsinks, dtables)

    def _dsinks(self, p: Problem, x: Operands, w: Work) -> torch.Tensor:
        delta = rows(w.room, w.space, "delta", p)
        if self._summed(p) != "with sinks" or p.program.score is None:
            return sink_gradient(x, w.saved.lse, delta)  # type: ignore[no-any-return]
        high = heads(w.room.view(w.space, "gain")[padded_rows(p) :], p)
        return sink_gradient(x, high, delta, rows(w.room, w.space, "gain", p))  # type: ignore[no-any-return]

    def gains(self, p: Problem) -> bool:
        """Whether a row's weights are divided by their sum, which lse cannot hold beside the row's highest score."""
        return p.program.buries

    def _summed(self, p: Problem) -> str | None:
        if not self.gains(p):
            return None
        return "of more keys" if p.shared_lse else "with sinks" if p.sinks else "summed"

    def marked(self, p: Problem) -> bool:
        """Whether the kernels mark tiles that a second launch computes again."""
        return p.program.keep is not None

    def pairs(self, x: Operands, dout: torch.Tensor) -> dict[str, Any]:
        """Room for operands as (hi, lo) pairs, by name; none here."""
        return {}

    def tidied(self, p: Problem, saved: Saved) -> Saved:
        """With dout as the products want it: the inputs' dtype, dense in the last dim; and dlse dense."""
        dout, dlse = saved.dout, saved.dlse
        dout = dout if dout.dtype == p.dtype else dout.to(p.dtype)
        return saved._replace(
            dout=dout.contiguous() if is_copied(dout) else dout, dlse=None if dlse is None else dlse.contiguous()
        )

    def made(self, p: Problem, x: Operands) -> dict[str, torch.Tensor]:
        """Gradients to fill."""
        made = {"dq": dense_like(x.q), "dk": dense_like(x.k), "dv": dense_like(x.v)}
        if p.bias_shape is not None:
            made["dbias"] = torch.empty(p.bias_shape, dtype=torch.float32, device=x.q.device)
        return made | table_gradients.room(p, x.q.device)

    def room(self, p: Problem) -> Room:
        """For delta, lse in the log2 domain, gains and behind them the rows' highest scores, and a mark a tile, which
        has 16 rows at least."""
        marks = int(self.marked(p))
        return Room.of(
            delta=padded_rows(p),
            lse_log2=padded_rows(p),
            gain=(1 + (p.program.score is not None)) * padded_rows(p) if self.gains(p) else 0,
            bad_q=marks * p.batch * p.heads_q * -(-p.seqlen_q // 16),
            bad_kv=marks * p.batch * p.heads_kv * -(-p.seqlen_kv // 16),
        )

    def changed(self, saved: Saved, made: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The addresses of what a call saved and of what it makes, by the names of arguments."""
        found = {
            "out_ptr": saved.out.data_ptr(), "lse_ptr": saved.lse.data_ptr(), "dout_ptr": saved.dout.data_ptr(),
            "dlse_ptr": 0 if saved.dlse is None else saved.dlse.data_ptr(),
        }  # fmt: skip
        return found | {f"{name}_ptr": tensor.data_ptr() for name, tensor in made.items()}

    def buffers(
        self, p: Problem, x: Operands, saved: Saved, room: Room, space: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """What launches take besides gradients, by name, as tensors; delta stands for what they do not read."""
        work = {name: rows(room, space, name, p) for name in ("delta", "lse_log2")} | {"dout": saved.dout}
        delta = work["delta"]
        work["dlse"] = delta if saved.dlse is None else saved.dlse
        work["gain"] = rows(room, space, "gain", p) if self.gains(p) else delta
        work["sinks"] = delta if x.sinks is None else x.sinks
        for name in ("bad_q", "bad_kv"):
            work[name] = room.view(space, name, dtype=torch.int32) if self.marked(p) else delta
        return work

    def workspace(self, p: Problem, x: Operands, saved: Saved) -> dict[str, torch.Tensor]:
        """All tensors that `launches` takes by name, new ones."""
        room, saved = self.room(p), self.tidied(p, saved)
        return self.made(p, x) | self.buffers(p, x, saved, room, room.allocate(x.q.device))


SPEC = TritonBackward()
