"""What `attention` would do on several ranks, and why, in words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from sartor import api as dense
from sartor.checks import boolean, known_layout, unexpected
from sartor.distributed.api import attention, known_method, ranks_of, seconds, shardings_of
from sartor.distributed.choose import Forecast, Work, forecasts, work_of
from sartor.distributed.machine import Machine, machine_of
from sartor.distributed.sharding import Sharding
from sartor.distributed.sight import sight
from sartor.mods.core import Mask
from sartor.plan import Explanation
from sartor.problem import Call


@dataclass(frozen=True, repr=False)
class ContextExplanation:
    """The forecasts of `choose` in words; `str()` prints them."""

    work: Work
    machine: Machine
    method: str
    forecasts: dict[str, Forecast]
    local: Explanation | None  # of the largest call of this rank
    readers: tuple[int, ...]  # whose keys this rank would get in the ring

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        w, m = self.work, self.machine
        lines = [
            f"{w.ranks} ranks, queries `{w.queries[:60]}`, keys `{w.keys[:60]}`, rates of {m.name} ({m.source})",
            f"  links: {m.near / 1e9:.0f} GB/s within {m.host_ranks} ranks, {m.far / 1e9:.0f} GB/s between them",
        ]
        for name, found in self.forecasts.items():
            mark = "-> " if name == self.method else "   "
            lines.append(f"{mark}{name}: {_in_words(found, w.gradient)}")
        lines.append(f"  in the ring this rank gets keys of {len(self.readers)} others")
        return "\n".join(lines + ([f"  on this rank: {self.local}"] if self.local else []))


def _in_words(found: Forecast, gradient: bool) -> str:
    if found.reason:
        return f"no, {found.reason}"
    passes = [("forward", found.forward)] + ([("backward", found.backward)] if gradient else [])
    return ", ".join(
        f"{name} {time.total * 1e3:.3g} ms ({time.exposed * 1e3:.3g} ms of transfers not hidden)"
        for name, time in passes
    )


_KNOWN = tuple(signature(attention).parameters)


def explain(
    q: Any, k: Any, v: Any, *, mesh: Any = None, group: Any = None, layout_of_sequence: Any = "contiguous",
    layout: str = "bshd", machine: Machine | None = None, method: str = "auto", **options: Any,
) -> ContextExplanation:  # fmt: skip
    """Which method `attention` would take for the same arguments, and what the model says of each. Runs nothing.

    Args:
        q, k, v: shards, as in `attention`; meta tensors will do.
        machine: whose numbers to take; by default the device's (`sartor.distributed.machine`).
        method: to ask what another than the one chosen would take.
        Others: as in `attention`.

    Raises:
        TypeError, ValueError: as `attention`; of a keyword that is unknown, which one may be meant.
    """
    known_layout(layout)
    if not options.keys() <= set(_KNOWN):
        raise unexpected("explain", options, _KNOWN)
    boolean("return_lse", options.pop("return_lse", False))
    seconds(options.pop("timeout", None))
    call = Call(q, k, v, layout=layout, **options).bshd()
    ranks = ranks_of(mesh, group)
    known_method(method, ranks)
    queries, keys = shardings_of(layout_of_sequence, ranks.ranks, call)
    work = work_of(call, ranks.ranks, ranks.heads_ranks, queries, keys)
    machine = machine or machine_of(call.q.device)
    found = forecasts(work, machine)
    chosen = min(found, key=lambda name: found[name].seconds(work.gradient)) if method == "auto" else method
    mask = call.mask if isinstance(call.mask, Mask) else None
    view = sight(call.causal, call.window, mask, Sharding.parse(queries), Sharding.parse(keys).seqlen)
    runs = Sharding.parse(keys).runs
    others = tuple(o for o in range(ranks.ranks) if o != ranks.rank and view.needed(ranks.rank, runs[o]))
    plain = replace(call, mask=None, score=None, bias=None, alibi_slopes=None, causal=False, window=None)
    local = dense.explain(plain.q, plain.k, plain.v, kernel=call.kernel, softcap=call.softcap, precision=call.precision)
    return ContextExplanation(work, machine, chosen, found, local, others)
