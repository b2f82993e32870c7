"""The public functions: what they say, and how they sit in torch."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import warnings
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import dialects
import sartor
from sartor import kernels, mods, nvrtc, ops, problem, testing
from sartor import plan as planning
from sartor.compat import flash_attn_3
from sartor.device import ARCHITECTURES, CPU, Device
from sartor.errors import Unsupported
from sartor.kernels import blocked, spans
from sartor.kernels.blocked import BACKWARD_SPEC
from sartor.kernels.spec import Saved
from sartor.kernels.triton import backward as triton_backward
from sartor.kernels.triton import launch
from sartor.mods import core, program
from sartor.mods.recent import Recent
from sartor.mods.tracing import resolve
from sartor.problem import FARTHEST, Call, Problem, is_copied

needs_triton = pytest.mark.skipif(not launch.available(), reason="plans kernels that Triton compiles")


def inputs(sq=9, skv=13, dtype=torch.float32, **rest):
    return testing.make_inputs(2, 4, 2, sq, skv, 8, dtype=dtype, layout="bshd", **rest)


# ---- explain and Unsupported


def test_explain_names_the_plan_and_the_reasons():
    q, k, v = inputs(sq=13)
    plain = sartor.explain(q, k, v, causal=True)
    assert plain.plan.kernel.name == "torch_cpu"
    assert plain.backward.kernel.name == "torch_cpu_backward"
    assert "blocked_backward computes" in str(plain)
    capped = sartor.explain(q, k, v, softcap=2.0, return_lse=True)
    assert capped.plan.kernel.name == "blocked"
    assert any("softcap" in reason for reason in capped.refused["torch_cpu"])
    text = str(capped)
    for word in ("b=2", "h=4/2", "sq=13", "softcap", "torch_cpu: no", "forward:", "blocked_backward"):
        assert word in text


@pytest.mark.parametrize("case", ["plain", "lse", "nan", "overflow"])
def test_what_pytorchs_backward_lacks_is_left_to_blocked(monkeypatch, case):
    """It knows no gradient of lse, and what is not finite must not reach where a mask forbids it."""
    seen = []
    run = blocked.BlockedBackward.run
    monkeypatch.setattr(blocked.BlockedBackward, "run", lambda *args: seen.append(case) or run(*args))
    q, k, v = inputs(sq=13)
    if case == "nan":
        v[:, 12] = torch.nan
    if case == "overflow":
        v[:, 12] = 1e38
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, lse = sartor.attention(q, k, v, causal=True, return_lse=True)
    (dq,) = torch.autograd.grad((out * 10).sum() + (lse.sum() if case == "lse" else 0), q)
    assert seen == ([] if case == "plain" else [case])
    assert dq[:, :12].isfinite().all()


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({"softcap": 3.0, "bias": torch.ones(13, 13)}, {}, "softcap > bias"),
        ({"score": mods.Score(lambda s, b, h, q, kv, aux: s * 2)}, {}, "score"),
        ({"sinks": torch.ones(4)}, {}, "sinks"),
        ({"out_dtype": torch.float32}, {"dtype": torch.bfloat16}, "out_dtype torch.bfloat16, got torch.float32"),
        ({}, {"skv": 0}, "0"),
    ],
)
def test_why_not_torch(options, change, reason):
    q, k, v = inputs(**{"sq": 13, **change})
    refused = sartor.explain(q, k, v, **options).refused["torch_cpu"]
    assert any(reason in r for r in refused)
    with pytest.raises(sartor.Unsupported, match=reason) as caught:
        sartor.attention(q, k, v, kernel="torch", **options)
    assert isinstance(caught.value, NotImplementedError)
    assert "torch_cpu cannot because" in str(caught.value)


def test_a_window_without_a_left_end_is_a_band():
    """As a causal mask is: its rows begin with the first key, and kernels are cut to that."""
    x = torch.empty(1, 300, 4, 64, dtype=torch.bfloat16, device="meta")
    kinds = {problem.mask_class(Problem.of(Call(x, x, x, window=(left, 5)))) for left in (None, -1)}
    assert kinds == {"band"}
    assert problem.mask_class(Problem.of(Call(x, x, x, window=(299, 5)))) == "window"


@pytest.mark.parametrize("window", [(None, 0), (-1, 0), (None, None), (None, 3)])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_a_causal_mask_told_by_a_window_is_a_causal_mask(window, causal):
    """As flash-attn's `window_size=(-1, 0)` and transformers' masks tell it; for one query that is no mask."""
    x = torch.empty(1, 300, 4, 64, dtype=torch.bfloat16, device="meta")
    for q in (x, x[:, :1]):
        found, plain = Call(q, x, x, causal=causal, window=window), causal or window[1] == 0
        assert (found.key() == Call(q, x, x, causal=plain).key()) is (plain is not False or window[1] is None)
        if plain is True and q.shape[1] == 1:
            assert Problem.of(found).program.keep is None


@needs_triton
@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())
def test_kernel_by_its_own_name():
    """Where a family has two, either can be asked for; and the first of the family is what the family's name takes."""
    q = torch.empty(1, 4096, 2, 64, device="meta")
    found = {
        kernel: sartor.explain(q, q, q, kernel=kernel, device=ARCHITECTURES[90]).plan.kernel.name
        for kernel in ("fp32", "hopper_fp32", "fp32_forward")
    }
    assert found["fp32_forward"] == "fp32_forward"
    assert found["hopper_fp32"] == "hopper_fp32" or nvrtc.missing()
    assert found["fp32"] == ("fp32_forward" if nvrtc.missing() else "hopper_fp32")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["blocked", "reference"])
