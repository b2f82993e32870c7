"""Suites: TOML files in benchmarks/suites, each a few grids of workloads and who is compared on them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from sartor.lab.workloads.workload import Workload

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GRID_KEYS = {
    "batch", "tokens", "heads", "hidden", "heads_kv", "seqlen", "seqlen_kv", "dim", "dim_v", "dtype", "mask", "modes",
    "data", "providers",
}  # fmt: skip


@dataclass(frozen=True)
class Suite:
    """Workloads in order, each with its providers; ratios are taken of `ours` against `baseline`; `lead_ms` and
    `rounds` are as in `timing.Budget`; `fresh` asks for first calls, not for times, `unseen` also for calls of lengths
    that are new."""

    name: str
    description: str
    baseline: str
    cases: tuple[tuple[Workload, tuple[str, ...]], ...]
    plots: tuple[str, ...] = field(default=())
    lead_ms: float | None = None
    rounds: int | None = None
    fresh: bool = False
    unseen: bool = False
    ours: str = "sartor"

    def narrowed(self, providers: list[str], modes: list[str]) -> Suite:
        """Only these providers and modes, where given."""
        cases = tuple((w, tuple(providers) or who) for w, who in self.cases if not modes or w.mode in modes)
        return replace(self, cases=cases)


def checkout() -> Path | None:
    """Root of the repository when the package is run from one, editable installs included."""
    root = Path(__file__).resolve().parents[4]
    return root if (root / "benchmarks" / "suites").is_dir() and (root / "pyproject.toml").is_file() else None


def folder() -> Path:
    """Where the suites are: in the checkout, else in the installed package."""
    root = checkout()
    return root / "benchmarks" / "suites" if root else Path(str(resources.files("sartor"))) / "suites"


def available() -> list[str]:
    """Names of the suites."""
    return sorted(path.stem for path in folder().glob("*.toml"))


def load(name: str) -> Suite:
    """The suite called `name`; ValueError lists the known ones."""
    path = folder() / f"{name}.toml"
    if not path.is_file():
        raise ValueError(f"suite must be one of {', '.join(available())}, got {name!r}")
    return parse(name, tomllib.loads(path.read_text(encoding="utf-8")))


def parse(name: str, table: dict[str, Any]) -> Suite:
    """A suite from its TOML table. Modes and providers of a grid default to the suite's."""
    modes, who = table.get("modes", ["fwd"]), table.get("providers", ["sartor", "sdpa"])
    cases = []
    for grid in table["grid"]:
        unknown = set(grid) - GRID_KEYS
        if unknown:
            raise ValueError(f"{name}: grid keys must be among {sorted(GRID_KEYS)}, got {sorted(unknown)}")
        cases += [(w, tuple(grid.get("providers", who))) for w in expand(grid, grid.get("modes", modes))]
    return Suite(
        name, table.get("description", ""), table.get("baseline", "sdpa"), tuple(cases), tuple(table.get("plots", ())),
        table.get("lead_ms"), table.get("rounds"), table.get("fresh", False),
        table.get("unseen", False), table.get("ours", "sartor"),
    )  # fmt: skip


def expand(grid: dict[str, Any], modes: list[str]) -> Iterator[Workload]:
    """Every combination of a grid's values: modes outermost, lengths innermost."""

    def many(key: str, default: Any = None) -> list[Any]:
        value = grid.get(key, default)
        return value if isinstance(value, list) else [value]

    axes = (
        modes, many("dtype", "bfloat16"), many("mask", "full"), many("dim"), many("dim_v"),
        many("heads_kv"), many("batch"), many("data", "normal"), many("seqlen"), many("seqlen_kv"),
    )  # fmt: skip
    for mode, dtype, mask, dim, dim_v, heads_kv, batch, data, n, n_kv in product(*axes):
        heads = grid["heads"] if "heads" in grid else max(1, grid["hidden"] // dim)
        size = batch if batch is not None else max(1, grid["tokens"] // n)
        yield Workload(size, heads, heads_kv or heads, n, n_kv or n, dim, dim_v or dim, dtype, mask, mode, data)
