"""Random problems over all features on CUDA: out, lse and every gradient within budgets of the float64 reference."""

from __future__ import annotations

import random

import pytest
import torch

import judged
from sartor import mods, testing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
DIMS = (1, 8, 24, 40, 64, 64, 72, 80, 96, 100, 128, 128, 160, 192, 256)
LENGTHS = (1, 5, 64, 100, 129, 200, 257, 300)


def drawn(r):
    """(batch, heads_kv, group, sq, skv, dim, dim_v, dtype)"""
    batch, heads_kv, group = r.choice((1, 2, 3)), r.choice((1, 2)), r.choice((1, 1, 2, 3, 8))
    sq, skv, dim, dtype = r.choice(LENGTHS), r.choice(LENGTHS), r.choice(DIMS), r.choice(DTYPES)
    return batch, heads_kv, group, sq, skv, dim, r.choice((dim, dim, dim, r.choice(DIMS))), dtype


def of_seed(seed):
    """Its test, which judges the kernels that may run it."""
    *_, dim, dim_v, dtype = drawn(random.Random(seed))
    return pytest.param(seed, marks=pytest.mark.judges(*judged.by(dtype, dim=max(dim, dim_v))))


def problem(seed):
    """(q, k, v, options) of `attention`, the same for a seed everywhere."""
    r = random.Random(seed)
    batch, heads_kv, group, sq, skv, dim, dim_v, dtype = drawn(r)
    layout, heads = r.choice(("bshd", "bhsd")), heads_kv * group
    q, k, v = testing.make_inputs(batch, heads, heads_kv, sq, skv, dim, dim_v, dtype, "cuda", layout, seed)
    q, k, v = (testing.layouts(t).get(r.choice(("dense", "dense", "step", "swapped", "last")), t) for t in (q, k, v))
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    options = {"layout": layout, "causal": r.choice((False, True, "top_left"))}
    if r.random() < 0.3:
        options["window"] = (r.choice((-1, 0, 17, 150)), r.choice((-1, 0, 40)))
    if r.random() < 0.4:
        documents = (torch.arange(n, device="cuda").expand(batch, n) // 70 for n in (sq, skv))
        options["mask"] = r.choice((
            normal(batch, 1, sq, skv) > -1, normal(skv) > -1, mods.prefix(50) | mods.causal(),
            mods.document(*documents), mods.window(64, 0) & mods.Mask(lambda b, h, q, kv, aux: (q + kv + h) % 5 != 0),
        ))  # fmt: skip
    if r.random() < 0.2:
        options["softcap"] = r.choice((0.5, 3.0, 30.0))
    if r.random() < 0.3:
        options["softmax_scale"] = r.choice((-0.5, 0.0, 0.1, 1.0))
    if r.random() < 0.2:
        options["alibi_slopes"] = normal(*r.choice(((heads,), (batch, heads)))).abs()
    if r.random() < 0.25:
        sizes = [n if r.random() < 0.5 else 1 for n in (batch, heads, sq, skv)]
        options["bias"] = normal(*sizes).to(dtype)
    if r.random() < 0.25:
        options["sinks"] = normal(heads)
    if r.random() < 0.2:
        options["deterministic"] = True
    return q, k, v, options


@pytest.mark.parametrize("seed", [of_seed(seed) for seed in range(40)])
def test_random_problem(seed):
    q, k, v, options = problem(seed)
    testing.verify(q, k, v, through_lse=seed % 3 == 0, **options)
