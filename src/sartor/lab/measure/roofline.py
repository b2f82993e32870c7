"""Ceilings: what this machine does at best, measured in the same process as what is held against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sartor.device import Device
from sartor.kernels.spec import Plan
from sartor.lab.measure.records import CEILINGS, Record, Run, read
from sartor.lab.measure.timing import Budget, interleave
from sartor.lab.workloads.suites import checkout
from sartor.lab.workloads.workload import Workload
from sartor.problem import mask_class
from sartor.tuning import table

PRODUCT = {"cuda": 8192, "cpu": 1024}  # rows and columns of the matrix product
SPLIT = 3  # float32 accuracy from 16-bit tensor cores takes three products, hi*hi + hi*lo + lo*hi


@dataclass(frozen=True)
class Ceilings:
    """TFLOP/s of a large matrix product per dtype, and GB/s of a large copy, read and written."""

    tflops: dict[str, float]
    gbps: float

    def ms(self, w: Workload) -> float | None:
        """The least time `w` could take: its products at full rate, or its bytes at full rate."""
        peak = self.tflops.get(w.dtype)
        if not peak or not self.gbps:
            return None
        return max(w.flops / peak * 1e-9, w.bytes / self.gbps * 1e-6)


def measure(device: torch.device, dtypes: list[str]) -> Ceilings:
    """Measure the ceilings; a second on a GPU, a second on a CPU.

    For float32 on a GPU the ceiling is a third of the float16 rate where that is above the plain float32 product's;
    the latter, which float32 units without tensor cores are held against, is kept as `float32 plain`.
    """
    n, copy_bytes = PRODUCT[device.type], 1 << (30 if device.type == "cuda" else 27)
    if device.type == "cuda" and "float32" in dtypes:
        dtypes = [*dtypes, "float16"]
    tflops = {}
    for name in dict.fromkeys(dtypes):
        dtype = getattr(torch, name)
        a, b = (torch.randn(n, n, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        tflops[name] = 2e-9 * n**3 / _ms(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device)  # type: ignore[misc]
    if device.type == "cuda" and "float32" in tflops:
        tflops["float32 plain"] = tflops["float32"]
        tflops["float32"] = max(tflops["float32"], tflops["float16"] / SPLIT)
    source = torch.ones(copy_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return Ceilings(tflops, 2e-6 * copy_bytes / _ms(lambda: target.copy_(source), device))


def recorded(device: Device) -> Ceilings:
    """The ceilings last recorded for a device; where there is no record, its datasheet's."""
    root, peak = checkout(), device.peak_bf16_tflops
    files = (root / "benchmarks" / "results" / device.key).glob("*.jsonl") if root else ()
    found = sorted((r for file in files for r in read(file) if r.mode == CEILINGS), key=lambda r: r.time)
    ceilings = Ceilings({"bfloat16": peak, "float16": peak, "float32": peak / SPLIT}, device.peak_gbps)
    for r in found:
        ceilings.tflops.update({r.dtype: r.tflops} if r.tflops else {})
        ceilings = replace(ceilings, gbps=r.gbps or ceilings.gbps)
    return ceilings


def outlook(w: Workload, plan: Plan) -> str:
    """What a forward should take, at the rate its tile reached when it was tuned, and the least the ceilings allow.

    The rate is that of many tiles, bound by their products: where tiles do not fill the GPU, or bytes take longer, it
    predicts nothing. A product's ceiling that it passed is none.
    """
    p, device, ceilings, words = plan.problem, plan.device, recorded(plan.device), []
    row = table.find(plan.kernel, p, device)
    filled = row is not None and row.tile == plan.tile and table.blocks(p, row.tile) >= device.sm_count
    if row and row.tflops and filled and mask_class(p) in ("full", "band"):
        ceilings.tflops[w.dtype] = max(row.tflops, ceilings.tflops[w.dtype])
        ms = w.flops / row.tflops * 1e-9
        if ms >= (ceilings.ms(w) or 0.0):
            words = [f"predicted {ms:.3g} ms, at the {row.tflops:.0f} TFLOP/s of its tuning row"]
    least = ceilings.ms(w)
    return "; ".join(words if least is None else [*words, f"the ceilings allow {least:.3g} ms"])


def _ms(run: Callable[[], object], device: torch.device) -> float:
    return interleave({"": run}, device, Budget(rounds=5, turn_ms=25.0, warmup_ms=50.0))[""].ms


def to_records(ceilings: Ceilings, run: Run) -> list[Record]:
    """The ceilings as records of mode `ceilings`: one per dtype, one for the copy."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def record(provider: str, dtype: str) -> Record:
        return Record(
            run.run_id, run.suite, provider, CEILINGS, dtype, 0, 0, 0, 0, 0, 0, 0, "", **run.environment, time=stamp
        )

    found = []
    for dtype, tflops in ceilings.tflops.items():
        found.append(record("ceiling-matmul", dtype))
        found[-1].tflops = tflops
    found.append(record("ceiling-copy", ""))
    found[-1].gbps = ceilings.gbps
    return found
