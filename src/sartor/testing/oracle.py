"""What a result is compared to: the same mathematics in float64, and in the inputs' own dtype in plain PyTorch; and
what its sums would be if nothing cancelled in them. Calls are cut into a few heads at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from sartor.api import attention
from sartor.kernels.reference import after_dropout, scores, weights
from sartor.kernels.spec import Operands
from sartor.mods.core import Mask, Score, index_tensors
from sartor.mods.expr import evaluate
from sartor.problem import Call, Problem, aux_values

Tensor = torch.Tensor
SCORES_AT_ONCE = 2**26  # float64 scores that one piece of the oracle may hold: half a GiB a matrix


class Piece(NamedTuple):
    """Some batch items and heads of a call; q, k, v in layout (batch, seqlen, heads, dim)."""

    batch: slice
    heads: slice
    heads_kv: slice
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


def _pieces(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Iterator[Piece]:
    """Those of a call in layout bshd, with their parts of the options."""
    seed = options.get("dropout_seed")
    if isinstance(seed, int):  # that of a piece is several numbers
        number = torch.full((1,), seed - 2**64 * (seed >= 2**63), dtype=torch.int64, device=q.device)
        options = options | {"dropout_seed": number}
    b, sq, hq, _ = q.shape
    skv, hkv = k.shape[1], k.shape[2]
    whole = b * hq * sq * skv <= SCORES_AT_ONCE
    group = hq // hkv
    step = hkv if whole else max(1, SCORES_AT_ONCE // max(1, group * sq * skv))
    for item in [slice(0, b)] if whole else [slice(i, i + 1) for i in range(b)]:
        for first in range(0, hkv, step):
            kv = slice(first, min(first + step, hkv))
            heads = slice(kv.start * group, kv.stop * group)
            part = options if whole else {name: _cut(name, o, item, heads) for name, o in options.items()}
            yield Piece(item, heads, kv, q[item, :, heads], k[item, :, kv], v[item, :, kv], part)


def _cut(name: str, option: Any, batch: slice, heads: slice) -> Any:
    if name == "dropout_seed":
        numbers = torch.cat([option.reshape(-1), option.new_zeros(4 if option.numel() == 1 else 0)])
        return numbers + numbers.new_tensor([0, batch.start, heads.start, *[0] * (len(numbers) - 3)])
    if isinstance(option, Mask):
        aux = _cut_aux(option, batch, heads)
        return Mask(
            lambda b, h, q, kv, aux: option.keep(b + batch.start, h + heads.start, q, kv, aux), aux, name=option.name
        )
    if isinstance(option, Score):
        aux = _cut_aux(option, batch, heads)
        return Score(
            lambda s, b, h, q, kv, aux: option.fn(s, b + batch.start, h + heads.start, q, kv, aux), aux, option.name
        )
    if not isinstance(option, Tensor):
        return option
    if name == "sinks":
        return option[heads]
    if name == "alibi_slopes":
        return option[heads] if option.dim() == 1 else option[batch, heads]
    full = option[(None,) * (4 - option.dim())]
    return full[_along(full, batch, heads)]


def _cut_aux(mod: Mask | Score, batch: slice, heads: slice) -> tuple[Any, ...]:
    """What it reads; tables, which are read by the whole problem's positions, as they are."""
    return tuple(a if i in mod.tables else _cut("aux", a, batch, heads) for i, a in enumerate(mod.values))


def _along(full: Tensor, batch: slice, heads: slice) -> tuple[slice, slice]:
    """The part of a tensor broadcastable to (batch, heads, ...) that a piece sees."""
    return batch if full.shape[0] > 1 else slice(None), heads if full.shape[1] > 1 else slice(None)


def _bshd(layout: str, *tensors: Tensor) -> list[Tensor]:
    """Tensors of a layout in layout bshd, or the other way round."""
    return [t.transpose(1, 2) if layout == "bhsd" else t for t in tensors]


def _double(options: dict[str, Any]) -> dict[str, Any]:
    """The options for float64 inputs: floating tensors upcast, kernel choices dropped."""
    dropped = ("kernel", "out_dtype", "return_lse", "precision", "deterministic")
    floats = ("bias", "sinks", "alibi_slopes")
    kept = {n: o for n, o in options.items() if n not in dropped}
    return {n: o.detach().double() if n in floats and o is not None else o for n, o in kept.items()}


# ---- the oracle


def reference(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = "bshd", **attention_kwargs: Any
) -> tuple[Tensor, Tensor]:
    """out (in `layout`) and lse (batch, heads_q, seqlen_q) of `attention` in float64, a few heads at a time."""
    return in_pieces(_exact, q, k, v, layout, _double(attention_kwargs), torch.float64)


