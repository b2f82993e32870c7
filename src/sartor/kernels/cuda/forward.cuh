// What the Hopper forwards share: the layout of shared memory, the tile scheduler, the loader (producer) and, of a
// consumer warpgroup, its work tile, ping-pong, the mask and the stores of the epilogue. The mainloops are the kernels'
// own.
//
// The kernel that includes this has defined its tiles, QTile, KTile and VTile; LEAVES, whether a warpgroup passes over
// the key tiles before those that it sees; and its config in macros:
//
//   BLOCK_N         keys a tile
//   GROUPS          consumer warpgroups
//   STAGES_K, STAGES_V, Q_BUFFERS   tiles that there is room for
//   ROWS            queries of a head in a slice of 64 rows
//   DIM_V, COLUMNS  columns of the output, and how many of these are in memory
//   BF16, WIDE      inputs are bfloat16; the output is float32
//   MASK            0 none, 1 an interval a row, 2 any, 3 any, walked by its block list (kernels/blocks.py)
//   LOWER           an interval may begin after the first key
//   SCORE, PRESCALE, SINKS   as the Triton kernels have them (triton/groups.py)
//   RAGGED          the last key tile is not full
//   BALANCED        query tiles are claimed from a counter, the longest first; otherwise every gridDim.x-th is a block's
//   LATE_ROUNDS     of all blocks, the last ones: in them a query tile is claimed as late as can be
//   LAST_WAVE           the last wave of query tiles is split among more blocks: see `share`
//   SPLIT           KV splits: a block sees some of the keys, and merge.cuh merges the results
//   PING_PONG       one warpgroup multiplies while another one computes its softmax
//   NEAR_STAGES     tiles of near values that there is room for where a warp of the producer brings them; 0 where warps do
//   MAPPED          defined where the copy engine does, by maps
//   FILLED          defined with SPLIT where a mask reads tensors: splits share what is seen, as a cache may be filled in part
//   SECTIONED       defined where the query tiles of several heads are next to each other, and
//   BATCH_FIRST     where those of batch items follow each other: see `locate`
//   DROPOUT         defined where there is some
#pragma once
#include "cuda/dropout.cuh"
#include "cuda/expressions.cuh"
#include "cuda/near.cuh"
#include "cuda/wgmma.cuh"

#ifndef FILLED
#define FILLED 0
#endif
#ifndef MAPPED
#define MAPPED 0
#endif
#ifndef BATCH_FIRST
#define BATCH_FIRST 0
#endif
#ifndef SECTIONED
#define SECTIONED 0
#endif
constexpr int THREADS = 128 * (GROUPS + 1 + DROPOUT);  // the producer's first, those of drawers last
constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : FILLED ? 56 : 40;  // beside one consumer warpgroup there are more
enum : int { DRAWER_REGISTERS = DIM > 128 || DIM_V > 128 ? 40 : 56 };  // with fewer, two counters are not under way at once
constexpr int CONSUMER_REGISTERS = GROUPS == 3 ? 160 : GROUPS == 2 && DROPOUT ? 236 - DRAWER_REGISTERS / 2 : 232;
static_assert(GROUPS < 3 || !DROPOUT);
constexpr bool LISTED = MASK == 3;  // then the key tiles [begin, end) of a work tile are entries of a block list
constexpr bool SKIPS = GROUPS > 1 && !LISTED && (MASK || LAST_WAVE);  // whether warpgroups pass over key tiles that only others see
using Half = Half16<BF16>;
using Slice = SliceOf<ROWS>;
using Job = WorkTile<GROUPS, MASK == 2>;
constexpr int WORK_TILE_LANES = MASK == 2 ? 32 : 1;  // lanes of a warp that arrive for it at a work tile's barriers
// BRINGER: whether the producer brings near values. Enumerators, which no cubin holds: fingerprints of plans without near
// values stay
enum : int { BRINGER = NEAR_STAGES && NEAR_BYTES, NEAR_RING = BRINGER ? NEAR_STAGES : 0, NEAR_TILES = BRINGER ? NEAR_STAGES : 1 };
enum : int { BRINGERS = GROUPS > 1 ? 2 : 1 };  // warps
enum : int { DRAWN_RING = DROPOUT ? 2 : 0 };   // tiles of bits that say which weights stay
using Drawing = Drawn<BLOCK_N>;

