"""Tuning rows: which one a problem gets."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sartor import kernels, mods
from sartor.device import ARCHITECTURES
from sartor.kernels.spec import Tile, first_of_class, legal
from sartor.lab.measure import search
from sartor.plan import choose, choose_backward
from sartor.problem import Call, Problem, mask_class
from sartor.tuning import table

DEVICE = ARCHITECTURES[90]
SHORT, MIDDLE, LONG = Tile(64, 32, 4, 3), Tile(64, 64, 4, 3), Tile(128, 128, 8, 3)


def problem(keys, dim=128):
    q, k = (torch.empty((1, n, 2, dim), dtype=torch.bfloat16, device="meta") for n in (4096, keys))
    return Problem.of(Call(q, k, k))


def test_few_keys_have_rows_of_their_own(monkeypatch):
    """The row with the fewest keys that are enough; a tile that is not legal is passed over."""
    illegal = Tile(128, 256, 8, 4)
    key = ("triton_forward", 16, 128, 128, "full")
    limits = ((128, illegal, "a"), (512, SHORT, "b"), (2048, MIDDLE, "c"), (float("inf"), LONG, "d"))
    monkeypatch.setattr(table, "rows", lambda arch: {key: [table.Row(*limit) for limit in limits]})
    spec = kernels.load("triton_forward")
    for keys, tile, source in ((1, SHORT, "b"), (512, SHORT, "b"), (513, MIDDLE, "c"), (2049, LONG, "d")):
        assert table.lookup(spec, problem(keys), DEVICE) == (tile, source)
    assert table.lookup(spec, problem(512, 64), DEVICE)[1] == "first legal tile"


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "full"), ({"causal": True}, "band"), ({"window": (5, 0)}, "window"),
        ({"bias": (2, 64, 64)}, "tensor"), ({"bias": (64, 64), "causal": True}, "tensor"),
        ({"mask": (64, 64)}, "tensor"),
        ({"bias": (2, 1, 64)}, "score"), ({"softcap": 3.0}, "score"),
        ({"causal": True, "softcap": 3.0}, "score"), ({"mask": mods.prefix(3)}, "band"),
        ({"mask": mods.document(torch.zeros((1, 64), dtype=torch.int64, device="meta"))}, "mods"),
    ],
)  # fmt: skip
def test_mask_classes(options, kind):
    """A row is looked up by what the mods cost: nothing, a compare, a load for every pair, arithmetic."""
    for name in {"bias", "mask"} & set(options):
        if isinstance(options[name], tuple):
            dtype = torch.bfloat16 if name == "bias" else torch.bool
            options = options | {name: torch.empty(options[name], dtype=dtype, device="meta")}
    q = torch.empty((1, 64, 2, 64), dtype=torch.bfloat16, device="meta")
    assert mask_class(Problem.of(Call(q, q, q, **options))) == kind


def test_head_dims_between_sixteens_may_have_rows(monkeypatch):
    """A row for exactly 72 serves 72 and what is rounded up to it, another mask's too before one for 80."""
    key = ("triton_forward", 16)
    found = {
        (*key, 72, 72, "band"): [table.Row(512, SHORT, "72")],
        (*key, 80, 80, "full"): [table.Row(512, MIDDLE, "80")],
    }
    monkeypatch.setattr(table, "rows", lambda arch: found)
    for dim, causal, source in ((72, True, "72"), (65, True, "72"), (72, False, "72"), (80, True, "80")):
        q = torch.empty((1, 512, 2, dim), dtype=torch.bfloat16, device="meta")
        p = Problem.of(Call(q, q, q, causal=causal))
        assert table.lookup(kernels.load("triton_forward"), p, DEVICE)[1] == source


