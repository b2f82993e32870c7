"""FlexAttention's functions as people write them, for both FlexAttention and Sartor, with the tensors they capture.

By name; each is what a user of `torch.nn.attention.flex_attention` has, not what Sartor would have them write.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import and_masks, or_masks


class Mods(NamedTuple):
    """What one problem asks of FlexAttention, and the captured tensors that are trained."""

    score_mod: Any = None
    mask_mod: Any = None
    trained: tuple[torch.Tensor, ...] = ()


def make(
    batch: int, heads: int, length: int, device: str = "cpu", dtype: torch.dtype = torch.float32, trains: bool = True
) -> dict[str, Mods]:
    """By name, for as many keys as queries; lengths are multiples of 8."""
    drawn = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=drawn).to(device, dtype) / 2).requires_grad_(trains)

    document_id = torch.randint(0, 4, (batch, length), generator=drawn).sort(1).values.to(device)
    prefix_length = torch.randint(1, length, (batch,), generator=drawn).to(device)
    windows = torch.randint(1, length // 2, (heads,), generator=drawn).to(device)
    relative, slopes, table, buckets = (
        randn(heads, 2 * length - 1),
        randn(heads),
        randn(length, length),
        randn(heads, 8),
    )
    width, kernel = length // 8, 5  # of an image, and of the neighbourhood in it

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def sliding_window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= 9) & causal(b, h, q_idx, kv_idx)

    def document(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (document_id[b, q_idx] == document_id[b, kv_idx])

    def prefix(b, h, q_idx, kv_idx):
        return kv_idx < prefix_length[b]

    def natten(b, h, q_idx, kv_idx):
        q_x, q_y = q_idx // width, q_idx % width
        kv_x, kv_y = kv_idx // width, kv_idx % width
        kernel_x = q_x.clamp(kernel // 2, (8 - 1) - kernel // 2)
        kernel_y = q_y.clamp(kernel // 2, (width - 1) - kernel // 2)
        return ((kernel_x - kv_x).abs() <= kernel // 2) & ((kernel_y - kv_y).abs() <= kernel // 2)

    def dilated(b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return torch.logical_and(distance <= 4 * 3, distance % 3 == 0)

    def per_head_window(b, h, q_idx, kv_idx):
        return torch.where(h % 2 == 0, (q_idx - kv_idx).abs() <= windows[h], q_idx >= kv_idx)

    def softcap(score, b, h, q_idx, kv_idx):
        return 2.0 * torch.tanh(score / 2.0)

    def relative_bias(score, b, h, q_idx, kv_idx):
        return score + relative[h, q_idx - kv_idx + length - 1]

    def alibi(score, b, h, q_idx, kv_idx):
        return score + (kv_idx - q_idx) * torch.exp2(-((h + 1) * 8.0 / heads))

    def trained_alibi(score, b, h, q_idx, kv_idx):
        return score - torch.abs(q_idx - kv_idx) * slopes[h] + table[q_idx, kv_idx]

    def bucketed(score, b, h, q_idx, kv_idx):  # T5's
        far = (q_idx - kv_idx).abs()
        large = 4 + (torch.log(far.float() / 4) / math.log(4) * 4).to(torch.long)
        return score + buckets[h, torch.where(far < 4, far, torch.clamp(large, max=7))]

    def gated(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score * torch.sigmoid(slopes[h]) ** 2, -float("inf"))

    return {
        "causal": Mods(None, causal),
        "window": Mods(None, sliding_window),
        "document": Mods(None, document),
        "prefix_lm": Mods(None, or_masks(prefix, causal)),
        "natten": Mods(None, natten),
        "dilated": Mods(None, dilated),
        "per_head_window": Mods(None, per_head_window),
        "softcap": Mods(softcap),
        "relative_bias": Mods(relative_bias, None, (relative,)),
        "alibi": Mods(alibi, causal),
        "trained_alibi": Mods(trained_alibi, and_masks(causal, document), (slopes, table)),
        "bucketed": Mods(bucketed, sliding_window, (buckets,)),
        "gated": Mods(gated, None, (slopes,)),
    }


NAMES = tuple(make(1, 2, 16))
