"""The operator of calls that read q, k and v alone, as compiled functions call it: that it computes the same, and what
a call of it costs, in counts that a busy machine does not change."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.utils.flop_counter import FlopCounterMode

import sartor
from counted import calls_of
from sartor import compiled, ops, testing
from sartor.mods.recent import Recent

OPERATORS = torch.ops.sartor
CALLS = {
    "full": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left", "softmax_scale": 0.3},
    "window": {"window": (7, None), "softcap": 5.0},
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(ops, "PREPARED", Recent(2048))


def leaves(turned=False, dim_v=16, dtype=torch.float32):
    made = testing.make_inputs(2, 4, 2, 9, 13, 16, dim_v=dim_v, dtype=dtype)
    made = [t.transpose(1, 2) if turned else t.transpose(1, 2).contiguous() for t in made]
    return [t.requires_grad_() for t in made]


class Graphs:
    """A backend that keeps what it is given, forwards and backwards, and runs it as it is."""

    def __init__(self):
        self.called = []

    def __call__(self, module, inputs):
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=self.keep, bw_compiler=self.keep)(module, inputs)

    def keep(self, module, inputs):
        self.called += [n.target for n in module.graph.nodes if "sartor" in str(n.target)]
        return module


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
@pytest.mark.parametrize("name", CALLS)
def test_results(name, turned, layout):
    given, graphs = leaves(turned), Graphs()
    given = given if layout == "bshd" else [t.detach().transpose(1, 2).requires_grad_() for t in given]
    call = lambda *t: sartor.attention(*t, layout=layout, kernel="blocked", **CALLS[name])  # noqa: E731 - compiled too
    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend=graphs)):
        for _ in range(2):  # as learned, and as found
            out = function(*given)
            found.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
        assert [t.stride() for t in other] == [t.stride() for t in found[-1]]
    assert graphs.called == [OPERATORS.plain_forward.default, OPERATORS.plain_backward.default]


def test_other_calls_have_the_operator_of_all_arguments():
    q, k, v = leaves()
    for options in ({"return_lse": True}, {"sinks": torch.zeros(4)}, {"bias": torch.zeros(9, 13)}):
        torch._dynamo.reset()
        graphs = Graphs()
        torch.compile(lambda *t: sartor.attention(*t, **options), backend=graphs)(q, k, v)  # noqa: B023 - called here
        assert graphs.called[:1] == [OPERATORS.attention.default]


def test_what_dynamo_traces_asks_for_types():
    """Of a number or a string `__class__` is something else to the Dynamo of torch 2.11, which no test here runs."""
    for function in (sartor.attention, compiled.attend):
        assert "__class__" not in function.__code__.co_names


def test_plans_that_need_copies():
    """A last dim that is not dense, and another head dim of v."""
    q, k, v = leaves(dim_v=8, dtype=torch.float64)
    strided = torch.stack([q.detach(), q.detach()], -1)[..., 0].requires_grad_()
    call = lambda *t: sartor.attention(*t, causal=True)  # noqa: E731 - compiled and not
    for query in (q, strided):
        want, found = (
            torch.autograd.grad(f(query, k, v).square().sum(), (query, k, v))
            for f in (call, torch.compile(call, fullgraph=True, backend="aot_eager"))
        )
        assert all(map(torch.allclose, found, want))


def test_lengths_share_a_graph():
    graphs = Graphs()
    call = torch.compile(lambda x: sartor.attention(x, x, x, causal=True), dynamic=True, backend=graphs)
    for n in range(8, 20):
        x = torch.randn(2, n, 4, 8)
        assert torch.equal(call(x), sartor.attention(x, x, x, causal=True))
    assert len(graphs.called) <= 2  # one of 8 heads and 8 keys


def test_errors_name_the_argument():
    q, k, v = leaves()
    wrong = (
        ({"causal": "left"}, "causal must"),
        ({"window": (-3, 0)}, "window .* must"),
        ({"softcap": -1.0}, "softcap must"),
    )
    for options, words in wrong:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=words):
            torch.compile(lambda *t: sartor.attention(*t, **options), backend="eager")(q, k, v)  # noqa: B023


def test_no_second_derivative():
    q, k, v = leaves()
    out, _ = OPERATORS.plain(q, k, v, None, 0.0, "", None, "auto")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(dq.sum(), k)


@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
def test_opcheck(turned):
    given, settings = leaves(turned), (None, 0.0, "bottom_right", [7, -1], "blocked")
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(OPERATORS.plain, (*given, *settings), test_utils=(*checks, "test_aot_dispatch_dynamic"))
    q, k, v = (t.detach() for t in given)
    torch.library.opcheck(OPERATORS.plain_forward, (q, k, v, *settings), test_utils=checks)
    out, lse = OPERATORS.plain_forward(q, k, v, *settings)
    for dout in (testing.make_like(out), torch.ones(()).expand_as(out)):
        torch.library.opcheck(OPERATORS.plain_backward, (dout, q, k, v, out, lse, *settings), test_utils=checks)


def test_flops():
    q = torch.zeros(2, 32, 4, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        OPERATORS.plain(q, q, q, None, 0.0, "bottom_right", None, "auto")[0].sum().backward()
    assert counter.get_total_flops() == 3.5 * 2 * 2 * 4 * (32 * 32 // 2) * 32


def guards(function):
    """Lines that say what a compiled function checks at each call."""
    (entry,) = _debug_get_cache_entry_list(function.__code__)
    return str(entry.guard_manager).count("+- ")


def test_guards():
    """Each is checked at every call of what was compiled: 481 where a `Call` was traced, 42 of PyTorch's attention."""
    q, k, v = (t.transpose(1, 2) for t in leaves())
    counts = []
    for call in (
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        lambda q, k, v: sartor.attention(q, k, v, layout="bhsd"),
    ):
        torch.compile(call, backend="eager")(q, k, v)
        counts.append(guards(call))
    assert counts[1] <= counts[0] + 85


def test_calls_past_the_kernel(monkeypatch):
    """Of functions between a graph and a plan that is known."""
    q, k, v = (t.detach() for t in leaves())
    settings = None, 0.0, "bottom_right", None, "auto"
    out, lse = OPERATORS.plain_forward(q, k, v, *settings)
    OPERATORS.plain_backward(out, q, k, v, out, lse, *settings)
    for work in (w for seen in ops.PREPARED.values() if type(seen) is tuple for _, w in seen):
        monkeypatch.setattr(type(work), "followed", lambda *_: (out, lse))
        monkeypatch.setattr(type(work), "backward", lambda *_: (q, k, v))
    forward, backward = OPERATORS.plain_forward.default, OPERATORS.plain_backward.default
    assert calls_of(lambda: forward(q, k, v, *settings)) <= 30
    assert calls_of(lambda: backward(out, q, k, v, out, lse, *settings)) <= 45
