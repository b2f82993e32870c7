"""PNG plots made of records. A provider has one colour everywhere; every axis says its unit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sartor.lab.measure.records import CEILINGS, Record

COLOURS = {
    "sartor": "#d6294b", "eager": "#8c8c8c", "sdpa-math": "#b08d57", "sdpa": "#3b6fb6", "sdpa-flash": "#2a9d8f",
    "tf32": "#4a9ac7", "sdpa-cudnn": "#5a4fcf", "sdpa-efficient": "#e39b2d", "flex": "#7a3b8f",
}  # fmt: skip
VARIANTS = ["#f08a9d", "#8f1330", "#f4b6a6", "#5e0d20", "#c7527f"]  # `sartor:<kernel>`, rungs, in order of appearance
STYLE: dict[Any, Any] = {
    "font.size": 10, "font.family": "DejaVu Sans", "axes.titlesize": 10.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333", "xtick.color": "#444444", "ytick.color": "#444444", "axes.grid": True,
    "grid.color": "#e4e4e4", "grid.linewidth": 0.7, "axes.axisbelow": True, "legend.frameon": False,
    "savefig.dpi": 160, "figure.constrained_layout.use": True,
}  # fmt: skip


def colour(provider: str, seen: list[str]) -> str:
    """The colour of a provider; `seen` are all the providers of the plot, in order."""
    if ":" in provider:
        variants = [name for name in seen if ":" in name]
        return VARIANTS[variants.index(provider) % len(VARIANTS)]
    return COLOURS.get(provider, "#333333")


def _panels(records: list[Record], keys: Callable[[Record], tuple[Any, ...]]) -> dict[tuple[Any, ...], list[Record]]:
    """Records by what a panel shows, those of the forward first."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for r in sorted(records, key=lambda r: r.mode != "fwd"):
        if r.mode != CEILINGS:
            groups.setdefault(keys(r), []).append(r)
    return groups


def _providers(records: list[Record]) -> list[str]:
    found = list(dict.fromkeys(r.provider for r in records if r.ms is not None))
    return sorted(found, key=lambda name: (not name.startswith("sartor"), ":" in name))


def latency(records: list[Record], folder: Path) -> list[Path]:
    """Milliseconds against length, log-log, with the quadratic slope that all the arithmetic has."""
    return _curves(records, folder, "latency", "ms", "time per call (ms)", slopes=(2,))


def memory(records: list[Record], folder: Path) -> list[Path]:
    """Peak extra MiB against length, log-log, with linear and quadratic guides."""
    return _curves(records, folder, "memory", "peak_mem_mib", "peak extra memory (MiB)", slopes=(1, 2))


def rates(records: list[Record], folder: Path) -> list[Path]:
    """TFLOP/s against length, log-log."""
    return _curves(records, folder, "rates", "tflops", "TFLOP/s of useful work", slopes=())


def errors(records: list[Record], folder: Path) -> list[Path]:
    """Relative error against length, log-log; left out where the answer is 0, as gradients are of a single key."""
    told = [r for r in records if r.err_rel is not None and r.err_rel < 1]
    return _curves(told, folder, "errors", "err_rel", "relative error against float64", slopes=())


def _curves(
    records: list[Record], folder: Path, name: str, key: str, label: str, slopes: tuple[int, ...]
) -> list[Path]:
    panels = _panels(records, lambda r: (r.mode, r.dtype, r.mask, r.batch, r.heads_q, r.dim, r.data))
    panels = {k: v for k, v in panels.items() if len({r.seqlen_kv for r in v}) > 1}
    if not panels:
        return []
    columns = min(3, len(panels))
    figure, axes = _subplots(len(panels), columns, (4.6, 3.9), (0.9, 0.0))
    for i, (axis, ((mode, dtype, mask, b, h, d, _), found)) in enumerate(zip(axes.flat, panels.items(), strict=False)):
        _curve_panel(axis, found, key, slopes)
        axis.set_title(f"{_mode(mode)}, {mask}, {dtype}\nB={b} H={h} D={d}")
        axis.set_xlabel("sequence length" if all(r.seqlen_q == r.seqlen_kv for r in found) else "keys")
        if i % columns == 0:
            axis.set_ylabel(label)
    return [save(figure, folder, f"{records[-1].suite}-{name}", records)]


