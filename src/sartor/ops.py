"""Calls to plans to launches, twice over: eagerly by the cheap route, and as torch.library operators.

Eager calls on plain tensors take `torch.autograd.Function` (or nothing at all without gradients). Everything that
needs to see an operator (torch.compile, FakeTensor, FLOP counting, torch.jit.trace) goes through `torch.ops.sartor`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from sartor.device import Device
from sartor.kernels.once import NO_SECOND, once
from sartor.kernels.spec import Gradients, Operands, Plan, Saved, unviewed
from sartor.mods.core import lookup, tensors_of
from sartor.mods.recent import Recent
from sartor.plan import advice, choose, choose_backward
from sartor.problem import Call, Problem, Template, aux_values, changed, heads_outermost, wide

Tensor = torch.Tensor


class Like(NamedTuple):
    """Of the inputs besides q, k and v: dtypes and shapes, as their gradients have them."""

    bias: tuple[torch.dtype, torch.Size] | None
    sinks: torch.dtype | None
    tables: list[tuple[torch.dtype, torch.Size]]
    wanted: dict[int, int]  # of the tables whose gradients are wanted, by their number among these

    @classmethod
    def of(cls, call: Call | Made, tables: Sequence[Tensor]) -> Like:
        """Those of a call, whose score has these tensors."""
        if isinstance(call, Made):
            return cls(None, None, [], {})
        bias, sinks = call.bias, call.sinks
        return cls(
            None if bias is None else (bias.dtype, bias.shape), None if sinks is None else sinks.dtype,
            [(t.dtype, t.shape) for t in tables], dict(enumerate(call.table_gradients or ())),
        )  # fmt: skip


class Made(NamedTuple):
    """A forward that was made."""

    x: Operands
    out: Tensor
    lse: Tensor


@dataclass(slots=True)
class Prepared:
    """A validated problem with its plans, and its aux values but for the tensors, which are the call's."""

    problem: Problem
    device: Device
    forward: Plan
    template: Template
    any_layout: bool  # whether the forward kernel takes and gives layout bhsd too
    backwards: dict[tuple[bool, bool], Plan] = field(default_factory=dict)  # by what `backward_plan` looks at
    layouts: tuple[Any, ...] = ()  # strides, and offset from 16 bytes, of what autograd saves: for all calls of the key
    like: Like | None = None  # what the gradients of bias, sinks and tables are like: for all calls of the key

    def operands(self, call: Call, lse: bool = True) -> Operands:
        """The data of one call, dense in the last dim, in a layout that the forward kernel takes."""
        q, k, v, layout = call.q, call.k, call.v, call.layout
        if layout != "bshd" and not self.any_layout:
            q, k, v, layout = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), "bshd"
        if self.problem.copies:
            named = zip("qkv", (q, k, v), strict=True)
            q, k, v = (t.contiguous() if name in self.problem.copies else t for name, t in named)
        sinks = call.sinks
        if sinks is not None:  # as lse is: kernels read them by their address
            sinks = sinks.to(wide(q.dtype)).contiguous()
        seed = call.dropout_seed
        seed = seed if seed is None else seed.contiguous()
        return Operands(q, k, v, sinks, aux_values(call, self.template), layout, lse, seed)

    def backward_plan(self, shared_lse: bool = False) -> Plan:
        """Chosen at the first backward; PyTorch may have been told to be deterministic since the forward."""
        repeat = self.problem.deterministic or torch.are_deterministic_algorithms_enabled()
        asked = repeat, shared_lse
        found = self.backwards.get(asked)
        if found is None:
            problem = self.problem
            if asked != (problem.deterministic, problem.shared_lse):
                problem = replace(problem, deterministic=repeat, shared_lse=shared_lse)
            found = self.backwards[asked] = own(choose_backward(problem, self.device))
        return found


def own(plan: Plan) -> Plan:
    """The plan with a cache of its own: what a kernel keeps there fits the strides of one call key only."""
    return changed(plan, cache={})


