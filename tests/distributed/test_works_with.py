"""Context parallel attention inside what people train with: compilers, checkpointing, DTensors, models of others."""

from __future__ import annotations

import shutil
import warnings

import cases
import pytest
import torch
import torch.distributed as dist
from cases import Case
from torch import nn
from torch.nn import functional as F

import sartor
import sartor.distributed as context
from sartor import mods
from sartor.distributed import Sharding
from sartor.integrations.torch import activate

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def shards(groups, ranks=2, seqlen=32, heads=4, kind="zigzag", seed=3):
    """Leaves of this rank, and the group."""
    generator = torch.Generator().manual_seed(seed)
    sharding = Sharding.make(kind, seqlen, ranks)
    whole = [torch.randn(2, seqlen, heads, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    return [context.shard(t, sharding, dist.get_rank()).requires_grad_() for t in whole], groups[ranks], whole


def gradients(out, leaves):
    return torch.autograd.grad(out.square().sum(), leaves)


def compiled(groups, method, kind, backend="aot_eager"):
    torch.compiler.reset()  # the same function is compiled again and again
    leaves, group, _ = shards(groups)
    ids = torch.arange(32, dtype=torch.int32)[None] // 11
    given = {"mask": mods.document(ids) & mods.causal()} if kind == "documents" else {"causal": True}
    if kind == "learned":
        table = torch.linspace(-1, 1, 4 * 64, dtype=torch.float64).view(4, 64).requires_grad_()
        given["score"] = cases.by_distance(table)
        leaves.append(table)

    def layer(q, k, v):
        out = context.attention(q * 2, k, v, group=group, method=method, layout_of_sequence="zigzag", **given)
        return out * 3

    whole = torch.compile(layer, fullgraph=True, backend=backend)
    expected, found = layer(*leaves[:3]), whole(*leaves[:3])
    torch.testing.assert_close(found, expected, **CLOSE)
    for a, b in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("kind", ["causal", "documents"])
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses", "auto"])
def test_compiled_without_a_break(world, method, kind):
    world.run(2, compiled, method, kind)


def test_compiled_with_a_table_that_is_learned(world):
    world.run(2, compiled, "ring", "learned")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_compiled_by_inductor(world, method):
    world.run(2, compiled, method, "documents", "inductor")


def checkpointed(groups):
    from torch.utils.checkpoint import checkpoint

    leaves, group, _ = shards(groups, ranks=3, seqlen=36)

    def layer(q, k, v):
        return context.attention(q, k, v, group=group, method="ring", causal=True, layout_of_sequence="zigzag")

    expected = gradients(layer(*leaves), leaves)
    for a, b in zip(gradients(checkpoint(layer, *leaves, use_reentrant=False), leaves), expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_checkpointed(world):
    world.run(3, checkpointed)


def of_dtensors(groups, layout):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "sequence"))
    heads, sequence = (2, 1) if layout == "bshd" else (1, 2)
    generator = torch.Generator().manual_seed(0)
    shape = (2, 13, 4, 8) if layout == "bshd" else (2, 4, 13, 8)
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    expected = sartor.attention(*whole, causal=True, layout=layout, return_lse=True)
    for first, second in ((Shard(0), Shard(heads)), (Shard(heads), Shard(sequence)), (Replicate(), Shard(sequence))):
        placed = [distribute_tensor(t, mesh, [first, second]).requires_grad_() for t in whole]
        found = context.attention(*placed, causal=True, layout=layout, return_lse=True)
        for a, b in zip(found, expected, strict=True):
            assert isinstance(a, DTensor)
            torch.testing.assert_close(a.full_tensor(), b, **CLOSE)
        given = {"layout": layout, "dropout_p": 0.5, "dropout_seed": 3}
        dropped = context.attention(*placed, **given).full_tensor()
        torch.testing.assert_close(dropped, sartor.attention(*whole, **given), **CLOSE)
    found[0].to_local().sum().backward()
    wrong = [distribute_tensor(t, mesh, [Replicate(), Shard(3)]) for t in whole]
    with pytest.raises(ValueError, match="must be sharded on the sequence"):
        context.attention(*wrong, layout=layout)
    wrong = [distribute_tensor(t, mesh, [Replicate(), Shard(heads)]) for t in whole]
    wrong[1:] = [distribute_tensor(t.narrow(heads, 0, 1), mesh, [Replicate(), Shard(heads)]) for t in whole[1:]]
    with pytest.raises(ValueError, match="heads of k and v must be a multiple of the 2 ranks"):
        context.attention(*wrong, layout=layout)
    with pytest.raises(TypeError, match="k must be a DTensor"):
        context.attention(placed[0], whole[1], whole[2], layout=layout)
    with pytest.raises(ValueError, match="must be 'contiguous'"):
        context.attention(*placed, layout=layout, layout_of_sequence="zigzag")


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_dtensors(world, layout):
    world.run(4, of_dtensors, layout)


def in_a_model(groups):
    """A module of PyTorch's own, of which nothing was changed."""
    (q, k, v), group, whole = shards(groups, seqlen=24)
    whole = [t.transpose(1, 2) for t in whole]
    table = torch.randn(4, 24, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    sharding = Sharding.make("zigzag", 24, 2)
    rows = context.shard(table, sharding, dist.get_rank(), dim=1)

    def model(q, k, v, table):
        first = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        return F.scaled_dot_product_attention(first, k, v, attn_mask=table)

    expected = model(*whole, table)
    with context.context_parallel(group=group, layout_of_sequence="zigzag", method="ring"):
        found = model(*(t.transpose(1, 2) for t in (q, k, v)), rows)
        torch.manual_seed(3)
        dropped = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), dropout_p=0.5)
    torch.manual_seed(3)
    want = sartor.scaled_dot_product_attention(*whole, dropout_p=0.5)
    torch.testing.assert_close(dropped, context.shard(want, sharding, dist.get_rank(), dim=2), **CLOSE)
    torch.testing.assert_close(found, context.shard(expected, sharding, dist.get_rank(), dim=2), **CLOSE)
    gradients(found, [q, k, v])
    torch.testing.assert_close(model(*whole, table), expected)  # outside of it, PyTorch's own again


