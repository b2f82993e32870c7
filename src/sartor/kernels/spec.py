"""What a kernel is to the planner: facts, reasons, tiles, and one way to run it."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from sartor.device import Device
from sartor.problem import Problem, heads_outermost, without_gaps
from sartor.symbols import empty_like


@dataclass(slots=True)
class Operands:
    """The data of one call, views of what the caller passed, in layout (batch, seqlen, heads, dim). A kernel whose
    `any_layout` is true gets layout bhsd as well, and gives its output in the layout it got."""

    q: torch.Tensor  # (b, sq, hq, d)
    k: torch.Tensor  # (b, skv, hkv, d)
    v: torch.Tensor  # (b, skv, hkv, dv)
    sinks: torch.Tensor | None = None  # (hq,), dense, in lse's dtype
    aux: tuple[int | float | torch.Tensor, ...] = ()  # numbers, tables, tensors broadcastable to (b, hq, sq, skv)
    layout: str = "bshd"
    lse: bool = True  # whether it is wanted; a kernel may return None for one that is not
    seed: torch.Tensor | None = None  # of dropout: int64, 1, 5 or 7 numbers, dense


class Saved(NamedTuple):
    """What the backward reads of the forward, and the gradients that arrive."""

    out: torch.Tensor  # (b, sq, hq, dv)
    lse: torch.Tensor  # (b, hq, sq) float32
    dout: torch.Tensor  # (b, sq, hq, dv)
    dlse: torch.Tensor | None  # (b, hq, sq)


class Gradients(NamedTuple):
    """Gradients in the shapes of the inputs; None where the input is absent."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None
    dtables: tuple[torch.Tensor, ...] = ()  # in the order and the shapes of Problem.table_shapes


@dataclass(frozen=True, slots=True)
class Tile:
    """The config a kernel is compiled for: rows of queries, rows of keys, warps, pipeline stages.

    `then` is the config of the next kernel, where a pass has two kernels with configs of their own (dk and dv, then
    dq). With `num_splits` above 1, partial outputs are float32, and the merge kernel combines them by highest scores
    and sums.
    """

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 1
    then: Tile | None = None
    num_splits: int = 1

    def __str__(self) -> str:
        after = f", {self.then}" if self.then else ""
        splits = f" p{self.num_splits}" if self.num_splits > 1 else ""
        return f"{self.block_m}x{self.block_n} w{self.warps} s{self.stages}{splits}{after}"

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Tile:
        """From four numbers, or eight for a tile with a second one."""
        block_m, block_n, warps, stages = numbers[:4]
        return cls(block_m, block_n, warps, stages, cls.of(numbers[4:]) if numbers[4:] else None)


class Again(NamedTuple):
    """What repeats a call that reads q, k and v alone, or its backward, on tensors in the layout of the call: `run`, of
    q, k, v and whether lse is wanted, or of dout, q, k, v, out and lse; None for a result says that it cannot.

    Launches take the addresses of q, k, v, out, lse, 0, `shared` and a workspace of `space`, or of q, k, v, dout, out,
    lse, 0, dq, dk, dv and a workspace.
    """

    run: Callable[..., Any]
    launches: Any
    space: int | None = None  # float32 numbers of its own workspace; a forward has one with several KV splits
    mends: bool = False  # whether some launches are of Triton's kernels
    shared: Callable[[], torch.Tensor] | None = None  # of a forward, the workspace of the current stream
    layouts: Sequence[int] = ()  # as `replay.calls.layouts` has them, where no call has been made


class KernelSpec:
    """A kernel's facts: its name, what `kernel=` accepts for it, the features (`sartor.features`) it serves; and what
    the planner asks of it, with the answers of a kernel that serves every number and has no tiles."""

    name: str
    family: str
    features: frozenset[str]
    backwards: tuple[str, ...] = ()  # of a forward: the backward kernels it goes with, first choice first
    any_layout = False  # of a forward: see `Operands`
    replays = False  # whether its launches may be made in C
    # On the current stream: of a forward `run(plan, x)`, which gives out (b, sq, hq, dv) and lse (b, hq, sq); of a
    # backward `run(plan, x, saved)`, which gives `Gradients` of every differentiable input
    run: Callable[..., Any]

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """Sentences with both numbers, of a problem whose features are served; none when the kernel can run. There are
        some of all lengths of a class (`length_class`), or of none."""
        return []

    def why_no_length(self, p: Problem, dev: Device) -> list[str]:
        """The same of what depends on more of lengths, where `why_not` says nothing."""
        if dev.is_cpu or (p.seqlen_q < LONGEST and p.seqlen_kv < LONGEST):
            return []
        return [f"needs fewer than {LONGEST} queries and keys, got {max(p.seqlen_q, p.seqlen_kv)}"]

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """Legal tiles, best guess first; empty for kernels that have none to choose."""
        return ()

    def fits(self, p: Problem, dev: Device, tile: Tile) -> bool:
        """Whether a tuned tile is legal."""
        return tile in legal(self, p, dev)

    def suited(self, p: Problem, dev: Device, tile: Tile) -> Tile:
        """The tile, or another for as many of them as a problem has."""
        return tile

    def shared_bytes(self, plan: Plan) -> int | None:
        """Shared memory that a block takes, of the launch that takes most; None where the kernel does not say."""
        return None

    def again(self, plan: Plan, *data: Any) -> Again | None:
        """What repeats a run with this data for other tensors that lie in the same way; None where calls need more."""
        return None

    def symbolic(self, plan: Plan, *data: Any) -> tuple[Any, tuple[Any, ...], list[Any]] | None:
        """For data that is `symbols.SymbolicTensor`s: the row of launches (`cuda.row`), what `repeated` takes besides
        them, and tensors that a backward allocates besides gradients; None where `again` says None."""
        return None

    def repeated(self, launches: Any, device: torch.device, *numbers: Any) -> Again:
        """What `again` returns, for launches and the numbers that `symbolic` gave."""
        raise NotImplementedError

    def behind(self, plan: Plan) -> Any:
        """The launches of a forward that has run in layout bshd, where they may come behind others that fill tensors
        which they read, as `hopper.forward.Ready.behind` says; else None."""
        return None

    def notes(self, p: Problem) -> Iterable[str]:
        """What there is to say of a plan besides, in sentences."""
        return ()


