"""Record: the only way a number leaves the machine. One JSON object a line, and the same as CSV beside it."""

from __future__ import annotations

import csv
import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sartor.device import Device
from sartor.lab.workloads.suites import checkout
from sartor.lab.workloads.workload import Workload

CEILINGS = "ceilings"  # `mode` of the records that hold a run's measured peaks


@dataclass
class Record:
    """One provider on one workload; docs/measuring.md explains the keys. `skipped`: why nothing was measured."""

    run_id: str
    suite: str
    provider: str
    mode: str
    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    dim: int
    dim_v: int
    mask: str
    ms: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    pct_ceiling: float | None = None
    peak_mem_mib: float | None = None
    host_us: float | None = None
    first_call_s: float | None = None
    err_rel: float | None = None
    err_max: float | None = None
    err_budget: float | None = None
    skipped: str | None = None
    plan: str | None = None
    device: str = ""
    clock_mhz_before: float | None = None
    clock_mhz_after: float | None = None
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    triton: str = ""
    commit: str = ""
    dirty: bool | None = None
    fingerprint: str | None = None
    time: str = ""
    cos_sim: float | None = None
    smem_bytes: int | None = None
    smem_padded_bytes: int | None = None
    data: str = "normal"
    counters: dict[str, float] | None = None
    errors: dict[str, float] | None = None
    disk_call_s: float | None = None
    import_s: float | None = None
    contention: float | None = None
    wall_us: float | None = None
    unseen_us: float | None = None

    @classmethod
    def of(cls, run: Run, provider: str, w: Workload) -> Record:
        """A record of `run` with nothing measured yet."""
        return cls(run.run_id, run.suite, provider, **asdict(w), **run.environment, time=_now())

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Inverse of `to_json`; keys of later versions are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in json.loads(line).items() if k in known})

    def to_json(self) -> str:
        """One line; floats to six significant digits."""
        return json.dumps({k: _short(v) for k, v in asdict(self).items()})

    @property
    def workload(self) -> Workload:
        """What was measured."""
        return Workload(**{f.name: getattr(self, f.name) for f in fields(Workload)})

    @property
    def wrong(self) -> bool:
        """Whether the largest error is beyond its budget."""
        return bool(self.err_max and self.err_budget and self.err_max > self.err_budget)

    @property
    def base_provider(self) -> str:
        """`sartor` for `sartor` and `sartor:<kernel>` alike."""
        return self.provider.split(":")[0]


@dataclass(frozen=True)
class Run:
    """What all records of one process share. They were timed in turns, so they may be compared."""

    run_id: str
    suite: str
    environment: dict[str, Any]

    @classmethod
    def start(cls, suite: str, device: torch.device) -> Run:
        """A new run on `device`."""
        run_id = time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + "-" + secrets.token_hex(2)
        return cls(run_id, suite, environment(device))


def environment(device: torch.device) -> dict[str, Any]:
    """The keys of a record that say where it was made."""
    commit, dirty = _git()
    return {
        "device": Device.of(device).key,
        "driver": nvidia_smi("driver_version") if device.type == "cuda" else "",
        "cuda": (torch.version.cuda or "") if device.type == "cuda" else "",
        "torch": torch.__version__,
        "triton": _triton_version(),
        "commit": commit,
        "dirty": dirty,
    }


