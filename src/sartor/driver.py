"""The CUDA driver's launch, called with little ceremony: arguments lie in a frame that is laid out once.

Triton's launcher parses every argument anew, which takes 10 to 15 us of host time a launch. Here a call writes
only the arguments that it changes, and calls cuLaunchKernel through ctypes.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any


def size(letter: str) -> int:
    """Bytes of a parameter; letters are those of `Frame`."""
    return struct.calcsize("=" + letter.replace("P", "Q"))


_NONE = ctypes.c_void_p(0)
_ONE = ctypes.c_uint(1)
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class LaunchError(RuntimeError):
    """The driver refused to load or launch a kernel."""


@cache
def library() -> Any:
    """The driver. Raises OSError where there is none."""
    found = ctypes.WinDLL("nvcuda") if os.name == "nt" else ctypes.CDLL("libcuda.so.1")  # type: ignore[attr-defined]
    start, integer, pointer = found.cuLaunchKernel, ctypes.c_uint, ctypes.c_void_p
    start.argtypes = [pointer, *[integer] * 7, pointer, pointer, pointer]
    encode = found.cuTensorMapEncodeTiled
    encode.argtypes = [pointer, integer, integer, pointer, pointer, pointer, pointer, pointer, *[integer] * 4]
    return found


def name_of(status: int) -> str:
    """Of a CUresult."""
    name = ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(name))
    return (name.value or b"CUresult %d" % status).decode()


def _bind() -> None:
    """Make the context that torch uses on its current device this thread's own."""
    import torch

    context = ctypes.c_void_p()
    library().cuDevicePrimaryCtxRetain(ctypes.byref(context), torch._C._cuda_getDevice())
    library().cuCtxSetCurrent(context)


class Frame:
    """The arguments of one launch in memory: values, and the array of pointers to them that cuLaunchKernel takes.

    Args:
        letters: one a parameter, as `struct` has them: q int64, i int32, f float32, 128s bytes; P for a pointer (int).
        fixed: the values of parameters, by index, that are the same in every launch; `write` takes the others.
    """

    def __init__(self, letters: Sequence[str], fixed: Mapping[int, Any] | None = None) -> None:
        kept, codes, sizes = fixed or {}, [letter.replace("P", "Q") for letter in letters], list(map(size, letters))
        changing = [i for i in range(len(letters)) if i not in kept]
        order = [*changing, *kept]  # in memory: what changes comes first, to be written at once
        self.packer = struct.Struct("=" + "".join(codes[i] for i in changing))
        self.values = ctypes.create_string_buffer(sum(sizes))
        places, end = {}, 0
        for i in order:
            places[i], end = ctypes.addressof(self.values) + end, end + sizes[i]
        rest = struct.Struct("=" + "".join(codes[i] for i in kept))
        rest.pack_into(self.values, self.packer.size, *kept.values())
        self.pointers = (ctypes.c_void_p * len(letters))(*(places[i] for i in range(len(letters))))
        self.address = ctypes.c_void_p(ctypes.addressof(self.pointers))

    def write(self, values: Sequence[Any]) -> None:
        """Put the values that change, in the order of their parameters."""
        self.packer.pack_into(self.values, 0, *values)


class Launcher:
    """Launches of one kernel with frames of one layout; threads may launch at the same time.

    Args:
        name: the kernel's, for messages.
        block: threads a block.
        shared: bytes of dynamic shared memory a block.
        letters, fixed: as for `Frame`.
    """

    def __init__(
        self, name: str, block: int, shared: int, letters: Sequence[str], fixed: Mapping[int, Any] | None = None
    ) -> None:
        self.name, self.letters, self.fixed = name, letters, fixed
        self.block, self.shared = ctypes.c_uint(block), ctypes.c_uint(shared)
        self._frames: list[Frame] = []

    def start(self, function: ctypes.c_void_p, grid: tuple[int, int, int], stream: int, values: Sequence[Any]) -> None:
        """Launch `function` on a stream (a raw handle). Raises LaunchError with the driver's reason."""
        try:  # frames are lent, never shared: a list's pop and append are atomic
            frame = self._frames.pop()
        except IndexError:
            frame = Frame(self.letters, self.fixed)
        frame.write(values)
        status = library().cuLaunchKernel(
            function, *grid, self.block, _ONE, _ONE, self.shared, stream, frame.address, _NONE
        )
        if status == _NO_CONTEXT:  # a thread of autograd's that has called nothing of CUDA's yet
            _bind()
            status = library().cuLaunchKernel(
                function, *grid, self.block, _ONE, _ONE, self.shared, stream, frame.address, _NONE
            )
        self._frames.append(frame)
        if status:
            shape = f"grid {grid}, block {self.block.value}, {self.shared.value} bytes of shared memory"
            raise LaunchError(f"{self.name} ({shape}) did not launch: {name_of(status)}")
