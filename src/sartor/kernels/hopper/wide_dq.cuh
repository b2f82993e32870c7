// dq = dS K for Hopper (sm_90a), from dS as wide_backward.cuh left it in memory: one product.
//
// A block has two tiles of 64 queries of a head, one for each consumer warpgroup, and its mainloop visits tiles of 64
// keys. Where a launch has some of the keys only, sums go from launch to launch in float32 (`carry`), as threads hold
// them.
//
// The config, in macros: DIM (a multiple of 16), COLUMNS (in memory), WIDTH (of a swizzled chunk), STAGES, MASK (0 none,
// 1 an interval a row), BF16.
#pragma once
#include "cuda/expressions.cuh"
#include "cuda/gradient.cuh"
#include "hopper/wide.cuh"

using Keys = Staged<DIM, 64, WIDTH>;
using Half = Half16<BF16>;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
constexpr int SECTION = 16;  // heads of which, under a mask, the longest blocks begin first: cuda/schedule.cuh
constexpr int STAGE_BYTES = 2 * DsTile::bytes + Keys::bytes, AT_BARRIERS = STAGES * STAGE_BYTES;
static_assert(AT_BARRIERS == OFFSET_BARRIERS && SHARED_BYTES == AT_BARRIERS + 16 * STAGES + 1024);

struct Rings {
  Ring<STAGES> tiles;
  DEVICE Rings(u32 base) : tiles(base + AT_BARRIERS) {}
  DEVICE void init() const {
    tiles.init(8);
    barrier_publish();
  }
};

// ---- what a block does: two query tiles of a head, and the key tiles that they see
struct TilePair {
  const Params& t;
  const Shape& n;
  const Aux& x;
  const Piece& piece;
  int batch, head, slot;  // slot: of the head, counted from the launch's first
  int one, other;         // tiles of queries; one past the end is none

  DEVICE int tile(int group) const { return group ? other : one; }
  struct KeyRange {
    int begin, end;
    DEVICE KeyRange with(const KeyRange& other) const {  // both, and what is between
      if (begin >= end) return other;
      return other.begin >= other.end ? *this : KeyRange{imin(begin, other.begin), imax(end, other.end)};
    }
  };
  DEVICE KeyRange keys(int group) const {  // tiles of those that a warpgroup multiplies
    const int first = 64 * tile(group), end = piece.first + piece.count;
    if (first >= n.seqlen_q) return {end, end};
#if MASK
    int lo = n.seqlen_kv, hi = 0;
    UNROLL for (int i = 0; i < 2; i++) {
      const Span span = rows(batch, head, imin(first + 32 * i + int(threadIdx.x & 31), n.seqlen_q - 1), x, n);
      lo = imin(lo, span.lo), hi = imax(hi, span.hi);
    }
    const int from = imax(imax(warp_min(lo), 0) / 64, piece.first);
    return {from, imax(imin(ceil_div(imin(imax(warp_max(hi), 0), n.seqlen_kv), 64), end), from)};
#else
    return {piece.first, end};
#endif
  }
};

// ---- producer: one warp, whose first thread starts copies of dS and TMA loads of keys
DEVICE void load(u32 base, const TilePair& pair) {
  const Params& t = pair.t;
  const int lane = threadIdx.x & 31, head = pair.head / pair.n.group;
  const Piece& piece = pair.piece;
  Ring<STAGES> ring = Rings(base).tiles;
  const TilePair::KeyRange a = pair.keys(0), b = pair.keys(1), all = a.with(b);
  int2 written = make_int2(0, 1 << 30);
#pragma unroll 1
  for (int j = all.begin; j < all.end; j++) {
    if (MASK && ((j - all.begin) & 31) == 0 && j + lane < all.end)
      written = reinterpret_cast<const int2*>(t.written)[i64(pair.slot) * piece.count + j + lane - piece.first];
    const int lo = MASK ? __shfl_sync(ALL, written.x, (j - all.begin) & 31) : 0;
    const int hi = MASK ? __shfl_sync(ALL, written.y, (j - all.begin) & 31) : 1 << 30;
    ring.await_empty();
    if (lane == 0) {
      const u32 to = base + ring.stage() * STAGE_BYTES, bar = ring.full();
      const bool first = j >= a.begin && j < a.end, second = j >= b.begin && j < b.end;
      barrier_expect_more(bar, (first + second) * DsTile::bytes);
      UNROLL for (int g = 0; g < 2; g++)
        if (g ? second : first) {
          const int i = pair.tile(g);
          const u8* from = i >= lo && i < hi ? t.ds + DsTile::bytes * piece.tile(pair.slot, j, i) : t.zeros;
          bulk_load(to + g * DsTile::bytes, from, DsTile::bytes, bar);
        }
      Keys::load(to + 2 * DsTile::bytes, &t.k, bar, EVICT_LAST, 64 * j, head, pair.batch);
    }
    ring.next();
  }
}

