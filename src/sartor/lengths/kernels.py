"""What lengths say, by one small launch each: intervals of packed sequences, places in a cache, new keys put in one.

Nothing is compiled anew for other lengths, strides or values. What is read from `cu_seqlens` and lengths is clamped, so
that whatever they hold nothing is read or written out of bounds; what is wrong is told by a flag (see values.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-(2**31) + 1)
MOST = tl.constexpr(2**31 - 1)
NOTHING = tl.constexpr(-(2**63))


@triton.jit
def _value(ptr, inside):
    """An element of any integer type, clipped to int32."""
    x = tl.load(ptr, mask=inside, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(x, LEAST), MOST).to(tl.int32)


@triton.jit
def _within(x, limit):
    return tl.minimum(tl.maximum(x, 0), limit)


@triton.jit
def _tell(flags, word, wrong, value, beside):
    """Set the flag, and the word to one of the wrong values and the number that its message has beside it."""
    if flags != 0:
        both = (value.to(tl.int64) << 32) | (beside.to(tl.int64) & 0xFFFFFFFF)
        one = tl.max(tl.where(wrong, both, NOTHING), 0)
        words = flags.to(tl.pointer_type(tl.int64))
        tl.store(words + word, one, mask=one != NOTHING)
        tl.store(words, 1, mask=one != NOTHING)


@triton.jit
def _tell_filled(n, inside, most, flags, word):
    """Of lengths, whether they are between 0 and `most`."""
    _tell(flags, word, inside & ((n < 0) | (n > most)), n, n * 0 + most)


@triton.jit
def _check(ends_ptr, stride, sequences, limit, flags, word, BLOCK: tl.constexpr):
    """Of the elements of one of cu_seqlens, this program's share: whether they begin with 0, fall, or end too late."""
    for first in range(tl.program_id(0) * BLOCK, sequences + 1, tl.num_programs(0) * BLOCK):
        n = first + tl.arange(0, BLOCK)
        end = _value(ends_ptr + n.to(tl.int64) * stride, n <= sequences)
        before = _value(ends_ptr + (n - 1).to(tl.int64) * stride, (n > 0) & (n <= sequences))
        _tell(flags, word, (n == 0) & (end != 0), end, end * 0)
        _tell(flags, word + 1, (n > 0) & (n <= sequences) & (end < before), end, before)
        _tell(flags, word + 2, (n == sequences) & (end > limit), end, end * 0 + limit)


@triton.jit
def _sequence(ends_ptr, stride, sequences, place):
    """The number of the sequence of each place, by binary search: `sequences` past the last one."""
    low, high = place * 0, place * 0 + sequences
    left = sequences
    while left > 0:
        middle = (low + high) // 2
        right = (low < high) & (_value(ends_ptr + (middle + 1).to(tl.int64) * stride, low < high) <= place)
        high = tl.where(right, high, middle)
        low = tl.where(right, middle + 1, low)
        left = left // 2
    return low


