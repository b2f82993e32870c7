"""What providers, devices, modes and masks are called in tables and pictures: in words, and the look of a provider."""

from __future__ import annotations

from dataclasses import dataclass

from sartor.device import ARCHITECTURES
from sartor.lab.ladder import catalogue
from sartor.lab.workloads.workload import Pattern


@dataclass(frozen=True)
class Look:
    """A provider's words, and its colour and marker in every picture (the colours of Okabe and Ito 2008, which people
    with a colour vision deficiency tell apart, and shades of them)."""

    words: str
    colour: str
    marker: str


PROVIDERS = {
    "sartor": Look("Sartor", "#D55E00", "o"),
    "sartor:triton": Look("Sartor (Triton)", "#F2B27F", "D"),
    "sartor:fp32_forward": Look("Sartor (Triton)", "#F2B27F", "D"),
    "sartor-varlen": Look("Sartor (flash_attn_varlen_func)", "#E69F00", "D"),
    "sartor-kvcache": Look("Sartor (flash_attn_with_kvcache)", "#8C6D1F", "D"),
    "sartor-kvcache-new": Look("Sartor (the same, new keys)", "#A04000", "X"),
    "torch-varlen": Look("PyTorch varlen_attn", "#44AA99", "P"),
    "tf32": Look("Sartor (TF32)", "#882255", "X"),
    "eager": Look("PyTorch eager", "#444444", "s"),
    "sdpa": Look("PyTorch SDPA", "#332288", "^"),
    "sdpa-math": Look("PyTorch SDPA (math)", "#999999", "v"),
    "sdpa-flash": Look("PyTorch SDPA (FlashAttention-2)", "#009E73", "P"),
    "sdpa-efficient": Look("PyTorch SDPA (efficient)", "#56B4E9", "h"),
    "sdpa-cudnn": Look("PyTorch SDPA (cuDNN)", "#0072B2", "^"),
    "flash-attn": Look("flash-attn 2", "#117733", "p"),
    "fa3": Look("FlashAttention-3", "#882299", "d"),
    "fa4": Look("FlashAttention-4", "#AA4466", "<"),
    "flex": Look("FlexAttention", "#CC79A7", "s"),
}
SHADES = ("#F2B27F", "#D55E00", "#A04000", "#5A2100")  # of rungs and of kernels by name, in order of appearance
MARKERS = "oDsXP"
MODES = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "forward and backward", "decode": "decoding",
         "graph": "decoding in a CUDA graph"}  # fmt: skip


def provider(code: str) -> str:
    """`Sartor (blocked)` of `sartor:blocked`, `rung 07a` of `rung:07a`."""
    if code in PROVIDERS:
        return PROVIDERS[code].words
    family, _, member = code.partition(":")
    return f"Sartor ({member})" if family == "sartor" else f"{family} {member}".rstrip()


def title(code: str) -> str:
    """The same, with the title of a rung."""
    family, _, member = code.partition(":")
    return f"{member} {catalogue.find(member).title}" if family == "rung" else provider(code)


def look(code: str, seen: list[str]) -> Look:
    """The look of a provider; `seen` are those of the panel, in order."""
    if code in PROVIDERS:
        return PROVIDERS[code]
    variants = [name for name in seen if name not in PROVIDERS]
    i = variants.index(code) if code in variants else 0
    return Look(provider(code), SHADES[i % len(SHADES)], MARKERS[i % len(MARKERS)])


def device(key: str) -> str:
    """`NVIDIA H200` of the folder `h200`."""
    known = {d.key: d.name for d in ARCHITECTURES.values()}
    return "CPU" if key == "cpu" else known.get(key, key.upper())


def mask(text: str) -> str:
    """A workload's mask in words: `causal, 8 documents`."""
    p = Pattern.parse(text)
    words = {
        "causal": bool(p.causal), f"window of {p.window}": p.window,
        f"{p.document} documents": p.document and not p.lognormal,
        f"{p.document} documents of lognormal lengths": p.lognormal,
        f"first {p.prefix} keys": p.prefix, "a bool for each pair": p.tensor,
        "a bias for each pair": p.bias and not p.learned, "a bias with its gradient": p.learned,
        f"softcap {p.softcap:g}": p.softcap, "ALiBi": p.alibi,
        f"NATTEN {p.natten} x {p.natten}": p.natten, f"dilated by {p.dilated}": p.dilated,
        f"windows by head, {p.windows} to {p.windows // 8} keys to a side": p.windows,
        "relative table": p.relative, "caches filled in part": p.cached,
    }  # fmt: skip
    said = ", ".join(word for word, holds in words.items() if holds)
    return (f"{said} (top left)" if p.causal == "top_left" else said) or "full"


def length(n: int) -> str:
    """`16k` of 16384."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)
