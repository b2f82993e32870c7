"""Launches of kernels in a row, which share the values that change with each call: each is written once, for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sartor import driver
from sartor.nvrtc import Kernel
from sartor.replay.lists import Launched, Made, Replayed, launcher


class Part(NamedTuple):
    """One launch: its parameters take the values of these names. `overlaps` as of `driver.Step`."""

    kernel: Kernel
    grid: int
    takes: dict[str, str]
    overlaps: bool = False


class Row:
    """The launches of one call, replayed in C where that can be.

    Args:
        names: of the addresses that change with each call, in the order in which `start` takes them.
        made: by name, the values that are made of these.
        parts: the launches.
        more: launches of others' that follow, which take the same values by their places.
        first: the same of launches that come before.
    """

    def __init__(
        self, names: Sequence[str], made: Mapping[str, Made], parts: Sequence[Part], more: Sequence[driver.Step] = (),
        first: Sequence[driver.Step] = (),
    ) -> None:  # fmt: skip
        self.given, self.made, self.parts, self.more, self.first = len(names), made, list(parts), more, first
        self.names = [*names, *made]
        for kernel, _, takes, _ in parts:
            if takes.keys() != set(kernel.changing) or not set(takes.values()) <= set(self.names):
                all_names = ", ".join(self.names)
                raise TypeError(f"{kernel.name} takes {', '.join(kernel.changing)}, got {takes} of {all_names}")
        self._launchers: dict[int, Replayed | Launched] = {}  # by device

    def start(self, addresses: Sequence[int]) -> None:
        """Launch on torch's current stream. Raises LaunchError with the driver's reason."""
        device = torch._C._cuda_getDevice()
        found = self._launchers.get(device) or self._on(device)
        found.start(addresses, torch._C._cuda_getCurrentRawStream(device))

    def launches(self) -> Replayed | Launched:
        """What makes them on the current device."""
        device = torch._C._cuda_getDevice()
        return self._launchers.get(device) or self._on(device)

    def _on(self, device: int) -> Replayed | Launched:
        found = self._launchers[device] = launcher(*self.listed(device))
        return found

    def listed(self, device: int) -> tuple[list[driver.Step], int, list[Made]]:
        """The launches on a device, how many values a call gives, and what is made of these."""
        at = {name: i for i, name in enumerate(self.names)}
        steps = [
            k.step(device, (n, 1, 1), tuple([at[takes[x]] for x in k.changing]), overlaps and driver.overlaps())
            for k, n, takes, overlaps in self.parts
        ]
        return [*self.first, *steps, *self.more], self.given, [*self.made.values()]

    def named(self, addresses: Sequence[int]) -> list[tuple[Kernel, int, dict[str, Any]]]:
        """Kernel, grid and values by name of each launch that `start` makes of `parts`."""
        values = [*addresses, *[one.of(addresses) for one in self.made.values()]]
        found = dict(zip(self.names, values, strict=True))
        return [(k, grid, {name: found[of] for name, of in takes.items()}) for k, grid, takes, _ in self.parts]
