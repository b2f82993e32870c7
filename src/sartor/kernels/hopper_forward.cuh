// Attention forward for Hopper (sm_90a): TMA brings tiles, a scheduler and a loader order them, warpgroups compute.
//
// A consumer warpgroup owns 64 query rows. While the tensor cores multiply this tile's Q K^T and the last tile's P V, it
// turns the scores it has into weights, in registers (Shah et al. 2024, FlashAttention-3, sections 3.1 and 3.2). Blocks
// are persistent: the first product of the next query tile goes along with the last one of this.
//
// Compile-time measure: DIM, DIM_V (multiples of 16), DIM_EXACT (a multiple of 8), COLUMNS (of the output, at most DIM_V), WIDTH, WIDTH_V
// (columns a swizzled chunk), GROUPS (consumer warpgroups), BLOCK_N (keys a tile), STAGES_K, STAGES_V, Q_BUFFERS,
// Q_REGISTERS, ROWS (of a slice), MASK (0 none, 1 an interval a row, 2 any), LOWER (the interval has a lower end), SCORE,
// PRESCALE, SINKS, MARK, BALANCED, RAGGED (the last key tile is not full), TURNS (warpgroups take turns at the tensor
// cores), BF16, WIDE (float32 output).
#pragma once

constexpr int MARKS = 4;  // where they begin in the workspace, after the scheduler's counters
constexpr int STEPS = DIM / 16, THREADS = 128 * (GROUPS + 1);
constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 40, CONSUMER_REGISTERS = GROUPS == 3 ? 160 : 232;
using Half = Half16<BF16>;
using QTile = Staged<DIM, 64, WIDTH>;
using KTile = Staged<DIM, BLOCK_N, WIDTH>;
using VTile = Staged<DIM_V, BLOCK_N, WIDTH_V>;
using Part = Slice<ROWS>;
using Job = Work<GROUPS>;

struct Tensors {
  const TensorMap *q, *k, *v;
  void* out;         // (batch, heads, seqlen_q, COLUMNS) by strides, in elements
  i64 out_batch, out_head, out_row;
  float* lse;        // (batch, heads, seqlen_q)
  const float* sinks;  // (heads,)
  int* work;         // [next tile, blocks that are done, -, -], then marks, a head its last 64 queries first
};

// ---- shared memory: tiles first, then pairs of barriers (full, empty), then jobs
constexpr int AT_K = Q_BUFFERS * GROUPS * QTile::bytes, AT_V = AT_K + STAGES_K * KTile::bytes;
constexpr int AT_BARRIERS = AT_V + STAGES_V * VTile::bytes;
constexpr int AT_JOBS = AT_BARRIERS + 16 * (STAGES_K + STAGES_V + 2 + Q_BUFFERS * GROUPS);

struct Rings {
  Ring<STAGES_K> k;
  Ring<STAGES_V> v;
  Ring<2> jobs;
  Ring<Q_BUFFERS> q;
  DEVICE Rings(u32 base, int group)
      : k(base + AT_BARRIERS), v(k.bars + 16 * STAGES_K), jobs(v.bars + 16 * STAGES_V),
        q(jobs.bars + 32 + 16 * Q_BUFFERS * group) {}
};

// ---- the scheduler: one warp that finds the next query tile and its keys, a tile or two ahead of everybody
DEVICE void describe(const Place& at, u32 slot, const Shape& n, const Aux& x) {
  const bool lead = (threadIdx.x & 31) == 0;
  int lo = MASK ? n.seqlen_kv : 0, hi = MASK ? 0 : n.seqlen_kv;
#pragma unroll 1
  for (int g = 0; g < GROUPS; g++) {
    int full_lo = 0, full_hi = n.seqlen_kv;
    const Part part = Part::number(at.tile * GROUPS + g, n);
#if MASK
#pragma unroll 1
    for (int row = threadIdx.x & 31; row < 64; row += 32) {
      if (part.real(row, n)) {
        const Span s = rows(at.batch, at.head * n.group + part.head(row), part.query(row), x, n);
        lo = imin(lo, s.lo), hi = imax(hi, s.hi), full_lo = imax(full_lo, s.full_lo), full_hi = imin(full_hi, s.full_hi);
      }
    }
    full_lo = warp_max(full_lo), full_hi = warp_min(full_hi);
#endif
    if (lead) {
      shared_store(slot + Job::first_query(g), part.first_query), shared_store(slot + Job::first_head(g), part.first_head);
      shared_store(slot + Job::full_begin(g), ceil_div(full_lo, BLOCK_N));
      shared_store(slot + Job::full_end(g), imax(full_hi, 0) / BLOCK_N);
    }
  }
  if (MASK) lo = warp_min(lo), hi = warp_max(hi);
  hi = imin(imax(hi, 0), n.seqlen_kv), lo = imin(imax(lo, 0), hi);
  const int begin = lo / BLOCK_N, end = imax(ceil_div(hi, BLOCK_N), begin + 1);  // at least one, if all of it is masked
  if (lead) {
    shared_store(slot + Job::batch, at.batch), shared_store(slot + Job::head, at.head);
    shared_store(slot + Job::begin, begin), shared_store(slot + Job::end, end);
  }
}

