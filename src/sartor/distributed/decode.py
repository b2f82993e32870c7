"""Decoding: the cache lies on several ranks, the few new queries on all of them; results are merged by their lse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sartor import ops
from sartor.api import Causal, Layout, Window
from sartor.checks import boolean
from sartor.distributed.api import ranks_of, seconds, shardings_of
from sartor.distributed.local import Local, Rectangle
from sartor.distributed.merge import Merged
from sartor.distributed.operator import check_places
from sartor.distributed.sharding import Run, Sharding
from sartor.distributed.shift import Frame
from sartor.distributed.transport import Transport
from sartor.mods.core import Mask, Score
from sartor.problem import Call, Problem, wide

Tensor = torch.Tensor


def decode(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: Any = None, group: Any = None,
    layout_of_sequence: str | Sharding = "striped", timeout: float | None = None, layout: Layout = "bshd",
    causal: Causal = False, window: Window = None, softmax_scale: float | None = None, softcap: float = 0.0,
    mask: Mask | None = None, score: Score | None = None, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, return_lse: bool = False, out_dtype: torch.dtype | None = None, kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of the same queries on every rank to keys of which each rank has a shard. No gradients.

    Every rank computes its part in float32; out and lse, which are small where queries are few, are gathered and merged
    in the order of ranks, so that all get the same bits.

    Args:
        q: (batch, seqlen_q, heads_q, dim) in `layout`, the same on all ranks.
        k, v: this rank's shard of the cache, (batch, places, heads_kv, dim).
        layout_of_sequence: which places of the whole cache those are. "striped" fills ranks evenly as a cache grows:
            place p is number p // ranks on rank p % ranks.
        mask: in positions of the whole cache, as `sartor.mods.cached(lengths, seqlen_q, capacity)` is for a cache that
            is filled to `lengths`. Nothing on a GPU is waited for.
        sinks: (heads_q,), the same on all ranks; they count once.
        Others: as in `sartor.distributed.attention`.

    Returns:
        out (batch, seqlen_q, heads_q, dim_v), and lse (batch, heads_q, seqlen_q) with `return_lse`; equal on all ranks.

    Raises:
        TypeError, ValueError, Unsupported: as `sartor.attention`. Ranks are not asked whether they agree.
    """
    boolean("return_lse", return_lse)
    ranks = ranks_of(mesh, group)
    if ranks.heads_ranks != 1:
        raise ValueError(f"mesh must have 1 dim, got {ranks.ring_ranks} x {ranks.heads_ranks}")
    call = Call(
        q, k, v, None, mask, score, alibi_slopes, sinks, causal, window, softmax_scale, softcap, False, out_dtype,
        kernel, layout=layout,
    ).bshd()  # fmt: skip
    if torch.is_grad_enabled() and call.needs_gradient:
        raise NotImplementedError("decode has no gradients: expected inputs without requires_grad, or torch.no_grad()")
    transport = Transport.named(ranks.ring, seconds(timeout))
    with torch.no_grad():
        merged = _merged(call, Sharding.parse(shardings_of(layout_of_sequence, ranks.ranks, call)[1]), transport)
        if sinks is not None:
            merged.add_sinks(sinks)
    out = merged.out.to(out_dtype or q.dtype)
    out = out.transpose(1, 2) if layout == "bhsd" else out
    return (out, merged.lse) if return_lse else out


def _merged(call: Call, keys: Sharding, transport: Transport) -> Merged:
    """The results over the keys of all ranks."""
    for name, t in (("k", call.k), ("v", call.v)):
        check_places(name, t, keys, transport.rank)
    if call.mask is not None and not isinstance(call.mask, Mask):
        raise TypeError(f"mask must be a sartor.mods.Mask, got {type(call.mask).__name__}")
    Problem.of(Call(call.q, call.k, call.v, sinks=call.sinks, alibi_slopes=call.alibi_slopes, kernel=call.kernel))
    queries = Sharding.make("contiguous", call.q.shape[1], 1)
    local = Local(call, queries, keys, 0)
    own = Merged(call.q, call.v.shape[3], wide(call.q.dtype))
    plain = local.score is None and call.mask is None and not call.causal and call.window is None
    for kv in keys.runs[transport.rank]:
        at = _rectangle(call, kv, keys.seqlen, plain)
        own.add(at.q, *ops.run(replace(local.problem(at, call.k, call.v), out_dtype=wide(call.q.dtype)), True))
    merged, shapes = Merged(call.q, call.v.shape[3], wide(call.q.dtype)), [tuple(own.out.shape), tuple(own.lse.shape)]
    for out, lse in transport.gather([own.out, own.lse], [shapes] * transport.ranks):
        merged.add(slice(None), out, lse)
    return merged


def _rectangle(call: Call, kv: Run, seqlen_kv: int, plain: bool) -> Rectangle:
    """All queries and one run of the cache; whether the mask leaves anything of it is the kernel's to find."""
    n = call.q.shape[1]
    frame = None if plain else Frame(Run(0, 0, 1, n), kv, n, seqlen_kv)
    return Rectangle(slice(0, n), kv.places, frame, plain)
