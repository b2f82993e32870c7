"""Rows that a bias or a score function hides all keys from by a finite minus infinity, forward and backward."""

import pytest
import torch

import buried
import judged
import sartor
from sartor import mods, ops, testing
from sartor.kernels.spec import Saved
from sartor.problem import Call

pytestmark = [pytest.mark.gpu, pytest.mark.judges(*judged.NARROW)]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def found(q, k, v, dout, **options):
    """out, dq, dk, dv by name."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = sartor.attention(*leaves, **options)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))


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
def test_gradients_of_a_bias_that_hides_all_keys_and_of_sinks_as_low(dtype, low):
    q, k, v = testing.make_inputs(2, 4, 2, 150, 170, 64, dtype=dtype, device="cuda", layout="bshd")
    bias, sinks = torch.full((2, 1, 150, 170), low, device="cuda"), torch.full((4,), low, device="cuda")
    dout, leaves = testing.make_like(q), [t.clone().requires_grad_() for t in (bias, sinks)]
    out = sartor.attention(q, k, v, bias=leaves[0], sinks=leaves[1], kernel="triton")
    made = dict(zip(("dbias", "dsinks"), torch.autograd.grad(out, leaves, dout), strict=True))
    buried.judge(made, q, k, v, dout, bias=bias, sinks=sinks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_a_score_hides_all_keys_from(dtype):
    q, k, v = testing.make_inputs(2, 4, 2, 150, 170, 128, dtype=dtype, device="cuda", layout="bshd")
    options = {"score": mods.Score(lambda s, b, h, q, kv: mods.where(q % 3 == 1, s - 1e9, s))}
    dout = testing.make_like(q)
    buried.judge(found(q, k, v, dout, **options), q, k, v, dout, **options)


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
