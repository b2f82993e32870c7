"""Every mask against a literal matrix, the soundness of its bounds, and what the tracer says to bad functions."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dialects
from sartor import attention, mods, ops
from sartor.mods import core, expr, program, tracing
from sartor.mods.core import BIG
from sartor.mods.derivative import diff
from sartor.mods.expr import Expr, evaluate, lift
from sartor.mods.masks import from_tensor
from sartor.mods.program import Program
from sartor.mods.recent import Recent
from sartor.mods.tracing import resolve
from sartor.problem import Call, Problem


def matrix(text):
    """Rows of # (visible) and . (masked)."""
    return torch.tensor([[c == "#" for c in row] for row in text.split()])


LITERAL = {
    "causal": (mods.causal(), "##... ###.. ####. #####"),
    "causal_tall": (mods.causal(), "... ... #.. ##. ###"),
    "causal_top_left": (mods.causal("top_left"), "#.... ##... ###.. ####."),
    "window": (mods.window(1, 0), "##... .##.. ..##. ...##"),
    "window_both": (mods.window(1, 1), "###.. .###. ..### ...##"),
    "window_top_left": (mods.window(0, 1, "top_left"), "##... .##.. ..##. ...##"),
    "window_left_open": (mods.window(None, 0), "##... ###.. ####. #####"),
    "window_right_open": (mods.window(0, -1), ".#### ..### ...## ....#"),
    "window_open": (mods.window(None, None), "##### ##### ##### #####"),
    "prefix": (mods.prefix(2), "##... ##... ##... ##..."),
    "prefix_none": (mods.prefix(0), "..... ..... ..... ....."),
    "prefix_tensor": (mods.prefix(torch.tensor([3])), "###.. ###.. ###.. ###.."),
    "document": (mods.document(torch.tensor([[0, 0, 1, 2]])), "##.. ##.. ..#. ...#"),
    "document_scattered": (mods.document(torch.tensor([[0, 1, 0, 1]])), "#.#. .#.# #.#. .#.#"),
    "document_kv": (mods.document(torch.tensor([[0, 1]]), torch.tensor([[1, 0, 2]])), ".#. #.."),
    "tensor": (from_tensor(matrix("#.# .#.")), "#.# .#."),
    "and": (mods.causal() & mods.prefix(2), "##... ##... ##... ##..."),
    "or": (mods.window(0, 0) | mods.prefix(1), "##... #.#.. #..#. #...#"),
    "not": (~mods.causal("top_left"), ".#### ..### ...## ....#"),
    "sinks_and_window": (mods.causal() & (mods.prefix(1) | mods.window(1, 0)), "##... ###.. #.##. #..##"),
    "user": (mods.Mask(lambda b, h, q, kv, aux: (q + kv) % aux[0] == 0, (2,)), "#.#.# .#.#. #.#.# .#.#."),
}


@pytest.mark.parametrize("name", LITERAL)
def test_literal(name):
    mask, text = LITERAL[name]
    want = matrix(text)
    got = mask.materialize(1, 1, *want.shape)
    assert got.dtype == torch.bool
    assert torch.equal(got[0, 0], want)
    assert_sound(mask, 1, 1, *want.shape)


def test_masks_of_batch_and_head():
    lengths = mods.prefix(torch.tensor([1, 3]))
    assert lengths.materialize(2, 1, 1, 4).int().sum(-1).flatten().tolist() == [1, 3]
    per_head = mods.Mask(lambda b, h, q, kv, aux: kv <= h)
    assert per_head.materialize(1, 3, 1, 4).int().sum(-1).flatten().tolist() == [1, 2, 3]


def spans(mask, which, batch, heads, sq, skv):
    """lo, hi, full_lo, full_hi as (batch, heads, positions) tensors."""
    n = sq if which == "rows" else skv
    axes = (torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1))
    position = torch.arange(n).view((-1, 1) if which == "rows" else (1, -1))
    aux = tuple(resolve(a, sq, skv) for a in mask.aux)
    found = getattr(mask, which)(*axes, position, aux)
    shape = (batch, heads, n, 1) if which == "rows" else (batch, heads, 1, n)
    return [torch.as_tensor(x).expand(shape).reshape(batch, heads, n) for x in found]


def assert_sound(mask, batch, heads, sq, skv):
    """`rows` and `cols` never exclude a visible pair, and what they call full is visible."""
    keep = mask.materialize(batch, heads, sq, skv)
    for which, matrix_, other in (("rows", keep, skv), ("cols", keep.transpose(2, 3), sq)):
        lo, hi, full_lo, full_hi = spans(mask, which, batch, heads, sq, skv)
        at = torch.arange(other)
        inside = (at >= lo[..., None]) & (at < hi[..., None])
        full = (at >= full_lo[..., None]) & (at < full_hi[..., None])
        assert not (matrix_ & ~inside).any(), which
        assert not (full & ~matrix_).any(), which


