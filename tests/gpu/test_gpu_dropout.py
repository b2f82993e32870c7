"""Dropout on a GPU: the mask of the reference bit for bit, gradients within budgets, seeds drawn as PyTorch draws."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import sartor
from sartor import testing
from sartor.kernels import dropout

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

SEED = 0x0123456789ABCDEF
P = 0.3
KERNELS = [
    pytest.param("triton", torch.bfloat16, marks=pytest.mark.judges("triton_forward", "triton_backward")),
    pytest.param("triton", torch.float16, marks=pytest.mark.judges("triton_forward", "triton_backward")),
    pytest.param("fp32", torch.float32, marks=pytest.mark.judges("fp32_forward", "fp32_backward")),
    pytest.param("hopper", torch.bfloat16, marks=pytest.mark.judges("hopper_forward", "hopper_backward")),
    pytest.param("hopper", torch.float16, marks=pytest.mark.judges("hopper_forward", "hopper_backward")),
]
of_every_kernel = pytest.mark.parametrize(("kernel", "dtype"), KERNELS)


def inputs(dtype, b=2, hq=4, hkv=2, sq=300, skv=450, d=64, dv=None, **rest):
    return testing.make_inputs(b, hq, hkv, sq, skv, d, dv, dtype, "cuda", "bshd", **rest)


def kept(b, h, sq, skv):
    """By the reference on the CPU."""
    return dropout.kept(P, torch.tensor([SEED]), slice(0, b), slice(0, h), slice(0, sq), slice(0, skv)).cuda()


def marked(n, dim, first, dtype, b=2, h=4):
    """(b, n, h, dim): a column for each of `dim` rows from `first` on, which tells it apart."""
    rows = torch.arange(n, device="cuda")[:, None] == first + torch.arange(dim, device="cuda")
    return rows.to(dtype).view(1, n, 1, dim).expand(b, n, h, dim).contiguous()


@of_every_kernel
@pytest.mark.parametrize("dim", [40, 64, 96, 128])
def test_masks_are_the_references_bit_for_bit(kernel, dtype, dim):
    """That of out, by values that tell keys apart; that of dv, by gradients that tell queries apart."""
    q, k, _ = inputs(dtype, hkv=4, sq=250, skv=230, d=dim)
    want = kept(2, 4, 250, 230)
    for first in range(0, 250, dim):
        v = marked(230, dim, first, dtype).requires_grad_()
        out = sartor.attention(q, k, v, kernel=kernel, dropout_p=P, dropout_seed=SEED)
        (dv,) = torch.autograd.grad(out, v, marked(250, dim, first, dtype))
        keys, queries = want[..., first : first + dim], want[..., first : first + dim, :]
        assert torch.equal(out.transpose(1, 2)[..., : keys.shape[3]] != 0, keys)
        assert torch.equal(dv.transpose(1, 2)[..., : queries.shape[2]] != 0, queries.transpose(2, 3))


PARTS = {"sixteens": (1, 2, 3, 5), "in steps": (1, 2, 3, 2, 7, 3)}  # what follows the seed


@pytest.mark.parametrize(("kernel", "dtype"), [one for one in KERNELS if one.values[0] != "hopper"])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("dim", [64, 128])
def test_parts_of_a_larger_problem(kernel, dtype, dim, name):
    """Their masks are the reference's bit for bit, in out and in dv, and gradients are within budgets."""
    seed = torch.tensor([SEED, *PARTS[name]])
    q, k, _ = inputs(dtype, hkv=4, sq=250, skv=230, d=dim)
    want = dropout.kept(P, seed, slice(0, 2), slice(0, 4), slice(0, 250), slice(0, 230)).cuda()
    given = {"kernel": kernel, "dropout_p": P, "dropout_seed": seed.cuda()}
    for first in range(0, 250, dim):
        v = marked(230, dim, first, dtype).requires_grad_()
        out = sartor.attention(q, k, v, **given)
        (dv,) = torch.autograd.grad(out, v, marked(250, dim, first, dtype))
        keys, queries = want[..., first : first + dim], want[..., first : first + dim, :]
        assert torch.equal(out.transpose(1, 2)[..., : keys.shape[3]] != 0, keys)
        assert torch.equal(dv.transpose(1, 2)[..., : queries.shape[2]] != 0, queries.transpose(2, 3))
    testing.verify(*inputs(dtype, d=dim), layout="bshd", causal=True, through_lse=True, **given)


@pytest.mark.parametrize("name", PARTS)
def test_hopper_refuses_parts_in_words(name):
    seed = torch.tensor([SEED, *PARTS[name]], device="cuda")
    with pytest.raises(sartor.Unsupported, match="needs dropout of"):
        sartor.attention(*inputs(torch.bfloat16), kernel="hopper", dropout_p=P, dropout_seed=seed)