def test_in_a_model(world):
    world.run(2, in_a_model)


def module(name):
    """One of PyTorch's own with attention in it, and what calls it."""
    torch.manual_seed(0)
    if name == "attention":
        made = nn.MultiheadAttention(16, 2, batch_first=True)
        return made, lambda x: made(x, x, x, need_weights=False)[0]
    made = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return made, lambda x: made(x, torch.ones(x.shape[1], x.shape[1]).tril().log(), is_causal=True)


def in_modules(groups, name, how):
    """Values, and gradients of inputs and of parameters, are those of one process."""
    made, call = module(name)
    made = made.double().train(how != "eval")
    whole = torch.randn(2, 24, 16, dtype=torch.float64, requires_grad=True)
    sharding, rank = Sharding.make("zigzag", 24, 2), dist.get_rank()
    own = context.shard(whole, sharding, rank).detach().requires_grad_()
    expected = call(whole)
    if how == "compiled":
        torch.compiler.reset()
        call = torch.compile(call, backend="aot_eager")
    here = {"group": groups[2], "layout_of_sequence": "zigzag", "method": "ring"}
    with context.context_parallel(**here):
        found = call(own)
    with context.context_parallel(**here), torch.device("cpu"), torch.no_grad():  # a mode around it, the fast path
        again = call(own)
    torch.testing.assert_close(found, context.shard(expected, sharding, rank), **CLOSE)
    torch.testing.assert_close(again, found, **CLOSE)
    dx, *wanted = gradients(expected, [whole, *made.parameters()])
    own_dx, *parts = gradients(found, [own, *made.parameters()])
    torch.testing.assert_close(own_dx, context.shard(dx, sharding, rank), **CLOSE)
    for part, want in zip(parts, wanted, strict=True):
        dist.all_reduce(part, group=groups[2])
        torch.testing.assert_close(part, want, **CLOSE)


@pytest.mark.parametrize("how", ["train", "eval", "compiled"])
@pytest.mark.parametrize("name", ["attention", "layer"])
def test_in_modules_of_pytorch(world, name, how):
    world.run(2, in_modules, name, how)