def test_sinks_of_any_dtype_and_stride(dtype, kernel):
    """Kernels get them dense and in lse's dtype; their gradient comes back in their own."""
    q, k, v = inputs()
    sinks = torch.randn(4, 2).to(dtype)[:, 0].requires_grad_()
    plain = sinks.detach().float().contiguous().requires_grad_()
    call = Call(q, k, v, sinks=sinks)
    found = ops.prepare(call).operands(call).sinks
    assert (found.dtype, found.stride()) == (torch.float32, (1,))
    out, same = (sartor.attention(q, k, v, sinks=s, kernel=kernel) for s in (sinks, plain))
    assert torch.equal(out, same)
    (d,), (d_plain,) = (torch.autograd.grad(o.sum(), s) for o, s in ((out, sinks), (same, plain)))
    assert torch.equal(d, d_plain.to(dtype))


def test_explain_for_another_device():
    q, k, v = (t.to("meta") for t in inputs(dtype=torch.bfloat16))
    assert "NVIDIA H200" in str(sartor.explain(q, k, v, device=ARCHITECTURES[90]))


def test_explain_puts_the_tensors_on_the_device():
    """Those that are on `meta`, or elsewhere, are meant to be there."""
    here, meta, gpu = inputs(), [t.to("meta") for t in inputs()], ARCHITECTURES[90]
    assert sartor.explain(*here).plan.kernel.name == "torch_cpu"
    assert str(sartor.explain(*meta, device=CPU)) == str(sartor.explain(*here))
    assert str(sartor.explain(*here, device=gpu)) == str(sartor.explain(*meta, device=gpu))
    assert sartor.explain(*here, kernel="torch", device=gpu).plan is None


@needs_triton
@pytest.mark.skipif(bool(nvrtc.missing()), reason="plans a kernel that NVRTC compiles")
def test_explain_says_why_not_another_backward():
    q = torch.empty(1, 100, 2, 64, device="meta")
    options = {"mask": torch.empty(100, 100, dtype=torch.bool, device="meta")}
    walk = sartor.explain(q, q, q, device=ARCHITECTURES[90], **options)
    assert any("got tensor" in why for why in walk.refused_backward["hopper_fp32_backward"])
    lines = str(walk).splitlines()
    assert lines[-1 - len(walk.notes) - 1].startswith("  backward: fp32_backward")
    assert any(line.startswith("  hopper_fp32_backward: no, ") for line in lines)


@needs_triton
@pytest.mark.skipif(bool(nvrtc.missing()), reason="plans a kernel that NVRTC compiles")
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_explain_plans_packed_sequences_and_documents(dim):
    """Those of training: both passes by the kernels of CUDA C++."""
    q = torch.empty(1, 100, 2, dim, device="meta", dtype=torch.bfloat16)
    ids, ends = (torch.empty(n, device="meta", dtype=torch.int32) for n in (100, 5))
    document, packed = sartor.mods.document(ids[None]), sartor.mods.packed(ends, ends, 100, 100, causal=True)
    for options in ({"mask": document}, {"mask": document, "causal": True}, {"mask": packed}):
        for dtype, name in ((torch.bfloat16, "hopper_backward"), (torch.float32, "hopper_fp32_backward")):
            if dim <= 128 or dtype == torch.bfloat16:
                walk = sartor.explain(*[q.to(dtype)] * 3, device=ARCHITECTURES[90], **options)
                wide = dim > 128 and options["mask"] is packed  # an interval by its text
                assert walk.backward.kernel.name == ("hopper_wide_backward" if wide else name)


@needs_triton
def test_explain_says_what_a_block_holds():
    """The tiles and the shared memory of both passes, as the kernels' own model counts it; less than padded."""
    q = torch.empty(1, 4096, 2, 96, dtype=torch.bfloat16, device="meta")
    walk = sartor.explain(q, q, q, causal=True, kernel="triton", device=ARCHITECTURES[90])
    for plan in (walk.plan, walk.backward):
        assert 0 < plan.shared_bytes < plan.padded().shared_bytes <= ARCHITECTURES[90].smem_bytes
        assert f"{plan.tile.block_m} queries x {plan.tile.block_n} keys, {plan.tile.warps} warps" in str(walk)
        assert f"{plan.shared_bytes} bytes of shared memory" in str(walk)
    assert plan.padded().problem.dim == 128
    assert sartor.explain(*inputs()).plan.shared_bytes is None


def test_explain_says_what_is_copied():
    q, k, v = inputs()
    wide = torch.stack([q, q], -1)[..., 0]
    assert any("q is copied" in note for note in sartor.explain(wide, k, v).notes)


def test_explain_takes_what_attention_takes():
    q, k, v = inputs()
    parameters = inspect.signature(sartor.attention).parameters
    options = {n: p.default for n, p in parameters.items() if p.kind == p.KEYWORD_ONLY}
    assert sartor.explain(q, k, v, **options).plan is not None


