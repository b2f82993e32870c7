"""What all pictures share: the style, a head that names the problem, ticks; and the bars.

A picture is as wide as a README shows it, so that its text keeps its size. It says by itself what it shows: a title,
the problem that all of it has in common, the device, and from which records it was drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sartor.lab.measure.records import CEILINGS, Record
from sartor.lab.measure.roofline import PRODUCT
from sartor.lab.show import names
from sartor.lab.show.table import number

WIDTH = 8.3  # inches; of 100 pixels a README shows about as many
CORNER = 140  # characters of a line of runs
GREY = "#555555"
STYLE: dict[Any, Any] = {
    "font.size": 9, "font.family": "DejaVu Sans", "axes.titlesize": 9, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333", "xtick.color": "#333333", "ytick.color": "#333333", "axes.grid": True,
    "grid.color": "#e4e4e4", "grid.linewidth": 0.7, "axes.axisbelow": True, "legend.frameon": False,
    "lines.scale_dashes": False, "savefig.dpi": 200, "figure.constrained_layout.use": True,
}  # fmt: skip
MOST, LEAST = "more is better", "less is better"
FEWEST = 3  # points of a panel: of fewer a table says more


def panels(records: list[Record], keys: Callable[[Record], tuple[Any, ...]]) -> dict[tuple[Any, ...], list[Record]]:
    """Records by what a panel shows, those of the forward first."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for r in sorted(records, key=lambda r: r.mode != "fwd"):
        if r.mode != CEILINGS:
            groups.setdefault(keys(r), []).append(r)
    return groups


def providers(records: list[Record]) -> list[str]:
    """Those that measured anything, ours first."""
    found = list(dict.fromkeys(r.provider for r in records if r.ms is not None))
    return sorted(found, key=lambda name: (not name.startswith("sartor"), ":" in name))


def problem(records: list[Record]) -> str:
    """What all records have in common: `B=4 H=16 D=128, bfloat16, causal, NVIDIA H200`."""
    sizes: dict[str, set[Any]] = {
        "B": {r.batch for r in records}, "H": {_heads(r) for r in records}, "N": {_lengths(r) for r in records},
        "D": {str(r.dim) if r.dim == r.dim_v else f"{r.dim}/{r.dim_v}" for r in records},
    }  # fmt: skip
    said = [" ".join(f"{x}={next(iter(found))}" for x, found in sizes.items() if len(found) == 1)]
    products = {"B×N": {r.batch * r.seqlen_kv for r in records}, "H×D": {r.heads_q * r.dim for r in records}}
    said += [
        f"{x}={next(iter(found))}" for x, found in products.items()
        if len(found) == 1 and all(len(sizes[letter]) > 1 for letter in x.split("×"))
    ]  # fmt: skip
    shared = [{r.dtype for r in records}, {names.mask(r.mask) for r in records}]
    words = [next(iter(found)) for found in shared if len(found) == 1]
    return ", ".join(filter(None, [*said, *words, names.device(records[-1].device)]))


def panel(group: list[Record], drawn: list[Record]) -> str:
    """What all of a panel has in common, and not all of the picture."""
    r = group[0]
    told = {"dtype": r.dtype, "mask": names.mask(r.mask), "batch": f"B={r.batch}", "heads_q": f"H={r.heads_q}",
            "dim": f"D={r.dim}", "data": r.data}  # fmt: skip
    own = [k for k in told if len({getattr(x, k) for x in group}) == 1 < len({getattr(x, k) for x in drawn})]
    return ", ".join([names.MODES[r.mode], *(told[k] for k in own)])


def _heads(r: Record) -> str:
    return str(r.heads_q) if r.heads_q == r.heads_kv else f"{r.heads_q}/{r.heads_kv}"


def _lengths(r: Record) -> str:
    return str(r.seqlen_q) if r.seqlen_q == r.seqlen_kv else f"{r.seqlen_q}/{r.seqlen_kv}"


def subplots(count: int, columns: int, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure and its axes, row by row, as many as there are panels; the rest are not seen. `height` is a row's."""
    import matplotlib.pyplot as plt

    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, height * rows), squeeze=False, **options)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, axes


def plain_rates(axis: Any) -> None:
    """Plain figures at the powers of ten of a log axis, and between them where it spans few."""
    from matplotlib.ticker import LogLocator

    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 50 * low else (1,)))
    axis.yaxis.set_major_formatter(lambda value, _: power(value))
    axis.minorticks_off()


