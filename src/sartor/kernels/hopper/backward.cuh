// Attention backward of float16 and bfloat16 for Hopper (sm_90a): one text, one kernel to three.
//
// A block holds rows of two operands, X and Y, each of its GROUPS warpgroups 64 of them, and steps over tiles of BLOCK rows
// of the other two, x and y. KEYS: it holds keys and values, steps over queries and dout, and computes dk (DX), dv (DY) or
// both. Otherwise it holds queries and dout, steps over keys and values, and computes dq (DX). Scores stand with the held
// rows along M, so that weights and score gradients are A operands as they are:
//
//     s = X x^T    w = exp2(s - lse)    dp = Y y^T (DX)    ds = w (dp - delta)    dy += w y (DY)    dx += ds x (DX)
//
// A thread has 64 rows of a gradient in registers: all columns of two up to head dim 128, of one up to 256. dv alone wants
// neither Y nor dp.
//
// Warpgroups share tiles and nothing else: while one makes weights, the others multiply (IN_TURNS: these wait until then).
//
// FUSED: KEYS computes dq too, which saves two products of seven. A warpgroup leaves its dS in shared memory,
// and multiplies those of the block with the held keys a tile later, so that the other one may be half a tile behind. Its
// part of a tile's dq, 64 queries by at most 64 columns, is added to float32 sums, by blocks in any order; `round_dq` makes
// 16 bits of them. Where registers are left they hold the first columns of keys and values too, as products wait for shared memory.
//
// The config, in macros: GROUPS, KEYS, DX, DY, FUSED, DIM (a multiple of 16), COLUMNS (of them in memory, and of gradients), WIDTH (of a
// swizzled chunk), BLOCK (a multiple of 16), STAGES, APART (whether y, of which only dp is made, has one stage, of its
// own), MASK, SHARED_SPANS, ORDERED, PERSISTENT, SECTIONED, HEAD_PARTS (cuda/backward.cuh; hopper/parts.cuh), SCORE (of
// scores: 0 no change, 1 one whose derivative is 1, 2 any), SEEN (hopper/seen.cuh: the mask reads a bool tensor; 2: and
// nothing else), ADDED (the score reads a tensor of 16 bits for every pair), DADDED (hopper/dbias.cuh: its gradient is 1
// stored, 2 added up), BURIES (hopper/buried.cuh), WHOLE_APART (whether tiles that are seen whole have a loop of their own),
// BF16; PREPROCESS (whether `preprocess` is in this text too) and for it WIDE (whether out has float32).
#pragma once
#include "cuda/dropout.cuh"
#include "cuda/gradient.cuh"
#include "cuda/wgmma.cuh"

#define DRAWN (DROPOUT && FUSED)  // whether warps that load also find which weights stay

using Held = Staged<DIM, 64, WIDTH>;
using Tile = Staged<DIM, BLOCK, WIDTH>;
using Half = Half16<BF16>;
constexpr bool RISES = SCORE == 2 && DX;  // whether there are derivatives of the score function to multiply with
constexpr int STEPS = DIM / 16, HELD = 1 + DX;  // HELD: tiles of a warpgroup
// Where blocks stay there are keys of two sets of rows, then values of one; else each warpgroup's keys, then its values
constexpr int KEYS_BYTES = GROUPS * Held::bytes, SETS = 1 + PERSISTENT, KEYS_APART = PERSISTENT ? Held::bytes : HELD * Held::bytes;
constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : DRAWN ? 40 : 24;
constexpr int CONSUMER_REGISTERS = GROUPS == 3 ? 160 : DRAWN ? 232 : 240;

// A warpgroup makes 64 queries by PART columns of a tile's dq. Up to head dim 64 these are all columns of half of its queries.
// Beyond, both warpgroups have the same queries, the second one columns from its chunk on. In eights of columns, it adds those
// from ADDS_FROM to ADDS_TO: the first one has made those before, and behind the last there are zeros. FEWER: floats of a warp, then
constexpr bool BY_ROWS = DIM <= 64;
constexpr int PART = BY_ROWS ? COLUMNS : WIDTH == 64 ? 64 : COLUMNS - WIDTH, WARP_PART = 16 * PART;
constexpr int ADDS_FROM = BY_ROWS ? 0 : (PART - WIDTH) / 8, ADDS_TO = BY_ROWS ? PART / 8 : (COLUMNS - WIDTH) / 8;
constexpr int FEWER = WARP_PART - 128 * (ADDS_TO - ADDS_FROM);
constexpr bool EARLY = DIM > 64;  // registers let dq be the first of a tile's last three products, not the second

