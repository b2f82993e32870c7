"""Errors and traffic of context parallel attention, over gloo on a CPU:

    torchrun --nproc-per-node 8 -m sartor.lab.measure.context

Errors are against float64, of the first 2, 4 and 8 ranks by every method, beside those of one process. What many steps
of a ring do to them is computed in one process: once merged in float32, as here, and once with partial results and
sums kept in the inputs' dtype. Traffic is counted, in bytes that a rank gives to others, beside what the model says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import sartor.distributed as context
from sartor import testing
from sartor.api import attention
from sartor.distributed import choose
from sartor.distributed.local import Local, Sums
from sartor.distributed.merge import Merged
from sartor.distributed.transport import Transport
from sartor.kernels.spec import Saved
from sartor.lab.measure.records import Record, Run, Store
from sartor.lab.workloads.suites import checkout
from sartor.lab.workloads.workload import Workload
from sartor.problem import Call, wide

Tensor = torch.Tensor
Results = dict[str, Tensor]
SUITE = "distributed"
STEPS = (1, 4, 16, 64)
PROBLEMS = [Workload(1, 8, 4, 1024, 1024, 64, 64, dtype, "causal") for dtype in ("float32", "bfloat16")]
TRAFFIC = [Workload(1, 8, 4, 4096, 4096, 64, 64, "bfloat16", mask) for mask in ("causal", "window256")]
METHODS = ("ring", "allgather", "ulysses", "usp")
CPU = torch.device("cpu")


class Data(NamedTuple):
    """The whole sequence, (batch, seqlen, heads, dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def make(cls, w: Workload) -> Data:
        """The same on all ranks."""
        q, k, v = testing.make_inputs(
            w.batch,
            w.heads_q,
            w.heads_kv,
            w.seqlen_q,
            w.seqlen_kv,
            w.dim,
            w.dim_v,
            w.torch_dtype,
            CPU,
            layout="bshd",
            seed=0,
        )
        noise = torch.Generator("cpu").manual_seed(1)
        dout = torch.randn(q.shape, generator=noise, dtype=torch.float32, device="cpu")
        return cls(q, k, v, dout.to(q.dtype))


def options(w: Workload) -> dict[str, Any]:
    """Of `attention`, for a mask of this module."""
    return {"causal": bool(w.pattern.causal), "window": (w.pattern.window - 1, 0) if w.pattern.window else None}


def sharding_of(w: Workload, ranks: int) -> context.Sharding:
    """Zigzag where that is what makes work equal."""
    return context.Sharding.make("zigzag" if w.mask == "causal" else "contiguous", w.seqlen_q, ranks)


def on_ranks(w: Workload, x: Data, where: dict[str, Any], method: Any, ranks: int) -> tuple[Results, Results]:
    """This rank's out and lse, then its dq, dk and dv."""
    sharding, rank = sharding_of(w, ranks), dist.get_rank()
    q, k, v, dout = (context.shard(t, sharding, rank).requires_grad_() for t in x)
    out, lse = context.attention(
        q, k, v, **where, method=method, layout_of_sequence=sharding, return_lse=True, **options(w)
    )
    found = torch.autograd.grad(out, (q, k, v), dout)
    return {"out": out.detach(), "lse": lse.detach()}, dict(zip(("dq", "dk", "dv"), found, strict=True))


def joined(parts: Results, sharding: context.Sharding, group: Any) -> Results:
    """Results of the whole sequence, on all ranks."""
    transport = Transport(group)
    found = {}
    for name, t in parts.items():
        shards = [x for (x,) in transport.gather([t], [[tuple(t.shape)]] * transport.ranks)]
        found[name] = context.unshard(shards, sharding, 2 if name == "lse" else 1)
    return found


def alone(w: Workload, x: Data) -> Results:
    """What one process computes by `sartor.attention`."""
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    out, lse = attention(q, k, v, return_lse=True, **options(w))
    found = torch.autograd.grad(out, (q, k, v), x.dout)
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(("dq", "dk", "dv"), found, strict=True))


def in_steps(w: Workload, x: Data, steps: int, rounded: bool) -> Results:
    """A ring of so many ranks, computed in one process; `rounded` keeps in the inputs' dtype what is summed."""
    sharding = sharding_of(w, steps)

    def kept(t: Tensor) -> Tensor:
        return t.to(w.torch_dtype).to(t.dtype) if rounded else t

    shards = [[context.shard(t, sharding, rank) for t in x] for rank in range(steps)]
    totals = [[torch.zeros(t.shape, dtype=wide(t.dtype), device=t.device) for t in shard[1:3]] for shard in shards]
    found: dict[str, list[Tensor]] = {"out": [], "lse": [], "dq": []}
    for rank, (q, k, v, dout) in enumerate(shards):
        local = Local(Call(q, k, v, **options(w)), sharding, sharding, rank)
        owners = [(rank - t) % steps for t in range(steps)]
        merged, sums = Merged(q, w.dim_v, wide(q.dtype)), Sums(local)
        for owner in owners:
            local.add(merged, sharding.runs[owner], shards[owner][1], shards[owner][2])
            merged.out = kept(merged.out)
        saved = Saved(merged.out.to(q.dtype), merged.lse, dout, None)
        for owner in owners:
            added = sums.start(*shards[owner][1:3])
            local.gradients(sharding.runs[owner], shards[owner][1], shards[owner][2], saved, sums)
            sums.dq = kept(sums.dq)
            totals[owner] = [kept(total + d) for total, d in zip(totals[owner], added, strict=True)]
        for name, t in (("out", saved.out), ("lse", merged.lse), ("dq", sums.dq.to(q.dtype))):
            found[name].append(t)
    found |= {n: [total[i].to(w.torch_dtype) for total in totals] for i, n in enumerate(("dk", "dv"))}
    return {n: context.unshard(ts, sharding, 2 if n == "lse" else 1) for n, ts in found.items()}


