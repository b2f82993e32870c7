"""transformers' models with `attn_implementation="sartor"` against themselves with "eager"."""

from __future__ import annotations

import inspect

import pytest
import torch
from test_mods import assert_sound
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

import sartor
from sartor.problem import band

transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")
theirs = pytest.importorskip("transformers.masking_utils")
ours = pytest.importorskip("sartor.integrations.transformers")

BATCH = 2


@pytest.fixture(autouse=True, scope="module")
def registered():
    ours.register()
    yield
    for registry in (transformers.AttentionInterface, theirs.AttentionMaskInterface):
        for name in ("sartor", "paged|sartor"):
            registry._global_mapping.pop(name)


# ---- masks


def pads(n):
    """True = seen; a mask of each kind for n keys."""
    at = torch.arange(n)
    left, right = torch.stack([at >= 3, at >= 0]), torch.stack([at < n - 2, at < n - 1])
    holes = left.clone()
    holes[1, n // 2] = False
    return {
        "none": None,
        "whole": torch.ones(BATCH, n, dtype=torch.bool),
        "left": left,
        "right": right,
        "both": left & right,
        "holes": holes,
        "nothing": left & (at < 0),
        "short": left[:, : n - 2],
    }


PLACES = {  # q_length, kv_length, q_offset, kv_offset
    "square": (9, 9, 0, 0),
    "decode": (1, 9, 8, 0),
    "chunk": (3, 9, 6, 0),
    "static": (3, 12, torch.tensor(4), 0),
    "static_decode": (1, 12, torch.tensor(7), 0),
    "sliding": (2, 6, 11, 7),
    "static_sliding": (2, 6, torch.tensor([11]), 7),
    "cross": (4, 9, 0, 0),
    "past": (7, 3, 0, 0),
}
ONE = {
    "decode": (1, 9, 8, 0),
    "static_decode": (1, 12, torch.tensor(7), 0),
    "sliding_decode": (1, 6, 12, 7),
    "static_sliding_decode": (1, 6, torch.tensor([11]), 7),
}
IDS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, 2, 2, -1, -1], [0, 0, -1, -1, -1, -1, 0, 0, -1, -1, -1, -1, -1]])
FUNCTIONS = {
    "causal": lambda: theirs.causal_mask_function,
    "full": lambda: theirs.bidirectional_mask_function,
    "window": lambda: theirs.sliding_window_causal_mask_function(4),
    "long_window": lambda: theirs.sliding_window_causal_mask_function(40),
    "two_sided": lambda: theirs.sliding_window_bidirectional_mask_function(2),
    "chunks": lambda: theirs.chunked_causal_mask_function(4, torch.tensor([3, 0])),
    "blocks": lambda: theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(IDS)),
    "window_or_blocks": lambda: theirs.or_masks(
        theirs.sliding_window_causal_mask_function(3), theirs.blockwise_overlay(IDS)
    ),
    "blocks_in_window": lambda: theirs.and_masks(
        theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(IDS)), theirs.sliding_window_overlay(3)
    ),
}
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1], [3, 4, 5, 6, 7, 8, 0, 0, 1]])


def packed_function(inner):
    ids = theirs.find_packed_sequence_indices(POSITIONS)
    parts = theirs.packed_sequence_mask_function(ids), theirs.remap_positions_for_packed_sequence(inner, POSITIONS)
    return theirs.and_masks(*parts)


def dense(found, shape):
    """The bool tensor that a LayerMask stands for."""
    if found is None:
        return torch.ones(shape, dtype=torch.bool)
    if "mask" in found.arguments:
        return found.arguments["mask"].materialize(*shape)
    made = band(found.arguments["causal"], found.arguments["window"])
    return torch.ones(shape, dtype=torch.bool) if made is None else made.materialize(*shape)


