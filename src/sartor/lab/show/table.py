"""A table, rendered for a terminal or as Markdown; records laid out as workloads by providers; numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sartor.lab.measure.flash import ABSENT
from sartor.lab.measure.records import CEILINGS, Record

AXES = ("mode", "dtype", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "dim", "dim_v", "mask", "data")
LABELS = {
    "batch": "B", "heads_q": "H", "heads_kv": "H kv", "seqlen_q": "N", "seqlen_kv": "N kv", "dim": "D", "dim_v": "D v"
}  # fmt: skip
NONE = "-"
Cells = dict[str, Record]


@dataclass
class Table:
    """Headers, rows of text, lines that go under them. Cells of `best` are bold, columns of `words` flush left."""

    title: str
    headers: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    best: set[tuple[int, int]] = field(default_factory=set)
    words: tuple[str, ...] = ()

    def markdown(self) -> str:
        """GitHub Markdown."""

        def line(cells: Iterable[str]) -> str:
            return "| " + " | ".join(cells) + " |"

        marked = [
            [f"**{cell}**" if (i, j) in self.best else cell for j, cell in enumerate(row)]
            for i, row in enumerate(self.rows)
        ]
        table = [line(self.headers), line("---" if left else "---:" for left in self._left()), *map(line, marked)]
        return "\n".join([self.title, "", *table, *(f"\n{note}" for note in self.notes)])

    def _left(self) -> list[bool]:
        return [i == 0 or header in self.words for i, header in enumerate(self.headers)]

    def rich(self) -> Any:
        """An empty line, the title, a rich.table.Table, the notes, which have the whole line beside a narrow table."""
        from rich import box
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for header, left in zip(self.headers, self._left(), strict=True):
            table.add_column(escape(header), justify="left" if left else "right")
        for i, row in enumerate(self.rows):
            cells = [f"[bold green]{escape(c)}[/]" if (i, j) in self.best else escape(c) for j, c in enumerate(row)]
            table.add_row(*cells)
        return Group("", Text(self.title, "bold"), table, *(Text(note, "italic") for note in self.notes))


@dataclass
class Pivot:
    """Records laid out as workloads by providers. Axes on which all agree are named once, in `constant`."""

    rows: list[Cells]
    providers: list[str]
    varying: list[str]
    constant: str

    @classmethod
    def of(cls, records: list[Record]) -> Pivot:
        """The pivot of some records, without ceilings and without libraries that were not installed."""
        here = [r for r in records if not (r.skipped or "").endswith(ABSENT)]
        records = [r for r in here if r.mode != CEILINGS]
        rows: dict[Any, Cells] = {}
        for r in records:
            rows.setdefault(r.workload, {})[r.provider] = r
        providers = list(dict.fromkeys(r.provider for r in records))
        providers.sort(key=lambda name: not name.startswith("sartor"))
        values = {axis: {getattr(r, axis) for r in records} for axis in AXES}
        varying = [a for a in AXES if len(values[a]) > 1 and not _follows(a, records)]
        constant = [a for a in AXES if len(values[a]) == 1 and not _follows(a, records)]
        first = records[0] if records else None
        words = [f"{LABELS[a]}={getattr(first, a)}" if a in LABELS else str(getattr(first, a)) for a in constant]
        return cls(list(rows.values()), providers, varying, ", ".join(words))

    def axes(self, cells: Cells) -> list[str]:
        """The varying axes of one row."""
        first = next(iter(cells.values()))
        return [str(getattr(first, axis)) for axis in self.varying]


def _follows(axis: str, records: list[Record]) -> bool:
    """Whether an axis says nothing new: dim_v where it is dim, and so on; batch where tokens are constant."""
    if axis == "data":
        return all(r.data == "normal" for r in records)
    twin = {"heads_kv": "heads_q", "seqlen_kv": "seqlen_q", "dim_v": "dim"}.get(axis)
    return twin is not None and all(getattr(r, axis) == getattr(r, twin) for r in records)


def number(x: float | None) -> str:
    """Three significant digits, without an exponent."""
    if x is None:
        return NONE
    digits = 0 if abs(x) >= 100 else 1 if abs(x) >= 10 else 2 if abs(x) >= 1 else 3 if abs(x) >= 0.1 else 4
    return f"{x:.{digits}f}"
