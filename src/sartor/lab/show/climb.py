"""The ladder's tables and plots, made of records: a rung on its problem, beside SDPA, the ceiling, the rung before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sartor.lab.ladder import catalogue as ladder
from sartor.lab.ladder.rung import Rung
from sartor.lab.measure.records import CEILINGS, Record
from sartor.lab.show import counters, plots
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
    old = {r.provider for r in records if _number(r) and not covered(r)}
    return [f"Unverified, as measured from other sources than today's: {', '.join(sorted(old))}."] if old else []


def sweep(name: str, records: list[Record]) -> Table:
    """Time and rate by length, and the share of SDPA's rate."""
    pivot = Pivot.of([r for r in _measured(records) if SWEEPS[name](r)])
    baseline = BASELINES[next(iter(pivot.rows[0].values())).dtype] if pivot.rows else ""
    headers = ["N", *pivot.providers]
    made = Table(f"ms / TFLOP/s (speed, of {baseline}); {pivot.constant}", headers, [])
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
    made = Table(
        f"{_problem(first)}, full; SDPA is {BASELINES[first.dtype]}; the ceiling is {what}, {number(peak)} TFLOP/s",
        ["rung", "ms", "TFLOP/s", "of SDPA", "of the ceiling", "vs the rung before", "claimed by its source"], [],
        words=("claimed by its source",),
    )  # fmt: skip
    reasons = dict[str, None]()
    for r in sorted(group, key=_number):
        if not _number(r):
            made.rows.append([r.provider, *_figures(r, group, records, reasons), NONE])
            continue
        rung = ladder.find(_number(r))
        made.rows.append([f"{rung.number} {rung.title}", *_figures(r, group, records, reasons), rung.claim])
    made.notes = noted(reasons)
    return made


def _figures(r: Record, group: list[Record], records: list[Record], reasons: dict[str, None]) -> list[str]:
    """ms, TFLOP/s, of SDPA, of the ceiling, times as fast as the rung before; where it did not run, why."""
    if r.ms is None or r.tflops is None:
        return [skipped(r, reasons), *[NONE] * 4]
    times = {other.provider: other.ms for other in group}
    before = times.get(f"rung:{ladder.find(_number(r)).before}") if _number(r) else None
    base, (peak, _) = times.get(BASELINES[r.dtype]), _ceiling(r.dtype, records)
    over = " over its error budget" if r.err_max and r.err_budget and r.err_max > r.err_budget else ""
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
    """TFLOP/s from rung to rung on a log axis, a panel for each problem, with SDPA and the ceiling as lines.

    Where several lengths were measured, latency against length too, and memory for the small problem.
    """
    import matplotlib.pyplot as plt

    groups = [[r for r in _measured(records) if fits(r) and r.tflops] for fits in PROBLEMS.values()]
    groups = [sorted((r for r in g), key=_number) for g in groups if any(_number(r) for r in g)]
    if not groups:
        return []
    widths = [1 + sum(bool(_number(r)) for r in g) for g in groups]
    size = (0.72 * sum(widths) + 2.5, 4.6)
    figure, axes = plt.subplots(1, len(groups), figsize=size, squeeze=False, width_ratios=widths)
    for axis, group in zip(axes.flat, groups, strict=True):
        _panel(axis, group, records)
    axes.flat[0].set_ylabel("TFLOP/s")
    files = [plots.save(figure, folder, f"{records[-1].suite}-climb", records)]
    swept = [r for r in records if r.ms and any(fits(r) for fits in SWEEPS.values())]
    warp = [r for r in swept if SWEEPS["warp-lengths"](r)]
    return files + plots.latency(swept, folder) + plots.memory(warp, folder)


def _panel(axis: Any, group: list[Record], records: list[Record]) -> None:
    from matplotlib.ticker import LogLocator

    steps = [r for r in group if _number(r)]
    x, y = range(len(steps)), [r.tflops or 0 for r in steps]
    red = plots.COLOURS["sartor"]
    axis.scatter(x, y, color=red, s=36)
    for i, value in zip(x, y, strict=True):
        if i and ladder.find(_number(steps[i])).before == _number(steps[i - 1]):
            axis.plot([i - 1, i], [y[i - 1], value], color=red, linewidth=2)
        axis.annotate(number(value), (i, value), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=8)
    lines: dict[str, tuple[float | None, str]] = {
        r.provider: (r.tflops, plots.COLOURS.get(r.provider, "#333333")) for r in group if not _number(r)
    }
    lines["matrix product"] = (_ceiling(group[0].dtype, records)[0], "#555555")
    drawn = [(rate, name, colour) for name, (rate, colour) in lines.items() if rate]
    above = float("inf")
    for rate, name, colour in sorted(drawn, reverse=True):
        axis.axhline(rate, color=colour, linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
        # clear of the first point, and of the name of a line close above
        side, end = ("right", len(steps) - 0.55) if 0.8 < rate / y[0] < 1.25 else ("left", -0.45)
        up, lift = ("top", -2) if rate > 0.85 * above else ("bottom", 2)
        axis.annotate(f"{name} {number(rate)}", (end, rate), xytext=(0, lift), textcoords="offset points", ha=side,
                      va=up, fontsize=7.5, color=colour)  # fmt: skip
        above = rate
    axis.set_yscale("log")
    axis.set_xlim(-0.5, len(steps) - 0.5)
    axis.set_xticks(x, [_number(r) for r in steps])
    axis.set_xlabel("rung")
    axis.set_title(_problem(group[0]).replace(", ", "\n"))
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.minorticks_off()
