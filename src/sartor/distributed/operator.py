"""One call on one rank as an operator with a backward, and the same without the dispatcher, for eager calls.

`sartor::context_attention` takes what `sartor::attention` takes, and the names of the method, the group and the
shardings. Compilers see no more of it than its shapes: its transfers are its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sartor import ops
from sartor.distributed.agreement import agree
from sartor.distributed.gather import Gathered
from sartor.distributed.local import Local
from sartor.distributed.merge import Merged
from sartor.distributed.ring import Ring
from sartor.distributed.sharding import Sharding
from sartor.distributed.shift import values
from sartor.distributed.transport import Transport
from sartor.kernels.algebra import sink_gradient
from sartor.kernels.once import once
from sartor.kernels.spec import Operands, Saved
from sartor.mods.core import Mod
from sartor.problem import Call, Problem, wide

Tensor = torch.Tensor
METHODS: dict[str, Any] = {"ring": Ring, "allgather": Gathered}
_PLACE = "str method, str group, str queries, str keys, int first_head, int heads, bool gradient, float timeout"
_LIBRARY = torch.library.Library("sartor", "FRAGMENT")
_LIBRARY.define(f"context_attention({_PLACE}, {ops.SCHEMA}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "context_attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool bias_gradient,"
    f" int[] table_gradients, {_PLACE}, {ops.SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call runs, in the order of the operator's first arguments."""

    method: str  # one of METHODS
    group: str  # its name, "" for this rank alone
    queries: str  # text of a sharding
    keys: str
    first_head: int = 0
    heads: int = 0  # of all heads, how many are here; 0: all
    gradient: bool = False
    timeout: float = 0.0  # seconds, 0 for the group's own

    def arguments(self) -> tuple[Any, ...]:
        """As the operator takes them."""
        return (
            self.method, self.group, self.queries, self.keys, self.first_head, self.heads, self.gradient, self.timeout,
        )  # fmt: skip


OWN = len(Place.__slots__)  # how many arguments come before those of `sartor::attention`


@torch.library.impl(_LIBRARY, "context_attention", "CompositeExplicitAutograd")
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    place, call = Place(*args[:OWN]), ops._call(*args[OWN:])
    with torch.no_grad():
        transport = Transport.named(place.group, place.timeout)
        local = _agreed(place, call, transport)
        merged = Merged(call.q, call.v.shape[3], wide(call.q.dtype))
        METHODS[place.method](local, transport).forward(merged)
        if call.sinks is not None:
            merged.add_sinks(call.sinks)
        return merged.out.to(call.out_dtype or call.q.dtype), merged.lse


@torch.library.impl(_LIBRARY, "context_attention_backward", "CompositeExplicitAutograd")
def _backward(
    dout: Tensor, dlse: Any, out: Tensor, lse: Tensor, bias_gradient: bool, table_gradients: list[int], *args: Any
) -> tuple[Tensor, ...]:
    place, call = Place(*args[:OWN]), ops._call(*args[OWN:])
    call.bias_gradient, call.table_gradients = bias_gradient, tuple(table_gradients)
    with torch.no_grad():
        transport = Transport.named(place.group, place.timeout)
        local = _local(place, call, transport)
        sums, dk, dv = METHODS[place.method](local, transport).backward(Saved(out, lse, dout, dlse))
        none = call.q.new_empty(0)
        dbias = none if sums.dbias is None else sums.dbias.to(call.bias.dtype).view(call.bias.shape)  # type: ignore[union-attr]
        dsinks = none if call.sinks is None else _sink_gradient(call, out, lse, dout, dlse)
        dtables = torch.cat([none.to(sums.dtype), *(t.ravel() for t in sums.dtables)])
        return sums.dq.to(call.q.dtype), dk.to(call.k.dtype), dv.to(call.v.dtype), dbias, dsinks, dtables


