"""A small language model trained on sequences that are spread over processes.

    torchrun --nproc-per-node 4 examples/long_context.py
    torchrun --nproc-per-node 4 examples/long_context.py --method ulysses --layout contiguous

Every process holds a part of each sequence and all of the weights. Attention is the one place where parts meet; losses
and gradients are summed over processes afterwards. Without torchrun, one process does the same: the losses are equal.
On GPUs, each process takes one.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import sartor
import sartor.distributed as context

DIM, HEADS, VOCABULARY = 32, 4, 64


class Attention(nn.Module):
    """Causal self-attention with rotary positions; `attend` is `sartor.attention` or that of several processes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x, positions, attend):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, DIM // HEADS).unbind(2)
        q, k = rotated(q, positions), rotated(k, positions)
        return self.out(attend(q, k, v).flatten(2))


def rotated(x, positions):
    """Rotary embedding by the positions in the whole sequence, (batch, tokens, heads, dim)."""
    half = x.shape[-1] // 2
    frequencies = 1000 ** (-torch.arange(half, device=x.device) / half)
    angles = (positions[:, None].float() * frequencies).to(x.dtype)[None, :, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList([Attention() for _ in range(2)])
        self.mixers = nn.ModuleList(
            [nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)) for _ in range(2)]
        )
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens, positions, attend):
        x = self.embedding(tokens)
        for attention, mixer in zip(self.layers, self.mixers, strict=True):
            x = x + attention(F.rms_norm(x, (DIM,)), positions, attend)
            x = x + mixer(F.rms_norm(x, (DIM,)))
        return self.head(x)


def sequences(batch, seqlen, step):
    """Tokens that repeat after a third of the sequence, so that there is something far away to attend to."""
    generator = torch.Generator().manual_seed(step)
    part = torch.randint(VOCABULARY, (batch, seqlen // 3 + 1), generator=generator)
    tokens = part.repeat(1, 4)[:, : seqlen + 1]
    return tokens[:, :-1], tokens[:, 1:]  # labels are shifted before they are cut


def train(args, rank, ranks, device):
    """The losses of all steps."""
    torch.manual_seed(0)
    model = Model().to(device=device, dtype=torch.float64 if args.float64 else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sharding = context.Sharding.make(args.layout, args.seqlen, ranks)
    positions = context.positions(sharding, rank, device)

    def attend(q, k, v):
        if ranks == 1:
            return sartor.attention(q, k, v, causal=True)
        return context.attention(q, k, v, causal=True, method=args.method, layout_of_sequence=sharding)

    losses = []
    for step in range(args.steps):
        tokens, labels = sequences(args.batch, args.seqlen, step)
        tokens = context.shard(tokens, sharding, rank).to(device)
        labels = context.shard(labels, sharding, rank, fill=-100).to(device)
        logits = model(tokens, positions, attend)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss = total / (args.batch * args.seqlen)  # this process's share of the mean over all tokens
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if ranks > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            dist.all_reduce(loss)
        optimizer.step()
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.12f}", flush=True)
    return losses


def main():
    """Read the options, join the other processes if there are any, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=509)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--method", default="ring", choices=["auto", "ring", "ulysses", "allgather"])
    parser.add_argument("--layout", default="zigzag", choices=["contiguous", "zigzag", "striped"])
    parser.add_argument("--float64", action="store_true", help="to compare losses to the last digits")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if gpu else "gloo")
    train(args, dist.get_rank() if ranks > 1 else 0, ranks, device)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
