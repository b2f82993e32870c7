"""The workspace of a call: one allocation, in which every buffer has its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

STEP = 32  # elements: every buffer begins on 128 bytes


@dataclass(frozen=True)
class Room:
    """Where the buffers lie in one float32 tensor. Elements of a buffer have four bytes each, whatever they mean."""

    places: dict[str, int]  # bytes from the beginning, by name
    sizes: dict[str, int]  # elements
    length: int  # elements of all

    @classmethod
    def of(cls, **sizes: int) -> Room:
        """For buffers of so many elements, in this order."""
        places, end = {}, 0
        for name, size in sizes.items():
            places[name], end = 4 * end, end + -(-size // STEP) * STEP
        return cls(places, sizes, end)

    def allocate(self, device: torch.device) -> torch.Tensor:
        """The tensor, uninitialised. Each call has its own: calls overlap on streams, graphs keep theirs."""
        return torch.empty(self.length, dtype=torch.float32, device=device)

    def view(self, room: torch.Tensor, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A buffer as a tensor."""
        flat = room.narrow(0, self.places[name] // 4, self.sizes[name])
        return flat.view(dtype).view(shape) if shape else flat.view(dtype)

    def addresses(self, room: torch.Tensor) -> dict[str, Any]:
        """The addresses of all buffers, by name."""
        start = room.data_ptr()
        return {name: start + place for name, place in self.places.items()}
