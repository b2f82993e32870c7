"""What masks and scores look like: the weights that `attention` gives, as a small matrix; and their speed beside it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

import sartor
from sartor.lab.measure import providers
from sartor.lab.measure.records import Record
from sartor.lab.show import names, plots
from sartor.lab.show.table import number
from sartor.lab.workloads.workload import Inputs, Workload

SIDE = 64  # queries and keys of a picture


def weights(length: int = SIDE, **options: Any) -> torch.Tensor:
    """The weights (length, length) of queries and keys that are all alike, each row over its largest, float32: 0 is
    hidden. With the unit matrix for values, `sartor.attention` returns them; `options` are its own."""
    alike = torch.zeros(1, length, 1, length, dtype=torch.float32, device="cpu")
    unit = torch.eye(length, dtype=torch.float32, device="cpu")[None, :, None]
    out: Any = sartor.attention(alike, alike, unit, **options)
    found: torch.Tensor = out[0, :, 0]
    return found / found.amax(1, keepdim=True).clamp(min=torch.finfo(found.dtype).tiny)


def draw(axis: Any, weights: torch.Tensor) -> None:
    """Weights as a matrix on an axis: queries downwards, keys to the right, hidden is white."""
    axis.imshow(weights.numpy(), cmap="Blues", vmin=0.0, vmax=1.3, interpolation="nearest")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(visible=False)
    for side in axis.spines.values():
        side.set(visible=True, color="#888888", linewidth=0.8)


def of_workload(r: Record) -> torch.Tensor:
    """The weights of a record's mask and scores, made smaller: windows, prefixes, distances too."""
    shrink = r.seqlen_kv // SIDE
    text = re.sub(
        r"(windows?|prefix)(\d+)", lambda m: f"{m[1]}{max(8 if m[1] == 'windows' else 1, int(m[2]) // shrink)}", r.mask
    )
    text = re.sub(r"natten(\d+)", lambda m: f"natten{int(m[1]) // math.isqrt(shrink) | 1}", text)  # the image's width
    w = Workload(1, 1, 1, SIDE, SIDE, SIDE, SIDE, "float32", text)
    x = Inputs.make(w, torch.device("cpu"))
    if x.slopes is not None:
        x.slopes *= shrink
    return weights(**{k: v for k, v in providers.options(w, x).items() if k != "layout"})


def plot(records: list[Record], folder: Path) -> list[Path]:
    """A row for each mask of the shortest length and the largest head dim: its shape, and for each mode bars of useful
    TFLOP/s."""
    found = [r for r in records if r.mode in ("fwd", "bwd")]
    shown = min(((r.seqlen_kv, -r.dim) for r in found), default=None)
    found = [r for r in found if (r.seqlen_kv, -r.dim) == shown]
    if not found:
        return []
    masks, modes = list(dict.fromkeys(r.mask for r in found)), sorted({r.mode for r in found}, reverse=True)
    import matplotlib.pyplot as plt

    size, ratios = (plots.WIDTH, 0.72 * len(masks) + 0.35), [0.62, *[3.0] * len(modes)]
    figure, axes = plt.subplots(len(masks), len(ratios), figsize=size, squeeze=False, width_ratios=ratios)
    top = max(r.tflops or 0 for r in found)
    for mask, row in zip(masks, axes, strict=True):
        draw(row[0], of_workload(next(r for r in found if r.mask == mask)))
        for mode, axis in zip(modes, row[1:], strict=True):
            _row(axis, [r for r in found if (r.mask, r.mode) == (mask, mode)], plots.providers(found), top)
        row[1].set_ylabel(names.mask(mask).replace(", ", ",\n"), rotation=0, ha="right", va="center", labelpad=6)
    axes[0][0].set_title("keys →", fontsize=8, fontweight="normal")
    axes[0][0].set_ylabel("queries →", fontsize=8, rotation=270, labelpad=9)
    for mode, axis in zip(modes, axes[0][1:], strict=True):
        axis.set_title(f"{names.MODES[mode]}, useful TFLOP/s")
    title = f"Masks and scores: what a query sees, and how fast ({plots.MOST})"
    return [plots.save(figure, folder, f"{records[-1].suite}-shapes", found, title)]


def _row(axis: Any, records: list[Record], seen: list[str], top: float) -> None:
    """A bar for each provider, with its figure; where there is none, why."""
    for i, name in enumerate(seen):
        r = next((r for r in records if r.provider == name), None)
        rate = r.tflops if r else None
        axis.barh(i, rate or 0, 0.86, color=names.look(name, seen).colour, label=names.provider(name))
        said = number(rate) if rate else (r.skipped if r else None) or "not measured"
        axis.annotate(said, (rate or 0, i), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7,
                      color="#222222" if rate else "#777777")  # fmt: skip
    axis.set_xlim(0, 1.15 * top)
    axis.set_ylim(len(seen) - 0.5, -0.5)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(visible=False)
    axis.spines["bottom"].set_visible(False)
