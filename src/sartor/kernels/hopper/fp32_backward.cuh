// Attention backward of float32 for Hopper (sm_90a), on hi/lo pairs of float16 (triton/split.py): one text, two
// kernels.
//
// A block holds rows of two operands, X and Y, each of its GROUPS warpgroups 64 of them, and steps over tiles of 64 rows of
// the other two, x and y. KEYS: it holds keys and values, steps over queries and dout, and computes dk and dv. Otherwise it
// holds queries and dout, steps over keys and values, and computes dq. Scores stand with the held rows along M, so that
// weights and score gradients are A operands as they are:
//
//     s = X x^T    w = exp2(s - lse)    dp = Y y^T    ds = w (dp - delta)    dy += w y (KEYS)    dx += ds x
//
// Three products take the place of one, the small ones first. Scores are short sums, dx and dy long ones: what a tile
// adds to these starts from zero and is added by an ordinary multiply-add, with the tile's unit (triton/products.py).
// Warpgroups share tiles and nothing else: while one computes weights, the other multiplies.
//
// The config, in macros: GROUPS, KEYS, DIM, DIM_V (multiples of 16), COLUMNS, COLUMNS_V (of them in memory), WIDTH,
// WIDTH_V (of a swizzled chunk), PARTS_X, PARTS_Y (products that a tile's share of dx, dy is made in: all columns of it
// take as many registers as the result), STAGES_X, STAGES_Y, MASK, SHARED_SPANS, ORDERED, PERSISTENT
// (cuda/backward.cuh), SINKS, REGAINED (what dp is multiplied with, for what was cut off it: triton/split.py).
#pragma once
#include "cuda/split.cuh"
#include "cuda/wgmma.cuh"

using XTile = Pair<Staged<DIM, 64, WIDTH>>;
using YTile = Pair<Staged<DIM_V, 64, WIDTH_V>>;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int SEGMENT = 128;  // rows that share a unit (triton/split.py)

// ---- layout of shared memory, as Config.laid_out has it: held tiles, stepped tiles, of each stage what goes with its
// rows, intervals of the held rows (SHARED_SPANS), barriers, room to begin on 1024
constexpr int AT_HELD_Y = GROUPS * XTile::bytes, AT_X = AT_HELD_Y + GROUPS * YTile::bytes;
constexpr int AT_Y = AT_X + STAGES_X * XTile::bytes, AT_ROWS = AT_Y + STAGES_Y * YTile::bytes;
constexpr int DELTA = 256, GAIN = 512, UNITS = KEYS ? 768 : 0, ROWS_BYTES = UNITS + 16;  // bytes from a stage's lse
constexpr int AT_BARRIERS = AT_ROWS + STAGES_X * ROWS_BYTES + SHARED_SPANS * 16 * 64 * GROUPS;
#if SHARED_SPANS
constexpr int AT_SPANS = AT_BARRIERS - 16 * 64 * GROUPS;
static_assert(AT_SPANS == OFFSET_SPANS);
#endif
static_assert(AT_HELD_Y == OFFSET_HELD_Y && AT_X == OFFSET_X && AT_Y == OFFSET_Y && AT_ROWS == OFFSET_ROWS);
static_assert(AT_BARRIERS == OFFSET_BARRIERS);
static_assert(SHARED_BYTES == AT_BARRIERS + 16 * (1 + STAGES_X + STAGES_Y) + 1024);

struct Rings {
  u32 held;  // a barrier
  Ring<STAGES_X> x;
  Ring<STAGES_Y> y;
  DEVICE Rings(u32 base) : held(base + AT_BARRIERS), x(held + 16), y(x.bars + 16 * STAGES_X) {}
  DEVICE void init() const {  // by one thread; a stage of x is full when its tile and what goes with its rows are there
    barrier_init(held, 2 * GROUPS);
    for (int i = 0; i < STAGES_X; i++) barrier_init(x.bars + 16 * i, 2), barrier_init(x.bars + 16 * i + 8, 4 * GROUPS);
    y.init(4 * GROUPS);
    barrier_publish();
  }
};

