// The copy engine: tiles of a 4-d tensor (columns, rows, heads, batch) into swizzled shared memory.
#pragma once
#include "cuda/ptx.cuh"

struct __align__(64) TensorMap { u64 opaque[16]; };

DEVICE void tma_load(u32 to, const TensorMap* map, u32 bar, int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], [%2];" ::"r"(to),
      "l"(map), "r"(bar), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}

// A tile of ROWS rows lies in shared memory as chunks of WIDTH columns (16-bit elements), each ROWS x WIDTH with the
// swizzle of its row length: 64 columns 128 bytes, 32 columns 64 bytes, 16 columns 32 bytes. Columns beyond the tensor's
// are zeros, so a head dim needs no padding in memory.
template <int COLUMNS, int ROWS, int WIDTH> struct Staged {
  static constexpr int chunks = (COLUMNS + WIDTH - 1) / WIDTH;
  static constexpr int row_bytes = 2 * WIDTH, chunk_bytes = ROWS * row_bytes, bytes = chunks * chunk_bytes;
  static constexpr u64 layout = WIDTH == 64 ? 1 : WIDTH == 32 ? 2 : 3;  // as a wgmma descriptor says it

  static DEVICE void load(u32 to, const TensorMap* map, u32 bar, int row, int head, int batch) {
    barrier_expect(bar, bytes);
    UNROLL for (int c = 0; c < chunks; c++) tma_load(to + c * chunk_bytes, map, bar, c * WIDTH, row, head, batch);
  }
  // byte offset of 16-byte piece `piece` of row `row` within its chunk
  static DEVICE int swizzled(int row, int piece) {
    const int turn = WIDTH == 64 ? row & 7 : WIDTH == 32 ? (row >> 1) & 3 : (row >> 2) & 1;
    return row * row_bytes + ((piece ^ turn) << 4);
  }
};

DEVICE void tma_load(u32 to, const TensorMap* map, u32 bar, int column, int row, int head, int batch, int part) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], [%2];" ::"r"(to),
      "l"(map), "r"(bar), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(part) : "memory");
}

// A tile of a tensor of pairs (parts/split.py), which is 5-d (columns, rows, heads, batch, 2): its hi, then its lo
template <class Tile> struct Pair : Tile {
  static constexpr int lo = Tile::bytes, bytes = 2 * Tile::bytes;

  static DEVICE void load(u32 to, const TensorMap* map, u32 bar, int row, int head, int batch) {
    barrier_expect(bar, bytes);
    UNROLL for (int part = 1; part >= 0; part--)
      UNROLL for (int c = 0; c < Tile::chunks; c++)
        tma_load(to + part * lo + c * Tile::chunk_bytes, map, bar, c * (Tile::row_bytes / 2), row, head, batch, part);
  }
};