// ---- shared memory, as Config.laid_out has it: held tiles, stepped tiles, dS of two tiles (FUSED), a tile of a 16-bit
// tensor (ADDED) and a tile of a bool one (SEEN), of each stage lse, delta and highest scores (BURIES) of its rows (KEYS)
// and bits (SEEN, DRAWN), intervals of the held rows (SHARED_SPANS), barriers, room to begin on 1024
using DsTile = Staged<64 * GROUPS, BLOCK, 64>;  // dS, queries by keys: a chunk a warpgroup
constexpr int AT_STAGES = (HELD + PERSISTENT) * KEYS_BYTES, STAGE_BYTES = (2 - APART) * Tile::bytes;
constexpr int AT_Y = AT_STAGES + STAGES * STAGE_BYTES;  // APART
constexpr int AT_DS = AT_Y + APART * Tile::bytes;
constexpr int AT_ADDED = AT_DS + FUSED * 2 * DsTile::bytes, AT_RAW = AT_ADDED + ADDED * DsTile::bytes;
constexpr int RAW_BYTES = (SEEN > 0) * BLOCK * 64 * GROUPS;
enum : int { PIECES = (SEEN > 0) * BLOCK / 32, PIECE_BYTES = 32 * 64 * GROUPS };  // of a tile's bools: 32 queries
enum : int { SLICE = 4, SLICE_BYTES = SLICE * 4 * 64 * GROUPS };  // rows of dS in float32, to add to a bias's gradient
constexpr int AT_SLICES = AT_RAW + RAW_BYTES, AT_ROWS = AT_SLICES + (DADDED == 2) * 4 * SLICE_BYTES;
constexpr int DELTA = 4 * BLOCK, HIGH = 8 * BLOCK, BITS = (8 + 4 * BURIES) * BLOCK;
constexpr int ROWS_BYTES = (KEYS ? (8 + 4 * BURIES + 16 * DRAWN) * BLOCK : 0) + RAW_BYTES / 8;
constexpr int SOON = 2;  // tiles: when so many are left to load, the next rows are claimed
constexpr int JOB_BYTES = PERSISTENT * 16 * (1 + ORDERED * (1 + GROUPS));
constexpr int AT_BARRIERS = AT_ROWS + STAGES * ROWS_BYTES + SETS * (SHARED_SPANS * 16 * 64 * GROUPS + JOB_BYTES);
#if SHARED_SPANS
constexpr int AT_SPANS = AT_ROWS + STAGES * ROWS_BYTES;
static_assert(AT_SPANS == OFFSET_SPANS);
#endif
#if PERSISTENT
constexpr int AT_JOBS = AT_ROWS + STAGES * ROWS_BYTES;  // which rows are held next, behind their intervals
constexpr int AT_JOBS_END = AT_BARRIERS + 16 * (6 + STAGES);  // of the barriers of `jobs`
#endif
static_assert(AT_STAGES == OFFSET_STAGES && AT_Y == OFFSET_Y && AT_DS == OFFSET_DS && AT_ROWS == OFFSET_ROWS);
static_assert(AT_ADDED == OFFSET_ADDED && AT_RAW == OFFSET_RAW && AT_SLICES == OFFSET_SLICES);
static_assert(!DADDED || (ADDED && !SEEN && !RISES));
static_assert((!SEEN || MASK == 2) && (!(SEEN || ADDED) || (FUSED && !PERSISTENT)));
static_assert(AT_BARRIERS == OFFSET_BARRIERS);
static_assert(SHARED_BYTES == AT_BARRIERS + 16 * (1 + STAGES + (FUSED ? 2 + (4 + GROUPS) * PERSISTENT : APART) + ADDED + PIECES) + 1024);

#if DRAWN
enum : int { DRAWERS = 4 - PERSISTENT };  // warps that draw: all that load but the one that claims rows
using Drawing = DrawnAcross<BLOCK>;
static_assert(Drawing::BYTES == 16 * BLOCK && GROUPS == 2 && KEYS && !SEEN);
#endif

struct Rings {
#if PERSISTENT
  Ring<2> held;    // keys
  Ring<1> values;  // of the first warpgroup; those of the others follow
#else
  u32 held;  // a barrier
#endif
  Ring<STAGES> tiles;
  Ring<2> ds;
#if APART
  Ring<1> y{ds.bars};  // in their place
#endif
#if ADDED
  Ring<1> added{ds.bars + 32};
#endif
#if SEEN
  Ring<PIECES> raw{ds.bars + 32 + 16 * ADDED};  // bytes of a bool tensor, of 32 queries each
#endif
  DEVICE Rings(u32 base)
      : held(base + AT_BARRIERS), tiles(base + AT_BARRIERS + 16 * SETS), ds(tiles.bars + 16 * STAGES)
#if PERSISTENT
        , values(base + AT_JOBS_END + 16)
#endif
  {}
#if PERSISTENT
  DEVICE u32 loaded() const { return ds.bars + 64; }  // when most tiles of a block's rows are on their way
#endif
  DEVICE void init() const {  // by one thread; a stage is full when its two tiles and what goes with its rows are there
#if PERSISTENT
    held.init(4 * GROUPS, GROUPS);
    for (int g = 0; g < GROUPS; g++) Ring<1>(values.bars + 16 * g).init(4);
    barrier_init(loaded(), 1);
    Ring<2>(ds.bars + 32).init(4 * GROUPS + 3);  // of jobs: three warps load
#else
    barrier_init(held, HELD * GROUPS);
#endif
    tiles.init(4 * GROUPS, 2 - APART + KEYS * (1 + DX) + (SEEN > 0) + DRAWN * (2 - PERSISTENT));
#if APART
    y.init(4 * GROUPS);
#endif
    if (FUSED) ds.init(4 * GROUPS + DADDED, 4 * GROUPS);
#if ADDED
    added.init(4 * GROUPS);
#endif
#if SEEN
    raw.init(1);
#endif
    barrier_publish();
  }
};

#include "cuda/backward.cuh"
#if SEEN
#include "hopper/seen.cuh"
#endif
#if DADDED
#include "hopper/dbias.cuh"
#endif
#if HEAD_PARTS
static_assert(FUSED && !PERSISTENT && !ORDERED && DADDED < 2);
// A thread's share of a warpgroup's sums, as it has them: threads side by side
DEVICE void store_sums(const float (&sum)[COLUMNS / 2], float* to) {
  UNROLL for (int i = 0; i < COLUMNS / 8; i++)
    *reinterpret_cast<float4*>(to + 512 * i) = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
}
#endif

#if DRAWN
// ---- drawers: the warps of the producer find which weights stay, each its share of a tile, as early as its stage is free
struct Drawer {
  u64 seed;
  DEVICE Drawer(const Task& task) : seed(read_seed(task.t.seed)) {}
  DEVICE void draw(u32 base, const Rings& rings, const Task& task, int g, int j, int warp) const {
    const u32 to = base + AT_ROWS + rings.tiles.stage() * ROWS_BYTES + BITS;
    Drawing::draw(to, warp, DRAWERS, seed, task.t.steps, task.batch, task.query_head(g), j * (BLOCK / 16), task.first / 16);
  }
};
#endif

