"""Which kernel a call takes, and why not another; then how long it takes beside what PyTorch has."""

import torch
import torch.nn.functional as F

import sartor
from sartor.device import ARCHITECTURES
from sartor.lab.measure.timing import Budget, interleave

BATCH, HEADS, LENGTH, DIM = 1, 4, 256, 72


def main() -> None:
    # A plan needs no GPU and no data: what an H200 would run, for tensors that have only a shape.
    shape = (4, 4096, 16, DIM)
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    print(sartor.explain(q, q, q, causal=True, window=(1023, 0), device=ARCHITECTURES[90]))

    # A kernel that is asked for by name runs or says why it cannot; nothing falls back in silence.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM, device=device)
    try:
        sartor.attention(q.double(), k.double(), v.double(), kernel="hopper", layout="bhsd")
    except sartor.Unsupported as error:
        print(f"\nasked for by name: {error}")

    # The timer of the benchmarks: the candidates take turns, so that no clock drift favours one of them.
    print(f"\nhere: {sartor.explain(q, k, v, causal=True, layout='bhsd').plan}")
    calls = {
        "Sartor": lambda: sartor.attention(q, k, v, causal=True, layout="bhsd"),
        "PyTorch SDPA": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    flops = 2 * BATCH * HEADS * LENGTH * LENGTH / 2 * (DIM + DIM)  # of the pairs that are seen
    for name, timing in interleave(calls, device, Budget(rounds=5)).items():
        print(f"{name:<14}{timing.ms:8.3f} ms{flops / timing.ms * 1e-6:10.1f} GFLOP/s")


if __name__ == "__main__":
    main()
