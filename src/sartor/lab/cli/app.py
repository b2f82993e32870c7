"""The command line: flags in, lab out. Every figure it prints comes from the lab; nothing is computed here."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sartor.lab.cli import ladder as ladder_cli
from sartor.lab.cli.flags import (
    DTYPE_HELP,
    INTERRUPTED,
    DeviceFlag,
    OutFlag,
    RecordFlag,
    device_of,
    friendly,
    results_folder,
    seconds,
    target,
    writable,
    wrote,
)

if TYPE_CHECKING:
    import torch

    from sartor.lab.workloads.suites import Suite

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Exact attention, cut to measure, and the lab that measures it.")  # fmt: skip
app.add_typer(ladder_cli.ladder, name="ladder")
app.command()(ladder_cli.profile)


def _version(wanted: bool) -> None:
    if wanted:
        import sartor

        typer.echo(f"sartor {sartor.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Exact attention, cut to measure, and the lab that measures it."""


@app.command()
def doctor(
    distributed: Annotated[
        bool, typer.Option("--distributed", help="under torchrun: measure kernels and links, for method='auto'")
    ] = False,
) -> None:
    """What this machine has, and whether attention is right on it. Exit code 1 if not."""
    from rich.console import Console
    from rich.markup import escape

    from sartor.lab.measure import doctor, links

    console, wrong = Console(), 0
    with friendly():
        for finding in links.examine() if distributed else doctor.examine():
            mark = {None: "  ", True: "[green]ok[/]", False: "[red]no[/]"}[finding.ok]
            line = f"{mark} [bold]{escape(finding.what)}[/]: {escape(finding.found)}"
            console.print(line, highlight=False, soft_wrap=True)
            wrong += finding.ok is False
    raise typer.Exit(1 if wrong else 0)


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="remove all of it")] = False,
    most_mib: Annotated[float | None, typer.Option(help="remove the least recently used files beyond so many")] = None,
) -> None:
    """What the disk cache of machine code holds, and what in it is ignored; or remove from it."""
    from sartor import cache as disk

    with friendly():
        if most_mib is not None and not 0 <= most_mib < math.inf:
            raise ValueError(f"--most-mib must be a finite number, 0 or more, got {most_mib}")
    if clear or most_mib is not None:
        removed = disk.bound(-1 if clear else int((most_mib or 0) * 2**20))
        typer.echo(f"removed {removed} files")
    found = disk.contents()
    typer.echo(f"{disk.folder()}: {found.files} files, {found.size / 2**20:.1f} MiB of at most {disk.LIMIT >> 20}")
    for sentence in found.ignored:
        typer.echo(sentence)


