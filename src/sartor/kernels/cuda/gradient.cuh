// The stores of a backward's epilogue: a warpgroup's 64 rows of a gradient, from registers to memory, or by the copy engine.
#pragma once
#include "cuda/wgmma.cuh"

// This thread's rows, `row` and `row` + 8, as far as they are before `end`, of COUNT columns. Returns whether something
// is not finite as it is stored
template <class Half, int COUNT, int N>
DEVICE bool store_rows(const float (&sum)[N], u16* to, i64 by_row, float scale, int row, int end) {
  bool lost = false;
  UNROLL for (int r = 0; r < 2; r++) {
    const int at = row + 8 * r;
    u32 test = 0;  // stays 0 unless something is not finite
    u16* place = to + at * by_row;
    UNROLL for (int i = 0; i < COUNT / 8; i += 4) {  // four threads transpose 4x4 words: 16 bytes each
      u32 words[4];
      UNROLL for (int b = 0; b < 4; b++) {
        const int from = 4 * imin(i + b, COUNT / 8 - 1) + 2 * r;
        words[b] = Half::pack(sum[from] * scale, sum[from + 1] * scale);
        test = Half::add_zero_times(test, words[b]);
      }
      transpose_words(words, threadIdx.x & 3);
      const int column = 8 * (i + (threadIdx.x & 3));
      if (at < end && column < COUNT)
        *reinterpret_cast<uint4*>(place + column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    lost |= at < end && test;
  }
  return lost;
}

// The same by a warp, of its 16 rows, over a Tile of shared memory that nothing reads any more: it stages them, and its first
// thread has the copy engine store them, which clips what is beyond the tensor
template <class Half, class Tile, int COUNT, int N>
DEVICE bool leave_rows(const float (&sum)[N], u32 to, const TensorMap& map, float scale, int first, int head, int batch, int end) {
  const int lane = threadIdx.x & 31, slice = 16 * (threadIdx.x >> 5 & 3), row = first + slice + (lane >> 2);
  u32 test[2] = {0, 0};  // of each row, as above
  UNROLL for (int k = 0; k < (COUNT + 15) / 16; k++) {
    u32 words[4];
    UNROLL for (int i = 0; i < 4; i++) {
      const int at = 8 * k + 2 * i;
      words[i] = at < COUNT / 2 ? Half::pack(sum[at] * scale, sum[at + 1] * scale) : 0;
      test[i % 2] = Half::add_zero_times(test[i % 2], words[i]);
    }
    store_matrix(to + Tile::chunk(k) + Tile::swizzled(slice + (lane & 15), k, lane >> 4), words);
  }
  shared_fence();
  __syncwarp();
  if (lane == 0) {
    UNROLL for (int c = 0; c < Tile::chunks; c++)
      tma_store(&map, to + c * Tile::chunk_bytes + slice * Tile::row_bytes, c * (Tile::row_bytes / 2), first + slice, head, batch);
    stores_end();
  }
  return (row < end && test[0]) || (row + 8 < end && test[1]);
}
