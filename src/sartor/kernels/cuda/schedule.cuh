// The tile scheduler's arithmetic. A query tile is of queries that share a key head: GROUPS slices of 64 rows, one a
// consumer warpgroup. A slice is ROWS queries of 64 / ROWS heads: of one, or of several that share keys where queries
// are few.
#pragma once
#include "cuda/ptx.cuh"
#include "cuda/tma.cuh"

struct Shape { int heads_kv, group, seqlen_q, seqlen_kv, tiles_head, tiles, section, whole, splits, width; };

struct Rows { const u16* data; i64 batch, head, row; };  // 16-bit rows that start on 16 bytes, strides in elements
struct Inputs { Rows q, k, v; };

// Of a block list (kernels/blocks.py): a tile, and for each warpgroup where its bits are
struct alignas(16) Entry { int tile, bits[3]; };

template <int ROWS> struct SliceOf {
  static constexpr int heads = 64 / ROWS;
  int first_query, first_head;  // head: of those that share the key head

  static DEVICE int slots(const Shape& n) { return ceil_div(n.group, heads); }
  static DEVICE int count(const Shape& n) { return ceil_div(n.seqlen_q, ROWS) * slots(n); }
  static DEVICE SliceOf number(int index, const Shape& n) {
    const int slots = SliceOf::slots(n), block = index / slots;
    return {block * ROWS, (index - block * slots) * heads};
  }
  DEVICE int query(int row) const { return ROWS == 64 ? first_query + row : first_query + row % ROWS; }
  DEVICE int head(int row) const { return ROWS == 64 ? first_head : first_head + row / ROWS; }
  DEVICE bool real(int row, const Shape& n) const { return query(row) < n.seqlen_q && (ROWS == 64 || head(row) < n.group); }
};

// A work tile in shared memory, by byte offsets. Of the query tile: batch (an item; -1 where there are no more), head,
// its key tiles [begin, end), and the key tile at which the next work tile is claimed (claim_at). Of slice g: its first
// query and head, the key tiles [full_begin, full_end) that need no mask, and [own_begin, own_end), outside which it
// sees nothing. INTERVALS: also the interval of keys of each row.
template <int GROUPS, bool INTERVALS> struct WorkTile {
  static constexpr int batch = 0, head = 4, begin = 8, end = 12, claim_at = 16, intervals = 24 + 24 * GROUPS;
  static constexpr int bytes = intervals + (INTERVALS ? 512 * GROUPS : 0);
  static DEVICE int first_query(int g) { return 20 + 24 * g; }
  static DEVICE int first_head(int g) { return 24 + 24 * g; }
  static DEVICE int full_begin(int g) { return 28 + 24 * g; }
  static DEVICE int full_end(int g) { return 32 + 24 * g; }
  static DEVICE int bits(int g) { return full_begin(g); }  // of a block list's last entry
  static DEVICE int own_begin(int g) { return 36 + 24 * g; }
  static DEVICE int own_end(int g) { return 40 + 24 * g; }
  static DEVICE int interval(int g, int row) { return intervals + 512 * g + 8 * row; }
};

// The place of a query tile by its number. BALANCED: the longest come first over a section of heads, as many as keep
// their keys in L2. SECTIONED: a section's heads take turns, tile by tile; they read the same bias or mask, which is then in
// L2. Otherwise the tiles of a head follow each other. BATCH_FIRST: after a head comes the same head of the next batch item,
// not the next head.
struct Place { int batch, head, tile; };
template <bool BALANCED, bool SECTIONED = false, bool BATCH_FIRST = false> DEVICE Place locate(int number, const Shape& n) {
  int flat, tile;
  if (BALANCED || SECTIONED) {
    const int heads = n.tiles / n.tiles_head, first = number / (n.tiles_head * n.section) * n.section;
    const int width = imin(n.section, heads - first), left = number - first * n.tiles_head;
    tile = BALANCED ? n.tiles_head - 1 - left / width : left / width;
    flat = first + left % width;
  } else {
    flat = number / n.tiles_head;
    tile = number - flat * n.tiles_head;
  }
  if (BATCH_FIRST) {
    const int items = n.tiles / n.tiles_head / n.heads_kv;
    return {flat % items, flat / items, tile};
  }
  return {flat / n.heads_kv, flat % n.heads_kv, tile};
}

// What is to be computed by number: `count` slices of a query tile from its `first` on, as far as there are. With
// LAST_WAVE the last wave is split: first come `n.whole` whole tiles, equally many a block; then the rest of them, in
// `n.splits` parts of `n.width` slices; then what is left of each head, too little for a tile.
struct Share : Place { int first, count; };
template <int GROUPS, bool BALANCED, bool LAST_WAVE, bool SECTIONED, bool BATCH_FIRST>
DEVICE Share share(int number, const Shape& n) {
  const int index = number - n.whole, per_tile = ceil_div(GROUPS, n.width);
  if (!LAST_WAVE || index < 0) return {locate<BALANCED, SECTIONED, BATCH_FIRST>(number, n), 0, GROUPS};
  if (index < n.splits) return {locate<BALANCED>(n.whole + index / per_tile, n), index % per_tile * n.width, n.width};
  const int flat = index - n.splits;
  return {{flat / n.heads_kv, flat % n.heads_kv, n.tiles_head}, 0, GROUPS};
}
