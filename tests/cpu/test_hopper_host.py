"""The host side of the Hopper forward, with a driver that launches nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sartor
from sartor import nvrtc, ops
from sartor.device import ARCHITECTURES, Device
from sartor.kernels.hopper_forward import HopperForward


@dataclass
class Driver:
    """What it was asked for: tensor maps (address and sizes), and the arguments of each launch."""

    maps: list[tuple[Any, ...]] = field(default_factory=list)
    launches: list[tuple[Any, ...]] = field(default_factory=list)


@pytest.fixture
def driver(monkeypatch):
    found = Driver()

    def tensor_map(address, dtype, sizes, strides, box, swizzle):
        found.maps.append((address, sizes, strides))
        return bytes(128)

    kernel = SimpleNamespace(launch=lambda grid, values: found.launches.append((grid, *values)))
    monkeypatch.setattr(nvrtc, "tensor_map", tensor_map)
    monkeypatch.setattr(nvrtc, "missing", lambda: "")
    monkeypatch.setattr(nvrtc, "Kernel", lambda *_: kernel)
    monkeypatch.setattr(HopperForward, "compile", lambda *_: None)
    monkeypatch.setattr(Device, "of", classmethod(lambda *_: ARCHITECTURES[90]))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(ops, "_PREPARED", {})
    return found


def inputs(dim, layout="bhsd"):
    shapes = ((2, 4, 70, dim), (2, 2, 90, dim), (2, 2, 90, dim))
    tensors = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    return [t if layout == "bhsd" else t.transpose(1, 2).contiguous() for t in tensors]


@pytest.mark.parametrize("causal", [False, True])
def test_a_layout_is_read_as_it_lies(driver, causal):
    """Heads outermost, as a layout or as a view: the same launch, and the output lies as the queries do."""
    q, k, v = inputs(64)
    out, lse = sartor.attention(q, k, v, layout="bhsd", causal=causal, return_lse=True)
    view = sartor.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)
    assert out.shape == q.shape
    assert out.stride() == q.stride() == view.transpose(1, 2).stride()
    assert lse.is_contiguous()
    first, second = driver.launches
    at_out = 6
    assert first[:at_out] == second[:at_out]
    assert [x for x in first[at_out + 2 :] if x] == [x for x in second[at_out + 2 :] if x] or causal  # its workspace
    of_first, of_second = driver.maps[:4], driver.maps[4:]
    assert of_first[:3] == of_second[:3]
    assert of_first[3][1:] == of_second[3][1:]  # of the outputs, which are two


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_maps_are_kept_by_address(driver, layout):
    """A second call on the same tensors makes none; another tensor makes its own, as an output does where it is new."""
    q, k, v = inputs(64, layout)
    outs = [sartor.attention(q, k, v, layout=layout) for _ in range(2)]
    assert [m[0] for m in driver.maps] == [t.data_ptr() for t in (q, k, v, *outs)]
    other = q.clone()
    outs.append(sartor.attention(other, k, v, layout=layout))
    assert [m[0] for m in driver.maps[5:]] == [other.data_ptr(), outs[-1].data_ptr()]
    assert len(driver.launches) == 3


def test_rows_are_padded_in_the_layout_they_have(driver):
    """Copies of 40 columns for 33, mapped with the strides that the copies have: autograd gets its own."""
    q, k, v = inputs(33)
    for gradient in (False, True):
        out = sartor.attention(q.requires_grad_(gradient), k, v, layout="bhsd")
        assert out.shape == q.shape
    strides = [strides for _, sizes, strides in driver.maps if sizes == (40, 70, 4, 2)]
    assert strides == [(80, 80 * 70, 80 * 70 * 4), (80 * 4, 80, 80 * 70 * 4)]


def test_float32_output(driver):
    q, k, v = inputs(64)
    out = sartor.attention(q, k, v, layout="bhsd", out_dtype=torch.float32)
    assert (out.shape, out.dtype) == (q.shape, torch.float32)


def test_old_maps_are_dropped(monkeypatch):
    monkeypatch.setattr(nvrtc, "tensor_map", lambda address, *rest: bytes([address, rest[-1]]))
    monkeypatch.setattr(nvrtc.TensorMaps, "MOST", 2)
    maps = nvrtc.TensorMaps("float16", (), (), ((), 128), ((), 32))
    assert [maps[a] for a in (1, 2, 3)] == [bytes([a, 128, a, 32]) for a in (1, 2, 3)]
    assert list(maps) == [3]
