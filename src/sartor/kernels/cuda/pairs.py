"""Host side shared by the Hopper kernels that multiply pairs of float16: their maps, and what pairs may be off by."""

from __future__ import annotations

from sartor import nvrtc
from sartor.kernels.triton import launch
from sartor.problem import Problem

if launch.available():
    from sartor.kernels.triton import products, split


def noise(p: Problem) -> float:
    """What pairs may be off by in a score of rows of units 1, in what is allowed: products.unresolved."""
    return abs(p.softmax_scale) * launch.LOG2_E * products.NOISE.value * p.dim**0.5 / products.RESOLVED.value  # type: ignore[no-any-return]


def maps(shape: tuple[int, int, int], dim: int, rows: int, width: int) -> nvrtc.TensorMaps:
    """Maps of pairs, (b, h, s, 2 * pitch), as (columns, s, h, b, 2), for copies of `width` columns of so many rows.

    `shape` is that of the tensor they are of: batch, length, heads.
    """
    (batch, length, heads), row = shape, 4 * split.pitch(dim)
    sizes, strides = (row // 4, length, heads, batch, 2), (row, row * length, row * length * heads, row // 2)
    return nvrtc.TensorMaps("float16", sizes, strides, ((width, rows, 1, 1, 1), 2 * width))
