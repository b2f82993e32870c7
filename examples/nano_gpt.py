"""A small GPT over characters, on `sartor.nn.Attention`: trained on this file, then asked to go on, with a cache."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from sartor.nn import Attention

CHARACTERS = sorted(set(TEXT := Path(__file__).read_text()))


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(2)])
        self.attention = Attention(dim, heads, heads // 2, window=(31, 0), sinks=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, cache=None):
        x = x + self.attention(self.norms[0](x), cache=cache)
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, dim: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(len(CHARACTERS), dim), nn.Linear(dim, len(CHARACTERS))
        self.layers = nn.ModuleList([Layer(dim, heads) for _ in range(layers)])

    def forward(self, tokens, caches=None):
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[i])
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens, count: int):
        caches = [layer.attention.new_cache(tokens.shape[0], tokens.shape[1] + count) for layer in self.layers]
        found = [tokens]
        for _ in range(count):  # the prompt first, then one token at a time
            found.append(self(found[-1], caches)[:, -1:].argmax(-1))
        return torch.cat(found, 1)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model, data = GPT().to(device), torch.tensor([CHARACTERS.index(c) for c in TEXT], device=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(80):
    starts = torch.randint(0, len(data) - 65, (8, 1), device=device)
    block = data[starts + torch.arange(65, device=device)]
    loss = F.cross_entropy(model(block[:, :-1]).flatten(0, 1), block[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss:", loss.item(), "".join(CHARACTERS[i] for i in model.generate(data[None, :20], 60)[0]), sep="\n")
assert loss.item() < 2.0
