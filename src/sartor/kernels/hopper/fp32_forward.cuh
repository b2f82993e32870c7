// Attention forward of float32 for Hopper (sm_90a), on hi/lo pairs of float16 (triton/split.py): x = (hi + lo) * unit.
//
// Three products take the place of one, the small ones first (triton/products.py). Those of Q K^T share an accumulator.
// P V starts from zero at every key tile, and an ordinary multiply-add, with the tile's unit, adds it to the output:
// tensor cores truncate what they add, which a sum over all keys would show. The rest is as in hopper/forward.cuh.
//
// Nothing is split in a launch before. A warp splits its own queries, which are copied during the end of the query tile
// before. Keys and values, which many blocks read, are split into global memory ahead of their use: by all warps before
// the first product, then by two warps of the producer warpgroup. Most of the time that this takes is hidden behind the
// products.
//
// Tiles for which pairs are not accurate enough are marked, to be computed again.
//
// Beside the config of cuda/forward.cuh: DIM (a multiple of 16, as DIM_V is), DIM_EXACT (columns of q and k in memory),
// WIDTH, WIDTH_V (columns a swizzled chunk), VECTOR (rows begin and end on 16 bytes), AHEAD (the next queries are copied
// beside the last product), HUGE_SCORE (log2). ROWS is 64.
#pragma once

using QTile = Pair<Staged<DIM, 64, WIDTH>>;
using KTile = Pair<Staged<DIM, BLOCK_N, WIDTH>>;
using VTile = Pair<Staged<DIM_V, BLOCK_N, WIDTH_V>>;
constexpr bool LEAVES = false;  // its loop ends where its block's last one does
#include "cuda/forward.cuh"
#include "cuda/softmax.cuh"
#include "cuda/split.cuh"

using SplitK = Splitter<DIM_EXACT, BLOCK_N, VECTOR, false>;
using SplitV = Splitter<COLUMNS, BLOCK_N, VECTOR, true>;
constexpr int STEPS = DIM / 16, WARPS = THREADS / 32;
// Registers of a thread: of the producer warpgroup, which splits, and of the others. At launch all have 168, or 128
// where there are four warpgroups
constexpr int WIDE_TILE = BLOCK_N + DIM_V, PARTED = GROUPS == 3 ? 512 : 504;
constexpr int OTHER_REGISTERS = GROUPS < 3 ? (WIDE_TILE > 128 ? 232 : 216) : WIDE_TILE > 64 ? 96 + (WIDE_TILE + 15) / 16 * 8 : 128;
constexpr int SPLITTER_REGISTERS = PARTED - (GROUPS == 3 ? 3 : 2) * OTHER_REGISTERS;
// After what cuda/forward.cuh has in shared memory: units of a stage's keys and values, and room for a team that
// splits. There is more, in the place of the tiles, before the first tile comes.
constexpr int AT_UNITS = AFTER_DRAWN, AT_ROOM = (AT_UNITS + 8 * STAGES_K + 15) & ~15;
constexpr int ROOM_BYTES = TEAM_BYTES + (SplitK::bytes > SplitV::bytes ? SplitK::bytes : SplitV::bytes);
static_assert(AT_UNITS == OFFSET_UNITS && AT_ROOM == OFFSET_ROOM && SHARED_BYTES >= AT_ROOM + ROOM_BYTES);
constexpr int ROOMS = AT_ROOM / ROOM_BYTES + 1, TEAMS = ROOMS < WARPS / 2 ? ROOMS : WARPS / 2;  // before the first tile

// ---- keys and values are split, a key tile of one of them at a time. Teams of two warps claim these items in the
// order in which they are needed: what somebody waits for is being worked on, whichever blocks have begun.
struct Keys {
  const Shape& n;
  Source k, v;
  u16 *k_pairs, *v_pairs;  // (batch, heads, seqlen_kv, 2 * pitch)
  u64* units;              // (batch, heads, key tiles), of k in the low word, of v in the high one; 0 until the pairs are there
  int* work;               // [-, -, next item, teams that are done]

  // Made anew each time: a warp that splits has as few as 32 registers
  DEVICE int tiles() const { return ceil_div(opaque(n.seqlen_kv), BLOCK_N); }
  DEVICE int items() const { return 2 * (opaque(n.tiles) / n.tiles_head) * tiles(); }
  DEVICE u64* unit(int batch, int head, int tile) const {
    return units + (i64(batch) * n.heads_kv + head) * tiles() + tile;
  }

