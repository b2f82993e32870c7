// Which weights of a warpgroup's tile stay: sartor/kernels/dropout.py, in the layout of softmax.cuh. Of a patch, a thread
// holds the half of two rows that are both even or both odd, and the one 4 lanes on the other half. Each makes every second
// patch of the keys, and gives half of it for half of the other's.
#pragma once
#include "cuda/ptx.cuh"

#ifndef DROPOUT
#define DROPOUT 0
#endif

// Both halves of a product. Of one in C++ the compiler adds 0 to the upper one
DEVICE void multiply(u32 x, u32 y, u32& high, u32& low) {
  asm("{ .reg .b64 xy; mul.wide.u32 xy, %2, %3; mov.b64 {%0, %1}, xy; }" : "=r"(low), "=r"(high) : "r"(x), "r"(y));
}
// A round of Philox-4x32: of four words of a counter and a key
DEVICE void philox_round(u32 (&c)[4], u32 k0, u32 k1) {
  u32 high[2], low[2];
  multiply(c[0], 0xd2511f53u, high[0], low[0]), multiply(c[2], 0xcd9e8d57u, high[1], low[1]);
  c[0] = high[1] ^ c[1] ^ k0, c[1] = low[1], c[2] = high[0] ^ c[3] ^ k1, c[3] = low[0];
}
// Philox-4x32-7 (Salmon et al. 2011) of some counters, in their places: one beside the other
template <int N> DEVICE void philox(u32 (&c)[N][4], u64 key) {
  u32 k[2] = {u32(key), u32(key >> 32)};
  UNROLL for (int i = 0; i < 7; i++) {
    UNROLL for (int x = 0; x < N; x++) philox_round(c[x], k[0], k[1]);
    k[0] += 0x9e3779b9u, k[1] += 0xbb67ae85u;
  }
}
// Which pairs of a patch stay, in the upper four bits of each byte; the lower ones mean nothing. All numbers are compared
// with the threshold at once, from their lowest bit on: where a bit is the threshold's, the bits below decide
DEVICE u32 decide(const u32 (&c)[4], u32 steps) {
  u32 stay = c[0] * 0x9e3779b9u < steps << 24 ? 0 : ~0u;  // where the numbers are equal: by the patch
  UNROLL for (int pass = 0; pass < 2; pass++) {  // the lower four bits of the numbers, then the upper ones
    if (pass) stay <<= 4;
    UNROLL for (int j = 0; j < 4; j++) {
      const u32 zeros = (steps >> (8 + j) & 1 ? 0 : 0x0f0f0f0fu) | (steps >> (12 + j) & 1 ? 0 : 0xf0f0f0f0u);
      stay = (c[j] & zeros) | (stay & (c[j] | zeros));
    }
  }
  return stay;
}
// Of one pair
DEVICE bool stays(u64 seed, u32 steps, int batch, int head, int query, int key) {
  u32 c[1][4] = {{u32(key / 16 * 4 + key % 8 / 2), u32(query / 16 * 4 + query % 8 / 2), u32(head), u32(batch)}};
  philox(c, seed);
  return decide(c[0], steps) >> (8 * (2 * (query / 8 % 2) + key / 8 % 2) + 7 - 2 * (query % 2) - key % 2) & 1;
}

// All bits of two packed numbers, where byte `byte` of `even` and `odd` has its highest bit: a permutation says it of each
// byte that it picks
DEVICE u32 both_masks(u32 even, u32 odd, int byte) {
  u32 all;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(even), "r"(odd), "r"(0xcc88 + 0x1111 * byte));
  return all;
}

// The lanes of a warp read one seed: by the shuffles the compiler knows that
DEVICE u64 read_seed(const u64* from) {
  u32 low, high;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "l"(from));  // here, and not kept
  return u64(__shfl_sync(ALL, high, 0)) << 32 | __shfl_sync(ALL, low, 0);
}

// Of a tile of 64 rows and N columns: of queries and keys, or with ACROSS the other way round
template <int N, bool ACROSS = false> struct Stay {
  // For a thread's rows and columns 16 t + 8 k + 2 * (lane % 4) + e, row r: bit 7 - at(t, e) of byte 2 r + k, or with ACROSS
  // 2 k + r
  u32 bits[(N + 63) / 64];
  static DEVICE int at(int t, int e) {
    return ACROSS ? 4 * (t % 4 / 2) + t % 2 + 2 * e : 2 * (t % 4) + e;
  }

  // `row`: the first of the warp's 16; `column`: the first, in sixteens
  DEVICE void draw(u64 seed, u32 steps, int batch, int head, int row, int column, int lane) {
    constexpr int apart = ACROSS ? 1 : 2;  // bits from an even row's to an odd one's
    constexpr u32 even = ACROSS ? 0xa0a0a0a0 : 0xc0c0c0c0;
    const bool odd = lane & 4;
    const u32 own = odd ? even >> apart : even;
    UNROLL for (int i = 0; i < (N + 63) / 64; i++) bits[i] = 0;
    UNROLL for (int t = 0; t < N / 16; t += 2) {
      const bool two = t + 1 < N / 16;
      const u32 of_row = row / 4 + (lane >> 3), of_column = 4 * (opaque(column) + t + (two && odd)) + (lane & 3);
      u32 c[1][4] = {{ACROSS ? of_row : of_column, ACROSS ? of_column : of_row, u32(head), u32(batch)}};
      philox(c, seed);
      const u32 mine = decide(c[0], steps), other = two ? __shfl_xor_sync(ALL, mine, 4) : mine;
      // who made the patch of t + 1 has its odd row's bits where they are to be; the others come or go over to them
      const u32 moved = __funnelshift_l(other & own, other & own, odd ? apart : two ? 32 - apart : 0);
      bits[t / 4] |= (two ? (mine & own) | moved : moved) >> (4 * (t % 4 / 2));
      asm volatile("" : "+r"(bits[t / 4]));  // one after the other, in few registers, and where products are under way
    }
  }
  // For the two numbers of columns 8 * (i / 2) and row i % 2, packed: all bits of those that stay
  DEVICE u32 mask(int i) const {
    const int t = i / 4, byte = ACROSS ? 2 * (i / 2 % 2) + i % 2 : 2 * (i % 2) + i / 2 % 2;
    return both_masks(bits[t / 4] << at(t, 0), bits[t / 4] << at(t, 1), byte);
  }
  // One of them, x, or 0: by its bit, or by half of the mask of both, which takes registers and no predicates
  DEVICE float by_bit(float x, int i, int e) const {
    const int t = i / 4, byte = ACROSS ? 2 * (i / 2 % 2) + i % 2 : 2 * (i % 2) + i / 2 % 2;
    return bits[t / 4] & 1u << (8 * byte + 7 - at(t, e)) ? x : 0.f;
  }
  static DEVICE float by_mask(float x, u32 mask, int e) {
    u32 all;
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(all) : "r"(mask), "r"(e ? 0x3232 : 0x1010));
    return __int_as_float(__float_as_int(x) & all);
  }
};