#include "cuda/backward.cuh"

DEVICE const float* units_stepped(const Task& task, const float* units, int g) {  // of the g-th round
  const int heads = KEYS ? task.heads_q() : task.n.heads_kv;
  return units + (i64(task.batch) * heads + task.other(g)) * ceil_div(task.stepped(), SEGMENT);
}
DEVICE float unit_held(const Task& task, const float* units) {
  return units[(i64(task.batch) * task.heads_held() + task.head) * ceil_div(task.held(), SEGMENT) + task.first / SEGMENT];
}

// ---- producer: one warp loads tiles by TMA, one brings what goes with their rows
DEVICE void load(u32 base, const Task& task) {  // its first thread starts the loads
  const Params& t = task.t;
  const bool lead = (threadIdx.x & 31) == 0;
  Rings rings(base);
  if (lead) {
    for (int g = 0; g < GROUPS; g++) {
      const int row = task.first + 64 * g;
      XTile::load(base + g * XTile::bytes, &t.held_x, rings.held, EVICT_FIRST, row, task.head, task.batch);
      YTile::load(base + AT_HELD_Y + g * YTile::bytes, &t.held_y, rings.held, EVICT_FIRST, row, task.head, task.batch);
    }
  }
  task.walk(Nothing{}, [&, rings](int g, int j) mutable {
    const int head = task.other(g);
    rings.x.await_empty();
    const u32 x = base + AT_X + rings.x.stage() * XTile::bytes, y = base + AT_Y + rings.y.stage() * YTile::bytes;
    if (lead) XTile::load(x, &t.x, rings.x.full(), EVICT_LAST, 64 * j, head, task.batch);
    rings.x.next();
    rings.y.await_empty();
    if (lead) YTile::load(y, &t.y, rings.y.full(), EVICT_LAST, 64 * j, head, task.batch);
    rings.y.next();
  });
}

// lse, or NaN where pairs do not resolve the row's scores (products.unresolved): the largest, about lse, is below
// `least`
DEVICE float resolved(float lse, float least) {
  return fabsf(lse) < (least > 1.f ? least : 0.f) ? __int_as_float(0x7fffffff) : lse;
}

// One warp brings what goes with the rows of a tile: the units and, of queries, lse, delta and gain
DEVICE void bring_rows(u32 base, const Task& task) {
  const Params& t = task.t;
  const int lane = threadIdx.x & 31;
  const float held = KEYS ? unit_held(task, t.unit_hx) * t.noise : 0.f;
  Rings rings(base);
  task.walk(Nothing{}, [&, rings](int g, int j) mutable {
    const float *unit_x = units_stepped(task, t.unit_x, g), *unit_y = units_stepped(task, t.unit_y, g);
    const i64 row = task.row(g);
    const float x = unit_x[j / (SEGMENT / 64)], y = unit_y[j / (SEGMENT / 64)];
    float lse[2] = {INF, INF}, delta[2] = {0.f, 0.f}, gain[2] = {1.f, 1.f};
    if (KEYS) {
      UNROLL for (int i = 0; i < 2; i++) {
        const i64 at = row + 64 * j + lane + 32 * i;
        if (at - row < task.stepped()) lse[i] = t.lse[at], delta[i] = t.delta[at], gain[i] = t.gain[at];
      }
    }
    rings.x.await_empty();
    const u32 to = base + AT_ROWS + rings.x.stage() * ROWS_BYTES;
    if (KEYS) {
      UNROLL for (int i = 0; i < 2; i++) {
        const u32 at = to + 4 * (lane + 32 * i);
        shared_store(at, __float_as_int(resolved(lse[i], held * x)));
        shared_store(at + DELTA, __float_as_int(delta[i])), shared_store(at + GAIN, __float_as_int(gain[i]));
      }
    }
    if (lane == 0) shared_store(to + UNITS, __float_as_int(x)), shared_store(to + UNITS + 4, __float_as_int(y));
    __syncwarp();
    if (lane == 0) barrier_arrive(rings.x.full());
    rings.x.next();
  });
}

