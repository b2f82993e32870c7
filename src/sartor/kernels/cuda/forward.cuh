// What the Hopper forwards share: shared memory, the scheduler, the loader, and a warpgroup's place, mask and output.
//
// The kernel that includes this has named its tiles, QTile, KTile and VTile, whether a warpgroup passes over the key tiles
// before those that it sees (LEAVES), and its config in macros: DIM_V, COLUMNS (of the output, at most DIM_V), GROUPS
// (consumer warpgroups), BLOCK_N (keys a tile), STAGES_K, STAGES_V, Q_BUFFERS, LATE_ROUNDS (of all blocks, the last ones, in
// which query tiles are claimed late), ROWS (of a slice), MASK (0 none, 1 an interval a row, 2 any), LOWER (the interval
// has a lower end), SCORE, PRESCALE, SINKS, BALANCED, PARTS (see `share`), SPLIT (keys are dealt out too), RAGGED (the last
// key tile is not full), PING_PONG (warpgroups take turns at the tensor cores), WIDE (float32 output), BF16.
#pragma once
#include "cuda/expressions.cuh"
#include "cuda/near.cuh"
#include "cuda/wgmma.cuh"

constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 40, CONSUMER_REGISTERS = GROUPS == 3 ? 160 : 232;
constexpr bool SKIPS = GROUPS > 1 && (MASK || PARTS);  // whether warpgroups pass over key tiles that only others see
using Half = Half16<BF16>;
using Part = Slice<ROWS>;
using Job = Work<GROUPS, MASK == 2>;
constexpr int TELLERS = MASK == 2 ? 32 : 1;  // lanes that arrive for a warp at a job's barriers: all, if all write and read it

// ---- shared memory, as Config.laid_out has it: tiles first, then pairs of barriers (full, empty), then jobs
constexpr int AT_K = Q_BUFFERS * GROUPS * QTile::bytes, AT_V = AT_K + STAGES_K * KTile::bytes;
constexpr int AT_BARRIERS = AT_V + STAGES_V * VTile::bytes;
constexpr int AT_JOBS = AT_BARRIERS + 16 * (STAGES_K + STAGES_V + 3 + Q_BUFFERS * GROUPS);  // 3: jobs and next
constexpr int AT_NEAR = AT_JOBS + 2 * Job::bytes;  // NEAR_BYTES a consumer warp
static_assert(AT_K == OFFSET_K && AT_V == OFFSET_V && AT_BARRIERS == OFFSET_BARRIERS);
static_assert(AT_JOBS == OFFSET_JOBS && AT_NEAR == OFFSET_NEAR && SHARED_BYTES >= AT_NEAR + 4 * GROUPS * NEAR_BYTES);

struct Rings {
  Ring<STAGES_K> k;
  Ring<STAGES_V> v;
  Ring<2> jobs;  // notes on query tiles, free when the consumers have read them
  Ring<1> next;  // full when the loader, on its way through a note, says that another may be written
  Ring<Q_BUFFERS> q;
  DEVICE Rings(u32 base, int group)
      : k(base + AT_BARRIERS), v(k.bars + 16 * STAGES_K), jobs(v.bars + 16 * STAGES_V),
        next(jobs.bars + 32), q(next.bars + 16 + 16 * Q_BUFFERS * group) {}

  static DEVICE void init(u32 base) {  // by one thread
    Rings rings(base, 0);
    rings.k.init(4 * GROUPS), rings.v.init(4 * GROUPS);
    rings.jobs.init(4 * TELLERS * GROUPS, TELLERS);
    rings.next.init(1);
    for (int g = 0; g < GROUPS; g++) Rings(base, g).q.init(4);
    barrier_publish();
  }
};

