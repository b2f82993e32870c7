// The gradient of what is added to scores for every pair of query and key: the tiles of dS that one sweep has in shared
// memory anyway. A warp that loads takes them from there, in the inputs' dtype. DADDED 1: nothing is broadcast, the copy engine
// stores them. 2: it adds them up in float32, of which the warp makes a few rows at a time, by blocks in any order; blocks
// that add to the same places begin together (Task::number), so that what they add to is in the L2 cache. Lanes that added
// them took 140 clocks a row, which all warps waited for.
#pragma once

static_assert(GROUPS == 2 && DsTile::row_bytes == 128);

#if DADDED == 2
// A row of a tile in float32, four keys a lane
DEVICE void widen_row(u32 to, u32 tile, int row) {
  const int lane = threadIdx.x & 31;
  u32 low, high;
  shared_load_pair(low, high, tile + (lane >> 4) * DsTile::chunk_bytes + DsTile::swizzled(row, lane >> 2 & 3, lane >> 1 & 1) + 8 * (lane & 1));
  shared_store_four(to + 16 * lane, make_float4(Half::widen(u16(low)), Half::widen(u16(low >> 16)), Half::widen(u16(high)), Half::widen(u16(high >> 16))));
}
#endif

DEVICE void keep_ds(u32 base, Task task) {
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
#else
    const int by_head = head * task.t.dsums_by_head, by_item = task.batch * task.t.dsums_by_item;
#pragma unroll 1
    for (int slice = 0; slice < BLOCK / SLICE; slice++) {
      const u32 from = base + AT_SLICES + slice % 2 * SLICE_BYTES;
      if (lead) await_last_but_one_read();
      __syncwarp();
#pragma unroll 4  // there are few registers
      for (int row = 0; row < SLICE; row++) widen_row(from + row * (SLICE_BYTES / SLICE), tile, slice * SLICE + row);
      shared_fence();
      __syncwarp();
      if (lead) tma_add(&task.t.dsums, from, task.first, BLOCK * j + slice * SLICE, by_head, by_item), stores_end();
    }
#endif
    leave();
  });
}
