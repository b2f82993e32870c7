// wgmma, the products of a warpgroup: ordering, shared-memory descriptors, operands. The instructions themselves, a
// struct Wgmma<N> for each width, are generated (wgmma.py): their operand lists depend on N.
#pragma once
#include "cuda/ptx.cuh"
#include "cuda/tma.cuh"

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// A descriptor's high word is constant for a layout; addresses are stepped with 32-bit adds on the low word.
template <class Tile> DEVICE u64 descriptor(u32 low) {
  constexpr u32 high = u32(Tile::layout << 30) | u32(8 * Tile::row_bytes >> 4);
  u64 x;
  asm("mov.b64 %0, {%1, %2};" : "=l"(x) : "r"(low), "r"(high));
  return x;
}
// The low word of an operand whose columns are the product's K dim (Q and K of Q K^T) ...
DEVICE u32 along_k(u32 address) { return (16 >> 4 << 16) | (address >> 4); }
// ... and of one whose rows are (V of P V): its chunks of columns lie a chunk apart
template <class Tile> DEVICE u32 across_k(u32 address) { return (u32(Tile::chunk_bytes >> 4) << 16) | (address >> 4); }
// how far the k-th sixteen columns are, in descriptor units
template <class Tile> DEVICE constexpr u32 step_k(int k) {
  constexpr int per_chunk = Tile::row_bytes / 32;
  return (k / per_chunk * Tile::chunk_bytes + k % per_chunk * 32) >> 4;
}
template <class Tile> DEVICE u64 operand(u32 low, int k) {  // the k-th sixteen columns as an operand
  if (k < Tile::wide) return descriptor<Tile>(low + step_k<Tile>(k));
  return descriptor<typename Tile::Last>(low + (Tile::wide_bytes >> 4) + step_k<typename Tile::Last>(k - Tile::wide));
}

// Four neighbouring threads transpose 4x4 words; this one is number `quarter`. What they have of a row, pairs of
// columns eight apart, becomes 16 bytes each
DEVICE void transpose_words(u32 (&a)[4], int quarter) {
  u32 y = quarter & 1 ? a[0] : a[1], z = quarter & 1 ? a[2] : a[3];
  y = __shfl_xor_sync(ALL, y, 1), z = __shfl_xor_sync(ALL, z, 1);
  if (quarter & 1) a[0] = y, a[2] = z; else a[1] = y, a[3] = z;
  y = quarter & 2 ? a[0] : a[2], z = quarter & 2 ? a[1] : a[3];
  y = __shfl_xor_sync(ALL, y, 2), z = __shfl_xor_sync(ALL, z, 2);
  if (quarter & 2) a[0] = y, a[1] = z; else a[2] = y, a[3] = z;
}
