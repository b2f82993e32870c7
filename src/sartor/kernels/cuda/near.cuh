// Near values: what masks and score functions read for every pair of query and key, brought to shared memory tile by
// tile: by warps of the producer, ahead of the warpgroup that reads them (by the copy engine, or cp.async), or by each warp for
// its own 16 rows (cp.async), for the next key tile while it works on this one.
#pragma once
#include "cuda/tma.cuh"

// The elements of sixteen keys that go with a thread's scores: in each of its two rows, eight apart, two neighbouring keys
// and the two that are eight on. All lanes of a warp ask together
template <class Tile, class T> DEVICE void near_block(u32 tile, int key, T (&to)[8]) {
  const int lane = threadIdx.x & 31;
  UNROLL for (int i = 0; i < 4; i++)
    Tile::pair(tile, (lane >> 2) + 8 * (i & 1), key + 8 * (i >> 1) + 2 * (lane & 3), to[2 * i], to[2 * i + 1]);
}

// The rows of one tensor, each from 16 bytes on. So that the threads of a warp read from different banks, elements of at
// most 16 bits lie in chunks of 128 bytes, swizzled as the copy engine has it, where rows are full of these
// (brought.swizzled); the others' rows are padded
template <class T, int KEYS> struct NearTile {
  static constexpr int row_bytes = KEYS * sizeof(T);
  static constexpr bool swizzled = sizeof(T) <= 2 && row_bytes % 128 == 0;
  static constexpr int pitch = swizzled ? 128 : row_bytes + 16, bytes = 16 * (swizzled ? row_bytes : pitch);
  // Where byte `at` of a row is
  static DEVICE int place(int row, int at) {
    return row * pitch + (swizzled ? at / 128 * 2048 + (at % 128 ^ (row & 7) << 4) : at);
  }

  // Two lanes copy a row, from its key `first` on; keys from `count` on become zeros
  static DEVICE void bring(u32 to, const T* row, int first, int count) {
    const int half = 16 * (threadIdx.x & 1), left = (count - first) * int(sizeof(T)) - half;
    const u8* from = reinterpret_cast<const u8*>(row + first) + half;
    const int own = threadIdx.x >> 1 & 15;
    UNROLL for (int at = 0; at < row_bytes; at += 32)
      if (row_bytes % 32 == 0 || at + half < row_bytes)
        copy_16_bytes(to + place(own, at + half), left > at ? from + at : reinterpret_cast<const u8*>(row),
                      imin(imax(left - at, 0), 16));
  }
  // The same for 64 rows, of which 16 are every `apart` bytes, by a warp whose neighbouring lanes copy neighbouring pieces.
  // ENDS: there may be keys from `count` on; `even`: rows are equally far from each other
  template <bool ENDS, int apart, class Row> static DEVICE void load(u32 to, bool even, Row row, int first, int count) {
    constexpr int pieces = row_bytes / 16, step = 32 / pieces;  // of a row; rows a copy of all lanes
    const int lane = threadIdx.x & 31, left = (count - first) * int(sizeof(T));
    auto copy = [&](u32 to, const u8* from, int at) {
      const int bytes = ENDS ? imin(imax(left - at, 0), 16) : 16;
      copy_16_bytes(to, ENDS && bytes == 0 ? from - at : from, bytes);
    };
    if (32 % pieces == 0 && step <= 8 && even) {
      const int at = lane % pieces * 16, own = lane / pieces, begin = place(own, at);
      const u8* from = reinterpret_cast<const u8*>(row(own) + first) + at;
      const i64 stride = step * (reinterpret_cast<const u8*>(row(1)) - reinterpret_cast<const u8*>(row(0)));
#pragma unroll 1
      for (int i = 0; i < 8; i++, to += i % 2 ? 8 * pitch : apart - 8 * pitch)  // eight rows each
        UNROLL for (int r = 0; r < 8; r += imax(step, 1), from += stride)
          copy(to + (swizzled ? opaque(begin) ^ r << 4 : begin) + r * pitch, from, at);
    } else {
#pragma unroll 1
      for (int i = 0; i < 2 * pieces; i++) {
        const int piece = 32 * i + lane, r = piece / pieces, at = piece % pieces * 16;
        copy(to + r / 16 * apart + place(r % 16, at), reinterpret_cast<const u8*>(row(r) + first) + at, at);
      }
    }
  }
  // The same of 16 rows by the copy engine, by one thread; zeros come from beyond the ends
  static DEVICE void map(u32 to, const TensorMap* from, u32 bar, int key, int query, int head, int batch) {
    static_assert(swizzled, "as the copy engine lays a tile out");
    constexpr int keys = 128 / sizeof(T);
    UNROLL for (int c = 0; c < row_bytes / 128; c++)
      tma_load(to + 2048 * c, from, bar, EVICT_NORMAL, key + keys * c, query, head, batch);
  }
  // The elements of a row at `key`, which is even, and after it
  static DEVICE void pair(u32 tile, int row, int key, T& low, T& high) {
    const u32 at = tile + place(row, key * int(sizeof(T)));
    if constexpr (sizeof(T) == 4) {
      u32 a, b;
      shared_load_pair(a, b, at);
      low = *reinterpret_cast<T*>(&a), high = *reinterpret_cast<T*>(&b);
    } else {
      unpack(sizeof(T) == 2 ? shared_load(at) : shared_load_short(at), low, high);
    }
  }
  // Elements of sixteen keys from `key` on: see `near_block`. The address is made anew each time: eight of them, one for
  // each place of a piece, would be held in registers
  static DEVICE void block(u32 tile, int key, T (&to)[8]) {
    if constexpr (sizeof(T) == 2) {
      u32 x[4];
      const int lane = threadIdx.x & 31;
      const u32 own = opaque(place(lane & 15, 16 * (lane >> 4)));
      const int chunk = 2 * key / 128 * (swizzled ? 2048 : 128);
      load_matrix(x, tile + (swizzled ? own ^ 2 * key % 128 : own + 2 * key % 128) + chunk);
      UNROLL for (int i = 0; i < 4; i++) unpack(x[i], to[2 * i], to[2 * i + 1]);
    } else {
      near_block<NearTile>(tile, key, to);
    }
  }
  static DEVICE void unpack(u32 both, T& low, T& high) {
    low = T(both & (sizeof(T) == 2 ? 0xffff : 0xff)), high = T(both >> 8 * sizeof(T));
  }
};

