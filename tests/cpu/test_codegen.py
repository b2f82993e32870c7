"""What Triton kernels are told of a mask."""

from __future__ import annotations

import pytest
import torch

from sartor import mods
from sartor.problem import Call, Problem

codegen = pytest.importorskip("sartor.kernels.triton.codegen")


def program(**options):
    q = torch.empty((1, 64, 2, 64), dtype=torch.bfloat16, device="meta")
    return Problem.of(Call(q, q, q, **options)).program


def ids():
    return torch.zeros(1, 64, dtype=torch.int32, device="meta")


def table(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("options", "uneven", "partial", "always"),
    [
        ({}, False, 0, 0), ({}, True, 1, 1), ({"softcap": 3.0}, False, 0, 0),
        ({"causal": True}, False, 1, 2), ({"mask": mods.prefix(3)}, False, 1, 2),
        ({"mask": mods.document(ids())}, False, 1, 1),
        ({"mask": table(64, 64, dtype=torch.bool)}, False, 2, 2),
        ({"mask": table(64, 64, dtype=torch.bool), "causal": True}, False, 2, 2),
    ],
)  # fmt: skip
def test_masking(options, uneven, partial, always):
    """A branch skips the mask in full tiles: not where no tile is ever full, nor, if asked, where it is arithmetic."""
    found = program(**options)
    assert codegen.masking(found, found.rows, uneven) == partial
    assert codegen.masking(found, found.cols, uneven, always=True) == always


def test_loads_are_not_masked():
    """Positions are valid ones, so loads can be as wide as their tensor's alignment allows."""
    text = codegen.source(program(bias=table(2, 64, 64), mask=mods.document(ids())))
    assert text.count("tl.load") > 2
    assert "mask=" not in text


def test_tile_bytes():
    assert codegen.tile_bytes(program(bias=table(2, 64, 64)), 64, 32) == 2 * 64 * 32
    assert codegen.tile_bytes(program(mask=table(64, 64, dtype=torch.bool)), 64, 32) == 64 * 32
    assert codegen.tile_bytes(program(causal=True), 64, 32) == 0