def _subplots(
    count: int, columns: int, size: tuple[float, float], margin: tuple[float, float], **options: Any
) -> tuple[Any, Any]:
    """A figure and its axes, row by row, as many as there are panels; the rest are not seen. Sizes are in inches."""
    import matplotlib.pyplot as plt

    rows = -(-count // columns)
    figsize = size[0] * columns + margin[0], size[1] * rows + margin[1]
    figure, axes = plt.subplots(rows, columns, figsize=figsize, squeeze=False, **options)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, axes


def _label_rates(axis: Any) -> None:
    """Figures at the powers of ten of a log axis, and between them where it spans few."""
    from matplotlib.ticker import LogLocator

    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 50 * low else (1,)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _curve_panel(axis: Any, records: list[Record], key: str, slopes: tuple[int, ...]) -> None:
    seen = _providers(records)
    ends: list[tuple[float, float, str]] = []
    for provider in seen:
        points = sorted((r.seqlen_kv, getattr(r, key)) for r in records if r.provider == provider and getattr(r, key))
        if not points:
            continue
        x, y = zip(*points, strict=True)
        width = 2.4 if provider == "sartor" else 1.5
        axis.plot(x, y, marker="o", markersize=3.6, linewidth=width, color=colour(provider, seen),
                  zorder=4 if provider == "sartor" else 3)  # fmt: skip
        ends.append((x[-1], y[-1], provider))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({r.seqlen_kv for r in records})
    axis.set_xticks(lengths, _labels(lengths))
    axis.minorticks_off()
    _label_rates(axis)
    _label_ends(axis, ends, seen, lengths)
    _guides(axis, slopes, lengths)


def _label_ends(axis: Any, ends: list[tuple[float, float, str]], seen: list[str], lengths: list[int]) -> None:
    """Names at the ends of their lines, moved apart where they would overlap; positions are shares of the log axis."""
    low, high = (math.log10(v) for v in axis.get_ylim())
    gap, shares = 0.058, list[float]()
    ends = sorted(ends, key=lambda end: end[1])
    for _, y, _ in ends:
        shares.append(max((math.log10(y) - low) / (high - low), shares[-1] + gap if shares else 0.0))
    for i in reversed(range(len(shares))):
        shares[i] = min(shares[i], 0.97 - gap * (len(shares) - 1 - i))
    for share, (_, _, provider) in zip(shares, ends, strict=True):
        weight = "bold" if provider == "sartor" else "normal"
        axis.annotate(
            provider, (1.015, share), xycoords="axes fraction", color=colour(provider, seen), va="center",
            fontsize=8.5, fontweight=weight, annotation_clip=False,
        )  # fmt: skip
    axis.set_xlim(lengths[0] / 1.12, lengths[-1] * 1.1)


def _guides(axis: Any, slopes: tuple[int, ...], lengths: list[int]) -> None:
    """Dashed lines of slope 1 and 2 through the lower left, within the limits that the data set."""
    limits = axis.get_ylim()
    for slope in slopes:
        y = [limits[0] * 1.05 * (n / lengths[0]) ** slope for n in lengths]
        axis.plot(lengths, y, linestyle=(0, (4, 3)), color="#bbbbbb", linewidth=1, zorder=1)
        middle = max(1, len([v for v in y if v < limits[1]]) - 2)
        axis.annotate("O(N)" if slope == 1 else "O(N²)", (lengths[middle], y[middle]), xytext=(3, -10),
                      textcoords="offset points", color="#999999", fontsize=8)  # fmt: skip
    axis.set_ylim(limits)


def head_dims(records: list[Record], folder: Path) -> list[Path]:
    """TFLOP/s for each head dim, grouped bars, with the measured matrix-product ceiling as a line."""
    import matplotlib.pyplot as plt

    panels = _panels(records, lambda r: (r.mode, r.dtype, r.mask))
    figure, axes = plt.subplots(len(panels), 1, figsize=(11, 3.7 * len(panels)), squeeze=False)
    for axis, ((mode, dtype, mask), found) in zip(axes.flat, panels.items(), strict=True):
        _bars(axis, found, [r.dim for r in found])
        _ceiling(axis, records, found[-1])
        first = found[0]
        axis.set_title(f"{_mode(mode)}, {mask}, {dtype}, B={first.batch} H={first.heads_q} N={first.seqlen_q}")
        axis.set_ylabel("TFLOP/s of useful work")
    axes.flat[-1].set_xlabel("head dim")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper left", ncols=6, fontsize=9.5)
    return [save(figure, folder, f"{records[-1].suite}-tflops", records)]


def _bars(axis: Any, records: list[Record], groups: list[Any], key: str = "tflops") -> None:
    seen, places = _providers(records), sorted(set(groups))
    width = 0.82 / max(1, len(seen))
    for i, provider in enumerate(seen):
        value = {x: getattr(r, key) or 0 for x, r in zip(groups, records, strict=True) if r.provider == provider}
        at = [places.index(x) + (i - (len(seen) - 1) / 2) * width for x in value]
        axis.bar(at, list(value.values()), width * 0.94, color=colour(provider, seen), label=provider)
    axis.set_xticks(range(len(places)), [str(x) for x in places])
    axis.grid(visible=False, axis="x")
    axis.set_ylim(0, 1.22 * max((getattr(r, key) or 0 for r in records), default=1) or 1)


def grid(records: list[Record], folder: Path) -> list[Path]:
    """TFLOP/s (decode: GB/s) against length, a panel for each head dim and mask, a file for each mode and dtype."""
    files = []
    for (mode, dtype), found in _panels(records, lambda r: (r.mode, r.dtype)).items():
        panels = _panels(found, lambda r: (r.mask, r.dim, r.heads_q, r.heads_kv))
        key, unit = ("gbps", "GB/s") if mode == "decode" else ("tflops", "TFLOP/s")
        columns = min(4, len({k[1:] for k in panels}))
        figure, axes = _subplots(len(panels), columns, (3.9, 3.2), (0.6, 0.5), sharey=True)
        for axis, ((mask, dim, h, kv), group) in zip(axes.flat, panels.items(), strict=False):
            places = [(r.seqlen_kv, r.seqlen_q, r.batch if mode == "decode" else 0) for r in group]
            _bars(axis, group, places, key)
            axis.set_xticks(range(len(set(places))), [_place(*place) for place in sorted(set(places))])
            twins = len([k for k in panels if k[:2] == (mask, dim) and k[2] == k[3]])
            heads = f", heads {h} on {kv}" if h != kv else f", H={h}" if twins > 1 else ""
            axis.set_title(f"D={dim}, {mask}{heads}")
        axes.flat[0].set_ylim(0, 1.12 * max(getattr(r, key) or 0 for r in found) or 1)
        for axis in axes.flat:
            _ceiling(axis, records, found[-1], key)
        for axis in axes[:, 0]:
            axis.set_ylabel(f"{unit}, {_mode(mode)}, {dtype}")
        for axis in axes[-1]:
            axis.set_xlabel("keys, for one query" if mode == "decode" else "seqlen")
        handles, names = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=6, fontsize=9.5)
        files.append(save(figure, folder, f"{records[-1].suite}-{mode}-{dtype}", found))
    return files


