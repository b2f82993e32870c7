// The gradient of what is added to scores for every pair of query and key: the tiles of dS that one sweep has in shared
// memory anyway. A warp that loads takes them from there, in the inputs' dtype. DADDED 1: nothing is broadcast, the copy engine
// stores them. 2: they are added up in float32, by blocks in any order; blocks that add to the same places begin together
// (Task::number), so that what they add to is in the L2 cache.
#pragma once

static_assert(GROUPS == 2 && DsTile::row_bytes == 128);

#if DADDED == 2
DEVICE void add_row(const Task& task, u32 tile, int row, int query, int batch, int head) {  // four keys a lane
  const int lane = threadIdx.x & 31, key = task.first + 4 * lane;
  u32 low, high;
  shared_load_pair(low, high, tile + (lane >> 4) * DsTile::chunk_bytes + DsTile::swizzled(row, lane >> 2 & 3, lane >> 1 & 1) + 8 * (lane & 1));
  float* to = task.t.dsums + batch * task.t.dsums_batch + head * task.t.dsums_head + query * task.t.dsums_row + key;
  const float4 x = {Half::widen(u16(low)), Half::widen(u16(low >> 16)), Half::widen(u16(high)), Half::widen(u16(high >> 16))};
  if (key < task.n.seqlen_kv && query < task.n.seqlen_q) global_add_four(to, x);  // rows have room for four at their end
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
#pragma unroll 4
    for (int row = 0; row < BLOCK; row++) add_row(task, tile, row, BLOCK * j + row, task.batch, head);
#endif
    leave();
  });
}
