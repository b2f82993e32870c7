"""The public call: attention over a sequence whose tokens lie on several ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from sartor import ops
from sartor.api import Causal, Layout, Window, _autocast, seed_of
from sartor.checks import boolean, needs_operator, real
from sartor.distributed import dtensor, operator
from sartor.distributed.agreement import tell
from sartor.distributed.choose import choose, sizes_of, table_of_queries
from sartor.distributed.operator import Place
from sartor.distributed.sharding import KINDS, Sharding
from sartor.distributed.transport import Transport
from sartor.distributed.ulysses import collect_heads, spread_heads
from sartor.kernels import dropout
from sartor.mods.core import Mask, Score
from sartor.problem import Call

Tensor = torch.Tensor
Method = Literal["auto", "ring", "ulysses", "usp", "allgather"]
Shardings = str | Sharding | tuple[Sharding, Sharding]
METHODS = ("auto", "ring", "ulysses", "usp", "allgather")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a call: those that pass keys on, and those that share the heads of one of their shards."""

    ring: str  # the group's name; "" for one rank alone
    ring_ranks: int
    ring_rank: int
    heads: str
    heads_ranks: int
    heads_rank: int

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.ring_ranks * self.heads_ranks

    @property
    def rank(self) -> int:
        """Which this one is: the ranks that share heads follow one another."""
        return self.ring_rank * self.heads_ranks + self.heads_rank

    def turned(self) -> Ranks:
        """With the ranks of the ring sharing heads instead."""
        return Ranks("", 1, 0, self.ring, self.ring_ranks, self.ring_rank)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: Any = None, group: Any = None, method: Method = "auto",
    layout_of_sequence: Shardings = "contiguous", timeout: float | None = None, layout: Layout = "bshd",
    causal: Causal = False, window: Window = None, softmax_scale: float | None = None, softcap: float = 0.0,
    bias: Tensor | None = None, mask: Tensor | Mask | None = None, score: Score | None = None,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, deterministic: bool = False,
    return_lse: bool = False, out_dtype: torch.dtype | None = None, kernel: str = "auto", precision: str = "ieee",
    dropout_p: float = 0.0, dropout_seed: int | Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`sartor.attention` over a sequence that lies on several ranks: q, k and v are this rank's shards.

    Every rank of the group calls it, with equal options and shards of one sharding. All that speaks of positions
    (causal, window, masks and scores as functions, the tensors they read, ALiBi) means those of the whole sequence.

    Args:
        q, k, v: shards in `layout`; or DTensors, sharded on the sequence over one dim of their mesh at most and on
            others by batch or heads; others are refused in words.
        mesh: a DeviceMesh of one dim; or of two for `method="usp"`: over the first, keys pass from rank to rank,
            over the second, heads are shared.
        group: a ProcessGroup instead; by default, of a mesh nothing being said, all ranks.
        method: "ring" (keys pass from rank to rank while the ones before are computed), "allgather" (all keys on every
            rank), "ulysses" (each rank gets all tokens of some heads), "usp" (ring and Ulysses, each over a dim of the
            mesh), or "auto": the one with the least time by the model in `sartor.distributed.choose`.
        layout_of_sequence: "contiguous", "zigzag" or "striped" (see `Sharding.make`), where all shards have the same
            number of tokens and no padding; or a `Sharding`; or two of them, of queries and of keys.
        timeout: seconds a transfer may take on backends that measure it (gloo); by default the group's own limit.
        bias, mask as a tensor: of this rank's queries and all keys, broadcastable to (batch, heads_q, places of the
            shard of q, seqlen_kv), keys in the order of the sequence. With queries on their own axis, or any axis for
            them where all shards have one token, they are refused by "ulysses" and "usp".
        mask, score: tensors that they read are those of the whole sequence, the same on all ranks.
        sinks: the same on all ranks. Its gradient, that of a bias without queries, and those of tensors that a score
            reads are what this rank's queries and heads add: sum them over the group as those of every parameter that
            all ranks hold.
        dropout_p, dropout_seed: which weights are dropped is a function of positions in the whole sequence, whatever
            the sharding and the method: those that one device drops by the same seed. It is drawn from this rank's own
            generator where none is given: ranks that are seeded alike drop what one device does. A seed tensor has 1
            number or 5.
        Others: as in `sartor.attention`.

    Returns:
        out and lse of this rank's queries, as `sartor.attention` returns them; padding is 0 and -inf.

    Raises:
        TypeError, ValueError, Unsupported: as `sartor.attention`.
        Disagreement (a ValueError): ranks made calls that do not go together, on all ranks.
        RuntimeError: a rank was lost, or did not come within the time limit.
    """
    if dtensor.is_one(q) or dtensor.is_one(k) or dtensor.is_one(v):
        first_item, first_head = dtensor.first(q, layout)
        q, k, v, mesh, layout_of_sequence, wrap = dtensor.unwrapped(q, k, v, mesh, layout_of_sequence, layout)
    else:
        wrap, first_item, first_head = None, 0, 0
    ranks = Ranks("", 1, 0, "", 1, 0) if wrap is not None and mesh is group is None else ranks_of(mesh, group)
    limit = 0.0
    try:
        boolean("return_lse", return_lse)
        limit = seconds(timeout)
        if torch._C._is_any_autocast_enabled():
            q, k, v = _autocast(q, k, v)
        call = Call(
            q, k, v, bias, mask, score, alibi_slopes, sinks, causal, window, softmax_scale, softcap, deterministic,
            out_dtype, kernel, precision, layout, dropout_p=dropout_p,
        ).bshd()  # fmt: skip
        call.dropout_seed = seed_of(call, dropout_seed)
        if call.dropout_seed is not None and (first_item or first_head):
            call.dropout_seed = dropout.part(call.dropout_seed, first_head=first_head, first_item=first_item)
        known_method(method, ranks)
        texts = shardings_of(layout_of_sequence, ranks.ranks, call)
        name = choose(call, ranks, *texts) if method == "auto" else method
        if name == "ulysses":
            ranks = ranks.turned()
        if ranks.heads_ranks > 1:
            _refuse_rows(call, texts[0])
    except Exception as error:
        _tell(ranks, (q, k, v), error, limit)
        raise
    out, lse = _run(call, name, ranks, texts, limit)
    out = out.transpose(1, 2) if layout == "bhsd" else out
    if wrap is not None:
        out, lse = wrap(out, lse)
    return (out, lse) if return_lse else out


def seconds(timeout: Any) -> float:
    """A time limit, 0 for the group's own."""
    if timeout is None:
        return 0.0
    limit = real("timeout", timeout)
    if not 0 < limit < math.inf:
        raise ValueError(f"timeout must be a number of seconds > 0, got {timeout!r}")
    return limit