class Exact(NamedTuple):
    """The float64 results of a problem."""

    w: Workload
    x: Data
    found: Results

    @classmethod
    def make(cls, w: Workload, x: Data) -> Exact:
        """By the reference."""
        found = dict(zip(("out", "lse"), testing.reference(*x[:3], **options(w)), strict=True))
        return cls(w, x, found | testing.reference_gradients(*x, **options(w)))

    def records(self, run: Run, provider: str, results: Results, within: bool = True) -> Iterator[Record]:
        """One of each pass. With `within`, AssertionError where a result is over the budget of one device."""
        if within:
            testing.check_all(results, *self.x, **options(self.w))
        errors = {name: testing.measure(t, self.found[name]) for name, t in results.items()}
        for mode, names in (("fwd", ("out", "lse")), ("bwd", ("dq", "dk", "dv"))):
            record = Record.of(run, provider, replace(self.w, mode=mode))
            record.errors = {f"{n} {what}": getattr(errors[n], what) for n in names for what in ("rel", "max")}
            yield record


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the bytes that this rank gives to others; an all-gather gives its own to each of them."""
    total = [0]

    def size(t: Tensor) -> int:
        return t.numel() * t.element_size()

    def counting(name: str, given: Any) -> Any:
        inner = getattr(Transport, name)

        def call(self: Transport, *args: Any, **kwargs: Any) -> Any:
            total[0] += given(self, args[0])
            return inner(self, *args, **kwargs)

        return mock.patch.object(Transport, name, call)

    def of_others(self: Transport, parts: Sequence[Sequence[Tensor]]) -> int:
        return sum(size(t) for rank, part in enumerate(parts) if rank != self.rank for t in part)

    with (
        counting("post", lambda self, sends: sum(size(t) for t, _ in sends)),
        counting("gather", lambda self, xs: sum(map(size, xs)) * (self.ranks - 1)),
        counting("reduce_scatter", of_others),
        counting("all_to_all", of_others),
    ):
        yield total


def traffic(w: Workload, where: dict[str, Any], method: Any, group: Any, run: Run) -> list[Record]:
    """Bytes that the busiest rank gives, counted and by the model; a record of each pass."""
    ranks, rank = group.size(), dist.get_rank()
    x, sharding = Data.make(w), sharding_of(w, ranks)
    leaves = [context.shard(t, sharding, rank).requires_grad_() for t in x[:3]]

    def forward() -> Tensor:
        out = context.attention(
            leaves[0], leaves[1], leaves[2], **where, method=method, layout_of_sequence=sharding, **options(w)
        )
        assert isinstance(out, Tensor)
        return out

    forward()  # ranks agree, once
    with counted() as forwards:
        out = forward()
    with counted() as backwards:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    call = Call(leaves[0], leaves[1], leaves[2], **options(w))
    shares = where["mesh"].size(1) if "mesh" in where else 1
    records = []
    for mode, bytes_given in (("fwd", forwards), ("bwd", backwards)):
        model = choose.traffic(
            choose.work_of(call, ranks, shares, sharding.text, sharding.text), method, rank, mode == "bwd"
        )
        pair = torch.tensor([float(bytes_given[0]), float(model)], dtype=torch.float32, device="cpu")
        dist.all_reduce(pair, dist.ReduceOp.MAX, group=group)
        record = Record.of(run, f"context:{method}:{ranks}", replace(w, mode=mode))
        record.counters = {"bytes given": pair[0].item(), "bytes by the model": pair[1].item()}
        records.append(record)
    return records


def places(ranks: int, groups: dict[int, Any], meshes: dict[int, DeviceMesh]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each method with what says where it runs."""
    for method in METHODS:
        if method != "usp":
            yield method, {"group": groups[ranks]}
        elif ranks in meshes:
            yield method, {"mesh": meshes[ranks]}


def main(results: Path) -> None:
    """Join the other processes, measure, and let rank 0 write the records."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    counts = [n for n in (2, 4, 8) if n <= world]
    groups = {n: dist.new_group(list(range(n))) for n in counts}
    meshes = {n: DeviceMesh("cpu", [list(range(n // 2)), list(range(n // 2, n))], mesh_dim_names=("ring", "heads"))
              for n in counts if n > 2}  # fmt: skip
    run = Run.start(SUITE, CPU)
    store = Store(results, run) if rank == 0 else None

    def keep(records: Iterator[Record] | list[Record]) -> None:
        if store is not None:
            store.add(records)

    for w in PROBLEMS:
        x = Data.make(w)
        exact = Exact.make(w, x) if rank == 0 else None
        if exact is not None:
            keep(exact.records(run, "context:alone:1", alone(w, x)))
            for steps in STEPS:
                keep(exact.records(run, f"steps:{steps}", in_steps(w, x, steps, False)))
                if w.dtype != "float32":
                    keep(exact.records(run, f"rounded:{steps}", in_steps(w, x, steps, True), within=False))
        dist.barrier()
        for ranks in counts:
            for method, where in places(ranks, groups, meshes) if rank < ranks else ():
                parts = on_ranks(w, x, where, method, ranks)
                found = joined(parts[0] | parts[1], sharding_of(w, ranks), groups[ranks])
                if exact is not None:
                    keep(exact.records(run, f"context:{method}:{ranks}", found))
    for w in TRAFFIC:
        for ranks in counts:
            for method, where in places(ranks, groups, meshes) if rank < ranks else ():
                keep(traffic(w, where, method, groups[ranks], run))
    dist.barrier()
    if store is not None:
        store.close(replace=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    root = checkout()
    main(root / "benchmarks" / "results" if root else Path("results"))
