"""Calls that replay.c makes without Python: what it is told of torch, and of calls that were made once.

PyTorch's node is that of an operator, whose kernels are asked for by the dispatcher. In their place come kernels in C,
by the interface that torch gives extensions; they make what was made before for tensors that lie in the same way, and
hand all other calls to Python's kernels of the operator.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from sartor import driver
from sartor.replay import library
from sartor.replay.lists import Replayed

MARK, TENSORS, MADE, DIMS = 0x5A, 6, 4, 4  # as replay.c has them
NOTHING = (0,) * (3 + 2 * DIMS)  # in the place of a tensor's layout
DTYPES = ("float16", "bfloat16", "float32")
OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"
PYTHONS_FORWARD = "PrivateUse3"  # the key of Python's kernel where C has that of the tensors' backend; nobody else's
# Their names say what they take
_REDISPATCH = "_ZN2at4_ops{}{}10redispatchEN3c1014DispatchKeySetERKNS_6TensorES6_S6_{}dbRKSt8optionalIS4_ES7_IdE"
OF_TORCH = {  # fields of `Torch`, in its order
    "grad_mode": "aoti_torch_grad_mode_is_enabled", "dim": "aoti_torch_get_dim", "sizes": "aoti_torch_get_sizes",
    "strides": "aoti_torch_get_strides", "dtype": "aoti_torch_get_dtype", "device": "aoti_torch_get_device_index",
    "address": "aoti_torch_get_data_ptr", "empty": "aoti_torch_empty_strided",
    "drop": "aoti_torch_delete_tensor_object", "stream": "aoti_torch_get_current_cuda_stream",
    "settings": "_ZN2at13globalContextEv", "deterministic": "_ZNK2at7Context23deterministicAlgorithmsEv",
    "context": "cuCtxGetCurrent", "capturing": "cuStreamIsCapturing", "allocate": "_Znwm", "release": "_ZdlPv",
    "forward": _REDISPATCH.format(len(OPERATOR), OPERATOR, ""),
    "backward": _REDISPATCH.format(len(OPERATOR) + 9, f"{OPERATOR}_backward", "S6_S6_S6_"),
}  # fmt: skip


class _Torch(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in OF_TORCH],
        ("forward_keys", ctypes.c_uint64), ("backward_keys", ctypes.c_uint64),
    ]  # fmt: skip


# replay.c's `Call`: addresses, layouts of what is given and made, their places, counts and settings
CALL = struct.Struct(f"=5Q{(TENSORS + MADE) * '9q2i'}{TENSORS + MADE + 6}i")


_Call = ctypes.c_char * CALL.size


class _First(ctypes.Structure):
    _fields_ = [("forward", ctypes.c_void_p), ("backward", ctypes.c_void_p)]


@dataclass(frozen=True)
class Kind:
    """A pass: where among the values of its list given tensors are, those that are made, and a workspace; how many of
    what is made are returned."""

    name: str
    given: tuple[int, ...]
    made: tuple[int, ...]
    returned: int
    kept: int = 0

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Places and counts, as replay.c has them."""
        given, made = self.given, self.made
        places = *given, *[0] * (TENSORS - len(given)), *made, *[0] * (MADE - len(made))
        return *places, self.kept, len(given), len(made), self.returned


FORWARD = Kind("forward", (0, 1, 2), (3, 4), 2, 6)  # q, k, v; out, lse; no sinks
BACKWARD = Kind("backward", (3, 0, 1, 2, 4, 5), (7, 8, 9, 10), 3)  # dout, q, k, v, out, lse; dq, dk, dv, workspace


class Calls:
    """The calls of one plan that C makes. `shape` is that of the empty tensor by which C finds them, which must not
    outlive this."""

    MOST = 8  # of a pass

    def __init__(self) -> None:
        self._first, self._kept = _First(), dict[str, list[Any]](forward=[], backward=[])
        self.shape = 0, MARK, ctypes.addressof(self._first)

    def add(
        self, kind: Kind, layouts: Sequence[int], device: torch.device, launches: Replayed,
        kept: torch.Tensor | None = None, stream: int = 0,
    ) -> None:  # fmt: skip
        """One of tensors with these layouts. `kept` is the workspace that calls on a stream share."""
        others = self._kept[kind.name]
        if len(others) >= self.MOST:
            return
        first = 0, launches.at, driver.context(), stream, 0 if kept is None else kept.data_ptr()
        rest = _functions().of_device(device.type), torch.are_deterministic_algorithms_enabled()
        call = _Call()
        CALL.pack_into(call, 0, *first, *layouts, *kind.numbers, *rest)
        others.append((call, launches, kept))
        place = ctypes.addressof(self._first) + getattr(_First, kind.name).offset
        library.loaded().sartor_add(place, ctypes.addressof(call))