// ---- producer: one warp loads tiles by TMA, others bring lse and delta
DEVICE void load(u32 base, Task task) {  // one warp; its first thread starts the loads
  const Params& t = task.t;
  const bool lead = (threadIdx.x & 31) == 0;
  Rings rings(base);
#if PERSISTENT
  const auto hold = [&, keys = rings.held, values = rings.values]() mutable {
    keys.await_empty();
    UNROLL for (int g = 0; g < GROUPS; g++)
      if (lead) Held::load(base + keys.stage() * KEYS_BYTES + g * Held::bytes, &t.held_x, keys.full(), EVICT_FIRST, task.first + 64 * g, task.head, task.batch);
    keys.next();
    UNROLL for (int g = 0; g < GROUPS; g++) {
      barrier_wait(values.empty() + 16 * g, values.parity() ^ 1);
      if (lead) Held::load(base + SETS * KEYS_BYTES + g * Held::bytes, &t.held_y, values.full() + 16 * g, EVICT_FIRST, task.first + 64 * g, task.head, task.batch);
    }
    values.next();
  };
#else
  const auto hold = [&] {
    if (lead) {
      for (int g = 0; g < GROUPS; g++) {
        const u32 to = base + HELD * g * Held::bytes;
        Held::load(to, &t.held_x, rings.held, EVICT_FIRST, task.first + 64 * g, task.head, task.batch);
        if (DX) Held::load(to + Held::bytes, &t.held_y, rings.held, EVICT_FIRST, task.first + 64 * g, task.head, task.batch);
      }
    }
  };
#endif
#if DRAWN
  const Drawer drawer(task);
#endif
  task.walk(hold, [&, rings](int g, int j) mutable {
#if PERSISTENT
    if (g < 0) {
      rings.tiles.await_empty();
      if (lead) UNROLL for (int i = 0; i < 2 + DRAWN; i++) barrier_arrive(rings.tiles.full());
      rings.tiles.next();
      return;
    }
#endif
    const int head = task.other(g);
#if SEEN
    UNROLL for (int i = 0; i < PIECES; i++) {
      rings.raw.await_empty();
      if (lead) {
        barrier_expect(rings.raw.full(), PIECE_BYTES);
        tma_load(base + AT_RAW + i * PIECE_BYTES, &t.seen, rings.raw.full(), EVICT_LAST, task.first, BLOCK * j + 32 * i,
                 head * t.seen_by_head, task.batch * t.seen_by_item);
      }
      rings.raw.next();
    }
#endif
    rings.tiles.await_empty();
    const u32 to = base + AT_STAGES + rings.tiles.stage() * STAGE_BYTES;
    if (lead) {
      Tile::load(to, &t.x, rings.tiles.full(), EVICT_LAST, BLOCK * j, head, task.batch);
      if (!APART) Tile::load(to + Tile::bytes, &t.y, rings.tiles.full(), EVICT_LAST, BLOCK * j, head, task.batch);
    }
#if DRAWN
    drawer.draw(base, rings, task, g, j, 0);
    __syncwarp();  // all lanes have written
    if (lead) barrier_arrive(rings.tiles.full());
#endif
    rings.tiles.next();
#if APART
    rings.y.await_empty();
    if (lead) Tile::load(base + AT_Y, &t.y, rings.y.full(), EVICT_LAST, BLOCK * j, head, task.batch);
    rings.y.next();
#endif
#if ADDED
    rings.added.await_empty();
    if (lead) {
      barrier_expect(rings.added.full(), DsTile::bytes);
      UNROLL for (int i = 0; i < GROUPS; i++)
        tma_load(base + AT_ADDED + i * DsTile::chunk_bytes, &t.added, rings.added.full(), EVICT_LAST, task.first + 64 * i,
                 BLOCK * j, head * t.by_head, task.batch * t.by_item);
    }
    rings.added.next();
#endif
  }
#if PERSISTENT
  , [&, loaded = rings.loaded()] { if (lead) barrier_arrive(loaded); }
#endif
  );
}

// A warp brings lse, delta or both of the queries of a tile. Of those past the end lse = +inf makes weights 0. With BURIES the
// one that brings lse also brings what weights are relative to
template <int FIRST, int LAST> DEVICE void bring_rows(u32 base, Task task, const float* lse, const float* delta) {
  constexpr int EACH = ceil_div(BLOCK, 32);
  const int lane = threadIdx.x & 31;
  Rings rings(base);
#if DROPOUT
  // delta is as gradients are, until they are stored; beside half of a weight twice
  const float by = (1 + DRAWN) / task.t.stay_scale;
#endif
#if DRAWN
  const Drawer drawer(task);
#endif
  task.walk(Nothing{}, [&, rings](int g, int j) mutable {
#if PERSISTENT
    if (g < 0) {
      rings.tiles.await_empty();
      if (lane < LAST - FIRST) barrier_arrive(rings.tiles.full());
      rings.tiles.next();
      return;
    }
#endif
    float x[LAST - FIRST][EACH];
#if BURIES
    float high[EACH];
#endif
    UNROLL for (int which = FIRST; which < LAST; which++) {
      const float* of_head = (which ? delta : lse) + task.row(g);
      UNROLL for (int i = 0; i < EACH; i++) {
        const int at = BLOCK * j + lane + 32 * i;
        float& found = x[which - FIRST][i];
        found = at < task.stepped() ? of_head[at] : which ? 0.f : INF;
#if DROPOUT
        if (which) found *= by;
        if (DRAWN && !which) found += 1.f;  // for half of each weight
#endif
#if BURIES
        if (!which) high[i] = at < task.stepped() ? task.high(g)[at] : 0.f;
#endif
      }
    }
    rings.tiles.await_empty();
    const u32 to = base + AT_ROWS + rings.tiles.stage() * ROWS_BYTES + 4 * lane;
    UNROLL for (int which = FIRST; which < LAST; which++)
      UNROLL for (int i = 0; i < EACH; i++)
        if (lane + 32 * i < BLOCK) {
          shared_store(to + which * DELTA + 128 * i, __float_as_int(x[which - FIRST][i]));
#if BURIES
          if (!which) shared_store(to + HIGH + 128 * i, __float_as_int(high[i]));
#endif
        }
#if DRAWN
    drawer.draw(base, rings, task, g, j, LAST);
#endif
    __syncwarp();
    if (lane < LAST - FIRST) barrier_arrive(rings.tiles.full());
    rings.tiles.next();
  });
}

