// What the weights of a row are relative to where scores may bury rows (Program.buries): lse, or, where that is too large to
// hold the logarithm of a sum beside it, the row's highest score, which is found here with the sum of the weights relative to
// it. Differences of such scores are exact. Most rows need nothing: a warp that has no such row is done at once.
//
// A block has 64 rows of a head, a warp 16 of them, against 8 keys at a time. Four threads read a row, each 8 columns out
// of 32: which columns a product takes together does not matter, if both operands take the same. SHARED: lse is of more keys
// than there are here.
#pragma once

constexpr float FAR = 4096.f;  // Program's
constexpr int THIRTY_TWOS = ceil_div(COLUMNS, 32);

struct Highest {  // of one row, in one thread
  float top = -INF, sum = 0.f;
  DEVICE void join(float other, float others) {  // a higher score's and its share of the sum
    const float higher = fmaxf(top, other), from = higher == -INF ? 0.f : higher;
    sum = sum * power2((top - from) * LOG2_E) + others * power2((other - from) * LOG2_E);
    top = higher;
  }
  DEVICE void add(float score) { join(score, score == -INF ? 0.f : 1.f); }
  DEVICE void join_lanes() {
    UNROLL for (int way = 1; way < 4; way *= 2) join(__shfl_xor_sync(ALL, top, way), __shfl_xor_sync(ALL, sum, way));
  }
};

DEVICE void read_columns(uint4 (&to)[THIRTY_TWOS], const u16* row) {
  UNROLL for (int i = 0; i < THIRTY_TWOS; i++) {
    const int column = 32 * i + 8 * (threadIdx.x & 3);
    to[i] = column < COLUMNS ? *reinterpret_cast<const uint4*>(row + column) : make_uint4(0, 0, 0, 0);
  }
}
DEVICE void multiply_16(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {  // 16 rows by 8
  if (BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(128) find_highest(FIND_HIGHEST_PARAMETERS) {
  const Shape n{heads_kv, group, seqlen_q, seqlen_kv, 0, 0, 0};
  const Aux x{AUX_VALUES};
  const int slices = ceil_div(seqlen_q, 64), flat = blockIdx.x / slices, lane = threadIdx.x & 31;
  const int batch = flat / (heads_kv * group), head = flat - batch * (heads_kv * group);
  const int first = 64 * (blockIdx.x - flat * slices) + 16 * (threadIdx.x >> 5) + (lane >> 2);  // row, and 8 on
  float own[2];
  bool far[2];
  UNROLL for (int r = 0; r < 2; r++) {
    const int at = first + 8 * r;
    own[r] = at < seqlen_q ? lse[i64(flat) * seqlen_q + at] : 0.f;
    far[r] = !SHARED && fabsf(own[r]) > FAR;  // infinite too: it may have been too large for who computed it
  }
  Highest found[2];
  if (__any_sync(ALL, far[0] || far[1])) {
    uint4 queries[2][THIRTY_TWOS];
    int lo = seqlen_kv, hi = 0;
    UNROLL for (int r = 0; r < 2; r++) {
      const int at = imin(first + 8 * r, seqlen_q - 1);
      read_columns(queries[r], q + batch * q_batch + head * q_head + at * q_row);
#if MASK
      const Span span = rows(batch, head, at, x, n);
      lo = imin(lo, span.lo), hi = imax(hi, span.hi);
#else
      lo = 0, hi = seqlen_kv;
#endif
    }
    lo = imax(warp_min(lo), 0) & ~7, hi = imin(warp_max(hi), seqlen_kv);
    const u16* keys = k + batch * k_batch + head / group * k_head;
#pragma unroll 1
    for (int kv = lo; kv < hi; kv += 8) {
      uint4 key[THIRTY_TWOS];
      read_columns(key, keys + imin(kv + (lane >> 2), seqlen_kv - 1) * k_row);
      float s[4] = {0.f, 0.f, 0.f, 0.f};
      UNROLL for (int i = 0; i < THIRTY_TWOS; i++) {
        const uint4 &a = queries[0][i], &b = queries[1][i], &c = key[i];
        multiply_16(s, a.x, b.x, a.y, b.y, c.x, c.y), multiply_16(s, a.z, b.z, a.w, b.w, c.z, c.w);
      }
      UNROLL for (int i = 0; i < 4; i++) {
        const int query = imin(first + i / 2 * 8, seqlen_q - 1), at = kv + 2 * (lane & 3) + i % 2;
        bool seen = at < seqlen_kv;
#if MASK
        seen = seen && keep(batch, head, query, imin(at, seqlen_kv - 1), x, n);
#endif
        found[i / 2].add(seen ? score(s[i] * scale, batch, head, query, imin(at, seqlen_kv - 1), x, n) : -INF);
      }
    }
    UNROLL for (int r = 0; r < 2; r++) {
      found[r].join_lanes();
      if (sinks) found[r].add(sinks[head]);
    }
  }
  const i64 kept = i64(flat) * (ceil_div(seqlen_q, 16) * 16);
  UNROLL for (int r = 0; r < 2; r++) {
    const int at = first + 8 * r;
    const bool none = own[r] == -INF && (SHARED || found[r].top == -INF), use = far[r] && !none;
    if ((lane & 3) != 0 || at >= seqlen_q) continue;
    gain[kept + at] = use ? 1.f / found[r].sum : 1.f;
    gain[total + kept + at] = use ? found[r].top : none ? 0.f : own[r];
    log2_sum[kept + at] = none ? INF : use ? logarithm2(found[r].sum) : 0.f;
  }
}
