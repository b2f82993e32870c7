"""Calls that C makes without Python: the launches that Python would make, or Python's kernels of the operator."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import sartor
import settings
import stubbed
from sartor import direct, driver, mods, node, nvrtc
from sartor.device import ARCHITECTURES
from sartor.kernels.cuda import host, row
from sartor.kernels.triton import launch
from sartor.replay import calls, library, lists

pytestmark = [
    pytest.mark.skipif(not launch.available(), reason="needs Triton, whose launches stand between"),
    pytest.mark.skipif(stubbed.COMPILER is None, reason="needs a C compiler"),
]
STREAM = 0x5EED


class Repair:
    """A launch of Triton's that joins a row."""

    def among(self, places):
        taken = tuple(places[f"{name}_ptr"] for name in ("q", "dq", "delta", "bad_q", "lse"))
        return driver.Step("PPiPfPPPP", {2: 7, 4: 0.5, 7: 0, 8: 0}, taken, self.function, "repair", (3, 1, 1), 128, 64)


class Seen:
    """Of forwards and backwards those that Python made, the launchers of rows, and addresses of what C allocated."""

    def __init__(self, stub):
        self.stub, self.forwards, self.python, self.rows, self.allocated = stub, [], [], [], []


@pytest.fixture
def seen(monkeypatch):
    found, functions = Seen(None), calls._functions()
    kinds = ctypes.c_int64, *[ctypes.c_void_p] * 2, *[ctypes.c_int32] * 3, ctypes.POINTER(ctypes.c_void_p)

    @ctypes.CFUNCTYPE(ctypes.c_int, *kinds)
    def empty(dim, sizes, strides, dtype, device_type, device, made):
        pointers = ctypes.c_void_p(sizes), ctypes.c_void_p(strides)
        status = functions.torch.aoti_torch_empty_strided(
            ctypes.c_int64(dim), *pointers, *map(ctypes.c_int32, (dtype, device_type, device)), made
        )
        address = ctypes.c_void_p()
        functions.torch.aoti_torch_get_data_ptr(ctypes.c_void_p(made[0]), ctypes.byref(address))
        found.allocated.append(address.value)
        return found.stub.fails if found.stub.fails else status

    find = functions.find
    monkeypatch.setattr(functions, "find", lambda name: empty if name.endswith("empty_strided") else find(name))
    launcher, way, followed = row.launcher, node.Work.backward, node.Work.followed
    monkeypatch.setattr(node.Work, "followed", lambda self, *given: found.forwards.append(1) or followed(self, *given))
    monkeypatch.setattr(row, "launcher", lambda *args: found.rows.append(args) or launcher(*args))
    monkeypatch.setattr(node.Work, "backward", lambda self, *given: found.python.append(1) or way(self, *given))
    repair, kept = Repair(), iter([False, *[True] * 99])
    monkeypatch.setattr(launch, "repeat", lambda *_: next(kept))
    monkeypatch.setattr(launch, "run", lambda *_: None)
    monkeypatch.setattr(launch, "direct_ones", lambda *_: [repair, repair])
    monkeypatch.setattr(direct, "hooked", lambda: False)
    with stubbed.stubbed() as stub:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
        ctypes.c_void_p.in_dll(stub.library, "stub_stream").value = STREAM
        repair.function = stub.function("repair", 8, 8, 4, 8, 4, 8, 8, 8, 8)
        found.stub, stub.fails = stub, 0
        yield found


def leaves(dtype=torch.bfloat16, layout="bshd", heads_kv=3, dim=64, parts=False):
    """`parts`: of wider tensors, as of one product for q, k and v."""
    for n, heads in ((70, 6), (90, heads_kv), (90, heads_kv)):
        t = torch.zeros((2, n, 3, heads, dim), dtype=dtype)[:, :, 1]
        if layout == "bhsd":
            t = t.transpose(1, 2)
        yield (t if parts else t.contiguous()).requires_grad_()


def laid_out(t):
    return t.shape, t.stride(), t.dtype