#if DRAWN
DEVICE void draw_all(u32 base, Task task) {  // by a warp that brings nothing else
  Rings rings(base);
  const Drawer drawer(task);
  task.walk(Nothing{}, [&, rings](int g, int j) mutable {
    rings.tiles.await_empty();
    drawer.draw(base, rings, task, g, j, 3);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(rings.tiles.full());
    rings.tiles.next();
  });
}
#endif

struct Consumer : Worker {
  Rings rings;
  float s[BLOCK / 2], dp[BLOCK / 2], dx[COLUMNS / 2], dy[COLUMNS / 2];
  u32 a[BLOCK / 4], b[BLOCK / 4];  // weights and score gradients as A operands
  float lse[2], delta[2];          // of held queries
#if DROPOUT && !DRAWN
  Stay<BLOCK, KEYS> stay;
#endif
#if BURIES
  float high[2];  // scores that their weights are relative to
#endif
#if MASK == 3
  u32 kept[2];  // bits of this tile's pairs
#endif
  static constexpr bool PLAIN = FUSED && MASK < 2 && !(SCORE || DROPOUT || SEEN || ADDED);
  // A tile's last product is under way beside the next one's scores. Elsewhere it costs held steps in registers, and with them
  // 1 to 4 % where power is the limit, or spills
  static constexpr bool BEHIND = PLAIN && !ORDERED && BY_ROWS, WHOLE_BEHIND = WHOLE_APART && MASK && COLUMNS == 128;
  u32 behind = 0;  // what tells that its stage is free
  // Steps of held rows that are in registers, as A operands: as many as fill 224 beside gradients, scores, dp and dq
  static constexpr int OWN = PLAIN ? (224 - COLUMNS - BLOCK - PART / 2) / 4 : 0;
  static constexpr int OWN_X = imin(STEPS, OWN), OWN_Y = imin(STEPS, OWN - OWN_X);
  u32 own_x[4 * OWN_X + 1], own_y[4 * OWN_Y + 1];
#if FUSED
  Ring<2> ds;         // of the tile before; `rings` has those of the next one to write
  float dq[PART / 2];     // this thread's of the tile before
  int adding = -1;        // which tile of all that is; -1: none
#endif
#if PERSISTENT
  Ring<2> keys;       // held with that tile: those of the rows before until the first dq of these rows is made
  u32 left = 0;       // the barrier of a stage where gradients are that may not be stored yet
#endif

  DEVICE Consumer(const Task& task, u32 base, int group)
      : Worker(task, base, group), rings(base)
#if FUSED
        , ds(rings.ds)
#endif
#if PERSISTENT
        , keys(rings.held)
#endif
  {}

#if PERSISTENT
  DEVICE u32 keys_at() const { return base + keys.stage() * KEYS_BYTES; }
  DEVICE u32 held_at() const { return base + rings.held.stage() * KEYS_BYTES + group * Held::bytes; }
  DEVICE u32 values_at() const { return base + SETS * KEYS_BYTES + group * Held::bytes; }
#else
  DEVICE u32 keys_at() const { return base; }
  DEVICE u32 held_at() const { return base + HELD * group * Held::bytes; }
  DEVICE u32 values_at() const { return held_at() + Held::bytes; }
#endif
  DEVICE u32 stage_at() const { return base + AT_STAGES + rings.tiles.stage() * STAGE_BYTES; }
  DEVICE u32 rows_at_first() const { return base + AT_ROWS + rings.tiles.stage() * ROWS_BYTES; }
  DEVICE u32 rows_at() const { return rows_at_first() + 8 * (lane & 3); }
  template <class R> DEVICE void done(R& ring) {
    __syncwarp();  // all lanes have read what goes with its rows
    if (lane == 0) barrier_arrive(ring.empty());
    ring.next();
  }

  // ---- products
  template <int N> DEVICE void load_own(u32 (&own)[N], u32 held) {
    UNROLL for (int k = 0; k < N / 4; k++)
      load_matrix(*reinterpret_cast<u32(*)[4]>(own + 4 * k),
                  held + Held::chunk(k) + Held::swizzled(16 * (threadIdx.x >> 5 & 3) + (lane & 15), k, lane >> 4));
  }
  template <int N>  // to = held rows, of which `own` has the first steps, times stepped rows
  DEVICE void multiply_rows(float (&to)[BLOCK / 2], const u32 (&own)[N], u32 held, u32 stepped) {
    const u32 columns = along_k(stepped), rows = along_k(held);
    UNROLL for (int k = 0; k < STEPS; k++) {
      const u64 x = operand<Held>(rows, k), y = operand<Tile>(columns, k);
      if (k < N / 4) k ? Wgmma<BLOCK>::rs<false, false>(to, own + 4 * k, y) : Wgmma<BLOCK>::rs<true, false>(to, own, y);
      else k ? Wgmma<BLOCK>::ss<false>(to, x, y) : Wgmma<BLOCK>::ss<true>(to, x, y);
    }
    wgmma_commit();
  }
  DEVICE void add_product(float (&sum)[COLUMNS / 2], u32 (&w)[BLOCK / 4], u32 stepped) {  // sum += w times stepped rows
    const u32 columns = across_k<Tile>(stepped);
    pin(sum), pin(w);
    wgmma_fence();
    UNROLL for (int k = 0; k < BLOCK / 16; k++)
      Wgmma<COLUMNS>::rs<false, true>(sum, w + 4 * k, descriptor<Tile>(columns + (k * 16 * Tile::row_bytes >> 4)));
    wgmma_commit();
  }

