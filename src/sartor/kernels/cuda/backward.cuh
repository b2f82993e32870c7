// What the Hopper backwards share: the rows that a block holds and steps over, a warpgroup's place, mask and marks.
//
// The kernel that includes this has a config in macros: GROUPS (warpgroups that multiply, each with 64 held rows), KEYS
// (keys and values are held, queries and dout stepped over, not the other way round), BLOCK (rows of a tile that is
// stepped over), MASK (0 none, 1 an interval of every row and column, 2 any, 3 any, walked by its block list:
// kernels/blocks.py), SHARED_SPANS (intervals of held rows come from tables: a block reads each once and keeps it in
// shared memory, at AT_SPANS), ORDERED (a table says which rows are held when: hopper/order.cuh), PERSISTENT (a block
// holds one set of rows after another; a warp claims the next ones while the others work, and leaves them in shared
// memory with their intervals), SECTIONED (a launch says how many heads are in flight).
#pragma once
#include "cuda/expressions.cuh"
#include "cuda/wgmma.cuh"

constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int SECTION = 16;  // heads of which, under a mask, the longest blocks begin first: cuda/schedule.cuh

struct Nothing { DEVICE void operator()() const {} };

// ---- task: the rows that a block holds, and the tiles that its mainloop visits
struct Task {
  const Params& t;
  const Shape& n;
  const Aux& x;
  int batch, head, first;  // head: of the held operand
#if HEAD_PARTS
  int part = 0;            // of the query heads that share it, equally many each
#endif
#if SHARED_SPANS
  u32 spans = 0;           // where they are
#endif
#if PERSISTENT
  Ring<2> jobs{0};         // of rows to hold
#endif

  static DEVICE int sets(const Params& t) {  // of rows that blocks hold, where no table orders them
#if PERSISTENT && !ORDERED
    return t.total;
#else
    return gridDim.x;
#endif
  }
  static DEVICE int parts(const Params& t) {
#if HEAD_PARTS
    return t.parts;
#else
    return 1;
#endif
  }
  static DEVICE Task number(int index, const Params& t, const Shape& n, const Aux& x) {
    const int heads = KEYS ? n.heads_kv : n.heads_kv * n.group, tiles = ceil_div(KEYS ? n.seqlen_kv : n.seqlen_q, 64 * GROUPS);
#if DADDED == 2
    const int items = gridDim.x / (heads * tiles);  // those that share what they add to come first
    int batch = 0, head = 0;
    if (!t.by_item) batch = index % items, index /= items;
    if (!t.by_head) head = index % heads, index /= heads;
    const int tile = index % tiles;
    index /= tiles;
    if (t.by_head) head = index % heads, index /= heads;
    if (t.by_item) batch = index;
    return {t, n, x, batch, head, tile * 64 * GROUPS};
#elif ORDERED
    const Place at = locate<true>(index, {heads, 1, 0, 0, t.blocks, t.blocks * heads, SECTION});
    const int found = t.order[t.blocks - 1 - at.tile];
    return {t, n, x, found / tiles, at.head, found % tiles * 64 * GROUPS};
#else
#if SECTIONED
    const bool last = index >= t.sectioned * tiles;  // in the last section
    const int before = last ? t.sectioned : 0, end = last ? sets(t) / tiles : t.sectioned;
    Place at = locate<true>(index - before * tiles, {1, 1, 0, 0, tiles, (end - before) * tiles, last ? end : t.section});
    at.head = at.batch + before, at.batch = at.head / (heads * parts(t)), at.head %= heads * parts(t);
#else
    const Place at = locate<MASK != 0>(index, {heads * parts(t), 1, 0, 0, tiles, sets(t), SECTION});
#endif
#if HEAD_PARTS
    Task found = {t, n, x, at.batch, at.head / t.parts, (tiles - 1 - at.tile) * 64 * GROUPS};
    found.part = at.head % t.parts;
    return found;
#else
    const int tile = KEYS ? tiles - 1 - at.tile : at.tile;  // causal: the longest are the last queries, the first keys
    return {t, n, x, at.batch, at.head, tile * 64 * GROUPS};
#endif
#endif
  }

