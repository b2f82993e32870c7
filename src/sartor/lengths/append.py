"""New keys and values, written to the places of a cache that come after those that are filled."""

from __future__ import annotations

import torch

from sartor.checks import needs_operator
from sartor.lengths.intervals import by_kernel

Tensor = torch.Tensor


def append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor | int, name: str) -> None:
    """Write k and v (batch, added, heads, dim) into their caches (batch, capacity, heads, dim), of the same dtype, from
    place lengths[b] on: an int, or integers (batch,), which `values.look` has seen. What does not fit is left out, and
    told of on GPUs, where errors call the lengths `name`."""
    added = k.shape[1]
    pairs = (k_cache, k), (v_cache, v)
    if not isinstance(lengths, Tensor):
        for old, new in pairs:
            old[:, lengths : lengths + added] = new
        return
    plain = not needs_operator(k_cache)
    follows = torch.is_grad_enabled() and any(t.requires_grad for t in (k_cache, v_cache, k, v))
    if plain and not follows and by_kernel(k_cache):
        from sartor.lengths import launches

        launches.append(k, v, k_cache, v_cache, lengths, name)
        torch.autograd.graph.increment_version((k_cache, v_cache))
        return
    item = torch.arange(k.shape[0], device=k.device)[:, None]
    place = torch.arange(added, device=k.device)
    if plain and k_cache.device.type == "cpu":  # there all values are right
        at = lengths.long()[:, None] + place
        for old, new in pairs:
            old[item, at] = new
        return
    # As many places as are added, the last ones at most: some of them keep what they hold if not all that is new fits.
    begin = lengths.long()[:, None]
    at = begin.clamp(0, k_cache.shape[1] - added) + place
    source = at - begin
    fits = ((source >= 0) & (source < added))[..., None, None]
    for old, new in pairs:
        old[item, at] = torch.where(fits, new[item, source.clamp(0, added - 1)], old[item, at])
