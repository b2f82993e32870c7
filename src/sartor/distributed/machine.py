"""What the model of `choose` knows of a machine: rates of kernels, rates and latencies of links.

`sartor doctor --distributed` measures them and writes them to a file, which `method="auto"` then reads. Where there is
none, numbers of an H200 from records and data sheets are taken, or a guess for CPUs.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from sartor import cache

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Machine:
    """Rates of kernels are in one dtype, of useful FLOPs: (keys that a query sees, TFLOP/s) of a forward, (queries that
    see a key, TFLOP/s) of a backward; `precisions` are factors for others by the bytes of an element. Rates of links
    are in one direction, each rank sending and receiving at once."""

    name: str
    forward: Points
    backward: Points
    source: str
    host_ranks: int  # ranks of a host
    near: float  # bytes/s to a rank of the same host
    far: float  # bytes/s to a rank of another
    near_latency: float  # seconds
    far_latency: float
    step: float  # seconds that a step costs the host, at the least: launches, and the merging of small results
    memory: float  # bytes of a rank
    rows: int = 1  # queries of a forward, keys of a backward, of all heads, fewer of which leave a part of it idle
    precisions: tuple[tuple[int, float], ...] = ((2, 1.0), (4, 0.25), (8, 0.05))

    def rate(self, backward: bool, length: float, rows: float, itemsize: int) -> float:
        """FLOP/s of a kernel that loops over so many keys (queries in a backward) for so many rows of all heads,
        between two measured lengths on a logarithmic scale."""
        table = self.backward if backward else self.forward
        factor = dict(self.precisions).get(itemsize, 1.0) * min(1.0, rows / self.rows)
        at = math.log2(max(length, 1))
        points = [(math.log2(n), rate * 1e12 * factor) for n, rate in table]
        if at <= points[0][0]:
            return points[0][1] * 2 ** (at - points[0][0])  # below, the time of a block no longer shrinks
        for (x0, y0), (x1, y1) in pairwise(points):
            if at <= x1:
                return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
        return points[-1][1]

    def transfer(self, count: float, one: int, other: int, messages: int = 1) -> float:
        """Seconds for so many bytes from one rank to another, in messages one after the other."""
        if count == 0:
            return 0.0
        near = one // self.host_ranks == other // self.host_ranks
        latency, rate = (self.near_latency, self.near) if near else (self.far_latency, self.far)
        return messages * latency + count / rate

    def write(self, path: Path) -> None:
        """Keep it in a file that `read` reads."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Machine:
        """The machine of a file. Raises ValueError where it is not one, OSError where it cannot be read."""
        found = json.loads(path.read_text())
        names = {f.name for f in fields(cls)}
        if not isinstance(found, dict) or set(found) != names:
            raise ValueError(f"expected an object with the keys {sorted(names)}")
        for name in ("forward", "backward", "precisions"):
            found[name] = tuple((int(n), float(rate)) for n, rate in found[name])
        numbers = [found[n] for n in ("host_ranks", "near", "far", "memory", "rows")]
        numbers += [rate for n in ("forward", "backward", "precisions") for _, rate in found[n]]
        if not found["forward"] or not found["backward"] or not all(0 < x < math.inf for x in numbers):
            raise ValueError("expected rates, ranks and memory > 0")
        return cls(**found)


H200 = Machine(
    "h200",
    ((2048, 406.855), (8192, 619.915), (16384, 683.751), (65536, 672.637)),
    ((128, 164.625), (1024, 463.993), (2048, 389.363), (4096, 486.208), (8192, 578.566), (16384, 580.467),
     (32768, 571.785)),
    "benchmarks/results/h200/scaling.jsonl, run 20261124T161631-a2d7;"
    " links: 80 % of what their makers state",
    host_ranks=8, near=0.8 * 450e9, far=0.8 * 50e9, near_latency=10e-6, far_latency=20e-6, step=319.824e-6,
    memory=141e9, rows=132 * 128,
)  # fmt: skip
CPU = Machine(
    "cpu", ((512, 0.1), (4096, 0.1)), ((512, 0.1), (4096, 0.1)), "a guess: `sartor doctor --distributed` measures it",
    host_ranks=1 << 20, near=2e9, far=2e9, near_latency=100e-6, far_latency=100e-6, step=300e-6, memory=16e9,
)  # fmt: skip


def file_of(device: torch.device) -> Path:
    """Where the numbers that were measured for a device are kept: `machine-<device>.json` beside compiled kernels."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return cache.folder() / f"machine-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"


def machine_of(device: torch.device) -> Machine:
    """The machine whose numbers are taken for a device: as measured, else as built in."""
    usual = CPU if device.type == "cpu" else H200
    if device.type not in ("cpu", "cuda"):
        return usual
    return _measured(file_of(device)) or usual


@lru_cache(maxsize=16)
def _measured(path: Path) -> Machine | None:
    """The machine of a file, read once in a process; None where there is none, or none to trust."""
    try:
        fault: Any = cache.distrusted(path.parent)
        if not fault:
            return Machine.read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        fault = f"{path} is ignored: {error}"
    warnings.warn(f"{fault}; built-in rates are taken", stacklevel=2)
    return None
