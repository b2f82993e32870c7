"""FlexAttention's functions on a GPU, unchanged: by every family that takes them, against dense scores in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as theirs

import flex_mods
import judged
import sartor
from sartor import mods, testing
from sartor.integrations import flex

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.judges(*judged.NARROW),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BATCH, HEADS, LENGTH, DIM = 2, 4, 512, 64
SIZES = BATCH, HEADS, LENGTH, LENGTH


def inputs(dtype, length=LENGTH):
    return testing.make_inputs(BATCH, HEADS, 2, length, length, DIM, dtype=dtype, device="cuda", requires_grad=True)


def dense(q, k, v, score_mod, mask_mod, dtype):
    """In a dtype, by the functions on index tensors, of which autograd makes the gradients."""
    at = [torch.arange(n, device="cuda").view(-1, *(1,) * (3 - i)) for i, n in enumerate(SIZES)]
    q, k, v = (t.to(dtype) for t in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    s = q @ k.mT / DIM**0.5
    s = s if score_mod is None else score_mod(s, *at)
    s = s if mask_mod is None else torch.where(mask_mod(*at), s, -torch.inf)
    dense.largest = s.detach()[s.isfinite()].abs().max().item()
    return s.to(dtype).softmax(-1) @ v


def errors(found, exact):
    """Largest ones, as shares of the largest element."""
    return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", flex_mods.NAMES)
def test_unchanged(name, dtype):
    """Forward and all gradients as exact as the same mathematics in PyTorch, in the inputs' dtype."""
    made, exact_mods = (
        flex_mods.make(*SIZES[:3], device="cuda", dtype=t)[name] for t in (torch.float32, torch.float64)
    )
    block_mask = made.mask_mod and create_block_mask(made.mask_mod, *SIZES, device="cuda")
    q, k, v = inputs(dtype)
    dout = testing.make_like(q)

    def of(out, trained):
        return [out, *torch.autograd.grad(out, (q, k, v, *trained), dout.to(out.dtype))]

    exact = of(dense(q, k, v, exact_mods.score_mod, exact_mods.mask_mod, torch.float64), exact_mods.trained)
    noise = 2.0**-22 * (1 + dense.largest)  # of weights that are made again from float32 scores
    plain = flex_mods.make(*SIZES[:3], device="cuda", dtype=dtype)[name]
    budget = errors(of(dense(q, k, v, plain.score_mod, plain.mask_mod, dtype), plain.trained), exact)
    found = of(flex.flex_attention(q, k, v, made.score_mod, block_mask, enable_gqa=True), made.trained)
    for i, (error, allowed) in enumerate(zip(errors(found, exact), budget, strict=True)):
        assert error <= 3 * allowed + noise, (i, error, allowed)


@pytest.mark.parametrize("name", ["causal", "window", "natten", "softcap", "relative_bias", "alibi", "per_head_window"])
def test_against_flex_attention_compiled(name):
    made = flex_mods.make(*SIZES[:3], device="cuda", trains=False)[name]
    block_mask = made.mask_mod and create_block_mask(made.mask_mod, *SIZES, device="cuda")
    q, k, v = (t.detach() for t in inputs(torch.bfloat16))
    options = {"score_mod": made.score_mod, "block_mask": block_mask, "enable_gqa": True, "return_lse": True}
    try:
        want, want_lse = torch.compile(theirs)(q, k, v, **options)
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"PyTorch's FlexAttention does not compile it: {str(error).splitlines()[0]}")
    out, lse = flex.flex_attention(q, k, v, **options)
    torch.testing.assert_close(out, want, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["triton", "hopper"])
@pytest.mark.parametrize("name", ["relative", "nested"])
def test_gathers_of_every_family(name, family):
    """In masks and in scores, with indices below 0 and beyond the table."""
    if family == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    table = torch.randn(HEADS, 300, device="cuda")
    places = torch.randint(0, 300, (7,), device="cuda")
    index = {"relative": lambda q, kv: q - kv, "nested": lambda q, kv: places[(q + kv) % 7] + q - 40}[name]
    q, k, v = testing.make_inputs(BATCH, HEADS, HEADS, 300, 340, DIM, device="cuda", layout="bshd")
    score = mods.Score(lambda s, b, h, q, kv: s + table[h, index(q, kv)])
    mask = mods.Mask(lambda b, h, q, kv: table[h, index(q, kv)] > -1)
    testing.verify(q, k, v, kernel=family, score=score)
    testing.verify(q, k, v, kernel=family, mask=mask, causal=True)


def test_intervals_reach_the_fastest_kernels():
    """A causal mask, a window and a prefix written by hand take the kernels that mods.causal takes."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    q, k, v = (t.detach().transpose(1, 2) for t in inputs(torch.bfloat16))
    for name in ("causal", "window", "prefix_lm"):
        mask = mods.Mask(flex_mods.make(*SIZES[:3], device="cuda")[name].mask_mod)
        found = sartor.explain(q, k, v, mask=mask)
        assert (found.plan.kernel.name, found.backward.kernel.name) == ("hopper_forward", "hopper_backward"), name