  DEVICE void split_one(int item, const Team& team) const {
    const Shape order{n.heads_kv, 0, 0, 0, tiles(), items() / 2, n.section};
    Place at = locate<BALANCED>(item / 2, order);
    if (!BALANCED) at.tile = tiles() - 1 - at.tile;  // the last keys first, as they are read
    const i64 row = i64(at.tile) * BLOCK_N, to = (i64(at.batch) * n.heads_kv + at.head) * n.seqlen_kv + row;
    const int rows = imin(n.seqlen_kv - int(row), BLOCK_N);
    const Source& x = item % 2 ? v : k;
    const float* from = x.at + at.batch * x.batch + at.head * x.head + row * x.row;
    const float unit = item % 2 ? SplitV::run(team, from, x.row, rows, v_pairs + to * (2 * SplitV::PITCH))
                                : SplitK::run(team, from, x.row, rows, k_pairs + to * (2 * SplitK::PITCH));
    const u64 bits = u32(__float_as_int(unit));
    if (team.thread == 0) global_set(this->unit(at.batch, at.head, at.tile), item % 2 ? bits << 32 : bits);
  }
  // The next item that nobody has claimed, if that is before `limit`
  DEVICE int claim(int limit) const {
    return static_cast<volatile int*>(work)[2] < limit ? atomicAdd(work + 2, 1) : items();
  }
  DEVICE void split_some(int limit, const Team& team) const {
    const bool lead = team.thread == 0;
#pragma unroll 1
    while (true) {
      const int item = team.broadcast(lead ? claim(limit) : 0);
      if (item >= items()) break;
      split_one(item, team);
    }
    if (lead && atomicAdd(work + 3, 1) == int(gridDim.x) * (TEAMS + 1) - 1) work[2] = work[3] = 0;
  }

  // For the loader: waits for the pairs of a key tile, and puts their units in place
  DEVICE void await(u32 slot, int tile, int head, int batch) const {
    u64 both;
    do both = global_acquire(unit(batch, head, tile));
    while (u32(both) == 0 || u32(both >> 32) == 0);
    global_fence();
    shared_store(slot, int(both)), shared_store(slot + 4, int(both >> 32));
  }
};

// Prefetches the queries of the next tile to L2, where the mask is an interval: without a mask that was slower
DEVICE void prefetch_q(const Source& q, const Place& at, const Shape& n) {
#pragma unroll 1
  for (int i = threadIdx.x & 31; MASK == 1 && VECTOR && i < 64 * GROUPS; i += 32) {
    const Slice slice = slice_of(at.tile, i / 64, n);
    const int query = slice.query(i % 64);
    const float* from = q.at + at.batch * q.batch + (at.head * n.group + slice.first_head) * q.head + query * q.row;
    if (query < n.seqlen_q) global_prefetch(from, 4 * DIM_EXACT);
  }
}

// ---- consumer warpgroup
struct Consumer : Worker {
  const Source& q;
  const float factor, scale, noise;  // noise: products.unresolved for units of 1, in what it allows
  int* const marks;                  // one for 64 queries of a head, its last ones first
  using Weights = Online<BLOCK_N>;
  Weights softmax;
  float s[BLOCK_N / 2], share[DIM_V / 2], o[DIM_V / 2];  // scores, then weights; a tile's share of the output; output
  u32 hi[BLOCK_N / 4], lo[BLOCK_N / 4];                  // weights as A operands of P V
  float q_unit, k_unit, next, v_unit;  // of this warp's queries; of this tile's keys, and values; of those for hi and lo
  float most;                          // the largest unit of keys so far

  DEVICE Consumer(const Params& t, const Source& q, const Shape& n, const Aux& x, u32 base, int group)
      : Worker(t, n, x, base, group), q(q), factor(t.factor), scale(t.scale), noise(t.noise), marks(t.marks),
        softmax(SCORE || PRESCALE ? 1.f : scale) {}