OPTIONS = {
    "full": {}, "causal": {"causal": True}, "window": {"softcap": 5.0, "window": (7, 3)},
    "mask": {"mask": mods.causal() & mods.window(9, 0)}, "score": {"score": mods.Score(lambda s, b, h, *_: s * 2 + h)},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "like",
    [
        {},
        {"layout": "bhsd"},
        {"dtype": torch.float16},
        {"heads_kv": 6},
        {"heads_kv": 1, "dim": 128},
        {"dim": 192},
        {"parts": True},
        {"parts": True, "layout": "bhsd"},
        {"parts": True, "heads_kv": 1, "dim": 128},
    ],
    ids=str,
)
def test_the_same_bytes(seen, options, like):
    """As Python's launches of the same addresses, and results that lie as Python's do."""
    q, k, v = leaves(**like)
    options = options | {"layout": like.get("layout", "bshd")}
    for i in range(4):
        seen.stub.told()
        out = sartor.attention(q, k, v, **options)
        lse, dout, told_first = out.grad_fn._saved_logsumexp, torch.zeros_like(out), seen.stub.told()
        found = torch.autograd.grad(out, (q, k, v), dout)
        told = seen.stub.told()
        if i == 0:
            first = out, *found
            continue
        assert len(seen.forwards) == len(seen.python) == 1
        given = [t.data_ptr() for t in (q, k, v, out, lse)]
        assert given[3:] == seen.allocated[-6:-4]
        kept = [t.data_ptr() for t in host._WORKSPACES.values()]
        lists.Launched(*seen.rows[0]).start([*given, 0, *kept], STREAM)
        assert told_first == seen.stub.told() != b""
        given = [t.data_ptr() for t in (q, k, v, dout, out, lse)] + [0, *seen.allocated[-4:]]
        assert given[7:10] == [t.data_ptr() for t in found]
        lists.Launched(*seen.rows[-1]).start(given, STREAM)
        assert told == seen.stub.told() != b""
        assert [laid_out(t) for t in (out, *found)] == [laid_out(t) for t in first]
        assert laid_out(lse) == ((*out.shape[:1], 6, 70), (420, 70, 1), torch.float32)
    assert sum(step.name == "repair" for step in seen.rows[-1][0]) == 2 * bool(
        options.keys() & {"causal", "window", "mask"}
    )


def test_what_c_leaves_to_python(seen, monkeypatch):
    """Whatever is not as it was."""
    q, k, v = leaves()
    out = sartor.attention(q, k, v)
    dout = torch.zeros_like(out)

    def by_python(dout, **options):
        before = len(seen.python)
        found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True, **options)
        assert [t.shape for t in found] == [t.shape for t in (q, k, v)]
        return len(seen.python) - before

    assert [by_python(dout) for _ in range(3)] == [1, 0, 0]
    assert by_python(dout, create_graph=True) == 1
    turned = dout.transpose(1, 2).contiguous().transpose(1, 2)
    assert [by_python(turned) for _ in range(2)] == [1, 0]
    assert [by_python(settings.shifted(dout)) for _ in range(2)] == [1, 1]
    assert by_python(torch.zeros(1, dtype=out.dtype).expand(out.shape)) == 1
    with settings.deterministic():
        assert [by_python(dout) for _ in range(2)] == [1, 0]
    seen.stub.library.stub_refuse(719, 1)
    assert by_python(dout) == 1
    seen.stub.fails = 1
    assert by_python(dout) == 1
    seen.stub.fails = 0
    ctypes.c_void_p.in_dll(seen.stub.library, "stub_context").value = 2
    assert by_python(dout) == 1
    ctypes.c_void_p.in_dll(seen.stub.library, "stub_context").value = 1
    assert by_python(dout) == 0


def test_calls_on_another_device_are_not_kept(seen, monkeypatch):
    """Launches are those of the device that is current; another one's go the way of all calls."""
    q, k, v = leaves()
    monkeypatch.setattr(node, "current", lambda device: False)
    monkeypatch.setattr(host, "current", lambda device: False)
    for i in range(3):
        out = sartor.attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        assert len(seen.forwards) == len(seen.python) == i + 1
    monkeypatch.undo()


def test_workspaces_are_those_of_streams(seen, monkeypatch):
    """A forward that may repair rows marks them in memory of its stream, and in a graph's own while one is captured."""
    q, k, v = leaves()
    now = ctypes.c_void_p.in_dll(seen.stub.library, "stub_stream")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: now.value or 0, raising=False)

    def by_python(stream, capturing=False):
        before, now.value = len(seen.forwards), stream
        ctypes.c_int.in_dll(seen.stub.library, "stub_capturing").value = capturing
        monkeypatch.setattr(node, "capturing", lambda _: capturing)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        sartor.attention(q, k, v, causal=True)
        return len(seen.forwards) - before

    assert [by_python(stream) for stream in (1, 1, 2, 1, 2, 0, 0)] == [1, 0, 1, 0, 0, 1, 0]
    assert len({t.data_ptr() for t in host._WORKSPACES.values()}) == 3
    assert [by_python(3, True), by_python(1, True), by_python(1), by_python(3)] == [1, 1, 0, 1]


