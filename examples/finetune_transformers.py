"""Train a transformers model with Sartor's attention, then let it generate from prompts of different lengths.

The model is tiny and made from a config, so that this runs anywhere; `from_pretrained(name, attn_implementation=
"sartor")` does the same to a model with weights.
"""

import torch
from transformers import MistralConfig, MistralForCausalLM

import sartor.integrations.transformers

PAD, BOS = 0, 1
FIRST, LAST = 4, 36  # the tokens of the task: count on by one


def batch(size: int, length: int, device: str) -> torch.Tensor:
    start = torch.randint(0, LAST - FIRST, (size, 1))
    counted = FIRST + (start + torch.arange(length - 1)) % (LAST - FIRST)
    return torch.cat([torch.full((size, 1), BOS), counted], 1).to(device)


def main() -> None:
    sartor.integrations.transformers.register()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = MistralConfig(
        vocab_size=LAST, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=None,
        attn_implementation="sartor",
    )  # fmt: skip
    model = MistralForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        tokens = batch(16, 24, device)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 13 == 0:
            print(f"step {step:2d}  loss {loss.item():.3f}")

    prompts = torch.tensor([[BOS, 10, 11, 12, 13], [PAD, PAD, PAD, BOS, 30]], device=device)  # padded on the left
    model.eval()
    found = model.generate(prompts, attention_mask=(prompts != PAD).long(), max_new_tokens=4, do_sample=False)
    print("counted on:", found[:, 5:].tolist())
    assert found[0, 5:].tolist() == [14, 15, 16, 17]
    assert found[1, 5:].tolist() == [31, 32, 33, 34]


if __name__ == "__main__":
    main()
