"""Device: the facts about a machine that planning may use. One row per architecture, injectable in tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Device:
    """arch: 10 * major + minor, 0 for a CPU. smem_bytes: shared memory a block may have. Peaks: datasheet, dense."""

    name: str
    arch: int
    sm_count: int = 0
    smem_bytes: int = 0
    l2_bytes: int = 0
    peak_bf16_tflops: float = 0.0
    peak_gbps: float = 0.0

    @property
    def is_cpu(self) -> bool:
        """Whether this is the host."""
        return self.arch == 0

    @property
    def key(self) -> str:
        """Name of the folder its records lie in: `h200`, `cpu`, ..."""
        words = self.name.lower().replace("nvidia", "").split()
        return words[0] if words else "gpu"

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """The device a tensor lies on; `meta` and other host-like devices plan as a CPU does."""
        if device.type != "cuda":
            return CPU
        return _cuda(device.index if device.index is not None else torch.cuda.current_device())


CPU = Device("cpu", 0)

# What a GPU of each architecture has, where the driver is not there to ask: for planning and compiling elsewhere.
ARCHITECTURES = {
    80: Device("NVIDIA A100", 80, 108, 163 << 10, 40 << 20, 312.0, 2039.0),
    86: Device("NVIDIA A10", 86, 72, 99 << 10, 6 << 20, 125.0, 600.0),
    89: Device("NVIDIA L40S", 89, 142, 99 << 10, 96 << 20, 362.0, 864.0),
    90: Device("NVIDIA H200", 90, 132, 227 << 10, 60 << 20, 989.0, 4800.0),
    100: Device("NVIDIA B200", 100, 148, 227 << 10, 126 << 20, 2250.0, 8000.0),
    120: Device("NVIDIA RTX 5090", 120, 170, 99 << 10, 96 << 20, 210.0, 1792.0),
}


@cache
def _cuda(index: int) -> Device:
    p = torch.cuda.get_device_properties(index)
    arch = 10 * p.major + p.minor
    like = ARCHITECTURES.get(arch) or Device("", arch)
    same = like.name == p.name
    return Device(
        name=p.name,
        arch=arch,
        sm_count=p.multi_processor_count,
        smem_bytes=getattr(p, "shared_memory_per_block_optin", like.smem_bytes),
        l2_bytes=p.L2_cache_size,
        peak_bf16_tflops=like.peak_bf16_tflops if same else 0.0,
        peak_gbps=like.peak_gbps if same else 0.0,
    )


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which nothing may wait."""
    if device.type != "cuda" or not torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()):
        return False  # the default stream, 0, cannot be captured
    return torch.cuda.is_current_stream_capturing()
