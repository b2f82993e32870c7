"""README tables, rewritten between markers from the committed records. Nobody types a number."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from sartor.lab.evidence.evidence import Evidence
from sartor.lab.measure import profile
from sartor.lab.measure import records as store
from sartor.lab.measure.records import CEILINGS, Record
from sartor.lab.show import climb, outside, overlap, ranks, scaling, several, steps, tables
from sartor.lab.show.table import Table
from sartor.lab.workloads import suites
from sartor.lab.workloads.workload import MODES

MARKED = re.compile(r"(<!-- sartor:report (\S+) -->\n).*?(<!-- /sartor:report -->)", re.DOTALL)
VIEWS = (
    "fwd", "bwd", "fwd_bwd", "decode", "graph", "memory", "accuracy", "errors", "host", "cost", "first",
    "visited", "ranks", "traffic", "steps", "models", "overlap", "blocks", "forecast", "timers", "several",
)  # fmt: skip
FILES = ("README.md", *(f"docs/{name}.md" for name in ("results", "ladder", "numerics", "distributed", "measuring")))


def render(name: str, results: Path) -> str:
    """The text of a marker `DEVICE/SUITE/VIEW`; the ladder's views are `climb`, its sweeps, and a rung's number."""
    device, suite, view = _parse(name)
    found = store.latest(store.read(results / device / f"{suite}.jsonl"), by_workload=True)
    mode = "fwd" if view == "visited" else view
    chosen = [r for r in found if r.mode != CEILINGS and (mode not in MODES or r.mode == mode)]
    if view == "cost":
        chosen = [r for r in chosen if r.skipped or tables.wall(r) is not None]
    if not chosen:
        return "No record yet.\n"
    if suite == "ladder":
        counted = profile.newest(store.read(results / device / f"{profile.SUITE}.jsonl"))
        parts = [table.markdown() for table in climb.view(view, found, counted) if table.rows]
        if not parts:
            return "No record yet.\n"
        notes = climb.outdated([*chosen, *counted], Evidence.load(results / device).covers)
        return "\n\n".join([*parts, *notes, provenance(chosen, found)] if view == "climb" else parts) + "\n"
    evidence = Evidence.load(results / device)
    ours = [evidence.covers(r) for r in chosen if r.provider == "sartor"]
    none = bool(ours) and not any(ours)  # then it is said once, not in each cell
    table, marks = _table(view, suite, chosen, lambda r: (none and r.provider == "sartor") or evidence.covers(r))
    if none or not (marks or all(map(evidence.covers, chosen))):
        part = "These figures of Sartor are" if none else "Some of these figures of Sartor are"
        table.notes.append(
            f"{part} unverified: what ran is not what passed the GPU tests, by the fingerprint of its launches."
        )
    table.notes.append(provenance(chosen, found))
    return table.markdown() + "\n"


def _table(view: str, suite: str, chosen: list[Record], verified: tables.Verified) -> tuple[Table, bool]:
    """The table of a view, and whether its cells say what is not verified."""
    baseline, ours = _compared(suite)
    plain = {
        "memory": lambda: tables.memory(chosen),
        "accuracy": lambda: tables.accuracy(chosen),
        "errors": lambda: tables.errors(chosen, baseline),
        "visited": lambda: tables.visited(chosen, baseline),
        "host": lambda: tables.host(chosen),
        "cost": lambda: tables.cost(chosen, baseline),
        "ranks": lambda: ranks.errors(chosen),
        "traffic": lambda: ranks.traffic(chosen),
        "steps": lambda: steps.steps(chosen),
        "models": lambda: steps.models(chosen),
        "overlap": lambda: overlap.table(chosen),
        "blocks": lambda: scaling.blocks(chosen),
        "forecast": lambda: scaling.forecast(chosen),
        "timers": lambda: outside.timers(chosen),
        "several": lambda: several.table(chosen),
    }
    if view in plain:
        return plain[view](), False
    if view == "first":
        return tables.first(chosen, verified), True
    if suite == "head-dims":
        return tables.head_dims(chosen, baseline, verified), True
    return tables.speed(chosen, baseline, verified, ours), True


def _parse(name: str) -> tuple[str, str, str]:
    parts = name.split("/")
    if len(parts) != 3 or (parts[2] not in VIEWS and parts[1] != "ladder"):
        raise ValueError(f"a report marker must be DEVICE/SUITE/VIEW with a view of {', '.join(VIEWS)}, got {name!r}")
    return parts[0], parts[1], parts[2]


@cache
def _compared(suite: str) -> tuple[str, str]:
    """Whom ratios are taken against, and whose they are."""
    if suite not in suites.available():
        return "sdpa", "sartor"
    found = suites.load(suite)
    return found.baseline, found.ours


def provenance(chosen: list[Record], everything: list[Record]) -> str:
    """Where the figures come from: device, versions, clocks, measured ceilings, commit, run."""
    r = chosen[-1]
    clocks = [c for x in chosen for c in (x.clock_mhz_before, x.clock_mhz_after) if c]
    peaks = [x for x in everything if x.mode == CEILINGS and x.run_id == r.run_id]
    words = [f"Device {r.device}", f"torch {r.torch}"]
    words += [f"triton {r.triton}"] if r.triton else []
    words += [f"driver {r.driver}"] if r.driver else []
    words += [f"SM clock {min(clocks):.0f}-{max(clocks):.0f} MHz"] if clocks else []
    scale, unit = (1e3 if r.device == "cpu" else 1.0), tables.rate_unit(r.device)
    words += [f"{x.dtype} matrix product {scale * x.tflops:.3g} {unit}" for x in peaks if x.tflops]
    words += [f"copy {x.gbps:.0f} GB/s" for x in peaks if x.gbps]
    commits = dict.fromkeys(f"{x.commit[:10]}{' with changes' if x.dirty else ''}" for x in chosen if x.commit)
    words += [f"commit {', '.join(commits)}"] if commits else []
    return ", ".join(words) + f"; run {', '.join(dict.fromkeys(x.run_id for x in chosen))}."


def rewrite(text: str, results: Path) -> str:
    """`text` with everything between markers made anew."""
    return MARKED.sub(lambda m: m[1] + render(m[2], results) + m[3], text)


def update(readme: Path, results: Path, check: bool) -> bool:
    """Rewrite a file; with `check` only say whether it is up to date."""
    old = readme.read_text(encoding="utf-8")
    new = rewrite(old, results)
    if not check and new != old:
        readme.write_text(new, encoding="utf-8")
    return new == old