// What a query tile is of: an item of the batch. With SPLIT its keys are dealt out in n.parts parts of n.width key tiles:
// each part is a query tile of an item of its own, and so are its results, in float32.
DEVICE int batch_of(int item, const Shape& n) { return SPLIT ? item / n.parts : item; }
DEVICE int first_key(int item, const Shape& n) { return SPLIT ? item % n.parts * n.width * BLOCK_N : 0; }
DEVICE int end_of_keys(int item, const Shape& n) {
  return SPLIT ? imin(first_key(item, n) + n.width * BLOCK_N, n.seqlen_kv) : n.seqlen_kv;
}

// In the place of its lse, from which a sum beside a highest score of -1e9 could not be had again
DEVICE void store_sum(float* lse, i64 place, float highest, float total) { lse[2 * place] = highest, lse[2 * place + 1] = total; }

// Slice `i` of a tile. With BALANCED the tile of a head that is not full is its first one, not its last, which may take the
// longest; where there is no slice, it lies past the end.
DEVICE Part slice(int tile, int i, const Shape& n) {
  const int index = tile * GROUPS + i, missing = BALANCED ? n.tiles_head * GROUPS - Part::count(n) : 0;
  if (index < missing) return {n.seqlen_q, 0};
  return Part::number(index - missing, n);
}

// ---- the scheduler: one warp that finds the next query tile and its keys. `late`: as late as the loader can wait for it,
// as a block that has claimed long tiles ahead leaves others idle in the end
DEVICE void describe(const Share& at, bool late, u32 slot, const Shape& n, const Aux& x) {
  const bool lead = (threadIdx.x & 31) == 0;
  int lo = MASK ? n.seqlen_kv : 0, hi = MASK ? 0 : n.seqlen_kv;
#pragma unroll 1
  for (int g = 0; g < GROUPS; g++) {
    Part part = slice(at.tile, at.first + g, n);
    if (PARTS && g >= imin(at.count, GROUPS - at.first)) part.first_query = n.seqlen_q;  // past the end: another block's
    const bool all = !MASK && !(PARTS && part.first_query >= n.seqlen_q);
    int full_lo = 0, full_hi = n.seqlen_kv, own_lo = MASK ? n.seqlen_kv : 0, own_hi = all ? n.seqlen_kv : 0;
#if MASK
#pragma unroll (MASK == 2 ? 1 : 2)  // two rows at once, of any mask, take more registers than the 32 it may have
    for (int r = 0; r < (part.first_query < n.seqlen_q ? 2 : 0); r++) {  // rows past the end count as the last
      const int row = (threadIdx.x & 31) + 32 * r;
      const int head = imin(part.head(row), n.group - 1), query = imin(part.query(row), n.seqlen_q - 1);
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
      shared_store(slot + Job::first_query(g), part.first_query), shared_store(slot + Job::first_head(g), part.first_head);
      shared_store(slot + Job::full_begin(g), ceil_div(full_lo, BLOCK_N));
      shared_store(slot + Job::full_end(g), imax(full_hi, 0) / BLOCK_N);
      shared_store(slot + Job::own_begin(g), imax(own_lo, 0) / BLOCK_N);
      shared_store(slot + Job::own_end(g), ceil_div(own_hi, BLOCK_N));
    }
  }
  const int first = first_key(at.batch, n);
  hi = imin(imax(hi, first), end_of_keys(at.batch, n)), lo = imin(imax(lo, first), hi);
  const int begin = lo / BLOCK_N, end = imax(ceil_div(hi, BLOCK_N), begin + 1);  // at least one, if all of it is masked
  if (lead) {
    shared_store(slot + Job::batch, at.batch), shared_store(slot + Job::head, at.head);
    shared_store(slot + Job::begin, begin), shared_store(slot + Job::end, end);
    shared_store(slot + Job::tell, late ? imin(begin + 2, end - 1) : end - 1);
  }
}

