"""Calls that PyTorch's fused CPU kernel computes at once, with PyTorch's own node of autograd behind the result: their
backward takes no more of the host than that of PyTorch's attention.

What that node gets wrong is seen in its gradients, which then are not finite: a hook of it puts `blocked`'s in their
place. The hook holds no tensor; it asks the node that is being run for what it saved.
"""

from __future__ import annotations

from typing import Any

import torch

from sartor.device import Device
from sartor.kernels import blocked, torch_cpu
from sartor.kernels.algebra import finite, resolved
from sartor.kernels.spec import Operands, Plan, Saved
from sartor.problem import Call, Problem, aux_values

Tensor = torch.Tensor
NO_SECOND = "sartor.attention has no second derivative: expected no gradient of its gradients"
MOST = 2**18  # scores up to which a block that is made for the call is left to the node to keep


class Last(torch.autograd.Function):
    """A gradient that has no gradient, and says so to whoever asks for one by way of what it came from."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Any) -> Tensor:
        """The gradient as it is."""
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raises NotImplementedError."""
        raise NotImplementedError(NO_SECOND)


def attend(plan: Plan, x: Operands) -> Tensor | None:
    """out of a plan of `torch_cpu`, in the layout of `x`, for autograd to follow; None of a call that takes several
    blocks, wants other gradients than those of q, k and v, has to be repaired, or whose saved tensors have hooks."""
    p, added, is_causal = plan.problem, None, False
    if p.bias_shape is not None or p.table_shapes or torch._C._is_any_autocast_enabled():
        return None
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # they may give back other strides
        return None
    if torch_cpu.at_once(p, x):
        is_causal = p.program == torch_cpu.CAUSAL
    elif _may_be_one_block(p, x):
        block = next(iter(torch_cpu.blocks(plan, x)))
        if not block.covers(p):
            return None
        added = block.added
    else:
        return None
    given = x.layout == "bhsd"
    q, k, v = (x.q, x.k, x.v) if given else (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    out, lse = torch_cpu.FORWARD(q, k, v, 0.0, is_causal, attn_mask=added, scale=p.softmax_scale)
    masked = is_causal or added is not None
    if not torch_cpu.sound(lse) or not resolved(lse) or (masked and not finite(out.detach())):
        return None
    node: Any = out.grad_fn
    node.register_hook(_mend_masked if is_causal or p.program.keep is not None else _mend)
    return out if given else out.transpose(1, 2)


def _may_be_one_block(p: Problem, x: Operands) -> bool:
    """Whether nothing but a tensor of the caller's is added, or a block that is small enough to be kept."""
    if p.program.keep is None and len(x.aux) == 1 and isinstance(x.aux[0], Tensor):
        return True
    return p.seqlen_q <= torch_cpu.ROWS and p.batch * p.heads_q * p.seqlen_q * p.seqlen_kv <= MOST


def _mend(gradients: Any, douts: Any) -> Any:
    return _mended(gradients, douts[0], False)


def _mend_masked(gradients: Any, douts: Any) -> Any:
    return _mended(gradients, douts[0], True)


def _mended(gradients: Any, dout: Tensor, masked: bool) -> Any:
    """The node's gradients if they are finite, else those of `blocked`; with create_graph=True such as have none."""
    with torch.no_grad():
        if not all(finite(d) for d in gradients if d is not None):
            found = _by_blocked(dout, masked)
            gradients = tuple(None if d is None else new for d, new in zip(gradients, found, strict=False))
    if not torch.is_grad_enabled():
        return gradients
    node: Any = torch._C._current_autograd_node()
    sources = dout, node._saved_query, node._saved_key, node._saved_value
    return tuple(d if d is None else Last.apply(d.detach().requires_grad_(), *sources) for d in gradients)


def _by_blocked(dout: Tensor, masked: bool) -> tuple[Tensor, ...]:
    """dq, dk and dv of the node that is being run, from what it saved."""
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
    out, lse = blocked.SPEC.run(plan, x)
    found = blocked.BACKWARD_SPEC.run(plan, x, Saved(out, lse, dout.detach().transpose(1, 2), None))
    return tuple(t.transpose(1, 2) for t in found[:3])
