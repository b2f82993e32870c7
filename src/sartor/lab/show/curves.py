"""Pictures of curves against length, log-log: time, memory, rates, errors. Lines that coincide are all seen."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from sartor.lab.measure.records import Record
from sartor.lab.show import names, plots

HEIGHT = 2.7  # inches of a panel
SAME = 0.02  # of an axis: curves that are nowhere further apart are seen as one
Curve = dict[int, float]  # by length


def latency(records: list[Record], folder: Path) -> list[Path]:
    """Milliseconds, with the quadratic slope that all the arithmetic has."""
    return _draw(records, folder, "latency", "ms", ("Time of a call by length", "ms"), (2,))


def memory(records: list[Record], folder: Path) -> list[Path]:
    """Peak extra MiB, with linear and quadratic slopes."""
    return _draw(records, folder, "memory", "peak_mem_mib", ("Memory beyond the inputs by length", "MiB"), (1, 2))


def rates(records: list[Record], folder: Path) -> list[Path]:
    """TFLOP/s."""
    return _draw(records, folder, "rates", "tflops", ("Useful TFLOP/s by length", "TFLOP/s"), ())


def errors(records: list[Record], folder: Path) -> list[Path]:
    """Relative error; not of a single key, whose value is the answer and whose gradients are 0."""
    told = [r for r in records if r.err_rel is not None and r.seqlen_kv > 1]
    title = "Error by length, over the size of the answer, against float64"
    return _draw(told, folder, "errors", "err_rel", (title, "relative error"), ())


def _draw(
    records: list[Record], folder: Path, name: str, key: str, words: tuple[str, str], slopes: tuple[int, ...]
) -> list[Path]:
    groups = plots.panels(records, lambda r: (r.mode, r.dtype, r.mask, r.batch, r.heads_q, r.dim, r.data))
    groups = {k: v for k, v in groups.items() if len({r.seqlen_kv for r in v}) >= plots.FEWEST}
    if not groups:
        return []
    drawn = [r for group in groups.values() for r in group]
    columns = min(2, len(groups))
    figure, axes = plots.subplots(len(groups), columns, HEIGHT)
    for i, (axis, group) in enumerate(zip(axes.flat, groups.values(), strict=False)):
        _panel(axis, group, key, slopes)
        axis.set_title(plots.panel(group, drawn))
        axis.set_xlabel("sequence length" if all(r.seqlen_q == r.seqlen_kv for r in group) else "keys")
        if i % columns == 0:
            axis.set_ylabel(words[1])
    better = plots.MOST if key == "tflops" else plots.LEAST
    return [plots.save(figure, folder, f"{records[-1].suite}-{name}", drawn, f"{words[0]} ({better})", handles=[])]


def _panel(axis: Any, records: list[Record], key: str, slopes: tuple[int, ...]) -> None:
    seen = plots.providers(records)
    curves = {
        name: dict(sorted((r.seqlen_kv, getattr(r, key)) for r in records if r.provider == name and getattr(r, key)))
        for name in seen
    }
    curves = {name: curve for name, curve in curves.items() if curve}
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    values, lengths = [y for c in curves.values() for y in c.values()], sorted({n for c in curves.values() for n in c})
    span = math.log10(max(values) / min(values))
    for together in _bundles(curves, SAME * span):
        for i, name in enumerate(together):
            _line(axis, curves[name], names.look(name, seen), name == "sartor", i, len(together))
    room = 10 ** (0.05 * span)
    axis.set_ylim(min(values) / room ** (3 if slopes else 1), max(values) * room)
    axis.set_xlim(lengths[0] / 1.12, lengths[-1] * 1.1)
    axis.set_xticks(lengths, _labels(lengths))
    plots.plain_rates(axis)
    for slope in slopes:
        _guide(axis, slope, list(curves.values()), room)
    _label_ends(axis, curves, seen)


def _line(axis: Any, curve: Curve, look: names.Look, ours: bool, i: int, count: int) -> None:
    """A curve, the i-th of so many that coincide: their dashes take turns, and their markers shrink. Ours lies thick
    and solid under all others, which therefore never hide it, nor it them."""
    dash, thick = 5, ours or count == 1 or i == 0
    style: Any = "-" if thick else (-i * dash % (count * dash), (dash, (count - 1) * dash))
    axis.plot(
        list(curve), list(curve.values()), color=look.colour, linewidth=2.8 if ours else 1.4, linestyle=style,
        marker=look.marker, markersize=5 + 1.9 * (count - 1 - i), markeredgecolor="white", markeredgewidth=0.5,
        zorder=3 if ours else 4 + 0.01 * i,
    )  # fmt: skip


def _bundles(curves: dict[str, Curve], apart: float) -> list[list[str]]:
    """Names of curves that are seen as one line, for each such line; `apart` is in powers of ten."""
    found: list[list[str]] = []
    for name, curve in curves.items():
        for together in found:
            first = curves[together[0]]
            shared = [n for n in curve if n in first]
            if len(shared) > 1 and all(abs(math.log10(curve[n] / first[n])) < apart for n in shared):
                together.append(name)
                break
        else:
            found.append([name])
    return found


def _label_ends(axis: Any, curves: dict[str, Curve], seen: list[str]) -> None:
    """Names beside the ends of their curves, moved apart where they would overlap and tied to them by a thin line."""
    low, high = (math.log10(v) for v in axis.get_ylim())
    ends = sorted(((*list(c.items())[-1][::-1], name) for name, c in curves.items()), key=lambda e: (e[0], -e[1]))
    texts = [textwrap.fill(names.title(name), 19) for _, _, name in ends]
    sizes = [(0.125 * (1 + text.count("\n")) + 0.04) / (HEIGHT - 0.65) for text in texts]  # shares of the axis
    places = [(math.log10(y) - low) / (high - low) for y, _, _ in ends]
    for _ in range(200):  # push neighbours apart, and keep all beside the axis
        for i in range(len(places) - 1):
            short = (sizes[i] + sizes[i + 1]) / 2 - (places[i + 1] - places[i])
            places[i : i + 2] = places[i] - max(0.0, short) / 2, places[i + 1] + max(0.0, short) / 2
        places[0], places[-1] = max(places[0], sizes[0] / 2 - 0.03), min(places[-1], 1.03 - sizes[-1] / 2)
    for place, text, (y, n, name) in zip(places, texts, ends, strict=True):
        line = {"arrowstyle": "-", "color": names.look(name, seen).colour, "linewidth": 1.1, "shrinkA": 1, "shrinkB": 3}
        axis.annotate(
            text, xy=(n, y), xytext=(1.1, place), textcoords="axes fraction", va="center", ha="left", fontsize=8,
            color="#222222", fontweight="bold" if name == "sartor" else "normal", annotation_clip=False,
            linespacing=1.05, arrowprops=line | {"relpos": (0, 0.5)},
        )  # fmt: skip


def _guide(axis: Any, slope: int, curves: list[Curve], room: float) -> None:
    """A dashed line of this slope, under the lowest curve that ends about as steeply, and over its longer half."""
    limits, steep = axis.get_ylim(), []
    for curve in curves:
        (n0, y0), (n1, y1) = list(curve.items())[-2:]
        if abs(math.log(y1 / y0) / math.log(n1 / n0) - slope) < 0.35:
            steep.append((y1, n1))
    if not steep:
        return
    y, n = min(steep)
    y /= room**1.6
    first = math.sqrt(n * min(min(c) for c in curves))
    axis.plot([first, n], [y * (first / n) ** slope, y], linestyle=(0, (3, 3)), color="#888888", linewidth=1, zorder=1)
    middle = math.sqrt(first * n)
    axis.annotate(
        "∝ N" if slope == 1 else "∝ N²", (middle, y * (middle / n) ** slope), xytext=(2, -2),
        textcoords="offset points", color="#666666", fontsize=8, ha="left", va="top",
    )  # fmt: skip
    axis.set_ylim(min(limits[0], y * (first / n) ** slope / room), limits[1])


def _labels(lengths: list[int]) -> list[str]:
    """Names of lengths on a log axis; none where it would touch the one before."""
    least, last, made = 0.1 * math.log(lengths[-1] / lengths[0]), 0, list[str]()
    for n in lengths:
        apart = not last or math.log(n / last) > least
        made.append(names.length(n) if apart else "")
        last = n if apart else last
    return made