struct Silent { DEVICE void operator()(const Place&) const {} };
template <class Tell = Silent> DEVICE void schedule(u32 base, const Params& t, const Shape& n, const Aux& x, Tell tell = {}) {
  Rings rings(base, 0);
  const int lane = threadIdx.x & 31;
  const bool lead = lane == 0;
  int number = blockIdx.x;
#pragma unroll 1
  for (bool first = true;; first = false) {
    if (!first) rings.next.await_full(), rings.next.next();
    rings.jobs.await_empty();
    int next = number;  // where tiles differ, from one counter, the longest first. The grid's size is not kept, for registers
    if (!first) next = (BALANCED ? lead ? atomicAdd(t.work, 1) : 0 : number) + opaque(gridDim.x);
    number = __shfl_sync(ALL, next, 0);
    if (number >= n.tiles) break;
    Share at = share<GROUPS, BALANCED, PARTS>(SPLIT ? number / n.parts : number, n);
    if (SPLIT) at.batch = at.batch * n.parts + number % n.parts;
    const bool late = BALANCED && number + LATE_ROUNDS * int(opaque(gridDim.x)) >= n.tiles;
    describe(at, late, base + AT_JOBS + rings.jobs.stage() * Job::bytes, n, x);
    __syncwarp();
    if (lane < TELLERS) barrier_arrive(rings.jobs.full());
    tell(at);
    rings.jobs.next();
  }
  if (lead) shared_store(base + AT_JOBS + rings.jobs.stage() * Job::bytes, -1);
  __syncwarp();
  if (lane < TELLERS) barrier_arrive(rings.jobs.full());
  if (BALANCED && lead && atomicAdd(t.work + 1, 1) == int(gridDim.x) - 1) t.work[0] = t.work[1] = 0;  // for the next launch
}

// ---- the loader
// One thread that orders tiles into shared memory as room comes free. QUERIES: whether they too are its; LATE: values come
// after the next tile's keys, which are needed first and may have room sooner; `await` returns when the keys and values of
// a tile are there, for a stage.
template <bool QUERIES, bool LATE, class Params, class Await>
DEVICE void load(u32 base, const Params& t, const Shape& n, Await await) {
  Rings rings(base, 0);
  auto load_values = [&](int j, int head, int batch) {
    rings.v.await_empty();
    VTile::load(base + AT_V + rings.v.stage() * VTile::bytes, address(t.v_map), rings.v.full(), OFTEN, j * BLOCK_N, head, batch);
    rings.v.next();
  };
#pragma unroll 1
  while (true) {
    rings.jobs.await_full();
    const u32 slot = base + AT_JOBS + rings.jobs.stage() * Job::bytes;
    const int item = shared_load(slot + Job::batch), head = shared_load(slot + Job::head), batch = batch_of(item, n);
    const int begin = shared_load(slot + Job::begin), last = shared_load(slot + Job::end) - 1;
    const int tell = shared_load(slot + Job::tell);
    if (item < 0) return;
#pragma unroll 1
    for (int j = last, g = QUERIES ? 0 : GROUPS; j >= begin; j--) {
      rings.k.await_empty();
      await(rings.k.stage(), j, head, batch);
      KTile::load(base + AT_K + rings.k.stage() * KTile::bytes, address(t.k_map), rings.k.full(), OFTEN, j * BLOCK_N, head, batch);
      rings.k.next();
      if (j == tell) barrier_arrive(rings.next.full());
#pragma unroll 1
      for (; g < GROUPS; g++) {  // queries come after the first keys, whose place is free sooner
        const u32 skip = 16 * Q_BUFFERS * g;  // the rings of all groups turn together
        barrier_wait(rings.q.empty() + skip, rings.q.parity() ^ 1);
        const u32 to = base + (g * Q_BUFFERS + rings.q.stage()) * QTile::bytes;
        const int query = shared_load(slot + Job::first_query(g)), first_head = shared_load(slot + Job::first_head(g));
        if constexpr (QUERIES)
          QTile::load(to, address(t.q_map), rings.q.full() + skip, ONCE, query, head * n.group + first_head, batch);
      }
      if (!LATE || j < last) load_values(j + LATE, head, batch);
    }
    if (LATE) load_values(begin, head, batch);
    rings.jobs.next();
    rings.q.next();
  }
}

