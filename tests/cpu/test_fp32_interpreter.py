"""float32 in pairs of float16, in Triton's interpreter: the features of the Triton kernels, and what pairs do not do.

As in test_triton_interpreter.py the cases run in processes of their own:

    TRITON_INTERPRET=1 pytest -o python_functions='case_*' tests/cpu/test_fp32_interpreter.py
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import sartor
from samples import sample
from sartor import testing
from sartor.kernels.triton import launch

_spec = importlib.util.spec_from_file_location("shared_cases", Path(__file__).with_name("test_triton_interpreter.py"))
shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shared)
small_tiles = shared.small_tiles
inputs, verify_as = shared.inputs, testing.verify

FEATURES = (
    "case_features", "case_spoilt", "case_bias", "case_strides_after_strides", "case_what_a_score_reads_is_trained",
    "case_dim_v", "case_gqa", "case_no_key_at_all", "case_scale", "case_dead_keys_of_any_value", "case_bits",
    "case_nothing", "case_rows_that_a_bias_hides_all_keys_from", "case_rows_that_a_score_hides_all_keys_from",
    "case_gradients_of_what_hides_all_keys",
    "case_gradients_of_some_of_the_keys",
    "case_whole_tiles_as_planned", "case_a_dropout_mask_is_the_references_bit_for_bit", "case_dropout_with_features",
    "case_dropout_with_what_else_there_is", "case_dropout_as_planned", "case_dropout_of_a_part",
)  # fmt: skip


@pytest.mark.skipif(shared.INSIDE or not launch.available(), reason="runs the cases in other processes, with Triton")
@pytest.mark.parametrize(("half", "mark"), shared.HALVES)
def test_interpreter(half, mark):
    own = [f"{__file__}::{name}" for name in globals() if name.startswith("case_")]
    names = [*(f"{shared.__file__}::{name}" for name in FEATURES), *own]
    shared.run_cases(names[half::2], mark, SARTOR_TEST_KERNEL="fp32")


def results(q, k, v, dout, kernel="fp32", **options):
    """out, lse, dq, dk, dv."""
    return shared.forward_and_gradients(q, k, v, dout, kernel, **options)


def marks(monkeypatch):
    """A list to which each launch over marked tiles adds how many tiles it found marked."""
    found, run = [], launch.run

    def counted(steps, cache, key=None):
        for step in steps:
            if step.name.endswith("exact"):
                x, name = step.arguments, step.name.removesuffix(" exact")
                length, block = ("seqlen_kv", "BLOCK_N") if name == "dkdv" else ("seqlen_q", "BLOCK_M")
                heads = x["heads_q"] // (x["group"] if name == "dkdv" else 1)
                bad = next(value for key, value in x.items() if key.startswith("bad"))
                found.append((name, int((bad[: x["batch"] * heads * -(-x[length] // x[block])] != 0).sum())))
            run([step], {}, key)

    monkeypatch.setattr(launch, "run", counted)
    return found


@pytest.mark.parametrize("dim", sample([1, 8, 17, 40, 80, 128, 256], lambda dim: dim in (8, 80)))
def case_dims(dim):
    verify_as(*inputs(sq=33, skv=49, d=dim), kernel="fp32", causal=True)


@pytest.mark.parametrize("scale", sample([1.0, 8.0], lambda scale: scale == 8.0))
def case_healthy_data_is_not_computed_twice(scale, monkeypatch):
    found = marks(monkeypatch)
    q, k, v = inputs(sq=200, skv=300, d=32)
    results(q * scale, k * scale, v, testing.make_like(q))
    assert found
    assert not any(count for _, count in found)


def case_split_holds_what_it_says():
    """hi and lo add up to x within 2^-23 of it, or 2^-25 units; units are powers of two."""
    from sartor.kernels.triton import split

    x = shared.normal(2, 300, 3, 20) * torch.tensor([1e-30, 1.0, 1e30])[:, None]
    x[0, 5, 0, 0], x[1, 200:, 1] = 1e-4, 0.0
    pairs = split.allocate(x)
    launch.run([split.step("x", x, pairs, strict=False)], {})
    hi, lo = (pairs.data[..., i : i + 20].double() for i in (0, split.pitch(20)))
    unit = pairs.units.double().transpose(1, 2).repeat_interleave(split.SEGMENT.value, 1)[:, :300, :, None]
    error = ((hi + lo) * unit - x).abs()
    assert (error <= torch.maximum(x.abs().double() * 2.0**-23, unit * 2.0**-25)).all()
    assert (torch.frexp(pairs.units).mantissa == 0.5).all()
    assert not pairs.data[..., 20:24].any()


def case_split_names_what_it_cannot_hold():
    from sartor.kernels.triton import split

    x = shared.normal(1, 4 * 128, 1, 16)
    x[0, 0, 0, 0] = torch.inf
    x[0, 130, 0] *= 1e-6  # a row
    x[0, 256:384, 0, 3] *= 1e-6  # a column
    x[0, 400, 0, 5] = 1e-9  # one element
    for wide, nan in ((True, [True, True, True, False]), (False, [True, False, False, False])):
        pairs = split.allocate(x)
        launch.run([split.step("x", x, pairs, wide)], {})
        assert pairs.units[0, 0].isnan().tolist() == nan


SPREAD = torch.logspace(-6, 6, 16)
HARD = {
    "one_in_q": lambda q, k, v: q[:, 11, :, 3].fill_(1e4),
    "one_in_k": lambda q, k, v: k[:, 11, :, 3].fill_(1e4),
    "one_in_v": lambda q, k, v: v[:, 11, :, 3].fill_(1e4),
    "columns_of_v": lambda q, k, v: v.mul_(SPREAD),
    "columns_of_k_against_q": lambda q, k, v: (k.mul_(SPREAD), q.div_(SPREAD)),
    "rows_of_v": lambda q, k, v: v.mul_(torch.logspace(-6, 6, v.shape[1])[:, None, None]),
    "tiny": lambda q, k, v: v.mul_(1e-30),
    "huge": lambda q, k, v: (v.mul_(1e36), k.mul_(1e20), q.mul_(1e-20)),
}


@pytest.mark.parametrize("case", sample(HARD, ["one_in_q", "columns_of_v", "huge"].__contains__))
@pytest.mark.parametrize("causal", sample([False, True], lambda causal: causal))
def case_hard_data(case, causal):
    """As accurate as PyTorch's float32, column by column: a small one does not hide behind a large one."""
    q, k, v = inputs(hq=1, sq=150, skv=150)
    HARD[case](q, k, v)
    dout = testing.make_like(q) * 1e-6
    found = results(q, k, v, dout, causal=causal)
    exact = results(q.double(), k.double(), v.double(), dout.double(), "reference", causal=causal)
    plain = dict(zip(("out", "lse"), testing.low_precision(q, k, v, causal=causal), strict=True))
    plain |= testing.low_precision_gradients(q, k, v, dout, causal=causal)
    for name in ("out", "lse") if case.startswith("one") else exact:  # gradients through huge scores: see numerics.md
        for column in range(exact[name].shape[-1] if name != "lse" else 1):
            pick = (..., column) if name != "lse" else ...
            ours, theirs = (testing.measure(t[name][pick], exact[name][pick]).rel for t in (found, plain))
            assert ours <= 4 * theirs + 4e-7, f"{name}, column {column}: {ours:.1e}, PyTorch {theirs:.1e}"


