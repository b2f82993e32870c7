"""Block lists against masks taken pair by pair, and what the Hopper forward is launched with."""

from __future__ import annotations

import pytest
import torch

import sartor
from sartor import mods, nvrtc
from sartor.device import ARCHITECTURES
from sartor.kernels import blocks
from sartor.kernels.blocks import EMPTY, FULL, Cut
from sartor.mods import masks
from sartor.mods.recent import Recent
from sartor.problem import Call, Problem, aux_values

CPU = torch.device("cpu")
HOLES = {
    "natten": mods.Mask(lambda b, h, q, kv: ((q // 20 - kv // 20).abs() <= 3) & ((q % 20 - kv % 20).abs() <= 3)),
    "blocks": mods.Mask(lambda b, h, q, kv: (q // 128 + kv // 128) % 3 == 0),
    "scattered": mods.Mask(lambda b, h, q, kv: (q * 7 + kv * 13) % 257 < 2),
    "nothing": mods.Mask(lambda b, h, q, kv: (q + kv) % 2 == 3),
    "items": mods.Mask(lambda b, h, q, kv: ((q + kv + 64 * b) % 256 < 40) & (kv >= 30 * b)),
    "heads": mods.Mask(lambda b, h, q, kv: ((kv // 64) % (h + 2) == 0) & (kv <= q)),
    "inverted": mods.Mask(lambda b, h, q, kv: ~(h == 1) & ~(b > 0) & ((q + kv) % 3 == 0)),
    "numbers": mods.Mask(lambda b, h, q, kv, aux: ((q // aux[0]) % 2 == (kv // aux[0]) % 2) & (q != kv), (96,)),
}


def call(mask, lengths=(300, 500), heads=(6, 2), dim=64, **options):
    shapes = ((2, lengths[0], heads[0], dim), (2, lengths[1], heads[1], dim), (2, lengths[1], heads[1], dim))
    return Call(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes), mask=mask, **options)


def made(c, cut):
    return blocks.of(Problem.of(c), aux_values(c), cut, CPU)


def drawn(found, p, cut):
    """The mask that a list says, (batch, heads_q, seqlen_q, seqlen_kv), as the kernels read it."""
    held, stepped = (p.seqlen_kv, p.seqlen_q) if cut.by_key else (p.seqlen_q, p.seqlen_kv)
    slices, tiles = -(-held // 64), -(-stepped // cut.block)
    seen = torch.zeros(p.batch, p.heads_q, 64 * slices, cut.block * tiles, dtype=torch.bool)
    heads, each = (p.heads_q, 1) if cut.by_key else (p.heads_kv, p.group)
    count = -(-slices * each // cut.groups)
    missing = 0 if cut.by_key else count * cut.groups - slices * each
    thread, i = torch.arange(128)[:, None], torch.arange(cut.block // 4)
    column = i // 2 * 8 + 2 * (thread % 4) + i % 2
    for b in range(p.batch):
        for head in range(heads):
            for block in range(count):
                at = (b * found.planes[0] + head * found.planes[1]) * count + block
                entries = found.entries[found.starts[at] : found.starts[at + 1]].tolist()
                assert len(entries) >= int(not cut.by_key)
                assert [tile for tile, *_ in entries] == sorted({tile for tile, *_ in entries})
                for tile, *places in entries:
                    for g, place in enumerate(places[: cut.groups]):
                        index = block * cut.groups + g - missing
                        if place == EMPTY or not 0 <= index < slices * each:
                            assert place == EMPTY
                            continue
                        piece = torch.ones(64, cut.block, dtype=torch.bool)
                        for r in range(2) if place != FULL else ():
                            row = thread // 32 * 16 + thread % 32 // 4 + 8 * r
                            piece[row.expand_as(column), column] = (found.bits[place, :, r, None] >> i & 1).bool()
                        own, of_group = divmod(index, each)
                        to = seen[b, head * each + of_group, 64 * own : 64 * own + 64]
                        to[:, cut.block * tile : cut.block * (tile + 1)] = piece
    seen = seen[:, :, :held, :stepped]
    return seen.transpose(2, 3) if cut.by_key else seen


CUTS = [Cut(False, 128, 2), Cut(False, 64, 3), Cut(True, 128, 2), Cut(True, 64, 2)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", HOLES)
def test_a_list_is_its_mask(name, cut, monkeypatch):
    monkeypatch.setattr(blocks, "PAIRS", 2**17)  # several pieces
    monkeypatch.setattr(blocks, "_KEPT", {})
    c = call(HOLES[name])
    p, found = Problem.of(c), made(c, cut)
    assert torch.equal(drawn(found, p, cut), HOLES[name].materialize(2, 6, 300, 500))
    assert name != "inverted" or min(found.planes) > 0
    assert all(planes > 0 for planes, mask in zip(found.planes, ("items", "heads"), strict=True) if mask == name)


def test_what_is_counted():
    mask = mods.Mask(lambda b, h, q, kv: (q // 512) % 2 == (kv // 512) % 2)
    found = made(call(mask, (2048, 2048)), CUTS[0])
    assert str(found) == "256 of 512 tiles, 256 of them full"
    assert found.bits.shape == (1, 128, 2)  # none is read


def test_who_is_served():
    ids = torch.zeros(1, 300, dtype=torch.int32)
    odd = lambda b, h, q, kv, aux: (q + kv) % 2 == 1  # noqa: E731 - which reads none of its tensors
    for mask, served in (
        (HOLES["natten"], True), (HOLES["numbers"], True), (HOLES["natten"] & mods.causal(), True),
        (mods.causal(), False), (mods.window(3, 3), False), (masks.everything(), False),
        (mods.document(ids), False), (torch.ones(300, 300, dtype=torch.bool), False),
        (mods.Mask(lambda b, h, q, kv: ids[0, q] == ids[0, kv]), False),
        (mods.Mask(odd, (ids.view(1, 1, 300, 1),), rows=lambda b, h, q, aux: (aux[0], 300, 0, 0)), True),
    ):  # fmt: skip
        assert blocks.serves(Problem.of(call(mask, (300, 300)))) == served, mask
    table = torch.zeros(6, 599)
    score = mods.Score(lambda s, b, h, q, kv: s + table[h, q - kv + 299])
    assert blocks.serves(Problem.of(call(HOLES["natten"], (300, 300), score=score)))  # which the mask does not read
    assert not blocks.serves(Problem.of(call(HOLES["natten"], (300, 300), dropout_p=0.1)))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [("MOST_BITS", 2**16, "bits take more"), ("PIECES", 0, "too many pairs"), ("PAIRS", 2**13, "too many pairs"),
     ("MOST_BYTES", 0, "all of them take")],
)  # fmt: skip
def test_limits(name, value, why, monkeypatch):
    """Of what a list takes, of what all of them take, and of what is looked at: no list, and `told` says why."""
    monkeypatch.setattr(blocks, "_KEPT", {})
    monkeypatch.setattr(blocks, "_REFUSED", Recent(8))
    monkeypatch.setattr(blocks, name, value)
    c = call(mods.Mask(lambda b, h, q, kv: (q + kv) % 5 != 3), (2000, 2000), (1, 1))
    p = Problem.of(c)
    assert "first call" in blocks.told(p, by_key=False)
    assert made(c, CUTS[0]) is None
    monkeypatch.setattr(blocks, "_made", None)  # and is not looked at again
    assert made(c, CUTS[0]) is None
    assert why in blocks.told(p, by_key=False)
    assert "first call" in blocks.told(p, by_key=True)


def test_a_list_is_made_once(monkeypatch):
    """For a predicate, its numbers and lengths: whatever the batch, where it does not say otherwise."""
    monkeypatch.setattr(blocks, "_KEPT", {})
    c = call(HOLES["numbers"])
    found = made(c, CUTS[0])
    assert made(call(HOLES["numbers"], dim=128), CUTS[0]) is found
    other = mods.Mask(lambda b, h, q, kv, aux: ((q // aux[0]) % 2 == (kv // aux[0]) % 2) & (q != kv), (64,))
    assert made(call(other), CUTS[0]) is not found
    assert made(call(HOLES["numbers"], (300, 501)), CUTS[0]) is not found
    assert made(c, CUTS[0]) is found
    assert len(blocks._KEPT) == 3


def test_intervals_in_tensors_bound_no_list(monkeypatch):
    """They may be changed in place, and the list would not."""
    monkeypatch.setattr(blocks, "_KEPT", {})
    third = lambda b, h, q, kv, aux: (q + kv) % 3 == 0  # noqa: E731
    mask = mods.Mask(third, (torch.full((2, 6, 1, 1), 100),), rows=lambda b, h, q, aux: (0, aux[0], 0, 0))
    p, found = Problem.of(call(mask)), made(call(mask), CUTS[0])
    q, kv = torch.arange(300)[:, None], torch.arange(500)
    assert torch.equal(drawn(found, p, CUTS[0]), ((q + kv) % 3 == 0).expand(2, 6, 300, 500))


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())
def test_explain_says_what_is_known_of_a_list(monkeypatch):
    """When it is made, and what is in it; nothing of masks that have none."""
    monkeypatch.setattr(blocks, "_KEPT", {})
    c = call(HOLES["natten"], (400, 400))

    def notes(mask=c.mask):
        found = sartor.explain(c.q, c.k, c.v, mask=mask, device=ARCHITECTURES[90])
        assert found.plan.kernel.name == "hopper_forward"
        return " ".join(note for note in found.notes if "block list" in note)

    assert "forward: block list: made by the first call" in notes()
    found = made(c, CUTS[0])
    assert f"forward: block list: {found}" in notes()
    assert notes(mods.causal()) == ""
