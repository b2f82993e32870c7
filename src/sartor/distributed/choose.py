"""How long each method should take, and which one `method="auto"` takes: the least by this model.

A step of the ring takes max(compute of a block, transfer of keys of the next one and of gradients of the one before);
the other methods add up what they transfer and what they compute. Compute is FLOPs over a kernel rate that depends on
how far a kernel loops and how many rows it has, and never less than what the host needs for a step; a transfer is a
latency and bytes over the rate of the link, within a host or between hosts. Everything the model reads is in
`machine.Machine`. Masks other than a band count as if everything were seen, so that no device is asked.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from sartor.distributed.machine import Machine, machine_of
from sartor.distributed.sharding import Runs, Sharding
from sartor.distributed.sight import Sight, sight
from sartor.problem import Call

Window = tuple[int | None, int | None] | None


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

    def repeats(self, shares: int) -> int:
        """How often a key head is there where so many ranks share heads, and some must share one."""
        group = self.heads_q // max(self.heads_kv, 1)  # none are refused later, in words
        return group // math.gcd(max(self.heads_q // shares, 1), group)

    @property
    def wide(self) -> int:
        """Bytes of an element of partial results and of gradients that are summed over ranks."""
        return max(4, self.itemsize)


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
    table = table_of_queries(call, 1 in sizes_of(queries))  # on any rank, as all must choose alike
    return Work(
        q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.element_size(), queries, keys, ranks, shares,
        call.causal, call.window, bool(table),
        torch.is_grad_enabled() and call.needs_gradient,
    )  # fmt: skip


def table_of_queries(call: Call, single: bool) -> str:
    """Which of bias and mask is a tensor that depends on queries, "" for none. Its row for a shard of one place has the
    shape of a row for all: `single` says to take the one for the other."""
    for name, table in (("bias", call.bias), ("mask", call.mask)):
        if isinstance(table, torch.Tensor) and table.dim() > 1 and (single or table.shape[-2] != 1):
            return name
    return ""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def sizes_of(sharding: str) -> tuple[int, ...]:
    """Places of the shards, by the text of their sharding."""
    return Sharding.parse(sharding).sizes


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


def area(view: Sight, queries: Sharding, block: Runs, reader: int) -> tuple[float, int]:
    """(pairs of a query and a key that a block of keys computes, keys that are sent for it)."""
    pairs = 0.0
    for i, q in enumerate(queries.runs[reader]):
        for kv in block:
            start, stop = view.seen(reader, i, kv)
            if start < stop:
                _, _, lo, hi = view.spans[reader][i]
                first, last = (-((kv.first - end) // kv.step) for end in (lo, hi))
                full = max(0, min(stop, last) - max(start, first))
                pairs += q.count * (stop - start + full) / 2
    return pairs, sum(part.count for _, part in view.needed(reader, block))


@lru_cache(maxsize=8192)
def _areas(causal: bool | str, window: Window, queries: str, keys: str, rank: int) -> tuple[tuple[float, int], ...]:
    """`area` of the keys of each owner for the queries of a rank, by the texts of shardings; then that of the run of
    its own keys that a ring's backward computes last."""
    shards, of_keys = Sharding.parse(queries), Sharding.parse(keys)
    view = sight(causal, window, None, shards, of_keys.seqlen)
    found = tuple(area(view, shards, runs, rank) for runs in of_keys.runs)
    own = of_keys.runs[rank]
    return *found, area(view, shards, own[-1:] if len(own) > 1 else (), rank)


