// Near values: what masks and score functions read for every pair of query and key, copied to shared memory (cp.async).
// A warp copies the 16 rows that it computes, for the next key tile, while it works on this one. There is room for one
// tile, and only the warp itself has to wait.
#pragma once
#include "cuda/ptx.cuh"

// The rows of one tensor, each from 16 bytes on, padded so that the threads of a warp read from different banks
template <class T, int KEYS> struct NearTile {
  static constexpr int row_bytes = KEYS * sizeof(T), pitch = row_bytes + 16, bytes = 16 * pitch;

  // Two lanes copy a row, from its key `first` on; keys from `count` on become zeros
  static DEVICE void bring(u32 to, const T* row, int first, int count) {
    const int half = 16 * (threadIdx.x & 1), left = (count - first) * int(sizeof(T)) - half;
    const u8* from = reinterpret_cast<const u8*>(row + first) + half;
    to += (threadIdx.x >> 1 & 15) * pitch + half;
    UNROLL for (int at = 0; at < row_bytes; at += 32)
      if (row_bytes % 32 == 0 || at + half < row_bytes)
        copy_16_bytes(to + at, left > at ? from + at : reinterpret_cast<const u8*>(row), imin(imax(left - at, 0), 16));
  }
  // The elements of a row at `key`, which is even, and after it
  static DEVICE void pair(u32 tile, int row, int key, T& low, T& high) {
    const u32 at = tile + row * pitch + key * int(sizeof(T));
    if constexpr (sizeof(T) == 4) {
      u32 a, b;
      shared_load_pair(a, b, at);
      low = *reinterpret_cast<T*>(&a), high = *reinterpret_cast<T*>(&b);
    } else {
      const u32 both = sizeof(T) == 2 ? shared_load(at) : shared_load_short(at);
      low = T(both & (sizeof(T) == 2 ? 0xffff : 0xff)), high = T(both >> 8 * sizeof(T));
    }
  }
};
