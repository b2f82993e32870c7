// dk and dv of float16 and bfloat16 for Hopper (sm_90a), of head dims up to 256: four products. dS goes to memory, from
// which wide_dq.cuh makes dq: five products in all, and no sum is added to by several blocks.
//
// A block has 64 keys of a head. One warpgroup sums up dv (64 keys by all columns), the other one dk. Their mainloop
// visits tiles of 64 queries:
//
//     values: s = K Q^T     w = exp2(s - lse)    dv += w dO
//     keys:   dp = V dO^T   ds = w (dp - delta)  dk += ds Q    ds to memory
//
// Weights go from the one to the other through shared memory, each thread's to the same thread. w and ds are A operands
// as they are in registers. So are as many columns of K and of V as there is room for: products then read less shared
// memory.
//
// The config, in macros: DIM, DIM_V (multiples of 16), COLUMNS_QK, COLUMNS (in memory, of q and of v), WIDTH, WIDTH_V
// (of swizzled chunks), STAGES_Q, STAGES_O, MASK (0 none, 1 an interval a row), BF16; what cuda/backward.cuh
// asks for (GROUPS 1, KEYS 1, BLOCK 64); PREPROCESS, FUSED (0) and WIDE for preprocess.cuh.
#pragma once
#include "cuda/gradient.cuh"
#include "cuda/wgmma.cuh"
#include "hopper/wide.cuh"

using OfKeys = Staged<DIM, 64, WIDTH>;
using OfValues = Staged<DIM_V, 64, WIDTH_V>;
using Half = Half16<BF16>;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
constexpr int WEIGHTS = 64 * 64 * 2, ROW = 4 * 64;  // bytes of a tile of weights, of a number a query
// float16 has no exponents for small weights: they are 2^15 times as large until they are multiplied
constexpr float LIFT = BF16 ? 0.f : 15.f, LIFTED = BF16 ? 1.f : 32768.f;

constexpr int AT_K = 0, AT_V = OfKeys::bytes, AT_Q = AT_V + OfValues::bytes, AT_O = AT_Q + STAGES_Q * OfKeys::bytes;
constexpr int AT_W = AT_O + STAGES_O * OfValues::bytes, AT_DS = AT_W + 2 * WEIGHTS, AT_LSE = AT_DS + DsTile::bytes;
constexpr int AT_DELTA = AT_LSE + STAGES_Q * ROW, AT_BARRIERS = AT_DELTA + STAGES_O * ROW;
static_assert(AT_V == OFFSET_V && AT_Q == OFFSET_Q && AT_O == OFFSET_O && AT_W == OFFSET_W && AT_DS == OFFSET_DS);
static_assert(AT_LSE == OFFSET_LSE && AT_BARRIERS == OFFSET_BARRIERS);
static_assert(SHARED_BYTES == AT_BARRIERS + 16 * (1 + STAGES_Q + STAGES_O + 2) + 1024);

struct Rings {
  u32 k, v;  // barriers
  Ring<STAGES_Q> q;
  Ring<STAGES_O> o;
  Ring<2> w;
  DEVICE Rings(u32 base)
      : k(base + AT_BARRIERS), v(k + 8), q(k + 16), o(q.bars + 16 * STAGES_Q), w(o.bars + 16 * STAGES_O) {}
  DEVICE void init() const {  // a stage is full when its tile and what goes with its rows are there
    barrier_init(k, 1), barrier_init(v, 1);
    q.init(8, 2), o.init(8, 2), w.init(4, 4);
    barrier_publish();
  }
};

#include "cuda/backward.cuh"

template <bool SECOND, class X, class Y> struct Chosen { typedef X type; };
template <class X, class Y> struct Chosen<false, X, Y> { typedef Y type; };
template <bool SECOND, class X, class Y> using Either = typename Chosen<SECOND, X, Y>::type;
template <bool SECOND> DEVICE auto pick(const Rings& rings) {  // of what is stepped over
  if constexpr (SECOND) return rings.o;
  else return rings.q;
}
DEVICE void shared_store_words(u32 at, const u32* x) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
               ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
DEVICE void shared_load_words(u32 (&x)[4], u32 at) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

DEVICE Piece piece_of(const Params& t, const Shape& n) {
  return {t.first_head, t.first_tile, t.tiles, ceil_div(n.seqlen_q, 64), t.skew, n.seqlen_q / 64};
}
DEVICE int in_piece(const Task& task, const Piece& piece, int g) {  // head of queries, counted from the launch's first
  return (task.batch * task.n.heads_kv + task.head - piece.first_head) * task.n.group + g;
}