def assert_as_sdpa(function, place, padding, known=True):
    q, kv, q_offset, kv_offset = place
    common = {
        "batch_size": BATCH, "q_length": q, "kv_length": kv, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": function, "attention_mask": padding, "device": torch.device("cpu"),
    }  # fmt: skip
    want = theirs.sdpa_mask(**common, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    found = ours.layer_mask(**common, allow_is_bidirectional_skip=True, dtype=torch.float32, config=None)
    shape = (BATCH, 1, q, kv)
    assert torch.equal(dense(found, shape), want.expand(shape))
    assert found is None or torch.equal(found.tensor(), want.expand(shape))
    made = None if found is None else found.arguments.get("mask")
    if made is not None:
        assert_sound(made, *shape)
        assert (made.name == "tensor") is not known
        assert known is False or max(t.numel() for t in made.tensors) <= BATCH * max(q, kv)
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks(name, place):
    for padding in pads(PLACES[place][1] + PLACES[place][3]).values():
        assert_as_sdpa(FUNCTIONS[name](), PLACES[place], padding)


@pytest.mark.parametrize("name", ["causal", "window", "two_sided", "chunks", "full"])
def test_packed_masks(name):
    function = FUNCTIONS[name]()
    if name == "chunks":
        function = theirs.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.int64))
    assert_as_sdpa(packed_function(function), PLACES["square"], None)


def test_masks_by_a_function_of_ones_own():
    own = theirs.and_masks(theirs.causal_mask_function, lambda b, h, q, kv: (q + kv) % 3 != b)
    for padding in pads(9).values():
        assert_as_sdpa(own, PLACES["square"], padding, known=False)
    never = theirs.and_masks(theirs.causal_mask_function, lambda b, h, q, kv: kv > 100)
    assert_as_sdpa(never, PLACES["square"], None, known=False)


@pytest.mark.parametrize(
    ("name", "place", "padding", "arguments"),
    [
        ("causal", "square", "none", {"causal": True, "window": (None, 0)}),
        ("causal", "chunk", "whole", {"causal": True, "window": (None, 0)}),
        ("long_window", "square", "whole", {"causal": True, "window": (None, 0)}),
        ("window", "decode", "none", {"causal": True, "window": (3, 0)}),
        ("two_sided", "square", "whole", {"causal": False, "window": (2, 2)}),
    ],
)
def test_what_attention_can_be_told_is_no_tensor(name, place, padding, arguments):
    found = assert_as_sdpa(FUNCTIONS[name](), PLACES[place], pads(PLACES[place][1])[padding])
    assert found.arguments == arguments


def test_padding_at_the_ends_makes_intervals():
    for padding in ("left", "right", "both"):
        found = assert_as_sdpa(theirs.causal_mask_function, PLACES["square"], pads(9)[padding])
        assert found.arguments["mask"].name == "intervals"


def test_no_mask_is_none_where_that_was_asked_for():
    assert assert_as_sdpa(theirs.bidirectional_mask_function, PLACES["cross"], pads(9)["whole"]) is None


def test_a_layer_mask_stands_for_a_tensor():
    found = ours.LayerMask((2, 1, 3, 4), {"causal": True, "window": None})
    assert found.shape == (2, 1, 3, 4)
    assert found.ndim == 4
    assert found.contiguous() is found
    assert found.to("cpu") is found
    assert "causal" in str(found)
    seen = assert_as_sdpa(theirs.causal_mask_function, PLACES["square"], pads(9)["holes"])
    moved = seen.to("cpu")
    assert torch.equal(dense(moved, (2, 1, 9, 9)), dense(seen, (2, 1, 9, 9)))
    assert torch.equal(moved.tensor(), seen.tensor())


def test_models_may_read_a_layer_mask_as_the_tensor():
    found = assert_as_sdpa(theirs.causal_mask_function, PLACES["square"], pads(9)["left"])
    want, scores = found.tensor(), torch.randn(BATCH, 4, 9, 9)
    assert found.dtype == torch.bool
    assert found.size() == want.shape
    for made, of in ((found[:, :, -1:], want[:, :, -1:]), (~found, ~want), (found & want, want), (want & found, want)):
        assert torch.equal(made, of)
    hidden = scores.masked_fill(~want, torch.finfo(torch.float32).min)
    assert torch.equal(scores + found, hidden)
    assert torch.equal(found + scores, hidden)
    with pytest.raises(TypeError, match="attention_mask must be a tensor for this model"):
        ours.LayerMask((2, 1, 3, 4), {"causal": True}).dtype  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute"):
        found.seq_lengths  # noqa: B018


# ---- models

