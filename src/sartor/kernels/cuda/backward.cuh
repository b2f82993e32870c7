// What the Hopper backwards share beside the rows of a block (task.cuh, which tells of the macros): a warpgroup's place,
// mask and marks.
#pragma once
#include "cuda/task.cuh"

// A consumer warpgroup: where it is, and what it does with rows
struct Worker {
  const Task& task;
  const u32 base;
  const int group, lane, row;  // row: the first of this thread's two in its 64
  const float factor, scale;

  DEVICE Worker(const Task& task, u32 base, int group)
      : task(task), base(base), group(group), lane(threadIdx.x & 31), row((threadIdx.x >> 5 & 3) * 16 + (lane >> 2)),
        factor(task.t.factor), scale(task.t.scale) {}

  DEVICE int first() const { return task.first + 64 * group; }
  DEVICE static void read_two(float (&x)[2], u32 at) {
    u32 low, high;
    shared_load_pair(low, high, at);
    x[0] = __int_as_float(low), x[1] = __int_as_float(high);
  }
  DEVICE void read_held(float (&lse)[2], float (&delta)[2]) const {  // of queries; past the end weights become 0
    UNROLL for (int r = 0; r < 2; r++) {
      const int at = first() + row + 8 * r;
      lse[r] = INF, delta[r] = 0.f;
      if (at < task.held()) lse[r] = task.t.lse[task.row(0) + at], delta[r] = task.t.delta[task.row(0) + at];
    }
  }
  DEVICE void mask(float (&weights)[BLOCK / 2], int j, int g) const {
    UNROLL for (int r = 0; r < 2; r++) {
      const Span span = task.span(imin(first() + row + 8 * r, task.held() - 1), g);
      const int from = BLOCK * j + 2 * (lane & 3), lo = span.lo - from, hi = imin(span.hi, task.stepped()) - from;
      UNROLL for (int i = 0; i < BLOCK / 4; i++) {
        const int offset = i / 2 * 8 + i % 2;
        if (offset >= hi || offset < lo) weights[i / 2 * 4 + 2 * r + i % 2] = 0.f;
      }
    }
  }
  // whether the 64 rows are to be computed again; not `fresh`: what an earlier kernel said of them stays
  DEVICE void mark(bool lost, bool fresh = true) const {
    lost = group_any(1 + group, lost);
    const int slices = ceil_div(task.held(), 64), slice = first() / 64;
    const int flat = task.batch * task.heads_held() + task.head;
    if ((threadIdx.x & 127) == 0 && slice < slices && (fresh || lost))
      task.t.marks[flat * slices + (KEYS ? slice : slices - 1 - slice)] = lost;
  }
};

// A block's work: four warps that load, each told its number, and warpgroups that multiply, each told its own
template <class Rings, class Load, class Multiply> DEVICE void divide(u32 base, Load load, Multiply multiply) {
  if (threadIdx.x == 0) Rings(base).init();
  __syncthreads();
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);
  if (warp < 4) {
    registers_fewer<PRODUCER_REGISTERS>();
    load(warp);
  } else {
    registers_more<CONSUMER_REGISTERS>();
    multiply(warp / 4 - 1);
  }
}
