// Attention forward of float32 for Hopper (sm_90a), on pairs of float16 (parts/split.py): x = (hi + lo) * unit.
//
// Three products take the place of one, the small ones first (parts/products.py). The scores' go into one accumulator.
// P V starts from zero at every key tile, and an ordinary multiply-add, with the tile's unit, adds it to the output: the
// tensor core's own additions cut off bits, which a sum over all keys would show. The rest is as in hopper_forward.cuh.
//
// Tiles that pairs do not do are marked, to be computed again. Beside the measure of cuda/forward.cuh: DIM (a multiple of
// 16, as DIM_V is), WIDTH, WIDTH_V (columns a swizzled chunk), TURNS (warpgroups take turns at the tensor cores),
// HUGE_SCORE (log2). ROWS is 64, and BLOCK_N divides SEGMENT, the rows that share a unit.
#pragma once

using QTile = Pair<Staged<DIM, 64, WIDTH>>;
using KTile = Pair<Staged<DIM, BLOCK_N, WIDTH>>;
using VTile = Pair<Staged<DIM_V, BLOCK_N, WIDTH_V>>;
#include "cuda/forward.cuh"

constexpr int STEPS = DIM / 16;

struct Units {
  const float *q, *k, *v;  // (batch, heads, segments)
  int* marks;              // one for 64 queries of a head, its last ones first
  float noise;             // products.unresolved for units of 1, in what it allows
};

struct Consumer : Worker {
  const Units& units;
  const float factor, scale;
  using Weights = Online<BLOCK_N>;
  Weights softmax;
  float s[BLOCK_N / 2], share[DIM_V / 2], o[DIM_V / 2];  // scores, then weights; a tile's share of the output; output
  u32 hi[BLOCK_N / 4], lo[BLOCK_N / 4];                  // weights as A operands of P V
  float q_unit, v_unit, most;  // v_unit: of the tile that hi and lo belong to; most: the largest unit of keys so far

  DEVICE Consumer(const Tensors& t, const Units& units, const Shape& n, const Aux& x, float factor, float scale, u32 base,
                  int group)
      : Worker(t, n, x, base, group), units(units), factor(factor), scale(scale),
        softmax(SCORE || PRESCALE ? 1.f : scale) {}

  DEVICE void begin_q() {
    const int flat = (batch * n.heads_kv + head) * n.group + part.first_head, segments = ceil_div(n.seqlen_q, SEGMENT);
    const int own = imin(part.first_query / SEGMENT, segments - 1);  // a slice may begin past the last query
    q_unit = global_load(units.q + flat * segments + own);
    most = 0.f;
    rings.q.await_full();
  }
  DEVICE void end_q() { release(rings.q.empty()), rings.q.next(); }
  DEVICE int segment() const {
    return (batch * n.heads_kv + head) * ceil_div(n.seqlen_kv, SEGMENT) + j / (SEGMENT / BLOCK_N);
  }

  template <bool ZERO> DEVICE void multiply_qk(u32 queries, u32 keys) {
    UNROLL for (int k = 0; k < STEPS; k++) {
      const u64 a = descriptor<QTile>(queries + step_k<QTile>(k)), b = descriptor<KTile>(keys + step_k<KTile>(k));
      k || !ZERO ? Wgmma<BLOCK_N>::ss<false>(s, a, b) : Wgmma<BLOCK_N>::ss<true>(s, a, b);
    }
  }
  DEVICE void multiply_qk() {  // s = Q K^T
    const u32 queries = along_k(q_tile()), keys = along_k(base + AT_K) + rings.k.stage() * (KTile::bytes >> 4);
    multiply_qk<true>(queries, keys + (KTile::lo >> 4));
    multiply_qk<false>(queries + (QTile::lo >> 4), keys);
    multiply_qk<false>(queries, keys);
    wgmma_commit();
  }
  template <bool ZERO> DEVICE void multiply_pv(const u32* p, u32 values) {
    UNROLL for (int k = 0; k < BLOCK_N / 16; k++) {
      const u64 b = descriptor<VTile>(values + (k * 16 * VTile::row_bytes >> 4));
      k || !ZERO ? Wgmma<DIM_V>::rs<false, true>(share, p + 4 * k, b) : Wgmma<DIM_V>::rs<true, true>(share, p, b);
    }
  }
  DEVICE void multiply_pv() {  // share = P V
    const u32 values = across_k<VTile>(base + AT_V) + rings.v.stage() * (VTile::bytes >> 4);
    multiply_pv<true>(hi, values + (VTile::lo >> 4));
    multiply_pv<false>(lo, values);
    multiply_pv<false>(hi, values);
    wgmma_commit();
  }
  DEVICE void multiply_both() {  // this tile's scores, and the last tile's share of the output; waits for the scores
    rings.k.await_full();
    pin(share), pin(hi), pin(lo);
    if (TURNS) group_sync(8 + group, 256);
    wgmma_fence();
    multiply_qk();
    rings.v.await_full();
    wgmma_fence();
    multiply_pv();
    if (TURNS) group_arrive(8 + (group + 1) % GROUPS, 256);
    wgmma_wait<1>();
    pin(s);
    done_k();
  }
  DEVICE void promote() {  // waits for the last tile's share
    wgmma_wait<0>();
    pin(share);
    done_v();
    UNROLL for (int i = 0; i < DIM_V / 2; i++) o[i] = fmaf(share[i], v_unit, o[i]);
  }

