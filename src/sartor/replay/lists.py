"""Lists of launches as replay.c reads them, and the values of a call: those it is given, and those made of them.

Another length has a list with other numbers in the same places: what does not depend on them, its form, is made once.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sartor import driver
from sartor.driver import LaunchError
from sartor.nvrtc import TensorMaps
from sartor.replay import library

FRAME, PARAMETERS, MAP, RANK = 16384, 128, 128, 5  # as replay.c has them
LIST, STEP = "7Q5I4x", "2Q7I4x"  # its structs, as `struct` has them


class At(NamedTuple):
    """An address so many bytes after a given one."""

    source: int
    offset: int

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is the same in lists of one form."""
        return At, self.source

    def of(self, given: Sequence[int]) -> int:
        """Of a call."""
        return given[self.source] + self.offset


class Mapped(NamedTuple):
    """Tensor maps of a given address, side by side."""

    source: int
    maps: TensorMaps

    @property
    def kind(self) -> tuple[Any, ...]:
        """As of `At`."""
        return Mapped, self.source, len(self.maps.boxes), len(self.maps.operand[1])

    def of(self, given: Sequence[int]) -> bytes:
        """Of a call."""
        return self.maps[given[self.source]]


class Record(NamedTuple):
    """Numbers side by side in which given addresses stand: pairs of a place and a source."""

    struct: struct.Struct
    numbers: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        """As of `At`."""
        return Record, self.places, self.struct.format

    def of(self, given: Sequence[int]) -> bytes:
        """Of a call."""
        found = bytearray(self.struct.pack(*self.numbers))
        for place, source in self.places:
            struct.pack_into("=Q", found, place, given[source])
        return bytes(found)


Made = At | Mapped | Record


def _map(rank: int) -> str:
    """A struct of replay.c's."""
    rest = RANK - rank
    return f"{rank}Q{8 * rest}x{rank - 1}Q{8 * rest}x{rank}I{4 * rest}x8I4x"


class Form:
    """What lists of launches of these forms have in common: where parameters lie, and what is written there."""

    def __init__(self, forms: tuple[driver.Form, ...], given: int, kinds: tuple[tuple[Any, ...], ...]) -> None:
        layout = driver.Layout.of(forms, given + len(kinds))
        self.why, places = _why_not(forms, layout, (*[(At, i) for i in range(given)], *kinds)), dict[int, int]()
        if self.why:
            return
        for form, found in zip(forms, layout.places, strict=True):
            places |= {value: found[i] for i, value in driver.taken(*form).items()}
        # of what is made the numbers, of maps and records with their places too
        self.offsets, self.maps = list[int](), list[tuple[int, int]]()
        self.records = list[tuple[int, int, struct.Struct]]()
        first, others, ranks = list[int](), list[int](), list[int]()  # addresses: places and sources
        for value, place in places.items():
            i = value - given
            kind, source, *more = kinds[i] if i >= 0 else (None, value)
            if kind is At:
                self.offsets.append(i)
                first += place, source
            elif kind is Mapped:
                self.maps.append((i, place))
                ranks += [more[1]] * more[0]
            elif kind is Record:
                self.records.append((i, place, struct.Struct(*more)))
                others += [x for inside, of in source for x in (place + inside, of)]
            else:
                others += place, source
        self._kept = [(ctypes.c_uint * len(found))(*found) for found in (*layout.places, first + others)]
        *self.places, self.addresses = [(ctypes.addressof(array), len(array)) for array in self._kept]
        parts = LIST, STEP * len(forms), "q" * len(self.offsets), "".join(map(_map, ranks))
        self.begins = [*itertools.accumulate(struct.calcsize(f"={part}") for part in parts)]
        self.counts = len(forms), len(self.offsets), len(ranks), layout.changing.size + layout.fixed.size
        fixed = layout.fixed.format.removeprefix("=")
        self.struct = struct.Struct(f"={''.join(parts)}{layout.changing.size}x{fixed}")
        self.pack, self.type = struct.Struct(f"={given}Q").pack, ctypes.c_char * self.struct.size

    def numbers(self, steps: Sequence[driver.Step], made: Sequence[Made]) -> list[Any]:
        """What a list has after its addresses, but for records."""
        numbers: list[Any] = []
        for step, places in zip(steps, self.places, strict=True):
            numbers += step.function, *places, *step.grid, step.block, step.shared, step.overlaps
        numbers += [made[i].offset for i in self.offsets]  # type: ignore[union-attr]
        for i, place in self.maps:
            source, maps = made[i]  # type: ignore[misc]
            for x in maps.arguments:  # type: ignore[union-attr]
                numbers += *x.sizes, *x.strides, *x.box, place, source, x.dtype, len(x.sizes), *x.options
                place += MAP
        for step in steps:
            numbers += step.fixed.values()
        return numbers

    @staticmethod
    @lru_cache(maxsize=512)
    def of(forms: tuple[driver.Form, ...], given: int, kinds: tuple[tuple[Any, ...], ...]) -> Form:
        """Made once."""
        return Form(forms, given, kinds)