// ---- consumer warpgroup
struct Consumer : Worker {
  const float noise;
  Rings rings;
  float s[32], dp[32], dx[DIM / 2], dy[DIM_V / 2];
  float hx, hy;  // units of held rows
  float lse[2], delta[2], total[2];  // of held queries

  DEVICE Consumer(const Task& task, u32 base, int group) : Worker(task, base, group), noise(task.t.noise), rings(base) {}

  DEVICE void release(u32 bar) const {
    if (lane == 0) barrier_arrive(bar);
  }
  DEVICE void done_x() {
    __syncwarp();  // all lanes have read what goes with its rows
    release(rings.x.empty()), rings.x.next();
  }
  DEVICE void done_y() { release(rings.y.empty()), rings.y.next(); }
  DEVICE u32 rows_at() const { return opaque(base) + AT_ROWS + rings.x.stage() * ROWS_BYTES; }
  DEVICE static float read(u32 at) { return __int_as_float(shared_load(at)); }

  // ---- products
  template <class Tile, int STEPS, bool ZERO> DEVICE void multiply_rows(float (&to)[32], u32 a, u32 b) {
    UNROLL for (int k = 0; k < STEPS; k++) {
      const u64 x = descriptor<Tile>(a + step_k<Tile>(k)), y = descriptor<Tile>(b + step_k<Tile>(k));
      k || !ZERO ? Wgmma<64>::ss<false>(to, x, y) : Wgmma<64>::ss<true>(to, x, y);
    }
  }
  // to = held rows times stepped rows
  template <class Tile, int STEPS> DEVICE void multiply_rows(float (&to)[32], u32 held, u32 stepped) {
    const u32 a = along_k(opaque(base) + held), b = along_k(opaque(base) + stepped);
    pin(to);
    wgmma_fence();
    multiply_rows<Tile, STEPS, true>(to, a + (Tile::lo >> 4), b);
    multiply_rows<Tile, STEPS, false>(to, a, b + (Tile::lo >> 4));
    multiply_rows<Tile, STEPS, false>(to, a, b);
    wgmma_commit();
  }
  template <class Tile, int N, bool ZERO> DEVICE void multiply_columns(float (&to)[N / 2], const u32 (&w)[16], u32 columns) {
    UNROLL for (int k = 0; k < 4; k++) {
      const u64 b = descriptor<Tile>(columns + (k * 16 * Tile::row_bytes >> 4));
      k || !ZERO ? Wgmma<N>::rs<false, true>(to, w + 4 * k, b) : Wgmma<N>::rs<true, true>(to, w, b);
    }
  }
  // sum += w times stepped rows, w split here, each held row of it by the power of two that its largest element wants
  template <class Tile, int WHOLE, int PARTS>
  DEVICE void add_product(float (&sum)[WHOLE / 2], const float (&w)[32], u32 tile, float unit) {
    constexpr int N = WHOLE / PARTS, chunk = Tile::row_bytes / 2;
    float up[2], down[2];
    UNROLL for (int r = 0; r < 2; r++) {
      float top = 0.f;
      UNROLL for (int i = 0; i < 16; i++) top = fmaxf(top, fabsf(w[i / 2 * 4 + 2 * r + i % 2]));
      top = fmaxf(top, __shfl_xor_sync(ALL, top, 1)), top = fmaxf(top, __shfl_xor_sync(ALL, top, 2));
      const Power power = power_of_two(top);
      up[r] = power.up, down[r] = power.down * unit;
    }
    u32 hi[16], lo[16];
    UNROLL for (int i = 0; i < 16; i++) split(w[2 * i] * up[i % 2], w[2 * i + 1] * up[i % 2], hi[i], lo[i]);
    UNROLL for (int part = 0; part < PARTS; part++) {
      const u32 column = part * N / chunk * Tile::chunk_bytes + part * N % chunk * 2;
      const u32 at = across_k<Tile>(opaque(base) + tile + column);
      float share[N / 2];
      pin(share), pin(hi), pin(lo);
      wgmma_fence();
      multiply_columns<Tile, N, true>(share, lo, at);
      multiply_columns<Tile, N, false>(share, hi, at + (Tile::lo >> 4));
      multiply_columns<Tile, N, false>(share, hi, at);
      wgmma_commit();
      wgmma_wait<0>();
      pin(share);
      UNROLL for (int i = 0; i < N / 2; i++) sum[part * N / 2 + i] = fmaf(share[i], down[i / 2 % 2], sum[part * N / 2 + i]);
    }
  }