  DEVICE int heads_q() const { return n.heads_kv * n.group; }
  DEVICE int held() const { return KEYS ? n.seqlen_kv : n.seqlen_q; }
  DEVICE int stepped() const { return KEYS ? n.seqlen_q : n.seqlen_kv; }
#if HEAD_PARTS
  DEVICE int rounds() const { return n.group / t.parts; }
  DEVICE int other(int g) const { return head * n.group + part * rounds() + g; }
#else
  DEVICE int rounds() const { return KEYS ? n.group : 1; }
  // of the g-th round, in its batch: the head that is stepped over, the head of queries
  DEVICE int other(int g) const { return KEYS ? head * n.group + g : head / n.group; }
#endif
  DEVICE int query_head(int g) const { return KEYS ? other(g) : head; }
  DEVICE i64 row(int g) const { return (i64(batch) * heads_q() + query_head(g)) * (ceil_div(n.seqlen_q, 16) * 16); }
#if BURIES
  DEVICE const float* high(int g) const { return t.gain + t.rows + row(g); }  // behind the gains
#endif
  DEVICE int heads_held() const { return KEYS ? n.heads_kv : heads_q(); }
  DEVICE Span span(int at, int g) const {
#if SHARED_SPANS
    const float4 found = shared_load_four(spans + 16 * (at - first));
    return {__float_as_int(found.x), __float_as_int(found.y), __float_as_int(found.z), __float_as_int(found.w)};
  }
  DEVICE void write_span(int i) const {  // of the i-th held row
    const int at = imin(first + i, held() - 1);
    const Span s = KEYS ? cols(batch, 0, at, x, n) : rows(batch, 0, at, x, n);  // which no head changes
    const u32 to = spans + 16 * i;
    shared_store_pair(to, make_uint2(s.lo, s.hi)), shared_store_pair(to + 8, make_uint2(s.full_lo, s.full_hi));
#elif MASK
    return KEYS ? cols(batch, query_head(g), at, x, n) : rows(batch, query_head(g), at, x, n);
#else
    return {0, stepped(), 0, stepped()};
#endif
  }

  // Stepped rows that `count` held rows from `from` on attend to: tiles [begin, end), those in [full_begin, full_end) whole
  struct Range { int begin, end, full_begin, full_end; };
#if MASK == 3  // of a range [begin, end) are entries
  DEVICE Range range(int, int, int g) const {
    const int blocks = ceil_div(held(), 64 * GROUPS), plane = batch * t.plane_batch + query_head(g) * t.plane_head;
    const int* at = t.starts + plane * blocks + first / (64 * GROUPS);
    return {__shfl_sync(ALL, at[0], 0), __shfl_sync(ALL, at[1], 0), 0, 0};  // which tells the compiler that they are uniform
  }
  DEVICE int tile(int j) const { return __shfl_sync(ALL, t.entries[j].tile, 0); }
#else
  DEVICE Range range(int from, int count, int g) const {
    int lo = 0, hi = stepped(), full_lo = 0, full_hi = stepped();
    if (MASK) {
      lo = stepped(), hi = 0;
#pragma unroll 1
      for (int i = threadIdx.x & 31; i < count; i += 32) {
        const Span s = span(imin(from + i, held() - 1), g);
        const bool some = !(SHARED_SPANS || MASK == 2) || s.lo < s.hi;  // where a row sees nothing, its interval may lie anywhere
        if (some) lo = imin(lo, s.lo), hi = imax(hi, s.hi);
        full_lo = imax(full_lo, s.full_lo), full_hi = imin(full_hi, s.full_hi);
      }
      lo = imax(warp_min(lo), 0), hi = imin(imax(warp_max(hi), 0), stepped());
      full_lo = warp_max(full_lo), full_hi = imax(warp_min(full_hi), 0);
    }
    return {lo / BLOCK, ceil_div(hi, BLOCK), ceil_div(full_lo, BLOCK), full_hi / BLOCK};
  }
#endif