TEXT = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
NO_GQA = {k: v for k, v in TEXT.items() if k != "num_key_value_heads"}
GPT2 = {
    "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
T5 = {
    "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "decoder_start_token_id": 0, "eos_token_id": None,
}  # fmt: skip
BART = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "forced_eos_token_id": None,
    "decoder_start_token_id": 1,
}  # fmt: skip
LLAMA4 = {
    **TEXT, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 5,
    "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "attn_temperature_tuning": False,
}  # fmt: skip
DECODERS = {
    "llama": ("Llama", TEXT),
    "gpt2": ("GPT2", GPT2),
    "gemma2": ("Gemma2", {**TEXT, "head_dim": 8, "sliding_window": 5}),
    "gemma3": ("Gemma3", {**TEXT, "head_dim": 8, "sliding_window": 5, "layer_types": LAYERS}),
    "gpt_oss": (
        "GptOss", {**TEXT, "head_dim": 8, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "mistral": ("Mistral", {**TEXT, "sliding_window": 5}),
    "llama4": ("Llama4", LLAMA4),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **TEXT, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        },
    ),
    "doge": ("Doge", TEXT),
    "gemma4": (
        "Gemma4",
        {
            **TEXT, "head_dim": 8, "global_head_dim": 8, "vocab_size_per_layer_input": 97, "sliding_window": 5,
            "hidden_size_per_layer_input": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
            "layer_types": 2 * LAYERS,
        },
    ),
    "deepseek_v4": (
        "DeepseekV4",
        {
            **TEXT, "num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 16, "q_lora_rank": 8,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "o_groups": 2, "o_lora_rank": 8,
            "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        },
    ),
    "inkling2": (
        "Inkling2",
        {
            **TEXT, "head_dim": 8, "layer_types": ["hybrid_sliding", "hybrid"], "moe_intermediate_size": 48,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "attention_dropout": 0.0,
        },
    ),
}  # fmt: skip


def decoder(name):
    family, options = DECODERS[name]
    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    head = {"GPT2": "LMHeadModel"}.get(family, "ForCausalLM")
    return build(getattr(transformers, f"{family}{head}"), config(**options))


def build(kind, config):
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager").eval()
    for p in model.parameters():  # sinks and biases begin as zeros, and attention nearly uniform
        torch.nn.init.normal_(p, std=0.2)
    return model


def tokens(n=12, pad=4):
    """Two sequences, the first of which has padding on the left."""
    ids = torch.randint(3, 97, (BATCH, n), generator=torch.Generator().manual_seed(1))
    seen = torch.ones_like(ids)
    seen[0, :pad] = 0
    return ids, seen


def both(model, run):
    """What `run` gives with eager and with sartor."""
    found = []
    for implementation in ("eager", "sartor"):
        model.set_attn_implementation(implementation)
        found.append(run())
    return found


def gradients(model, **inputs):
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found, want):
    """By torch's tolerance for the dtype, of the largest value: sums cancel."""
    torch.testing.assert_close(found / want.abs().max(), want / want.abs().max())


def assert_gradients(model, **inputs):
    want, found = both(model, lambda: gradients(model, **inputs))
    assert want.keys() == found.keys()
    largest = max(g.abs().max() for g in want.values())
    for name, g in want.items():  # of what is small beside the model's largest, as a key's bias, rounding is left
        torch.testing.assert_close(found[name] / largest, g / largest)
        if g.abs().max() > 1e-3 * largest:
            assert_close(found[name], g)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name):
    model = decoder(name)
    ids, seen = tokens()
    for mask in (None, seen):
        want, found = both(model, lambda mask=mask: model(input_ids=ids, attention_mask=mask).logits)
        rows = torch.ones_like(seen).bool() if mask is None else seen.bool()
        assert_close(found[rows], want[rows])
    labels = torch.where(seen.bool(), ids, -100)
    labels[0, 4] = -100  # its logits are of padding
    assert_gradients(model, input_ids=ids, attention_mask=seen, labels=labels)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens(name, cache):
    if (name, cache) == ("deepseek_v4", "static"):
        pytest.skip("transformers has no static cache for compressed layers")
    model = decoder(name)
    ids, seen = tokens()
    options = {"attention_mask": seen, "max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_logits": True, "cache_implementation": None if cache == "dynamic" else cache}
    want, found = both(model, lambda: model.generate(input_ids=ids, **options))
    assert torch.equal(found.sequences, want.sequences)
    assert_close(torch.stack(found.logits), torch.stack(want.logits))


