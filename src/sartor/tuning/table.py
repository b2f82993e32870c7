"""Tuning rows: data/sm<arch>.jsonl, one JSON object per line, each with where it was measured.

A row holds `kernel`, `bits` (of the dtype), `dim` and `dim_v` (rounded up to 8, or where there is no such row to 16),
`mask` (see `problem.mask_class`), `tile` ([block_m, block_n, warps, stages], and again for a pass with two kernels),
`tflops` (useful ones a second, of a forward) and `record` (the run it comes from).
A row with `keys` is for problems of at most so many keys, where filling the pipeline costs more than a small tile does;
of several the one with the fewest keys is taken, or, where queries are too few for its tile, the one with the fewest
queries. Where tiles are few, a kernel may take fewer queries than the row says (`suited`), but no other keys: what else
is in a batch does not change a row's bits. Legality is the kernel's business: a row whose tile is not among the
kernel's legal ones is an error that a test finds.
"""

from __future__ import annotations

import json
import math
from functools import cache, lru_cache
from importlib.resources import files
from itertools import product
from typing import Any, NamedTuple

from sartor.device import Device
from sartor.kernels.spec import KernelSpec, Tile, first_of_class, length_class
from sartor.problem import Problem, mask_class

SLICE = 64  # queries that one warpgroup of a block works on, at most


class Row(NamedTuple):
    """A tuned tile: the most keys it is for, the tile, `file:line`, and the TFLOP/s it reached, 0 where unknown."""

    keys: float
    tile: Tile
    source: str
    tflops: float = 0.0


def bucket(dim: int, step: int = 16) -> int:
    """Head dims are tiled in sixteens, or in eights."""
    return -(-dim // step) * step


@cache
def rows(arch: int) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by (kernel, bits, dim, dim_v, mask), fewest keys first."""
    name = f"sm{arch}.jsonl"
    file = files("sartor.tuning").joinpath("data", name)
    if not file.is_file():
        return {}
    found: dict[tuple[Any, ...], list[Row]] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        row = json.loads(line)
        key = tuple(row[k] for k in ("kernel", "bits", "dim", "dim_v", "mask"))
        most, tflops = row.get("keys", math.inf), row.get("tflops", 0.0)
        found.setdefault(key, []).append(Row(most, Tile.of(row["tile"]), f"from {name}:{number}", tflops))
    return {key: sorted(tiles, key=lambda row: row.keys) for key, tiles in found.items()}


def find(spec: KernelSpec, p: Problem, dev: Device) -> Row | None:
    """The row of a problem, if there is one whose tile is legal."""
    return _find(spec, p, length_class(p), dev)


def _find(spec: KernelSpec, p: Problem, alike: Problem, dev: Device) -> Row | None:
    for some in _legal_rows(spec, alike, dev):  # type: ignore[arg-type] # kernels are by identity
        best = next((row for row in some if p.seqlen_kv <= row.keys), None)
        if best:
            idle = best.tile.block_m - p.seqlen_q * p.group >= SLICE
            return min(some, key=lambda row: row.tile.block_m) if idle else best
    return None


@lru_cache(maxsize=1024)
def _legal_rows(spec: KernelSpec, p: Problem, dev: Device) -> list[list[Row]]:
    """Of a class of lengths the rows whose tiles are legal, those first that were tuned for the most alike."""
    mask, known = mask_class(p), rows(dev.arch)
    masks = dict.fromkeys((mask, "full" if mask == "band" else "band"))
    dims = dict.fromkeys((bucket(p.dim, step), bucket(p.dim_v, step)) for step in (8, 16))
    found = [known.get((spec.name, p.dtype.itemsize * 8, *of, kind), []) for of, kind in product(dims, masks)]
    return [[row for row in some if spec.fits(p, dev, row.tile)] for some in found]


def blocks(p: Problem, tile: Tile) -> int:
    """Query tiles of a problem; those of a group count as one head's."""
    return math.ceil(p.seqlen_q * p.group / tile.block_m) * p.batch * p.heads_kv


def lookup(spec: KernelSpec, p: Problem, dev: Device) -> tuple[Tile | None, str]:
    """The tuned tile for a problem, else the kernel's first legal one; and where it comes from."""
    alike = length_class(p)
    first = first_of_class(spec, alike, dev)  # type: ignore[arg-type]
    if first is None:
        return None, ""
    row = _find(spec, p, alike, dev)
    tile, source = (row.tile, row.source) if row else (first, "first legal tile")
    return spec.suited(p, dev, tile), source