def _ceiling(axis: Any, records: list[Record], shown: Record, key: str = "tflops") -> None:
    """The rate of a matrix product or a copy in the run of what is shown, named at the left, where bars are mostly
    short; the axis is raised to it when they stay readable."""
    ceilings = [r for r in records if r.mode == CEILINGS and r.run_id == shown.run_id]
    peaks = [getattr(r, key) for r in ceilings if r.dtype in (shown.dtype, "") and getattr(r, key)]
    what = "copy" if key == "gbps" else "matrix product"
    top = axis.get_ylim()[1]
    if peaks and peaks[-1] < 2.2 * top:
        axis.set_ylim(0, max(top, peaks[-1] * 1.09))
        axis.axhline(peaks[-1], color="#555555", linewidth=1, linestyle=(0, (5, 3)), zorder=2)
        text = f"{what} {peaks[-1]:.0f}" if peaks[-1] >= 10 else f"{what} {peaks[-1]:.3g}"
        at: Any = ("axes fraction", "data")
        axis.annotate(text, (0.01, peaks[-1]), xycoords=at, va="bottom", fontsize=8, color="#555555")


def save(figure: Any, folder: Path, name: str, records: list[Record]) -> Path:
    """Write a figure as PNG, with where its records come from in the corner."""
    import matplotlib.pyplot as plt

    r, runs = records[-1], ", ".join(dict.fromkeys(x.run_id for x in records if x.mode != CEILINGS))
    figure.supxlabel(f"{r.device}, torch {r.torch}, run {runs}", fontsize=7.5, color="#999999", ha="left", x=0.01)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path)
    plt.close(figure)
    return path


def _mode(mode: str) -> str:
    return {"fwd": "forward", "bwd": "backward", "fwd_bwd": "forward + backward"}.get(mode, mode)


def _labels(lengths: list[int]) -> list[str]:
    """Names of lengths on a log axis; none where it would touch the one before."""
    least, last, names = 0.07 * math.log(lengths[-1] / lengths[0]), 0, list[str]()
    for n in lengths:
        apart = not last or math.log(n / last) > least
        names.append(_length(n) if apart else "")
        last = n if apart else last
    return names


def _place(seqlen_kv: int, seqlen_q: int, batch: int) -> str:
    """The name of a group of bars; `batch` where it has one, for decoding."""
    if batch:
        return f"{_length(seqlen_kv)}\nbatch {batch}"
    return _length(seqlen_kv) if seqlen_q == seqlen_kv else f"{_length(seqlen_q)}/{_length(seqlen_kv)}"


def _length(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)
