"""A rank's memory does not grow with the number of ranks: what it takes for 1 / P of the sequence is O(N / P)."""

from __future__ import annotations

import torch

import sartor.distributed as context
from sartor.lab.measure.memory import peak_mib


def peak(groups, ranks, places, method, causal=True):
    """MiB of a forward and backward beyond the inputs, on this rank."""
    q, k, v = (torch.randn(1, places, 2, 64, requires_grad=True) for _ in range(3))

    def call():
        out = context.attention(
            q, k, v, group=groups[ranks], method=method, causal=causal, layout_of_sequence="zigzag", kernel="blocked"
        )
        return torch.autograd.grad(out.sum(), [q, k, v])

    call()
    return peak_mib(call, torch.device("cpu"))


def test_ring(world):
    places = 768
    four = max(world.run(4, peak, 4, places, "ring"))
    shard = places * 2 * 64 * 4 / 2**20
    scores = 2 * 256 * 512 * 4 / 2**20  # of a tile of all heads, of which the kernel has some at a time
    assert four <= 25 * shard + 4 * scores  # tensors of a shard: out, gradients, two blocks of keys, what is on its way


def test_ring_of_more_ranks(large_world):
    five, eight = (max(large_world.run(ranks, peak, ranks, 512, "ring", False)) for ranks in (5, 8))
    assert eight <= 1.02 * five  # shards of the same size; of four ranks not all that can be on its way is


def test_allgather_holds_all_keys(world):
    """Which is why "auto" refuses it where keys are many."""
    places = 512
    two, four = (max(world.run(ranks, peak, ranks, places, "allgather")) for ranks in (2, 4))
    assert four > 1.2 * two
