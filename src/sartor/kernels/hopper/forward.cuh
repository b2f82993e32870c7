// Attention forward of float16 and bfloat16 for Hopper (sm_90a). A block is persistent. Its producer warpgroup has the
// tile scheduler, which finds query tiles, and the loader, which brings tiles by TMA; one to three consumer warpgroups
// multiply. With dropout they are one or two, and the last warpgroup finds which weights stay.
//
// A consumer warpgroup owns 64 query rows. In its mainloop this key tile's Q K^T and the last one's P V are under way
// together, and the softmax of the new scores runs beside P V (Shah et al. 2024, FlashAttention-3, sections 3.1 and
// 3.2). The first product of the next query tile goes along with the last one of this, where there is room for both
// tiles of queries.
//
// Beside the config of cuda/forward.cuh: DIM (a multiple of 16; DIM_V is one of 8), WIDTH, WIDTH_V (columns a swizzled
// chunk), LAST (columns of a narrower last chunk of q and k, or 0), HELD (of q, how many times 16 columns are held in
// registers: the product of two operands in shared memory waits for them), DIM_EXACT (the head dim, padded to 8), AHEAD
// (the next query tile is there before this one is done with), STAGED (the copy engine stores the output).
#pragma once

using QTile = Staged<DIM, 64, WIDTH, LAST>;
using KTile = Staged<DIM, BLOCK_N, WIDTH, LAST>;
using VTile = Staged<DIM_V, BLOCK_N, WIDTH_V>;
constexpr bool LEAVES = MASK && LOWER;
#include "cuda/forward.cuh"
#include "cuda/softmax.cuh"
#include "hopper/repair.cuh"
static_assert(SHARED_BYTES == AFTER_DRAWN);

constexpr int STEPS = DIM / 16;
constexpr bool Q_REGISTERS = HELD == STEPS;  // all of q: its place is free for the next at once
constexpr bool LATE = !Q_REGISTERS && STAGES_V < STAGES_K;  // whether values come after the next tile's keys
constexpr bool EARLY = !AHEAD || SCORE;  // normalisers at once, or when the next product is under way: it wants registers
// The output is staged where a tile was that is read no more: the queries, or for each warpgroup a share of the last
// values. CHUNKS: for how many of its chunks there is room at a time
using OutTile = Staged<DIM_V, 64, WIDTH_V>;
constexpr int CHUNKS = imin((AHEAD ? QTile::bytes : VTile::bytes / GROUPS) / OutTile::chunk_bytes, OutTile::chunks);
static_assert(!STAGED || CHUNKS > 0);
// Staged also where no other product goes along: q is read no more; where it is in registers, the next one may be in
// its place
constexpr bool STAGED_ALONE = STAGED && AHEAD && !Q_REGISTERS;
static_assert(!SPLIT || (GROUPS == 1 && WIDE && !BALANCED && !LOWER && !SINKS));
static_assert(AHEAD || !STAGED || !LEAVES);  // all would have to be done with the values it lies over

// ---- consumer warpgroup
struct Consumer : Worker {
  const float factor, scale;
  Softmax<BLOCK_N, BF16, SINKS, SCORE> softmax;
  Guess guess;  // of the last step
  float s[BLOCK_N / 2], o[DIM_V / 2];  // scores, then weights; output
  u32 p[BLOCK_N / 4];                  // weights as the A operand of P V
#if MASK
  Marks marks;
#endif
#if HELD
  u32 q[4 * HELD];
#endif
#if DROPOUT
  Drawing stay;
#endif

  DEVICE Consumer(const Params& t, const Shape& n, const Aux& x, u32 base, int group)
      : Worker(t, n, x, base, group), factor(t.factor), scale(t.scale) {}

  DEVICE void read_drawn() {  // which weights of this key tile stay, while its scores are made
#if DROPOUT
    rings.drawn.await_full();
    stay.read(base + AT_DRAWN + (GROUPS * rings.drawn.stage() + group) * Drawing::BYTES, warp, lane);
    done_drawn();
#endif
  }

  // ---- queries: awaited, and where HELD read into registers
  DEVICE void begin_q() {
    bring_near(j);
    rings.q.await_full();
#if HELD
    const int r = warp * 16 + (lane & 15);
    UNROLL for (int k = 0; k < HELD; k++) {
      u32(&piece)[4] = *reinterpret_cast<u32(*)[4]>(q + 4 * k);
      load_matrix(piece, q_tile() + QTile::chunk(k) + QTile::swizzled(r, k, lane >> 4));
    }
    __syncwarp();
    pin(q);
#endif
  }
  DEVICE void end_q() { release(rings.q.empty()), rings.q.next(); }