def power(value: float) -> str:
    """A figure of a log axis; a power of ten where zeros would have to be counted."""
    if value < 9e-4:
        digit, exponent = f"{value:.0e}".split("e")
        return f"${'' if digit == '1' else digit + '·'}10^{{{int(exponent)}}}$"
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def head_dims(records: list[Record], folder: Path) -> list[Path]:
    """TFLOP/s for each head dim, grouped bars, a panel for each mode; none of wrong results."""
    records = [r for r in records if not r.wrong]
    groups = panels(records, lambda r: (r.mode, r.dtype, r.mask))
    figure, axes = subplots(len(groups), 1, 2.6)
    for axis, found in zip(axes.flat, groups.values(), strict=True):
        bars(axis, found, [r.dim for r in found])
        _product(axis, records, found[-1])
        axis.set_title(panel(found, [r for r in records if r.mode != CEILINGS]))
        axis.margins(x=0.01)
        axis.set_ylabel("TFLOP/s")
    axes.flat[-1].set_xlabel("head dim")
    return [save(figure, folder, f"{records[-1].suite}-tflops", records, f"Useful TFLOP/s by head dim ({MOST})")]


def bars(axis: Any, records: list[Record], groups: list[Any], key: str = "tflops") -> None:
    """Grouped bars, a group for each of the sorted `groups`, a colour for each provider."""
    seen, places = providers(records), sorted(set(groups))
    width = 0.82 / max(1, len(seen))
    for i, name in enumerate(seen):
        value = {x: getattr(r, key) or 0 for x, r in zip(groups, records, strict=True) if r.provider == name}
        at = [places.index(x) + (i - (len(seen) - 1) / 2) * width for x in value]
        axis.bar(
            at, list(value.values()), width * 0.94, color=names.look(name, seen).colour, label=names.provider(name)
        )
    axis.set_xticks(range(len(places)), [str(x) for x in places])
    axis.tick_params(axis="x", length=0)
    axis.grid(visible=False, axis="x")
    axis.set_ylim(0, 1.05 * max((getattr(r, key) or 0 for r in records), default=1) or 1)


def grid(records: list[Record], folder: Path) -> list[Path]:
    """TFLOP/s (decode: GB/s) against length, a panel for each head dim and mask, a file for each mode and dtype.

    Panels of few lengths are left to the tables, those whose bars would be too short to be seen beside others to the
    log axis of `rates`.
    """
    files = []
    for (mode, dtype), found in panels(records, lambda r: (r.mode, r.dtype)).items():
        key, unit = ("gbps", "GB/s") if mode in ("decode", "graph") else ("tflops", "useful TFLOP/s")
        groups = panels(found, lambda r: (r.mask, r.dim, r.heads_q, r.heads_kv))
        groups = {k: v for k, v in groups.items() if len({_place(r) for r in v}) >= FEWEST}
        least = max((getattr(r, key) or 0 for r in found), default=0) / 50
        seen = {k: v for k, v in groups.items() if min(getattr(r, key) or least for r in v) >= least}
        if seen:
            name, title = f"{records[-1].suite}-{mode}-{dtype}", f"{names.MODES[mode].capitalize()}: {unit} by length"
            files.append(_grid(records, seen, key, title, folder, name))
    return files