def ranks_of(mesh: Any, group: Any) -> Ranks:
    """The ranks of a mesh or group. Raises TypeError or ValueError where neither is one that can be taken."""
    if mesh is not None and group is not None:
        raise ValueError("mesh and group must not be given both, expected one of them")
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("torch.distributed must be initialised: expected init_process_group before this call")
    if mesh is None:
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group must be a ProcessGroup that this rank is in, got {type(group).__name__}")
        return Ranks(group.group_name, group.size(), group.rank(), "", 1, 0)
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh must have 1 or 2 dims, got {mesh.ndim}: take a part of it by the names of its dims")
    ring = mesh.get_group(0)
    if mesh.ndim == 1:
        return Ranks(ring.group_name, ring.size(), ring.rank(), "", 1, 0)
    heads = mesh.get_group(1)
    return Ranks(ring.group_name, ring.size(), ring.rank(), heads.group_name, heads.size(), heads.rank())


def shardings_of(given: Any, ranks: int, call: Call) -> tuple[str, str]:
    """The texts of the shardings of queries and keys."""
    if isinstance(given, str):
        if given not in KINDS:
            raise ValueError(f"layout_of_sequence must be one of {KINDS} or a Sharding, got {given!r}")
        lengths = call.q.shape[1], call.k.shape[1]
        return tuple(f"{given} {n * ranks} over {ranks} by 1 padded" for n in lengths)  # type: ignore[return-value]
    pair = given if isinstance(given, tuple) and len(given) == 2 else (given, given)
    if not all(isinstance(one, Sharding) for one in pair):
        raise TypeError(f"layout_of_sequence must be a name, a Sharding or two of them, got {type(given).__name__}")
    for one in pair:
        if one.ranks != ranks:
            raise ValueError(f"layout_of_sequence must have {ranks} shards, one for each rank, got {one.ranks}")
    return pair[0].text, pair[1].text


