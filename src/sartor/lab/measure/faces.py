"""What loops call that keep no mask: packed sequences and caches by their lengths, Sartor's and PyTorch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch

import sartor
from sartor.lab.workloads.workload import Inputs, Pattern, Workload

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Face(NamedTuple):
    """`why_not` is a sentence, empty where it can run; `make` the closure over (batch, heads, seqlen, dim)."""

    why_not: Callable[[Workload, torch.device], str]
    make: Callable[[Workload, Inputs], Attend]


def _not_packed(w: Workload, device: torch.device) -> str:
    alone = replace(w.pattern, causal="", document=0, lognormal=False) == Pattern()
    fits = w.batch == 1 and w.pattern.document and alone
    return "" if fits else "is for documents of one batch item, causal or not"


def _not_packed_gpu(w: Workload, device: torch.device) -> str:
    return "needs an NVIDIA GPU" if device.type != "cuda" else _not_packed(w, device)


def _no_cache(w: Workload, device: torch.device) -> str:
    return "" if replace(w.pattern, cached=False) == Pattern() else "is for caches without a score"


def _kept(x: Inputs, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A view as the function takes it, which callers have at no cost: made of the workload's tensors beforehand."""
    known = {id(t): change(t) for t in (x.q, x.k, x.v)}
    return lambda t: known[id(t)] if id(t) in known else change(t)


def _packed(w: Workload, x: Inputs, function: Any = sartor.flash_attn_varlen_func, **given: Any) -> Attend:
    assert x.ids is not None
    # no index, whose gradient autograd would copy into zeros
    view, counts = _kept(x, lambda t: t.squeeze(0).transpose(0, 1)), torch.bincount(x.ids[0])
    ends, longest = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(), int(counts.max())
    given = given or {"causal": bool(w.pattern.causal)}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = function(view(q), view(k), view(v), ends, ends, longest, longest, **given)
        return out.transpose(0, 1)[None]

    return attend


def _packed_of_torch(w: Workload, x: Inputs) -> Attend:
    from torch.nn.attention.varlen import varlen_attn  # of torch 2.10 and later

    causal = bool(w.pattern.causal)
    if "window_size" in inspect.signature(varlen_attn).parameters:  # by which later ones are told
        return _packed(w, x, varlen_attn, window_size=(-1, 0 if causal else -1))
    return _packed(w, x, varlen_attn, is_causal=causal)


def _cache(w: Workload, x: Inputs, new: bool = False) -> Attend:
    """`flash_attn_with_kvcache`; with `new`, the last key of each item is written by the call that attends to it."""
    view = _kept(x, lambda t: t.transpose(1, 2))
    lengths = torch.full((w.batch,), w.seqlen_kv, dtype=torch.int32, device=x.q.device)
    lengths = lengths if x.lengths is None else x.lengths
    items, last = torch.arange(w.batch, device=x.q.device), lengths.long() - 1
    before: dict[str, Any] = {"cache_seqlens": lengths - 1 if new else lengths}
    if new:
        before |= {name: view(t)[items, last].unsqueeze(1) for name, t in (("k", x.k), ("v", x.v))}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = before
        if k.shape[2] < w.seqlen_kv:  # of another length, see `unseen`
            given = before | {"cache_seqlens": before["cache_seqlens"].clamp(max=k.shape[2])}
        out: Any = sartor.flash_attn_with_kvcache(view(q), view(k), view(v), **given)
        return cast(Tensor, out.transpose(1, 2))

    return attend


FACES = {
    "sartor-varlen": Face(_not_packed, _packed),
    "torch-varlen": Face(_not_packed_gpu, _packed_of_torch),
    "sartor-kvcache": Face(_no_cache, _cache),
    "sartor-kvcache-new": Face(_no_cache, partial(_cache, new=True)),
}
