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
"""

from __future__ import annotations

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


def kept(p: float, seed: Tensor, items: slice, heads: slice, i: slice, j: slice) -> Tensor:
    """Bool (items, heads, queries, keys): whether a pair's weight stays.

    `seed` is int64 of one number; or of three, the others being the batch item and the head of a larger problem that
    are the first ones here.
    """
    numbers = seed.reshape(-1)
    first = numbers[1:] if len(numbers) > 1 else numbers.new_zeros(2)
    item, head = (_range(s.start, s.stop, seed) + first[n] & LOW for n, s in enumerate((items, heads)))
    rows, keys = (_range(s.start // PATCH * 4, -(-s.stop // PATCH) * 4, seed) for s in (i, j))  # patches
    counter = keys, rows[:, None], head[:, None, None], item[:, None, None, None]
    words = torch.broadcast_tensors(*philox(counter, (numbers[0] & LOW, numbers[0] >> 32 & LOW)))
    upper = (words[0] + words[1] + words[2] + words[3] & LOW) >> 24 < threshold(p) % 256
    least = (threshold(p) // 256 + upper.to(torch.int16))[..., None, None, None, None]
    shape = (*words[0].shape, 2, 2)
    byte = torch.arange(0, 32, 8, dtype=torch.int32, device=seed.device).view(2, 2)
    pairs = torch.stack(words, -1).to(torch.int32).view(shape)[..., None, None] >> byte & 255  # (..., odd q, odd k, 8s)
    b, h, n, m = words[0].shape
    found: Tensor = (pairs >= least).view(b, h, n // 4, 4, m // 4, 4, 2, 2, 2, 2).permute(0, 1, 2, 8, 3, 6, 4, 9, 5, 7)
    found = found.reshape(b, h, 4 * n, 4 * m)
    return found[..., i.start % PATCH :, j.start % PATCH :][..., : i.stop - i.start, : j.stop - j.start]


def _range(start: int, stop: int, like: Tensor) -> Tensor:
    return torch.arange(start, stop, dtype=like.dtype, device=like.device)


def applied(p: float, weights: Tensor, stay: Tensor) -> Tensor:
    """Weights, or gradients of them, scaled where they stay and 0 elsewhere."""
    found: Tensor = torch.where(stay, weights * scale(p), 0)
    return found


def numbers(p: float) -> dict[str, int | float]:
    """What kernels in CUDA C++ take besides a seed."""
    return {"steps": threshold(p), "stay_scale": scale(p)}
