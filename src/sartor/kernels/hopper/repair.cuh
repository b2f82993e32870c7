// NaN repair: rows that came out not finite under a mask are computed again. Masked keys are not read, so that a NaN of
// theirs reaches nothing; NaN and infinities that a row attends to do what they do in the definition. Plain float32
// arithmetic. After all its query tiles a warp repairs its own rows, mostly none.
#pragma once

#if MASK

// What a warp has marked, 16 rows of a slice each: a list linked through the workspace, where each mark's place holds
// the mark before it, plus 1
struct Marks {
  static constexpr int begin = 4;  // after the scheduler's counters
  int last = 0;

  DEVICE void add(int mark, int* work) {
    work[begin + mark] = last;  // by every lane
    last = mark + 1;
  }
};

struct Repair {
  const Params& t;
  const Shape& n;
  const Aux& x;
  const int warp, lane;
  float* query;  // this warp's row of q, in shared memory
  float top, sum, o[ceil_div(DIM_V, 64)][2];  // o[i]: columns 64 * i + 2 * lane and the next

  // The score of one key; every lane has its own
  DEVICE float dot(const u16* key) const {
    float s = 0.f;
    for (int c = 0; c < DIM_EXACT; c += 8) {
      const uint4 piece = *reinterpret_cast<const uint4*>(key + c);
      const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
      UNROLL for (int i = 0; i < 4; i++) {
        s = fmaf(query[c + 2 * i], Half::widen(u16(words[i])), s);
        s = fmaf(query[c + 2 * i + 1], Half::widen(u16(words[i] >> 16)), s);
      }
    }
    return s;
  }

  DEVICE void fold(const u16* values, float weight, u32 attended) {  // o += weights V over the attended of 32 keys
    for (; attended; attended &= attended - 1) {
      const int i = __ffs(attended) - 1;
      const float w = __shfl_sync(ALL, weight, i);
      const u16* row = values + i * t.inputs.v.row;
      UNROLL for (int c = 0; c < ceil_div(DIM_V, 64); c++)
        UNROLL for (int e = 0; e < 2; e++) {
          const int column = 64 * c + 2 * lane + e;
          if (column < COLUMNS) o[c][e] = fmaf(w, Half::widen(row[column]), o[c][e]);
        }
    }
  }

  DEVICE float stay(float weight, int batch, int head, int row, int key) const {
#if DROPOUT
    return stays(*t.seed, t.steps, batch, head, row, key) ? weight * t.stay_scale : 0.f;
#else
    return weight;
#endif
  }

  DEVICE void run(int item, int head, int row) {
    const int batch = batch_of(item, n), key_head = head / n.group;
    const u16* from = t.inputs.q.data + batch * t.inputs.q.batch + head * t.inputs.q.head + row * t.inputs.q.row;
    __syncwarp();
    for (int c = lane; c < DIM_EXACT; c += 32) query[c] = Half::widen(from[c]);
    __syncwarp();
    const Span span = rows(batch, head, row, x, n);
    const int lo = imax(span.lo, first_key(item, n, x)), hi = imin(span.hi, end_of_keys(item, n, x));
    top = -MOST, sum = 0.f;
    UNROLL for (int c = 0; c < ceil_div(DIM_V, 64); c++) o[c][0] = o[c][1] = 0.f;
    for (int first = lo; first < hi; first += 32) {
      const int kv = first + lane;
      const bool mine = kv < hi && keep(batch, head, row, kv, x, n);
      float s = -INF;
      if (mine) s = dot(t.inputs.k.data + batch * t.inputs.k.batch + key_head * t.inputs.k.head + i64(kv) * t.inputs.k.row) * t.scale;
#if SCORE
      if (mine) s = score(s, batch, head, row, kv, x, n);
#endif
      float higher = fmaxf(s, top);
      UNROLL for (int step = 16; step; step /= 2) higher = fmaxf(higher, __shfl_xor_sync(ALL, higher, step));
      const float shrink = power2((top - higher) * LOG2_E);
      float weight = mine ? power2((s - higher) * LOG2_E) : 0.f;
      UNROLL for (int c = 0; c < ceil_div(DIM_V, 64); c++) o[c][0] *= shrink, o[c][1] *= shrink;
      sum = fmaf(sum, shrink, weight);  // every lane has its share
      top = higher;
      if (DROPOUT) weight = stay(weight, batch, head, row, kv);  // which the sum counts all the same
      fold(t.inputs.v.data + batch * t.inputs.v.batch + key_head * t.inputs.v.head + i64(first) * t.inputs.v.row, weight, __ballot_sync(ALL, mine));
    }
    UNROLL for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    store(item, head, row);
  }

  DEVICE void store(int item, int head, int row) {
    const float sink = SINKS ? t.sinks[head] : -INF;
    const float highest = fmaxf(top, sink), shrink = power2((top - highest) * LOG2_E);
    const float l = sum * shrink + power2((sink - highest) * LOG2_E), inverse = l == 0.f ? 0.f : shrink / l;
    const int flat = item * n.heads_kv * n.group + head;
#if SPLIT
    if (lane == 0) store_sum(t.lse, i64(flat) * n.seqlen_q + row, highest, l);
#else
    if (lane == 0) global_store(t.lse, i64(flat) * n.seqlen_q + row, l == 0.f ? -INF : highest + logarithm2(l) * LN_2);
#endif
    const i64 place = item * t.out_batch + head * t.out_head + row * t.out_row;
    UNROLL for (int c = 0; c < ceil_div(DIM_V, 64); c++)
      UNROLL for (int e = 0; e < 2; e++) {
        const int column = 64 * c + 2 * lane + e;
        if (column >= COLUMNS) continue;
        if (WIDE) static_cast<float*>(t.out)[place + column] = o[c][e] * inverse;
        else static_cast<u16*>(t.out)[place + column] = u16(Half::pack(o[c][e] * inverse, 0.f));
      }
  }

  DEVICE void run(const Marks& marks) {
    static_assert(4 * DIM_EXACT <= 16 * QTile::row_bytes, "a row of q takes the place of the warp's rows");
    const int tiles = ceil_div(n.seqlen_q, 64), heads = n.heads_kv * n.group;
    for (int next = marks.last; next;) {
      const int index = (next - 1) / 4, first = index / tiles, head = first % n.group;
      const Slice slice = {(tiles - 1 - index % tiles) * 64, head};
      next = t.work[Marks::begin + next - 1];
      for (int row = 16 * warp; row < 16 * warp + 16; row++)
        if (slice.real(row, n)) run(first / heads, first % heads - head + slice.head(row), slice.query(row));
    }
  }
};

#endif
