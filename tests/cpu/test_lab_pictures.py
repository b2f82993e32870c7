"""Pictures say by themselves what they show: words, the problem, the device; and they are those of the records."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_lab_bench import record

from sartor.lab.ladder import catalogue
from sartor.lab.measure import providers
from sartor.lab.measure import records as store
from sartor.lab.measure.records import CEILINGS, Record
from sartor.lab.show import curves, masks, names, plots, views
from sartor.lab.workloads import suites

pytest.importorskip("matplotlib")
from PIL import Image

ROOT = suites.checkout()
PICTURES = sorted((ROOT / "benchmarks" / "results").glob("*/*.png")) if ROOT else []
CODE = re.compile(r"sdpa-|sartor:|rung:|changed:|\bfwd\b|\bbwd\b")


def some(lengths: tuple[int, ...] = (512, 1024, 2048), **changes: object) -> list[Record]:
    who = ("sartor", "sdpa-cudnn", "sartor:triton")
    size = {"suite": "tiny", "batch": 4, "heads_q": 8, "heads_kv": 8, "dtype": "bfloat16", **changes}
    return [
        record(provider=name, seqlen_q=n, seqlen_kv=n, ms=n / 100, tflops=float(n), peak_mem_mib=float(n), **size)
        for name in who
        for n in lengths
    ]


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text of the figures that are drawn."""
    from matplotlib.text import Text

    found: list[str] = []
    save = plots.save

    def saved(figure, *args, **kwargs):
        path = save(figure, *args, **kwargs)
        found.extend(" ".join(t.get_text().split()) for t in figure.findobj(Text) if t.get_text() and t.get_visible())
        return path

    monkeypatch.setattr(plots, "save", saved)
    return found


def test_plots_are_drawn_from_records(tmp_path: Path) -> None:
    found = some() + some(mask="causal")
    files = views.drawn(found, tmp_path, ("latency", "memory", "head_dims", "grid", "masks"))
    assert [f.name for f in files] == [
        "tiny-latency.png", "tiny-memory.png", "tiny-tflops.png", "tiny-fwd-bfloat16.png", "tiny-shapes.png"
    ]  # fmt: skip
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)


@pytest.mark.parametrize("kind", ["latency", "memory", "rates", "grid", "head_dims", "masks"])
def test_a_title_names_the_problem_and_labels_are_words(kind: str, tmp_path: Path, texts: list[str]) -> None:
    lengths = (2048,) if kind in ("head_dims", "masks") else (512, 1024, 2048)
    peak = record(mode=CEILINGS, dtype="bfloat16", tflops=2100.0, suite="tiny", provider="ceiling-matmul")
    (file,) = views.drawn([peak, *some(lengths)], tmp_path, (kind,))
    for part in ("B=4", "H=8", "D=64", "bfloat16", "NVIDIA H200"):
        assert any(part in text for text in texts), part
    assert {"Sartor", "PyTorch SDPA (cuDNN)", "Sartor (Triton)"} <= set(texts)
    assert not [text for text in texts if CODE.search(text)]
    assert ({"cuBLAS 8192³ at its power cap", "2100 TFLOP/s"} <= set(texts)) == (kind in ("grid", "head_dims"))
    with Image.open(file) as image:
        assert image.text["Description"] in texts
        assert image.text["Source"] == "r1"
        assert image.width <= 1660


def test_the_legend_names_what_any_panel_shows(tmp_path: Path, texts: list[str]) -> None:
    """Runs of different panels may have different providers, as many each."""
    others = [r for r in some(mask="causal") if r.provider != "sartor:triton"]
    others += [replace(r, provider="fa3") for r in others if r.provider == "sartor"]
    views.drawn(some(mask="full") + others, tmp_path, ("grid",))
    assert {"Sartor (Triton)", "FlashAttention-3"} <= set(texts)