def of_modules_refused(groups):
    x = torch.zeros(1, 4, 8)
    with context.context_parallel(group=groups[1]):
        with pytest.raises(NotImplementedError, match="need_weights must be False"):
            nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x)
        for name in ("add_bias_kv", "add_zero_attn"):
            with pytest.raises(NotImplementedError, match="must have add_bias_kv=False and add_zero_attn=False"):
                nn.MultiheadAttention(8, 2, batch_first=True, **{name: True})(x, x, x, need_weights=False)


def test_modules_refused(world):
    world.run(1, of_modules_refused)


def while_active(groups):
    """Within `activate()` too, which puts another function in the place of PyTorch's."""
    (q, k, v), group, whole = shards(groups, kind="contiguous")
    with activate(), context.context_parallel(group=group, method="ring"), warnings.catch_warnings():
        warnings.filterwarnings("error", "PyTorch computes this attention")
        found = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
    whole = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in whole))
    torch.testing.assert_close(found, context.shard(whole, Sharding.make("contiguous", 32, 2), dist.get_rank(), dim=2))


@pytest.mark.filterwarnings("ignore")
def test_while_active(world):
    world.run(2, while_active)


def decoded(groups, ranks, kind, sq, feature):
    case = Case(feature, kind=kind, ranks=ranks, seqlen_q=sq, seqlen_kv=50, pad=False)
    data, sharding = cases.inputs(case), Sharding.make(kind, 50, ranks)
    lengths = torch.tensor([31, 50])
    given = {
        "cached": lambda: {"mask": mods.cached(lengths, sq, 50, causal=True)},
        "full": lambda: {},
        "causal": lambda: {"causal": True, "alibi_slopes": torch.ones(4), "softcap": 2.0},
        "sinks": lambda: {"sinks": torch.arange(4.0, dtype=torch.float64), "window": (20, 0)},
    }[feature]()
    k, v = (context.shard(data[n], sharding, dist.get_rank()) for n in ("k", "v"))
    out, lse = context.decode(
        data["q"], k, v, group=groups[ranks], layout_of_sequence=sharding, return_lse=True, **given
    )
    expected = sartor.attention(data["q"], data["k"], data["v"], return_lse=True, kernel="reference", **given)
    torch.testing.assert_close((out, lse), expected, **CLOSE)


@pytest.mark.parametrize("feature", ["cached", "full", "causal", "sinks"])
@pytest.mark.parametrize(("ranks", "kind", "sq"), [(3, "striped", 1), (2, "contiguous", 4), (4, "zigzag", 2)])
def test_decode(world, ranks, kind, sq, feature):
    world.run(ranks, decoded, ranks, kind, sq, feature)


def explained(groups):
    q, k, v = (torch.empty(1, 4096, 16, 128, device="meta", dtype=torch.bfloat16) for _ in range(3))
    found = context.explain(q, k, v, group=groups[4], causal=True, layout_of_sequence="zigzag")
    windowed = context.explain(q, k, v, group=groups[4], causal=True, window=(100, 0))
    chosen = context.explain(q, k, v, group=groups[4], bias=torch.empty(4096, 1, device="meta"), method="ring")
    for given, kind, words in (
        ({"causl": True}, TypeError, "unexpected keyword argument 'causl': did you mean causal"),
        ({"method": "foo"}, ValueError, "method must be one of"),
        ({"method": "usp"}, ValueError, "a mesh of 2 dims go together, got 'usp' and 1 dims"),
        ({"timeout": -1}, ValueError, "timeout must be a number of seconds > 0"),
    ):
        with pytest.raises(kind, match=words):
            context.explain(q, k, v, group=groups[4], **given)
    return str(found), found.method, windowed.readers, str(chosen)


def test_explain(world):
    answers = world.run(4, explained)
    text, method, readers, chosen = answers[2]
    assert f"-> {method}: forward" in text
    assert "not hidden" in text
    assert readers == (1,)
    assert answers[0][2] == ()
    assert "ulysses: no, a bias or mask tensor depends on queries" in chosen
    assert "-> ring" in chosen
