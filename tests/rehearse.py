"""GPU tests on a machine without a GPU (`pytest -m gpu --rehearse tests/gpu`): each runs until it asks for a value.

Tensors on "cuda" are meta tensors that say they lie on cuda:0, of an H200 as `ARCHITECTURES` has it. CUDA C++ is
compiled, into the disk cache, and not launched; Triton's kernels are read by Triton, not compiled. Comparisons of
values pass. What else asks for a value ends the test, which was rehearsed; every other exception is an error of the
host.
"""

from __future__ import annotations

import linecache
import re
import sys
from contextlib import ExitStack, nullcontext, suppress
from functools import wraps
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch.utils._device import _device_constructors
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from sartor import device, nvrtc, testing
from sartor.device import ARCHITECTURES
from sartor.kernels.hopper.backward import HopperBackward
from sartor.kernels.hopper.forward import HopperForward
from sartor.kernels.triton import lower
from sartor.lab.measure import rehearsal
from sartor.lengths import launches, values

META, CUDA = torch.device("meta"), torch.device("cuda", 0)
NEGATED = re.compile(r"(?<!is )\bnot (?!in\b)")
LIKE = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
Tensor, Base = torch.Tensor, torch._C.TensorBase


class NoValue(pytest.skip.Exception):
    """A value was asked for, which only a launch gives. A test whose fixtures ask for one is skipped."""


def _no_value(*args, **kwargs):
    raise NoValue


def _is_cuda(t):
    return Base.device.__get__(t).type == "meta"


def _placed(x):
    """What stands for a device."""
    kind = x.partition(":")[0] if isinstance(x, str) else x.type if isinstance(x, torch.device) else ""
    return META if kind == "cuda" else x


def _constructor(make):
    @wraps(make)
    def call(*args, **kwargs):
        kwargs = {name: _placed(x) for name, x in kwargs.items() if name != "pin_memory"}
        if kwargs.get("device") is META:
            kwargs.pop("generator", None)
        return make(*args, **kwargs)

    return call


class Generator(torch._C.Generator):
    """Of a CPU: for meta tensors nothing is drawn."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


def _to(move):
    def call(t, *args, **kwargs):
        target = [_placed(x) for x in args], {name: _placed(x) for name, x in kwargs.items()}
        given = [x for x in (*target[0], *target[1].values()) if isinstance(x, str | torch.device)]
        if _is_cuda(t) and any(torch.device(x).type == "cpu" for x in given):
            raise NoValue
        return move(t, *target[0], **target[1])

    return call


def _passing(frame):
    """What a comparison in a test's `assert` should come out as; None elsewhere."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return NEGATED.search(line) is None if line.startswith("assert") else None


def _bool(of):
    def call(t):
        if not _is_cuda(t):
            return of(t)
        frame = sys._getframe(1)
        if "_pytest" in frame.f_code.co_filename:  # it compares the variables of two frames
            return False
        found = _passing(frame)
        return _no_value() if found is None else found

    return call


def _asked(ask):
    return lambda t, *args, **kwargs: _no_value() if _is_cuda(t) else ask(t, *args, **kwargs)


def _equal(a, b, *args, **kwargs):
    return a.shape == b.shape and _passing(sys._getframe(1)) is not False


def _measured(out, exact, *args, **kwargs):
    """For every comparison that raises by itself."""
    assert not isinstance(out, Tensor) or out.shape == exact.shape
    return testing.Errors(0.0, 0.0, ())


def _checked(found, q, k, v, *args, **kwargs):
    return {name: _measured(t, {"dq": q, "dk": k, "dv": v}.get(name, t)) for name, t in found.items()}


def _launched(kernel, grid, given, stream=None):
    if given.keys() != set(kernel.changing):
        raise TypeError(f"{kernel.name} takes {', '.join(kernel.changing)}, got {', '.join(given)}")


def _traced(step, arch, seen=set()):  # noqa: B006 - for as long as the process lasts
    """Triton reads the kernel's Python, where most of its errors are; machine code would take ten times as long."""
    source = lower.source_of(step.kernel, step.arguments)
    if source.hash() not in seen:
        lower.trace(source, step.tile, arch)
        seen.add(source.hash())
    return step.name