  // The same of the rows that a block holds, or those of a warpgroup; the last block may have more of these than rows for them
  DEVICE Range look(int group, int g) const {
    if (group < 0) return range(first, 64 * GROUPS, g);
    const int own = first + 64 * group;
    return own < held() ? range(own, 64, g) : Range{0, 0, 0, 0};
  }
  DEVICE Range tiles_of(int group, int g) const {
#if PERSISTENT && ORDERED
    const int at = 4 * (group + 2);
    return {told(at), told(at + 1), told(at + 2), told(at + 3)};  // no head changes what tables tell
#else
    return look(group, g);
#endif
  }

#if PERSISTENT
  // which rows they are, and ranges of tiles that tables tell, behind their intervals
  static constexpr int SPAN_BYTES = SHARED_SPANS * 16 * 64 * GROUPS, job_bytes = SPAN_BYTES + JOB_BYTES;
  DEVICE u32 job() const { return jobs.bars + 32 - AT_JOBS_END + AT_JOBS + jobs.stage() * job_bytes; }
  DEVICE bool take() {  // the next rows to hold, if there are any
    jobs.await_full();
#if SHARED_SPANS
    spans = job();
#endif
    batch = told(0), head = told(1), first = told(2);
    return batch >= 0;
  }
  DEVICE bool steps() const { return !MASK || told(3); }  // whether there is a tile to step over
  DEVICE int told(int i) const { return __shfl_sync(ALL, shared_load(job() + SPAN_BYTES + 4 * i), 0); }
  DEVICE void leave() {  // by a warp that has read all of it
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(jobs.empty());
    jobs.next();
  }
  // By one warp: claims rows for this block until there are none. The next ones when few tiles of these are left to load, not
  // before: at the end rows would wait for a block that has long ones to do, beside blocks that have none
  DEVICE void claim(u32 loaded) {
    const bool lead = (threadIdx.x & 31) == 0;
#if ORDERED
    const int all = t.blocks * heads_held();
    int* claimed = t.order + t.blocks;
#else
    const int all = sets(t);
    int* claimed = t.claimed;
#endif
    int index = blockIdx.x;
#pragma unroll 1
    for (int parity = 0;; parity ^= 1) {
      jobs.await_empty();
      if (index < all) {
        const Task next = number(index, t, n, x);
        batch = next.batch, head = next.head, first = next.first;
#if SHARED_SPANS
        spans = job();
#pragma unroll 1
        for (int i = threadIdx.x & 31; i < 64 * GROUPS; i += 32) write_span(i);
#endif
      }
      const u32 at = job() + SPAN_BYTES;
#if ORDERED
      __syncwarp();
#pragma unroll 1
      for (int i = 0; index < all && i <= GROUPS; i++) {
        const Range found = look(i - 1, 0);
        const u32 to = at + 16 + 16 * i;
        if (!lead) continue;
        shared_store(to, found.begin), shared_store(to + 4, found.end);
        shared_store(to + 8, found.full_begin), shared_store(to + 12, found.full_end);
      }
#endif
      int some = 0;
      if (MASK && index < all)
#pragma unroll 1
        for (int g = 0; g < rounds() && !some; g++) {
          const Range found = range(first, 64 * GROUPS, g);
          some = found.begin < found.end;
        }
      if (lead) {
        shared_store(at, index < all ? batch : -1), shared_store(at + 4, head), shared_store(at + 8, first);
        shared_store(at + 12, some);
      }
      __syncwarp();
      if (lead) barrier_arrive(jobs.full());
      jobs.next();
      if (index >= all) return;
      barrier_wait(loaded, parity);
      index = __shfl_sync(ALL, lead ? atomicAdd(claimed, 1) : 0, 0) + gridDim.x;
    }
  }
#endif

  // Calls `visit(g, j)` for each tile j that is stepped over in the g-th round, `begin` for the rows that are held, and `soon`
  // before the last few. They are to hold rings by value: by reference these cost registers. Where blocks stay, the first tile
  // comes before the held rows, as its stage is free earlier; and without a tile these do not come
#if PERSISTENT
  template <class Begin, class Visit, class Soon = Nothing> DEVICE void walk(Begin begin, Visit visit, Soon soon = {}) {
#pragma unroll 1
    while (take()) {
#else
  template <class Begin, class Visit> DEVICE void walk(Begin begin, Visit visit) const {
#endif
#if !PERSISTENT
      begin();
#endif
#pragma unroll 1
      for (int g = 0; g < rounds(); g++) {
        const Range tiles = tiles_of(-1, g);
#if PERSISTENT
        const int second = g ? -1 : tiles.begin + 1;
        const int few = g < rounds() - 1 ? -1 : imax(tiles.begin, tiles.end - SOON);
#endif
#pragma unroll 1
        for (int j = tiles.begin; j < tiles.end; j++) {
#if PERSISTENT
          if (j == second) begin();
          if (j == few) soon();
#endif
#if MASK == 3
          visit(g, tile(j));
#else
          visit(g, j);
#endif
        }
#if PERSISTENT
        if (second >= tiles.end && steps()) begin();
        if (few >= tiles.end) soon();
#endif
      }
#if PERSISTENT
      visit(-1, 0);  // no tile: its stage is room for what the consumers leave
      leave();
    }
#endif
  }
};

// ---- consumer warpgroup: its rows, the mask, marks
struct Worker {
#if PERSISTENT
  Task task;
#else
  const Task& task;
#endif
  const u32 base;
  const int group, lane, row;  // row: the first of this thread's two in its 64
  const float factor, scale;

