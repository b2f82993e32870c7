// The results of KV splits merged (Dao, Haziza, Massa and Sizov 2023, Flash-Decoding): one weighs its sum of exponentials,
// which is relative to its highest score. A block makes 128 columns of a row of the output; each of its four warps takes
// every fourth split.
#pragma once

struct Merge {
  const float *outs, *sums;  // (batch, num_splits, heads, seqlen_q, COLUMNS), (batch, num_splits, heads, seqlen_q, 2)
  const int num_splits;
  const i64 first, step;  // this row in `sums`, of the first split, and on to the next

  DEVICE float highest(int split) const { return sums[2 * (first + split * step)]; }
  DEVICE float total(int split) const { return sums[2 * (first + split * step) + 1]; }
  DEVICE void read(float (&x)[4], int split, int column) const {
    const float* from = outs + (first + split * step) * COLUMNS + column;
    if (COLUMNS % 4 == 0 && column < COLUMNS) {
      const float4 four = *reinterpret_cast<const float4*>(from);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
      UNROLL for (int e = 0; e < 4; e++) x[e] = column + e < COLUMNS ? from[e] : 0.f;
    }
  }
};

extern "C" __global__ void __launch_bounds__(128) hopper_merge(HOPPER_MERGE_PARAMETERS) {
  __shared__ float shares[4][128], totals[4];
  const int pieces = ceil_div(COLUMNS, 128), row = blockIdx.x / pieces, left = blockIdx.x % pieces * 128;
  const int query = row % seqlen_q, flat = row / seqlen_q, head = flat % heads, batch = flat / heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 step = i64(heads) * seqlen_q;
  const Merge from{outs, sums, num_splits, batch * num_splits * step + i64(head) * seqlen_q + query, step};

  await_launch_before();
  const float sink = sinks ? sinks[head] : -INF;
  float top = sink;
  for (int split = lane; split < num_splits; split += 32) top = fmaxf(top, from.highest(split));
  UNROLL for (int way = 16; way; way /= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, way));
  const float base = fabsf(top) <= MOST ? top : 0.f;  // inf: the sum is NaN

  float share[4] = {0.f, 0.f, 0.f, 0.f}, total = 0.f;
#pragma unroll 4
  for (int split = warp; split < num_splits; split += 4) {
    const float weight = from.total(split) * power2((from.highest(split) - base) * LOG2_E);
    float x[4];
    from.read(x, split, left + 4 * lane);
    UNROLL for (int e = 0; e < 4; e++) share[e] = fmaf(weight, x[e], share[e]);
    total += weight;
  }
  UNROLL for (int e = 0; e < 4; e++) shares[warp][4 * lane + e] = share[e];
  if (lane == 0) totals[warp] = total;
  __syncthreads();

  const int i = threadIdx.x, column = left + i;
  const float sum = (totals[0] + totals[1]) + (totals[2] + totals[3]) + power2((sink - base) * LOG2_E);
  const float result = (shares[0][i] + shares[1][i]) + (shares[2][i] + shares[3][i]);
  const float x = sum == 0.f ? 0.f : result / sum;
  const i64 place = batch * out_batch + head * out_head + query * out_row + column;
  if (column < COLUMNS) {
    if (wide) static_cast<float*>(out)[place] = x;
    else static_cast<u16*>(out)[place] = u16(Half::pack(x, 0.f));
  }
  if (column == 0) global_store(lse, row, sum == 0.f ? -INF : base + logarithm2(sum) * LN_2);
}
