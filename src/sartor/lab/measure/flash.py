"""The flash-attn libraries as providers: version 2, FlashAttention-3 and FlashAttention-4, where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sartor.lab.workloads.workload import Inputs, Pattern, Workload

Tensor = torch.Tensor
ABSENT = "is not installed"  # how the reason of a library that is not here ends


@dataclass(frozen=True)
class Library:
    """Where a library's `flash_attn_func` is, and what it takes. `whole` is its window where there is none."""

    package: str  # as pip knows it
    module: str
    whole: tuple[int | None, int | None] = (-1, -1)
    alibi: bool = False

    def function(self) -> Any:
        """Its `flash_attn_func`. Raises ImportError where it is not installed, or what stands there is Sartor's."""
        found = getattr(importlib.import_module(self.module), "flash_attn_func", None)
        if found is None or found.__module__.partition(".")[0] == "sartor":
            raise ImportError(f"{self.module} has no flash_attn_func of its own")
        return found

    def why_not(self, w: Workload, device: torch.device) -> str:
        """Why it cannot run a workload; what only a run can tell is left to the run."""
        try:
            self.function()
        except ImportError:
            return f"{self.package} {ABSENT}"
        p = w.pattern
        plain = replace(p, causal="", window=0, softcap=0.0, alibi=False) == Pattern()
        reasons = (
            ("needs an NVIDIA GPU", device.type != "cuda"),
            (f"takes float16 and bfloat16, got {w.dtype}", w.dtype not in ("float16", "bfloat16")),
            ("takes no such mask or bias", not plain),
            ("aligns causal masks to the bottom right", p.causal == "top_left" and w.seqlen_q != w.seqlen_kv),
            ("takes no ALiBi", p.alibi and not self.alibi),
        )
        return next((text for text, holds in reasons if holds), "")

    def make(self, w: Workload, x: Inputs) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The call, over (batch, heads, seqlen, dim); the library gets views of that as (batch, seqlen, heads, dim)."""
        function, p = self.function(), w.pattern
        window = (p.window - 1, 0) if p.window else self.whole
        given: dict[str, Any] = {"causal": bool(p.causal), "window_size": window, "softcap": float(p.softcap)}
        if x.slopes is not None:
            given["alibi_slopes"] = x.slopes

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found = function(*(t.transpose(1, 2) for t in (q, k, v)), **given)
            out: Tensor = found[0] if isinstance(found, tuple) else found  # some versions give lse too
            return out.transpose(1, 2)

        return attend


LIBRARIES = {
    "flash-attn": Library("flash-attn", "flash_attn", alibi=True),
    "fa3": Library("FlashAttention-3 (flash_attn_interface)", "flash_attn_interface"),
    "fa4": Library("flash-attn-4 (flash_attn.cute)", "flash_attn.cute", whole=(None, None)),
}
