"""What the bench shows: the progress of a run, its tables, its plots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sartor.lab.measure import contention
from sartor.lab.measure.bench import Session
from sartor.lab.measure.records import CEILINGS, Record, Store
from sartor.lab.show import climb, curves, masks, overlap, plots, scaling, tables
from sartor.lab.workloads.suites import Suite

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 10_000
PLOTS: dict[str, Callable[..., list[Path]]] = {
    "latency": curves.latency, "memory": curves.memory, "rates": curves.rates, "errors": curves.errors,
    "head_dims": plots.head_dims, "grid": plots.grid, "climb": climb.plot, "masks": masks.plot,
    "forecast": scaling.plot, "timeline": overlap.timeline,
}  # fmt: skip
ALONE = {"scaling": ("forecast",), "overlap": ("timeline",)}  # plots of what a module of its own measures
CONVENTION = (
    "FLOP/s count useful work: forward 2 * B * H * visible pairs * (D + D v), half of all pairs when square and "
    "causal; backward 2.5 times that. Medians; compare within a run only."
)


def console() -> Console:
    """The terminal; a file or a pipe has no width, so that a table's row and a sentence stay one line."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=WIDE)


@contextmanager
def progress(console: Console, steps: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A bar with the time left, and two functions: say what is being done, and count one step."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: list[Any] = [BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn(),
                          TextColumn("{task.description}")]  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=steps)
        yield (lambda text: bar.update(task, description=text)), (lambda: bar.advance(task))


@dataclass
class Measured:
    """Records of a suite, the files written: records, CSV, plots; what the time was spent on, in words; and after
    Ctrl-C, how much of it there is."""

    records: list[Record]
    files: list[Path]
    spent: str
    interrupted: str = ""


def run(console: Console, suite: Suite, session: Session, out: Path, plot: bool, record: Path | None) -> Measured:
    """Measure a suite with progress into `out`, or into `record`, where it replaces older runs. Ctrl-C ends it: what is
    measured by then is kept, in `out`."""
    store, found, done = Store(record or out, session.run), list[Record](), 0
    steps = len(suite.cases) + (not suite.fresh)
    try:
        with progress(console, steps) as (tell, step):
            for rows in session.measure(suite, tell):
                store.add(rows)
                found += rows
                done += 1
                step()
    except KeyboardInterrupt:
        store = store.withdraw(out) if record else store
        store.close(replace=False)
        cases = max(done - (not suite.fresh), 0)
        return Measured(found, store.files, _spent(session), f"{cases} of {len(suite.cases)} workloads are measured")
    store.close(replace=record is not None)
    files = store.files + (draw(found, suite, store.path.parent) if plot else [])
    return Measured(found, files, _spent(session))


def _spent(session: Session) -> str:
    """Seconds by what they were spent on: for who wants the next run shorter."""
    return ", ".join(f"{what} {seconds:.1f} s" for what, seconds in session.spent.items() if seconds >= 0.05)


def show(console: Console, records: list[Record], suite: Suite, session: Session) -> None:
    """The tables of a run, one for each mode; memory where the suite is about it; host time where it was measured.
    First calls have one table."""
    if suite.fresh:
        console.print(tables.first(records).rich())
        return
    for mode in dict.fromkeys(r.mode for r in records if r.mode != CEILINGS):
        found = [r for r in records if r.mode == mode]
        console.print(tables.speed(found, suite.baseline, ours=suite.ours).rich())
        if "memory" in suite.plots:
            console.print(tables.memory(found).rich())
        if suite.name == "small" and any(r.host_us for r in found):
            console.print(tables.host(found).rich())
        if suite.unseen and any(r.ms for r in found):
            console.print(tables.cost(found, suite.baseline).rich())
        if any(r.err_rel for r in found):
            console.print(tables.accuracy(found).rich())
    where = session.run.environment["device"]
    peaks = [
        f"{dtype} matrix product {tables.rate(x, where)} {tables.rate_unit(where)}"
        for dtype, x in session.ceilings.tflops.items()
    ]
    if peaks:
        console.print(f"ceilings here: {', '.join(peaks)}, copy {session.ceilings.gbps:.0f} GB/s", highlight=False)
    console.print(CONVENTION, highlight=False)
    if warning := contention.verdict(records):
        console.print(warning, style="bold yellow", highlight=False)


def draw(records: list[Record], suite: Suite, folder: Path) -> list[Path]:
    """The suite's plots, where there is something to draw."""
    return drawn(records, folder, suite.plots) if any(r.ms for r in records) else []


def drawn(records: list[Record], folder: Path, kinds: tuple[str, ...]) -> list[Path]:
    """Draw plots by their kinds, as a suite names them; the files made."""
    import matplotlib as mpl

    mpl.use("Agg")
    with mpl.rc_context(plots.STYLE):
        return [path for kind in kinds for path in PLOTS[kind](records, folder)]
