// Attention backward of float16 and bfloat16 for Hopper (sm_90a): one text, two kernels.
//
// A block holds rows of two operands, X and Y, each of its GROUPS warpgroups 64 of them, and steps over tiles of BLOCK rows
// of the other two, x and y. KEYS: it holds keys and values, steps over queries and dout, and computes dk and dv. Otherwise
// it holds queries and dout, steps over keys and values, and computes dq. Scores stand with the held rows along M, so that
// weights and score gradients are A operands as they are:
//
//     s = X x^T    w = exp2(s - lse)    dp = Y y^T    ds = w (dp - delta)    dy += w y (KEYS)    dx += ds x
//
// Warpgroups share tiles and nothing else: while one makes weights, the others multiply.
//
// The measure, in macros: GROUPS, KEYS, DIM (a multiple of 16), COLUMNS (of them in memory), WIDTH (of a swizzled chunk),
// BLOCK (a multiple of 16), STAGES, MASK (0 none, 1 an interval a row), BF16.
#pragma once
#include "cuda/wgmma.cuh"

using Held = Staged<DIM, 64, WIDTH>;
using Tile = Staged<DIM, BLOCK, WIDTH>;
using Half = Half16<BF16>;
constexpr int STEPS = DIM / 16;
constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 24, CONSUMER_REGISTERS = GROUPS == 3 ? 160 : 240;

// ---- shared memory: held tiles, stepped tiles, of each stage lse and delta of its rows (KEYS), barriers
constexpr int AT_STAGES = 2 * GROUPS * Held::bytes, STAGE_BYTES = 2 * Tile::bytes;
constexpr int AT_ROWS = AT_STAGES + STAGES * STAGE_BYTES, DELTA = 4 * BLOCK, ROWS_BYTES = KEYS ? 8 * BLOCK : 0;
constexpr int AT_BARRIERS = AT_ROWS + STAGES * ROWS_BYTES;

struct Rings {
  u32 held;  // a barrier
  Ring<STAGES> tiles;
  DEVICE Rings(u32 base) : held(base + AT_BARRIERS), tiles(held + 16) {}
  DEVICE void init() const {  // by one thread; a stage is full when its two tiles and what goes with its rows are there
    barrier_init(held, 2 * GROUPS);
    tiles.init(4 * GROUPS, KEYS ? 4 : 2);
    barrier_publish();
  }
};

struct Tensors {
  const TensorMap *held_x, *held_y, *x, *y;
  const float *lse, *delta;  // (batch, heads_q, rows_pitch), lse as log2
  u16 *dx, *dy;
  i64 dx_batch, dx_head, dx_row, dy_batch, dy_head, dy_row;
  int* marks;  // one for 64 held rows of a head
};
#include "cuda/backward.cuh"

DEVICE void load(u32 base, const Task& task) {  // one warp; its first thread orders tiles
  const Tensors& t = task.t;
  const bool lead = (threadIdx.x & 31) == 0;
  Rings rings(base);
  if (lead) {
    for (int g = 0; g < GROUPS; g++) {
      const u32 to = base + 2 * g * Held::bytes;
      Held::load(to, t.held_x, rings.held, ONCE, task.first + 64 * g, task.head, task.batch);
      Held::load(to + Held::bytes, t.held_y, rings.held, ONCE, task.first + 64 * g, task.head, task.batch);
    }
  }
#pragma unroll 1
  for (int g = 0; g < task.turns(); g++) {
    const Task::Range range = task.range(task.first, 64 * GROUPS, g);
    const int head = task.other(g);
#pragma unroll 1
    for (int j = range.begin; j < range.end; j++) {
      rings.tiles.await_empty();
      const u32 to = base + AT_STAGES + rings.tiles.stage() * STAGE_BYTES;
      if (lead) {
        Tile::load(to, t.x, rings.tiles.full(), OFTEN, BLOCK * j, head, task.batch);
        Tile::load(to + Tile::bytes, t.y, rings.tiles.full(), OFTEN, BLOCK * j, head, task.batch);
      }
      rings.tiles.next();
    }
  }
}