@app.command()
def explain(
    batch: int = 1,
    heads: Annotated[str, typer.Option(help="query heads, or query/key heads as 32/8")] = "16",
    seqlen: Annotated[str, typer.Option(help="length, or query/key lengths as 1/8k")] = "4096",
    dim: Annotated[str, typer.Option(help="head dim, or dim/dim_v as 192/128")] = "128",
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "bfloat16",
    mask: Annotated[str, typer.Option(help="full, causal, window1024, document8, softcap30, alibi, a+b, ...")] = "full",
    kernel: Annotated[str, typer.Option(help="a kernel by name, or auto")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, or an architecture that is not here: sm80, sm90, ...")] = "",
    launches: Annotated[bool, typer.Option("--launches", help="compile, and list what is launched on the GPU")] = False,
) -> None:
    """Which kernel would run a problem, and why not the others. Runs nothing. Exit code 1 if none would."""
    from sartor.lab.measure import adhoc

    with friendly():
        w = adhoc.problem(batch, (heads, seqlen, dim), dtype, mask)
        found = adhoc.walk(w, kernel, device)
        typer.echo(str(found))
        steps = list(adhoc.launches(w, kernel, found)) if launches else []
    if steps:
        from sartor.lab.show import tables, views

        views.console().print(tables.launches(steps).rich())
    elif launches:
        typer.echo("  launches: none, as it would not run on a GPU")
    raise typer.Exit(0 if found.plan is not None else 1)


@app.command()
def check(device: DeviceFlag = "", kernel: str = "auto") -> None:
    """Errors against float64 on this machine, with their budgets. Exit code 1 if one is over, or none was measured."""
    from sartor.lab.measure import check as checks
    from sartor.lab.show import tables, views

    with friendly():
        rows = checks.run(device_of(device), kernel)
    views.console().print(tables.checks(rows).rich())
    ran = any(row.verdict for row in rows)
    if not ran:
        typer.echo(f"no error was measured: none of the problems runs here by kernel {kernel!r}")
    raise typer.Exit(0 if ran and all(row.ok for row in rows) else 1)


@app.command()
def bench(
    suite: Annotated[str, typer.Option(help="a suite of benchmarks/suites; `sartor bench --list` names them")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="the suite for this machine")] = False,
    show: Annotated[bool, typer.Option("--list", help="name the suites")] = False,
    providers: Annotated[str, typer.Option(help="comma-separated; see docs/measuring.md")] = "",
    modes: Annotated[str, typer.Option(help="comma-separated: fwd, bwd, fwd_bwd, decode, graph")] = "",
    dim: Annotated[str, typer.Option(help="ad hoc: 64,128 or 192/128")] = "",
    seqlen: Annotated[str, typer.Option(help="ad hoc: 512,1k,4k or 1/8k")] = "",
    heads: Annotated[str, typer.Option(help="ad hoc: 16 or 32/8; by default 2048 / dim")] = "",
    batch: Annotated[int, typer.Option(help="ad hoc; by default 16384 / length")] = 0,
    dtype: Annotated[str, typer.Option(help="ad hoc: bf16,fp32")] = "",
    mask: Annotated[str, typer.Option(help="ad hoc: full,causal,window1024, ...")] = "",
    causal: Annotated[str, typer.Option(help="ad hoc: yes, no or both; short for --mask")] = "",
    rounds: Annotated[int, typer.Option(help="turns of each provider; by default the suite's, or 6 to 10, in 6 s")] = 0,
    turn_ms: Annotated[float | None, typer.Option(help="what counts of a turn; 40 on a GPU, 5 on a CPU")] = None,
    lead_ms: Annotated[float | None, typer.Option(help="what goes before it; 80 on a GPU, 0 on a CPU")] = None,
    max_seconds: Annotated[float, typer.Option(help="start no further workload after this")] = float("inf"),
    check: Annotated[bool, typer.Option(help="measure errors against float64")] = True,
    plot: Annotated[bool, typer.Option(help="draw the suite's plots")] = True,
    record: RecordFlag = False,
    out: OutFlag = Path("results"),
    device: DeviceFlag = "",
) -> None:
    """Measure providers on a suite, in turns; print the table, append records, draw plots."""
    from sartor.lab.measure import adhoc
    from sartor.lab.measure.timing import Budget
    from sartor.lab.workloads import suites

    with friendly():
        if show:
            for name in suites.available():
                typer.echo(f"{name:12s} {suites.load(name).description}")
            return
        where = device_of(device)
        flags = {"dim": dim, "seqlen": seqlen, "heads": heads, "dtype": dtype, "mask": mask, "causal": causal}
        chosen = adhoc.suite(suite, quick, where, batch, {k: v for k, v in flags.items() if v})
        chosen = adhoc.narrow(chosen, providers, modes)
        lead = chosen.lead_ms if lead_ms is None else lead_ms
        budget = Budget(rounds, turn_ms, lead, max_s=float("inf")) if rounds else Budget(chosen.rounds, turn_ms, lead)
        into = target(out, record)
        _bench(chosen, where, budget, (check, plot), (out, into), seconds(max_seconds, "--max-seconds"))