  // ---- warpgroups take turns at the tensor cores: one multiplies while the other makes weights
  // beyond head dim 64 turns cost 1 to 4 %, beside a bias 6 to 12 %
  static constexpr bool IN_TURNS = PLAIN && BY_ROWS && !SHARED_SPANS;
  DEVICE void await_turn() const { if (IN_TURNS) group_sync(8 + group, 256); }
  DEVICE void pass_turn() const { if (IN_TURNS) group_arrive(9 - group, 256); }

  // ---- weights and dS of one tile
#if SCORE
  // Scaled scores as the score function has them, and its derivatives, in the place of what they will be multiplied with
  DEVICE void apply_score(int j, int g) {
    const int first = BLOCK * j + 2 * (lane & 3), head = task.query_head(g);
#if ADDED
    u32 added[4];  // what is added to scores of 16 stepped rows: pairs, as scores lie
    const int unit = (threadIdx.x >> 5 & 3) * 2 + (lane >> 3 & 1) ^ (lane & 7);
    const u32 at = base + AT_ADDED + group * DsTile::chunk_bytes + ((lane >> 4) * 8 + (lane & 7)) * DsTile::row_bytes + 16 * unit;
    rings.added.await_full();
#endif
    UNROLL for (int i = 0; i < BLOCK / 8; i++) {
#if ADDED
      if (i % 2 == 0) load_matrix_across(added, at + 8 * i * DsTile::row_bytes);
#endif
      const int stepped = opaque(first) + 8 * i;  // in this order: what is made for all pairs at once would be held
      UNROLL for (int r = 0; r < 2; r++) {
        const int held = this->first() + row + 8 * r;
        float rise[2];
        UNROLL for (int e = 0; e < 2; e++) {
          const int q = KEYS ? stepped + e : held, kv = KEYS ? held : stepped + e;
          float& to = s[4 * i + 2 * r + e];
#if ADDED
          Near y;
          put_added(y, u16(added[i % 2 * 2 + r] >> 16 * e));
          to = score_and_rise(to * scale, task.batch, head, q, kv, task.x, task.n, rise[e], y);
#else
          to = score_and_rise(to * scale, task.batch, head, q, kv, task.x, task.n, rise[e]);
#endif
        }
        if (RISES) b[2 * i + r] = Half::pack(rise[0], rise[1]);
      }
    }
  }
#endif
  DEVICE void weigh() {  // weights in place of scores, 1 at most, however lse was rounded; with DRAWN half of them
    const u32 at = rows_at();
    UNROLL for (int i = 0; i < BLOCK / 8; i++) {
      float column[2];
      if (KEYS) read_two(column, at + 32 * i);
#if BURIES
      float top[2];
      if (KEYS) read_two(top, at + HIGH + 32 * i);
#endif
      UNROLL for (int r = 0; r < 2; r++)
        UNROLL for (int e = 0; e < 2; e++) {
          float& w = s[4 * i + 2 * r + e];
#if BURIES
          w -= KEYS ? top[e] : high[r];
#endif
          w = power2(-larger(fmaf(-w, factor, KEYS ? column[e] : lse[r]), DRAWN));
        }
    }
  }
  DEVICE void differentiate() {  // dS and weights as A operands; the compiler drops what is not multiplied
    const u32 from = rows_at() + DELTA;
#if DRAWN
    Drawing stay;
#endif
    UNROLL for (int i = 0; i < BLOCK / 8; i++) {
      float column[2];
      if (KEYS && DX) read_two(column, from + 32 * i);
#if DRAWN
      if (i % 4 == 0) stay.read(rows_at_first() + BITS, i / 4, opaque(threadIdx.x) - 128);
#endif
      UNROLL for (int r = 0; r < 2; r++) {
        const int at = 4 * i + 2 * r;
#if DRAWN
        const float w[2] = {s[at] * stay.twice(i % 4, r, 0), s[at + 1] * stay.twice(i % 4, r, 1)};  // those that stay
        float low = fmaf(w[0], dp[at], -s[at] * column[0]), high = fmaf(w[1], dp[at + 1], -s[at + 1] * column[1]);
#else
        const float w[2] = {s[at], s[at + 1]};
#if DROPOUT
        const u32 mask = stay.mask(2 * i + r);
        if (DX)
          UNROLL for (int e = 0; e < 2; e++)
            dp[at + e] = DIM > 64 ? stay.by_bit(dp[at + e], 2 * i + r, e) : stay.by_mask(dp[at + e], mask, e);  // what spills less
#endif
        float low = s[at] * (dp[at] - (KEYS ? column[0] : delta[r]));
        float high = s[at + 1] * (dp[at + 1] - (KEYS ? column[1] : delta[r]));
#endif
        if (DADDED && MASK) low = s[at] == 0.f ? 0.f : low, high = s[at + 1] == 0.f ? 0.f : high;  // hidden, whatever dp is
        if (RISES) low *= Half::widen(u16(b[2 * i + r])), high *= Half::widen(u16(b[2 * i + r] >> 16));
        a[2 * i + r] = Half::pack(w[0], w[1]), b[2 * i + r] = Half::pack(low, high);
#if DROPOUT && !DRAWN
        a[2 * i + r] &= mask;
#endif
      }
    }
  }

#if SEEN
  DEVICE void hide_unseen(int j, int g) {  // weights of pairs that the mask leaves out
    u32 seen[2][BLOCK / 32];  // a bit for each stepped row
    UNROLL for (int r = 0; r < 2; r++) read_bits(seen[r], rows_at_first() + BITS, 64 * group + row + 8 * r);
    const int first = BLOCK * j + 2 * (lane & 3), head = task.query_head(g);
    UNROLL for (int i = 0; i < BLOCK / 8; i++) {
      const int query = opaque(first) + 8 * i;
      UNROLL for (int r = 0; r < 2; r++)
        UNROLL for (int e = 0; e < 2; e++) {
          bool kept = seen[r][i / 4] >> (8 * (i % 4) + e) & 1;
#if SEEN == 1
          Near y;
          put_seen(y, kept);
          kept = keep(task.batch, head, query + e, this->first() + row + 8 * r, task.x, task.n, y);
#endif
          if (!kept) s[4 * i + 2 * r + e] = 0.f;
        }
    }
  }
#endif
#if FUSED
  // ---- dq in the same sweep: dS through shared memory, its product with the held keys, sums in memory
  DEVICE u32 ds_at(const Ring<2>& ring) const { return base + AT_DS + ring.stage() * DsTile::bytes; }
  DEVICE void publish_ds() {
    __syncwarp();
    if (lane == 0) barrier_arrive(rings.ds.full());
    rings.ds.next();
  }
  DEVICE void share_ds() {  // to shared memory, keys of a query side by side
    const int warp = threadIdx.x >> 5 & 3, query = (lane & 7) + (lane >> 4) * 8;
    rings.ds.await_empty();
    const u32 to = ds_at(rings.ds) + group * DsTile::chunk_bytes + DsTile::swizzled(query, warp, lane >> 3 & 1);
    UNROLL for (int k = 0; k < BLOCK / 16; k++)
      store_matrix_across(to + k * 16 * DsTile::row_bytes, *reinterpret_cast<const u32(*)[4]>(b + 4 * k));
    shared_fence();
    publish_ds();
  }
  DEVICE void multiply_keys() {  // dq of the tile before: a warpgroup has 64 of 128 queries, or of 128 columns
    static_assert(BLOCK == (BY_ROWS ? 128 : 64) && GROUPS == 2 && (BY_ROWS || WIDTH == 64 || (WIDTH == 32 && DIM == 80)));
    ds.await_full();
    const u32 own = along_k(ds_at(ds) + BY_ROWS * group * 64 * DsTile::row_bytes);
    const u32 columns = across_k<Held>(keys_at() + !BY_ROWS * group * Held::chunk_bytes);
    wgmma_fence();
    UNROLL for (int k = 0; k < 4 * GROUPS; k++) {
      const u64 x = operand<DsTile>(own, k);
      const u64 y = descriptor<Held>(columns + (k / 4 * KEYS_APART + k % 4 * 16 * Held::row_bytes >> 4));
      k ? Wgmma<PART>::ss<false, true>(dq, x, y) : Wgmma<PART>::ss<true, true>(dq, x, y);
    }
    wgmma_commit();
  }
  DEVICE void add_dq() {
    pin(dq);
    if (lane == 0) barrier_arrive(ds.empty());
    ds.next();
    if (adding < 0) return;
    float* sums = sums_of(adding);
    UNROLL for (int i = 0; i < PART / 8; i++)
      if ((i >= ADDS_FROM && i < ADDS_TO) || !group)
        global_add_four(sums + 128 * i, make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]));
  }
  DEVICE int number_of(int j, int g) const {
    return (task.batch * task.heads_q() + task.query_head(g)) * ceil_div(task.n.seqlen_q, BLOCK) + j;
  }
  DEVICE float* sums_of(int tile) const {
    const int warp = 4 * group + (threadIdx.x >> 5 & 3);
    float* own = task.t.sums + i64(tile) * (BLOCK * COLUMNS) + warp * WARP_PART + 4 * lane;
    return FEWER && group ? own - (warp - 4) * FEWER - 128 * ADDS_FROM : own;
  }
