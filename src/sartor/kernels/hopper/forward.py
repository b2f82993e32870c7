"""The Hopper forward, host side: which problems, which config, tensor maps, launch. The kernel is in the .cuh beside.

A masked key whose value is NaN reaches its row through 0 * NaN. Rows of a masked problem that come out non-finite are
marked, and computed again with care at the end (`repair.cuh`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from struct import Struct
from typing import Any, cast

import torch

from sartor import nvrtc
from sartor.device import Device, capturing
from sartor.features import BITS_16, DROPOUT, GENERAL, GRADIENTS
from sartor.kernels import blocks, dropout
from sartor.kernels.blocks import Blocks
from sartor.kernels.cuda import brought, expressions, host
from sartor.kernels.cuda.layout import Layout
from sartor.kernels.cuda.params import DROPOUT as DROPOUT_NUMBERS
from sartor.kernels.cuda.params import LENGTHS, Params, of_lengths, of_strides, strides
from sartor.kernels.cuda.row import Part, Row
from sartor.kernels.hopper import arch
from sartor.kernels.hopper.backward_problem import change
from sartor.kernels.hopper.schedule import Schedule
from sartor.kernels.spec import Again, KernelSpec, Operands, Plan, Tile, allocate_out
from sartor.kernels.triton import launch
from sartor.mods.recent import Recent
from sartor.problem import Problem, changed, rows_on_16_bytes, without_gaps
from sartor.replay.lists import At, Made, Mapped, Record

PARAMS = Params(
    "hopper_forward",
    q_map="TwoMaps", k_map="TwoMaps", v_map="TensorMap",
    out_map="TensorMap",  # of a warp's 16 rows, where the copy engine stores them
    inputs="Inputs",  # what rows that are computed again are read from
    out="void*", lse="float*",  # (batch, heads, seqlen_q), or null; of a KV split its highest score and its sum instead
    sinks="const float*",  # (heads,)
    work="int*",  # [next tile, blocks that are done, -, -], marks
    **strides("out"), **LENGTHS,
    tiles_head="int", tiles="int", section="int", whole="int", splits="int", width="int",
    factor="float", scale="float",
)  # fmt: skip
DROPOUT_PARAMS = PARAMS.followed_by(DROPOUT_NUMBERS)
MERGE_PARAMS = Params(
    "hopper_merge",
    outs="const float*", sums="const float*",  # of KV splits
    out="void*", lse="float*", sinks="const float*", **strides("out"),
    heads="int", seqlen_q="int", num_splits="int", wide="int",
)  # fmt: skip
MERGE_COLUMNS = 128  # a thread a column
PROMOTION = 128  # bytes, a row of a chunk: to fetch what lies beside it is a quarter more for L2 to read
LISTED = PARAMS.followed_by(blocks.PARAMETERS)
INPUTS = Struct("=QqqqQqqqQqqq")  # of q, k and v: address, strides of batch, head and row
MAX_DIM, MAX_DROPOUT = 256, 160  # beyond the latter, drawers leave two warpgroups too few registers for a product
SHARERS = 8  # heads, of all batch items, that read the same tiles at the same time, about so many
DRAWN_STAGES = 2  # with dropout, of bits that say which weights stay
LISTED_DIMS = (64, 128)  # for which the kernel is cut to walk a list of key tiles


class HopperForward(KernelSpec):
    """See the module."""

    name = "hopper_forward"
    family = "hopper"
    replays = True
    backwards: tuple[str, ...] = ("hopper_wide_backward", "hopper_backward", "triton_backward")
    features = GENERAL | BITS_16 | GRADIENTS | {DROPOUT}
    any_layout = True

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """What TMA, wgmma and the run-time compiler need."""
        why = arch.reasons(p, dev)
        if max(p.dim, p.dim_v) > MAX_DIM:
            why.append(f"needs head dims up to {MAX_DIM}, got {p.dim} and {p.dim_v}")
        elif p.dropout_p and max(p.dim, p.dim_v) > MAX_DROPOUT:
            why.append(f"needs head dims up to {MAX_DROPOUT} with dropout, got {p.dim} and {p.dim_v}")
        if not p.rows_on_16_bytes and p.dim % 8 == 0 and p.dim_v % 8 == 0:
            why.append("needs rows of q, k and v that start on 16 bytes, got strides or addresses that do not")
        return why or launch.no_tile(self, p, dev)

    def config(self, p: Problem, tile: Tile) -> Config:
        """What the kernel is compiled for."""
        return _config(p, tile)

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """Tiles that fit shared memory and registers, best guess first."""
        found = (_tile(p, *of) for of in _grid(p))
        return (tile for tile in found if self.config(p, tile).fits(dev))

    def fits(self, p: Problem, dev: Device, tile: Tile) -> bool:
        """The same of one tile, without a look at the others."""
        of = tile.block_m // 64, tile.block_n, tile.stages
        return of in _grid(p) and tile == _tile(p, *of) and self.config(p, tile).fits(dev)

    def suited(self, p: Problem, dev: Device, tile: Tile) -> Tile:
        """The tile with fewer queries, where few tiles leave SMs idle, or several KV splits."""
        return self.config(p, tile).suited(dev)

    def shared_bytes(self, plan: Plan) -> int:
        """Dynamic shared memory a block takes."""
        assert plan.tile is not None
        return self.config(plan.problem, plan.tile).shared_bytes

    def compile(self, p: Problem, tile: Tile) -> nvrtc.Binary:
        """The kernel cut to a problem; needs no GPU."""
        return compiled(self.config(p, tile))

    def run(self, plan: Plan, x: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out, (b, sq, hq, dv) or in the layout of `x`, and lse (b, hq, sq)."""
        ready: Any = plan.cache.get(x.layout)  # copies of padded rows lie as their layout has it
        if ready is None:
            ready = self.ready(plan, x)
        return ready.run(x)  # type: ignore[no-any-return]

    def again(self, plan: Plan, *data: Any) -> Again | None:
        """See `KernelSpec`."""
        ready: Any = plan.cache.get(data[0].layout)
        if ready is None or not ready.alone:
            return None
        return self.repeated(ready.row.launches(), ready.lse.device, *ready.numbers)

    def symbolic(self, plan: Plan, *data: Any) -> tuple[Row, tuple[Any, ...], list[Any]] | None:
        """See `KernelSpec`."""
        ready = self.ready(plan, *data)
        return (ready.row, ready.numbers, []) if ready.alone else None

    def repeated(self, launches: Any, device: torch.device, *numbers: Any) -> Again:
        """See `KernelSpec`."""
        marks, space, *shape = numbers
        found = Alone(launches, device, tuple(shape), marks, space)
        return Again(found.run, launches, space, shared=None if marks is None else found.workspace)

    def behind(self, plan: Plan) -> Ready | None:
        """See `KernelSpec`."""
        ready, p = plan.cache.get("bshd"), plan.problem
        if not isinstance(ready, Ready) or p.copies or ready.pads or p.sinks or p.dropout_p or _may_list(p):
            return None
        return ready

    def ready(self, plan: Plan, x: Operands) -> Ready:
        """The launches of a plan: over a list of key tiles, where there is to be one. While a graph is captured none is
        made, and launches without, where there should be one, are not kept."""
        p, tile = plan.problem, cast(Tile, plan.tile)
        listed, found = self.listed(p, tile), None
        if listed is not None:
            found = blocks.of(p, x.aux, blocks.Cut(False, listed.block_n, listed.block_m // 64), x.q.device)
        if listed is not None and found is not None:
            m = replace(self.config(p, listed), listed=True)
            made = Ready.of(compiled(m), m, plan.device, x, found)
        else:
            m = _informed(self.config(p, tile))
            made = Ready.of(self.compile(p, tile), m, plan.device, x)
        if listed is None or found is not None or not capturing(x.q.device):
            plan.cache[x.layout] = made
        return made

    def listed(self, p: Problem, tile: Tile) -> Tile | None:
        """The tile with which the kernel walks a list of key tiles, where it does: it has as many keys as a thread has
        bits for, or half, where a score that reads tensors takes registers, and as many queries as they allow."""
        if not _may_list(p):
            return None
        groups = min(tile.block_m // 64, 3 if p.dim <= 64 and p.program.score is None else 2)
        keys = blocks.WIDEST // 2 if any(a.dtype for a in p.program.aux) else blocks.WIDEST
        return Tile(64 * groups, keys, 4 * (groups + 1), 6)

    def notes(self, p: Problem) -> Iterable[str]:
        """What is known of the list of key tiles, where there may be one; and how what pairs read is."""
        if _may_list(p):
            yield f"forward: {blocks.told(p, by_key=False)}"
        pairs, strips = brought.tiles(p.program), brought.strips(p.program)
        if pairs and p.aux_on_16_bytes:
            yield "forward: what is read for every pair is brought to shared memory, ahead of the products"
        elif pairs:
            yield "forward: what is read for every pair is read in place, as its rows do not start on 16 bytes"
        if strips:
            where = "brought to shared memory as strips" if _rows(p) == 64 else "read in place, as heads share a tile"
            yield f"forward: what is read at a distance of query and key is {where}"


def compiled(m: Config) -> nvrtc.Binary:
    """The kernel of a config; needs no GPU."""
    dtype = "bf16" if m.p.dtype == torch.bfloat16 else "f16"
    return arch.build(m, dtype, "hopper/forward", (m.block_n, m.dim_v), (m.params, MERGE_PARAMS))


def _may_list(p: Problem) -> bool:
    """Whether the kernel is cut to walk a list of key tiles, and each slice is of one head."""
    return (
        blocks.serves(p) and p.dim == p.dim_v and p.dim in LISTED_DIMS and not _near(p, listed=True) and _rows(p) == 64
    )


def _near(p: Problem, listed: bool = False) -> tuple[int, ...]:
    """The aux values that are brought to shared memory tile by tile: tensors of pairs, whose rows start on 16 bytes;
    and where a slice is of one head and there is no list of tiles, what is read at the distance of query and key."""
    strips = brought.strips(p.program) if _rows(p) == 64 and not listed else ()
    return (brought.tiles(p.program) if p.aux_on_16_bytes else ()) + strips


def _laid(p: Problem, keys: int) -> bool:
    """Whether tensors are read for every pair, all of which the copy engine can bring in tiles of so many keys."""
    tiles = brought.tiles(p.program) if p.aux_on_16_bytes and _rows(p) == 64 else ()
    return bool(tiles) and all(brought.swizzled(p.program.aux[i], keys) for i in tiles)


def _rows(p: Problem) -> int:
    """Queries of a head in a slice of 64: few enough, and heads that share keys share a slice."""
    rows = 64
    while p.group > 1 and not p.dropout_p and rows >= 2 * max(p.seqlen_q, 1) and 64 // rows < p.group:
        rows //= 2
    return rows


def _grid(p: Problem) -> Iterable[tuple[int, int, int]]:
    """(consumer warpgroups, keys a tile, stages), best guess first."""
    wide, odd = max(p.dim, p.dim_v), p.dim % 16 > 0 or p.dim_v % 16 > 0  # odd: rows that do not start on 32 bytes
    slices = -(-p.seqlen_q // 64) * p.group
    groups: tuple[int, ...] = (2, 3, 1) if wide <= 160 else (2, 1)
    if slices == 1 or wide <= (120 if odd else 80):
        groups = (1, 2, 3) if slices == 1 else (3, 2, 1)
    narrow = wide > 176 or (odd and wide > 80)
    widths = (64, 80, 96, 48, 32, 16, 128) if narrow else (128, 112, 96, 80, 64, 192, 176, 160, 144, 48, 32, 16)
    sizes = [(g, n) for g in groups for n in widths]
    if slices > 1 and wide <= 128:  # first what the copy engine lays out: lanes take four times as long to bring it
        laid, order = [n for n in (128, 64) if _laid(p, n)], (3, 2, 1) if wide <= 64 else (2, 3, 1)
        sizes = list(dict.fromkeys([(g, n) for n in laid for g in order] + sizes))
    most_groups, most_keys = (2, 128) if p.dropout_p else (3, 192)  # the drawers are a warpgroup, and take registers
    return ((g, n, s) for g, n in sizes if g <= most_groups and n <= most_keys for s in (6, 5, 4, 3, 2))


@cache
def _with_maps(params: Params, mapped: tuple[int, ...]) -> Params:
    """And a map of each of these aux values, with what its places by item and head are multiplied with."""
    kinds = {"": "TensorMap", "_by_item": "int", "_by_head": "int"}
    return params.followed_by({f"near{i}{name}": kind for i in mapped for name, kind in kinds.items()})


def _tile(p: Problem, groups: int, keys: int, stages: int) -> Tile:
    """One of the grid: with dropout the drawers are a warpgroup too."""
    return Tile(64 * groups, keys, 4 * (groups + 1 + (p.dropout_p > 0)), stages)


def _padded(t: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dim a multiple of 8: itself, or a copy with up to 7 columns of zeros. It is copied if
    its rows do not start on 16 bytes, as beside one that is padded they need not."""
    missing = -t.shape[3] % 8
    if missing:
        return torch.nn.functional.pad(t, (0, missing))
    return t if rows_on_16_bytes(t) else t.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Config(Schedule):
    """What the kernel is compiled for, beyond the problem: see the head of `forward.cuh`. A tile's stages are key and
    value tiles together, the odd one for keys: they stay longer, for tiles that are done again."""

    stages_k: int
    stages_v: int

    @classmethod
    def of(cls, p: Problem, tile: Tile) -> Config:
        """The config of a problem with a tile."""
        return cls(
            p, tile, tile.block_m // 64, tile.block_n, -(-p.dim // 16) * 16, -(-p.dim_v // 8) * 8, _rows(p),
            -(-tile.stages // 2), tile.stages // 2,
        )  # fmt: skip

    @property
    def marks(self) -> int:
        """Warps' shares of tiles, 16 of 64 queries of a head, that may need repair."""
        return 4 * self.p.batch * self.p.heads_q * -(-self.p.seqlen_q // 64)

    @property
    def ragged(self) -> bool:
        """Whether the last key tile is not full."""
        return self.p.seqlen_kv % self.block_n != 0

    @property
    def steps(self) -> int:
        """Products of 16 columns in q k^T."""
        return self.dim // 16

    @property
    def accumulators(self) -> int:
        """Registers a thread: scores, weights, output."""
        return self.block_n // 2 + self.block_n // 4 + self.dim_v // 2

    @cached_property
    def registers(self) -> int:
        """Registers a thread that accumulators, and what is read for every pair, may take: the rest is beside them."""
        changed = self.p.program.score is not None
        if self.listed and (changed or self.groups == 1 or self.p.out_dtype == torch.float32):
            return 184
        if self.groups < 3:
            wide = self.mask == 2 and max(self.dim, self.dim_v) > 160
            most = 184 if wide or (self.split and changed) else 192
            return most - (self.lent if self.p.dropout_p else 0)
        if self.mapped and change(self.p) < 2:  # a few words are spilled between query tiles
            return 136
        if changed:
            return 108 if self.near else 116
        return 132 if self.mask != 2 or self.block_n <= 96 else 120

    @property
    def of_dropout(self) -> int:
        """Registers a thread that the bits of a key tile take, which say what stays, and more beside what is read for
        every pair, or a mask that is no interval."""
        if not self.p.dropout_p:
            return 0
        beside = 16 if self.near and self.p.program.score is not None else 4 if self.mask == 2 else 0
        return self.drawn_bytes // 256 + beside

    @property
    def lent(self) -> int:
        """Registers a thread that two warpgroups have less where there are drawers, by CONSUMER_REGISTERS."""
        return 0 if self.groups == 1 else 16 if max(self.dim, self.dim_v) > 128 else 24

    @property
    def drawn_bytes(self) -> int:
        """What the drawers write for 64 rows of a key tile."""
        return 256 * -(-self.block_n // 32)

    @cached_property
    def held(self) -> int:
        """Steps of q k^T whose columns of q are held in registers: all, or as many as there is room for beside a plain
        mask. The others read two operands from shared memory, which is as fast as tensor cores at best: three
        warpgroups have room for some where key tiles are narrow, whose products from shared memory are slower."""
        plain = self.p.program.score is None
        narrow = self.block_n <= 64 and plain and self.mask < 2
        most = self.registers if self.groups < 3 else 124 if narrow else 0
        most -= 0 if plain else 8 * len(self.near)
        room = max(most - self.accumulators - self.of_dropout, 0) // 4
        return self.steps if room >= self.steps else room if plain else 0

    @property
    def q_registers(self) -> bool:
        """Whether all of q is held in registers."""
        return self.held == self.steps

    @cached_property
    def widths(self) -> tuple[int, int, int]:
        """Columns of a swizzled chunk of q and k, of a narrower last one (0: there is none), and of a chunk of v."""
        rest = self.dim % 64
        if self.dim > 64 and rest in (16, 32):
            qk, last = 64, rest
        else:
            qk, last = (32, 16) if self.p.dim == 48 else (host.width(self.p.dim, 64), 0)
        return qk, last, host.width(self.p.dim_v, 64)

    @cached_property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a row in shared memory, of q and k, and of v."""
        w, last, wv = self.widths
        return 2 * (self.dim if last else w * -(-self.dim // w)), 2 * wv * -(-self.dim_v // wv)

    @cached_property
    def q_buffers(self) -> int:
        """Two where the next tile's q would have to wait for this one's products, and there is room beside two stages
        of what is near."""
        two = not self.q_registers and self._laid_out(2, 1 + self.brings).size <= arch.SHARED_BYTES
        return 2 if two else 1

    @property
    def ahead(self) -> bool:
        """Whether the next tile's q is there before this one is done with."""
        return self.q_registers or self.q_buffers > 1

    @cached_property
    def staged(self) -> bool:
        """Whether the copy engine stores the output, from shared memory: where rows allow it, registers suffice, and
        ptxas leaves products under way beside it (not beside chunks of 32 columns). Over values only where all
        warpgroups end with the same."""
        p = self.p
        rows = p.out_dtype == p.dtype and p.dim_v % 8 == 0 and self.rows == 64 and not self.split
        free = self.dim <= 128 if self.ahead else self.widths[2] != 32 and not self.lower
        listed = self.listed and self.dim > 64 and self.groups > 1  # where registers do not suffice
        return rows and free and p.program.score is None and self.mask != 2 and not listed

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block: tiles, barriers, jobs, aux values."""
        return self.layout.size

    @cached_property
    def layout(self) -> Layout:
        """Of shared memory."""
        return self.laid_out(self.q_buffers)

    @property
    def ping_pong(self) -> bool:
        """Whether warpgroups take turns at the tensor cores (Shah et al. 2024, FlashAttention-3, section 3.1)."""
        return self.groups > 1 and not (self.q_registers and self.dim >= 128)

    def fits(self, dev: Device) -> bool:
        """Whether registers and shared memory suffice, and the kernel would end."""
        registers = self.accumulators + self.of_dropout + 8 * len(self.near)
        if self.brings and self.near_stages == 1 and self.stages_k + self.stages_v > 4:
            return False  # where a stage more of keys or values takes the room of what is near
        return registers <= self.registers and self.shared_bytes <= launch.smem_limit(dev) and not self.stuck

    @property
    def stuck(self) -> bool:
        """Whether warpgroups could wait for each other for ever: who passes over a key tile holds it until its turn,
        which whoever works on that tile passes on when the next one is there. With one stage it never is."""
        return self.stages_k == 1 and self.ping_pong and (self.mask > 0 or self.last_wave)

    @cached_property
    def near(self) -> tuple[int, ...]:
        """See `_near`."""
        return _near(self.p, self.listed)

    @cached_property
    def params(self) -> Params:
        """What the kernel takes."""
        found = LISTED if self.listed else DROPOUT_PARAMS if self.p.dropout_p else PARAMS
        return _with_maps(found, self.mapped) if self.mapped else found

    def laid_out(self, q_buffers: int) -> Layout:
        """Shared memory with so many buffers for q; near values have two stages where those fit."""
        one = self._laid_out(q_buffers, 1)
        if not self.brings:
            return one
        two = self._laid_out(q_buffers, 2)
        return two if two.size <= arch.SHARED_BYTES else one

    def _laid_out(self, q_buffers: int, near_stages: int) -> Layout:
        qk, v = self.row_bytes
        step = 1024 if self.widths[1] else 1  # a chunk of 64 columns begins on 1024 bytes
        q_tile, k_tile = (-(-rows * qk // step) * step for rows in (64, self.block_n))
        barriers = self.stages_k + self.stages_v + 3 + q_buffers * self.groups  # 3: two of work tiles, and `next`
        barriers += near_stages * self.groups if self.brings else 0
        barriers += DRAWN_STAGES * self.groups if self.p.dropout_p else 0
        aux = [self.p.program.aux[i] for i in self.near]
        near = sum(brought.tile_bytes(a, self.block_n) for a in aux if not a.dims)
        strips = sum(8 * (self.block_n + 16) for a in aux if a.dims)
        job = 24 + (536 if self.mask == 2 else 24) * self.groups
        q, k, v = q_buffers * self.groups * q_tile, self.stages_k * k_tile, self.stages_v * self.block_n * v
        room = -(q + k + v + 16 * barriers + 2 * job) % 1024 if near else 0  # so that its tiles begin on 1024 bytes
        return Layout(
            q=q, k=k, v=v, barriers=16 * barriers, jobs=2 * job + room,
            near=4 * self.groups * (near_stages * near + strips),
            drawn=DRAWN_STAGES * self.groups * self.drawn_bytes if self.p.dropout_p else 0,
        )  # fmt: skip

    @cached_property
    def brings(self) -> bool:
        """Whether a warp of the producer brings tiles of what is read for every pair."""
        return any(not self.p.program.aux[i].dims for i in self.near)

    @cached_property
    def mapped(self) -> tuple[int, ...]:
        """The aux values whose tiles the copy engine brings: all that a warp of the producer does, or none."""
        return brought.tiles(self.p.program) if _laid(self.p, self.block_n) else ()

    @cached_property
    def shared_by(self) -> str:
        """What reads the same of the tiles that the producer brings: the batch items of a head ("batch"), "heads", or
        nothing. Query tiles of several of them are next to each other, so that they read at the same time, from L2."""
        read = [self.p.program.aux[i].pattern.lower() for i in self.near if not self.p.program.aux[i].dims]
        if self.p.batch > 1 and not self.split and any("h" in r and "b" not in r for r in read):
            return "batch"
        return "heads" if self.p.heads_kv > 1 and not self.split and any("h" not in r for r in read) else ""

    @property
    def together(self) -> int:
        """Heads, of all batch items, whose query tiles are next to each other: those of a section, or who shares."""
        if self.balanced or not self.shared_by:
            return self.section
        return max(SHARERS // self.p.batch, 1) * self.p.batch if self.shared_by == "batch" else SHARERS

    @property
    def near_stages(self) -> int:
        """Tiles of those that there is room for; 0 where each warp brings its own."""
        return 0 if not self.brings else 1 + (self.layout.regions == self._laid_out(self.q_buffers, 2).regions)

    def defines(self) -> dict[str, Any]:
        """Macros by name."""
        return self.macros

    @cached_property
    def macros(self) -> host.Macros:
        """The same, made once for a kind."""
        p, program, mask = self.p, self.p.program, self.mask
        width, last, width_v = self.widths
        return host.Macros({
            "DIM": self.dim, "DIM_V": self.dim_v, "DIM_EXACT": -(-p.dim // 8) * 8, "COLUMNS": p.dim_v,
            "WIDTH": width, "LAST": last, "WIDTH_V": width_v,
            "GROUPS": self.groups, "BLOCK_N": self.block_n, "STAGES_K": self.stages_k, "STAGES_V": self.stages_v,
            "Q_BUFFERS": self.q_buffers, "HELD": self.held, "ROWS": self.rows, "LATE_ROUNDS": self.late_rounds,
            "MASK": mask, "LOWER": int(self.lower),
            "SCORE": int(program.score is not None), "PRESCALE": int(p.softmax_scale <= 0),
            "SINKS": int(p.sinks and not self.split), "SPLIT": int(self.split),
            "BALANCED": int(self.balanced), "LAST_WAVE": int(self.last_wave),
            "RAGGED": int(self.ragged), "PING_PONG": int(self.ping_pong),
            "BF16": int(p.dtype == torch.bfloat16), "WIDE": int(p.out_dtype == torch.float32 or self.split),
            "AHEAD": int(self.ahead), "STAGED": int(self.staged), "NEAR_STAGES": self.near_stages,
            **({"DROPOUT": 1} if p.dropout_p else {}), **({"MAPPED": 1} if self.mapped else {}),
            **({"BATCH_FIRST": 1} if self.shared_by == "batch" else {}),
            **({"SECTIONED": 1} if self.shared_by and not self.balanced else {}),
            **({"FILLED": 1} if self.split and p.program.loads else {}),
        } | self.layout.defines())  # fmt: skip


PLANNED = "mask", "band", "lower"  # of a kind of problems, with fields; what the choice of a tile asks for
# Of one with lengths that are alike
LASTING = "near", "widths", "layout", "staged", "shared_by", "mapped", "params", "macros"
_FIELDS, _KINDS = Recent(2048), Recent(256)  # what these are, by all that they hang on


@lru_cache(maxsize=1024)
def _config(p: Problem, tile: Tile) -> Config:
    key = p.kind, tile, _rows(p)
    known = _FIELDS.get(key)
    if known is None:
        m = Config.of(p, tile)
        known = changed(m, **{name: getattr(m, name) for name in PLANNED})
        _FIELDS.add(key, known)
    return changed(known, p=p)  # type: ignore[no-any-return]


def _informed(m: Config) -> Config:
    """The config with what is known of its kind."""
    key = m.p.kind, m.tile, m.rows, m.ragged, m.last_wave, m.listed
    known = _KINDS.get(key)
    if known is None:
        _KINDS.add(key, {name: getattr(m, name) for name in LASTING})
    else:
        m.__dict__.update(known)
    return m


@dataclass
class Merge:
    """The launch that merges the results of KV splits, and the room that they take, in float32."""

    part: Part
    strides: tuple[int, int, int]  # of a split's output, which lies as a batch item's
    sums: int  # bytes from the outputs on
    size: torch.Tensor  # one number, expanded to all that is in the room

    @classmethod
    def of(cls, binary: nvrtc.Binary, m: Config, out: torch.Tensor) -> Merge:
        """For an output like `out`, (b, sq, hq, dv)."""
        p, splits = m.p, m.tile.num_splits
        rows = p.batch * p.heads_q * p.seqlen_q
        outs, wide = splits * rows * p.dim_v, p.out_dtype == torch.float32
        fixed = of_strides("out", launch.strides(out))
        fixed |= {"heads": p.heads_q, "seqlen_q": p.seqlen_q, "num_splits": splits, "wide": int(wide)}
        kernel = nvrtc.Kernel(binary, MERGE_PARAMS, MERGE_COLUMNS, fixed=fixed)
        takes = {"outs": "outs", "sums": "sums", "out": "out", "lse": "lse", "sinks": "sinks"}
        return cls(
            Part(kernel, rows * -(-p.dim_v // MERGE_COLUMNS), takes, overlaps=True),
            (p.heads_q * p.seqlen_q * p.dim_v, p.seqlen_q * p.dim_v, p.dim_v), 4 * outs,
            host.like((outs + 2 * splits * rows,), out.device),
        )  # fmt: skip


@dataclass
class Ready:
    """The compiled kernel with what does not change between calls of one key."""

    problem: Problem
    row: Row  # takes q, k, v, out, lse, sinks, and of these what there is: work, room, seed, tensors among aux
    pads: bool  # whether q, k or v may have to be padded
    tensors: bool  # whether there are tensors among the aux values
    masked: bool  # whether rows may need repair, for which there are `marks`
    marks: int
    lse: torch.Tensor  # one number, expanded to lse's shape: `empty_like` parses less than `empty`
    merge: Merge | None  # of several KV splits
    mapped: tuple[int, ...]  # the aux values that the copy engine brings

    @classmethod
    def of(cls, binary: nvrtc.Binary, m: Config, dev: Device, x: Operands, listed: Blocks | None = None) -> Ready:
        """Everything the launches of a config need; `listed` is the list of key tiles that they walk."""
        p, pads, q, k, v = m.p, bool(m.p.dim % 8 or m.p.dim_v % 8), x.q, x.k, x.v
        x = host.unexpanded(x, m.mapped) if m.mapped else x
        if pads:
            q, k, v = _padded(q), _padded(k), _padded(v)
        out = x.q if p.out_like_q and without_gaps(x.q) else allocate_out(p, x.q, x.layout)  # of which strides are read
        if x.layout == "bhsd":
            out, q, k, v = out.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        merge = Merge.of(binary, m, out) if m.split else None
        sms, masked = dev.sm_count or 1, p.program.keep is not None
        assigned = m.assign(sms)
        fixed: dict[str, Any] = of_strides("out", launch.strides(out) if merge is None else merge.strides)
        fixed |= of_lengths(p)
        fixed |= {
            "tiles_head": assigned.tiles_head, "tiles": assigned.tiles,
            "section": m.together, "whole": assigned.whole, "splits": assigned.splits, "width": assigned.width,
            "factor": launch.factor(p, p.softmax_scale), "scale": p.softmax_scale,
        } | expressions.arguments(x.aux, p.program)  # fmt: skip
        if p.dropout_p:
            fixed |= dropout.numbers(p.dropout_p)
        fixed |= listed.arguments if listed is not None else {}
        width, last, width_v = m.widths
        slice_, tile = (m.rows, 64 // m.rows), (m.block_n, 1)
        names = _names(p, x, merge)
        at = {name: i for i, name in enumerate(names)}
        made: dict[str, Made] = {
            "q_map": Mapped(at["q"], host.maps(q, slice_, width, last, promotion=PROMOTION)),
            "k_map": Mapped(at["k"], host.maps(k, tile, width, last, promotion=PROMOTION)),
            "v_map": Mapped(at["v"], host.maps(v, tile, width_v, promotion=PROMOTION)),
        }
        if m.staged:  # a warp's rows are stored by the copy engine
            made["out_map"] = Mapped(at["out"], host.maps(out, (16, 1), width_v))
        for i in m.mapped:
            aux = cast(torch.Tensor, x.aux[i])
            maps, own = host.pair_maps(aux, 16, 128 // aux.itemsize)
            made[f"near{i}"] = Mapped(at[f"a{i}"], maps)
            fixed |= {f"near{i}_{name}": times for name, times in own.items()}
        if masked:
            of = tuple([x for t in (q, k, v) for x in (0, *launch.strides(t))])
            made["inputs"] = Record(INPUTS, of, tuple((INPUTS.size // 3 * at[name], at[name]) for name in "qkv"))
        if merge is not None:
            made |= {"outs": At(at["room"], 0), "sums": At(at["room"], merge.sums)}
        first = _part(binary, m, fixed, min(assigned.tiles, sms), [*names, *made])
        row = Row(names, made, [first] if merge is None else [first, merge.part])
        return cls(
            p, row, pads, bool(expressions.of_tensors(x.aux)), masked,
            m.marks * m.tile.num_splits, host.like((p.batch, p.heads_q, p.seqlen_q), q.device), merge, m.mapped,
        )  # fmt: skip

    def run(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One launch on the current stream, and with several KV splits the one that merges them."""
        p, q, k, v = self.problem, x.q, x.k, x.v
        x = host.unexpanded(x, self.mapped) if self.mapped else x
        if self.pads:
            q, k, v = _padded(q), _padded(k), _padded(v)
        out = torch.empty_like(x.q) if p.out_like_q else allocate_out(p, x.q, x.layout)
        lse = torch.empty_like(self.lse) if x.lse else None
        values = [
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(),
            0 if x.sinks is None else x.sinks.data_ptr(),
        ]  # fmt: skip
        if self.masked:
            values.append(self.workspace().data_ptr())
        room = None if self.merge is None else torch.empty_like(self.merge.size)
        if room is not None:
            values.append(room.data_ptr())
        if x.seed is not None:
            values.append(x.seed.data_ptr())
        if self.tensors:
            values += [t.data_ptr() for t in x.aux if isinstance(t, torch.Tensor)]
        self.row.start(values)
        return out, lse

    def workspace(self) -> torch.Tensor:
        """Of the current stream, where rows may need repair."""
        return host.workspace(self.lse.device, self.marks)

    def behind(
        self, first: Sequence[tuple[Callable[..., Any], Sequence[str]]], more: Sequence[str],
        filled: Mapping[str, tuple[str, int]], overlaps: bool = False,
    ) -> Row | None:  # fmt: skip
        """The launches behind others, which fill tensors that these read. None where one of those cannot join.

        Args:
            first: of each its `driver.Step`, of the places of the addresses that it takes, and the names of these.
            more: names of addresses that a call gives besides.
            filled: by name, of which all of `tensors` are, the name of a given address, and how many bytes after it.
            overlaps: as of `driver.Step`, of the attention.
        """
        names = [*(n for n in self.row.names[: self.row.given] if n not in filled), *more]
        made: dict[str, Made] = {name: At(names.index(source), n) for name, (source, n) in filled.items()}
        made |= self.row.made  # of q, k, v, out and room, which come before what is filled
        at = {name: i for i, name in enumerate([*names, *made])}
        steps = [step(tuple([at[name] for name in takes])) for step, takes in first]
        own, *rest = self.row.parts
        parts = [own._replace(overlaps=overlaps), *rest]
        return None if None in steps else Row(names, made, parts, first=[s for s in steps if s is not None])

    @property
    def alone(self) -> bool:
        """Whether a call takes q, k and v as they are and nothing else."""
        p = self.problem
        return p.out_like_q and not (self.pads or self.tensors or p.sinks or p.dropout_p)

    @property
    def numbers(self) -> tuple[Any, ...]:
        """What `Alone` is made of."""
        space = None if self.merge is None else self.merge.size.shape[0]
        return self.marks if self.masked else None, space, *self.lse.shape


@dataclass
class Alone:
    """The launches of calls that take q, k and v as they are and nothing else, on one device."""

    launches: Any
    device: torch.device
    shape: tuple[int, ...]  # of lse
    marks: int | None  # None: no rows may need repair
    space: int | None  # of several KV splits

    @cached_property
    def lse(self) -> torch.Tensor:
        """As of `Ready`."""
        return host.like(self.shape, self.device)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wants_lse: bool) -> Any:
        """out and lse; None where they are not on the current device."""
        if not host.current(self.device):
            return None
        out, lse = torch.empty_like(q), torch.empty_like(self.lse) if wants_lse else None
        values = [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(), 0]
        if self.marks is not None:
            values.append(self.workspace().data_ptr())
        room = None if self.space is None else torch.empty(self.space, dtype=torch.float32, device=self.device)
        if room is not None:
            values.append(room.data_ptr())
        self.launches.start(values, torch._C._cuda_getCurrentRawStream(self.device.index))
        return out, lse

    def workspace(self) -> torch.Tensor:
        """Of the current stream, where rows may need repair."""
        return host.workspace(self.device, self.marks or 0)


def _names(p: Problem, x: Operands, merge: Merge | None) -> list[str]:
    """Of the addresses that `Ready.run` gives, in its order."""
    return [
        "q", "k", "v", "out", "lse", "sinks", *["work"] * (p.program.keep is not None), *["room"] * (merge is not None),
        *["seed"] * bool(p.dropout_p), *expressions.of_tensors(x.aux),
    ]  # fmt: skip


def _part(binary: nvrtc.Binary, m: Config, fixed: dict[str, Any], grid: int, names: Iterable[str]) -> Part:
    """The launch, of which each call gives these values."""
    given = set(names)
    fixed = {"out_map": b"", "inputs": b"", "work": 0} | fixed
    taken = expressions.passed(m.params, m.p.program)
    fixed = {name: value for name, value in fixed.items() if name not in given}
    kernel = nvrtc.Kernel(binary, taken, 32 * m.tile.warps, m.shared_bytes, fixed)
    takes = {name: name for name in kernel.changing}
    return Part(kernel, grid, takes | ({"out": "outs", "lse": "sums"} if m.split else {}))


SPEC = HopperForward()
