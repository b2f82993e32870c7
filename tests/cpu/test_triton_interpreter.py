"""The Triton kernels in Triton's interpreter, on CPU tensors, within the budgets that GPUs are held to.

Triton decides when it is imported whether it interprets, so `test_interpreter` runs the `case_*` functions of this file
in processes of their own. To run one of them:

    TRITON_INTERPRET=1 pytest -o python_functions='case_*' tests/cpu/test_triton_interpreter.py -k gqa

`-m ""` takes those of `make test-all` too.

Most cases run on tiles of 64 by 32, those about edges of tiles on 32 by 16, so that a short sequence has empty, partial
and full ones: the interpreter takes as long for a small tile as for a large one. bfloat16 is left to the GPU: the
interpreter has none.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

import buried
import dialects
import sartor
from samples import sample
from sartor import mods, testing
from sartor.kernels.spec import Saved, Tile
from sartor.kernels.triton import launch
from sartor.problem import Call, Problem
from sartor.tuning import table

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
NAN, INF = math.nan, math.inf
FP16, FP32 = torch.float16, torch.float32
KERNEL = os.environ.get("SARTOR_TEST_KERNEL", "triton")  # test_fp32_interpreter.py runs some of the cases as "fp32"


def tiles(large, small):
    """Of queries and keys where queries stay, and the other way round where keys do; by kernel."""
    forward, backward = Tile(large, small), Tile(small, large, then=Tile(large, small))
    both = {"forward": forward, "backward": backward}.items()
    return {f"{family}_{name}": tile for family in ("triton", "fp32") for name, tile in both}


SMALL, FINE = tiles(64, 32), tiles(32, 16)


# Halves of the cases, by their mark: those of `make test`, and those left to `make test-all`
HALVES = sample([(half, mark) for mark in ("not thorough", "thorough") for half in (0, 1)], lambda x: "not" in x[1])


@pytest.mark.skipif(INSIDE, reason="runs the cases in other processes")
@pytest.mark.skipif(not launch.available(), reason="needs Triton")
@pytest.mark.parametrize(("half", "mark"), HALVES)
def test_interpreter(half, mark):
    run_cases([f"{__file__}::{n}" for n in globals() if n.startswith("case_")][half::2], mark)


def run_cases(names, mark="not thorough", **environment):
    """Run cases in a process in which Triton interprets."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore::RuntimeWarning",
        "-o",
        "python_functions=case_*",
        "-m",
        mark,
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"} | environment
    done = subprocess.run([*command, *names], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def small_tiles(request, monkeypatch):
    """Tiles of SMALL, or those that a case is marked with: FINE, or the first legal ones."""
    found = getattr(request.function, "tiles", SMALL)
    if INSIDE and found:
        monkeypatch.setattr(table, "lookup", lambda spec, p, dev: (found.get(spec.name), "small"))
        torch.set_num_threads(1)  # the interpreter's tensors are small
    sartor.plan.choose.cache_clear()
    sartor.plan.choose_backward.cache_clear()
    sartor.ops.PREPARED.clear()


def first_tile(case):
    case.tiles = None
    return case


def fine_tiles(case):
    case.tiles = FINE
    return case


def inputs(b=1, hq=2, hkv=1, sq=70, skv=90, d=16, dv=None, dtype=FP32, **rest):
    """q, k, v in layout (batch, seqlen, heads, dim)."""
    return testing.make_inputs(b, hq, hkv, sq, skv, d, dv, dtype, "cpu", "bshd", **rest)


def verify(*qkv, **options):
    return testing.verify(*qkv, kernel=KERNEL, **options)


def normal(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def forward_and_gradients(q, k, v, dout=None, kernel=KERNEL, **options):
    """out, lse, dq, dk, dv."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = sartor.attention(*leaves, return_lse=True, kernel=kernel, **options)
    grads = torch.autograd.grad(out, leaves, testing.make_like(out) if dout is None else dout)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True))


def equal(x, y):
    """Same bits, NaN included."""
    return all(torch.equal(x[n].nan_to_num(7e7), y[n].nan_to_num(7e7)) for n in x)


# ---- shapes


@pytest.mark.parametrize("dim", sample([1, 17, 40, 80, 96, 112], lambda dim: dim in (1, 40, 96)))
@pytest.mark.parametrize("dtype", [FP32, FP16])
def case_dims(dim, dtype):
    verify(*inputs(sq=33, skv=49, d=dim, dtype=dtype), causal=True, through_lse=dtype == FP32)


@pytest.mark.parametrize(("dim", "dim_v"), [(16, 40), (40, 17), (48, 112)])
def case_dim_v(dim, dim_v):
    verify(*inputs(sq=33, skv=49, d=dim, dv=dim_v))


@fine_tiles
@pytest.mark.parametrize("n", [1, 63, 65])
@pytest.mark.parametrize("causal", [False, True])
def case_lengths(n, causal):
    for sq, skv in ((n, n), (n, 40), (40, n)):
        verify(*inputs(hq=1, sq=sq, skv=skv), causal=causal)


@fine_tiles
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize(("sq", "skv"), [(32, 32), (64, 64), (96, 32), (32, 96), (64, 16), (80, 64)])
def case_whole_tiles(sq, skv, causal):
    """A causal backward once left out the last tile of such lengths."""
    verify(*inputs(hq=1, sq=sq, skv=skv), causal=causal)


@first_tile
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [128, 130])
def case_whole_tiles_as_planned(n, causal):
    verify(*inputs(hq=1, sq=n, skv=n), causal=causal)


def case_gqa():
    verify(*inputs(b=2, hq=6, hkv=2, sq=35, skv=41), causal=True, through_lse=True)


@pytest.mark.parametrize("shape", [(1, 9, 0), (0, 9, 13), (1, 0, 13)])
def case_nothing(shape):
    b, sq, skv = shape
    q, k, v = inputs(b=b, sq=sq, skv=skv)
    for options in ({}, {"causal": True}):
        found = forward_and_gradients(q, k, v, **options)
        assert (found["lse"] == -INF).all()
        assert not any(found[n].any() for n in ("out", "dq", "dk", "dv"))
    sinks = normal(2)
    lse = forward_and_gradients(q, k, v, sinks=sinks)["lse"]
    assert skv or torch.equal(lse, sinks.view(1, -1, 1).expand(lse.shape))


# ---- masks and scores

FEATURES = {
    "full": lambda: {},
    "causal": lambda: {"causal": True},
    "top_left": lambda: {"causal": "top_left"},
    "window": lambda: {"window": (20, 7)},
    "window_left_open": lambda: {"window": (None, 7)},
    "window_right_open": lambda: {"window": (20, -1)},
    "window_of_one": lambda: {"window": (0, 0)},
    "window_top_left": lambda: {"causal": "top_left", "window": (33, None)},
    "mask": lambda: {"mask": normal(70, 90) > -0.5},
    "mask_of_keys": lambda: {"mask": normal(90) > 0},
    "prefix_or_causal": lambda: {"mask": mods.prefix(50) | mods.causal("top_left")},
    "prefix_tensor": lambda: {"mask": mods.prefix(torch.tensor([37]))},
    "document": lambda: {
        "causal": True, "mask": mods.document(*(torch.arange(n)[None] // 25 for n in (70, 90)))
    },
    "document_scattered": lambda: {"mask": mods.document(*(torch.arange(n)[None] % 3 for n in (70, 90)))},
    "cached": lambda: {"mask": mods.cached(torch.tensor([75]), 70, 90, causal=True, window=(30, None))},
    "packed": lambda: {
        "mask": mods.packed(torch.tensor([0, 0, 20, 21, 66]), torch.tensor([0, 9, 31, 80, 85]), 70, 90, window=(9, 2))
    },
    "user": lambda: {"mask": mods.Mask(lambda b, h, q, kv, aux: (q + kv * h + b) % aux[0] != 1, (3,))},
    "user_below_0": lambda: {
        "mask": mods.Mask(lambda b, h, q, kv, aux: ((kv - q) // 8 != -1) & ((q - kv) % aux[0] != -1), (-3,))
    },
    "user_not": lambda: {"mask": mods.Mask(lambda b, h, q, kv, aux: (kv <= q) | ~(aux[0] == 1), (1,))},
    "softcap": lambda: {"softcap": 2.0},
    "alibi": lambda: {"alibi_slopes": normal(2).abs(), "causal": True},
    "sinks": lambda: {"sinks": normal(2), "causal": True},
    "all": lambda: {
        "causal": True, "window": (60, 0), "softcap": 3.0, "alibi_slopes": normal(2).abs(), "sinks": normal(2),
        "bias": normal(2, 70, 90), "mask": normal(90, seed=4) > -1,
    },
}  # fmt: skip


OFTEN = ("full", "causal", "window", "window_top_left", "mask", "cached", "packed", "user", "softcap", "sinks", "all")


@pytest.mark.parametrize("name", sample(FEATURES, OFTEN.__contains__))
def case_features(name):
    verify(*inputs(), through_lse=True, **FEATURES[name]())


@pytest.mark.parametrize("name", sample(dialects.SCORES, list(dialects.SCORES)[::4].__contains__))
def case_scores_of_every_operator(name):
    score = dialects.scores(2, 40, 50)[name]
    verify(*inputs(sq=40, skv=50), causal=True, score=score, through_lse=name not in dialects.OF_PLACES)


TRAINED = {  # by name: a score of tensors that are trained, in their shapes: read at places, or at the position
    "relative": (lambda t, u: lambda s, b, h, q, kv: s * mods.sigmoid(u[h]) + t[h, q - kv + 49] ** 2, (2, 90), (2,)),
    "of_rows": (lambda t, u: lambda s, b, h, q, kv: s + t[q] * u[b, kv], (40,), (2, 50)),
    "of_pairs": (lambda t, u: lambda s, b, h, q, kv: s + t[q, kv] + u[kv // 3, h], (40, 50), (17, 2)),
    "shared": (lambda t, u: lambda s, b, h, q, kv: mods.tanh(s * t[q // 2]) + t[h] * s + u[1, kv], (20,), (2, 50)),
}


@pytest.mark.parametrize("name", sample(TRAINED, lambda name: name == "relative"))
def case_what_a_score_reads_is_trained(name):
    make, *shapes = TRAINED[name]
    q, k, v = inputs(b=2, sq=40, skv=50, requires_grad=True)
    leaves = q, k, v, *(normal(*shape, seed=len(shape)).requires_grad_() for shape in shapes)
    options = {"score": mods.Score(make(*leaves[3:])), "causal": True}
    out, want = (sartor.attention(q, k, v, kernel=kernel, **options) for kernel in (KERNEL, "reference"))
    for _ in range(2):  # as launched anew, and again
        found = torch.autograd.grad(out, leaves, testing.make_like(out), retain_graph=True)
    for d, exact in zip(found, torch.autograd.grad(want, leaves, testing.make_like(out)), strict=True):
        assert torch.allclose(d, exact, rtol=1e-4, atol=1e-5 * exact.abs().max().item())
    with pytest.raises(sartor.Unsupported, match="reads in any order, got deterministic=True"):
        torch.autograd.grad(sartor.attention(q, k, v, kernel=KERNEL, deterministic=True, **options).sum(), leaves)


def case_a_score_that_is_infinite_at_0():
    """As which tiles hold what is not there."""
    q, k, v = (t.abs() + 0.5 for t in inputs(sq=20, skv=27))
    verify(q, k, v, score=mods.Score(lambda s, b, h, q, kv, aux: 1 / s), through_lse=True)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def case_saved_tensors_laid_out_anew(layout):
    """By hooks that keep them elsewhere and give them back dense, before and after a call without."""
    q, k, v = (t[:, :, :, 0] for t in torch.stack(inputs(hkv=2, sq=40, skv=40), 3).split(1, 3))
    bias = normal(40, 40).T
    options = {"layout": layout, "bias": bias}
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    want = forward_and_gradients(q, k, v, **options)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t
    )
    for _ in range(2):
        with hooks:
            assert equal(forward_and_gradients(q, k, v, **options), want)


def case_bfloat16_is_refused():
    """The interpreter computes something else."""
    q, k, v = (t.bfloat16() for t in inputs(sq=5, skv=7))
    assert sartor.explain(q, k, v).plan.kernel.name == "torch_cpu"
    with pytest.raises(sartor.errors.Unsupported, match="Triton's interpreter"):
        sartor.attention(q, k, v, kernel="triton")


@pytest.mark.parametrize("name", sample(dialects.RULES, list(dialects.RULES)[::4].__contains__))
def case_a_mask_means_what_it_says_in_python(name):
    mask, want = dialects.make(40, 50)[name]
    q, k, v = inputs(sq=40, skv=50)
    found, same = (forward_and_gradients(q, k, v, mask=m) for m in (mask, want))
    assert all(torch.allclose(found[n], same[n], rtol=1e-4, atol=1e-5) for n in found)


@pytest.mark.parametrize("kept", [True, False])
def case_a_mask_that_is_the_same_everywhere(kept):
    q, k, v = inputs(sq=8, skv=8)
    mask = mods.Mask(lambda b, h, q, kv: kept)
    found, want = (forward_and_gradients(q, k, v, mask=m) for m in (mask, mask.materialize(1, 1, 8, 8)))
    assert all(torch.allclose(found[n], want[n], rtol=1e-4, atol=1e-5) for n in found)


@fine_tiles
@pytest.mark.parametrize("causal", [True, "top_left"])
@pytest.mark.parametrize(("sq", "skv"), [(90, 40), (40, 90)])
def case_causal_of_other_lengths(sq, skv, causal):
    """More queries than keys leave rows without a key."""
    verify(*inputs(sq=sq, skv=skv), causal=causal)
    found = forward_and_gradients(*inputs(sq=sq, skv=skv), causal=causal)
    dead = max(sq - skv, 0) if causal is True else 0
    assert not found["out"][:, :dead].any()
    assert not found["dq"][:, :dead].any()
    assert (found["lse"][:, :, :dead] == -INF).all()
    assert all(t.isfinite().all() for n, t in found.items() if n != "lse")


SHAPES = [(b, h, i, j) for b in (1, 2) for h in (1, 2) for i in (1, 34) for j in (1, 37)]


@pytest.mark.parametrize("shape", sample([(shape,) for shape in SHAPES], lambda case: case[0] in SHAPES[::5]))
def case_bias(shape):
    """dbias is summed along what the bias was broadcast along."""
    options = {"softcap": 3.0, "alibi_slopes": normal(2).abs(), "sinks": normal(2), "causal": True}
    verify(*inputs(b=2, sq=34, skv=37), bias=normal(*shape), through_lse=True, **options)


HIDDEN = {"full": {}, "causal": {"causal": True}, "sinks": {"sinks": normal(2) - 1e9}}
HIDDEN_CASES = [(name, low) for name in HIDDEN for low in buried.LOW]


@pytest.mark.parametrize(("name", "low"), sample(HIDDEN_CASES, lambda case: case[0] == "full" or case[1] == -1e9))
def case_rows_that_a_bias_hides_all_keys_from(name, low):
    """lse cannot hold the logarithm of 50 beside -1e9, nor finfo.min in the log2 domain; weights still sum to 1."""
    q, k, v = inputs(b=2, sq=40, skv=50, dtype=FP32 if KERNEL == "fp32" else FP16)
    options = HIDDEN[name] | {"bias": buried.bias(low, q.dtype, 40, 50)}
    dout = testing.make_like(q)
    buried.judge(forward_and_gradients(q, k, v, dout, **options), q, k, v, dout, **options)


def of_bias_and_sinks(q, k, v, dout, kernel, bias, sinks):
    """dbias and dsinks by name."""
    leaves = [t.detach().requires_grad_() for t in (bias, sinks)]
    out = sartor.attention(q, k, v, bias=leaves[0], sinks=leaves[1], kernel=kernel)
    return dict(zip(("dbias", "dsinks"), torch.autograd.grad(out, leaves, dout), strict=True))


GRADIENT_CASES = [(low, shape) for low in (-1e9, torch.finfo(FP32).min) for shape in ((40, 50), (40, 1), (1, 50))]


@pytest.mark.parametrize(("low", "shape"), sample(GRADIENT_CASES, lambda case: case[0] == -1e9 or case[1] == (40, 50)))
def case_gradients_of_what_hides_all_keys(low, shape):
    """Sinks as low as the keys have a share of the weights."""
    q, k, v = inputs(b=2, sq=40, skv=50, dtype=FP32 if KERNEL == "fp32" else FP16)
    bias, sinks, dout = torch.full((2, 1, *shape), low), torch.full((2,), low), testing.make_like(q)
    found = of_bias_and_sinks(q, k, v, dout, KERNEL, bias, sinks)
    buried.judge(found, q, k, v, dout, bias=bias, sinks=sinks)


@pytest.mark.parametrize("name", buried.SCORES)
def case_rows_that_a_score_hides_all_keys_from(name):
    q, k, v = inputs(sq=40, skv=50, dtype=FP32 if KERNEL == "fp32" else FP16)
    options = {"score": buried.SCORES[name]}
    dout = testing.make_like(q)
    buried.judge(forward_and_gradients(q, k, v, dout, **options), q, k, v, dout, **options)


@pytest.mark.parametrize("options", [{}, {"bias": normal(40, 1)}], ids=["plain", "bias"])
def case_gradients_of_some_of_the_keys(options):
    """With out and lse of all keys, as a ring has them: the weights of a row do not sum to 1."""
    q, k, v = inputs(sq=40, skv=50, dtype=FP32 if KERNEL == "fp32" else FP16)
    dout = testing.make_like(q)
    out, lse = sartor.attention(q, k, v, return_lse=True, kernel=KERNEL, **options)
    parts = []
    for some in (slice(0, 20), slice(20, 50)):
        call = Call(q, k[:, some], v[:, some], kernel=KERNEL, **options)
        prepared = sartor.ops.prepare(call)
        saved = Saved(out, lse, dout, None)
        parts.append(sartor.ops._backward(prepared, prepared.operands(call), saved, shared_lse=True))
    dk, dv = (torch.cat([getattr(g, name) for g in parts], 1) for name in ("dk", "dv"))
    buried.judge({"out": out, "dq": parts[0].dq + parts[1].dq, "dk": dk, "dv": dv}, q, k, v, dout, **options)


def case_overlapping_rows():
    """Whose `empty_like` has another dim innermost."""
    x = normal(1, 51).unfold(-1, 32, 1)[:, :, None]
    verify(x, x, x)


def case_no_key_at_all():
    q, k, v = inputs(sq=40, skv=50)
    nothing = torch.zeros(40, 50, dtype=torch.bool)
    for options in ({"mask": nothing}, {"mask": mods.prefix(0)}, {"bias": torch.full((40, 50), -INF)}):
        found = forward_and_gradients(q, k, v, **options)
        assert (found["lse"] == -INF).all()
        assert not any(found[n].any() for n in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def case_scale(scale):
    for options in ({"causal": True}, {"softcap": 2.0}):
        verify(*inputs(sq=40, skv=50), softmax_scale=scale, **options)


def case_tf32():
    """The interpreter computes tf32 products exactly, from inputs rounded to tf32."""
    q, k, v = inputs(sq=40, skv=50)
    exact = sartor.attention(q, k, v, kernel="triton")
    rounded = sartor.attention(q, k, v, kernel="triton", precision="tf32")
    error = (exact - rounded).abs().max()
    assert 0 < error <= 2**-8 * v.abs().max()


# ---- what is masked reaches nothing, not as NaN either

HIDING = {
    "causal": lambda: {"causal": True},
    "window": lambda: {"window": (20, 10)},
    "mask": lambda: {"mask": normal(70, 90) > 0},
    "prefix": lambda: {"mask": mods.prefix(40) | mods.causal("top_left")},
}


def same_pattern(found, exact):
    """NaN and infinities where the definition has them."""
    for n, t in found.items():
        assert torch.equal(t.isnan(), exact[n].isnan()), n
        assert torch.equal(t == INF, exact[n] == INF), n
        assert torch.equal(t == -INF, exact[n] == -INF), n


@pytest.mark.parametrize("case", sample(HIDING, lambda case: case == "causal"))
@pytest.mark.parametrize(
    ("which", "value"),
    sample(
        [("q", NAN), ("k", NAN), ("v", NAN), ("v", INF), ("dout", NAN)],
        [("k", NAN), ("v", INF), ("dout", NAN)].__contains__,
    ),
)
def case_spoilt(which, value, case):
    q, k, v = inputs(hq=1)
    dout = testing.make_like(q)
    spoilt = {"q": q, "k": k, "v": v, "dout": dout}[which]
    spoilt[0, 45, 0, 3] = value
    options = HIDING[case]()
    found = forward_and_gradients(q, k, v, dout, **options)
    exact = forward_and_gradients(q.double(), k.double(), v.double(), dout.double(), "reference", **options)
    assert not all(t.isfinite().all() for n, t in found.items() if n != "lse")
    same_pattern(found, exact)
    healthy = inputs(hq=1)
    size, s_max = testing.magnitudes(*healthy, testing.make_like(q), **options)
    for n, t in found.items():  # where they are finite: the noise of float32, whose terms the healthy call gives
        finite = exact[n].isfinite()
        e, terms = exact[n].where(finite, 0), size[n].where(finite, 0)
        testing.check(t.where(finite, 0), e.float(), e, magnitude=terms, s_max=s_max, name=n)


@fine_tiles
def case_dead_keys_of_any_value():
    q, k, v = inputs(sq=40, skv=60)
    options = {"mask": mods.prefix(33)}
    clean = forward_and_gradients(q, k, v, **options)
    k[:, 33:], v[:, 33:] = NAN, INF
    found = forward_and_gradients(q, k, v, **options)
    assert all(t.isfinite().all() for t in found.values())
    for results in (clean, found):
        testing.check_all(results, *inputs(sq=40, skv=60), testing.make_like(q), **options)


# ---- one call after another


@fine_tiles
def case_window_after_window():
    """A plan once kept the first window's numbers."""
    q, k, v = inputs(sq=60, skv=60)
    results = []
    for window in ((5, 0), (30, 0), (5, 9)):
        verify(q, k, v, window=window)
        results.append(sartor.attention(q, k, v, window=window, kernel=KERNEL))
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    "layout", sample(["swapped", "packed", "step", "last", "transposed", "offset"], lambda layout: layout == "packed")
)
def case_strides_after_strides(layout):
    """A plan once kept the first strides. The layout of dout is another matter than that of q, k and v."""
    q, k, v = inputs(hq=2, hkv=2, sq=40, skv=40)
    dout, dlse = testing.make_like(q), normal(1, 2, 40)
    plain = forward_and_gradients(q, k, v, dout, causal=True)
    other = [testing.layouts(t)[layout] for t in (q, k, v)]
    assert equal(forward_and_gradients(*other, dout, causal=True), plain)
    assert equal(forward_and_gradients(q, k, v, testing.layouts(dout)[layout], causal=True), plain)
    assert equal(forward_and_gradients(q, k, v, torch.ones(()).expand(q.shape), causal=True),
                 forward_and_gradients(q, k, v, torch.ones(q.shape), causal=True))  # fmt: skip
    assert equal(forward_and_gradients(q, k, v, dout, causal=True), plain)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    ends = sartor.attention(*leaves, causal=True, return_lse=True, kernel=KERNEL)
    both = torch.autograd.grad(ends, leaves, (dout, dlse), retain_graph=True)
    without = torch.autograd.grad(ends[:1], leaves, dout)
    assert all(torch.equal(g, plain[n]) for g, n in zip(without, ("dq", "dk", "dv"), strict=True))
    found = dict(zip(("dq", "dk", "dv"), both, strict=True))
    testing.check_all(found, q, k, v, dout, dlse, causal=True)


def case_bits():
    """Run to run, and whatever else is in the batch."""
    q, k, v = inputs(b=2, sq=40, skv=50)
    found = forward_and_gradients(q, k, v, causal=True)
    assert equal(found, forward_and_gradients(q, k, v, causal=True))
    dout = testing.make_like(q)
    alone = forward_and_gradients(q[1:], k[1:], v[1:], dout[1:], causal=True)
    assert equal(alone, {n: t[1:] for n, t in found.items()})


def case_source_has_no_numbers():
    """A window's size, a prefix's length and a softcap go through `aux`: a new one compiles nothing."""
    from sartor.kernels.triton import codegen

    q, k, v = (torch.empty(1, 64, 2, 16) for _ in range(3))

    def source(**options):
        return codegen.source(Problem.of(Call(q, k, v, **options)).program)

    text = source(window=(12345, 77), softcap=98.5, mask=mods.prefix(4321))
    assert all(number not in text for number in ("12345", "77", "98.5", "4321"))
    assert text == source(window=(3, 5), softcap=2.5, mask=mods.prefix(6))


# ---- dropout

SEED = torch.tensor([0x0123456789ABCDEF])
DROPOUT = {"dropout_p": 0.3, "dropout_seed": SEED}


def case_a_dropout_mask_is_the_references_bit_for_bit():
    """Forward, by values that tell keys apart; backward, by gradients of the values that tell queries apart."""
    q, k, _ = inputs(b=2, hkv=2, sq=40, skv=50)
    v = torch.eye(50).view(1, 50, 1, 50).expand(2, 50, 2, 50)
    for options in ({}, {"causal": True}):
        out, want = (sartor.attention(q, k, v, kernel=kernel, **DROPOUT, **options) for kernel in (KERNEL, "reference"))
        assert torch.equal(out != 0, want != 0)
        v_ = torch.randn(2, 50, 2, 40, requires_grad=True)
        dout = torch.eye(40).view(1, 40, 1, 40).expand(2, 40, 2, 40)
        (dv,) = torch.autograd.grad(sartor.attention(q, k, v_, kernel=KERNEL, **DROPOUT, **options), v_, dout)
        assert torch.equal(dv != 0, (want != 0).transpose(1, 3))


DROPPED = ("full", "causal", "window", "mask", "softcap", "all")


@pytest.mark.parametrize("name", sample(DROPPED, ("causal", "all").__contains__))
def case_dropout_with_features(name):
    verify(*inputs(b=2), through_lse=True, **DROPOUT, **FEATURES[name]())


def case_dropout_with_what_else_there_is():
    verify(*inputs(hq=6, hkv=2, sq=35, skv=41, d=40, dv=17), **DROPOUT)
    bias = normal(1, 1, 1, 41).where(normal(41) > 0, -1e9)  # as a mask: rows' sums beside lse
    verify(*inputs(b=2, sq=35, skv=41), bias=bias, **DROPOUT)
    q, k, v = inputs(b=2, sq=40, skv=50, requires_grad=True)
    leaves = q, k, v, normal(2, 90).requires_grad_()
    score = mods.Score(lambda s, b, h, q, kv: s + leaves[3][h, q - kv + 49] ** 2)
    out, want = (sartor.attention(q, k, v, kernel=kernel, score=score, **DROPOUT) for kernel in (KERNEL, "reference"))
    found, exact = (torch.autograd.grad(x, leaves, testing.make_like(want)) for x in (out, want))
    for d, e in zip(found, exact, strict=True):
        assert torch.allclose(d, e, rtol=1e-4, atol=1e-5 * e.abs().max().item())


def case_dropout_of_16_bits():
    verify(*inputs(b=2, hq=6, hkv=2, sq=35, skv=41, d=40, dv=17, dtype=FP16), causal=True, **DROPOUT)


@first_tile
def case_dropout_as_planned():
    verify(*inputs(hq=1, sq=130, skv=130), causal=True, **DROPOUT)


PARTS = {  # seeds of parts of a larger problem
    "sixteens": torch.cat([SEED, torch.tensor([1, 2, 3, 5])]),
    "in steps": torch.cat([SEED, torch.tensor([1, 2, 3, 2, 7, 3])]),
}


@pytest.mark.parametrize("name", PARTS)
def case_dropout_of_a_part(name):
    """The mask of the reference, in the forward and in the gradients of q, k and v."""
    q, k, _ = inputs(b=2, hkv=2, sq=40, skv=50)
    v = torch.eye(50).view(1, 50, 1, 50).expand(2, 50, 2, 50)
    given = {"dropout_p": 0.3, "dropout_seed": PARTS[name]}
    out, want = (sartor.attention(q, k, v, kernel=kernel, **given) for kernel in (KERNEL, "reference"))
    assert torch.equal(out != 0, want != 0)
    verify(*inputs(b=2, sq=35, skv=41), causal=True, **given)
