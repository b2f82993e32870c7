"""What is compared: one decorated closure per provider, over (batch, heads, seqlen, dim) tensors.

A provider says in words why it cannot run a workload; what only a run can tell (an Unsupported, an out-of-memory) is
caught by the bench and recorded the same way. Nobody falls back to something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sartor
from sartor import kernels
from sartor.device import Device
from sartor.errors import Unsupported
from sartor.lab.ladder import catalogue as ladder
from sartor.lab.measure import faces, flash, flex
from sartor.lab.measure.memory import available_bytes
from sartor.lab.workloads.workload import FORWARD, Inputs, Pattern, Workload

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Make = Callable[[Workload, Inputs], Attend]
Reason = Callable[[Workload, torch.device], str]
OOM = "out of memory"
PATHS = re.compile(r"(/[\w.\-]+)+/")  # a record does not name a machine's folders


@dataclass(frozen=True)
class Provider:
    """`make` builds the closure to measure; `why_not` is a sentence, empty when it can run."""

    name: str
    make: Make
    why_not: Reason


_PROVIDERS: dict[str, Provider] = {}


def provider(name: str, why_not: Reason = lambda w, device: "") -> Callable[[Make], Make]:
    """Register a function (workload, inputs) -> attend under a name."""

    def register(make: Make) -> Make:
        _PROVIDERS[name] = Provider(name, make, why_not)
        return make

    return register


def names() -> list[str]:
    """Every provider, in order of registration; `sartor:<kernel>` and `rung:<number>` besides."""
    return list(_PROVIDERS)


def get(name: str) -> Provider:
    """The provider called `name`; ValueError lists the known ones."""
    if name.startswith("sartor:"):
        kernel = name.removeprefix("sartor:")
        known = ("auto", *kernels.families(), *kernels.FORWARD)
        if kernel not in known:
            raise ValueError(f"provider sartor:KERNEL must name one of {', '.join(known)}, got {name!r}")
        return Provider(name, _sartor(kernel), lambda w, device: "")
    if name.startswith("rung:"):
        rung = ladder.find(name.removeprefix("rung:"))
        return Provider(name, lambda w, x: rung.attend(w), lambda w, device: rung.why_not(w, Device.of(device)))
    if name not in _PROVIDERS:
        raise ValueError(f"provider must be one of {', '.join(names())}, sartor:KERNEL or rung:NUMBER, got {name!r}")
    return _PROVIDERS[name]


def reason(error: Exception) -> str:
    """One line, without the names of a machine's folders."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return OOM
    if isinstance(error, Unsupported):
        return "; ".join(f"{name}: {why[0]}" for name, why in error.reasons.items() if why)
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return PATHS.sub("", f"{type(error).__name__}: {text}")[:200]


def options(w: Workload, x: Inputs) -> dict[str, Any]:
    """The keywords of `sartor.attention` that a workload asks for."""
    p = w.pattern
    found: dict[str, Any] = {"layout": "bhsd"}
    if p.causal:
        found["causal"] = p.causal
    if p.window:
        found["window"] = (p.window - 1, 0)
    if p.softcap:
        found["softcap"] = float(p.softcap)
    if x.slopes is not None:
        found["alibi_slopes"] = x.slopes
    if x.bias is not None:
        found["bias"] = x.bias
    mask = sartor.mods.document(x.ids) if x.ids is not None else None
    if x.lengths is not None:
        mask = sartor.mods.cached(x.lengths, w.seqlen_q, w.seqlen_kv)
    if p.prefix:
        prefix = sartor.mods.prefix(p.prefix)
        mask = prefix if mask is None else mask & prefix
    keep, table, last = x.function(w), x.table, w.seqlen_kv - 1
    if keep is not None:
        mask = sartor.mods.Mask(keep)
    if table is not None:
        found["score"] = sartor.mods.Score(lambda s, b, h, q, kv: s + table[h, q - kv + last])
    if mask is not None or x.keep is not None:
        found["mask"] = x.keep if mask is None else mask
    return found


def _sartor(kernel: str) -> Make:
    """Ours: what `kernel="auto"` takes, or one kernel by name."""

    def make(w: Workload, x: Inputs) -> Attend:
        attend: Any = partial(sartor.attention, kernel=kernel, **options(w, x))
        return cast(Attend, attend)

    return make


provider("sartor")(_sartor("auto"))


@provider("tf32", lambda w, device: "" if w.dtype == "float32" else f"is for float32, got {w.dtype}")
def _tf32(w: Workload, x: Inputs) -> Attend:
    """Ours with `precision="tf32"`: what float32 costs when 10 bits will do."""
    attend: Any = partial(sartor.attention, precision="tf32", **options(w, x))
    return cast(Attend, attend)


@provider("eager", lambda w, device: _too_big(w, device, copies=5))
def _eager(w: Workload, x: Inputs) -> Attend:
    """softmax(q k^T) v in three steps, as a textbook writes it: every score in memory."""
    visible, added, scale, group = x.visible(w), x.added(w), w.dim**-0.5, w.heads_q // w.heads_kv

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        s: Tensor = q @ k.mT * scale  # (b, hq, sq, skv)
        if w.pattern.softcap:
            s = w.pattern.softcap * torch.tanh(s / w.pattern.softcap)
        if added is not None:
            s = s + added
        if visible is not None:
            s = s.masked_fill(~visible, -torch.inf)
        out: Tensor = s.softmax(-1) @ v
        return out

    return attend