@triton.jit
def _side(
    own_ptr, own_stride, others_ptr, others_stride, sequences, length, others_length, before, after, table_ptr, pitch,
    first, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each place, the interval of places in the other's sequence that it goes with; empty past the last one."""
    place = first + tl.arange(0, BLOCK)
    number = _sequence(own_ptr, own_stride, sequences, place)
    end = tl.minimum(number + 1, sequences).to(tl.int64)
    lo = _within(_value(others_ptr + number.to(tl.int64) * others_stride, place < length), others_length)
    hi = _within(_value(others_ptr + end * others_stride, place < length), others_length)
    diagonal = hi - _within(_value(own_ptr + end * own_stride, place < length), length) + place
    tl.store(table_ptr + place, tl.maximum(lo, diagonal - before), mask=place < length)
    tl.store(table_ptr + pitch + place, tl.minimum(hi, diagonal + after + 1), mask=place < length)


INTERVALS = (
    "q_ptr", "kv_ptr", "rows_ptr", "cols_ptr", "q_stride", "kv_stride", "sequences", "seqlen_q", "seqlen_kv", "left",
    "right", "rows_pitch", "cols_pitch", "flags", "q_word", "kv_word",
)  # fmt: skip


@triton.jit(do_not_specialize=INTERVALS)
def intervals_kernel(
    q_ptr, kv_ptr, rows_ptr, cols_ptr, q_stride: tl.int64, kv_stride: tl.int64, sequences: tl.int32,
    seqlen_q: tl.int32, seqlen_kv: tl.int32, left: tl.int32, right: tl.int32, rows_pitch: tl.int64,
    cols_pitch: tl.int64, flags: tl.int64, q_word: tl.int32, kv_word: tl.int32, BLOCK: tl.constexpr,
):  # fmt: skip
    """`intervals.packed_intervals`: first programs have rows, the others columns; all of them look at the values."""
    program, programs = tl.program_id(0), tl.cdiv(seqlen_q, BLOCK)
    if program < programs:
        _side(
            q_ptr, q_stride, kv_ptr, kv_stride, sequences, seqlen_q, seqlen_kv, left, right, rows_ptr, rows_pitch,
            program * BLOCK, BLOCK,
        )  # fmt: skip
    else:
        _side(
            kv_ptr, kv_stride, q_ptr, q_stride, sequences, seqlen_kv, seqlen_q, right, left, cols_ptr, cols_pitch,
            (program - programs) * BLOCK, BLOCK,
        )  # fmt: skip
    if flags != 0:
        _check(q_ptr, q_stride, sequences, seqlen_q, flags, q_word, BLOCK)
        _check(kv_ptr, kv_stride, sequences, seqlen_kv, flags, kv_word, BLOCK)


PLACES = ("q_ptr", "kv_ptr", "places_ptr", "q_stride", "kv_stride", "sequences", "seqlen_q", "pitch")


@triton.jit(do_not_specialize=PLACES)
def places_kernel(
    q_ptr, kv_ptr, places_ptr, q_stride: tl.int64, kv_stride: tl.int64, sequences: tl.int32, seqlen_q: tl.int32,
    pitch: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    """`intervals.packed_places`."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = _sequence(q_ptr, q_stride, sequences, place)
    end = tl.minimum(number + 1, sequences).to(tl.int64)
    ends = _value(kv_ptr + end * kv_stride, place < seqlen_q) - _value(q_ptr + end * q_stride, place < seqlen_q)
    tl.store(places_ptr + place, tl.minimum(number, tl.maximum(sequences - 1, 0)), mask=place < seqlen_q)
    tl.store(places_ptr + pitch + place, ends + place, mask=place < seqlen_q)


CACHED = (
    "lengths_ptr", "table_ptr", "stride", "uniform", "batch", "added", "capacity", "seqlen_q", "left", "right",
    "pitch", "flags", "word",
)  # fmt: skip


@triton.jit(do_not_specialize=CACHED)
def cached_kernel(
    lengths_ptr, table_ptr, stride: tl.int64, uniform: tl.int32, batch: tl.int32, added: tl.int32,
    capacity: tl.int32, seqlen_q: tl.int32, left: tl.int32, right: tl.int32, pitch: tl.int64, flags: tl.int64,
    word: tl.int32, BLOCK: tl.constexpr,
):  # fmt: skip
    """`intervals.cached_table`; `uniform` is the length of all items where it is not negative."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = b * 0 + uniform
    if uniform < 0:
        n = _value(lengths_ptr + b.to(tl.int64) * stride, b < batch)
        _tell_filled(n, b < batch, capacity - added, flags, word)
    length = _within(tl.maximum(tl.minimum(n, capacity), -added) + added, capacity)
    tl.store(table_ptr + b, length, mask=b < batch)
    tl.store(table_ptr + pitch + b, length - seqlen_q, mask=b < batch)
    tl.store(table_ptr + 2 * pitch + b, length - seqlen_q - left, mask=b < batch)
    tl.store(table_ptr + 3 * pitch + b, length - seqlen_q + right + 1, mask=b < batch)


@triton.jit
def _check_filled(lengths_ptr, stride, batch, most, flags, word, BLOCK: tl.constexpr):
    """`_tell_filled` of all lengths, by one program."""
    if flags != 0:
        for first in range(0, batch, BLOCK):
            b = first + tl.arange(0, BLOCK)
            n = _value(lengths_ptr + b.to(tl.int64) * stride, b < batch)
            _tell_filled(n, b < batch, most, flags, word)


FILLED = "lengths_ptr", "stride", "batch", "most", "flags", "word"


@triton.jit(do_not_specialize=FILLED)
def filled_kernel(
    lengths_ptr, stride: tl.int64, batch: tl.int32, most: tl.int32, flags: tl.int64, word: tl.int32,
    OVERLAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Look at lengths that a mask reads itself. OVERLAPS: the next launch may begin at once, as it waits for nothing
    here."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    _check_filled(lengths_ptr, stride, batch, most, flags, word, BLOCK)


@triton.jit
def _put(
    new_ptr, cache_ptr, lengths_ptr, length_stride, batch, added, heads, width, capacity, new_b, new_s, new_h, new_d,
    cache_b, cache_s, cache_h, cache_d, first, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = first.to(tl.int64) + tl.arange(0, BLOCK)
    d, row = i % width, i // width
    h, row = row % heads, row // heads
    j, b = row % added, row // added
    inside = b < batch
    at = _value(lengths_ptr + b * length_stride, inside).to(tl.int64) + j
    x_ptr = new_ptr.to(tl.pointer_type(UNIT)) + b * new_b + j * new_s + h * new_h + d * new_d
    y_ptr = cache_ptr.to(tl.pointer_type(UNIT)) + b * cache_b + at * cache_s + h * cache_h + d * cache_d
    inside = inside & (at >= 0) & (at < capacity)
    tl.store(y_ptr, tl.load(x_ptr, mask=inside, other=0), mask=inside)


APPEND = (
    "k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr", "lengths_ptr", "length_stride", "batch", "added", "heads",
    "k_width", "v_width", "capacity", "flags", "word",
    *(f"{name}_{dim}" for name in ("k", "v", "k_cache", "v_cache") for dim in "bshd"),
)  # fmt: skip


@triton.jit(do_not_specialize=APPEND)
def append_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, lengths_ptr, length_stride: tl.int64, batch: tl.int32, added: tl.int32,
    heads: tl.int32, k_width: tl.int32, v_width: tl.int32, capacity: tl.int32, flags: tl.int64, word: tl.int32,
    k_b: tl.int64, k_s: tl.int64, k_h: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_s: tl.int64, v_h: tl.int64, v_d: tl.int64,
    k_cache_b: tl.int64, k_cache_s: tl.int64, k_cache_h: tl.int64, k_cache_d: tl.int64,
    v_cache_b: tl.int64, v_cache_s: tl.int64, v_cache_h: tl.int64, v_cache_d: tl.int64,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`append.append`: first programs have k, the others v; the first one looks at the lengths too. Widths and strides
    are in units of UNIT."""
    if tl.program_id(0) == 0:
        _check_filled(lengths_ptr, length_stride, batch, capacity - added, flags, word, BLOCK)
    total = batch.to(tl.int64) * added * heads * k_width
    program, programs = tl.program_id(0).to(tl.int64), tl.cdiv(total, BLOCK)
    if program < programs:
        _put(
            k_ptr, k_cache_ptr, lengths_ptr, length_stride, batch, added, heads, k_width, capacity, k_b, k_s, k_h, k_d,
            k_cache_b, k_cache_s, k_cache_h, k_cache_d, program * BLOCK, UNIT, BLOCK,
        )  # fmt: skip
    else:
        _put(
            v_ptr, v_cache_ptr, lengths_ptr, length_stride, batch, added, heads, v_width, capacity, v_b, v_s, v_h, v_d,
            v_cache_b, v_cache_s, v_cache_h, v_cache_d, (program - programs) * BLOCK, UNIT, BLOCK,
        )  # fmt: skip
