"""What the CUDA kernels are told of masks and scores."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import dialects
from sartor import mods
from sartor.kernels.cuda import brought, expressions
from sartor.mods.program import Program
from sartor.problem import Call, Problem


def table(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def program(**options):
    q, k = table(1, 64, 4, 32), table(1, 96, 4, 32)
    return Problem.of(Call(q, k, k, **options)).program


@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({"bias": table(4, 64, 96, dtype=torch.bfloat16)}, (0,)),
        ({"mask": table(64, 96, dtype=torch.bool), "bias": table(64, 96)}, (0, 1)),
        ({"mask": table(1, 96, dtype=torch.bool)}, ()),  # one row of keys for all queries
        ({"bias": table(64, 1)}, ()),  # one column
        ({"bias": table(96, 64).T}, ()),  # keys lie apart
        ({"bias": table(64, 96, dtype=torch.float64)}, (0,)),  # read as float32
        (
            {"mask": mods.Mask(lambda b, h, q, kv, aux: aux[0] > 0, (table(64, 96, dtype=torch.float64),))},
            (),
        ),  # too wide
        ({"causal": True, "softcap": 30.0}, ()),
    ],
)
def test_what_is_read_for_every_pair_is_brought_near(options, near):
    assert brought.tiles(program(**options)) == near


def test_near_values_are_read_from_their_argument():
    """`keep` and `score` come twice: for who has a Near, and for who reads in place."""
    found = program(mask=table(64, 96, dtype=torch.bool), bias=table(64, 96))
    lines = expressions.source(found, brought.tiles(found)).splitlines()
    for name, i in (("DEVICE bool keep(", 0), ("DEVICE float score(", 1)):
        in_place, near = (line for line in lines if line.startswith(name))
        assert f"x.a{i}[" in in_place
        assert "Near& y" not in in_place
        assert f"y.a{i}" in near
        assert f"x.a{i}[" not in near


def test_near_values_that_a_kernel_brings_itself():
    """It puts what it has of one pair where `keep` and `score` look for it."""
    found = program(mask=table(4, 64, 96, dtype=torch.bool), bias=table(64, 96, dtype=torch.bfloat16))
    text = expressions.source(found, brought.tiles(found), tiles=False)
    assert expressions.seen_and_added(found, brought.tiles(found)) == (0, 1)
    assert "void put_seen(Near& y, bool value) { y.a0 = value; }" in text
    assert "void put_added(Near& y, u16 value) { y.a1 = value; }" in text
    assert text.count("DEVICE float score_and_rise(") == 2
    assert "NearTile" not in text


def test_scores_divide_without_a_branch_and_masks_exactly():
    mask = mods.Mask(lambda b, h, q, kv, aux: q / 2 > kv)
    text = expressions.source(program(softcap=30.0, mask=mask))
    assert "ratio(s, x.a0)" in text
    assert "divide(q, 2)" in text


def test_intervals_of_rows_and_columns():
    causal, window = program(causal=True), program(window=(5, None))
    for found in (causal, window):
        text = expressions.source(found)
        assert "DEVICE Span rows(int b, int h, int q, " in text
        assert "DEVICE Span cols(int b, int h, int kv, " in text
        assert found.is_interval_both_ways
    ids = table(1, 96, dtype=torch.int64)
    assert not program(mask=mods.document(ids[:, :64], ids)).is_interval_both_ways
    assert not program().is_interval_both_ways


def test_what_cuda_would_take_otherwise():
    """Each dtype by its own widening, positions past the end moved to the last, Python's // and %, infinity's sign."""

    def text(**options):
        q, k = (torch.empty(1, n, 4, 32, device="meta") for n in (64, 96))
        return expressions.source(Problem.of(Call(q, k, k, **options)).program)

    for dtype, word in ((torch.float16, "Half16<false>::widen(x.a0["), (torch.bfloat16, "Half16<true>::widen(x.a0[")):
        found = text(bias=torch.empty(4, 64, 96, dtype=dtype, device="meta"))
        assert word in found
        assert "i64(imin(q, n.seqlen_q - 1)) * x.a0_q + imin(kv, n.seqlen_kv - 1)" in found
    found = text(mask=mods.Mask(lambda b, h, q, kv, aux: (q // 3 + kv % 5) % 2 == 0))
    assert "(((q / 3) + (kv % 5)) % 2)" in found
    assert [expressions._number(x) for x in (math.inf, -math.inf, 2**31, 0.5)] == [
        "INF",
        "-INF",
        "2147483648ll",
        "0.5f",
    ]


def test_integers_have_32_bits():
    """Which is said; a prefix needs no more."""
    found = Program.of(mods.Mask(lambda b, h, q, kv, aux: kv < aux[0], (2**31,)), None)[0]
    with pytest.raises(ValueError, match="must have 32 bits on GPUs, got 2147483648: give it as a tensor"):
        expressions.arguments((2**31,), found)
    assert [mods.prefix(n).aux[0] for n in (-(2**40), 3, 2**40)] == [0, 3, mods.core.BIG]


def test_ends_of_64_bits_are_narrowed():
    """An end read from a table of int64 may lie beyond every int; others cost no comparison."""

    def rows(**options):
        (line,) = (line for line in expressions.source(program(**options)).splitlines() if " rows(" in line)
        return line

    ids = table(1, 96, dtype=torch.int64)
    assert rows(mask=mods.prefix(ids[0, :1])).count("narrow(") == 2
    assert rows(mask=mods.prefix(ids[0, :1].int())).count("narrow(") == 0
    far = mods.Mask(lambda b, h, q, kv, aux: kv < 1 << 40, rows=lambda b, h, q, aux: (0, 1 << 40, 0, 0))
    assert "narrow(1099511627776ll)" in rows(mask=far)


HOST = """
#include <cmath>
#include <cstring>
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef long long i64;
#define DEVICE static inline
#define __restrict__
#define INF INFINITY
constexpr float LOG2_E = 1.4426950408889634f;
int imin(int a, int b) { return a < b ? a : b; }
float __fdiv_rn(float a, float b) { return a / b; }
float __fsqrt_rn(float a) { return sqrtf(a); }
float reciprocal(float x) { return 1 / x; }
float reciprocal_normal(float x) { return 1 / x; }
float power2(float x) { return exp2f(x); }
template <bool BF16> struct Half16 {
  static float widen(u16 x) { _Float16 half; memcpy(&half, &x, 2); return half; }
};
struct Shape { int seqlen_q, seqlen_kv; };
"""
ONE = """
namespace mask%d {
%s
extern "C" void run%d(
    const void* s, const void* u, const void* f, const void* t, int seqlen_q, int seqlen_kv, bool* out) {
  const Shape n{seqlen_q, seqlen_kv};
  const Aux x{(const signed char*)s, seqlen_kv, (const u8*)u, seqlen_kv, (const u16*)f, seqlen_kv, -3, 2.5f%s};
  for (int q = 0; q < n.seqlen_q; q++)
    for (int kv = 0; kv < n.seqlen_kv; kv++) *out++ = keep(0, 0, q, kv, x, n);
}
}
"""


@pytest.fixture
def compiled(tmp_path):
    """What makes functions of generated texts: with the shelf they stand on, compiled for this machine."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")

    def build(texts):
        shelf = re.sub(r"#.*", "", Path(expressions.__file__).with_name("expressions.cuh").read_text())
        source, library = tmp_path / "texts.cpp", tmp_path / "texts.so"
        source.write_text("\n".join([HOST, shelf, *texts]))
        subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
        return ctypes.CDLL(str(library))

    return build