// The same in a forward, where two warps make the bits of 64 rows and N columns for the four warps that multiply: words in
// shared memory, each of two patches side by side
template <int N> struct Drawn {
  enum : int { WORDS = (N + 31) / 32, BYTES = 256 * WORDS };  // a thread's; a warpgroup's
  u32 bits[WORDS];  // of a thread's row r and column 32 w + 16 t + 8 k + e of its: bit 7 - 4 t - e of byte 2 r + k

  // `half`: of the rows, which are from `row` on; `column`: the first, in sixteens
  static DEVICE void draw(u32 to, int half, u64 seed, u32 steps, int batch, int head, int row, int column) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int w = 0; w < WORDS; w++) {
      const u32 of_column = 4 * (column + 2 * w) + (lane & 3), of_row = row / 4 + 8 * half + (lane >> 2);
      u32 c[2][4] = {{of_column, of_row, u32(head), u32(batch)}, {of_column + 4, of_row, u32(head), u32(batch)}};
      philox(c, seed);
      const u32 both = (decide(c[0], steps) & 0xf0f0f0f0) | (decide(c[1], steps) >> 4 & 0x0f0f0f0f);
      shared_store(to + 256 * w + 128 * half + 4 * lane, both);
    }
  }
  DEVICE void read(u32 from, int warp, int lane) {
    UNROLL for (int w = 0; w < WORDS; w++)
      bits[w] = u32(shared_load(from + 256 * w + 64 * warp + 16 * (lane >> 3) + 4 * (lane & 3))) << (lane & 4 ? 2 : 0);
  }
  // For the two numbers of columns 8 * (i / 2) and row i % 2, packed: all bits of those that stay
  DEVICE u32 mask(int i) const {
    const int t = i / 4, byte = 2 * (i % 2) + i / 2 % 2;
    const u32 even = bits[t / 2] << 4 * (t % 2);
    return both_masks(even, even << 1, byte);
  }
};

// The same in a backward in one sweep, with 128 keys along the rows and N queries
template <int N> struct DrawnAcross {
  enum : int { WORDS = 4 * (N / 32), BYTES = 128 * WORDS };  // a warp's, each of 32 keys and 32 queries
  u32 bits;  // of this thread's key r and query 16 t + 8 k + e of its 32: bit 6 - 4 t - 2 e of byte 2 k + r

  // Every `warps`-th of the words, from `warp` on; `query`, `key`: the first, in sixteens
  static DEVICE void draw(u32 to, int warp, int warps, u64 seed, u32 steps, int batch, int head, int query, int key) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int i = warp; i < WORDS; i += warps) {
      const u32 of_key = 4 * key + 8 * (i & 3) + (lane >> 2), of_query = 4 * (query + (i >> 2) * 2) + (lane & 3);
      u32 c[2][4] = {{of_key, of_query, u32(head), u32(batch)}, {of_key, of_query + 4, u32(head), u32(batch)}};
      philox(c, seed);
      const u32 both = (decide(c[0], steps) & 0xf0f0f0f0) | (decide(c[1], steps) >> 4 & 0x0f0f0f0f);
      shared_store(to + 128 * i + 4 * lane, both);
    }
  }
  // The i-th 32 queries; `thread`: of those that share the keys
  DEVICE void read(u32 from, int i, int thread) {
    bits = u32(shared_load(from + 512 * i + 16 * (thread >> 3) + 4 * (thread & 3))) >> (thread & 4 ? 0 : 1);
  }
  // Of the i-th eight queries of these and key r: 2, or 0 where the weight goes. A byte is the highest of a float, so that
  // no mask is made of a bit: a product with it takes the place of an `and`, and of those there is little room
  DEVICE float twice(int i, int r, int e) const {
    u32 x = bits << (4 * (i / 2) + 2 * e) & 0x40404040;
    asm("prmt.b32 %0, %0, 0, %1;" : "+r"(x) : "r"(0x444 + 0x1000 * (2 * (i % 2) + r)));
    return __int_as_float(x);
  }
};