PREPARED = Recent(2048)  # by call key; a plan keeps some ten kilobytes: launches, frames, tensor maps


def prepare(call: Call) -> Prepared:
    """Validate and plan a call, or find the plan of an equal one."""
    try:
        key = call.key()
        found = PREPARED.get(key)
    except (TypeError, AttributeError, RuntimeError):  # an argument of the wrong type: say so by name
        Problem.of(call)
        raise
    if found is None:
        problem, template = Problem.parse_kind(call, key)
        device = Device.of(call.q.device)
        forward = own(choose(problem, device))
        if sentence := advice(problem, device, forward):
            _warn_once(sentence)
        found = Prepared(problem, device, forward, template, forward.kernel.any_layout)
        PREPARED.add(key, found)
    return found


@cache
def _warn_once(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=5)  # the line that calls `attention`


def run(call: Call, lse: bool) -> tuple[Tensor, Any]:
    """out, in the layout of the call, and lse if it is wanted; differentiable, by the cheap route."""
    prepared = prepare(call)
    if torch.is_grad_enabled() and call.needs_gradient:
        call_, given = call.transposed(), "bshd"
        tables = call.score.tensors if call.table_gradients else ()  # type: ignore[union-attr]
        out, found = _apply(call_.q, call_.k, call_.v, call_.bias, call_.sinks, call_, prepared, *tables)
    else:
        x = prepared.operands(call, lse)
        given = x.layout
        out, found = _forward(prepared, x)
    return (out if given == call.layout else out.transpose(1, 2)), found


def _run(plan: Plan, *data: Any) -> Any:
    """What the plan's kernel makes of its operands, on their device, whatever the current one and autocast are."""
    device = data[0].q.device
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):  # Triton launches on the current one
            return _run(plan, *data)
    if not torch._C._is_any_autocast_enabled() or not torch.is_autocast_enabled(device.type):
        return plan.kernel.run(plan, *data)
    torch.set_autocast_enabled(device.type, False)  # torch.autocast would ask the driver what it supports, at each call
    try:
        return plan.kernel.run(plan, *data)
    finally:
        torch.set_autocast_enabled(device.type, True)


def _forward(prepared: Prepared, x: Operands) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _run(prepared.forward, x)
    return result


def _backward(prepared: Prepared, x: Operands, saved: Saved, shared_lse: bool = False) -> Gradients:
    g: Gradients = _run(prepared.backward_plan(shared_lse), x, saved)
    return g


def _flat(prepared: Prepared, x: Operands, saved: Saved) -> tuple[Any, ...]:
    """The gradients in a row, those of tables last."""
    *g, dtables = _backward(prepared, x, saved)
    return *g, *dtables


def _layout(t: Any) -> tuple[tuple[int, ...], int] | None:
    """Strides, and bytes from a multiple of 16."""
    return None if t is None else (t.stride(), t.data_ptr() & 15)


