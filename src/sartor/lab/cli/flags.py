"""What the commands of the command line share: flags, friendly errors, the device and the folder that flags name."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from sartor.lab.show.views import Measured

DeviceFlag = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1; by default the GPU if there is one")]
OutFlag = Annotated[Path, typer.Option(help="folder of records; <out>/<device>/<suite>.jsonl")]
RecordFlag = Annotated[bool, typer.Option("--record", help="write to benchmarks/results, replacing older runs")]


INTERRUPTED = 130
DTYPE_HELP = "bf16, fp16, fp32, fp64, or as torch names them"


@contextmanager
def friendly() -> Iterator[None]:
    """A wrong value, or a file that is not there, is the caller's mistake: one line, exit code 2, no traceback. Ctrl-C
    gives 130, as shells have it."""
    try:
        yield
    except KeyboardInterrupt:
        typer.secho("interrupted", fg="red", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (ValueError, TypeError, OSError) as error:
        line, *_ = str(error).split("\n")
        typer.secho(f"error: {line}", fg="red", err=True)
        raise typer.Exit(2) from None


def device_of(name: str) -> torch.device:
    """The device a flag names."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if match is None:
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    if name != "cpu" and int(match[1] or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch sees {torch.cuda.device_count() or 'no'} NVIDIA GPU here")
    return torch.device(name)


def seconds(value: float, flag: str) -> float:
    """The time that a flag gives, infinite ones too. Raises ValueError with the flag for another number: a range of
    typer lets NaN pass."""
    if not value > 0:
        raise ValueError(f"{flag} must be a positive number of seconds, got {value}")
    return value


def writable(folder: Path, flag: str) -> Path:
    """The folder that a flag names, made if need be. Raises ValueError with the flag where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"{flag} must be a folder that can be written, got {str(folder)!r}: {reason}") from None


def target(out: Path, record: bool) -> Path | None:
    """Where --record writes, or nothing. Raises ValueError where the run could not write in the end."""
    if record:
        return writable(results_folder(), "--record")
    writable(out, "--out")
    return None


def wrote(console: Console, found: Measured) -> None:
    """Say what a run's time was spent on, where its records are, how to repeat it; ends the command after Ctrl-C."""
    if found.interrupted:
        console.print(f"interrupted: {found.interrupted}", style="bold red", highlight=False)
    if found.spent:
        console.print(f"spent: {found.spent}", highlight=False, soft_wrap=True)
    console.print("wrote " + ", ".join(map(str, found.files)), highlight=False, soft_wrap=True)
    console.print(f"again: sartor {' '.join(sys.argv[1:])}", highlight=False, soft_wrap=True)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


def results_folder() -> Path:
    """benchmarks/results of the checkout."""
    from sartor.lab.workloads.suites import checkout

    root = checkout()
    if root is None:
        raise ValueError("this needs a checkout of the repository: an installed package has no benchmarks/results")
    return root / "benchmarks" / "results"
