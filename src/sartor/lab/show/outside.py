"""The table of two timers."""

from __future__ import annotations

from sartor.lab.measure.records import Record
from sartor.lab.show import names
from sartor.lab.show.table import Table, number


def timers(records: list[Record]) -> Table:
    """Milliseconds of each provider by the lab's timer and by the other, and what the last takes over the first."""
    who = list(dict.fromkeys(r.provider.partition(":")[2] for r in records))
    first, last = names.provider(who[0]), names.provider(who[-1])
    headers = ["pass", "mask", "N", "D"]
    for name in who:
        headers += [f"{names.provider(name)} ms", "other timer"]
    table = Table("The same calls by two timers", [*headers, f"{first} vs {last}", "other timer"], [])
    for w in dict.fromkeys(r.workload for r in records):
        of = {r.provider.partition(":")[2]: r for r in records if r.workload == w}
        pairs = [(of[name].ms or 0.0, (of[name].counters or {})["outside ms"]) for name in who]
        row = [names.MODES[w.mode], names.mask(w.mask), names.length(w.seqlen_q), str(w.dim)]
        row += [number(ms) for pair in pairs for ms in pair]
        table.rows.append([*row, *(f"{there / here:.3f}x" for here, there in zip(pairs[0], pairs[-1], strict=True))])
    return table
