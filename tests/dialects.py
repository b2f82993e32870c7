"""Masks that mean another thing in Python than, word for word, in PyTorch, Triton or C++; and what they mean. Scores of
every operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from sartor import mods

# By name, a rule of positions and of values of int8, uint8 and float16, -3 and 2.5, true of numbers in Python too
NUMBERS: dict[str, Callable[..., Any]] = {
    "not_of_an_integer": lambda q, kv, a: ~a[3] + ~kv < -5,
    "counted": lambda q, kv, a: (kv <= q) + (a[0] > 0) + (a[1] > 4) >= 2 - False * q,
    "ordered": lambda q, kv, a: (kv <= q) > (a[0] > 0),
    "negative_floor": lambda q, kv, a: (q - kv) // a[3] == 2,
    "negative_rest": lambda q, kv, a: (kv - q) % 5 < (q - kv) % a[3] + 3,
    "floor_of_floats": lambda q, kv, a: a[2] // 3 > (q - kv) // a[4],
    "rest_of_floats": lambda q, kv, a: a[2] % a[4] < (kv - 3) % 1.5,
    "exact_quotient": lambda q, kv, a: (q + kv) / 3 == (q + kv) // 3,
    "no_wrapping": lambda q, kv, a: a[0] * 100 < a[1] - 5,
    "out_of_range": lambda q, kv, a: (a[0] < 300) & (a[1] != -1) & (kv < q + 7),
    "signs_mixed": lambda q, kv, a: q % (a[1] + 1) == 0,
    "64_bits": lambda q, kv, a: (q * 2654435761 + kv) % 7 < 5,
    "half_precision": lambda q, kv, a: a[2] + 2048 < 2048.3,
    "infinite": lambda q, kv, a: mods.where(kv > q, -math.inf, a[2]) > -math.inf,
    "powers": lambda q, kv, a: (q - kv) ** 2 < 3**2 + kv**1 + a[3] ** 0,
    "root": lambda q, kv, a: mods.sqrt(q * q + kv * kv) <= 10,
    "power_of_a_half": lambda q, kv, a: (q * q + kv * kv) ** 0.5 <= 10,
    "clamped": lambda q, kv, a: mods.clamp(q - kv, -2, 3) == a[3] + 1,
    "exponentials": lambda q, kv, a: mods.exp2(q * -0.5) < mods.exp(kv * -0.25),
    "logarithm": lambda q, kv, a: mods.log(kv + 1) > q / 4,
    "sigmoid": lambda q, kv, a: mods.sigmoid(q - kv) > 0.6,
    "truncated": lambda q, kv, a: mods.truncate((q - kv) / 3) == -1,
}
# ~True is -2 in Python, so what these say is said again
NEGATIONS: dict[str, tuple[Callable[..., Any], Callable[..., bool]]] = {
    "not_and": (lambda q, kv, a: ~((kv <= q) & (kv > 3)), lambda q, kv, a: not (kv <= q and kv > 3)),
    "not_or": (lambda q, kv, a: ~((kv > q) | (a[0] > 2)), lambda q, kv, a: kv <= q and a[0] <= 2),
    "not_xor": (lambda q, kv, a: ~((kv > q) ^ (q < 9)), lambda q, kv, a: (kv > q) == (q < 9)),
}
# That index the table a[5]: from its end by what is negative, its edge by what is beyond it
GATHERS: dict[str, Callable[..., Any]] = {
    "gathered": lambda q, kv, a: a[5][q % 3, kv - q] > 0,
    "gathered_by_numbers": lambda q, kv, a: a[5][1, -2] < a[5][(q > 3) & (kv > 4), q // 2],
    "gathered_by_what_is_gathered": lambda q, kv, a: a[5][a[5][0, kv] + 1, q] >= a[3] + 4,
}
RULES = {name: (rule, rule) for name, rule in (NUMBERS | GATHERS).items()} | NEGATIONS
TABLE = [[0, -3, 4, 1, -1, 2, -2], [5, 0, -4, 3, 2, -5, 1], [-1, 2, 0, -2, 3, 1, -3]]


class Edged:
    """TABLE, read as masks read it."""

    def __getitem__(self, indices: tuple[int, int]) -> int:
        row, column = (max(0, min(i + n if i < 0 else i, n - 1)) for i, n in zip(indices, (3, 7), strict=True))
        return TABLE[row][column]


def make(seqlen_q: int, seqlen_kv: int, device: str = "cpu") -> dict[str, tuple[mods.Mask, torch.Tensor]]:
    """By name, a mask and the (seqlen_q, seqlen_kv) matrix that it is."""
    drawn = torch.randint(0, 9, (seqlen_q, seqlen_kv), generator=torch.Generator().manual_seed(0))
    tables = (drawn - 4).to(torch.int8), drawn.to(torch.uint8), (drawn / 4 - 1).to(torch.float16)
    columns = [t.tolist() for t in tables]
    found = {}
    for name, (rule, says) in RULES.items():
        keep = lambda b, h, q, kv, aux, rule=rule: rule(q, kv, aux)  # noqa: E731 - one use
        table = (torch.tensor(TABLE, device=device),) if name in GATHERS else ()
        mask = mods.Mask(keep, (*(t.to(device) for t in tables), -3, 2.5, *table), name=name)
        want = torch.tensor([
            [bool(says(q, kv, [*(column[q][kv] for column in columns), -3, 2.5, Edged()])) for kv in range(seqlen_kv)]
            for q in range(seqlen_q)
        ])  # fmt: skip
        found[name] = mask, want.to(device)
    return found


def scores(heads: int, seqlen_q: int, seqlen_kv: int, device: str = "cpu") -> dict[str, mods.Score]:
    """By name."""
    drawn = torch.Generator().manual_seed(0)
    slopes = torch.rand(heads, 1, 1, generator=drawn).to(device)
    table = torch.randn(seqlen_q, seqlen_kv, generator=drawn).to(device, torch.float16)
    relative = torch.randn(heads, 2 * min(seqlen_q, seqlen_kv) + 1, generator=drawn).to(device)
    middle = min(seqlen_q, seqlen_kv)
    return {
        "capped": mods.Score(lambda s, b, h, q, kv, aux: 2.0 - mods.tanh(s / 2.0) * -2.0),
        "relative": mods.Score(lambda s, b, h, q, kv, aux: s + aux[0] * abs(q - kv) * 0.1, (-1,)),
        "hidden": mods.Score(lambda s, b, h, q, kv, aux: mods.where(kv <= q, s, -math.inf)),
        "tables": mods.Score(lambda s, b, h, q, kv, aux: s * aux[0] + aux[1], (slopes, table)),
        "clipped": mods.Score(lambda s, b, h, q, kv, aux: mods.minimum(mods.maximum(s, -0.25) * 1.5, aux[0]), (0.5,)),
        "rational": mods.Score(lambda s, b, h, q, kv, aux: s / (1 + abs(s))),
        "tripled": mods.Score(lambda s, b, h, q, kv, aux: s * 3),
        "stepped": mods.Score(lambda s, b, h, q, kv, aux: s + s // 0.5),
        "of_signs": mods.Score(lambda s, b, h, q, kv, aux: mods.where((s > 0) & (kv > 3), s * 2, s)),
        "functions": mods.Score(lambda s, b, h, q, kv: s * mods.sigmoid(s) - mods.sqrt(abs(s) + 1) + mods.exp2(s / 2)),
        "exponential": mods.Score(lambda s, b, h, q, kv: mods.log(1 + mods.exp(s)) + mods.clamp(s, -1, 0.5)),
        "powers": mods.Score(lambda s, b, h, q, kv: (s**2 + s**4 / 8 + (abs(s) + 0.5) ** 1.5) * 2.0 ** (-h - 3)),
        "gathered": mods.Score(lambda s, b, h, q, kv: s + relative[h, q - kv + middle] * 0.5),
        "captured": mods.Score(lambda s, b, h, q, kv: s * slopes[h, 0, 0] + table[q, kv]),
        "of_places": mods.Score(lambda s, b, h, q, kv, aux: (q - kv) * 0.1),
        "constant": mods.Score(lambda s, b, h, q, kv, aux: 0.5),
    }


SCORES = tuple(scores(1, 1, 1))
OF_PLACES = ("of_places", "constant")  # whose lse has no gradient