def known_method(method: Any, ranks: Ranks) -> None:
    """One of METHODS, which goes with the mesh."""
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    dims = 2 if ranks.heads else 1
    if method != "auto" and (dims == 2) != (method == "usp"):
        raise ValueError(f"method 'usp' and a mesh of 2 dims go together, got {method!r} and {dims} dims")


def _refuse_rows(call: Call, queries: str) -> None:
    """Raise ValueError for a table of queries, of which a rank that shares heads needs those of others."""
    name = table_of_queries(call, set(sizes_of(queries)) == {1})  # of others, one rank at least knows
    if name:
        raise ValueError(
            f"{name} must not depend on queries with method 'ulysses' or 'usp', which need those of other ranks, nor"
            " have an axis for them where all shards have one token: expected method 'ring' or 'allgather', a tensor of"
            f" keys alone, or a function, got {tuple(getattr(call, name).shape)}"
        )


def _tell(ranks: Ranks, given: tuple[Any, ...], error: Exception, timeout: float) -> None:
    """Make the call an error on all ranks, which are about to ask whether they agree: first those that share heads."""
    devices = [t.device for t in given if isinstance(t, Tensor)]
    if devices and not torch.compiler.is_compiling():
        for group in (ranks.heads, ranks.ring):
            tell(Transport.named(group, timeout), error, devices[0])


def _run(call: Call, method: str, ranks: Ranks, texts: tuple[str, str], timeout: float) -> tuple[Tensor, Tensor]:
    """out in layout bshd, and lse."""
    gradient = torch.is_grad_enabled() and call.needs_gradient
    inner = method if method in operator.METHODS else "ring"
    if ranks.heads_ranks == 1:
        return _operate(call, Place(inner, ranks.ring, *texts, gradient=gradient, timeout=timeout))
    return _shared(call, inner, ranks, texts, gradient, timeout)


def _operate(call: Call, place: Place) -> tuple[Tensor, Tensor]:
    args = ops.as_operator_arguments(call)
    if not needs_operator(call.q):
        return operator.run(place, args)
    out, lse = torch.ops.sartor.context_attention(*place.arguments(), *args)
    return out, lse


def _shared(
    call: Call, method: str, ranks: Ranks, texts: tuple[str, str], gradient: bool, timeout: float
) -> tuple[Tensor, Tensor]:
    """The heads of each rank of a group over the tokens of all of them, and back."""
    first, shares = ranks.ring_rank * ranks.heads_ranks, ranks.heads_ranks
    try:
        given = call.q, _repeated(call.k, call, shares), _repeated(call.v, call, shares)
        q, k, v = spread_heads(given, ranks.heads, (texts[0], texts[1], texts[1]), first, timeout)
    except ValueError as error:  # which all that share heads know of
        _tell(replace(ranks, heads=""), (call.q,), error, timeout)
        raise
    heads = q.shape[2]
    own = slice(ranks.heads_rank * heads, (ranks.heads_rank + 1) * heads)
    inner = replace(
        call, q=q, k=k, v=v, sinks=None if call.sinks is None else call.sinks[own], bias=_heads(call.bias, own),
        mask=_heads(call.mask, own) if isinstance(call.mask, Tensor) else call.mask,
    )  # fmt: skip
    queries, keys = (f"{text}; joined by {shares}" for text in texts)
    out, lse = _operate(inner, Place(method, ranks.ring, queries, keys, own.start, heads, gradient, timeout))
    made, own_texts = (out, lse.transpose(1, 2)[..., None]), (texts[0], texts[0])
    out, lse = collect_heads(made, ranks.heads, own_texts, first, (0.0, -math.inf), timeout)
    return out, lse[..., 0].transpose(1, 2)


def _repeated(t: Tensor, call: Call, shares: int) -> Tensor:
    """k or v, with heads repeated where ranks would have to share one."""
    heads_q, heads_kv = call.q.shape[2], call.k.shape[2]
    if heads_q % shares == 0 and heads_kv and heads_q % heads_kv == 0:
        group_size = heads_q // heads_kv
        each = group_size // math.gcd(heads_q // shares, group_size)
        t = t[:, :, :, None].expand(*t.shape[:3], each, t.shape[3]).flatten(2, 3)
    return t


def _heads(t: Tensor | None, own: slice) -> Tensor | None:
    """Some heads of a table broadcastable to (batch, heads, queries, keys)."""
    return t if t is None or t.dim() < 3 or t.shape[-3] == 1 else t[..., own, :, :]