def _grid(
    records: list[Record], groups: dict[tuple[Any, ...], list[Record]], key: str, title: str, folder: Path, name: str
) -> Path:
    drawn = [r for group in groups.values() for r in group]
    # every mask in a row of its own, where it has as many panels as the others
    columns = min(3, len({k[1:] for k in groups}))
    figure, axes = subplots(len(groups), columns, 2.3, sharey=True)
    for axis, ((mask, dim, h, kv), group) in zip(axes.flat, groups.items(), strict=False):
        bars(axis, group, [_place(r) for r in group], key)
        axis.set_xticks(*_ticks(group))
        twins = [k for k in groups if k[:2] == (mask, dim)]
        heads = f", H={h}" if len(twins) > 1 else ""
        axis.set_title(f"D={dim}, {names.mask(mask)}{heads}{f' on {kv}' if h != kv else ''}")
    axes.flat[0].set_ylim(0, 1.05 * max(getattr(r, key) or 0 for r in drawn) or 1)
    for axis in axes.flat:
        _product(axis, records, drawn[-1], key)
    for axis in axes[:, 0]:
        axis.set_ylabel("GB/s" if key == "gbps" else "TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("keys, for one query" if drawn[0].mode in ("decode", "graph") else "sequence length")
    return save(figure, folder, name, drawn, f"{title} ({MOST})")


def _place(r: Record) -> tuple[int, int, int]:
    return r.seqlen_kv, r.seqlen_q, r.batch


def _ticks(group: list[Record]) -> tuple[range, list[str]]:
    """Where groups of bars stand, and their names; with the batch where it changes and tokens are not what is kept."""
    places = sorted({_place(r) for r in group})
    batches, tokens = {batch for _, _, batch in places}, {batch * n for n, _, batch in places}
    told = len(batches) > 1 and len(tokens) > 1
    lengths = [
        names.length(n) if n == q or q == 1 else f"{names.length(q)}/{names.length(n)}" for n, q, _ in places
    ]  # fmt: skip
    return range(len(places)), [f"{n}\nB={p[2]}" if told else n for n, p in zip(lengths, places, strict=True)]


def _product(axis: Any, records: list[Record], shown: Record, key: str = "tflops") -> None:
    """The rate of the matrix product or copy in the run of what is shown: a line behind the bars, for it is no ceiling.
    The axis is raised to it where bars stay readable."""
    ceilings = [r for r in records if r.mode == CEILINGS and r.run_id == shown.run_id and getattr(r, key)]
    found = [r for r in ceilings if r.dtype in (shown.dtype, "")]
    top = axis.get_ylim()[1]
    if not found or getattr(found[-1], key) > 2.2 * top:
        return
    rate = getattr(found[-1], key)
    axis.set_ylim(0, max(top, rate * 1.1))
    label, unit = product(found[-1], ceilings), "GB/s" if key == "gbps" else "TFLOP/s"
    axis.axhline(rate, color=GREY, linewidth=1.2, linestyle=(0, (5, 3)), zorder=0.5, label=label)
    at = {"transform": axis.get_yaxis_transform(), "ha": "left", "va": "bottom", "fontsize": 7.5, "color": GREY}
    axis.text(0.01, rate, f"{number(rate)} {unit}", **at)  # panels are of different runs; bars on the left are low


def product(r: Record, ceilings: list[Record]) -> str:
    """What a record of mode `ceilings` measured, in words."""
    if r.provider == "ceiling-copy":
        return "copy of a large tensor"
    if r.device == "cpu":
        return f"matrix product {PRODUCT['cpu']}³"
    plain = [x.tflops or 0.0 for x in ceilings if x.dtype == "float32 plain" and x.run_id == r.run_id]
    if r.dtype == "float32" and plain and plain[0] < (r.tflops or 0.0):
        return f"a third of cuBLAS {PRODUCT['cuda']}³ in float16 at its power cap"
    return f"cuBLAS {PRODUCT['cuda']}³ {'in float32' if 'float32' in r.dtype else 'at its power cap'}"


def save(
    figure: Any, folder: Path, name: str, drawn: list[Record], title: str, handles: list[Any] | None = None
) -> Path:
    """Write a figure as PNG, under a head (title, problem, legend) and with the records' runs in the corner.

    `handles` are the legend's, by default those of all axes. Title, problem and runs stand in the file's text fields
    too.
    """
    import matplotlib.pyplot as plt

    drawn = [r for r in drawn if r.mode != CEILINGS]
    if handles is None:
        told = sorted((axis.get_legend_handles_labels() for axis in figure.axes), key=lambda x: -len(x[0]))
        handles = list({label: handle for axis in told for handle, label in zip(*axis, strict=True)}.values())
        handles = sorted(handles, key=lambda handle: hasattr(handle, "get_linestyle"))  # bars before lines
    rows = -(-len(handles) // 3)
    text, source = problem(drawn), ", ".join(dict.fromkeys(r.run_id for r in drawn))
    corner = textwrap.wrap(f"torch {drawn[-1].torch}, run {source}", CORNER)
    head, foot = 0.56 + 0.2 * rows, 0.1 + 0.12 * len(corner)
    height = figure.get_figheight() + head + foot
    figure.set_figheight(height)
    figure.get_layout_engine().set(rect=(0, foot / height, 1, 1 - (head + foot) / height))
    figure.text(0.01, 1 - 0.08 / height, title, fontsize=11, fontweight="bold", va="top")
    figure.text(0.01, 1 - 0.3 / height, text, fontsize=9, color="#333333", va="top")
    figure.text(0.01, 0.06 / height, "\n".join(corner), fontsize=7, color="#777777")
    if handles:
        at = {"loc": "upper left", "bbox_to_anchor": (0.003, 1 - 0.47 / height), "borderaxespad": 0.0}
        figure.legend(handles=handles, ncols=min(3, len(handles)), fontsize=8.5, columnspacing=1.6, **at)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, metadata={"Title": title, "Description": text, "Source": source})
    plt.close(figure)
    return path