#endif

  DEVICE void settle() {  // the last product of the tile before is done
    pin(dx), pin(b);
    __syncwarp();
    if (lane == 0 && behind) barrier_arrive(behind);
    behind = 0;
  }
  template <bool LATE>  // whether the last product of the tile before is under way: this settles it
  DEVICE void weigh_tile(u32 x, u32 y, int j, int g, bool partial) {  // its weights and score gradients, as operands
    pin(s);
    if (DX) pin(dp);
    wgmma_fence();
    multiply_rows(s, own_x, held_at(), x);
#if APART
    rings.y.await_full();
    pin(dp);
    wgmma_fence();
#endif
    if (LATE) wgmma_wait<1>(), settle(), pin(dp), wgmma_fence();
    if (DX) multiply_rows(dp, own_y, values_at(), y);
    pass_turn();
#if DROPOUT && !DRAWN
    const int own = first() + (row & ~15);  // the first of the warp's rows
    stay.draw(read_seed(task.t.seed), task.t.steps, task.batch, task.query_head(g), own, j * (BLOCK / 16), lane);
#endif
#if MASK == 2 && !SEEN
    u32 kept[2];
    const bool pairs = partial && !whole(g);
    if (FUSED && pairs) look_at_every_pair<4>(kept, j, g);  // while they are multiplied, where registers allow it
#endif
    wgmma_wait<DX>();
    pin(s);
#if SCORE
    apply_score(j, g);
#endif
    weigh();
    // queries past the end have weights of 0, keys past it gradients; without a branch ptxas makes weights after the wait
#if SEEN
    hide_unseen(j, g);
#elif MASK == 3
    if (partial) hide(s, kept);
#elif MASK == 2
    if (!FUSED && pairs) look_at_every_pair<1>(kept, j, g);
    if (pairs) hide(s, kept);
    else
#endif
    if (!SEEN && MASK != 3 && (MASK || FUSED || (DX && DIM > 128)) && partial) mask(s, j, g);
    if (DX) {
      wgmma_wait<0>();
      pin(dp);
    }
#if APART
    done(rings.y);
#endif
    differentiate();
  }
  // ---- mainloop
  template <bool LATE, bool RELEASES = true> DEVICE void step(int j, int g, bool partial, bool seen) {
    const u32 x = stage_at(), y = APART ? base + AT_Y : x + Tile::bytes;
    rings.tiles.await_full();
    if (LATE || !(FUSED && (ORDERED || MASK == 3 || (MASK == 1 && !BY_ROWS))) || seen) {
      weigh_tile<LATE>(x, y, j, g, partial);
    } else {  // only the other warpgroup sees something; without any product ptxas would serialise all
      UNROLL for (int i = 0; i < BLOCK / 4; i++) a[i] = b[i] = 0;
#if ADDED
      rings.added.await_full();
#endif
    }
#if FUSED
    await_turn();
    if (EARLY) multiply_keys();
#endif
    if (DY) add_product(dy, a, y);
#if ADDED
    done(rings.added);  // here: a product of weights has waited until they were made, loads alone may still be under way
#endif
#if FUSED
    share_ds();
    if (!EARLY) multiply_keys();
#endif
    if (DX) add_product(dx, b, x);
#if FUSED
    wgmma_wait<1 + EARLY>();
    end_dq<RELEASES>(j, g);
#endif
    if (LATE) {
      if (EARLY) wgmma_wait<1>();
      pin(dy), pin(a);
      behind = rings.tiles.empty(), rings.tiles.next();
      return;
    }
    wgmma_wait<0>();
    if (DX) pin(dx);
    if (DY) pin(dy);
    done(rings.tiles);
  }