def _bench(
    suite: Suite, device: torch.device, budget: Any, flags: tuple[bool, bool], out: tuple[Path, Path | None],
    max_seconds: float,
) -> None:  # fmt: skip
    from sartor.lab.measure.bench import Session
    from sartor.lab.measure.records import Run
    from sartor.lab.show import views

    check, plot = flags
    session, console = Session(Run.start(suite.name, device), device, budget, check, max_seconds), views.console()
    found = views.run(console, suite, session, out[0], plot, out[1])
    views.show(console, found.records, suite, session)
    wrote(console, found)


@app.command()
def plot(
    suite: str,
    device: Annotated[str, typer.Option(help="folder name: h200, cpu; by default that of the newest records")] = "",
    out: OutFlag = Path("results"),
    record: Annotated[bool, typer.Option("--record", help="read and write benchmarks/results")] = False,
) -> None:
    """Draw a suite's plots from its latest records."""
    from sartor.lab.measure import adhoc, records
    from sartor.lab.show import views
    from sartor.lab.workloads import suites

    with friendly():
        file = records.newest(results_folder() if record else out, suite, device)
        writable(file.parent, "--record" if record else "--out")
        found = records.latest(records.read(file), by_workload=record)
        if suite in views.ALONE:
            files = views.drawn(found, file.parent, views.ALONE[suite])
        else:
            chosen = adhoc.EMPTY if suite == adhoc.EMPTY.name else suites.load(suite)
            files = views.draw(found, chosen, file.parent)
        if not files:
            raise ValueError(f"suite {suite} asks for no plot, or its records have nothing to draw")
        for path in files:
            typer.echo(str(path))


@app.command()
def report(
    readme: Annotated[
        list[Path] | None, typer.Argument(help="files with markers; by default README.md and those of docs/")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="write nothing; exit code 1 if a file is stale")] = False,
) -> None:
    """Rewrite the tables between markers from the committed records."""
    from sartor.lab.show import report as reports

    with friendly():
        results, stale = results_folder(), False
        root = results.parents[1]
        for path in readme or [root / name for name in reports.FILES]:
            fresh = reports.update(path, results, check)
            stale |= not fresh
            typer.echo(f"{path.name}: {'up to date' if fresh else 'stale' if check else 'rewritten'}")
    raise typer.Exit(1 if check and stale else 0)


@app.command()
def tune(
    out: Annotated[Path, typer.Option(help="table to write or update")] = Path("sm.jsonl"),
    dims: Annotated[str, typer.Option(help="comma-separated; by default multiples of 16 or 32 from 16 to 256")] = "",
    dtypes: Annotated[str, typer.Option(help="comma-separated: bf16,fp16,fp32")] = "bfloat16",
    kernels: Annotated[str, typer.Option(help="comma-separated kernels; by default all that can be tuned")] = "",
    workers: Annotated[int, typer.Option(help="processes that compile")] = 8,
) -> None:
    """Time the legal tiles of the GPU kernels on this GPU and write the fastest into a tuning table."""
    with friendly():
        import torch

        from sartor.lab.measure import search
        from sartor.lab.measure.adhoc import number
        from sartor.lab.workloads.workload import dtype_name

        writable(out.absolute().parent, "--out")
        wanted = [number(d, "dims") for d in dims.split(",")] if dims else search.DIMS
        names = kernels.split(",") if kernels else search.KERNELS
        wide = [dtype_name(d) for d in dtypes.split(",")]
        for flag, given, known in (("kernels", names, search.KERNELS), ("dtypes", wide, search.DTYPES)):
            if set(given) - set(known):
                raise ValueError(f"--{flag} must be among {', '.join(known)}, got {','.join(given)!r}")
        if not torch.cuda.is_available():
            raise ValueError("tune needs an NVIDIA GPU, none is here")
        found, whole = {}, False
        with suppress(KeyboardInterrupt):
            for job, trials in search.search(search.jobs(wanted, wide, names), workers, typer.echo):
                found[job] = trials[0]
                typer.echo(f"  {trials[0].tile}: {job.tflop / trials[0].ms * 1e3:.0f} TFLOP/s")
            whole = True
        search.write(search.rows(found), out)
    done = "" if whole else "interrupted: what was found by then is kept; "
    typer.echo(f"{done}wrote {out}; the tables that come with sartor are src/sartor/tuning/data/sm<arch>.jsonl")
    raise typer.Exit(0 if whole else INTERRUPTED)


