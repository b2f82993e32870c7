"""Rotary positions (Su et al. 2021, section 3.4) of the queries and new keys of a cache, from tables of cos and sin."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sartor.checks import boolean, floating

Tensor = torch.Tensor


class Rotary(NamedTuple):
    """cos and sin (seqlen_ro, rotary_dim / 2), of each place, and whether pairs are of columns next to each other.
    Build with `rotary_of`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def turn(self, x: Tensor, begin: Tensor | int, moves: bool = True) -> Tensor:
        """x (batch, seqlen, heads, dim) turned by its places, as a new tensor of its dtype.

        Token s of item b is at place begin[b] + s, or, unless it moves, at begin[b]. Places outside of the tables take
        the nearest row. It is computed in float32, or in float64 for such an x, and rounded once.
        """
        place = torch.arange(x.shape[1] if moves else 1, device=x.device)
        at = (begin.long()[:, None] if isinstance(begin, Tensor) else begin) + place
        at = at.clamp(0, self.cos.shape[0] - 1)
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (t[at].to(dtype)[..., None, :] for t in (self.cos, self.sin))
        half = cos.shape[-1]
        turned, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
        if self.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
        else:
            a, b = turned[..., :half], turned[..., half:]
        pair = a * cos - b * sin, b * cos + a * sin
        found = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat((found.to(x.dtype), rest), -1)


def rotary_of(cos: Any, sin: Any, interleaved: Any, q: Tensor, k: Tensor | None) -> Rotary | None:
    """What turns q and the new keys k; None where there is neither cos nor sin. Raises TypeError, ValueError where
    they are not as `flash_attn_with_kvcache` says."""
    if cos is None and sin is None:
        return None
    for name, t, other in (("rotary_cos", cos, "rotary_sin"), ("rotary_sin", sin, "rotary_cos")):
        if t is None:
            raise ValueError(f"{name} must be given where {other} is, got None")
        floating(name, t)
    if k is None:
        raise ValueError(f"rotary_cos must be None where no k and v are added, got shape {tuple(cos.shape)}")
    most = min(q.shape[-1], k.shape[-1]) // 2
    if cos.dim() != 2 or not cos.shape[0] or cos.shape[1] > most:
        want = f"(seqlen_ro, rotary_dim / 2), of at least 1 place and at most {most} columns"
        raise ValueError(f"rotary_cos must have shape {want}, got {tuple(cos.shape)}")
    if sin.shape != cos.shape:
        raise ValueError(f"rotary_sin must have the shape of rotary_cos, {tuple(cos.shape)}, got {tuple(sin.shape)}")
    for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
        if t.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {t.device}")
    return Rotary(cos, sin, boolean("rotary_interleaved", interleaved))