// ---- layout of shared memory, as Config.laid_out has it: tiles, pairs of barriers (full, empty), work tiles, near
// values, bits that say which weights stay
constexpr int AT_K = Q_BUFFERS * GROUPS * QTile::bytes, AT_V = AT_K + STAGES_K * KTile::bytes;
constexpr int AT_BARRIERS = AT_V + STAGES_V * VTile::bytes;
enum : int { AT_NEAR_BARRIERS = AT_BARRIERS + 16 * (STAGES_K + STAGES_V + 3 + Q_BUFFERS * GROUPS) };  // 3: jobs and next
enum : int { AT_DRAWN_BARRIERS = AT_NEAR_BARRIERS + 16 * NEAR_RING * GROUPS };
constexpr int AT_JOBS = AT_DRAWN_BARRIERS + 16 * DRAWN_RING * GROUPS;
constexpr int AT_NEAR = NEAR_BYTES ? AT_JOBS + 2 * Job::bytes + 1023 & ~1023 : AT_JOBS + 2 * Job::bytes;  // NEAR_BYTES a consumer warp and stage, then STRIP_BYTES a warp
enum : int { AT_STRIPS = AT_NEAR + 4 * GROUPS * NEAR_TILES * NEAR_BYTES, AT_DRAWN = AT_STRIPS + 4 * GROUPS * STRIP_BYTES };
enum : int { AFTER_DRAWN = AT_DRAWN + DRAWN_RING * GROUPS * Drawing::BYTES };
static_assert(AT_K == OFFSET_K && AT_V == OFFSET_V && AT_BARRIERS == OFFSET_BARRIERS);
static_assert(AT_JOBS == OFFSET_JOBS && AT_NEAR == OFFSET_NEAR && SHARED_BYTES >= AFTER_DRAWN);

struct Rings {
  Ring<STAGES_K> k;
  Ring<STAGES_V> v;
  Ring<2> jobs;  // work tiles, free when the consumers have read them
  Ring<1> next;  // full when the loader has come to the key tile at which the scheduler may claim another work tile
  Ring<Q_BUFFERS> q;
  Ring<NEAR_RING> near;  // of near values, if the producer brings them
  Ring<DRAWN_RING> drawn;  // of bits that say which weights stay, which two drawers write for each group
  DEVICE Rings(u32 base, int group)
      : k(base + AT_BARRIERS), v(k.bars + 16 * STAGES_K), jobs(v.bars + 16 * STAGES_V),
        next(jobs.bars + 32), q(next.bars + 16 + 16 * Q_BUFFERS * group),
        near(base + AT_NEAR_BARRIERS + 16 * NEAR_RING * group), drawn(base + AT_DRAWN_BARRIERS + 16 * DRAWN_RING * group) {}

  static DEVICE void init(u32 base) {  // by one thread
    Rings rings(base, 0);
    rings.k.init(4 * GROUPS), rings.v.init(4 * GROUPS);
    rings.jobs.init(4 * WORK_TILE_LANES * GROUPS + BRINGER * BRINGERS + DROPOUT * 2 * GROUPS, WORK_TILE_LANES);
    rings.next.init(1);
    for (int g = 0; g < GROUPS; g++) Rings(base, g).q.init(4);
    if (BRINGER) for (int g = 0; g < GROUPS; g++) Rings(base, g).near.init(4, MAPPED ? 1 : 32);
    if (DROPOUT) for (int g = 0; g < GROUPS; g++) Rings(base, g).drawn.init(4, 2);
    barrier_publish();
  }
};

// ---- KV splits: with SPLIT there are n.splits of them, of n.width key tiles each; with FILLED they share what an item's
// last query sees of its first head, and the last one has the rest. A split counts as a batch item of its own: so do its
// query tiles, and its results, in float32.
DEVICE int batch_of(int item, const Shape& n) { return SPLIT ? item / n.splits : item; }
#if FILLED
DEVICE int nth_key(int split, int item, const Shape& n, const Aux& x) {  // where a split begins
  const int seen = imin(rows(batch_of(item, n), 0, n.seqlen_q - 1, x, n).hi, n.seqlen_kv);
  return imin(split * imax(ceil_div(seen, BLOCK_N * n.splits), 1) * BLOCK_N, n.seqlen_kv);
}
DEVICE int first_key(int item, const Shape& n, const Aux& x) { return nth_key(item % n.splits, item, n, x); }
DEVICE int end_of_keys(int item, const Shape& n, const Aux& x) {
  const int next = item % n.splits + 1;
  return next == n.splits ? n.seqlen_kv : nth_key(next, item, n, x);
}
#else
DEVICE int first_key(int item, const Shape& n, const Aux&) { return SPLIT ? item % n.splits * n.width * BLOCK_N : 0; }
DEVICE int end_of_keys(int item, const Shape& n, const Aux& x) {
  return SPLIT ? imin(first_key(item, n, x) + n.width * BLOCK_N, n.seqlen_kv) : n.seqlen_kv;
}
#endif

// In the place of its lse, from which a sum beside a highest score of -1e9 could not be had again
DEVICE void store_sum(float* lse, i64 place, float highest, float total) { lse[2 * place] = highest, lse[2 * place + 1] = total; }

// Slice `i` of a query tile; past the end where the tile has fewer. With BALANCED a head's first tile is the one that
// is not full, since its last one may take the longest.
DEVICE Slice slice_of(int tile, int i, const Shape& n) {
  const int index = tile * GROUPS + i, missing = BALANCED ? n.tiles_head * GROUPS - Slice::count(n) : 0;
  if (index < missing) return {n.seqlen_q, 0};
  return Slice::number(index - missing, n);
}

