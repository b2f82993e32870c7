// What the generated text of masks and score functions is made of: Python's arithmetic in C++.
#pragma once
#include "cuda/ptx.cuh"
#include "cuda/schedule.cuh"

struct Span { int lo, hi, full_lo, full_hi; };  // keys of a row: within [lo, hi), all of [full_lo, full_hi)

// An end of a span as an int: one beyond every position stays so
DEVICE int narrow(i64 a) { return int(a < -(1 << 28) ? -(1 << 28) : a > 1 << 28 ? 1 << 28 : a); }

template <class A, class B> DEVICE auto maximum(A a, B b) { return a < b ? b : a; }
template <class A, class B> DEVICE auto minimum(A a, B b) { return b < a ? b : a; }
template <class A, class B> DEVICE auto where(bool c, A a, B b) { return c ? a : b; }
template <class A> DEVICE A absolute(A a) { return a < A(0) ? -a : a; }
template <class A, class B> DEVICE float divide(A a, B b) { return __fdiv_rn(float(a), float(b)); }
DEVICE float ratio(float a, float b) { return a * reciprocal(b); }  // for scores: two units in the last place, no branch
template <class A, class B> DEVICE float floor_divide(A a, B b) { return floorf(divide(a, b)); }  // of floats

DEVICE float square_root(float x) { return __fsqrt_rn(x); }
DEVICE float sigmoid(float x) { return __fdiv_rn(1.f, 1.f + expf(-x)); }
DEVICE int truncate(float x) { return int(x); }
// A place in a dim of a table: a negative one counts from the end, one beyond it is moved to its edge
DEVICE i64 place(i64 i, i64 size) {
  i = i < 0 ? i + size : i;
  return i < 0 ? 0 : i < size ? i : size - 1;
}

// tanh but near 0: 4e-7 off
DEVICE float tanh_far(float x) {
  return fmaf(-2.f, reciprocal_normal(power2(x * (2.f * LOG2_E)) + 1.f), 1.f);
}
// tanh to float32 accuracy: an odd polynomial near 0 (Cephes, tanhf)
DEVICE float tanh_exact(float x) {
  const float z = x * x;
  float near = fmaf(-5.70498872745e-3f, z, 2.06390887954e-2f);
  near = fmaf(near, z, -5.37397155531e-2f);
  near = fmaf(near, z, 1.33314422036e-1f);
  near = fmaf(fmaf(near, z, -3.33332819422e-1f) * z, x, x);
  return fabsf(x) < 0.625f ? near : tanh_far(x);
}
// for scores of 16-bit operands: 4e-7 off, and 2^-14 of itself
DEVICE float tanh_half(float x) { return fabsf(x) < 0.0078125f ? x : tanh_far(x); }