// ---- producer: two warps load tiles, two bring lse and delta
// Calls `visit(g, j)` for each query tile j of the g-th head that shares the keys
template <class Visit> DEVICE void over_tiles(const Task& task, Visit visit) {
#pragma unroll 1
  for (int g = 0; g < task.rounds(); g++) {
    const Task::Range tiles = task.range(task.first, 64, g);
#pragma unroll 1
    for (int j = tiles.begin; j < tiles.end; j++) visit(g, j);
  }
}

template <bool SECOND> DEVICE void load(u32 base, const Task& task) {  // one warp; its first thread orders tiles
  using Tile = Either<SECOND, OfValues, OfKeys>;
  const Params& t = task.t;
  const bool lead = (threadIdx.x & 31) == 0;
  Rings rings(base);
  const TensorMap *held = SECOND ? &t.v : &t.k, *map = SECOND ? &t.dout : &t.q;
  const u32 to = base + (SECOND ? AT_V : AT_K), at = base + (SECOND ? AT_O : AT_Q);
  if (lead) Tile::load(to, held, SECOND ? rings.v : rings.k, EVICT_FIRST, task.first, task.head, task.batch);
  auto ring = pick<SECOND>(rings);
  over_tiles(task, [&, ring](int g, int j) mutable {
    const int head = task.other(g);
    ring.await_empty();
    if (lead) Tile::load(at + ring.stage() * Tile::bytes, map, ring.full(), EVICT_LAST, 64 * j, head, task.batch);
    ring.next();
  });
}

// A warp brings a number for each query of a tile, times `scale`, minus `less`; `past` for those past the end: with
// lse = +inf their weights are 0
template <bool SECOND>
DEVICE void bring_rows(u32 base, const Task& task, const float* from, float scale, float less, float past) {
  const int lane = threadIdx.x & 31;
  Rings rings(base);
  auto ring = pick<SECOND>(rings);
  over_tiles(task, [&, ring](int g, int j) mutable {
    const float* of_head = from + task.row(g);
    float x[2];
    UNROLL for (int i = 0; i < 2; i++) {
      const int at = 64 * j + lane + 32 * i;
      x[i] = at < task.stepped() ? fmaf(of_head[at], scale, -less) : past;
    }
    ring.await_empty();
    const u32 to = base + (SECOND ? AT_DELTA : AT_LSE) + ring.stage() * ROW + 4 * lane;
    UNROLL for (int i = 0; i < 2; i++) shared_store(to + 128 * i, __float_as_int(x[i]));
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.full());
    ring.next();
  });
}

// Under a mask, what the launch of dq reads: of each head and key tile, for which query tiles dS was written; and a
// tile of zeros, which stands for the others
DEVICE void write_visited(const Task& task, const Piece& piece) {
  const int lane = threadIdx.x & 31;
  if (blockIdx.x == 0)
#pragma unroll 1
    for (int i = lane; i < DsTile::bytes / 16; i += 32)
      reinterpret_cast<uint4*>(task.t.zeros)[i] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (int g = 0; g < task.rounds(); g++) {
    const Task::Range all = task.range(task.first, 64, g);
    const int at = in_piece(task, piece, g) * piece.count + task.first / 64 - piece.first;
    if (lane == 0) reinterpret_cast<int2*>(task.t.written)[at] = make_int2(all.begin, all.end);
  }
}

