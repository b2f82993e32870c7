"""Tables made of records: one builder per view."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import geometric_mean, median
from typing import Any

from sartor.lab.measure import check
from sartor.lab.measure.contention import MOST, SPREAD, disturbed
from sartor.lab.measure.records import Record
from sartor.lab.measure.rehearsal import Launched
from sartor.lab.measure.timing import LONGEST_MS
from sartor.lab.show import names
from sartor.lab.show.table import LABELS, NONE, Pivot, Table, number

Verified = Callable[[Record], bool]
BY_BYTES = ("decode", "graph")  # modes that are as fast as memory is read


def speed(
    records: list[Record], baseline: str, verified: Verified = lambda r: True, ours: str = "sartor"
) -> Table:  # fmt: skip
    """Milliseconds and TFLOP/s (of a CPU GFLOP/s, of decoding GB/s) of every provider, and how `ours` compares. A time
    that is not to be trusted is marked ~. One whose errors are beyond their budget is marked †, and never the best."""
    pivot = Pivot.of(records)
    unit = "GB/s" if all(r.mode in BY_BYTES for r in records) else rate_unit(records[0].device)
    table = _table(pivot, f"ms and {unit}", [*_words(pivot), f"vs {names.provider(baseline)}", "vs best"])
    reasons: dict[str, None] = {}
    ratios: list[float] = []
    for i, cells in enumerate(pivot.rows):
        row = pivot.axes(cells)
        times = {name: r.ms for name, r in cells.items() if r.ms}
        right = {name: ms for name, ms in times.items() if not cells[name].wrong}
        for name in pivot.providers:
            record = cells.get(name)
            if name in right and right[name] == min(right.values()):
                table.best.add((i, len(row)))
            row.append(_cell(_speed, record, reasons, verified))
        own, others = times.get(ours), [ms for name, ms in right.items() if not name.startswith("sartor")]
        row.append(_ratio(times.get(baseline), own))
        row.append(_ratio(min(others, default=None), own))
        if own and others:
            ratios.append(min(others) / own)
        table.rows.append(row)
    table.notes += _verdict(ratios, ours) + noted(reasons)
    if any(r.ms and disturbed(r) for r in records):
        table.notes.append(
            f"~ is not to be trusted: other processes took over {100 * MOST:.0f} % of the CPUs that it wants, or its"
            f" samples' 80th percentile is over {SPREAD} times their 20th."
        )
    table.notes += _wrong(records)
    return table


def _wrong(records: Iterable[Record]) -> list[str]:
    return ["†: its largest error is beyond its budget; it counts as no rival."] if any(map(_dagger, records)) else []


def _dagger(r: Record) -> str:
    return "†" * bool(r.ms and r.wrong)


def _verdict(ratios: list[float], ours: str) -> list[str]:
    """How often we are ahead; the worst row is named as loudly as the best."""
    if not ratios:
        return []
    wins, n = sum(r > 1 for r in ratios), len(ratios)
    return [
        f"vs: how many times as fast {names.provider(ours)} is. Against the best other of each row: "
        f"ahead on {wins} of {n}, geometric mean {geometric_mean(ratios):.2f}x, "
        f"worst {min(ratios):.2f}x, best {max(ratios):.2f}x."
    ]


def _cell(told: Callable[[Record], str], r: Record | None, reasons: dict[str, None], verified: Verified) -> str:
    """What is told of a record; where that is nothing, why nothing was measured."""
    if r is None:
        return NONE
    text = told(r)
    if not text:
        return skipped(r, reasons)
    return text if verified(r) else f"{text} unverified"


def rate_unit(device: str) -> str:
    """Of useful work, by a device's key: a CPU does less than a TFLOP/s."""
    return "GFLOP/s" if device == "cpu" else "TFLOP/s"


def rate(tflops: float | None, device: str) -> str:
    """In that unit."""
    return number(None if tflops is None else tflops * (1e3 if device == "cpu" else 1))


def noted(reasons: Iterable[str]) -> list[str]:
    """Reasons as `skipped` collects them, each said once: of the providers that share it."""
    sharing = dict[str, list[str]]()
    for text in reasons:
        provider, _, why = text.partition(": ")
        sharing.setdefault(why, []).append(provider)
    return [f"{', '.join(who)}: {why}" for why, who in sharing.items()]


