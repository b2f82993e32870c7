"""What masks and scores read for every pair, which the Hopper forward brings to shared memory: biases, bool tensors and
tables of distances, of every dtype and broadcast, in full tiles and others, within limits, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import buried
import sartor
from sartor import kernels, mods, nvrtc, testing
from sartor.device import Device
from sartor.kernels.spec import Operands, Plan, Tile
from sartor.plan import choose
from sartor.problem import Call, Problem, aux_values

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and not nvrtc.missing()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and NVRTC"),
    pytest.mark.judges("hopper_forward"),
]
SPEC = kernels.load("hopper_forward") if HOPPER else None
DEVICE = Device.of(torch.device("cuda")) if HOPPER else None
BF16 = torch.bfloat16
LENGTHS = [(1000, 1000), (384, 512), (130, 1040)]  # rows of a bool tensor or a bias start on 16 bytes: 1000 is 8 * 125
LIMITS = {"full": {}, "causal": {"causal": True}, "window": {"window": (100, 7)}}


def inputs(lengths=(1000, 1000), dim=128, dtype=BF16, batch=2, heads=(4, 2)):
    return testing.make_inputs(batch, *heads, *lengths, dim, None, dtype, "cuda", "bshd", 0)


def drawn(*shape, dtype=BF16, scale=1.0):
    g = torch.Generator("cuda").manual_seed(1)
    return (torch.randn(shape, generator=g, device="cuda", dtype=torch.float32) * scale).to(dtype)


def seen(*shape, share=0.8, pitch=16):
    """A bool tensor whose rows start on 16 bytes."""
    g = torch.Generator("cuda").manual_seed(2)
    *rows, keys = shape
    wide = torch.rand(*rows, -(-keys // pitch) * pitch, generator=g, device="cuda", dtype=torch.float32) < share
    return wide[..., :keys]


def check(q, k, v, brings=True, tile=None, **options):
    """By the plan that the call gets, or with another tile; `brings` says whether a warp of the producer has tiles to
    bring."""
    call = Call(q, k, v, **options)
    p = Problem.of(call)
    chosen = choose(p, DEVICE)
    assert chosen.kernel.name == "hopper_forward", chosen
    plan = Plan(SPEC, p, DEVICE, tile or chosen.tile, "test")
    assert SPEC.config(p, plan.tile).brings == brings
    out, lse = SPEC.run(plan, Operands(q, k, v, None, aux_values(call), lse=True))
    testing.check_all({"out": out, "lse": lse}, q, k, v, **options)
    again, _ = SPEC.run(plan, Operands(q, k, v, None, aux_values(call), lse=True))
    torch.testing.assert_close(again, out, rtol=0, atol=0)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1), (1, 1)], ids=str)
def test_biases(shape, lengths, limits):
    """Broadcast over batch items or heads; with fewer batch items than the call they come in an order of their own."""
    check(*inputs(lengths), bias=drawn(*shape, *lengths), **LIMITS[limits])


@pytest.mark.parametrize("dim", [32, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_biases_of_every_dtype_and_head_dim(dtype, dim):
    q, k, v = inputs((400, 1000), dim, BF16 if dtype == torch.float32 else dtype)
    check(q, k, v, bias=drawn(4, 400, 1000, dtype=dtype))


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("lengths", [*LENGTHS, (1000, 1001)], ids=str)
@pytest.mark.parametrize("shape", [(2, 4), (2, 1), ()], ids=str)
def test_bool_tensors(shape, lengths, limits):
    check(*inputs(lengths), mask=seen(*shape, *lengths), **LIMITS[limits])


@pytest.mark.parametrize("dim", [40, 64, 88, 96, 192, 256])
def test_bool_tensors_of_other_head_dims(dim):
    check(*inputs(dim=dim), mask=seen(2, 4, 1000, 1000))


def test_bools_that_are_not_one():
    """Bytes that are not 0 are true, as torch has them."""
    bytes_ = torch.randint(0, 256, (512, 512), device="cuda", dtype=torch.uint8) * (seen(512, 512))
    q, k, v = inputs((512, 512))
    plain, odd = bytes_ != 0, bytes_.view(torch.bool)
    found = [sartor.attention(q, k, v, mask=m, return_lse=True) for m in (plain, odd)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("limits", LIMITS)
def test_a_bool_tensor_and_a_bias(limits):
    q, k, v = inputs()
    check(q, k, v, mask=seen(2, 1, 1000, 1000), bias=drawn(4, 1000, 1000), **LIMITS[limits])


def test_rows_that_see_nothing_or_one_key():
    mask = torch.zeros(512, 512, dtype=torch.bool, device="cuda")
    mask[torch.arange(256), torch.arange(256) * 2] = True
    check(*inputs((512, 512)), mask=mask)


@pytest.mark.parametrize("kind", ["bias", "mask"])
def test_rows_that_start_anywhere(kind):
    """Nothing is brought where rows do not start on 16 bytes."""
    wide = drawn(4, 300, 1001) if kind == "bias" else seen(4, 300, 1001, pitch=1)
    check(*inputs((300, 1001)), brings=False, **{kind: wide})


@pytest.mark.parametrize("keys", [16, 48, 80, 96, 112, 128])
@pytest.mark.parametrize("kind", ["bias", "mask", "relative"])
def test_widths_of_key_tiles(kind, keys):
    q, k, v = inputs((300, 1000), 64)
    options = {"bias": {"bias": drawn(4, 300, 1000)}, "mask": {"mask": seen(2, 1, 300, 1000)}}
    options["relative"] = {"score": relative(drawn(4, 1299), 999)}
    for groups in (1, 2):
        tile = Tile(64 * groups, keys, 4 * (groups + 1), 4)
        check(q, k, v, brings=kind != "relative", tile=tile, **options[kind])


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("dim", [16, 40, 64])
def test_three_warpgroups(dim, limits):
    """As calls of many tiles have them."""
    q, k, v = inputs(dim=dim)
    for options in ({"bias": drawn(2, 1, 1000, 1000)}, {"mask": seen(4, 1000, 1000)}):
        check(q, k, v, tile=Tile(192, 128, 16, 5), **options, **LIMITS[limits])


def relative(table, last):
    """A table of each head and distance, added to the scores."""
    return mods.Score(lambda s, b, h, q, kv, aux: s + aux[0][h, q - kv + last], (table,))


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", [*LENGTHS, (301, 999)], ids=str)
def test_tables_of_distances(lengths, dtype, limits):
    table = drawn(4, sum(lengths) - 1, dtype=dtype)
    check(*inputs(lengths), brings=False, score=relative(table, lengths[1] - 1), **LIMITS[limits])


@pytest.mark.parametrize(
    "read",
    [
        lambda s, b, h, q, kv, aux: (
            s * aux[0][h, kv - q + 50]
        ),  # a negative index counts from the end, one beyond is moved
        lambda s, b, h, q, kv, aux: s + aux[0][b, 3 + q - kv].abs(),
        lambda s, b, h, q, kv, aux: s + 2 * aux[0][0, q - (kv + 1)],
    ],
    ids=["factor", "batch", "shared"],
)
def test_other_reads_of_distances(read):
    check(*inputs((300, 400)), brings=False, score=mods.Score(read, (drawn(4, 200),)))


def test_a_table_beside_a_bias():
    table, bias = drawn(4, 1999), drawn(4, 1000, 1000)
    score = mods.Score(lambda s, b, h, q, kv, aux: s + aux[0][h, q - kv + 999] + aux[1], (table, bias))
    check(*inputs(), score=score)


@pytest.mark.parametrize("low", buried.LOW)
def test_rows_that_a_bias_hides_wholly(low):
    q, k, v = inputs((152, 176), 128)
    bias = buried.bias(low, BF16, 152, 176, "cuda")
    out, lse = sartor.attention(q, k, v, bias=bias, return_lse=True)
    buried.judge({"out": out, "lse": lse}, q, k, v, testing.make_like(q), bias=bias)


def test_scores_that_rise_repeat_a_tile():
    """Keys whose bias is far above that of all before them: their tile is weighed again, by what was brought of it."""
    q, k, v = inputs((256, 1024), 128)
    bias = drawn(4, 256, 1024)
    bias += 60 * torch.arange(8, 0, -1, device="cuda").repeat_interleave(128).to(BF16)
    check(q, k, v, bias=bias)
    check(q, k, v, bias=bias, mask=seen(256, 1024))


@pytest.mark.parametrize("queries", [1, 5, 32])
def test_few_queries_whose_heads_share_a_slice(queries):
    q, k, v = inputs((queries, 1000), 128, heads=(8, 1))
    check(q, k, v, brings=queries > 1, bias=drawn(8, queries, 1000))  # one row is read as what all queries share
    check(q, k, v, brings=queries > 1, mask=seen(2, 8, queries, 1000))
    check(q, k, v, brings=False, score=relative(drawn(8, 999 + queries), 999))


def test_many_tiles_a_block():
    """Blocks that have several query tiles, of long and short rows."""
    q, k, v = inputs((1500, 1504), 64, batch=4, heads=(16, 16))
    check(q, k, v, bias=drawn(16, 1500, 1504), causal=True)
    tile = choose(Problem.of(Call(q, k, v, bias=drawn(1500, 1504))), DEVICE).tile
    check(q, k, v, bias=drawn(1500, 1504), tile=replace(tile, block_m=64, warps=8))
