"""All-to-all between sequence and heads (Jacobs et al. 2023): each rank gets some of the heads over the tokens of all
ranks of a group, and gives its results back. Each is the other's backward."""

from __future__ import annotations

from typing import Any

import torch

from sartor.checks import needs_operator
from sartor.distributed.agreement import agree
from sartor.distributed.operator import check_places
from sartor.distributed.sharding import Sharding, apart, joined_places, together
from sartor.distributed.transport import Transport

Tensor = torch.Tensor
_LIBRARY = torch.library.Library("sartor", "FRAGMENT")
_LIBRARY.define("spread_heads(Tensor x, str group, str sharding, int first, float timeout) -> Tensor")
_LIBRARY.define("collect_heads(Tensor x, str group, str sharding, int first, float fill, float timeout) -> Tensor")


def spread_heads(x: Tensor, group: str, sharding: str, first: int, timeout: float) -> Tensor:
    """(batch, places, heads, dim) of one shard to (batch, tokens of the group, heads // ranks, dim).

    Args:
        x: the shard of rank `first + r`, r being the number in the group.
        group: its name.
        sharding: the text of the sharding, whose shards first .. first + ranks - 1 the group has.
        first: the group's first shard.
        timeout: seconds, 0 for the group's own.

    Returns:
        Heads r * heads // ranks and on of the tokens in the order of `Sharding.joined`.
    """
    way: Any = torch.ops.sartor.spread_heads if needs_operator(x) else _Spread.apply
    found: Tensor = way(x, group, sharding, first, timeout)
    return found


def collect_heads(x: Tensor, group: str, sharding: str, first: int, fill: float, timeout: float) -> Tensor:
    """The inverse of `spread_heads`; padding is filled with `fill`."""
    way: Any = torch.ops.sartor.collect_heads if needs_operator(x) else _Collect.apply
    found: Tensor = way(x, group, sharding, first, fill, timeout)
    return found


@torch.library.impl(_LIBRARY, "spread_heads", "CompositeExplicitAutograd")
def _spread(x: Tensor, group: str, sharding: str, first: int, timeout: float) -> Tensor:
    transport, whole = Transport.named(group, timeout), Sharding.parse(sharding)
    ranks, error = transport.ranks, None
    try:
        check_places("q, k or v", x, whole, first + transport.rank)
        if x.shape[2] % ranks:
            raise ValueError(f"heads must be a multiple of the {ranks} ranks that share them, got {x.shape[2]}")
    except ValueError as wrong:
        error = wrong
    said = "" if error else (
        f"all-to-all of (batch {x.shape[0]}, heads {x.shape[2]}, dim {x.shape[3]}) {x.dtype}, `{sharding}` from {first}"
        " on"
    )  # fmt: skip
    agree(transport, said, x.device, error)
    counts = [whole.count(first + r) for r in range(ranks)]
    b, heads, dim = x.shape[0], x.shape[2] // ranks, x.shape[3]
    parts = x[:, : counts[transport.rank]].split(heads, 2)
    got = transport.all_to_all(parts, [(b, n, heads, dim) for n in counts])
    return together(got, joined_places(sharding, ranks, first // ranks))


@torch.library.impl(_LIBRARY, "collect_heads", "CompositeExplicitAutograd")
def _collect(x: Tensor, group: str, sharding: str, first: int, fill: float, timeout: float) -> Tensor:
    transport, whole = Transport.named(group, timeout), Sharding.parse(sharding)
    ranks, mine = transport.ranks, first + transport.rank
    counts = [whole.count(first + r) for r in range(ranks)]
    b, _, heads, dim = x.shape
    parts = apart(x, joined_places(sharding, ranks, first // ranks))
    own = counts[transport.rank]
    got = transport.all_to_all(parts, [(b, own, heads, dim)] * ranks)
    found = x.new_empty((b, whole.sizes[mine], heads * ranks, dim))
    for part, to in zip(got, found[:, :own].split(heads, 2), strict=True):
        to.copy_(part)
    found[:, own:] = fill
    return found


@torch.library.register_fake("sartor::spread_heads", lib=_LIBRARY)
def _spread_fake(x: Tensor, group: str, sharding: str, first: int, timeout: float) -> Tensor:
    ranks = Transport.named(group).ranks
    tokens = Sharding.parse(sharding).joined(ranks).sizes[first // ranks]
    return x.new_empty((x.shape[0], tokens, x.shape[2] // ranks, x.shape[3]))


@torch.library.register_fake("sartor::collect_heads", lib=_LIBRARY)
def _collect_fake(x: Tensor, group: str, sharding: str, first: int, fill: float, timeout: float) -> Tensor:
    transport = Transport.named(group)
    places = Sharding.parse(sharding).sizes[first + transport.rank]
    return x.new_empty((x.shape[0], places, x.shape[2] * transport.ranks, x.shape[3]))


def _spread_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.group, ctx.sharding, ctx.first, ctx.timeout = inputs


def _collect_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.group, ctx.sharding, ctx.first, _, ctx.timeout = inputs


def _spread_backward(ctx: Any, g: Tensor) -> Any:
    return collect_heads(g, ctx.group, ctx.sharding, ctx.first, 0.0, ctx.timeout), None, None, None, None


def _collect_backward(ctx: Any, g: Tensor) -> Any:
    return spread_heads(g, ctx.group, ctx.sharding, ctx.first, ctx.timeout), None, None, None, None, None


torch.library.register_autograd("sartor::spread_heads", _spread_backward, setup_context=_spread_context, lib=_LIBRARY)
torch.library.register_autograd(
    "sartor::collect_heads", _collect_backward, setup_context=_collect_context, lib=_LIBRARY
)


class _Spread(torch.autograd.Function):
    """`spread_heads` of eager calls, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _spread_context(ctx, inputs, None)
        return _spread(*inputs)

    backward = staticmethod(_spread_backward)


class _Collect(torch.autograd.Function):
    """`collect_heads` of eager calls."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _collect_context(ctx, inputs, None)
        return _collect(*inputs)

    backward = staticmethod(_collect_backward)
