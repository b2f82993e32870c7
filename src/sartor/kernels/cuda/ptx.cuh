// What C++ cannot say on an NVIDIA GPU, one instruction a function: barriers, registers, conversions, exp2.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr float MOST = 3.4028234663852886e38f, LEAST = 1.1754943508222875e-38f;  // of normal numbers
#define INF __int_as_float(0x7f800000)
constexpr u32 ALL = 0xffffffffu;  // every lane of a warp

DEVICE constexpr int imin(int a, int b) { return a < b ? a : b; }
DEVICE constexpr int imax(int a, int b) { return a > b ? a : b; }
DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

DEVICE u32 shared_address(const void* p) {
  u32 address;
  asm("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(address) : "l"(p));
  return address;
}

// ---- mbarriers: counted arrivals and bytes; a wait names the parity of the phase it waits for the end of
DEVICE void barrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}
DEVICE void barrier_publish() {  // initialised barriers become visible to the copy engine
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void barrier_arrive_if(bool mine, u32 bar) {  // no branch, which the compiler would make one of two of these
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p mbarrier.arrive.shared::cta.b64 _, [%1];}" ::"r"(u32(mine)), "r"(bar) : "memory");
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE; bra WAIT; DONE:}" ::"r"(bar), "r"(parity) : "memory");
}

// A ring of stages in shared memory, each with a `full` and an `empty` barrier, 16 bytes a pair. One register counts
// through the ring twice: it says which stage, and the parity of the barriers' phase.
template <int COUNT> struct Ring {
  u32 bars;
  int place = 0;
  DEVICE Ring(u32 at) : bars(at) {}
  DEVICE int stage() const { return place < COUNT ? place : place - COUNT; }
  DEVICE int parity() const { return place >= COUNT; }
  DEVICE u32 full() const { return bars + 16 * stage(); }
  DEVICE u32 empty() const { return bars + 16 * stage() + 8; }
  DEVICE void init(int readers, int writers = 1) const {
    for (int i = 0; i < COUNT; i++) barrier_init(bars + 16 * i, writers), barrier_init(bars + 16 * i + 8, readers);
  }
  DEVICE void await_full() const { barrier_wait(full(), parity()); }
  DEVICE void await_empty() const { barrier_wait(empty(), parity() ^ 1); }
  DEVICE void next() { place = place == 2 * COUNT - 1 ? 0 : place + 1; }
};
template <> struct Ring<0> {  // none: nothing waits
  DEVICE Ring(u32) {}
  DEVICE int stage() const { return 0; }
  DEVICE int parity() const { return 0; }
  DEVICE u32 full() const { return 0; }
  DEVICE u32 empty() const { return 0; }
  DEVICE void init(int, int = 1) const {}
  DEVICE void await_full() const {}
  DEVICE void next() {}
};

// ---- named barriers, and a vote, of a warpgroup by default, in one instruction
DEVICE void group_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void group_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE bool group_any(int id, bool mine, int threads = 128) {
  u32 any = mine;
  asm volatile("{.reg .pred p, q; setp.ne.u32 p, %0, 0; bar.red.or.pred q, %1, %2, p; selp.u32 %0, 1, 0, q;}"
               : "+r"(any) : "r"(id), "r"(threads) : "memory");
  return __any_sync(ALL, any);  // tells the compiler that the answer is uniform
}

// ---- launches that overlap (programmatic dependent launch)
DEVICE void await_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void next_launch_may_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- registers
template <int N> DEVICE void registers_fewer() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void registers_more() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void pin(float (&x)[N]) {  // what an unfinished wgmma owns must not move across this
  UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> DEVICE void pin(u32 (&x)[N]) {
  UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}

template <class T> DEVICE T opaque(T x) {  // what is made of it is made anew each time, not kept in registers
  asm volatile("" : "+r"(x));
  return x;
}

DEVICE u32 shift_left(u32 x, u32 by) {  // 0 where C++ leaves it open, from 32 on
  asm("shl.b32 %0, %0, %1;" : "+r"(x) : "r"(by));
  return x;
}

// ---- global memory that no launch writes while this one reads it, asked for here and not where it is used
DEVICE int load_one(const int* from) {
  int x;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}
DEVICE void load_pair(u32& a, u32& b, const int* from) {
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(from));
}

