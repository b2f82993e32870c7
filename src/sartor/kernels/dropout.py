"""Which pairs of query and key dropout keeps: a function of a seed and of where in the call a pair is.

Random numbers are Philox-4x32-7's (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; seven rounds are
the fewest that pass their tests, and what flash-attn takes): 128 bits from a key of 64 bits, the seed, and a counter of
128. One counter serves a patch of 4 queries by 4 keys, eight bits a pair:

    queries of a patch   16 a + 2 c + {0, 1, 8, 9}, c = 0 .. 3; its keys likewise
    counter              (4 a + c of the keys, 4 a + c of the queries, head, batch item)
    place of a pair      bit 7 - 2 (query % 2) - key % 2 of byte 2 (query // 8 % 2) + key // 8 % 2
    its number           from the lowest bit on: four places below its own in words 0 to 3, its own in words 0 to 3

Two threads of a warp, 4 apart, hold a patch of the accumulators of a `wgmma`, whether queries or keys run along its
rows; each of them wants every second row of it. So a kernel throws no number away if such threads exchange halves. And
numbers are compared all at once, as one bit after the other decides for sixteen pairs (`decided`).

A number of eight bits alone would know probabilities in steps of 1/256, 0.1 as 0.1016. The threshold is therefore one
of two neighbours, by the patch: the upper one where a hash of its first word is small. Of that word a pair's number has
two bits, and its hash, a product with the golden ratio, is as likely to be small whatever these are. So a pair is
dropped with a probability of round(65536 p) / 65536, and what is left is scaled by just that.

A seed tensor is int64 and has one of these numbers of numbers; what is computed is a part of a larger problem, whose
pairs have the positions that they have there:

    1   the seed
    5   and the first batch item, head, query and key, the last two counted in sixteens
    7   the seed, the first batch item and head, the first query and the step between queries, those of keys
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

Tensor = torch.Tensor
ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
HASH = 0x9E3779B9
STEPS = 2**16  # of a probability
PATCH = 16  # queries, and keys, after which the order of patches repeats
LOW = 2**32 - 1


def threshold(p: float) -> int:
    """Of STEPS, how many drop a pair: at least one is left that does not."""
    return min(STEPS - 1, round(STEPS * p))


def scale(p: float) -> float:
    """What kept weights are multiplied by, so that their mean is what it was."""
    return STEPS / (STEPS - threshold(p))


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of 32 bits, as int64, of four words that broadcast with each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high, low = zip(*map(_product, (c0, c2), MULTIPLIERS), strict=True)
        c0, c1, c2, c3 = high[1] ^ c1 ^ k0, low[1], high[0] ^ c3 ^ k1, low[0]
        k0, k1 = k0 + WEYL[0] & LOW, k1 + WEYL[1] & LOW
    return c0, c1, c2, c3


def _product(x: Tensor, y: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower half of x * y, which int64 holds but for its sign."""
    whole = x * y
    return whole >> 32 & LOW, whole & LOW


