"""What the model of `sartor.distributed.choose` says of many GPUs, from the steps that were measured on one: how near
it is to those steps, how long a pass takes, and up to how many GPUs each method pays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sartor.distributed.choose import Forecast, Work, forecasts
from sartor.distributed.machine import H200, Machine
from sartor.distributed.sharding import Sharding
from sartor.lab.measure import scaling
from sartor.lab.measure.records import Record
from sartor.lab.show import plots
from sartor.lab.show.table import NONE, Table, number
from sartor.lab.workloads.workload import Workload

LENGTHS = {1 << 17: "128k", 1 << 20: "1M", 1 << 24: "16M"}  # tokens
GPUS = tuple(1 << i for i in range(11))
TABLED = (8, 32, 64, 128, 256, 1024)  # of them, in the table
METHODS = {"ring": "#D55E00", "allgather": "#0072B2", "ulysses": "#009E73", "usp": "#332288"}  # and their colours
PAYS = 0.5  # of the time of each GPU that is put to use


class Point(NamedTuple):
    """A method on some GPUs: seconds of a forward and backward, and the share of them that one GPU's work explains."""

    seconds: float
    efficiency: float
    shares: int  # ranks that share heads
    reason: str


def work(r: Workload, tokens: int, gpus: int, shares: int) -> Work:
    """Attention of such heads and dims, causal, zigzag."""
    text = Sharding.make("zigzag", tokens, gpus).text
    size = r.torch_dtype.itemsize
    return Work(
        1, r.heads_q, r.heads_kv, r.dim, r.dim_v, size, text, text, gpus, shares, True, None, False, True
    )  # fmt: skip


def best(r: Workload, machine: Machine, tokens: int, gpus: int) -> dict[str, tuple[Forecast, int]]:
    """The forecast of each method; of usp that of the best mesh."""
    found = {name: (f, 1) for name, f in forecasts(work(r, tokens, gpus, 1), machine).items()}
    meshes = [s for s in GPUS[1:] if s < gpus and r.heads_q % s == 0]
    several = [(forecasts(work(r, tokens, gpus, s), machine)["usp"], s) for s in meshes]
    if several:
        found["usp"] = min(several, key=lambda pair: pair[0].seconds(True))
    return found


def points(r: Workload, machine: Machine, tokens: int) -> Iterator[tuple[int, dict[str, Point]]]:
    """Each number of GPUs with its methods."""
    alone = best(r, machine, tokens, 1)["ring"][0].seconds(True)
    for gpus in GPUS:
        yield (
            gpus,
            {
                name: Point(f.seconds(True), alone / gpus / f.seconds(True), shares, f.reason)
                for name, (f, shares) in best(r, machine, tokens, gpus).items()
            },
        )


def shown(records: list[Record]) -> tuple[Workload, Machine]:
    """The model of language whose attention is spread, and the machine that the records make."""
    p = scaling.PLAN
    return Workload(1, *p.heads, 1, 1, p.dim, p.dim, p.dtype, "causal"), scaling.machine(records, H200)


def forecast(records: list[Record]) -> Table:
    """Milliseconds of a forward and backward, and efficiency, by method; the fastest is bold."""
    r, machine = shown(records)
    shape = f"{r.dtype}, H={r.heads_q} on {r.heads_kv}, D={r.dim}, causal, zigzag"
    table = Table(
        f"Predicted: time of a forward and backward / efficiency ({shape})", ["tokens", "GPUs", *METHODS], []
    )  # fmt: skip
    lasts: dict[str, list[str]] = {name: [] for name in METHODS}
    for tokens, words in LENGTHS.items():
        found = dict(points(r, machine, tokens))
        for gpus in TABLED:
            at = found[gpus]
            table.rows.append([words, str(gpus), *(_cell(at.get(name)) for name in METHODS)])
            fastest = min(at, key=lambda name: at[name].seconds)
            table.best.add((len(table.rows) - 1, 2 + list(METHODS).index(fastest)))
        for name in METHODS:
            paying = [gpus for gpus, at in found.items() if name in at and at[name].efficiency >= PAYS]
            lasts[name].append(f"{max(paying, default=0) or 'none'} of {words}")
    table.notes.append(
        "Efficiency: what one GPU takes by the same model, over GPUs times the time. usp (ranks that share heads)."
    )
    fit = int(machine.memory / _held(r))
    table.notes.append(
        f"A token takes {_held(r) / 1e3:.0f} kB on a rank of the ring, keys on their way included:"
        f" {machine.memory / 1e9:.0f} GB hold {fit / 2**20:.1f}M tokens, were there nothing else. What does not fit is"
        " predicted all the same."
    )
    table.notes.append(
        f"The most GPUs at which each still puts {PAYS:.0%} of their time to use: "
        + "; ".join(f"{name} {', '.join(found)}" for name, found in lasts.items()) + " tokens."
    )  # fmt: skip
    table.notes.append(
        f"Links {machine.near / 1e9:.0f} GB/s within {machine.host_ranks} GPUs and {machine.far / 1e9:.0f} GB/s between"
        f" hosts, after {machine.near_latency * 1e6:.0f} and {machine.far_latency * 1e6:.0f} us."
    )
    return table


