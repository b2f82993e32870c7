"""Workloads: FLOPs and bytes by definition, patterns against a literal mask, suites that parse."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sartor.lab.measure.providers import get, names, options, runner
from sartor.lab.workloads import suites
from sartor.lab.workloads.workload import Inputs, Pattern, Workload, document_ids, key_span

MASKS = ["full", "causal", "causal_top_left", "window5", "prefix7", "window3+prefix9", "causal_top_left+window4"]


def workload(mask: str = "full", mode: str = "fwd", sq: int = 16, skv: int = 16, **changes: int) -> Workload:
    sizes = {"batch": 2, "heads_q": 4, "heads_kv": 2, "dim": 8, "dim_v": 8} | changes
    return Workload(**sizes, seqlen_q=sq, seqlen_kv=skv, dtype="float32", mask=mask, mode=mode)


def literal(mask: str, sq: int, skv: int) -> np.ndarray:
    """The mask by a double loop over its definition."""
    p, keep = Pattern.parse(mask), np.zeros((sq, skv), bool)
    shift = 0 if p.causal == "top_left" else skv - sq
    ids = document_ids(p, skv) if p.document else None
    for i in range(sq):
        for j in range(skv):
            ok = not (p.causal or p.window) or j <= i + shift
            ok &= not p.window or i + shift - j < p.window
            ok &= not p.prefix or j < p.prefix
            ok &= ids is None or ids[i] == ids[j]
            keep[i, j] = ok
    return keep


@pytest.mark.parametrize("mask", [*MASKS, "document3", "causal+document4", "lognormal4"])
@pytest.mark.parametrize(("sq", "skv"), [(16, 16), (12, 20), (20, 12), (1, 16)])
def test_key_spans_equal_the_literal_mask(mask: str, sq: int, skv: int) -> None:
    if Pattern.parse(mask).document and sq != skv:
        pytest.skip("documents are laid over equal lengths")
    lo, hi = key_span(Pattern.parse(mask), sq, skv)
    keys = np.arange(skv)
    assert ((keys >= lo[:, None]) & (keys < hi[:, None]) == literal(mask, sq, skv)).all()


@pytest.mark.parametrize("mask", [*MASKS, "document3", "causal+document4"])
def test_visited_tiles_are_those_with_a_visible_pair(mask: str) -> None:
    tiles = literal(mask, 16, 16).reshape(4, 4, 8, 2).any((1, 3))
    assert workload(mask).visited(4, 2) == 8 * tiles.sum()


@pytest.mark.parametrize("mask", [*MASKS, "document3", "causal+document4"])
def test_sartor_is_asked_for_the_same_mask(mask: str) -> None:
    w = workload(mask)
    x = Inputs.make(w, torch.device("cpu"))
    mine, found = torch.from_numpy(literal(mask, 16, 16)), options(w, x)
    import sartor
    from sartor.problem import Call, mods

    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    found.pop("layout")
    theirs, _ = mods(Call(q, k, v, **found))
    if theirs is None:
        assert mine.all()
    else:
        assert isinstance(theirs, sartor.mods.Mask)
        assert (theirs.materialize(2, 4, 16, 16) == mine).all()


@pytest.mark.parametrize("name", ["sartor", "sdpa", "eager"])
@pytest.mark.parametrize("mode", ["bwd", "fwd_bwd"])
def test_a_learned_bias_has_its_gradient(name: str, mode: str) -> None:
    w = workload("learned", mode)
    x = Inputs.make(w, torch.device("cpu"))
    *_, dbias = runner(get(name).make(w, x), w, x)()
    assert dbias.shape == x.bias.shape
    plain = Inputs.make(replace(w, mask="bias"), torch.device("cpu"))
    assert [len(of.leaves) for of in (x, plain)] == [4, 3]
    assert torch.equal(x.bias, plain.bias)


def test_windows_by_head_are_those_of_their_definition() -> None:
    """The same for Sartor, FlexAttention and SDPA; pairs are those of a head on average."""
    from sartor.lab.measure.flex import block_mask, mask_mod

    w, n = workload("windows8", heads_q=8), 16
    x, places, heads = Inputs.make(w, torch.device("cpu")), torch.arange(n), torch.arange(8)
    distance = (places[:, None] - places).abs()
    literal = distance <= torch.tensor([8, 4, 2, 1, 8, 4, 2, 1])[:, None, None]
    assert torch.equal(options(w, x)["mask"].materialize(1, 8, n, n)[0], literal)
    assert torch.equal(x.visible(w)[0], literal)
    assert torch.equal(mask_mod(w, x)(places[:1], heads[:, None, None], places[:, None], places), literal)
    assert w.pairs == literal.sum() / 8
    assert w.visited(4, 2) == literal.view(8, 4, 4, 8, 2).any(4).any(2).sum()  # tiles of 8 pairs, of 8 heads
    assert block_mask(w, x).shape == (1, 8, n, n)
    out = get("sartor").make(w, x)(x.q, x.k, x.v)
    assert torch.allclose(out, get("eager").make(w, x)(x.q, x.k, x.v), atol=1e-5)


@pytest.mark.parametrize("mask", ["natten3", "dilated3", "relative", "dilated2+relative"])
def test_scattered_masks_and_tables_are_those_of_their_definition(mask: str) -> None:
    """The same for Sartor, FlexAttention and SDPA, in the pairs that count and the tiles that are visited."""
    from sartor.lab.measure.flex import mask_mod, score_mod

    w, n = workload(mask), 16
    x = Inputs.make(w, torch.device("cpu"))
    literal, (x0, y0) = np.zeros((n, n), bool), np.divmod(np.arange(n), 4)
    cx, cy = x0.clip(1, 2), y0.clip(1, 2)
    for i in range(n):
        for j in range(n):
            near = abs(cx[i] - x0[j]) <= 1 and abs(cy[i] - y0[j]) <= 1
            step = int(mask[7]) if "dilated" in mask else 1
            literal[i, j] = near if "natten" in mask else abs(i - j) % step == 0
    found = options(w, x)
    seen = torch.from_numpy(literal)
    if "mask" in found:
        assert torch.equal(found["mask"].materialize(1, 1, n, n)[0, 0], seen)
        assert torch.equal(x.visible(w)[0, 0], seen)
        places = torch.arange(n)
        assert torch.equal(mask_mod(w, x)(places[:1], places[:1], places[:, None], places), seen)
    assert w.pairs == literal.sum()
    hull = np.array([[r.argmax(), n - r[::-1].argmax()] for r in literal])
    assert np.array_equal(np.stack(key_span(w.pattern, n, n), 1), hull)
    if w.pattern.relative:
        s = torch.zeros(1, 4, n, n)
        at = [torch.arange(m).view(-1, *(1,) * (3 - i)) for i, m in enumerate((1, 4, n, n))]
        assert torch.equal(score_mod(w, x)(s, *at), x.added(w))
        assert torch.equal(found["score"].fn(s, *at, found["score"].aux), x.added(w))


@pytest.mark.parametrize("mask", ["causal", "window100", "causal+document3", "prefix300", "tensor", "natten13"])
def test_block_masks_are_those_of_the_workload_and_compile_nothing(mask, monkeypatch):
    """Compiled, the sort in `create_block_mask` took two minutes of a bench at 16384 keys."""
    from sartor.lab.measure.flex import block_mask

    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("it was compiled"))
    w = Workload(1, 2, 2, 900, 900, 16, 16, "float32", mask)
    x = Inputs.make(w, torch.device("cpu"))
    seen = torch.nn.functional.pad(x.visible(w)[0, 0], (0, 124, 0, 124)).view(8, 128, 8, 128)
    assert torch.equal(block_mask(w, x).to_dense()[0, 0].bool(), seen.any(3).any(1))
    full = replace(w, mask="full")
    assert block_mask(full, Inputs.make(full, torch.device("cpu"))) is None


def test_flops_follow_the_convention() -> None:
    square = workload("causal", sq=64, skv=64)
    assert square.flops == 4 * 2 * 4 * 64 * 64 * 8 / 2
    assert workload(sq=64, skv=32, dim=8, dim_v=4).flops == 2 * 2 * 4 * 64 * 32 * 12
    assert workload(mode="bwd").flops == 2.5 * workload().flops
    assert workload("window4", sq=8, skv=8).pairs == 1 + 2 + 3 + 4 * 5


def test_bytes_count_every_tensor_once() -> None:
    w = workload(sq=10, skv=20)
    q, kv = 2 * 4 * 10 * 8 * 4, 2 * 2 * 20 * 8 * 4
    assert w.bytes == 2 * q + 2 * kv + 2 * 4 * 10 * 4


@given(st.integers(1, 40), st.integers(1, 500), st.booleans())
def test_documents_cover_the_sequence_in_order(documents: int, seqlen: int, lognormal: bool) -> None:
    ids = document_ids(Pattern(document=documents, lognormal=lognormal), seqlen)
    assert ids.shape == (seqlen,)
    assert (np.diff(ids) >= 0).all()
    assert 0 <= ids[0] <= ids[-1] < documents


def test_lognormal_documents_are_as_unequal_as_texts() -> None:
    lengths = np.bincount(document_ids(Pattern.parse("lognormal63"), 65536))
    assert (lengths.min(), np.median(lengths), lengths.max()) == (130, 793, 4834)
    assert lengths.tolist() != sorted(lengths)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask": "causel"}, "got 'causel'"),
        ({"mask": "window0"}, "positive number, .* got 'window0'"),
        ({"mask": "causal+document0"}, "positive number, .* got 'document0'"),
        ({"mask": "prefix0"}, "positive number, .* got 'prefix0'"),
        ({"mask": "softcap00"}, "positive number, .* got 'softcap00'"),
        ({"mask": "natten0"}, "positive number, .* got 'natten0'"),
        ({"mask": "natten4"}, "an odd N of at most the image's width 4, got 'natten4'"),
        ({"mask": "natten3", "skv": 20}, "a square number, got .16, 20. with 'natten3'"),
        ({"mask": "causal+dilated2"}, "go with scores alone, got 'causal.dilated2'"),
        ({"mask": "windows7"}, "an N of at least 8, .* got 'windows7'"),
        ({"mask": "causal+windows8"}, "goes with scores alone, got 'causal.windows8'"),
        ({"mode": "sideways"}, "got 'sideways'"),
        ({"heads_kv": 3}, "multiple of heads_kv"),
        ({"heads_kv": 0}, "heads_kv must be a positive number, got 0"),
        ({"batch": -1}, "batch must be a positive number, got -1"),
    ],
)
def test_wrong_workloads_are_refused_in_words(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        workload(**{"mask": "full", **changes})


@pytest.mark.parametrize("name", suites.available())
def test_every_suite_loads_and_names_known_providers(name: str) -> None:
    suite = suites.load(name)
    assert suite.cases
    assert suite.description
    for _, who in suite.cases:
        assert [get(p).name for p in who] == list(who)
        assert suite.baseline in names()


def test_unknown_grid_keys_and_suites_are_refused() -> None:
    with pytest.raises(ValueError, match="seqlenn"):
        suites.parse("x", {"grid": [{"heads": 1, "dim": 8, "seqlenn": 3}]})
    with pytest.raises(ValueError, match="got 'nope'"):
        suites.load("nope")


def test_paper_suite_is_the_grid_of_16k_tokens() -> None:
    cases = suites.load("paper").cases
    assert len(cases) == 2 * 3 * 6 * 2
    assert {w.batch * w.seqlen_q for w, _ in cases} == {16384}
    assert {w.heads_q * w.dim for w, _ in cases} == {2048}


def test_a_grid_is_every_combination_of_its_values():
    grid = {"heads": 4, "heads_kv": [2, 4], "batch": 1, "dim": 64, "dim_v": 48, "seqlen": [8, 16], "seqlen_kv": 32}
    found = list(suites.expand(grid, ["fwd", "bwd"]))
    assert len(set(found)) == len(found) == 8
    assert found[0] == Workload(1, 4, 2, 8, 32, 64, 48, "bfloat16", "full", "fwd")


@pytest.mark.parametrize("mask", ["full", "causal", "causal_top_left", "window8", "prefix3", "causal+softcap30"])
@pytest.mark.parametrize(("sq", "skv"), [(12, 20), (20, 12), (1, 16), (16, 16)])
def test_useful_pairs_are_those_that_are_seen(mask, sq, skv):
    """Half a square under a causal mask, as is customary; nothing is half where lengths differ."""
    w = Workload(1, 2, 2, sq, skv, 8, 8, "float32", mask)
    seen = Inputs.make(w, torch.device("cpu")).visible(w)
    square = sq == skv and mask.startswith("causal")
    assert w.pairs == (sq * skv / 2 if square else sq * skv if seen is None else int(seen.sum()))
