"""Partial results over disjoint keys, of any rows in any order, against the softmax of all keys at once."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from sartor.distributed.merge import Merged

ROWS = 7
PARTS = st.lists(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS), st.booleans()), max_size=6)


@settings(deadline=None, max_examples=200)
@given(parts=PARTS, whole=st.booleans(), seed=st.integers(0, 99), looked_at=st.integers(0, 6))
def test_any_rows_in_any_order(parts, whole, seed, looked_at):
    generator = torch.Generator().manual_seed(seed)
    q = torch.empty(1, ROWS, 2, 4, dtype=torch.float64)
    merged = Merged(q, 3, torch.float64)
    scores = torch.full((1, 2, ROWS, 4 * len(parts)), -torch.inf, dtype=torch.float64)
    values = torch.randn(1, 2, 4 * len(parts), 3, generator=generator, dtype=torch.float64)
    for i, (a, b, hidden) in enumerate(parts):
        start, stop, keys = min(a, b), max(a, b), slice(4 * i, 4 * i + 4)
        own = torch.randn(1, 2, stop - start, 4, generator=generator, dtype=torch.float64) * 9
        if hidden:  # these keys from the first of the rows
            own[:, :, :1] = -torch.inf
        scores[:, :, start:stop, keys] = own
        out = own.softmax(3).nan_to_num() @ values[:, :, keys]
        rows = slice(None) if whole and (start, stop) == (0, ROWS) else slice(start, stop)
        merged.add(rows, out.transpose(1, 2), own.logsumexp(3))
        if i == looked_at:
            assert merged.out.isfinite().all()
    want = scores.softmax(3).nan_to_num() @ values
    torch.testing.assert_close(merged.out, want.transpose(1, 2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged.lse, scores.logsumexp(3), rtol=1e-12, atol=1e-12)
