"""Which kernels tests judge (mark `judges`) where those are told by the head dims that the tests have."""

from __future__ import annotations

import pytest

from sartor.lab.evidence import wanted

NARROW = tuple(name for name in wanted.KERNELS if name != "hopper_wide_backward")  # take head dims up to 128
WIDE = pytest.mark.judges("hopper_wide_backward")  # beside what else a test judges
