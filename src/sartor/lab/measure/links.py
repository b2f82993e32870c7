"""doctor --distributed: rates of kernels and of links, measured by all ranks at once, for `method="auto"` of
`sartor.distributed.attention`.

Every rank takes part in every measurement and the slowest one counts, since a call ends when its slowest rank does.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from sartor import ops
from sartor.distributed.machine import H200, Machine, Points, file_of
from sartor.distributed.merge import Merged
from sartor.distributed.transport import Transport
from sartor.lab.measure import providers
from sartor.lab.measure.doctor import Finding
from sartor.lab.measure.memory import available_bytes
from sartor.lab.measure.timing import Budget, interleave, synchronize
from sartor.lab.workloads.workload import Inputs, Workload
from sartor.problem import Call

ROWS = 128  # that a multiprocessor holds
SMALL, REPEATS = 1 << 12, 15  # bytes of a transfer that takes its latency; how often transfers are timed


class Plan(NamedTuple):
    """What is measured on a kind of device."""

    dtypes: tuple[str, ...]  # the first at every length, the others at the middle one
    lengths: tuple[int, ...]
    tokens: int  # of a block, over its batch items
    heads: int
    dim: int
    large: int  # bytes of a transfer that takes its rate


GPU = Plan(("bfloat16", "float32"), (512, 1024, 2048, 4096, 8192, 16384), 16384, 16, 128, 1 << 27)
CPU = Plan(("float32", "bfloat16", "float64"), (256, 512, 1024, 2048), 2048, 4, 64, 1 << 22)


class Layout(NamedTuple):
    """How ranks lie on hosts."""

    hosts: int
    ranks: int  # of each

    @classmethod
    def find(cls) -> Layout:
        """Ask all ranks. Raises ValueError where hosts have unequally many, or ranks that do not follow one another."""
        names: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(names, socket.gethostname())
        order = list(dict.fromkeys(names))
        each = len(names) // len(order)
        if names != [name for name in order for _ in range(each)]:
            raise ValueError(f"hosts must have equally many ranks that follow one another, got {names}")
        return cls(len(order), each)


def examine(plan: Plan | None = None) -> Iterator[Finding]:
    """Join the other processes, measure, keep what was found on every host. Findings come on rank 0 only.

    Raises:
        ValueError: this process was not started by torchrun.
    """
    if "RANK" not in os.environ:
        raise ValueError(
            "--distributed must be run by torchrun, as in: torchrun --nproc-per-node 4 -m sartor doctor --distributed"
        )
    number, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    device = torch.device("cuda", number % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo")
    try:
        machine = measure(device, plan or (GPU if gpus else CPU))
        path = file_of(device)
        if number == 0:
            machine.write(path)
        if dist.get_rank() == 0:
            yield from _findings(machine, str(path))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def measure(device: torch.device, plan: Plan) -> Machine:
    """What all ranks of the default group measure; the same on all of them."""
    layout, ranks = Layout.find(), dist.get_world_size()
    if ranks < 2:
        raise ValueError("--distributed must have 2 ranks or more to measure a link, got 1")
    forward, backward, precisions = _kernels(device, plan)
    near, near_latency = _link(device, plan.large, _within(layout.ranks))
    far, far_latency = near, near_latency
    known = "between hosts: none here, rates within one are taken"
    if layout.hosts > 1:
        far, far_latency = _link(device, plan.large, _between(layout.ranks))
        known = f"between {layout.hosts} hosts: measured"
        if layout.ranks == 1:
            near, near_latency = far, far_latency
    elif device.type == "cuda":
        far, far_latency = H200.far, H200.far_latency
        known = "between hosts: not measured, 80 % of 400 Gbit/s are taken"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    source = f"measured {time.strftime('%Y-%m-%d', time.gmtime())} by {ranks} ranks over {dist.get_backend()}; {known}"
    memory = _worst(-float(available_bytes(device)) / (layout.ranks if device.type == "cpu" else 1), device)
    rows = ROWS * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return Machine(
        name, forward, backward, source, layout.ranks, near, far, near_latency, far_latency, _step(device, plan),
        -memory, rows, precisions,
    )  # fmt: skip


Peers = Callable[[int], tuple[int, int]]  # of a rank: whom it sends to, whom it receives from


def _within(host_ranks: int) -> Peers:
    """The next rank of the same host and the one before."""

    def peers(rank: int) -> tuple[int, int]:
        first, place = rank // host_ranks * host_ranks, rank % host_ranks
        return first + (place + 1) % host_ranks, first + (place - 1) % host_ranks

    return peers


def _between(host_ranks: int) -> Peers:
    """The rank of the same number on the next host and on the one before."""
    ranks = dist.get_world_size()
    return lambda rank: ((rank + host_ranks) % ranks, (rank - host_ranks) % ranks)


def _link(device: torch.device, large: int, peers: Peers) -> tuple[float, float]:
    """(bytes/s, seconds of latency), every rank sending and receiving at once, as in a step of the ring."""
    short, long = (_transfer(device, count, peers) for count in (SMALL, large))
    rate = (large - SMALL) / max(long - short, 1e-3 * long)
    return rate, max(short - SMALL / rate, 0.0)


def _transfer(device: torch.device, count: int, peers: Peers) -> float:
    """Seconds of the median transfer of so many bytes, on the slowest rank."""
    transport = Transport(dist.group.WORLD)
    to, source = peers(transport.rank)
    x = torch.zeros(count, dtype=torch.uint8, device=device)
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        transport.post([(x, to)], [((count,), source)], x).wait()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return _worst(median(times[REPEATS // 3 :]), device)


def _kernels(device: torch.device, plan: Plan) -> tuple[Points, Points, Points]:
    """Rates of the forward and of the backward by length, and factors of dtypes by the bytes of an element."""
    found = {
        mode: tuple((n, _rate(device, plan, n, plan.dtypes[0], mode)) for n in plan.lengths) for mode in ("fwd", "bwd")
    }
    length, usual = found["fwd"][len(plan.lengths) // 2]
    factors = [(_size(plan.dtypes[0]), 1.0)]
    factors += [(_size(dtype), _rate(device, plan, length, dtype, "fwd") / usual) for dtype in plan.dtypes[1:]]
    return found["fwd"], found["bwd"], tuple(sorted(factors))


def _size(dtype: str) -> int:
    """Bytes of an element."""
    size: int = getattr(torch, dtype).itemsize
    return size


def _rate(device: torch.device, plan: Plan, length: int, dtype: str, mode: str) -> float:
    """Useful TFLOP/s of a block of so many queries and keys, on the slowest rank."""
    batch = max(1, plan.tokens // length)
    w = Workload(batch, plan.heads, plan.heads, length, length, plan.dim, plan.dim, dtype, "full", mode)
    x = Inputs.make(w, device)
    run = providers.runner(providers.get("sartor").make(w, x), w, x)
    dist.barrier()
    timing = interleave({"sartor": run}, device, Budget(rounds=3))["sartor"]
    return w.flops / _worst(timing.ms, device) * 1e-9


def _step(device: torch.device, plan: Plan) -> float:
    """Seconds for which a small block and its merging keep the host."""
    shape = (1, 16, plan.heads, plan.dim)
    q, k, v = (torch.zeros(shape, dtype=getattr(torch, plan.dtypes[0]), device=device) for _ in range(3))
    merged, times = Merged(q, plan.dim, torch.float32), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        merged.add(slice(None), *ops.run(Call(q, k, v, out_dtype=torch.float32), True))
        times.append(time.perf_counter() - start)
    synchronize(device)
    return _worst(median(times[REPEATS // 3 :]), device)


def _worst(value: float, device: torch.device) -> float:
    """The largest of all ranks."""
    t = torch.tensor([value], dtype=torch.float64, device=device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t.item())


def _findings(machine: Machine, path: str) -> Iterator[Finding]:
    yield Finding("machine", f"{machine.name}, {machine.source}")
    for what, points in (("forward", machine.forward), ("backward", machine.backward)):
        yield Finding(what, ", ".join(f"{rate:.3g} TFLOP/s at {n}" for n, rate in points))
    yield Finding(
        "dtypes", ", ".join(f"{factor:.2g} of that rate for {size} bytes" for size, factor in machine.precisions)
    )
    yield Finding("link within a host", f"{machine.near / 1e9:.3g} GB/s after {machine.near_latency * 1e6:.3g} us")
    yield Finding("link between hosts", f"{machine.far / 1e9:.3g} GB/s after {machine.far_latency * 1e6:.3g} us")
    yield Finding("host time of a step", f"{machine.step * 1e6:.3g} us")
    yield Finding("written", f"{path}, which method='auto' reads", True)
