"""DTensors in: sharded on the sequence over the ranks of the call, or by batch and heads alone, which needs no other
rank. Out come DTensors sharded alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from sartor.distributed.sharding import Sharding

Tensor = torch.Tensor
Wrap = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def is_one(t: Any) -> bool:
    """Whether it is a DTensor."""
    if type(t) is torch.Tensor or type(t) is torch.nn.Parameter:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(t, DTensor)


def first(t: Any, layout: str) -> tuple[int, int]:
    """The batch item and the head that are the first ones on this rank."""
    if not is_one(t):  # which `unwrapped` refuses
        return 0, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return offset[0], offset[2 if layout == "bshd" else 1]


def unwrapped(
    q: Any, k: Any, v: Any, mesh: Any, layout_of_sequence: Any, layout: str
) -> tuple[Tensor, Tensor, Tensor, Any, Any, Wrap]:
    """Local q, k, v; the mesh of the sequence, None where no rank needs another; its sharding; and what makes DTensors
    of out and lse.

    On other dims of their mesh they may be sharded by batch or heads, or replicated: what is passed beside them (bias,
    sinks, slopes, what masks read) is then that of the local batch items and heads.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not is_one(t):
            raise TypeError(f"{name} must be a DTensor, as another of q, k and v is, got {type(t).__name__}")
        if t.device_mesh != q.device_mesh or tuple(t.placements) != tuple(q.placements):
            raise ValueError(
                f"{name} must have the mesh and placements of q, {q.placements}, got {t.placements} on {t.device_mesh}"
            )
    sequence, heads = (1, 2) if layout == "bshd" else (2, 1)
    dims = [i for i, p in enumerate(q.placements) if p.is_shard(sequence)]
    wrong = [p for p in q.placements if p.is_partial() or (p.is_shard() and p.dim % q.dim() not in (0, 1, 2))]
    if len(dims) > 1 or wrong:
        raise ValueError(
            f"q, k and v must be sharded on the sequence (dim {sequence}) over at most one dim of their mesh, and"
            f" elsewhere by batch or heads or not at all, got placements {q.placements}"
        )
    _check_heads(q, k, heads)
    wrap = _wrapper(q, v, heads, sequence)
    if not dims:
        if mesh is not None:
            raise ValueError(f"mesh must be None for q sharded on no sequence, got {mesh} and {q.placements}")
        whole = tuple(Sharding.make("contiguous", t.shape[sequence], 1) for t in (q, k))
        return q.to_local(), k.to_local(), v.to_local(), None, whole, wrap
    names = q.device_mesh.mesh_dim_names
    own = q.device_mesh[names[dims[0]]] if names and q.device_mesh.ndim > 1 else q.device_mesh
    if own.ndim != 1:
        raise ValueError("the mesh of q, k and v must have names of its dims, expected mesh_dim_names, got none")
    if mesh is not None and mesh != own:
        raise ValueError(f"mesh must be that of the sequence of q, {own}, got {mesh}")
    if layout_of_sequence != "contiguous":
        raise ValueError(
            f"layout_of_sequence of DTensors must be 'contiguous', as they are sharded, got {layout_of_sequence!r}:"
            " pass local tensors for another"
        )
    ranks = own.size()
    shardings = tuple(Sharding.make("contiguous", t.shape[sequence], ranks, pad=False) for t in (q, k))
    return q.to_local(), k.to_local(), v.to_local(), own, shardings, wrap


def _check_heads(q: Any, k: Any, heads: int) -> None:
    """Raise ValueError where a rank would not have the key heads of its query heads."""
    ranks = math.prod(q.device_mesh.size(i) for i, p in enumerate(q.placements) if p.is_shard(heads))
    if q.shape[heads] != k.shape[heads] and k.shape[heads] % ranks:
        raise ValueError(
            f"heads of k and v must be a multiple of the {ranks} ranks that they are sharded over, got {k.shape[heads]}"
        )


def _wrapper(q: Any, v: Any, heads: int, sequence: int) -> Wrap:
    from torch.distributed.tensor import DTensor, Shard

    def wrap(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        shape = torch.Size((*q.shape[:3], v.shape[3]))
        stride = torch.empty(shape, dtype=torch.int8, device="meta").stride()
        whole = DTensor.from_local(out.contiguous(), q.device_mesh, q.placements, shape=shape, stride=stride)
        places = {sequence: 2, heads: 1, 0: 0}
        placements = [Shard(places[p.dim % 4]) if p.is_shard() else p for p in q.placements]
        shape = torch.Size((q.shape[0], q.shape[heads], q.shape[sequence]))
        stride = torch.empty(shape, dtype=torch.int8, device="meta").stride()
        return whole, DTensor.from_local(lse.contiguous(), q.device_mesh, placements, shape=shape, stride=stride)

    return wrap
