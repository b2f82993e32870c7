"""Training on sequences of different lengths, packed one after another: no token is padding, none sees another's."""

import torch
import torch.nn.functional as F
from torch import nn

import sartor
from sartor import mods
from sartor.nn import Attention

VOCABULARY, DIM = 32, 64


def sequences(count: int) -> list[torch.Tensor]:
    """Of 5 to 40 tokens that count on from a random one."""
    lengths, starts = torch.randint(5, 41, (count,)), torch.randint(0, VOCABULARY, (count,))
    return [(start + torch.arange(n)) % VOCABULARY for n, start in zip(lengths, starts, strict=True)]


def pack(parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Tokens (1, total), their positions, and cu_seqlens (count + 1,)."""
    lengths = torch.tensor([len(p) for p in parts])
    positions = torch.cat([torch.arange(n) for n in lengths])
    return torch.cat(parts)[None], positions[None], F.pad(lengths.cumsum(0), (1, 0)).int()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.layers = nn.ModuleList([Attention(DIM, 4, 2) for _ in range(2)])

    def forward(self, tokens, positions, cu_seqlens):
        n = tokens.shape[1]
        mask = mods.packed(cu_seqlens, cu_seqlens, n, n, causal=True)  # once; the layers share it
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, positions, mask)
        return self.head(x)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(30):
    tokens, positions, ends = (t.to(device) for t in pack(sequences(12)))
    targets = tokens.roll(-1, 1)[0].index_fill(0, ends[1:].long() - 1, -100)  # the last of each has no next one
    loss = F.cross_entropy(model(tokens, positions, ends)[0], targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{tokens.shape[1]} tokens in {len(ends) - 1} sequences, loss {loss.item():.3f}")
assert loss.item() < 1.0

q = torch.randn(tokens.shape[1], 4, 16, device=device)  # the same by flash-attn's function, without modules
print(sartor.flash_attn_varlen_func(q, q, q, ends, ends, 40, 40, causal=True).shape)
