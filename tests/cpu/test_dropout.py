"""Dropout: which pairs stay is a function of a seed and of positions, the same whoever computes it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import sartor
from sartor import testing
from sartor.kernels import blocked, dropout
from sartor.kernels.spec import Tile
from sartor.testing import oracle

SEED = torch.tensor([0x0123456789ABCDEF])
KNOWN = [  # counter, key, and what comes of them: the test vectors of Random123 for 7 rounds
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]  # fmt: skip


def mask_of(kernel, b=2, h=3, sq=50, skv=70, p=0.3, seed=SEED, **options):
    """Which weights a kernel keeps, bool (b, h, sq, skv): values that tell keys apart show them."""
    q, k = torch.zeros(b, sq, h, 8), torch.zeros(b, skv, h, 8)
    v = torch.eye(skv).view(1, skv, 1, skv).expand(b, skv, h, skv)
    out = sartor.attention(q, k, v, kernel=kernel, dropout_p=p, dropout_seed=seed, **options)
    return out.transpose(1, 2) > 0


def whole(b=2, h=3, sq=50, skv=70, p=0.3, seed=SEED):
    return dropout.kept(p, seed, slice(0, b), slice(0, h), slice(0, sq), slice(0, skv))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox(counter, key, words):
    as_tensors = (tuple(map(torch.tensor, given)) for given in (counter, key))
    assert tuple(int(word) for word in dropout.philox(*as_tensors)) == words


def test_the_layout_that_the_module_writes_down():
    """Pair by pair, in plain integers."""
    p, found = 0.3, whole()
    seed = int(SEED)
    key = torch.tensor(seed & dropout.LOW), torch.tensor(seed >> 32)
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 49, 69), (1, 0, 7, 8), (0, 1, 24, 15), (1, 1, 33, 66), (0, 2, 13, 36)):
        patch = [n // 16 * 4 + n % 8 // 2 for n in (j, i)]
        words = [int(w) for w in dropout.philox(tuple(map(torch.tensor, (*patch, h, b))), key)]
        place = 8 * (2 * (i // 8 % 2) + j // 8 % 2) + 7 - 2 * (i % 2) - j % 2
        number = sum((w >> place - 4 & 1) << n | (w >> place & 1) << n + 4 for n, w in enumerate(words))
        steps = round(p * 65536)
        least = steps // 256 + (words[0] * dropout.HASH % 2**32 >> 24 < steps % 256)
        assert bool(found[b, h, i, j]) == (number >= least)


def test_any_window_of_the_mask_is_a_part_of_it():
    want = whole(sq=100, skv=130)
    part = dropout.kept(0.3, SEED, slice(1, 2), slice(1, 3), slice(37, 83), slice(5, 129))
    assert torch.equal(part, want[1:2, 1:3, 37:83, 5:129])


def numbered(*first):
    return torch.cat([SEED, torch.tensor(first)])


PARTS = {  # seeds, and which queries and keys of the larger problem they make the first ones, of item and head 1
    "items": (numbered(1, 1, 0, 0), slice(0, None), slice(0, None)),
    "sixteens": (numbered(1, 1, 2, 3), slice(32, None), slice(48, None)),
    "apart": (numbered(1, 1, 5, 1, 9, 1), slice(5, None), slice(9, None)),
    "in steps": (numbered(1, 1, 3, 2, 1, 3), slice(3, None, 2), slice(1, None, 3)),
    "composed": (dropout.part(numbered(1, 0, 1, 2), (32, 1), (48, 1), 1), slice(48, None), slice(80, None)),
    "composed apart": (dropout.part(numbered(1, 0, 1, 2), (5, 2), (48, 1), 1), slice(21, None, 2), slice(80, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kernel", ["reference", "blocked"])
def test_a_part_of_a_larger_problem_has_its_part_of_the_mask(kernel, name):
    seed, rows, keys = PARTS[name]
    want = whole(2, 3, 100, 130)[1:, 1:, rows, keys]
    assert torch.equal(mask_of(kernel, *want.shape, seed=seed), want)


@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.9])
def test_how_many_are_dropped(p):
    """Within six standard deviations: by head, and in each of the sixteen places of a patch."""
    dropped = ~whole(4, 4, 512, 512, p)
    want = dropout.threshold(p) / 65536
    assert abs(want - p) <= 2**-17
    by_place = dropped.view(4, 4, 32, 2, 4, 2, 32, 2, 4, 2).double().mean((0, 1, 2, 4, 6, 8)).flatten()
    for found, n in ((dropped.double().mean((2, 3)).flatten(), 512**2), (by_place, 512**2)):
        assert ((found - want).abs() <= 6 * (want * (1 - want) / n) ** 0.5).all()


def test_pairs_are_independent_of_their_neighbours():
    """So are heads, items and seeds: products of two deviations vanish within six standard deviations."""
    x = whole(3, 3, 256, 256, 0.3).double() - (1 - dropout.threshold(0.3) / 65536)
    others = [x.roll(steps, dims) for dims, steps in ((0, 1), (1, 1), (2, 1), (2, 2), (2, 8), (3, 1), (3, 2), (3, 8))]
    others += [whole(3, 3, 256, 256, 0.3, SEED + step).double() - 0.7 for step in (1, 2**32)]
    spread = x.square().mean()
    for other in others:
        assert abs((x * other).mean()) < 6 * spread / x.numel() ** 0.5


@pytest.mark.parametrize("kernel", ["reference", "blocked"])
def test_masks_are_the_same_bit_for_bit(kernel, monkeypatch):
    assert torch.equal(mask_of(kernel), whole())
    monkeypatch.setattr(blocked, "TILE", Tile(24, 40))  # which cuts patches
    sartor.plan.choose.cache_clear()
    sartor.ops.PREPARED.clear()
    assert torch.equal(mask_of(kernel, deterministic=True), whole())
    causal = torch.ones(50, 70, dtype=torch.bool).tril(20)
    assert torch.equal(mask_of(kernel, causal=True, softmax_scale=2.0), whole() & causal)
    sartor.plan.choose.cache_clear()
    sartor.ops.PREPARED.clear()


@pytest.mark.parametrize("kernel", ["reference", "blocked"])
def test_gradients_through_dropout(kernel):
    q, k, v = testing.make_inputs(2, 4, 2, 300, 530, 16, dtype=torch.float32, layout="bshd")
    options = {"sinks": torch.randn(4), "bias": torch.randn(4, 300, 530), "softcap": 3.0}
    for given in ({}, {"causal": True}, options):
        found = testing.verify(q, k, v, kernel=kernel, layout="bshd", through_lse=True, **given, **DROPOUT)
        assert found["out"].max > 0


ELSEWHERE = torch.empty(1, dtype=torch.int64, device="meta")
DROPOUT = {"dropout_p": 0.25, "dropout_seed": SEED}


def test_the_oracle_in_pieces_has_the_mask_of_the_whole(monkeypatch):
    q, k, v = testing.make_inputs(2, 4, 2, 30, 40, 8, dtype=torch.float32, layout="bshd")
    want = testing.reference(q, k, v, **DROPOUT)
    monkeypatch.setattr(oracle, "SCORES_AT_ONCE", 2 * 30 * 40)
    for found, whole in zip(testing.reference(q, k, v, **DROPOUT), want, strict=True):
        torch.testing.assert_close(found, whole)


def small(**rest):
    return testing.make_inputs(2, 2, 2, 40, 40, 8, dtype=torch.float32, layout="bshd", **rest)


def test_seeds():
    q, k, v = small()
    found = {}
    for name, seed in {"int": 5, "again": 5, "tensor": torch.tensor([5]), "high": 2**63 + 5, "low": 5 - 2**63}.items():
        found[name] = sartor.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)
    assert torch.equal(found["int"], found["again"])
    assert torch.equal(found["int"], found["tensor"])
    assert torch.equal(found["high"], found["low"])
    assert not torch.equal(found["int"], found["high"])


def test_manual_seed():
    q, k, v = small()
    torch.manual_seed(3)
    first, second = (sartor.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert torch.equal(sartor.attention(q, k, v, dropout_p=0.5), first)
    torch.set_rng_state(state)
    sartor.attention(q, k, v)
    sartor.attention(q, k, v, dropout_p=0, dropout_seed=3)
    sartor.attention(q, k, v, dropout_p=0.5, dropout_seed=3)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn where nothing is wanted


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_the_mask(reentrant):
    found = []
    for recomputed in (False, True):
        leaves = small(requires_grad=True)
        call = lambda *t: sartor.attention(*t, dropout_p=0.5)  # noqa: E731
        torch.manual_seed(3)
        out = checkpoint(call, *leaves, use_reentrant=reentrant) if recomputed else call(*leaves)
        torch.randn(3)
        out.square().sum().backward()
        found.append([out.detach(), *(t.grad for t in leaves)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_compiled():
    """A mask of its own for each call, the same in its backward; a given seed's is that of eager calls."""
    torch._dynamo.reset()
    leaves = small(requires_grad=True)
    given = torch.compile(lambda *t: sartor.attention(*t, dropout_p=0.5, dropout_seed=7), fullgraph=True)
    out, want = given(*leaves), sartor.attention(*leaves, dropout_p=0.5, dropout_seed=7)
    assert torch.equal(out, want)
    grads = [torch.autograd.grad(x, leaves, testing.make_like(want)) for x in (out, want)]
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
    drawn = torch.compile(lambda *t: sartor.attention(*t, dropout_p=0.5), fullgraph=True)
    v = torch.eye(40).view(1, 40, 1, 40).expand(2, 40, 2, 40).contiguous().requires_grad_()
    used = drawn(*leaves[:2], v)  # dv of queries that tell themselves apart is the weights' transpose
    assert not torch.equal(used, drawn(*leaves[:2], v))
    (dv,) = torch.autograd.grad(used, v, torch.eye(40).view(1, 40, 1, 40).expand(2, 40, 2, 40))
    torch.testing.assert_close(dv, used.detach().transpose(1, 3))


