"""Problems and suites from command-line flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

import sartor
from sartor.device import ARCHITECTURES, Device
from sartor.lab.measure import providers, rehearsal, roofline
from sartor.lab.measure.fingerprint import GPU_KERNELS
from sartor.lab.measure.rehearsal import Launched
from sartor.lab.workloads import suites
from sartor.lab.workloads.suites import Suite
from sartor.lab.workloads.workload import MODES, Inputs, Workload, dtype_name
from sartor.plan import Explanation
from sartor.problem import Call

EMPTY = Suite("adhoc", "from the command line", "", (), ("grid", "rates"))
MASKS = {"yes": "causal", "no": "full", "both": "full,causal"}


def number(text: str, flag: str) -> int:
    """`4k` is 4096."""
    scale = 1024 if text.lower().endswith("k") else 1
    digits = text[:-1] if scale == 1024 else text
    if not digits.isdecimal() or int(digits) == 0:
        raise ValueError(f"--{flag} must be a positive number such as 512 or 4k, got {text!r}")
    return int(digits) * scale


def pair(text: str, flag: str) -> tuple[int, int]:
    """`192/128` is two numbers, `128` twice the same."""
    parts = [number(part, flag) for part in text.split("/")]
    if len(parts) > 2:
        raise ValueError(f"--{flag} must be one number or two as A/B, got {text!r}")
    return parts[0], parts[-1]


def suite(name: str, quick: bool, device: torch.device, batch: int, flags: dict[str, str]) -> Suite:
    """The suite asked for: by name, the quick one of this machine, or one made of ad-hoc flags."""
    asked = [bool(name), quick, bool(flags) or batch != 0]
    if sum(asked) != 1:
        raise ValueError("say one of --suite NAME, --quick, or ad-hoc flags such as --dim 64 --seqlen 1k")
    if quick:
        name = "quick-gpu" if device.type == "cuda" else "quick-cpu"
    return suites.load(name) if name else _adhoc(device, batch, flags)


def _adhoc(device: torch.device, batch: int, flags: dict[str, str]) -> Suite:
    gpu = device.type == "cuda"
    texts = {"dim": "128" if gpu else "64", "seqlen": "4k" if gpu else "1k", "dtype": "bfloat16" if gpu else "float32"}
    texts |= flags
    if "mask" in flags and "causal" in flags:
        raise ValueError("--causal is short for --mask: give one of them, as in --mask causal+document8")
    masks = texts.get("mask") or MASKS.get(texts.get("causal", "no"))
    if masks is None:
        raise ValueError(f"--causal must be yes, no or both, got {texts['causal']!r}")
    who = ("sartor", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient") if gpu else ("sartor", "sdpa", "eager")
    cases = []
    for dtype in map(dtype_name, texts["dtype"].split(",")):
        for mask in masks.split(","):
            for d, dv in (pair(t, "dim") for t in texts["dim"].split(",")):
                hq, hkv = pair(texts.get("heads") or str(max(1, (2048 if gpu else 256) // d)), "heads")
                for sq, skv in (pair(t, "seqlen") for t in texts["seqlen"].split(",")):
                    b = batch or max(1, (16384 if gpu else 1024) // max(sq, 256))
                    cases.append((Workload(b, hq, hkv, sq, skv, d, dv, dtype, mask), who))
    return replace(EMPTY, baseline=who[1], cases=tuple(cases))


def narrow(chosen: Suite, who: str, modes: str) -> Suite:
    """Only these providers and modes; an ad-hoc suite takes the modes as its own."""
    names = [n for n in who.split(",") if n]
    for n in names:
        providers.get(n)
    wanted = [m for m in modes.split(",") if m]
    for m in wanted:
        if m not in MODES:
            raise ValueError(f"--modes must be among {', '.join(MODES)}, got {m!r}")
    if chosen.name == "adhoc" and wanted:
        cases = tuple((replace(w, mode=m), p) for m in wanted for w, p in chosen.cases)
        chosen = replace(chosen, cases=cases)
    narrowed = chosen.narrowed(names, wanted)
    if not narrowed.cases:
        have = ", ".join(dict.fromkeys(w.mode for w, _ in chosen.cases))
        raise ValueError(f"--modes must be among those of the suite {chosen.name}, {have}, got {modes!r}")
    return narrowed


def problem(batch: int, sizes: tuple[str, str, str], dtype: str, mask: str) -> Workload:
    """One problem, of `heads`, `seqlen` and `dim` in words."""
    (hq, hkv), (sq, skv), (d, dv) = (pair(t, f) for t, f in zip(sizes, ("heads", "seqlen", "dim"), strict=True))
    return Workload(batch, hq, hkv, sq, skv, d, dv, dtype_name(dtype), mask)


def walk(w: Workload, kernel: str, device: str) -> Explanation:
    """The explanation of one problem; tensors without data, so that any size and any architecture will do."""
    x = Inputs.without_data(w)
    found = sartor.explain(x.q, x.k, x.v, kernel=kernel, device=_target(device), **providers.options(w, x))
    words = "" if found.plan is None else roofline.outlook(w, found.plan)
    return replace(found, notes=(*found.notes, f"the forward: {words}")) if words else found


def launches(w: Workload, kernel: str, found: Explanation) -> Iterator[tuple[str, Launched]]:
    """The launches of an explained problem, forward then backward, as (pass, launch); they are compiled for that."""
    for mode, plan in (("fwd", found.plan), ("bwd", found.backward)):
        if found.plan is not None and plan is not None and plan.kernel.name.startswith(GPU_KERNELS):
            one = replace(w, mode=mode)
            x = Inputs.without_data(one)
            call = Call(x.q, x.k, x.v, kernel=kernel, **providers.options(one, x))
            yield from ((mode, step) for step in rehearsal.launches(call, found.plan, found.backward, mode))


def _target(name: str) -> Device:
    if name.startswith("sm"):
        known = {f"sm{arch}": device for arch, device in ARCHITECTURES.items()}
        if name.replace("_", "") not in known:
            raise ValueError(f"--device must be among {', '.join(known)}, got {name!r}")
        return known[name.replace("_", "")]
    if name in ("", "cuda") and torch.cuda.is_available():
        return Device.of(torch.device("cuda"))
    if name not in ("", "cpu"):
        raise ValueError(f"--device must be cpu, cuda where there is a GPU, or smNN, got {name!r}")
    return Device.of(torch.device("cpu"))
