// The store of a backward's epilogue: a warpgroup's 64 rows of a gradient, from registers to memory.
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
