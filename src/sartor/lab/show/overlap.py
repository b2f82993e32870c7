"""What a ring's transfers cost that hide behind what it computes: a table, and a picture of when each came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sartor.lab.measure.records import Record
from sartor.lab.show import names, plots
from sartor.lab.show.table import NONE, Table, number

Spans = list[tuple[float, float]]
LINKS = {"near": "NVLink", "far": "InfiniBand"}
COLOURS = {"computes": "#D55E00", "transfers": "#0072B2", "stands still": "#444444"}


def spans(r: Record, what: str) -> Spans:
    """Begin and end of each transfer or wait, in milliseconds since the pass began."""
    found, counters = list[tuple[float, float]](), r.counters or {}
    while f"{what} {len(found)} begin" in counters:
        found.append((counters[f"{what} {len(found)} begin"], counters[f"{what} {len(found)} end"]))
    return found


def total(found: Spans) -> float:
    """Milliseconds of all."""
    return sum(end - begin for begin, end in found)


def _of(records: list[Record], mode: str, way: str, link: str) -> Record | None:
    wanted = f"transfers:{way}:{link}"
    return next((r for r in records if r.mode == mode and r.provider == wanted), None)


def table(records: list[Record]) -> Table:
    """Milliseconds of a pass for each link: without transfers, with them overlapped and in line; and their own."""
    w, ranks = records[0].workload, int((records[0].counters or {}).get("ranks", 0))
    shape = f"H={w.heads_q} on {w.heads_kv}, D={w.dim}, {w.dtype}, {names.mask(w.mask)}"
    headers = ["pass", "link", "without transfers", "overlapped", "in line", "transfers", "stood still for them"]
    found = Table(f"ms of one of {ranks} ranks with {w.seqlen_q} tokens each ({shape})", headers, [], words=("link",))
    for mode in dict.fromkeys(r.mode for r in records):
        none = _of(records, mode, "none", "near")
        for link, words in LINKS.items():
            side, line = (_of(records, mode, way, link) for way in ("overlapped", "in line"))
            if side is None or line is None or none is None:
                continue
            rate = f"{words}, {number((side.counters or {})['GB/s'])} GB/s"
            sums = (total(spans(side, what)) for what in ("transfer", "wait"))
            cells = [*(number(r.ms) for r in (none, side, line)), *(f"{x:.2f}" for x in sums)]
            found.rows.append([names.MODES[mode], rate, *(cell or NONE for cell in cells)])
    return found


def timeline(records: list[Record], folder: Path) -> list[Path]:
    """When a rank computes, stands still and gets what others have; a panel for each pass and link."""
    drawn = [r for r in records if r.provider.startswith("transfers:overlapped:")]
    if not drawn:
        return []
    figure, axes = plots.subplots(len(drawn), 1, 0.95)
    for axis, r in zip(axes.flat, drawn, strict=False):
        _lanes(axis, r)
    axes.flat[-1].set_xlabel("ms since the pass began")
    title = "A ring's transfers beside what it computes"
    return [plots.save(figure, folder, f"{records[-1].suite}-timeline", drawn, title)]


def _lanes(axis: Any, r: Record) -> None:
    """Computing with its gaps above, transfers below."""
    waits, end = spans(r, "wait"), r.ms or 0.0
    edges = [0.0, *(t for wait in waits for t in wait), end]
    lanes = {"computes": list(zip(edges[::2], edges[1::2], strict=True)), "stands still": waits,
             "transfers": spans(r, "transfer")}  # fmt: skip
    for what, found in lanes.items():
        bars = [(begin, stop - begin) for begin, stop in found]
        axis.broken_barh(bars, (0 if what == "transfers" else 1, 0.8), facecolors=COLOURS[what], label=what)
    axis.set_yticks([0.4, 1.4], ["transfers", "computes"])
    axis.grid(visible=False, axis="y")
    link = r.provider.rpartition(":")[2]
    axis.set_title(f"{names.MODES[r.mode]}, {LINKS[link]}, {number((r.counters or {})['GB/s'])} GB/s")