  // ---- products
  DEVICE void multiply_qk() {  // s = Q K^T
    const u32 keys = along_k(base + AT_K) + rings.k.stage() * (KTile::bytes >> 4);
    UNROLL for (int k = 0; k < STEPS; k++) {
      const u64 b = operand<KTile>(keys, k);
#if HELD
      if (k < HELD) {
        k ? Wgmma<BLOCK_N>::rs<false, false>(s, q + 4 * k, b) : Wgmma<BLOCK_N>::rs<true, false>(s, q, b);
        continue;
      }
#endif
      const u64 a = operand<QTile>(along_k(q_tile()), k);
      k ? Wgmma<BLOCK_N>::ss<false>(s, a, b) : Wgmma<BLOCK_N>::ss<true>(s, a, b);
    }
    wgmma_commit();
  }
  DEVICE void multiply_pv() {  // o += P V
    const u32 values = across_k<VTile>(base + AT_V) + rings.v.stage() * (VTile::bytes >> 4);
    UNROLL for (int k = 0; k < BLOCK_N / 16; k++)
      Wgmma<DIM_V>::rs<false, true>(o, p + 4 * k, descriptor<VTile>(values + (k * 16 * VTile::row_bytes >> 4)));
    wgmma_commit();
  }
  DEVICE void multiply_last() {  // the output's last share
    rings.v.await_full();
    pin(o), pin(p);
    wgmma_fence();
    multiply_pv();
  }
  DEVICE void begin_both() {  // this tile's scores, and the last tile's share of the output
    rings.k.await_full();
    pin(o), pin(p);
    await_turn();
    wgmma_fence();
    multiply_qk();
    rings.v.await_full();
    wgmma_fence();
    multiply_pv();
    pass_turn();
    read_drawn();
  }

  // ---- mainloop: the key tiles of a query tile, from the last to the first
  DEVICE void start() {  // the softmax of a query tile's first key tile
    prepare(s, scale);
    softmax.start(s, factor);
    done_near(), bring_near(j - 1);
  }
  DEVICE void pack() {
    UNROLL for (int i = 0; i < BLOCK_N / 4; i++) p[i] = Half::pack(s[2 * i], s[2 * i + 1]);
#if DROPOUT
    UNROLL for (int i = 0; i < BLOCK_N / 4; i++) p[i] &= stay.mask(i);
#endif
  }
  DEVICE void clear() {
    UNROLL for (int i = 0; i < DIM_V / 2; i++) o[i] = 0.f;
  }

  // A step of the mainloop; false where weights are wrong, whose references were too low. MASKED, in which rows may
  // also see their first key, is a copy of its own: code in a loop costs even where it is passed by.
  template <bool MASKED> DEVICE bool step() {
    begin_both();
    wgmma_wait<1>();
    pin(s);
    bool late = false;  // whether there are rows that may see their first key here
    if (MASKED) {
      const int2 ends = prepare(s, scale);
      late = this->late(softmax, ends);
    } else {
      apply_score(s, scale);
    }
    guess = softmax.template speculate<MASKED>(s, factor, late);
    const bool wrong = group_any(1 + group, softmax.wrong(guess, 0) || softmax.wrong(guess, 1));
    wgmma_wait<0>();
    pin(o);
    if (wrong) return false;
    end_step();
    if (late) softmax.settle(factor);
    return true;
  }
  DEVICE void end_step() {
    done_k(), done_v();
    done_near(), bring_near(j - 1);
    pack();
  }
  DEVICE void repeat_step() {  // with references that are right
    wgmma_fence();
    multiply_qk();
    wgmma_wait<0>();
    pin(s);
    prepare(s, scale);
    float shrink[2];
    softmax.template correct<MASK != 0>(s, factor, guess, shrink);
    UNROLL for (int i = 0; i < DIM_V / 2; i++) o[i] *= shrink[i / 2 % 2];
    end_step();
    softmax.settle(factor);
  }
  template <bool MASKED> DEVICE bool steps(int last) {
#pragma unroll 1
    for (; j >= last; j--)
      if (!step<MASKED>()) return false;
    return true;
  }
  DEVICE void sweep() {  // the key tiles after the first
    j--;
#pragma unroll 1
    while (j >= begin) {
      const bool after = LISTED || (MASK && j >= full_end), before = LOWER && j < full_begin;  // the full tiles
      const int last = imax(begin, after ? full_end : LOWER && !before ? full_begin : begin);
      if (!(after || before ? steps<true>(last) : steps<false>(last))) repeat_step(), j--;
    }
  }

