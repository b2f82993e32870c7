"""Calls on packed sequences and caches that are kept: the launches of the way of all calls, byte by byte."""

from __future__ import annotations

import ctypes

import pytest
import torch

import settings
import stubbed
from sartor import direct, driver, lengths_front
from sartor.compat import flash_attn, flash_attn_3
from sartor.kernels.cuda import host
from sartor.kernels.triton import launch
from sartor.lengths import append, intervals, values
from sartor.mods.recent import Recent

pytestmark = [
    pytest.mark.skipif(not launch.available(), reason="needs Triton, whose launches stand between"),
    pytest.mark.skipif(stubbed.COMPILER is None, reason="needs a C compiler"),
]
STREAM = 0x5EED
SMALL = torch.tensor([0, 50, 50, 130, 200], dtype=torch.int32)


class Compiled:
    """In the place of what Triton compiled, whose kernels say what they take."""

    def __init__(self, kernel, stub):
        kinds = [p.annotation_type for p in kernel.params if not p.is_constexpr]
        letters = "".join("P" if kind is None else direct.LETTERS[kind] for kind in map(_kind, kinds)) + "PP"
        function = stub.function(kernel.__name__, *map(driver.size, letters))
        fixed = {len(letters) - 2: 0, len(letters) - 1: 0}
        self.launches = driver.Launches(driver.Step(letters, fixed, None, function, kernel.__name__, (1, 1, 1), 128))
        self.start = lambda grid, addresses, numbers, stream: self.launches.start(
            (*addresses, *numbers), stream, (grid, 1, 1)
        )


def _kind(annotation):
    return annotation or None


class Known(dict):
    def __init__(self, stub, module):
        self.stub, self.module = stub, module

    def get(self, key, default=None):
        if key not in self:
            self[key] = object(), Compiled(getattr(self.module.kernels, key[0]), self.stub)
        return self[key]


@pytest.fixture
def stub(monkeypatch):
    from sartor.lengths import launches

    with stubbed.stubbed() as stub:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
        monkeypatch.setattr(direct, "hooked", lambda: False)
        monkeypatch.setattr(launch, "run", lambda *_: None)
        monkeypatch.setattr(launches, "_COMPILED", Known(stub, launches))
        monkeypatch.setattr(lengths_front, "KEPT", Recent(64))
        monkeypatch.setattr(values, "_FLAGS", {None: values.Flag(torch.device("cpu"), pinned=False)})
        for module in (intervals, append):
            monkeypatch.setattr(module, "by_kernel", lambda t: True)
        yield stub


@pytest.fixture
def memory(monkeypatch):
    """Every call gets the same: its tables are where a kept call has them."""
    like, tables = torch.empty_like, {"space": torch.zeros(1 << 16, dtype=torch.int32)}

    def rooms(make):
        def call(*args):
            space = tables["space"]
            at, found = 0, []
            for t in make(*args):
                found.append(space.as_strided(t.shape, t.stride(), at))
                at += -(-t.untyped_storage().nbytes() // 16) * 4
            tables["begin"] = at
            return tuple(found)

        return call

    def empty_like(t, *args, **kwargs):
        if t.dtype == torch.float32 and t.dim() == 1:  # a workspace
            begin = tables.pop("begin", 0)
            return tables["space"].view(torch.float32)[begin : begin + t.shape[0]]
        key = t.shape[-3:], t.dtype
        found = tables.get(key)
        if found is None:
            found = tables[key] = like(t, *args, **kwargs)
        return found.view(t.shape)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(intervals, "rows_and_cols", rooms(intervals.rows_and_cols))
    return tables


def heads(n, h, d=64, dtype=torch.bfloat16):
    return torch.zeros((n, h, d), dtype=dtype)


def told(stub, call):
    stub.told()
    call()
    return stub.told()


def kept():
    return [one for found in lengths_front.KEPT.values() for _, one in found]


def same_three_times(stub, memory, call):
    """What the driver is told by the way of all calls, twice, and then by what is kept; results that lie alike."""
    found, results = [], []
    for i in range(3):
        assert bool(kept()) == (i == 2)
        stub.told()
        memory.pop("begin", None)
        results.append(call())
        found.append(stub.told())
    (one,) = kept()
    assert isinstance(one, lengths_front.Kept)
    assert found[0] == found[1] == found[2] != b""
    first, _, last = ([t for t in (x if isinstance(x, tuple) else (x,)) if t is not None] for x in results)
    assert [(t.shape, t.stride(), t.dtype) for t in first] == [(t.shape, t.stride(), t.dtype) for t in last]
    return one


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 3), "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("like", [(64, 4, 4), (128, 4, 2), (64, 4, 1), (96, 2, 2), (64, 1, 1)], ids=str)
@pytest.mark.parametrize("parts", [False, True], ids=["", "parts"])
def test_packed_sequences(stub, memory, options, lse, like, parts):
    """`parts`: of wider tensors, as of one product for q, k and v."""
    dim, h, hkv = like
    q, k, v = heads(200, h, dim), heads(200, hkv, dim), heads(200, hkv, dim)
    if parts:
        q, k, v = (torch.stack([t, t, t], 1)[:, 1] for t in (q, k, v))
    options = options | {"return_attn_probs": lse}
    same_three_times(stub, memory, lambda: flash_attn.flash_attn_varlen_func(q, k, v, SMALL, SMALL, 80, 80, **options))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 0), "num_splits": 1}], ids=str)
