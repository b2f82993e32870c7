"""Context parallel attention on several GPUs of one host, beside one of them computing everything:

    torchrun --nproc-per-node 2 -m sartor.lab.measure.several

Forward and backward of every method, of PyTorch's `context_parallel` where it runs, and of each method's transfers
alone: what is left of it if blocks of keys are not computed. All ranks start together, and the slowest counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import sartor.distributed as context
from sartor import testing
from sartor.api import attention
from sartor.distributed.local import Local
from sartor.lab.measure.links import _worst
from sartor.lab.measure.overlap import between, mark
from sartor.lab.measure.records import Record, Run, Store, sm_clock_mhz
from sartor.lab.measure.timing import synchronize
from sartor.lab.workloads.suites import checkout
from sartor.lab.workloads.workload import Workload

Tensor = torch.Tensor
Pass = Callable[[], Any]
SUITE = "several"
ALONE, OURS, TRANSFERS, PYTORCHS = "one", "context", "transfers", "pytorch"  # whose figures: before the method's name
METHODS = ("ring", "allgather", "ulysses", "usp")
ROTATIONS = ("allgather", "alltoall")  # how PyTorch's passes keys on


class Plan(NamedTuple):
    """What is measured, causal and zigzag."""

    heads: tuple[tuple[int, int], ...] = ((32, 8), (16, 16))
    tokens: tuple[int, ...] = (8192, 32768, 131072)  # of all ranks
    dim: int = 128
    dtype: str = "bfloat16"
    rounds: int = 3

    @property
    def workloads(self) -> Iterator[Workload]:
        """The whole sequences."""
        for heads in self.heads:
            for n in self.tokens:
                yield Workload(1, *heads, n, n, self.dim, self.dim, self.dtype, "causal")


class Contender(NamedTuple):
    """Its two passes, and its share of out for a comparison."""

    forward: Pass
    backward: Pass
    out: Tensor


def whole(w: Workload, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v and dout of the whole sequence, (batch, seqlen, heads, dim), the same on all ranks."""
    q, k, v = testing.make_inputs(
        w.batch, w.heads_q, w.heads_kv, w.seqlen_q, w.seqlen_kv, w.dim, w.dim_v, w.torch_dtype, device, layout="bshd",
        seed=0,
    )  # fmt: skip
    return q, k, v, testing.make_like(q)


def passes(call: Callable[..., Any], leaves: list[Tensor], dout: Tensor) -> Contender:
    """Forwards without gradients, and the backward of a forward that is run here."""
    for t in leaves:
        t.requires_grad_()
    out = call(*leaves)

    def forward() -> None:
        with torch.no_grad():
            call(*leaves)

    def backward() -> None:
        torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return Contender(forward, backward, out.detach())


def alone(w: Workload, x: tuple[Tensor, ...]) -> Contender:
    """This rank's device computes everything."""
    leaves = [t.detach().clone() for t in x[:3]]
    return passes(lambda q, k, v: attention(q, k, v, causal=True), leaves, x[3])


def shared(w: Workload, x: tuple[Tensor, ...], method: Any, where: dict[str, Any]) -> Contender:
    """By `sartor.distributed`."""
    sharding = context.Sharding.make("zigzag", w.seqlen_q, dist.get_world_size())
    *leaves, dout = (context.shard(t, sharding, dist.get_rank()).detach() for t in x)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return context.attention(q, k, v, **where, method=method, layout_of_sequence=sharding, causal=True)

    return passes(call, leaves, dout)


class Pytorchs:
    """PyTorch's `context_parallel`, which is entered once and left with `stack`."""

    def __init__(self, w: Workload, x: tuple[Tensor, ...], stack: ExitStack) -> None:
        self.w, self.x, self.stack = w, x, stack
        self.leaves: list[Tensor] = []

    def contender(self, rotation: str) -> Contender:
        """Keys passed on one way or the other."""
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        if not self.leaves:
            mesh = init_device_mesh("cuda" if self.x[0].is_cuda else "cpu", (dist.get_world_size(),))
            buffers = [t.transpose(1, 2).contiguous() for t in self.x]
            self.stack.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4))
            self.leaves = [t.detach().clone() for t in buffers]

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            set_rotate_method(rotation)
            shared = self.w.heads_q != self.w.heads_kv
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)

        *leaves, dout = self.leaves
        return passes(call, leaves, dout)


@contextmanager
def transfers_alone() -> Iterator[None]:
    """Blocks of keys are not computed; what is posted beside them is."""

    def add(self: Local, merged: Any, block: Any, k: Any, v: Any, beside: Pass = lambda: None) -> None:
        beside()

    def gradients(
        self: Local, block: Any, k: Any, v: Any, saved: Any, sums: Any, beside: Pass = lambda: None
    ) -> None:  # fmt: skip
        beside()

    with mock.patch.object(Local, "add", add), mock.patch.object(Local, "gradients", gradients):
        yield


