"""A table of context parallel attention on several GPUs of one host, beside one GPU."""

from __future__ import annotations

from sartor.lab.measure.records import Record
from sartor.lab.measure.several import ALONE, OURS, PYTORCHS, TRANSFERS
from sartor.lab.show import names
from sartor.lab.show.table import NONE, Table, number

Key = tuple[int, int, int]  # heads and tokens


def table(records: list[Record]) -> Table:
    """Milliseconds of both passes, the gain over one GPU, and what is left of them without computing."""
    by: dict[Key, dict[tuple[str, str], Record]] = {}
    for r in records:
        by.setdefault((r.heads_q, r.heads_kv, r.seqlen_q), {})[r.provider, r.mode] = r
    w, ranks = records[0].workload, int((records[0].counters or {}).get("ranks", 0))
    title = f"ms of {ranks} GPUs / gain over one (D={w.dim}, {w.dtype}, {names.mask(w.mask)})"
    headers = ["heads", "tokens", "computed by", "forward", "backward", "transfers forward", "transfers backward"]
    found = Table(title, headers, [], words=("computed by",))
    for (heads, heads_kv, tokens), cells in by.items():
        for provider in dict.fromkeys(name for name, _ in cells):
            if provider.startswith(TRANSFERS):
                continue
            moved = provider.replace(OURS, TRANSFERS, 1) if provider.startswith(OURS) else ""
            times = [_time(cells.get((provider, mode)), cells.get((ALONE, mode))) for mode in ("fwd", "bwd")]
            times += [_time(cells.get((moved, mode)), None) for mode in ("fwd", "bwd")]
            found.rows.append([f"{heads} on {heads_kv}", str(tokens), _in_words(provider), *times])
    errors = [r.errors["out rel"] for r in records if r.errors]
    if errors:
        found.notes.append(f"out differs from one GPU's by at most {max(errors):.1e} of its norm.")
    skipped = {f"{_in_words(r.provider)}, {r.heads_q} on {r.heads_kv}: {r.skipped}" for r in records if r.skipped}
    found.notes += [f"Not measured: {why}." for why in sorted(skipped)]
    return found


def _time(r: Record | None, one: Record | None) -> str:
    if r is None or r.ms is None:
        return NONE
    text = number(r.ms) or NONE
    return text if one is None or one is r or not one.ms else f"{text} / {one.ms / r.ms:.2f}x"


def _in_words(provider: str) -> str:
    kind, _, method = provider.partition(":")
    return {ALONE: "one GPU", OURS: method, PYTORCHS: f"PyTorch, {method}"}[kind]