  // ---- queries: a warp copies its 16 rows, four columns at a time, COPIES times a thread, to where their pairs will
  // be once the last ones are read no more, and splits them in place: a thread reads what it copied itself.
  static constexpr int FOURS = DIM / 4, COPIES = 16 * FOURS / 32, PER_CHUNK = 16 * QTile::row_bytes / 512;
  DEVICE u32 copied(int i, int lane) const {
    return q_tile() + warp * 16 * QTile::row_bytes + i / PER_CHUNK * QTile::chunk_bytes + i % PER_CHUNK * 512 + 16 * lane;
  }
  DEVICE void fetch_q() {
    const int lane = opaque(this->lane), first = slice.query(warp * 16), last = n.seqlen_q - 1;
    const float* from = q.at + batch * q.batch + (head * n.group + slice.first_head) * q.head;
    group_sync(1 + group, 128);
#pragma unroll 2
    for (int i = 0; i < COPIES; i++) {  // rows past the end are the last once more
      const int four = 32 * i + lane, column = four % FOURS * 4;
      copy_four<VECTOR>(copied(i, lane), from + imin(first + four / FOURS, last) * q.row + column, DIM_EXACT - column);
    }
  }
  DEVICE void begin_q() {
    const int lane = opaque(this->lane);
    float4 x[COPIES];
    float top = 0.f;
    await_copies();
    UNROLL for (int i = 0; i < COPIES; i++) x[i] = shared_load_four(copied(i, lane)), top = largest(top, x[i]);
    top = __int_as_float(warp_max(__float_as_int(top)));
    const float up = power_of_two(top).up;
    q_unit = unit_of(top), most = 0.f;
    __syncwarp();  // all have read
    UNROLL for (int i = 0; i < COPIES; i++) {
      const int four = 32 * i + lane, row = warp * 16 + four / FOURS, column = four % FOURS * 4, k = column / 16;
      const u32 to = q_tile() + QTile::chunk(k) + QTile::swizzled(row, k, column / 8 % 2) + column % 8 * 2;
      uint2 high, low;
      split(x[i], up, high, low);
      shared_store_pair(to, high), shared_store_pair(to + QTile::lo, low);
    }
    shared_fence();
    group_sync(1 + group, 128);
  }

