"""CUDA C++ at run time: compile with NVRTC, keep the result on disk, load and launch it.

NVRTC and its Python binding come with a CUDA build of torch (or `pip install "cuda-core[cu13]"`); where they are
missing, `missing()` says so. A cubin is kept on disk (`cache.py`) under a hash of everything it depends on: the text
with all headers it includes, macros, architecture, compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from sartor import cache as disk
from sartor import driver
from sartor.driver import LaunchError

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class CompileError(RuntimeError):
    """NVRTC refused a source; the message ends with its log."""


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers a thread; bytes spilled, of stack, of static shared memory."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True, eq=False)
class Binary:
    """A compiled source: machine code for one architecture, the compiler's log, resources by kernel name."""

    cubin: bytes
    log: str
    arch: str
    resources: dict[str, Resources]

    def sass(self, kernel: str = "") -> str:
        """Machine code as text, of one kernel or all. Raises FileNotFoundError where no disassembler is installed."""
        return _cuobjdump(self.cubin, "-sass", *(["-fun", kernel] if kernel else []))


@cache
def missing() -> str:
    """Why nothing can be compiled here, or an empty string."""
    for module in ("cuda.core", "cuda.bindings"):
        try:
            found = util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f'needs NVRTC through {module}, which is not installed: pip install "cuda-core[cu13]"'
    try:
        with _IMPORTING:
            from cuda.core import ObjectCode, Program  # noqa: F401 - elsewhere in old ones
    except ImportError:
        return f"needs cuda-core 0.7 or later, got {metadata.version('cuda-core')}"
    try:
        compiler()
    except Exception as error:  # the binding raises its own kinds, by version
        return f"needs NVRTC, whose library was not found: {str(error).splitlines()[0]}"
    return ""


@cache
def compiler() -> str:
    """NVRTC's version, down to the build where its wheel says it."""
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if int(status) != 0:
        raise RuntimeError(f"nvrtcVersion: {status}")
    for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            return f"{major}.{minor} {metadata.version(wheel)}"
        except metadata.PackageNotFoundError:
            continue
    return f"{major}.{minor}"


def headers(source: str, include: Path | None) -> dict[str, str]:
    """The texts of all headers that `source` includes by quoted name, directly or through others."""
    found: dict[str, str] = {}
    left = [source]
    while left:
        for name in _INCLUDE.findall(left.pop()):
            if name not in found:
                if include is None or not (include / name).is_file():
                    raise CompileError(f'header "{name}" must be in the include folder, got {include}')
                found[name] = (include / name).read_text()
                left.append(found[name])
    return found


_IMPORTING = threading.Lock()
_LOCKS: dict[str, threading.Lock] = {}
_BINARIES: dict[str, Binary] = {}


def compile(
    source: str,
    *,
    arch: str = "sm_90a",
    defines: Mapping[str, object] | None = None,
    include: Path | None = None,
    name: str = "kernel.cu",
) -> Binary:
    """Compile CUDA C++ for one architecture, or find the result of an earlier time in memory or on disk.

    Args:
        source: the text of one translation unit; kernels are `extern "C"`.
        arch: as `sm_90a`.
        defines: macros by name.
        include: the folder of the headers that `source` includes by quoted name.
        name: what the compiler's messages call the source.

    Raises:
        CompileError: the source is wrong (with the compiler's log), or there is no NVRTC (with the reason).
    """
    if missing():
        raise CompileError(missing())
    macros = [(key, str(value)) for key, value in sorted((defines or {}).items())]
    texts = headers(source, include)
    parts = json.dumps([source, sorted(texts.items()), macros, arch, compiler()])
    key = hashlib.sha256(parts.encode()).hexdigest()
    with _LOCKS.setdefault(key, threading.Lock()):  # dict.setdefault is atomic
        if key not in _BINARIES:
            kept = disk.read(key)
            if kept is None:
                binary = _compile(source, arch, macros, include, name)
                disk.write(key, _packed(binary))
            _BINARIES[key] = binary if kept is None else _unpacked(kept)
    return _BINARIES[key]


