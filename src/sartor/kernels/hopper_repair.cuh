// Tiles that came out non-finite, computed again with care: a masked key is not looked at, so its NaN reaches nothing,
// while NaN and Inf that a row attends to do what they do in the definition. Plain float32 arithmetic, a warp a row; it
// mostly finds nothing to do.
#pragma once

struct Rows { const u16* data; i64 batch, head, row; };  // 16-bit rows that start on 16 bytes, strides in elements

constexpr int REPAIR_WARPS = 4;

struct Repair {
  const Rows &q, &k, &v;
  const Tensors& t;
  const Shape& n;
  const Aux& x;
  const float scale;
  const int lane;
  float* query;  // this warp's row of q, in shared memory
  float top, sum, o[DIM_V / 32 + 1][2];  // o[i]: columns 64 * i + 2 * lane and the next

  // The score of one key; every lane has its own
  DEVICE float dot(const u16* key) const {
    float s = 0.f;
    for (int c = 0; c < DIM_EXACT; c += 8) {
      const uint4 piece = *reinterpret_cast<const uint4*>(key + c);
      const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
      UNROLL for (int i = 0; i < 4; i++) {
        s = fmaf(query[c + 2 * i], Half::widen(u16(words[i])), s);
        s = fmaf(query[c + 2 * i + 1], Half::widen(u16(words[i] >> 16)), s);
      }
    }
    return s;
  }

  DEVICE void fold(const u16* values, float weight, u32 attended) {  // o += weights V over the attended of 32 keys
    for (; attended; attended &= attended - 1) {
      const int i = __ffs(attended) - 1;
      const float w = __shfl_sync(ALL, weight, i);
      const u16* row = values + i * v.row;
      UNROLL for (int c = 0; c < DIM_V / 32 + 1; c++)
        UNROLL for (int e = 0; e < 2; e++) {
          const int column = 64 * c + 2 * lane + e;
          if (column < COLUMNS) o[c][e] = fmaf(w, Half::widen(row[column]), o[c][e]);
        }
    }
  }

  DEVICE void run(int batch, int head, int row) {
    const int key_head = head / n.group;
    const u16* from = q.data + batch * q.batch + head * q.head + row * q.row;
    __syncwarp();
    for (int c = lane; c < DIM_EXACT; c += 32) query[c] = Half::widen(from[c]);
    __syncwarp();
    const Span span = rows(batch, head, row, x, n);
    const int lo = imax(span.lo, 0), hi = imin(span.hi, n.seqlen_kv);
    top = -MOST, sum = 0.f;
    UNROLL for (int c = 0; c < DIM_V / 32 + 1; c++) o[c][0] = o[c][1] = 0.f;
    for (int first = lo; first < hi; first += 32) {
      const int kv = first + lane;
      const bool mine = kv < hi && keep(batch, head, row, kv, x, n);
      float s = -INF;
      if (mine) s = dot(k.data + batch * k.batch + key_head * k.head + i64(kv) * k.row) * scale;
#if SCORE
      if (mine) s = score(s, batch, head, row, kv, x, n);
#endif
      float higher = fmaxf(s, top);
      UNROLL for (int step = 16; step; step /= 2) higher = fmaxf(higher, __shfl_xor_sync(ALL, higher, step));
      const float shrink = power2((top - higher) * LOG2_E), weight = mine ? power2((s - higher) * LOG2_E) : 0.f;
      UNROLL for (int c = 0; c < DIM_V / 32 + 1; c++) o[c][0] *= shrink, o[c][1] *= shrink;
      sum = fmaf(sum, shrink, weight);  // every lane has its share
      top = higher;
      fold(v.data + batch * v.batch + key_head * v.head + i64(first) * v.row, weight, __ballot_sync(ALL, mine));
    }
    UNROLL for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    store(batch, head, row);
  }

  DEVICE void store(int batch, int head, int row) {
    const float sink = SINKS ? t.sinks[head] : -INF;
    const float highest = fmaxf(top, sink), shrink = power2((top - highest) * LOG2_E);
    const float l = sum * shrink + power2((sink - highest) * LOG2_E), inverse = l == 0.f ? 0.f : shrink / l;
    const int flat = batch * n.heads_kv * n.group + head;
    if (lane == 0) t.lse[i64(flat) * n.seqlen_q + row] = l == 0.f ? -INF : highest + logarithm2(l) * LN_2;
    const i64 place = batch * t.out_batch + head * t.out_head + row * t.out_row;
    UNROLL for (int c = 0; c < DIM_V / 32 + 1; c++)
      UNROLL for (int e = 0; e < 2; e++) {
        const int column = 64 * c + 2 * lane + e;
        if (column >= COLUMNS) continue;
        if (WIDE) static_cast<float*>(t.out)[place + column] = o[c][e] * inverse;
        else static_cast<u16*>(t.out)[place + column] = u16(Half::pack(o[c][e] * inverse, 0.f));
      }
  }
};

// A block takes every gridDim-th mark: it looks at 128 of them at once, and clears those it repaired.
extern "C" __global__ void __launch_bounds__(32 * REPAIR_WARPS, 4)
    hopper_repair(const u16* q, i64 q_batch, i64 q_head, i64 q_row, const u16* k, i64 k_batch, i64 k_head, i64 k_row,
                  const u16* v, i64 v_batch, i64 v_head, i64 v_row, void* out, float* lse, const float* sinks, int* work,
                  i64 out_batch, i64 out_head, i64 out_row, int heads_kv, int group, int seqlen_q, int seqlen_kv, int marks,
                  float scale AUX_PARAMETERS) {
  __shared__ float queries[REPAIR_WARPS][DIM_EXACT];
  const Tensors t{nullptr, nullptr, nullptr, out, out_batch, out_head, out_row, lse, sinks, work};
  const Shape n{heads_kv, group, seqlen_q, seqlen_kv, 0, 0, 0};
  const Aux x{AUX_VALUES};
  const Rows qs{q, q_batch, q_head, q_row}, ks{k, k_batch, k_head, k_row}, vs{v, v_batch, v_head, v_row};
  const int warp = threadIdx.x / 32, tiles = ceil_div(seqlen_q, 64), heads = heads_kv * group;
  Repair repair{qs, ks, vs, t, n, x, scale, int(threadIdx.x & 31), queries[warp]};
  for (int first = blockIdx.x; first < marks; first += 128 * gridDim.x) {
    const int own = first + threadIdx.x * gridDim.x;
    if (!__syncthreads_or(own < marks && work[MARKS + own])) continue;
    for (int mark = first; mark < imin(marks, first + 128 * int(gridDim.x)); mark += gridDim.x) {
      if (work[MARKS + mark] == 0) continue;
      const int head = mark / tiles, start = (tiles - 1 - mark % tiles) * 64;
      for (int row = start + warp; row < imin(start + 64, seqlen_q); row += REPAIR_WARPS)
        repair.run(head / heads, head % heads, row);
      __syncthreads();
      if (threadIdx.x == 0) work[MARKS + mark] = 0;
    }
    __syncthreads();
  }
}
