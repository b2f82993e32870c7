// The softmax of a warpgroup's tile of scores, 64 rows by N keys, as wgmma leaves it in registers: a thread holds two
// rows, eight apart, and of every eight keys two: s[4 * i + e] is row e / 2 and key 8 * i + 2 * (lane % 4) + e % 2.
#pragma once
#include "cuda/ptx.cuh"

// ---- reductions over a row: of this thread's scores, then over the four threads that share the row
template <int M> DEVICE float tile_max(const float (&s)[M], int r) {
  float a = fmaxf(s[2 * r], s[2 * r + 1]), b = -INF;
  UNROLL for (int i = 1; i < M / 4; i++) {
    float& into = i % 2 ? b : a;
    into = fmaxf(into, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
  }
  return fmaxf(a, b);
}
DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(ALL, x, 1));
  return fmaxf(x, __shfl_xor_sync(ALL, x, 2));
}
DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(ALL, x, 1);
  return x + __shfl_xor_sync(ALL, x, 2);
}

// ---- softmax of 16-bit inputs. A row's weights are 2^(factor * s - reference). The reference comes from the row's
// first tile and is kept while the weights stay in range (docs/numerics.md, "Speculation"), so later tiles need no
// maximum.
struct Guess { float before[2], added[2]; };  // of a thread's two rows: their sums before, and what a tile added

