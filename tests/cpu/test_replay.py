"""Launches replayed in C are, byte by byte, those that Python makes; and what is there where C cannot."""

from __future__ import annotations

import re
import struct
import threading

import pytest
import torch

import sartor
import settings
import stubbed
from sartor import driver, mods, node
from sartor.kernels.cuda import row
from sartor.kernels.hopper import backward_launches
from sartor.kernels.triton import launch
from sartor.nvrtc import TensorMaps
from sartor.replay import library, lists

pytestmark = [
    pytest.mark.skipif(not launch.available(), reason="needs Triton, whose launches stand between"),
    pytest.mark.skipif(stubbed.COMPILER is None, reason="needs a C compiler"),
]
STREAM = 0x5EED
EIGHT = int.from_bytes(b"abcdefgh", "little")


@pytest.fixture
def stub(monkeypatch):
    with stubbed.stubbed() as found:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
        monkeypatch.setattr(launch, "repeat", lambda *_: True)
        yield found


@pytest.fixture
def both(stub, monkeypatch):
    """Every row of launches is made in C and by Python. What it says is how many launches there were of each."""
    found = []

    class Both:
        def __init__(self, *args):
            assert lists.Replayed.why_not(*args) == ""
            self.steps, self.ways = args[0], [kind(*args) for kind in (lists.Replayed, lists.Launched)]

        def start(self, given, stream):
            stub.told()
            told = [(way.start(given, stream), stub.told())[1] for way in self.ways]
            assert told[0] == told[1] != b""
            assert told[0].count(STREAM.to_bytes(8, "little")) == len(self.steps)
            found.append(len(self.steps))

    monkeypatch.setattr(row, "launcher", Both)
    return found


def inputs(dtype=torch.bfloat16, dim=64, dim_v=None, heads_kv=3, queries=70, layout="bshd"):
    """q, k, v with different strides in every dim, each within a wider tensor."""
    for i, (n, heads, d) in enumerate(((queries, 6, dim), (90, heads_kv, dim), (90, heads_kv, dim_v or dim))):
        t = torch.zeros((2, n + i, heads + i, d + 8 * i), dtype=dtype)[:, :n, :heads, :d]
        yield (t if layout == "bshd" else t.transpose(1, 2)).requires_grad_()


CALLS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (7, 3), "softcap": 5.0, "softmax_scale": 0.3},
    "deterministic": {"causal": True, "deterministic": True},
    "sinks": {"sinks": torch.zeros(6), "return_lse": True},
    "bias": {"bias": torch.zeros(6, 70, 96, dtype=torch.bfloat16)[..., :90]},
    "one bias": {"bias": torch.zeros(1, 1, 70, 96, dtype=torch.bfloat16, requires_grad=True)[..., :90]},
    "mask": {"mask": torch.ones(90, dtype=torch.bool)},
    "document": {"mask": mods.document(torch.zeros(2, 70, dtype=torch.int32), torch.zeros(2, 90, dtype=torch.int32))},
    "listed": {"mask": mods.Mask(lambda b, h, q, kv: (q + kv) % (b + h + 2) == 0)},
    "score": {"score": mods.Score(lambda s, b, h, q, kv, aux: mods.maximum(s, 0.3) - abs(q - kv) * 0.1)},
    "alibi": {"alibi_slopes": torch.zeros(6)},
    "dropout": {"dropout_p": 0.2, "dropout_seed": torch.tensor([3])},
    "layout": {"causal": True, "layout": "bhsd"},
}