DEVICE void schedule(u32 base, const Tensors& t, const Shape& n, const Aux& x) {
  Ring<2> jobs = Rings(base, 0).jobs;
  const bool lead = (threadIdx.x & 31) == 0;
  int number = blockIdx.x;
#pragma unroll 1
  while (number < n.tiles) {
    int next = number + gridDim.x;
    if (BALANCED && lead) next = atomicAdd(t.work, 1) + gridDim.x;
    jobs.await_empty();
    describe(locate<BALANCED>(number, n), base + AT_JOBS + jobs.stage() * Job::bytes, n, x);
    if (lead) barrier_arrive(jobs.full());
    jobs.next();
    number = __shfl_sync(ALL, next, 0);
  }
  jobs.await_empty();
  if (lead) {
    shared_store(base + AT_JOBS + jobs.stage() * Job::bytes, -1);
    barrier_arrive(jobs.full());
    if (BALANCED && atomicAdd(t.work + 1, 1) == int(gridDim.x) - 1) t.work[0] = t.work[1] = 0;  // as the next launch needs
  }
}

// ---- the loader: one thread that orders tiles into shared memory as room comes free
DEVICE void load(u32 base, const Tensors& t, const Shape& n) {
  Rings rings(base, 0);
#pragma unroll 1
  while (true) {
    rings.jobs.await_full();
    const u32 slot = base + AT_JOBS + rings.jobs.stage() * Job::bytes;
    const int batch = shared_load(slot + Job::batch), head = shared_load(slot + Job::head);
    const int begin = shared_load(slot + Job::begin);
    if (batch < 0) return;
#pragma unroll 1
    for (int j = shared_load(slot + Job::end) - 1, g = 0; j >= begin; j--) {
      rings.k.await_empty();
      KTile::load(base + AT_K + rings.k.stage() * KTile::bytes, t.k, rings.k.full(), j * BLOCK_N, head, batch);
      rings.k.next();
#pragma unroll 1
      for (; g < GROUPS; g++) {  // queries come after the first keys, whose place is free sooner
        const u32 skip = 16 * Q_BUFFERS * g;  // the rings of all groups turn together
        barrier_wait(rings.q.empty() + skip, rings.q.parity() ^ 1);
        QTile::load(base + (g * Q_BUFFERS + rings.q.stage()) * QTile::bytes, t.q, rings.q.full() + skip,
                    shared_load(slot + Job::first_query(g)), head * n.group + shared_load(slot + Job::first_head(g)), batch);
      }
      rings.v.await_empty();
      VTile::load(base + AT_V + rings.v.stage() * VTile::bytes, t.v, rings.v.full(), j * BLOCK_N, head, batch);
      rings.v.next();
    }
    barrier_arrive(rings.jobs.empty());
    rings.jobs.next();
    rings.q.next();
  }
}

// ---- a consumer warpgroup
struct Consumer {
  const Tensors& t;
  const Shape& n;
  const Aux& x;
  const float factor, scale;
  const u32 base;
  const int group, lane, row;  // row: the first of this thread's two in its slice
  Rings rings;
  Softmax<BLOCK_N, BF16> softmax;
  float s[BLOCK_N / 2], o[DIM_V / 2];  // scores, then weights; output
  u32 p[BLOCK_N / 4];                  // weights as the A operand of P V
#if Q_REGISTERS
  u32 q[4 * STEPS];
#endif
  int batch, head, j, begin, full_begin, full_end;  // this query tile
  Part part;

