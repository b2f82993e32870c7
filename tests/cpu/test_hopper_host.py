"""The host side of the Hopper forward, with a driver that launches nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sartor
from counted import calls_of
from sartor import mods, nvrtc, ops
from sartor.device import ARCHITECTURES, Device
from sartor.kernels import blocks
from sartor.kernels.cuda import host
from sartor.kernels.cuda.row import Row
from sartor.kernels.hopper import backward_config, backward_launches
from sartor.kernels.hopper import forward as hopper_forward
from sartor.kernels.hopper.forward import Config, HopperForward
from sartor.kernels.hopper.schedule import LONG
from sartor.kernels.spec import Tile
from sartor.mods.recent import Recent
from sartor.plan import choose
from sartor.problem import Call, Problem


@dataclass
class Driver:
    """What it was asked for: tensor maps (address and sizes), and of each launch kernel, grid, arguments by name."""

    maps: list[tuple[Any, ...]] = field(default_factory=list)
    launches: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)


@pytest.fixture
def driver(monkeypatch):
    found = Driver()

    def tensor_map(address, dtype, sizes, strides, box, swizzle, promotion=256):
        found.maps.append((address, sizes, strides))
        return bytes(128)

    def launch(self, grid, values):
        assert values.keys() == set(self.changing)
        found.launches.append((self.name, grid, self.fixed | values))

    monkeypatch.setattr(nvrtc, "tensor_map", tensor_map)
    monkeypatch.setattr(nvrtc, "missing", lambda: "")

    def start(self, values):
        for one in self.named(values):
            launch(*one)

    monkeypatch.setattr(nvrtc.Kernel, "launch", launch)
    monkeypatch.setattr(Row, "start", start)
    monkeypatch.setattr(HopperForward, "compile", lambda *_: None)
    monkeypatch.setattr(Device, "of", classmethod(lambda *_: ARCHITECTURES[90]))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(ops, "PREPARED", Recent(2048))
    return found


def inputs(dim, layout="bhsd"):
    shapes = ((2, 4, 70, dim), (2, 2, 90, dim), (2, 2, 90, dim))
    tensors = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    return [t if layout == "bhsd" else t.transpose(1, 2).contiguous() for t in tensors]


@pytest.mark.parametrize("causal", [False, True])
def test_a_layout_is_read_as_it_lies(driver, causal):
    """Heads outermost, as a layout or as a view: the same launch, and the output lies as the queries do."""
    q, k, v = inputs(64)
    out, lse = sartor.attention(q, k, v, layout="bhsd", causal=causal, return_lse=True)
    view = sartor.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)
    assert out.shape == q.shape
    assert out.stride() == q.stride() == view.transpose(1, 2).stride()
    assert lse.is_contiguous()
    (_, _, first), (_, _, second) = driver.launches
    own = {"out", "lse", *(["work"] if causal else ())}
    assert {n: x for n, x in first.items() if n not in own} == {n: x for n, x in second.items() if n not in own}
    of_first, of_second = driver.maps[:4], driver.maps[4:]
    assert of_first[:3] == of_second[:3]
    assert of_first[3][1:] == of_second[3][1:]  # of the outputs, which are two


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_maps_are_kept_by_address(driver, layout):
    """A second call on the same tensors makes none; another tensor makes its own, as an output does where it is new."""
    q, k, v = inputs(64, layout)
    outs = [sartor.attention(q, k, v, layout=layout) for _ in range(2)]
    assert [m[0] for m in driver.maps] == [t.data_ptr() for t in (q, k, v, *outs)]
    other = q.clone()
    outs.append(sartor.attention(other, k, v, layout=layout))
    assert [m[0] for m in driver.maps[5:]] == [other.data_ptr(), outs[-1].data_ptr()]
    assert len(driver.launches) == 3


def test_rows_are_padded_in_the_layout_they_have(driver):
    """Copies of 40 columns for 33, mapped with the strides that the copies have: autograd gets its own."""
    q, k, v = inputs(33)
    for gradient in (False, True):
        out = sartor.attention(q.requires_grad_(gradient), k, v, layout="bhsd")
        assert out.shape == q.shape
    strides = [strides for _, sizes, strides in driver.maps if sizes == (40, 70, 4, 2)]
    assert strides == [(80, 80 * 70, 80 * 70 * 4), (80 * 4, 80, 80 * 70 * 4)]


def test_float32_output(driver):
    q, k, v = inputs(64)
    out = sartor.attention(q, k, v, layout="bhsd", out_dtype=torch.float32)
    assert (out.shape, out.dtype) == (q.shape, torch.float32)


def test_old_maps_are_dropped(monkeypatch):
    monkeypatch.setattr(nvrtc, "tensor_map", lambda address, *rest: bytes([address, rest[-1]]))
    monkeypatch.setattr(nvrtc.TensorMaps, "MOST", 2)
    maps = nvrtc.TensorMaps("float16", (), (), ((), 128), ((), 32))
    assert [maps[a] for a in (1, 2, 3)] == [bytes([a, 128, a, 32]) for a in (1, 2, 3)]
    assert list(maps) == [3]


def config(heads, slices, groups, dim=128, **options):
    """Of a problem with so many slices of 64 queries a head, on tiles of so many of them."""
    q = torch.empty((1, 64 * slices - 3, heads, dim), dtype=torch.bfloat16, device="meta")
    return Config.of(Problem.of(Call(q, q, q, **options)), Tile(64 * groups, 64, 4 * (groups + 1), 4))


def slices_of(number, assigned, m, section):
    """(head, slice) that a block is given under a number, as `share` and `locate` in schedule.cuh say."""
    part, pieces = number - assigned.whole, -(-m.groups // assigned.width)

    def locate(number):
        if not m.balanced:
            return number // assigned.tiles_head, number % assigned.tiles_head
        heads = (assigned.whole + assigned.splits // pieces) // assigned.tiles_head
        begin = number // (assigned.tiles_head * section) * section
        width, left = min(section, heads - begin), number - begin * assigned.tiles_head
        return begin + left % width, assigned.tiles_head - 1 - left // width

    if part >= assigned.splits:
        return [(part - assigned.splits, assigned.tiles_head * m.groups + i) for i in range(m.groups)]
    head, tile = locate(number if part < 0 else assigned.whole + part // pieces)
    first, count = (0, m.groups) if part < 0 else (part % pieces * assigned.width, assigned.width)
    return [(head, tile * m.groups + i) for i in range(first, min(first + count, m.groups))]


@settings(deadline=None)
@given(
    heads=st.integers(1, 300),
    slices=st.integers(1, 90),
    groups=st.integers(1, 3),
    sms=st.sampled_from([1, 7, 114, 132]),
    options=st.sampled_from([{}, {"window": (900, 0)}, {"causal": True}]),
)
def test_every_slice_is_computed_once(heads, slices, groups, sms, options):
    m = config(heads, slices, groups, **options)
    assigned = m.assign(sms)
    section = m.section
    computed = [pair for number in range(assigned.tiles) for pair in slices_of(number, assigned, m, section)]
    first = assigned.tiles_head * groups - slices if m.balanced else 0  # the tile that is not full comes first there
    real = [(head, i) for head, i in computed if first <= i < first + slices]
    assert len(set(real)) == len(real) == heads * slices
    assert m.last_wave or assigned.tiles == assigned.whole
    assert not m.last_wave or assigned.whole % sms == 0


def test_no_tile_in_which_warpgroups_wait_for_ever():
    """With one stage of keys, who passes over a key tile would hold it for who waits for the next one."""
    for options in ({}, {"causal": True}, {"window": (900, 0)}):
        m = config(2, 3 * LONG, 2, dim=64, **options)
        narrow = replace(m, stages_k=1, stages_v=1)
        assert narrow.stuck
        assert not m.stuck
        assert not replace(narrow, groups=1).stuck
        found = list(HopperForward().tiles(m.p, ARCHITECTURES[90]))
        assert found
        assert not any(t.stages == 2 and t.block_m > 64 for t in found)


def test_a_split_last_wave_ends_sooner():
    """Of 1408 tiles, 88 would be an eleventh round of 132 blocks: of fewer slices it is shorter."""
    whole, parted = (config(64, 64, 3, causal=causal).assign(132) for causal in (True, False))
    assert (whole.tiles, whole.whole) == (1408, 1408)
    assert (parted.whole, parted.splits, parted.width) == (1320, 48, 2)
    assert parted.time < 11 * 3.0
    assert not config(64, 3 * LONG - 1, 3).last_wave  # short heads are read once


@given(
    heads=st.sampled_from([2**i for i in range(11)]),
    n=st.integers(1, 32768),
    dim=st.sampled_from([8, 64, 72, 128, 256]),
    mask=st.sampled_from([{}, {"causal": True}, {"window": (100, 0)}]),
)
def test_sections_of_heads_are_nearly_equal(heads, n, dim, mask):
    """The last one ends the launch: with few heads its long tiles would."""
    section = config(heads, -(-n // 64), 2, dim, **mask).section
    assert 1 <= section <= heads
    assert -heads % section < section / 8


def test_keys_and_values_in_flight_stay_in_l2():
    in_flight = {d: 4 * 4096 * d * config(64, 64, 2, d, causal=True).section >> 20 for d in (64, 128, 256)}
    assert in_flight == {64: 32, 128: 32, 256: 16}


def decode(batch, heads, heads_kv, n, dim=128, queries=1, **options):
    """The tile and the config of few queries on 132 SMs."""
    shapes = ((batch, queries, heads, dim), (batch, n, heads_kv, dim))
    q, k = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    p = Problem.of(Call(q, k, k, **options))
    tile = choose(p, ARCHITECTURES[90]).tile
    return tile, Config.of(p, tile)


def test_few_queries_have_kv_splits():
    """As many as there are SMs for, but for what the merging costs, and where splits would be idle or change bits."""
    assert [decode(b, 32, 8, 8192)[0].num_splits for b in (1, 2, 4, 8, 16)] == [16, 8, 4, 2, 1]
    assert [decode(1, 8, 8, n)[0].num_splits for n in (1000, 2048, 65536)] == [1, 8, 16]
    assert decode(1, 8, 8, 8192, causal=True, queries=3)[0].num_splits == 16
    document = mods.document(*(torch.empty(1, n, dtype=torch.int32, device="meta") for n in (3, 8192)))
    for options in ({"window": (100, 0)}, {"deterministic": True}, {"mask": document}):
        assert decode(1, 8, 8, 8192, queries=3, **options)[0].num_splits == 1
    torch.use_deterministic_algorithms(True)
    try:
        assert decode(1, 8, 8, 8192)[0].num_splits == 1
    finally:
        torch.use_deterministic_algorithms(False)
    lengths = torch.empty(1, dtype=torch.int32, device="meta")
    assert decode(1, 8, 8, 8192, mask=mods.cached(lengths, 1, 8192))[0].num_splits == 16


def test_few_queries_have_few_keys_a_tile():
    """What is read once is to have little under way; where heads have more queries, tiles are as tuned."""
    assert [decode(1, 8, 8, 4096, dim)[0].block_n for dim in (64, 96, 128, 256)] == [128, 80, 64, 64]
    assert decode(1, 8, 8, 4096, queries=65)[0].block_n > 64


@settings(deadline=None)
@given(
    batch=st.integers(1, 6), heads=st.integers(1, 20), n=st.integers(1, 40000), queries=st.integers(1, 200),
    dim=st.sampled_from([8, 64, 128, 256]),
)  # fmt: skip
def test_every_part_has_keys(batch, heads, n, queries, dim):
    """One without would do others' again."""
    tile, m = decode(batch, heads, heads, n, dim, queries)
    assigned = m.assign(132)
    if tile.num_splits > 1:
        assert (assigned.splits - 1) * assigned.width < m.key_tiles <= assigned.splits * assigned.width
        assert assigned.tiles == assigned.tiles_head * batch * heads * tile.num_splits <= 132