SIDES = st.none() | st.integers(-1, 12)
ALIGN = st.sampled_from(["bottom_right", "top_left"])
BATCH, HEADS = 2, 2


@st.composite
def leaves(draw, sq, skv):
    """A mask without operators."""
    kind = draw(st.sampled_from(["causal", "window", "prefix", "lengths", "document", "tensor", "user"]))
    if kind == "causal":
        return mods.causal(draw(ALIGN))
    if kind == "window":
        return mods.window(draw(SIDES), draw(SIDES), draw(ALIGN))
    if kind == "prefix":
        return mods.prefix(draw(st.integers(0, skv + 2)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    if kind == "lengths":
        return mods.prefix(torch.randint(0, skv + 2, (BATCH,), generator=generator))
    if kind == "document":
        ids, kv_ids = (
            torch.randint(0, 3, (draw(st.sampled_from([1, BATCH])), n), generator=generator) for n in (sq, skv)
        )
        ordered = draw(st.booleans())
        return mods.document(ids.sort(1).values if ordered else ids, kv_ids.sort(1).values if ordered else kv_ids)
    if kind == "tensor":
        return from_tensor(torch.rand(BATCH, 1, sq, skv, generator=generator) > 0.3)
    step = draw(st.integers(2, 4))
    return mods.Mask(lambda b, h, q, kv, aux: (q * 3 + kv + h + b) % aux[0] != 0, (step,))


@st.composite
def masks(draw, sq, skv, depth=2):
    """A mask made of others by &, | and ~."""
    sign = draw(st.sampled_from(["leaf", "&", "|", "~"])) if depth else "leaf"
    if sign == "leaf":
        return draw(leaves(sq, skv))
    left = draw(masks(sq, skv, depth - 1))
    if sign == "~":
        return ~left
    right = draw(masks(sq, skv, depth - 1))
    return left & right if sign == "&" else left | right


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(st.data())
def test_bounds_are_sound(data):
    sq, skv = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12))
    assert_sound(data.draw(masks(sq, skv)), BATCH, HEADS, sq, skv)


def test_operators_are_those_of_matrices():
    a, b = mods.causal(), mods.window(2, 1, "top_left")
    full = [m.materialize(1, 1, 7, 9) for m in (a, b, a & b, a | b, ~a)]
    assert torch.equal(full[2], full[0] & full[1])
    assert torch.equal(full[3], full[0] | full[1])
    assert torch.equal(full[4], ~full[0])
    keep = torch.rand(1, 1, 7, 9, generator=torch.Generator().manual_seed(0)) > 0.5  # a tensor on either side
    for either, both in ((a | keep, a & keep), (keep | a, keep & a)):
        assert torch.equal(either.materialize(1, 1, 7, 9), full[0] | keep)
        assert torch.equal(both.materialize(1, 1, 7, 9), full[0] & keep)


# ---- the tracer


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (lambda b, h, q, kv, aux: q > 3 and kv > 3, "`and`"),
        (lambda b, h, q, kv, aux: not q > 3, "`not`"),
        (lambda b, h, q, kv, aux: 0 <= kv < q, "`and`"),
        (lambda b, h, q, kv, aux: aux[0][q] > 0, "indexed"),
        (lambda b, h, q, kv, aux: (q + kv)[h] > 0, "one number"),
        (lambda b, h, q, kv, aux: sum(q) > 0, "iteration"),
        (lambda b, h, q, kv, aux: kv < "7", "str"),
        (lambda b, h, q, kv, aux: None, "NoneType"),
        (lambda b, h, q, kv, aux: q - kv, r"comparison.*\(q - kv\)"),
        (lambda b, h, q, kv, aux: (q > kv) & 1, "comparison"),
        (lambda b, h, q, kv, aux: ~(q - kv), "comparison"),
        (lambda b, h, q, kv, aux: mods.where(q > kv, q < 3, kv), "comparison"),
        (lambda b, h, q, kv, aux: aux[0], "comparison"),
        (lambda b, h, q, kv, aux: (q > kv, q < 3), "2 values"),
    ],
)
def test_bad_functions_are_refused(function, word):
    with pytest.raises(TypeError, match=word):
        mods.Mask(function, (1,))


def test_what_is_boolean_is_accepted():
    table = torch.tensor([[True, False]])
    for keep in (
        lambda b, h, q, kv, aux: True,
        lambda b, h, q, kv, aux: aux[0],
        lambda b, h, q, kv, aux: ~aux[0] ^ (q >= kv),
        lambda b, h, q, kv, aux: mods.where(aux[0], q >= kv, False),
    ):
        assert mods.Mask(keep, (table,)).materialize(1, 1, 2, 2).dtype == torch.bool
    with pytest.raises(TypeError, match="comparison"):
        mods.Mask(lambda b, h, q, kv, aux: aux[0], (table.int(),))


