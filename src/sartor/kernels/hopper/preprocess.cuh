// The preprocess kernel of a backward (Dao 2023, algorithm 2, line 4): delta = rowsum(out * dout) - dlse, and lse in the log2
// domain, +inf for rows without a key, whose weights then are 0. Rows of delta and lse begin on 64 bytes, see Task::row.
// Where one sweep adds up dq (FUSED), its sums are set to zero here. WIDE: out has float32.
//
// A block makes 64 rows of a head. LANES threads read a row, 8 columns each.
#pragma once

constexpr int EIGHTS = COLUMNS / 8, LANES = EIGHTS <= 8 ? 8 : EIGHTS <= 16 ? 16 : 32;
constexpr int TOGETHER = 128 / LANES, DEPTH = 4;  // rows that are read at once, and how often before one is summed up

template <bool WIDE_ROW> struct Eight {  // neighbouring elements of a row
  uint4 words[1 + WIDE_ROW];
  DEVICE void read(const void* row, int eight, bool there) {
    UNROLL for (int i = 0; i <= WIDE_ROW; i++)
      words[i] = there ? static_cast<const uint4*>(row)[(1 + WIDE_ROW) * eight + i] : make_uint4(0, 0, 0, 0);
  }
  DEVICE void widen(float (&to)[8]) const {
    UNROLL for (int i = 0; i <= WIDE_ROW; i++) {
      const u32 x[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
      UNROLL for (int e = 0; e < 4; e++) {
        if (WIDE_ROW) to[4 * i + e] = __int_as_float(x[e]);
        else to[2 * e] = Half::widen(u16(x[e])), to[2 * e + 1] = Half::widen(u16(x[e] >> 16));
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(128) preprocess(PREPROCESS_PARAMETERS) {
  __shared__ float found[64];
  const int slices = FUSED ? ceil_div(seqlen_q, BLOCK) * BLOCK / 64 : ceil_div(seqlen_q, 64);
  // The last heads first where FUSED: the sweep takes the first ones first, and finds in L2 what was read and zeroed last.
  const int place = FUSED ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int flat = place / slices, slice = place - flat * slices, first = 64 * slice;
  const int batch = flat / heads_q, head = flat - batch * heads_q;
#if PERSISTENT && !ORDERED
  if (blockIdx.x == 0 && threadIdx.x == 0) *claimed = 0;
#endif
  const int eight = threadIdx.x % LANES, own = threadIdx.x / LANES;
  out += (2 + 2 * WIDE) * (batch * out_batch + head * out_head);
  dout += 2 * (batch * dout_batch + head * dout_head);
#pragma unroll 1
  for (int from = 0; from < 64; from += DEPTH * TOGETHER) {
    Eight<WIDE> x[DEPTH];
    Eight<false> y[DEPTH];
    UNROLL for (int i = 0; i < DEPTH; i++) {
      const int row = first + from + i * TOGETHER + own;
      const bool there = row < seqlen_q && eight < EIGHTS;
      x[i].read(out + (2 + 2 * WIDE) * row * out_row, eight, there);
      y[i].read(dout + 2 * row * dout_row, eight, there);
    }
#if FUSED
    if (from == 0) {  // while these are on their way
      float4* zero = reinterpret_cast<float4*>(sums + (i64(flat) * slices + slice) * (64 * COLUMNS));
      UNROLL for (int i = 0; i < COLUMNS / 8; i++) zero[128 * i + threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
#endif
    UNROLL for (int i = 0; i < DEPTH; i++) {
      float a[8], b[8], sum = 0.f;
      x[i].widen(a), y[i].widen(b);
      UNROLL for (int e = 0; e < 8; e++) sum = fmaf(a[e], b[e], sum);
      UNROLL for (int way = LANES / 2; way; way /= 2) sum += __shfl_xor_sync(ALL, sum, way);
      if (eight == 0) found[from + i * TOGETHER + own] = sum;
    }
  }
  __syncthreads();
  const int row = first + threadIdx.x;
  if (threadIdx.x < 64 && row < seqlen_q) {
    const i64 of_lse = i64(flat) * seqlen_q + row, kept = i64(flat) * (ceil_div(seqlen_q, 16) * 16) + row;
    const float x = lse[of_lse] * LOG2_E;  // may be beyond float32, where all keys of a row are biased by the least there is
    delta[kept] = found[threadIdx.x] - (dlse ? dlse[of_lse] : 0.f);
    lse_log2[kept] = x == -INF ? INF : x;
  }
}