@app.command()
def verify(
    device: DeviceFlag = "",
    out: Annotated[Path | None, typer.Option(help="benchmarks/results by default")] = None,
    only: Annotated[bool, typer.Option("--fingerprints-only", help="print them, run no test, write nothing")] = False,
    every: Annotated[bool, typer.Option("--all", help="every kernel, whatever has changed")] = False,
    kernels: Annotated[str, typer.Option(help="comma-separated; by default what changed since it passed")] = "",
    limit: Annotated[float, typer.Option(help="seconds; tests that are not done are left to the next run")] = 570.0,
) -> None:
    """Run the GPU tests and accuracy rows of kernels that changed and write the evidence."""
    from sartor.lab.evidence import verify as verification
    from sartor.lab.evidence import wanted

    with friendly():
        if only:
            for name, found in sorted(verification.fingerprints(device_of(device), float("inf"), typer.echo).items()):
                typer.echo(f"{found.fingerprint} {name}: {found.plan}")
            return
        results = results_folder()
        writable(out or results, "--out")
        limit = seconds(limit, "--limit")
        if every and kernels:
            raise ValueError(f"--kernels chooses and --all does not, got {kernels!r} and --all")
        names = wanted.KERNELS if every else wanted.named(kernels) if kernels else None
        run = verification.verify(results.parents[1], out or results, device_of(device), typer.echo, names, limit)
    if not run:
        typer.echo("all fingerprints are those that passed")
        return
    typer.echo("seconds by module: " + ", ".join(f"{name} {seconds}" for name, seconds in run["modules"].items()))
    words = ("passed", "failed", "skipped", "not_done", "over_budget", "seconds")
    typer.echo(", ".join(f"{w.replace('_', ' ')} {run[w]}" for w in words))
    for name in run["failures"]:
        typer.echo(f"  {name}")
    raise typer.Exit(1 if run["failed"] or run["not_done"] or run["over_budget"] else 0)


@app.command()
def refresh(
    show: Annotated[bool, typer.Option("--list", help="name the commands, run nothing")] = False,
    limit: Annotated[float, typer.Option(help="seconds; what would not end in time is left out")] = 3600.0,
    rounds: Annotated[int, typer.Option(help="of timing; by default each suite's own")] = 0,
    device: Annotated[str, typer.Option(help="folder name; by default this GPU's")] = "",
    only: Annotated[list[str] | None, typer.Option(help="as paper:fwd or verify; several in order")] = None,
) -> None:
    """Measure again what is older than its sources: evidence, suites, ladder. Exit code 1 if something is left."""
    from sartor.lab.evidence import refresh as refreshing

    with friendly():
        from sartor.device import Device

        here = device_of("")
        if device and not show:
            raise ValueError(f"--device goes with --list, got {device!r}: refresh measures on the GPU that is here")
        if here.type == "cpu" and not device:
            raise ValueError("refresh needs an NVIDIA GPU; with --list --device h200 it names what is to be run there")
        if device == "cpu":
            raise ValueError("--device must be a GPU's folder, got 'cpu': its records are made anew by bench --quick")
        results, limit = results_folder(), seconds(limit, "--limit")
        folders = sorted(path.name for path in results.iterdir() if path.is_dir() and path.name != "cpu")
        if device and device not in folders:
            raise ValueError(f"--device must be a GPU's folder of {results.name}, {', '.join(folders)}, got {device!r}")
        refreshing.refuse(only or ())
        folder = results / (device or Device.of(here).key)
        wanted = refreshing.stages(folder, rounds, lambda text: typer.echo(text, err=True))
        wanted = refreshing.chosen(wanted, only) if only else wanted
        if show:
            for stage in wanted:
                typer.echo(f"{stage.seconds:5.0f} s  {stage}")
        whole = not wanted if show else refreshing.run(wanted, limit, typer.echo)
    raise typer.Exit(0 if whole else 1)