// Bits of those of a thread's keys, two of every eight, that are from `key` on
DEVICE u32 from_column(int key) { return shift_left(~0u, imax(2 * (key >> 3) + imin(key & 7, 2), 0)); }

// ---- a consumer warpgroup: what it knows of its query tile
struct Worker {
  const Params& t;
  const Shape& n;
  const Aux& x;
  const u32 base;
  const int group, warp, lane, row;  // warp: of the group's four; row: the first of this thread's two in its slice
  Rings rings;
  int batch = -1, head, j, begin, full_begin, full_end;  // this query tile
  int skipped, below;  // of its key tiles, after and before those that this warpgroup sees
  Part part;

  DEVICE Worker(const Params& t, const Shape& n, const Aux& x, u32 base, int group)
      : t(t), n(n), x(x), base(base), group(group), warp(threadIdx.x >> 5 & 3), lane(threadIdx.x & 31),
        row(warp * 16 + (lane >> 2)), rings(base, group) {}

  DEVICE void release(u32 bar) const { barrier_arrive_if(lane == 0, bar); }
  DEVICE void done_k() { release(rings.k.empty()), rings.k.next(); }
  DEVICE void done_v() { release(rings.v.empty()), rings.v.next(); }

  DEVICE u32 job() const { return base + AT_JOBS + rings.jobs.stage() * Job::bytes; }
  DEVICE void done_job() {
    __syncwarp();
    if (lane < TELLERS) barrier_arrive(rings.jobs.empty());
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
    part = {read(Job::first_query(group)), read(Job::first_head(group))};
    begin = read(Job::begin), j = read(Job::end) - 1;
    skipped = SKIPS ? imin(j - begin, imax(j + 1 - read(Job::own_end(group)), 0)) : 0;
    below = SKIPS && LEAVES ? imin(j - skipped - begin, imax(read(Job::own_begin(group)) - begin, 0)) : 0;
    begin += below;
    full_begin = read(Job::full_begin(group)), full_end = read(Job::full_end(group));
    if (MASK != 2) done_job();
    return true;
  }

  // Ping-pong scheduling: warpgroups take turns at the tensor cores, one a key tile, used or not
  DEVICE void await_turn() const {
    if (PING_PONG) group_sync(8 + group, 256);
  }
  DEVICE void pass_turn() const {
    if (PING_PONG) group_arrive(8 + (group + 1) % GROUPS, 256);
  }
  DEVICE void pass_over() {
    await_turn(), pass_turn();
    rings.k.await_full(), done_k();
    rings.v.await_full(), done_v();
  }
  DEVICE void skip() {
#pragma unroll 1
    for (; skipped; skipped--, j--) pass_over();
  }
  DEVICE void leave() {  // the turn of the first one is passed on
    rings.k.await_full(), done_k();
    rings.v.await_full(), done_v();
#pragma unroll 1
    for (below--; below; below--) pass_over();
  }

  DEVICE u32 q_tile() const { return base + (group * Q_BUFFERS + rings.q.stage()) * QTile::bytes; }

  // ---- what the mods read for every pair: of the next tile, copied while this one is worked on
  DEVICE u32 near() const { return base + AT_NEAR + (4 * group + warp) * NEAR_BYTES; }
  DEVICE int query_head(int row) const { return head * n.group + imin(part.head(row), n.group - 1); }
  DEVICE void bring_near(int tile) const {
    if (NEAR_BYTES == 0 || tile < begin) return;
    const int own = warp * 16 + (lane >> 1);
    __syncwarp();
    bring(near(), batch, query_head(own), part.query(own), tile * BLOCK_N, x, n);
  }

  // Of row r and 128 keys from the tile's w-th on, what is not seen; comparing each key would cost twice as much
  DEVICE static void hide(float (&s)[BLOCK_N / 2], int r, int w, u32 seen) {
    UNROLL for (int i = 0; i < imin(BLOCK_N - w, 128) / 4; i++) {
      float& x = s[w / 2 + i / 2 * 4 + 2 * r + i % 2];
      x = seen >> i & 1 ? x : -INF;
    }
  }