  DEVICE float prepare_with(float k_unit) {  // returns what is left of the unit
    const float unit = larger(q_unit * k_unit, LEAST);
    most = larger(most, k_unit);
    prepare(s, scale * unit);
    return SCORE || PRESCALE ? 1.f : unit;
  }
  DEVICE void start(float k_unit) {  // the softmax of a query tile's first key tile
    const float unit = prepare_with(k_unit);
    softmax.start(s, unit);
    softmax.weigh(s, unit, factor);
  }
  DEVICE void pack() {
    UNROLL for (int i = 0; i < BLOCK_N / 4; i++) split(s[2 * i], s[2 * i + 1], hi[i], lo[i]);
  }
  DEVICE void clear() {
    UNROLL for (int i = 0; i < DIM_V / 2; i++) o[i] = 0.f;
  }

  DEVICE void step() {
    const float k_unit = global_load(units.k + segment()), next = global_load(units.v + segment());
    multiply_both();
    const float unit = prepare_with(k_unit);
    float shrink[2];
    const bool grew = softmax.raise(s, unit, factor, shrink);
    softmax.weigh(s, unit, factor);
    keep_here(softmax.sum[0] + softmax.sum[1], -factor);
    promote();
    if (grew) {
      UNROLL for (int i = 0; i < DIM_V / 2; i++) o[i] *= shrink[i / 2 % 2];
    }
    v_unit = next;
    pack();
  }

  // Whether pairs do not do for a row (products.unresolved, products.huge), whose maximum the softmax knows to `slack`
  DEVICE bool lost(const Finished& f) const {
    constexpr float slack = Weights::limit - Weights::margin;
    const float noise = q_unit * most * units.noise;
    bool any = false;
    UNROLL for (int r = 0; r < 2; r++) {
      const float score = fabsf(softmax.top[r] * factor);
      const bool row = score + slack > HUGE_SCORE || noise > fmaxf(score - slack, 1.f);
      any |= f.real[r] && softmax.top[r] > -MOST && row;
    }
    return any;
  }
  DEVICE void store(const Finished& f, bool lost) {
    float test[2] = {0.f, 0.f};  // stays 0 unless something is not finite
    UNROLL for (int i = 0; i < DIM_V / 2; i++) {
      const int r = i / 2 % 2;
      o[i] *= f.inverse[r];
      test[r] = fmaf(o[i], 0.f, test[r]);
    }
    UNROLL for (int r = 0; r < 2; r++) store_row(o, r, f), lost |= f.real[r] && test[r] != 0.f;
    lost = group_any(1 + group, lost);
    if ((threadIdx.x & 127) == 0 && f.real[0]) units.marks[f.mark[0]] = lost;
  }

  DEVICE void run() {
    if (TURNS && group == 0) group_arrive(8, 256);
    while (next_job()) {
      begin_q();
      const float k_unit = global_load(units.k + segment());
      v_unit = global_load(units.v + segment());
      rings.k.await_full();
      wgmma_fence();
      multiply_qk();
      wgmma_wait<0>();
      pin(s);
      done_k();
      start(k_unit), pack(), clear();
#pragma unroll 1
      for (j--; j >= begin; j--) step();
      end_q();
      rings.v.await_full();
      pin(share), pin(hi), pin(lo);
      wgmma_fence();
      multiply_pv();
      const Finished last = finish(softmax, factor);
      promote();
      store(last, lost(last));
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_fp32(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                const __grid_constant__ TensorMap v, const float* q_units, const float* k_units, const float* v_units,
                float* out, float* lse, const float* sinks, int* work, int* marks, i64 out_batch, i64 out_head, i64 out_row,
                int heads_kv, int group, int seqlen_q, int seqlen_kv, int tiles_head, int tiles, int section, float factor,
                float scale, float noise AUX_PARAMETERS) {
  extern __shared__ u8 memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const Tensors t{&q, &k, &v, out, out_batch, out_head, out_row, lse, sinks, work};
  const Units units{q_units, k_units, v_units, marks, noise};
  const Shape n{heads_kv, group, seqlen_q, seqlen_kv, tiles_head, tiles, section};
  const Aux x{AUX_VALUES};
  if (threadIdx.x == 0) Rings::init(base);
  __syncthreads();
  const int warpgroup = __shfl_sync(ALL, threadIdx.x >> 7, 0);
  if (warpgroup == 0) {
    registers_fewer<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) load(base, t, n);
    if (threadIdx.x >= 96) schedule(base, t, n, x);
  } else {
    registers_more<CONSUMER_REGISTERS>();
    Consumer(t, units, n, x, factor, scale, base, warpgroup - 1).run();
  }
}
