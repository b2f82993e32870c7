"""Triton's kernels launched by the driver itself: what is known of how Triton 3.5 to 3.7 compile them.

A compiled kernel takes its arguments in the order of its signature, nested tuples flattened, constants left out; then a
pointer to global scratch and one to profile scratch (`make_launcher` in triton/backends/nvidia/driver.py). The sizes of
parameters in the kernel's PTX must say the same. What is compiled otherwise, Triton launches.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata as packages
from typing import Any, NamedTuple

import torch

from sartor import driver

KNOWN = (3, 5), (3, 7)  # releases, first and last
LETTERS = {"i32": "i", "i64": "q", "fp32": "f"}  # of `driver.Frame`, by Triton's types
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


def hooked() -> bool:
    """Whether someone wants to hear of each launch: Triton's own launcher tells them."""
    from triton import knobs

    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


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
        metadata, n = compiled.metadata, len(letters)
        self.function, fixed = ctypes.c_void_p(compiled.function), {n + i: 0 for i in range(SCRATCH)}
        block = 32 * metadata.num_warps
        self.launcher = driver.Launcher(metadata.name, block, metadata.shared, letters + "P" * SCRATCH, fixed)

    @classmethod
    def of(cls, compiled: Any, version: tuple[int, ...]) -> Open | None:
        """None where Triton had better launch it."""
        kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
        letters = ["P" if kind[0] == "*" else LETTERS.get(kind) for kind in kinds]
        known = KNOWN[0] <= version <= KNOWN[1] and plain(compiled.metadata) and as_written(compiled, letters)
        return cls(compiled, "".join(letter or "" for letter in letters)) if known else None

    def start(self, grid: int, addresses: Sequence[int], numbers: Sequence[int], stream: int) -> None:
        """Launch."""
        self.launcher.start(self.function, (grid, 1, 1), stream, (*addresses, *numbers))


class Direct:
    """A compiled kernel with everything about a launch of it that no call changes."""

    def __init__(self, compiled: Any, found: list[Leaf], grid: int) -> None:
        letters = "".join(leaf.letter or "" for leaf in found) + "P" * SCRATCH
        fixed = {i: _value(leaf) for i, leaf in enumerate(found) if leaf.letter != "P"}
        fixed |= {len(found) + i: 0 for i in range(SCRATCH)}
        self.changing = [(leaf.name, leaf.path) for leaf in found if leaf.letter == "P"]
        self.names = None if any(path for _, path in self.changing) else [name for name, _ in self.changing]
        self.function, self.grid = ctypes.c_void_p(compiled.function), (grid, 1, 1)
        metadata = compiled.metadata
        self.launcher = driver.Launcher(metadata.name, 32 * metadata.num_warps, metadata.shared, letters, fixed)

    @classmethod
    def of(cls, compiled: Any, arguments: dict[str, Any], grid: int, version: tuple[int, ...]) -> Direct | None:
        """For a kernel compiled for these arguments; None where Triton had better launch it."""
        signature = compiled.src.signature
        if not KNOWN[0] <= version <= KNOWN[1] or list(signature) != list(arguments) or not plain(compiled.metadata):
            return None
        found = [leaf for name, kind in signature.items() for leaf in leaves(kind, arguments[name], name)]
        return cls(compiled, found, grid) if as_written(compiled, [leaf.letter for leaf in found]) else None

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
        self.launcher.start(self.function, self.grid, stream, self.addresses(arguments))


def current_stream() -> int:
    """torch's, on the current device."""
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
