// float32 rows are split into hi/lo pairs (triton/split.py), by warps of the kernel that multiplies the pairs.
#pragma once
#include "cuda/schedule.cuh"

// The power of two that brings the largest element, `top`, into [2^14, 2^15), and its inverse (triton/maths.py)
struct Power { float up, down; };
DEVICE Power power_of_two(float top) {
  const int exponent = imax(__float_as_int(top) >> 23, 15);
  return {__int_as_float((268 - exponent) << 23), __int_as_float((exponent - 14) << 23)};
}
// The unit of elements of which `top` is the largest: NaN where one is infinite
DEVICE float unit_of(float top) { return top < INF ? power_of_two(top).down : __int_as_float(0x7fffffff); }

// Four columns of a row, of which `left` are in memory, to shared memory; the rest become zeros
template <bool VECTOR> DEVICE void copy_four(u32 to, const float* from, int left) {
  if (VECTOR) copy_16_bytes(to, from, left > 0 ? 16 : 0);
  else UNROLL for (int e = 0; e < 4; e++) copy_4_bytes(to + 4 * e, from + e, left > e ? 4 : 0);
}
DEVICE float largest(float top, const float4& x) {
  return fmaxf(fmaxf(top, fmaxf(fabsf(x.x), fabsf(x.y))), fmaxf(fabsf(x.z), fabsf(x.w)));
}
DEVICE void split(const float4& x, float up, uint2& hi, uint2& lo) {
  split(x.x * up, x.y * up, hi.x, lo.x), split(x.z * up, x.w * up, hi.y, lo.y);
}

struct Source { const float* at; i64 batch, head, row; };  // (batch, heads, rows, columns) by strides, in elements

// ---- two warps that split rows together, with `room` in shared memory and a named barrier
struct Team {
  const u32 room;  // TEAM_BYTES for what they exchange, then what a Splitter needs
  const int id, thread;
  DEVICE Team(u32 room, int id, int first_warp) : room(room), id(id), thread(threadIdx.x - 32 * first_warp) {}

  DEVICE float largest(float x) const {
    x = __int_as_float(warp_max(__float_as_int(x)));
    if (thread % 32 == 0) shared_store(room + thread / 8, __float_as_int(x));
    group_sync(id, 64);
    return fmaxf(__int_as_float(shared_load(room)), __int_as_float(shared_load(room + 4)));
  }
  DEVICE int broadcast(int x) const {  // what the first thread has
    if (thread == 0) shared_store(room + 8, x);
    group_sync(id, 64);
    return shared_load(room + 8);
  }
  DEVICE bool any(bool x) const { return group_any(id, x, 64); }
};
constexpr int TEAM_BYTES = 16;

// ---- a team makes the pairs of COUNT rows: copies them to shared memory, finds the largest element, splits by its
// unit. STRICT: a row, or a warp's half of a column, that would lose bits makes the unit NaN. VECTOR: rows begin and
// end on 16 bytes.
template <int COLUMNS, int COUNT, bool VECTOR, bool STRICT> struct Splitter {
  static constexpr int PITCH = ceil_div(COLUMNS, 8) * 8;
  static constexpr int LANES = PITCH > 64 ? 32 : PITCH > 32 ? 16 : PITCH > 16 ? 8 : PITCH > 8 ? 4 : 2;  // threads a row
  static constexpr int CHUNKS = ceil_div(PITCH, 4 * LANES), ABREAST = 64 / LANES, STEPS = ceil_div(COUNT, ABREAST);
  static constexpr int STEP_BYTES = 1024, bytes = STEPS * CHUNKS * STEP_BYTES;  // a thread reads what it copied, 16 bytes a step
  static constexpr float ROOM = 1.f / 32768;  // triton/split.py

  DEVICE static float over_row(float x) {  // the largest of a row's threads
    if constexpr (LANES == 32) x = __int_as_float(warp_max(__float_as_int(x)));
    else UNROLL for (int lane = 1; lane < LANES; lane *= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, lane));
    return x;
  }
  DEVICE static float over_column(float x) {
    UNROLL for (int lane = LANES; lane < 32; lane *= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, lane));
    return x;
  }

  // `rows` and `column` are this thread's: how many rows there are from its first on, and its first column
  DEVICE static void fetch(const float* from, i64 stride, int rows, int column, u32 room) {
#pragma unroll 4
    for (int i = 0; i < STEPS; i++, from += ABREAST * stride, rows -= ABREAST)
      UNROLL for (int c = 0; c < CHUNKS; c++, room += STEP_BYTES) {
        const int left = rows > 0 ? COLUMNS - column - c * 4 * LANES : 0;
        copy_four<VECTOR>(room, from + c * 4 * LANES, left);
      }
    await_copies();
  }

  DEVICE static float largest(const Team& team, u32 room, bool& lossy) {
    float top = 0.f, least = INF, by_column[CHUNKS][4] = {};  // least: of the rows and columns that are not 0
#pragma unroll 4
    for (int i = 0; i < STEPS; i++) {
      float by_row = 0.f;
      UNROLL for (int c = 0; c < CHUNKS; c++, room += STEP_BYTES) {
        const float4 x = shared_load_four(room);
        by_row = ::largest(by_row, x);
        if (STRICT) {
          float(&most)[4] = by_column[c];
          most[0] = fmaxf(most[0], fabsf(x.x)), most[1] = fmaxf(most[1], fabsf(x.y));
          most[2] = fmaxf(most[2], fabsf(x.z)), most[3] = fmaxf(most[3], fabsf(x.w));
        }
      }
      if (STRICT) {
        by_row = over_row(by_row);
        if (by_row > 0.f) least = fminf(least, by_row);
      }
      top = fmaxf(top, by_row);
    }
    top = team.largest(top);
    if (STRICT) {
      UNROLL for (int c = 0; c < CHUNKS; c++)
        UNROLL for (int e = 0; e < 4; e++) {
          const float most = over_column(by_column[c][e]);
          if (most > 0.f) least = fminf(least, most);
        }
      lossy = least < top * ROOM;
    }
    return top;
  }

  // Writes the pairs of `rows` rows, COUNT at most, for wgmma to read, and returns their unit
  DEVICE static float run(const Team& team, const float* from, i64 stride, int rows, u16* to) {
    const int thread = opaque(team.thread), row = thread / LANES, column = 4 * (thread % LANES);
    u32 room = team.room + TEAM_BYTES + 16 * thread;
    rows -= row, to += row * (2 * PITCH) + column;
    fetch(from + row * stride + column, stride, rows, column, room);
    bool lossy = false;
    const float top = largest(team, room, lossy), up = power_of_two(top).up;
#pragma unroll 4
    for (int i = 0; i < STEPS; i++, rows -= ABREAST, to += ABREAST * 2 * PITCH)
      UNROLL for (int c = 0; c < CHUNKS; c++, room += STEP_BYTES) {
        const float4 x = shared_load_four(room);
        uint2 hi, lo;
        split(x, up, hi, lo);
        if (rows <= 0 || column + c * 4 * LANES >= PITCH) continue;
        u16* at = to + c * 4 * LANES;
        *reinterpret_cast<uint2*>(at) = hi, *reinterpret_cast<uint2*>(at + PITCH) = lo;
      }
    global_fence();
    return team.any(lossy) ? __int_as_float(0x7fffffff) : unit_of(top);
  }
};
