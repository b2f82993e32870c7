"""One rung of the ladder: a file whose header block is its registration, built for a head dim and run on tensors.

A CUDA rung is a `.cu` file with one kernel, `rung`, compiled at run time for the GPU at hand; its header says how to
launch it. A Python rung has a function `run(q, k, v, causal, softmax_scale)`; a Triton one also `build`, by which it is
compiled where there is no GPU. Headers are TOML, in a comment that begins `/* rung`, or in the module's docstring.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

import sartor
from sartor import nvrtc
from sartor.device import Device
from sartor.kernels.cuda.params import Params
from sartor.lab.ladder import header
from sartor.lab.workloads.workload import Inputs, Workload

FOLDER = Path(__file__).parent / "rungs"
PARAMS = Params(
    "rung", q="void*", k="void*", v="void*", out="void*", workspace="void*", heads="int", n="int", scale="float"
)


@dataclass(frozen=True, eq=False)
class Rung:
    """A rung's registration and its text. `arch` is the least compute capability, `before` whom it is compared with."""

    number: str
    title: str
    idea: str
    source: str
    claim: str
    arch: int
    dtypes: list[str]
    dims: list[int]
    causal: bool
    before: str
    expect: str
    path: Path
    code: str  # without the header
    launch: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    search: dict[str, list[int]] = field(default_factory=dict)
    kernel: str = ""  # the family of `sartor.attention` that the rung shows

    @property
    def provider(self) -> str:
        """Its name in records."""
        return f"rung:{self.number}"

    @property
    def is_cuda(self) -> bool:
        """Whether it is a CUDA C++ file."""
        return self.path.suffix == ".cu"

    def source_hash(self) -> str:
        """Hash of its file and of the headers that it includes."""
        digest = hashlib.sha256(self.path.read_bytes())
        texts = nvrtc.headers(self.code, FOLDER) if self.is_cuda else {}
        for name, text in sorted(texts.items()):
            digest.update(name.encode() + b"\0" + text.encode())
        return digest.hexdigest()[:16]

    def plan(self, w: Workload, device: Device) -> str:
        """How it is launched, in one line."""
        if self.kernel:
            return f"{self.path.stem} {self._walk(w, device).plan}"
        if not self.is_cuda:
            return self.path.stem
        size = self.geometry(w)
        grid = "x".join(map(str, size["grid"]))
        return f"{self.path.stem} grid={grid} block={size['block'][0]} shared={size['shared'][0]}"

    def why_not(self, w: Workload, device: Device) -> str:
        """Why it cannot run a workload on a device; empty when it can."""
        have = f"{device.arch // 10}.{device.arch % 10}"
        reasons = (
            ("needs an NVIDIA GPU", device.is_cpu),
            (f"needs compute capability >= {self.arch // 10}.{self.arch % 10}, {device.name} has {have}",
             device.arch < self.arch),
            (f"takes {' and '.join(self.dtypes)}, got {w.dtype}", w.dtype not in self.dtypes),
            (f"takes head dims {', '.join(map(str, self.dims))}, got {w.dim}", w.dim not in self.dims),
            (f"takes queries, keys and values of one shape, got {w}",
             (w.heads_q, w.seqlen_q, w.dim) != (w.heads_kv, w.seqlen_kv, w.dim_v)),
            (f"takes no mask{' but causal' if self.causal else ''}, got {w.mask}",
             w.mask not in (("full", "causal") if self.causal else ("full",))),
            (nvrtc.missing(), self.is_cuda),
        )  # fmt: skip
        found = next((text for text, holds in reasons if holds and text), "")
        return found or self._no_room(w, device) or self._product_why_not(w, device)

    def _no_room(self, w: Workload, device: Device) -> str:
        need, have = self.geometry(w)["shared"][0] if self.is_cuda else 0, device.smem_bytes or 48 << 10
        return f"needs {need} bytes of shared memory a block, {device.name} has {have}" if need > have else ""

    def _product_why_not(self, w: Workload, device: Device) -> str:
        if not self.kernel:
            return ""
        try:
            walk = self._walk(w, device)
        except ValueError as error:  # there is no such kernel
            return str(error)
        return "" if walk.plan else "; ".join(why[0] for why in walk.refused.values() if why)

    def _walk(self, w: Workload, device: Device) -> Any:
        options: dict[str, Any] = {"layout": "bhsd", "causal": bool(w.pattern.causal), "kernel": self.kernel}
        return sartor.explain(*meta(w), device=device, **options)

    def names(self, w: Workload) -> dict[str, int]:
        """What the launch expressions may use: the problem and the parameters of its head dim."""
        own: dict[str, Any] = {k: v for k, v in self.parameters.items() if not isinstance(v, dict)}
        own |= self.parameters.get(str(w.dim), {})
        problem = {"N": w.seqlen_q, "BH": w.batch * w.heads_q, "D": w.dim, "CAUSAL": int(bool(w.pattern.causal))}
        return problem | own

    def geometry(self, w: Workload) -> dict[str, list[int]]:
        """block (threads), grid (up to three numbers), shared (bytes), workspace (floats) of one launch."""
        return {key: header.evaluate(self.launch[key], self.names(w)) for key in header.LAUNCH}

    def binary(self, w: Workload, arch: str) -> nvrtc.Binary:
        """The compiled CUDA file. Raises nvrtc.CompileError with the log."""
        defines = {k: v for k, v in self.names(w).items() if k not in ("N", "BH")}
        if w.dtype != "float32":
            defines["BF16"] = int(w.dtype == "bfloat16")
        return nvrtc.compile(self.code, arch=arch, defines=defines, include=FOLDER, name=self.path.name)

    def attend(self, w: Workload, softmax_scale: float | None = None) -> Callable[..., torch.Tensor]:
        """The function of contiguous (batch, heads, n, dim) tensors that computes a workload on the current GPU."""
        scale = w.dim**-0.5 if softmax_scale is None else softmax_scale
        causal = bool(w.pattern.causal)
        if not self.is_cuda:
            run = module(self.path).run
            return lambda q, k, v: run(q, k, v, causal, scale)
        device = Device.of(torch.device("cuda"))
        size = self.geometry(w)
        start = _kernel(self.binary(w, f"sm_{device.arch}"), size["block"][0], size["shared"][0])
        x, y, z = (*size["grid"], 1, 1)[:3]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(q)
            space = torch.empty(size["workspace"][0], dtype=torch.float32, device=q.device)
            tensors = {"q": q, "k": k, "v": v, "out": out, "workspace": space}
            numbers = {"heads": w.batch * w.heads_q, "n": w.seqlen_q, "scale": scale}
            start.launch((x, y, z), {name: t.data_ptr() for name, t in tensors.items()} | numbers)
            return out

        return attend


@lru_cache(maxsize=256)
def _kernel(binary: nvrtc.Binary, block: int, shared: int) -> nvrtc.Kernel:
    return nvrtc.Kernel(binary, PARAMS, block, shared)


def meta(w: Workload) -> list[torch.Tensor]:
    """q, k, v of a workload without data."""
    x = Inputs.without_data(w)
    return [x.q, x.k, x.v]


@cache
def module(path: Path) -> Any:
    """The module of a Python rung."""
    spec = importlib.util.spec_from_file_location(f"sartor.lab.ladder.rungs.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def parse(path: Path) -> Rung:
    """The rung in a file. ValueError names the file and what is wrong with its header."""
    table, code = header.read(path)
    facts = {key: table[key] for key in header.FACTS}
    launch = {key: table[key] for key in header.LAUNCH if key in table}
    rest = {key: table[key] for key in ("parameters", "search", "kernel") if key in table}
    return Rung(**facts, path=path, code=code, launch=launch, **rest)
