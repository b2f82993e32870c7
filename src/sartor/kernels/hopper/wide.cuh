// What the two kernels of the wide backward have in common: where dS lies in memory between them.
//
// It lies in tiles of 64 keys by 64 queries, 8 KB, each laid out as in shared memory (`DsTile`), so that one bulk copy
// without a tensor map brings it there. A launch makes dS of some key heads and some key tiles. A key tile's tiles of
// dS are side by side, one for each query tile from the first that can see it on.
#pragma once
#include "cuda/tma.cuh"

using DsTile = Staged<64, 64, 64>;  // rows are keys

// The tiles of one launch: of heads of keys from `first_head` on, flat over batches, key tiles [first, first + count)
struct Piece {
  int first_head, first, count, queries;
  int skew, most;  // no query before the tile j - skew sees the tile j of keys; blocks begin with `most` at the latest

  DEVICE int first_query(int j) const { return imin(imax(j - skew, 0), most); }
  DEVICE i64 unseen(int x) const {  // sum of first_query over tiles of keys before x + skew, also those before 0
    const i64 rise = imin(imax(x, 0), most + 1);
    return rise * (rise - 1) / 2 + i64(imax(x - most - 1, 0)) * most;
  }
  DEVICE i64 before(int j) const {  // tiles of a head up to the j-th of keys
    return i64(j - first) * queries - unseen(j - skew) + unseen(first - skew);
  }
  DEVICE i64 a_head() const { return before(first + count); }
  // the tile of keys j and queries i of a head of queries, counted from the launch's first
  DEVICE i64 tile(int head, int j, int i) const { return head * a_head() + before(j) + i - first_query(j); }
};

DEVICE void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {  // the barrier expects them
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
DEVICE void bulk_store(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
DEVICE void barrier_expect_more(u32 bar, u32 bytes) {  // without an arrival
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
