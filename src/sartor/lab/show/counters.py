"""What Nsight Compute counted, as tables, in the words of the ladder's sources."""

from __future__ import annotations

from collections.abc import Callable

from sartor.lab.measure.profile import Counts
from sartor.lab.measure.records import Record
from sartor.lab.show import names
from sartor.lab.show.table import NONE, Table, number


def _of(key: str, scale: float = 1.0) -> Callable[[Counts], str]:
    return lambda c: number(scale * c[key]) if key in c else NONE


def _loads(c: Counts) -> str:
    """Shared loads for each multiply-add, as instructions of a warp; where tensor cores multiply it says nothing."""
    if not c.get("ffma_threads") or c.get("tensor_pipe_pct", 0) > 5:
        return NONE
    return number(32 * c.get("shared_loads", 0) / c["ffma_threads"])


COLUMNS: dict[str, Callable[[Counts], str]] = {
    "DRAM read GB": _of("dram_read_bytes", 1e-9),
    "written GB": _of("dram_write_bytes", 1e-9),
    "L2 hits %": _of("l2_hit_pct"),
    "occupancy %": _of("occupancy_pct"),
    "registers": lambda c: f"{c['registers']:.0f}" if "registers" in c else NONE,
    "shared KiB": lambda c: number((c.get("shared_static_bytes", 0) + c.get("shared_dynamic_bytes", 0)) / 1024),
    "loads / FMA": _loads,
    "conflicts %": lambda c: number(100 * c.get("bank_conflicts", 0) / (c.get("shared_wavefronts") or 1)),
    "FMA pipe %": _of("fma_pipe_pct"),
    "tensor pipe %": _of("tensor_pipe_pct"),
    "top stalls": lambda c: ", ".join(f"{s} {number(v)}" for s, v in stalls(c)[:3]),
}


def stalls(counts: Counts) -> list[tuple[str, float]]:
    """Why warps wait: warps stalled by a reason for each instruction issued, the most frequent first.

    A warp that could go but was not selected does not wait.
    """
    found = {key.removeprefix("stall_"): value for key, value in counts.items() if key.startswith("stall_")}
    return sorted(((s, v) for s, v in found.items() if s != "not_selected"), key=lambda pair: -pair[1])


def table(records: list[Record], title: str = "What Nsight Compute counts") -> Table:
    """A row for each provider. conflicts: of the passes through shared memory, those that bank conflicts cause."""
    made = Table(title, ["", "ms", *COLUMNS], [], words=("top stalls",))
    for r in records:
        cells = [number(r.ms), *(show(r.counters) for show in COLUMNS.values())] if r.counters else [r.skipped or NONE]
        made.rows.append([names.provider(r.provider), *cells, *[NONE] * (1 + len(COLUMNS) - len(cells))])
    return made


def side_by_side(records: list[Record], at_once: int = 5) -> list[Table]:
    """The same for a terminal: a column for each provider, some at a time, and a row for each stall reason."""
    made = []
    for first in range(0, len(records), at_once):
        some = [r for r in records[first : first + at_once] if r.counters]
        rows = [["ms", *(number(r.ms) for r in some)]]
        rows += [
            [name, *(show(r.counters or {}) for r in some)] for name, show in COLUMNS.items() if "stalls" not in name
        ]
        tops = [[f"{s} {number(v)}" for s, v in stalls(r.counters or {})[:3]] for r in some]
        rows += [["top stalls" if not i else "", *row] for i, row in enumerate(zip(*tops, strict=True))]
        notes = [f"{names.provider(r.provider)}: {r.skipped}" for r in records[first : first + at_once] if r.skipped]
        made.append(Table("What Nsight Compute counts", ["", *(names.provider(r.provider) for r in some)], rows, notes))
    return made
