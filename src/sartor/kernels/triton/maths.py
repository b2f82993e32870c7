"""Small mathematics the kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """tanh to float32 accuracy: an odd polynomial near 0 (Cephes, tanhf), else through exp."""
    z = x * x
    near = -5.70498872745e-3 * z + 2.06390887954e-2
    near = near * z - 5.37397155531e-2
    near = near * z + 1.33314422036e-1
    near = (near * z - 3.33332819422e-1) * z * x + x
    big = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(big * (2.0 * 1.4426950408889634)) + 1.0)
    return tl.where(big < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def divide(a, b):
    """a / b in float32, rounded once: what `/` gives there may be two units in the last place off."""
    return tl.div_rn(tl.cast(a, tl.float32), tl.cast(b, tl.float32))


@triton.jit
def floor_divide(a, b):
    """a // b of float32."""
    return tl.floor(divide(a, b))


@triton.jit
def exp(x):
    """e to the power x."""
    return tl.exp(tl.cast(x, tl.float32))


@triton.jit
def exp2(x):
    """2 to the power x."""
    return tl.exp2(tl.cast(x, tl.float32))


@triton.jit
def log(x):
    """Natural logarithm."""
    return tl.log(tl.cast(x, tl.float32))


@triton.jit
def sqrt(x):
    """Square root, rounded once: masks compare distances."""
    return tl.sqrt_rn(tl.cast(x, tl.float32))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-tl.cast(x, tl.float32)))


@triton.jit
def truncate(x):
    """The integer next to x towards 0."""
    return tl.cast(x, tl.int32)


@triton.jit
def index(i, size, SIGNED: tl.constexpr):
    """A place in a dim of a table: a negative one counts from the end, one beyond it is moved to its edge."""
    if SIGNED:
        i = tl.where(i < 0, i + size, i)
        i = tl.maximum(i, 0)
    return tl.minimum(i, size - 1)


@triton.jit
def finite(x):
    """Whether each element is neither NaN nor infinite. (x - x == 0 would not do: a fused a*b - x is not 0.)"""
    return tl.abs(x) < float("inf")


@triton.jit
def power_of_two(top):
    """(up, down): the power of two that brings a float32 `top` >= 0 into [2^14, 2^15), and its inverse, as exact.

    Below 2^-112 it is 2^126, the largest whose inverse is a normal number.
    """
    exponent = tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 15)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return up, ((exponent - 14) << 23).to(tl.float32, bitcast=True)