def without_computing(run: Pass) -> Pass:
    """A pass of which only the transfers are left."""

    def transfers() -> None:
        with transfers_alone():
            run()

    return transfers


def places() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each method that so many ranks have, with what says where it runs."""
    ranks = dist.get_world_size()
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    for method in METHODS:
        if method != "usp":
            yield method, {"group": dist.group.WORLD}
        elif ranks % 2 == 0 and ranks > 2:
            yield method, {"mesh": DeviceMesh(kind, torch.arange(ranks, device="cpu").view(ranks // 2, 2))}


def contenders(
    w: Workload, x: tuple[Tensor, ...], device: torch.device, stack: ExitStack
) -> Iterator[tuple[str, Callable[[], Contender]]]:
    """Names, and what makes them."""
    yield ALONE, lambda: alone(w, x)
    for method, where in places():
        yield f"{OURS}:{method}", lambda method=method, where=where: shared(w, x, method, where)  # type: ignore[misc]
    if device.type == "cuda":
        theirs = Pytorchs(w, x, stack)
        for rotation in ROTATIONS:
            yield f"{PYTORCHS}:{rotation}", lambda rotation=rotation: theirs.contender(rotation)  # type: ignore[misc]


def sample(run: Pass, device: torch.device) -> float:
    """Milliseconds of one pass on the slowest rank, all having started together."""
    dist.barrier()
    synchronize(device)
    begin = mark(device)
    run()
    end = mark(device)
    synchronize(device)
    return _worst(between(begin, end), device)


def measure(plan: Plan, device: torch.device, run: Run) -> Iterator[Record]:
    """A record of each workload, contender and pass; those of a workload were timed in turns, in the same order on all
    ranks."""
    for w in plan.workloads:
        with ExitStack() as stack:
            yield from _measure(plan, w, device, run, stack)


def _measure(plan: Plan, w: Workload, device: torch.device, run: Run, stack: ExitStack) -> Iterator[Record]:
    x = whole(w, device)
    found: dict[str, Contender] = {}
    skipped: dict[str, str] = {}
    for name, make in contenders(w, x, device, stack):
        try:
            found[name] = make()
        except Exception as error:  # PyTorch's own: of equal calls on all ranks
            if not name.startswith(PYTORCHS):
                raise
            skipped[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    jobs: dict[str, tuple[Pass, Pass]] = {}
    for name, one in found.items():
        jobs[name] = one.forward, one.backward
        if name.startswith(OURS):
            method = name.partition(":")[2]
            jobs[f"{TRANSFERS}:{method}"] = without_computing(one.forward), without_computing(one.backward)
    names = list(jobs)
    for number, mode in enumerate(("fwd", "bwd")):
        for name in names:
            jobs[name][number]()  # compiles, and takes memory
        before, times = sm_clock_mhz(device), {name: list[float]() for name in names}
        for turn in range(plan.rounds):
            first = turn * len(names) // plan.rounds
            for name in names[first:] + names[:first]:
                times[name].append(sample(jobs[name][number], device))
        for name in (*names, *skipped):
            record = Record.of(run, name, replace(w, mode=mode))
            record.counters = {"ranks": dist.get_world_size()}
            record.skipped = skipped.get(name)
            if name in times:
                ordered = sorted(times[name])
                record.ms, record.ms_p20, record.ms_p80 = median(ordered), ordered[0], ordered[-1]
                if not name.startswith(TRANSFERS):
                    record.tflops = record.workload.flops / record.ms * 1e-9
            if name.startswith(OURS):
                record.errors = {"out rel": _error(w, found[name].out, found[ALONE].out, device)}
            record.clock_mhz_before, record.clock_mhz_after = before, sm_clock_mhz(device)
            yield record


def _error(w: Workload, out: Any, all_of_it: Any, device: torch.device) -> float:
    """Norm of the difference to one device's, over that one's, on the worst rank."""
    sharding = context.Sharding.make("zigzag", w.seqlen_q, dist.get_world_size())
    want = context.shard(all_of_it, sharding, dist.get_rank()).float()
    return _worst(((out.float() - want).norm() / want.norm()).item(), device)


def main(results: Path, plan: Plan | None = None) -> None:
    """Join the other processes, measure, and let rank 0 write the records."""
    number, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    many = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", number) if many else torch.device("cpu")
    if many:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if many else "gloo")
    small = Plan(((4, 2),), (512,), 16, "float32", 1)  # a CPU has nothing to say of GPUs: for a look at what comes
    run = Run.start(SUITE, device)
    store = Store(results, run) if dist.get_rank() == 0 else None
    for record in measure(plan or (Plan() if many else small), device, run):
        if store is not None:
            store.add([record])
    dist.barrier()
    if store is not None:
        store.close(replace=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    root = checkout()
    main(
        Path(os.environ["OUT"]) if "OUT" in os.environ else root / "benchmarks" / "results" if root else Path("results")
    )
