"""What `blocked` computes, of calls with few scores: all scores at once, as a textbook has it, and a backward that
reads the weights instead of computing them again. To walk over tiles takes several times as long.

Nothing is looked at beforehand. What is not finite among the inputs or hidden by the mask, and a row that reaches no
key, leave something in out, dq or dk that is not finite; such calls and gradients are left to `blocked`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sartor.kernels import blocked
from sartor.kernels.algebra import finite, without_nan, working_dtype
from sartor.kernels.kept import DATA, Kept
from sartor.kernels.once import once
from sartor.kernels.spans import Frame, hidden, whole
from sartor.kernels.spec import Operands, Plan, unviewed
from sartor.kernels.straight import number, straight
from sartor.problem import Template, filled

Tensor = torch.Tensor
_KEPT = Kept()


class Made(NamedTuple):
    """A result, and what its backward reads."""

    out: Tensor  # (b, hq, sq, dv)
    weights: Tensor  # (b, hq, sq, skv)
    slope: Any  # the derivative of the score function, broadcastable to the same; a number; None without one


class Small:
    """A plan of `blocked` for few scores."""

    __slots__ = ("changed", "key_heads", "narrow", "plan", "scale", "shape", "sloped", "template", "tile")

    def __init__(self, plan: Plan, template: Template) -> None:
        p, dtype = plan.problem, working_dtype(plan.problem)
        self.plan, self.template, self.scale = plan, template, number(p.softmax_scale, dtype)
        self.narrow, self.key_heads = p.dtype != dtype, p.batch * p.heads_kv
        self.shape = p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv  # of the scores
        self.tile = slice(0, p.seqlen_q), slice(0, p.seqlen_kv)
        self.changed = self.sloped = None  # the score function, without and with its derivative, where it is simple
        if p.program.score is not None and p.program.dscore is not None:
            self.changed = straight((p.program.score,), template, dtype)
            self.sloped = straight((p.program.score, p.program.dscore), template, dtype)

    @classmethod
    def of(cls, plan: Plan, template: Template) -> Small | None:
        """None of a plan of another kernel or for `blocked` by name, which then walks; of one whose calls have many
        scores, or want more than gradients of q, k and v."""
        return cls(plan, template) if plan.kernel is blocked.SPEC and blocked.few(plan.problem) else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, read: list[Tensor]) -> Tensor | None:
        """out of q, k and v in layout bhsd and of the tensors among the aux values, for autograd to follow; None where
        it is not finite."""
        if not torch.is_grad_enabled() or not (q.requires_grad or k.requires_grad or v.requires_grad):
            made = self.made(q, k, v, read, False)
            return None if made is None else made.out
        with torch.no_grad():
            made = self.made(q, k, v, read, True)
        return None if made is None else _apply(q, k, v, self, [made], *read)  # type: ignore[no-any-return]

    def made(self, q: Tensor, k: Tensor, v: Tensor, read: list[Tensor], derivative: bool) -> Made | None:
        """The result with what a backward reads, the score's derivative only if it is wanted; None if not finite. Its
        products are those of `blocked`'s one tile, and so are its bits."""
        p = self.plan.problem
        q, k, v = self.by_key_head(q), self.by_key_head(k), self.by_key_head(v)
        s, slope = torch.bmm(q.mul(self.scale), k.mT).view(self.shape), None
        if p.program.score is not None:
            s, slope = self.changed_scores(s, read, derivative)
        if p.program.keep is not None:
            s = s + self.hidden(read)
        weights = s.softmax(3)
        out = torch.bmm(self.by_key_head(weights), v)
        if not without_nan(out):
            return None
        out = out.view(*self.shape[:3], p.dim_v)
        return Made(out.to(p.dtype) if self.narrow else out, weights, slope)

    def changed_scores(self, s: Tensor, read: list[Tensor], derivative: bool) -> tuple[Tensor, Any]:
        """What the score function makes of them, with its derivative if it is wanted."""
        if derivative and self.sloped is not None:
            return self.sloped(s)  # type: ignore[no-any-return]
        if not derivative and self.changed is not None:
            return self.changed(s)[0], None
        new, slope = self.frame(s, read).changed(s, *self.tile, derivative)
        alike = isinstance(new, torch.Tensor) and new.shape == s.shape and new.dtype == s.dtype
        return new if alike else torch.as_tensor(new, dtype=s.dtype, device=s.device).expand(s.shape), slope

    def by_key_head(self, t: Tensor) -> Tensor:
        """(b, h, s, n) in the working dtype as (b * hkv, h // hkv * s, n), with rows that `blocked` has in memory."""
        if self.narrow:
            t = t.to(working_dtype(self.plan.problem))
        return t.reshape(self.key_heads, -1, t.shape[3])

    def frame(self, s: Tensor, read: list[Tensor]) -> Frame:
        """The call without q, k and v; `s` tells the device."""
        return whole(self.plan, Operands(s, s, s, None, filled(self.template, read)))

    def hidden(self, read: list[Tensor]) -> Tensor:
        """What the mask adds to the scores, kept where little data tells."""
        little = not read or sum(t.numel() for t in read) <= DATA
        term: Tensor | None = _KEPT.get(self.plan, read) if little else None
        if term is None:
            frame = self.frame(self.scale, read)
            term = hidden(frame.keep(*self.tile), frame.dtype)
            if little:
                _KEPT.add(self.plan, read, term, term.numel())
        return term

    def walked(self, q: Tensor, k: Tensor, v: Tensor, read: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
        """The gradients by `blocked`."""
        q, k, v, dout = (t.transpose(1, 2) for t in (q, k, v, dout))
        x = Operands(q, k, v, None, filled(self.template, read))
        return tuple(t.transpose(1, 2) for t in blocked.gradients(self.plan, x, dout))


class _Small(torch.autograd.Function):
    """A result that was made, with its gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, small: Small, made: list[Made], *read: Tensor) -> Tensor:
        (found,) = made
        slope = found.slope if isinstance(found.slope, torch.Tensor) else None
        ctx.small, ctx.number = small, None if slope is not None else found.slope
        out = unviewed(found.out)
        ctx.save_for_backward(q, k, v, out, found.weights, slope, *read)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, weights, slope, *read = ctx.saved_tensors
        rest = [None] * (2 + len(read))
        slope = ctx.number if slope is None else slope
        made = Made(out, weights, slope)
        return *once(lambda: _gradients(ctx.small, (q, k, v), made, read, dout), dout, q, k, v), *rest


# without its look for functorch's wrappers: calls that come here have none
_apply = super(torch.autograd.Function, _Small).apply


def _gradients(
    small: Small, of: tuple[Tensor, ...], made: Made, read: list[Tensor], dout: Tensor
) -> tuple[Tensor, ...]:
    """dq, dk and dv. dq and dk tell whether all is finite: q may be NaN and the scores not, which a function made."""
    q, k, v, out, wide_dout, weights = map(small.by_key_head, (*of, made.out, dout, made.weights))
    ds = torch.bmm(wide_dout, v.transpose(1, 2)).sub_((wide_dout * out).sum(2, keepdim=True)).mul_(weights)
    if made.slope is not None:
        ds = ds.view(made.weights.shape).mul_(made.slope).view(ds.shape)
    ds = ds.mul_(small.scale)
    dq, dk = torch.bmm(ds, k), torch.bmm(ds.transpose(1, 2), q)
    if not finite(dq) or not finite(dk):
        return small.walked(of[0], of[1], of[2], read, dout)
    found = zip((dq, dk, torch.bmm(weights.transpose(1, 2), wide_dout)), of, strict=True)
    return tuple(d.view(t.shape).to(t.dtype) for d, t in found)
