"""Masks whose intervals are told by tables, by name, for two items of given lengths: for tests of kernels."""

from __future__ import annotations

from typing import Any

import torch

from sartor import mods


def masks(sq: int, skv: int, device: str) -> dict[str, dict[str, Any]]:
    """Options of `sartor.attention`: documents that lie together, that are scattered, of which queries or keys are
    missing, each with another mask."""
    generator = torch.Generator().manual_seed(sq)

    def ids(count: int, ordered: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        found = [torch.randint(0, count, (2, n), generator=generator) for n in (sq, skv)]
        return tuple((x.sort(1).values if ordered else x).to(device) for x in found)  # type: ignore[return-value]

    pieces = (torch.arange(n, device=device)[None] // 90 % 3 for n in (sq, skv))
    together = mods.document(*ids(7))
    lengths = torch.tensor([[skv // 3], [skv]], device=device).view(2, 1, 1, 1)
    of_heads = torch.randint(1, skv, (4, 1, 1), generator=generator).to(device)
    return {
        "documents": {"mask": together},
        "causal documents": {"mask": together, "causal": "top_left"},
        "window of documents": {"mask": together, "window": (40, 30)},
        "prefix of documents": {"mask": together & mods.prefix(skv // 2)},
        "prefix or documents": {"mask": together | mods.prefix(skv // 5)},
        "small documents": {"mask": mods.document(*ids(60))},
        "scattered documents": {"mask": mods.document(*ids(4, ordered=False)), "causal": True},
        "pieces of documents": {"mask": mods.document(*pieces)},
        "lengths": {"mask": mods.prefix(lengths.view(2)), "causal": True},
        "lengths of heads": {"mask": mods.Mask(lambda b, h, q, kv, aux: kv < aux[0], (of_heads,))},
        "pairs": {"mask": mods.Mask(lambda b, h, q, kv: (q + 2 * kv) % 5 != 0), "causal": True},
    }


def packed(sq: int, skv: int, device: str) -> dict[str, dict[str, Any]]:
    """The same for one item: packed sequences, some without queries or keys, with tokens past the last one."""
    ends = [torch.tensor([0, 0, n // 9, n // 9, n // 2, n - 70, n - 70], device=device) for n in (sq, skv)]
    ends[1][2] = ends[1][3] = skv // 8
    ends[1][1] = skv // 16  # keys without queries
    ends[0][3] += 9  # queries without keys
    return {
        "packed": {"mask": mods.packed(*ends, sq, skv)},
        "causal packed": {"mask": mods.packed(*ends, sq, skv, causal=True)},
        "windows of packed": {"mask": mods.packed(*ends, sq, skv, window=(50, 20))},
    }