// A table that is read at the distance of query and key: its elements for 16 rows and a tile of keys, each beside the one
// before it, which the next key reads
template <int KEYS> struct NearStrip {
  static constexpr int count = KEYS + 15, bytes = 8 * (KEYS + 16);

  // `value(kv, q)` is the element of a key and a query; `ahead` is the first row less the first key
  template <class Value> static DEVICE void bring(u32 to, Value value, int first, int ahead) {
    UNROLL for (int i = 0; i < ceil_div(count, 32); i++) {
      const int at = 32 * i + int(threadIdx.x & 31);
      if (at >= count) break;
      const float x = value(first, first + ahead - (KEYS - 1) + at);
      shared_store(to + 8 * at, __float_as_int(x)), shared_store(to + 8 * at + 12, __float_as_int(x));
    }
  }
  static DEVICE void pair(u32 strip, int row, int key, float& low, float& high) {
    u32 a, b;
    shared_load_pair(a, b, strip + 8 * (row - key + KEYS - 1));
    low = __int_as_float(a), high = __int_as_float(b);
  }
  static DEVICE void block(u32 strip, int key, float (&to)[8]) { near_block<NearStrip>(strip, key, to); }
};

// ---- a row of bools as bits
// Four bytes as four bits, into the low end of `bits`: a byte that is not 0 is true
DEVICE u32 with_bytes(u32 bits, u32 x) {
  const u32 set = (((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) & 0x80808080u;
  return __funnelshift_l(set * 0x00204081u, bits, 4);
}
// Of a row of KEYS bools in a tile and 128 keys from `first` on, this thread's bits: 2 * i + e for key
// 8 * i + 2 * (lane % 4) + e
template <int KEYS> DEVICE u32 seen_bits(u32 tile, int row, int first) {
  using Tile = NearTile<bool, KEYS>;
  const u32 own = tile + Tile::place(row, first) + 2 * (threadIdx.x & 3);
  u32 found = 0;
  UNROLL for (int i = imin(KEYS - first, 128) / 16 - 1; i >= 0; i--) {
    const u32 at = Tile::swizzled ? own ^ 16 * i : own + 16 * i;
    found = with_bytes(found, shared_load_short(at) | shared_load_short(at + 8) << 16);
  }
  return found;
}
