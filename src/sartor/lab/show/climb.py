"""The ladder's tables and plots, made of records: a rung on its problem, beside SDPA, the ceiling, the rung before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from sartor.lab.ladder import catalogue as ladder
from sartor.lab.ladder.rung import Rung
from sartor.lab.measure.records import CEILINGS, Record
from sartor.lab.show import counters, curves, names, plots
from sartor.lab.show.table import NONE, Pivot, Table, number
from sartor.lab.show.tables import noted, skipped

LAST = ("sdpa-efficient", "rung:05", "rung:06", "rung:08")  # measured at every length of the float32 problem
Problem = Callable[[Record], bool]
PROBLEMS: dict[str, Problem] = {
    "fp32": lambda r: r.dtype == "float32" and r.batch == 8 and r.seqlen_q == 4096,
    "bf16": lambda r: r.dtype == "bfloat16" and r.seqlen_q == 4096,
    "fp16": lambda r: r.dtype == "float16",
}
SWEEPS: dict[str, Problem] = {
    "fp32-lengths": lambda r: r.dtype == "float32" and r.batch == 8 and r.provider in LAST,
    "warp-lengths": lambda r: r.dtype == "float32" and r.batch == 1,
    "bf16-lengths": lambda r: r.dtype == "bfloat16",
}
BASELINES = {"float32": "sdpa-efficient", "bfloat16": "sdpa-flash", "float16": "sdpa-flash"}
PLAIN = "float32 plain"  # the ceiling of float32 units: what cuBLAS reaches without tensor cores


def view(name: str, records: list[Record], counted: list[Record]) -> list[Table]:
    """The tables of a report's view: `climb`, a sweep, `profile`, `sources`, or a rung by number. ValueError else."""
    if name == "climb":
        return tables(records)
    if name in SWEEPS:
        return [sweep(name, records)]
    if name in ("profile", *PROBLEMS):
        return [counters.table([r for r in counted if name == "profile" or PROBLEMS[name](r)])]
    rung = ladder.find(name)
    figures = one(rung, records)
    own = [r for r in counted if r.provider == rung.provider]
    figures.notes.append(f"Its source claims: {rung.claim}.")
    return [figures, counters.table(own)] if own else [figures]


def tables(records: list[Record]) -> list[Table]:
    """A table for each problem: time, rate, and what they are of SDPA, of the ceiling, of the rung before."""
    found = [(name, [r for r in _measured(records) if fits(r)]) for name, fits in PROBLEMS.items()]
    return [_table(rows, records) for _, rows in found if rows]


def outdated(records: list[Record], covered: Callable[[Record], bool]) -> list[str]:
    """A sentence on the rungs whose records are not `covered` by evidence, if there are any."""
    old = {names.provider(r.provider) for r in records if _number(r) and not covered(r)}
    return [f"Unverified, as measured from other sources than today's: {', '.join(sorted(old))}."] if old else []


def sweep(name: str, records: list[Record]) -> Table:
    """Time and rate by length, and the share of SDPA's rate."""
    pivot = Pivot.of([r for r in _measured(records) if SWEEPS[name](r)])
    baseline = BASELINES[next(iter(pivot.rows[0].values())).dtype] if pivot.rows else ""
    headers, beside = ["N", *map(names.provider, pivot.providers)], names.provider(baseline)
    made = Table(f"ms / TFLOP/s (speed, of {beside}); {pivot.constant}", headers, [])
    reasons = dict[str, None]()
    for cells in sorted(pivot.rows, key=lambda cells: next(iter(cells.values())).seqlen_q):
        base, row = cells.get(baseline), [str(next(iter(cells.values())).seqlen_q)]
        for provider in pivot.providers:
            r = cells.get(provider)
            row.append(NONE if r is None else _rate(r, base) if r.ms else skipped(r, reasons))
        made.rows.append(row)
    made.notes += noted(reasons)
    return made


def one(rung: Rung, records: list[Record]) -> Table:
    """A rung on its problems."""
    headers = ["problem", "ms", "TFLOP/s", "of SDPA", "of the ceiling"]
    headers += [f"vs rung {rung.before}" if rung.before else "vs the rung before", "largest error / budget"]
    made, reasons = Table("", headers, []), dict[str, None]()
    longest = max((r.seqlen_q for r in records if SWEEPS["warp-lengths"](r)), default=0)
    for fits in (*PROBLEMS.values(), lambda r: SWEEPS["warp-lengths"](r) and r.seqlen_q == longest):
        group = [r for r in _measured(records) if fits(r)]
        for r in group:
            if r.provider == rung.provider:
                made.rows.append([_problem(r), *_figures(r, group, records, reasons), _error(r)])
    made.notes = noted(reasons)
    return made


def _table(group: list[Record], records: list[Record]) -> Table:
    first, (peak, what) = group[0], _ceiling(group[0].dtype, records)
    base = names.provider(BASELINES[first.dtype])
    made = Table(
        f"{_problem(first)}, full; SDPA is {base}; the ceiling is {what}, {number(peak)} TFLOP/s",
        ["rung", "ms", "TFLOP/s", "of SDPA", "of the ceiling", "vs the rung before", "claimed by its source"], [],
        words=("claimed by its source",),
    )  # fmt: skip
    reasons = dict[str, None]()
    for r in sorted(group, key=_number):
        if not _number(r):
            made.rows.append([names.provider(r.provider), *_figures(r, group, records, reasons), NONE])
            continue
        claim = ladder.find(_number(r)).claim
        made.rows.append([names.title(r.provider), *_figures(r, group, records, reasons), claim])
    made.notes = noted(reasons)
    return made