  // ---- products
  template <bool ZERO> DEVICE void multiply_qk(u32 queries, u32 keys) {
    UNROLL for (int k = 0; k < STEPS; k++) {
      const u64 a = descriptor<QTile>(queries + step_k<QTile>(k)), b = descriptor<KTile>(keys + step_k<KTile>(k));
      k || !ZERO ? Wgmma<BLOCK_N>::ss<false>(s, a, b) : Wgmma<BLOCK_N>::ss<true>(s, a, b);
    }
  }
  DEVICE void multiply_qk() {  // s = Q K^T
    const u32 queries = opaque(along_k(q_tile()));
    const u32 keys = along_k(opaque(base) + AT_K) + rings.k.stage() * (KTile::bytes >> 4);
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
    const u32 values = across_k<VTile>(opaque(base) + AT_V) + rings.v.stage() * (VTile::bytes >> 4);
    multiply_pv<true>(hi, values + (VTile::lo >> 4));
    multiply_pv<false>(lo, values);
    multiply_pv<false>(hi, values);
    wgmma_commit();
  }
  DEVICE void await_k() {
    rings.k.await_full();
    const u32 slot = opaque(base) + AT_UNITS + 8 * rings.k.stage();
    // read by the lane that gives the stage back
    if (lane == 0) k_unit = __int_as_float(shared_load(slot)), next = __int_as_float(shared_load(slot + 4));
    k_unit = __shfl_sync(ALL, k_unit, 0), next = __shfl_sync(ALL, next, 0);
  }
  DEVICE void multiply_both() {  // this tile's scores, and the last tile's share of the output; waits for the scores
    await_k();
    pin(share), pin(hi), pin(lo);
    wgmma_fence();
    multiply_qk();
    rings.v.await_full();
    wgmma_fence();
    multiply_pv();
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

  // ---- mainloop
  DEVICE float prepare() {  // scores with the mask; returns the unit by which they are still to be multiplied
    const float unit = larger(q_unit * k_unit, LEAST);
    most = larger(most, k_unit);
    Worker::prepare(s, scale * unit);
    bring_near(j - 1);
    return SCORE || PRESCALE ? 1.f : unit;
  }
  DEVICE void start() {  // the softmax of a query tile's first key tile
    const float unit = prepare();
    softmax.start(s, unit);
    softmax.weigh(s, unit, factor);
    v_unit = next;
  }
  DEVICE void pack() {
    UNROLL for (int i = 0; i < BLOCK_N / 4; i++) split(s[2 * i], s[2 * i + 1], hi[i], lo[i]);
  }
  DEVICE void clear() {
    UNROLL for (int i = 0; i < DIM_V / 2; i++) o[i] = 0.f;
  }

  DEVICE void step() {
    multiply_both();
    const float unit = prepare();
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

  // ---- epilogue
  // Whether pairs do not resolve a row (products.unresolved, products.huge), whose maximum the softmax knows to `slack`
  DEVICE bool lost(const Finished& f) const {
    constexpr float slack = Weights::limit - Weights::margin;
    const float off = q_unit * most * noise;
    bool any = false;
    UNROLL for (int r = 0; r < 2; r++) {
      const float score = fabsf(softmax.top[r] * factor);
      const bool row = score + slack > HUGE_SCORE || off > fmaxf(score - slack, 1.f);
      any |= f.real[r] && (SCORE || softmax.top[r] > -MOST) && row;  // a bias of -MOST looks like no key
    }
    return any;
  }
  DEVICE void store(const Finished& f, bool lost) {
    float test[2] = {0.f, 0.f};  // stays 0 unless something is not finite
    UNROLL for (int i = 0; i < DIM_V / 2; i++) {
      const int r = i / 2 % 2;
      o[i] = fmaf(o[i], f.inverse[r], o[i] * softmax.rest[r]);
      test[r] = fmaf(o[i], 0.f, test[r]);
    }
    UNROLL for (int r = 0; r < 2; r++) store_row(o, r, f), lost |= f.real[r] && test[r] != 0.f;
    lost = group_any(1 + group, lost);
    if ((threadIdx.x & 127) == 0 && f.real[0]) marks[f.mark] = lost;
  }

  DEVICE bool begin_job() {
    if (!next_job()) return false;
    fetch_q();
    return true;
  }
  DEVICE void run() {
    bool more = AHEAD && begin_job();
    while (AHEAD ? more : begin_job()) {
      if (GROUPS < 3 && BLOCK_N <= 64) skip();  // three have no registers left for it
      bring_near(j);
      begin_q();
      await_k();
      wgmma_fence();
      multiply_qk();
      wgmma_wait<0>();
      pin(s);
      done_k();
      start(), pack(), clear();
#pragma unroll 1
      for (j--; j >= begin; j--) step();
      rings.v.await_full();
      pin(share), pin(hi), pin(lo);
      wgmma_fence();
      multiply_pv();
      Finished last = finished();
      normalise(last, softmax, factor);
      const bool unresolved = lost(last);
      if (AHEAD) more = begin_job();  // beside the last product
      promote();
      store(last, unresolved);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_fp32(HOPPER_FP32_PARAMETERS) {
  extern __shared__ __align__(1024) u8 memory[];
  // rounding changes nothing, but a base that the compiler knows costs it registers
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const Params t = PARAMS;
  const Shape n{heads_kv, group, seqlen_q, seqlen_kv, tiles_head, tiles, section};
  const Source queries{q, q_batch, q_head, q_row};
  const Keys keys{n, {k, k_batch, k_head, k_row}, {v, v_batch, v_head, v_row}, k_pairs, v_pairs, units, work};
  const Aux x{AUX_VALUES};
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);
  if (warp < 2 * TEAMS) {
    keys.split_some(first, Team(base + warp / 2 * ROOM_BYTES, 1 + warp / 2, warp & ~1));
    shared_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) Rings::init(base);
  __syncthreads();
  if (warp < 4) {
    registers_fewer<SPLITTER_REGISTERS>();
    if (threadIdx.x == 0)
      load<false, false>(base, t, n, [&](int stage, int tile, int head, int batch) {
        keys.await(base + AT_UNITS + 8 * stage, tile, head, batch);
      });
    if (warp == 1 || warp == 2) keys.split_some(keys.items(), Team(base + AT_ROOM, 8, 1));
    if (warp == 3) schedule(base, t, n, x, [&](const Place& at) { prefetch_q(queries, at, n); });
  } else {
    registers_more<OTHER_REGISTERS>();
    Consumer(t, queries, n, x, base, warp / 4 - 1).run();
  }
}