def _compile(source: str, arch: str, macros: list[tuple[str, str]], include: Path | None, name: str) -> Binary:
    with _IMPORTING:  # two threads that import cuda.core for the first time get half of it
        from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(
        name=name, arch=arch, std="c++17", define_macro=macros or None, ptxas_options=["-v"],
        include_path=[str(include)] if include else None,
    )  # fmt: skip
    try:
        code = Program(source, "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        message = f"{name} for {arch} with {dict(macros)} does not compile:\n{error}\n{log.getvalue()}"
        raise CompileError(message) from error
    text = log.getvalue().replace("\0", "").strip()
    return Binary(bytes(code), text, arch, _resources(text) or _resources_of(bytes(code)))


def _resources(log: str) -> dict[str, Resources]:
    """ptxas's report: a block of lines for each kernel."""
    found = {}
    for block in re.split(r"(?=Compiling entry function ')", log)[1:]:
        kernel = block.split("'")[1]

        def number(pattern: str, block: str = block) -> int:
            match = re.search(pattern, block)
            return int(match.group(1)) if match else 0

        spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        found[kernel] = Resources(
            number(r"Used (\d+) registers"), spilled, number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes smem")
        )
    return found


def _resources_of(cubin: bytes) -> dict[str, Resources]:
    """The same from the machine code, where the compiler reports nothing: what is on the stack counts as spilled."""
    try:
        text = _cuobjdump(cubin, "-res-usage")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return {}
    pattern = r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    return {
        name: Resources(int(registers), int(stack) + int(local), int(stack), int(shared))
        for name, registers, stack, shared, local in re.findall(pattern, text)
    }


def _cuobjdump(cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [disassembler(), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _packed(binary: Binary) -> bytes:
    facts = {"log": binary.log, "arch": binary.arch, "resources": {k: asdict(r) for k, r in binary.resources.items()}}
    return json.dumps(facts).encode() + b"\n" + binary.cubin


def _unpacked(content: bytes) -> Binary:
    head, cubin = content.split(b"\n", 1)
    facts = json.loads(head)
    resources = {kernel: Resources(**r) for kernel, r in facts["resources"].items()}
    return Binary(cubin, facts["log"], facts["arch"], resources)


@cache
def disassembler() -> str:
    """Path of cuobjdump: the machine's own, or the one in Triton's wheel. Raises FileNotFoundError."""
    own = shutil.which("cuobjdump")
    triton = util.find_spec("triton")
    inside = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump" if triton and triton.origin else Path()
    if own or inside.is_file():
        return own or str(inside)
    raise FileNotFoundError("needs cuobjdump to show machine code: it comes with the CUDA toolkit and with Triton")


_CODES: dict[Binary, Any] = {}  # loaded, and never unloaded: a captured graph outlives the plan that it was made with


class Parameters(Protocol):
    """What is declared of a kernel: its `extern "C"` name, its parameters' types by name, codes for `driver.Frame`."""

    kernel: str
    types: dict[str, str]

    @property
    def codes(self) -> tuple[str, ...]: ...

    def __hash__(self) -> int: ...  # by identity


class Kernel:
    """One kernel of a binary, ready to launch on any device of its architecture.

    Args:
        binary: what `compile` returned.
        params: its name and parameters.
        block: threads a block.
        shared: bytes of dynamic shared memory a block.
        fixed: the values of parameters, by name, that are the same in every launch.
    """

    def __init__(
        self, binary: Binary, params: Parameters, block: int, shared: int = 0, fixed: Mapping[str, Any] | None = None
    ) -> None:
        self.binary, self.name, self.params, self.block, self.shared = binary, params.kernel, params, block, shared
        self.fixed = fixed or {}
        self.changing, self._fixed, self._handles = _alike(binary, params, shared, tuple(self.fixed))
        self._launches: dict[int, driver.Launches] = {}  # by device

    def launch(self, grid: int | tuple[int, int, int], values: Mapping[str, Any], stream: int | None = None) -> None:
        """Launch with `values` by name on `stream` (a raw handle), by default torch's current stream of the device.

        Raises TypeError where a value is missing or one too many, LaunchError with the driver's reason; errors of the
        kernel itself come later, as CUDA's do.
        """
        given = [values[name] for name in self.changing if name in values]
        if not len(given) == len(values) == len(self.changing):
            raise TypeError(f"{self.name} takes {', '.join(self.changing)}, got {', '.join(values)}")
        device, size = torch._C._cuda_getDevice(), (grid, 1, 1) if isinstance(grid, int) else grid
        launches = self._launches.get(device)
        if launches is None:
            launches = self._launches[device] = driver.Launches(self.step(device, size))
        launches.start(given, torch._C._cuda_getCurrentRawStream(device) if stream is None else stream, size)

    def step(
        self, device: int, grid: tuple[int, int, int], given: tuple[int, ...] | None = None, overlaps: bool = False
    ) -> driver.Step:
        """A launch on a device; `given`, in the order of `changing`, and `overlaps` as of `driver.Step`."""
        fixed = dict(zip(self._fixed.values(), map(self.fixed.__getitem__, self._fixed), strict=True))
        handle = self._handles.get(device) or self._load(device)
        return driver.Step(self.params.codes, fixed, given, handle, self.name, grid, self.block, self.shared, overlaps)

    def _load(self, device: int) -> int:
        """The driver's handle on a device; more shared memory than 48 KiB is asked for once, here."""
        with _IMPORTING:
            from cuda.bindings import driver as bindings
            from cuda.core import ObjectCode

            code = _CODES.get(self.binary)
            if code is None:
                code = _CODES[self.binary] = ObjectCode.from_cubin(self.binary.cubin)
            found = int(code.get_kernel(self.name).handle)
            limit = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            kernel, on = bindings.CUkernel(found), bindings.CUdevice(device)
            (status,) = bindings.cuKernelSetAttribute(limit, self.shared, kernel, on)
            if status != bindings.CUresult.CUDA_SUCCESS:
                raise LaunchError(f"{self.name} needs {self.shared} bytes of shared memory a block: {status.name}")
            self._handles[device] = found
            return found


@lru_cache(maxsize=1024)
def _alike(
    binary: Binary, params: Parameters, shared: int, fixed: tuple[str, ...]
) -> tuple[list[str], dict[str, int], dict[int, int]]:
    """What launches have in common that differ in numbers alone, as those of other lengths do: the names of values that
    change with each call, the places of fixed ones by name, and the driver's handles by device."""
    places = {name: i for i, name in enumerate(params.types) if name in fixed}
    return [name for name in params.types if name not in places], places, {}


# Enumerators of cuda.h, whose names they have
_MAP_DTYPES = {"bool": 0, "float16": 6, "float32": 7, "bfloat16": 9}  # CU_TENSOR_MAP_DATA_TYPE_
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_, by bytes
_PROMOTIONS = {64: 1, 128: 2, 256: 3}  # CU_TENSOR_MAP_L2_PROMOTION_L2_, by bytes
_INTERLEAVE_NONE, _ZEROS_BEYOND = 0, 0
_PROMOTION = 256  # bytes, where a box does not say
MAP_ALIGNMENT = 64  # bytes, of a CUtensorMap


class TensorMaps(dict[int, bytes]):
    """`tensor_map`s by address, made when first asked for, of an operand whose other arguments stay. `boxes` are what
    `tensor_map` takes last, from the box on; of several the maps stand one after the other."""

    MOST = 4096

    def __init__(
        self, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...],
        *boxes: tuple[tuple[int, ...], int] | tuple[tuple[int, ...], int, int],
    ) -> None:  # fmt: skip
        self.operand, self.boxes = (dtype, sizes, strides), boxes

    @property
    def arguments(self) -> list[MapArguments]:
        """What the driver is given of each, beside the map and the address."""
        return [MapArguments.of(*self.operand, *box) for box in self.boxes]

    def __missing__(self, address: int) -> bytes:
        if len(self) >= self.MOST:
            self.clear()
        found = self[address] = b"".join(tensor_map(address, *self.operand, *box) for box in self.boxes)
        return found


def tensor_map(
    address: int, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int,
    promotion: int = _PROMOTION,
) -> bytes:  # fmt: skip
    """A TMA tensor map: 128 bytes that a kernel takes as a `__grid_constant__` parameter.

    Args:
        address: of the first element; a multiple of 16.
        dtype: `bool` (bytes), `float16`, `bfloat16` or `float32`.
        sizes: elements a dim, innermost first.
        strides: bytes a step of each dim but the innermost; multiples of 16.
        box: elements of one copy a dim.
        swizzle: 0, 32, 64 or 128 bytes.
        promotion: 64, 128 or 256 bytes that L2 fetches where a copy asks for less; 64 where rows do not start on 32.

    Reads beyond `sizes` give zeros. Raises LaunchError with the arguments where the driver refuses them.
    """
    given = MapArguments.of(dtype, sizes, strides, box, swizzle, promotion)
    wide, narrow = ctypes.c_uint64, ctypes.c_uint32
    room = ctypes.create_string_buffer(128 + MAP_ALIGNMENT)
    start, rank = -(-ctypes.addressof(room) // MAP_ALIGNMENT) * MAP_ALIGNMENT, len(sizes)
    arrays = (wide * rank)(*sizes), (wide * len(strides))(*strides), (narrow * rank)(*box), (narrow * rank)(*[1] * rank)
    arguments = start, given.dtype, rank, address, *arrays, *given.options
    status = driver.library().cuTensorMapEncodeTiled(*arguments)
    if status == driver.NO_CONTEXT:  # a thread of autograd's, whose maps come before its first launch
        driver.bind()
        status = driver.library().cuTensorMapEncodeTiled(*arguments)
    if status:
        why = driver.name_of(status)
        raise LaunchError(f"tensor map of sizes {sizes}, strides {strides}, box {box}, at {address:#x}: {why}")
    return ctypes.string_at(start, 128)


class MapArguments(NamedTuple):
    """What cuTensorMapEncodeTiled takes of numbers, beside an element's step in each dim, which is 1."""

    dtype: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    options: tuple[int, ...]  # interleave, swizzle, promotion, what is read beyond

    @classmethod
    def of(
        cls, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int,
        promotion: int = _PROMOTION,
    ) -> MapArguments:  # fmt: skip
        """As of `tensor_map`. Where rows do not start on sectors, fetching more around them costs."""
        aligned = True
        for stride in strides:
            aligned = aligned and stride % 32 == 0
        options = _INTERLEAVE_NONE, _SWIZZLES[swizzle], _PROMOTIONS[promotion if aligned else 64], _ZEROS_BEYOND
        return cls(_MAP_DTYPES[dtype], sizes, strides, box, options)
