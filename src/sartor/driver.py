"""The CUDA driver's launch, called with little ceremony: arguments lie in a frame that is laid out once.

Triton's launcher parses every argument anew, which takes 10 to 15 us of host time a launch. Here a call writes
only the arguments that it changes, and calls cuLaunchKernelEx through ctypes, which takes four arguments where
cuLaunchKernel takes eleven.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple


@cache
def size(letter: str) -> int:
    """Bytes of a parameter; letters are those of `Frame`."""
    return struct.calcsize("=" + letter.replace("P", "Q"))


Grid = tuple[int, int, int]
Form = tuple[Sequence[str], tuple[int, ...], tuple[int, ...] | None]  # letters, which are fixed, what the others take
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
OVERLAPS = 12030  # the CUDA version from which on a graph takes launches that overlap


class LaunchError(RuntimeError):
    """The driver refused to load or launch a kernel."""


@cache
def library() -> Any:
    """The driver. Raises OSError where there is none."""
    found = ctypes.WinDLL("nvcuda") if os.name == "nt" else ctypes.CDLL("libcuda.so.1")  # type: ignore[attr-defined]
    declare(found)
    return found


def declare(library: Any) -> None:
    """Say what the driver's functions take."""
    integer, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernelEx.argtypes = [pointer] * 4
    encode = library.cuTensorMapEncodeTiled
    encode.argtypes = [pointer, integer, integer, pointer, pointer, pointer, pointer, pointer, *[integer] * 4]


def overlaps() -> bool:
    """Whether a launch may begin before the one before it has ended, in a graph too."""
    version = ctypes.c_int()
    library().cuDriverGetVersion(ctypes.byref(version))
    return version.value >= OVERLAPS


def name_of(status: int) -> str:
    """Of a CUresult."""
    name = ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(name))
    return (name.value or b"CUresult %d" % status).decode()


def bind() -> None:
    """Make the context that torch uses on its current device this thread's own."""
    import torch

    context = ctypes.c_void_p()
    library().cuDevicePrimaryCtxRetain(ctypes.byref(context), torch._C._cuda_getDevice())
    library().cuCtxSetCurrent(context)


def context() -> int:
    """This thread's; 0 where it has none."""
    found = ctypes.c_void_p()
    library().cuCtxGetCurrent(ctypes.byref(found))
    return found.value or 0


def capture(stream: int) -> int:
    """A number of the capture that a stream is in, which no other one has or will have."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    nothing = [None] * 3  # the graph, what the next node depends on, and how many of these
    library().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), *nothing)
    return number.value


NONE: Mapping[int, Any] = {}


class Step(NamedTuple):
    """One launch.

    Args:
        letters: one a parameter, as `struct` has them: q int64, i int32, f float32, 128s bytes; P for a pointer (int).
        fixed: the values of parameters, by index, that are the same in every launch.
        given: for each of the others the place of its value among those of a call; by default they come in order.
        function: the driver's handle.
        name: the kernel's, for messages.
        block: threads a block.
        shared: bytes of dynamic shared memory a block.
        overlaps: whether it may begin before the launch before it has ended (programmatic dependent launch): its
            kernel waits for that one itself, or needs nothing of it.
    """

    letters: Sequence[str]
    fixed: Mapping[int, Any] = NONE
    given: tuple[int, ...] | None = None
    function: int = 0
    name: str = ""
    grid: Grid = (1, 1, 1)
    block: int = 1
    shared: int = 0
    overlaps: bool = False

    @property
    def form(self) -> Form:
        """What its values' places depend on."""
        return self.letters, tuple(self.fixed), self.given

    def refused(self, why: str, grid: Grid | None = None) -> str:
        """That the driver did not launch it, on another grid if one is given."""
        shape = f"grid {grid or self.grid}, block {self.block}, {self.shared} bytes of shared memory"
        return f"{self.name} ({shape}) did not launch: {why}"