def test_ids_beyond_int32():
    """They are told apart, and kept in int32; whatever integers the two are of."""
    ids = torch.tensor([[0, 0, 2**32, 2**32, 1], [-(2**63), 2**63 - 1, -1, 2**32 - 1, -1]])
    for kv_ids in (ids, torch.tensor([[1, 0, 2**32]]), torch.tensor([[1, 0, 0, 7]]).int()):
        mask = mods.document(ids, kv_ids)
        shape = 2, 1, ids.shape[1], kv_ids.shape[1]
        assert torch.equal(mask.materialize(*shape)[:, 0], ids[:, :, None] == kv_ids[:, None])
        assert {t.dtype for t in mask.tensors} == {torch.int32}
        assert_sound(mask, *shape)


@given(data=st.data(), sq=st.integers(1, 12), skv=st.integers(1, 12))
def test_tables_tell_intervals_both_ways(data, sq, skv):
    """Of documents that lie together and of packed sequences, within causality, a window or a prefix too: each query
    sees all of its interval, each key is seen by all of its own."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    kind, batch = data.draw(st.sampled_from(["document", "packed", "both"])), 1
    mask = None
    if kind != "packed":
        batch = data.draw(st.sampled_from([1, 2]))
        places = torch.randperm(5, generator=generator)  # documents in any order; of some, queries or keys alone
        ids, kv_ids = (places[torch.randint(0, 5, (batch, n), generator=generator).sort(1).values] for n in (sq, skv))
        mask = mods.document(ids, kv_ids)
    if kind != "document" and batch == 1:
        ends = [torch.randint(0, n + 1, (4,), generator=generator).sort().values for n in (sq, skv)]  # some are empty
        ends = [torch.cat([e.new_zeros(1), e]) for e in ends]
        sides = data.draw(st.none() | st.tuples(SIDES, SIDES))
        found = mods.packed(*ends, sq, skv, data.draw(st.booleans()), sides)
        mask = found if mask is None else mask & found
    other = data.draw(st.sampled_from(["", "causal", "window", "prefix"]))
    if other == "causal":
        mask = mask & mods.causal(data.draw(ALIGN))
    elif other == "window":
        mask = mods.window(data.draw(SIDES), data.draw(SIDES)) & mask
    elif other == "prefix":
        mask = mask & mods.prefix(data.draw(st.integers(0, skv)))
    keep = mask.materialize(batch, 1, sq, skv)
    for which, pairs, n in (("rows", keep, skv), ("cols", keep.mT, sq)):
        lo, hi, full_lo, full_hi = (x[..., None] for x in spans(mask, which, batch, 1, sq, skv))
        assert torch.equal(lo, full_lo)
        assert torch.equal(hi, full_hi)
        at = torch.arange(n)
        assert torch.equal((at >= lo) & (at < hi), pairs)


def test_bad_arguments_are_refused():
    keep = lambda b, h, q, kv, aux: kv <= q  # noqa: E731 - a mask
    table, ends = torch.zeros(4), torch.tensor([0, 4])
    for call, word in (
        (lambda: mods.Mask(3), "mask"),
        (lambda: mods.Mask(keep, aux=[3]), "aux .*list"),
        (lambda: mods.Mask(keep, aux=table), "aux .*Tensor"),
        (lambda: mods.Mask(keep, aux=(1, "a")), r"aux\[1\] .*str: a"),
        (lambda: mods.Mask(keep, rows=lambda b, h, q, aux: (0, q)), "rows .*2 values"),
        (lambda: mods.Mask(keep, cols=lambda b, h, kv, aux: kv), "cols .*1 values"),
        (lambda: mods.Mask(lambda b, h, q, kv: table + q > kv), r"tensor of shape \(4,\) in arithmetic: index it"),
        (lambda: mods.Mask(lambda b, h, q, kv: table[q, kv] > 0), r"shape \(4,\) by 1 integers, got 2: q, kv"),
        (lambda: mods.Mask(lambda b, h, q, kv: table[q / 2] > 0), "index by integers"),
        (lambda: mods.Mask(lambda b, h, q, kv: table[:, q] > 0), "one integer for each dim, .*got slice"),
        (lambda: mods.Mask(lambda b, h, q, kv: table[:0][q] > 0), "must have an element"),
        (lambda: mods.Mask(lambda b, h, q, kv, aux: (aux[0] == 1) & (aux[0][q] > 2), (table,)), "give it twice"),
        (lambda: mods.Mask(lambda b, h, q, kv, aux: aux[1] > q, (table,)), "beyond what there is"),
        (lambda: mods.Mask(lambda b, h, q: q > 3), r"must take \(b, h, q, kv\) or .*, got one that takes \(b, h, q\)"),
        (lambda: mods.Mask(lambda b, h, q, kv, x, y: q > 3), "got one that takes"),
        (lambda: mods.Mask(lambda b, h, q, kv: torch.sin(q) > 0), r"`sin` is not known .*minimum.*test_mods.py: `"),
        (lambda: mods.Mask(lambda b, h, q, kv: q.cumsum(0) > 0), "no `cumsum`: use operators"),
        (lambda: mods.Mask(lambda b, h, q, kv: 2**q > kv), r"power of integers .*write 2\.0"),
        (lambda: mods.Mask(lambda b, h, q, kv: range(4)[q] > kv), "no number yet"),
        (lambda: mods.Mask(keep, (lambda sq, skv: sq / 2,)).materialize(1, 1, 4, 4), "integer .*float: 2.0"),
        (lambda: mods.causal("middle"), "align"),
        (lambda: mods.window(-2, 0), "left"),
        (lambda: mods.window(0, 1.5), "right"),
        (lambda: mods.document(torch.zeros(3)), r"ids must have shape \(batch, seqlen\), got 1 dims: \(3,\)"),
        (lambda: mods.document(torch.zeros(1, 3)), "ids must hold integers, got dtype torch.float32"),
        (lambda: mods.document([[0, 1]]), "ids .*list"),
        (lambda: mods.document(torch.zeros(1, 3).bool()), r"ids .*torch\.bool"),
        (lambda: mods.document(torch.zeros(2, 3).int(), torch.zeros(3, 3).int()), "kv_ids .*2.* 3"),
        (lambda: mods.document(torch.zeros(1, 3).int(), torch.zeros(1, 3).int().to("meta")), "kv_ids .*cpu.*meta"),
        (lambda: mods.prefix(2.5), "length .*2.5"),
        (lambda: mods.prefix(True), "length .*True"),
        (lambda: mods.prefix("a"), "length .*'a'"),
        (lambda: mods.prefix(torch.tensor([2.5])), r"length .*torch\.float32"),
        (lambda: mods.prefix(torch.ones(2, 2).int()), r"length .*\(2, 2\)"),
        (lambda: mods.causal() & torch.ones(3, 3), "&"),
        (lambda: mods.softcap(3.0).then(3), "other must be a sartor.mods.Score, got int"),
        (lambda: mods.packed(ends, ends, "a", 4), "seqlen_q must be an integer, got str: 'a'"),
        (lambda: mods.packed(ends, ends, 4, None), "seqlen_kv must be an integer, got NoneType"),
        (lambda: mods.packed_alibi(table, ends, ends, "x"), "seqlen_q must be an integer, got str: 'x'"),
        (lambda: mods.cached(ends, 4, 2.5), "seqlen_kv must be an integer, got float: 2.5"),
        (lambda: mods.cached_alibi(table, ends, 1.5), "seqlen_q must be an integer, got float: 1.5"),
        (lambda: from_tensor(torch.ones(3, 3)), "bool"),
    ):
        with pytest.raises((TypeError, ValueError), match=word):
            call()


def test_equal_text_is_an_equal_program():
    def make(n):
        return mods.Mask(lambda b, h, q, kv, aux: q - kv < aux[0], (n,))

    programs = [Program.of(make(n), None)[0] for n in (3, 4)]
    assert programs[0] == programs[1]
    closed = [Program.of(mods.Mask(lambda b, h, q, kv, aux, n=n: q - kv < n), None)[0] for n in (3, 4)]
    assert closed[0] != closed[1]
    assert make(3).handle != make(4).handle


def test_functions_of_the_lengths_are_told_apart():
    """By what they compute, not by their names: a graph and a plan find a mask by its handle."""

    def sliding(n):
        def start(sq, skv):
            return skv - sq - n

        return mods.Mask(lambda b, h, q, kv, aux: kv >= q + aux[0], (start,))

    def least(n):  # Python's max compares: it can not be called on symbols
        return partial(lambda n, sq, skv: max(n, skv - sq), n)

    x = torch.randn(1, 6, 2, 8)
    assert sliding(1).handle == sliding(1).handle
    for make in (sliding, lambda n: mods.Mask(lambda b, h, q, kv, aux: kv <= q + aux[0], (least(n),))):
        one, two = make(1), make(4)
        assert one.handle != two.handle
        for mask in (one, two):
            keep = mask.materialize(1, 1, 6, 6)
            assert torch.allclose(attention(x, x, x, mask=mask), attention(x, x, x, mask=keep), atol=1e-6)


class Limit:
    """A function of the lengths that cannot be traced, nor be referenced weakly."""

    __slots__ = ("limit",)

    def __init__(self, limit):
        self.limit = limit

    def __call__(self, sq, skv):
        return self.limit if sq > 3 else 1


@pytest.mark.parametrize("make", [Limit, lambda c: lambda sq, skv: c if sq > 3 else 1], ids=["object", "function"])
def test_functions_that_cannot_be_traced_are_told_apart(make, monkeypatch):
    """Whatever address one is at: plans of another that was there before know its numbers."""
    monkeypatch.setattr(core, "TEMPLATES", Recent(8))
    monkeypatch.setattr(tracing, "_NUMBERS", Recent(8))
    at, handles = set(), set()
    for c in range(50):
        one = mods.Mask(lambda b, h, q, kv, aux: kv < aux[0], (make(c),))
        assert mods.Mask(lambda b, h, q, kv, aux: kv < aux[0], one.aux).handle == one.handle
        at.add(id(one.aux[0]))
        handles.add(one.handle)
        del one
    assert len(at) < 50
    assert len(handles) == 50


def test_numbers_of_other_libraries():
    for number, same in ((np.int64(2), 2), (np.float32(1.5), 1.5)):
        mask = mods.Mask(lambda b, h, q, kv, aux: kv < q * aux[0], (number,))
        assert mask.aux == (same,)
        assert type(mask.aux[0]) is type(same)


@pytest.mark.parametrize("b", [3, -3])
def test_division_rounds_down_in_every_language(b):
    """As Python's, whichever way the language rounds that a mask is told in."""
    masks = [
        (lambda b_, h, q, kv, aux: (q - kv) // b == 1, lambda i, j: (i - j) // b == 1),
        (lambda b_, h, q, kv, aux: (q - kv) // aux[0] == -2, lambda i, j: (i - j) // b == -2),
        (lambda b_, h, q, kv, aux: (q - kv) % aux[0] == b // 2, lambda i, j: (i - j) % b == b // 2),
    ]
    towards_zero = {"//": lambda x, y: torch.div(x, y, rounding_mode="trunc"), "%": torch.fmod}
    for function, rule in masks:
        mask = mods.Mask(function, (b,))
        want = torch.tensor([[rule(i, j) for j in range(9)] for i in range(7)])
        assert torch.equal(mask.materialize(1, 1, 7, 9)[0, 0], want)
        at = {"q": torch.arange(7)[:, None], "kv": torch.arange(9)}
        program = Program.of(mask, None)[0]
        with pytest.MonkeyPatch.context() as patch:
            for op, rounded in towards_zero.items():
                patch.setitem(expr._FUNCTIONS, op, rounded)
            assert torch.equal(evaluate(program.keep, at, (torch.tensor(b),)), want)


@pytest.mark.parametrize("name", dialects.RULES)
def test_a_mask_means_what_it_says_in_python(name):
    """Whatever PyTorch, Triton and C++ take its words for."""
    mask, want = dialects.make(13, 17)[name]
    assert torch.equal(mask.materialize(1, 1, 13, 17)[0, 0], want)
    x, y = torch.randn(1, 13, 2, 8), torch.randn(1, 17, 2, 8)
    for kernel in ("blocked", "reference"):
        found = attention(x, y, y, mask=mask, kernel=kernel)
        assert torch.allclose(found, attention(x, y, y, mask=want, kernel=kernel), atol=1e-6)


def test_a_mod_is_what_it_was_when_it_was_made():
    """Whatever its function closes over becomes, and wherever it is taken."""
    n = [0]
    mask = mods.Mask(lambda b, h, q, kv, aux: q - kv < n[0] + aux[0], (lambda sq, skv: n[0] * sq,))
    n[0] = 2
    assert mask.materialize(1, 1, 3, 3).sum() == 3
    x = torch.randn(1, 3, 2, 8)
    for mod in (mask, mods.causal() & mods.document(torch.tensor([[0, 0, 1]])), ~mods.prefix(2)):
        for same in (copy.deepcopy(mod), pickle.loads(pickle.dumps(mod))):
            assert same.handle == mod.handle
            assert torch.equal(attention(x, x, x, mask=same), attention(x, x, x, mask=mod))
    assert repr(mask) == "Mask(mask)"
    assert repr(mods.bias(torch.ones(3, 3))) == "Score(bias, torch.float32[1, 1, 3, 3])"


class Scaled(torch.nn.Module):
    """A score that reads a parameter at the position."""

    def __init__(self):
        super().__init__()
        self.p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.score = mods.Score(lambda s, b, h, q, kv: s * self.p[h]).then(mods.softcap(5.0))

    def forward(self, x):
        return attention(x, x, x, score=self.score)

    def replace(self):
        self.p.data = self.p.data.clone()
        return self


REPLACED = {"dtype": lambda n: n.to(torch.bfloat16), "data": Scaled.replace, "copied": copy.deepcopy}


@pytest.mark.parametrize("name", REPLACED)
def test_a_captured_tensor_may_be_given_other_data(name):
    """The mod reads what the tensor holds at the call, as optimizers change it, and its gradient goes there."""
    x = torch.randn(1, 6, 2, 8)
    net = Scaled()
    before = net(x)
    net = REPLACED[name](net)
    assert torch.equal(net(x), before)
    with torch.no_grad():
        net.p.mul_(3.0)
    out = net(x)
    capped = mods.softcap(5.0)
    assert torch.equal(out, attention(x, x, x, score=mods.Score(lambda s, b, h, q, kv: s * net.p[h]).then(capped)))
    out.sum().backward()
    assert net.p.grad is not None
    assert net.p.grad.dtype == net.p.dtype


def test_a_captured_tensor_varies_along_the_same_dims():
    """Intervals that were read off the function, and its text, depend on that."""
    ends = torch.nn.Parameter(torch.ones(1))
    score = mods.Score(lambda s, b, h, q, kv: s + ends[kv])
    ends.data = torch.ones(6)
    x = torch.randn(1, 6, 2, 8)
    with pytest.raises(ValueError, match=r"must have size 1 along the same dims .*, got shape \(6,\)"):
        attention(x, x, x, score=score)


def test_a_score_made_in_inference_mode_has_a_gradient():
    p, x = torch.nn.Parameter(torch.ones(2)), torch.randn(1, 6, 2, 8)
    with torch.inference_mode():
        score = mods.Score(lambda s, b, h, q, kv: s * p[h] + torch.exp(p)[h])
        attention(x, x, x, score=score)
    attention(x, x, x, score=score).sum().backward()
    assert p.grad is not None


def test_intervals_are_of_integers():
    with pytest.raises(TypeError, match="rows must return integers, got"):
        mods.Mask(lambda b, h, q, kv, aux: kv < q, rows=lambda b, h, q, aux: (0, q / 2, 0, 0))
    with pytest.raises(TypeError, match="cols must return integers"):
        mods.Mask(lambda b, h, q, kv, aux: kv < q, (torch.ones(4),), cols=lambda b, h, kv, aux: (aux[0], 9, 9, 0))


def test_what_cannot_be_negative_is_divided_as_written():
    blocks = mods.Mask(lambda b, h, q, kv, aux: (q + kv * 2) // 64 == mods.maximum(kv - 3, 0) % 8)
    assert Program.of(blocks, None)[0].keep.text() == blocks.handle.split("; ")[1]


def test_not_of_what_is_a_number():
    """`~True` is -2 in Python."""
    x = torch.randn(1, 6, 2, 8)
    masks = (
        (mods.Mask(lambda b, h, q, kv, aux: (kv <= q) | ~(aux[0] == 1), (1,)), True),
        (mods.Mask(lambda b, h, q, kv, aux: (kv <= q) & ~(aux[0] == 2), (1,)), True),
        (~mods.Mask(lambda b, h, q, kv, aux: False), False),
    )
    for mask, causal in masks:
        for kernel in ("auto", "reference"):
            want = attention(x, x, x, causal=causal, kernel=kernel)
            assert torch.allclose(attention(x, x, x, mask=mask, kernel=kernel), want, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (8,), (8, 1), (2, 8, 8), (1, 1, 8, 8)])
def test_aux_tensors_of_every_rank(shape):
    x, keep = torch.randn(1, 8, 2, 16), torch.rand(shape) < 0.7
    mask = mods.Mask(lambda b, h, q, kv, aux: aux[0], (keep,))
    for own in (mask, mask & mods.causal()):
        want = attention(x, x, x, mask=own.materialize(1, 2, 8, 8))
        assert torch.allclose(attention(x, x, x, mask=own), want, atol=1e-6)


def test_a_mask_that_is_gone_keeps_no_tensor():
    keep = torch.rand(37, 41) < 0.5
    found = weakref.ref(keep)
    mask = ~from_tensor(keep) & mods.causal()
    del keep, mask
    gc.collect()
    assert found() is None


def test_where_and_extremes():
    table = mods.Mask(lambda b, h, q, kv, aux: mods.where(q < 2, kv < 1, kv < mods.minimum(q, mods.maximum(2, 1))))
    assert torch.equal(table.materialize(1, 1, 4, 4)[0, 0], matrix("#... #... ##.. ##.."))


SCORES = {
    "softcap": mods.softcap(1.5),
    "alibi": mods.alibi(torch.tensor([0.5, 0.25])),
    "bias": mods.bias(torch.arange(5.0)),
    "chain": mods.softcap(2.0).then(mods.alibi(torch.tensor([0.5, 1.0]))).then(mods.bias(torch.ones(2, 1, 5))),
    "user": mods.Score(lambda s, b, h, q, kv, aux: mods.where(q > kv, s * s / aux[0], -s) + s * 2, (4.0,)),
} | {name: score for name, score in dialects.scores(2, 4, 5).items() if name not in (*dialects.OF_PLACES, "stepped")}


@pytest.mark.parametrize("name", SCORES)
def test_derivatives(name):
    """The symbolic derivative is autograd's."""
    score = SCORES[name]
    program, values = Program.of(None, score)
    aux = tuple(v if spec.dims else resolve(v, 4, 5) for v, spec in zip(values, program.aux, strict=True))
    axes = [torch.arange(n).view(-1, *(1,) * i) for n, i in ((2, 3), (2, 2), (4, 1), (5, 0))]
    at = dict(zip(("b", "h", "q", "kv"), axes, strict=True))
    s = torch.linspace(-3, 3, 80, dtype=torch.float64).view(2, 2, 4, 5).requires_grad_()
    (exact,) = torch.autograd.grad(evaluate(program.score, at | {"s": s}, aux).sum(), s)
    got = torch.as_tensor(evaluate(program.dscore, at | {"s": s}, aux), dtype=torch.float64).expand(exact.shape)
    assert (got - exact).abs().max() <= 8 * torch.finfo(torch.float32).eps * exact.abs().max()


POSITIONAL = {  # added to a score, in float64
    "factor": lambda q, kv: 0.1 * (q - kv),
    "quotient": lambda q, kv: (q - kv) / 7,
    "exponential": lambda q, kv: mods.exp(-(q + kv)),
    "limit": lambda q, kv: mods.maximum(q - kv, 0.7),
}


@pytest.mark.parametrize("name", POSITIONAL)
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_positions_become_floats_of_the_dtype_of_the_call(name, kernel):
    added, at = POSITIONAL[name], torch.arange(6, dtype=torch.float64)
    x = torch.randn(1, 6, 1, 8, dtype=torch.float64)
    score = mods.Score(lambda s, b, h, q, kv: s + added(q, kv))
    want = attention(x, x, x, bias=added(at[:, None], at), kernel=kernel)
    assert (attention(x, x, x, score=score, kernel=kernel) - want).abs().max() < 1e-14


def test_numbers_to_choose_from_are_of_the_dtype_of_the_call():
    x = torch.randn(1, 6, 1, 8, dtype=torch.float64)
    score = mods.Score(lambda s, b, h, q, kv: s + mods.where(q > kv, 0.1, 0.3))
    want = attention(x, x, x, bias=0.3 - 0.2 * torch.ones(6, 6, dtype=torch.float64).tril(-1))
    assert (attention(x, x, x, score=score) - want).abs().max() < 1e-14


def test_the_derivative_by_positions_in_float64():
    q, k, v = torch.randn(3, 4, 8, dtype=torch.float64)
    q, at = q.requires_grad_(), torch.arange(4)
    score = mods.Score(lambda s, b, h, q, kv: s / (1 + q + kv))
    out = attention(*(t[None, :, None] for t in (q, k, v)), score=score, softmax_scale=1.0)[0, :, 0]
    want = (q @ k.T / (1 + at[:, None] + at).double()).softmax(-1) @ v
    found, exact = (torch.autograd.grad(t.square().sum(), q)[0] for t in (out, want))
    assert (found - exact).abs().max() < 1e-13


def test_unknown_derivative():
    with pytest.raises(NotImplementedError, match="//"):
        diff(Expr("//", (Expr("sym", ("s",)), lift(2))), "s")


def test_big_stays_in_int32():
    assert 4 * BIG <= 2**31


def test_programs_are_told_apart_by_all_that_a_kernel_is_made_of():
    """Equal programs share compiled code: what is read, by which steps, as which dtype, and the columns' spans."""
    q = torch.empty(1, 8, 2, 16, device="meta")
    f32, lower = torch.empty(8, 8, device="meta"), lambda b, h, q, kv, aux: (kv + q) % 2 == 0
    spans = lambda b, h, kv, aux: (kv, mods.core.BIG, kv, mods.core.BIG)  # noqa: E731
    some = (
        {"bias": f32},
        {"bias": f32.to(torch.bfloat16)},
        {"bias": f32.T},
        {"bias": f32[:1]},
        {"mask": mods.Mask(lower)},
        {"mask": mods.Mask(lower, cols=spans)},
        {"mask": mods.Mask(lower, rows=spans)},
    )
    programs = [Problem.of(Call(q, q, q, **options)).program for options in some]
    assert len(set(programs)) == len(programs)


def test_scores_that_may_hide_a_row():
    """By a large number, wherever it comes from, and not by what is small or a factor."""
    q, row, heads = (torch.empty(s, device="meta") for s in ((2, 8, 2, 16), (8, 1), (2, 2, 1, 1)))
    score, far = mods.Score, 1e9
    none = (
        {"alibi_slopes": heads[0, :, 0, 0], "window": (5000, 0)},
        {"softcap": 30.0},
        {"score": score(lambda s, b, h, q, kv: s * 0.5 + (kv - q))},
        {"score": score(lambda s, b, h, q, kv, aux: s - aux[0] * kv, (2.0,)), "mask": mods.prefix(9000)},
        {"score": score(lambda s, b, h, q, kv, aux: s * aux[0], (heads,))},
    )
    some = (
        {"bias": row},
        {"bias": heads},
        {"score": score(lambda s, b, h, q, kv: mods.where(kv > 3, s, s - far))},
        {"score": score(lambda s, b, h, q, kv: s - far * (q // 4))},
        {"score": score(lambda s, b, h, q, kv, aux: s - aux[0] * (q // 4), (far,))},
        {"score": score(lambda s, b, h, q, kv, aux: s - aux[0] * (q // 4), (int(far),))},
    )
    found = [[Problem.of(Call(q, q, q, **o)).program.buries for o in options] for options in (none, some)]
    assert found == [[False] * len(none), [True] * len(some)]


def test_lengths_beyond_every_position_stay_in_int32():
    """Kernels add positions to them in 32 bits."""
    for mask in (mods.window(2**40, 2**40), mods.window(2**31 - 1, 0), mods.prefix(2**40)):
        assert all(callable(a) or abs(a) <= mods.core.BIG for a in mask.aux), mask.name
        assert mask.materialize(1, 1, 3, 3)[..., 2, :].all()


@pytest.mark.parametrize("sign", sorted(expr.INFIX))
def test_operators_mean_what_they_do_in_python(sign):
    """With the number on either side: `9 - q` is not `q - 9`."""

    def of(x, y):
        return expr._INFIX_FUNCTIONS[sign](x, y)

    for number in (2, 9):
        for fn in (lambda q, n=number: of(q, n), lambda q, n=number: of(n, q)):
            for value in (1, 4):
                made = fn(expr.Expr("sym", ("q",)))
                assert expr.evaluate(made, {"q": value}, ()) == fn(value), made.text()
                assert eval(made.text(), {"q": value}) == fn(value)


def test_changing_numbers_leave_nothing_behind(monkeypatch):
    """A softcap, a scale or a length that is another in every call: what is kept of them is bounded."""
    prepared, programs = Recent(64), Recent(32)
    monkeypatch.setattr(ops, "PREPARED", prepared)
    monkeypatch.setattr(program, "_PROGRAMS", programs)
    before = len(core.TEMPLATES)
    q = torch.zeros(1, 2, 1, 8)
    for i in range(1, 200):
        attention(q, q, q, softcap=float(i), kernel="reference", causal=True)
        attention(q, q, q, softmax_scale=1.0 / i, kernel="reference")
        assert len(prepared) <= 64
        assert len(programs) <= 32
    assert len(core.TEMPLATES) <= before


def test_the_oldest_make_room():
    kept = Recent(8)
    kept.add("for good", 0)
    kept.pin()
    for i in range(100):
        kept.add(i, i)
    assert len(kept) == 8
    assert kept["for good"] == 0
    assert list(kept)[1:] == list(range(93, 100))


def test_a_mod_over_tensors_of_other_dims_is_traced_once(monkeypatch):
    """As at every step of a decoding loop, whose query dim is 1. Its tensors are not kept."""
    made = []
    monkeypatch.setattr(mods.Mask, "_remade", lambda self, own=mods.Mask._remade: made.append(self) or own(self))
    template = mods.Mask(lambda b, h, q, kv, aux: kv < aux[0], (torch.zeros(2, 1, 7, 1, dtype=torch.int64),))
    for limit in (3, 5):
        one = template.with_tensors([torch.full((2, 1, 1, 1), limit)])
        assert one.materialize(2, 1, 1, 9).sum(-1).unique().tolist() == [limit]
        back = one.with_tensors([torch.full((2, 1, 7, 1), limit)])
        assert back.materialize(2, 1, 7, 9).sum(-1).unique().tolist() == [limit]
    assert len(made) <= 2
    assert all(t.is_meta for m in template._varied.values() for t in m.tensors)


def _same(mask):
    return mask


@pytest.mark.parametrize("copied", [_same, copy.deepcopy, lambda m: m & mods.causal(), lambda m: mods.causal() | m])
def test_intervals_are_read_off_again_where_tensors_vary_along_other_dims(copied):
    """Those of a copy too, and those that were combined."""
    mask = copied(mods.Mask(lambda b, h, q, kv, aux: kv <= aux[0] + q, (torch.full((1, 1, 1, 1), 2),)))
    mask = mask.with_tensors([torch.arange(600).flip(0).view(1, 1, 1, 600) - 500])
    x = torch.randn(1, 600, 1, 8)
    want = attention(x, x, x, mask=mask.materialize(1, 1, 600, 600))
    torch.testing.assert_close(attention(x, x, x, mask=mask), want)