// ---- tile scheduler: one warp, which finds the next query tile and the key tiles that its rows see, and writes the
// work tile. `late`: the tile after it is claimed as late as the loader can wait for it. A block that claims long tiles
// ahead leaves others idle in the end.
DEVICE void describe(const Share& at, bool late, u32 slot, const Shape& n, const Aux& x) {
  const bool lead = (threadIdx.x & 31) == 0;
  int lo = MASK ? n.seqlen_kv : 0, hi = MASK ? 0 : n.seqlen_kv;
#pragma unroll 1
  for (int g = 0; g < GROUPS; g++) {
    Slice slice = slice_of(at.tile, at.first + g, n);
    if (LAST_WAVE && g >= imin(at.count, GROUPS - at.first)) slice.first_query = n.seqlen_q;  // past the end: another block's
    const bool all = !MASK && !(LAST_WAVE && slice.first_query >= n.seqlen_q);
    int full_lo = 0, full_hi = n.seqlen_kv, own_lo = MASK ? n.seqlen_kv : 0, own_hi = all ? n.seqlen_kv : 0;
#if MASK
#pragma unroll (MASK == 2 ? 1 : 2)  // two rows at once, of any mask, take more registers than the 32 it may have
    for (int r = 0; r < (slice.first_query < n.seqlen_q ? 2 : 0); r++) {  // rows past the end count as the last
      const int row = (threadIdx.x & 31) + 32 * r;
      const int head = imin(slice.head(row), n.group - 1), query = imin(slice.query(row), n.seqlen_q - 1);
      const Span s = rows(batch_of(at.batch, n), at.head * n.group + head, query, x, n);
      if (MASK == 2) {
        const bool whole = s.lo == s.full_lo && s.hi == s.full_hi;  // whether the row attends to all of it
        const u32 at_row = opaque(slot) + Job::interval(g, row);  // an address found anew: none is kept for each row
        shared_store_pair(at_row, make_uint2(whole ? imax(s.lo, 0) : -1, imin(s.hi, n.seqlen_kv)));
      }
      own_lo = imin(own_lo, s.lo), own_hi = imax(own_hi, s.hi);
      full_lo = imax(full_lo, s.full_lo), full_hi = imin(full_hi, s.full_hi);
    }
    full_lo = warp_max(full_lo), full_hi = warp_min(full_hi), own_lo = warp_min(own_lo), own_hi = warp_max(own_hi);
    lo = imin(lo, own_lo), hi = imax(hi, own_hi);
#endif
    if (lead) {
      shared_store(slot + Job::first_query(g), slice.first_query), shared_store(slot + Job::first_head(g), slice.first_head);
      shared_store(slot + Job::full_begin(g), ceil_div(full_lo, BLOCK_N));
      shared_store(slot + Job::full_end(g), imax(full_hi, 0) / BLOCK_N);
      shared_store(slot + Job::own_begin(g), imax(own_lo, 0) / BLOCK_N);
      shared_store(slot + Job::own_end(g), ceil_div(own_hi, BLOCK_N));
    }
  }
  const int first = first_key(at.batch, n, x);
  hi = imin(imax(hi, first), end_of_keys(at.batch, n, x)), lo = imin(imax(lo, first), hi);
  const int begin = lo / BLOCK_N, end = imax(ceil_div(hi, BLOCK_N), begin + 1);  // at least one, if all of it is masked
  if (lead) {
    shared_store(slot + Job::batch, at.batch), shared_store(slot + Job::head, at.head);
    shared_store(slot + Job::begin, begin), shared_store(slot + Job::end, end);
    shared_store(slot + Job::claim_at, late ? imin(begin + 2, end - 1) : end - 1);
  }
}

#if MASK == 3
constexpr int ALL_SEEN = -1;  // in place of the number of an entry's bits; below it nothing is
static_assert(BLOCK_N <= 128 && GROUPS <= 3 && ROWS == 64 && NEAR_BYTES == 0);

DEVICE void describe_listed(const Share& at, bool late, u32 slot, const Params& t, const Shape& n) {
  const int* starts = t.starts + (at.batch * t.plane_batch + at.head * t.plane_head) * n.tiles_head + at.tile;
  const int begin = starts[0], end = starts[1];
  if (threadIdx.x & 31) return;
  UNROLL for (int g = 0; g < GROUPS; g++) {
    const Slice slice = slice_of(at.tile, g, n);
    shared_store(slot + Job::first_query(g), slice.first_query), shared_store(slot + Job::first_head(g), slice.first_head);
    shared_store(slot + Job::bits(g), t.entries[end - 1].bits[g]);
  }
  shared_store(slot + Job::batch, at.batch), shared_store(slot + Job::head, at.head);
  shared_store(slot + Job::begin, begin), shared_store(slot + Job::end, end);
  shared_store(slot + Job::claim_at, late ? imin(begin + 2, end - 1) : end - 1);
}
#endif