  // ---- weights and dS
  DEVICE void weigh(float unit, const float (&lse)[2]) {
    const float by = factor * unit;
    const u32 at = rows_at() + 8 * (lane & 3);
    UNROLL for (int i = 0; i < 8; i++) {
      float column[2], gain[2];
      if (KEYS) read_two(column, at + 32 * i), read_two(gain, at + GAIN + 32 * i);
      UNROLL for (int r = 0; r < 2; r++)
        UNROLL for (int e = 0; e < 2; e++) {
          float& w = s[4 * i + 2 * r + e];
          w = power2(-larger(fmaf(-w, by, KEYS ? column[e] : lse[r]), -1.f));  // 2 at most, however lse was rounded
          if (KEYS) w *= gain[e];
        }
    }
  }
  DEVICE void differentiate(float unit) {  // dS in place of dp
    const u32 at = rows_at() + DELTA + 8 * (lane & 3);
    UNROLL for (int i = 0; i < 8; i++) {
      float column[2];
      if (KEYS) read_two(column, at + 32 * i);
      UNROLL for (int r = 0; r < 2; r++)
        UNROLL for (int e = 0; e < 2; e++) {
          float& ds = dp[4 * i + 2 * r + e];
          ds = s[4 * i + 2 * r + e] * fmaf(ds, unit, -(KEYS ? column[e] : delta[r]));
        }
    }
  }

  // ---- mainloop
  DEVICE void step(int j, int g, bool partial) {
    const u32 x = AT_X + rings.x.stage() * XTile::bytes, y = AT_Y + rings.y.stage() * YTile::bytes;
    rings.x.await_full();
    multiply_rows<XTile, DIM / 16>(s, group * XTile::bytes, x);
    const float unit_x = read(rows_at() + UNITS), unit_y = read(rows_at() + UNITS + 4);
    rings.y.await_full();
    multiply_rows<YTile, DIM_V / 16>(dp, AT_HELD_Y + group * YTile::bytes, y);
    wgmma_wait<1>();
    pin(s);
    float lse[2];
    UNROLL for (int r = 0; r < 2; r++) lse[r] = KEYS ? 0.f : resolved(this->lse[r], hx * unit_x * noise);
    weigh(hx * unit_x, lse);
#if MASK == 2
    if (partial && !whole(g)) {
      u32 kept[2];
      look_at_every_pair<4>(kept, j, g);
      hide(s, kept);
    } else
#endif
    if ((MASK || !KEYS) && partial) mask(s, j, g);  // queries past the end have weights of 0
    if (!KEYS) {
      UNROLL for (int r = 0; r < 2; r++) {  // a tile's sum first: a long sum of single weights would drift
        float sum = 0.f;
        UNROLL for (int i = 0; i < 16; i++) sum += s[i / 2 * 4 + 2 * r + i % 2];
        total[r] += sum;
      }
    }
    wgmma_wait<0>();
    pin(dp);
    differentiate(hy * unit_y);
    if (KEYS) add_product<YTile, DIM_V, PARTS_Y>(dy, s, y, unit_y);
    done_y();
    add_product<XTile, DIM, PARTS_X>(dx, dp, x, unit_x);
    done_x();
  }