  DEVICE Consumer(const Tensors& t, const Shape& n, const Aux& x, float factor, float scale, u32 base, int group)
      : t(t), n(n), x(x), factor(factor), scale(scale), base(base), group(group), lane(threadIdx.x & 31),
        row(((threadIdx.x & 127) >> 5) * 16 + (lane >> 2)), rings(base, group) {}

  DEVICE void release(u32 bar) const {
    if (lane == 0) barrier_arrive(bar);
  }

  DEVICE bool next_job() {
    rings.jobs.await_full();
    const u32 slot = base + AT_JOBS + rings.jobs.stage() * Job::bytes;
    auto read = [&](int at) { return __shfl_sync(ALL, shared_load(slot + at), 0); };
    const int first = read(Job::batch);
    if (first < 0) return false;
    batch = first, head = read(Job::head), part = {read(Job::first_query(group)), read(Job::first_head(group))};
    begin = read(Job::begin), j = read(Job::end) - 1;
    full_begin = read(Job::full_begin(group)), full_end = read(Job::full_end(group));
    __syncwarp();
    release(rings.jobs.empty());
    rings.jobs.next();
    return true;
  }

  DEVICE u32 q_tile() const { return base + (group * Q_BUFFERS + rings.q.stage()) * QTile::bytes; }

  DEVICE void begin_q() {
    rings.q.await_full();
#if Q_REGISTERS
    const int r = ((threadIdx.x & 127) >> 5) * 16 + (lane & 15);
    UNROLL for (int k = 0; k < STEPS; k++) {
      constexpr int per_chunk = WIDTH / 16;
      u32(&piece)[4] = *reinterpret_cast<u32(*)[4]>(q + 4 * k);
      load_matrix(piece, q_tile() + k / per_chunk * QTile::chunk_bytes + QTile::swizzled(r, k % per_chunk * 2 + (lane >> 4)));
    }
    __syncwarp();
    release(rings.q.empty());
    pin(q);
    rings.q.next();
#endif
  }
  DEVICE void end_q() {
#if !Q_REGISTERS
    release(rings.q.empty());
    rings.q.next();
#endif
  }

  DEVICE void multiply_qk() {  // s = Q K^T
    const u32 keys = along_k(base + AT_K) + rings.k.stage() * (KTile::bytes >> 4);
    UNROLL for (int k = 0; k < STEPS; k++) {
      const u64 b = descriptor<KTile>(keys + step_k<KTile>(k));
#if Q_REGISTERS
      k ? Wgmma<BLOCK_N>::rs<false, false>(s, q + 4 * k, b) : Wgmma<BLOCK_N>::rs<true, false>(s, q, b);
#else
      const u64 a = descriptor<QTile>(along_k(q_tile()) + step_k<QTile>(k));
      k ? Wgmma<BLOCK_N>::ss<false>(s, a, b) : Wgmma<BLOCK_N>::ss<true>(s, a, b);
#endif
    }
    wgmma_commit();
  }
  DEVICE void multiply_pv() {  // o += P V
    const u32 values = across_k<VTile>(base + AT_V) + rings.v.stage() * (VTile::bytes >> 4);
    UNROLL for (int k = 0; k < BLOCK_N / 16; k++)
      Wgmma<DIM_V>::rs<false, true>(o, p + 4 * k, descriptor<VTile>(values + (k * 16 * VTile::row_bytes >> 4)));
    wgmma_commit();
  }
  DEVICE void multiply_both() {  // this tile's scores, and the last tile's share of the output; waits for the scores
    rings.k.await_full();
    pin(o), pin(p);
    if (TURNS) group_sync(8 + group, 256);
    wgmma_fence();
    multiply_qk();
    rings.v.await_full();
    wgmma_fence();
    multiply_pv();
    if (TURNS) group_arrive(8 + (group + 1) % GROUPS, 256);
    wgmma_wait<1>();
    pin(s);
  }
  DEVICE void done_k() { release(rings.k.empty()), rings.k.next(); }
  DEVICE void done_v() { release(rings.v.empty()), rings.v.next(); }