@pytest.mark.parametrize("call", [sartor.attention, sartor.explain])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("is_causal", "causal"), ("scale", "softmax_scale"), ("attn_mask", r"mask \(bool, .* or bias \(float"),
        ("dropout", "dropout_p"), ("generator", "dropout_seed"), ("sliding_window", "window"), ("score_mod", "score"),
        ("casual", "causal"),
    ],
)  # fmt: skip
def test_keywords_of_other_libraries_are_told_their_name_here(call, given, meant):
    q, k, v = inputs()
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{given}': did you mean {meant}"):
        call(q, k, v, **{given: None})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zz': expected q, k, v, layout, causal"):
        call(q, k, v, zz=1)


def test_a_type_error_from_within_is_left_alone():
    q, k, v = inputs()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
        sartor.attention(q, k)
    with pytest.raises(TypeError, match="return_lse must be a bool"):
        sartor.attention(q, k, v, return_lse=1)


def test_tf32_on_a_cpu_is_told_to_change_nothing():
    q, k, v = inputs()
    assert any("tf32' changes nothing on a CPU" in note for note in sartor.explain(q, k, v, precision="tf32").notes)
    assert not sartor.explain(q, k, v).notes or "tf32" not in str(sartor.explain(q, k, v).notes)


def test_a_plan_for_a_cpu_speaks_of_a_cpu():
    """Of its tiles, not of warps; and of what is missing, a GPU."""
    q, k, v = inputs()
    told = str(sartor.explain(q, k, v, kernel="blocked"))
    assert re.search(r"blocked\[\d+x\d+\] ", told)
    assert "queries x" in told
    assert "warps" not in told
    told = str(sartor.explain(q.half(), k.half(), v.half(), kernel="hopper"))
    assert "needs an NVIDIA GPU of compute capability 9.0, this is a CPU" in told


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper GPU, to plans, without the run-time compiler."""
    planned = planning.choose, planning.choose_backward
    for choose in planned:
        choose.cache_clear()
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, device: ARCHITECTURES[90]))
    monkeypatch.setattr(nvrtc, "missing", lambda: "needs NVRTC, which is not here: pip install it")
    ops._warn_once.cache_clear()
    yield
    ops._warn_once.cache_clear()
    for choose in planned:
        choose.cache_clear()


def test_a_hopper_gpu_without_the_compiler_warns_once(hopper):
    """Where that is all that the faster kernel lacks, and where no kernel was asked for by name."""
    call = [torch.empty(1, n, 2, 64, dtype=torch.bfloat16) for n in (96, 96, 96)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.prepare(Call(*call, kernel="triton"))
        ops.prepare(Call(*(t.double() for t in call)))
    with pytest.warns(UserWarning, match="NVIDIA H200 a slower kernel runs .* pip install it"):
        ops.prepare(Call(*call))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.prepare(Call(*call, causal=True))


def test_what_to_install_is_said_of_the_line_that_calls(monkeypatch):
    monkeypatch.setattr(ops, "PREPARED", Recent(64))
    monkeypatch.setattr(ops, "advice", lambda *a: "a slower kernel runs")
    with pytest.warns(UserWarning, match="a slower kernel runs") as said:
        sartor.attention(*inputs(), return_lse=True)  # the way that a GPU's calls go
    ops._warn_once.cache_clear()
    assert [warning.filename for warning in said] == [__file__]


@pytest.mark.parametrize("window", [[3, 1], (np.int64(3), np.int32(1))])
def test_windows_of_other_types(window):
    """attention and explain take a list, and integers of other libraries."""
    q, k, v = inputs()
    assert torch.equal(sartor.attention(q, k, v, window=window), sartor.attention(q, k, v, window=(3, 1)))
    assert sartor.explain(q, k, v, window=window).problem == sartor.explain(q, k, v, window=(3, 1)).problem


PUBLIC = [
    f"{module.__name__}.{name}"
    for module, names in ((sartor, sartor.__all__), (mods, mods.__all__), (flash_attn_3, vars(flash_attn_3)))
    for name in names
    if inspect.isfunction(found := getattr(module, name)) and not name.startswith("_") and name in found.__name__
]


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_say_what_every_argument_is(name):
    module, _, function = name.rpartition(".")
    found = getattr(importlib.import_module(module), function)
    words = set(re.findall(r"\w+", found.__doc__))
    assert set(inspect.signature(found).parameters) - {"options"} <= words


def test_registry():
    for name in (*kernels.FORWARD, *kernels.BACKWARD):
        assert kernels.load(name).name == name
    for name in kernels.FORWARD:
        assert set(kernels.load(name).backwards) <= set(kernels.BACKWARD)


# ---- results


def test_out_dtype():
    q, k, v = inputs(dtype=torch.bfloat16)
    for family in ("blocked", "reference"):
        out = sartor.attention(q, k, v, out_dtype=torch.float32, kernel=family)
        assert out.dtype == torch.float32
        up = [t.double() for t in (q, k, v)]
        exact = sartor.attention(*up, kernel="reference")
        testing.check(out, exact.float(), exact, dtype=torch.float32)
        testing.verify(q, k, v, out_dtype=torch.float32, kernel=family)


def test_lse_gradient_of_merged_halves():
    """Two calls merged through lse have the gradients of one call."""
    q, k, v = inputs()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    halves = [
        sartor.attention(leaves[0], leaves[1][:, part], leaves[2][:, part], return_lse=True)
        for part in (slice(0, 5), slice(5, None))
    ]
    out, lse = sartor.merge_states(*halves[0], *halves[1])
    dout, dlse = testing.make_like(out), testing.make_like(lse, 2)
    grads = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    found = {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    testing.check_all(found, q, k, v, dout, dlse)


OUT, LSE = torch.zeros(2, 9, 4, 8), torch.zeros(2, 4, 9)


@pytest.mark.parametrize(
    ("states", "layout", "words"),
    [
        ((OUT, LSE, OUT[:, :8], LSE), "bshd", r"out2.*\(2, 8, 4, 8\)"),
        ((OUT, LSE[:, :2], OUT, LSE[:, :2]), "bshd", r"lse1.*\(2, 4, 9\).*\(2, 2, 9\)"),
        ((OUT, LSE, OUT, LSE), "bhsd", r"lse1.*\(2, 9, 4\).*\(2, 4, 9\)"),
        ((OUT, LSE, OUT, LSE), "BSHD", r"layout.*'BSHD'"),
        ((OUT[0], LSE[0], OUT[0], LSE[0]), "bshd", r"out1.*got 3"),
        ((OUT, None, OUT, LSE), "bshd", "lse1.*NoneType"),
        ((OUT, LSE, OUT.int(), LSE), "bshd", "out2.*int32"),
        ((OUT, LSE, OUT, LSE.to("meta")), "bshd", "lse2.*cpu.*meta"),
    ],
)
def test_merge_states_refuses(states, layout, words):
    with pytest.raises((TypeError, ValueError), match=words):
        sartor.merge_states(*states, layout=layout)


def test_merge_states_gradients():
    """Those of a direct softmax over the two; none where there is nothing in either."""
    generator = torch.Generator().manual_seed(0)
    out1, out2 = (torch.randn(1, 3, 2, 4, generator=generator, requires_grad=True) for _ in range(2))
    lse1, lse2 = (torch.randn(1, 2, 3, generator=generator, requires_grad=True) for _ in range(2))
    out, lse = sartor.merge_states(out1, lse1, out2, lse2)
    share = torch.softmax(torch.stack([lse1, lse2]), 0).transpose(2, 3)[..., None]
    direct = share[0] * out1 + share[1] * out2, torch.logaddexp(lse1, lse2)
    leaves = (out1, lse1, out2, lse2)
    found, want = (torch.autograd.grad([o.sum(), s.sum()], leaves) for o, s in ((out, lse), direct))
    for a, b in zip((out, lse, *found), (*direct, *want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_layout(layout):
    q, k, v = testing.make_inputs(2, 4, 2, 9, 13, 8, dim_v=5, dtype=torch.float32, layout=layout)
    out = sartor.attention(q, k, v, layout=layout)
    assert out.shape == ((2, 9, 4, 5) if layout == "bshd" else (2, 4, 9, 5))
    testing.verify(q, k, v, layout=layout, bias=torch.randn(4, 9, 13), through_lse=True)


def test_plans_are_found_again():
    q, k, v = inputs()
    first = ops.prepare(Call(q, k, v, causal=True))
    assert ops.prepare(Call(q.clone(), k, v, causal=True)) is first
    assert ops.prepare(Call(q, k, v)) is not first
    assert ops.prepare(Call(q, k[:, :12], v[:, :12], causal=True)) is not first


def test_plans_are_of_one_alignment():
    """Of each tensor: what was compiled for a q that starts on 16 bytes reads it so."""
    room = torch.zeros(3, 2, 9, 4, 12)
    (q, off_q), (k, off_k) = ((room[i, ..., :8], room[i, ..., 2:10]) for i in (0, 1))
    assert [t.data_ptr() % 16 for t in (q, k, off_q, off_k)] == [0, 0, 8, 8]
    keys = {Call(*tensors, room[2][..., :8]).key() for tensors in ((q, k), (off_q, k), (q, off_k), (off_q, off_k))}
    assert len(keys) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float64_bias_is_read_as_float32(dtype):
    """Kernels would add it in float64 else, or not compile; its gradient is of its own dtype."""
    q, k, v = inputs(dtype=dtype)
    bias = torch.randn(9, 13, dtype=torch.float64, requires_grad=True)
    call = Call(q, k, v, bias)
    assert [t.dtype for t in ops.prepare(call).operands(call).aux] == [torch.float32]
    out = sartor.attention(q, k, v, bias=bias)
    assert torch.equal(out, sartor.attention(q, k, v, bias=bias.float()))
    (gradient,) = torch.autograd.grad(out.sum(), bias)
    assert gradient.dtype == torch.float64


def test_what_is_deterministic_is_asked_when_it_runs():
    """PyTorch may be told between the forward and the backward."""
    prepared = ops.prepare(Call(*inputs()))
    plain = prepared.backward_plan()
    assert not plain.problem.deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert prepared.backward_plan().problem.deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert prepared.backward_plan() is plain


WITH_TENSORS = {
    "bias": lambda: {"bias": torch.randn(13), "softcap": 3.0},
    "bool mask": lambda: {"mask": torch.rand(2, 1, 9, 13) > 0.3, "causal": "bottom_right"},
    "mask": lambda: {"mask": mods.document(torch.zeros(2, 9).int(), torch.zeros(2, 13).int()), "window": (5, -1)},
    "all": lambda: {
        "mask": mods.prefix(torch.tensor([3, 4])), "causal": "top_left", "softcap": 3.0,
        "alibi_slopes": torch.rand(4), "bias": torch.randn(4, 1, 13),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_aux_values_are_read_in_the_order_of_the_mods(name):
    call = Call(*inputs(), **WITH_TENSORS[name]())
    mask, score = problem.mods(call)
    expected = [resolve(v, 9, 13) for v in (mask.aux if mask else ()) + (score.aux if score else ())]
    for found in (problem.aux_values(call), ops.prepare(call).operands(call).aux):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b) and a.dim() == 4 if isinstance(b, torch.Tensor) else a == b


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_a_repeated_call_traces_nothing(name, monkeypatch):
    """Nor does the operator, which names a mask by its handle."""
    q, k, v = inputs()
    call = Call(q, k, v, **WITH_TENSORS[name]())
    first = ops.prepare(call)
    arguments = ops.as_operator_arguments(call)

    def trace(*args):
        raise AssertionError("a mod was traced again")

    monkeypatch.setattr(core, "trace", trace)
    monkeypatch.setattr(program.Program, "of", trace)
    again = replace(call, q=q.clone(), bias=None if call.bias is None else call.bias.clone())
    assert ops.prepare(again) is first
    assert len(first.operands(again).aux) == len(first.template)
    other = ops._call(*arguments)
    assert ops.prepare(other) is first
    assert len(first.operands(other).aux) == len(first.template)


def test_a_plan_does_not_remember_data():
    q, k, v = inputs()
    for n in (3, 7, 13):
        for mask in (mods.prefix(n), mods.prefix(torch.tensor([n])), torch.arange(13) < n):
            testing.verify(q, k, v, mask=mask, gradients=False)


# ---- torch


FEATURES = {
    "plain": {},
    "band": {"causal": True, "window": (5, 2), "softcap": 2.0},
    "tensors": {"alibi_slopes": torch.rand(4), "sinks": torch.randn(4), "bias": torch.randn(4, 9, 13)},
    "bool": {"mask": torch.rand(9, 13) > 0.3},
    "mods": {"mask": mods.prefix(torch.tensor([5, 9])) & mods.causal()},
    "out_dtype": {"out_dtype": torch.float32},
    "dropout": {"dropout_p": 0.3, "dropout_seed": torch.tensor([2**40 + 3])},
}


def leaves_of(options, dtype=torch.float32):
    q, k, v = (t.requires_grad_() for t in inputs(dtype=dtype))
    own = {n: o.clone().requires_grad_() if n in ("bias", "sinks") else o for n, o in options.items()}
    return (q, k, v), own


@pytest.mark.parametrize("name", FEATURES)
def test_compile(name):
    torch._dynamo.reset()
    (q, k, v), options = leaves_of(FEATURES[name])
    leaves = [q, k, v, *(o for n, o in options.items() if n in ("bias", "sinks"))]
    call = lambda q, k, v: sartor.attention(q, k, v, return_lse=True, **options)  # noqa: E731 - compiled and not
    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out, lse = function(q, k, v)
        grads = torch.autograd.grad([out.sum(), lse.sum()], leaves)
        results.append([out.detach(), lse.detach(), *grads])
    for x, y in zip(*results, strict=True):
        assert x.shape == y.shape
        assert torch.equal(x, y)


def test_compile_with_masks():
    """A graph serves masks of one kind whatever they hold."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda x, mask: sartor.attention(x, x, x, mask=mask), fullgraph=True, backend=counter)
    x = torch.randn(2, 9, 4, 16)
    for seed in range(3):
        mask = mods.document(torch.arange(9).repeat(2, 1) // (2 + seed))
        assert torch.equal(compiled(x, mask), sartor.attention(x, x, x, mask=mask))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", FEATURES)
def test_opcheck(name):
    (q, k, v), options = leaves_of(FEATURES[name])
    arguments = ops.as_operator_arguments(Call(q, k, v, **options))
    torch.library.opcheck(torch.ops.sartor.attention, arguments, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(torch.ops.sartor.attention, arguments, test_utils=("test_autograd_registration",))


def test_opcheck_backward():
    (q, k, v), options = leaves_of(FEATURES["tensors"])
    with torch.no_grad():
        arguments = ops.as_operator_arguments(Call(q, k, v, **options))
        out, lse = torch.ops.sartor.attention(*arguments)
        for wanted in (False, True):
            given = (testing.make_like(out), testing.make_like(lse), out, lse, wanted, [], *arguments)
            torch.library.opcheck(
                torch.ops.sartor.attention_backward, given, test_utils=("test_schema", "test_faketensor")
            )


@pytest.mark.parametrize("kernel", ["torch", "blocked", "reference"])
def test_opcheck_strides(kernel):
    """The fake promises the strides that every kernel's results have."""
    for sq in (1, 9):
        q, k, v = (t.transpose(1, 2) for t in testing.make_inputs(2, 4, 2, sq, 13, 8, dtype=torch.float32))
        for query in (q, q[::2], q.flip(1)[:, :, :3].repeat_interleave(2, 2)[:, :, :4]):
            arguments = ops.as_operator_arguments(Call(query, k[: len(query)], v[: len(query)], kernel=kernel))
            torch.library.opcheck(torch.ops.sartor.attention, arguments, test_utils=("test_schema", "test_faketensor"))


def test_opcheck_dynamic():
    (q, k, v), _ = leaves_of({})
    arguments = ops.as_operator_arguments(Call(q, k, v, causal=True))
    torch.library.opcheck(torch.ops.sartor.attention, arguments, test_utils=("test_aot_dispatch_dynamic",))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_bias_gets_a_gradient_if_it_wants_one(compiled, monkeypatch):
    """It takes the backward a kernel and the memory of the bias, which a mask of floats is not to pay for."""
    torch._dynamo.reset()
    made = []
    run = BACKWARD_SPEC.run
    monkeypatch.setattr(type(BACKWARD_SPEC), "run", lambda self, *a: made.append(run(*a)) or made[-1])
    (q, k, v), _ = leaves_of({})
    call = lambda bias: sartor.attention(q, k, v, bias=bias, kernel="blocked")  # noqa: E731 - compiled and not
    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    for wanted in (False, True, False):
        bias = torch.randn(9, 13, requires_grad=wanted)
        call(bias).sum().backward()
        assert (bias.grad is not None) == wanted == (made.pop().dbias is not None)


def test_unsupported_reaches_another_process():
    with pytest.raises(Unsupported) as caught:
        sartor.attention(*inputs(), kernel="triton")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is Unsupported
    assert str(again) == str(caught.value)
    assert again.reasons == caught.value.reasons


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_no_score_at_all(layout, causal):
    """-inf for every key: lse is -inf, where PyTorch's own kernel says 0; other rows with 0 keep it."""
    q, k, v = torch.zeros(1, 4, 1, 8), torch.full((1, 4, 1, 8), -1e20), torch.randn(1, 4, 1, 8)
    q[:, 1:3] = 1e20
    want = torch.tensor([1.0, 0, 0, 1]).log() + (torch.tensor([1.0, 2, 3, 4]) if causal else torch.tensor(4.0)).log()
    q, k, v = (t.transpose(1, 2) if layout == "bhsd" else t for t in (q, k, v))
    for kernel in ("auto", "torch", "reference"):
        out, lse = sartor.attention(q, k, v, layout=layout, causal=causal, return_lse=True, kernel=kernel)
        assert torch.allclose(lse.flatten(), want)
        assert not out.flatten(0, 2)[1:3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_with_an_infinite_score(dtype, causal):
    """NaN, lse too, whoever computes; PyTorch's own kernel makes zeros of it in 16 bits."""
    q, k, v = (
        torch.ones(1, 70, 1, 8, dtype=dtype),
        torch.randn(1, 70, 1, 8).to(dtype),
        torch.ones(1, 70, 1, 8, dtype=dtype),
    )
    k[0, 3, 0, 2] = torch.inf
    for kernel in ("auto", "torch", "blocked", "reference"):
        out, lse = sartor.attention(q, k, v, causal=causal, return_lse=True, kernel=kernel)
        first = 3 if causal else 0
        assert out[:, first:].isnan().all()
        assert lse[:, :, first:].isnan().all()
        assert out[:, :first].isfinite().all()


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch):
    """Triton launches on the current one."""
    entered = []

    @contextmanager
    def device(of):
        entered.append(of)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: of.index, raising=False)
        yield
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    plan = SimpleNamespace(kernel=SimpleNamespace(run=lambda plan, x: torch._C._cuda_getDevice()))
    for index, times in ((0, 0), (1, 1)):
        data = SimpleNamespace(q=SimpleNamespace(device=torch.device("cuda", index)))
        assert ops._run(plan, data) == index
        assert len(entered) == times


def test_flop_counter():
    q, k, v = inputs(requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = sartor.attention(q, k, v)
    assert counter.get_total_flops() == 4 * 2 * 4 * 9 * 13 * 8
    with FlopCounterMode(display=False) as counter:
        sartor.attention(q, k, v).sum().backward()
    assert counter.get_total_flops() == 3.5 * 4 * 2 * 4 * 9 * 13 * 8
    assert out.shape == q.shape


def test_autocast():
    q, k, v = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert sartor.attention(q, k, v).dtype == torch.bfloat16
        assert sartor.attention(*(t.double() for t in (q, k, v))).dtype == torch.float64
        assert sartor.explain(q, k, v).problem.dtype == torch.bfloat16


@pytest.mark.parametrize("name", FEATURES)
def test_meta(name):
    q, k, v = (t.to("meta") for t in inputs(dtype=torch.bfloat16))
    options = FEATURES[name]
    if "mask" in options and isinstance(options["mask"], mods.Mask):
        options = {"mask": mods.prefix(torch.zeros(2, dtype=torch.int32, device="meta"))}
    options = {n: o.to("meta") if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    out, lse = sartor.attention(q, k, v, return_lse=True, **options)
    assert (out.shape, out.dtype) == (q.shape, options.get("out_dtype", torch.bfloat16))
    assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)


def test_meta_is_still_validated():
    q, k, v = (t.to("meta") for t in inputs())
    with pytest.raises(ValueError, match="softcap"):
        sartor.attention(q, k, v, softcap=-1.0)


def test_calls_that_lie_otherwise_in_memory_are_planned_apart():
    """A plan keeps tensor maps and strides, and its kernel was chosen by alignment: a key says all of these, of every
    tensor, and every option."""
    q, k, v = testing.make_inputs(2, 4, 4, 8, 8, 8, dtype=torch.bfloat16, layout="bshd")
    given = {"q": q, "k": k, "v": v, "bias": torch.randn(2, 4, 8, 8), "mask": torch.rand(2, 4, 8, 8) > 0.5}
    key = Call(**given).key()
    for name, t in given.items():
        for way, other in testing.layouts(t).items():
            assert Call(**given | {name: other}).key() != key, (name, way)
    for name, value in {
        "precision": "tf32", "kernel": "blocked", "layout": "bhsd", "out_dtype": torch.float32, "softcap": 1.0,
        "softmax_scale": 1.0, "deterministic": True, "bias_gradient": True, "causal": True, "window": (1, 1),
        "dropout_p": 0.1, "dropout_seed": torch.tensor([1]),
    }.items():  # fmt: skip
        assert Call(**given | {name: value}).key() != key, name
    torch.use_deterministic_algorithms(True)
    try:
        assert Call(**given).key() != key
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("dim", "whole"), [(32, True), (36, False)])
def test_rows_of_a_copy_start_where_its_width_says(dim, whole):
    """What is copied since its last dim is not dense: on 16 bytes only where its rows are as many bytes."""
    k = torch.empty(1, 8, 2, 40, dtype=torch.bfloat16)[..., :dim]
    assert Problem.of(Call(k, k, k)).rows_on_16_bytes
    assert Problem.of(Call(testing.layouts(k)["last"], k, k)).rows_on_16_bytes == whole


@pytest.mark.parametrize("name", dialects.SCORES)
def test_scores_of_every_operator(name):
    score, through_lse = dialects.scores(4, 9, 13)[name], name not in dialects.OF_PLACES
    q, k, v = inputs()
    testing.verify(q, k, v, score=score, kernel="blocked", through_lse=through_lse)
    more = {"softcap": 2.0, "alibi_slopes": torch.rand(4), "bias": torch.randn(4, 9, 13), "sinks": torch.randn(4)}
    testing.verify(q, k, v, score=score, kernel="blocked", causal=True, **more)


def test_a_score_comes_between_softcap_and_bias():
    q, k, v = inputs()
    bias, slopes = torch.randn(9, 13), torch.rand(4)
    slope = slopes.view(4, 1, 1)
    score = mods.Score(lambda s, b, h, q, kv, aux: s * s)
    whole = mods.Score(
        lambda s, b, h, q, kv, aux: (mods.tanh(s / 2) * 2) * (mods.tanh(s / 2) * 2) - aux[0] * abs(q + 4 - kv) + aux[1],
        (slope, bias),
    )
    found = sartor.attention(q, k, v, score=score, softcap=2.0, alibi_slopes=slopes, bias=bias)
    assert torch.allclose(found, sartor.attention(q, k, v, score=whole), atol=1e-6)
    assert "softcap > score > alibi > bias" in str(
        sartor.explain(q, k, v, score=score, softcap=2.0, alibi_slopes=slopes, bias=bias)
    )


def test_what_a_score_must_be():
    q, k, v = inputs()
    plain = lambda s, b, h, q, kv, aux: s + aux[0]  # noqa: E731
    for call, error, words in (
        (lambda: sartor.attention(q, k, v, score=plain), TypeError, "score must be a .*Score, got function: wrap it"),
        (lambda: sartor.attention(q, k, v, score=mods.causal()), TypeError, "score must be a .*Score, got Mask"),
        (lambda: sartor.attention(q, k, v, score=mods.bias(torch.ones(3, 13))), ValueError, "score must be broadcast"),
        (lambda: mods.Score(3), TypeError, "score must be a function .*got int"),
        (lambda: mods.Score(lambda s, b, h, q, kv, aux: q - kv), TypeError, "returns a float, got .q - kv"),
        (lambda: mods.Score(lambda s, b, h, q, kv, aux: (s, s)), TypeError, "returns a float, got 2 values"),
        (lambda: mods.Score(lambda s, b, h, q: s), TypeError, "must take .s, b, h, q, kv. or .s, b, h, q, kv, aux."),
    ):
        with pytest.raises(error, match=words):
            call()


def test_a_graph_takes_masks_and_scores_of_all_lengths():
    """And tells two of one kind apart; what it names by a handle has to have been made."""
    torch._dynamo.reset()
    counter = CompileCounter()
    attend = torch.compile(
        lambda q, k, v, m, s: sartor.attention(q, k, v, mask=m, score=s), dynamic=True, fullgraph=True, backend=counter
    )
    for n in range(8, 20):
        q, k, v = (torch.randn(2, n, 4, 8) for _ in range(3))
        mask, score = mods.document(torch.arange(2 * n).view(2, n) // 5), mods.bias(torch.randn(n, n))
        assert torch.equal(attend(q, k, v, mask, score), sartor.attention(q, k, v, mask=mask, score=score))
    assert counter.frame_count <= 2
    arguments = list(ops.as_operator_arguments(Call(q, k, v, mask=mods.causal())))
    arguments[8] += " of another process"
    with pytest.raises(RuntimeError, match="a mod that this process has not made"):
        torch.ops.sartor.attention(*arguments)


def test_a_graph_has_the_gradients_of_masks_and_scores():
    torch._dynamo.reset()
    q, k, v = (t.requires_grad_() for t in inputs())
    options = {
        "mask": mods.document(torch.zeros(2, 9).int(), torch.arange(26).view(2, 13) // 9),
        "sinks": torch.ones(4),
    }
    options["score"] = dialects.scores(4, 9, 13)["tables"]
    attend = torch.compile(lambda: sartor.attention(q, k, v, **options), fullgraph=True, backend="aot_eager")
    found, want = (torch.autograd.grad(f().square().sum(), (q, k, v)) for f in (attend, attend.__wrapped__))
    assert all(map(torch.equal, found, want))


def test_one_query_sees_all_that_a_causal_one_may():
    """So that decoding takes the kernels of no mask."""
    q, k, v = inputs(sq=1)
    for causal, name in ((True, "full"), ("bottom_right", "full"), ("top_left", "causal")):
        assert Problem.of(Call(q, k, v, causal=causal)).mask_name == name
    assert Problem.of(Call(q, k, v, causal=True, window=(3, 0))).mask_name != "full"


def test_what_a_score_reads_has_no_tangent():
    q, k, v = inputs()
    with forward_ad.dual_level():
        score = mods.Score(
            lambda s, b, h, q, kv, aux: s * aux[0], (forward_ad.make_dual(torch.ones(9, 13), torch.ones(9, 13)),)
        )
        with pytest.raises(NotImplementedError, match="aux must have no tangent"):
            sartor.attention(q, k, v, score=score)


def test_a_saved_tensor_gets_its_layout_back():
    """Strides, those of expanded ones too, where a hook made it dense; and an address on 16 bytes, if it had one."""
    for t in (torch.randn(2, 3, 4).transpose(0, 1), torch.randn(1, 3, 1).expand(5, 3, 4), torch.randn(2, 3, 4)[:, ::2]):
        for kept in (t.contiguous(), torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)):
            found = ops._laid_out(kept, (t.stride(), t.data_ptr() & 15))
            assert torch.equal(found, t)
            assert found.stride() == t.stride()
            assert found.data_ptr() & 15 == 0


def test_no_query_heads_are_refused():
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"heads of q must be a multiple .*got heads 0 and 2"):
        sartor.attention(q[:, :, :0], k, v)


@pytest.mark.parametrize("kernel", ["auto", "blocked", "reference"])
def test_nan_stays_nan_beside_infinity(kernel):
    q, k, v = inputs()
    q[0, 1], v[0, 2, 0, 3] = torch.nan, torch.inf
    out = sartor.attention(q, k, v, kernel=kernel)
    assert out[0, 1].isnan().all()
    assert out[0, 0, 0, 3] == torch.inf


def test_traced_by_torchscript():
    q, k, v = inputs(sq=13)
    traced = torch.jit.trace(lambda q, k, v: sartor.attention(q, k, v, causal=True), (q, k, v))
    others = inputs(sq=13, seed=5)
    assert torch.equal(traced(*others), sartor.attention(*others, causal=True))


def test_rows_far_apart_are_copied():
    """As with sequences outermost and large batches: 32 bits do not hold a row's place within a tile of 128."""
    q, k, v = testing.make_inputs(1, 2, 2, 3, 3, 8, dtype=torch.float32, layout="bshd")
    far = torch.empty(3, FARTHEST + 4)[:, :16].view(1, 3, 2, 8).copy_(k)
    prepared = ops.prepare(Call(q, far, v))
    assert prepared.problem.copies == ("k",)
    assert prepared.operands(Call(q, far, v)).k.is_contiguous()
    assert "k is copied once" in str(sartor.explain(q, far, v))
    assert torch.equal(sartor.attention(q, far, v), sartor.attention(q, k, v))
    assert not is_copied(far[:, :1])  # the next row is not there
    saved = Saved(q, torch.zeros(1, 2, 3), far, None)
    x = prepared.operands(Call(q, far, v))
    assert triton_backward.SPEC.workspace(prepared.problem, x, saved)["dout"].is_contiguous()


def test_items_that_are_taken_one_by_one(monkeypatch):
    """Where an item's scores alone fill the caches: what is given by item is that item's, for the second one too."""
    monkeypatch.setattr(spans, "ITEM", 1)
    drawn = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))  # noqa: E731
    mask = mods.Mask(lambda b, h, q, kv, aux: (kv + 3 * b <= q + 6) & aux[0], (drawn(2, 1, 1, 13) > -1,))
    given = {"mask": mask, "bias": drawn(2, 4, 9, 13), "alibi_slopes": drawn(2, 4).abs(), "sinks": drawn(4)}
    x = testing.make_inputs(2, 4, 2, 9, 13, 16, dtype=torch.float32, layout="bshd")
    testing.verify(*x, kernel="blocked", through_lse=True, **given)