def _figures(r: Record, group: list[Record], records: list[Record], reasons: dict[str, None]) -> list[str]:
    """ms, TFLOP/s, of SDPA, of the ceiling, times as fast as the rung before; where it did not run, why."""
    if r.ms is None or r.tflops is None:
        return [skipped(r, reasons), *[NONE] * 4]
    times = {other.provider: other.ms for other in group}
    before = times.get(f"rung:{ladder.find(_number(r)).before}") if _number(r) else None
    base, (peak, _) = times.get(BASELINES[r.dtype]), _ceiling(r.dtype, records)
    over = " over its error budget" if r.wrong else ""
    return [
        number(r.ms) + over, number(r.tflops), f"{100 * base / r.ms:.0f} %" if base else NONE,
        f"{100 * r.tflops / peak:.1f} %" if peak else NONE, f"{before / r.ms:.2f}x" if before else NONE,
    ]  # fmt: skip


def _ceiling(dtype: str, records: list[Record]) -> tuple[float | None, str]:
    """TFLOP/s of the matrix product that a problem is held against, and its name."""
    wanted = PLAIN if dtype == "float32" else dtype
    peaks = [r.tflops for r in records if r.mode == CEILINGS and r.dtype == wanted]
    return (peaks[-1] if peaks else None), f"cuBLAS's {dtype} matrix product"


def _rate(r: Record, base: Record | None) -> str:
    share = f" ({100 * base.ms / r.ms:.0f} %)" if base and base.ms and r.ms and base is not r else ""
    return f"{number(r.ms)} / {number(r.tflops)}{share}"


def _error(r: Record) -> str:
    if r.err_max is None or r.err_budget is None:
        return NONE
    return f"{r.err_max:.1e} / {r.err_budget:.1e}"


def _measured(records: list[Record]) -> list[Record]:
    return [r for r in records if r.mode != CEILINGS]


def _number(r: Record) -> str:
    return r.provider.removeprefix("rung:") if r.base_provider == "rung" else ""


def _problem(r: Record) -> str:
    return f"{r.dtype}, B={r.batch} H={r.heads_q} N={r.seqlen_q} D={r.dim}"


def plot(records: list[Record], folder: Path) -> list[Path]:
    """TFLOP/s from rung to rung on a log axis, a panel for each problem, with SDPA and the matrix product among them.

    Where several lengths were measured, latency against length too, and memory for the small problem.
    """
    import matplotlib.pyplot as plt

    groups = [[r for r in _measured(records) if fits(r) and r.tflops] for fits in PROBLEMS.values()]
    groups = [sorted((r for r in g), key=_number) for g in groups if any(_number(r) for r in g)]
    if not groups:
        return []
    rows = [len(g) + 1 for g in groups]
    size = (plots.WIDTH, 0.19 * sum(rows) + 0.4 * len(groups) + 0.3)
    figure, axes = plt.subplots(len(groups), 1, figsize=size, squeeze=False, height_ratios=rows, sharex=True)
    for axis, group in zip(axes.flat, groups, strict=True):
        _panel(axis, group, records)
    axes.flat[-1].set_xlabel("useful TFLOP/s")
    drawn, title = (
        [r for g in groups for r in g],
        f"The ladder: useful TFLOP/s of the forward, rung by rung ({plots.MOST})",
    )
    files = [plots.save(figure, folder, f"{records[-1].suite}-climb", drawn, title)]
    swept = [r for r in records if r.ms and any(fits(r) for fits in SWEEPS.values())]
    warp = [r for r in swept if SWEEPS["warp-lengths"](r)]
    return files + curves.latency(swept, folder) + curves.memory(warp, folder)


def _panel(axis: Any, group: list[Record], records: list[Record]) -> None:
    """A line for each rung, and dashed ones for what it is held against, sorted by their rates, above."""
    from matplotlib.patheffects import withStroke

    peak, what = _product(group[0].dtype, records)
    held = [(r.tflops or 0.0, names.provider(r.provider), names.look(r.provider, [])) for r in group if not _number(r)]
    held += [(peak, what, names.Look(what, plots.GREY, "d"))] if peak else []
    steps = [(r.tflops or 0.0, names.title(r.provider), names.PROVIDERS["sartor"]) for r in group if _number(r)]
    rows = [*sorted(held, key=lambda row: row[0], reverse=True), *steps]
    for i, (rate, _, look) in enumerate(rows):
        if i < len(held):
            axis.axvline(rate, color=look.colour, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        axis.scatter(rate, i, color=look.colour, marker=look.marker, s=34, zorder=3)
        axis.annotate(number(rate), (rate, i), xytext=(6, 2), textcoords="offset points", va="center", fontsize=8,
                      zorder=4, path_effects=[withStroke(linewidth=2.5, foreground="white")])  # fmt: skip
    numbered = [_number(r) for r in group if _number(r)]
    for i, (below, above) in enumerate(pairwise(numbered), len(held)):
        if ladder.find(above).before == below:
            axis.plot([rows[i][0], rows[i + 1][0]], [i, i + 1], color=rows[i][2].colour, linewidth=1.8, zorder=2)
    axis.set_yticks(range(len(rows)), [name for _, name, _ in rows])
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(rows) - 0.5, -0.7)
    axis.grid(visible=False, axis="y")
    axis.set_xscale("log")
    axis.set_xlim(0.4, 1600)
    axis.set_xticks([0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.minorticks_off()
    axis.set_title(_problem(group[0]))


def _product(dtype: str, records: list[Record]) -> tuple[float | None, str]:
    """The ceiling of a problem, for a picture."""
    wanted, ceilings = PLAIN if dtype == "float32" else dtype, [r for r in records if r.mode == CEILINGS]
    found = [r for r in ceilings if r.dtype == wanted]
    return (found[-1].tflops, plots.product(found[-1], ceilings)) if found else (None, "")