def part(
    seed: Tensor,
    rows: tuple[int, int] = (0, 1),
    keys: tuple[int, int] = (0, 1),
    first_head: int = 0,
    first_item: int = 0,
) -> Tensor:
    """The seed, of 1 or 5 numbers, of some queries and keys, (first, step), of heads and items from some on."""
    numbers, (row, step), (key, stride) = seed.reshape(-1), rows, keys
    aligned = step == stride == 1 and row % PATCH == key % PATCH == 0
    offsets = (row // PATCH, key // PATCH) if aligned else (row, step, key, stride)
    own = _on_device((first_item, first_head, *offsets), seed.device)
    if seed.numel() > 1:
        first = numbers[1:]
        if not aligned:
            unit = _on_device((1, 1, PATCH, 0, PATCH, 0), seed.device)
            first = first[_on_device((0, 1, 2, 2, 3, 3), seed.device)] * unit
        own = own + first
    return torch.cat([numbers[:1], own])


@lru_cache(maxsize=4096)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """They are copied there once: each copy would be waited for."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def kept(p: float, seed: Tensor, items: slice, heads: slice, i: slice, j: slice) -> Tensor:
    """Bool (items, heads, queries, keys): whether a pair's weight stays."""
    numbers = seed.reshape(-1)
    if len(numbers) == 7:
        return _kept_pair_by_pair(p, numbers, items, heads, i, j)
    first = numbers[1:] if len(numbers) > 1 else numbers.new_zeros(4)
    item, head = (_range(s.start, s.stop, seed) + first[n] & LOW for n, s in enumerate((items, heads)))
    rows, keys = (
        _range(s.start // PATCH * 4, -(-s.stop // PATCH) * 4, seed) + 4 * first[2 + n] & LOW
        for n, s in enumerate((i, j))
    )  # patches
    found = decided(threshold(p), _words(numbers[0], item, head, rows, keys)).to(torch.int32)
    odd = torch.arange(2, device=seed.device)
    place = _place(odd.view(2, 1, 1, 1) + 8 * odd.view(2, 1), odd.view(2, 1, 1) + 8 * odd)
    b, h, n, m = found.shape
    found = found[..., None, None, None, None] & (1 << place).to(torch.int32)  # (..., odd q, odd k, 8s)
    found = (found != 0).view(b, h, n // 4, 4, m // 4, 4, 2, 2, 2, 2).permute(0, 1, 2, 8, 3, 6, 4, 9, 5, 7)
    found = found.reshape(b, h, 4 * n, 4 * m)
    return found[..., i.start % PATCH :, j.start % PATCH :][..., : i.stop - i.start, : j.stop - j.start]


def _kept_pair_by_pair(p: float, numbers: Tensor, items: slice, heads: slice, i: slice, j: slice) -> Tensor:
    """`kept` of queries and keys in steps, which share patches with others that are not here."""
    seed, first_item, first_head, *places = numbers.unbind()
    item, head = (
        _range(items.start, items.stop, numbers) + first_item,
        _range(heads.start, heads.stop, numbers) + first_head,
    )
    q, kv = (_range(s.start, s.stop, numbers) * places[2 * n + 1] + places[2 * n] for n, s in enumerate((i, j)))
    words = _words(seed, item & LOW, head & LOW, *(n // PATCH * 4 + n % 8 // 2 & LOW for n in (q, kv)))
    return decided(threshold(p), words) >> _place(q[:, None], kv) & 1 != 0


def _place(q: Tensor, kv: Tensor) -> Tensor:
    """Of a pair in what is decided of its patch: a bit."""
    return 16 * (q // 8 % 2) + 8 * (kv // 8 % 2) + 7 - 2 * (q % 2) - kv % 2


def _words(seed: Tensor, item: Tensor, head: Tensor, rows: Tensor, keys: Tensor) -> list[Tensor]:
    """The random words (items, heads, rows, keys) of counters."""
    counter = keys, rows[:, None], head[:, None, None], item[:, None, None, None]
    return torch.broadcast_tensors(*philox(counter, (seed & LOW, seed >> 32 & LOW)))  # type: ignore[no-any-return]


def decided(steps: int, words: Sequence[Tensor]) -> Tensor:
    """Of patches, whether pairs stay, at their places: a number is compared with the threshold from its lowest bit on,
    and where a bit is the threshold's, those below have decided. Where the numbers are equal the patch decides. The
    lower four bits of each byte mean nothing."""
    stay = torch.where((words[0] * HASH & LOW) < steps % 256 << 24, 0, LOW)
    for shift in (4, 0):
        for j, word in enumerate(words):
            zeros = sum(four for bit, four in ((8 + j, 0x0F0F0F0F), (12 + j, 0xF0F0F0F0)) if not steps >> bit & 1)
            stay = word & zeros | stay & (word | zeros)
        stay = stay << shift & LOW
    return stay


def _range(start: int, stop: int, like: Tensor) -> Tensor:
    return torch.arange(start, stop, dtype=like.dtype, device=like.device)


def applied(p: float, weights: Tensor, stay: Tensor) -> Tensor:
    """Weights, or gradients of them, scaled where they stay and 0 elsewhere."""
    found: Tensor = torch.where(stay, weights * scale(p), 0)
    return found


def numbers(p: float) -> dict[str, int | float]:
    """What kernels in CUDA C++ take besides a seed."""
    return {"steps": threshold(p), "stay_scale": scale(p)}