  // ---- epilogue: normalise, mark what is not finite, store from registers or by TMA
  DEVICE void stage(int row, int head, int batch, u32 room) {  // a warp stages and stores its 16 rows, from `row` on
    const int own = warp * 16 + (lane & 15);
    UNROLL for (int c = 0; c < OutTile::chunks; c += CHUNKS) {
      const int end = imin(c + CHUNKS, OutTile::chunks);
      if (c) await_stores_read(), __syncwarp();
      UNROLL for (int k = c * OutTile::per_chunk; k < imin(end * OutTile::per_chunk, ceil_div(DIM_V, 16)); k++) {
        u32 x[4];
        UNROLL for (int i = 0; i < 4; i++) {
          const int first = 8 * k + 2 * i;
          x[i] = first < DIM_V / 2 ? Half::pack(o[first], o[first + 1]) : 0;
        }
        store_matrix(room + OutTile::chunk(k) - c * OutTile::chunk_bytes + OutTile::swizzled(own, k, lane >> 4), x);
      }
      shared_fence();
      __syncwarp();
      if (lane == 0) {
        const u32 from = room + warp * 16 * OutTile::row_bytes;
        UNROLL for (int i = c; i < end; i++)
          tma_store(&t.out_map, from + (i - c) * OutTile::chunk_bytes, i * WIDTH_V, row, head, batch);
        stores_end();
      }
    }
  }

  struct Done : Finished { int row, head, batch; };  // and the corner of this warp's slice of the output
  DEVICE Done done() const {
    return {finished(), slice.first_query + 16 * warp, head * n.group + slice.first_head, batch};
  }
  DEVICE void scale_output(const Done& f) {
    UNROLL for (int r = 0; r < 2; r++)
      UNROLL for (int i = 0; i < DIM_V / 8; i++)
        UNROLL for (int e = 0; e < 2; e++) o[4 * i + 2 * r + e] *= f.inverse[r];
#if MASK
    u32 test[2] = {0, 0};  // stays 0 unless something is not finite as it is stored
    UNROLL for (int i = 0; i < DIM_V / 4; i++)
      test[i % 2] = Half::add_zero_times(test[i % 2], Half::pack(o[2 * i], o[2 * i + 1]));
    const bool lost = (f.real[0] && test[0]) || (f.real[1] && test[1]);
    if (__any_sync(ALL, lost)) marks.add(4 * f.mark + warp, t.work);
#endif
  }
  template <bool STAGE> DEVICE void store(const Done& f, u32 room = 0) {
    if (STAGE) stage(f.row, f.head, f.batch, room);
    else UNROLL for (int r = 0; r < 2; r++) store_row(o, r, f);
    __syncwarp();  // or else the compiler takes what follows for divergent, and stage numbers leave the uniform registers
  }
  DEVICE void store_over_values(const Done& f) {  // which all warpgroups have to be done with
    if (STAGED && GROUPS > 1) group_sync(11, 128 * GROUPS);
    store<STAGED>(f, base + AT_V + rings.v.stage() * VTile::bytes + group * CHUNKS * OutTile::chunk_bytes);
  }
  DEVICE void release_staged(u32 bar) const {  // one branch: two of them cost registers
    if (lane == 0) await_stores_read(), barrier_arrive(bar);
    __syncwarp();
  }
  DEVICE void done_values() {
    STAGED ? release_staged(rings.v.empty()) : release(rings.v.empty());
    rings.v.next();
  }

  // ---- prologue: a query tile's first key tile
  DEVICE void first(bool turn) {  // when nothing else is under way
    begin_q();
    if (Q_REGISTERS) end_q();
    rings.k.await_full();
    wgmma_fence();
    multiply_qk();
    if (turn) await_turn(), pass_turn();
    read_drawn();
    wgmma_wait<0>();
    pin(s);
    done_k();
    start();
    softmax.settle(factor);
    pack(), clear();
  }
  DEVICE void first_with_last(Done& last) {  // along with the last product of the query tile before
    const u32 room = q_tile(), left = rings.q.empty();  // that q has left, or will have with begin_q
    if (!Q_REGISTERS) rings.q.next();
    begin_q();
    if (Q_REGISTERS) rings.q.next();
    if (!STAGED) release(left);
    begin_both();
    if (!EARLY) normalise(last, softmax, factor);
    wgmma_wait<1>();
    pin(s);
    done_k();
    start();
    keep_here(softmax.sum[0] + softmax.sum[1], -factor);
    wgmma_wait<0>();
    pin(o);
    done_v();
    scale_output(last), store<STAGED>(last, room);
    softmax.settle(factor);
    clear(), pack();
    if (STAGED) release_staged(left);
  }
  DEVICE void first_after_last(const Done& last) {  // while that one's output is stored
    wgmma_wait<0>();
    pin(o);
    begin_q();
    rings.k.await_full();
    pin(s);
    wgmma_fence();
    multiply_qk();
    read_drawn();
    scale_output(last), store_over_values(last);
    wgmma_wait<0>();
    pin(s);
    done_k();
    start();
    softmax.settle(factor);
    clear(), pack();
    done_values();
  }