def test_who_hears_of_tritons_launches_does(seen, monkeypatch):
    q, k, v = leaves()
    for heard, by_python in ((False, 1), (False, 0), (True, 1), (False, 0)):
        before = len(seen.python)
        monkeypatch.setattr(direct, "hooked", lambda heard=heard: heard)
        out = sartor.attention(q, k, v, causal=True)
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        assert len(seen.python) - before == by_python


def test_errors_and_memory(seen, monkeypatch):
    """Of C, of Python, and of a backward that fails: what Python raised comes as it is, and nothing stays allocated."""
    q, k, v = leaves()

    def freed(raises=None):
        out = sartor.attention(q, k, v)
        dout = torch.zeros_like(out)
        found = ()
        if raises is None:
            found = torch.autograd.grad(out, (q, k, v), dout)
        else:
            with pytest.raises(raises, match="of the backward"):
                torch.autograd.grad(out, (q, k, v), dout)
        kept = [StorageWeakRef(t.untyped_storage()) for t in (out, dout, *found)]
        del out, dout, found
        return all(ref.expired() for ref in kept)

    assert [freed() for _ in range(3)] == [True] * 3

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("of the backward")

    monkeypatch.setattr(node.Work, "backward", fails)
    seen.stub.library.stub_refuse(2, 0)
    assert freed()
    with settings.deterministic():
        assert freed(torch.OutOfMemoryError)


def test_arguments_reach_python(monkeypatch):
    """Numbers, and whether there are a mask and a scale."""
    given = []
    monkeypatch.setattr(node, "_backward", lambda *args, **named: given.append((args, named)) or args[1:4])
    monkeypatch.setattr(node, "_forward", lambda *args, **named: given.append((args, named)) or (args[2], args[1]))
    operator_of = getattr(torch.ops.aten, node.OPERATOR).default
    with stubbed.stubbed():
        tensors = [torch.full((1, 1, 2, 8), float(i)) for i in range(6)]
        operator = getattr(torch.ops.aten, f"{node.OPERATOR}_backward").default
        for mask, scale in ((None, None), (tensors[0], None), (None, 0.375), (tensors[0], -2.0)):
            found = operator(*tensors, 0.25, True, attn_mask=mask, scale=scale)
            assert [float(t.mean()) for t in found] == [1, 2, 3]
            args, named = given.pop()
            assert all(a is b for a, b in zip(args[:6], tensors, strict=True))
            assert args[6:] == (0.25, True)
            assert named.get("attn_mask") is mask
            assert named.get("scale") == scale
        operator(*tensors, 0.0, False)
        assert given.pop()[0][6:] == (0.0, False)
        with torch.no_grad():
            found = operator_of(*tensors[:3], 0.5, True, attn_mask=tensors[4], scale=0.25)
        assert [float(t.mean()) for t in found] == [2, 1]
        args, named = given.pop()
        assert all(a is b for a, b in zip(args[:3], tensors, strict=False))
        assert (args[3:], named["attn_mask"] is tensors[4], named["scale"]) == ((0.5, True), True, 0.25)


def test_without_it_python_makes_all(monkeypatch):
    monkeypatch.setattr(library, "_loaded", lambda: (None, "none here"))
    with stubbed.stubbed():
        q, k, v = leaves()
        for _ in range(2):
            out = sartor.attention(q, k, v)
            handle = out.grad_fn._saved_attn_mask
            torch.autograd.grad(out, (q, k, v), out.detach())
            assert handle.of_sartor.calls is None
            assert handle.shape == (0,)


def test_explain_says_what_launches(monkeypatch):
    q = torch.empty(1, 128, 8, 64, dtype=torch.bfloat16, device="meta")
    hopper = ARCHITECTURES[90]

    def notes(**options):
        return [note for note in sartor.explain(q, q, q, device=hopper, **options).notes if " launches" in note]

    monkeypatch.setattr(nvrtc, "missing", lambda: "")
    with stubbed.stubbed():
        where = "where autograd follows q, k and v alone, later calls run without Python"
        assert notes() == [f"C makes the launches of a call; {where}"]
        assert notes(kernel="triton") == []
        monkeypatch.setattr(calls._functions(), "cuda", None)
        assert notes()[0].startswith("C makes the launches of a call, which Python prepares: needs what")
        monkeypatch.setattr(library, "_loaded", lambda: (None, "SARTOR_REPLAY=0 is set"))
        assert notes() == ["Python makes the launches one by one: SARTOR_REPLAY=0 is set"]
