"""Every file in examples/ and the code of how-to pages run on a CPU in seconds, and leave nothing behind."""

from __future__ import annotations

import ast
import importlib.util
import re
import runpy
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sartor.integrations import torch as pytorchs

ALL = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
FILES = [f for f in ALL if f.stem != "long_context"]  # what torchrun starts is in tests/distributed
MOST_LINES = 59
STANDINS = ("flash_attn", "flash_attn_interface")  # which `install()` makes


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """As in a process of its own, where no warning was given yet."""
    monkeypatch.setattr(pytorchs._STATE, "said", set())


def libraries(file):
    """The top-level modules that it imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return sorted(found)


@pytest.mark.parametrize("file", ALL, ids=lambda f: f.stem)
def test_it_is_short_and_says_what_it_shows(file):
    text = file.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert ast.get_docstring(ast.parse(text))


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """No arguments, and files go where they are taken away."""
    monkeypatch.setattr(sys, "argv", ["example"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_example(file):
    missing = [name for name in libraries(file) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    function, dtype = F.scaled_dot_product_attention, torch.get_default_dtype()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(file), run_name="__main__")
    assert F.scaled_dot_product_attention is function
    assert torch.get_default_dtype() is dtype


def test_the_gallery_is_a_picture_where_it_is_wanted(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    file = next(f for f in FILES if f.stem == "gallery")
    monkeypatch.setattr(sys, "argv", [str(file), str(tmp_path / "wanted.png")])
    runpy.run_path(str(file), run_name="__main__")
    assert (tmp_path / "wanted.png").read_bytes().startswith(b"\x89PNG")


DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS.parent / "README.md", DOCS / "index.md", *sorted((DOCS / "how-to").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_code_of_a_page_runs(page, tmp_path):
    """Its blocks one after another, as a reader would type them."""
    file = tmp_path / "page.py"
    file.write_text("\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)))
    missing = [n for n in libraries(file) if n not in STANDINS and importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    runpy.run_path(str(file))
