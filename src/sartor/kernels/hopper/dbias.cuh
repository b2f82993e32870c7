// The gradient of what is added to scores for every pair of query and key: the tiles of dS that one sweep has in shared
// memory anyway. Warps that load take them from there, in the inputs' dtype. DADDED 1: nothing is broadcast, the copy engine
// stores them. 2: it adds them up in float32, of which two warps make a few rows at a time, by blocks in any order; blocks
// that add to the same places begin together (Task::number), so that what they add to is in the L2 cache. One warp, which read
// a row, then added it and then read the next, took longer for a tile than all products: 140 clocks a row.
#pragma once

static_assert(GROUPS == 2 && DsTile::row_bytes == 128);

#if DADDED == 2
static_assert(8 % SLICE == 0);
DEVICE float4 widened(const u32 (&x)[2]) {
  return make_float4(Half::widen(u16(x[0])), Half::widen(u16(x[0] >> 16)), Half::widen(u16(x[1])), Half::widen(u16(x[1] >> 16)));
}
// A slice of a tile in float32, four keys a lane: all its rows are read before the first is written
DEVICE void widen(u32 to, u32 tile, int slice) {
  const int lane = threadIdx.x & 31, first = SLICE * slice;
  const u32 from = tile + (lane >> 4) * DsTile::chunk_bytes + first * DsTile::row_bytes + 8 * (lane & 1);
  const u32 piece = (lane << 3 & 0x70) ^ (first & 7) << 4;  // as rows are swizzled
  u32 x[SLICE][2];
  UNROLL for (int i = 0; i < SLICE; i++) shared_load_pair(x[i][0], x[i][1], from + i * DsTile::row_bytes + (piece ^ i << 4));
  UNROLL for (int i = 0; i < SLICE; i++) shared_store_four(to + i * (SLICE_BYTES / SLICE) + 16 * lane, widened(x[i]));
}
#endif

DEVICE void keep_ds(u32 base, Task task, int adder) {  // of DADDED warps, each its share of the slices
  const bool lead = (threadIdx.x & 31) == 0;
  Ring<2> ring = Rings(base).ds;
  const auto leave = [&] {
    __syncwarp();
    if (lead) barrier_arrive(ring.empty());
    ring.next();
  };
  ring.await_full(), leave();  // of no tile yet
  task.walk(Nothing{}, [&](int g, int j) {
    const int head = task.query_head(g);
    ring.await_full();
    const u32 tile = base + AT_DS + ring.stage() * DsTile::bytes;
#if DADDED == 1
    if (lead) {
      UNROLL for (int i = 0; i < GROUPS; i++)
        tma_store(&task.t.dadded, tile + i * DsTile::chunk_bytes, task.first + 64 * i, BLOCK * j, head, task.batch);
      stores_end(), await_stores_read();
    }
#else  // two slices of shared memory a warp
    const int by_head = head * task.t.dsums_by_head, by_item = task.batch * task.t.dsums_by_item;
#pragma unroll 1
    for (int slice = adder; slice < BLOCK / SLICE; slice += 2) {
      const u32 from = base + AT_SLICES + slice % 4 * SLICE_BYTES;
      if (lead) await_last_but_one_read();
      __syncwarp();
      widen(from, tile, slice);
      shared_fence();
      __syncwarp();
      if (lead) tma_add(&task.t.dsums, from, task.first, BLOCK * j + slice * SLICE, by_head, by_item), stores_end();
    }
#endif
    leave();
  });
  if (lead) await_stores_read();  // a block's memory is another's when it has ended
}
