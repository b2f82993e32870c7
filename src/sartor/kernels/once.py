"""Gradients that have no gradients of their own, and say so to whoever asks for one (create_graph=True)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Tensor = torch.Tensor
NO_SECOND = "sartor.attention has no second derivative: expected no gradient of its gradients"


class _Last(torch.autograd.Function):
    """A gradient as it is, that raises where it is differentiated by way of what it came from."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Any) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(NO_SECOND)


def once(make: Callable[[], Iterable[Tensor | None]], *sources: Any) -> Iterable[Any]:
    """The gradients that `make` computes from `sources`. With create_graph=True such as raise NotImplementedError if
    the graph is used, instead of a second derivative of zero."""
    if not torch.is_grad_enabled():
        return make()
    with torch.no_grad():
        found = make()
    return tuple(d if d is None else _Last.apply(d.detach().requires_grad_(), *sources) for d in found)