@pytest.mark.parametrize(
    ("call", "dtype"), [*((call, torch.bfloat16) for call in CALLS), ("full", torch.float16), ("causal", torch.float16)]
)
def test_the_same_bytes(both, call, dtype):
    """Grids, blocks, shared memory, streams and every parameter, tensor maps among them; forward and backward."""
    options = CALLS[call]
    q, k, v = inputs(dtype, layout=options.get("layout", "bshd"))
    for _ in range(2):
        out = sartor.attention(q, k, v, **options)
        out = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    assert len(both) == 4
    assert both[0] == both[2] == 1
    assert both[1] == both[3] >= 2


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 96), (192, 192), (192, 128), (256, 256)])
@pytest.mark.parametrize("heads_kv", [1, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_bytes_of_head_dims_and_groups(both, dims, heads_kv, causal):
    q, k, v = inputs(dim=dims[0], dim_v=dims[1], heads_kv=heads_kv)
    out = sartor.attention(q, k, v, causal=causal)
    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    assert len(both) == 2


def test_the_same_bytes_of_what_is_padded_and_merged(both):
    q, k, v = (t.detach() for t in inputs(dim=33))
    sartor.attention(q, k, v)
    keys = torch.zeros((1, 9000, 4, 64), dtype=torch.bfloat16)
    sartor.attention(keys[:, :1], keys, keys, return_lse=True)
    assert both == [1, 2]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_later_calls_go_straight_to_the_launches(stub, monkeypatch, layout):
    """With what the first one found out: addresses in the same order, results that lie the same way."""
    monkeypatch.setattr(node.Calls, "add", lambda *_: None)  # of backwards C makes none
    given, first = [], []
    start, way = lists.Replayed.start, node.Work._first_backward
    monkeypatch.setattr(lists.Replayed, "start", lambda self, at, on: given.append(tuple(at)) or start(self, at, on))
    monkeypatch.setattr(node.Work, "_first_backward", lambda self, *a: first.append(1) or way(self, *a))
    q, k, v = (t.detach().contiguous().requires_grad_() for t in inputs(layout=layout))
    shapes = set()
    for _ in range(3):
        out = sartor.attention(q, k, v, layout=layout)
        dout = torch.zeros_like(out)
        found = torch.autograd.grad(out, (q, k, v), dout)
        forward, backward = given[-2:]
        assert forward[:4] == backward[:3] + backward[4:5] == tuple(t.data_ptr() for t in (q, k, v, out))
        assert forward[4:] == (backward[5], 0)
        assert backward[3] == dout.data_ptr()
        assert backward[6:10] == (0, *(t.data_ptr() for t in found))
        shapes.add(tuple((t.shape, t.stride()) for t in (out, *found)))
    assert (len(given), len(first), len(shapes)) == (6, 1, 1)
    for other in (dout.transpose(1, 2).contiguous().transpose(1, 2), torch.zeros(1, dtype=out.dtype).expand(out.shape)):
        torch.autograd.grad(sartor.attention(q, k, v, layout=layout), (q, k, v), other)
    with settings.deterministic():
        torch.autograd.grad(sartor.attention(q, k, v, layout=layout), (q, k, v), dout)
    assert len(first) == 4


class Repair:
    """A launch of Triton's that joins a row."""

    def among(self, places):
        taken = tuple(places[f"{name}_ptr"] for name in ("q", "dq", "delta", "bad_q", "lse"))
        return driver.Step("PPiPfPPPP", {2: 7, 4: 0.5, 7: 0, 8: 0}, taken, self.function, "repair", (3, 1, 1), 128, 64)


def test_repairs_join_the_list(both, stub, monkeypatch):
    repair, kept = Repair(), iter([False, True])
    repair.function = stub.function("repair", 8, 8, 4, 8, 4, 8, 8, 8, 8)
    monkeypatch.setattr(launch, "repeat", lambda *_: next(kept))
    monkeypatch.setattr(launch, "run", lambda *_: None)
    monkeypatch.setattr(launch, "direct_ones", lambda *_: [repair, repair])
    monkeypatch.setattr(backward_launches.direct, "hooked", lambda: False)
    q, k, v = inputs()
    for _ in range(2):
        out = sartor.attention(q, k, v, causal=True)
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    assert both[3] == both[1] + 2


def step(stub, letters="P P", **options):
    letters = tuple(letters.split())
    function = stub.function("f", *map(driver.size, letters))
    return driver.Step(letters, **{"function": function, "name": "f", "grid": (2, 3, 4), **options})


def test_values_are_made_of_others(stub):
    """Addresses with an offset, records, values that several launches take, and one that none does."""
    steps = [
        step(stub, "P P 48s i", fixed={3: -5}, given=(0, 4, 5)),
        step(stub, given=(2, 0), block=96, shared=1 << 17),
    ]
    made = [lists.At(1, 40), lists.Record(struct.Struct("=6Q"), (EIGHT,) * 6, ((8, 2), (24, 0)))]
    found = []
    for kind in (lists.Replayed, lists.Launched):
        way = kind(steps, 4, made)
        for given in ((1, 2, 3, 4), (2**63, 2**64 - 41, 7, 0)):
            way.start(given, STREAM)
        found.append(stub.told())
    assert found[0] == found[1]
    assert b"abcdefgh\3" + bytes(7) + b"abcdefgh\1" + bytes(7) + b"abcdefgh" * 2 in found[0]
    assert (42).to_bytes(8, "little") + b"abcdefgh" in found[0]


def test_a_context_is_bound_where_there_is_none(stub, monkeypatch):
    """By a map, or a launch."""
    bound = []
    monkeypatch.setattr(driver, "bind", lambda: bound.append(1))
    maps = TensorMaps("float16", (8, 4), (16,), ((8, 4), 0))
    for steps, made in (([step(stub)], []), ([step(stub, "P 128s", given=(0, 1))], [lists.Mapped(0, maps)])):
        way = lists.Replayed(steps, 2 - len(made), made)
        stub.library.stub_refuse(driver.NO_CONTEXT, 1)
        way.start((16, 32)[: 2 - len(made)], STREAM)
        assert stub.told()
    assert bound == [1, 1]


def test_what_the_driver_refuses_is_told(stub):
    both = [step(stub), step(stub, name="second", shared=9)]
    stub.library.stub_refuse(1, 1)
    with pytest.raises(
        driver.LaunchError, match=r"f \(grid \(2, 3, 4\), block 1, 0 bytes of .* did not launch: CUDA_ERR"
    ):
        lists.Replayed(both, 2, []).start((1, 2), STREAM)
    maps = TensorMaps("float16", (8, 4), (16,), ((8, 4), 0))
    stub.library.stub_refuse(1, 1)
    with pytest.raises(driver.LaunchError, match="a tensor map for f was not made: CUDA_ERROR_1"):
        lists.Replayed([step(stub, "P 128s", given=(0, 1))], 1, [lists.Mapped(0, maps)]).start((16,), STREAM)


def test_what_is_not_replayed(stub):
    """Has a sentence, and is launched by Python."""
    cases = {
        "needs values that are addresses, got P, i": [step(stub, "P i")],
        "needs 16384 bytes and 128 parameters a launch at most, got .* and 129": [step(stub, "P " * 129)],
        "needs 16384 bytes and 128 parameters a launch at most, got 20": [
            step(stub, "P 20000s", fixed={1: b""}, given=(0,))
        ],
    }
    for why, steps in cases.items():
        assert re.match(why, lists.Replayed.why_not(steps, 2, []))
        assert isinstance(lists.launcher(steps, 2, []), lists.Launched)


def test_threads_replay_one_list(stub):
    stub.library.stub_quiet(1)
    way, failed = lists.Replayed([step(stub)] * 3, 2, []), []

    def run():
        try:
            for _ in range(300):
                way.start((1, 2), STREAM)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stub.library.stub_quiet(0)
    assert not failed


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """The library is looked for again, with an empty cache."""
    monkeypatch.setenv("SARTOR_CACHE", str(tmp_path))
    library._loaded.cache_clear()
    yield tmp_path
    library._loaded.cache_clear()


def test_the_library_is_compiled_once(anew, monkeypatch):
    assert library.why_not() == ""
    assert len(list(anew.iterdir())) == 1
    library._loaded.cache_clear()
    monkeypatch.setattr(library, "FLAGS", library.FLAGS)
    run = library.subprocess.run
    asked = []
    monkeypatch.setattr(library.subprocess, "run", lambda command, **o: asked.append(command[1:]) or run(command, **o))
    assert library.why_not() == ""
    assert asked == [["--version"]]


def test_why_there_is_no_library(anew, monkeypatch):
    monkeypatch.setenv("SARTOR_REPLAY", "0")
    assert library.why_not() == "SARTOR_REPLAY=0 is set"
    monkeypatch.delenv("SARTOR_REPLAY")
    library._loaded.cache_clear()
    monkeypatch.setattr(library, "FLAGS", ("-no-such-flag", *library.FLAGS))
    assert "made nothing to load of replay.c" in library.why_not()
    library._loaded.cache_clear()
    monkeypatch.setenv("PATH", str(anew))
    assert library.why_not() == "needs a C compiler, found none of cc, gcc, clang"
    assert not list(anew.iterdir())