def _passes(queries: Sharding, keys: Sharding, work: Work, machine: Machine, stride: int, backward: bool) -> Time:
    """The ring over shards of `stride` ranks each, on the slowest of its first, middle and last rank."""
    return max(
        (_pass(queries, keys, work, machine, stride, backward, rank) for rank in
         sorted({0, queries.ranks // 2, queries.ranks - 1})),
        key=lambda time: time.total,
    )  # fmt: skip


def compute(work: Work, machine: Machine, backward: bool, shares: int, block: tuple[float, float, float]) -> float:
    """Seconds for a block of (pairs, queries, keys) and the heads of one of so many ranks that share them."""
    pairs, queries, keys = block
    flops = pairs * work.pair / shares * (2.5 if backward else 1)
    if not flops:  # nor a rate to be asked for, of a batch of 0 for one
        return 0.0
    rows = keys if backward else queries  # that a kernel holds while it loops over the others
    rate = machine.rate(backward, pairs / rows, rows * work.batch * work.heads_q / shares, work.itemsize)
    return max(flops / rate, machine.step)


def _pass(
    queries: Sharding, keys: Sharding, work: Work, machine: Machine, stride: int, backward: bool, rank: int
) -> Time:
    """One rank: while a block is computed, keys of the next one come and gradients of the one before go."""
    ranks, rows = queries.ranks, queries.count(rank)
    *found, late = _areas(work.causal, work.window, queries.text, keys.text, rank)
    blocks = [found[(rank - t) % ranks] for t in range(ranks)]
    busy = [compute(work, machine, backward, stride, (pairs, rows, sent)) for pairs, sent in blocks]

    def transfers(itemsize: int) -> list[float]:
        return [0.0] + [
            machine.transfer(
                work.key_bytes(sent, itemsize) * work.repeats(stride) / stride, rank * stride,
                (rank - t) % ranks * stride,
            ) for t, (_, sent) in enumerate(blocks) if t
        ] + [0.0]  # fmt: skip

    come, go, last = transfers(work.itemsize), [0.0] * (ranks + 1), 0.0
    if backward:
        last = busy[0] * late[0] / blocks[0][0] if ranks > 1 and late[0] else 0.0
        busy[0] -= last
        go = [0.0, *transfers(work.wide)[:-1]]  # of the block before
    exposed = sum(max(0.0, come[t + 1] + go[t] - busy[t]) for t in range(ranks)) + max(0.0, go[ranks] - last)
    return Time(sum(busy) + last, exposed)


def _ring(work: Work, machine: Machine, backward: bool) -> Time:
    return _passes(Sharding.parse(work.queries), Sharding.parse(work.keys), work, machine, 1, backward)


def _allgather(work: Work, machine: Machine, backward: bool) -> Time:
    queries, far = Sharding.parse(work.queries), work.ranks - 1
    worst = 0.0
    for rank in sorted({0, far // 2, far}):
        pairs = sum(pairs for pairs, _ in _areas(work.causal, work.window, work.queries, work.keys, rank)[:-1])
        block = pairs, queries.count(rank), Sharding.parse(work.keys).seqlen
        worst = max(worst, compute(work, machine, backward, 1, block))
    return Time(worst, machine.transfer(_gathered(work, backward), 0, far, 2 if backward else 1))


def _gathered(work: Work, backward: bool) -> float:
    """Bytes of k and v that a rank gets; in the backward, of dk and dv that it gives too."""
    wire = work.itemsize + work.wide if backward else work.itemsize
    return work.key_bytes(Sharding.parse(work.keys).seqlen, wire) * (work.ranks - 1) / work.ranks


def _shuffled(work: Work, shares: int, backward: bool) -> float:
    """Bytes that a rank gives in all-to-alls: of q, k, v, out and lse; in the backward, of dout, dq, dk and dv."""
    queries, keys = Sharding.parse(work.queries), Sharding.parse(work.keys)
    rows = queries.seqlen / work.ranks * work.batch * work.heads_q * (work.dim + work.dim_v) * work.itemsize
    lse = 0 if backward else queries.seqlen / work.ranks * work.batch * work.heads_q * work.wide
    return (rows + lse + work.key_bytes(keys.seqlen / work.ranks) * work.repeats(shares)) * (shares - 1) / shares


def _passed(work: Work, rank: int, backward: bool) -> float:
    """Bytes that a rank of the ring gives: keys, and in the backward gradients of those of others."""
    queries, keys = (Sharding.parse(text).joined(work.shares) for text in (work.queries, work.keys))
    view, number = _sight(work, queries), rank // work.shares
    others = [r for r in range(keys.ranks) if r != number]
    given = sum(area(view, queries, keys.runs[number], reader)[1] for reader in others)
    got = sum(area(view, queries, keys.runs[owner], number)[1] for owner in others) if backward else 0
    count = work.key_bytes(given) + work.key_bytes(got, work.wide)
    return count * work.repeats(work.shares) / work.shares


def traffic(work: Work, method: str, rank: int, backward: bool) -> float:
    """Bytes that a rank gives to others in one pass, by this model; an all-gather counts as its own to each of them."""
    if method == "allgather":
        return _gathered(work, backward)
    if method == "ring":
        return _passed(work, rank, backward)
    shares = work.ranks if method == "ulysses" else work.shares
    return _shuffled(work, shares, backward) + _passed(work._replace(shares=shares), rank, backward)


def _ulysses(work: Work, machine: Machine, backward: bool) -> Time:
    return _usp(work._replace(shares=work.ranks), machine, backward)


def _usp(work: Work, machine: Machine, backward: bool) -> Time:
    queries, keys = (Sharding.parse(text).joined(work.shares) for text in (work.queries, work.keys))
    inner = _passes(queries, keys, work, machine, work.shares, backward)
    count = _shuffled(work, work.shares, backward)
    shuffles = 2 * machine.step + machine.transfer(count, 0, work.shares - 1, 2)
    return Time(inner.compute, inner.exposed + shuffles)