#if FUSED
  // Steps over tiles from j to `end`, all seen whole. The first one that follows a change of rows ends the last dq of the
  // rows before, whose keys are released then: with 128 columns in the inner loop, else between its first turn and the
  // others, so that it is 11 to 33 instructions shorter (with 128 columns that took 2 to 5 % longer)
  DEVICE void step_whole(int j, int end, int g) {
    constexpr bool WITHIN = COLUMNS == 128;
#pragma unroll 1
    for (int stop = !WITHIN && holds_before() ? j + 1 : end; j < end; stop = end) {
#pragma unroll 1
      do step<WHOLE_BEHIND, WITHIN>(j, g, false, true);
      while (++j < stop);
      if (!WITHIN && holds_before()) release();
    }
    if (WHOLE_BEHIND) wgmma_wait<0>(), settle();
  }
  DEVICE void step_over(int j, int g) {  // only the other warpgroup sees something
    rings.tiles.await_full();
    UNROLL for (int i = 0; i < BLOCK / 4; i++) b[i] = 0;
    multiply_keys();
    share_ds();
    wgmma_wait<0>();
    end_dq(j, g);
    done(rings.tiles);
  }
  template <bool RELEASES = true> DEVICE void end_dq(int j, int g) {  // that of the tile before is made
    add_dq();
    adding = number_of(j, g);
    if (RELEASES && holds_before()) release();
  }
#else
  DEVICE void step_whole(int, int, int) {}
  DEVICE void step_over(int, int) {}
#endif

#if PERSISTENT
  DEVICE bool holds_before() const { return keys.place != rings.held.place; }
  // Others may come where the rows before these were: their last dq is made, their gradients are stored
  DEVICE void release() {
    clear();
    done(keys);
  }
  DEVICE void clear() {
    if (lane == 0 && left) await_stores_read(), barrier_arrive(left);
    left = 0;
  }
#else
  DEVICE bool holds_before() const { return false; }
  DEVICE void release() {}
