"""Ten functions written for FlexAttention, run by Sartor as they are: only the import changes."""

import torch
from torch.nn.attention.flex_attention import create_block_mask, or_masks

from sartor.integrations.flex import flex_attention

BATCH, HEADS, LENGTH, DIM, WIDTH, KERNEL = 2, 4, 128, 32, 16, 5


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    document_id = (torch.arange(LENGTH, device=device) // 50).expand(BATCH, -1)
    prefix_length = torch.tensor([20, 90], device=device)
    windows = torch.tensor([4, 8, 16, 32], device=device)
    table = torch.zeros(HEADS, 2 * LENGTH - 1, device=device, requires_grad=True)

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def natten(b, h, q_idx, kv_idx):
        q_x, q_y, kv_x, kv_y = q_idx // WIDTH, q_idx % WIDTH, kv_idx // WIDTH, kv_idx % WIDTH
        q_x = q_x.clamp(KERNEL // 2, LENGTH // WIDTH - 1 - KERNEL // 2)
        q_y = q_y.clamp(KERNEL // 2, WIDTH - 1 - KERNEL // 2)
        return ((q_x - kv_x).abs() <= KERNEL // 2) & ((q_y - kv_y).abs() <= KERNEL // 2)

    masks = {
        "causal": causal,
        "window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 16),
        "document": lambda b, h, q_idx, kv_idx: document_id[b, q_idx] == document_id[b, kv_idx],
        "prefix-LM": or_masks(lambda b, h, q_idx, kv_idx: kv_idx < prefix_length[b], causal),
        "NATTEN": natten,
        "dilated": lambda b, h, q_idx, kv_idx: ((q_idx - kv_idx).abs() <= 32) & ((q_idx - kv_idx) % 4 == 0),
        "window by head": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= windows[h],
    }
    scores = {
        "softcap": lambda score, b, h, q_idx, kv_idx: 20 * torch.tanh(score / 20),
        "ALiBi": lambda score, b, h, q_idx, kv_idx: score - (q_idx - kv_idx).abs() * torch.exp2(-(h + 1) * 8.0 / HEADS),
        "relative bias": lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + LENGTH - 1],
    }
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, DIM, device=device, requires_grad=True) for _ in range(3))
    for name, mask_mod in masks.items():
        block_mask = create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device=device)
        out, lse = flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
        print(f"{name}: out {tuple(out.shape)}, mean lse {lse.mean():.3f}")
    for name, score_mod in scores.items():
        out = flex_attention(q, k, v, score_mod)
        out.square().sum().backward()
        print(f"{name}: out {tuple(out.shape)}, |dq| {q.grad.norm():.3f}")
    print(f"and the table of the relative bias is trained: {table.grad.norm():.3f}")


if __name__ == "__main__":
    main()
