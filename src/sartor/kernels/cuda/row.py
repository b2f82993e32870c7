"""Launches of kernels in a row, which share the values that change with each call: each is written once, for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sartor import driver
from sartor.nvrtc import Kernel


class Part(NamedTuple):
    """One launch: its parameters take the values of these names."""

    kernel: Kernel
    grid: int
    takes: dict[str, str]


class Row:
    """The launches of one call.

    Args:
        names: of the values that change with each call, in the order in which `start` takes them.
        parts: the launches.
        more: launches of others' that follow, which take the same values by their places.
    """

    def __init__(self, names: Sequence[str], parts: Sequence[Part], more: Sequence[driver.Step] = ()) -> None:
        self.names, self.parts, self.more = list(names), list(parts), more
        for kernel, _, takes in parts:
            if takes.keys() != set(kernel.changing) or not set(takes.values()) <= set(names):
                raise TypeError(f"{kernel.name} takes {', '.join(kernel.changing)}, got {takes} of {', '.join(names)}")
        self._launches: dict[int, driver.Launches] = {}  # by device

    def start(self, values: Sequence[Any]) -> None:
        """Launch on torch's current stream. Raises LaunchError with the driver's reason."""
        device = torch._C._cuda_getDevice()
        launches = self._launches.get(device) or self._on(device)
        launches.start(values, torch._C._cuda_getCurrentRawStream(device))

    def _on(self, device: int) -> driver.Launches:
        at = {name: i for i, name in enumerate(self.names)}
        steps = [k.step(device, (n, 1, 1), tuple([at[takes[x]] for x in k.changing])) for k, n, takes in self.parts]
        found = self._launches[device] = driver.Launches(*steps, *self.more, count=len(self.names))
        return found

    def named(self, values: Sequence[Any]) -> list[tuple[Kernel, int, dict[str, Any]]]:
        """Kernel, grid and values by name of each launch that `start` makes of `parts`."""
        found = dict(zip(self.names, values, strict=True))
        return [(k, grid, {name: found[of] for name, of in takes.items()}) for k, grid, takes in self.parts]
