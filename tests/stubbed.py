"""Calls on CPU tensors that are planned for an H100, with a driver that launches nothing (stub.c)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import warnings
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from sartor import driver, dynamic_shapes, node, nvrtc, ops
from sartor.device import ARCHITECTURES, Device
from sartor.kernels.cuda import host
from sartor.mods.recent import Recent
from sartor.replay import calls

COMPILER = shutil.which("cc")
FUNCTIONS: dict[tuple[str, tuple[int, ...]], Any] = {}  # of all stubs: kernels keep their handles


class Stub:
    """What the driver was told."""

    def __init__(self, library: Any) -> None:
        self.library = library
        library.stub_told.restype = ctypes.c_void_p

    def told(self) -> bytes:
        """Since the last time it was asked."""
        size = ctypes.c_size_t()
        at = self.library.stub_told(ctypes.byref(size))
        assert size.value <= 1 << 20
        return ctypes.string_at(at, size.value)

    def function(self, name: str, *sizes: int) -> int:
        """A handle of a kernel whose parameters take so many bytes each: the same one when asked again."""
        made = FUNCTIONS.setdefault((name, sizes), (ctypes.c_uint * (1 + len(sizes)))(len(sizes), *sizes))
        return ctypes.addressof(made)

    def load(self, kernel: Any, device: int) -> int:
        """In the place of `nvrtc.Kernel._load`."""
        found = self.function(kernel.name, *map(driver.size, kernel.params.codes))
        kernel._handles[device] = found
        return found


@cache
def library() -> Any:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "stub.so"
        source = Path(__file__).with_name("stub.c")
        subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", str(source), "-o", str(file)], check=True)
        found = ctypes.CDLL(str(file))
    driver.declare(found)
    return found


@contextmanager
def stubbed() -> Any:
    """While it lasts, tensors on a CPU say that they are on a GPU, with PyTorch's node behind calls."""
    stub = Stub(library())
    stub.library.stub_refuse(0, 0)
    ctypes.c_int.in_dll(stub.library, "stub_version").value = 0
    stub.told()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the operator has another kernel
        patch.setattr(driver, "library", lambda: stub.library)
        patch.setattr(nvrtc, "missing", lambda: "")
        patch.setattr(nvrtc.Kernel, "_load", lambda kernel, device: stub.load(kernel, device))
        patch.setattr(host, "_built", lambda *_: None)
        for name in ("_WORKSPACES", "_SPARE", "_OF_GRAPHS"):
            patch.setattr(host, name, {})
        patch.setattr(Device, "of", classmethod(lambda *_: ARCHITECTURES[90]))
        patch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        patch.setattr(ops, "PREPARED", Recent(2048))
        patch.setattr(dynamic_shapes, "KNOWN", Recent(256))
        patch.setattr(calls._functions(), "cuda", stub.library)
        patch.setattr(node, "_SERVED", [])
        served = node.serve("CPU", "AutogradCPU")
        try:
            yield stub
        finally:
            served._destroy()