def taken(letters: Sequence[str], fixed: tuple[int, ...], given: tuple[int, ...] | None) -> dict[int, int]:
    """The value that each parameter of a launch takes which is not fixed, both by their numbers."""
    changing = [i for i in range(len(letters)) if i not in fixed]
    return dict(zip(changing, range(len(changing)) if given is None else given, strict=True))


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_uint), ("unused", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


OVERLAP = _Attribute(6, 0, (ctypes.c_uint * 16)(1))  # programmatic stream serialization


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip


class Layout(NamedTuple):
    """Where values lie in a frame, for launches of these forms; launches of another length have the same."""

    changing: struct.Struct  # what each call writes
    fixed: struct.Struct  # what comes after
    places: tuple[list[int], ...]  # of each launch, where the values of its parameters begin
    arrays: tuple[Any, ...]  # of each launch, the type of its pointers

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(forms: tuple[Form, ...], count: int) -> Layout:
        """For `count` values a call, or as many as are taken; one that no launch takes passes for a pointer.

        Raises TypeError where parameters of different sizes would take one value.
        """
        found: dict[int, str] = {}
        takes = []
        for letters, fixed, given in forms:
            takes.append(taken(letters, fixed, given))
            for i, place in takes[-1].items():
                if found.setdefault(place, letters[i]) != letters[i]:
                    raise TypeError(f"value {place} cannot be taken as {letters[i]} and as {found[place]}")
        codes = [found.get(place, "P") for place in range(max([count, *(place + 1 for place in found)]))]
        rest = [letters[i] for letters, fixed, _ in forms for i in fixed]
        ends = list(itertools.accumulate(map(size, [*codes, *rest]), initial=0))
        after = iter(ends[len(codes) :])
        places = []
        for (letters, fixed, _), places_of in zip(forms, takes, strict=True):
            at = {i: ends[place] for i, place in places_of.items()} | {i: next(after) for i in fixed}
            places.append([at[i] for i in range(len(letters))])
        return Layout(
            _packed(codes), _packed(rest), tuple(places), tuple(ctypes.c_void_p * len(at) for at in places)
        )  # fmt: skip


def _packed(letters: Sequence[str]) -> struct.Struct:
    return struct.Struct("=" + "".join(letters).replace("P", "Q"))


class Frame:
    """What cuLaunchKernelEx reads of one or more launches: values, pointers to them, grids and streams.

    A value that several launches take is there once. `write` puts those of a call.
    """

    def __init__(self, steps: Sequence[Step], count: int = 0) -> None:
        layout = Layout.of(tuple([step.form for step in steps]), count)
        self.packer, split = layout.changing, layout.changing.size
        self.values = ctypes.create_string_buffer(split + layout.fixed.size)
        layout.fixed.pack_into(self.values, split, *[value for step in steps for value in step.fixed.values()])
        begin, self.places = ctypes.addressof(self.values), layout.places
        arrays = zip(layout.arrays, layout.places, strict=True)
        self.pointers = [array(*[begin + place for place in places]) for array, places in arrays]
        self.configs = [_Config(step.grid, (step.block, 1, 1), step.shared) for step in steps]
        for config, step in zip(self.configs, steps, strict=True):
            if step.overlaps:
                config.attributes, config.count = ctypes.addressof(OVERLAP), 1
        self.stream, self.grid = 0, steps[0].grid
        starts = zip(self.configs, steps, self.pointers, strict=True)
        self.starts = [(ctypes.addressof(c), step.function, ctypes.addressof(at), 0) for c, step, at in starts]

    def write(self, values: Sequence[Any]) -> None:
        """Put the values of a call."""
        self.packer.pack_into(self.values, 0, *values)

    def place(self, stream: int, grid: Grid) -> None:
        """Put the stream, and the grid of the first launch."""
        self.stream, self.grid = stream, grid
        self.configs[0].grid = grid
        for config in self.configs:
            config.stream = stream


class Launches:
    """Launches one after the other, with frames of one layout; threads may launch at the same time.

    Args:
        steps: of each launch.
        count: values of a call, of which some may be taken by none.
    """

    def __init__(self, *steps: Step, count: int = 0) -> None:
        self.steps, self.count, self.grid = steps, count, steps[0].grid
        self._frames: list[Frame] = []

    def start(self, values: Sequence[Any], stream: int, grid: Grid | None = None) -> None:
        """Launch on a stream (a raw handle), the first one on `grid` where that is given.

        Raises LaunchError with the driver's reason.
        """
        try:  # frames are lent, never shared: a list's pop and append are atomic
            frame = self._frames.pop()
        except IndexError:
            frame = Frame(self.steps, self.count)
        frame.packer.pack_into(frame.values, 0, *values)
        if frame.stream != stream or (grid or self.grid) != frame.grid:
            frame.place(stream, grid or self.grid)
        launch = library().cuLaunchKernelEx
        for config, function, pointers, extra in frame.starts:
            status = launch(config, function, pointers, extra)
            if status == NO_CONTEXT:  # a thread of autograd's that has called nothing of CUDA's yet
                bind()
                status = launch(config, function, pointers, extra)
            if status:
                raise LaunchError(self._refused(frame, config, status))
        self._frames.append(frame)

    def _refused(self, frame: Frame, config: int, status: int) -> str:
        """In words."""
        step = self.steps[[start[0] for start in frame.starts].index(config)]
        return step.refused(name_of(status), frame.grid if step is self.steps[0] else None)