@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("like", [(3, 2, 300, 4), (1, 1, 8192, 1)], ids=["short", "in parts"])
def test_caches(stub, memory, options, new, like):
    b, m, n, hkv = like
    q, k, v = heads(b * m, 4).view(b, m, 4, 64), *(heads(b * n, hkv).view(b, n, hkv, 64) for _ in "kv")
    added = [heads(b * new, hkv).view(b, new, hkv, 64) for _ in "kv"] if new else [None, None]
    lengths = torch.full((b,), n - 9, dtype=torch.int32)
    options = options | {"return_softmax_lse": bool(new), "cache_seqlens": lengths}
    before = k._version

    def call():
        lengths.add_(0)  # or else they are looked at no more
        return flash_attn.flash_attn_with_kvcache(q, k, v, *added, **options)

    one = same_three_times(stub, memory, call)
    assert one.merges == (n == 8192 and "num_splits" not in options)
    assert k._version - before == 3 * bool(new)


@pytest.mark.parametrize(("version", "new", "attributes"), [(12020, 0, 0), (12030, 0, 1), (12030, 2, 0)])
def test_the_attention_does_not_wait_for_who_looks_at_lengths(stub, version, new, attributes):
    """It does for who adds keys."""
    ctypes.c_int.in_dll(stub.library, "stub_version").value = version
    q, k, v, *added = heads(3, 4).view(3, 1, 4, 64), *(heads(3 * n, 4).view(3, n, 4, 64) for n in (300, 300, 2, 2))
    lengths = torch.full((3,), 9, dtype=torch.int32)
    sizes = []
    for changes in (True, True, True, False, False, True):
        stub.told()
        if changes:
            lengths.add_(0)
        flash_attn.flash_attn_with_kvcache(q, k, v, *added[:new], cache_seqlens=lengths)
        sizes.append(len(stub.told()))
    assert sizes[0] == sizes[1]
    assert sizes[2] - sizes[1] == attributes * ctypes.sizeof(driver._Attribute)
    assert sizes[3] == sizes[4]
    assert (sizes[3] < sizes[1]) == (not new), "they have not changed since they were looked at"
    assert sizes[5] == sizes[2]