@pytest.mark.parametrize("window", [None, (None, 1), (2, None), (-1, 1), (2, -1), (None, None), (0, 0)])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_an_operator_is_given_the_same_band(window, causal):
    """A schema has no None in a list of integers: what compilers see is the eager call, unbounded sides too."""
    q, k, v = testing.make_inputs(1, 2, 2, 5, 7, 8, dtype=torch.float32, layout="bshd")
    out = sartor.attention(q, k, v, causal=causal, window=window)
    same, _ = torch.ops.sartor.attention(*ops.as_operator_arguments(Call(q, k, v, causal=causal, window=window)))
    assert torch.equal(same, out)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
def test_one_input_alone_may_want_a_gradient(name):
    """It is the one it has among others that do, and not left to PyTorch: on GPUs there would be none."""
    q, k, v = testing.make_inputs(1, 2, 2, 5, 7, 8, dtype=torch.float32, layout="bshd")
    given = {"q": q, "k": k, "v": v, "bias": torch.ones(5, 7), "sinks": torch.ones(2)}
    alone = given | {name: given[name].clone().requires_grad_()}
    assert Call(**alone).needs_gradient
    assert not Call(**given).needs_gradient
    every = {n: t.clone().requires_grad_() for n, t in given.items()}
    found, want = (
        torch.autograd.grad(sartor.attention(**some).square().sum(), some[name])[0] for some in (alone, every)
    )
    assert torch.equal(found, want)
