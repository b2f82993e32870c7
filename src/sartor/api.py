"""The public functions: attention, explain, merge_states."""

from __future__ import annotations

from inspect import signature
from typing import Any, Literal, NoReturn

import torch
from torch.autograd import forward_ad

from sartor import compiled, front, ops
from sartor.checks import (
    LAYOUTS,
    boolean,
    floating,
    is_integer,
    known_layout,
    needs_operator,
    seed,
    unexpected,
)  # fmt: skip
from sartor.device import Device
from sartor.mods.core import Mask, Score
from sartor.plan import Explanation
from sartor.plan import explain as explain_problem
from sartor.problem import Call, Problem

Layout = Literal["bshd", "bhsd"]
Causal = bool | Literal["bottom_right", "top_left"]
Window = tuple[int | None, int | None] | None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout = "bshd",
    causal: Causal = False,
    window: Window = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | Mask | None = None,
    score: Score | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    kernel: str = "auto",
    precision: str = "ieee",
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    **unknown: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(q k^T) v, in linear memory, with gradients for q, k, v, bias and sinks.

    The algorithm is FlashAttention's tiling with an online softmax (Dao et al. 2022, algorithm 1; Dao 2023, section
    3.1; Milakov and Gimelshein 2018), and its recomputing backward (Dao 2023, algorithm 2).

    Args:
        q: (batch, seqlen_q, heads_q, dim), or (batch, heads_q, seqlen_q, dim) with `layout="bhsd"`; float16, bfloat16,
            float32 or float64. Any strides; what is not dense in the last dim, or has rows 2^24 elements apart, is
            copied.
        k: (batch, seqlen_kv, heads_kv, dim). heads_q is a multiple of heads_kv: query head h uses key head
            h // (heads_q // heads_kv).
        v: (batch, seqlen_kv, heads_kv, dim_v); dim and dim_v are 1 to 512.
        layout: "bshd" or "bhsd"; that of the result too.
        causal: True or "bottom_right" lets query i see keys up to i + seqlen_kv - seqlen_q; "top_left" up to i.
        window: (left, right), query i sees keys i - left to i + right, both included, aligned as `causal` is; None or
            -1 is unbounded.
        softmax_scale: factor of q k^T; 1 / sqrt(dim) by default. May be 0 or negative.
        softcap: with c > 0, scores become c * tanh(score / c).
        bias: float tensor broadcastable to (batch, heads_q, seqlen_q, seqlen_kv), added to the scores; float64 is added
            as float32 where inputs are not float64. Differentiable, at the price of one more kernel and of its size in
            float32, which are spared where it requires no gradient.
        mask: bool tensor broadcastable to the same, True = attend; or a `sartor.mods.Mask`.
        score: a `sartor.mods.Score`, a function of the scaled score and its position, after `softcap` and before
            `alibi_slopes` and `bias`; its derivative is taken. The tensors it reads are differentiable.
        alibi_slopes: (heads_q,) or (batch, heads_q), float32 (float64 is read so beside float64 inputs only): scores
            lose slope * |i + seqlen_kv - seqlen_q - j|. Not differentiable: refused where autograd would follow it.
        sinks: (heads_q,): one more logit in each row's softmax denominator; differentiable.
        deterministic: bit-equal gradients from run to run, which torch.use_deterministic_algorithms asks for too.
            Without it two may not be, on Hopper of 16-bit floats: dq at head dims up to 128, and the gradient of a bias
            of queries and keys that is broadcast over items or heads. Either also keeps the keys of few queries whole,
            whose number of parts may change with the batch, and bits with it.
        return_lse: return (out, lse) with lse the natural-log logsumexp of the scores, (batch, heads_q, seqlen_q),
            float32 (float64 for float64 inputs), differentiable.
        out_dtype: None for the inputs' dtype, or torch.float32 for unrounded partial results.
        kernel: "auto", or a family ("hopper", "fp32", "triton", "torch", ...) or one of its kernels ("fp32_forward")
            by name, which then runs or raises.
        precision: for float32 inputs, "ieee" (float32 accuracy, by pairs of float16; docs/numerics.md)
            or "tf32" (10 bits of mantissa; on Hopper slower than that; a CPU computes in float32 all the same).
        dropout_p: the probability, at least 0 and below 1, with which a weight of the softmax is 0 where it multiplies
            v, in steps of 2^-16; the others are scaled so that their mean stays. lse is as without.
        dropout_seed: what the mask is a function of, besides batch item, head, query and key: the same on every device,
            by every kernel. An int of 64 bits, or int64 of one number on the device of q. None draws one from PyTorch's
            generator of that device, on the device, as torch.manual_seed, CUDA graphs and checkpointing want it. Five
            numbers make this call a part of a larger problem: the seed, and its batch item, head, query and key that
            are the first ones here, the last two counted in sixteens. Seven do so with steps between queries and
            between keys: the seed, the first batch item and head, the first query and its step, the first key and its.

    Returns:
        out (batch, seqlen_q, heads_q, dim_v) in `layout`. A row that attends to no key is 0, its lse -inf (its sink's
        value where there are sinks), its gradients 0. Keys that a row does not attend to never reach it, not as NaN
        either.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was expected and what came. Of a keyword
            that is `unknown` it says which one is meant.
        Unsupported (a NotImplementedError): no kernel, or not the one asked for, can run this; with every reason.
    """
    autocast = torch._C._is_any_autocast_enabled()
    if autocast:
        q, k, v = _autocast(q, k, v)
    # `type`, as in `compiled`: the Dynamo of torch 2.11 knows no `__class__` of numbers
    if (
        return_lse is False and sinks is None and type(softcap) is float and deterministic is False
        and out_dtype is None and precision == "ieee" and type(dropout_p) is float and dropout_p == 0
        and dropout_seed is None and not unknown and forward_ad._current_level < 0
        and not (autocast and getattr(q, "is_cpu", True))  # PyTorch's kernels, which autocast would change
    ):  # fmt: skip
        if not torch.compiler.is_compiling():
            found = front.attend(
                q, k, v, bias, mask, score, alibi_slopes, causal, window, softmax_scale, softcap, layout, kernel
            )
        elif bias is None and mask is None and score is None and alibi_slopes is None:
            found = compiled.attend(q, k, v, causal, window, softmax_scale, softcap, layout, kernel)
        else:
            found = None
        if found is not None:
            return found
    if unknown:
        raise unexpected("attention", unknown, _KNOWN)
    boolean("return_lse", return_lse)
    call = Call(
        q, k, v, bias, mask, score, alibi_slopes, sinks, causal, window, softmax_scale, softcap, deterministic,
        out_dtype, kernel, precision, layout, dropout_p=dropout_p,
    )  # fmt: skip
    if forward_ad._current_level >= 0:
        _refuse_tangents(call)
    if needs_operator(q):
        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotImplementedError(
                "attention has no functorch rules: expected a call outside of torch.func, got one in"
            )
        _refuse_distributed(q, k, v)
        call.dropout_seed = seed_of(call, dropout_seed)
        out, lse = torch.ops.sartor.attention(*ops.as_operator_arguments(call.bshd()))
        out = out.transpose(1, 2) if layout == "bhsd" else out
    else:
        call.dropout_seed = seed_of(call, dropout_seed)
        out, lse = ops.run(call, return_lse)
    return (out, lse) if return_lse else out


_KNOWN = tuple(name for name in signature(attention).parameters if name != "unknown")


def explain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, layout: Layout = "bshd", device: Device | None = None,
    **options: Any,
) -> Explanation:  # fmt: skip
    """Which kernels `attention` would run for the same arguments, and why not the others. Runs nothing.

    Args:
        q, k, v, layout: as in `attention`; meta tensors will do.
        device: plan for this device instead of the tensors' (see `sartor.device.ARCHITECTURES`).
        **options: as in `attention`; `return_lse` is accepted and changes nothing.
    """
    boolean("return_lse", options.pop("return_lse", False))
    if not options.keys() <= set(_KNOWN):
        raise unexpected("explain", options, _KNOWN)
    if device is not None and not isinstance(device, Device):
        raise TypeError(f"device must be a sartor.device.Device, got {type(device).__name__}: {device!r}")
    q, k, v = _autocast(q, k, v)
    given = options.pop("dropout_seed", None)
    call = Call(q, k, v, layout=layout, **options)
    call.dropout_seed = seed_of(call, given) if given is not None else None
    return explain_problem(Problem.of(call), device or Device.of(call.q.device))


def merge_states(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor, *, layout: Layout = "bshd"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys, from the results over each. Computes and returns float32.

    Args:
        out1, out2: (batch, seqlen_q, heads_q, dim_v) in `layout`.
        lse1, lse2: (batch, heads_q, seqlen_q), natural log; -inf where a row attended to nothing.

    Returns:
        out float32 and lse float32, in the same shapes. Sinks, if any, may be in one of the two only.

    Raises:
        TypeError: an argument is no dense tensor of floats.
        ValueError: `layout` is unknown, or shapes or devices do not go with those of `out1`.
    """
    _check_states(out1, lse1, out2, lse2, layout)
    lse1, lse2 = lse1.float(), lse2.float()
    top = torch.maximum(lse1, lse2).detach()  # it only shifts the exponents: its gradients cancel
    empty = top == -torch.inf
    base = torch.where(empty, 0, top)
    w1, w2 = torch.exp(lse1 - base), torch.exp(lse2 - base)
    total = torch.where(empty, 1, w1 + w2)

    def part(out: torch.Tensor, lse: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen, share = (lse != -torch.inf)[..., None], (w / total)[..., None]
        if layout == "bshd":
            seen, share = seen.transpose(1, 2), share.transpose(1, 2)
        return torch.where(seen, out.float(), 0) * share  # what has seen no key adds nothing, whatever it holds

    lse = torch.where(empty, -torch.inf, torch.log(total) + base)
    return part(out1, lse1, w1) + part(out2, lse2, w2), lse


def _check_states(out1: Any, lse1: Any, out2: Any, lse2: Any, layout: Any) -> None:
    known_layout(layout)
    for name, t in (("out1", out1), ("lse1", lse1), ("out2", out2), ("lse2", lse2)):
        floating(name, t)
        if t.device != out1.device:
            raise ValueError(f"{name} must be on the device of out1, {out1.device}, got {t.device}")
    if out1.dim() != 4:
        raise ValueError(f"out1 must have 4 dims {LAYOUTS[layout]}, got {out1.dim()}: {tuple(out1.shape)}")
    b, sq, hq = out1.shape[:3] if layout == "bshd" else out1.transpose(1, 2).shape[:3]
    for name, t, shape in (("lse1", lse1, (b, hq, sq)), ("out2", out2, tuple(out1.shape)), ("lse2", lse2, (b, hq, sq))):
        if tuple(t.shape) != shape:
            raise ValueError(
                f"{name} must have the shape {shape} that goes with out1 {tuple(out1.shape)} in layout {layout!r},"
                f" got {tuple(t.shape)}"
            )


def _autocast(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """q, k and v in the autocast dtype, where autocast is on."""
    if not isinstance(q, torch.Tensor) or q.is_meta or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)

    def cast(t: Any) -> Any:
        narrow = isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64
        return t.to(dtype) if narrow else t

    return cast(q), cast(k), cast(v)


def seed_of(call: Call, given: Any) -> torch.Tensor | None:
    """What the dropout mask of a call is made of: what was given, else a number drawn from PyTorch's generator."""
    if not (given is None or isinstance(given, torch.Tensor) or is_integer(given)):
        raise TypeError(f"dropout_seed must be an int or a torch.Tensor, got {type(given).__name__}: {given!r}")
    if is_integer(given) and not -(2**63) <= given < 2**64:
        raise ValueError(f"dropout_seed must be of 64 bits, got {given}")
    if not isinstance(call.q, torch.Tensor):
        return None
    device = call.q.device
    if isinstance(given, torch.Tensor):
        seed(given, device)
    if not call.dropout_p:
        return None
    if isinstance(given, torch.Tensor):
        return given
    if given is None:
        return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device)
    return torch.full((1,), given - 2**64 * (given >= 2**63), dtype=torch.int64, device=device)


def _refuse_tangents(call: Call) -> None:
    """Forward-mode differentiation would get a tangent of zero: say that there is none."""
    given = [(name, getattr(call, name)) for name in ("q", "k", "v", "bias", "alibi_slopes", "sinks")]
    for mod in (call.mask, call.score):
        given += [("aux", t) for t in getattr(mod, "tensors", ())]
    for name, t in given:
        if isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(f"{name} must have no tangent: attention has no forward-mode derivative (jvp)")


def _refuse_distributed(*tensors: Any) -> None:
    """The operator has no rule for how its inputs may be sharded."""
    for name, t in zip("qkv", tensors, strict=True):
        if type(t).__name__ == "DTensor":
            raise NotImplementedError(
                f"{name} must be a local tensor, got a DTensor of placements {t.placements}: give {name}.to_local(), or"
                " call sartor.distributed.attention, which takes DTensors"
            )