def reference_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None, *, layout: str = "bshd",
    **attention_kwargs: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """float64 gradients `dq`, `dk`, `dv` (in `layout`), and `dbias`, `dsinks` where there are bias and sinks."""
    return _gradients(_exact, q, k, v, dout, dlse, layout, _double(attention_kwargs), torch.float64)


def low_precision(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = "bshd", **attention_kwargs: Any
) -> tuple[Tensor, Tensor]:
    """out and lse of the same mathematics in the inputs' own dtype, in plain PyTorch: products, softmax and all.

    Differentiable by autograd. Like PyTorch's math backend it rounds scores and probabilities to the dtype.
    """
    q, k, v = _bshd(layout, q, k, v)
    dropped = ("kernel", "out_dtype", "return_lse")
    call = Call(q, k, v, **{n: o for n, o in attention_kwargs.items() if n not in dropped})
    p = Problem.of(call)
    aux = aux_values(call)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(p.group, 1) for t in (k, v))
    s = q @ (k * p.softmax_scale).transpose(-1, -2)  # (b, h, sq, skv)
    b, h, i, j = index_tensors(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv, s.device)
    symbols = {"b": b, "h": h, "q": i, "kv": j}
    if p.program.score is not None:
        s = evaluate(p.program.score, symbols | {"s": s}, aux)
    if p.program.keep is not None:
        keep = torch.as_tensor(evaluate(p.program.keep, symbols, aux), device=s.device)
        s = s.masked_fill(~keep.to(torch.bool).expand(s.shape), -torch.inf)
    if call.sinks is not None:
        s = torch.cat([s, call.sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    dead = (s == -torch.inf).all(-1, keepdim=True)
    probabilities = torch.softmax(s.masked_fill(dead, 0), -1).masked_fill(dead, 0).to(v.dtype)[..., : v.shape[2]]
    out = after_dropout(p, Operands(q, k, v, seed=call.dropout_seed), probabilities) @ v
    lse = torch.logsumexp(s if s.dtype == torch.float64 else s.float(), -1) if s.shape[-1] else s.sum(-1) - torch.inf
    return _bshd(layout, out.transpose(1, 2))[0], lse


def low_precision_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None, *, layout: str = "bshd",
    **attention_kwargs: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients of `low_precision`, a few heads at a time; keys as in `reference_gradients`."""
    return _gradients(low_precision, q, k, v, dout, dlse, layout, attention_kwargs, q.dtype)


def _exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = attention(q, k, v, kernel="reference", return_lse=True, **options)
    return out, lse


def in_pieces(
    fn: Any, q: Tensor, k: Tensor, v: Tensor, layout: str, options: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """out and lse of a function, computed in `dtype`, a few heads at a time."""
    q, k, v = _bshd(layout, q.detach(), k.detach(), v.detach())
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.promote_types(dtype, torch.float32))
    for piece in _pieces(q, k, v, options):
        parts = fn(piece.q.to(dtype), piece.k.to(dtype), piece.v.to(dtype), **piece.options)
        out[piece.batch, :, piece.heads], lse[piece.batch, piece.heads] = parts
    return _bshd(layout, out)[0], lse


def _gradients(
    fn: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, layout: str, options: dict[str, Any],
    dtype: torch.dtype,
) -> dict[str, Tensor]:  # fmt: skip
    q, k, v, dout = _bshd(layout, q.detach(), k.detach(), v.detach(), dout.detach())
    found = {f"d{name}": torch.zeros_like(t, dtype=dtype) for name, t in (("q", q), ("k", k), ("v", v))}
    for name in ("bias", "sinks"):
        if options.get(name) is not None:
            found[f"d{name}"] = torch.zeros_like(options[name], dtype=torch.promote_types(options[name].dtype, dtype))
    for piece in _pieces(q, k, v, options):
        leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in zip("qkv", piece[3:6], strict=True)}
        own = dict(piece.options)
        for name in ("bias", "sinks"):
            if own.get(name) is not None:
                own[name] = leaves[name] = own[name].detach().clone().requires_grad_()
        out, lse = fn(leaves["q"], leaves["k"], leaves["v"], **own)
        ends, starts = [out], [dout[piece.batch, :, piece.heads].to(out.dtype)]
        if dlse is not None:
            ends, starts = [*ends, lse], [*starts, dlse[piece.batch, piece.heads].to(lse.dtype)]
        parts = torch.autograd.grad(ends, list(leaves.values()), starts, allow_unused=True)
        for name, part in zip(leaves, parts, strict=True):
            if part is not None:
                _place(found, name, part, piece)
    return {n: _bshd(layout, g)[0] if n in ("dq", "dk", "dv") else g for n, g in found.items()}


def _place(found: dict[str, Tensor], name: str, part: Tensor, piece: Piece) -> None:
    whole = found[f"d{name}"]
    if name == "bias":
        full = whole.view((1,) * (4 - whole.dim()) + tuple(whole.shape))
        full[_along(full, piece.batch, piece.heads)] += part.view(*(4 - part.dim()) * (1,), *part.shape)
    elif name == "sinks":
        whole[piece.heads] += part
    else:
        whole[piece.batch, :, piece.heads if name == "q" else piece.heads_kv] = part


# ---- what a sum would be if nothing cancelled in it


class Magnitudes(NamedTuple):
    """The units of rounding: `terms` holds, element by element, the sum of absolute terms behind each result."""

    terms: dict[str, Tensor]  # out, lse, dq, dk, dv, dbias, dsinks, in the shapes of the results
    s_max: float  # largest absolute score that is attended to


def magnitudes(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, dlse: Tensor | None = None, *, layout: str = "bshd",
    **attention_kwargs: Any,
) -> Magnitudes:  # fmt: skip
    """Magnitudes of out and lse, and with `dout` those of the gradients."""
    q, k, v = _bshd(layout, q.detach(), k.detach(), v.detach())
    dout = None if dout is None else _bshd(layout, dout.detach())[0]
    options = _double(attention_kwargs)
    found = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in (("dq", q), ("dk", k), ("dv", v))}
    found["out"] = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=torch.float64)
    found["lse"] = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float64)
    for name in ("bias", "sinks"):
        if options.get(name) is not None:
            found[f"d{name}"] = torch.zeros_like(options[name])
    s_max = 0.0
    for piece in _pieces(q, k, v, options):
        do = None if dout is None else dout[piece.batch, :, piece.heads]
        s_max = max(s_max, _add_magnitudes(found, piece, do, None if dlse is None else dlse[piece.batch, piece.heads]))
    names = ("out", "lse") if dout is None else tuple(found)
    rows = ("out", "dq", "dk", "dv")
    return Magnitudes({n: _bshd(layout, found[n])[0] if n in rows else found[n] for n in names}, s_max)


def _add_magnitudes(found: dict[str, Tensor], piece: Piece, dout: Tensor | None, dlse: Tensor | None) -> float:
    q, k, v = (t.double().nan_to_num(0, 0, 0) for t in piece[3:6])
    call = Call(q, k, v, **piece.options, bias_gradient=True)
    p = Problem.of(call)
    x = Operands(q, k, v, call.sinks, aux_values(call), seed=call.dropout_seed)  # type: ignore[arg-type]
    q, k, v = q.transpose(1, 2), *(t.transpose(1, 2).repeat_interleave(p.group, 1) for t in (k, v))
    s, keep, slope = scores(p, x, q, k)
    probabilities, lse = weights(x, s, keep)
    used = after_dropout(p, x, probabilities)
    out = used @ v.abs()  # (b, h, sq, dv)
    queries = piece.batch, slice(None), piece.heads
    found["out"][queries] = out.transpose(1, 2)
    found["lse"][piece.batch, piece.heads] = 1 + lse.nan_to_num(0, 0, 0).abs()
    if dout is not None:
        do = dout.transpose(1, 2).double().nan_to_num(0, 0, 0).abs()
        delta = (do * out).sum(-1, keepdim=True) + (0 if dlse is None else dlse.double().abs()[..., None])
        ds = probabilities * (after_dropout(p, x, do @ v.abs().transpose(-1, -2)) + delta)
        steep = 1 + abs(slope) if isinstance(slope, Tensor) else 1  # 1 - tanh^2 cancels: its terms are of size 1
        raw = torch.where(keep, ds * steep, 0) * abs(p.softmax_scale)
        found["dq"][queries] = (raw @ k.abs()).transpose(1, 2)
        keys = piece.batch, slice(None), piece.heads_kv
        for name, t in (("dk", raw.transpose(-1, -2) @ q.abs()), ("dv", used.transpose(-1, -2) @ do)):
            found[name][keys] = t.reshape(p.batch, p.heads_kv, p.group, *t.shape[2:]).sum(2).transpose(1, 2)
        if p.bias_shape is not None:
            _place(found, "bias", ds.sum_to_size(p.bias_shape), piece)
        if call.sinks is not None:
            share = torch.exp(call.sinks.view(1, -1, 1) - lse).nan_to_num(0, 0, 0)
            _place(found, "sinks", (share * (1 + delta[..., 0])).sum((0, 2)), piece)
    seen = s[keep & s.isfinite()]
    return seen.abs().max().item() if seen.numel() else 0.0
