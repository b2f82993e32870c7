// dq of one sweep by a warpgroup of its own (ADDER): it multiplies dS, which the others leave in shared memory, with
// the held keys, and adds to the sums in memory. So only it waits where memory takes sums slowly. Sums of 64 queries lie
// as pieces of eight columns, in the order in which threads have them.
#pragma once
static_assert(BLOCK == 64 && FUSED);

struct Adder : Worker {
  Rings rings;
  DEVICE Adder(const Task& task, u32 base) : Worker(task, base, 0), rings(base) {}

  DEVICE void multiply(float (&dq)[DIM / 2]) {  // a tile's dS with the held keys
    const u32 own = along_k(base + AT_DS + rings.ds.stage() * DsTile::bytes), keys = across_k<Held>(base);
    wgmma_fence();
    UNROLL for (int k = 0; k < 4 * GROUPS; k++) {
      const u64 x = operand<DsTile>(own, k);
      const u64 y = descriptor<Held>(keys + (k / 4 * HELD * Held::bytes + k % 4 * 16 * Held::row_bytes >> 4));
      k ? Wgmma<DIM>::ss<false, true>(dq, x, y) : Wgmma<DIM>::ss<true, true>(dq, x, y);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(dq);
  }
  DEVICE void run() {
    barrier_wait(rings.held, 0);
#pragma unroll 1
    for (int g = 0; g < task.rounds(); g++) {
      const Task::Range tiles = task.range(task.first, 64 * GROUPS, g);
      const i64 head = task.batch * task.heads_q() + task.query_head(g);
      float* sums = task.t.sums + (head * ceil_div(task.n.seqlen_q, BLOCK) + tiles.begin) * (BLOCK * DIM);
      sums += 4 * (threadIdx.x & 127);
#pragma unroll 1
      for (int j = tiles.begin; j < tiles.end; j++, sums += BLOCK * DIM) {
        float dq[DIM / 2];
        rings.ds.await_full();
        multiply(dq);
        if (lane == 0) barrier_arrive(rings.ds.empty());
        rings.ds.next();
        UNROLL for (int i = 0; i < DIM / 2; i += 4)
          global_add_four(sums + 128 * i, make_float4(dq[i], dq[i + 1], dq[i + 2], dq[i + 3]));
      }
    }
  }
};