// ---- shared memory
DEVICE void shared_store(u32 address, int x) { asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory"); }
DEVICE int shared_load(u32 address) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
DEVICE u32 shared_load_short(u32 address) {
  u16 x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
  return x;
}
template <class T> DEVICE void shared_load_pair(T& a, T& b, u32 address) {  // T: 32 bits
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(address) : "memory");
}
DEVICE void shared_store_pair(u32 address, uint2 x) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}
DEVICE void shared_store_four(u32 address, const float4& x) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
DEVICE void copy_16_bytes(u32 to, const void* from, int bytes) {  // `bytes` of them, then zeros; this thread's to wait for
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
DEVICE void copies_arrive(u32 bar) {  // this thread's, once they are done, as one arrival
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
DEVICE void copy_4_bytes(u32 to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
DEVICE void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEVICE float4 shared_load_four(u32 address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
  return x;
}
DEVICE void load_matrix(u32 (&x)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
DEVICE void load_matrix_across(u32 (&x)[4], u32 address) {  // each transposed
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}

DEVICE void store_matrix(u32 address, const u32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
DEVICE void store_matrix_across(u32 address, const u32 (&x)[4]) {  // each transposed
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// ---- global memory
DEVICE void global_prefetch(const void* p, u32 bytes) {  // to L2, from 16 bytes on
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

// ---- between blocks: a word whose bits say that what was written before they were set is there; and what makes threads'
// writes visible to the copy engine and to wgmma
DEVICE u64 global_acquire(const u64* p) {
  u64 x;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}
DEVICE void global_set(u64* p, u64 bits) {
  asm volatile("red.release.gpu.global.or.b64 [%0], %1;" ::"l"(p), "l"(bits) : "memory");
}
DEVICE void global_add_four(float* to, const float4& x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
DEVICE void global_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
DEVICE void shared_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void global_store(float* base, i64 at, float x) {  // if there is a base; a branch of C++ cost registers here
  asm volatile("{.reg .pred p; setp.ne.u64 p, %0, 0; @p st.global.f32 [%1], %2;}" ::"l"(base), "l"(base + at), "f"(x) : "memory");
}

// ---- arithmetic
DEVICE float power2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float reciprocal_normal(float x) {  // where neither x nor the result need be subnormal: a fifth of the instructions
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float logarithm2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float larger(float a, float b) {  // NaN where either is
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
DEVICE bool finite(float x) { return fabsf(x) < INF; }
DEVICE int warp_min(int x) {
  int y;
  asm volatile("redux.sync.min.s32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}
DEVICE int warp_max(int x) {
  int y;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

// ---- 16-bit floats: Half16<true> is bfloat16, Half16<false> float16
template <bool BF16> struct Half16 {
  static DEVICE u32 pack(float low, float high) {
    u32 x;
    if (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
  }
  static DEVICE u32 add_zero_times(u32 x, u32 y) {  // pairs: x stays 0 while y is finite
    u32 z;
    if (BF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(y), "r"(0), "r"(x));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(y), "r"(0), "r"(x));
    return z;
  }
  static DEVICE float widen(u16 x) {
    if (BF16) return __int_as_float(u32(x) << 16);
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
  }
};

// Two float32 as two pairs of float16: a = hi + lo, but for lo's rounding
DEVICE void split(float a, float b, u32& hi, u32& lo) {
  hi = Half16<false>::pack(a, b);
  lo = Half16<false>::pack(a - Half16<false>::widen(u16(hi)), b - Half16<false>::widen(u16(hi >> 16)));
}
