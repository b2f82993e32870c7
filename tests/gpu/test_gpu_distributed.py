"""Context parallel on GPUs: NCCL where there are two of them, else several processes over gloo on one."""

from __future__ import annotations

import multiprocessing
import tempfile
from datetime import timedelta

import pytest
import torch

import judged

pytestmark = [pytest.mark.gpu, pytest.mark.judges(*judged.NARROW)]
RANKS, SEQLEN = 2, 2000


def rank_of(rank, place, answers, method, options):
    """One process: its results and gradients."""
    import torch.distributed as dist

    import sartor.distributed as context

    many = torch.cuda.device_count() >= RANKS
    device = torch.device("cuda", rank if many else 0)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if many else "gloo", rank=rank, world_size=RANKS, init_method=f"file://{place}",
        timeout=timedelta(seconds=90),
    )  # fmt: skip
    q, k, v, dout = (t.to(device) for t in inputs())
    sharding = context.Sharding.make("zigzag", SEQLEN, RANKS)
    leaves = [context.shard(t, sharding, rank).requires_grad_() for t in (q, k, v)]
    out, lse = context.attention(*leaves, method=method, layout_of_sequence=sharding, return_lse=True, **options)
    grads = torch.autograd.grad(out, leaves, context.shard(dout, sharding, rank))
    answers.put((rank, [t.detach().cpu().float().numpy() for t in (out, lse, *grads)]))
    dist.destroy_process_group()


def inputs():
    """q, k, v and dout of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    heads = (4, 2, 2, 4)
    return [torch.randn(1, SEQLEN, h, 64, generator=generator).bfloat16() for h in heads]


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (300, 0), "softcap": 5.0}], ids=["causal", "window"])
def test_results_of_one_device(method, options):
    import sartor.distributed as context
    from sartor.testing import check_all

    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            spawn.Process(target=rank_of, args=(r, f"{folder}/store", answers, method, options)) for r in range(RANKS)
        ]
        for process in ranks:
            process.start()
        found = dict(answers.get(timeout=300) for _ in ranks)
        for process in ranks:
            process.join(60)
    sharding = context.Sharding.make("zigzag", SEQLEN, RANKS)
    names, dims = ("out", "lse", "dq", "dk", "dv"), (1, 2, 1, 1, 1)
    whole = {
        n: context.unshard([torch.from_numpy(found[r][i]) for r in range(RANKS)], sharding, dim).cuda()
        for i, (n, dim) in enumerate(zip(names, dims, strict=True))
    }
    whole = {n: t if n == "lse" else t.bfloat16() for n, t in whole.items()}
    q, k, v, dout = (t.cuda() for t in inputs())
    check_all(whole, q, k, v, dout, **options)
