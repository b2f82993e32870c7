"""Peak extra memory of a call: what it allocates beyond its inputs, its output and its intermediates included."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

MIB = 1 << 20


def peak_mib(run: Callable[[], object], device: torch.device) -> float:
    """MiB a call holds at its worst moment on top of what was allocated before it."""
    return _peak_cuda(run, device) if device.type == "cuda" else _peak_host(run)


def _peak_cuda(run: Callable[[], object], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


def _peak_host(run: Callable[[], object]) -> float:
    """Running sum of what torch's CPU allocator hands out and takes back, scratch buffers inside operators included."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces every start and stop on stderr
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profile:
        result = run()
    held = peak = 0
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del result
    return peak / MIB


def available_bytes(device: torch.device) -> int:
    """Bytes that may still be allocated."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