// A warp brings a number for each query of a tile, `past` for those past the end: lse = +inf makes their weights 0
DEVICE void bring_rows(u32 base, const Task& task, const float* from, float past, u32 place) {
  constexpr int EACH = ceil_div(BLOCK, 32);
  const int lane = threadIdx.x & 31;
  Rings rings(base);
#pragma unroll 1
  for (int g = 0; g < task.turns(); g++) {
    const Task::Range range = task.range(task.first, 64 * GROUPS, g);
    const float* of_head = from + task.row(g);
#pragma unroll 1
    for (int j = range.begin; j < range.end; j++) {
      float x[EACH];
      UNROLL for (int i = 0; i < EACH; i++) {
        const int at = BLOCK * j + lane + 32 * i;
        x[i] = at < task.stepped() ? of_head[at] : past;
      }
      rings.tiles.await_empty();
      const u32 to = base + AT_ROWS + rings.tiles.stage() * ROWS_BYTES + place + 4 * lane;
      UNROLL for (int i = 0; i < EACH; i++)
        if (lane + 32 * i < BLOCK) shared_store(to + 128 * i, __float_as_int(x[i]));
      __syncwarp();
      if (lane == 0) barrier_arrive(rings.tiles.full());
      rings.tiles.next();
    }
  }
}

struct Consumer : Worker {
  Rings rings;
  float s[BLOCK / 2], dp[BLOCK / 2], dx[DIM / 2], dy[DIM / 2];
  u32 a[BLOCK / 4], b[BLOCK / 4];  // weights and score gradients as A operands
  float lse[2], delta[2];          // of held queries

  DEVICE Consumer(const Task& task, u32 base, int group, float factor, float scale)
      : Worker(task, base, group, factor, scale), rings(base) {}

  DEVICE u32 held_at() const { return base + 2 * group * Held::bytes; }
  DEVICE u32 stage_at() const { return base + AT_STAGES + rings.tiles.stage() * STAGE_BYTES; }
  DEVICE u32 rows_at() const { return base + AT_ROWS + rings.tiles.stage() * ROWS_BYTES + 8 * (lane & 3); }
  DEVICE void done() {
    __syncwarp();  // all lanes have read what goes with its rows
    if (lane == 0) barrier_arrive(rings.tiles.empty());
    rings.tiles.next();
  }

  // ---- products
  DEVICE void multiply_rows(float (&to)[BLOCK / 2], u32 held, u32 stepped) {  // to = held rows times stepped rows
    const u32 columns = along_k(stepped), own = along_k(held);
    UNROLL for (int k = 0; k < STEPS; k++) {
      const u64 x = sixteen<Held>(own, k), y = sixteen<Tile>(columns, k);
      k ? Wgmma<BLOCK>::ss<false>(to, x, y) : Wgmma<BLOCK>::ss<true>(to, x, y);
    }
    wgmma_commit();
  }
  DEVICE void add_product(float (&sum)[DIM / 2], u32 (&w)[BLOCK / 4], u32 stepped) {  // sum += w times stepped rows
    const u32 columns = across_k<Tile>(stepped);
    pin(sum), pin(w);
    wgmma_fence();
    UNROLL for (int k = 0; k < BLOCK / 16; k++)
      Wgmma<DIM>::rs<false, true>(sum, w + 4 * k, descriptor<Tile>(columns + (k * 16 * Tile::row_bytes >> 4)));
    wgmma_commit();
  }

  // ---- of one tile
  DEVICE void weigh() {  // weights in place of scores, 1 at most, however lse was rounded
    const u32 at = rows_at();
    UNROLL for (int i = 0; i < BLOCK / 8; i++) {
      float column[2];
      if (KEYS) read_two(column, at + 32 * i);
      UNROLL for (int r = 0; r < 2; r++)
        UNROLL for (int e = 0; e < 2; e++) {
          float& w = s[4 * i + 2 * r + e];
          w = power2(-larger(fmaf(-w, factor, KEYS ? column[e] : lse[r]), 0.f));
        }
    }
  }
  DEVICE void differentiate() {  // score gradients, and weights as they are multiplied
    const u32 from = rows_at() + DELTA;
    UNROLL for (int i = 0; i < BLOCK / 8; i++) {
      float column[2];
      if (KEYS) read_two(column, from + 32 * i);
      UNROLL for (int r = 0; r < 2; r++) {
        const int at = 4 * i + 2 * r;
        const float low = s[at] * (dp[at] - (KEYS ? column[0] : delta[r]));
        const float high = s[at + 1] * (dp[at + 1] - (KEYS ? column[1] : delta[r]));
        a[2 * i + r] = Half::pack(s[at], s[at + 1]), b[2 * i + r] = Half::pack(low, high);
      }
    }
  }

