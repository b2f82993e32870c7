"""The tables of training steps, and of what models of transformers do."""

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


def models(records: list[Record]) -> Table:
    """Wall time of a training step and of a generated token by attention, tokens a second, against SDPA; and how far
    losses and logits are from those of wider attention."""
    w = records[0].workload
    headers = ["", "attention", "ms", "tokens/s", f"vs {names.provider('sdpa')}", "apart / budget"]
    table = Table(f"{records[0].plan} ({w.dtype}, H={w.heads_q}, H kv={w.heads_kv}, D={w.dim})", headers, [])
    table.words = ("attention",)
    times = {(r.mode, r.provider): r.ms for r in records if r.ms}
    for r in records:
        w, found = r.workload, r.counters or {}
        name, base = names.provider(r.provider.partition(":")[2]), times.get((r.mode, "model:sdpa"))
        what = f"training step, B={w.batch}, N={w.seqlen_q}" if r.mode == "fwd_bwd" else (
            f"generated token, B={w.batch}, N kv up to {w.seqlen_kv}"
        )  # fmt: skip
        table.rows.append([
            what, name, number(r.ms), f"{found['tokens/s']:.0f}" if found else NONE,
            f"{base / r.ms:.2f}x" if base and r.ms else NONE,
            NONE if r.err_max is None or not r.err_budget else f"{r.err_max:.1e} / {r.err_budget:.1e}",
        ])  # fmt: skip
        if r.skipped:
            table.notes.append(f"{name}, {what.partition(',')[0]}: {r.skipped}")
    return table
