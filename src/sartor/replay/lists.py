"""Lists of launches as replay.c reads them, and the values of a call: those it is given, and those made of them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sartor import driver
from sartor.driver import LaunchError
from sartor.nvrtc import TensorMaps
from sartor.replay import library

FRAME, PARAMETERS, MAP = 16384, 128, 128  # as replay.c has them


@dataclass(frozen=True)
class At:
    """An address so many bytes after a given one."""

    source: int
    offset: int

    def of(self, given: Sequence[int]) -> int:
        """Of a call."""
        return given[self.source] + self.offset


@dataclass(frozen=True)
class Mapped:
    """Tensor maps of a given address, side by side."""

    source: int
    maps: TensorMaps

    def of(self, given: Sequence[int]) -> bytes:
        """Of a call."""
        return self.maps[given[self.source]]


@dataclass(frozen=True)
class Record:
    """Bytes in which given addresses stand: pairs of a place and a source."""

    content: bytes
    places: tuple[tuple[int, int], ...]

    def of(self, given: Sequence[int]) -> bytes:
        """Of a call."""
        found = bytearray(self.content)
        for place, source in self.places:
            struct.pack_into("=Q", found, place, given[source])
        return bytes(found)


Made = At | Mapped | Record


class _Step(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint), ("shared", ctypes.c_uint),
        ("count", ctypes.c_uint), ("places", ctypes.c_void_p),
    ]  # fmt: skip


class _Address(ctypes.Structure):
    _fields_ = [("place", ctypes.c_uint), ("source", ctypes.c_uint), ("offset", ctypes.c_int64)]


class _Map(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_uint) for name in ("place", "source", "dtype", "rank")],
        *[(name, ctypes.c_void_p) for name in ("sizes", "strides", "box", "steps")],
        *[(name, ctypes.c_uint) for name in ("interleave", "swizzle", "promotion", "beyond")],
    ]


class _List(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("launch", "encode", "steps", "addresses", "maps", "frame")],
        *[(name, ctypes.c_uint) for name in ("size", "step_count", "address_count", "map_count")],
    ]


class _Entry(NamedTuple):
    """An address, or a map, of a list."""

    place: int
    source: int
    what: Any


class Replayed:
    """Launches one after the other, made in C. `given` values a call, addresses all, come first; then those made of
    them. Threads may launch at the same time."""

    def __init__(self, steps: Sequence[driver.Step], given: int, made: Sequence[Made]) -> None:
        self.steps, self.given = steps, given
        frame = driver.Frame(steps, given + len(made))
        of_steps = zip(steps, frame.places, strict=True)
        places = {value: found[i] for step, found in of_steps for i, value in step.taken.items()}
        content, addresses, maps = bytearray(frame.values.raw), list[_Entry](), list[_Entry]()
        for value, place in places.items():
            one = At(value, 0) if value < given else made[value - given]
            if isinstance(one, At):
                addresses.append(_Entry(place, one.source, one.offset))
            elif isinstance(one, Mapped):
                maps += [_Entry(place + MAP * i, one.source, x) for i, x in enumerate(one.maps.arguments)]
            else:
                content[place : place + len(one.content)] = one.content
                addresses += [_Entry(place + inside, source, 0) for inside, source in one.places]
        self._list = self._laid_out(frame, bytes(content), addresses, maps)
        self._pack, self.at = struct.Struct(f"={given}Q").pack, ctypes.addressof(self._list)
        self._replay = library.loaded().sartor_replay

    def _laid_out(self, frame: driver.Frame, content: bytes, addresses: list[_Entry], maps: list[_Entry]) -> _List:
        launch, encode = (
            ctypes.cast(getattr(driver.library(), name), ctypes.c_void_p).value
            for name in ("cuLaunchKernelEx", "cuTensorMapEncodeTiled")
        )
        arrays = [(ctypes.c_uint * len(found))(*found) for found in frame.places]
        of_steps = zip(self.steps, arrays, strict=True)
        parts = (
            _array(_Step, [(s.function, s.grid, s.block, s.shared, len(a), ctypes.addressof(a)) for s, a in of_steps]),
            _array(_Address, addresses),
            _array(_Map, [(m.place, m.source, m.what.kind, m.what.rank, *_flat(m.what.rest)) for m in maps]),
            ctypes.create_string_buffer(content, len(content)),
        )
        self._kept = arrays, maps, parts  # to which the list points
        return _List(
            launch, encode, *map(ctypes.addressof, parts), len(content), len(self.steps), len(addresses), len(maps)
        )

    @staticmethod
    def why_not(steps: Sequence[driver.Step], given: int, made: Sequence[Made]) -> str:
        """Why Python makes these launches one by one, in a sentence, or an empty string."""
        if library.why_not():
            return library.why_not()
        size, most = driver.frame_bytes(steps, given + len(made)), max(len(step.letters) for step in steps)
        if size > FRAME or most > PARAMETERS:
            return f"needs {FRAME} bytes and {PARAMETERS} parameters a launch at most, got {size} and {most}"
        letters = {
            step.letters[i] for step in steps for i, value in step.taken.items()
            if value < given or isinstance(made[value - given], At)
        }  # fmt: skip
        return "" if letters <= {"P"} else f"needs values that are addresses, got {', '.join(sorted(letters))}"

    def start(self, given: Sequence[int], stream: int) -> None:
        """Launch on a stream (a raw handle). Raises LaunchError with the driver's reason."""
        values = self._pack(*given)
        status = self._replay(self.at, values, stream)
        if status & 0xFFFF == driver.NO_CONTEXT:  # a thread of autograd's that has called nothing of CUDA's yet
            driver.bind()
            status = self._replay(self.at, values, stream)
        if status:
            number, why = status >> 16, driver.name_of(status & 0xFFFF)
            if number == len(self.steps):
                raise LaunchError(f"a tensor map for {self.steps[-1].name} was not made: {why}")
            raise LaunchError(self.steps[number].refused(why))


class Launched:
    """The same, made by Python."""

    def __init__(self, steps: Sequence[driver.Step], given: int, made: Sequence[Made]) -> None:
        self.made, self.launches = made, driver.Launches(*steps, count=given + len(made))

    def start(self, given: Sequence[int], stream: int) -> None:
        """Launch on a stream (a raw handle). Raises LaunchError with the driver's reason."""
        self.launches.start([*given, *[one.of(given) for one in self.made]], stream)


def launcher(steps: Sequence[driver.Step], given: int, made: Sequence[Made]) -> Replayed | Launched:
    """What makes these launches."""
    return (Launched if Replayed.why_not(steps, given, made) else Replayed)(steps, given, made)


def _array(kind: Any, entries: Sequence[tuple[Any, ...]]) -> Any:
    return (kind * len(entries))(*entries)


def _flat(rest: tuple[Any, ...]) -> list[Any]:
    """Arrays as their addresses, numbers as they are."""
    return [x if isinstance(x, int) else ctypes.addressof(x) for x in rest]