  // Scores as the softmax takes them: scaled and changed by the score function, -inf where masked
  DEVICE void prepare() {
    const int first = j * BLOCK_N + 2 * (lane & 3);
#if SCORE || MASK
    const int query[2] = {part.query(row), part.query(row + 8)};
    const int heads[2] = {head * n.group + part.head(row), head * n.group + part.head(row + 8)};
#endif
#if SCORE
    UNROLL for (int i = 0; i < BLOCK_N / 2; i++) {
      const int r = i / 2 % 2, kv = first + i / 4 * 8 + i % 2;
      s[i] = score(s[i] * scale, batch, heads[r], query[r], kv, x, n);
    }
#elif PRESCALE
    UNROLL for (int i = 0; i < BLOCK_N / 2; i++) s[i] *= scale;
#endif
    if ((!MASK && !RAGGED) || (j < full_end && (!LOWER || j >= full_begin))) return;
#if MASK == 2
    UNROLL for (int i = 0; i < BLOCK_N / 2; i++) {
      const int r = i / 2 % 2, kv = first + i / 4 * 8 + i % 2;
      if (!(kv < n.seqlen_kv && keep(batch, heads[r], query[r], kv, x, n))) s[i] = -INF;
    }
#else
    int lo[2] = {0, 0}, hi[2] = {n.seqlen_kv, n.seqlen_kv};
#if MASK
    UNROLL for (int r = 0; r < 2; r++) {
      const Span span = rows(batch, heads[r], query[r], x, n);
      lo[r] = span.lo, hi[r] = imin(span.hi, n.seqlen_kv);
    }
#endif
    UNROLL for (int r = 0; r < 2; r++) lo[r] -= first, hi[r] -= first;
    UNROLL for (int i = 0; i < BLOCK_N / 2; i++) {
      const int r = i / 2 % 2, offset = i / 4 * 8 + i % 2;
      if (offset >= hi[r] || (LOWER && offset < lo[r])) s[i] = -INF;
    }
#endif
  }

  DEVICE void start() {  // the softmax of a query tile's first key tile
    prepare();
    softmax.start(s, factor);
    softmax.weigh(s, factor);
  }
  DEVICE void pack() {
    UNROLL for (int i = 0; i < BLOCK_N / 4; i++) p[i] = Half::pack(s[2 * i], s[2 * i + 1]);
  }
  DEVICE void clear() {
    UNROLL for (int i = 0; i < DIM_V / 2; i++) o[i] = 0.f;
  }

  DEVICE void step() {
    multiply_both();
    prepare();
    const Guess guess = softmax.speculate(s, factor);
    const bool wrong = group_any(1 + group, guess.wrong[0] || guess.wrong[1]);
    wgmma_wait<0>();
    pin(o);
    if (wrong) {
      wgmma_fence();
      multiply_qk();
      wgmma_wait<0>();
      pin(s);
      prepare();
      float shrink[2];
      softmax.correct(s, factor, guess, shrink);
      UNROLL for (int i = 0; i < DIM_V / 2; i++) o[i] *= shrink[i / 2 % 2];
    }
    done_k(), done_v();
    pack();
  }

  // What is left of a finished query tile: its place, its normalisers
  struct Finished {
    float inverse[2];
    i64 place[2], lse[2];
    int mark[2];
    bool real[2];
  };
  DEVICE Finished finish() {
    Finished f;
    float sink[2] = {-INF, -INF}, lse[2];
    UNROLL for (int r = 0; r < 2; r++) {
      const int query = part.query(row + 8 * r), in_batch = head * n.group + part.head(row + 8 * r);
      const int flat = batch * n.heads_kv * n.group + in_batch;
      f.real[r] = part.real(row + 8 * r, n);
      f.place[r] = batch * t.out_batch + in_batch * t.out_head + query * t.out_row;
      f.lse[r] = i64(flat) * n.seqlen_q + query;
      f.mark[r] = MARKS + (flat + 1) * ceil_div(n.seqlen_q, 64) - 1 - query / 64;
      if (SINKS && f.real[r]) sink[r] = t.sinks[in_batch];
    }
    softmax.finish(factor, sink, f.inverse, lse);
    UNROLL for (int r = 0; r < 2; r++)
      if (f.real[r] && (lane & 3) == 0) t.lse[f.lse[r]] = lse[r];
    return f;
  }