def hopper_tile(batch, lengths, dim=128, group=1, causal=False):
    shapes = [(batch, n, heads, dim) for n, heads in zip(lengths, (16, 16 // group), strict=True)]
    q, k = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    tile, _ = table.lookup(kernels.load("hopper_forward"), Problem.of(Call(q, k, k, causal=causal)), DEVICE)
    return tile


@pytest.mark.parametrize(("batch", "lengths", "dim", "group", "rows"), [
    (8, (8192, 8192), 128, 1, 192), (1, (1, 8192), 128, 4, 64), (64, (1, 8192), 128, 4, 64),
    (64, (40, 8192), 128, 4, 128), (1, (2048, 2048), 64, 1, 128), (8, (2048, 2048), 64, 1, 192),
])  # fmt: skip
def test_few_tiles_are_small(batch, lengths, dim, group, rows):
    """No SM is left idle for 192 rows a tile that 128 would keep busy, and no part of a block."""
    assert hopper_tile(batch, lengths, dim, group).block_m == rows


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 160])
def test_what_else_is_in_a_batch_changes_no_tile_of_keys(dim):
    """Which keys are added up together decides a row's bits."""
    for n, causal in itertools.product((1, 64, 100, 1000, 2048, 4096, 8192), (False, True)):
        tiles = [hopper_tile(batch, (n, 8192), dim, causal=causal) for batch in (1, 2, 3, 5, 8, 64)]
        assert len({tile.block_n for tile in tiles}) == 1


def test_rows_come_with_fewest_keys_first():
    for tiles in table.rows(90).values():
        limits = [row.keys for row in tiles]
        assert limits == sorted(set(limits))


def test_the_fastest_tiles_are_timed_again(monkeypatch):
    """A tile's time is that of the bench's turns; those that were slow at first are not asked again."""
    tiles = [Tile(64, 16 * n, 4, 2) for n in range(1, search.FINALISTS + 3)]
    calls = dict.fromkeys(tiles, 0)

    def runner(job, tile, call):
        def run():
            calls[tile] += 1
            time.sleep(tile.block_n * 2e-5)

        return 0, run

    monkeypatch.setattr(search, "runner", runner)
    monkeypatch.setattr(search.Job, "call", lambda self: Call(*[torch.empty(1, 8, 1, 16)] * 3))
    job = search.Job("hopper_forward", "forward", 16, "full")
    found = search.measure(job, [search.Trial(t) for t in reversed(tiles)])
    assert [t.tile for t in found] == tiles[: search.FINALISTS]
    assert all(0.3 < t.ms / (t.tile.block_n * 2e-2) < 3 for t in found)
    assert calls[tiles[0]] > calls[tiles[-1]]


def test_rows_are_written_once_per_length(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "provenance", lambda kernel: "a test")
    path = tmp_path / "sm90.jsonl"
    lengths = ((512, 512), (4096, None))
    jobs = [search.Job("triton_forward", "forward", 128, "full", seqlen=n, keys=keys) for n, keys in lengths]
    for ms in (2.0, 1.0):
        found = {job: search.Trial(MIDDLE, ms=ms) for job in jobs}
        search.write(search.rows(found), path)
    lines = path.read_text().splitlines()
    assert len(lines) == 2
    assert '"keys": 512' in lines[0]
    assert '"ms": 1.0' in lines[0]
    assert "keys" not in lines[1]
    assert json.loads(lines[1])["tflops"] == pytest.approx(jobs[1].tflop * 1e3, rel=1e-3)


def test_hopper_jobs():
    """Each kernel in its dtype, short lengths apart; a kernel by name is that one only."""
    found = list(search.jobs([64], names=search.HOPPER))
    assert {(j.kernel, j.dtype, j.mask, j.keys) for j in found} == {
        *(("hopper_forward", "bfloat16", mask, keys) for mask in ("full", "band") for keys in (None, 1024)),
        *(("hopper_forward", "bfloat16", mask, None) for mask in ("tensor", "score")),
        *(("hopper_fp32", "float32", mask, None) for mask in ("full", "band")),
    }
    assert {j.kernel for j in search.jobs([64], names=["triton_backward"])} == {"triton_backward"}


@pytest.mark.parametrize("dim", [40, 64, 128, 256])
def test_hopper_candidates(dim):
    """Every tuned tile is a candidate; of a shape there are two at most."""
    legal = list(kernels.load("hopper_forward").tiles(problem(4096, dim), DEVICE))
    job = search.Job("hopper_forward", "forward", dim, "full")
    found = search.hopper_candidates(job, legal)
    assert set(found) <= set(legal)
    assert max(Counter((t.block_m, t.block_n) for t in found).values()) == 2
    row = table.find(kernels.load("hopper_forward"), problem(4096, dim), DEVICE)
    assert "sm90" in row.source
    assert row.tile in found


ANY = [Tile(64 * groups, n, 4 * (groups + 1), stages) for groups in (1, 2, 3) for n in (64, 128) for stages in (4, 6)]
PLANNED = {"hopper_forward": 16, "hopper_fp32": 32, "fp32_forward": 32, "triton_forward": 16,
           "hopper_wide_backward": 16, "hopper_backward": 16, "hopper_fp32_backward": 32, "fp32_backward": 32,
           "triton_backward": 16}  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.tuples(st.integers(1, 3000), st.integers(2, 3000) | st.integers(1, 40).map(lambda n: 16 * n)),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1), (16, 1)]), dim=st.sampled_from([40, 64, 128, 256]),
    batch=st.integers(1, 4), options=st.sampled_from([{}, {"causal": True}, {"softcap": 3.0}]),
    arch=st.sampled_from([80, 90]),
)  # fmt: skip
def test_a_class_of_lengths_has_the_tiles_of_each(lengths, heads, dim, batch, options, arch):
    """Whatever the kernel: what is enumerated once for a class is what a length of it would find by itself."""
    (sq, skv), (hq, hkv), dev = lengths, heads, ARCHITECTURES[arch]
    for name, bits in PLANNED.items():
        if not (arch == 80 and name.startswith("hopper")):
            dtype = torch.bfloat16 if bits == 16 else torch.float32
            q, k = (torch.empty((batch, n, h, dim), dtype=dtype, device="meta") for n, h in ((sq, hq), (skv, hkv)))
            spec, p = kernels.load(name), Problem.of(Call(q, k, k, **options))
            if not ("hopper" in name and "fp32" in name and dim > 128):
                tiles = tuple(spec.tiles(p, dev))
                assert legal(spec, p, dev) == tiles
                for tile in () if "backward" in name else (*tiles[:1], *tiles[-1:], *ANY):
                    assert spec.fits(p, dev, tile) == (tile in tiles)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_new_length_searches_nothing(monkeypatch, dtype, options):
    """Tiles are enumerated for classes of lengths, of which a thousand lengths have a few dozen."""
    counts = Counter()
    first_of_class.cache_clear()
    for name in PLANNED:
        spec = type(kernels.load(name))

        def tiles(self, p, dev, tiles=spec.__dict__["tiles"]):
            counts[self.name] += 1
            return tiles(self, p, dev)

        monkeypatch.setattr(spec, "tiles", tiles)
    for n in range(1, 1000):
        q = torch.empty((2, 3 * n, 4, 128), dtype=dtype, device="meta")
        p = Problem.of(Call(q, q, q, **options))
        choose.__wrapped__(p, DEVICE)
        choose_backward.__wrapped__(p, DEVICE)
    first_of_class.cache_clear()
    assert counts
    assert max(counts.values()) <= 60