def patches():
    """Owner, name and value of what is changed while tests are rehearsed."""
    facts = {"is_available": True, "get_device_capability": (9, 0), "device_count": 1, "current_device": 0}
    for name, value in (facts | {"is_bf16_supported": True}).items():
        yield torch.cuda, name, lambda *args, value=value: value
    for name in ("synchronize", "set_sync_debug_mode", "reset_peak_memory_stats", "empty_cache", "_sleep"):
        yield torch.cuda, name, lambda *args: None
    for name in ("Stream", "CUDAGraph", "current_stream"):
        yield torch.cuda, name, MagicMock()
    for name in ("stream", "graph"):
        yield torch.cuda, name, lambda *args, **kwargs: nullcontext()
    for name in ("memory_allocated", "max_memory_allocated", "mem_get_info"):
        yield torch.cuda, name, _no_value
    yield torch, "compile", _no_value
    yield torch._C, "_cuda_getDevice", lambda: 0
    yield torch._C, "_cuda_getCurrentRawStream", lambda device: 0
    yield device, "_cuda", lambda index: ARCHITECTURES[90]
    yield torch, "Generator", Generator
    for make in _device_constructors():
        if getattr(torch, make.__name__, None) is make:
            yield torch, make.__name__, _constructor(make)
    for name in LIKE:
        yield torch, f"{name}_like", _constructor(getattr(torch, f"{name}_like"))
        if hasattr(Tensor, f"new_{name}"):
            yield Tensor, f"new_{name}", _constructor(getattr(Tensor, f"new_{name}"))
    yield Tensor, "device", property(lambda t: CUDA if _is_cuda(t) else Base.device.__get__(t))
    yield Tensor, "is_cuda", property(_is_cuda)
    yield Tensor, "is_meta", property(lambda t: False)
    yield Tensor, "to", _to(Tensor.to)
    yield Tensor, "normal_", lambda t, *args, **kwargs: t
    yield torch.UntypedStorage, "data_ptr", _no_value  # which tests tell storages apart by
    yield Tensor, "cuda", lambda t, *args, **kwargs: t.to(META)
    yield Tensor, "__bool__", _bool(Tensor.__bool__)
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__index__"):
        yield Tensor, name, _asked(getattr(Tensor, name))
    for name in ("equal", "allclose"):
        yield torch, name, _equal
    yield torch.testing, "assert_close", _measured
    for owner in (testing, testing.budgets):  # where tests find them, and where they find each other
        yield owner, "check", _measured
        yield owner, "measure", _measured
        yield owner, "check_all", _checked
        yield owner, "cosine", lambda *args: 1.0
    for runner in (JITFunction, Autotuner):  # of tests that launch by themselves
        yield runner, "run", _no_value
    yield launches, "launch", lambda *args: None
    yield values, "CHECKS", False
    yield rehearsal, "_of_triton", _traced


class Plugin:
    """Changes the process until pytest ends."""

    def __init__(self):
        self.changed, self.told = ExitStack(), False
        for owner, name, value in [*patches(), (values, "flag", self.flag), (values, "address", self.flag)]:
            self.changed.enter_context(patch.object(owner, name, value, create=True))
        self.changed.enter_context(rehearsal.rehearsed(ARCHITECTURES[90]))
        self.changed.enter_context(patch.object(nvrtc.Kernel, "launch", _launched))
        for kernel in (HopperForward, HopperBackward):  # what repeats a call loads machine code
            self.changed.enter_context(patch.object(kernel, "again", lambda *_: None))

    def flag(self, device):
        """Where a kernel would write what is wrong with lengths, which nobody is told of here."""
        self.told = True
        return 0

    def pytest_unconfigure(self):
        self.changed.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        self.told = False
        try:
            return (yield)
        except NoValue:
            pass
        except (NotImplementedError, RuntimeError) as error:  # PyTorch's own, of meta tensors
            if type(error) not in (NotImplementedError, RuntimeError) or "meta" not in str(error):
                raise
        except pytest.fail.Exception:  # an error that was expected did not come
            if not self.told:
                raise
        item.user_properties.append(("rehearsed", "until a value was asked for"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item):
        with suppress(NoValue):
            return (yield)

    def pytest_report_teststatus(self, report):
        if report.when == "call" and report.passed and "rehearsed" in dict(report.user_properties):
            return "rehearsed", "r", "REHEARSED"
        return None
