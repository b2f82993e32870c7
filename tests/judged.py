"""Which kernels tests judge (mark `judges`), where their parameters or head dims tell."""

from __future__ import annotations

import pytest
import torch

from sartor import kernels
from sartor.lab.evidence import wanted
from sartor.problem import name_of

NARROW = tuple(name for name in wanted.KERNELS if name != "hopper_wide_backward")  # take head dims up to 128
WIDE = pytest.mark.judges("hopper_wide_backward")  # beside what else a test judges


def by(dtype: torch.dtype | None = None, family: str = "auto", dim: int = 0) -> set[str]:
    """The kernels that may run problems of a dtype and head dim (0: any), by those of a family or by any."""
    found = set(wanted.KERNELS)
    if dtype is not None:
        found = {name for name in found if name_of(dtype) in kernels.load(name).features}
    if family in kernels.families():
        own = [kernels.load(name) for name in kernels.FORWARD if kernels.load(name).family == family]
        found &= {name for spec in own for name in (spec.name, *spec.backwards)}
    return found - {"hopper_wide_backward" if dim <= 128 else "hopper_backward"} if dim else found


def narrowed(params: dict) -> set[str]:
    """The kernels that the parameters `dtype` and `kernel` of a test allow; a dtype of something else is not asked."""
    dtype = params.get("dtype")
    return by(dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None, params.get("kernel", ""))
