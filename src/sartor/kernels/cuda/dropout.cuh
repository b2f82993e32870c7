// Which weights of a warpgroup's tile stay: sartor/kernels/dropout.py, in the layout of softmax.cuh. Of a patch, a thread
// holds the half of two rows that are both even or both odd, and the one 4 lanes on the other half. Each makes every second
// patch of the keys, and gives half of it for half of the other's.
#pragma once
#include "cuda/ptx.cuh"

#ifndef DROPOUT
#define DROPOUT 0
#endif

// Philox-4x32-10 (Salmon et al. 2011): four words of a counter and a key, in the counter's place
DEVICE void philox(u32 (&c)[4], u64 key) {
  u32 k[2] = {u32(key), u32(key >> 32)};
  UNROLL for (int i = 0; i < 10; i++) {
    const u64 a = u64(0xd2511f53u) * c[0], b = u64(0xcd9e8d57u) * c[2];
    c[0] = u32(b >> 32) ^ c[1] ^ k[0], c[1] = u32(b);
    c[2] = u32(a >> 32) ^ c[3] ^ k[1], c[3] = u32(a);
    k[0] += 0x9e3779b9u, k[1] += 0xbb67ae85u;
  }
}
// The highest bit of each byte: whether the byte is not below the patch's threshold; the others are 0
DEVICE void compare(u32 (&c)[4], u32 steps) {
  const u32 least = (steps >> 8) + ((c[0] + c[1] + c[2] + c[3]) >> 24 < (steps & 255));
  const u32 four = least * 0x01010101u, some = least > 255 ? 0 : 0x80808080u;
  UNROLL for (int j = 0; j < 4; j++) {
    const u32 rest = (c[j] | 0x80808080u) - (four & 0x7f7f7f7fu);
    c[j] = ((c[j] & ~four) | (~(c[j] ^ four) & rest)) & some;
  }
}
// Of one pair
DEVICE bool stays(u64 seed, u32 steps, int batch, int head, int query, int key) {
  u32 c[4] = {u32(key / 16 * 4 + key % 8 / 2), u32(query / 16 * 4 + query % 8 / 2), u32(head), u32(batch)};
  philox(c, seed);
  compare(c, steps);
  const u32 word = query % 2 ? key % 2 ? c[3] : c[2] : key % 2 ? c[1] : c[0];
  return word >> (8 * (2 * (query / 8 % 2) + key / 8 % 2) + 7) & 1;
}

// The lanes of a warp read one seed: by the shuffles the compiler knows that
DEVICE u64 read_seed(const u64* from) {
  u32 low, high;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "l"(from));  // here, and not kept
  return u64(__shfl_sync(ALL, high, 0)) << 32 | __shfl_sync(ALL, low, 0);
}

// Of a tile of 64 rows and N columns: of queries and keys, or with ACROSS the other way round
template <int N, bool ACROSS = false> struct Stay {
  // For a thread's rows and columns 16 t + 8 k + 2 * (lane % 4) + e, row r: bit 7 - 2 (t % 4) - e of byte 2 r + k, or with
  // ACROSS 2 k + r
  u32 bits[(N + 63) / 64];

  // `row`: the first of the warp's 16; `column`: the first, in sixteens
  DEVICE void draw(u64 seed, u32 steps, int batch, int head, int row, int column, int lane) {
    const bool odd = lane & 4;
    UNROLL for (int i = 0; i < (N + 63) / 64; i++) bits[i] = 0;
    UNROLL for (int t = 0; t < N / 16; t += 2) {
      const bool two = t + 1 < N / 16;
      const u32 of_row = row / 4 + (lane >> 3), of_column = 4 * (opaque(column) + t + (two && odd)) + (lane & 3);
      u32 c[4] = {ACROSS ? of_row : of_column, ACROSS ? of_column : of_row, u32(head), u32(batch)};
      philox(c, seed);
      compare(c, steps);
      const u32 of_even = c[0] | c[ACROSS ? 2 : 1] >> 1, of_odd = c[ACROSS ? 1 : 2] | c[3] >> 1, own = odd ? of_odd : of_even;
      if (two) {
        const u32 other = __shfl_xor_sync(ALL, odd ? of_even : of_odd, 4);
        bits[t / 4] |= (odd ? other : own) >> (2 * (t % 4));
        bits[t / 4] |= (odd ? own : other) >> (2 * (t % 4) + 2);
      } else {
        bits[t / 4] |= own >> (2 * (t % 4));
      }
      asm volatile("" : "+r"(bits[t / 4]));  // one after the other, in few registers, and where products are under way
    }
  }
  // For the two numbers of columns 8 * (i / 2) and row i % 2, packed: all bits of those that stay
  DEVICE u32 mask(int i) const {
    const int t = i / 4, byte = ACROSS ? 2 * (i / 2 % 2) + i % 2 : 2 * (i % 2) + i / 2 % 2;
    const u32 even = bits[t / 4] << (2 * (t % 4)), odd = bits[t / 4] << (2 * (t % 4) + 1);
    u32 all;  // the highest bit of a byte, eight times
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(even), "r"(odd), "r"(0xcc88 + 0x1111 * byte));
    return all;
  }
  // One of them, x, or 0: by its bit, or by half of the mask of both, which takes registers and no predicates
  DEVICE float by_bit(float x, int i, int e) const {
    const int t = i / 4, byte = ACROSS ? 2 * (i / 2 % 2) + i % 2 : 2 * (i % 2) + i / 2 % 2;
    return bits[t / 4] & 1u << (8 * byte + 7 - 2 * (t % 4) - e) ? x : 0.f;
  }
  static DEVICE float by_mask(float x, u32 mask, int e) {
    u32 all;
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(all) : "r"(mask), "r"(e ? 0x3232 : 0x1010));
    return __int_as_float(__float_as_int(x) & all);
  }
};
