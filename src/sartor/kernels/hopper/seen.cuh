// What a mask reads of a bool tensor for every pair of query and key, where keys are held. The copy engine brings the bytes
// of 32 queries at a time as they lie, a query's keys side by side, and a warp makes a word of them for each key, so that a
// consumer reads all of a key's in one go, and each bit is at a place that the compiler knows.
#pragma once

static_assert(GROUPS == 2 && BLOCK % 32 == 0);

// Four keys a lane: bit q of `word[k]` is what query q has for the k-th of them, of 32 queries
DEVICE void pack_bits(u32 (&word)[4], u32 from) {
  u32 eight[4];  // of each key a byte, with a bit a query
  UNROLL for (int i = 0; i < 4; i++) {
    eight[i] = 0;
    UNROLL for (int q = 0; q < 8; q++) eight[i] += u32(shared_load(from + 128 * (8 * i + q))) << q;
  }
  UNROLL for (int k = 0; k < 4; k += 2) {  // bytes across
    const u32 low = __byte_perm(eight[0], eight[1], k ? 0x7362 : 0x5140);
    const u32 high = __byte_perm(eight[2], eight[3], k ? 0x7362 : 0x5140);
    word[k] = __byte_perm(low, high, 0x5410), word[k + 1] = __byte_perm(low, high, 0x7632);
  }
}

DEVICE void pack_seen(u32 base, Task task) {
  const int lane = threadIdx.x & 31;
  task.walk(Nothing{}, [&, rings = Rings(base)](int, int) mutable {
    rings.tiles.await_empty();
    const u32 to = base + AT_ROWS + rings.tiles.stage() * ROWS_BYTES + BITS + lane * (4 * BLOCK / 8);
#pragma unroll 1
    for (int i = 0; i < BLOCK / 32; i++) {
      u32 word[4];
      rings.raw.await_full();
      pack_bits(word, base + AT_RAW + rings.raw.stage() * PIECE_BYTES + 4 * lane);
      UNROLL for (int k = 0; k < 4; k++) shared_store(to + k * (BLOCK / 8) + 4 * i, word[k]);
      __syncwarp();  // all lanes have read
      if (lane == 0) barrier_arrive(rings.raw.empty());
      rings.raw.next();
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(rings.tiles.full());
    rings.tiles.next();
  });
}

// A thread's, of one key, from the first of its stepped rows on
DEVICE void read_bits(u32 (&seen)[BLOCK / 32], u32 from, int key) {
  UNROLL for (int i = 0; i < BLOCK / 32; i += 2) shared_load_pair(seen[i], seen[i + 1], from + key * (BLOCK / 8) + 4 * i);
  UNROLL for (int i = 0; i < BLOCK / 32; i++) seen[i] >>= 2 * (threadIdx.x & 3);
}
