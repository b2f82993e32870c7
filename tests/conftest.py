"""Memory that the package asks for uninitialised comes full of NaN: whoever reads it before writing is found out."""

from __future__ import annotations

import sys

import pytest
import torch


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