// ---- consumer warpgroup: sums from the launch before, mainloop, epilogue
DEVICE void multiply(u32 base, const TilePair& pair, int group) {
  const Params& t = pair.t;
  const int lane = threadIdx.x & 31, tile = pair.tile(group);
  float sum[DIM / 2];
  const i64 kept = i64(pair.slot) * pair.piece.queries + tile;
  float4* carry = reinterpret_cast<float4*>(t.carry) + kept * (16 * DIM) + (threadIdx.x & 127);
  const bool there = 64 * tile < pair.n.seqlen_q;
  const bool resumes = t.resumes && there;
  UNROLL for (int i = 0; i < DIM / 8; i++) {
    const float4 x = resumes ? carry[128 * i] : make_float4(0.f, 0.f, 0.f, 0.f);
    sum[4 * i] = x.x, sum[4 * i + 1] = x.y, sum[4 * i + 2] = x.z, sum[4 * i + 3] = x.w;
  }
  const TilePair::KeyRange own = pair.keys(group), all = own.with(pair.keys(1 - group));
  Ring<STAGES> ring = Rings(base).tiles, before = ring;
  const auto done = [&] {
    __syncwarp();
    if (lane == 0) barrier_arrive(before.empty());
    before.next();
  };
#pragma unroll 1
  for (int j = all.begin; j < imin(own.begin, all.end); j++) ring.await_full(), ring.next(), done();
  pin(sum);
#pragma unroll 1
  for (int j = own.begin; j < own.end; j++) {
    ring.await_full();
    const u32 at = base + ring.stage() * STAGE_BYTES;
    const u32 x = across_k<DsTile>(at + group * DsTile::bytes), y = across_k<Keys>(at + 2 * DsTile::bytes);
    wgmma_fence();
    UNROLL for (int k = 0; k < 4; k++)
      Wgmma<DIM>::ss<false, true, true>(sum, descriptor<DsTile>(x + (k * 16 * DsTile::row_bytes >> 4)),
                                        descriptor<Keys>(y + (k * 16 * Keys::row_bytes >> 4)));
    wgmma_commit();
    ring.next();
    if (j > own.begin) wgmma_wait<1>(), done();
  }
  wgmma_wait<0>();
  pin(sum);
  if (own.begin < own.end) done();
#pragma unroll 1
  for (int j = imax(own.end, all.begin); j < all.end; j++) ring.await_full(), ring.next(), done();
  if (!t.ends) {
    if (there)
      UNROLL for (int i = 0; i < DIM / 8; i++)
        carry[128 * i] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
    return;
  }
  group_sync(3, 256);  // both are done with all stages
  bool lost = leave_rows<Half, Keys, COLUMNS>(
      sum, base + group * STAGE_BYTES, t.dq, t.scale, 64 * tile, pair.head, pair.batch, pair.n.seqlen_q);
  if (lane == 0) await_stores_read();
  if (MASK) {
    lost = group_any(1 + group, lost);
    const int flat = pair.batch * pair.n.heads_kv * pair.n.group + pair.head, slices = pair.piece.queries;
    if (there && (threadIdx.x & 127) == 0) t.marks[flat * slices + slices - 1 - tile] = lost;
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) wide_dq(WIDE_DQ_PARAMETERS) {
  extern __shared__ u8 memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const Params t = PARAMS;
  const Shape n{heads_kv, group, seqlen_q, seqlen_kv, 0, 0, 0};
  const Aux aux{AUX_VALUES};
  const Piece piece = {first_head, first_tile, tiles, ceil_div(seqlen_q, 64), skew, seqlen_q / 64};
  const int pairs = ceil_div(piece.queries, 2), heads_q = heads_kv * n.group;
  const Place at = locate<MASK>(blockIdx.x, {1, 1, 0, 0, pairs, int(gridDim.x), SECTION});
  const int flat = first_head * n.group + at.batch;
  // folds: the first and the last tile and so on, which together have as many keys as others under a causal mask
  const int first = folds ? at.tile : 2 * at.tile, last = piece.queries - 1 - at.tile;
  const TilePair pair = {t, n, aux, piece, flat / heads_q, flat % heads_q, at.batch, first, folds ? (last > first ? last : piece.queries) : first + 1};
  if (threadIdx.x == 0) Rings(base).init();
  __syncthreads();
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);
  if (warp < 4) {
    registers_fewer<PRODUCER_REGISTERS>();
    if (warp == 0) load(base, pair);
  } else {
    registers_more<CONSUMER_REGISTERS>();
    multiply(base, pair, warp / 4 - 1);
  }
}
