"""PyTorch's FlexAttention as a provider: a workload's mask and scores as its functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sartor.lab.workloads.workload import Inputs, Workload

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def why_not(w: Workload, device: torch.device) -> str:
    """Why it cannot run a workload, a sentence; empty where it can."""
    return "" if device.type == "cuda" else "compiled FlexAttention is measured on GPUs only"


def make(w: Workload, x: Inputs) -> Attend:
    """torch.compile'd FlexAttention with a block mask; past the recompile limit it must raise, not run eagerly."""
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    dynamo: Any = torch._dynamo.config
    setattr(dynamo, "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit", 512)
    if hasattr(dynamo, "fail_on_recompile_limit_hit"):
        dynamo.fail_on_recompile_limit_hit = True
    return partial(
        torch.compile(flex_attention, dynamic=False),
        score_mod=score_mod(w, x), block_mask=block_mask(w, x), enable_gqa=w.heads_q != w.heads_kv,
    )  # fmt: skip


def block_mask(w: Workload, x: Inputs) -> Any:
    """FlexAttention's BlockMask of a workload; None where everything is visible.

    Made eagerly, as `create_block_mask` does by default: compiled it sorts 128 blocks of keys in registers, and Triton
    takes two minutes to compile that for 16384 keys. The mask is the same.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    seen = mask_mod(w, x)
    heads = None if x.windows is None else w.heads_q  # all alike
    return None if seen is None else create_block_mask(seen, None, heads, w.seqlen_q, w.seqlen_kv, device=x.q.device)


def mask_mod(w: Workload, x: Inputs) -> Callable[..., Tensor] | None:
    """Who sees whom, as a function of (b, h, q, kv); None where everyone sees all."""
    p, shift = w.pattern, 0 if w.pattern.causal == "top_left" else w.seqlen_kv - w.seqlen_q
    parts: list[Callable[..., Tensor]] = []
    if p.causal or p.window:
        parts.append(lambda b, h, q, kv: q + shift >= kv)
    if p.window:
        parts.append(lambda b, h, q, kv: q + shift - kv < p.window)
    if p.prefix:
        parts.append(lambda b, h, q, kv: kv < p.prefix)
    if x.ids is not None:
        ids = x.ids[0]
        parts.append(lambda b, h, q, kv: ids[q] == ids[kv])
    if x.keep is not None:
        keep = x.keep[0, 0]
        parts.append(lambda b, h, q, kv: keep[q, kv])
    function = x.function(w)
    if function is not None:
        parts.append(function)
    if not parts:
        return None
    from torch.nn.attention.flex_attention import and_masks

    return and_masks(*parts)


def score_mod(w: Workload, x: Inputs) -> Callable[..., Tensor] | None:
    """What is made of a score, as a function of (score, b, h, q, kv); None where it stays as it is."""
    cap, bias, slopes, shift = w.pattern.softcap, x.bias, x.slopes, w.seqlen_kv - w.seqlen_q
    table, last = x.table, w.seqlen_kv - 1
    if not cap and bias is None and slopes is None and table is None:
        return None

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if cap:
            s = cap * torch.tanh(s / cap)
        if bias is not None:
            s = s + bias[0, h, q, kv]
        if table is not None:
            s = s + table[h, q - kv + last]
        if slopes is not None:
            s = s - slopes[h] * (q + shift - kv).abs()
        return s

    return score
