"""Rows that a bias or a score function hides all keys from by a finite minus infinity, forward and backward."""

import pytest
import torch

import buried
import judged
import sartor
from sartor import ops, testing
from sartor.kernels.spec import Saved
from sartor.problem import Call

pytestmark = [pytest.mark.gpu, pytest.mark.judges(*judged.NARROW)]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def found(q, k, v, dout, **options):
    """out, lse, dq, dk, dv by name."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = sartor.attention(*leaves, return_lse=True, **options)
    results = out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), results, strict=True))


@pytest.mark.parametrize("low", buried.LOW)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", ["auto", "triton"])
@pytest.mark.parametrize("extra", ["full", "causal", "sinks"])
def test_rows_that_a_bias_hides_all_keys_from(dtype, low, kernel, extra):
    q, k, v = testing.make_inputs(2, 4, 2, 150, 170, 64, dtype=dtype, device="cuda", layout="bshd")
    options = {"bias": buried.bias(low, dtype, 150, 170, "cuda")}
    options |= {"full": {}, "causal": {"causal": True}, "sinks": {"sinks": torch.randn(4, device="cuda") - 1e9}}[extra]
    dout = testing.make_like(q)
    buried.judge(found(q, k, v, dout, kernel=kernel, **options), q, k, v, dout, **options)


@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", ["triton"])
def test_gradients_of_a_bias_that_hides_all_keys_and_of_sinks_as_low(dtype, low, kernel):
    q, k, v = testing.make_inputs(2, 4, 2, 150, 170, 64, dtype=dtype, device="cuda", layout="bshd")
    bias, sinks = torch.full((2, 1, 150, 170), low, device="cuda"), torch.full((4,), low, device="cuda")
    dout, leaves = testing.make_like(q), [t.clone().requires_grad_() for t in (bias, sinks)]
    out = sartor.attention(q, k, v, bias=leaves[0], sinks=leaves[1], kernel=kernel)
    made = dict(zip(("dbias", "dsinks"), torch.autograd.grad(out, leaves, dout), strict=True))
    buried.judge(made, q, k, v, dout, bias=bias, sinks=sinks)


@pytest.mark.parametrize("name", buried.SCORES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_a_score_hides_all_keys_from(dtype, name):
    q, k, v = testing.make_inputs(2, 4, 2, 150, 170, 128, dtype=dtype, device="cuda", layout="bshd")
    options = {"score": buried.SCORES[name]}
    dout = testing.make_like(q)
    buried.judge(found(q, k, v, dout, **options), q, k, v, dout, **options)


@pytest.mark.parametrize("low", buried.LOW)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("extra", ["full", "causal", "sinks"])
def test_kv_splits_that_hold_such_rows(dtype, low, extra):
    """The last split has the fewest keys, whose values are the largest. Another row sees keys of some splits alone."""
    q, k, v = alike(2, 8, 2, 5, 3000, dtype)
    v[:, 2944:] += 8
    bias = buried.bias(low, dtype, 5, 3000, "cuda")
    bias[0, :, 3, :1700] = bias.amin()
    options = {"full": {}, "causal": {"causal": True}, "sinks": {"sinks": bias.amin().float().expand(8).contiguous()}}
    options = options[extra] | {"bias": bias}
    assert sartor.explain(q, k, v, **options).plan.tile.num_splits > 1
    found = dict(zip(("out", "lse"), sartor.attention(q, k, v, return_lse=True, **options), strict=True))
    buried.judge(found, q, k, v, testing.make_like(q), **options)


@pytest.mark.parametrize("low", buried.LOW)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", ["auto", "triton"])
def test_sinks_as_low_as_the_keys(dtype, low, kernel):
    """They have the share of one more key, and here there are three."""
    q, k, v = alike(2, 4, 2, 150, 3, dtype)
    bias = buried.bias(low, dtype, 150, 3, "cuda")
    options = {"bias": bias, "sinks": bias.amin().float().expand(4).contiguous()}
    dout = testing.make_like(q)
    buried.judge(found(q, k, v, dout, kernel=kernel, **options), q, k, v, dout, **options)


def alike(b, heads, heads_kv, sq, skv, dtype):
    """q, k, v whose scores are all 0: that float32 rounds scores beside a low bias makes no weight inexact."""
    q, k, v = testing.make_inputs(b, heads, heads_kv, sq, skv, 64, dtype=dtype, device="cuda", layout="bshd")
    return torch.zeros_like(q), k, v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extra", ["plain", "bias"])
def test_gradients_of_some_of_the_keys(dtype, extra):
    """With out and lse of all keys, as a ring has them: the weights of a row do not sum to 1."""
    q, k, v = testing.make_inputs(1, 4, 2, 150, 170, 64, dtype=dtype, device="cuda", layout="bshd")
    options = {"bias": torch.randn(150, 1, device="cuda")} if extra == "bias" else {}
    dout = testing.make_like(q)
    out, lse = sartor.attention(q, k, v, return_lse=True, **options)
    parts = []
    for some in (slice(0, 70), slice(70, 170)):
        call = Call(q, k[:, some].contiguous(), v[:, some].contiguous(), **options)
        prepared = ops.prepare(call)
        parts.append(ops._backward(prepared, prepared.operands(call), Saved(out, lse, dout, None), shared_lse=True))
    made = {"out": out, "dq": parts[0].dq.float() + parts[1].dq.float()}
    made |= {name: torch.cat([getattr(g, name) for g in parts], 1) for name in ("dk", "dv")}
    buried.judge(made, q, k, v, dout, **options)