def test_a_seed_changed_in_place_before_the_backward_is_noticed():
    seed = torch.tensor([5])
    out = sartor.attention(*small(requires_grad=True), dropout_p=0.5, dropout_seed=seed)
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_rows_without_keys_of_which_dropout_leaves_nothing():
    q, k = torch.zeros(1, 3, 1, 8), torch.zeros(1, 1, 1, 8)
    given = {"causal": True, "return_lse": True, "dropout_p": 0.5, "dropout_seed": 0}
    lse = sartor.attention(q, k, k, **given)[1]
    assert lse.tolist() == [[[-torch.inf, -torch.inf, 0]]]
    assert torch.equal(lse, sartor.attention(q, k, k, kernel="reference", **given)[1])


def test_no_rows_and_no_keys():
    for sq, skv in ((0, 5), (5, 0), (1, 1)):
        q, k, v = testing.make_inputs(1, 2, 2, sq, skv, 8, dtype=torch.float32, layout="bshd")
        testing.verify(q, k, v, layout="bshd", **DROPOUT)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"dropout_p": -0.1}, ValueError, r"dropout_p must be at least 0 and below 1, got -0\.1"),
        ({"dropout_p": 1}, ValueError, r"got 1\.0"),
        ({"dropout_p": True}, TypeError, "dropout_p must be a float, got bool"),
        ({"dropout_p": 0.1, "dropout_seed": 0.5}, TypeError, "must be an int or a torch.Tensor, got float"),
        ({"dropout_seed": 0.5}, TypeError, "must be an int or a torch.Tensor, got float"),
        ({"dropout_p": 0.1, "dropout_seed": 2**64}, ValueError, "dropout_seed must be of 64 bits"),
        ({"dropout_p": 0.1, "dropout_seed": torch.ones(1)}, ValueError, "got .* of dtype torch.float32"),
        ({"dropout_p": 0.1, "dropout_seed": torch.ones(2).long()}, ValueError, r"1, 5 or 7 numbers .* got \(2,\)"),
        ({"dropout_p": 0.1, "dropout_seed": ELSEWHERE}, ValueError, "device of q, cpu, got meta"),
        ({"dropout_seed": 2**64}, ValueError, "dropout_seed must be of 64 bits"),
        ({"dropout_seed": torch.ones(1)}, ValueError, "got .* of dtype torch.float32"),
        ({"dropout_seed": torch.ones(2).long()}, ValueError, r"1, 5 or 7 numbers .* got \(2,\)"),
        ({"dropout_seed": ELSEWHERE}, ValueError, "device of q, cpu, got meta"),
        ({"dropout_p": 0.1, "kernel": "torch"}, sartor.Unsupported, r"has no dropout, got dropout_p=0\.1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(given, error, words):
    with pytest.raises(error, match=words):
        sartor.attention(*small(), **given)


def test_faces():
    """Those of other libraries, by the seed that PyTorch's generator gives; a module in training only."""
    q, k, v = small()
    flat, ends = [t.flatten(0, 1) for t in (q, k, v)], torch.tensor([0, 40, 80], dtype=torch.int32)
    calls = {
        "sdpa": lambda p: sartor.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), dropout_p=p),
        "flash": lambda p: sartor.flash_attn_func(q, k, v, p).transpose(1, 2),
        "qkv": lambda p: sartor.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), p).transpose(1, 2),
        "kv": lambda p: sartor.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), p).transpose(1, 2),
    }
    want = sartor.attention(q, k, v, dropout_p=0.5, dropout_seed=drawn()).transpose(1, 2)
    for name, call in calls.items():
        torch.manual_seed(3)
        assert torch.equal(call(0.5), want), name
        assert torch.equal(call(0.0), calls["sdpa"](0.0)), name
    torch.manual_seed(3)
    packed = sartor.flash_attn_varlen_func(*flat, ends, ends, 40, 40, 0.5)
    assert not torch.equal(packed, sartor.flash_attn_varlen_func(*flat, ends, ends, 40, 40))
    torch.testing.assert_close(packed[:40], want.transpose(1, 2)[0])  # the first sequence is where the first item is
    layer = sartor.nn.Attention(16, 2, dropout=0.5)
    x = torch.randn(2, 5, 16)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def drawn():
    torch.manual_seed(3)
    return torch.randint(0, 2**63 - 1, (1,))


def test_explain():
    q, k, v = small()
    assert "dropout 0.1" in str(sartor.explain(q, k, v, dropout_p=0.1))
    with pytest.raises(ValueError, match="dropout_seed must be"):
        sartor.explain(q, k, v, dropout_seed=torch.ones(2).long())