  // The end of a query tile where no other product goes along with its last one; returns whether there is a next tile.
  // `leaves`: other warpgroups see more keys, and may wait for this one to pass over them
  DEVICE bool end_alone(Done& last, bool more, bool leaves) {
#if SPLIT
    next_launch_may_begin();  // the merge, which waits itself for the end of this one
#endif
    const u32 room = q_tile(), left = rings.q.empty();
    if (AHEAD) {
      if (!Q_REGISTERS && !STAGED_ALONE) release(left);
      if (!Q_REGISTERS) rings.q.next();
      multiply_last();
    }
    if (AHEAD ? more : leaves) await_turn(), pass_turn();  // the next: others need not wait for the end of this tile
    if (!EARLY) normalise(last, softmax, factor);
    wgmma_wait<0>();
    pin(o);
    scale_output(last);
    if (AHEAD) done_v(), store<STAGED_ALONE>(last, room);
    else store_over_values(last), done_values();
    if (leaves) leave(), more = next_job();
    if (STAGED_ALONE) release_staged(left);
    return more;
  }

  // ---- the query tiles of a block
  DEVICE void run() {
    if (!next_job()) return;
    if (PING_PONG && group == 0) group_arrive(8, 256);
    bool turn = false;  // whether the first product takes a turn, as it does where others begin along with their last one
    while (true) {
      skip();
      first(turn);
      while (true) {
        sweep();
        Done last = done();
        if (!AHEAD) end_q(), multiply_last();
        if (EARLY) normalise(last, softmax, factor);
        const bool leaves = below, more = leaves || next_job();
        if (!more || leaves || skipped) {
          if (!end_alone(last, more, leaves)) return;
          turn = AHEAD && leaves;
          break;
        }
        if (AHEAD) first_with_last(last);
        else first_after_last(last);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_forward(HOPPER_FORWARD_PARAMETERS) {
  extern __shared__ __align__(1024) u8 memory[];
  // rounding changes nothing, but a base that the compiler knows costs it registers
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const Params t = PARAMS;
  const Shape n{heads_kv, group, seqlen_q, seqlen_kv, tiles_head, tiles, section, whole, splits, width};
  const Aux x{AUX_VALUES};
  if (threadIdx.x == 0) Rings::init(base);
  __syncthreads();
  const int warpgroup = __shfl_sync(ALL, threadIdx.x >> 7, 0);
  if (warpgroup == 0) {
    registers_fewer<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) load<true, LATE>(base, t, n, [](int, int, int, int) {});
    if (BRINGER && threadIdx.x >= 32 && threadIdx.x < 32 + 32 * BRINGERS) bring_all(base, (threadIdx.x >> 5) - 1, t, n, x);
    if (threadIdx.x >= 96) schedule(base, t, n, x);
#if DROPOUT
  } else if (warpgroup > GROUPS) {
    registers_fewer<DRAWER_REGISTERS>();
    const int warp = __shfl_sync(ALL, threadIdx.x >> 5 & 3, 0);
    if (warp < 2 * GROUPS) draw_all(base, warp >> 1, warp & 1, t, n);
#endif
  } else {
    registers_more<CONSUMER_REGISTERS>();
    Consumer consumer(t, n, x, base, GROUPS > 1 ? warpgroup - 1 : 0);
    consumer.run();
#if MASK
    if (STAGED && consumer.lane == 0) await_stores();  // before a row is written again
    __syncwarp();
    u8* own_rows = memory + (consumer.q_tile() - shared_address(memory)) + consumer.warp * 16 * QTile::row_bytes;
    Repair{t, n, x, consumer.warp, consumer.lane, reinterpret_cast<float*>(own_rows)}.run(consumer.marks);
#endif
  }
}

#if SPLIT
#include "hopper/merge.cuh"
#endif
