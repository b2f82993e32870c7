"""Memory that the package asks for uninitialised comes full of NaN: whoever reads it before writing is found out.
Triton's interpreter, where it runs, does not look for the same names at each call.
"""

from __future__ import annotations

import inspect
import os
import sys
from functools import cache

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    # At each call of a device function it lists what Triton's modules hold, a third of its time. Only a patch changes
    # what they hold, and a patch is of a name that was a built-in function before.
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def _built_in(package):
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def _patch_builtin(package, builder, scope):
        for name in _built_in(package):
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = _patch_builtin


def _poisoned(make):
    def call(*args, **kwargs):
        t = make(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("sartor"):
            t.fill_(float("nan") if t.is_floating_point() else t.dtype is torch.bool or 113)
        return t

    return call


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """H05: `torch.empty`, `empty_like` and `new_empty` give poison to `sartor`."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