class Operations(TorchDispatchMode):
    """How many torch operations ran."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("cache", "most"), [(None, 2), ("static", 7)])
def test_a_tokens_mask_is_made_in_a_few_operations(cache, most, monkeypatch):
    """After a prompt with padding at the left; with a static cache a token's place is on the device."""
    counts, made = [], ours.layer_mask

    def counted(*args, **kwargs):
        with Operations() as operations:
            found = made(*args, **kwargs)
        counts.append(operations.count)
        return found

    model = decoder("llama")
    model.set_attn_implementation("sartor")
    monkeypatch.setitem(theirs.AttentionMaskInterface._global_mapping, "sartor", counted)
    ids, seen = tokens()
    for _ in range(2):  # what is traced once is traced in the first
        counts.clear()
        model.generate(
            ids,
            attention_mask=seen,
            max_new_tokens=6,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
        )
    assert len(counts) == 6
    assert max(counts[1:]) <= most, counts


@pytest.mark.parametrize("place", ["decode", "static_decode", "static_sliding_decode", "sliding_decode"])
@pytest.mark.parametrize("name", ["causal", "window", "two_sided", "full", "long_window"])
def test_masks_of_a_token_after_a_prompt(name, place):
    """Of the prompt's padding and what follows, of which some may be no tokens."""
    _, kv, _, kv_offset = places = ONE[place]
    prompt = pads(5)["left"]
    ours.layer_mask(
        BATCH, 5, 5, mask_function=theirs.causal_mask_function, attention_mask=prompt, device=torch.device("cpu")
    )
    whole = torch.cat([prompt, torch.ones(BATCH, kv + kv_offset - 5, dtype=torch.bool)], 1)
    gap, other = whole.clone(), whole.clone()
    gap[0, -1], other[1, 0] = False, False
    assert ours._first_seen(whole) is not None
    assert ours._first_seen(gap) is ours._first_seen(other) is ours._first_seen(whole[:, :4]) is None
    for padding in (whole, gap, other, whole[:, :-2]):
        assert_as_sdpa(FUNCTIONS[name](), places, padding)


def test_a_prompt_in_parts():
    model = decoder("mistral")
    ids, seen = tokens()

    def run():
        cache = transformers.DynamicCache(config=model.config)
        parts = [(ids[:, :7], seen[:, :7]), (ids[:, 7:], seen)]
        return [model(input_ids=i, attention_mask=m, past_key_values=cache).logits for i, m in parts]

    (_, want), (_, found) = both(model, run)
    assert_close(found, want)


def test_packed_positions_and_lengths():
    """Sequences one after another give what each gives alone, by position_ids and by flash attention's arguments."""
    model = decoder("mistral")
    ids = tokens()[0][:1]
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]])
    ends = torch.tensor([0, 7, 12], dtype=torch.int32)
    model.set_attn_implementation("eager")
    want = torch.cat([model(input_ids=part).logits for part in ids.split([7, 5], 1)], 1)
    model.set_attn_implementation("sartor")
    assert_close(model(input_ids=ids, position_ids=positions, use_cache=False).logits, want)
    flat = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
    assert_close(model(input_ids=ids, position_ids=positions, **flat).logits, want)
    assert len(ours._PACKED) == 1
    del flat, ends
    assert len(ours._PACKED) == 0


