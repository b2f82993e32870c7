"""Backwards that replay.c makes without Python: what it is told of torch, and of calls that were made once.

PyTorch's node asks the dispatcher for its operator's backward. In its place comes a kernel in C, by the interface that
torch gives extensions; it makes what was made before for tensors that lie in the same way, and hands all other calls to
Python's kernel of the operator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sartor import driver
from sartor.replay import library
from sartor.replay.lists import Replayed

MARK = 0x5A  # as replay.c has it
DTYPES = ("float16", "bfloat16", "float32")
PYTHON = (
    "_ZN2at4_ops52_scaled_dot_product_flash_attention_for_cpu_backward10redispatchEN3c1014DispatchKeySetERKNS_6Tensor"
    "ES6_S6_S6_S6_S6_dbRKSt8optionalIS4_ES7_IdE"  # its name says what it takes
)
OF_TORCH = {  # fields of `Torch`, in its order
    "grad_mode": "aoti_torch_grad_mode_is_enabled", "dim": "aoti_torch_get_dim", "sizes": "aoti_torch_get_sizes",
    "strides": "aoti_torch_get_strides", "dtype": "aoti_torch_get_dtype", "device": "aoti_torch_get_device_index",
    "address": "aoti_torch_get_data_ptr", "empty": "aoti_torch_empty_strided",
    "drop": "aoti_torch_delete_tensor_object", "stream": "aoti_torch_get_current_cuda_stream",
    "settings": "_ZN2at13globalContextEv", "deterministic": "_ZNK2at7Context23deterministicAlgorithmsEv",
    "context": "cuCtxGetCurrent", "allocate": "_Znwm", "release": "_ZdlPv", "python": PYTHON,
}  # fmt: skip


class _Torch(ctypes.Structure):
    _fields_ = [*[(name, ctypes.c_void_p) for name in OF_TORCH], ("keys", ctypes.c_uint64)]


class _Layout(ctypes.Structure):
    _fields_ = [
        ("dim", ctypes.c_int64), ("sizes", ctypes.c_int64 * 4), ("strides", ctypes.c_int64 * 4),
        ("dtype", ctypes.c_int32), ("device", ctypes.c_int32),
    ]  # fmt: skip


class _Call(ctypes.Structure):
    _fields_ = [
        ("next", ctypes.c_void_p), ("list", ctypes.c_void_p), ("context", ctypes.c_void_p), ("given", _Layout * 6),
        ("made", _Layout * 4), ("device_type", ctypes.c_int32), ("deterministic", ctypes.c_int32),
    ]  # fmt: skip


class Calls:
    """The backwards of one plan that C makes. `shape` is that of the empty tensor by which C finds them, which must not
    outlive this."""

    def __init__(self) -> None:
        self._first = ctypes.c_void_p()
        self.shape, self._kept = (0, MARK, ctypes.addressof(self._first)), list[Any]()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._kept)

    def add(
        self, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], launches: Replayed, repeats: bool
    ) -> None:
        """One of dout, q, k, v, out and lse, which gave dq, dk, dv; the last of `made` is like the workspace."""
        functions = _functions()
        layouts = (_Layout * 6)(*map(_layout, given)), (_Layout * 4)(*map(_layout, made))
        kind = functions.of_device(given[0].device.type)
        call = _Call(None, launches.at, driver.context(), *layouts, kind, repeats)
        self._kept.append((call, launches))
        library.loaded().sartor_add(ctypes.addressof(self._first), ctypes.addressof(call))


class _Functions:
    """torch's, found by name."""

    def __init__(self) -> None:
        folder = Path(torch.__file__).parent / "lib"
        self.torch = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        cuda = folder / "libtorch_cuda.so"
        self.cuda = ctypes.CDLL(str(cuda)) if cuda.is_file() else None
        self.standard = ctypes.CDLL("libstdc++.so.6")
        self.dtypes = {getattr(torch, name): getattr(self.torch, f"aoti_torch_dtype_{name}")() for name in DTYPES}

    def of_device(self, kind: str) -> int:
        """torch's number of a kind of devices."""
        return int(getattr(self.torch, f"aoti_torch_device_type_{kind}")())

    def find(self, name: str) -> Any:
        """Raises AttributeError where nobody has it."""
        owners = {"cuCtxGetCurrent": driver.library(), "_Znwm": self.standard, "_ZdlPv": self.standard}
        owners["aoti_torch_get_current_cuda_stream"] = self.cuda
        return getattr(owners.get(name, self.torch), name)


@cache
def _functions() -> _Functions:
    return _Functions()


class Kernel:
    """replay.c's kernel of an operator's backward under a key of the dispatcher, until it is destroyed."""

    def __init__(self, operator: str, key: str, of_python: str) -> None:
        functions = _functions()
        addresses = [ctypes.cast(functions.find(name), ctypes.c_void_p).value for name in OF_TORCH.values()]
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, of_python)).raw_repr()
        library.loaded().sartor_torch(ctypes.byref(_Torch(*addresses, keys)))
        self._library, made = ctypes.c_void_p(), functions.torch
        failed = made.aoti_torch_library_init_impl(
            b"aten", key.encode(), __file__.encode(), ctypes.c_uint32(1), ctypes.byref(self._library)
        )
        kernel = ctypes.cast(library.loaded().sartor_backward, ctypes.c_void_p)
        if failed or made.aoti_torch_library_impl(self._library, operator.encode(), kernel):
            raise OSError(f"torch took no kernel of {operator}")

    def destroy(self) -> None:
        """Unregister."""
        _functions().torch.aoti_torch_delete_library_object(self._library)


def why_not() -> str:
    """Why backwards need Python, in a sentence, or an empty string."""
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
        return f"C makes the launches of a call; Python takes part in every backward: {why_not()}"
    return "C makes the launches of a call, and the backwards of calls that read q, k and v alone without Python"


def _layout(t: torch.Tensor) -> _Layout:
    wide, index = ctypes.c_int64 * 4, t.device.index
    strides = (1,) if t.dim() == 1 else t.stride()  # of a workspace that is one number, expanded
    dtype = _functions().dtypes[t.dtype]
    return _Layout(t.dim(), wide(*t.shape), wide(*strides), dtype, -1 if index is None else index)
