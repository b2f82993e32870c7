"""Context parallel attention in models whose parameters are spread too: FSDP2, tensor parallel, both at once; and in a
model of transformers, where that is installed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import sartor
import sartor.distributed as context
from sartor.distributed import Sharding

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
DIM, HEADS, SEQLEN = 16, 4, 22


class Block(nn.Module):
    """Attention and a mixer; `attend` takes (batch, tokens, heads of this rank, dim)."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x, attend):
        q, k, v = (w(x).unflatten(-1, (-1, DIM // HEADS)) for w in (self.wq, self.wk, self.wv))
        x = x + self.wo(attend(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Two blocks, of random weights that are the same everywhere."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.double()

    def forward(self, x, attend, remade=False):
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks:
            x = checkpoint(block, x, attend, use_reentrant=False) if remade else block(x, attend)
        return x


def batches():
    """Of two steps, whose gradients are accumulated."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, SEQLEN, DIM, generator=generator, dtype=torch.float64) for _ in range(2)]


def expected():
    """The gradients of one process."""
    model = Model()
    for x in batches():
        model(x, lambda q, k, v: sartor.attention(q, k, v, causal=True)).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def spread(groups, tensor, fully, remade, method):
    """`tensor` ranks share heads and mixers, the others the sequence and, with `fully`, parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parts = 4 // tensor
    mesh = init_device_mesh("cpu", (parts, tensor), mesh_dim_names=("sequence", "heads"))
    wanted, model, sharding = expected(), Model(), Sharding.make("zigzag", SEQLEN, parts)
    for block in model.blocks:
        if tensor > 1:
            columns, rows = dict.fromkeys(("wq", "wk", "wv", "up"), ColwiseParallel()), ("wo", "down")
            parallelize_module(block, mesh["heads"], {**columns, **{name: RowwiseParallel() for name in rows}})
        if fully:
            fully_shard(block, mesh=mesh["sequence"])
    if fully:
        fully_shard(model, mesh=mesh["sequence"])

    def attend(q, k, v):
        return context.attention(
            q, k, v, mesh=mesh["sequence"], causal=True, method=method, layout_of_sequence=sharding
        )

    rank = mesh["sequence"].get_local_rank()
    for x in batches():
        out = model(context.shard(x, sharding, rank), attend, remade)
        own = out[:, : sharding.count(rank)]  # without padding
        (own.square().sum() / x.numel()).backward()
    for name, p in model.named_parameters():
        found = p.grad
        if not fully:
            dist.all_reduce(
                found.to_local() if isinstance(found, DTensor) else found, group=mesh["sequence"].get_group()
            )
        found = found.full_tensor() if isinstance(found, DTensor) else found
        if fully:  # which takes the mean over ranks, where the sum is wanted
            found = found * parts
        torch.testing.assert_close(found, wanted[name], **CLOSE)


@pytest.mark.parametrize(
    ("tensor", "fully", "remade", "method"),
    [
        (2, False, False, "ring"),
        (1, True, False, "ring"),
        (2, True, False, "allgather"),
        (2, True, True, "ring"),
    ],
    ids=["tensor", "fsdp", "fsdp-tensor", "fsdp-tensor-checkpointed"],
)
def test_spread_parameters(world, tensor, fully, remade, method):
    world.run(4, spread, tensor, fully, remade, method)


def of_transformers(groups, kind):
    """Logits and gradients of a model of transformers, which is told nothing but the mask and positions."""
    import transformers

    from sartor.integrations.transformers import context_mask, register

    register()
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sartor"}  # fmt: skip
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes)
    else:  # softcaps, and layers of two kinds
        config = transformers.Gemma2Config(**sizes, sliding_window=6)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().train()
    tokens = torch.randint(50, (2, 21), generator=torch.Generator().manual_seed(1))
    rank, sharding = dist.get_rank(), Sharding.make("zigzag", 21, 2)

    def gradients(logits):
        return torch.autograd.grad(logits.square().sum(), list(model.parameters()), allow_unused=True)

    whole = model(input_ids=tokens, use_cache=False).logits
    mask = context_mask(sharding, group=groups[2], method="ring")
    if kind == "gemma2":
        near = context_mask(sharding, group=groups[2], method="ring", window=(5, 0))
        mask = {"full_attention": mask, "sliding_attention": near}
    found = model(
        input_ids=context.shard(tokens, sharding, rank), attention_mask=mask, use_cache=False,
        position_ids=context.positions(sharding, rank)[None],
    ).logits[:, : sharding.count(rank)]  # fmt: skip
    own = whole[:, sharding.tokens(rank)]
    torch.testing.assert_close(found, own, rtol=1e-6, atol=1e-6)  # rotary embeddings are float32
    for a, b in zip(gradients(found), gradients(whole), strict=True):
        if a is not None:
            dist.all_reduce(a, group=groups[2])
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_model_of_transformers(world, kind):
    pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")
    world.run(2, of_transformers, kind)
