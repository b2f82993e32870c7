"""The Hopper backward of float16 and bfloat16, host side. The kernels are in the .cuh beside; what they are compiled
for and how they are launched, in `backward_config` and `backward_launches`.

A call is a few launches of CUDA C++: `preprocess` (delta, lse in the log2 domain), dq, dk with dv. Under a mask, the
kernels of `triton_backward` then compute marked tiles again.

Where bits may change from run to run, dk, dv and dq come from one sweep (`fused`), and a launch rounds dq. Beyond head
dim 128 registers hold one gradient: dk and dv are two launches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sartor.device import Device, capturing
from sartor.features import BIAS_GRADIENT, BITS_16, COMMON, DROPOUT, PAIRS, SCORE, SHARED_LSE
from sartor.kernels import blocks
from sartor.kernels.cuda.row import Row
from sartor.kernels.hopper import arch
from sartor.kernels.hopper.backward_config import BOTH, Config, partial_sums, sums
from sartor.kernels.hopper.backward_launches import Alone, Ready, like_gradient
from sartor.kernels.hopper.backward_problem import (
    ADDED,
    SEEN,
    fused,
    listed,
    near,
    parts,
    reads_otherwise,
    why_no_gradient,
)
from sartor.kernels.spec import Again, Gradients, KernelSpec, Operands, Plan, Saved, Tile
from sartor.kernels.triton import launch
from sartor.kernels.triton.backward import TritonBackward
from sartor.problem import Problem

DIMS = range(64, 257, 8)  # of several sweeps: registers hold no more; narrower ones wait for exponentials

# Tiles of what computes marked ones again; a mark is for 64 rows. The second are for 65 to 128 columns: there threads
# would spill with the first, and a launch that finds no mark took 5 us, not 3.
REPAIRS = (Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)), (Tile(32, 64, 8, 1), Tile(64, 32, 8, 1))


class HopperBackward(TritonBackward):
    """See the module."""

    name = "hopper_backward"
    family = "hopper"
    replays = True
    features = COMMON | BITS_16 | {PAIRS, SCORE, BIAS_GRADIENT, SHARED_LSE, DROPOUT}

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """What the copy engine, wgmma and the run-time compiler need."""
        why = launch.reasons(p, dev) + arch.reasons(p, dev)
        if p.program.reads_pairs and not near(p):
            why.append(f"needs a mask that reads at most one table of queries and keys, {SEEN}, got {p.mask_name}")
        if p.program.score is not None and reads_otherwise(p):
            why.append(f"needs scores that read at most one table of queries and keys, {ADDED}, got {p.score_name}")
        if p.dropout_p and p.program.buries:
            why.append(f"needs scores whose sum lse can tell beside dropout, got {p.score_name}")
        why += why_no_gradient(p)
        if p.dim not in DIMS and not fused(p):
            first, also = (DIMS[0], " with deterministic=True") if p.deterministic else (8, "")
            why.append(f"needs head dims {first} to {DIMS[-1]}{also}, multiples of 8, got {p.dim}")
        return why

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """One: registers leave little choice."""
        tile = None
        for m in Config.all(p):
            queries, keys = (m.block, 64 * m.groups) if m.keys else (64 * m.groups, m.block)
            tile = Tile(queries, keys, m.warps, m.stages, tile)
        assert tile is not None
        yield tile

    fits = KernelSpec.fits

    def shared_bytes(self, plan: Plan) -> int:
        """Dynamic shared memory that a block takes, of the kernels the one that takes most."""
        return max(m.shared_bytes for m in Config.all(plan.problem))

    def run(self, plan: Plan, x: Operands, saved: Saved) -> Gradients:
        """dq, dk, dv, dsinks."""
        key = launch.key(saved)
        ready: Any = plan.cache.get(("hopper", key))
        if ready is None:
            ready = self.ready(plan, x, saved, key)
            if not (capturing(x.q.device) and listed(plan.problem)):  # when no list is made
                plan.cache["hopper", key] = ready
        return ready.run(plan, x, saved)  # type: ignore[no-any-return]

    def again(self, plan: Plan, *data: Any) -> Again | None:
        """See `KernelSpec`."""
        ready: Any = plan.cache.get(("hopper", launch.key(data[1])))
        if ready is None or not ready.alone:
            return None
        return self.repeated((ready.whole or ready.row).launches(), ready.space.device, *ready.numbers)

    def symbolic(self, plan: Plan, *data: Any) -> tuple[Row, tuple[Any, ...], list[Any]] | None:
        """See `KernelSpec`."""
        x, saved = data
        ready = self.ready(plan, x, saved, None)
        if ready.problem.program.keep is not None:
            made = {"dq": like_gradient(x.q), "dk": like_gradient(x.k), "dv": like_gradient(x.v), "room": ready.space}
            ready.whole = ready.joined(x, ready.known(plan, x, saved, made))
        return (ready.whole or ready.row, ready.numbers, [ready.space]) if ready.alone else None

    def repeated(self, launches: Any, device: torch.device, *numbers: Any) -> Again:
        """See `KernelSpec`."""
        mends, length = numbers
        return Again(Alone(launches, device, length, mends).run, launches, length, mends)

    def ready(self, plan: Plan, x: Operands, saved: Saved, key: object) -> Ready:
        """The launches of calls with this key."""
        return Ready.of(plan.problem, x, saved, key, plan.device.sm_count or 1)

    def repairs(self, plan: Plan, x: Operands, saved: Saved, work: dict[str, torch.Tensor]) -> list[launch.Launch]:
        """The launches of `triton_backward` over what was marked."""
        p, shared = plan.problem, self._shared(plan, x, work["dout"], work)
        of_keys, of_queries = REPAIRS[64 < p.dim <= BOTH]
        marked = self._dkdv(p, of_keys, shared, work), self._dq(p, of_queries, shared, work)
        return [step.repair(plan.device) for step in marked]

    def notes(self, p: Problem) -> Iterable[str]:
        """Memory that a call takes besides its results, and what it is for."""
        if fused(p):
            size = 4 * sums(p) / 2**20
            yield f"the backward adds up dq in any order, in {size:.1f} MiB of float32; deterministic=True spares both"
        if parts(p) > 1:
            size = 4 * partial_sums(p) / 2**20
            yield f"blocks share the query heads of a key head, and leave dk and dv in {size:.1f} MiB of float32"
        if listed(p):
            yield f"backward: {blocks.told(p, by_key=True)}"


SPEC = HopperBackward()