def test_kv_splits_are_merged(driver):
    """The first kernel writes where the second one reads, which writes what the caller gets."""
    q, k = (torch.zeros((1, n, 4, 64), dtype=torch.bfloat16) for n in (1, 9000))
    out, lse = sartor.attention(q, k, k, return_lse=True)
    (_, grid, first), (_, rows, second) = driver.launches
    assert (grid, rows) == (24 * 4, 4)
    assert (second["outs"], second["sums"]) == (first["out"], first["lse"])
    assert (second["out"], second["lse"]) == (out.data_ptr(), lse.data_ptr())
    assert second["sums"] - second["outs"] == 4 * 24 * 4 * 64
    ready = ops.prepare(Call(q, k, k)).forward.cache["bshd"]
    assert ready.merge.size.numel() == 24 * 4 * (64 + 2)  # an output, a highest score and a sum for each row


def test_few_tiles_have_few_queries():
    """Of the tiles timed on 132 SMs (seen while tuning, 128 keys a tile), the fastest."""
    best = {(64, 4, 4096): 1, (64, 8, 4096): 2, (64, 2, 16384): 2, (64, 1024, 512): 3, (64, 512, 1024): 3}
    h200 = replace(ARCHITECTURES[90], sm_count=132)
    for (dim, heads, n), groups in best.items():
        m = config(heads, -(-n // 64), 3, dim, causal=True)
        assert m.suited(h200).block_m == 64 * groups, (dim, heads, n)


def test_a_launch_reads_the_tensors_of_its_call(driver):
    """v is padded, where q and k are not; and a second call of one key reads its own bias, not the first's."""
    q, k, _ = inputs(64)
    v, biases = torch.zeros((2, 2, 90, 33), dtype=torch.bfloat16), [torch.zeros(4, 70, 90) for _ in range(2)]
    for bias in biases:
        sartor.attention(q, k, v, layout="bhsd", bias=bias)
        assert driver.launches[-1][-1]["a0"] == bias.data_ptr()
    padded = [address for address, sizes, _ in driver.maps if sizes[0] == 40]
    assert padded
    assert v.data_ptr() not in padded


def test_workspaces_hold_what_kernels_write():
    """A mark for every 16 rows of every query head; whole tiles of dq where one sweep adds it up."""
    for heads, n in ((1, 1), (3, 5), (7, 64)):
        m = config(heads, n, 2, causal=True)
        assert 16 * m.marks >= heads * -(-m.p.seqlen_q // 64) * 64
    for dim, n in ((64, 1), (64, 1000), (128, 1000)):
        q = torch.empty((2, n, 3, dim), dtype=torch.bfloat16, device="meta")
        p = Problem.of(Call(q, q, q))
        rows, rest = divmod(backward_config.sums(p), 2 * 3 * dim)
        assert (rest, rows % backward_config.Config.all(p)[0].block) == (0, 0)
        assert rows >= n


def test_streams_do_not_share_counters(monkeypatch):
    """Launches of two streams may overlap; a captured graph runs again when others use what is kept."""
    now = SimpleNamespace(stream=1, capturing=False, capture=1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: now.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    monkeypatch.setattr(host.driver, "capture", lambda _: now.capture)
    kept, cpu = {}, torch.device("cpu")
    monkeypatch.setattr(host, "_WORKSPACES", kept)
    for name in ("_SPARE", "_OF_GRAPHS"):
        monkeypatch.setattr(host, name, {})
    monkeypatch.setattr(host, "_REPLACED", [])
    first = host.workspace(cpu, 8)
    assert host.workspace(cpu, 8) is first
    assert host.workspace(cpu) is first
    now.stream = 2
    assert host.workspace(cpu, 8).data_ptr() != first.data_ptr()
    now.stream, now.capturing = 1, True
    assert host.workspace(cpu, 8).data_ptr() != first.data_ptr()
    assert len(kept) == 2
    now.capturing = False
    larger = host.workspace(cpu, 60)
    assert larger.numel() == host.COUNTERS + 60
    assert not larger.any()
    assert host.workspace(cpu, 8) is host.workspace(cpu, 40) is larger
    (replaced,) = host._REPLACED
    assert replaced is first, "launches that are not done use it"
    assert host.workspace(cpu, 61).numel() == 2 * larger.numel()


def test_a_graph_takes_a_workspace_that_was_cleared_before(monkeypatch):
    """One a capture and stream; it clears one itself where none was made, or what was made is too small."""
    now = SimpleNamespace(stream=1, capturing=False, capture=1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: now.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    monkeypatch.setattr(host.driver, "capture", lambda _: now.capture)
    for name in ("_WORKSPACES", "_SPARE", "_OF_GRAPHS"):
        monkeypatch.setattr(host, name, {})
    cpu = torch.device("cpu")

    def of(capture, marks=8, stream=1):
        now.capturing, now.capture, now.stream = capture is not None, capture, stream
        return host.workspace(cpu, marks)

    eager = of(None)
    first = of(1)
    assert first is not eager
    assert first is of(1)
    own = of(1, 30)
    assert (own.numel(), own.any()) == (host.COUNTERS + 30, False)
    assert own is not of(1, 30), "what a graph clears is a call's own"
    assert of(2) is not first, "no call came between"
    assert of(None) is eager
    second = of(2)
    assert len({id(t) for t in (eager, first, second, of(2, stream=5))}) == 4
    assert of(2) is second
    assert of(1) is first
    of(None, 30)
    assert of(3, 30).numel() > first.numel()
    monkeypatch.setattr(host, "MOST_GRAPHS", len(host._OF_GRAPHS))
    of(None)
    assert not host._SPARE, "graphs are not counted when they are gone"


def test_macros_follow_the_problem():
    for scale, prescale in ((0.5, 0), (0.0, 1), (-1.0, 1)):
        assert config(2, 4, 2, softmax_scale=scale).defines()["PRESCALE"] == prescale
    m = config(2, 4, 2)  # 253 queries and keys
    for keys, ragged in ((256, 0), (253, 1), (64, 0), (30, 1)):
        assert replace(m, p=replace(m.p, seqlen_kv=keys)).defines()["RAGGED"] == ragged
    assert m.staged
    for change in ({"dim_v": 33}, {"out_dtype": torch.float32}):
        assert not type(m).of(replace(m.p, **change), m.tile).staged  # rows of out that no copy can store


@pytest.mark.parametrize("dims", [(33, 64), (64, 33)])
def test_what_is_not_padded_may_lie_anywhere(driver, dims):
    """Columns of one are a multiple of 8, those of the other are not: it is copied too, where it is off 16 bytes."""
    dim, dim_v = dims
    q = torch.zeros(1, 64, 2, dim + 1, dtype=torch.bfloat16)[..., 1:]
    v = torch.zeros(1, 64, 2, dim_v + 1, dtype=torch.bfloat16)[..., 1:]
    sartor.attention(q, q, v)
    assert driver.maps
    for address, _, strides in driver.maps:
        assert address % 16 == 0
        assert all(n % 16 == 0 for n in strides)


@dataclass
class Backward:
    """What was asked for: launches as the driver's, arguments of Triton's launches, workspaces."""

    launches: list[tuple[str, int, dict[str, Any]]]
    repairs: list[dict[str, Any]] = field(default_factory=list)
    rooms: list[torch.Tensor] = field(default_factory=list)


@pytest.fixture
def backward(driver, monkeypatch):
    found, like = Backward(driver.launches), torch.empty_like

    def room(t, **options):
        made = like(t, **options)
        if t.dim() == 1:
            found.rooms.append(made)
        return made

    def again(changed, *_):
        found.repairs.append(changed)
        return True

    monkeypatch.setattr(backward_config.Config, "compile", lambda _: None)
    monkeypatch.setattr(torch, "empty_like", room)
    monkeypatch.setattr(backward_launches.launch, "repeat", again)
    return found


def gradients(q, k, v, **options):
    """The backward of one call; what it computes is whatever was in memory."""
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = sartor.attention(q, k, v, **options)
    dout = torch.zeros_like(out)
    return dout, *torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.parametrize("causal", [False, True])
def test_launches_of_a_backward(driver, backward, causal):
    """Without a mask none is Triton's; all that is needed besides gradients lies in one tensor."""
    q, k, v = inputs(64, "bshd")
    k, v = (
        t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v)
    )  # a key head of few blocks would be shared
    dout, dq, dk, dv = gradients(q, k, v, causal=causal)
    names = [name for name, *_ in backward.launches if name != "hopper_forward"]
    assert names == ["preprocess", "hopper_backward", "round_dq"]
    (room,) = backward.rooms
    places = backward_config.room(problem_of(q, k, causal)).places
    at = {name: place + room.data_ptr() for name, place in places.items()}
    first, sweep, last = (values for name, _, values in backward.launches if name != "hopper_forward")
    assert (first["dout"], first["dlse"]) == (dout.data_ptr(), 0)
    assert first.items() >= {name: at[name] for name in ("delta", "lse_log2", "sums")}.items()
    read = {"lse": at["lse_log2"], "delta": at["delta"], "marks": at["bad_kv"], "sums": at["sums"]}
    assert sweep.items() >= read.items()
    assert {dk.data_ptr(), dv.data_ptr()} <= {address for address, *_ in driver.maps}
    assert last.items() >= {"sums": at["sums"], "dq": dq.data_ptr(), "marks": at["bad_q"]}.items()
    assert len(backward.repairs) == causal
    for changed in backward.repairs:
        assert (changed["bad_kv_ptr"], changed["dq_ptr"].data_ptr()) == (at["bad_kv"], dq.data_ptr())


@pytest.mark.parametrize(("keys", "section"), [(90, 132), (1000, 17), (4096, 5), (40_000, 1)])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (30, 30)}, {}, {"causal": True, "deterministic": True}], ids=str
)
def test_heads_in_flight(driver, backward, options, keys, section):
    """Under a mask, of one sweep, as few as have a block of 128 keys for each of 132 SMs."""
    q, k, v = (torch.zeros(1, n, 1, 64, dtype=torch.bfloat16) for n in (70, keys, keys))
    gradients(q, k, v, **options)
    one = options and not options.get("deterministic")
    sweeps = [values for name, _, values in backward.launches if name == "hopper_backward"]
    assert [values.get("section") for values in sweeps] == ([section] if one else [None] * len(sweeps))


@pytest.mark.parametrize(
    ("tokens", "dim", "heads", "section", "sectioned"),
    [
        (1024, 128, 256, 17, 216),
        (4096, 128, 64, 5, 54),
        (16384, 128, 16, 2, 14),
        (512, 64, 1024, 33, 925),
        (4096, 128, 8, 5, 0),
    ],
)
def test_the_last_heads_are_one_section(tokens, dim, heads, section, sectioned):
    """Three blocks an SM, or as many as stay in 40 MiB of L2, but as many as others at least: SMs end together."""
    q = torch.empty(1, tokens, heads, dim, dtype=torch.bfloat16, device="meta")
    (config,) = backward_config.Config.all(Problem.of(Call(q, q, q, causal=True)))
    assert config.sections(heads, 132) == {"section": section, "sectioned": sectioned}


@pytest.mark.parametrize("deterministic", [False, True])
def test_launches_under_documents(driver, backward, deterministic):
    """Their tables are every call's own; before each sweep over them one launch says which block begins when."""
    q, k, v = inputs(64, "bshd")
    ids = [torch.arange(n, dtype=torch.int32)[None] // 30 for n in (70, 90)]
    masks = [mods.document(*ids) for _ in "ab"]
    for mask in masks:
        gradients(q, k, v, mask=mask, deterministic=deterministic)
    found = [launched for launched in backward.launches if launched[0] != "hopper_forward"]
    sweeps = ["order_blocks", "hopper_backward"]
    names = ["preprocess", *sweeps * 2] if deterministic else ["preprocess", *sweeps, "round_dq"]
    assert [name for name, *_ in found] == 2 * names
    orders, blocks = ([x for x in found if x[0] == name] for name in sweeps)
    for (_, one, first), (_, grid, second) in zip(orders, blocks, strict=True):
        assert one == 1
        assert grid in (2 * 4, 2 * 2)  # 128 rows or fewer of each head, on 132 SMs
        assert first["order"] == second["order"]
        tables = {name: value for name, value in first.items() if name.startswith("a")}
        assert len(tables) == 10
        assert second.items() >= tables.items()
    assert orders[0][2]["a0"] == orders[-1][2]["a0"]  # of the ids themselves
    assert orders[0][2]["a9"] != orders[-1][2]["a9"]  # of what each mask has made of them


def problem_of(q, k, causal):
    return Problem.of(Call(q, k, k, causal=causal))


def test_rooms_do_not_overlap():
    """Each part on 128 bytes, and as long as what is written there."""
    q, k = (torch.empty((2, n, 3, 128), dtype=torch.bfloat16, device="meta") for n in (70, 90))
    room = backward_config.room(problem_of(q, k, True))
    sums = {"sums": 2 * 3 * 128 * 128, "delta": 480, "lse_log2": 480}
    assert room.sizes == sums | {"bad_q": 12, "bad_kv": 12, "claimed": 1}
    parts = sorted((place, 4 * room.sizes[name]) for name, place in room.places.items())
    assert all(place % 128 == 0 for place, _ in parts)
    ends = [place + size for place, size in parts]
    assert all(end <= place for end, (place, _) in zip(ends, parts[1:], strict=False))
    assert ends[-1] <= 4 * room.length


def test_a_list_of_key_tiles_is_walked(driver, monkeypatch):
    """Where a mask leaves holes: made once for its text, numbers and lengths. Not while a graph is captured."""
    monkeypatch.setattr(blocks, "_KEPT", {})
    monkeypatch.setattr(hopper_forward, "compiled", lambda m: None)
    q, k, v = (torch.zeros((2, 4, 700, 64), dtype=torch.bfloat16) for _ in range(3))
    mask = mods.Mask(lambda b, h, q, kv, aux: (q - kv) % aux[0] == 0, (3,))

    def launched(**options):
        sartor.attention(q, k, v, layout="bhsd", **options)
        return driver.launches[-1][2]

    capturing = True
    for module in (blocks, hopper_forward):
        monkeypatch.setattr(module, "capturing", lambda device: capturing)
    assert [launched(mask=mask).keys() & {"entries"} for _ in range(2)] == [set(), set()]
    capturing = False
    first, second = launched(mask=mask), launched(mask=mask)
    (found,) = blocks._KEPT.values()
    told = {name: getattr(found, name).data_ptr() for name in ("starts", "entries", "bits")}
    assert told | {"plane_batch": 0, "plane_head": 0} == {n: first[n] for n in (*told, "plane_batch", "plane_head")}
    assert first["entries"] == second["entries"]
    capturing = True
    assert launched(mask=mask)["entries"] == first["entries"]
    capturing = False
    other = mods.Mask(lambda b, h, q, kv, aux: (q - kv) % aux[0] == 0, (4,))
    assert launched(mask=other)["entries"] != first["entries"]
    assert "entries" not in launched(causal=True)
    assert "entries" not in launched(mask=torch.ones(700, 700, dtype=torch.bool))


@pytest.mark.parametrize(("causal", "forward", "both"), [(False, 400, 715), (True, 460, 920)])
def test_a_length_not_seen_before(driver, backward, causal, forward, both):
    """What the host does of one, in calls of functions: results that all lengths share are not made again."""
    counts = []  # of each length: what is collected, or dropped from a cache, while one is counted, is no part of it
    for n in range(1000, 994, -1):
        q, k, v = (torch.zeros(2, n, 4, 128, dtype=torch.bfloat16) for _ in range(3))
        one = calls_of(lambda: sartor.attention(q, k, v, causal=causal))  # noqa: B023 - called here
        counts.append((one, calls_of(lambda: gradients(q, k, v, causal=causal))))  # noqa: B023 - called here
    assert median(one for one, _ in counts) <= forward, counts
    assert median(two for _, two in counts) <= both, counts


def test_configs_of_other_lengths_are_alike():
    """Those of a kind, but for the problem: also where heads share the blocks of keys."""
    for heads, keys, options in (
        (4, 90, {}), (4, 5000, {"causal": True}), (1, 90, {"causal": True}), (1, 300_000, {}),
        (4, 777, {"window": (30, 30), "deterministic": True}),
    ):  # fmt: skip
        q, k = (torch.empty(2, n, h, 128, dtype=torch.bfloat16, device="meta") for n, h in ((70, 8), (keys, heads)))
        p = Problem.of(Call(q, k, k, **options))
        for m in backward_config.Config.all(p):
            alone = backward_config.Config(p, m.gradients, m.groups, m.block, m.apart, m.listed)
            assert m == alone
            assert m == backward_config.Config.of(p, *m.gradients)
            assert (m.defines(), m.shared_bytes, m.stages, m.sectioned) == (
                alone.defines(), alone.shared_bytes, alone.stages, alone.sectioned,
            )  # fmt: skip
            assert [kernel.types for kernel in m.kernels] == [kernel.types for kernel in alone.kernels]


def test_shelves_know_no_macros():
    """They are included before a kernel's macros: an `#ifdef` there never holds, and nothing says so."""
    for shelf in host.SHELVES:
        for name, text in nvrtc.headers(f'#include "{shelf}"', host.FOLDER).items():
            assert "#if" not in text, name


@pytest.mark.parametrize(
    ("shape", "causal", "by", "together"),
    [
        ((1, 16), False, "batch", 8),  # the four items of two heads
        ((1, 16), True, "batch", 32),  # of a section of heads, as under any causal mask
        ((1, 1), False, "heads", 8),
        ((4, 1), False, "heads", 8),
        ((4, 16), False, "", 32),
    ],
)
def test_who_shares_a_bias_reads_it_at_the_same_time(shape, causal, by, together):
    q = torch.empty(4, 4096, 16, 128, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(*shape, 4096, 4096, dtype=torch.bfloat16, device="meta")
    p = Problem.of(Call(q, q, q, bias=bias, causal=causal))
    config = Config.of(p, choose(p, ARCHITECTURES[90]).tile)
    assert (config.shared_by, config.together) == (by, together)
    names = {"batch": {"BATCH_FIRST", "SECTIONED"}, "heads": {"SECTIONED"}, "": set()}[by]
    assert {"BATCH_FIRST", "SECTIONED"} & config.defines().keys() == names - ({"SECTIONED"} if causal else set())