def _speed(r: Record) -> str:
    if r.ms is None:
        return ""
    mark = "~" if disturbed(r) else ""
    return f"{mark}{number(r.ms)} / {number(r.gbps) if r.mode in BY_BYTES else rate(r.tflops, r.device)}{_dagger(r)}"


def _calls(r: Record) -> str:
    return "" if r.disk_call_s is None else f"{number(r.first_call_s)} / {number(r.disk_call_s)}"


def _peak(r: Record) -> str:
    return "" if r.peak_mem_mib is None else number(r.peak_mem_mib)


def skipped(r: Record, reasons: dict[str, None]) -> str:
    """OOM as OOM; everything else as a dash with its reason in the notes."""
    if r.skipped == "out of memory":
        return "OOM"
    if r.skipped:  # first calls have no `ms` and nothing to excuse
        reasons[f"{names.provider(r.provider)}: {r.skipped}"] = None
    return NONE


def memory(records: list[Record]) -> Table:
    """Peak extra MiB of every provider."""
    pivot = Pivot.of(records)
    table = _table(pivot, "peak extra memory in MiB, output included", _words(pivot))
    reasons: dict[str, None] = {}
    for cells in pivot.rows:
        found = [cells.get(name) for name in pivot.providers]
        table.rows.append(pivot.axes(cells) + [_cell(_peak, r, reasons, lambda r: True) for r in found])
    table.notes += noted(reasons)
    return table


def accuracy(records: list[Record]) -> Table:
    """Relative and largest error against float64, and the share of the budget that is used."""
    pivot = Pivot.of([r for r in records if r.err_rel is not None])
    table = _table(pivot, "relative error, and largest error / its budget, against float64", _words(pivot))
    for i, cells in enumerate(pivot.rows):
        row = pivot.axes(cells)
        errors = {name: r.err_rel for name, r in cells.items() if r.err_rel is not None}
        for name in pivot.providers:
            r = cells.get(name)
            if r is None or r.err_rel is None or r.err_max is None:
                row.append(NONE)
                continue
            if r.err_rel == min(errors.values()):
                table.best.add((i, len(row)))
            used = f" / {r.err_max / r.err_budget:.2f}" if r.err_budget else ""
            row.append(f"{r.err_rel:.1e}{used}")
        table.rows.append(row)
    return table


def errors(records: list[Record], baseline: str) -> Table:
    """Result by result, the relative error of Sartor and its shares of the baseline's: of its norm, of its largest."""
    merged: dict[Any, Record] = {}
    for r in records:
        if r.errors is not None:
            problem = replace(r.workload, mode="fwd_bwd")
            whole = merged.setdefault((problem, r.provider), replace(r, mode="fwd_bwd", errors={}))
            whole.errors = (whole.errors or {}) | r.errors
    pivot = Pivot.of(list(merged.values()))
    results = list(dict.fromkeys(key.split()[0] for r in merged.values() for key in r.errors or {}))
    beside = names.provider(baseline)
    table = _table(pivot, f"relative error of Sartor, and its norm / its largest as shares of {beside}'s", results)
    for cells in pivot.rows:
        ours, theirs = (cells[name].errors or {} if name in cells else {} for name in ("sartor", baseline))
        table.rows.append(pivot.axes(cells) + [_error_cell(ours, theirs, name) for name in results])
    return table


def _error_cell(ours: dict[str, float], theirs: dict[str, float], name: str) -> str:
    keys = f"{name} rel", f"{name} max"
    if not all(key in ours for key in keys):
        return NONE
    shares = [f"{ours[key] / theirs[key]:.2f}" if theirs.get(key) else NONE for key in keys]
    return f"{ours[keys[0]]:.1e} ({' / '.join(shares)})"


def host(records: list[Record]) -> Table:
    """Microseconds of host time per call."""
    pivot = Pivot.of(records)
    table = _table(pivot, "host time per call in microseconds", _words(pivot))
    for cells in pivot.rows:
        times = [cells[name].host_us if name in cells else None for name in pivot.providers]
        table.rows.append(pivot.axes(cells) + [NONE if t is None else f"{t:.1f}" for t in times])
    return table


