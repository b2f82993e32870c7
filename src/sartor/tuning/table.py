"""Tuning rows: data/sm<arch>.jsonl, one JSON object per line, each with where it was measured.

A row holds `kernel`, `bits` (of the dtype), `dim` and `dim_v` (rounded up to 16), `mask` (see `problem.mask_class`),
`tile` ([block_m, block_n, warps, stages], and again for a pass with two kernels) and `record` (the run it comes from).
A row with `keys` is for problems of at most so many keys, where filling the pipeline costs more than a small tile does;
of several the one with the fewest keys is taken. Legality is the kernel's business:
a row whose tile is not among the kernel's legal ones is an error that a test finds.
"""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.resources import files
from typing import Any

from sartor.device import Device
from sartor.kernels.spec import KernelSpec, Tile
from sartor.problem import Problem, mask_class


def bucket(dim: int) -> int:
    """Head dims are tiled in sixteens."""
    return -(-dim // 16) * 16


@cache
def rows(arch: int) -> dict[tuple[Any, ...], list[tuple[float, Tile, str]]]:
    """Most keys, tile and `file:line` by (kernel, bits, dim, dim_v, mask), fewest keys first."""
    name = f"sm{arch}.jsonl"
    file = files("sartor.tuning").joinpath("data", name)
    if not file.is_file():
        return {}
    found: dict[tuple[Any, ...], list[tuple[float, Tile, str]]] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        row = json.loads(line)
        key = tuple(row[k] for k in ("kernel", "bits", "dim", "dim_v", "mask"))
        found.setdefault(key, []).append((row.get("keys", math.inf), Tile.of(row["tile"]), f"from {name}:{number}"))
    return {key: sorted(tiles, key=lambda t: t[0]) for key, tiles in found.items()}


def _never(p: Problem, dev: Device, tile: Tile) -> bool:
    return False


def lookup(spec: KernelSpec, p: Problem, dev: Device) -> tuple[Tile | None, str]:
    """The tuned tile for a problem, else the kernel's first legal one; and where it comes from."""
    legal = list(spec.tiles(p, dev))
    if not legal:
        return None, ""
    key = (spec.name, p.dtype.itemsize * 8, bucket(p.dim), bucket(p.dim_v))
    for kind in dict.fromkeys((mask_class(p), "full" if mask_class(p) in ("full", "band") else "band")):
        for most, tile, source in rows(dev.arch).get((*key, kind), []):
            if p.seqlen_kv <= most and (tile in legal or getattr(spec, "fits", _never)(p, dev, tile)):
                return tile, source
    return legal[0], "first legal tile"
