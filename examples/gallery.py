"""A gallery of masks and scores, a picture of each: the weights that attention gives to keys that are all alike.

    python examples/gallery.py [gallery.png]

Without a path the picture goes to the folder for temporary files. Queries run downwards, keys to the right.
"""

import math
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import torch

from sartor import mods
from sartor.lab.show.masks import draw, weights

mpl.use("Agg")
import matplotlib.pyplot as plt

N, HALF = 64, 32
ids = torch.tensor([0] * 20 + [1] * 12 + [2] * 32)[None]  # of three documents
ends = torch.tensor([0, 20, 32, 64])  # where packed sequences start, and where the last one ends
picked = torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.3
by_distance = torch.cos(torch.arange(-N, N) / 5)  # a table that is learned, in a model

GALLERY = {
    "causal": {"causal": True},
    "window of 16": {"causal": True, "window": (15, 0)},
    "first 16 keys": {"mask": mods.prefix(16)},
    "documents": {"mask": mods.document(ids)},
    "packed, causal": {"mask": mods.packed(ends, ends, N, N, causal=True)},
    "48 places of a cache": {"mask": mods.cached(torch.tensor([48]), N, N, causal=True)},
    "a prefix, then causal": {"mask": mods.causal() | mods.prefix(16)},
    "causal in documents": {"mask": mods.causal() & mods.document(ids)},
    "first 4 keys and a window": {"mask": mods.causal() & (mods.prefix(4) | mods.window(11, 0))},
    "any bool tensor": {"mask": picked},
    "every 4th key": {"mask": mods.Mask(lambda b, h, q, kv: (q - kv) % 4 == 0)},
    "two halves, two rules": {"mask": mods.Mask(lambda b, h, q, kv: (q >= kv) & ((q < HALF) | (q - kv < 8)))},
    "ALiBi": {"causal": True, "alibi_slopes": torch.tensor([0.125])},
    "a table by distance": {"score": mods.Score(lambda s, b, h, q, kv: s + by_distance[q - kv + N])},
    "a bias": {"bias": torch.randn(N, N, generator=torch.Generator().manual_seed(0))},
    "a score that fades": {"score": mods.Score(lambda s, b, h, q, kv: s - abs(q - kv) / (1 + kv))},
}

columns = 4
figure, axes = plt.subplots(math.ceil(len(GALLERY) / columns), columns, figsize=(8.3, 9), layout="constrained")
for axis, (name, options) in zip(axes.flat, GALLERY.items(), strict=True):
    seen = weights(N, **options)
    draw(axis, seen)
    axis.set_title(f"{name}\n{(seen > 0).float().mean():.0%} of the pairs", fontsize=9)
path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "gallery.png"
figure.savefig(path, dpi=150)
print(path)