def cost(records: list[Record], baseline: str) -> Table:
    """Microseconds from one call to the next in a loop, and of a call of a length that was not seen before."""
    pivot = Pivot.of([r for r in records if r.ms])
    headers = [f"vs {names.provider(baseline)}", "new length", f"of {names.provider(baseline)}"]
    table = _table(pivot, "microseconds a call in a loop, host and device together", [*_words(pivot), *headers])
    for cells in pivot.rows:
        walls = {name: wall(r) for name, r in cells.items()}
        new = [cells[name].unseen_us if name in cells else None for name in ("sartor", baseline)]
        table.rows.append([
            *pivot.axes(cells), *(number(walls.get(name)) for name in pivot.providers),
            _ratio(walls.get(baseline), walls.get("sartor")), *map(number, new),
        ])  # fmt: skip
    table.notes.append(
        "New length: a call of a length that the process has not seen, to its end, after calls of twelve others."
    )
    return table


def wall(r: Record) -> float | None:
    """Microseconds a call in a loop. Where it was in none it is as long as it was timed, on a CPU and where the host is
    far ahead; of other records, that are older, None."""
    timed = r.ms is not None and (r.device == "cpu" or r.ms > LONGEST_MS)
    return 1e3 * r.ms if r.wall_us is None and timed and r.ms else r.wall_us


def first(records: list[Record], verified: Verified = lambda r: True) -> Table:
    """Seconds of every provider's first call: of a process that finds nothing on disk, and of the next one."""
    pivot = Pivot.of(records)
    table = _table(pivot, "first call in seconds, cold / from disk", _words(pivot))
    reasons: dict[str, None] = {}
    for cells in pivot.rows:
        found = [cells.get(name) for name in pivot.providers]
        calls = [_cell(_calls, r, reasons, verified) for r in found]
        table.rows.append(pivot.axes(cells) + calls)
    took = [r.import_s for r in records if r.import_s is not None]
    if took:
        table.notes.append(f"import sartor, beyond torch: {number(median(took))} s, at most {number(max(took))} s.")
    table.notes += noted(reasons)
    return table


def visited(records: list[Record], baseline: str) -> Table:
    """What masks cost beside the pairs they show: the rate over the tiles that are visited, as a share of causal's."""
    pivot = Pivot.of([r for r in records if (r.plan or "").startswith("hopper") or r.provider == baseline])
    headers = ["visible", "in visited tiles", "ms", "TFLOP/s there", "of causal's", f"vs {names.provider(baseline)}"]
    table = _table(pivot, "rate of Sartor over the tiles that a mask makes it visit", headers)
    rows = [(cells["sartor"], cells.get(baseline), pivot.axes(cells)) for cells in pivot.rows if "sartor" in cells]
    rates = {(r.seqlen_q, r.mask): _visited(r) * (r.tflops or 0.0) / r.workload.pairs for r, _, _ in rows}
    for r, other, axes in rows:
        rate, causal = rates[r.seqlen_q, r.mask], rates.get((r.seqlen_q, "causal"))
        everything = r.seqlen_q * r.seqlen_kv
        table.rows.append([
            *axes, f"{100 * r.workload.pairs / everything:.1f} %", f"{100 * _visited(r) / everything:.1f} %",
            number(r.ms), number(rate), f"{100 * rate / causal:.0f} %" if causal else NONE,
            _ratio(other.ms if other else None, r.ms),
        ])  # fmt: skip
    return table


def _visited(r: Record) -> float:
    """Pairs in the tiles that a record's kernel visits, by the tile that its plan names."""
    found = re.search(r"\[(\d+)x(\d+)", r.plan or "")
    assert found, r.plan
    return r.workload.visited(int(found[1]), int(found[2]))


