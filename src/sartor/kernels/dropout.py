"""Which pairs of query and key dropout keeps: a function of a seed and of where in the call a pair is.

Random numbers are Philox-4x32-10's (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): 16 bytes from a
key of 64 bits, the seed, and a counter of 128. One counter serves a patch of 4 queries by 4 keys, a byte a pair:

    queries of a patch   16 a + 2 c + {0, 1, 8, 9}, c = 0 .. 3; its keys likewise
    counter              (4 a + c of the keys, 4 a + c of the queries, head, batch item)
    word of a pair       2 (query % 2) + key % 2
    byte of that word    2 (query // 8 % 2) + key // 8 % 2, from the lowest

Two threads of a warp, 4 apart, hold a patch of the accumulators of a `wgmma`, whether queries or keys run along its
rows; each of them wants two whole words of it. So a kernel throws no number away if such threads exchange words.

A byte alone would know probabilities in steps of 1/256, 0.1 as 0.1016. The threshold is therefore one of two
neighbours, by the patch: the upper one where the highest byte of the sum of its words is small. That byte is
independent of every other, so that a pair is dropped with a probability of round(65536 p) / 65536, and what is left is
scaled by just that.

A seed tensor is int64 and has one of these numbers of numbers; what is computed is a part of a larger problem, whose
pairs have the positions that they have there:

    1   the seed
    5   and the first batch item, head, query and key, the last two counted in sixteens
    7   the seed, the first batch item and head, the first query and the step between queries, those of keys
"""

from __future__ import annotations

from functools import lru_cache

import torch

Tensor = torch.Tensor
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
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
    words = _words(numbers[0], item, head, rows, keys)
    least = _least(p, words)[..., None, None, None, None]
    shape = (*words[0].shape, 2, 2)
    byte = torch.arange(0, 32, 8, dtype=torch.int32, device=seed.device).view(2, 2)
    pairs = torch.stack(words, -1).to(torch.int32).view(shape)[..., None, None] >> byte & 255  # (..., odd q, odd k, 8s)
    b, h, n, m = words[0].shape
    found: Tensor = (pairs >= least).view(b, h, n // 4, 4, m // 4, 4, 2, 2, 2, 2).permute(0, 1, 2, 8, 3, 6, 4, 9, 5, 7)
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
    q = q[:, None]
    even, odd = (torch.where(kv % 2 == 0, one, other) for one, other in (words[:2], words[2:]))
    word = torch.where(q % 2 == 0, even, odd)
    found: Tensor = (word >> 8 * (2 * (q // 8 % 2) + kv // 8 % 2) & 255) >= _least(p, words)
    return found


def _words(seed: Tensor, item: Tensor, head: Tensor, rows: Tensor, keys: Tensor) -> list[Tensor]:
    """The random words (items, heads, rows, keys) of counters."""
    counter = keys, rows[:, None], head[:, None, None], item[:, None, None, None]
    return torch.broadcast_tensors(*philox(counter, (seed & LOW, seed >> 32 & LOW)))  # type: ignore[no-any-return]


def _least(p: float, words: list[Tensor]) -> Tensor:
    """What a byte must be at least for its pair to stay, by counters."""
    upper = (words[0] + words[1] + words[2] + words[3] & LOW) >> 24 < threshold(p) % 256
    return threshold(p) // 256 + upper.to(torch.int16)


def _range(start: int, stop: int, like: Tensor) -> Tensor:
    return torch.arange(start, stop, dtype=like.dtype, device=like.device)


def applied(p: float, weights: Tensor, stay: Tensor) -> Tensor:
    """Weights, or gradients of them, scaled where they stay and 0 elsewhere."""
    found: Tensor = torch.where(stay, weights * scale(p), 0)
    return found


def numbers(p: float) -> dict[str, int | float]:
    """What kernels in CUDA C++ take besides a seed."""
    return {"steps": threshold(p), "stay_scale": scale(p)}
