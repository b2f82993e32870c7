"""A small language model trained on sequences spread over processes; one, without torchrun, has the same losses.

    torchrun --nproc-per-node 4 examples/long_context.py --method ulysses --layout contiguous

Each process holds a part of every sequence and all weights. Parts meet in attention; gradients are summed afterwards.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from sartor.distributed import Sharding, attention, positions, shard


class Layer(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, turns, **options):
        q, k, v = self.qkv(F.rms_norm(x, x.shape[-1:])).unflatten(2, (3, 4, -1)).unbind(2)  # 4 heads
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(3, (-1, 2))) * turns).flatten(3) for t in (q, k))
        x = x + self.out(attention(q, k, v, causal=True, **options).flatten(2))
        return x + self.mlp(x)


parser = argparse.ArgumentParser()
for name, default in {"seqlen": 509, "batch": 2, "steps": 10, "method": "ring", "layout": "zigzag"}.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
parser.add_argument("--float64", action="store_true", help="to compare losses to the last digits")
args = parser.parse_args()
alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group(**alone)
rank, ranks, gpus = dist.get_rank(), dist.get_world_size(), torch.cuda.device_count()
device = torch.device(f"cuda:{rank % gpus}" if gpus >= ranks else "cpu")
torch.manual_seed(0)  # the same weights and tokens everywhere
sharding = Sharding.make(args.layout, args.seqlen, ranks)
model = nn.ModuleList([nn.Embedding(64, 32), Layer(), Layer(), nn.Linear(32, 64)])
model.to(device, torch.float64 if args.float64 else torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
turns = torch.exp(positions(sharding, rank, device)[:, None, None] * 1j * 1000 ** (-torch.arange(4, device=device) / 4))
for step in range(args.steps):  # tokens repeat after a third of the sequence: what is far away tells them
    tokens = torch.randint(64, (args.batch, args.seqlen // 3 + 1)).repeat(1, 4)[:, : args.seqlen + 1]
    x = model[0](shard(tokens[:, :-1], sharding, rank).to(device))
    labels = shard(tokens[:, 1:], sharding, rank, fill=-100).to(device)  # shifted before they are cut
    for layer in model[1:3]:
        x = layer(x, turns, method=args.method, layout_of_sequence=sharding)
    loss = F.cross_entropy(model[3](x).flatten(0, 1), labels.flatten(), reduction="sum") / (args.batch * args.seqlen)
    optimizer.zero_grad()
    loss.backward()
    for t in (loss.detach(), *(p.grad for p in model.parameters())):  # sums over processes
        dist.all_reduce(t)
    optimizer.step()
    print(f"step {step}: loss {loss.item():.12f}\n" if rank == 0 else "", end="", flush=True)
dist.destroy_process_group()