template <int N, bool BF16, bool SINK, bool SCORE> struct Softmax {
  // bfloat16 weights have float32's range: a reference above the maximum leaves room for scores that grow. float16's
  // have not.
  static constexpr float margin = BF16 ? 30.f : 4.f, limit = BF16 ? 1.0995116e12f : 32768.f;
  static constexpr float steep = 2048.f;  // references beyond this are too coarse to be subtracted after scaling
  static constexpr float fine = 256.f;    // up to this a lone key's weight is off by 2^-17 at most
  // A key whose weight is this many times all others of its row leaves it no other: its own weight has to be exact, a
  // power of two, as it is after a correction. Below, rounding the normalised weights would cost as much.
  static constexpr float dominant = BF16 ? 512.f : 4096.f;

  float top[2], sum[2], bound[2];  // bound: `dominant` times what other threads had when the reference was fixed

  DEVICE float reference(int r, float factor) const { return fmaf(top[r], factor, margin); }
  DEVICE float allowed(int r, float factor) const {
    const float all = quad_sum(sum[r]);  // by every thread: a shuffle in a branch costs the compiler its uniform registers
    const bool exact = (all > 0.f) & (fabsf(reference(r, factor)) > steep);  // no branch
    return exact ? -INF : dominant * (all - sum[r]);
  }

  // Sets the references of `rows` from their first scores; `from` is what is added to scaled scores. A large reference
  // is subtracted before scaling instead, with EXACT any: the difference of large numbers is exact.
  template <bool EXACT> DEVICE void refer(float (&s)[N / 2], float factor, const bool (&rows)[2], float (&from)[2]) {
    bool coarse[2];
    UNROLL for (int r = 0; r < 2; r++) {
      const float most = fmaxf(quad_max(tile_max(s, r)), -MOST);
      if (rows[r]) top[r] = most, from[r] = -reference(r, factor), bound[r] = INF;
      coarse[r] = rows[r] && (EXACT || !(fabsf(from[r]) <= fine));
    }
    if (__any_sync(ALL, coarse[0] || coarse[1]))  // these rows subtract before scaling; the others subtract 0
      UNROLL for (int r = 0; r < 2; r++) {
        const float less = coarse[r] ? top[r] : 0.f;
        if (coarse[r]) from[r] = -margin;
        UNROLL for (int i = r; i < N / 4; i += 2) s[2 * i] -= less, s[2 * i + 1] -= less;
      }
  }
  DEVICE void start(float (&s)[N / 2], float factor) {
    float from[2];
    refer<false>(s, factor, {true, true}, from);
    sum[0] = sum[1] = 0.f;
    UNROLL for (int i = 0; i < N / 8; i++) {
      UNROLL for (int e = 0; e < 4; e++) s[4 * i + e] = power2(fmaf(s[4 * i + e], factor, from[e / 2]));
      UNROLL for (int r = 0; r < 2; r++) sum[r] += s[4 * i + 2 * r] + s[4 * i + 2 * r + 1];
    }
  }
  DEVICE void settle(float factor) {  // what new references leave to do, before the next tile
    UNROLL for (int r = 0; r < 2; r++) {
      const float room = allowed(r, factor);
      if (bound[r] == INF) bound[r] = room;
    }
  }
  // Whether all keys of the row were masked so far. A row that saw scores of -MOST, as biases make them, has a bound
  DEVICE bool unseen(int r) const { return top[r] == -MOST && (!SCORE || bound[r] == 0.f); }
  DEVICE bool late(bool first, bool second) const { return __any_sync(ALL, (first && unseen(0)) || (second && unseen(1))); }

  // Weights in place of scores, and their sums, by the references as they are; `wrong` says for which rows that was not
  // right. Where `late`, rows that saw no key before get their references from these scores, and `settle` follows.
  template <bool MASKED> DEVICE Guess speculate(float (&s)[N / 2], float factor, bool late) {
    float added[2] = {0.f, 0.f}, other[2] = {0.f, 0.f}, from[2] = {-reference(0, factor), -reference(1, factor)};
    if (MASKED) from[0] = fminf(from[0], MOST), from[1] = fminf(from[1], MOST);  // for unseen rows: -inf + inf is no weight
    if (late) refer<true>(s, factor, {unseen(0), unseen(1)}, from);
    UNROLL for (int i = 0; i < N / 8; i++) {
      UNROLL for (int e = 0; e < 4; e++) s[4 * i + e] = power2(fmaf(s[4 * i + e], factor, from[e / 2]));
      float(&into)[2] = i % 2 ? other : added;
      UNROLL for (int r = 0; r < 2; r++) into[r] += s[4 * i + 2 * r] + s[4 * i + 2 * r + 1];
    }
    Guess guess;
    UNROLL for (int r = 0; r < 2; r++) {
      guess.before[r] = sum[r], guess.added[r] = added[r] + other[r];
      sum[r] += guess.added[r];
    }
    return guess;
  }
  DEVICE bool wrong(const Guess& guess, int r) const {
    return !(guess.added[r] <= fminf(limit, fmaf(dominant, guess.before[r], bound[r])));
  }

  // From the same scores again, for rows whose guess was wrong: a higher reference, exact weights, and `shrink`, the
  // factor of the output so far. Other rows get the weights that they had: a row's result does not depend on its
  // neighbours. `settle` follows.
  template <bool MASKED> DEVICE void correct(float (&s)[N / 2], float factor, const Guess& guess, float (&shrink)[2]) {
    UNROLL for (int r = 0; r < 2; r++) {
      bool wrong = this->wrong(guess, r);
      wrong |= __shfl_xor_sync(ALL, wrong, 1);
      wrong |= __shfl_xor_sync(ALL, wrong, 2);
      const float most = quad_max(tile_max(s, r)), higher = wrong ? fmaxf(most, top[r]) : top[r];
      const bool exact = wrong || bound[r] == INF;  // as late rows have it
      const float from = MASKED ? fminf(-reference(r, factor), MOST) : -reference(r, factor);  // as in speculate
      shrink[r] = power2((top[r] - higher) * factor);
      float added = 0.f;
      UNROLL for (int i = 0; i < N / 8; i++) {
        UNROLL for (int e = 2 * r; e < 2 * r + 2; e++) {
          const float x = s[4 * i + e];
          s[4 * i + e] = power2(exact ? fmaf(x - higher, factor, -margin) : fmaf(x, factor, from));
          added += s[4 * i + e];
        }
      }
      top[r] = higher;
      if (wrong) sum[r] = fmaf(guess.before[r], shrink[r], added), bound[r] = INF;
    }
  }

  // Normaliser and natural-log lse of each row; `sink` is one more logit, if there are any
  DEVICE void finish(float factor, const float (&sink)[2], float (&inverse)[2], float (&lse)[2]) {
    UNROLL for (int r = 0; r < 2; r++) {
      float l = quad_sum(sum[r]), highest = fmaf(top[r], factor, margin), shrink = 1.f;
      if (SCORE) {  // to base e and without the margin: beside a bias of -1e9 it is lost, and -MOST has no room for a factor
        highest = top[r];
        if (SINK) {
          highest = fmaxf(highest, sink[r]), shrink = power2((top[r] - highest) * LOG2_E);
          l = l * shrink + power2(fmaf(sink[r] - highest, LOG2_E, -margin));
        }
        inverse[r] = l == 0.f ? 0.f : shrink * reciprocal(l);
        lse[r] = l == 0.f ? -INF : fmaf(margin + logarithm2(l), LN_2, highest);
        continue;
      }
      if (SINK) {
        const float base = highest;
        highest = fmaxf(fmaxf(base, sink[r] * LOG2_E), -MOST), shrink = power2(base - highest);
        l = l * shrink + power2(sink[r] * LOG2_E - highest);
      }
      inverse[r] = l == 0.f ? 0.f : shrink * reciprocal(l);
      lse[r] = l == 0.f ? -INF : (highest + logarithm2(l)) * LN_2;
    }
  }

  // Of each row's KV split: its normaliser, its highest score, and its sum of exponentials relative to that
  DEVICE void finish_split(float natural, float (&inverse)[2], float (&highest)[2], float (&total)[2]) const {
    UNROLL for (int r = 0; r < 2; r++) {
      const float l = quad_sum(sum[r]);
      inverse[r] = l == 0.f ? 0.f : reciprocal(l);
      highest[r] = top[r] * natural, total[r] = l * float(1 << int(margin));
    }
  }
};