#endif

  // ---- epilogue
  DEVICE bool leave(const float (&sum)[COLUMNS / 2], u32 to, const TensorMap& map, float scale) const {
    return leave_rows<Half, Held, COLUMNS>(sum, to, map, scale, first(), task.head, task.batch, task.held());
  }
  DEVICE void finish() {
    const Params& t = task.t;
#if HEAD_PARTS
    wgmma_wait<0>();
    add_dq();
    const int end = task.held();
    const int tiles = ceil_div(end, 64 * GROUPS), tile = task.first / (64 * GROUPS);
    const i64 flat = (i64(task.batch) * task.n.heads_kv + task.head) * tiles + tile;
    float* to = t.partial + ((flat * t.parts + task.part) * GROUPS + group) * (2 * 64 * COLUMNS) + 4 * (threadIdx.x & 127);
    store_sums(dx, to), store_sums(dy, to + 64 * COLUMNS);
    return;
#endif
#if DROPOUT
    const float by = t.stay_scale;
#else
    constexpr float by = 1.f;
#endif
    bool lost = false;
#if PERSISTENT
    constexpr int BOTH = STAGE_BYTES >= 2 * KEYS_BYTES;  // whether a stage has room for two gradients
    rings.tiles.await_full();  // a stage without a tile
    const u32 at = stage_at() + group * Held::bytes;
    lost |= leave(dy, at, t.dy, by);
    if (!BOTH) {
      if (lane == 0) await_stores_read();
      __syncwarp();
    }
    lost |= leave(dx, at + BOTH * KEYS_BYTES, t.dx, scale * by);
    left = rings.tiles.empty();
    rings.tiles.next();
#else
    group_sync(1 + group, 128);  // all have multiplied with what gradients are staged in the place of
    if (DY) lost |= leave(dy, held_at() + (HELD - 1) * Held::bytes, t.dy, by);
#if FUSED
    wgmma_wait<0>();
    add_dq();
    group_sync(3, 256);  // the other one has multiplied these keys too
#endif
    if (DX) lost |= leave(dx, held_at(), t.dx, scale * by);
    if (lane == 0) await_stores_read();
#endif
    if (MASK) mark(lost, DX);  // dv alone comes after dk, whose marks stay
  }

  DEVICE void run() {
    if (IN_TURNS && group == 1) group_arrive(8, 256);
#if PERSISTENT
    publish_ds();
#pragma unroll 1
    while (task.take()) {
      work();
      task.leave();
    }
    multiply_keys();
    wgmma_wait<0>();
    add_dq();
    if (lane == 0) await_stores_read();
#else
    work();
#endif
  }
  DEVICE void work() {
    if (DX) UNROLL for (int i = 0; i < COLUMNS / 2; i++) dx[i] = 0.f;
    if (DY) UNROLL for (int i = 0; i < COLUMNS / 2; i++) dy[i] = 0.f;
    if (!KEYS) read_held(lse, delta);
#if DROPOUT
    if (!KEYS) delta[0] /= task.t.stay_scale, delta[1] /= task.t.stay_scale;
#endif
#if BURIES
    UNROLL for (int r = 0; r < 2; r++) {
      const int at = first() + row + 8 * r;
      if (!KEYS) high[r] = at < task.held() ? task.high(0)[at] : 0.f;
    }
#endif
#if PERSISTENT
    const bool steps = task.steps();
    if (steps) {
      rings.held.await_full();
      barrier_wait(rings.values.full() + 16 * group, rings.values.parity());
    }
#else
    barrier_wait(rings.held, 0);
#endif
    load_own(own_x, held_at()), load_own(own_y, values_at());
#if FUSED && !PERSISTENT
    publish_ds();  // before the first tile there are none: what is multiplied is not added
#endif
    await_turn();
#pragma unroll 1
    for (int g = 0; g < task.rounds(); g++) {
      const Task::Range all = task.tiles_of(-1, g);
#if MASK == 3
#pragma unroll 1
      for (int j = all.begin; j < all.end; j++) {
        const int at = __shfl_sync(ALL, task.t.entries[j].bits[group], 0);  // -1: all is seen; -2: nothing
        if (at >= 0) load_pair(kept[0], kept[1], task.t.bits + i64(at) * 256 + 2 * (threadIdx.x & 127));
        step<BEHIND>(task.tile(j), g, at >= 0, at > -2);
      }
#else
      const Task::Range own = task.tiles_of(group, g);
#pragma unroll 1
      for (int j = all.begin; j < all.end; j++) {
        const bool nothing = j < own.begin || j >= own.end, partial = j < own.full_begin || j >= own.full_end;
        if (WHOLE_APART && !partial) {
          step_whole(j, own.full_end, g);
          j = own.full_end - 1;
        } else if (WHOLE_APART && nothing) {
          step_over(j, g);
        } else if (!FUSED && nothing) {
          rings.tiles.await_full(), done(rings.tiles);
#if APART
          rings.y.await_full(), done(rings.y);
#endif
        } else {  // where whole tiles are apart, one that is seen in part
          step<BEHIND>(j, g, WHOLE_APART || partial, WHOLE_APART || !nothing);
        }
      }
#endif
    }
    if (BEHIND) wgmma_wait<0>(), settle();
    pass_turn();
#if PERSISTENT
    if (steps) {
      __syncwarp();
      if (lane == 0) barrier_arrive(rings.values.empty() + 16 * group);
      rings.values.next(), rings.held.next();
    } else {
      clear();
    }
#elif FUSED
    multiply_keys();
#endif
    finish();
#if PERSISTENT
    if (!steps) clear();
#endif
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_backward(HOPPER_BACKWARD_PARAMETERS) {
  extern __shared__ u8 memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const Params t = PARAMS;
  const Shape n{heads_kv, group, seqlen_q, seqlen_kv, 0, 0, 0};
  const Aux aux{AUX_VALUES};
#if PERSISTENT
  Task task{t, n, aux, 0, 0, 0};
  task.jobs = Ring<2>(base + AT_JOBS_END - 32);
#else
  Task task = Task::number(blockIdx.x, t, n, aux);
#if SHARED_SPANS
  task.spans = base + AT_SPANS;
  if (threadIdx.x < 64 * GROUPS) task.write_span(threadIdx.x);  // before all wait for each other
#endif
#endif
  const auto bring = [&](int warp) {
    if (warp == 0) load(base, task);
#if DADDED == 2
    if (warp == 1) bring_rows<0, 2>(base, task, lse, delta);
#else
    if (KEYS && warp == 1) bring_rows<0, 1>(base, task, lse, delta);
    if (KEYS && DX && warp == 2) bring_rows<1, 2>(base, task, lse, delta);
#endif
#if PERSISTENT
    if (warp == 3) task.claim(Rings(base).loaded());
#endif
#if SEEN
    if (warp == 3) pack_seen(base, task);
#endif
#if DADDED
    if (warp >= 4 - DADDED) keep_ds(base, task, warp - (4 - DADDED));
#endif
#if DRAWN && !PERSISTENT
    if (warp == 3) draw_all(base, task);
#endif
  };
  const auto multiply = [&](int group) { Consumer(task, base, group).run(); };
  specialize_warps<Rings>(base, bring, multiply);
}

#if FUSED
// ---- dq in 16 bits, from the sums of FUSED: a block makes 64 queries of a head
extern "C" __global__ void __launch_bounds__(128) round_dq(ROUND_DQ_PARAMETERS) {
  const int slices = ceil_div(seqlen_q, 64), flat = blockIdx.x / slices, slice = blockIdx.x - flat * slices;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  constexpr int EIGHTS = PART / 8;
  sums += (i64(flat) * (ceil_div(seqlen_q, BLOCK) * BLOCK) + 64 * slice) * COLUMNS + 4 * lane;
  float sum[COLUMNS / 2];
  UNROLL for (int i = 0; i < COLUMNS / 8; i++) {
    const int part = i / EIGHTS;
    const float4 x = *reinterpret_cast<const float4*>(sums + part * 64 * PART + warp * (WARP_PART - part * FEWER) + 128 * (i % EIGHTS));
    sum[4 * i] = x.x, sum[4 * i + 1] = x.y, sum[4 * i + 2] = x.z, sum[4 * i + 3] = x.w;
  }
  u16* to = dq + flat / heads_q * dq_batch + flat % heads_q * dq_head;
  bool lost = store_rows<Half, COLUMNS>(sum, to, dq_row, scale, 64 * slice + 16 * warp + (lane >> 2), seqlen_q);
#if MASK
  lost = group_any(1, lost);
  if (threadIdx.x == 0) marks[flat * slices + slices - 1 - slice] = lost;
#endif
}
#endif

#if HEAD_PARTS
#include "hopper/parts.cuh"
#endif
#if ORDERED
#include "hopper/order.cuh"
#endif
#if PREPROCESS
#include "hopper/preprocess.cuh"
#if BURIES
#include "hopper/buried.cuh"
#endif
#endif
