"""Tables of context parallel records: errors by method and steps, bytes that ranks give."""

from __future__ import annotations

from sartor.lab.measure.records import Record
from sartor.lab.show.table import Table

NAMES = ("out", "lse", "dq", "dk", "dv")


def errors(records: list[Record]) -> Table:
    """The relative error of every result, by who computed it; a row for both passes."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for r in records:
        if r.errors:
            rows.setdefault((r.dtype, r.provider), {}).update(r.errors)
    table = Table("relative error against float64", ["dtype", "computed by", *NAMES], [], words=("computed by",))
    for (dtype, provider), found in rows.items():
        cells = [f"{found[f'{name} rel']:.1e}" for name in NAMES]
        table.rows.append([dtype, _in_words(provider, dtype), *cells])
    return table


def traffic(records: list[Record]) -> Table:
    """MB that the busiest rank gives, counted / by the model, in the forward and in the backward."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for r in records:
        if r.counters:
            counted, model = (r.counters[f"bytes {name}"] / 1e6 for name in ("given", "by the model"))
            rows.setdefault((r.mask, r.provider), {})[r.mode] = f"{counted:.2f} / {model:.2f}"
    table = Table(
        "MB that the busiest rank gives, counted / by the model",
        ["mask", "method", "forward", "backward"],
        [],
        words=("method",),
    )
    table.rows += [[mask, _in_words(who, ""), cells["fwd"], cells["bwd"]] for (mask, who), cells in rows.items()]
    return table


def _in_words(provider: str, dtype: str) -> str:
    kind, *rest = provider.split(":")
    if kind == "steps":
        return f"{rest[0]} steps merged in float32"
    if kind == "rounded":
        return f"{rest[0]} steps merged in {dtype}"
    return "one process" if rest[0] == "alone" else f"{rest[0]}, {rest[1]} ranks"