def test_gradients(stub):
    """Those of the way of all calls, behind a node whose tables lie in the workspace."""
    q, k, v = (heads(200, 4).requires_grad_() for _ in "qkv")
    found = []
    for i in range(4):
        out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, SMALL, SMALL, 80, 80, return_attn_probs=True)
        assert (out.shape, lse.shape) == (q.shape, (4, 200))
        assert not out._base._is_view()
        stub.told()
        gradients = torch.autograd.grad(out.sum() + lse.sum() if i % 2 else out.sum(), (q, k, v))
        found.append(len(stub.told()))
        assert [t.shape for t in gradients] == [q.shape] * 3
    assert found[:2] == found[2:]
    with torch.no_grad():
        assert not flash_attn.flash_attn_varlen_func(q, k, v, SMALL, SMALL, 80, 80).requires_grad
    (one,) = kept()
    stub.told()
    out, _ = one.attend((q, k, v, SMALL, SMALL), False)
    q.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()


def test_only_the_same_call_is_found(stub):
    q, k, v = (heads(200, 4) for _ in "qkv")

    def call(q=q, k=k, v=v, cu=SMALL, **options):
        return flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 80, 80, **options)

    for _ in range(2):
        call()
    (one,) = kept()
    made = []
    attend, one_class = lengths_front.Kept.attend, lengths_front.Kept
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_class, "attend", lambda self, *args: made.append(self) or attend(self, *args))

        def finds(*args, **options):
            made.clear()
            call(*args, **options)
            return one in made

        assert all(finds(**same) for same in ({}, {"cu": SMALL.clone()}, {"return_attn_probs": True}))
        assert not any(
            finds(**options)
            for options in (
                {"causal": True}, {"window_size": (3, 3)}, {"softmax_scale": 0.5}, {"softcap": 2.0},
                {"deterministic": True}, {"alibi_slopes": torch.ones(4)}, {"cu": SMALL[[0, 2, 3, 4]]},
                {"cu": SMALL.long()}, {"q": heads(200, 4).requires_grad_()}, {"q": settings.shifted(q)},
                {"k": k.transpose(0, 1).contiguous().transpose(0, 1)}, {"v": v[:, :2], "k": k[:, :2]},
            )
        )  # fmt: skip
        with settings.deterministic():
            assert not finds()
        with torch.autocast("cpu", torch.bfloat16):
            assert not finds()
        assert finds()


def test_what_is_wrong_is_said_as_ever(stub):
    q, k, v = (heads(200, 4) for _ in "qkv")

    def call(cu=SMALL, **options):
        return flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 80, 80, **options)

    for _ in range(3):
        call()
    assert len(kept()) == 1
    with pytest.raises(ValueError, match="cu_seqlens_q must begin with 0 and never fall, got"):
        call(SMALL + torch.tensor([1, 0, 0, 0, 0], dtype=torch.int32))
    for options, text in (
        ({"causal": 1}, "causal must be a bool"), ({"window_size": (True, 1)}, "window_size"),
        ({"return_attn_probs": 1}, "return_attn_probs must be a bool"), ({"softcap": "1"}, "softcap"),
        ({"deterministic": 0}, "deterministic must be a bool"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=text):
            call(**options)
    values._FLAGS[None].words[0] = 1
    values._FLAGS[None].words[1] = (7 << 32) + 3  # as a kernel writes it
    with pytest.raises(ValueError, match="cu_seqlens_q must begin with 0 and never fall, got 7 first"):
        call()
    call()
    stub.library.stub_refuse(719, 1)
    with pytest.raises(driver.LaunchError, match="hopper_forward was not made: CUDA_ERROR_719"):
        call()


def test_others_launch_where_it_may_not(stub, monkeypatch):
    """Hooks of Triton's launches are heard, other devices are made current, and no graph is what makes one kept."""
    q, k, v = (heads(200, 4) for _ in "qkv")

    def call():
        return flash_attn_3.flash_attn_varlen_func(q, k, v, SMALL, SMALL, 80, 80)

    with monkeypatch.context() as patch:
        patch.setattr(lengths_front, "capturing", lambda device: True)
        for _ in range(3):
            call()
        assert not kept()
    call()
    (one,) = kept()
    for owner, name, value in ((direct, "hooked", lambda: True), (host, "current", lambda device: False)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert one.attend((q, k, v, SMALL, SMALL), False) is None
    assert one.attend((q, k, v, SMALL, SMALL), False)[1] is None
