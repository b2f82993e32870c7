"""The Hopper backward of 16-bit floats on CUDA, by budgets of the float64 reference: masks, lengths, dims, NaN."""

from __future__ import annotations

import pytest
import torch

import buried
import dialects
import documents
import sartor
from sartor import kernels, mods, nvrtc, testing
from sartor.device import Device
from sartor.kernels.spec import Operands, Plan, Saved
from sartor.problem import Call, Problem, aux_values

if not nvrtc.missing():
    from sartor.kernels.cuda import expressions
    from sartor.kernels.hopper.backward_config import Config
    from sartor.kernels.hopper.backward_launches import Step

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and not nvrtc.missing()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and NVRTC"),
    pytest.mark.judges("hopper_backward"),
]
BF16, FP16 = torch.bfloat16, torch.float16
MASKS = [{}, {"causal": True}, {"causal": "top_left"}, {"window": (90, 30)}, {"causal": True, "window": (70, 0)}]
WAYS = {"one sweep": (128, False), "two sweeps": (128, True), "three sweeps": (256, True)}
LENGTHS = [(1, 2), (17, 300), (300, 17), (64, 128), (129, 65), (1000, 500)]


def inputs(b=2, hq=4, hkv=2, sq=600, skv=700, d=128, dtype=BF16):
    return testing.make_inputs(b, hq, hkv, sq, skv, d, d, dtype, "cuda", "bshd", 0)


def gradients(q, k, v, dout, dlse=None, name="hopper_backward", **options):
    """dq, dk, dv, and dsinks where there are sinks."""
    call = Call(q, k, v, **options)
    p, device, spec = Problem.of(call), Device.of(torch.device("cuda")), kernels.load(name)
    assert spec.why_not(p, device) == []
    plan = Plan(spec, p, device, next(iter(spec.tiles(p, device))), "test")
    out, lse = sartor.attention(q, k, v, return_lse=True, **options)
    return spec.run(plan, Operands(q, k, v, call.sinks, aux_values(call)), Saved(out, lse, dout, dlse))


def check(q, k, v, dout=None, dlse=None, **options):
    """By budget."""
    dout = testing.make_like(q) if dout is None else dout
    found = gradients(q, k, v, dout, dlse, **options)._asdict()
    found = {name: gradient for name, gradient in found.items() if gradient is not None and name != "dtables"}
    testing.check_all(found, q, k, v, dout, dlse, **options)


@pytest.mark.parametrize(
    ("dim", "deterministic"), [(40, False), (64, False), (64, True), (80, False), (96, False), *WAYS.values()]
)
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_masks(dim, options, deterministic):
    check(*inputs(d=dim), deterministic=deterministic, **options)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dim", "deterministic"),
    [*WAYS.values(), (48, False), (64, False), (80, False)],
    ids=[*WAYS, "one sweep of 48", "one sweep of 64", "one sweep of 80"],
)
def test_lengths(lengths, causal, dim, deterministic):
    check(*inputs(hq=6, sq=lengths[0], skv=lengths[1], d=dim), causal=causal, deterministic=deterministic)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dim", [72, 80, 88, 96, 104, 112, 120])
def test_dims(dim, dtype):
    check(*inputs(b=1, d=dim, dtype=dtype), causal=True, deterministic=True)


@pytest.mark.parametrize(("dim", "dtype"), [*((d, BF16) for d in (136, 152, 176, 192, 224, 248)), (160, FP16)], ids=str)
def test_dims_of_three_sweeps(dim, dtype):
    """Where scores are changed: else hopper_wide_backward takes them."""
    check(*inputs(b=1, d=dim, dtype=dtype), causal=True, softcap=3.0)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dim", [8, 16, 24, 32, 40, 48, 56, 72, 80, 88, 96, 104, 112, 120])
def test_dims_of_one_sweep(dim, dtype):
    check(*inputs(b=1, d=dim, dtype=dtype), causal=True)