class _Functions:
    """torch's, found by name."""

    def __init__(self) -> None:
        folder = Path(torch.__file__).parent / "lib"
        self.torch = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        cuda = folder / "libtorch_cuda.so"
        self.cuda = ctypes.CDLL(str(cuda)) if cuda.is_file() else None
        self.standard = ctypes.CDLL("libstdc++.so.6")
        self.devices = dict[str, int]()
        self.dtypes = {getattr(torch, name): getattr(self.torch, f"aoti_torch_dtype_{name}")() for name in DTYPES}

    def of_device(self, kind: str) -> int:
        """torch's number of a kind of devices."""
        found = self.devices.get(kind)
        if found is None:
            found = self.devices[kind] = int(getattr(self.torch, f"aoti_torch_device_type_{kind}")())
        return found

    def find(self, name: str) -> Any:
        """Raises AttributeError where nobody has it."""
        if name.startswith("cu"):
            return getattr(driver.library(), name)
        owners = {"_Znwm": self.standard, "_ZdlPv": self.standard, "aoti_torch_get_current_cuda_stream": self.cuda}
        return getattr(owners.get(name) or self.torch, name)


@cache
def _functions() -> _Functions:
    return _Functions()


class Kernels:
    """replay.c's kernels of the operator for a backend, and of its backward under the backend's key of autograd, until
    they are destroyed."""

    def __init__(self, backend: str, autograd: str) -> None:
        addresses = [ctypes.cast(_functions().find(name), ctypes.c_void_p).value for name in OF_TORCH.values()]
        keys = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for key in (PYTHONS_FORWARD, backend)]
        made = library.loaded()
        made.sartor_torch(ctypes.byref(_Torch(*addresses, *[key.raw_repr() for key in keys])))
        self._libraries = list[ctypes.c_void_p]()
        self._serve(OPERATOR, backend, made.sartor_forward)
        self._serve(f"{OPERATOR}_backward", autograd, made.sartor_backward)

    def _serve(self, operator: str, key: str, kernel: Any) -> None:
        made, found = _functions().torch, ctypes.c_void_p()
        place = __file__.encode(), ctypes.c_uint32(1)
        failed = made.aoti_torch_library_init_impl(b"aten", key.encode(), *place, ctypes.byref(found))
        address = ctypes.cast(kernel, ctypes.c_void_p)
        if failed or made.aoti_torch_library_impl(found, operator.encode(), address):
            raise RuntimeError(f"torch {torch.__version__} took no kernel of {operator}")
        self._libraries.append(found)

    def destroy(self) -> None:
        """Unregister."""
        for found in self._libraries:
            _functions().torch.aoti_torch_delete_library_object(found)


def why_not() -> str:
    """Why calls with PyTorch's node need Python, in a sentence, or an empty string."""
    if library.why_not():
        return library.why_not()
    try:
        for name in OF_TORCH.values():
            _functions().find(name)
    except (OSError, AttributeError) as error:
        return f"needs what torch {torch.__version__} and the driver do not have here: {error}"
    return ""


def told() -> str:
    """What makes the launches of kernels that can be replayed, and why it is not C, in a sentence."""
    if library.why_not():
        return f"Python makes the launches one by one: {library.why_not()}"
    if why_not():
        return f"C makes the launches of a call, which Python prepares: {why_not()}"
    return "C makes the launches of a call; where autograd follows q, k and v alone, later calls run without Python"


def layouts(given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> list[int]:
    """Of the tensors of a call, and of those that it makes."""
    found: list[int] = []
    for tensors, most in ((given, TENSORS), (made, MADE)):
        for t in tensors:
            found += _layout(t)
        found += NOTHING * (most - len(tensors))
    return found


def _layout(t: torch.Tensor) -> tuple[int, ...]:
    """Numbers of replay.c's `Layout`."""
    shape, index = t.shape, t.device.index
    strides = (1,) if len(shape) == 1 else t.stride()  # of a workspace that is one number, expanded
    rest = (0,) * (DIMS - len(shape))
    return len(shape), *shape, *rest, *strides, *rest, _functions().dtypes[t.dtype], -1 if index is None else index