def test_a_mask_means_in_cpp_what_it_says_in_python(compiled):
    """The text that kernels are made of."""
    made = dialects.make(13, 17)
    programs = [Program.of(mask, None)[0] for mask, _ in made.values()]
    table = ["", ", (const i64*)t, 3, 7"]
    functions = compiled([ONE % (i, expressions.source(p), i, table[len(p.aux) > 5]) for i, p in enumerate(programs)])
    for i, (name, (mask, want)) in enumerate(made.items()):
        found = torch.zeros(13, 17, dtype=torch.bool)
        tables = [ctypes.c_void_p(t.data_ptr()) for t in (*mask.tensors, found)]
        getattr(functions, f"run{i}")(*tables[:3], tables[-2], 13, 17, tables[-1])
        assert torch.equal(found, want), name


SCORE = """
namespace score%d {
%s
extern "C" void change%d(const float* s, int count, float* out, float* rise) {
  const Shape n{64, 96};
  const Aux x{%s};
  for (int i = 0; i < count; i++) out[i] = score_and_rise(s[i], 0, 0, 7, 5, x, n, rise[i]);
}
}
"""


@pytest.mark.parametrize("half", [False, True])
def test_a_score_and_its_derivative_in_cpp(compiled, half):
    """As autograd has them, for scores of numbers alone; for 16-bit operands tanh is coarser."""
    made = {"softcap": mods.softcap(3.0), "nested": mods.softcap(2.0).then(mods.softcap(1.0))}
    names = "capped", "clipped", "rational", "tripled", "of_signs", "hidden", "functions", "exponential", "powers"
    made |= {name: score for name, score in dialects.scores(1, 1, 1).items() if name in names}
    functions = compiled([
        SCORE % (i, expressions.source(Program.of(None, score)[0], half=half), i, ", ".join(map(str, score.aux)))
        for i, score in enumerate(made.values())
    ])  # fmt: skip
    powers = torch.linspace(-12, 4, 3000).exp2()
    for i, (name, score) in enumerate(made.items()):
        s = torch.cat([powers, -powers]).requires_grad_()
        out, rise = torch.zeros(2, len(s))
        tables = [ctypes.c_void_p(t.data_ptr()) for t in (s.detach(), out, rise)]
        getattr(functions, f"change{i}")(tables[0], len(s), *tables[1:])
        want = score.fn(s.double(), 0, 0, 7, 5, score.aux)
        (slope,) = torch.autograd.grad(want.sum(), s)
        assert torch.allclose(out.double(), want, rtol=6e-5 if half else 1e-6, atol=1e-6), name
        assert torch.allclose(rise, slope, rtol=1e-4, atol=3e-6), name


