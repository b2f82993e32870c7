"""What the commands of the command line share: flags, friendly errors, the device and the folder that flags name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

DeviceFlag = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1; by default the GPU if there is one")]
OutFlag = Annotated[Path, typer.Option(help="folder of records; <out>/<device>/<suite>.jsonl")]
RecordFlag = Annotated[bool, typer.Option("--record", help="write to benchmarks/results, replacing older runs")]


@contextmanager
def friendly() -> Iterator[None]:
    """A wrong value, or a file that is not there, is the caller's mistake: one line, exit code 2, no traceback."""
    try:
        yield
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


def results_folder() -> Path:
    """benchmarks/results of the checkout."""
    from sartor.lab.workloads.suites import checkout

    root = checkout()
    if root is None:
        raise ValueError("this needs a checkout of the repository: an installed package has no benchmarks/results")
    return root / "benchmarks" / "results"
