"""Triton's kernels launched by the driver itself: what is known of how Triton 3.5 to 3.7 compile them.

A compiled kernel takes its arguments in the order of its signature, nested tuples flattened, constants left out; then a
pointer to global scratch and one to profile scratch (`make_launcher` in triton/backends/nvidia/driver.py). The sizes of
parameters in the kernel's PTX must say the same. What is compiled otherwise, Triton launches.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata as packages
from typing import Any, NamedTuple

import torch

from sartor import driver

KNOWN = (3, 5), (3, 7)  # releases, first and last
LETTERS = {"i32": "i", "i64": "q", "fp32": "f"}  # of `driver.Step`, by Triton's types
NUMBERS = frozenset({int, type(None)})
SCRATCH = 2  # pointers after the arguments
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\b")


class Leaf(NamedTuple):
    """A parameter of a compiled kernel: its letter, where among the arguments its value is, and the value."""

    letter: str | None  # None: of a type that is not known
    name: str
    path: tuple[int, ...]  # in nested tuples
    value: Any


def leaves(kind: Any, value: Any, name: str, path: tuple[int, ...] = ()) -> Iterator[Leaf]:
    """The parameters that an argument makes; `kind` is its part of the signature."""
    if isinstance(kind, tuple):
        for i, (part, of_part) in enumerate(zip(kind, value, strict=True)):
            yield from leaves(part, of_part, name, (*path, i))
    elif kind != "constexpr":
        yield Leaf("P" if kind[0] == "*" else LETTERS.get(kind), name, path, value)


@cache
def version() -> tuple[int, ...]:
    """Triton's, down to the minor one; (0, 0) where it is not installed."""
    try:
        return tuple(int(x) for x in packages.version("triton").split(".")[:2])
    except packages.PackageNotFoundError:
        return 0, 0


def parameters(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel that a PTX text defines."""
    start = ptx.index(".entry")
    return [int(bits) // 8 for bits in _PARAMETER.findall(ptx[start : ptx.index(")", start)])]


@cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def hooked() -> bool:
    """Whether someone wants to hear of each launch: Triton's own launcher tells them."""
    runtime = _runtime()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        (enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True))
    )


def plain(metadata: Any) -> bool:
    """Whether a launch takes a grid, a block and shared memory only: no scratch, no clusters, no attribute."""
    wanted = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False}
    wanted |= {"global_scratch_size": 0, "profile_scratch_size": 0}
    return all((getattr(metadata, name, value) or 0) == value for name, value in wanted.items()) and all(
        n == 1 for n in getattr(metadata, "cluster_dims", ())
    )


def _value(leaf: Leaf) -> Any:
    """What is written for a number: a float beyond float32 is infinite there."""
    return ctypes.c_float(leaf.value).value if leaf.letter == "f" else leaf.value


def as_written(compiled: Any, letters: list[str | None]) -> bool:
    """Whether the parameters of a compiled kernel are these, and the pointers to scratch."""
    if None in letters:
        return False
    sizes = [driver.size(letter or "") for letter in letters] + [driver.size("P")] * SCRATCH
    return sizes == parameters(compiled.asm["ptx"])


class Open:
    """A compiled kernel of which every argument may change with each call: tensors first, then numbers."""

    def __init__(self, compiled: Any, letters: str) -> None:
        self.launches = driver.Launches(_step(compiled, letters, {}, (1, 1, 1)))

    @classmethod
    def of(cls, compiled: Any, version: tuple[int, ...]) -> Open | None:
        """None where Triton had better launch it."""
        kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
        letters = ["P" if kind[0] == "*" else LETTERS.get(kind) for kind in kinds]
        known = KNOWN[0] <= version <= KNOWN[1] and plain(compiled.metadata) and as_written(compiled, letters)
        return cls(compiled, "".join(letter or "" for letter in letters)) if known else None

    def start(self, grid: int, addresses: Sequence[int], numbers: Sequence[int], stream: int) -> None:
        """Launch."""
        self.launches.start((*addresses, *numbers), stream, (grid, 1, 1))