// base + ln(x), rounded about once: what is left to a coarse logarithm is from 2/3 to 4/3, so its error is small
DEVICE float add_logarithm(float base, float x) {
  const int bits = __float_as_int(x), whole = (bits - 0x3f2aaaab) >> 23;
  const float e = float(whole), sum = fmaf(e, LN_2, base), added = sum - base;
  const float lost = fmaf(e, LN_2, -added) + (base - (sum - added));
  return sum + fmaf(logarithm2(__int_as_float(bits - (whole << 23))), LN_2, lost);
}

// ---- softmax of float32 inputs in pairs: online (Milakov and Gimelshein 2018), but for a reference that a warp raises
// only when a maximum has grown a lot. Scores are s * unit, weights 2^(s * unit * factor - reference), which leaves
// float16 bits to spare below.
template <int N> struct Online {
  static constexpr float margin = 7.f, limit = 15.f;  // log2 of a new maximum's weight, and of the largest

  const float natural;  // what the scores are multiplied with in lse
  float top[2], sum[2], rest[2];  // rest: what a normaliser lacks, so that an output is rounded once

  DEVICE Online(float natural) : natural(natural) {}

  DEVICE float reference(int r, float factor) const { return fmaxf(fmaf(top[r], factor, -margin), -MOST); }

  DEVICE void start(const float (&s)[N / 2], float unit) {
    UNROLL for (int r = 0; r < 2; r++) top[r] = fmaxf(quad_max(tile_max(s, r)) * unit, -MOST), sum[r] = 0.f;
  }

  // Whether references were raised; `shrink` is then the factor of the output so far, as it was that of the sums
  DEVICE bool raise(const float (&s)[N / 2], float unit, float factor, float (&shrink)[2]) {
    float most[2];
    bool grew = false;
    UNROLL for (int r = 0; r < 2; r++) {
      most[r] = tile_max(s, r);
      grew |= fmaf(most[r], unit * factor, -reference(r, factor)) > limit;
    }
    if (!__any_sync(ALL, grew)) return false;
    UNROLL for (int r = 0; r < 2; r++) {
      const float before = reference(r, factor);
      top[r] = fmaxf(quad_max(most[r]) * unit, top[r]);
      shrink[r] = power2(before - reference(r, factor));
      sum[r] *= shrink[r];
    }
    return true;
  }

  DEVICE void weigh(float (&s)[N / 2], float unit, float factor) {
    const float from[2] = {reference(0, factor), reference(1, factor)}, by = unit * factor;
    float added[2] = {0.f, 0.f}, other[2] = {0.f, 0.f};
    UNROLL for (int i = 0; i < N / 8; i++) {
      UNROLL for (int e = 0; e < 4; e++) s[4 * i + e] = power2(fmaf(s[4 * i + e], by, -from[e / 2]));
      float(&into)[2] = i % 2 ? other : added;
      UNROLL for (int r = 0; r < 2; r++) into[r] += s[4 * i + 2 * r] + s[4 * i + 2 * r + 1];
    }
    UNROLL for (int r = 0; r < 2; r++) sum[r] += added[r] + other[r];
  }

  // Normaliser and natural-log lse of each row; `sink` is one more logit, -inf for none
  DEVICE void finish(float factor, const float (&sink)[2], float (&inverse)[2], float (&lse)[2]) {
    UNROLL for (int r = 0; r < 2; r++) {
      float l = quad_sum(sum[r]);
      const float own = top[r] * natural, highest = fmaxf(fmaxf(own, sink[r]), -MOST);
      const float excess = fmaf(top[r], factor, -reference(r, factor)) - margin;  // the reference's rounding
      const float shrink = l == 0.f ? 0.f : power2((own - highest) * LOG2_E - margin) * fmaf(excess, -LN_2, 1.f);
      l = l * shrink + power2((sink[r] - highest) * LOG2_E);
      inverse[r] = l == 0.f ? 0.f : shrink / l;
      rest[r] = l == 0.f ? 0.f : fmaf(-inverse[r], l, shrink) / l;
      lse[r] = l == 0.f ? -INF : add_logarithm(highest, l);
    }
  }
};

// A never-taken branch on `x`: without it ptxas moves the exponentials below the wait for the product that should hide them
DEVICE void keep_here(float x, float never) {
  if (x == never) asm volatile("st.shared.f32 [%0], %1;" ::"r"(0), "f"(x) : "memory");
}