struct NoPrefetch { DEVICE void operator()(const Place&) const {} };
template <class Prefetch = NoPrefetch> DEVICE void schedule(u32 base, const Params& t, const Shape& n, const Aux& x, Prefetch prefetch = {}) {
  Rings rings(base, 0);
  const int lane = threadIdx.x & 31;
  const bool lead = lane == 0;
  int number = blockIdx.x;
#pragma unroll 1
  for (bool first = true;; first = false) {
    if (!first) rings.next.await_full(), rings.next.next();
    rings.jobs.await_empty();
    int next = number;  // where tiles differ, from a counter. The grid's size is read anew, which saves a register
    if (!first) next = (BALANCED ? lead ? atomicAdd(t.work, 1) : 0 : number) + opaque(gridDim.x);
    number = __shfl_sync(ALL, next, 0);
    if (number >= n.tiles) break;
    Share at = share<GROUPS, BALANCED, LAST_WAVE, SECTIONED, BATCH_FIRST>(SPLIT ? number / n.splits : number, n);
    if (SPLIT) at.batch = at.batch * n.splits + number % n.splits;
    const bool late = BALANCED && number + LATE_ROUNDS * int(opaque(gridDim.x)) >= n.tiles;
#if MASK == 3
    describe_listed(at, late, base + AT_JOBS + rings.jobs.stage() * Job::bytes, t, n);
#else
    describe(at, late, base + AT_JOBS + rings.jobs.stage() * Job::bytes, n, x);
#endif
    __syncwarp();
    if (lane < WORK_TILE_LANES) barrier_arrive(rings.jobs.full());
    prefetch(at);
    rings.jobs.next();
  }
  if (lead) shared_store(base + AT_JOBS + rings.jobs.stage() * Job::bytes, -1);
  __syncwarp();
  if (lane < WORK_TILE_LANES) barrier_arrive(rings.jobs.full());
  if (BALANCED && lead && atomicAdd(t.work + 1, 1) == int(gridDim.x) - 1) t.work[0] = t.work[1] = 0;  // for the next launch
}

template <class Params> DEVICE int key_tile(const Params& t, int j) {  // of a work tile's j-th
  if constexpr (LISTED) return t.entries[j].tile;
  else return j;
}

// ---- loader: one thread of the producer warpgroup, which starts TMA loads as stages come free. QUERIES: of queries
// too; LATE: values come after the next tile's keys, which are needed first and whose stage may be free sooner; `await`
// returns when a tile's keys and values are in memory.
template <bool QUERIES, bool LATE, class Params, class Await>
DEVICE void load(u32 base, const Params& t, const Shape& n, Await await) {
  Rings rings(base, 0);
  auto load_values = [&](int entry, int head, int batch) {
    const int j = key_tile(t, entry);
    rings.v.await_empty();
    VTile::load(base + AT_V + rings.v.stage() * VTile::bytes, address(t.v_map), rings.v.full(), EVICT_LAST, j * BLOCK_N, head, batch);
    rings.v.next();
  };
#pragma unroll 1
  while (true) {
    rings.jobs.await_full();
    const u32 slot = base + AT_JOBS + rings.jobs.stage() * Job::bytes;
    const int item = shared_load(slot + Job::batch), head = shared_load(slot + Job::head), batch = batch_of(item, n);
    const int begin = shared_load(slot + Job::begin), last = shared_load(slot + Job::end) - 1;
    const int claim_at = shared_load(slot + Job::claim_at);
    if (item < 0) return;
#pragma unroll 1
    for (int j = last, g = QUERIES ? 0 : GROUPS; j >= begin; j--) {
      const int tile = key_tile(t, j);
      rings.k.await_empty();
      await(rings.k.stage(), tile, head, batch);
      KTile::load(base + AT_K + rings.k.stage() * KTile::bytes, address(t.k_map), rings.k.full(), EVICT_LAST, tile * BLOCK_N, head, batch);
      rings.k.next();
      if (j == claim_at) barrier_arrive(rings.next.full());
#pragma unroll 1
      for (; g < GROUPS; g++) {  // queries come after the first keys, whose place is free sooner
        const u32 skip = 16 * Q_BUFFERS * g;  // the rings of all groups are at the same stage
        barrier_wait(rings.q.empty() + skip, rings.q.parity() ^ 1);
        const u32 to = base + (g * Q_BUFFERS + rings.q.stage()) * QTile::bytes;
        const int query = shared_load(slot + Job::first_query(g)), first_head = shared_load(slot + Job::first_head(g));
        if constexpr (QUERIES)
          QTile::load(to, address(t.q_map), rings.q.full() + skip, EVICT_FIRST, query, head * n.group + first_head, batch);
      }
      if (!LATE || j < last) load_values(j + LATE, head, batch);
    }
    if (LATE) load_values(begin, head, batch);
    rings.jobs.next();
    rings.q.next();
  }
}