def _sdpa(backend: SDPBackend | None) -> Make:
    """PyTorch's scaled_dot_product_attention, held to one backend, or left to choose."""

    def make(w: Workload, x: Inputs) -> Attend:
        one_row = w.seqlen_q == 1 and w.pattern == Pattern(causal="bottom_right")
        is_causal = _sdpa_causal(w) and not one_row
        bias = None if is_causal or one_row else x.visible(w)
        added = x.added(w)
        if added is not None:
            bias = added if bias is None else added.masked_fill(~bias, -torch.inf)
        keywords: dict[str, Any] = {"attn_mask": bias, "is_causal": is_causal}
        if w.heads_q != w.heads_kv:
            keywords["enable_gqa"] = True
        sdpa: Any = F.scaled_dot_product_attention
        attend: Attend = partial(sdpa, **keywords)
        if backend is None:
            return attend

        def held(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return attend(q, k, v)

        return held

    return make


def _sdpa_causal(w: Workload) -> bool:
    """Whether `is_causal` says it: SDPA's is aligned to the top left."""
    square = w.seqlen_q == w.seqlen_kv
    return w.pattern.plain and bool(w.pattern.causal) and (square or w.pattern.causal == "top_left")


def _no_softcap(w: Workload, device: torch.device) -> str:
    return "SDPA has no softcap" if w.pattern.softcap else ""


def _sdpa_gpu(takes_mask: bool, takes_gqa: bool, takes_fp32: bool, max_dim: int = 512) -> Reason:
    def why_not(w: Workload, device: torch.device) -> str:
        masked = not (w.pattern == Pattern() or _sdpa_causal(w) or (w.seqlen_q == 1 and w.pattern.plain))
        reasons = (
            ("needs an NVIDIA GPU", device.type != "cuda"),
            ("takes no float32", not takes_fp32 and w.dtype == "float32"),
            ("takes no attention mask", masked and not takes_mask),
            ("takes no grouped heads", w.heads_q != w.heads_kv and not takes_gqa),
            (f"needs head dim <= {max_dim}, got {w.dim}", max(w.dim, w.dim_v) > max_dim),
        )
        return next((text for text, holds in reasons if holds), _no_softcap(w, device))

    return why_not


def _too_big(w: Workload, device: torch.device, copies: int) -> str:
    """A host has no out-of-memory error to catch: refuse what would not fit. A GPU is left to say so itself."""
    if device.type == "cuda":
        return ""
    need, have = copies * w.score_bytes, available_bytes(device)
    return f"needs {need / 2**30:.0f} GiB for its scores, {have / 2**30:.0f} are free" if need > 0.8 * have else ""


@provider("sdpa-math", lambda w, device: _no_softcap(w, device) or _too_big(w, device, copies=6))
def _sdpa_math(w: Workload, x: Inputs) -> Attend:
    return _sdpa(SDPBackend.MATH)(w, x)


provider("sdpa", _no_softcap)(_sdpa(None))
provider("sdpa-cudnn", _sdpa_gpu(True, True, False))(_sdpa(SDPBackend.CUDNN_ATTENTION))
provider("sdpa-flash", _sdpa_gpu(False, True, False, 256))(_sdpa(SDPBackend.FLASH_ATTENTION))
provider("sdpa-efficient", _sdpa_gpu(True, False, True))(_sdpa(SDPBackend.EFFICIENT_ATTENTION))
for _name, _face in faces.FACES.items():
    provider(_name, _face.why_not)(_face.make)
for _name, _library in flash.LIBRARIES.items():
    provider(_name, _library.why_not)(_library.make)
provider("flex", flex.why_not)(flex.make)


def lse(name: str, w: Workload, x: Inputs) -> Tensor | None:
    """lse (batch, heads_q, seqlen_q) of a float32 forward, from the providers that can be asked for it."""
    if w.mode != "fwd" or w.dtype != "float32":
        return None
    with torch.no_grad():
        if name == "tf32" or name.split(":")[0] == "sartor":
            attend: Any = get(name).make(w, x)
            return cast(Tensor, attend(x.q, x.k, x.v, return_lse=True)[1])
        if name == "sdpa-efficient" and w.pattern == Pattern():
            found = torch.ops.aten._scaled_dot_product_efficient_attention(x.q, x.k, x.v, None, True)
            return cast(Tensor, found[1][:, :, : w.seqlen_q])
    return None


def runner(attend: Attend, w: Workload, x: Inputs) -> Callable[[], Any]:
    """The call to time for a mode. A backward's graph is built here, outside the timed call, and kept."""
    if w.mode in FORWARD:

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(x.q, x.k, x.v)

        return captured(forward) if w.mode == "graph" else forward
    if w.mode == "fwd_bwd":
        return lambda: torch.autograd.grad(attend(x.q, x.k, x.v), x.leaves, x.dout)
    out = attend(x.q, x.k, x.v)
    return lambda: torch.autograd.grad(out, x.leaves, x.dout, retain_graph=True)


def captured(run: Callable[[], Any]) -> Captured:
    """A CUDA graph of some calls, as the layers of a step are. Raises RuntimeError where there is no GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("a CUDA graph needs an NVIDIA GPU")
    aside = torch.cuda.Stream()  # what a first call does is no part of it
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(Captured.calls):
            result = run()
    return Captured(graph, run, result)


@dataclass
class Captured:
    """A CUDA graph, which is replayed by a call."""

    graph: Any
    reads: Any  # what holds tensors, lengths say, that the graph reads
    result: Any  # of the last of its calls
    calls: ClassVar[int] = 8

    def __call__(self) -> Any:
        self.graph.replay()
        return self.result
