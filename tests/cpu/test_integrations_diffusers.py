"""diffusers' models by the backend "sartor", or by PyTorch's SDPA made ours, against PyTorch's."""

from __future__ import annotations

import pytest
import torch

from sartor.integrations import torch as pytorchs

diffusers = pytest.importorskip("diffusers", minversion="0.35", reason="diffusers is not installed")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch")

from sartor.integrations import diffusers as ours  # noqa: E402


@pytest.fixture(autouse=True)
def registered():
    ours.register()
    ours.register()  # twice is once
    before = dispatch._AttentionBackendRegistry._active_backend
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(before)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    inputs = {
        "hidden_states": normal(1, 16, 4), "encoder_hidden_states": normal(1, 7, 32),
        "pooled_projections": normal(1, 32), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3),
        "timestep": torch.tensor([0.5]),
    }  # fmt: skip
    return model, inputs


def unet():
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=12, attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip
    return model, {"sample": normal(1, 4, 8, 8), "timestep": 1, "encoder_hidden_states": normal(1, 5, 12)}


def dit():
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    return model.eval(), {
        "hidden_states": normal(1, 4, 8, 8), "timestep": torch.tensor([3]), "class_labels": torch.tensor([1])
    }  # fmt: skip


def sd3():
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip
    return model, {
        "hidden_states": normal(1, 4, 8, 8), "encoder_hidden_states": normal(1, 5, 16),
        "pooled_projections": normal(1, 16), "timestep": torch.tensor([3]),
    }  # fmt: skip


def run(model, inputs):
    model.zero_grad()
    out = model(**inputs).sample
    out.square().mean().backward()
    return [out, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(found, want):
    assert len(found) == len(want)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def calls(monkeypatch):
    """The calls of `sartor.attention`, by either way."""
    found = []
    for module in (ours, pytorchs):
        name = "attention" if module is ours else "by_sartor"
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, original=original, **k: found.append(a) or original(*a, **k))
    return found


def test_a_model_by_its_backend(calls):
    torch.manual_seed(0)
    model, inputs = flux()
    want = run(model, inputs)
    model.set_attention_backend("sartor")
    assert_same(run(model, inputs), want)
    assert len(calls) == 2


@pytest.mark.parametrize("make", [unet, dit, sd3])
def test_models_by_sdpa(make, calls):
    torch.manual_seed(0)
    model, inputs = make()
    want = run(model, inputs)
    with pytorchs.activate():
        found = run(model, inputs)
    assert_same(found, want)
    assert calls


def test_the_active_backend():
    q, k, v = normal(2, 5, 4, 8), normal(2, 7, 4, 8), normal(2, 7, 4, 8)
    seen = torch.ones(2, 7, dtype=torch.bool)
    seen[0, 5:] = False
    for options in ({}, {"attn_mask": seen}, {"attn_mask": normal(2, 1, 5, 7)}, {"is_causal": True}, {"scale": 0.2}):
        want = dispatch.dispatch_attention_fn(q, k, v, **options)
        with dispatch.attention_backend("sartor"):
            found = dispatch.dispatch_attention_fn(q, k, v, **options)
        torch.testing.assert_close(found, want)
    _, lse = ours.attention_backend(q, k, v, return_lse=True)
    assert lse.shape == (2, 4, 5)


def test_refusals():
    q = normal(1, 2, 2, 8)
    with pytest.raises(ValueError, match="dropout_p must be at least 0 and below 1, got 2"):
        ours.attention_backend(q, q, q, dropout_p=2)
    with pytest.raises(NotImplementedError, match="_parallel_config"):
        ours.attention_backend(q, q, q, _parallel_config=object())