class Direct:
    """A compiled kernel with everything about a launch of it that no call changes."""

    def __init__(self, compiled: Any, found: list[Leaf], grid: int) -> None:
        self.found = [leaf._replace(value=None) for leaf in found]  # which may be a tensor, that would stay allocated
        fixed = {i: _value(leaf) for i, leaf in enumerate(found) if leaf.letter != "P"}
        self.changing = [(leaf.name, leaf.path) for leaf in found if leaf.letter == "P"]
        self.names = None if any(path for _, path in self.changing) else [name for name, _ in self.changing]
        self.step = _step(compiled, "".join(leaf.letter or "" for leaf in found), fixed, (grid, 1, 1))
        self.launches = driver.Launches(self.step)

    def like(self, arguments: dict[str, Any], grid: int) -> Direct:
        """The same kernel for other arguments of the same kinds."""
        same = object.__new__(Direct)
        same.found, same.changing, same.names = self.found, self.changing, self.names
        fixed = dict(self.step.fixed)
        for i, (letter, name, path, _) in enumerate(self.found):
            if letter != "P":
                value = arguments[name]
                for place in path:
                    value = value[place]
                fixed[i] = ctypes.c_float(value).value if letter == "f" else value
        same.step = self.step._replace(fixed=fixed, grid=(grid, 1, 1))
        same.launches = driver.Launches(same.step)
        return same

    @staticmethod
    def serves(compiled: Any, arguments: dict[str, Any], version: tuple[int, ...]) -> bool:
        """Whether the driver may launch a kernel compiled for arguments of these kinds, or Triton had better do it."""
        signature = compiled.src.signature
        if not KNOWN[0] <= version <= KNOWN[1] or list(signature) != list(arguments) or not plain(compiled.metadata):
            return False
        return as_written(compiled, [leaf.letter for leaf in _found(compiled, arguments)])

    @classmethod
    def of(cls, compiled: Any, arguments: dict[str, Any], grid: int) -> Direct:
        """For a kernel that `serves` these arguments."""
        return cls(compiled, _found(compiled, arguments), grid)

    def addresses(self, arguments: dict[str, Any]) -> Sequence[int]:
        """What changes, in the order of the parameters; 0 for what is not among `arguments`."""
        if self.names is not None:
            given = [*map(arguments.get, self.names)]
            if NUMBERS.issuperset(map(type, given)):
                return [address or 0 for address in given]
        found = []
        for name, path in self.changing:
            value = arguments.get(name)
            for i in path:
                value = value[i]  # type: ignore[index]
            found.append(value if value.__class__ is int else 0 if value is None else value.data_ptr())
        return found

    def start(self, arguments: dict[str, Any], stream: int) -> None:
        """Launch with tensors, or their addresses, by the names of arguments."""
        self.launches.start(self.addresses(arguments), stream)

    def among(self, places: Mapping[Any, int]) -> driver.Step:
        """The launch as one of several that share values: `places` has theirs by names of arguments, or, of what is
        inside of a tuple, by (name, *path)."""
        given = tuple([places[(name, *path) if path else name] for name, path in self.changing])
        return self.step._replace(given=given)


def _found(compiled: Any, arguments: dict[str, Any]) -> list[Leaf]:
    return [leaf for name, kind in compiled.src.signature.items() for leaf in leaves(kind, arguments[name], name)]


def _step(compiled: Any, letters: str, fixed: dict[int, Any], grid: driver.Grid) -> driver.Step:
    """With the pointers to scratch that follow the parameters."""
    metadata = compiled.metadata
    fixed = fixed | {len(letters) + i: 0 for i in range(SCRATCH)}
    return driver.Step(
        letters + "P" * SCRATCH, fixed, None, compiled.function, metadata.name, grid, 32 * metadata.num_warps,
        metadata.shared,
    )  # fmt: skip


def current_stream() -> int:
    """torch's, on the current device."""
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