def _why_not(forms: tuple[driver.Form, ...], layout: driver.Layout, kinds: tuple[tuple[Any, ...], ...]) -> str:
    """Why Python makes launches of these forms one by one, in a sentence, or an empty string."""
    size, most = layout.changing.size + layout.fixed.size, max(map(len, layout.places))
    if size > FRAME or most > PARAMETERS:
        return f"needs {FRAME} bytes and {PARAMETERS} parameters a launch at most, got {size} and {most}"
    taken = [(form[0][i], value) for form in forms for i, value in driver.taken(*form).items()]
    letters = {letter for letter, value in taken if kinds[value][0] is At}
    return "" if letters <= {"P"} else f"needs values that are addresses, got {', '.join(sorted(letters))}"


def form_of(steps: Sequence[driver.Step], given: int, made: Sequence[Made]) -> Form:
    """The form of such a list."""
    return Form.of(tuple([step.form for step in steps]), given, tuple([one.kind for one in made]))


@lru_cache(maxsize=8)
def _functions(of: Any) -> list[int | None]:
    """The addresses of what lists call, of a driver."""
    names = "cuLaunchKernelEx", "cuTensorMapEncodeTiled"
    return [ctypes.cast(getattr(of, name), ctypes.c_void_p).value for name in names]


class Replayed:
    """Launches one after the other, made in C. `given` values a call, addresses all, come first; then those made of
    them. Threads may launch at the same time."""

    def __init__(
        self, steps: Sequence[driver.Step], given: int, made: Sequence[Made], form: Form | None = None
    ) -> None:  # fmt: skip
        form = form or form_of(steps, given, made)
        records = [made[i].numbers for i, *_ in form.records]  # type: ignore[union-attr]
        self._fill(form, [step.name for step in steps], form.numbers(steps, made), records)

    @classmethod
    def like(
        cls, form: Form, names: Sequence[str], numbers: Sequence[Any], records: Iterable[Sequence[int]]
    ) -> Replayed:  # fmt: skip
        """Launches of these names with other numbers than the form was found with: what `Form.numbers` gives, and those
        of records."""
        found = object.__new__(cls)
        found._fill(form, names, numbers, records)
        return found

    def _fill(
        self, form: Form, names: Sequence[str], numbers: Sequence[Any], records: Iterable[Sequence[int]]
    ) -> None:  # fmt: skip
        self.form, self.names, self._list = form, names, form.type()  # to the form the list points
        self.at = start = ctypes.addressof(self._list)
        addresses, count = form.addresses
        begins = [start + begin for begin in form.begins]
        first = *_functions(driver.library()), addresses, *begins, count // 2, *form.counts
        form.struct.pack_into(self._list, 0, *first, *numbers)
        for (_, place, of), content in zip(form.records, records, strict=True):
            of.pack_into(self._list, form.begins[-1] + place, *content)
        self._pack, self._replay = form.pack, library.loaded().sartor_replay

    @staticmethod
    def why_not(steps: Sequence[driver.Step], given: int, made: Sequence[Made]) -> str:
        """Why Python makes these launches one by one, in a sentence, or an empty string."""
        return library.why_not() or form_of(steps, given, made).why

    def start(self, given: Sequence[int], stream: int) -> None:
        """Launch on a stream (a raw handle). Raises LaunchError with the driver's reason."""
        values = self._pack(*given)
        status = self._replay(self.at, values, stream)
        if status & 0xFFFF == driver.NO_CONTEXT:  # a thread of autograd's that has called nothing of CUDA's yet
            driver.bind()
            status = self._replay(self.at, values, stream)
        if status:
            number, why = status >> 16, driver.name_of(status & 0xFFFF)
            if number == len(self.names):
                raise LaunchError(f"a tensor map for {self.names[-1]} was not made: {why}")
            place = self.form.begins[0] + number * struct.calcsize(f"={STEP}")
            *_, x, y, z, block, shared, _ = struct.unpack_from(f"={STEP}", self._list, place)
            step = driver.Step((), name=self.names[number], grid=(x, y, z), block=block, shared=shared)
            raise LaunchError(step.refused(why))


class Launched:
    """The same, made by Python."""

    def __init__(self, steps: Sequence[driver.Step], given: int, made: Sequence[Made]) -> None:
        self.made, self.launches = made, driver.Launches(*steps, count=given + len(made))

    def start(self, given: Sequence[int], stream: int) -> None:
        """Launch on a stream (a raw handle). Raises LaunchError with the driver's reason."""
        self.launches.start([*given, *[one.of(given) for one in self.made]], stream)


def launcher(steps: Sequence[driver.Step], given: int, made: Sequence[Made]) -> Replayed | Launched:
    """What makes these launches."""
    form = None if library.why_not() else form_of(steps, given, made)
    return Launched(steps, given, made) if form is None or form.why else Replayed(steps, given, made, form)
