"""PyTorch's fused CPU kernels, forward and backward, where they compute the same thing.

A mask, ALiBi and a bias are added to the scores: block of queries by block of queries, over the keys that the block
reaches, of which a window or documents spare most. The kernels work on blocks of a key head's queries as they are.

What they get wrong is refused or repaired here: with a causal mask they give NaN for scales <= 0, and they multiply
masked values by 0, which a NaN survives. A row whose scores are all NaN comes out 0 where a CPU's vectors are longer
than the row, and in 16 bits one with a score of +inf; lse comes out 0 where all scores are -inf, inf where one is +inf.
An empty problem ends the process (a division by 0). The backward knows no gradient of lse and none of what is added,
and lets what is not finite reach where a mask forbids it: such calls are `blocked_backward`'s, and where a mask is
added and anything comes out not finite, `blocked` computes the forward again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sartor.device import Device
from sartor.features import DETERMINISTIC, DTYPES, GQA, GRADIENTS, MASKS, SCORE, SHARED_LSE, UNALIGNED
from sartor.kernels import blocked
from sartor.kernels.algebra import LARGE, finite, resolved, spoiled, without_nan, working_dtype
from sartor.kernels.kept import DATA, EACH, Kept
from sartor.kernels.spans import ITEM, Frame, frames, hidden
from sartor.kernels.spec import Gradients, KernelSpec, Operands, Plan, Saved
from sartor.mods.masks import causal
from sartor.mods.program import Program
from sartor.mods.tracing import four_dims
from sartor.problem import Problem, Template, filled, wide

Tensor = torch.Tensor
FEATURES = MASKS | DTYPES | {GQA, SCORE, UNALIGNED, DETERMINISTIC, SHARED_LSE}
FULL, CAUSAL = Program(), Program.of(causal(), None)[0]
FORWARD = torch._scaled_dot_product_flash_attention_for_cpu  # the binding takes 2 us less than torch.ops' operator
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
ROWS = 256  # of a block of queries: what is added to its scores stays in the caches
WHOLE = 2**22  # elements of a tensor mask that are added at once: many, as the backward is slower block by block
FEW = 2**7  # rows up to which lse is looked at in Python
KEYS = 512  # up to which the keys are not cut: to find out which are reached takes longer than they do


_KEPT = Kept()


class TorchCpu(KernelSpec):
    """See the module."""

    name = "torch_cpu"
    family = "torch"
    backwards = ("torch_cpu_backward", "blocked_backward")
    features = FEATURES | GRADIENTS  # with which `blocked_backward` goes
    any_layout = True

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """Sentences, one for each thing that PyTorch's kernel lacks or gets wrong."""
        rules = (
            (p.device == "cpu", f"needs tensors on cpu, got {p.device}"),
            (_adds(p.program), f"needs scores changed by a sum only, got {p.score_name}"),
            (not p.empty, f"needs a score at least, got batch {p.batch}, lengths {p.seqlen_q} and {p.seqlen_kv}"),
        )
        return [reason for fits, reason in rules if not fits]

    def run(self, plan: Plan, x: Operands) -> tuple[Tensor, Tensor | None]:
        """out, in the layout of `x`, and lse if it is wanted."""
        given = x.layout == "bhsd"  # as PyTorch takes it
        q, k, v = (x.q, x.k, x.v) if given else (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        found = (_plain if at_once(plan.problem, x.aux) else _in_blocks)(plan, x, q, k, v)
        if found is None:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            out, lse = blocked.SPEC.run(plan, replace(x, q=q, k=k, v=v, layout="bshd"))
            return out.transpose(1, 2) if given else out, lse if x.lse else None
        out, lse = found
        return out if given else out.transpose(1, 2), lse.contiguous() if x.lse else None


def _adds(program: Program) -> bool:
    """Whether the score function adds to the score what does not depend on it: not so in s + s // 1, which rises by 1
    too, and where a table is indexed by s."""
    if program.score is None or program.dscore is None:
        return True
    reads = sum(e.op == "sym" and e.args[0] == "s" for e in program.score.nodes())
    return reads == 1 and program.dscore.text() == "1.0"


def at_once(p: Problem, aux: tuple[Any, ...]) -> bool:
    """Whether PyTorch's kernel computes the call as it is, with nothing added to the scores. Equal programs may read
    other numbers: PyTorch's diagonal is the main one."""
    if p.program == FULL:
        return True
    return p.program == CAUSAL and aux == (0,) and p.seqlen_q == p.seqlen_kv and p.softmax_scale > 0


def _plain(plan: Plan, x: Operands, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """out and lse of a call without a mask or with a causal one; None where they are not to be had."""
    p = plan.problem
    is_causal = p.program == CAUSAL
    repair = is_causal and not finite(v)
    out, lse = FORWARD(q, k, torch.where(v.isfinite(), v, 0) if repair else v, 0.0, is_causal, scale=p.softmax_scale)
    if repair:
        out = spoiled(out, *(_seen(kind, p.group) for kind in (v.isnan(), v == torch.inf, v == -torch.inf)))
    if sound(lse):
        return out, lse
    # 0 is of a row of NaN or -inf scores, or its due; if it is one of those, so is its score of the first key
    first = (q @ k[:, :, :1].repeat_interleave(p.group, 1).transpose(2, 3)) * p.softmax_scale
    if bool(((first[..., 0] == -torch.inf) & (lse == 0)).any()):
        return None
    lost = first.isnan() | lse.isposinf()[..., None]
    return torch.where(lost, torch.nan, out), torch.where(lost[..., 0], torch.nan, lse)


def sound(lse: Tensor, most: float = math.inf) -> bool:
    """Whether none is 0, infinite or beyond `most`, nor NaN where `out` is not NaN: of few rows in Python, which takes
    less time than operations on tensors do."""
    if lse.numel() > FEW:
        return bool((lse / lse).sum().item() > 0) and (most == math.inf or resolved(lse, most))
    bounded = most < math.inf
    for item in lse.tolist():
        for rows in item:  # their product and norm tell in a third of the time, nearly always
            if not 0.0 < abs(math.prod(rows)) < math.inf and (0.0 in rows or math.inf in rows):
                return False
            if bounded and not math.hypot(*rows) <= most and not (-most <= min(rows) and max(rows) <= most):
                return False
    return True


def _seen(marked: Tensor, group: int) -> Tensor:
    """Whether row i of a causal mask attends to a marked value: (b, hq, skv, dv) from (b, hkv, skv, dv)."""
    return (marked.cumsum(2) > 0).repeat_interleave(group, 1)


# ---- with something added to the scores


class Block(NamedTuple):
    """Some queries of some batch items, the keys that they reach, and what is added to their scores."""

    items: slice
    i: slice
    j: slice
    added: Tensor | None  # (1 or batch, 1 or hq, rows, 1 or keys), -inf where the mask hides a key

    def covers(self, p: Problem) -> bool:
        """Whether it is the whole call."""
        rows, keys = self.i.stop - self.i.start, self.j.stop - self.j.start
        return bool(self.items.stop - self.items.start == p.batch and rows == p.seqlen_q and keys == p.seqlen_kv)

    @property
    def queries(self) -> tuple[slice, ...]:
        """Where its rows are in (b, hq, sq, d)."""
        return self.items, slice(None), self.i

    @property
    def keys(self) -> tuple[slice, ...]:
        """Where its keys are in (b, hkv, skv, d)."""
        return self.items, slice(None), self.j


def _in_blocks(plan: Plan, x: Operands, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """out and lse of a call, block by block; None where something is not finite, which a mask may have to stop."""
    p, out, lse = plan.problem, None, None
    for block in blocks(plan, x):
        if block.covers(p):
            return of_block(p, block.added, q, k, v)
        part = of_block(p, block.added, q[block.queries], k[block.keys], v[block.keys])
        if part is None:
            return None
        if out is None or lse is None:
            out = q.new_empty((p.batch, p.seqlen_q, p.heads_q, p.dim_v)).transpose(1, 2)
            lse = q.new_empty((p.batch, p.heads_q, p.seqlen_q), dtype=working_dtype(p))
        out[block.queries], lse[block.queries] = part
    assert out is not None
    assert lse is not None
    return out, lse


def of_block(p: Problem, added: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """out and lse of queries and keys with what is added to their scores; None where something is not finite."""
    if k.shape[2] == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=working_dtype(p))
    out, lse = FORWARD(q, k, v, 0.0, False, attn_mask=added, scale=p.softmax_scale)
    if sound(lse) and without_nan(out):
        return out, lse
    if added is None:
        return None
    dead = (added == -torch.inf).all(3).expand(lse.shape)  # for which lse comes out 0
    out, lse = out.masked_fill(dead[..., None], 0), lse.masked_fill(dead, -torch.inf)
    return (out, lse) if bool(((lse / lse) > 0)[~dead].all()) and finite(out) else None


def is_one_block(p: Problem, is_given: bool) -> bool:
    """Whether one block covers every call of the problem; `is_given` as `given` tells."""
    if is_given:
        return p.program.keep is None or p.batch * p.heads_q * p.seqlen_q * p.seqlen_kv <= WHOLE
    uncut = p.program.rows is None or p.seqlen_kv <= KEYS
    return uncut and p.seqlen_q <= ROWS and p.heads_q * p.seqlen_q * p.seqlen_kv < ITEM


def added_at_once(plan: Plan, template: Template, read: list[Tensor], q: Tensor, is_given: bool) -> Tensor | None:
    """What is added to the scores of a call that one block covers; `read` are the tensors among its aux values."""
    if is_given:
        return _given(plan.problem, read[0], q.dtype)
    found: list[Block] = _KEPT.get(plan, read) or list(blocks(plan, Operands(q, q, q, None, filled(template, read))))
    return found[0].added


def blocks(plan: Plan, x: Operands) -> Iterable[Block]:
    """The blocks of a call, kept for the next one of the plan where they are small and read little data, or none."""
    p = plan.problem
    data = [a for a in x.aux if isinstance(a, Tensor)]
    if p.seqlen_q * p.seqlen_kv > EACH or sum(t.numel() for t in data) > DATA or given(p.program):
        return _blocks(plan, x)
    found: list[Block] | None = _KEPT.get(plan, data)
    if found is None:
        found = list(_blocks(plan, x))
        _KEPT.add(plan, data, found, 1 + sum(0 if block.added is None else block.added.numel() for block in found))
    return found


def given(program: Program) -> bool:
    """Whether what is added is a tensor of the caller's as it is, or says itself who sees whom."""
    score, keep = program.score, program.keep
    if keep is None:
        return score is not None and score.text() == "(s + aux[0])"
    return score is None and keep.op == "aux"


def _blocks(plan: Plan, x: Operands) -> Iterator[Block]:
    p = plan.problem
    everything = slice(0, p.batch), slice(0, p.seqlen_q), slice(0, p.seqlen_kv)
    if len(x.aux) == 1 and isinstance(x.aux[0], Tensor) and given(p.program):
        term = x.aux[0]
        if p.program.keep is None:
            yield Block(*everything, _given(p, term, x.q.dtype))
            return
        rows = p.seqlen_q if term.shape[2] == 1 else max(1, WHOLE * p.seqlen_q // term.numel())
        for first in range(0, p.seqlen_q, rows):
            i = slice(first, min(first + rows, p.seqlen_q))
            some = term if term.shape[2] == 1 or rows >= p.seqlen_q else term[:, :, i]
            yield Block(everything[0], i, everything[2], _given(p, some, x.q.dtype))
        return
    for frame in frames(plan, x):
        for span in frame.spans(ROWS, KEYS):
            keys = slice(span.lo, span.hi) if span.lo < span.hi else slice(0, 0)
            partial = span.lo < span.full_lo or span.full_hi < span.hi
            yield Block(frame.items, span.i, keys, added(frame, span.i, keys, partial))


def _given(p: Problem, term: Tensor, dtype: torch.dtype) -> Tensor:
    """The caller's tensor as what is added to scores."""
    return _dense(term if p.program.keep is None else hidden(term, working_dtype(p)), dtype)


def added(frame: Frame, i: slice, j: slice, partial: bool) -> Tensor | None:
    """What is added to the scores of a block, whose mask is looked at where it is `partial`."""
    term = None
    if frame.p.program.score is not None:
        term = torch.as_tensor(frame.changed(0.0, i, j)[0], dtype=frame.dtype, device=frame.device)
    if partial:
        term = frame.hidden(i, j) if term is None else term + frame.hidden(i, j)
    return None if term is None else _dense(four_dims(term), frame.dtype)


def _dense(term: Tensor, dtype: torch.dtype) -> Tensor:
    """In a dtype that PyTorch adds to scores of inputs of `dtype`, and with rows that it can read."""
    if term.dtype not in (dtype, wide(dtype)):
        term = term.to(wide(dtype))
    return term if term.stride(3) == 1 or term.shape[3] == 1 else term.contiguous()


class TorchCpuBackward(KernelSpec):
    """See the module."""

    name = "torch_cpu_backward"
    family = "torch"
    features = FEATURES

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """As of the forward."""
        return SPEC.why_not(p, dev)

    def notes(self, p: Problem) -> Iterable[str]:
        """What it leaves to another kernel."""
        yield (
            f"where lse has a gradient or is beyond {LARGE:g}, or something is not finite, blocked_backward computes"
            " the gradients"
        )

    def run(self, plan: Plan, x: Operands, saved: Saved) -> Gradients:
        """dq, dk, dv."""
        lse = _usable(saved.lse)
        if lse is not None and (saved.dlse is None or not bool(saved.dlse.any())):  # compiled graphs bring zeros
            dout, q, k, v, out = (t.transpose(1, 2) for t in (saved.dout, x.q, x.k, x.v, saved.out))
            found = _gradients(plan, x, (dout, q, k, v, out, lse))
            if all(map(finite, found)):
                dq, dk, dv = (t.transpose(1, 2) for t in found)
                return Gradients(dq, dk, dv)
        return blocked.BACKWARD_SPEC.run(plan, x, saved)


def _usable(lse: Tensor) -> Tensor | None:
    """lse to recompute weights from, inf for rows without a key, whose weights then are 0; None where it is not one."""
    if resolved(lse):
        return lse
    dead = lse == -torch.inf
    return lse.masked_fill(dead, torch.inf) if dead.any() and resolved(lse.masked_fill(dead, 0)) else None


def _gradients(plan: Plan, x: Operands, data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """dq, dk and dv of dout, q, k, v, out and lse, with heads before rows."""
    p, (dout, q, k, v, out, lse) = plan.problem, data
    if at_once(p, x.aux):
        return BACKWARD(dout, q, k, v, out, lse, 0.0, p.program == CAUSAL, scale=p.softmax_scale)  # type: ignore[no-any-return]
    sums = None
    for block in blocks(plan, x):
        if block.covers(p):
            return BACKWARD(  # type: ignore[no-any-return]
                dout, q, k, v, out, lse, 0.0, False, attn_mask=block.added, scale=p.softmax_scale
            )
        i, j = block.queries, block.keys
        if sums is None:
            sums = torch.zeros_like(q), *(torch.zeros_like(t, dtype=lse.dtype) for t in (k, v))
        if k[j].shape[2] == 0:
            continue
        found = BACKWARD(
            dout[i], q[i], k[j], v[j], out[i], lse[i], 0.0, False, attn_mask=block.added, scale=p.softmax_scale
        )
        for total, place, part in zip(sums, (i, j, j), found, strict=True):
            total[place] += part
    assert sums is not None
    return sums[0], *(t.to(k.dtype) for t in sums[1:])


SPEC = TorchCpu()
BACKWARD_SPEC = TorchCpuBackward()
