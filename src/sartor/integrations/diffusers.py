"""diffusers: `register()`, then `model.set_attention_backend("sartor")`, or its `attention_backend("sartor")`.

Its registry of backends serves the models that call its `dispatch_attention_fn`: Flux, Wan and most of its
transformers. Those that call PyTorch's SDPA themselves, as U-Nets, DiT and Stable Diffusion 3 do, take
`sartor.integrations.torch.activate()`.
"""

from __future__ import annotations

from typing import Any

import torch

from sartor.api import attention

Tensor = torch.Tensor
NAME = "sartor"


def register(name: str = NAME) -> None:
    """Let diffusers know the backend `name`, in lower case, as `set_attention_backend` looks it up.

    Raises:
        ImportError: diffusers is missing, or older than its registry of attention backends (0.35).
    """
    from diffusers.models.attention_dispatch import (  # type: ignore[import-not-found]
        AttentionBackendName,
        _AttentionBackendRegistry,
    )

    _AttentionBackendRegistry.register(_member(AttentionBackendName, name))(attention_backend)


def _member(names: Any, name: str) -> Any:
    """The member of an enumeration of texts, which is added if it is missing: backends are known by one."""
    if name in names._value2member_map_:
        return names._value2member_map_[name]
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    names._member_map_[member._name_] = names._value2member_map_[name] = member
    names._member_names_.append(member._name_)
    return member


def attention_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`sartor.attention` as diffusers calls a backend.

    Args:
        query, key, value: (batch, seqlen, heads, dim).
        attn_mask: bool, True = attend, or float, added to the scores: (batch, seqlen_kv), or what broadcasts to
            (batch, heads, seqlen_q, seqlen_kv).
        dropout_p: at least 0 and below 1.
        is_causal: query i sees keys up to i.
        enable_gqa: accepted; key heads may always be fewer.
        return_lse: return (out, lse), lse (batch, heads, seqlen_q).
        _parallel_config: None; context parallelism raises NotImplementedError.
    """
    if _parallel_config is not None:
        raise NotImplementedError("_parallel_config must be None: this backend has no context parallelism")
    extra: dict[str, Any] = {}
    if attn_mask is not None:
        if attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        extra = {"mask" if attn_mask.dtype == torch.bool else "bias": attn_mask}
    return attention(
        query, key, value, causal="top_left" if is_causal else False, softmax_scale=scale, return_lse=return_lse,
        dropout_p=dropout_p, **extra,
    )  # fmt: skip
