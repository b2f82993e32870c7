"""Masks and scores that are made inside torch.compile(fullgraph=True), against the same call without it."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask

import sartor
from sartor import mods
from sartor.integrations import flex
from sartor.mods import core, graph

BATCH, HEADS, LENGTH = 2, 4, 16
DOCUMENTS = torch.tensor([[0] * 6 + [1] * 10, [0] * 12 + [2] * 4])
ENDS = torch.tensor([0, 5, 16])
TABLE, SLOPES = torch.randn(HEADS, 40, generator=torch.Generator().manual_seed(1)), torch.tensor([0.1, 0.2, 0.3, 0.4])
KEEP = torch.eye(LENGTH, dtype=torch.bool) | (torch.arange(LENGTH) < 4)
OUTSIDE, OUTSIDE_SCORE = mods.causal(), mods.softcap(5.0)
MASKS = {
    "causal": mods.causal,
    "own": lambda: mods.Mask(lambda b, h, q, kv: q >= kv),
    "captured": lambda: mods.Mask(lambda b, h, q, kv: (q >= kv) & (DOCUMENTS[b, q] == DOCUMENTS[b, kv])),
    "aux": lambda: mods.Mask(lambda b, h, q, kv, aux: (q - kv).abs() <= aux[0], (3,)),
    "documents": lambda: mods.window(3, 0) & mods.document(DOCUMENTS),
    "prefix": lambda: mods.causal() | mods.prefix(torch.tensor([3, 4])),
    "tensor": lambda: mods.causal() & KEEP,
    "tensor_first": lambda: KEEP | mods.causal(),
    "made_outside": lambda: OUTSIDE & mods.window(4, None),
    "not": lambda: torch.logical_not(mods.Mask(lambda b, h, q, kv: torch.logical_not(q <= kv))),
    "torchs": lambda: torch.logical_and(mods.window(2, 2), mods.causal()),
    "packed": lambda: mods.packed(ENDS, ENDS, LENGTH, LENGTH) & mods.causal(),
}
SCORES = {
    "gather": lambda: mods.Score(lambda s, b, h, q, kv: s + TABLE[h, q - kv + 20]),
    "then": lambda: mods.softcap(3.0).then(mods.alibi(SLOPES)),
    "made_outside": lambda: OUTSIDE_SCORE.then(mods.Score(lambda s, b, h, q, kv: torch.where(q >= kv, s, -1.0))),
    "number": lambda: mods.Score(lambda s, b, h, q, kv: torch.neg(s) * SLOPES[1] + abs(q - kv) ** 2 * 0.01),
    "functions": lambda: mods.Score(lambda s, b, h, q, kv: s.clamp(-1, 1) + torch.exp2(-(h + 1) * 2.0)),
}


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def qkv(batch=BATCH):
    return torch.randn(3, batch, LENGTH, HEADS, 8, generator=torch.Generator().manual_seed(0)).unbind(0)


def assert_compiles(face, *inputs, backend="aot_eager"):
    want = face(*inputs)
    torch.testing.assert_close(torch.compile(face, fullgraph=True, backend=backend)(*inputs), want)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    assert_compiles(lambda q, k, v: sartor.attention(q, k, v, mask=MASKS[name]()), *qkv(1 if name == "packed" else 2))


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    assert_compiles(lambda q, k, v: sartor.attention(q, k, v, score=SCORES[name]()), *qkv())


def test_by_inductor_with_gradients():
    """One graph for other documents, and one more for each number; what a score captures has a gradient."""
    table = TABLE.clone().requires_grad_()
    q, k, v = (t.requires_grad_() for t in qkv())

    def face(q, k, v, documents, left):
        mask = mods.window(left, 0) & mods.Mask(lambda b, h, q, kv: documents[b, q] == documents[b, kv])
        score = mods.Score(lambda s, b, h, q, kv: s + table[h, q - kv + 20])
        return sartor.attention(q, k, v, mask=mask, score=score)

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(face, fullgraph=True, backend=counter)
    for graphs, documents, left in ((1, DOCUMENTS, 3), (1, DOCUMENTS.flip(0), 3), (2, DOCUMENTS, 5)):
        out, want = (f(q, k, v, documents, left) for f in (compiled, face))
        torch.testing.assert_close(out, want)
        found, exact = (torch.autograd.grad(t.square().sum(), (q, k, v, table)) for t in (out, want))
        for a, b in zip(found, exact, strict=True):
            torch.testing.assert_close(a, b)
        assert counter.frame_count == graphs


def test_a_parameter_that_a_mod_made_outside_reads():
    """Graphs take it, and not a view that another dtype leaves behind."""
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    make = lambda: mods.Score(lambda s, b, h, q, kv: s * p[h])  # noqa: E731 - two uses
    score, (q, k, v) = make(), qkv()
    compiled = torch.compile(lambda q: sartor.attention(q, k, v, score=score), fullgraph=True, backend="aot_eager")
    for dtype in (torch.float32, torch.bfloat16):
        p.data = p.data.to(dtype)
        with torch.no_grad():
            p.mul_(2.0)
        out, want = compiled(q), sartor.attention(q, k, v, score=make())
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(*(torch.autograd.grad(t.square().sum(), p) for t in (out, want)))


def test_dynamic_lengths():
    def face(x, documents):
        return sartor.attention(x, x, x, mask=mods.causal() & mods.document(documents))

    compiled = torch.compile(face, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (16, 24, 40):
        x, documents = torch.randn(2, n, 4, 8), torch.randint(0, 3, (2, n)).sort(1).values
        torch.testing.assert_close(compiled(x, documents), face(x, documents))


def test_flex_attention():
    """Its functions, and its block masks: closed over, and passed in."""

    def document(b, h, q, kv):
        return (q >= kv) & (DOCUMENTS[b, q] == DOCUMENTS[b, kv])

    q, k, v = (t.transpose(1, 2) for t in qkv())
    assert_compiles(
        lambda q, k, v: flex.flex_attention(q, k, v, lambda s, b, h, i, j: s + TABLE[h, i - j + 20]), q, k, v
    )
    made = [
        create_block_mask(f, 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=4)
        for f in (document, lambda b, h, q, kv: q >= kv)
    ]
    assert_compiles(lambda q, k, v: flex.flex_attention(q, k, v, None, made[0]), q, k, v, backend="inductor")
    for block_mask in made:
        assert_compiles(lambda q, k, v, m: flex.flex_attention(q, k, v, None, m), q, k, v, block_mask)


@pytest.mark.parametrize("dynamic", [None, True])
def test_flex_attention_of_other_lengths(dynamic):
    """A captured tensor is read at positions where it has their sizes, and else as a table."""

    def face(q, k, v, ids, table):
        return flex.flex_attention(
            q, k, v, lambda s, b, h, i, j: s + table[h, j], lambda b, h, i, j: (i >= j) & (ids[b, i] == ids[b, j])
        )

    compiled = torch.compile(face, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for n, more in ((5, 0), (9, 0), (12, 0), (12, 3)):
        q, k, v = torch.randn(3, 2, 4, n, 16)
        inputs = q, k, v, torch.randint(0, 2, (2, n + more)), torch.randn(4, n + more)
        torch.testing.assert_close(compiled(*inputs), face(*inputs))


@pytest.mark.parametrize("strict", [True, False])
def test_exported(strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v, t):
            mask = mods.Mask(lambda b, h, q, kv: kv * t[h] <= q * TABLE[h, q - kv + 20] + 9)
            return sartor.attention(q, k, v, mask=mask, score=mods.Score(lambda s, b, h, q, kv: s * t[h]))

    inputs = *qkv(), SLOPES
    made = torch.export.export(Model(), inputs, strict=strict).module()
    torch.testing.assert_close(made(*inputs), Model()(*inputs))


def test_what_graphs_name_stays(monkeypatch):
    """However many other masks are made meanwhile."""
    q, k, v = qkv()
    compiled = torch.compile(
        lambda q: sartor.attention(q, k, v, mask=mods.Mask(lambda b, h, q, kv: q >= kv + 1)),
        fullgraph=True,
        backend="eager",
    )
    want = compiled(q)
    monkeypatch.setattr(core, "TEMPLATES", core.Recent(8))
    assert torch.equal(compiled(q), want)


def test_mods_that_leave_their_graph():
    """One that follows a graph break takes them; code that is not compiled says where they were made."""
    q = qkv()[0]

    def broken(q):
        mask, score = mods.causal() & mods.document(DOCUMENTS), mods.softcap(3.0)
        torch._dynamo.graph_break()
        return sartor.attention(q, q, q, mask=mask, score=score)

    torch.testing.assert_close(torch.compile(broken, backend="eager")(q), broken(q))
    for make in (lambda: mods.prefix(9), lambda: mods.prefix(9) & mods.window(5, 4)):
        left = torch.compile(make, backend="eager")()
        for use in (
            lambda m=left: sartor.attention(q, q, q, mask=m),
            lambda m=left: m.materialize(1, 1, 2, 2),
            lambda m=left: m & OUTSIDE,
        ):
            with pytest.raises(RuntimeError, match=r"inside what torch\.compile compiles must be used there"):
                use()


def test_a_dynamo_that_cannot_trace_one(monkeypatch):
    """As that of torch 2.9: it is made outside of the graph, or refused where there is to be one graph."""
    monkeypatch.setattr(graph, "OPAQUE", True)
    q, k, v = qkv()
    for make in (
        lambda: {"mask": mods.causal() & mods.window(3, 0)},
        lambda: {"score": mods.Score(lambda s, *_: s * 2)},
    ):
        call = lambda q: sartor.attention(q, k, v, **make())  # noqa: B023, E731 - called here
        torch.testing.assert_close(torch.compile(call, backend="eager")(q), call(q))
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"needs torch 2\.10, got .*: make it before"):
            torch.compile(call, fullgraph=True, backend="eager")(q)


def test_refusals_say_what_to_write():
    q, k, v = qkv()
    for mask, words in (
        (lambda: mods.Mask(lambda b, h, q, kv: q - kv), "must be a function that returns a bool"),
        (lambda: torch.add(mods.causal(), 1), "goes with `&`"),
    ):
        with pytest.raises(Exception, match=words):
            torch.compile(lambda q: sartor.attention(q, k, v, mask=mask()), fullgraph=True, backend="eager")(q)  # noqa: B023
