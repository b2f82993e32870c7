"""Shared memory of a block, laid out in one place: regions one after the other, which kernels find by their offsets."""

from __future__ import annotations

from itertools import accumulate


class Layout:
    """Regions by name, in bytes. C++ asserts that each lies where it has it: `OFFSET_K` for `k`."""

    def __init__(self, **regions: int) -> None:
        self.regions = regions

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(self.regions.values())

    def defines(self) -> dict[str, int]:
        """Offsets, and the size as SHARED_BYTES, by name."""
        ends = accumulate(self.regions.values(), initial=0)
        return {f"OFFSET_{name.upper()}": at for name, at in zip(self.regions, ends, strict=False)} | {
            "SHARED_BYTES": self.size
        }