@of_every_kernel
@pytest.mark.parametrize("name", ["full", "causal", "features", "documents"])
def test_budgets(kernel, dtype, name):
    options = {
        "full": {},
        "causal": {"causal": True},
        "features": {"causal": True, "softcap": 20.0, "sinks": torch.randn(4, device="cuda")},
        "documents": {
            "mask": sartor.mods.document(*((torch.arange(n, device="cuda") // 70)[None] for n in (300, 450)))
        },
    }[name]
    seed = torch.tensor([SEED], device="cuda")
    testing.verify(
        *inputs(dtype), layout="bshd", kernel=kernel, dropout_p=P, dropout_seed=seed, through_lse=True, **options
    )


def test_other_head_dims_and_long_sequences():
    seed = torch.tensor([SEED], device="cuda")
    for dims in ({"d": 128}, {"d": 72, "dv": 40}, {"d": 64, "sq": 2000, "skv": 2500, "b": 1}):
        testing.verify(*inputs(torch.bfloat16, **dims), layout="bshd", dropout_p=0.1, dropout_seed=seed)


@pytest.mark.judges("hopper_forward")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_long_sequences_in_every_warpgroup(dim, causal):
    """Scores that grow, so that weights are made again; NaN that a mask hides, so that rows are."""
    q, k, v = inputs(torch.bfloat16, b=4, hq=8, hkv=8, sq=1500, skv=1600, d=dim)
    k = k * torch.linspace(1, 20, 1600, device="cuda").flip(0).view(1, -1, 1, 1).to(k.dtype)
    seed = torch.tensor([SEED], device="cuda")
    options = {"layout": "bshd", "kernel": "hopper", "dropout_p": P, "dropout_seed": seed, "causal": causal}
    testing.verify(q, k, v, gradients=False, **options)
    if causal:
        clean = sartor.attention(q, k, v, **options)[:, :-1]
        v = v.clone()
        v[:, -1] = torch.nan
        spoilt = sartor.attention(q, k, v, **options)[:, :-1]  # all but the last query, which sees the last key
        assert (spoilt - clean).norm() <= 2 * torch.finfo(torch.bfloat16).eps * clean.norm()


def test_manual_seed_and_checkpointing():
    found = []
    for recomputed in (False, True):
        leaves = inputs(torch.bfloat16, requires_grad=True)
        call = lambda *t: sartor.attention(*t, dropout_p=0.5, deterministic=True)  # noqa: E731
        torch.manual_seed(3)
        out = checkpoint(call, *leaves, use_reentrant=False) if recomputed else call(*leaves)
        torch.randn(3, device="cuda")
        out.sum().backward()
        found.append((out.detach(), *(t.grad for t in leaves)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_captured_graph_draws_a_new_mask_at_each_replay():
    """And its backward has the mask of its forward."""
    q, k, _ = inputs(torch.bfloat16, hkv=4, sq=64, skv=64)
    v, dout = marked(64, 64, 0, torch.bfloat16).requires_grad_(), marked(64, 64, 0, torch.bfloat16)

    def both():
        out = sartor.attention(q, k, v, dropout_p=P)
        return out.detach(), torch.autograd.grad(out, v, dout)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = both()
    masks = []
    for seed in (1, 1, None):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        masks.append(out.transpose(1, 2) != 0)
        assert torch.equal(masks[-1].transpose(2, 3), dv.transpose(1, 2) != 0)
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode):
    torch._dynamo.reset()
    q, k, _ = inputs(torch.bfloat16, hkv=4, sq=64, skv=64)
    v, dout = marked(64, 64, 0, torch.bfloat16).requires_grad_(), marked(64, 64, 0, torch.bfloat16)
    compiled = torch.compile(lambda *t: sartor.attention(*t, dropout_p=P), fullgraph=True, mode=mode)
    masks = []
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(q, k, v)
        masks.append((out.detach().transpose(1, 2) != 0).clone())
        (dv,) = torch.autograd.grad(out, v, dout)
        assert torch.equal(masks[-1].transpose(2, 3), dv.transpose(1, 2) != 0)
    assert not any(torch.equal(masks[-1], other) for other in masks[:-1])


@pytest.mark.judges("hopper_backward")
@pytest.mark.parametrize("dim", [64, 128])
def test_deterministic(dim):
    """The backward's other kernels have the same mask: the gradients are those of one sweep, and have the same bits."""
    leaves = inputs(torch.bfloat16, d=dim, requires_grad=True)
    found = []
    for deterministic in (False, True, True):
        out = sartor.attention(
            *leaves, kernel="hopper", dropout_p=P, dropout_seed=SEED, deterministic=deterministic, causal=True
        )
        found.append(torch.autograd.grad(out, leaves, testing.make_like(out)))
    for one, other, same in zip(*found, strict=True):
        assert torch.equal(other, same)
        assert (one.float() - other.float()).norm() < 0.01 * one.float().norm()
