"""The Hopper backward of float16 and bfloat16 beyond head dim 128, host side. The kernels are in wide_backward.cuh (dk,
dv, gradients of scores) and wide_dq.cuh (dq from those).

Five products, and nothing that several blocks add up: the bits are the same in every run. The gradients of scores lie
in memory between the two kernels, for some heads or some keys at a time (`pieces`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch

from sartor import nvrtc
from sartor.device import Device
from sartor.features import BITS_16, COMMON, DIM_V, SHARED_LSE
from sartor.kernels.cuda import expressions, host
from sartor.kernels.cuda.layout import Layout
from sartor.kernels.cuda.params import LENGTHS, Params, of_lengths
from sartor.kernels.hopper import arch
from sartor.kernels.hopper import pieces as cutting
from sartor.kernels.hopper.backward import HopperBackward
from sartor.kernels.hopper.backward_config import PREPROCESS
from sartor.kernels.hopper.backward_launches import Ready, Step, tidy, tidy_out
from sartor.kernels.hopper.pieces import Piece, Shape
from sartor.kernels.room import Room
from sartor.kernels.spec import Operands, Plan, Saved, Tile
from sartor.kernels.triton import launch
from sartor.kernels.triton.backward import dense_like, padded_rows
from sartor.problem import Problem
from sartor.symbols import Symbol

if TYPE_CHECKING:
    from typing_extensions import Self

PIECE = dict.fromkeys(("first_head", "first_tile", "tiles", "skew"), "int")
DKDV = Params(
    "wide_dkdv",
    k="TensorMap", v="TensorMap", q="TensorMap", dout="TensorMap",
    lse="const float*", delta="const float*",  # (batch, heads_q, rows_pitch), lse as log2
    dk="TensorMap", dv="TensorMap",  # of a warp's 16 rows
    marks="int*",  # one for 64 keys of a head
    ds="u8*",  # tiles, see wide.cuh
    written="int*", zeros="u8*",  # see `write_visited`
    **LENGTHS, factor="float", scale="float", **PIECE,
)  # fmt: skip
DQ = Params(
    "wide_dq",
    k="TensorMap", ds="const u8*", written="const int*", zeros="const u8*",
    carry="float*",  # dq, unscaled: tiles of 64 queries, as threads have them
    dq="TensorMap",  # of a warp's 16 rows
    marks="int*",  # one for 64 queries of a head
    **LENGTHS, scale="float", **PIECE,
    resumes="int", ends="int",  # whether earlier launches had keys of these heads, whether later ones have none
    folds="int",  # whether a block has a tile from either end
)  # fmt: skip
DIMS = range(64, 257, 8)
WORTH = 1.3  # times as long as without a limit of the workspace it may take: eight products are 1.6
FOLDS = 2  # blocks a SM, up to which tiles from either end are one's


class WideBackward(HopperBackward):
    """See the module."""

    name = "hopper_wide_backward"
    features = COMMON | BITS_16 | {DIM_V, SHARED_LSE}

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """What the copy engine, wgmma and the run-time compiler need."""
        why = launch.reasons(p, dev) + arch.reasons(p, dev)
        if p.program.keep is not None and not p.program.is_interval_both_ways:
            why.append(f"needs a mask that is one interval of every row and column, got {p.mask_name}")
        if p.dim not in DIMS or p.dim_v not in DIMS or max(p.dim, p.dim_v) <= 128:
            why.append(
                f"needs head dims of {DIMS[0]} to {DIMS[-1]}, multiples of 8, one of them beyond 128, "
                f"got {p.dim} and {p.dim_v}"
            )
        return why

    def why_no_length(self, p: Problem, dev: Device) -> list[str]:
        """Whether pieces that fit the workspace leave SMs idle."""
        shape = Shape.of(p, skew(p, (p.seqlen_kv - p.seqlen_q,)))
        limit, sms = cutting.limit(p), dev.sm_count or 1
        fit = cutting.pieces(shape, limit, sms)
        if len(fit) == 1:
            return []
        if fit and fit[0].tiles < shape.keys and p.program.keep is not None and shape.skew == cutting.NONE:
            return [
                f"needs gradients of scores of whole heads in {limit >> 20} MiB where a mask is not causal, "
                f"got {p.mask_name} of {p.seqlen_q} queries and {p.seqlen_kv} keys"
            ]
        wanted = cutting.pieces(shape, 1 << 60, sms)
        if fit and shape.time(fit, sms) <= WORTH * shape.time(wanted, sms):
            return []
        return [
            f"needs gradients of scores of as many keys as there are SMs for in {limit >> 20} MiB, "
            f"got {p.batch * p.heads_kv} heads of {p.seqlen_q} queries and {p.seqlen_kv} keys"
        ]

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """One: registers leave no choice."""
        yield Tile(64, 64, 12, sum(OfKeys(p).stages), Tile(128, 64, 12, OfQueries(p).stages))

    def shared_bytes(self, plan: Any) -> int:
        """Dynamic shared memory that a block takes, of the kernels the one that takes most."""
        return max(OfKeys(plan.problem).shared_bytes, OfQueries(plan.problem).shared_bytes)

    def ready(self, plan: Plan, x: Operands, saved: Saved, key: object) -> WideReady:
        """The launches of calls with this key."""
        return WideReady.of(plan.problem, x, saved, key, plan.device.sm_count or 1)

    def notes(self, p: Problem) -> Iterable[str]:
        """Memory that a call takes besides its results, and what it is for."""
        whole = p.batch * p.heads_q * -(-p.seqlen_q // 64) * -(-p.seqlen_kv // 64) * cutting.BYTES
        most = min(whole, cutting.limit(p)) / 2**20
        yield (
            f"the backward keeps gradients of scores, of some heads or keys at a time, in at most {most:.1f} MiB; "
            "its bits are the same in every run, with deterministic=True or without"
        )


def skew(p: Problem, aux: tuple[Any, ...]) -> int:
    """By how many tiles keys may be ahead of the queries that see them, under a causal mask; else no bound."""
    cols = p.program.cols
    if cols is None or cols[0].text() != "(kv - aux[0])" or not aux or not isinstance(aux[0], (int, Symbol)):
        return cutting.NONE
    return max(-cutting.NONE, min(cutting.NONE, -(-aux[0] // 64)))


@dataclass(frozen=True)
class Config:
    """What both kernels are compiled for."""

    p: Problem
    near = ()  # nothing is read for every pair
    fused, block = False, 64  # as Step.preprocess asks

    @property
    def dims(self) -> tuple[int, int]:
        """Columns of products, of q and k and of v and dout."""
        return tuple(-(-d // 16) * 16 for d in (self.p.dim, self.p.dim_v))  # type: ignore[return-value]

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of their swizzled chunks."""
        return tuple(host.width(d, 64) for d in (self.p.dim, self.p.dim_v))  # type: ignore[return-value]

    @property
    def tiles(self) -> tuple[int, int]:
        """Bytes of tiles of 64 rows."""
        return tuple(128 * w * -(-d // w) for d, w in zip(self.dims, self.widths, strict=True))  # type: ignore[return-value]

    @property
    def dtype(self) -> str:
        """As products name it."""
        return "bf16" if self.p.dtype == torch.bfloat16 else "f16"

    def common(self) -> dict[str, Any]:
        """Macros by name."""
        p = self.p
        return {
            "DIM": self.dims[0], "WIDTH": self.widths[0], "MASK": int(p.program.keep is not None),
            "BF16": int(p.dtype == torch.bfloat16),
        }  # fmt: skip


@dataclass(frozen=True)
class OfKeys(Config):
    """The kernel of dk and dv: see the head of wide_backward.cuh."""

    @property
    def stages(self) -> tuple[int, int]:
        """Tiles of Q and of dO."""
        return next(n for n in ((3, 3), (3, 2), (2, 2)) if self.laid_out(*n).size <= arch.SHARED_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block."""
        return self.laid_out(*self.stages).size

    def laid_out(self, stages_q: int, stages_o: int) -> Layout:
        """Shared memory with so many stages."""
        k, v = self.tiles
        return Layout(
            k=k, v=v, q=stages_q * k, o=stages_o * v, w=2 * cutting.BYTES, ds=cutting.BYTES, lse=stages_q * 256,
            delta=stages_o * 256, barriers=16 * (1 + stages_q + stages_o + 2), start=1024,
        )  # fmt: skip

    def defines(self) -> dict[str, Any]:
        """Macros by name."""
        p, (stages_q, stages_o) = self.p, self.stages
        return self.common() | {
            "GROUPS": 1, "KEYS": 1, "BLOCK": 64, "SHARED_SPANS": 0, "ORDERED": 0, "PERSISTENT": 0,
            "DIM_V": self.dims[1], "COLUMNS_QK": p.dim, "COLUMNS": p.dim_v,
            "WIDTH_V": self.widths[1], "STAGES_Q": stages_q, "STAGES_O": stages_o,
            "PREPROCESS": 1, "FUSED": 0, "WIDE": int(p.out_dtype == torch.float32),
        } | self.laid_out(stages_q, stages_o).defines()  # fmt: skip

    def compile(self) -> nvrtc.Binary:
        """The kernel; needs no GPU."""
        return arch.build(self, self.dtype, "hopper/wide_backward", {64, *self.dims}, (DKDV, PREPROCESS))


@dataclass(frozen=True)
class OfQueries(Config):
    """The kernel of dq: see the head of wide_dq.cuh."""

    @property
    def stages(self) -> int:
        """Tiles of keys."""
        return next(n for n in (6, 5, 4, 3) if self.laid_out(n).size <= arch.SHARED_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block."""
        return self.laid_out(self.stages).size

    def laid_out(self, stages: int) -> Layout:
        """Shared memory with so many stages."""
        return Layout(tiles=stages * (2 * cutting.BYTES + self.tiles[0]), barriers=16 * stages, start=1024)

    def defines(self) -> dict[str, Any]:
        """Macros by name."""
        return self.common() | {"COLUMNS": self.p.dim, "STAGES": self.stages} | self.laid_out(self.stages).defines()

    def compile(self) -> nvrtc.Binary:
        """The kernel; needs no GPU."""
        return arch.build(self, self.dtype, "hopper/wide_dq", {self.dims[0]}, (DQ,))


@dataclass(frozen=True)
class Cuts:
    """The pieces of a call, and room for the largest."""

    p: Problem
    skew: int
    sms: int

    @cached_property
    def shape(self) -> Shape:
        """What they are cut from."""
        return Shape.of(self.p, self.skew)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """In the order of their launches."""
        return cutting.pieces(self.shape, cutting.limit(self.p), self.sms)

    @property
    def ranged(self) -> bool:
        """Whether heads are cut."""
        return self.pieces[0].tiles < self.shape.keys

    def room(self) -> Room:
        """Room for gradients of scores and dq on its way, two numbers a row, and a mark for 64 queries or keys."""
        p, most, heads = self.p, max(map(self.shape.bytes, self.pieces)), self.pieces[0].heads
        marks, tiles = int(p.program.keep is not None), max(piece.tiles for piece in self.pieces)
        return Room.of(
            sums=0,
            ds=most // 4,
            carry=self.shape.carried(heads) // 4 if self.ranged else 0,
            written=marks * 2 * heads * p.group * tiles,
            zeros=marks * cutting.BYTES // 4,
            delta=padded_rows(p),
            lse_log2=padded_rows(p),
            bad_q=marks * p.batch * p.heads_q * -(-p.seqlen_q // 64),
            bad_kv=marks * p.batch * p.heads_kv * -(-p.seqlen_kv // 64),
        )

    def fixed(self, piece: Piece) -> dict[str, Any]:
        """What a launch of a piece is told of it."""
        return of_lengths(self.p) | {
            "first_head": piece.first_head, "first_tile": piece.first_tile, "tiles": piece.tiles, "skew": self.skew,
            "scale": self.p.softmax_scale,
        }  # fmt: skip

    def dkdv(self, piece: Piece, binary: nvrtc.Binary, tensors: dict[str, torch.Tensor], aux: tuple[Any, ...]) -> Step:
        """The first launch of a piece; `tensors` are like q, k, v, dout and the gradients."""
        m, (fixed, reads) = OfKeys(self.p), expressions.split(aux, self.p.program)
        fixed |= self.fixed(piece) | {"factor": launch.LOG2_E * self.p.softmax_scale}
        params = expressions.passed(DKDV, self.p.program)
        of, of_v = m.widths
        widths = {"k": of, "q": of, "v": of_v, "dout": of_v}
        maps = {name: host.maps(tensors[name], (64, 1), width) for name, width in widths.items()}
        maps |= {"dk": host.maps(tensors["dk"], (16, 1), of), "dv": host.maps(tensors["dv"], (16, 1), of_v)}
        names = dict.fromkeys(("delta", "ds", "written", "zeros", *maps))
        named = {name: name for name in names} | {"lse": "lse_log2", "marks": "bad_kv"} | reads
        return Step(nvrtc.Kernel(binary, params, 384, m.shared_bytes, fixed), piece.heads * piece.tiles, named, maps)

    def dq(self, piece: Piece, binary: nvrtc.Binary, tensors: dict[str, torch.Tensor], aux: tuple[Any, ...]) -> Step:
        """The second launch of a piece."""
        m, pairs = OfQueries(self.p), piece.heads * self.p.group * -(-self.shape.queries // 2)
        folds = self.skew != cutting.NONE and pairs < FOLDS * self.sms
        fixed, reads = expressions.split(aux, self.p.program)
        fixed |= self.fixed(piece)
        fixed |= {
            "resumes": int(piece.first_tile > 0), "ends": int(piece.first_tile + piece.tiles == self.shape.keys),
            "folds": int(folds),
        }  # fmt: skip
        params = expressions.passed(DQ, self.p.program)
        names = {name: name for name in ("k", "ds", "written", "zeros", "carry", "dq")} | {"marks": "bad_q"} | reads
        maps = {name: host.maps(tensors[name], (rows, 1), m.widths[0]) for name, rows in (("k", 64), ("dq", 16))}
        return Step(nvrtc.Kernel(binary, params, 384, m.shared_bytes, fixed), pairs, names, maps)


class WideReady(Ready):
    """The launches of one call key."""

    @classmethod
    def of(cls, p: Problem, x: Operands, saved: Saved, key: object, sms: int) -> Self:
        """Everything that the launches of a plan need."""
        dout, out = tidy(p, saved.dout), tidy_out(saved.out)
        tensors = {"q": x.q, "k": x.k, "v": x.v, "dout": dout}
        tensors |= {f"d{name}": dense_like(tensors[name]) for name in ("q", "k", "v")}
        cuts = Cuts(p, skew(p, x.aux), sms)
        first, second = OfKeys(p).compile(), OfQueries(p).compile()
        steps = [Step.preprocess(cast(Any, OfKeys(p)), first, out, dout)]
        for piece in cuts.pieces:
            steps += [cuts.dkdv(piece, first, tensors, x.aux), cuts.dq(piece, second, tensors, x.aux)]
        return cls.made(p, key, cuts.room(), steps, x, (dout is not saved.dout, out is not saved.out))


SPEC = WideBackward()
