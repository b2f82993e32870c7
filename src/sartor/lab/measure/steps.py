"""Training steps of a GPT-2 sized stack with `sartor.attention` and with SDPA, in turns of one process:

    python -m sartor.lab.measure.steps

What is timed is the wall time of a step, optimizer included, as a training loop sees it: where the host is late, that
counts. Loss curves are held against that of the same model whose attention is computed in a wider dtype. They may
differ from it by twice as much as those of plain PyTorch in the inputs' dtype do, which see the sequences of a batch in
several orders: the mean loss is the same, and its rounding another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
ORDERS = 3  # of the sequences of a batch, in which a training is repeated to see how far rounding alone takes losses


@dataclass(frozen=True)
class Plan:
    """A stack, whose attention is `w` in every layer, and how long it is measured."""

    w: Workload = GPT2
    layers: int = 12
    vocab: int = 50304
    curve: int = 16  # steps of a loss curve
    rounds: int = 8  # host time of a step differs by 10 % from turn to turn
    turn: int = 8  # steps of a turn, after two that do not count
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

    def __init__(self, plan: Plan, name: str, device: torch.device, compiled: bool = False, order: int = 0) -> None:
        torch.manual_seed(0)
        stack = Stack(plan, ATTENTION[name], device)
        gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(stack.parameters(), lr=3e-4, fused=gpu)
        self.model, self.plan, self.device, self.order = stack, plan, device, order
        if compiled:  # what is compiled for one layer serves them all
            for layer in stack.layers:
                layer.compile()
        self.noise = torch.Generator(device).manual_seed(1)

    def step(self) -> Tensor:
        """One step; its loss, on the device."""
        w = self.plan.w
        tokens = repeated(w.batch, w.seqlen_q + 1, self.plan.vocab, self.noise).roll(self.order, 0)
        with torch.autocast(self.device.type, w.torch_dtype, enabled=w.torch_dtype != torch.float32):
            loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return cast(Tensor, loss.detach())


def repeated(batch: int, length: int, vocab: int, noise: torch.Generator) -> Tensor:
    """int64 (batch, length): the second half of a sequence repeats the first, so that attention is of use."""
    half = (batch, (length + 1) // 2)
    first = torch.randint(min(1024, vocab), half, generator=noise, device=noise.device)
    return torch.cat([first, first], 1)[:, :length]


def curve(step: Callable[[], Tensor], steps: int) -> Tensor:
    """float64 (steps,) on the CPU: the losses of one training."""
    return torch.stack([step() for _ in range(steps)]).double().cpu()


def budget(eager: Sequence[Tensor], exact: Tensor, dtype: torch.dtype) -> float:
    """How far from `exact`, of wider attention, results of `dtype` may be: twice as far as the farthest of plain
    PyTorch's, and a rounding."""
    rounding = torch.finfo(dtype).eps * float(exact.abs().max())
    return FORWARD_FACTOR * max(float((one - exact).abs().max()) for one in eager) + rounding


def in_turns(
    runs: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, turn: int, lead: int = 2
) -> dict[str, list[float]]:
    """Milliseconds of a run, one sample a turn of so many runs after `lead` that do not count, by name."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for order in islice(orders(list(runs)), rounds):
        for name in order:
            for _ in range(lead):
                runs[name]()
            synchronize(device)
            start = time.perf_counter()
            for _ in range(turn):
                runs[name]()
            synchronize(device)
            samples[name].append((time.perf_counter() - start) * 1e3 / turn)
    return samples


def time_of(r: Record, samples: Sequence[float], before: float | None, device: torch.device) -> float:
    """Write the median of some samples and the clocks around them into a record; that median."""
    ordered = sorted(samples)
    r.ms = median(samples)
    r.ms_p20, r.ms_p80 = (ordered[round(at * (len(ordered) - 1))] for at in (0.2, 0.8))
    r.clock_mhz_before, r.clock_mhz_after = before, sm_clock_mhz(device)
    return r.ms


def measure(plan: Plan, device: torch.device, run: Run) -> Iterator[Record]:
    """A record of every attention, eager and compiled; loss curves are of the eager ones."""
    curves = {name: curve(Training(plan, name, device).step, plan.curve) for name in ATTENTION}
    exact, eager = curves["wider"], [curves["eager"]]
    eager += [curve(Training(plan, "eager", device, order=i).step, plan.curve) for i in range(1, ORDERS)]
    allowed = budget(eager, exact, torch.float32)
    for compiled in plan.compiled:
        records, trainings = {}, {}
        for name in COUNTED:
            records[name] = Record.of(run, f"{FAMILY}:{name}" + (":compiled" if compiled else ""), plan.w)
            try:
                training = Training(plan, name, device, compiled)
                training.step()
                trainings[name] = training.step
            except Exception as error:  # a fact about it, as in the bench
                records[name].skipped = providers.reason(error)
        before = sm_clock_mhz(device)
        for name, samples in in_turns(trainings, device, plan.rounds, plan.turn).items():
            r, losses = records[name], curves[name]
            ms = time_of(r, samples, before, device)
            r.counters = {"tokens/s": plan.w.batch * plan.w.seqlen_q / ms * 1e3}
            if not compiled:
                r.counters |= {"loss first": float(losses[0]), "loss last": float(losses[-1])}
                r.err_max, r.err_budget = float((losses - exact).abs().max()), allowed
        yield from records.values()


def main(results: Path | None = None, plan: Plan = Plan()) -> None:
    """Measure, and write the records."""
    write(SUITE, partial(measure, plan), results)


if __name__ == "__main__":
    main()
