"""Training steps of a GPT-2 sized stack with `sartor.attention` and with SDPA, in turns of one process:

    python -m sartor.lab.measure.steps

What is timed is the wall time of a step, optimizer included, as a training loop sees it: where the host is late, that
counts. Loss curves are held against that of the same model whose attention is computed in a wider dtype. They may
differ from it by twice as much as that of plain PyTorch in the inputs' dtype does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

import sartor
from sartor.lab.measure import providers
from sartor.lab.measure.records import Record, Run, sm_clock_mhz, write
from sartor.lab.measure.timing import orders, synchronize
from sartor.lab.workloads.workload import Workload
from sartor.testing import FORWARD_FACTOR

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SUITE, FAMILY = "steps", "step"
GPT2 = Workload(8, 12, 12, 1024, 1024, 64, 64, "bfloat16", "causal", "fwd_bwd")
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
COUNTED = ("sartor", "sdpa")


@dataclass(frozen=True)
class Plan:
    """A stack, whose attention is `w` in every layer, and how long it is measured."""

    w: Workload = GPT2
    layers: int = 12
    vocab: int = 50304
    curve: int = 30  # steps of a loss curve
    rounds: int = 4
    turn: int = 10  # steps of a turn, after two that do not count
    compiled: tuple[bool, ...] = (False, True)


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three steps in the inputs' dtype, which autocast would change, and the causal mask between them."""
    with torch.autocast(q.device.type, enabled=False):
        s = q @ k.mT * q.shape[-1] ** -0.5
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        out: Tensor = s.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return out


def _wider(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _plain(*(t.to(WIDER[q.dtype]) for t in (q, k, v))).to(q.dtype)


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cast(Tensor, sartor.attention(q, k, v, causal=True, layout="bhsd"))


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTION: dict[str, Attend] = {"sartor": _ours, "sdpa": _sdpa, "eager": _plain, "wider": _wider}


class Layer(nn.Module):
    """Attention and a perceptron, each after a norm, as in GPT-2."""

    def __init__(self, heads: int, dim: int, attend: Attend, device: torch.device) -> None:
        super().__init__()
        size = heads * dim
        where: dict[str, Any] = {"device": device, "dtype": torch.float32}
        self.heads, self.attend = heads, attend
        self.norms = nn.ModuleList(nn.LayerNorm(size, **where) for _ in range(2))
        self.qkv, self.out = nn.Linear(size, 3 * size, **where), nn.Linear(size, size, **where)
        self.up, self.down = nn.Linear(size, 4 * size, **where), nn.Linear(4 * size, size, **where)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, size) both ways."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + cast(Tensor, self.down(F.gelu(self.up(self.norms[1](x)))))


class Stack(nn.Module):
    """Embeddings, layers, and the loss of the next token."""

    def __init__(self, plan: Plan, attend: Attend, device: torch.device) -> None:
        super().__init__()
        w, size = plan.w, plan.w.heads_q * plan.w.dim
        where: dict[str, Any] = {"device": device, "dtype": torch.float32}
        self.tokens, self.places = nn.Embedding(plan.vocab, size, **where), nn.Embedding(w.seqlen_q, size, **where)
        self.layers = nn.ModuleList(Layer(w.heads_q, w.dim, attend, device) for _ in range(plan.layers))
        self.norm, self.head = nn.LayerNorm(size, **where), nn.Linear(size, plan.vocab, bias=False, **where)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of (batch, seqlen + 1) tokens."""
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(given) + self.places.weight[: given.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), wanted.flatten())


class Training:
    """A stack with its optimizer and its stream of tokens; the same start for every attention."""

    def __init__(self, plan: Plan, name: str, device: torch.device, compiled: bool = False) -> None:
        torch.manual_seed(0)
        stack = Stack(plan, ATTENTION[name], device)
        gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(stack.parameters(), lr=3e-4, fused=gpu)
        self.model = stack
        for layer in stack.layers if compiled else ():  # one graph for all, which takes a compiler seconds, not minutes
            layer.compile()
        self.plan, self.device = plan, device
        self.noise = torch.Generator(device).manual_seed(1)

    def step(self) -> Tensor:
        """One step; its loss, on the device. The second half of a sequence repeats the first: attention is of use."""
        w = self.plan.w
        half = (w.batch, w.seqlen_q // 2 + 1)
        first = torch.randint(min(1024, self.plan.vocab), half, generator=self.noise, device=self.device)
        tokens = torch.cat([first, first], 1)[:, : w.seqlen_q + 1]
        with torch.autocast(self.device.type, w.torch_dtype, enabled=w.torch_dtype != torch.float32):
            loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return cast(Tensor, loss.detach())


def curve(plan: Plan, name: str, device: torch.device) -> Tensor:
    """float64 (steps,) on the CPU: the losses of one training."""
    training = Training(plan, name, device)
    return torch.stack([training.step() for _ in range(plan.curve)]).double().cpu()


def in_turns(trainings: Mapping[str, Training], plan: Plan) -> dict[str, list[float]]:
    """Milliseconds of a step, one sample a turn, by name."""
    samples: dict[str, list[float]] = {name: [] for name in trainings}
    for order in islice(orders(list(trainings)), plan.rounds):
        for name in order:
            training = trainings[name]
            for _ in range(2):
                training.step()
            synchronize(training.device)
            start = time.perf_counter()
            for _ in range(plan.turn):
                training.step()
            synchronize(training.device)
            samples[name].append((time.perf_counter() - start) * 1e3 / plan.turn)
    return samples


def measure(plan: Plan, device: torch.device, run: Run) -> Iterator[Record]:
    """A record of every attention, eager and compiled; loss curves are of the eager ones."""
    curves = {name: curve(plan, name, device) for name in ATTENTION}
    exact = curves["wider"]
    rounding = torch.finfo(torch.float32).eps * float(exact.abs().max())
    budget = FORWARD_FACTOR * float((curves["eager"] - exact).abs().max()) + rounding
    for compiled in plan.compiled:
        records, trainings = {}, {}
        for name in COUNTED:
            records[name] = Record.of(run, f"{FAMILY}:{name}" + (":compiled" if compiled else ""), plan.w)
            try:
                trainings[name] = Training(plan, name, device, compiled)
                trainings[name].step()
            except Exception as error:  # a fact about it, as in the bench
                records[name].skipped = providers.reason(error)
                trainings.pop(name, None)
        before = sm_clock_mhz(device)
        for name, samples in in_turns(trainings, plan).items():
            r, ordered = records[name], sorted(samples)
            r.ms = median(samples)
            r.ms_p20, r.ms_p80 = (ordered[round(at * (len(ordered) - 1))] for at in (0.2, 0.8))
            r.clock_mhz_before, r.clock_mhz_after = before, sm_clock_mhz(device)
            losses = curves[name]
            r.counters = {"tokens/s": plan.w.batch * plan.w.seqlen_q / r.ms * 1e3}
            if not compiled:
                r.counters |= {"loss first": float(losses[0]), "loss last": float(losses[-1])}
                r.err_max, r.err_budget = float((losses - exact).abs().max()), budget
        yield from records.values()


def main(results: Path | None = None, plan: Plan = Plan()) -> None:
    """Measure, and write the records."""
    write(SUITE, partial(measure, plan), results)


if __name__ == "__main__":
    main()
