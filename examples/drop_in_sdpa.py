"""A model that knows nothing of Sartor, run by it: one line, or a `with` block, and nothing in the model changes."""

import torch
import torch.nn.functional as F
from torch import nn

import sartor.integrations.torch


class Block(nn.Module):
    """A layer as it is found in the wild."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    block = Block(dim=96, heads=4).to(device)
    encoder = nn.TransformerEncoderLayer(96, 4, dropout=0.0, batch_first=True).to(device)
    x = torch.randn(2, 128, 96, device=device)

    by_pytorch = encoder(block(x))
    with sartor.integrations.torch.activate():  # or once for the whole program, without `with`
        by_sartor = encoder(block(x))
        by_sartor.square().mean().backward()
    print("largest difference:", (by_sartor - by_pytorch).abs().max().item())
    torch.testing.assert_close(by_sartor, by_pytorch)

    with sartor.integrations.torch.activate():  # what Sartor has not got is PyTorch's, and said once
        q = torch.randn(3, 1, 4, 16, 24, device=device)
        torch.func.vmap(F.scaled_dot_product_attention)(q, q, q)


if __name__ == "__main__":
    main()