def _sink_gradient(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Any) -> Tensor:
    """Of this rank's queries, as every gradient of what all ranks hold."""
    assert call.sinks is not None
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(3).transpose(1, 2)
    delta = delta if dlse is None else delta - dlse
    found: Tensor = sink_gradient(Operands(call.q, call.k, call.v, call.sinks), lse, delta)
    return found.to(call.sinks.dtype)


def _local(place: Place, call: Call, transport: Transport) -> Local:
    queries, keys = Sharding.parse(place.queries), Sharding.parse(place.keys)
    return Local(call, queries, keys, transport.rank, place.first_head, place.heads)


def _agreed(place: Place, call: Call, transport: Transport) -> Local:
    """The call on this rank, once it is known to be right and that of all ranks."""
    local, text = _local(place, call, transport), ""
    error: Exception | None = None
    try:
        key = place, call.key()
        if key not in _CHECKED:
            _check(place, local)
            if len(_CHECKED) >= 4096:
                _CHECKED.clear()
            _CHECKED[key] = _description(place, local)
        text = f"{_CHECKED[key]}, what is seen {local.sight.digest}"
    except (TypeError, ValueError, NotImplementedError, AttributeError) as wrong:
        error = wrong
    agree(transport, text, device=call.q.device, error=error)
    return local


_CHECKED: dict[Any, str] = {}  # what calls of a rank that were found right say of themselves


def _check(place: Place, local: Local) -> None:
    """Raise TypeError or ValueError where the arguments of this rank are wrong."""
    call = local.call
    for name, t, sharding in (("q", call.q, local.queries), ("k", call.k, local.keys), ("v", call.v, local.keys)):
        check_places(name, t, sharding, local.rank)
    Problem.of(Call(
        call.q, call.k, call.v, sinks=call.sinks, alibi_slopes=None if place.heads else call.alibi_slopes,
        causal=call.causal, window=call.window, softmax_scale=call.softmax_scale, softcap=call.softcap,
        out_dtype=call.out_dtype, kernel=call.kernel, precision=call.precision, dropout_p=call.dropout_p,
        dropout_seed=call.dropout_seed,
    ))  # fmt: skip
    if place.gradient and call.kernel.startswith("reference"):
        raise ValueError(
            "kernel must be one whose backward takes the softmax of all keys as given, got 'reference', which computes"
            " it from the keys at hand"
        )
    if call.dropout_seed is not None and call.dropout_seed.numel() > 5:
        raise ValueError(
            "dropout_seed must be an int, or 1 or 5 numbers where a sequence lies on several ranks, got"
            f" {tuple(call.dropout_seed.shape)}"
        )
    (b, sq, hq, _), skv = call.q.shape, local.keys.seqlen
    _check_table("bias", call.bias, (b, hq, sq, skv))
    if isinstance(call.mask, Tensor):
        _check_table("mask", call.mask, (b, hq, sq, skv))
    for name, mod in (("mask", call.mask), ("score", call.score)):
        for i, read in enumerate(mod.values if isinstance(mod, Mod) else ()):
            if isinstance(read, Tensor) and i not in mod.tables:  # type: ignore[union-attr]
                _check_table(f"what {name} reads", read, (b, 0 if place.heads else hq, local.queries.seqlen, skv))


def check_places(name: str, t: Tensor, sharding: Sharding, rank: int) -> None:
    """Raise ValueError unless the tensor is a shard in layout bshd."""
    if sharding.ranks <= rank:
        raise ValueError(f"the sharding must have a shard for rank {rank}, got {sharding.ranks}: {sharding.text[:80]}")
    if t.dim() != 4 or t.shape[1] != sharding.sizes[rank]:
        raise ValueError(
            f"{name} must be (batch, {sharding.sizes[rank]}, heads, dim), shard {rank} of `{sharding.text[:80]}`, got"
            f" {tuple(t.shape)}"
        )


def _check_table(name: str, t: Any, full: tuple[int, ...]) -> None:
    """A size of 0 in `full` is any."""
    shape = () if t is None else (1,) * (4 - t.dim()) + tuple(t.shape)
    if len(shape) > 4 or any(want and have not in (1, want) for have, want in zip(shape, full, strict=False)):
        raise ValueError(
            f"{name} must be broadcastable to (batch, heads, queries, keys) = {full}, got {tuple(t.shape)}"
        )


