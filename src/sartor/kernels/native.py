"""Calls that are one call of PyTorch's fused CPU kernel: with what no call of a plan changes found out beforehand, and
with PyTorch's own node of autograd behind the result, whose backward takes no more of the host than that of PyTorch's
attention.

What that node gets wrong is seen in its gradients, which then are not finite: a hook of it puts `blocked`'s in their
place. The hook holds no tensor; it asks the node that is being run for what it saved.
"""

from __future__ import annotations

from typing import Any

import torch

from sartor.device import Device
from sartor.kernels import blocked, torch_cpu
from sartor.kernels.algebra import LARGE, finite, without_nan
from sartor.kernels.once import once
from sartor.kernels.spec import Operands, Plan
from sartor.problem import Call, Problem, Template, aux_values

Tensor = torch.Tensor
MOST = 2**18  # scores up to which a block that is made for the call is left to the node to keep


class Single:
    """A plan of `torch_cpu` whose calls take one call of PyTorch's kernel each."""

    __slots__ = ("given", "is_causal", "kept_by_node", "masked", "plain", "plan", "scale", "template")

    def __init__(self, plan: Plan, template: Template) -> None:
        p = plan.problem
        self.plan, self.template, self.scale = plan, template, p.softmax_scale
        self.plain = torch_cpu.at_once(p, template)  # nothing is added to the scores
        self.is_causal = self.plain and p.program == torch_cpu.CAUSAL
        self.masked = self.is_causal or p.program.keep is not None
        self.given = not self.plain and template == (None,) and torch_cpu.given(p.program)
        as_it_is = self.plain or (self.given and p.program.keep is None)
        self.kept_by_node = as_it_is or p.batch * p.heads_q * p.seqlen_q * p.seqlen_kv <= MOST

    @classmethod
    def of(cls, plan: Plan, template: Template) -> Single | None:
        """None of a plan of another kernel, whose calls need copies, or several blocks."""
        p = plan.problem
        if plan.kernel is not torch_cpu.SPEC or p.copies or p.bias_shape is not None or p.table_shapes:
            return None
        found = cls(plan, template)
        return found if found.plain or torch_cpu.is_one_block(p, found.given) else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, read: list[Tensor]) -> Tensor | None:
        """out of q, k and v in layout bhsd and of the tensors among the aux values, for autograd to follow; None of a
        call that has to be repaired, or whose saved tensors have hooks."""
        follow = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if follow and (not self.kept_by_node or hooked()):
            return None
        if self.plain:
            out, lse = torch_cpu.FORWARD(q, k, v, 0.0, self.is_causal, scale=self.scale)
            if not follow:
                return out if torch_cpu.sound(lse) and not (self.masked and not without_nan(out)) else None
        else:
            added = torch_cpu.added_at_once(self.plan, self.template, read, q, self.given)
            if not follow:
                found = torch_cpu.of_block(self.plan.problem, added, q, k, v)
                return None if found is None else found[0]
            out, lse = torch_cpu.FORWARD(q, k, v, 0.0, False, attn_mask=added, scale=self.scale)
        if not torch_cpu.sound(lse, LARGE) or (self.masked and not without_nan(out)):
            return None
        node: Any = out.grad_fn
        node.register_hook(_mend_masked if self.masked else _mend)
        return out


def hooked() -> bool:
    """Whether saved tensors have hooks, which may give back other strides."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _mend(gradients: Any, douts: Any) -> Any:
    return _mended(gradients, douts[0], False)


def _mend_masked(gradients: Any, douts: Any) -> Any:
    return _mended(gradients, douts[0], True)


def _mended(gradients: Any, dout: Tensor, masked: bool) -> Any:
    """The node's gradients if they are finite, else those of `blocked`; with create_graph=True such as have none."""
    if not torch.is_grad_enabled():
        return gradients if _finite(gradients) else _by_blocked(gradients, dout, masked)
    node: Any = torch._C._current_autograd_node()
    return once(
        lambda: gradients if _finite(gradients) else _by_blocked(gradients, dout, masked),
        dout, node._saved_query, node._saved_key, node._saved_value,
    )  # fmt: skip


def _finite(gradients: Any) -> bool:
    """Whether they are. dq tells of all, where it is wanted: what is not finite in q, k, v, dout or the weights makes
    some dS NaN, or what dS is multiplied by, and dq adds up all of these."""
    dq = gradients[0]
    return finite(dq) if dq is not None else all(finite(d) for d in gradients if d is not None)


def _by_blocked(gradients: Any, dout: Tensor, masked: bool) -> tuple[Tensor | None, ...]:
    """dq, dk and dv of the node that is being run, from what it saved; those that are wanted."""
    node: Any = torch._C._current_autograd_node()
    q, k, v = (t.detach().transpose(1, 2) for t in (node._saved_query, node._saved_key, node._saved_value))
    added, mask = node._saved_attn_mask, None
    if added is not None and masked:
        mask = added != -torch.inf
        added = torch.where(mask, added, 0)
    causal = "top_left" if node._saved_is_causal else False
    call = Call(q, k, v, added, mask, causal=causal, softmax_scale=node._saved_scale, bias_gradient=False)
    p, template = Problem.parse(call)
    plan = Plan(blocked.SPEC, p, Device.of(q.device), None, "")
    x = Operands(q, k, v, None, aux_values(call, template))
    found = blocked.gradients(plan, x, dout.detach().transpose(1, 2))
    return tuple(None if d is None else t.transpose(1, 2) for d, t in zip(gradients, found, strict=False))
