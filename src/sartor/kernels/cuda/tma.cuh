// TMA, the copy engine: tiles of a 4-d tensor (columns, rows, heads, batch) into swizzled shared memory, and back.
#pragma once
#include "cuda/ptx.cuh"

struct __align__(64) TensorMap { u64 opaque[16]; };
struct TwoMaps { TensorMap at[2]; };  // of chunks, and of a narrower last one
DEVICE const TensorMap* address(const TensorMap& map) { return &map; }
DEVICE const TensorMap* address(const TwoMaps& maps) { return maps.at; }

// L2 cache hints, as createpolicy encodes evict_normal, evict_first and evict_last: a tile is read once, or by many blocks
enum : u64 { EVICT_NORMAL = 0x1000000000000000 };
constexpr u64 EVICT_FIRST = 0x12f0000000000000, EVICT_LAST = 0x14f0000000000000;

DEVICE void tma_load(u32 to, const TensorMap* map, u32 bar, u64 keep, int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%4,%5,%6,%7}], [%2], %3;" ::"r"(to), "l"(map), "r"(bar), "l"(keep), "r"(column), "r"(row), "r"(head),
      "r"(batch) : "memory");
}
DEVICE void tma_store(const TensorMap* map, u32 from, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5}], [%1];"
               ::"l"(map), "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
DEVICE void tma_add(const TensorMap* map, u32 from, int column, int row, int head, int batch) {  // to what is there
  asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2,%3,%4,%5}], [%1];"
               ::"l"(map), "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
// A thread's bulk stores: commits them as a group; waits until shared memory has been read, of all or of all but the last
// group; until memory has been written
DEVICE void stores_end() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void await_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void await_last_but_one_read() { asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); }
DEVICE void await_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// A tile of ROWS rows lies in shared memory as chunks of WIDTH columns (16-bit elements), each ROWS x WIDTH with the
// swizzle of its row length: 64 columns 128 bytes, 32 columns 64 bytes, 16 columns 32 bytes. Columns beyond the tensor's
// are zeros, so a head dim needs no padding in memory. LAST is the width of a narrower last chunk, which has a map of its
// own beside the first; 0 where there is none.
template <int COLUMNS, int ROWS, int WIDTH, int LAST = 0> struct Staged {
  using Last = Staged<LAST ? LAST : 16, ROWS, LAST ? LAST : 16>;
  static constexpr int chunks = LAST ? COLUMNS / WIDTH : (COLUMNS + WIDTH - 1) / WIDTH;
  static constexpr int row_bytes = 2 * WIDTH, chunk_bytes = ROWS * row_bytes, wide_bytes = chunks * chunk_bytes;
  static constexpr int copied_bytes = wide_bytes + 2 * LAST * ROWS, bytes = LAST ? (copied_bytes + 1023) & ~1023 : wide_bytes;
  static constexpr u64 layout = WIDTH == 64 ? 1 : WIDTH == 32 ? 2 : 3;  // as a wgmma descriptor says it

  static DEVICE void load(u32 to, const TensorMap* map, u32 bar, u64 keep, int row, int head, int batch) {
    barrier_expect(bar, copied_bytes);
    UNROLL for (int c = 0; c < chunks; c++) tma_load(to + c * chunk_bytes, map, bar, keep, c * WIDTH, row, head, batch);
    if (LAST) tma_load(to + wide_bytes, map + 1, bar, keep, chunks * WIDTH, row, head, batch);
  }
  // byte offsets of the chunk of the k-th sixteen columns, and in it of the 16 bytes that are half `half` of row `row`
  static constexpr int per_chunk = WIDTH / 16, wide = chunks * per_chunk;
  static DEVICE constexpr int chunk(int k) { return LAST && k >= wide ? wide_bytes : k / per_chunk * chunk_bytes; }
  static DEVICE int swizzled(int row, int k, int half) {
    if (LAST && k >= wide) return Last::swizzled(row, k - wide, half);
    const int phase = WIDTH == 64 ? row & 7 : WIDTH == 32 ? (row >> 1) & 3 : (row >> 2) & 1;
    return row * row_bytes + (((k % per_chunk * 2 + half) ^ phase) << 4);
  }
};

DEVICE void tma_load(u32 to, const TensorMap* map, u32 bar, u64 keep, int column, int row, int head, int batch, int part) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%4,%5,%6,%7,%8}], [%2], %3;" ::"r"(to), "l"(map), "r"(bar), "l"(keep), "r"(column), "r"(row), "r"(head),
      "r"(batch), "r"(part) : "memory");
}

// A tile of a tensor of pairs (triton/split.py), which is 5-d (columns, rows, heads, batch, 2): its hi, then its lo
template <class Tile> struct Pair : Tile {
  static constexpr int lo = Tile::bytes, bytes = 2 * Tile::bytes;

  static DEVICE void load(u32 to, const TensorMap* map, u32 bar, u64 keep, int row, int head, int batch) {
    barrier_expect(bar, bytes);
    UNROLL for (int part = 1; part >= 0; part--)
      UNROLL for (int c = 0; c < Tile::chunks; c++)
        tma_load(to + part * lo + c * Tile::chunk_bytes, map, bar, keep, c * (Tile::row_bytes / 2), row, head, batch, part);
  }
};
