"""What Nsight Compute counts while a provider runs, as records, and in the words of the ladder's sources.

`ncu` runs this file, which calls each provider once before counting starts and once while it counts. Counts are those
of the longest kernel of a call; bytes and time of all its kernels. Clocks are left as they are.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sartor import kernels
from sartor.lab.ladder import catalogue as ladder
from sartor.lab.measure import providers
from sartor.lab.measure.bench import describe, sign
from sartor.lab.measure.records import Record, Run, Store, read
from sartor.lab.workloads import suites
from sartor.lab.workloads.workload import Inputs, Workload

SUITE = "profile"
SHARED = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"
METRICS = {  # what a record calls it: what Nsight Compute calls it
    "ns": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "shared_static_bytes": "launch__shared_mem_per_block_static",
    "shared_dynamic_bytes": "launch__shared_mem_per_block_dynamic",
    "shared_loads": "smsp__inst_executed_op_shared_ld.sum",
    "matrix_loads": "smsp__inst_executed_op_ldsm.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "bank_conflicts": f"{SHARED}.sum",
    "bank_conflicts_load": f"{SHARED}_op_ld.sum",
    "bank_conflicts_store": f"{SHARED}_op_st.sum",
    "ffma_threads": "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    "fma_pipe_pct": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "tensor_pipe_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
}
STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected", "short_scoreboard", "sleeping",
    "tex_throttle", "wait",
)  # fmt: skip
ALL = METRICS | {f"stall_{s}": f"smsp__average_warps_issue_stalled_{s}_per_issue_active.ratio" for s in STALLS}
SUMMED = ("ns", "dram_read_bytes", "dram_write_bytes")
Counts = dict[str, float]


def missing() -> str:
    """Why nothing can be counted here, or an empty string."""
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU here"
    return "" if shutil.which("ncu") else "Nsight Compute (ncu) is not installed: it comes with the CUDA toolkit"


def measure(cases: list[tuple[str, Workload]], run: Run) -> list[Record]:
    """A record with `counters` for each provider on its workload; `ms` is the time of its kernels while counted."""
    device = torch.device("cuda")
    found = []
    for name, w in cases:
        record = Record.of(run, name, w)
        record.skipped = providers.get(name).why_not(w, device) or None
        found.append(record)
    able = [r for r in found if r.skipped is None]
    counts = _count([(r.provider, r.workload) for r in able]) if able else {}
    for i, r in enumerate(able):
        describe(r, r.workload, Inputs.make(r.workload, device))
        r.counters = counts.get(str(i))
        r.skipped = None if r.counters else "Nsight Compute counted no kernel"
        r.ms = r.counters.pop("ns") * 1e-6 if r.counters else None
        sign(r, device)
    return found


def _count(cases: list[tuple[str, Workload]]) -> dict[str, Counts]:
    """Counts by the place of a case in the list. Raises ValueError with what ncu says when it fails."""
    given = json.dumps([[name, asdict(w)] for name, w in cases])
    command = [
        "ncu", "--csv", "--page", "raw", "--print-units", "base", "--nvtx", "--print-nvtx-rename", "kernel",
        "--profile-from-start", "off", "--clock-control", "none", "--metrics", ",".join(ALL.values()),
        sys.executable, "-m", "sartor.lab.measure.profile", given,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if not rows:
        raise ValueError("ncu: " + " ".join((done.stdout + done.stderr).split())[-400:])
    return parse(rows)


def parse(lines: Iterable[str]) -> dict[str, Counts]:
    """Counts by the range that kernels were launched in: `range/kernel`. The first row after the header has units."""
    found: dict[str, Counts] = {}
    rows = list(csv.DictReader(lines))[1:]
    for row in rows:
        counts = {key: _number(row.get(metric) or "") for key, metric in ALL.items()}
        now = {key: value for key, value in counts.items() if value is not None}
        name = row["Kernel Name"].split("/")[0]
        before = found.get(name, {})
        total = {key: before.get(key, 0.0) + now.get(key, 0.0) for key in SUMMED}
        longest = max((before, now), key=lambda c: c.get("longest_ns", c.get("ns", 0.0)))
        found[name] = longest | total | {"longest_ns": longest.get("longest_ns", longest.get("ns", 0.0))}
    for one in found.values():
        one.pop("longest_ns")
    return found


def _number(text: str) -> float | None:
    digits = text.replace(",", "")
    return float(digits) if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", digits) else None


def newest(records: list[Record]) -> list[Record]:
    """The last record of each provider on each workload: counts need no common run to be compared."""
    return list({(r.provider, r.workload): r for r in records}.values())


def save(found: list[Record], out: Path, run: Run, replace: bool) -> Path:
    """Add records to `<out>/<device>/profile.jsonl`; with `replace`, in the place of older ones."""
    store = Store(out, run)
    store.add(found)
    if replace:
        store.path.write_text("".join(r.to_json() + "\n" for r in newest(read(store.path))), encoding="utf-8")
    store.close(replace=False)
    return store.path


def workload(name: str) -> Workload:
    """Where a provider is looked at by default: the first workload of the ladder that has it, else its bfloat16 one."""
    cases = suites.load("ladder").cases
    home = [w for w, who in cases if name in who and (w.seqlen_q == 4096 or w.batch == 1)]
    return (home or [w for w, _ in cases if w.dtype == "bfloat16" and w.seqlen_q == 4096])[0]


def provider(target: str) -> str:
    """`4` and `07a` are rungs, `sdpa-flash` and the like providers, `hopper` and the like kernels of ours."""
    if target[:1].isdigit():
        return ladder.find(target).provider
    if target in (*kernels.families(), *kernels.FORWARD):
        return f"sartor:{target}"
    return providers.get(target).name  # or a ValueError that lists the known ones


def main(given: str) -> None:
    """Runs under ncu: each case once uncounted, then once counted, in a range named after its place."""
    cuda: Any = torch.cuda
    for i, (name, fields) in enumerate(json.loads(given)):
        w = Workload(**fields)
        x = Inputs.make(w, torch.device("cuda"))
        attend = providers.get(name).make(w, x)
        attend(x.q, x.k, x.v)
        cuda.synchronize()
        cuda.nvtx.range_push(str(i))
        cuda.profiler.start()
        attend(x.q, x.k, x.v)
        cuda.synchronize()
        cuda.profiler.stop()
        cuda.nvtx.range_pop()


if __name__ == "__main__":
    main(sys.argv[1])