def _laid_out(t: Any, layout: tuple[tuple[int, ...], int] | None) -> Any:
    """With the strides and on the 16 bytes that it was saved with, which the plan is for: hooks that keep it elsewhere
    may give it others."""
    if t is None or layout is None:
        return t
    strides, offset = layout
    if t.stride() == strides and (offset or not t.data_ptr() & 15):
        return t
    once = t[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    room = torch.empty_strided(once.shape, strides, dtype=t.dtype, device=t.device)
    return room.copy_(once).expand(t.shape)


class _Attention(torch.autograd.Function):
    """The eager route. Everything saved goes through autograd, which checks that it was not changed since."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Any,
        sinks: Any,
        call: Call | Made,
        prepared: Prepared,
        *tables: Tensor,
    ) -> Any:
        if isinstance(call, Made):
            x, out, lse = call
        else:
            x = prepared.operands(call)
            out, lse = _forward(prepared, x)
        out = unviewed(out)
        ctx.set_materialize_grads(False)
        ctx.prepared = prepared
        saved = [x.q, x.k, x.v, x.sinks, x.seed, out, lse, *[a for a in x.aux if isinstance(a, Tensor)]]
        if prepared.like is None:
            prepared.layouts, prepared.like = tuple(map(_layout, saved)), Like.of(call, tables)
        # of a copy autograd does not know what it was made of, which a gradient must name as its sources
        p = prepared.problem
        sources = [*((q, k, v) if p.copies else ()), bias if p.bias_shape else None, sinks, *tables]
        ctx.save_for_backward(*saved, *sources)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        prepared = ctx.prepared
        found, layouts = ctx.saved_tensors, prepared.layouts
        sources = found[len(layouts) :]
        q, k, v, sinks, seed, out, lse, *tensors = map(_laid_out, found, layouts)
        aux = prepared.template
        if tensors:
            left = iter(tensors)
            aux = tuple([next(left) if a is None else a for a in aux])
        saved = Saved(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        x = Operands(q, k, v, sinks, aux, seed=seed)
        dq, dk, dv, dbias, dsinks, *dtables = once(lambda: _flat(prepared, x, saved), dout, dlse, q, k, v, *sources)
        like = prepared.like
        if dbias is not None:
            dbias = None if like.bias is None else dbias.to(like.bias[0]).view(like.bias[1])
        if dsinks is not None:
            dsinks = dsinks.to(like.sinks)
        return dq, dk, dv, dbias, dsinks, None, None, *_of_tables(dtables, like)


# Function.apply without its look for functorch's wrappers, which a call on plain tensors has behind it
_apply = super(torch.autograd.Function, _Attention).apply


def followed(q: Tensor, k: Tensor, v: Tensor, made: Made, prepared: Prepared) -> tuple[Tensor, Tensor]:
    """out and lse of a forward that was made of these, in layout bshd, for autograd to follow."""
    found: tuple[Tensor, Tensor] = _apply(q, k, v, None, None, made, prepared)
    return found


def _of_tables(dtables: Sequence[Tensor], like: Like) -> list[Any]:
    """The gradients of the score's tensors, None of those of which none is wanted."""
    found: list[Any] = [None] * len(like.tables)
    for place, i in like.wanted.items():
        dtype, shape = like.tables[i]
        found[i] = dtables[place].to(dtype).view(shape)
    return found


# ---- the operators

ARGUMENTS = {  # of the operators, in their order
    "q": "Tensor", "k": "Tensor", "v": "Tensor", "bias": "Tensor?", "mask": "Tensor?", "alibi_slopes": "Tensor?",
    "sinks": "Tensor?", "mod_tensors": "Tensor[]", "mask_handle": "str", "score_handle": "str", "causal": "str",
    "window": "int[]?", "softmax_scale": "float?", "softcap": "float", "deterministic": "bool",
    "out_dtype": "ScalarType?", "kernel": "str", "precision": "str", "dropout_p": "float", "dropout_seed": "Tensor?",
}  # fmt: skip
SCHEMA = ", ".join(f"{kind} {name}" for name, kind in ARGUMENTS.items())
SINGLE = [name for name, kind in ARGUMENTS.items() if kind.startswith("Tensor") and kind != "Tensor[]"]  # one tensor
OPTIONS = [name for name, kind in ARGUMENTS.items() if not kind.startswith("Tensor")]
_LIBRARY = torch.library.Library("sartor", "DEF")
_LIBRARY.define(f"attention({SCHEMA}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool bias_gradient, int[] table_gradients,"
    f" {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"  # the last of all tables, side by side
)


def as_operator_arguments(call: Call) -> tuple[Any, ...]:
    """A call in the order of the operator's schema."""
    handles = ["", ""]
    tensors: list[Tensor] = []
    for i, mod in enumerate((call.mask, call.score)):
        if mod is not None and not isinstance(mod, Tensor):
            handles[i], tensors = mod.handle, [*tensors, *mod.tensors]
    mask = None if handles[0] else call.mask
    causal = call.causal if isinstance(call.causal, str) else "bottom_right" if call.causal else ""
    window = None if call.window is None else [-1 if side is None else side for side in call.window]
    made = {"mask": mask, "mod_tensors": tensors, "causal": causal, "window": window}
    made |= {"mask_handle": handles[0], "score_handle": handles[1]}
    return tuple(made[name] if name in made else getattr(call, name) for name in ARGUMENTS)


def named(args: Sequence[Any]) -> dict[str, Any]:
    """The operators' arguments by name."""
    return dict(zip(ARGUMENTS, args, strict=True))


def _call(*args: Any) -> Call:
    given = named(args)
    left = iter(given.pop("mod_tensors"))
    mask, score = (lookup(given.pop(handle), left) for handle in ("mask_handle", "score_handle"))
    window = None if given["window"] is None else tuple(given["window"])
    changed = {"mask": mask or given["mask"], "score": score, "causal": given["causal"] or False, "window": window}
    return Call(**given | changed)


@torch.library.impl(_LIBRARY, "attention", "CompositeExplicitAutograd")
def _attention(*args: Any) -> tuple[Tensor, Tensor]:
    call = _call(*args)
    prepared = prepare(call)
    out, lse = _forward(prepared, prepared.operands(call))
    if heads_outermost(call.q):  # the strides that the fake promises
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse
    return out.contiguous(), lse


@torch.library.impl(_LIBRARY, "attention_backward", "CompositeExplicitAutograd")
def _attention_backward(
    dout: Tensor, dlse: Any, out: Tensor, lse: Tensor, bias_gradient: bool, table_gradients: list[int], *args: Any
) -> tuple[Tensor, ...]:
    call = replace(_call(*args), bias_gradient=bias_gradient, table_gradients=tuple(table_gradients))
    prepared = prepare(call)
    out, lse = (t.clone() if t.data_ptr() & 15 else t for t in (out, lse))  # hooks may have moved them off 16 bytes
    g = _backward(prepared, prepared.operands(call), Saved(out, lse, dout, dlse))
    dbias = g.dq.new_empty(0) if g.dbias is None else g.dbias.to(call.bias.dtype).view(call.bias.shape)  # type: ignore[union-attr]
    dsinks = g.dq.new_empty(0) if g.dsinks is None else g.dsinks.to(call.sinks.dtype)  # type: ignore[union-attr]
    like = (call.q, call.k, call.v)
    dq, dk, dv = (d if d.is_contiguous() else d.contiguous() for d, _ in zip(g[:3], like, strict=True))
    return dq, dk, dv, dbias, dsinks, torch.cat([g.dq.new_empty(0, dtype=lse.dtype), *(t.ravel() for t in g.dtables)])


@torch.library.register_fake("sartor::attention", lib=_LIBRARY)
def _attention_fake(*args: Any) -> tuple[Tensor, Tensor]:
    given = named(args) | {"mod_tensors": [], "mask_handle": "", "score_handle": ""}  # on mods no shape depends
    problem, q, v = Problem.of(_call(*given.values())), given["q"], given["v"]
    b, sq, hq, dv = q.shape[0], q.shape[1], q.shape[2], v.shape[3]
    lse = q.new_empty((b, hq, sq), dtype=wide(q.dtype))
    if heads_outermost(q):
        return q.new_empty((b, hq, sq, dv), dtype=problem.out_dtype).transpose(1, 2), lse
    return q.new_empty((b, sq, hq, dv), dtype=problem.out_dtype), lse


@torch.library.register_fake("sartor::attention_backward", lib=_LIBRARY)
def _attention_backward_fake(
    dout: Tensor, dlse: Any, out: Tensor, lse: Tensor, bias_gradient: bool, table_gradients: list[int], *args: Any
) -> tuple[Tensor, ...]:
    given = named(args)
    wanted = [given["q"], given["k"], given["v"], given["bias"] if bias_gradient else None, given["sinks"]]
    gradients = [dout.new_empty(0) if t is None else t.new_empty(t.shape) for t in wanted]
    tables = given["mod_tensors"][tensors_of(given["mask_handle"]) :]
    return (*gradients, lse.new_empty(sum(tables[i].numel() for i in table_gradients)))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    given = named(inputs)
    ctx.save_for_backward(*map(given.get, SINGLE), *given["mod_tensors"], *output)
    ctx.options, ctx.n_mod_tensors = {name: given[name] for name in OPTIONS}, len(given["mod_tensors"])


def _operator_backward(ctx: Any, dout: Any, dlse: Any) -> Any:
    return gradients_by(torch.ops.sartor.attention_backward, ctx, dout, dlse)


def gradients_by(backward: Any, ctx: Any, dout: Any, dlse: Any, place: tuple[Any, ...] = ()) -> Any:
    """The gradients of an operator's inputs, `place` and then those of `sartor::attention`, by its backward."""
    n = ctx.n_mod_tensors
    *tensors, out, lse = ctx.saved_tensors
    given = dict(zip(SINGLE, tensors, strict=False)) | {"mod_tensors": list(tensors[len(SINGLE) :])} | ctx.options
    args, mod_tensors = [given[name] for name in ARGUMENTS], given["mod_tensors"]
    dout = torch.zeros_like(out) if dout is None else dout
    wanted = named(ctx.needs_input_grad[len(place) : len(place) + len(ARGUMENTS)])["bias"]
    first = tensors_of(given["mask_handle"])
    tables = [i for i, t in enumerate(mod_tensors[first:]) if t.requires_grad]
    g = backward(dout, dlse, out, lse, wanted, tables, *place, *args)
    dbias, dsinks = g[3] if wanted else None, None if given["sinks"] is None else g[4]
    of_mods: list[Any] = [None] * n
    sizes = [mod_tensors[first + i].numel() for i in tables]
    for i, d in zip(tables, g[5].split(sizes) if tables else (), strict=True):
        of_mods[first + i] = d.view(mod_tensors[first + i].shape).to(mod_tensors[first + i].dtype)
    found = dict(zip("qkv", g, strict=False)) | {"bias": dbias, "sinks": dsinks, "mod_tensors": of_mods}
    return *[None] * len(place), *map(found.get, ARGUMENTS)


def _no_double_backward(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError(NO_SECOND)


torch.library.register_autograd("sartor::attention", _operator_backward, setup_context=_setup_context, lib=_LIBRARY)
torch.library.register_autograd("sartor::attention_backward", _no_double_backward, lib=_LIBRARY)


def useful_flops(q: Any, k: Any, v: Any, causal: str) -> int:
    """Of the forward, by operands' shapes: 2 b h sq skv (d + dv), half of it for a square causal mask."""
    (b, sq, hq, d), skv = q, k[1]
    pairs = sq * skv // 2 if causal and sq == skv else sq * skv
    return int(2 * b * hq * pairs * (d + v[3]))


def _flops(args: Sequence[Any]) -> int:
    """Of operands' shapes."""
    given = named(args)
    return useful_flops(given["q"], given["k"], given["v"], given["causal"])


@register_flop_formula(torch.ops.sartor.attention)
def _forward_flops(*args: Any, out_shape: Any = None, **_: Any) -> int:
    """Useful FLOPs of the forward."""
    return _flops(args)


@register_flop_formula(torch.ops.sartor.attention_backward)
def _backward_flops(
    dout: Any, dlse: Any, out: Any, lse: Any, bias_gradient: bool, table_gradients: Any, *args: Any, **_: Any
) -> int:
    """Useful FLOPs of the backward: 2.5 times the forward's."""
    return int(2.5 * _flops(args))