def nvidia_smi(field: str) -> str:
    """One field of `nvidia-smi --query-gpu` for the current GPU, empty where it cannot be had."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return ""
    return lines[min(torch.cuda.current_device(), len(lines) - 1)].strip() if lines else ""


def sm_clock_mhz(device: torch.device) -> float | None:
    """The SM clock now; None on a CPU or where NVML does not answer."""
    if device.type != "cuda":
        return None
    try:
        return float(torch.cuda.clock_rate(device))
    except Exception:  # no NVML binding: ask the tool
        text = nvidia_smi("clocks.sm")
        return float(text) if text.replace(".", "").isdigit() else None


class Store:
    """`<out>/<device>/<suite>.jsonl`, appended to line by line, with a CSV made from it at the end."""

    def __init__(self, out: Path, run: Run) -> None:
        self.path: Path = out / run.environment["device"] / f"{run.suite}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.run = run

    @property
    def files(self) -> list[Path]:
        """Of the records, and of the CSV."""
        return [self.path, self.path.with_suffix(".csv")]

    def add(self, records: Iterable[Record]) -> None:
        """Append, at once: an interrupted run keeps what it has measured."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(record.to_json() + "\n" for record in records)

    def close(self, replace: bool) -> None:
        """Write the CSV. With `replace`, drop what earlier runs said about this run's modes, and the ceilings of runs
        of which nothing else is left."""
        records = read(self.path)
        if replace:
            modes = {r.mode for r in records if r.run_id == self.run.run_id} - {CEILINGS}
            records = [r for r in records if r.run_id == self.run.run_id or r.mode not in modes]
            kept = {r.run_id for r in records if r.mode != CEILINGS} | {self.run.run_id}
            records = [r for r in records if r.run_id in kept]
            self.path.write_text("".join(r.to_json() + "\n" for r in records), encoding="utf-8")
        write_csv(self.path.with_suffix(".csv"), records)

    def withdraw(self, out: Path) -> Store:
        """This run's records, moved to another folder: those of a part would stand for those of the whole."""
        records = read(self.path)
        moved = Store(out, self.run)
        moved.add(r for r in records if r.run_id == self.run.run_id)
        left = [r for r in records if r.run_id != self.run.run_id]
        self.path.write_text("".join(r.to_json() + "\n" for r in left), encoding="utf-8")
        if not left:
            self.path.unlink()
        return moved


def write_csv(path: Path, records: Iterable[Record]) -> None:
    """The records as a table, a line each."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Record)])
        writer.writeheader()
        writer.writerows({k: _short(v) for k, v in asdict(r).items()} for r in records)


def read(path: Path) -> list[Record]:
    """Every record of a file, in order; none when there is no file."""
    if not path.is_file():
        return []
    return [Record.from_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def newest(results: Path, suite: str, device: str = "") -> Path:
    """The file of a suite's records on a device, or on the one that has the newest. ValueError where there is none."""
    files = [folder / f"{suite}.jsonl" for folder in ([results / device] if device else results.glob("*"))]
    found = [(max(r.time for r in records), file) for file in files if (records := latest(read(file)))]
    if not found:
        raise ValueError(f"no record in {results / (device or '*') / suite}.jsonl")
    return max(found)[1]


def latest(records: list[Record], by_workload: bool = False) -> list[Record]:
    """For each mode, the records of the last run that has it, with that run's ceilings: these may be compared with each
    other. `by_workload`: for each workload, as committed records want it, which a run that was stopped renews in part;
    where every run is appended, workloads of earlier ones would come back."""

    def kind(r: Record) -> object:
        return r.workload if by_workload else r.mode

    last = {kind(r): r.run_id for r in sorted(records, key=lambda r: r.time) if r.mode != CEILINGS}
    runs = set(last.values())
    return [r for r in records if (r.run_id in runs if r.mode == CEILINGS else r.run_id == last[kind(r)])]


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@cache
def _git() -> tuple[str, bool | None]:
    if "SARTOR_COMMIT" in os.environ:  # a copy without its history, or with an older one, may be told
        return os.environ["SARTOR_COMMIT"], None
    root = checkout()

    def git(*args: str) -> str:
        command = ["git", "-C", str(root), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return (git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", "src"))) if root else ("", None)
    except (OSError, subprocess.SubprocessError):
        return "", None


def _triton_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def write(suite: str, measure: Callable[[torch.device, Run], Iterable[Record]], results: Path | None = None) -> None:
    """Measure on the GPU if there is one, and replace the suite's records, by default those of the checkout."""
    device, root = torch.device("cuda" if torch.cuda.is_available() else "cpu"), checkout()
    run = Run.start(suite, device)
    store = Store(results or (root / "benchmarks" / "results" if root else Path("results")), run)
    for record in measure(device, run):
        store.add([record])
    store.close(replace=True)
