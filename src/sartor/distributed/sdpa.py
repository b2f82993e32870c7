"""`F.scaled_dot_product_attention` made context parallel in a part of a program, models of others included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sartor.distributed.api import Method, Shardings, attention

Tensor = torch.Tensor
PYTORCHS = torch._C._nn.scaled_dot_product_attention  # whatever `torch.nn.functional` has in its place


class _Replaced(TorchFunctionMode):
    """Calls of PyTorch's attention go to another function, those that `nn.MultiheadAttention` makes too."""

    takes_attention = True  # for `sartor.integrations.torch`, whose function stands in the place of PyTorch's

    def __init__(self, other: Callable[..., Tensor]) -> None:
        super().__init__()
        self.other = other
        # The module's function is seen before the one that it calls, and runs with this mode off: a copy of it calls
        # `other`, and hands itself to modes around this one.
        module: Any = F.multi_head_attention_forward
        names = {n: value for n, value in module.__globals__.items() if n != "__name__"}  # compilers look it up there
        names["scaled_dot_product_attention"] = other
        self.module = FunctionType(module.__code__, names, module.__name__, module.__defaults__)
        names[module.__name__] = self.module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return self._of_module(*args, **kwargs)
        return (self.other if func is PYTORCHS else func)(*args, **kwargs)

    def _of_module(
        self, query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int, in_proj_weight: Any,
        in_proj_bias: Any, bias_k: Any, bias_v: Any, add_zero_attn: bool, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if kwargs["need_weights"]:
            raise NotImplementedError(
                "need_weights must be False for nn.MultiheadAttention within context_parallel, as no rank has the"
                " weights of all keys, got True"
            )
        if bias_k is not None or add_zero_attn:
            raise NotImplementedError(
                "nn.MultiheadAttention must have add_bias_kv=False and add_zero_attn=False within context_parallel, as"
                " each rank would add keys of its own, got True"
            )
        return self.module(
            query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v,
            add_zero_attn, *args, **kwargs,
        )  # fmt: skip


@contextmanager
def context_parallel(
    *, mesh: Any = None, group: Any = None, method: Method = "auto", layout_of_sequence: Shardings = "contiguous",
    timeout: float | None = None, **options: Any,
) -> Iterator[None]:  # fmt: skip
    """Within it, `torch.nn.functional.scaled_dot_product_attention` takes shards of a sequence, on this thread,
    and so do `nn.MultiheadAttention` (with `need_weights=False`) and PyTorch's Transformer layers, which call it.

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

    with _Replaced(replaced):
        yield
