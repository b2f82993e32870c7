"""`F.scaled_dot_product_attention` made context parallel in a part of a program, models of others included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sartor.distributed.api import Method, Shardings, attention

Tensor = torch.Tensor


class _Replaced(TorchFunctionMode):
    """Calls of one function go to another."""

    def __init__(self, function: Callable[..., Any], other: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.other = function, other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.other if func is self.function else func)(*args, **(kwargs or {}))


@contextmanager
def context_parallel(
    *, mesh: Any = None, group: Any = None, method: Method = "auto", layout_of_sequence: Shardings = "contiguous",
    timeout: float | None = None, **options: Any,
) -> Iterator[None]:  # fmt: skip
    """Within it, `torch.nn.functional.scaled_dot_product_attention` takes shards of a sequence, on this thread.

    Shard token ids, labels and position ids by `shard` and `positions` before the model sees them. Positions that the
    model makes itself count from 0 on every rank: pass them in.

    Args:
        mesh, group, method, layout_of_sequence, timeout: as in `sartor.distributed.attention`.
        **options: of `sartor.distributed.attention`, for what PyTorch's call has no argument for: `mask`, `window`, ...

    Of PyTorch's arguments, `attn_mask` is (batch, heads, queries of this rank, all keys), `is_causal` means positions
    of the whole sequence, `dropout_p` drops what one device does where ranks are seeded alike, and inputs must have
    four dims.
    """

    def replaced(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if query.dim() != 4:
            raise ValueError(f"query must have 4 dims (batch, heads, seqlen, dim), got {tuple(query.shape)}")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(f"enable_gqa must be True for heads that differ, got {query.shape[1]} and {key.shape[1]}")
        given = dict(options)
        if attn_mask is not None:
            given["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
        if is_causal:
            given["causal"] = "top_left"
        out = attention(
            query, key, value, mesh=mesh, group=group, method=method, layout_of_sequence=layout_of_sequence,
            timeout=timeout, layout="bhsd", softmax_scale=scale, dropout_p=dropout_p, **given,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    with _Replaced(F.scaled_dot_product_attention, replaced):
        yield