def test_all_runs_are_within_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are."""
    from matplotlib.figure import Figure

    ends: list[float] = []
    savefig = Figure.savefig

    def saved(figure, *args, **kwargs):
        ends.extend(t.get_window_extent().x1 / figure.bbox.width for t in figure.texts)
        return savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", saved)
    found = [replace(r, run_id=f"20261129T0000{i:02}-abcd") for i, r in enumerate(some())]
    views.drawn(found, tmp_path, ("grid",))
    assert max(ends) <= 1


def test_what_is_constant_is_said_once() -> None:
    tokens = [record(batch=16384 // n, seqlen_q=n, seqlen_kv=n, heads_q=8, heads_kv=2) for n in (512, 4096)]
    assert plots.problem(tokens) == "H=8/2 D=64, B×N=16384, float32, causal, NVIDIA H200"
    assert plots.panel([record(dtype="float16")], [record(dtype="float16"), record()]) == "forward, float16"


def test_curves_that_coincide_are_drawn_as_dashes_in_turn() -> None:
    from matplotlib.figure import Figure

    same, apart = {512: 1.0, 1024: 2.0}, {512: 3.0, 1024: 2.0}
    found = {"a": same, "b": apart, "c": {n: 1.001 * y for n, y in same.items()}, "d": same}
    assert curves._bundles(found, 0.01) == [["a", "c", "d"], ["b"]]
    axis, look = Figure().subplots(), names.PROVIDERS["eager"]
    for i in range(3):
        curves._line(axis, same, look, False, i, 3)
    first, second, third = axis.lines
    assert first.get_linestyle() == "-"  # which shows in the gaps of the others
    assert (second.get_linestyle(), third.get_linestyle()) == ("--", "--")
    assert first.get_markersize() > second.get_markersize() > third.get_markersize()


def test_few_points_are_left_to_the_tables(tmp_path: Path) -> None:
    assert views.drawn(some((512, 1024)), tmp_path, ("latency", "rates", "grid")) == []
    short = some()
    for r in short:
        r.tflops = r.tflops if r.seqlen_q > 512 else 1.0  # of up to 2048: nobody would see it
    assert views.drawn(short, tmp_path, ("grid",)) == []


@pytest.mark.parametrize(("value", "text"), [
    (1e-6, "$10^{-6}$"), (2e-6, "$2·10^{-6}$"), (0.01, "0.01"), (0.5, "0.5"), (20, "20"), (10000, "10,000"),
])  # fmt: skip
def test_figures_of_a_log_axis_are_plain(value: float, text: str) -> None:
    assert plots.power(value) == text


def test_every_provider_has_words() -> None:
    known = [*providers.names(), "sartor:triton", "sartor:blocked", *(r.provider for r in catalogue.load())]
    words = [names.provider(code) for code in known]
    assert len(set(words)) == len(words)
    assert not [text for text in words if CODE.search(text)]
    assert set(providers.names()) <= set(names.PROVIDERS)
    looks = [names.PROVIDERS[code] for code in providers.names()]
    assert len({look.colour for look in looks}) == len(looks)
    assert names.title("rung:07a").startswith("07a ")


def test_masks_have_words() -> None:
    found = {w.mask for name in suites.available() for w, _ in suites.load(name).cases}
    words = {mask: names.mask(mask) for mask in found}
    assert words["causal+document8"] == "causal, 8 documents"
    assert words["full"] == "full"
    assert len(set(words.values())) == len(words)


@pytest.mark.parametrize("mask", ["full", "causal", "window1024", "document8", "prefix1024", "causal+document8"])
def test_a_shape_is_that_of_the_mask(mask: str) -> None:
    """The smaller mask hides what the large one hides: its share of pairs is the same, but for a diagonal."""
    r = record(seqlen_q=4096, seqlen_kv=4096, mask=mask)
    seen = masks.of_workload(r) > 0
    assert seen.float().mean().item() == pytest.approx(r.workload.pairs / 4096**2, abs=0.02)


def test_the_shape_of_a_score_is_what_it_does_to_weights() -> None:
    fall = masks.of_workload(record(seqlen_q=4096, seqlen_kv=4096, mask="causal+alibi"))[-1]
    assert fall[-1] == 1
    assert fall[-2] == pytest.approx(math.exp(-64 * 2**-8), rel=1e-4)  # its slope of the last head, over 64 keys
    assert torch.equal(masks.of_workload(record(seqlen_q=512, seqlen_kv=512, mask="softcap30")), torch.ones(64, 64))


@pytest.mark.parametrize("file", PICTURES, ids=lambda f: f.stem)
def test_a_committed_picture_is_that_of_its_records(file: Path) -> None:
    """By the runs that it names; `sartor plot SUITE --record` draws it anew."""
    known = sorted((f.stem for f in file.parent.glob("*.jsonl") if file.stem.startswith(f"{f.stem}-")), key=len)
    with Image.open(file) as image:
        text = image.text
    found = store.latest(store.read(file.parent / f"{known[-1]}.jsonl"), by_workload=True)
    assert set(text["Source"].split(", ")) <= {r.run_id for r in found}
    assert names.device(file.parent.name) in text["Description"]
    assert text["Title"]


@pytest.mark.skipif(ROOT is None, reason="needs a checkout")
def test_every_picture_is_shown_and_every_shown_picture_is_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"\(([^)\s]*results/[^)\s]*\.png)\)", page.read_text())
    }
    assert shown == set(PICTURES)
