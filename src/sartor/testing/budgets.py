"""Errors of results, and what they may be: see `sartor.testing`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sartor.api import attention
from sartor.testing.inputs import make_like
from sartor.testing.oracle import (
    in_pieces,
    low_precision,
    low_precision_gradients,
    magnitudes,
    reference,
    reference_gradients,
)

Tensor = torch.Tensor
FORWARD_FACTOR, GRADIENT_FACTOR, RMS_FACTOR = 2.0, 3.0, 1.2


@dataclass(frozen=True)
class Errors:
    """How far a result is off. max: largest absolute error; rel: norm of the error over the exact norm; row: of max."""

    max: float
    rel: float
    row: tuple[int, ...]

    def __str__(self) -> str:
        return f"max {self.max:.1e} at row {self.row}, relative {self.rel:.1e}"


def measure(out: Tensor, exact: Tensor) -> Errors:
    """Errors of `out` against `exact`, of equal shapes; infinite where one is finite and the other is not."""
    error = _error(out, exact)
    if error.numel() == 0:
        return Errors(0.0, 0.0, ())
    place = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
    norm, exact_norm = error.norm().item(), _finite(exact).norm().item()
    return Errors(
        error.max().item(), norm / exact_norm if exact_norm else norm, tuple(place[:3] if len(place) == 4 else place)
    )


def cosine(out: Tensor, exact: Tensor) -> float:
    """Cosine of the angle between two results taken as vectors: 1 when they agree in direction."""
    a, b = _finite(out).flatten(), _finite(exact).flatten()
    product = (a.norm() * b.norm()).item()
    return (a @ b).item() / product if product else 1.0


def _finite(t: Tensor) -> Tensor:
    return t.detach().double().nan_to_num(0, 0, 0)


def _error(out: Tensor, exact: Tensor) -> Tensor:
    """|out - exact|, 0 where both are the same inf or NaN, inf where only one is finite."""
    out, exact = out.detach().double(), exact.detach().double()
    if out.shape != exact.shape:
        raise AssertionError(f"shape {tuple(out.shape)} must be {tuple(exact.shape)}")
    same = (out == exact) | (out.isnan() & exact.isnan())
    return torch.where(same, 0, (out - exact).abs()).nan_to_num(torch.inf, torch.inf, torch.inf)


@dataclass(frozen=True)
class Budget:
    """What a result may be off by, element by element."""

    lowp: Tensor  # error of same-precision PyTorch
    rounding: Tensor  # of the exact result to the result's dtype
    noise: Tensor  # of the working precision
    unit: Tensor  # one rounding of every term to the inputs' dtype

    @classmethod
    def of(
        cls, out: Tensor, lowp: Tensor, exact: Tensor, magnitude: Tensor | None, s_max: float, dtype: torch.dtype
    ) -> Budget:
        """The budget of `out`, whose inputs are of `dtype`."""
        exact = exact.detach().double()
        if magnitude is None:
            magnitude = _finite(exact).abs().max().expand(exact.shape)
        work = torch.float64 if dtype == torch.float64 else torch.float32
        error = _error(lowp, exact)
        return cls(
            torch.where(error.isinf(), 0, error),
            torch.where(exact.isfinite(), (exact.to(out.dtype).double() - exact).abs(), 0).nan_to_num(0, 0, 0),
            # a weight below the smallest normal number is 0 on a GPU: what it would have been multiplied by is lost
            2 * torch.finfo(work).eps * (1 + s_max) * magnitude + torch.finfo(work).tiny / torch.finfo(work).eps,
            torch.finfo(dtype).eps / 2 * magnitude,
        )

    def over(self, reduce: Any, factor: float, luck: float) -> tuple[Tensor, Tensor]:
        """(limit, same-precision error) with each part reduced by `reduce`.

        `luck` units are granted because the same-precision error of few elements may be small by chance.
        """
        lowp = reduce(self.lowp)
        return factor * lowp + reduce(self.rounding) + reduce(self.noise) + luck * reduce(self.unit), lowp


def check(
    out: Tensor, lowp: Tensor, exact: Tensor, factor: float = FORWARD_FACTOR, *, magnitude: Tensor | None = None,
    s_max: float = 0.0, name: str = "out", layout: str = "bshd", dtype: torch.dtype | None = None,
    independent: int | None = None,
) -> Errors:  # fmt: skip
    """Raise AssertionError unless `out` is within the budget that `lowp` and `exact` give; return its errors.

    Args:
        out: what is checked; rank 4 in `layout` is looked at by rows and heads, other ranks element by element.
        lowp: the same by `low_precision` or `low_precision_gradients`.
        exact: the same by `reference` or `reference_gradients`.
        factor: how many times the error of `lowp` is allowed: 2 for results, 3 for gradients.
        magnitude, s_max: as `magnitudes` gives them; without them, the largest exact value and 0.
        name: what to call it in the message.
        layout: as in `attention`.
        dtype: of the inputs, where `out` has another.
        independent: how many rows of a head have errors of their own, where they are fewer than its rows.
    """
    errors = measure(out, exact)
    if out.numel() == 0:
        return errors
    budget = Budget.of(out, lowp, exact, magnitude, s_max, dtype or out.dtype)
    error = _error(out, exact)
    seqlen = 1 if layout == "bshd" else 2
    by_rows = out.dim() == 4 and name != "dbias"
    luck = min(independent or out.numel(), out.shape[seqlen] if by_rows else out.numel()) ** -0.5
    rules: list[tuple[str, Any, float, float]] = [("", lambda t: t.amax(), factor, luck)]
    if by_rows:
        rules.append(("row", lambda t: t.amax(-1), factor, 1.0))
        rules.append(("head", lambda t: t.square().mean((seqlen, 3)).sqrt(), RMS_FACTOR, luck))
    else:
        rules.append(("element", lambda t: t, factor, 1.0))
    for rule, reduce, times, luck in rules:
        limit, low = budget.over(reduce, times, luck)
        _raise_if_over(name, rule, reduce(error), limit, low, errors.row)
    return errors


def _raise_if_over(name: str, rule: str, error: Tensor, limit: Tensor, lowp: Tensor, worst: tuple[int, ...]) -> None:
    excess = torch.where(error <= limit, -torch.inf, error)
    if not (excess > -torch.inf).any():
        return
    at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    where = f"{rule} {at}" if rule else f"row {worst}"
    raise AssertionError(
        f"{name}: error {error[at].item():.1e} exceeds {limit[at].item():.1e}"
        f" (same-precision PyTorch {lowp[at].item():.1e}) at {where}"
    )


def verify(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = "bshd", gradients: bool = True, through_lse: bool = False,
    dout: Tensor | None = None, **attention_kwargs: Any,
) -> dict[str, Errors]:  # fmt: skip
    """Run `attention` on copies of the inputs and check out, lse and every gradient by budget.

    Args:
        gradients: whether to run the backward.
        through_lse: whether a gradient arrives through lse too.
        dout: the gradient of out; drawn by `make_like` when absent.
        **attention_kwargs: as in `attention`, `kernel` included.
    """
    options = {n: o for n, o in attention_kwargs.items() if n != "return_lse"}
    leaves = {n: t.detach().requires_grad_(gradients) for n, t in (("q", q), ("k", k), ("v", v))}
    for name in ("bias", "sinks"):
        if options.get(name) is not None:
            options[name] = leaves[name] = options[name].detach().requires_grad_(gradients)
    result = attention(leaves["q"], leaves["k"], leaves["v"], layout=layout, return_lse=True, **options)  # type: ignore[arg-type]
    found = dict(zip(("out", "lse"), result, strict=True))
    dout = make_like(found["out"]) if dout is None else dout
    dlse = make_like(found["lse"], 2) if through_lse else None
    if gradients:
        ends = [found["out"], found["lse"]] if dlse is not None else [found["out"]]
        starts = [dout, dlse] if dlse is not None else [dout]
        parts = torch.autograd.grad(ends, list(leaves.values()), starts)
        found |= {f"d{n}": g for n, g in zip(leaves, parts, strict=True)}
    plain = {n: o.detach() if isinstance(o, Tensor) else o for n, o in options.items()}
    return check_all(found, q, k, v, dout if gradients else None, dlse, layout=layout, **plain)


def check_all(
    found: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None,
    dlse: Tensor | None = None, *, layout: str = "bshd", **attention_kwargs: Any,
) -> dict[str, Errors]:  # fmt: skip
    """`check` for results in hand: `found` holds some of out, lse, dq, dk, dv, dbias, dsinks."""
    with torch.no_grad():
        exact = dict(zip(("out", "lse"), reference(q, k, v, layout=layout, **attention_kwargs), strict=True))
        lowp = dict(
            zip(("out", "lse"), in_pieces(low_precision, q, k, v, layout, attention_kwargs, q.dtype), strict=True)
        )
        size, s_max = magnitudes(q, k, v, dout, dlse, layout=layout, **attention_kwargs)
    if dout is not None:
        exact |= reference_gradients(q, k, v, dout, dlse, layout=layout, **attention_kwargs)
        lowp |= low_precision_gradients(q, k, v, dout, dlse, layout=layout, **attention_kwargs)
    axis = 1 if layout == "bshd" else 2
    independent = min(q.shape[axis], k.shape[axis])  # a query's rounding reaches the gradients of all its keys
    return {
        n: check(
            t, lowp[n], exact[n], GRADIENT_FACTOR if n[0] == "d" else FORWARD_FACTOR, magnitude=size[n],
            s_max=s_max, name=n, layout=layout, dtype=q.dtype, independent=independent,
        )
        for n, t in found.items()
    }  # fmt: skip
