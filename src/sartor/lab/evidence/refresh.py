"""refresh: what the records of a device lack today, and the commands that measure it again, as many as time allows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from sartor.device import ARCHITECTURES
from sartor.lab.evidence import wanted
from sartor.lab.evidence.evidence import ELSEWHERE, Evidence, cases, of_today
from sartor.lab.ladder import catalogue as ladder
from sartor.lab.measure import ahead, fingerprint, profile, providers, timing
from sartor.lab.measure import records as store
from sartor.lab.measure.fingerprint import Found
from sartor.lab.measure.records import Record
from sartor.lab.measure.timing import Budget
from sartor.lab.workloads import suites
from sartor.lab.workloads.suites import Suite
from sartor.lab.workloads.workload import Workload

UNKNOWN_S, UNKNOWN_MS = 120.0, 2.0  # what has no record yet may take so long: a command, a call
START_S = 15.0  # of a process, until it has measured the ceilings
ROW_S = 1.0  # of a workload, beside its turns: inputs, errors, memory
Present = Mapping[str, Found]  # fingerprints of today, by key
Work = tuple[tuple[Workload, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Stage:
    """Arguments of `sartor`, the file that they write, about how long they take, and what they measure."""

    arguments: tuple[str, ...]
    file: Path
    seconds: float
    work: Work = ()

    def __str__(self) -> str:
        return f"sartor {' '.join(self.arguments)}"

    @property
    def name(self) -> str:
        """`paper:fwd` for a mode of a suite, else the command."""
        command, *rest = self.arguments
        return f"{rest[1]}:{rest[3]}" if command == "bench" else command


def stages(folder: Path, rounds: int = 0, tell: Callable[[str], None] = lambda text: None) -> list[Stage]:
    """What is of other machine code than today's, or was never measured: evidence first, then what takes the least time
    first. The fingerprints of today are computed for that, or found in the disk cache.

    `folder` is a device's of `benchmarks/results`; `rounds` are of timing, 0 for each suite's own.
    """
    flags = ("--rounds", str(Budget(rounds).rounds)) if rounds else ()  # refused before minutes of compiling
    evidence, now = Evidence.load(folder), present(tell)
    found = [*_suites(folder, now, flags), *_rungs(folder, now, flags)]
    return [*_verification(folder, evidence, now), *sorted(found, key=lambda stage: stage.seconds)]


def present(tell: Callable[[str], None]) -> Present:
    """The fingerprints of today, of everything that is verified. The first time takes a compiler many minutes."""
    tell("fingerprints of today: what is not in the disk cache is compiled")
    return fingerprint.every(cases(), ARCHITECTURES[90], tell=tell)


def refuse(names: Iterable[str]) -> None:
    """Raises ValueError for a name that no stage can have; `chosen`, which knows what is wanted, is minutes later."""
    every = list(_measured())
    modes = {f"{suite.name}:{w.mode}" for suite in every for w, _ in suite.cases}
    known = {"verify", "ladder", "profile", *modes, *(suite.name for suite in every)}
    for name in names:
        if name not in known:
            raise ValueError(f"--only must be one of {', '.join(sorted(known))}, got {name!r}")


def chosen(left: Iterable[Stage], names: Iterable[str]) -> list[Stage]:
    """The stages called so, in the order of `names`: `verify`, `ladder`, `paper:fwd`, `paper` for all its modes.

    Raises ValueError for a name of nothing that is wanted.
    """
    every, found = list(left), list[Stage]()
    known = ", ".join(sorted(stage.name for stage in every)) or "nothing, as all is of today"
    for name in names:
        own = [stage for stage in every if name in (stage.name, stage.name.split(":")[0])]
        if not own:
            raise ValueError(f"--only must be one of {known}, got {name!r}")
        found += (stage for stage in own if stage not in found)
    return found


def _verification(folder: Path, evidence: Evidence, now: Present) -> list[Stage]:
    """The GPU tests of the kernels of which a fingerprint is not the one that passed."""
    names = wanted.changed(evidence, now)
    if not names:
        return []
    seconds = max((run.get("seconds", UNKNOWN_S) for run in evidence.runs), default=UNKNOWN_S)
    return [Stage(("verify", "--kernels", ",".join(names)), folder / "evidence.json", seconds + START_S)]


def _measured() -> Iterator[Suite]:
    """The suites that `bench` measures on a GPU for the records."""
    return map(suites.load, sorted(set(suites.available()) - {*ELSEWHERE, "ladder"}))


def _suites(folder: Path, now: Present, rounds: tuple[str, ...]) -> list[Stage]:
    """A command for each mode of a suite of which a workload has no record, or one of other machine code."""
    found = []
    for suite in _measured():
        file = folder / f"{suite.name}.jsonl"
        known = store.latest(store.read(file), by_workload=True)
        for mode in dict.fromkeys(w.mode for w, _ in suite.cases):
            rows = [r for r in known if r.mode == mode]
            work = tuple((w, who) for w, who in suite.cases if w.mode == mode)
            pairs = {(w, provider) for w, who in work for provider in who}
            if pairs <= {(r.workload, r.provider) for r in rows} and all(of_today(r, now) for r in rows):
                continue
            command = ("bench", "--suite", suite.name, "--modes", mode, *rounds, "--record")
            share = len(pairs) / len(rows) if rows else 1.0
            seconds = _past(rows) * max(share, 1.0) if suite.fresh else _seconds(suite, work, rows, rounds)
            found.append(Stage(command, file, seconds, () if suite.fresh else work))
    return found


def _rungs(folder: Path, now: Present, rounds: tuple[str, ...]) -> list[Stage]:
    """The ladder and its profile, where a rung has changed; no profile on a GPU whose counters nobody can read."""
    sources = ladder.sources()

    def stale(rows: list[Record]) -> bool:
        plain = sources <= {(r.provider, r.fingerprint) for r in rows}
        return not plain or not all(of_today(r, now) for r in rows)

    steps, counters = folder / "ladder.jsonl", folder / f"{profile.SUITE}.jsonl"
    found, climbed = list[Stage](), store.latest(store.read(steps), by_workload=True)
    if stale(climbed):
        suite = suites.load("ladder")
        seconds = _seconds(suite, suite.cases, climbed, rounds)
        found.append(Stage(("ladder", *rounds, "--record"), steps, seconds, suite.cases))
    if stale(profile.newest(store.read(counters))) and not (torch.cuda.is_available() and profile.missing()):
        found.append(Stage(("profile", "--record"), counters, UNKNOWN_S))
    return found


def _seconds(suite: Suite, work: Work, known: list[Record], rounds: tuple[str, ...]) -> float:
    """About how long a run takes, by the milliseconds that its calls took last time."""
    ms = {(r.workload, r.provider): r.ms for r in known if r.mode != store.CEILINGS}
    budget = Budget(int(rounds[1]), max_s=float("inf")) if rounds else Budget(suite.rounds)
    total = START_S + ahead.seconds(work)
    for w, who in work:
        times = [ms[w, name] if (w, name) in ms else _unknown_ms(w, name) for name in who]
        total += ROW_S + timing.seconds([t for t in times if t is not None], replace(budget, lead_ms=suite.lead_ms))
    return total


def _unknown_ms(w: Workload, name: str) -> float | None:
    """Of a call that has no record; None where it cannot run."""
    refused = not name.startswith("rung:") and providers.get(name).why_not(w, torch.device("cuda"))
    return None if refused else UNKNOWN_MS


def _past(rows: list[Record]) -> float:
    """How long a run took, by the times at which its workloads began."""
    times = sorted({datetime.fromisoformat(r.time.replace("Z", "+00:00")) for r in rows})
    if len(times) < 2:
        return UNKNOWN_S
    return (times[-1] - times[0]).total_seconds() * len(times) / (len(times) - 1) + START_S


def run(left: Sequence[Stage], limit_s: float, tell: Callable[[str], None]) -> bool:
    """Run the commands one after the other; whether all of them were run and succeeded.

    What those that fit into the time call is compiled ahead, by several processes, all of it at once. A command that
    would not end within the limit is left out, one that takes three times as long as it should is stopped. The records
    that a command found are put back where it fails: records of a part would stand for those of the whole.
    """
    begin, whole = time.monotonic(), True
    deadline = begin + limit_s
    work = [case for stage in _fitting(left, limit_s) for case in stage.work]
    if work:
        tell("compiling ahead what is measured")
        made = ahead.prepare(work, torch.device("cuda"), deadline=deadline)
        tell(f"{made} calls compiled ahead in {time.monotonic() - begin:.0f} s")
    for stage in left:
        start = time.monotonic()
        if stage.seconds > deadline - start:
            tell(f"left out, {stage.seconds:.0f} s of {deadline - start:.0f}: {stage}")
            whole = False
            continue
        outcome = _kept(stage, min(deadline - start, 3 * stage.seconds))
        tell(f"{outcome or 'done'} after {time.monotonic() - start:.0f} s: {stage}")
        whole &= not outcome
    return whole


def _fitting(left: Iterable[Stage], limit_s: float) -> Iterator[Stage]:
    """Those that should end within the limit."""
    for stage in left:
        if stage.seconds <= limit_s:
            limit_s -= stage.seconds
            yield stage


def _kept(stage: Stage, limit_s: float) -> str:
    """Run a command; nothing, or what went wrong, and then the records are what they were."""
    files = (stage.file, stage.file.with_suffix(".csv")) if stage.arguments[0] != "verify" else ()
    before = {file: file.read_bytes() for file in files if file.is_file()}
    outcome = "interrupted"
    try:
        outcome = _outcome(stage, limit_s)
    finally:
        for file in files if outcome else ():
            file.unlink(missing_ok=True)
            if file in before:
                file.write_bytes(before[file])
    return outcome


def _outcome(stage: Stage, limit_s: float) -> str:
    """Nothing, or what went wrong. Who is stopped takes along whom it has started."""
    command = [sys.executable, "-m", "sartor", *stage.arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        try:
            said, _ = process.communicate(timeout=max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "stopped"
        except KeyboardInterrupt:  # which the terminal sends to this process only
            os.killpg(process.pid, signal.SIGKILL)
            raise
    last = " ".join(said.strip().splitlines()[-1:])
    return f"failed (exit code {process.returncode} {last})" if process.returncode else ""