// ---- consumer warpgroup: the first one has dv, the SECOND dk
template <bool SECOND> struct Consumer : Worker {
  using Held = Either<SECOND, OfValues, OfKeys>;   // and what is stepped over with it: for scores or dp
  using Other = Either<SECOND, OfKeys, OfValues>;  // for the gradient
  static constexpr int SUM = SECOND ? DIM : DIM_V, STEPS = (SECOND ? DIM_V : DIM) / 16;
  // Whether the next tile's scores, or dp, are multiplied beside this one's gradient. Beyond 224 columns of it that would
  // leave too few registers for steps of held rows; below, these get as many as fill 212 beside sum, s and a
  static constexpr bool AHEAD = SUM <= 224;
  static constexpr int REGISTERED = imin(STEPS, AHEAD ? (212 - SUM / 2 - 32 - 16) / 4 : 12);
  static constexpr int HELD_AT = SECOND ? AT_V : AT_K, X_AT = SECOND ? AT_O : AT_Q, Y_AT = SECOND ? AT_Q : AT_O;
  static constexpr int X_STAGES = SECOND ? STAGES_O : STAGES_Q, Y_STAGES = SECOND ? STAGES_Q : STAGES_O;

  const int thread, warp;
  Ring<X_STAGES> x;
  Ring<Y_STAGES> y;
  Ring<2> w;
  float s[32], sum[SUM / 2];
  u32 a[16], kept[4 * REGISTERED];

  DEVICE Consumer(const Task& task, u32 base, const Rings& rings)
      : Worker(task, base, 0), thread(threadIdx.x & 127), warp(thread >> 5), x(pick<SECOND>(rings)),
        y(pick<!SECOND>(rings)), w(rings.w) {}

  DEVICE u32 rows_at() const { return base + (SECOND ? AT_DELTA : AT_LSE) + x.stage() * ROW + 8 * (lane & 3); }
  DEVICE u32 weights_at() const { return base + AT_W + w.stage() * WEIGHTS + 16 * thread; }
  template <class R> DEVICE void done(R& ring) {
    __syncwarp();  // all lanes have read what goes with its rows
    if (lane == 0) barrier_arrive(ring.empty());
    ring.next();
  }

  // ---- products
  DEVICE void keep_columns() {
    UNROLL for (int k = 0; k < REGISTERED; k++)
      load_matrix(*reinterpret_cast<u32(*)[4]>(kept + 4 * k),
                  base + HELD_AT + Held::chunk(k) + Held::swizzled(16 * warp + (lane & 15), k, lane >> 4));
  }
  DEVICE void multiply_rows() {  // s = held rows times those of x
    const u32 own = along_k(base + HELD_AT), other = along_k(base + X_AT + x.stage() * Held::bytes);
    pin(s), pin(kept);
    wgmma_fence();
    UNROLL for (int k = 0; k < STEPS; k++) {
      const u64 b = operand<Held>(other, k);
      if (k == 0) Wgmma<64>::template rs<true, false>(s, kept, b);
      else if (k < REGISTERED) Wgmma<64>::template rs<false, false>(s, kept + 4 * k, b);
      else Wgmma<64>::template ss<false>(s, operand<Held>(own, k), b);
    }
    wgmma_commit();
  }
  DEVICE void add_product() {  // sum += a times rows of y
    const u32 columns = across_k<Other>(base + Y_AT + y.stage() * Other::bytes);
    pin(sum), pin(a);
    wgmma_fence();
    UNROLL for (int k = 0; k < 4; k++) {
      const u64 b = descriptor<Other>(columns + (k * 16 * Other::row_bytes >> 4));
      Wgmma<SUM>::template rs<false, true>(sum, a + 4 * k, b);
    }
    wgmma_commit();
  }

  // ---- weights and dS
  DEVICE void weigh(int j, int g, bool partial) {  // weights in place of scores, 1 at most before they are lifted
    const u32 at = rows_at();
    UNROLL for (int i = 0; i < 8; i++) {
      float lse[2];
      read_two(lse, at + 32 * i);
      UNROLL for (int e = 0; e < 4; e++) s[4 * i + e] = power2(-larger(fmaf(-s[4 * i + e], factor, lse[e & 1]), -LIFT));
    }
    if (partial) {
      if (MASK) mask(s, j, g);
      UNROLL for (int r = 0; r < 2; r++)
        if (first() + row + 8 * r >= task.held())
          UNROLL for (int i = 0; i < 8; i++) s[4 * i + 2 * r] = s[4 * i + 2 * r + 1] = 0.f;
    }
  }
  DEVICE void pack() { UNROLL for (int i = 0; i < 16; i++) a[i] = Half::pack(s[2 * i], s[2 * i + 1]); }
  DEVICE void share() {
    w.await_empty();
    const u32 to = weights_at();
    UNROLL for (int k = 0; k < 4; k++) shared_store_words(to + 2048 * k, a + 4 * k);
    __syncwarp();
    if (lane == 0) barrier_arrive(w.full());
    w.next();
  }
  DEVICE void differentiate() {  // dS in place of dp
    w.await_full();
    const u32 from = weights_at(), at = rows_at();
    UNROLL for (int k = 0; k < 4; k++) {
      u32 both[4];
      shared_load_words(both, from + 2048 * k);
      UNROLL for (int h = 0; h < 2; h++) {
        float delta[2];
        read_two(delta, at + 32 * (2 * k + h));
        UNROLL for (int r = 0; r < 2; r++) {
          float &low = s[8 * k + 4 * h + 2 * r], &high = s[8 * k + 4 * h + 2 * r + 1];
          const u32 pair = both[2 * h + r];
          low = fmaf(low, 1.f / LIFTED, -delta[0]) * Half::widen(u16(pair));
          high = fmaf(high, 1.f / LIFTED, -delta[1]) * Half::widen(u16(pair >> 16));
        }
      }
    }
    done(w);
  }
  DEVICE void leave(u8* tile) {  // dS goes to memory
    if (lane == 0) await_stores_read();
    __syncwarp();
    const u32 at = base + AT_DS;
    UNROLL for (int k = 0; k < 4; k++) {
      const u32 to = at + DsTile::swizzled(16 * warp + (lane & 15), k, lane >> 4);
      store_matrix(to, *reinterpret_cast<const u32(*)[4]>(a + 4 * k));
    }
    shared_fence();
    __syncwarp();
    if (lane == 0) bulk_store(tile + 2048 * warp, at + 2048 * warp, 2048), stores_end();
  }

  // ---- mainloop
  DEVICE void begin() {  // s of the first tile
    x.await_full();
    multiply_rows();
    wgmma_wait<0>();
    pin(s);
  }
  // NEXT: AHEAD, and a tile follows
  template <bool NEXT> DEVICE void step(int j, int g, bool partial, u8* tile) {
    if (!AHEAD) begin();
    if constexpr (SECOND) {
      differentiate();
      pack();
    } else {
      weigh(j, g, partial);
      pack();
      share();
    }
    done(x);
    if (NEXT) {
      x.await_full();
      multiply_rows();
    }
    y.await_full();
    add_product();
    if constexpr (SECOND) leave(tile);
    wgmma_wait<0>();
    pin(sum);
    if (NEXT) pin(s);
    done(y);
  }

  DEVICE void run(const Piece& piece) {
    UNROLL for (int i = 0; i < SUM / 2; i++) sum[i] = 0.f;
    barrier_wait(SECOND ? Rings(base).v : Rings(base).k, 0);
    keep_columns();
    const bool ragged = first() + 64 > task.held();
#pragma unroll 1
    for (int g = 0; g < task.rounds(); g++) {
      const Task::Range own = task.range(task.first, 64, g);
      u8* tile = task.t.ds + DsTile::bytes * piece.tile(in_piece(task, piece, g), first() / 64, 0);
      const int last = own.end - AHEAD;  // with AHEAD the last step is apart, as no tile follows
      if (AHEAD && own.begin < own.end) begin();
#pragma unroll 1
      for (int j = own.begin; j < last; j++)
        step<AHEAD>(j, g, ragged || (MASK && (j < own.full_begin || j >= own.full_end)), tile + i64(DsTile::bytes) * j);
      if (AHEAD && own.begin < own.end)
        step<false>(last, g, ragged || (MASK && (last < own.full_begin || last >= own.full_end)), tile + i64(DsTile::bytes) * last);
    }
    finish();
    if (lane == 0) await_stores_read();
  }
  // ---- epilogue
  DEVICE void finish() {
    const Params& t = task.t;
    const int end = task.held();
    const float by = SECOND ? scale : 1.f / LIFTED;
    group_sync(2, 256);  // none multiplies with keys or values any more
    using Own = Either<SECOND, OfKeys, OfValues>;
    bool lost = leave_rows<Half, Own, SECOND ? COLUMNS_QK : COLUMNS>(
        sum, base + (SECOND ? AT_K : AT_V), SECOND ? t.dk : t.dv, by, first(), task.head, task.batch, end);
    if (MASK) {
      lost = group_any(1, lost, 256);  // of both
      const int flat = task.batch * task.heads_held() + task.head;
      if (SECOND && thread == 0) t.marks[flat * ceil_div(end, 64) + first() / 64] = lost;
    }
  }
};