  DEVICE void step(int j, int g, bool partial) {
    const u32 x = stage_at(), y = x + Tile::bytes;
    rings.tiles.await_full();
    pin(s), pin(dp);
    wgmma_fence();
    multiply_rows(s, held_at(), x), multiply_rows(dp, held_at() + Held::bytes, y);
    wgmma_wait<1>();
    pin(s);
    weigh();
    if (MASK && partial) mask(s, j, g);  // queries past the end have weights of 0, keys past it gradients
    wgmma_wait<0>();
    pin(dp);
    differentiate();
    if (KEYS) add_product(dy, a, y);
    add_product(dx, b, x);
    wgmma_wait<0>();
    pin(dx);
    if (KEYS) pin(dy);
    done();
  }

  // This thread's two rows; whether something is not finite as it is stored
  DEVICE bool store(const float (&sum)[DIM / 2], u16* to, i64 by_row, float scale) const {
    bool lost = false;
    UNROLL for (int r = 0; r < 2; r++) {
      const int at = first() + row + 8 * r;
      u32 test = 0;  // stays 0 unless something is not finite
      u16* place = to + at * by_row;
      UNROLL for (int i = 0; i < COLUMNS / 8; i += 4) {  // four threads turn 4x4 words: 16 bytes each
        u32 words[4];
        UNROLL for (int b = 0; b < 4; b++) {
          const int from = 4 * imin(i + b, COLUMNS / 8 - 1) + 2 * r;
          words[b] = Half::pack(sum[from] * scale, sum[from + 1] * scale);
          test = Half::add_zero_times(test, words[b]);
        }
        turn(words, lane & 3);
        const int column = 8 * (i + (lane & 3));
        if (at < task.held() && column < COLUMNS)
          *reinterpret_cast<uint4*>(place + column) = make_uint4(words[0], words[1], words[2], words[3]);
      }
      lost |= at < task.held() && test;
    }
    return lost;
  }
  DEVICE void finish() {
    const Tensors& t = task.t;
    bool lost = store(dx, t.dx + task.batch * t.dx_batch + task.head * t.dx_head, t.dx_row, scale);
    if (KEYS) lost |= store(dy, t.dy + task.batch * t.dy_batch + task.head * t.dy_head, t.dy_row, 1.f);
    if (MASK) mark(lost);
  }

  DEVICE void run() {
    UNROLL for (int i = 0; i < DIM / 2; i++) dx[i] = 0.f;
    if (KEYS) {
      UNROLL for (int i = 0; i < DIM / 2; i++) dy[i] = 0.f;
    } else {
      read_held(lse, delta);
    }
    barrier_wait(rings.held, 0);
#pragma unroll 1
    for (int g = 0; g < task.turns(); g++) {
      const Task::Range all = task.range(task.first, 64 * GROUPS, g);
      Task::Range own = {0, 0, 0, 0};  // the last block may have more warpgroups than rows for them
      if (first() < task.held()) own = task.range(first(), 64, g);
#pragma unroll 1
      for (int j = all.begin; j < all.end; j++) {
        if (j < own.begin || j >= own.end) {
          rings.tiles.await_full(), done();
        } else {
          step(j, g, j < own.full_begin || j >= own.full_end);
        }
      }
    }
    finish();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_backward(const __grid_constant__ TensorMap held_x, const __grid_constant__ TensorMap held_y,
                    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap y, const float* lse,
                    const float* delta, u16* dx, u16* dy, int* marks, i64 dx_batch, i64 dx_head, i64 dx_row, i64 dy_batch,
                    i64 dy_head, i64 dy_row, int heads_kv, int group, int seqlen_q, int seqlen_kv, float factor,
                    float scale AUX_PARAMETERS) {
  extern __shared__ u8 memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const Tensors t{&held_x, &held_y, &x, &y, lse, delta, dx, dy, dx_batch, dx_head, dx_row, dy_batch, dy_head, dy_row, marks};
  const Shape n{heads_kv, group, seqlen_q, seqlen_kv, 0, 0, 0};
  const Aux aux{AUX_VALUES};
  const Task task = Task::number(blockIdx.x, t, n, aux);
  if (threadIdx.x == 0) Rings(base).init();
  __syncthreads();
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);
  if (warp < 4) {
    registers_fewer<PRODUCER_REGISTERS>();
    if (warp == 0) load(base, task);
    if (KEYS && warp == 1) bring_rows(base, task, lse, INF, 0);
    if (KEYS && warp == 2) bring_rows(base, task, delta, 0.f, DELTA);
  } else {
    registers_more<CONSUMER_REGISTERS>();
    Consumer(task, base, warp / 4 - 1, factor, scale).run();
  }
}