def case_keys_of_little_weight(monkeypatch):
    """dv is as accurate where no query gives a key more than 1e-13, and no tile is computed again for it."""
    found = marks(monkeypatch)
    q, k, v = inputs(sq=64, skv=80)
    bias = torch.zeros(64, 80)
    bias[:, 16:32] = -30.0
    verify_as(q, k, v, kernel="fp32", bias=bias)
    assert found
    assert not any(count for _, count in found)


@shared.fine_tiles
def case_wide_heads_alone_are_computed_again(monkeypatch):
    found = marks(monkeypatch)
    q, k, v = inputs(hq=3, hkv=3, sq=64, skv=64)
    v[:, :, 1] *= SPREAD
    results(q, k, v, testing.make_like(q))
    assert found == [("forward", 2), ("dq", 2), ("dkdv", 2)]


@shared.fine_tiles
def case_scores_that_pairs_do_not_resolve(monkeypatch):
    """Large numbers in q meet small ones in k: the error of a score would show in its exponential."""
    found = marks(monkeypatch)
    q, k, v = inputs(hq=1, sq=64, skv=64)
    q[..., :8], q[..., 8:], k[..., :8], k[..., 8:] = (
        q[..., :8] * 1e6,
        q[..., 8:] * 1e-6,
        k[..., :8] * 1e-6,
        k[..., 8:] * 1e6,
    )
    out = sartor.attention(q, k, v, kernel="fp32")
    assert found == [("forward", 2)]
    testing.check_all({"out": out}, q, k, v)