def test_a_tanh_is_made_once():
    """Of the score and of its derivative: compilers see no equality in what is written in PTX."""
    text = expressions.source(program(softcap=30.0), half=True)
    (line,) = (line for line in text.splitlines() if "const float t0" in line)
    assert line == "  const float t0 = tanh_half(ratio(s, x.a0));"
    assert text.count("tanh_half") == 3  # two of `score`, one of `score_and_rise`
    assert "tanh_half" not in expressions.source(program(softcap=30.0))


def test_distances_are_told_from_other_reads():
    """A table is a strip where its last index grows by one with the query and falls by one with the key, or the
    reverse, and all else of the index is the same for all pairs."""
    one = table(4, 191)
    for read, strips in (
        (lambda a, b, h, q, kv: a[h, q - kv + 95], (0,)),
        (lambda a, b, h, q, kv: a[b, 3 - (q - kv)], (0,)),
        (lambda a, b, h, q, kv: a[h, q - kv] * a[h, q - kv], (0,)),
        (lambda a, b, h, q, kv: a[h, q - kv] * a[h, kv - q], ()),
        (lambda a, b, h, q, kv: a[h, q - 2 * kv], ()),
        (lambda a, b, h, q, kv: a[h, abs(q - kv)], ()),
        (lambda a, b, h, q, kv: a[q, q - kv], ()),
        (lambda a, b, h, q, kv: a[h, q], ()),
    ):
        score = mods.Score(lambda s, b, h, q, kv, aux, read=read: s + read(aux[0], b, h, q, kv), (one,))
        found = program(score=score)
        assert brought.strips(found) == strips
        text = expressions.source(found, strips)
        assert ("NearStrip<BLOCK_N>::bring" in text) == bool(strips)


def test_a_bool_tensor_within_limits():
    """Whole words of it become bits where everything else of the mask is an end of the keys that integers tell."""
    keep = table(64, 96, dtype=torch.bool)
    for options, lo, hi in (
        ({}, [], []),
        ({"causal": True}, [], ["((q + aux[0]) + 1)"]),
        ({"window": (9, 3)}, ["((q + aux[2]) - aux[0])"], ["(((q + aux[2]) + aux[1]) + 1)"]),
    ):
        found = program(mask=keep, **options)
        seen = brought.seen(found, brought.tiles(found))
        assert [e.text() for e in seen.lo] == lo
        assert [e.text() for e in seen.hi] == hi
        assert "#define SEEN_AT" in expressions.source(found, brought.tiles(found))
    for mask in (
        mods.Mask(lambda b, h, q, kv, aux: aux[0] & (kv % 3 == 0), (keep,)),
        mods.Mask(lambda b, h, q, kv, aux: aux[0] | (kv < q), (keep,)),
        mods.Mask(lambda b, h, q, kv, aux: ~aux[0], (keep,)),
        mods.Mask(lambda b, h, q, kv, aux: aux[0] & (kv < q / 2), (keep,)),
    ):
        found = program(mask=mask)
        assert brought.seen(found, brought.tiles(found)) is None
        assert "#define SEEN_AT" not in expressions.source(found, brought.tiles(found))
