"""The table of training steps."""

from __future__ import annotations

from sartor.lab.measure.records import Record
from sartor.lab.show import names
from sartor.lab.show.table import NONE, Table, number


def steps(records: list[Record]) -> Table:
    """Wall time of a step, tokens a second, against SDPA; and how far the losses are from those of wider attention."""
    w = records[0].workload
    shape = f"{w.dtype}, B={w.batch}, H={w.heads_q}, N={w.seqlen_q}, D={w.dim}, {w.mask}"
    headers = ["stack", "attention", "ms a step", "tokens/s", f"vs {names.provider('sdpa')}", "last loss",
               "losses apart / budget"]  # fmt: skip
    table = Table(f"training steps, wall time ({shape})", headers, [], words=("attention",))
    times = {r.provider: r.ms for r in records if r.ms}
    for r in records:
        _, name, *kind = r.provider.split(":")
        base, found = times.get(":".join(["step", "sdpa", *kind])), r.counters or {}
        apart = NONE if r.err_max is None or not r.err_budget else f"{r.err_max:.1e} / {r.err_budget:.1e}"
        table.rows.append([
            kind[0] if kind else "eager", names.provider(name), number(r.ms),
            f"{found['tokens/s']:.0f}" if found else NONE, f"{base / r.ms:.2f}x" if base and r.ms else NONE,
            f"{found['loss last']:.4f}" if "loss last" in found else NONE, apart,
        ])  # fmt: skip
        if r.skipped:
            table.notes.append(f"{names.provider(name)}: {r.skipped}")
    return table
