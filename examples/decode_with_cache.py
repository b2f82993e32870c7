"""Decoding: keys and values stay in a cache; prompts differ in length, and lengths stay on the device.

Each step writes one key and value behind those of its sequence and attends to all that are there. Nothing is padded,
concatenated or read back.
"""

import torch

import sartor

BATCH, CAPACITY, HEADS, HEADS_KV, DIM = 3, 64, 8, 2, 64


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    k_cache, v_cache = torch.zeros(2, BATCH, CAPACITY, HEADS_KV, DIM, device=device, dtype=dtype)
    lengths = torch.tensor([5, 40, 17], dtype=torch.int32, device=device)  # of three prompts
    filled = torch.arange(CAPACITY, device=device) < lengths[:, None]
    k_cache[filled], v_cache[filled] = torch.randn(2, int(filled.sum()), HEADS_KV, DIM, device=device, dtype=dtype)

    for _ in range(8):  # of a model, this is one layer of one step
        q = torch.randn(BATCH, 1, HEADS, DIM, device=device, dtype=dtype)
        k, v = torch.randn(2, BATCH, 1, HEADS_KV, DIM, device=device, dtype=dtype)
        out = sartor.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
        lengths += 1
    print("lengths:", lengths.tolist(), " out:", tuple(out.shape))

    for i, n in enumerate(lengths.tolist()):  # each sequence alone, without a cache
        want = sartor.attention(q[i : i + 1], k_cache[i : i + 1, :n], v_cache[i : i + 1, :n])
        torch.testing.assert_close(out[i : i + 1], want)

    # Layers of a step share their lengths: the mask is made once and given to each.
    mask = sartor.mods.cached(lengths, seqlen_q=1, seqlen_kv=CAPACITY, window=(15, 0))
    local = [sartor.attention(q, k_cache, v_cache, mask=mask) for _ in range(4)]
    print("of the last 16 keys:", tuple(local[-1].shape))


if __name__ == "__main__":
    main()