FROM_TABLES = sorted(documents.masks(300, 300, "cpu"))
PACKED = sorted(documents.packed(300, 300, "cpu"))


def crossed(names, some):
    """Each with one sweep of 64 and of 128 and with two; `some` of them with others, with two of 64, and with three."""
    found = [(name, *way) for name in names for way in ((64, False), (128, False), (128, True))]
    others = (64, True), (40, False), (80, False), (96, False), (256, True)
    return found + [(name, *way) for name in names if name in some for way in others]


@pytest.mark.parametrize(
    ("name", "dim", "deterministic"), crossed(FROM_TABLES, ("causal documents", "scattered documents", "pairs"))
)
def test_intervals_from_tables(name, dim, deterministic):
    check(*inputs(d=dim), deterministic=deterministic, **documents.masks(600, 700, "cuda")[name])


@pytest.mark.parametrize(("dim", "deterministic"), [(48, False), (64, False), (80, False), *WAYS.values()])
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name, dim, deterministic):
    check(*inputs(b=1, d=dim), deterministic=deterministic, **documents.packed(600, 700, "cuda")[name])


@pytest.mark.parametrize("change", [{"softcap": 2.0}, {"alibi_slopes": True}], ids=["softcap", "alibi"])
@pytest.mark.parametrize("name", ["causal documents", "scattered documents"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_scores_of_documents(dim, name, change):
    change = {"alibi_slopes": torch.rand(4, device="cuda")} if "alibi_slopes" in change else change
    check(*inputs(d=dim), **change, **documents.masks(600, 700, "cuda")[name])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize(("dim", "deterministic"), [(64, False), *WAYS.values()])
def test_a_document_reaches_no_other(dim, deterministic, name, value):
    """One is spoilt; the gradients of those beside it, in the same tiles, stay as they were."""
    q, k, v = inputs(sq=600, skv=600, d=dim)
    at = torch.arange(600, device="cuda")
    options = {"mask": mods.document((at[None] >= 100).int() + (at >= 230)), "causal": True}
    options["deterministic"] = deterministic
    dout = testing.make_like(q)
    clean = gradients(q, k, v, dout, **options)[:3]
    {"q": q, "k": k, "v": v, "dout": dout}[name][:, 100:230] = value
    spoilt = gradients(q, k, v, dout, **options)[:3]
    for x, y in zip(spoilt, clean, strict=True):
        x, y = (torch.cat([t[:, :100], t[:, 230:]], 1) for t in (x, y))
        assert (x - y).norm() <= 2 * torch.finfo(BF16).eps * y.norm()


@pytest.mark.parametrize("value", [0.0, float("nan")])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tokens_past_the_last_sequence(dim, value):
    """They have gradients of 0, whatever they hold, and no part in others."""
    q, k, v = inputs(b=1, sq=500, skv=500, d=dim)
    ends = torch.tensor([0, 130, 130, 300], device="cuda", dtype=torch.int32)
    options, dout = {"mask": mods.packed(ends, ends, 500, 500, causal=True)}, testing.make_like(q)
    clean = gradients(q, k, v, dout, **options)[:3]
    for t in (q, k, v, dout):
        t[:, 300:] = value
    for x, y in zip(gradients(q, k, v, dout, **options)[:3], clean, strict=True):
        assert not x[:, 300:].any()
        assert (x - y)[:, :300].norm() <= 2 * torch.finfo(BF16).eps * y.norm()


ONE_SWEEP = [(64, BF16), (128, BF16), (128, FP16), (32, BF16), (80, BF16), (96, FP16)]
OF_PAIRS = (600, 700), (300, 20), (129, 1000), (1, 300)  # lengths of queries and keys


def seen(*shape, share=0.6):
    """A bool tensor in rows of a multiple of 16 keys, of which the last few are cut off."""
    whole = torch.rand(*shape[:-1], -(-shape[-1] // 16) * 16, device="cuda") < share
    return whole[..., : shape[-1]]


SEEN = {
    "all alike": lambda b, h, q, kv: {"mask": seen(q, kv)},
    "by head": lambda b, h, q, kv: {"mask": seen(h, q, kv), "causal": True},
    "by item": lambda b, h, q, kv: {"mask": seen(b, 1, q, kv), "alibi_slopes": torch.rand(h, device="cuda")},
    "each": lambda b, h, q, kv: {"mask": seen(b, h, q, kv), "window": (200, 50)},
    "rows without keys": lambda b, h, q, kv: {"mask": seen(q, kv, share=0.002), "softcap": 2.0},
    "documents": lambda b, h, q, kv: {
        "mask": documents.masks(q, kv, "cuda")["causal documents"]["mask"] & mods.from_tensor(seen(q, kv))
    },
}


@pytest.mark.parametrize(("dim", "dtype"), ONE_SWEEP, ids=str)
@pytest.mark.parametrize("name", SEEN)
def test_bool_tensors(name, dim, dtype):
    for sq, skv in OF_PAIRS:
        check(*inputs(sq=sq, skv=skv, d=dim, dtype=dtype), **SEEN[name](2, 4, sq, skv))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("dim", [64, 128])
def test_what_a_bool_tensor_hides_reaches_nothing(dim, name, value):
    q, k, v = inputs(sq=300, skv=300, d=dim)
    mask = seen(300, 300)
    mask[100:200], mask[:, 100:200] = False, False
    dout = testing.make_like(q)
    clean = gradients(q, k, v, dout, mask=mask)[:3]
    {"q": q, "k": k, "v": v, "dout": dout}[name][:, 100:200] = value
    for x, y in zip(gradients(q, k, v, dout, mask=mask)[:3], clean, strict=True):
        x, y = (torch.cat([t[:, :100], t[:, 200:]], 1) for t in (x, y))
        assert (x - y).norm() <= 2 * torch.finfo(BF16).eps * y.norm()


def added(*shape, dtype=BF16):
    """A bias in rows of a multiple of 8 keys, of which the last few are cut off."""
    return torch.randn(*shape[:-1], -(-shape[-1] // 8) * 8, device="cuda").to(dtype)[..., : shape[-1]]


ADDED = {
    "all alike": lambda b, h, q, kv: {"bias": added(q, kv)},
    "by head": lambda b, h, q, kv: {"bias": added(h, q, kv), "causal": True},
    "by item": lambda b, h, q, kv: {"bias": added(b, 1, q, kv, dtype=FP16), "window": (200, 50)},
    "each": lambda b, h, q, kv: {"bias": added(b, h, q, kv), "mask": seen(b, 1, q, kv)},
    "capped": lambda b, h, q, kv: {"bias": added(h, q, kv), "softcap": 2.0},
    "documents": lambda b, h, q, kv: {"bias": added(q, kv), **documents.masks(q, kv, "cuda")["causal documents"]},
}


@pytest.mark.parametrize(("dim", "dtype"), ONE_SWEEP, ids=str)
@pytest.mark.parametrize("name", ADDED)
def test_bias_of_pairs(name, dim, dtype):
    for sq, skv in OF_PAIRS:
        check(*inputs(sq=sq, skv=skv, d=dim, dtype=dtype), **ADDED[name](2, 4, sq, skv))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "dtype"), ONE_SWEEP, ids=str)
@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1), (1, 1)], ids=["stored", "of items", "of heads", "of all"])
def test_gradient_of_a_bias(shape, dim, dtype, causal):
    """Stored where nothing is broadcast, else added up."""
    for sq, skv in ((600, 700), (129, 1000), (300, 17)):
        bias = added(*shape, sq, skv, dtype=dtype).requires_grad_()
        check(*inputs(sq=sq, skv=skv, d=dim, dtype=dtype), bias=bias, causal=causal)


def test_gradient_of_a_bias_of_another_dtype():
    check(*inputs(), bias=added(2, 4, 600, 700, dtype=FP16).requires_grad_(), causal=True)


def test_a_bias_that_is_expanded():
    check(*inputs(), bias=added(1, 4, 600, 700).expand(2, 4, 600, 700).requires_grad_())
    check(*inputs(), bias=added(2, 1, 600, 700).expand(2, 4, 600, 700))


def test_what_is_hidden_has_no_gradient_of_a_bias():
    q, k, v = inputs(sq=300, skv=300)
    bias, dout = added(2, 4, 300, 300).requires_grad_(), testing.make_like(q)
    v[:, 200:] = float("nan")
    dbias = gradients(q, k, v, dout, bias=bias, causal=True).dbias
    hidden = torch.ones(300, 300, dtype=torch.bool, device="cuda").triu(1)
    assert not dbias[..., hidden].any()
    assert dbias[..., :200, :].isfinite().all()


@pytest.mark.parametrize(("dim", "deterministic"), [(64, False), (80, False), *WAYS.values()])
def test_scores_that_index_a_table(dim, deterministic):
    """As a bias of each head and distance; the table wants no gradient here."""
    table = torch.randn(4, 1299, device="cuda")
    score = mods.Score(lambda s, b, h, q, kv: s + table[h, q - kv + 699])
    check(*inputs(d=dim), score=score, causal=True, deterministic=deterministic)


BURIED = [(40, False, 176, BF16), (64, False, 176, FP16), (128, False, 176, BF16)]
BURIED += [(dim, True, 1, BF16) for dim in (128, 256)]


@pytest.mark.parametrize("extra", ["full", "causal", "sinks"])
@pytest.mark.parametrize(("dim", "deterministic", "keys", "dtype"), BURIED, ids=str)
def test_buried_rows(dim, deterministic, keys, dtype, extra):
    """That a bias of pairs, or of queries alone, hides all keys from; also beside queries that are NaN."""
    q, k, v = inputs(sq=150, skv=176, d=dim, dtype=dtype)
    options = {"full": {}, "causal": {"causal": True}, "sinks": {"sinks": torch.randn(4, device="cuda") - 1e9}}[extra]
    options, dout = options | {"deterministic": deterministic}, testing.make_like(q)
    for low in buried.LOW:
        options["bias"] = buried.bias(low, dtype, 150, 176, "cuda")[..., :keys]
        found = gradients(q, k, v, dout, **options)
        made = {name: getattr(found, name) for name in ("dq", "dk", "dv")}
        buried.judge(made, q, k, v, dout, **options)
    if extra == "causal":  # marked tiles are computed again, relative to the same
        dout[:, 140:] = float("nan")
        spoilt = gradients(q, k, v, dout, **options)
        assert (spoilt.dq - found.dq)[:, :140].norm() <= 2 * torch.finfo(dtype).eps * found.dq.norm()


def test_sinks_of_buried_rows():
    q, k, v = inputs(sq=150, skv=176)
    low = torch.finfo(BF16).min
    bias, sinks = torch.full((2, 1, 150, 176), low, device="cuda", dtype=BF16), torch.full((4,), low, device="cuda")
    dout = testing.make_like(q)
    found = gradients(q, k, v, dout, bias=bias, sinks=sinks)
    buried.judge({"dq": found.dq, "dsinks": found.dsinks}, q, k, v, dout, bias=bias, sinks=sinks)


@pytest.mark.parametrize("tokens", [100, 3000, 300_000])
def test_order_of_blocks(tokens):
    """Each once; those that step over most tiles first, by powers of two, neighbours in their order."""
    generator = torch.Generator().manual_seed(tokens)
    ends = torch.cat([torch.zeros(1), torch.rand(tokens // 50, generator=generator).sort().values * tokens]).int()
    q = torch.empty(1, tokens, 1, 128, dtype=BF16, device="cuda")
    call = Call(q, q, q, mask=mods.packed(ends.cuda(), ends.cuda(), tokens, tokens, causal=True))
    p, device, spec = Problem.of(call), Device.of(torch.device("cuda")), kernels.load("hopper_backward")
    assert spec.why_not(p, device) == []
    (m,) = Config.all(p)
    found = torch.full((m.blocks + 1,), -1, dtype=torch.int32, device="cuda")
    aux = aux_values(call)
    step, tables = Step.order(m, m.compile(), aux), [t for t in aux if isinstance(t, torch.Tensor)]
    reads = dict(zip(expressions.of_tensors(aux), tables, strict=True)) | {"order": found}
    step.kernel.launch(step.grid, {name: t.data_ptr() for name, t in reads.items()})
    *order, claimed = found.tolist()
    assert claimed == 0
    lo, hi = (t.cpu().view(-1).clamp(max=tokens) for t in call.mask.tensors[2:])
    first = torch.arange(m.blocks) * 128
    both = first, (first + 127).clamp(max=tokens - 1)
    lo, hi = (torch.stack([torch.where(lo[i] < hi[i], t[i], n) for i in both]) for t, n in ((lo, tokens), (hi, 0)))
    tiles = -(-hi.amax(0) // m.block) - lo.amin(0) // m.block
    bucket = tiles.clamp(min=1).float().log2().floor()
    assert torch.equal(torch.tensor(order), torch.argsort(-bucket, stable=True))


def changes(heads, sq, skv):
    """Options by which scores are changed, by name."""
    slopes, keys = torch.rand(heads, device="cuda"), torch.randn(skv, device="cuda")
    found = {"alibi": {"alibi_slopes": slopes}, "softcap": {"softcap": 2.0}, "keys": {"bias": keys.to(BF16)}}
    found["all"] = {"alibi_slopes": slopes, "softcap": 9.0, "causal": True, "softmax_scale": -0.2}
    scores = dialects.scores(heads, sq, skv, "cuda")
    return found | {name: {"score": scores[name]} for name in ("relative", "hidden", "clipped", "capped", "of_signs")}


@pytest.mark.parametrize(
    ("name", "dim", "deterministic"), crossed(changes(1, 1, 1), ("softcap", "all", "hidden")) if HOPPER else []
)
def test_scores(name, dim, deterministic):
    check(*inputs(d=dim), deterministic=deterministic, **changes(4, 600, 700)[name])


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_scores_of_float16(dim):
    check(*inputs(d=dim, dtype=FP16), causal=True, softcap=3.0)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dim", [128, 256])
def test_gradient_of_lse(dim, dtype):
    q, k, v = inputs(d=dim, dtype=dtype)
    check(q, k, v, dlse=torch.randn(2, 4, 600, device="cuda"), causal=True)


@pytest.mark.parametrize("dim", [40, 64, 72, 96, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "softcap": 2.0}], ids=str)
def test_one_key_head(dim, options):
    check(*inputs(hq=12, hkv=1, d=dim), **options)


@pytest.mark.parametrize("dim", [64, 128])
def test_bits_of_one_key_head(dim):
    """dk and dv have the same from run to run: what several blocks made is added up in order."""
    q, k, v = inputs(hq=12, hkv=1, d=dim)
    dout = testing.make_like(q)
    first = gradients(q, k, v, dout)[1:3]
    for _ in range(5):
        assert all(map(torch.equal, gradients(q, k, v, dout)[1:3], first))


def test_sinks():
    check(*inputs(), causal=True, sinks=torch.randn(4, device="cuda"))


def test_rows_of_dout():
    """One row that stands for all, rows that begin anywhere."""
    q, k, v = inputs()
    check(q, k, v, torch.ones(1, dtype=BF16, device="cuda").expand(q.shape))
    check(q, k, v, torch.nn.functional.pad(testing.make_like(q), (1, 0))[..., 1:])


@pytest.mark.parametrize("dim", [24, 64, 96, 128, 256])
def test_preprocess(dim):
    """out in float32, and one an element off 16 bytes: the gradients are the same but for what rounding out changes."""
    q, k, v = inputs(d=dim)
    dout, call = testing.make_like(q), Call(q, k, v)
    plain = gradients(q, k, v, dout)
    wide = gradients(q, k, v, dout.float(), out_dtype=torch.float32)
    out, lse = sartor.attention(q, k, v, return_lse=True)
    off = torch.nn.functional.pad(out, (1, 0))[..., 1:]
    p, device, spec = Problem.of(call), Device.of(torch.device("cuda")), kernels.load("hopper_backward")
    plan = Plan(spec, p, device, next(iter(spec.tiles(p, device))), "test")
    moved = spec.run(plan, Operands(q, k, v), Saved(off, lse, dout, None))
    for x, y, z in zip(plain[:3], wide[:3], moved[:3], strict=True):
        assert (x - y).norm() <= 4 * torch.finfo(BF16).eps * x.norm()
        assert (x - z).norm() <= 2 * torch.finfo(BF16).eps * x.norm()


def test_strided_inputs():
    q, k, v = torch.randn(2, 500, 3, 4, 128, device="cuda").to(BF16).unbind(2)
    check(q, k, v, causal=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dim", [40, 80, 128, 256])
def test_masked_keys_reach_nothing(dim, value):
    """Marked tiles are computed again: what no query sees changes no gradient of what it does see."""
    q, k, v = inputs(sq=100, skv=300, d=dim)
    dout = testing.make_like(q)
    clean = gradients(q, k, v, dout, causal="top_left")
    k[:, 100:], v[:, 100:] = value, value
    spoilt = gradients(q, k, v, dout, causal="top_left")
    assert all(x.isfinite().all() for x in spoilt[:3])
    for x, y in zip(spoilt[:3], clean[:3], strict=True):
        assert (x - y).norm() <= 2 * torch.finfo(BF16).eps * y.norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "dout"])
@pytest.mark.parametrize("dim", [128, 256])
def test_queries_without_keys_reach_nothing(dim, name, value):
    """The same of queries: dk is marked because of either, dv because of dout, and neither mark is lost."""
    q, k, v = inputs(sq=300, skv=100, d=dim)
    dout = testing.make_like(q)
    clean = gradients(q, k, v, dout, causal=True)
    {"q": q, "dout": dout}[name][:, :200] = value
    spoilt = gradients(q, k, v, dout, causal=True)
    for x, y in zip(spoilt[1:3], clean[1:3], strict=True):
        assert x.isfinite().all()
        assert (x - y).norm() <= 2 * torch.finfo(BF16).eps * y.norm()


@pytest.mark.parametrize("dim", [128, 256])
def test_portable_kernel_agrees(dim):
    q, k, v = inputs(d=dim)
    dout = testing.make_like(q)
    own, portable = (gradients(q, k, v, dout, name=n, causal=True) for n in ("hopper_backward", "triton_backward"))
    for x, y in zip(own[:3], portable[:3], strict=True):
        assert (x - y).norm() <= 2 * torch.finfo(BF16).eps * y.norm()


@pytest.mark.parametrize("dim", [128, 256])
def test_bits(dim):
    """Run to run; and of one head of many as of that head alone."""
    q, k, v = inputs(b=4, hq=16, hkv=16, d=dim)
    dout, options = testing.make_like(q), {"causal": True, "deterministic": True}
    first = gradients(q, k, v, dout, **options)[:3]
    for _ in range(5):
        assert all(map(torch.equal, gradients(q, k, v, dout, **options)[:3], first))
    alone = gradients(*(t[1:2, :, 3:4] for t in (q, k, v, dout)), **options)[:3]
    for found, whole in zip(alone, first, strict=True):
        assert torch.equal(found, whole[1:2, :, 3:4])


@pytest.mark.parametrize("dim", [64, 128])
def test_bits_of_one_sweep(dim):
    """dk and dv have the same every time, dq up to two key tiles: a sum of two is the same in either order."""
    q, k, v = inputs(b=4, hq=16, hkv=16, skv=250, d=dim)
    dout = testing.make_like(q)
    first = gradients(q, k, v, dout)[:3]
    for _ in range(5):
        assert all(map(torch.equal, gradients(q, k, v, dout)[:3], first))
