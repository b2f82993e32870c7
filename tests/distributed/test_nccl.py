"""Context parallel attention over NCCL, on two GPUs of one host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import Case
from test_context import FEATURES, OF_ROWS
from test_on_gpus import check_all

import sartor
import sartor.distributed as context
from sartor.distributed.sharding import KINDS

pytestmark = [pytest.mark.gpu, pytest.mark.judges]
# float64 goes to a kernel that compiles nothing: what is tested is which tensors go where, and in what order
FEW = ("causal_documents", "packed", "indexed", "alibi", "sinks", "bias_broadcast", "dropout")
LONG = {"dtype": "bfloat16", "dim": 64, "dim_v": 64, "seqlen_q": 4096, "batch": 1}
CASES = {
    "ring": [Case(f, "ring", KINDS[i % 3], ranks=2) for i, f in enumerate(FEATURES)],
    "allgather": [Case(f, "allgather", KINDS[i % 3], ranks=2) for i, f in enumerate(FEATURES)],
    "ulysses": [Case(f, "ulysses", KINDS[i % 3], ranks=2) for i, f in enumerate(FEATURES) if f not in OF_ROWS],
    "usp": [Case(f, "usp", "zigzag", mesh=mesh) for f in FEW for mesh in ((2, 1), (1, 2))],
    "shapes": [
        Case("causal", "ring", "zigzag", ranks=2, seqlen_q=37),
        Case("window", "ring", "striped", ranks=2, seqlen_q=5, pad=False),
        Case("bias", "ring", "contiguous", ranks=2, seqlen_q=9, seqlen_kv=30, pad=False),
        Case("causal", "ulysses", "striped", ranks=2, seqlen_q=37, pad=False, heads="mqa"),
        Case("window", "ring", "contiguous", ranks=2, seqlen_q=1200, batch=1, heads="mha"),
        Case("causal_documents", "ring", "balanced", ranks=2, seqlen_q=96, chunk=8),
        Case("causal", "auto", "zigzag", ranks=2),
    ],
    "budgets": [Case("causal", method, "zigzag", ranks=2, **LONG) for method in ("ring", "allgather", "ulysses")],
    "dropout in 16 bits": [Case("dropout", method, "zigzag", ranks=2, **LONG) for method in ("ring", "ulysses")],
}  # fmt: skip


@pytest.mark.parametrize("found", CASES.values(), ids=CASES)
def test_results_are_those_of_one_process(two_gpus, found):
    check_all(two_gpus, found)


def backend(groups):
    return dist.get_backend(groups[2]), torch.cuda.current_device()


def test_ranks_speak_nccl(two_gpus):
    assert two_gpus.run(2, backend) == [("nccl", 0), ("nccl", 1)]


def again_and_again(groups, method):
    """Calls back to back, other work beside them, and their first results: buffers must live until they were sent."""
    generator = torch.Generator().manual_seed(0)
    sharding, rank = context.Sharding.make("zigzag", 8192, 2), dist.get_rank()
    whole = [torch.randn(1, 8192, heads, 64, generator=generator).bfloat16().cuda() for heads in (8, 2, 2, 8)]
    *leaves, dout = (context.shard(t, sharding, rank) for t in whole)
    leaves = [t.requires_grad_() for t in leaves]
    found = []
    for _ in range(12):
        out = context.attention(
            *leaves, group=groups[2], method=method, layout_of_sequence=sharding, causal=True, deterministic=True
        )
        found.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
        junk = [torch.full_like(t, torch.nan) for t in whole]  # takes what was freed too early
        del junk
    torch.cuda.synchronize()
    return [bool(all(torch.equal(a, b) for a, b in zip(one, found[0], strict=True))) for one in found]


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_bits_of_calls_back_to_back(two_gpus, method):
    for answer in two_gpus.run(2, again_and_again, method):
        assert all(answer), answer


def compiled(groups, method):
    torch._dynamo.reset()
    shape = (1, 256, 4, 64)
    generator = torch.Generator().manual_seed(dist.get_rank())
    q, k, v = (torch.randn(shape, generator=generator).bfloat16().cuda().requires_grad_() for _ in range(3))

    def call(q, k, v):
        return context.attention(q, k, v, group=groups[2], method=method, layout_of_sequence="zigzag", causal=True)

    out, want = torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v)
    (found,), (exact,) = (torch.autograd.grad(t, [v], torch.ones_like(t)) for t in (out, want))
    return torch.equal(out, want), (found - exact).norm().item() <= 1e-2 * exact.norm().item()


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_compiled(two_gpus, method):
    assert two_gpus.run(2, compiled, method) == [(True, True)] * 2


def decoded(groups):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 4, 64, generator=generator).bfloat16().cuda() for n in (1, 4096, 4096))
    sharding = context.Sharding.make("striped", 4096, 2)
    own = [context.shard(t, sharding, dist.get_rank()) for t in (k, v)]
    found, want = context.decode(q, *own, group=groups[2]), sartor.attention(q, k, v)
    return (found - want).norm().item() / want.norm().item()


def test_decode(two_gpus):
    assert max(two_gpus.run(2, decoded)) < 1e-2


def unlike(groups):
    q, k, v = (torch.ones(1, 64, 2, 8 + 8 * dist.get_rank(), device="cuda") for _ in range(3))
    context.attention(q, k, v, group=groups[2], method="ring")


def test_ranks_that_differ(two_gpus):
    for error, _ in two_gpus.answers(2, unlike):
        assert error is not None
        assert error[0] == "Disagreement", error
    check_all(two_gpus, [Case("causal", "ring", "zigzag", ranks=2)])
