"""All-to-all between sequence and heads (Jacobs et al. 2023): each rank gets some of the heads over the tokens of all
ranks of a group, and gives its results back. Each is the other's backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sartor.checks import needs_operator
from sartor.distributed.agreement import agree
from sartor.distributed.operator import check_places
from sartor.distributed.sharding import Sharding, apart, joined_places, together
from sartor.distributed.transport import Transport

Tensor = torch.Tensor
_LIBRARY = torch.library.Library("sartor", "FRAGMENT")
_LIBRARY.define("spread_heads(Tensor[] xs, str group, str[] shardings, int first, float timeout) -> Tensor[]")
_LIBRARY.define(
    "collect_heads(Tensor[] xs, str group, str[] shardings, int first, float[] fills, float timeout) -> Tensor[]"
)


def spread_heads(
    xs: Sequence[Tensor], group: str, shardings: Sequence[str], first: int, timeout: float
) -> list[Tensor]:
    """Each from (batch, places, heads, dim) of one shard to (batch, tokens of the group, heads // ranks, dim), all in
    one transfer.

    Args:
        xs: the shards of rank `first + r`, r being the number in the group.
        group: its name.
        shardings: the texts of their shardings, whose shards first .. first + ranks - 1 the group has.
        first: the group's first shard.
        timeout: seconds, 0 for the group's own.

    Returns:
        Of each heads r * heads // ranks and on, of the tokens in the order of `Sharding.joined`.
    """
    if needs_operator(xs[0]):
        return list(torch.ops.sartor.spread_heads(xs, group, shardings, first, timeout))
    return list(_Spread.apply(group, list(shardings), first, timeout, *xs))  # type: ignore[no-untyped-call]


def collect_heads(
    xs: Sequence[Tensor], group: str, shardings: Sequence[str], first: int, fills: Sequence[float], timeout: float
) -> list[Tensor]:
    """The inverse of `spread_heads`; padding of each is filled with one of `fills`."""
    if needs_operator(xs[0]):
        return list(torch.ops.sartor.collect_heads(xs, group, shardings, first, fills, timeout))
    return list(_Collect.apply(group, list(shardings), first, list(fills), timeout, *xs))  # type: ignore[no-untyped-call]


@torch.library.impl(_LIBRARY, "spread_heads", "CompositeExplicitAutograd")
def _spread(xs: Sequence[Tensor], group: str, shardings: Sequence[str], first: int, timeout: float) -> list[Tensor]:
    transport, wholes = Transport.named(group, timeout), [Sharding.parse(text) for text in shardings]
    ranks, error = transport.ranks, None
    try:
        for x, whole in zip(xs, wholes, strict=True):
            check_places("q, k or v", x, whole, first + transport.rank)
            if x.shape[2] % ranks:
                raise ValueError(f"heads must be a multiple of the {ranks} ranks that share them, got {x.shape[2]}")
    except ValueError as wrong:
        error = wrong
    said = [] if error else [
        f"all-to-all of (batch {x.shape[0]}, heads {x.shape[2]}, dim {x.shape[3]}) {x.dtype}, `{text}` from {first} on"
        for x, text in zip(xs, shardings, strict=True)
    ]  # fmt: skip
    agree(transport, *said, device=xs[0].device, error=error)
    both = list(zip(xs, wholes, strict=True))
    shapes = [
        [(x.shape[0], whole.count(first + r), x.shape[2] // ranks, x.shape[3]) for x, whole in both]
        for r in range(ranks)
    ]
    own = [x[:, : shape[1]].split(shape[2], 2) for x, shape in zip(xs, shapes[transport.rank], strict=True)]
    got = transport.all_to_all(list(zip(*own, strict=True)), shapes)
    return [
        together(parts, joined_places(text, ranks, first // ranks))
        for parts, text in zip(zip(*got, strict=True), shardings, strict=True)
    ]


@torch.library.impl(_LIBRARY, "collect_heads", "CompositeExplicitAutograd")
def _collect(
    xs: Sequence[Tensor], group: str, shardings: Sequence[str], first: int, fills: Sequence[float], timeout: float
) -> list[Tensor]:
    transport, found = Transport.named(group, timeout), []
    ranks, rank = transport.ranks, transport.rank
    parts = [apart(x, joined_places(text, ranks, first // ranks)) for x, text in zip(xs, shardings, strict=True)]
    wholes = [Sharding.parse(text) for text in shardings]
    shapes = [(x.shape[0], w.count(first + rank), *x.shape[2:]) for x, w in zip(xs, wholes, strict=True)]
    got = transport.all_to_all(list(zip(*parts, strict=True)), [shapes] * ranks)
    for own, whole, fill in zip(zip(*got, strict=True), wholes, fills, strict=True):
        b, count, heads, dim = own[0].shape
        room = own[0].new_empty((b, whole.sizes[first + rank], heads * ranks, dim))
        for part, to in zip(own, room[:, :count].split(heads, 2), strict=True):
            to.copy_(part)
        room[:, count:] = fill
        found.append(room)
    return found


@torch.library.register_fake("sartor::spread_heads", lib=_LIBRARY)
def _spread_fake(
    xs: Sequence[Tensor], group: str, shardings: Sequence[str], first: int, timeout: float
) -> list[Tensor]:
    ranks = Transport.named(group).ranks
    tokens = [Sharding.parse(text).joined(ranks).sizes[first // ranks] for text in shardings]
    return [x.new_empty((x.shape[0], n, x.shape[2] // ranks, x.shape[3])) for x, n in zip(xs, tokens, strict=True)]


@torch.library.register_fake("sartor::collect_heads", lib=_LIBRARY)
def _collect_fake(
    xs: Sequence[Tensor], group: str, shardings: Sequence[str], first: int, fills: Sequence[float], timeout: float
) -> list[Tensor]:
    transport = Transport.named(group)
    places = [Sharding.parse(text).sizes[first + transport.rank] for text in shardings]
    return [
        x.new_empty((x.shape[0], n, x.shape[2] * transport.ranks, x.shape[3])) for x, n in zip(xs, places, strict=True)
    ]


def _spread_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.group, ctx.shardings, ctx.first, ctx.timeout = inputs


def _collect_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.group, ctx.shardings, ctx.first, _, ctx.timeout = inputs


def _back(
    ctx: Any, gs: Sequence[Tensor | None], way: Callable[[list[Tensor], list[str]], list[Tensor]]
) -> list[Tensor | None]:
    """The gradients that there are, the other way; lse often has none."""
    there = [(g, text) for g, text in zip(gs, ctx.shardings, strict=True) if g is not None]
    found = iter(way([g for g, _ in there], [text for _, text in there]) if there else ())
    return [None if g is None else next(found) for g in gs]


def _spread_backward(ctx: Any, gs: Sequence[Tensor | None]) -> Any:
    def way(gs: list[Tensor], texts: list[str]) -> list[Tensor]:
        return collect_heads(gs, ctx.group, texts, ctx.first, [0.0] * len(gs), ctx.timeout)

    return _back(ctx, gs, way), None, None, None, None


def _collect_backward(ctx: Any, gs: Sequence[Tensor | None]) -> Any:
    def way(gs: list[Tensor], texts: list[str]) -> list[Tensor]:
        return spread_heads(gs, ctx.group, texts, ctx.first, ctx.timeout)

    return _back(ctx, gs, way), None, None, None, None, None


torch.library.register_autograd("sartor::spread_heads", _spread_backward, setup_context=_spread_context, lib=_LIBRARY)
torch.library.register_autograd(
    "sartor::collect_heads", _collect_backward, setup_context=_collect_context, lib=_LIBRARY
)


class _Spread(torch.autograd.Function):
    """`spread_heads` of eager calls, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        inputs = given[4:], *given[:4]
        ctx.set_materialize_grads(False)
        _spread_context(ctx, inputs, None)
        return tuple(_spread(*inputs))

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> Any:
        found, *others = _spread_backward(ctx, gs)
        return *others, *found


class _Collect(torch.autograd.Function):
    """`collect_heads` of eager calls."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        inputs = given[5:], *given[:5]
        ctx.set_materialize_grads(False)
        _collect_context(ctx, inputs, None)
        return tuple(_collect(*inputs))

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> Any:
        found, *others = _collect_backward(ctx, gs)
        return *others, *found