def head_dims(records: list[Record], baseline: str, verified: Verified = lambda r: True) -> Table:
    """What an exact fit to the head dim saves: against padding to a power of two, and against the neighbours' line."""
    pivot = Pivot.of(records)
    rivals = [baseline, *(name for name in pivot.providers if name != baseline and not name.startswith("sartor"))]
    table = Table(
        f"Head dims ({pivot.constant})",
        ["D", *(f"{names.provider(name)} ms / TFLOP/s" for name in ("sartor", baseline)),
         *(f"vs {names.provider(name)}" for name in rivals), "padded to",
         "FLOPs saved", "bytes saved", "smem saved", "time / padded", "time / line", "max diff", "cosine"], [],
    )  # fmt: skip
    reasons: dict[str, None] = {}
    ours = {cells["sartor"].dim: cells["sartor"] for cells in pivot.rows if "sartor" in cells}
    for cells in pivot.rows:
        if "sartor" not in cells:
            continue
        r = cells["sartor"]
        table.rows.append([
            str(r.dim), _cell(_speed, r, reasons, verified), _cell(_speed, cells.get(baseline), reasons, verified),
            *(_beside(cells.get(name), r) for name in rivals), *_savings(r, ours),
            NONE if r.err_max is None else f"{r.err_max:.1e}", NONE if r.cos_sim is None else f"{r.cos_sim:.7f}",
        ])  # fmt: skip
    table.notes = [
        "Saved: against the same call padded to the next power of two; of shared memory (smem), against the same tile. "
        "Time / line: against the straight line between "
        "the neighbouring powers of two; 1.00 means that a head dim costs exactly its share.",
        *noted(reasons),
        *_wrong(cells[name] for cells in pivot.rows for name in ("sartor", *rivals) if name in cells),
    ]
    return table


def _beside(other: Record | None, ours: Record) -> str:
    """How many times as fast ours is."""
    return NONE if other is None or not other.ms else _ratio(other.ms, ours.ms) + _dagger(other)


def _savings(r: Record, ours: dict[int, Record]) -> list[str]:
    low, high = 1 << (r.dim.bit_length() - 1), 1 << (r.dim - 1).bit_length()
    if high == r.dim:
        return [str(high), NONE, NONE, NONE, NONE, NONE]
    share = 1 - r.dim / high
    padded, below = ours.get(high), ours.get(low)
    smem = 1 - r.smem_bytes / r.smem_padded_bytes if r.smem_bytes and r.smem_padded_bytes else None
    ratio = r.ms / padded.ms if padded and padded.ms and r.ms else None
    line = None
    if padded and below and padded.ms and below.ms and r.ms:
        line = r.ms / (below.ms + (padded.ms - below.ms) * (r.dim - low) / (high - low))
    percents = [f"{100 * share:.0f} %"] * 2 + [NONE if smem is None else f"{100 * smem:.0f} %"]
    return [str(high), *percents, *(NONE if x is None else f"{x:.2f}" for x in (ratio, line))]


def _ratio(other: float | None, ours: float | None) -> str:
    return f"{other / ours:.2f}x" if other and ours else NONE


def _words(pivot: Pivot) -> list[str]:
    return [*map(names.provider, pivot.providers)]


def _table(pivot: Pivot, what: str, columns: list[str]) -> Table:
    headers = [LABELS.get(axis, axis) for axis in pivot.varying] + columns
    return Table(f"{what} ({pivot.constant})" if pivot.constant else what, headers, [])


def launches(steps: Iterable[tuple[str, Launched]]) -> Table:
    """Pass, kernel, grid, threads and shared memory of each launch."""
    made = Table("launches", ["pass", "kernel", "grid", "threads", "shared bytes", "compiler"], [], words=("kernel",))
    for mode, step in steps:
        grid = " x ".join(map(str, step.grid))
        made.rows.append([mode, step.name, grid, str(step.block), str(step.shared), step.compiler])
    return made


def checks(rows: list[check.Row]) -> Table:
    """Problem, kernel, errors, budget."""
    made = Table(
        "errors against float64; the budget is twice, for gradients three times, the error of eager torch in the same"
        " precision, and one rounding",
        ["problem", "kernel", "relative", "largest", "budget", "cosine", ""], [],
    )  # fmt: skip
    for r in rows:
        v = r.verdict
        cells = [NONE] * 4 if v is None else [
            f"{v.err_rel:.1e}", f"{v.err_max:.1e}", f"{v.err_budget:.1e}", f"{v.cos_sim:.7f}"
        ]  # fmt: skip
        state = r.skipped or ("ok" if v is None or v.ok else v.over)
        made.rows.append([str(r.w), r.plan.split("[")[0].split(" ")[0], *cells, state])
    return made