  // ---- epilogue
  // Stores EXACT columns of this thread's two rows; `lost` where something is not finite
  template <int EXACT, int N> DEVICE void store(const float (&sum)[N], float* to, i64 by_row, float scale, bool& lost) const {
    UNROLL for (int r = 0; r < 2; r++) {
      const int at = first() + row + 8 * r;
      float test = 0.f;  // stays 0 unless something is not finite
      UNROLL for (int i = 0; i < ceil_div(EXACT, 8); i++) {
        const int column = 8 * i + 2 * (lane & 3);
        const float2 both = make_float2(sum[4 * i + 2 * r] * scale, sum[4 * i + 2 * r + 1] * scale);
        float* place = to + at * by_row + column;
        test = fmaf(both.x, 0.f, fmaf(both.y, 0.f, test));
        if (EXACT % 2 == 0) {
          if (at < task.held() && column < EXACT) *reinterpret_cast<float2*>(place) = both;
        } else {
          if (at < task.held() && column < EXACT) place[0] = both.x;
          if (at < task.held() && column + 1 < EXACT) place[1] = both.y;
        }
      }
      lost |= at < task.held() && test != 0.f;
    }
  }
  DEVICE void finish() {
    const Params& t = task.t;
    if (!KEYS) {
      UNROLL for (int r = 0; r < 2; r++) {
        const int at = first() + row + 8 * r;
        total[r] += __shfl_xor_sync(ALL, total[r], 1), total[r] += __shfl_xor_sync(ALL, total[r], 2);
        if (SINKS) total[r] += power2(t.sinks[task.head] * LOG2_E - lse[r]);
        const float gain = total[r] == 0.f ? 1.f : __frcp_rn(total[r]);
        if (at < task.held() && (lane & 3) == 0) t.gain[task.row(0) + at] = gain;
        UNROLL for (int i = 0; i < DIM / 4; i++) dx[i / 2 * 4 + 2 * r + i % 2] *= gain;
      }
    }
    bool lost = false;
    store<COLUMNS>(dx, t.dx + task.batch * t.dx_batch + task.head * t.dx_head, t.dx_row, scale, lost);
    if (KEYS) store<COLUMNS_V>(dy, t.dy + task.batch * t.dy_batch + task.head * t.dy_head, t.dy_row, 1.f, lost);
    mark(lost);
  }

  DEVICE void run() {
    hx = unit_held(task, task.t.unit_hx), hy = unit_held(task, task.t.unit_hy) * REGAINED;
    UNROLL for (int i = 0; i < DIM / 2; i++) dx[i] = 0.f;
    if (KEYS) {
      UNROLL for (int i = 0; i < DIM_V / 2; i++) dy[i] = 0.f;
    } else {
      total[0] = total[1] = 0.f;
      read_held(lse, delta);
    }
    barrier_wait(rings.held, 0);
#pragma unroll 1
    for (int g = 0; g < task.rounds(); g++) {
      const Task::Range all = task.range(task.first, 64 * GROUPS, g), own = task.range(first(), 64, g);
#pragma unroll 1
      for (int j = all.begin; j < all.end; j++) {
        if (MASK && (j < own.begin || j >= own.end)) {
          rings.x.await_full(), done_x();
          rings.y.await_full(), done_y();
        } else {
          step(j, g, j < own.full_begin || j >= own.full_end);
        }
      }
    }
    finish();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_fp32_backward(HOPPER_FP32_BACKWARD_PARAMETERS) {
  extern __shared__ u8 memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const Params t = PARAMS;
  const Shape n{heads_kv, group, seqlen_q, seqlen_kv, 0, 0, 0};
  const Aux aux{AUX_VALUES};
  Task task = Task::number(blockIdx.x, t, n, aux);
#if SHARED_SPANS
  task.spans = base + AT_SPANS;
  if (threadIdx.x < 64 * GROUPS) task.write_span(threadIdx.x);  // before all wait for each other
#endif
  const auto bring = [&](int warp) {
    if (warp == 0) load(base, task);
    if (warp == 1) bring_rows(base, task);
  };
  specialize_warps<Rings>(base, bring, [&](int group) { Consumer(task, base, group).run(); });
}
