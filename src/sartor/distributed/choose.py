"""How long each method should take, and which one `method="auto"` takes: the least by this model.

A step of the ring takes max(compute of the block before, transfer of the next one); the other methods add up what they
transfer and what they compute. Compute is FLOPs over a kernel rate that depends on the length of a block; a transfer is
a latency and bytes over the rate of the link, NVLink within a host, the network between hosts. Everything the model
reads is in `Machine`. Masks other than a band count as if everything were seen, so that no device is asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from sartor.distributed.sharding import Sharding
from sartor.distributed.sight import Sight, sight
from sartor.problem import Call

Window = tuple[int | None, int | None] | None


@dataclass(frozen=True)
class Machine:
    """What the model knows of a machine. Rates of kernels are bfloat16's at head dim 128, (tokens, TFLOP/s), from the
    records that `source` names; rates of links are 80 % of what their makers state, in one direction."""

    name: str
    forward: tuple[tuple[int, float], ...]
    backward: tuple[tuple[int, float], ...]
    source: str
    host_ranks: int  # ranks of a host
    near: float  # bytes/s to a rank of the same host
    far: float  # bytes/s to a rank of another
    near_latency: float  # seconds
    far_latency: float
    step: float  # seconds that a step costs the host: launches, and the merging of small results
    memory: float  # bytes of a rank

    def rate(self, backward: bool, length: int, itemsize: int) -> float:
        """FLOP/s of a kernel on a block of so many tokens, between two records on a logarithmic scale."""
        table = self.backward if backward else self.forward
        slower = {2: 1.0, 4: 0.25, 8: 0.05}.get(itemsize, 1.0)
        at = math.log2(max(length, 1))
        points = [(math.log2(n), rate * 1e12 * slower) for n, rate in table]
        if at <= points[0][0]:
            return points[0][1] * 2 ** (at - points[0][0])  # below, the time of a block no longer shrinks
        for (x0, y0), (x1, y1) in pairwise(points):
            if at <= x1:
                return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
        return points[-1][1]

    def transfer(self, count: float, one: int, other: int) -> float:
        """Seconds for so many bytes from one rank to another."""
        if count == 0:
            return 0.0
        near = one // self.host_ranks == other // self.host_ranks
        return (self.near_latency + count / self.near) if near else (self.far_latency + count / self.far)


H200 = Machine(
    "h200",
    ((512, 572.968), (1024, 627.736), (2048, 677.707), (4096, 707.996), (8192, 735.778), (16384, 752.818)),
    ((512, 360.171), (1024, 478.377), (2048, 523.86), (4096, 574.332), (8192, 594.928), (16384, 596.098)),
    "benchmarks/results/h200/paper.jsonl, runs 20261123T173650-6a6b (forward) and 20261122T182849-030f (backward)",
    host_ranks=8, near=0.8 * 450e9, far=0.8 * 50e9, near_latency=10e-6, far_latency=20e-6, step=30e-6, memory=141e9,
)  # fmt: skip
CPU = Machine(
    "cpu", ((512, 0.1), (4096, 0.1)), ((512, 0.1), (4096, 0.1)), "a guess: no record of several processes",
    host_ranks=1 << 20, near=2e9, far=2e9, near_latency=100e-6, far_latency=100e-6, step=300e-6, memory=16e9,
)  # fmt: skip


class Work(NamedTuple):
    """A call as the model sees it: numbers and names only."""

    batch: int
    heads_q: int
    heads_kv: int
    dim: int
    dim_v: int
    itemsize: int
    queries: str
    keys: str
    ranks: int
    shares: int  # ranks that share heads: 1 but for a mesh of two dims
    causal: bool | str
    window: Window
    rows: bool  # whether a bias or mask tensor depends on queries
    gradient: bool

    @property
    def pair(self) -> int:
        """Useful FLOPs of the forward for a query and a key."""
        return 2 * self.batch * self.heads_q * (self.dim + self.dim_v)

    def key_bytes(self, tokens: float, itemsize: int | None = None) -> float:
        """Bytes of k and v."""
        size = self.itemsize if itemsize is None else itemsize
        return tokens * self.batch * self.heads_kv * (self.dim + self.dim_v) * size


class Time(NamedTuple):
    """Seconds of a pass on the slowest rank that was looked at."""

    compute: float
    exposed: float  # transfers that no computation hides

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.exposed


class Forecast(NamedTuple):
    """What the model says of one method: its two passes, or why it cannot be taken."""

    forward: Time
    backward: Time
    reason: str = ""

    def seconds(self, gradient: bool) -> float:
        """Of a call, with its backward where there is one."""
        if self.reason:
            return math.inf
        return self.forward.total + (self.backward.total if gradient else 0.0)


NEVER = Time(math.inf, math.inf)


def work_of(call: Call, ranks: int, shares: int, queries: str, keys: str) -> Work:
    """The numbers of a call of local shards in layout bshd."""
    q, k, v = call.q, call.k, call.v
    tables = [t for t in (call.bias, call.mask) if isinstance(t, torch.Tensor)]
    return Work(
        q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.element_size(), queries, keys, ranks, shares,
        call.causal, call.window, any(t.dim() > 1 and t.shape[-2] != 1 for t in tables),
        torch.is_grad_enabled() and call.needs_gradient,
    )  # fmt: skip


def machine_of(device: torch.device) -> Machine:
    """The machine whose numbers are taken for a device."""
    return CPU if device.type == "cpu" else H200


def choose(call: Call, ranks: Any, queries: str, keys: str) -> str:
    """The method that takes least time by the model; the same on all ranks, as it reads only what they share."""
    work = work_of(call, ranks.ranks, ranks.heads_ranks, queries, keys)
    return str(best(tuple(work), call.q.device.type, ranks.heads != ""))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def best(work: tuple[Any, ...], device: str, two_dims: bool) -> str:
    """The name of the fastest method, "usp" for a mesh of two dims."""
    if two_dims:
        return "usp"
    found = forecasts(Work(*work), machine_of(torch.device(device)))
    gradient = Work(*work).gradient
    return min(("ring", "allgather", "ulysses"), key=lambda name: found[name].seconds(gradient))


@lru_cache(maxsize=1024)
def forecasts(work: Work, machine: Machine) -> dict[str, Forecast]:
    """What the model says of every method."""
    if work.shares > 1:
        return {"usp": Forecast(_usp(work, machine, False), _usp(work, machine, True))}
    found = {}
    reasons = {"ring": "", "allgather": _too_much(work, machine), "ulysses": _no_shares(work)}
    for name, model in (("ring", _ring), ("allgather", _allgather), ("ulysses", _ulysses)):
        if reasons[name]:
            found[name] = Forecast(NEVER, NEVER, reasons[name])
        else:
            found[name] = Forecast(model(work, machine, False), model(work, machine, True))
    return found


def _too_much(work: Work, machine: Machine) -> str:
    need = work.key_bytes(Sharding.parse(work.keys).seqlen)
    need += work.key_bytes(Sharding.parse(work.keys).seqlen, 4) if work.gradient else 0
    if need <= machine.memory / 8:
        return ""
    return f"all keys take {need / 1e9:.1f} GB on every rank, more than an eighth of its {machine.memory / 1e9:.0f} GB"


def _no_shares(work: Work) -> str:
    if work.heads_q % work.ranks:
        return f"heads of q must be a multiple of the ranks, got {work.heads_q} and {work.ranks}"
    return "a bias or mask tensor depends on queries" if work.rows else ""


def _sight(work: Work, queries: Sharding) -> Sight:
    return sight(work.causal, work.window, None, queries, Sharding.parse(work.keys).seqlen)


def area(view: Sight, queries: Sharding, keys: Sharding, reader: int, owner: int) -> tuple[float, int]:
    """(pairs of a query and a key that a block computes, keys that are sent for it)."""
    pairs = 0.0
    for i, q in enumerate(queries.runs[reader]):
        for kv in keys.runs[owner]:
            start, stop = view.seen(reader, i, kv)
            if start < stop:
                _, _, lo, hi = view.spans[reader][i]
                first, last = (-((kv.first - end) // kv.step) for end in (lo, hi))
                full = max(0, min(stop, last) - max(start, first))
                pairs += q.count * (stop - start + full) / 2
    return pairs, sum(part.count for _, part in view.needed(reader, keys.runs[owner]))


def _passes(queries: Sharding, keys: Sharding, work: Work, machine: Machine, stride: int, backward: bool) -> Time:
    """The ring over shards of `stride` ranks each, on the slowest of its first, middle and last rank."""
    view, ranks = _sight(work, queries), queries.ranks
    heads = stride  # of which each rank has a part
    worst = Time(0.0, 0.0)
    for rank in sorted({0, ranks // 2, ranks - 1}):
        blocks = [area(view, queries, keys, rank, (rank - t) % ranks) for t in range(ranks)]
        length = min(run.count for run in queries.runs[rank]) if queries.runs[rank] else 1
        rate = machine.rate(backward, length, work.itemsize)
        flops = work.pair / heads * (2.5 if backward else 1)
        compute = [pairs * flops / rate + (machine.step if pairs else 0) for pairs, _ in blocks]
        wire = work.itemsize + 4 if backward else work.itemsize
        moved = [
            machine.transfer(work.key_bytes(sent, wire) / heads, rank * stride, (rank - t) % ranks * stride)
            for t, (_, sent) in enumerate(blocks)
        ]
        exposed = sum(max(0.0, x - c) for c, x in zip(compute, moved[1:], strict=False))
        worst = max(worst, Time(sum(compute), exposed), key=lambda time: time.total)
    return worst


def _ring(work: Work, machine: Machine, backward: bool) -> Time:
    return _passes(Sharding.parse(work.queries), Sharding.parse(work.keys), work, machine, 1, backward)


def _allgather(work: Work, machine: Machine, backward: bool) -> Time:
    queries, keys = Sharding.parse(work.queries), Sharding.parse(work.keys)
    view, far = _sight(work, queries), work.ranks - 1
    wire = work.itemsize + 4 if backward else work.itemsize
    count = work.key_bytes(keys.seqlen, wire) * (work.ranks - 1) / work.ranks
    worst = 0.0
    for rank in sorted({0, far // 2, far}):
        pairs = sum(area(view, queries, keys, rank, owner)[0] for owner in range(keys.ranks))
        length = min((run.count for run in queries.runs[rank]), default=1)
        flops = pairs * work.pair * (2.5 if backward else 1)
        worst = max(worst, flops / machine.rate(backward, length, work.itemsize) + machine.step)
    return Time(worst, machine.transfer(count, 0, far))


def _shuffle(work: Work, machine: Machine, shares: int, backward: bool) -> float:
    """Seconds of the all-to-alls: q, k, v and out there and back; in the backward, dout, dq, dk and dv."""
    queries, keys = Sharding.parse(work.queries), Sharding.parse(work.keys)
    group = work.heads_q // work.heads_kv
    each = group // math.gcd(max(work.heads_q // shares, 1), group)
    rows = queries.seqlen / work.ranks * work.batch * work.heads_q * (work.dim + work.dim_v) * work.itemsize
    count = rows + work.key_bytes(keys.seqlen / work.ranks) * each
    return 2 * machine.step + machine.transfer(count * (shares - 1) / shares, 0, shares - 1)


def _ulysses(work: Work, machine: Machine, backward: bool) -> Time:
    return _usp(work._replace(shares=work.ranks), machine, backward)


def _usp(work: Work, machine: Machine, backward: bool) -> Time:
    queries, keys = (Sharding.parse(text).joined(work.shares) for text in (work.queries, work.keys))
    inner = _passes(queries, keys, work, machine, work.shares, backward)
    return Time(inner.compute, inner.exposed + _shuffle(work, machine, work.shares, backward))