  DEVICE void store(const Finished& f) {
    UNROLL for (int r = 0; r < 2; r++)
      UNROLL for (int i = 0; i < DIM_V / 8; i++)
        UNROLL for (int e = 0; e < 2; e++) o[4 * i + 2 * r + e] *= f.inverse[r];
#if MARK
    UNROLL for (int r = 0; r < 2; r++) {
      float test = 0.f;  // stays 0 unless something is not finite
      UNROLL for (int i = 0; i < DIM_V / 8; i++) test = fmaf(o[4 * i + 2 * r + 1], 0.f, fmaf(o[4 * i + 2 * r], 0.f, test));
      if (f.real[r] && test != 0.f) t.work[f.mark[r]] = 1;
    }
#endif
    UNROLL for (int r = 0; r < 2; r++) store_row(r, f);
  }
  DEVICE void store_row(int r, const Finished& f) {
    const int quarter = lane & 3;
#if WIDE
    float* to = static_cast<float*>(t.out) + f.place[r];
    UNROLL for (int i = 0; i < ceil_div(COLUMNS, 8); i++)
      UNROLL for (int e = 0; e < 2; e++)
        if (f.real[r] && 8 * i + 2 * quarter + e < COLUMNS) to[8 * i + 2 * quarter + e] = o[4 * i + 2 * r + e];
#else
    constexpr int WHOLE = COLUMNS % 8 ? 0 : COLUMNS / 32;
    u16* to = static_cast<u16*>(t.out) + f.place[r];
    UNROLL for (int i = 0; i < WHOLE; i++) {  // four threads turn 4x4 words: 16 bytes each
      u32 a[4];
      UNROLL for (int b = 0; b < 4; b++) a[b] = Half::pack(o[16 * i + 4 * b + 2 * r], o[16 * i + 4 * b + 2 * r + 1]);
      u32 y = quarter & 1 ? a[0] : a[1], z = quarter & 1 ? a[2] : a[3];
      y = __shfl_xor_sync(ALL, y, 1), z = __shfl_xor_sync(ALL, z, 1);
      if (quarter & 1) a[0] = y, a[2] = z; else a[1] = y, a[3] = z;
      y = quarter & 2 ? a[0] : a[2], z = quarter & 2 ? a[1] : a[3];
      y = __shfl_xor_sync(ALL, y, 2), z = __shfl_xor_sync(ALL, z, 2);
      if (quarter & 2) a[0] = y, a[1] = z; else a[2] = y, a[3] = z;
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

  DEVICE void run() {
    if (!next_job()) return;
    if (TURNS && group == 0) group_arrive(8, 256);
    begin_q();
    rings.k.await_full();
    wgmma_fence();
    multiply_qk();
    wgmma_wait<0>();
    pin(s);
    done_k();
    start(), pack(), clear();
    while (true) {
#pragma unroll 1
      for (j--; j >= begin; j--) step();
      end_q();
      const Finished last = finish();
      if (!next_job()) {
        rings.v.await_full();
        pin(o), pin(p);
        wgmma_fence();
        multiply_pv();
        wgmma_wait<0>();
        pin(o);
        store(last);
        return;
      }
      begin_q();
      multiply_both();
      done_k();
      start();
      keep_here(softmax.sum[0] + softmax.sum[1], -factor);
      wgmma_wait<0>();
      pin(o);
      done_v();
      store(last);
      clear(), pack();
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_forward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                   const __grid_constant__ TensorMap v, void* out, float* lse, const float* sinks, int* work, i64 out_batch,
                   i64 out_head, i64 out_row, int heads_kv, int group, int seqlen_q, int seqlen_kv, int tiles_head, int tiles,
                   int section, float factor, float scale AUX_PARAMETERS) {
  extern __shared__ u8 memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const Tensors t{&q, &k, &v, out, out_batch, out_head, out_row, lse, sinks, work};
  const Shape n{heads_kv, group, seqlen_q, seqlen_kv, tiles_head, tiles, section};
  const Aux x{AUX_VALUES};
  if (threadIdx.x == 0) {
    Rings rings(base, 0);
    rings.k.init(4 * GROUPS), rings.v.init(4 * GROUPS), rings.jobs.init(4 * GROUPS + 1);
    for (int g = 0; g < GROUPS; g++) Rings(base, g).q.init(4);
    barrier_publish();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(ALL, threadIdx.x >> 7, 0);
  if (warpgroup == 0) {
    registers_fewer<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) load(base, t, n);
    if (threadIdx.x >= 96) schedule(base, t, n, x);
  } else {
    registers_more<CONSUMER_REGISTERS>();
    Consumer(t, n, x, factor, scale, base, warpgroup - 1).run();
  }
}
