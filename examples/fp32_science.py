"""float32 for science: attention over points in space that turns with them, trained to predict forces.

Scores are made of features and distances, values of features and positions. So the result has a part that does not
change when all points are turned, and a part that turns with them, exactly: what is left is rounding. Head dims are
what they are (24 for keys, 27 for values), and float32 means float32 accuracy on GPUs too, on the tensor cores.
"""

import torch
from torch import nn

import sartor

POINTS, HEADS, DIM = 32, 4, 24


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Linear(1, 32), nn.Linear(32, 3 * HEADS * DIM)
        self.decay, self.head = nn.Parameter(torch.ones(HEADS)), nn.Linear(HEADS * DIM, HEADS)

    def forward(self, charges, positions):  # (batch, points), (batch, points, 3)
        q, k, v = self.qkv(self.embedding(charges[..., None]).tanh()).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        place = positions[:, :, None].expand(-1, -1, HEADS, -1)
        far = (positions[:, :, None] - positions[:, None]).norm(dim=-1)
        bias = -self.decay.abs()[:, None, None] * far[:, None]
        out = sartor.attention(q, k, torch.cat([v, place], -1), bias=bias)  # its gradient is computed too
        features, centre = out.split((DIM, 3), -1)
        weight = self.head(features.flatten(2))[..., None]  # of each head's direction
        return (weight * (centre - place)).sum(2)


def force(charges, positions):
    """Of screened charges, the answer to be learnt."""
    away = positions[:, :, None] - positions[:, None]
    far = away.norm(dim=-1, keepdim=True)
    return (charges[:, :, None, None] * charges[:, None, :, None] * away * torch.exp(-2 * far)).sum(2)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
layer = Layer().to(device)
optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
for step in range(100):
    charges, positions = torch.randn(8, POINTS, device=device).sign(), torch.randn(8, POINTS, 3, device=device)
    want = force(charges, positions)
    loss = (layer(charges, positions) - want).square().mean() / want.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 33 == 0:
        print(f"step {step:3d}  relative error {loss.item():.3f}")
turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0].to(device, torch.float32)
found, turned = layer(charges, positions), layer(charges, positions @ turn)
print(f"turned before or after: {(found @ turn - turned).norm() / found.norm():.1e} apart")
torch.testing.assert_close(turned, found @ turn, rtol=1e-4, atol=1e-4)