def _cell(p: Point | None) -> str:
    if p is None or p.reason:
        return NONE
    mesh = f" ({p.shares})" if p.shares > 1 else ""
    time = f"{number(p.seconds * 1e3)} ms" if p.seconds < 10 else f"{number(p.seconds)} s"
    return f"{time} / {p.efficiency:.0%}{mesh}"


def _held(r: Workload) -> int:
    """Bytes a token takes on a rank of the ring: q, out and dout, k and v with three blocks of others' keys, all in the
    inputs' dtype; in float32 dq, and dk and dv with two blocks of others'."""
    size, queries, keys = r.torch_dtype.itemsize, r.heads_q * r.dim, r.heads_kv * (r.dim + r.dim_v)
    return size * (3 * queries + 4 * keys) + 4 * (queries + 3 * keys)


def blocks(records: list[Record]) -> Table:
    """Measured steps beside the model's time for the same pairs."""
    _, machine = shown(records)
    headers = ["step", "heads", "queries", "keys", "seen", "forward ms", "model", "backward ms", "model"]
    table = Table("What a rank computes, measured and by the model", headers, [])
    rows: dict[Any, dict[str, Record]] = {}
    for r in records:
        if r.base_provider == scaling.FAMILY or _whole(r):
            rows.setdefault((r.provider, r.batch, r.heads_q, r.heads_kv, r.seqlen_q, r.seqlen_kv), {})[r.mode] = r
    for (name, batch, heads, shared, queries, keys), found in rows.items():
        cells = []
        for mode in ("fwd", "bwd"):
            r = found[mode]
            cells += [number(r.ms), number(scaling.modelled(r, machine) * 1e3)]
        share = (found["fwd"].counters or {}).get("fraction", scaling.seen(found["fwd"]) / queries / keys)
        words = name.removeprefix(f"{scaling.FAMILY}:").replace(":", ", ").replace("sartor", f"a call, batch {batch}")
        table.rows.append([words, f"{heads} on {shared}", str(queries), str(keys), f"{share:.0%}", *cells])
    return table


def _whole(r: Record) -> bool:
    """Whether it is of a whole causal call, which a rank of "ulysses" makes."""
    size = r.dim == r.dim_v == scaling.PLAN.dim and r.dtype == scaling.PLAN.dtype
    return size and r.provider == "sartor" and r.mask == "causal" and r.mode in ("fwd", "bwd")


def plot(records: list[Record], folder: Path) -> list[Path]:
    """Efficiency against GPUs, a panel for each length."""
    r, machine = shown(records)
    figure, axes = plots.subplots(len(LENGTHS), len(LENGTHS), 2.6, sharey=True)
    for axis, (tokens, words) in zip(axes.flat, LENGTHS.items(), strict=True):
        found = list(points(r, machine, tokens))
        for name, colour in METHODS.items():
            curve = {g: at[name].efficiency for g, at in found if name in at and not at[name].reason}
            axis.plot(list(curve), list(curve.values()), color=colour, marker="o", markersize=3.5, label=name)
        axis.axhline(PAYS, color=plots.GREY, linewidth=0.9, linestyle=(0, (5, 3)), zorder=0.5)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 8, 64, 1024], ["1", "8", "64", "1024"])
        axis.set_title(f"{words} tokens")
        axis.set_xlabel("GPUs")
    axes.flat[0].set_ylabel("efficiency")
    axes.flat[0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    drawn = [x for x in records if x.provider.startswith(f"{scaling.FAMILY}:ring")]
    title = f"Predicted efficiency of a forward and backward ({plots.MOST})"
    return [plots.save(figure, folder, f"{records[-1].suite}-forecast", drawn, title)]
