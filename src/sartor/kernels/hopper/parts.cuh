// dk and dv where too few blocks of keys are left for the SMs, as with one key head for all query heads (HEAD_PARTS): a block
// takes a part of the query heads that share its keys, and leaves its sums in float32, as threads have them. Here those of all
// parts are added up in their order, so that bits stay the same from run to run, and rounded.
//
// A block makes 64 keys of a head.
#pragma once

DEVICE bool round_sums(const float* from, int parts, u16* to, i64 by_row, float scale, int row, int end) {
  float sum[COLUMNS / 2];
  UNROLL for (int i = 0; i < COLUMNS / 2; i++) sum[i] = 0.f;
#pragma unroll 1
  for (int part = 0; part < parts; part++, from += GROUPS * 2 * 64 * COLUMNS)
    UNROLL for (int i = 0; i < COLUMNS / 8; i++) {
      const float4 x = *reinterpret_cast<const float4*>(from + 512 * i);
      sum[4 * i] += x.x, sum[4 * i + 1] += x.y, sum[4 * i + 2] += x.z, sum[4 * i + 3] += x.w;
    }
  return store_rows<Half, COLUMNS>(sum, to, by_row, scale, row, end);
}

extern "C" __global__ void __launch_bounds__(128) round_parts(ROUND_PARTS_PARAMETERS) {
  const int slices = ceil_div(seqlen_kv, 64), flat = blockIdx.x / slices, slice = blockIdx.x - flat * slices;
  const int batch = flat / heads_kv, head = flat - batch * heads_kv;
  const int row = 64 * slice + (threadIdx.x >> 5) * 16 + (threadIdx.x >> 2 & 7);
  const i64 tile = i64(flat) * ceil_div(slices, GROUPS) + slice / GROUPS;
  partial += (tile * parts * GROUPS + slice % GROUPS) * (2 * 64 * COLUMNS) + 4 * threadIdx.x;
  bool lost = round_sums(partial, parts, dk + batch * dk_batch + head * dk_head, dk_row, scale, row, seqlen_kv);
  lost |= round_sums(partial + 64 * COLUMNS, parts, dv + batch * dv_batch + head * dv_head, dv_row, 1.f, row, seqlen_kv);
#if MASK
  lost = group_any(1, lost);
  if (threadIdx.x == 0) marks[flat * slices + slice] = lost;
#endif
}
