"""Rows that an additive mask hides all keys from: biased by a finite minus infinity, beside which lse holds no sum."""

import torch

from sartor import mods, testing

SCORES = {  # that hide all keys from every third query
    "chosen": mods.Score(lambda s, b, h, q, kv: mods.where(q % 3 == 1, s - 1e9, s)),
    "number": mods.Score(lambda s, b, h, q, kv, aux: s - aux[0] * (q % 3 // 2), (1e9,)),
}
LOW = [-1e4, -1e9, "least"]  # "least": of the dtype


def bias(low, dtype, sq, skv, device="cpu"):
    """(2, 1, sq, skv) as of a batch with a padded query in the first item and nothing but padding in the other."""
    rows = torch.zeros(2, 1, sq, skv, dtype=dtype, device=device)
    low = torch.finfo(dtype).min if low == "least" else low
    rows[0, 0, 4] = low
    rows[1] = low
    return rows


def judge(found, q, k, v, dout, **options):
    """That `found`, results and gradients by name, is within the budgets, without scores rounded beside a bias."""
    with torch.no_grad():
        exact, lowp = (
            dict(zip(("out", "lse"), of(q, k, v, **options), strict=True))
            for of in (testing.reference, testing.low_precision)
        )
        size, _ = testing.magnitudes(q, k, v, dout, **options)
    exact |= testing.reference_gradients(q, k, v, dout, **options)
    lowp |= testing.low_precision_gradients(q, k, v, dout, **options)
    for name in found:
        factor = testing.FORWARD_FACTOR if name in ("out", "lse") else testing.GRADIENT_FACTOR
        testing.check(found[name], lowp[name], exact[name], factor, magnitude=size[name], name=name, dtype=q.dtype)
