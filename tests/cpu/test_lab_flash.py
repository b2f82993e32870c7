"""The flash-attn libraries as providers, by modules that stand in for them."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import sartor
from sartor.lab.measure import flash, providers
from sartor.lab.measure.records import Record, Run
from sartor.lab.show import tables
from sartor.lab.workloads.workload import Inputs, Workload

NAMES = list(flash.LIBRARIES)
W = Workload(2, 4, 2, 24, 24, 16, 16, "bfloat16", "causal")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def calls(monkeypatch):
    """Stand-ins of all three: what they were given. Version 2 gives out alone, the others with lse."""
    found = []

    def stand_in(module, paired):
        def flash_attn_func(q, k, v, **given):
            found.append((module, tuple(q.shape), given))
            window = given["window_size"]
            left = None if window[0] in (None, -1) else window[0]
            out, lse = sartor.attention(
                q, k, v, causal=given["causal"], window=None if left is None else (left, 0),
                softcap=given["softcap"], alibi_slopes=given.get("alibi_slopes"), return_lse=True,
            )  # fmt: skip
            return (out, lse) if paired else out

        made = ModuleType(module)
        made.flash_attn_func = flash_attn_func
        monkeypatch.setitem(sys.modules, module, made)

    for library in flash.LIBRARIES.values():
        stand_in(library.module, library.module != "flash_attn")
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("mask", ["full", "causal", "window8", "softcap30"])
def test_it_is_called_for_what_the_workload_says(calls, name, mode, mask):
    w = replace(W, mode=mode, mask=mask)
    x = Inputs.make(w, CPU)
    assert providers.get(name).why_not(w, CUDA) == ""
    found = providers.runner(providers.get(name).make(w, x), w, x)()
    expected = providers.runner(providers.get("sartor").make(w, x), w, x)()
    for one, other in zip(*((t,) if mode == "fwd" else t for t in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)
    assert calls[0][:2] == (flash.LIBRARIES[name].module, (2, 24, 4, 16))


@pytest.mark.parametrize("name", NAMES)
def test_what_it_cannot_run_is_said(calls, name):
    why_not = providers.get(name).why_not
    assert why_not(W, CPU) == "needs an NVIDIA GPU"
    assert why_not(replace(W, dtype="float32"), CUDA) == "takes float16 and bfloat16, got float32"
    assert why_not(replace(W, mask="causal+document3"), CUDA) == "takes no such mask or bias"
    assert "bottom right" in why_not(replace(W, mask="causal_top_left", seqlen_kv=40), CUDA)
    assert why_not(replace(W, mask="causal+alibi"), CUDA) == ("" if name == "flash-attn" else "takes no ALiBi")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_installed_or_ours_is_not_measured(monkeypatch, name):
    library = flash.LIBRARIES[name]
    monkeypatch.setitem(sys.modules, library.module, None)
    assert providers.get(name).why_not(W, CUDA) == f"{library.package} is not installed"
    ours = ModuleType(library.module)
    ours.flash_attn_func = sartor.attention  # as `integrations.flash_attn.install` leaves behind
    monkeypatch.setitem(sys.modules, library.module, ours)
    assert providers.get(name).why_not(W, CUDA).endswith(flash.ABSENT)


def test_tables_have_no_column_for_what_is_not_installed():
    run = Run("r1", "paper", {"device": "h200", "torch": "2"})
    rows = [Record.of(run, name, W) for name in ("sartor", "fa3", "fa4")]
    rows[0].ms = rows[2].ms = 1.0
    rows[0].tflops = rows[2].tflops = 1.0
    rows[1].skipped = f"FlashAttention-3 {flash.ABSENT}"
    text = tables.speed(rows, "sdpa").markdown()
    assert "FlashAttention-4" in text
    assert "FlashAttention-3" not in text
