// The order of a backward's blocks where intervals come from tables (ORDERED): those with most tiles to visit begin
// first, by powers of two, so that none is left alone at the end. Among equals, neighbours stay together: they visit
// the same tiles, which are then in L2. Only the first and the last of a block's rows are looked at, which is enough
// for an order.
//
// One block sorts, by counting: each warp counts and places neighbouring blocks.
#pragma once

constexpr int SORTERS = 32, BUCKETS = 32;  // warps; bucket b has the blocks of 2^(31 - b) tiles on

DEVICE int bucket_of(int block, int tiles, const Shape& n, const Aux& x) {
  const int length = KEYS ? n.seqlen_kv : n.seqlen_q, stepped = KEYS ? n.seqlen_q : n.seqlen_kv;
  const int item = block / tiles, first = block % tiles * 64 * GROUPS;
  int lo = stepped, hi = 0;
  UNROLL for (int i = 0; i < 2; i++) {
    const int at = i ? imin(first + 64 * GROUPS, length) - 1 : first;
    const Span s = KEYS ? cols(item, 0, at, x, n) : rows(item, 0, at, x, n);
    if (s.lo < s.hi) lo = imin(lo, s.lo), hi = imax(hi, s.hi);
  }
  return imin(__clz(imax(ceil_div(imin(hi, stepped), BLOCK) - imax(lo, 0) / BLOCK, 0)), BUCKETS - 1);
}

extern "C" __global__ void __launch_bounds__(32 * SORTERS) order_blocks(ORDER_BLOCKS_PARAMETERS) {
  __shared__ int places[BUCKETS][SORTERS], totals[BUCKETS];  // how many of a bucket a warp has, then where its next one goes
  const Shape n{heads_kv, group, seqlen_q, seqlen_kv, 0, 0, 0};
  const Aux aux{AUX_VALUES};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int tiles = ceil_div(KEYS ? seqlen_kv : seqlen_q, 64 * GROUPS), blocks = batch * tiles;
  const int share = ceil_div(blocks, 32 * SORTERS) * 32, first = warp * share, end = imin(first + share, blocks);
  places[warp][lane] = 0;
  __syncthreads();
#pragma unroll 1
  for (int place = 0; place < 2; place++) {
#pragma unroll 1
    for (int from = first; from < end; from += 32) {
      const int block = from + lane, bucket = block < end ? bucket_of(block, tiles, n, aux) : BUCKETS;
      const u32 same = __match_any_sync(ALL, bucket);
      const int rank = __popc(same & ((1u << lane) - 1)), next = block < end ? places[bucket][warp] : 0;
      __syncwarp();
      if (block < end && rank == 0) places[bucket][warp] = next + __popc(same);
      if (block < end && place) order[next + rank] = block;
      __syncwarp();
    }
    __syncthreads();
    if (place) break;
    const int own = places[warp][lane];  // of bucket `warp`, what warp `lane` has
    int sum = own;
    UNROLL for (int way = 1; way < 32; way *= 2) {
      const int x = __shfl_up_sync(ALL, sum, way);
      if (lane >= way) sum += x;
    }
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    int before = sum - own;
    for (int i = 0; i < warp; i++) before += totals[i];
    places[warp][lane] = before;
    __syncthreads();
  }
  if (threadIdx.x == 0) order[blocks] = 0;  // how many were claimed besides each block's first
}