def test_encoders():
    options = {k: v for k, v in NO_GQA.items() if k not in ("bos_token_id", "eos_token_id")}
    model = build(transformers.BertModel, transformers.BertConfig(**options))
    ids, seen = tokens()
    for mask in (None, seen):
        want, found = both(model, lambda mask=mask: model(input_ids=ids, attention_mask=mask).last_hidden_state)
        assert_close(found, want)
    vision = {"image_size": 8, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    vit = build(transformers.ViTForImageClassification, transformers.ViTConfig(**vision, intermediate_size=48))
    pixels, label = torch.rand(2, 3, 8, 8), torch.tensor([0, 1])
    want, found = both(vit, lambda: vit(pixel_values=pixels).logits)
    assert_close(found, want)
    assert_gradients(vit, pixel_values=pixels, labels=label)


@pytest.mark.parametrize(("family", "options"), [("T5", T5), ("Bart", BART)])
def test_cross_attention(family, options):
    config = getattr(transformers, f"{family}Config")(**options)
    model = build(getattr(transformers, f"{family}ForConditionalGeneration"), config)
    ids, seen = tokens()
    labels = ids[:, :5].contiguous()
    for mask in (None, seen):
        want, found = both(model, lambda mask=mask: model(input_ids=ids, attention_mask=mask, labels=labels).logits)
        assert_close(found, want)
    assert_gradients(model, input_ids=ids, attention_mask=seen, labels=labels)
    greedy = {"attention_mask": seen, "max_new_tokens": 5, "do_sample": False}
    want, found = both(model, lambda: model.generate(input_ids=ids, **greedy))
    assert torch.equal(found, want)


def test_vision_language():
    """Qwen2-VL: images of two sizes, whose patches attend within their own image; float masks of Mllama's cross
    attention."""
    text = {
        **TEXT, "image_token_id": 5, "vision_start_token_id": 6, "vision_end_token_id": 7, "video_token_id": 8,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 32, "mlp_ratio": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, **{k: v for k, v in text.items() if k.endswith("_token_id")}
    )
    model = build(transformers.Qwen2VLForConditionalGeneration, config)
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])  # 16 and 8 patches; 2 x 2 are one token
    ids = torch.tensor([[0, 0, 6, 5, 5, 5, 5, 7, 9], [6, 5, 5, 7, 11, 12, 13, 14, 15]])
    kinds = (ids == 5).int()
    pixels = torch.randn(24, 3 * 2 * 4 * 4)
    seen = (ids != 0).long()
    inputs = {"input_ids": ids, "attention_mask": seen, "pixel_values": pixels, "image_grid_thw": grid}
    inputs["mm_token_type_ids"] = kinds
    want, found = both(model, lambda: model(**inputs).logits)
    assert_close(found[seen.bool()], want[seen.bool()])


def test_cross_attention_to_images():
    """Mllama's text model with a float mask as it prepares it: rows without an image see all, and count for nothing."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.MllamaTextConfig(**TEXT, cross_attention_layers=[1], rope_parameters=rope)
    model = build(transformers.MllamaForCausalLM, config)
    ids, seen = tokens()
    images = torch.rand(BATCH, 1, 12, 7, generator=torch.Generator().manual_seed(2)) > 0.3
    images[:, :, 3] = False
    some = images.any(-1)[..., None].float()
    inputs = {
        "input_ids": ids, "attention_mask": seen, "cross_attention_states": torch.randn(BATCH, 7, 32),
        "cross_attention_mask": torch.where(images, 0.0, torch.finfo(torch.float32).min) * some,
        "full_text_row_masked_out_mask": some,
    }  # fmt: skip
    want, found = both(model, lambda: model(**inputs).logits)
    assert_close(found[seen.bool()], want[seen.bool()])
    labels = torch.where(seen.bool(), ids, -100)
    labels[0, 4] = -100  # its logits are of padding
    assert_gradients(model, **inputs, labels=labels)


def test_float_masks():
    model = decoder("llama")
    ids, _ = tokens()
    bias = torch.randn(BATCH, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), torch.finfo(torch.float32).min)
    want, found = both(model, lambda: model(input_ids=ids, attention_mask=bias).logits)
    assert_close(found, want)


def test_blocks_of_an_image_see_both_ways():
    """Gemma 3's language model with the masks of its images: blocks in full layers, blocks within the window."""
    model = decoder("gemma3")
    ids, seen = tokens()
    blocks = IDS[:, :12]
    common = {"config": model.config, "attention_mask": seen, "past_key_values": None, "position_ids": None}
    common |= {"inputs_embeds": torch.empty(BATCH, 12, 0)}

    def run():
        full = theirs.create_causal_mask(**common, block_sequence_ids=blocks)
        sliding = theirs.create_causal_mask(
            **common, or_mask_function=theirs.blockwise_overlay(blocks),
            and_mask_function=theirs.sliding_window_overlay(5),
        )  # fmt: skip
        return model(input_ids=ids, attention_mask={"full_attention": full, "sliding_attention": sliding}).logits

    want, found = both(model, run)
    assert_close(found[seen.bool()], want[seen.bool()])


# ---- refusals and features


