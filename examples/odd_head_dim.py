"""Training with head dims that are no power of two: 20 for queries and keys, 12 for values. Nothing is padded.

The task: pairs of a name and a value, then one of the names; the answer is its value.
"""

import torch
import torch.nn.functional as F
from torch import nn

import sartor

NAMES, VALUES, PAIRS, HEADS, DIM, DIM_V = 16, 10, 8, 2, 20, 12


class Recall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.names, self.values = nn.Embedding(NAMES, HEADS * DIM), nn.Embedding(VALUES, HEADS * DIM_V)
        self.query = nn.Linear(HEADS * DIM, HEADS * DIM)
        self.head = nn.Linear(HEADS * DIM_V, VALUES)

    def heads(self, names, values, asked):
        """q (batch, 1, heads, 20), k (batch, pairs, heads, 20), v (batch, pairs, heads, 12)."""
        k, v = self.names(names), self.values(values)
        q = self.query(self.names(asked))[:, None]
        return [t.unflatten(-1, (HEADS, -1)) for t in (q, k, v)]

    def forward(self, *tokens):
        return self.head(sartor.attention(*self.heads(*tokens)).flatten(1))


def examples(count: int) -> tuple[torch.Tensor, ...]:
    """Names and values (count, PAIRS), the name asked for and its value (count,)."""
    names = torch.rand(count, NAMES).argsort(1)[:, :PAIRS]
    values, place = torch.randint(0, VALUES, (count, PAIRS)), torch.randint(0, PAIRS, (count, 1))
    return names, values, names.gather(1, place)[:, 0], values.gather(1, place)[:, 0]


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Recall().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
for _ in range(60):
    *tokens, wanted = (t.to(device) for t in examples(64))
    loss = F.cross_entropy(model(*tokens), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
right = (model(*tokens).argmax(-1) == wanted).float().mean()
print(f"loss {loss.item():.3f}, right: {right.item():.0%}")
print(sartor.explain(*model.heads(*tokens)).plan)
assert loss.item() < 0.5
