"""The numbers of Hopper, and what each kernel for it needs of the machine. Another architecture has a folder beside."""

from __future__ import annotations

from functools import partial

from sartor.device import Device
from sartor.kernels.cuda import host
from sartor.kernels.spec import Tile
from sartor.problem import Problem

CAPABILITY, TARGET = 90, "sm_90a"
ROWS = 64  # of a warpgroup's product
WARPGROUP = 128  # threads
SMS = 132  # of an H100 SXM and an H200
SHARED_BYTES = 227 << 10  # that a block may take
REPAIR_TILE = Tile(64, 64, 4, 1, Tile(64, 64, 4, 1))  # of what computes marked tiles again: a mark is for 64 rows
build = partial(host.build, TARGET)


def reasons(p: Problem, dev: Device) -> list[str]:
    """Why a kernel cannot run a problem on a device, as far as machine, lengths and what the mods read say."""
    return host.reasons(p, dev, CAPABILITY)