extern "C" __global__ void __launch_bounds__(384, 1) wide_dkdv(WIDE_DKDV_PARAMETERS) {
  extern __shared__ u8 memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const Params t = PARAMS;
  const Shape n{heads_kv, group, seqlen_q, seqlen_kv, 0, 0, 0};
  const Aux aux{AUX_VALUES};
  const Piece piece = piece_of(t, n);
  const Place at = locate<MASK>(blockIdx.x, {1, 1, 0, 0, piece.count, int(gridDim.x), SECTION});
  const int flat = first_head + at.batch;  // causal: the longest are the first keys
  const Task task = {t, n, aux, flat / heads_kv, flat % heads_kv, 64 * (first_tile + piece.count - 1 - at.tile)};
  const auto bring = [&](int warp) {
    if (warp == 0) load<false>(base, task);
    if (warp == 1) load<true>(base, task);
    if (warp == 2) bring_rows<false>(base, task, lse, 1.f, LIFT, INF);
    if (warp == 3) {
      if (MASK) write_visited(task, piece);
      bring_rows<true>(base, task, delta, 1.f / LIFTED, 0.f, 0.f);
    }
  };
  specialize_warps<Rings>(base, bring, [&](int group) {
    const Rings rings(base);
    if (group) Consumer<true>(task, base, rings).run(piece);
    else Consumer<false>(task, base, rings).run(piece);
  });
}

#if PREPROCESS
#include "hopper/preprocess.cuh"
#endif
