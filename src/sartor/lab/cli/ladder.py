"""`sartor ladder` and `sartor profile`: flags in, rungs and what is known of them out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sartor.lab.cli.flags import DTYPE_HELP, DeviceFlag, OutFlag, RecordFlag, device_of, friendly, target, wrote

ladder = typer.Typer(invoke_without_command=True, help="From a naive kernel to the product kernels, rung by rung.")

Number = Annotated[str, typer.Argument(help="of a rung: 4, 07a; `sartor ladder list` names them")]
Dim = Annotated[int, typer.Option(help="head dim; by default 64 where the rung takes it, else its largest")]
Causal = Annotated[bool, typer.Option("--causal")]


@ladder.callback()
def climb(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="one length of each problem, fewer rounds")] = False,
    rounds: Annotated[int, typer.Option(help="of timing; 6 to 10, or 4 with --quick")] = 0,
    record: RecordFlag = False,
    out: OutFlag = Path("results"),
    device: DeviceFlag = "",
) -> None:
    """Run every rung on its source's problem: table, records, plots. Without a GPU: compile them all."""
    if context.invoked_subcommand is not None:
        return
    from sartor.lab.measure.bench import Session
    from sartor.lab.measure.records import Run
    from sartor.lab.measure.timing import Budget
    from sartor.lab.show import climb as made
    from sartor.lab.show import views
    from sartor.lab.workloads import suites

    console = views.console()
    with friendly():
        where = device_of(device)
        if where.type != "cuda":
            _compile_all(console)
            return
        suite = suites.load("ladder-quick" if quick else "ladder")
        session = Session(Run.start(suite.name, where), where, Budget(rounds or (4 if quick else None)))
        found = views.run(console, suite, session, out, True, target(out, record))
        sweeps = (made.sweep(name, found.records) for name in made.SWEEPS if not (quick or found.interrupted))
        for table in [*made.tables(found.records), *sweeps]:
            console.print(table.rich())
        wrote(console, found)


def _compile_all(console: Any) -> None:
    from sartor.lab.ladder import catalogue
    from sartor.lab.show import rungs

    console.print("No NVIDIA GPU here: rungs are compiled, not run; no time, no error, no profile can be had.")
    with console.status("compiling"):
        table = rungs.resources(catalogue.load())
    console.print(table.rich())


@ladder.command("list")
def list_rungs() -> None:
    """Name the catalogue."""
    from sartor.lab.show import rungs, views

    with friendly():
        views.console().print(rungs.overview().rich())


@ladder.command()
def run(
    number: Number,
    n: Annotated[int, typer.Option("--n", help="sequence length")] = 4096,
    batch: int = 1,
    heads: int = 8,
    dim: Dim = 0,
    dtype: Annotated[str, typer.Option(help=f"by default the first that the rung takes; {DTYPE_HELP}")] = "",
    causal: Causal = False,
    device: DeviceFlag = "",
) -> None:
    """Check one rung against float64 and time it beside SDPA. Exit code 1 if it is over its error budget."""
    from sartor.lab.ladder import catalogue
    from sartor.lab.show import rungs, views

    with friendly():
        rung = catalogue.find(number)
        w = catalogue.workload(rung, (batch, heads, n), dim, dtype, causal)
        verdict, table = rungs.run(rung, w, device_of(device))
    views.console().print(table.rich())
    raise typer.Exit(0 if verdict else 1)


@ladder.command()
def show(
    number: Number,
    sass: Annotated[bool, typer.Option("--sass", help="the machine code")] = False,
    resources: Annotated[bool, typer.Option("--resources", help="registers, shared memory, spills")] = False,
    dim: Dim = 0,
    arch: Annotated[int, typer.Option(help="to compile for; by default 90")] = 90,
    causal: Causal = False,
) -> None:
    """A rung's idea and code; or what the compiler makes of it."""
    from rich.syntax import Syntax

    from sartor.lab.ladder import catalogue
    from sartor.lab.show import rungs, views

    console = views.console()
    with friendly():
        rung = catalogue.find(number)
        if resources:
            console.print(rungs.resources((rung,), arch).rich())
        elif sass:
            typer.echo(catalogue.sass(rung, catalogue.workload(rung, (1, 8, 4096), dim, "", causal), arch))
        else:
            console.print(catalogue.words(rung), highlight=False)
            console.print(Syntax(rung.code, "cuda" if rung.is_cuda else "python", background_color="default"))


@ladder.command()
def diff(before: Number, after: Number) -> None:
    """What changes from one rung to another: the lesson, in colour, without the headers."""
    from rich.syntax import Syntax

    from sartor.lab.ladder import catalogue
    from sartor.lab.show import views

    with friendly():
        text = catalogue.diff(catalogue.find(before), catalogue.find(after))
    views.console().print(Syntax(text, "diff", background_color="default"))


def profile(
    targets: Annotated[
        list[str] | None, typer.Argument(help="rungs, kernels, providers: 4 5 hopper sdpa-flash; by default every rung")
    ] = None,
    record: RecordFlag = False,
    out: OutFlag = Path("results"),
) -> None:
    """Why it is as fast as it is: what Nsight Compute counts while it runs, or without it what the compiler made."""
    import torch

    from sartor.lab.ladder import catalogue
    from sartor.lab.measure import profile as profiles
    from sartor.lab.measure.records import Run
    from sartor.lab.show import counters, rungs, views

    console = views.console()
    with friendly():
        into = target(out, record) or out
        names = [profiles.provider(t) for t in targets or [rung.number for rung in catalogue.load()]]
        why = profiles.missing()
        if why:
            console.print(f"No counters: {why}. What is known without running:", highlight=False)
            shown = [catalogue.find(name.removeprefix("rung:")) for name in names if name.startswith("rung:")]
            if shown:
                console.print(rungs.resources(tuple(shown)).rich())
            others = [name for name in names if not name.startswith("rung:")]
            ours = ", ".join(name for name in others if name.startswith("sartor"))
            if others:
                tiles = f"; `sartor explain --device sm90` tells the tiles of {ours}" if ours else ""
                console.print(f"of {', '.join(others)} nothing{tiles}", highlight=False)
            return
        run = Run.start(profiles.SUITE, torch.device("cuda"))
        found = profiles.measure([(name, profiles.workload(name)) for name in names], run)
        path = profiles.save(found, into, run, record)
    for table in counters.side_by_side(found):
        console.print(table.rich())
    console.print(f"wrote {path}", highlight=False)