  // The mask where it is no interval: a loop makes bits of it, 2 * i + e for key 8 * i + e, in few registers
#if MASK == 2
  DEVICE void look_at_every_key(float (&s)[BLOCK_N / 2], int first, const int (&heads)[2], const int (&query)[2]) const {
    u64 kept[2] = {0, 0};
#pragma unroll 1
    for (int i = BLOCK_N / 8 - 1; i >= 0; i--)
      UNROLL for (int r = 0; r < 2; r++) {
        Near y[2];
        look(y, near(), (lane >> 2) + 8 * r, 8 * i + 2 * (lane & 3));
        UNROLL for (int e = 1; e >= 0; e--) {
          const int kv = first + 8 * i + e;
          kept[r] = kept[r] << 1 | (keep(batch, heads[r], query[r], kv, x, n, y[e]) & (kv < n.seqlen_kv));
        }
      }
    UNROLL for (int w = 0; w < BLOCK_N; w += 128)
      UNROLL for (int r = 0; r < 2; r++) hide(s, r, w, u32(kept[r] >> w / 4));
  }
#endif

  // Scores as the softmax takes them: scaled and changed by the score function, -inf where masked; and where this tile has a
  // mask, the ends of what this thread's rows see
  DEVICE int2 prepare(float (&s)[BLOCK_N / 2], float scale) const {
    change(s, scale);
    return mask(s);
  }
  DEVICE bool masked() const { return (MASK || RAGGED) && (j >= full_end || (LOWER && j < full_begin)); }  // this key tile

  DEVICE void change(float (&s)[BLOCK_N / 2], float scale) const {
    if (NEAR_BYTES) await_copies(), __syncwarp();
#if SCORE
    const int first = j * BLOCK_N + 2 * (lane & 3);
    const int query[2] = {part.query(row), part.query(row + 8)};
    const int heads[2] = {query_head(row), query_head(row + 8)};
    UNROLL for (int i = 0; i < BLOCK_N / 4; i++) {
      const int r = i % 2;
      Near y[2];
      look(y, near(), (lane >> 2) + 8 * r, i / 2 * 8 + 2 * (lane & 3));
      const int key = opaque(first) + i / 2 * 8;  // in this order: what is made for all pairs at once would be held
      UNROLL for (int e = 0; e < 2; e++) {
        float& to = s[2 * i + e];
        to = score(to * scale, batch, heads[r], query[r], key + e, x, n, y[e]);
      }
    }
#elif PRESCALE
    UNROLL for (int i = 0; i < BLOCK_N / 2; i++) s[i] *= scale;
#endif
  }
  DEVICE int2 mask(float (&s)[BLOCK_N / 2]) const {
    if (!masked()) return make_int2(0, 0);
    const int first = j * BLOCK_N + 2 * (lane & 3);
#if MASK
    const int query[2] = {part.query(row), part.query(row + 8)};
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

  // What is left of a finished query tile: its place, its normalisers
  struct Finished {
    float inverse[2], sink[2];
    i64 place, lse_place[2];
    int mark;  // the number of its slice: of 64 queries of a head, its last ones first
    bool real[2];
  };
  DEVICE Finished finished() const {
    Finished f;
    const int item = SPLIT ? batch * n.parts + begin / n.width : batch;
    UNROLL for (int r = 0; r < 2; r++) {
      const int query = part.query(row + 8 * r), in_batch = head * n.group + part.head(row + 8 * r);
      const int flat = item * n.heads_kv * n.group + in_batch;
      f.real[r] = part.real(row + 8 * r, n);
      f.lse_place[r] = i64(flat) * n.seqlen_q + query;
      if (r == 0) {
        const int first = flat - part.head(row) + part.first_head;
        f.place = item * t.out_batch + in_batch * t.out_head + query * t.out_row;
        f.mark = (first + 1) * ceil_div(n.seqlen_q, 64) - 1 - part.first_query / 64;
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
  }

  // from a thread's first row to its second, eight on
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
      turn(a, quarter);
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