LONGEST = 2**31 - 256  # on GPUs: kernels count queries and keys in 32 bits, and tiles from there on
FEW = (1, 2, 3, 8, 16, 24)  # slices of 64 queries of a group, from which on a kernel's tiles may be others


def length_class(p: Problem) -> Problem:
    """The problem with lengths that stand for its own: every length has the legal tiles of one of few classes. Of
    queries the slices of 64 tell, and how many share one; of keys whether they fill tiles of a power of two."""
    sq, skv, slices = p.seqlen_q, p.seqlen_kv, -(-p.seqlen_q // 64)
    if sq > 64:
        group = p.group
        queries = 64 * max(2, -(-FEW[bisect(FEW, slices * group) - 1] // group))
    else:
        queries = sq and 1 << (sq - 1).bit_length()
    even = 1
    for n in (16, 32, 64, 128):
        even = even if skv % n else n
    keys = skv if skv <= 1 else 128 + even % 128
    return _of_class(p.kind, queries, keys)


@lru_cache(maxsize=1024)
def _of_class(kind: Problem, queries: int, keys: int) -> Problem:
    return replace(kind, batch=min(kind.batch, 1), seqlen_q=queries, seqlen_kv=keys)


def legal(spec: KernelSpec, p: Problem, dev: Device) -> tuple[Tile, ...]:
    """The kernel's tiles, enumerated once for a class of lengths."""
    return legal_of_class(spec, length_class(p), dev)  # type: ignore[arg-type] # kernels are by identity


@lru_cache(maxsize=1024)
def legal_of_class(spec: KernelSpec, p: Problem, dev: Device) -> tuple[Tile, ...]:
    """The same of what is `length_class` of others."""
    return tuple(spec.tiles(p, dev))


@lru_cache(maxsize=1024)
def first_of_class(spec: KernelSpec, p: Problem, dev: Device) -> Tile | None:
    """The first of them, without the search for the others."""
    return next(iter(spec.tiles(p, dev)), None)


@dataclass(frozen=True, eq=False)
class Plan:
    """How one problem will be computed. `cache` is the kernel's own: compiled code, grids, strides."""

    kernel: KernelSpec
    problem: Problem
    device: Device
    tile: Tile | None
    source: str
    cache: dict[object, object] = field(default_factory=dict)

    @property
    def shared_bytes(self) -> int | None:
        """Shared memory that a block takes, of the launch that takes most; None where the kernel does not say."""
        return None if self.tile is None else self.kernel.shared_bytes(self)

    @property
    def registers(self) -> int | None:
        """Registers a thread starts with, where the kernel compiles without a GPU to tell; that takes a second."""
        build = getattr(self.kernel, "compile", None)
        if build is None or self.tile is None:
            return None
        return max((r.registers for r in build(self.problem, self.tile).resources.values()), default=None)

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say of the plan besides."""
        return tuple(self.kernel.notes(self.problem))

    def padded(self) -> Plan:
        """The same kernel and tile, for head dims padded to the next powers of two."""
        p = self.problem
        dim, dim_v = (1 << (n - 1).bit_length() for n in (p.dim, p.dim_v))
        return replace(self, problem=replace(p, dim=dim, dim_v=dim_v), cache={})

    @property
    def shape(self) -> str:
        """Its tile in words, or nothing; a CPU's has neither warps nor stages."""
        if self.tile is None or not self.device.is_cpu:
            return str(self.tile or "")
        return f"{self.tile.block_m}x{self.tile.block_n}"

    def __str__(self) -> str:
        tile = f"[{self.shape}]" if self.tile else ""
        return f"{self.kernel.name}{tile} {self.source}".strip()


def made_like(gradient: torch.Tensor, t: torch.Tensor) -> bool:
    """Whether `empty_like` makes of t a gradient that lies as this one does."""
    made = t if without_gaps(t) else torch.empty_like(t, device="meta")
    return made.stride() == gradient.stride()


def allocate_out(p: Problem, q: torch.Tensor, layout: str = "bshd") -> torch.Tensor:
    """An uninitialised (b, sq, hq, dv) tensor in the layout and memory order of q: sequence or heads outermost."""
    if p.out_like_q:
        return empty_like(q)
    if layout == "bhsd":
        return allocate_out(p, q.transpose(1, 2)).transpose(1, 2)
    b, sq, hq, dv = p.batch, p.seqlen_q, p.heads_q, p.dim_v
    if heads_outermost(q):
        return torch.empty((b, hq, sq, dv), dtype=p.out_dtype, device=q.device).transpose(1, 2)
    return torch.empty((b, sq, hq, dv), dtype=p.out_dtype, device=q.device)


def unviewed(out: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is no view, which autograd would not let a caller change in place."""
    if not out._is_view():
        return out
    place = out.untyped_storage(), out.storage_offset(), out.shape, out.stride()
    return torch.empty(0, dtype=out.dtype, device=out.device).set_(*place)