// ---- bringers: a warp or two of the producer warpgroup, which start copies of near values as their stages come free, for
// every other warpgroup 64 rows of every key tile of the work tile
template <class Params> DEVICE void bring_all(u32 base, int bringer, const Params& t, const Shape& n, const Aux& x) {
  Rings rings(base, 0);
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  while (true) {
    rings.jobs.await_full();
    const u32 slot = base + AT_JOBS + rings.jobs.stage() * Job::bytes;
    const int item = shared_load(slot + Job::batch), head = shared_load(slot + Job::head), batch = batch_of(item, n);
    const int begin = shared_load(slot + Job::begin), last = shared_load(slot + Job::end) - 1;
    if (item < 0) return;
    Slice slices[ceil_div(GROUPS, BRINGERS)];
    UNROLL for (int i = 0; i < ceil_div(GROUPS, BRINGERS); i++) {
      const int g = imin(BRINGERS * i + bringer, GROUPS - 1);
      slices[i] = {shared_load(slot + Job::first_query(g)), shared_load(slot + Job::first_head(g))};
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(rings.jobs.empty());
    rings.jobs.next();
#pragma unroll 1
    for (int j = last; j >= begin; j--) {
      UNROLL for (int i = 0; i < ceil_div(GROUPS, BRINGERS); i++) {
        const int g = BRINGERS * i + bringer;
        if (g >= GROUPS) break;
        const u32 skip = 16 * NEAR_RING * g;  // the rings of all groups are at the same stage
        barrier_wait(rings.near.empty() + skip, rings.near.parity() ^ 1);
#if MAPPED
        if (lane == 0) {
          const u32 to = base + AT_NEAR + 4 * (GROUPS * rings.near.stage() + g) * NEAR_BYTES, bar = rings.near.full() + skip;
          barrier_expect(bar, 4 * NEAR_BYTES);
          UNROLL for (int w = 0; w < 4; w++)
            map_near(to + w * NEAR_BYTES, bar, batch, head * n.group + imin(slices[i].first_head, n.group - 1),
                     slices[i].first_query + 16 * w, j * BLOCK_N, t);
        }
#else
        auto of_head = [&](int r) { return head * n.group + imin(slices[i].head(r), n.group - 1); };
        auto of_query = [&](int r) { return slices[i].query(r); };
        const u32 to = base + AT_NEAR + 4 * (GROUPS * rings.near.stage() + g) * NEAR_BYTES;
        const bool even = ROWS == 64 && slices[i].first_query + 64 <= n.seqlen_q;
        load_near(to, even, batch, of_head, of_query, j * BLOCK_N, x, n);
        copies_arrive(rings.near.full() + skip);
#endif
      }
      rings.near.next();
    }
  }
}

// ---- drawers: a warpgroup that finds which weights stay, ahead of the consumers: each of its warps for half of the rows of
// a consumer warpgroup
#if DROPOUT
template <class Params> DEVICE void draw_all(u32 base, int group, int half, const Params& t, const Shape& n) {
  static_assert(ROWS == 64 && !LISTED, "a patch is of one head, and j a key tile");
  Rings rings(base, group);
  const int lane = threadIdx.x & 31;
  const u64 seed = read_seed(t.seed);
#pragma unroll 1
  while (true) {
    rings.jobs.await_full();
    const u32 slot = base + AT_JOBS + rings.jobs.stage() * Job::bytes;
    auto read = [&](int at) { return __shfl_sync(ALL, shared_load(slot + at), 0); };
    const int item = read(Job::batch), head = read(Job::head), begin = read(Job::begin), last = read(Job::end) - 1;
    const int first_query = read(Job::first_query(group)), first_head = read(Job::first_head(group));
    if (item < 0) return;
    __syncwarp();
    if (lane == 0) barrier_arrive(rings.jobs.empty());
    rings.jobs.next();
#pragma unroll 1
    for (int j = last; j >= begin; j--) {
      rings.drawn.await_empty();
      const u32 to = base + AT_DRAWN + (GROUPS * rings.drawn.stage() + group) * Drawing::BYTES;
      Drawing::draw(to, half, seed, t.steps, batch_of(item, n), head * n.group + first_head, first_query, j * (BLOCK_N / 16));
      __syncwarp();
      if (lane == 0) barrier_arrive(rings.drawn.full());
      rings.drawn.next();
    }
  }
}
#endif

// Bits of those of a thread's keys, two of every eight, that are from `key` on
DEVICE u32 from_column(int key) { return shift_left(~0u, imax(2 * (key >> 3) + imin(key & 7, 2), 0)); }

// ---- consumer warpgroup: its work tile, and what it does with scores and output
struct Worker {
  const Params& t;
  const Shape& n;
  const Aux& x;
  const u32 base;
  const int group, warp, lane, row;  // warp: of the group's four; row: the first of this thread's two in its slice
  Rings rings;
  int batch = -1, head, j, begin, full_begin, full_end;  // this query tile
  int skipped, below;  // of its key tiles, after and before those that this warpgroup sees
  Slice slice;
#if FILLED
  int split;  // of the keys
#endif
#if MASK == 3
  int at, next_at;  // of this entry of the list and the next: where its bits are, or whether all or nothing is seen
  u32 bits[2];      // this entry's, of this thread's rows
#if SCORE
  int tile, next_tile;  // of keys
#endif
#endif

  DEVICE Worker(const Params& t, const Shape& n, const Aux& x, u32 base, int group)
      : t(t), n(n), x(x), base(base), group(group), warp(threadIdx.x >> 5 & 3), lane(threadIdx.x & 31),
        row(warp * 16 + (lane >> 2)), rings(base, group) {}

  DEVICE void release(u32 bar) const { barrier_arrive_if(lane == 0, bar); }
  DEVICE void done_k() { release(rings.k.empty()), rings.k.next(); }
  DEVICE void done_v() { release(rings.v.empty()), rings.v.next(); }
  DEVICE void done_near() {
    if (!BRINGER) return;
    __syncwarp();  // all lanes have read theirs
    release(rings.near.empty()), rings.near.next();
  }

  DEVICE void done_drawn() {
    __syncwarp();  // all lanes have read theirs
    release(rings.drawn.empty()), rings.drawn.next();
  }

  DEVICE u32 job() const { return base + AT_JOBS + rings.jobs.stage() * Job::bytes; }
  DEVICE void done_job() {
    __syncwarp();
    if (lane < WORK_TILE_LANES) barrier_arrive(rings.jobs.empty());
    rings.jobs.next();
  }
  DEVICE bool next_job() {
    if (MASK == 2 && batch >= 0) done_job();  // the last tile's intervals are not read any more
    rings.jobs.await_full();
    const u32 slot = job();
    auto read = [&](int at) { return __shfl_sync(ALL, shared_load(slot + at), 0); };
    const int first = read(Job::batch);
    if (first < 0) return false;
    batch = batch_of(first, n), head = read(Job::head);
#if FILLED
    split = first % n.splits;
#endif
    slice = {read(Job::first_query(group)), read(Job::first_head(group))};
    begin = read(Job::begin), j = read(Job::end) - 1;
    skipped = SKIPS ? imin(j - begin, imax(j + 1 - read(Job::own_end(group)), 0)) : 0;
    below = SKIPS && LEAVES ? imin(j - skipped - begin, imax(read(Job::own_begin(group)) - begin, 0)) : 0;
    begin += below;
#if MASK == 3
    full_begin = full_end = begin;
    at = read(Job::bits(group));
#else
    full_begin = read(Job::full_begin(group)), full_end = read(Job::full_end(group));
#endif
    if (MASK != 2) done_job();
    return true;
  }

  // ---- ping-pong: warpgroups take turns at the tensor cores, one turn a key tile, used or not
  DEVICE void await_turn() const {
    if (PING_PONG) group_sync(8 + group, 256);
  }
  DEVICE void pass_turn() const {
    if (PING_PONG) group_arrive(8 + (group + 1) % GROUPS, 256);
  }
  DEVICE void pass_over() {
    await_turn(), pass_turn();
    pass_tile();
  }
  DEVICE void pass_tile() {
    rings.k.await_full(), done_k();
    rings.v.await_full(), done_v();
    if (BRINGER) rings.near.await_full(), done_near();
    if (DROPOUT) rings.drawn.await_full(), done_drawn();
  }
  DEVICE void skip() {
#pragma unroll 1
    for (; skipped; skipped--, j--) pass_over();
  }
  DEVICE void leave() {  // passes over the tiles `below`; the turn of the first one has been passed on
    pass_tile();
#pragma unroll 1
    for (below--; below; below--) pass_over();
  }

  DEVICE u32 q_tile() const { return base + (group * Q_BUFFERS + rings.q.stage()) * QTile::bytes; }

  // ---- near values: what masks and scores read for every pair, brought for the next key tile during this one
  DEVICE u32 near() const {
    return base + AT_NEAR + (4 * (BRINGER ? GROUPS * rings.near.stage() + group : group) + warp) * NEAR_BYTES;
  }
  DEVICE u32 strips() const { return base + AT_STRIPS + (4 * group + warp) * STRIP_BYTES; }
  DEVICE int query_head(int row) const { return head * n.group + imin(slice.head(row), n.group - 1); }
#if MASK == 3
  // This entry's bits, and where the next one's are, a step before they are asked for
  DEVICE void bring_near(int entry) {
    if (entry < begin) return;
    if (entry < j) at = next_at;
    if (at >= 0) load_pair(bits[0], bits[1], t.bits + i64(at) * 256 + 2 * (threadIdx.x & 127));
    if (entry > begin) next_at = load_one(t.entries[entry - 1].bits + group);
#if SCORE
    tile = entry < j ? next_tile : load_one(&t.entries[entry].tile);
    if (entry > begin) next_tile = load_one(&t.entries[entry - 1].tile);
#endif
  }
#else
  DEVICE void bring_near(int tile) const {
    if (NEAR_BYTES + STRIP_BYTES == 0 || tile < begin) return;
    if (!BRINGER && NEAR_BYTES) {
      const int own = warp * 16 + (lane >> 1);
      __syncwarp();
      bring(near(), batch, query_head(own), slice.query(own), tile * BLOCK_N, x, n);
    }
    if (STRIP_BYTES) {
      __syncwarp();
      bring_strips(strips(), batch, query_head(0), slice.first_query + 16 * warp, tile * BLOCK_N, x, n);
    }
  }
#endif
  DEVICE int keys() const {  // where this key tile is
#if MASK == 3 && SCORE
    return tile;
#else
    return j;
#endif
  }

  // ---- scores: the score function and the mask
  // Of row r and 128 keys from the tile's w-th on, -inf for those not `seen`; comparing each key would take twice as
  // long
  DEVICE static void hide(float (&s)[BLOCK_N / 2], int r, int w, u32 seen) {
    UNROLL for (int i = 0; i < imin(BLOCK_N - w, 128) / 4; i++) {
      float& x = s[w / 2 + i / 2 * 4 + 2 * r + i % 2];
      x = seen >> i & 1 ? x : -INF;
    }
  }

  // A mask that is no interval: bits of it, 2 * i + e for key 8 * i + e, from the bools of a tensor within limits, or by a
  // loop in few registers
#if MASK == 2
  DEVICE void look_at_every_key(float (&s)[BLOCK_N / 2], int first, const int (&heads)[2], const int (&query)[2]) const {
#ifdef SEEN_AT
    UNROLL for (int r = 0; r < 2; r++) {
      const Span span = seen_within(batch, heads[r], query[r], x, n);
      const int own = (lane >> 2) + 8 * r;
      UNROLL for (int w = 0; w < BLOCK_N; w += 128)
        hide(s, r, w, seen_bits<BLOCK_N>(near() + SEEN_AT, own, w) & from_column(span.lo - first - w) & ~from_column(span.hi - first - w));
    }
#else
    u64 kept[2] = {0, 0};
#pragma unroll 1
    for (int i = BLOCK_N / 8 - 1; i >= 0; i--)
      UNROLL for (int r = 0; r < 2; r++) {
        Near y[2];
        look(y, near(), strips(), (lane >> 2) + 8 * r, 8 * i + 2 * (lane & 3));
        UNROLL for (int e = 1; e >= 0; e--) {
          const int kv = first + 8 * i + e;
          kept[r] = kept[r] << 1 | (keep(batch, heads[r], query[r], kv, x, n, y[e]) & (kv < n.seqlen_kv));
        }
      }
    UNROLL for (int w = 0; w < BLOCK_N; w += 128)
      UNROLL for (int r = 0; r < 2; r++) hide(s, r, w, u32(kept[r] >> w / 4));
#endif
  }
#endif

  // Scores as the softmax takes them: scaled and changed by the score function, -inf where masked; and where this tile has a
  // mask, the ends of what this thread's rows see
  DEVICE int2 prepare(float (&s)[BLOCK_N / 2], float scale) const {
    apply_score(s, scale);
    return mask(s);
  }
  DEVICE bool masked() const { return (MASK || RAGGED) && (j >= full_end || (LOWER && j < full_begin)); }  // this key tile

  DEVICE void apply_score(float (&s)[BLOCK_N / 2], float scale) const {
    if (BRINGER) rings.near.await_full();
    else if (NEAR_BYTES) await_copies();
    if (NEAR_BYTES + STRIP_BYTES) __syncwarp();
#if SCORE
    const int first = keys() * BLOCK_N + 2 * (lane & 3);
    const int query[2] = {slice.query(row), slice.query(row + 8)};
    const int heads[2] = {query_head(row), query_head(row + 8)};
    auto change = [&](int i, const Near* y) {  // the scores of row i % 2 and of two neighbouring keys
      // The key's number is made anew for each pair: made for all at once, they would be held in registers
      const int r = i % 2, key = opaque(first) + i / 2 * 8;
      UNROLL for (int e = 0; e < 2; e++) {
        float& to = s[2 * i + e];
        to = score(to * scale, batch, heads[r], query[r], key + e, x, n, y[e]);
      }
    };
    if (NEAR_BYTES) {
      UNROLL for (int i = 0; i < BLOCK_N / 4; i += 4) {
        Near y[8];
        look(y, near(), strips(), 4 * i);
        UNROLL for (int c = 0; c < 4; c++) change(i + c, y + 2 * c);
      }
    } else {
      UNROLL for (int i = 0; i < BLOCK_N / 4; i++) {
        Near y[2];
        look(y, near(), strips(), (lane >> 2) + 8 * (i % 2), i / 2 * 8 + 2 * (lane & 3));
        change(i, y);
      }
    }
#elif PRESCALE
    UNROLL for (int i = 0; i < BLOCK_N / 2; i++) s[i] *= scale;
#endif
  }
#if MASK == 3
  DEVICE int2 mask(float (&s)[BLOCK_N / 2]) const {  // whether a row sees something, not where it ends
    if (at == ALL_SEEN) return make_int2(1, 1);
    UNROLL for (int r = 0; r < 2; r++) hide(s, r, 0, at < 0 ? 0u : bits[r]);
    return at < 0 ? make_int2(0, 0) : make_int2(bits[0], bits[1]);
  }
#else
  DEVICE int2 mask(float (&s)[BLOCK_N / 2]) const {
    if (!masked()) return make_int2(0, 0);
    const int first = j * BLOCK_N + 2 * (lane & 3);
#if MASK
    const int query[2] = {slice.query(row), slice.query(row + 8)};
    const int heads[2] = {query_head(row), query_head(row + 8)};
#endif
    int lo[2] = {0, 0}, hi[2] = {n.seqlen_kv, n.seqlen_kv};
#if MASK == 1
    UNROLL for (int r = 0; r < 2; r++) {
      const Span span = rows(batch, heads[r], query[r], x, n);
      lo[r] = span.lo, hi[r] = imin(span.hi, n.seqlen_kv);
    }
#elif MASK == 2
    UNROLL for (int r = 0; r < 2; r++) shared_load_pair(lo[r], hi[r], job() + Job::interval(group, row + 8 * r));
    if (imin(lo[0], lo[1]) < 0) {
      look_at_every_key(s, first, heads, query);
      return make_int2(hi[0], hi[1]);
    }
#endif
    UNROLL for (int w = 0; w < BLOCK_N; w += 128)
      UNROLL for (int r = 0; r < 2; r++)
        hide(s, r, w, (LOWER ? from_column(lo[r] - first - w) : ~0u) & ~from_column(hi[r] - first - w));
    return make_int2(hi[0], hi[1]);
  }
#endif
  // Whether there may be rows that see their first key here, by what `mask` says
  template <class Softmax> DEVICE bool late(const Softmax& softmax, const int2& seen) const {
    return LISTED ? softmax.late(seen.x, seen.y) : softmax.late(seen.x > j * BLOCK_N, seen.y > j * BLOCK_N);
  }

  // ---- epilogue: what is kept of a query tile once the next one has begun, and the stores
  struct Finished {
    float inverse[2], sink[2];
    i64 place, lse_place[2];
    int mark;  // the number of its slice: of 64 queries of a head, its last ones first
    bool real[2];
  };
  DEVICE Finished finished() const {
    Finished f;
#if FILLED
    const int item = batch * n.splits + split;
#else
    const int item = SPLIT ? batch * n.splits + begin / n.width : batch;
#endif
    UNROLL for (int r = 0; r < 2; r++) {
      const int query = slice.query(row + 8 * r), in_batch = head * n.group + slice.head(row + 8 * r);
      const int flat = item * n.heads_kv * n.group + in_batch;
      f.real[r] = slice.real(row + 8 * r, n);
      f.lse_place[r] = i64(flat) * n.seqlen_q + query;
      if (r == 0) {
        const int first = flat - slice.head(row) + slice.first_head;
        f.place = item * t.out_batch + in_batch * t.out_head + query * t.out_row;
        f.mark = (first + 1) * ceil_div(n.seqlen_q, 64) - 1 - slice.first_query / 64;
      }
      f.sink[r] = SINKS && f.real[r] ? t.sinks[in_batch] : -INF;
    }
    return f;
  }
  template <class Softmax> DEVICE void normalise(Finished& f, Softmax& softmax, float factor) const {
#if SPLIT
    float highest[2], total[2];
    softmax.finish_split(SCORE || PRESCALE ? 1.f : t.scale, f.inverse, highest, total);
    UNROLL for (int r = 0; r < 2; r++)
      if (f.real[r] && (lane & 3) == 0) store_sum(t.lse, f.lse_place[r], highest[r], total[r]);
#else
    float lse[2];
    softmax.finish(factor, f.sink, f.inverse, lse);
    UNROLL for (int r = 0; r < 2; r++)
      if (t.lse && f.real[r] && (lane & 3) == 0) t.lse[f.lse_place[r]] = lse[r];
#endif
#if DROPOUT
    UNROLL for (int r = 0; r < 2; r++) f.inverse[r] *= t.stay_scale;
#endif
  }

  // Elements from a thread's first row to its second one, eight rows on
  DEVICE i64 half_slice() const { return ROWS >= 16 ? 8 * t.out_row : 8 / ROWS * t.out_head; }
  DEVICE void store_row(const float (&o)[DIM_V / 2], int r, const Finished& f) const {
    const int quarter = lane & 3;
#if WIDE
    float* to = static_cast<float*>(t.out) + f.place + r * half_slice();
    UNROLL for (int i = 0; i < ceil_div(COLUMNS, 8); i++) {
      const int column = 8 * i + 2 * quarter;
      const float2 both = make_float2(o[4 * i + 2 * r], o[4 * i + 2 * r + 1]);
      if (COLUMNS % 2 == 0) {
        if (f.real[r] && column < COLUMNS) *reinterpret_cast<float2*>(to + column) = both;
      } else {
        if (f.real[r] && column < COLUMNS) to[column] = both.x;
        if (f.real[r] && column + 1 < COLUMNS) to[column + 1] = both.y;
      }
    }
#else
    constexpr int WHOLE = COLUMNS % 8 ? 0 : COLUMNS / 32;
    u16* to = static_cast<u16*>(t.out) + f.place + r * half_slice();
    UNROLL for (int i = 0; i < WHOLE; i++) {
      u32 a[4];
      UNROLL for (int b = 0; b < 4; b++) a[b] = Half::pack(o[16 * i + 4 * b + 2 * r], o[16 * i + 4 * b + 2 * r + 1]);
      transpose_words(a, quarter);
      if (f.real[r]) *reinterpret_cast<uint4*>(to + 32 * i + 8 * quarter) = make_uint4(a[0], a[1], a[2], a[3]);
    }
    UNROLL for (int i = 4 * WHOLE; i < ceil_div(COLUMNS, 8); i++) {
      const u32 both = Half::pack(o[4 * i + 2 * r], o[4 * i + 2 * r + 1]);
      const int column = 8 * i + 2 * quarter;
      if (COLUMNS % 8 == 0) {
        if (f.real[r]) *reinterpret_cast<u32*>(to + column) = both;
      } else {
        if (f.real[r] && column < COLUMNS) to[column] = u16(both);
        if (f.real[r] && column + 1 < COLUMNS) to[column + 1] = u16(both >> 16);
      }
    }
#endif
  }
};
