"""`Attention`: one layer's attention as a module, small enough to copy. An example of good use.

One projection gives q, k and v; key heads are fewer and not repeated; windows and sinks are arguments of the kernel; a
cache is written in place and masked by its lengths, which stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sartor.api import Window, attention
from sartor.checks import needs_operator
from sartor.lengths.values import check_filled
from sartor.mods import Mask, cached
from sartor.mods.core import over

Tensor = torch.Tensor


@dataclass
class Cache:
    """Keys and values that were seen: k, v (batch, capacity, heads_kv, dim), of which lengths (batch,) are filled."""

    k: Tensor
    v: Tensor
    lengths: Tensor

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write k and v (batch, seqlen, heads_kv, dim) behind what is there; the caller leaves room for them.

        Raises ValueError on a CPU where there is none; a GPU, which is not waited for, then fails by itself.
        """
        capacity, added = self.k.shape[1], k.shape[1]
        if self.lengths.device.type == "cpu" and not needs_operator(self.lengths):
            check_filled("cache.lengths", self.lengths.tolist(), capacity, added)
        at = self.lengths[:, None].long() + torch.arange(added, device=k.device)
        item = torch.arange(k.shape[0], device=k.device)[:, None]
        self.k[item, at], self.v[item, at] = k.to(self.k.dtype), v.to(self.v.dtype)  # autocast's are others
        self.lengths += added


class Attention(torch.nn.Module):
    """Causal self-attention with grouped key heads and rotary positions.

    Args:
        dim: of the input and output; the head dim is dim / heads.
        heads, heads_kv: of queries, and of keys and values (heads by default).
        window: (left, right) of keys around a query, both included; (None, 0) is causal, None sees all.
        rotary_base: of the rotary positions (Su et al. 2021, section 3.4); 0 for none.
        dropout: the probability with which a weight of attention is dropped in training.
        sinks: whether each head has a learnt logit more in the softmax' denominator (Xiao et al. 2023; gpt-oss).

    Raises:
        ValueError: dim is no multiple of heads, heads none of heads_kv, or the head dim is odd with rotary positions.
    """

    def __init__(
        self, dim: int, heads: int, heads_kv: int | None = None, *, window: Window = (None, 0),
        rotary_base: float = 10000.0, sinks: bool = False, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.heads_kv = heads, heads_kv or heads
        if min(heads, self.heads_kv) < 1 or dim % heads or heads % self.heads_kv:
            found = f"{dim}, {heads}, {heads_kv}"
            raise ValueError(f"dim must be a multiple of heads, and heads of heads_kv, both positive, got {found}")
        if rotary_base and dim // heads % 2:
            raise ValueError(f"dim / heads must be even with a rotary_base, got {dim} / {heads}")
        self.head_dim, self.window, self.rotary_base = dim // heads, window, rotary_base
        self.qkv = torch.nn.Linear(dim, (heads + 2 * self.heads_kv) * self.head_dim, bias=False)
        self.out = torch.nn.Linear(dim, dim, bias=False)
        self.dropout = dropout
        self.sinks = torch.nn.Parameter(self.out.weight.new_zeros(heads)) if sinks else None

    def forward(
        self, x: Tensor, positions: Tensor | None = None, mask: Mask | None = None, cache: Cache | None = None
    ) -> Tensor:
        """(batch, seqlen, dim) from the same.

        Args:
            positions: integers (1 or batch, seqlen); by default from 0 on, or from what the cache holds.
            mask: instead of the window, as `mods.packed` of sequences one after another. Not with a cache.
            cache: of `new_cache`; x is behind it, and is added to it.
        """
        if mask is not None and cache is not None:
            raise ValueError(f"mask must be None with a cache, whose lengths and window say all, got {mask!r}")
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split((self.heads, self.heads_kv, self.heads_kv), 2)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
            positions = positions if cache is None else positions + cache.lengths[:, None]
        if self.rotary_base:
            q, k = rotate(q, positions, self.rotary_base), rotate(k, positions, self.rotary_base)
        window = self.window if mask is None and cache is None else None
        if cache is not None:
            cache.append(k, v)
            k, v = cache.k, cache.v
            mask = cached(cache.lengths, x.shape[1], k.shape[1], window=self.window)
        out = attention(
            q, k, v, window=window, mask=mask, sinks=self.sinks, dropout_p=self.dropout if self.training else 0.0
        )
        assert isinstance(out, Tensor)
        found: Tensor = self.out(out.flatten(2))
        return found

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for so many sequences and tokens, on the module's device and of its dtype."""
        # not the halves of one tensor, which may not be written where autograd follows
        k, v = (self.qkv.weight.new_zeros(batch, capacity, self.heads_kv, self.head_dim) for _ in range(2))
        return Cache(k, v, torch.zeros(batch, dtype=torch.int32, device=k.device))


class MaskBuffers(torch.nn.Module):
    """A mask whose tensors are buffers: they move, are saved and are copied with a model. Calling it gives the mask."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.template = mask.with_tensors([t.to("meta") for t in mask.tensors])
        for i, t in enumerate(mask.tensors):
            self.register_buffer(f"aux{i}", t)

    def forward(self) -> Mask:
        """The mask over the buffers as they are now."""
        return over(self.template, *self.buffers())


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """x (batch, seqlen, heads, dim) turned by its positions (1 or batch, seqlen), first half against second."""
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    rates = base ** (-torch.arange(half, dtype=dtype, device=x.device) / half)
    angles = (positions[..., None] * rates)[:, :, None]
    cos, sin = angles.cos(), angles.sin()
    a, b = x.to(dtype).split(half, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
