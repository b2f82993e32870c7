"""What each choice of the 16-bit Hopper forward is worth: the kernel with one choice changed, beside it as it is.

A change gives a property of `hopper_forward.Config` another value, or takes another legal tile. Providers are called
`changed:NAME`; one whose change makes no difference to a workload's kernel says so and is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from sartor.device import Device
from sartor.kernels.hopper.forward import Config, HopperForward
from sartor.kernels.hopper.schedule import EVERY
from sartor.kernels.spec import Operands, Plan, Tile
from sartor.plan import choose
from sartor.problem import Call, Problem, aux_values

FAMILY = "changed"
Legal = list[Tile]


@dataclass(frozen=True)
class Change:
    """What is otherwise: in words; properties of the config, from what it is; the tile, of those that are legal."""

    words: str
    properties: Mapping[str, Callable[[Config], Any]] = field(default_factory=dict)
    tile: Callable[[Tile, Legal], Tile | None] = lambda tile, legal: tile


def _widest(legal: Legal, rows: int, keys: int) -> Tile | None:
    """The legal tile of so many queries with the most keys, up to a limit, and then the most stages."""
    found = (t for t in legal if t.block_m == rows and t.block_n <= keys)
    return max(found, key=lambda t: (t.block_n, t.stages), default=None)


def _other_queries(tile: Tile, legal: Legal) -> Tile | None:
    return _widest(legal, 128 if tile.block_m == 192 else 192, 128)


def _fewer_keys(tile: Tile, legal: Legal) -> Tile | None:
    return _widest(legal, tile.block_m, tile.block_n // 2)


CHANGES = {
    "turns": Change(
        "warpgroups take turns at the tensor cores where they do not, and the reverse",
        {"ping_pong": lambda m: not m.ping_pong},
    ),
    "q-shared": Change("queries stay in shared memory, not in registers", {"held": lambda m: 0}),
    "no-ahead": Change(
        "queries in shared memory have one buffer: a tile's first product waits for the last one's output",
        {
            "ahead": lambda m: m.q_registers,
            "staged": lambda m: m.staged and (m.q_registers or (m.groups < 3 and not m.lower)),
        },
    ),
    "plain-store": Change("threads store the output, not the copy engine", {"staged": lambda m: False}),
    "claims": Change(
        "query tiles are claimed one ahead where they are claimed late, and the reverse",
        {"late_rounds": lambda m: 0 if m.late_rounds == EVERY else EVERY},
    ),
    "static": Change("query tiles are taken in a static order, not claimed", {"balanced": lambda m: False}),
    "whole": Change("the last wave of query tiles is not split", {"last_wave": lambda m: False}),
    "any-mask": Change("the mask is taken for one that is no interval", {"mask": lambda m: 2 * (m.mask > 0)}),
    "one-width": Change("copies of q and k are equally wide", {"widths": lambda m: (*m.widths[:1], 0, *m.widths[2:])}),
    "all-heads": Change("all heads are in flight at once", {"section": lambda m: m.p.batch * m.p.heads_kv}),
    "two-stages": Change("two stages of keys, two of values", tile=lambda tile, legal: replace(tile, stages=4)),
    "half-keys": Change("half as many keys a tile, or fewer", tile=_fewer_keys),
    "queries": Change("192 queries a tile where there are 128, and the reverse", tile=_other_queries),
}


def _property(value: Callable[[Config], Any]) -> property:
    return property(lambda m: value(Config.of(m.p, m.tile)))


@cache
def changed(name: str) -> HopperForward:
    """The kernel with a change; ValueError lists the known ones."""
    if name not in CHANGES:
        raise ValueError(f"a change must be one of {', '.join(CHANGES)}, got {name!r}")
    own = {n: _property(value) for n, value in CHANGES[name].properties.items()}
    config = type("Changed", (Config,), own)

    class Changed(HopperForward):
        """See CHANGES."""

        def config(self, p: Problem, tile: Tile) -> Config:
            """What the kernel is compiled for, with the change."""
            return config.of(p, tile)  # type: ignore[attr-defined, no-any-return]

    return Changed()


def plan(name: str, p: Problem, device: Device) -> Plan:
    """How a problem is computed with a change; ValueError where there is nothing to change."""
    base, spec = choose(p, device), changed(name)
    if type(base.kernel) is not HopperForward or base.tile is None:
        raise ValueError(f"{name}: is a change of hopper_forward, got {base}")
    tile = CHANGES[name].tile(base.tile, list(base.kernel.tiles(p, device)))
    if tile is None:
        raise ValueError(f"{name}: needs a legal tile, got none")
    old, new = base.kernel.config(p, base.tile), spec.config(p, tile)
    if old.defines() == new.defines() and (old.section == new.section or not old.balanced):
        raise ValueError(f"{name}: makes no difference here")
    return Plan(spec, p, device, tile, f"with a change: {CHANGES[name].words}")


def attend(name: str, options: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """A forward over (batch, heads, seqlen, dim) tensors with a change; `options` are those of `attention`."""
    keywords = {key: value for key, value in options.items() if key != "layout"}
    plans: list[Plan] = []

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        call = Call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **keywords)
        if not plans:
            plans.append(plan(name, Problem.of(call), Device.of(q.device)))
        x = Operands(q, k, v, None, aux_values(call), "bhsd", lse=False)
        return plans[0].kernel.run(plans[0], x)[0]  # type: ignore[no-any-return]

    return run
