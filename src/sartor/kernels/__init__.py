"""The kernels: one file each. FORWARD and BACKWARD are the only registry: names, in order of priority, and modules."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

FORWARD = {
    "hopper_forward": "hopper.forward",
    "hopper_fp32": "hopper.fp32_forward",
    "fp32_forward": "triton.fp32_forward",
    "triton_forward": "triton.forward",
    "torch_cpu": "torch_cpu",
    "blocked": "blocked",
    "reference": "reference",
}
BACKWARD = {
    "hopper_wide_backward": "hopper.wide_backward",
    "hopper_backward": "hopper.backward",
    "hopper_fp32_backward": "hopper.fp32_backward",
    "fp32_backward": "triton.fp32_backward",
    "triton_backward": "triton.backward",
    "torch_cpu_backward": "torch_cpu",
    "blocked_backward": "blocked",
    "reference_backward": "reference",
}


@cache
def load(name: str) -> Any:
    """The KernelSpec called `name`: `SPEC` of its module, or `BACKWARD_SPEC` where both passes share a file."""
    module = importlib.import_module(f"sartor.kernels.{(FORWARD | BACKWARD)[name]}")
    return module.BACKWARD_SPEC if name in BACKWARD and BACKWARD[name] in FORWARD.values() else module.SPEC


def families() -> tuple[str, ...]:
    """What `kernel=` accepts besides "auto" and single kernels."""
    return tuple(dict.fromkeys(load(name).family for name in FORWARD))