def _description(place: Place, local: Local) -> str:
    """What must be the same on all ranks, in words."""
    call, (b, _, hq, d) = local.call, local.call.q.shape
    extras = []
    for name in ("bias", "mask", "score", "alibi_slopes", "sinks"):
        found = getattr(call, name)
        if isinstance(found, Tensor):
            extras.append(f"{name} {found.dtype} of {found.dim()} dims")  # rows are as many as the shard has places
        elif found is not None:
            aux = values(found, local.queries.seqlen, local.keys.seqlen)
            read = [tuple(a.shape) if isinstance(a, Tensor) else a for a in aux]
            extras.append(f"{name} {found.text} of {read}")
    return (
        f"{place.method} of q (batch {b}, heads {hq}, dim {d}) {call.q.dtype}, k and v (heads {call.k.shape[2]}, dims"
        f" {call.k.shape[3]} and {call.v.shape[3]}), queries `{place.queries}`, keys `{place.keys}`, causal"
        f" {call.causal}, window {call.window}, scale {call.softmax_scale}, softcap {call.softcap}, kernel"
        f" {call.kernel}, precision {call.precision}, out {call.out_dtype}, gradient {place.gradient},"
        f" dropout {call.dropout_p},"
        f" {'; '.join(extras)}"
    )


@torch.library.register_fake("sartor::context_attention", lib=_LIBRARY)
def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = args[OWN : OWN + 3]
    out_dtype = ops.named(args[OWN:])["out_dtype"]
    b, sq, hq, _ = q.shape
    return q.new_empty((b, sq, hq, v.shape[3]), dtype=out_dtype or q.dtype), q.new_empty(
        (b, hq, sq), dtype=wide(q.dtype)
    )


@torch.library.register_fake("sartor::context_attention_backward", lib=_LIBRARY)
def _backward_fake(
    dout: Tensor, dlse: Any, out: Tensor, lse: Tensor, bias_gradient: bool, table_gradients: list[int], *args: Any
) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = ops._attention_backward_fake(
        dout, dlse, out, lse, bias_gradient, table_gradients, *args[OWN:]
    )
    return found


def run(place: Place, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """What the operator gives for these arguments of `sartor::attention`, past the dispatcher, which takes long over so
    many: for plain tensors, where no compiler or mode wants to see an operator."""
    given = *place.arguments(), *args
    if torch.is_grad_enabled() and place.gradient:
        found: tuple[Tensor, Tensor] = _Eager.apply(*given, *ops.named(args)["mod_tensors"])  # type: ignore[no-untyped-call]
        return found
    return _forward(*given)


class _Eager(torch.autograd.Function):
    """Arguments are those of the operator, and its list of tensors again, for autograd to see them."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        given = inputs[: OWN + len(ops.ARGUMENTS)]
        output = _forward(*given)
        _setup_context(ctx, given, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        def gradients(*args: Any) -> Any:
            sources = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
            return once(lambda: _backward(*args), *sources)

        found = list(ops.gradients_by(gradients, ctx, dout, dlse, ctx.place))
        of_mods, found[_MODS] = found[_MODS], None
        return *found, *of_mods


_MODS = OWN + list(ops.ARGUMENTS).index("mod_tensors")


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ops._setup_context(ctx, inputs[OWN:], output)
    ctx.place = inputs[:OWN]


def _gradients(ctx: Any, dout: Any, dlse: Any) -> Any:
    return ops.gradients_by(torch.ops.sartor.context_attention_backward, ctx, dout, dlse, ctx.place)


torch.library.register_autograd("sartor::context_attention", _gradients, setup_context=_setup_context, lib=_LIBRARY)
torch.library.register_autograd("sartor::context_attention_backward", ops._no_double_backward, lib=_LIBRARY)
