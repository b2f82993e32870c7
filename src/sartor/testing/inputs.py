"""Inputs to check attention with: of what size their values are, and how they lie in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor


def make_inputs(
    batch: int, heads_q: int, heads_kv: int, seqlen_q: int, seqlen_kv: int, dim: int, dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu", layout: str = "bhsd", seed: int = 0,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Standard normal q, k, v: (batch, heads, seqlen, dim), or (batch, seqlen, heads, dim) with `layout="bshd"`."""
    generator = None if torch.device(device).type == "meta" else torch.Generator(device).manual_seed(seed)
    dim_v = dim if dim_v is None else dim_v
    tensors = []
    for heads, seqlen, width in ((heads_q, seqlen_q, dim), (heads_kv, seqlen_kv, dim), (heads_kv, seqlen_kv, dim_v)):
        shape = (batch, heads, seqlen, width) if layout == "bhsd" else (batch, seqlen, heads, width)
        t = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
        tensors.append(t.requires_grad_(requires_grad))
    return tensors[0], tensors[1], tensors[2]


def make_like(t: Tensor, seed: int = 1) -> Tensor:
    """A standard normal tensor of the same shape, dtype and device: a gradient to send back."""
    generator = torch.Generator(t.device).manual_seed(seed)
    return torch.randn(t.shape, generator=generator, device=t.device, dtype=torch.float32).to(t.dtype)


def spread(t: Tensor) -> Tensor:
    """A factor for each column of t, from 1e-6 to 1e6."""
    return torch.logspace(-6, 6, t.shape[-1], device=t.device, dtype=t.dtype)


def _outlier(t: Tensor) -> Tensor:
    t = t.clone()
    t[..., t.shape[-2] // 3, t.shape[-1] // 5] = 1e4
    return t


def _slope(q: Tensor, k: Tensor, v: Tensor, rise: float) -> tuple[Tensor, Tensor, Tensor]:
    """(b, h, s, d) tensors whose scores change by `rise` along the keys, at the default scale."""
    q, k = q.clone(), k.clone()
    q[..., 0] = 1
    steps = torch.linspace(0, rise * k.shape[-1] ** 0.5, k.shape[-2], dtype=torch.float32, device=k.device)
    k[..., 0] = steps.to(k.dtype)
    return q, k, v


DATA: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "normal": lambda q, k, v: (q, k, v),
    "times8": lambda q, k, v: (8 * q, 8 * k, v),  # peaked softmax
    "constant": lambda q, k, v: (torch.full_like(q, 0.7), torch.full_like(k, 0.3), torch.full_like(v, 1.1)),
    "outlier_q": lambda q, k, v: (_outlier(q), k, v),  # one element of 1e4 in each head
    "outlier_k": lambda q, k, v: (q, _outlier(k), v),
    "outlier_v": lambda q, k, v: (q, k, _outlier(v)),
    "rising": lambda q, k, v: _slope(q, k, v, 30.0),  # scores rise by 30 from the first key to the last
    "falling": lambda q, k, v: _slope(q, k, v, -30.0),
    "channels_v": lambda q, k, v: (q, k, v * spread(v)),
    "channels": lambda q, k, v: (q * spread(q), k / spread(k), v * spread(v)),  # scores of ordinary size
}


def layouts(t: Tensor) -> dict[str, Tensor]:
    """The values of a rank 4 tensor in other memory: axes swapped, packed, every second row, unaligned, ..."""
    step = t.new_zeros(t.shape[0], 2 * t.shape[1], *t.shape[2:])
    step[:, ::2] = t
    off = t.new_zeros(t.numel() + 1)
    off[1:] = t.reshape(-1)
    return {
        "swapped": t.transpose(1, 2).contiguous().transpose(1, 2),
        "packed": torch.stack([t, t, t], 2)[:, :, 1],
        "step": step[:, ::2],
        "last": torch.stack([t, t], -1)[..., 0],
        "transposed": t.transpose(1, 3).contiguous().transpose(1, 3),
        "offset": off[1:].view(t.shape),
    }
