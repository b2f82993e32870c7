"""PyTorch's fused CPU kernels, forward and backward, where they compute the same thing.

What it gets wrong is refused or repaired here: with a causal mask it gives NaN for scales <= 0, and it multiplies
masked values by 0, which a NaN survives. A row whose scores are all NaN comes out 0 where a CPU's vectors are longer
than the row, and in 16 bits one with a score of +inf; lse comes out 0 where all scores are -inf, inf where one is +inf.
An empty problem ends the process (a division by 0). The backward knows no gradient of lse, and lets what is not finite
reach where a mask forbids it: such calls are `blocked_backward`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from sartor.device import Device
from sartor.kernels import blocked
from sartor.kernels.algebra import finite, spoiled
from sartor.kernels.spec import Gradients, Operands, Plan, Saved, Tile
from sartor.mods.core import Program
from sartor.mods.masks import causal
from sartor.problem import Problem, name_of

FULL, CAUSAL = Program(), Program.of(causal(), None)[0]


class TorchCpu:
    """See the module."""

    name = "torch_cpu"
    family = "torch"
    backwards: tuple[str, ...] = ("torch_cpu_backward", "blocked_backward")
    any_layout = True

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """Sentences, one for each thing that PyTorch's kernel lacks or gets wrong."""
        lone = p.program in (FULL, CAUSAL)
        square = p.seqlen_q == p.seqlen_kv
        rules = (
            (p.device == "cpu", f"needs tensors on cpu, got {p.device}"),
            (p.program.score is None, f"needs plain scores, got {p.score_name}"),
            (p.program.score is not None or lone, f"needs no mask or a causal one, got {p.mask_name}"),
            (not p.sinks, "needs no sinks, got sinks"),
            (p.dim == p.dim_v, f"needs equal head dims of q and v, got {p.dim} and {p.dim_v}"),
            (not p.empty, f"needs a score at least, got batch {p.batch}, lengths {p.seqlen_q} and {p.seqlen_kv}"),
            (p.out_dtype == p.dtype, f"needs out_dtype {name_of(p.dtype)}, got {name_of(p.out_dtype)}"),
            (p.program != CAUSAL or square, f"needs equal lengths when causal, got {p.seqlen_q} and {p.seqlen_kv}"),
            (
                p.program != CAUSAL or p.softmax_scale > 0,
                f"needs softmax_scale > 0 when causal, got {p.softmax_scale}: PyTorch gives NaN there",
            ),
        )
        return [reason for fits, reason in rules if not fits]

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """Its tiles are PyTorch's own."""
        return ()

    def run(self, plan: Plan, x: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out, in the layout of `x`, and lse if it is wanted."""
        p, given = plan.problem, x.layout == "bhsd"  # as PyTorch takes it
        is_causal = p.program == CAUSAL
        q, k, v = (x.q, x.k, x.v) if given else (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        repair = is_causal and not finite(v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, torch.where(v.isfinite(), v, 0) if repair else v, 0.0, is_causal, scale=p.softmax_scale
        )
        if repair:
            out = spoiled(out, *(_seen(kind, p.group) for kind in (v.isnan(), v == torch.inf, v == -torch.inf)))
        if not (lse / lse).sum().item() > 0:  # some are 0, infinite or NaN
            # 0 is of a row of NaN or -inf scores, or its due; if it is one of those, so is its score of the first key
            first = (q @ k[:, :, :1].repeat_interleave(p.group, 1).transpose(2, 3)) * p.softmax_scale
            if bool(((first[..., 0] == -torch.inf) & (lse == 0)).any()):
                q, k, v = (t.transpose(1, 2) for t in (q, k, v))
                out, lse = blocked.SPEC.run(plan, replace(x, q=q, k=k, v=v, layout="bshd"))
                return out.transpose(1, 2) if given else out, lse if x.lse else None
            lost = first.isnan() | lse.isposinf()[..., None]
            out, lse = torch.where(lost, torch.nan, out), torch.where(lost[..., 0], torch.nan, lse)
        return out if given else out.transpose(1, 2), lse.contiguous() if x.lse else None


class TorchCpuBackward:
    """See the module."""

    name = "torch_cpu_backward"
    family = "torch"

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """As of the forward."""
        return SPEC.why_not(p, dev)

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """Its tiles are PyTorch's own."""
        return ()

    def notes(self, p: Problem) -> Iterable[str]:
        """What it leaves to another kernel."""
        yield "where lse has a gradient, or something is not finite, blocked_backward computes the gradients"

    def run(self, plan: Plan, x: Operands, saved: Saved) -> Gradients:
        """dq, dk, dv."""
        p = plan.problem
        plain = saved.dlse is None or not bool(saved.dlse.any())  # compiled graphs bring zeros
        if plain and finite(saved.lse):
            dout, q, k, v, out = (t.transpose(1, 2) for t in (saved.dout, x.q, x.k, x.v, saved.out))
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, saved.lse, 0.0, p.program == CAUSAL, scale=p.softmax_scale
            )
            if all(map(finite, found)):
                return Gradients(*(t.transpose(1, 2) for t in found))
        return blocked.BACKWARD_SPEC.run(plan, x, saved)


def _seen(marked: torch.Tensor, group: int) -> torch.Tensor:
    """Whether row i of a causal mask attends to a marked value: (b, hq, skv, dv) from (b, hkv, skv, dv)."""
    return (marked.cumsum(2) > 0).repeat_interleave(group, 1)


SPEC = TorchCpu()
BACKWARD_SPEC = TorchCpuBackward()