  DEVICE Worker(const Task& task, u32 base, int group)
      : task(task), base(base), group(group), lane(threadIdx.x & 31), row((threadIdx.x >> 5 & 3) * 16 + (lane >> 2)),
        factor(task.t.factor), scale(task.t.scale) {}

  DEVICE int first() const { return task.first + 64 * group; }
  DEVICE static void read_two(float (&x)[2], u32 at) {
    u32 low, high;
    shared_load_pair(low, high, at);
    x[0] = __int_as_float(low), x[1] = __int_as_float(high);
  }
  DEVICE void read_held(float (&lse)[2], float (&delta)[2]) const {  // of queries; past the end weights become 0
    UNROLL for (int r = 0; r < 2; r++) {
      const int at = first() + row + 8 * r;
      lse[r] = INF, delta[r] = 0.f;
      if (at < task.held()) lse[r] = task.t.lse[task.row(0) + at], delta[r] = task.t.delta[task.row(0) + at];
    }
  }
#if MASK == 2
  // Whether the rows of this warp see all of their intervals, as of tables only their values tell
  DEVICE bool whole(int g) const {
    bool all = true;
    UNROLL for (int r = 0; r < 2; r++) {
      const Span span = task.span(imin(first() + row + 8 * r, task.held() - 1), g);
      all &= span.lo == span.full_lo && span.hi == span.full_hi;
    }
    return __all_sync(ALL, all);
  }
#endif
#if MASK >= 2
#if MASK == 2
  // A loop makes bits of it, in few registers: eight stepped rows at a time, AT_ONCE times at once
  template <int AT_ONCE> DEVICE void look_at_every_pair(u32 (&kept)[2], int j, int g) const {
    kept[0] = kept[1] = 0;
#pragma unroll (AT_ONCE)
    for (int i = BLOCK / 8 - 1; i >= 0; i--)
      UNROLL for (int r = 0; r < 2; r++)
        UNROLL for (int e = 1; e >= 0; e--) {
          const int held = first() + row + 8 * r, stepped = BLOCK * j + 2 * (lane & 3) + 8 * i + e;
          const bool seen = keep(task.batch, task.query_head(g), KEYS ? stepped : held, KEYS ? held : stepped, task.x, task.n);
          kept[r] = kept[r] << 1 | (seen & (stepped < task.stepped()));
        }
  }
#endif
  DEVICE static void hide(float (&weights)[BLOCK / 2], const u32 (&kept)[2]) {
    UNROLL for (int i = 0; i < BLOCK / 4; i++)
      UNROLL for (int r = 0; r < 2; r++)
        if (!(kept[r] >> i & 1)) weights[i / 2 * 4 + 2 * r + i % 2] = 0.f;
  }
#endif
  DEVICE void mask(float (&weights)[BLOCK / 2], int j, int g) const {
    UNROLL for (int r = 0; r < 2; r++) {
      const Span span = task.span(imin(first() + row + 8 * r, task.held() - 1), g);
      const int from = BLOCK * j + 2 * (lane & 3), lo = span.lo - from, hi = imin(span.hi, task.stepped()) - from;
      UNROLL for (int i = 0; i < BLOCK / 4; i++) {
        const int offset = i / 2 * 8 + i % 2;
        if (offset >= hi || offset < lo) weights[i / 2 * 4 + 2 * r + i % 2] = 0.f;
      }
    }
  }
  // whether the 64 rows are to be computed again; not `fresh`: what an earlier kernel said of them stays
  DEVICE void mark(bool lost, bool fresh = true) const {
    lost = group_any(1 + group, lost);
    const int slices = ceil_div(task.held(), 64), slice = first() / 64;
    const int flat = task.batch * task.heads_held() + task.head;
    if ((threadIdx.x & 127) == 0 && slice < slices && (fresh || lost))
      task.t.marks[flat * slices + (KEYS ? slice : slices - 1 - slice)] = lost;
  }
};

// ---- warp specialisation: the four producer warps call `load` with their numbers, consumer warpgroups `multiply`
template <class Rings, class Load, class Multiply> DEVICE void specialize_warps(u32 base, Load load, Multiply multiply) {
  if (threadIdx.x == 0) Rings(base).init();
  __syncthreads();
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);
  if (warp < 4) {
    registers_fewer<PRODUCER_REGISTERS>();
    load(warp);
  } else {
    registers_more<CONSUMER_REGISTERS>();
    multiply(warp / 4 - 1);
  }
}