def test_dropout():
    """In training, by the config's probability; none otherwise."""
    config = transformers.LlamaConfig(**TEXT, attention_dropout=0.1)
    model = build(transformers.LlamaForCausalLM, config)
    model.set_attn_implementation("sartor")
    ids, _ = tokens()
    same, again = (model(input_ids=ids).logits for _ in range(2))
    assert torch.equal(same, again)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(model.train()(input_ids=ids).logits)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_continuous_batching(name, monkeypatch):
    """Prompts of three lengths, of which the longest comes in parts, give the tokens that each gives alone."""
    model = decoder(name)
    prompts = [list(range(5, 8)), list(range(11, 24)), list(range(40, 45))]
    options = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    want = [model.generate(torch.tensor([p]), generation_config=options)[0, len(p) :].tolist() for p in prompts]
    model.set_attn_implementation("sartor")
    calls = []
    monkeypatch.setattr(
        ours, "attention", lambda *args, real=ours.attention, **kw: calls.append(args) or real(*args, **kw)
    )
    pages = transformers.ContinuousBatchingConfig(page_size=4, num_blocks=32, max_batch_tokens=8)
    found = model.generate_batch(
        prompts, generation_config=options, continuous_batching_config=pages, progress_bar=False
    )
    assert [found[f"req_{i}"].generated_tokens for i in range(3)] == want
    assert calls
    assert model.config._attn_implementation == "sartor"


@pytest.mark.parametrize("options", [{}, {"cache": object()}], ids=["pages copied", "pages given"])
def test_block_tables_are_refused(options):
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="block_table must be None"):
        ours.attention_forward(torch.nn.Module(), q, q, q, None, block_table=torch.zeros(1, 1), **options)


@pytest.mark.parametrize("name", ours.SELECT_KEYS)
def test_keys_chosen_by_the_model_are_refused(name):
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=f"{name} must be None, got keys that the model chose"):
        ours.attention_forward(torch.nn.Module(), q, q, q, None, **{name: torch.zeros(1, 3, 1)})


def test_block_masks_are_taken():
    q, k, v = (torch.randn(2, h, 9, 8) for h in (4, 2, 2))
    blocks = create_block_mask(lambda b, h, i, j: i - j <= 2, 2, None, 9, 9, device="cpu")
    found, _ = ours.attention_forward(torch.nn.Module(), q, k, v, blocks)
    seen = torch.ones(9, 9).triu(-2).bool()
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    assert_close(found, want.transpose(1, 2))


def test_features_are_told_by_the_signature():
    names = inspect.signature(ours.attention_forward).parameters
    assert {"s_aux", "softcap", "position_bias", "cu_seq_lens_q"} <= set(names)


def test_checkpointed_training():
    model = decoder("llama").train()
    ids, seen = tokens()
    inputs = {"input_ids": ids, "attention_mask": seen, "labels": ids, "use_cache": False}
    model.set_attn_implementation("sartor")
    want = gradients(model, **inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = gradients(model, **inputs)
    for name in want:
        assert_close(found[name], want[name])


@pytest.mark.parametrize("mask", [None, "padded"])
def test_compiled_whole(mask):
    model = build(transformers.MistralForCausalLM, transformers.MistralConfig(**TEXT | {"num_hidden_layers": 1}))
    ids, seen = tokens()
    inputs = {"input_ids": ids, "attention_mask": seen if mask else None, "use_cache": False}
    model.set_attn_implementation("sartor")
    want = model(**inputs).logits
    torch.compiler.reset()
    found = torch.compile(model, fullgraph=True, backend="eager")(**inputs).logits
    assert_close(found[seen.bool()], want[seen.bool()])


def test_compiled_decoding(monkeypatch):
    """With a static cache, as `generate` compiles it on GPUs: one graph for all steps, whose mask is an input."""
    model = build(transformers.LlamaForCausalLM, transformers.LlamaConfig(**TEXT | {"num_hidden_layers": 1}))
    model.set_attn_implementation("sartor")
    ids, seen = tokens()
    options = {"attention_mask": seen, "max_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}
    want = model.generate(input_ids=ids, **options)
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *args, **kwargs: True)
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):  # a function: what else is in the config, generate copies
        graphs.append(graph)
        return graph.forward

    options["compile_config"] = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None, dynamic=False)
    assert torch.equal(model.generate(input_ids=ids, **options), want)
    assert len(graphs) == 1


def test_kernels_are_ours():
    """The models' calls do reach `sartor.attention`."""
    model = decoder("llama")
    model.set_attn_implementation("sartor")
    calls = []
    original = ours.attention
    ours.attention = lambda *args, **kwargs: calls.append(kwargs) or original(*args, **kwargs)
    try:
        model(input_ids=tokens()[0])
    finally:
        ours.attention = original
    assert [c["causal"] for c in calls] == [True, True]
    assert original is sartor.attention
