"""Documents say what the code does: tutorials quote their examples, links lead somewhere, long pages stay short."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sartor.lab.measure import models, outside, overlap, profile, scaling, several, steps
from sartor.lab.workloads import suites

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = {"README.md": 150, "docs/design.md": 200}
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```.*?^```$|^ {4}.*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
SUITES = re.compile(
    r"[sS]uites?:? (`[\w-]+`(?:(?:,| and|, and|\sor) `[\w-]+`)*)|--suite ([\w-]+)|sartor:report \w+/([\w-]+)/"
)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)]*))?\)")


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as GitHub and the site make them."""
    headings = re.findall(r"^#+ +(.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", h.lower()).strip()) for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """On GitHub; what `make docs` is strict about is the site."""
    for path, anchor in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{path}#{anchor}"


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda p: p.stem)
def test_a_tutorial_quotes_its_example(page: Path) -> None:
    """Code in a tutorial is that of the file it names, which the tests run."""
    text = page.read_text(encoding="utf-8")
    file = ROOT / "examples" / re.search(r"\.\./examples/(\w+\.py)", text)[1]  # type: ignore[index]
    code = file.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        assert block in code, f"{file.name} does not have\n{block}"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda f: f.stem)
def test_a_page_leads_to_each_example(example: Path) -> None:
    assert any(f"/examples/{example.name})" in page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.parametrize("name", MOST_LINES)
def test_is_short(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= MOST_LINES[name]


def test_no_file_holds_both_sides_of_a_merge() -> None:
    tracked = subprocess.run(["git", "grep", "-lE", r"^(<{7}|>{7}) "], cwd=ROOT, capture_output=True, check=False)
    assert tracked.returncode == 128 or tracked.stdout.decode() == "", "128: a copy without its history"


def test_suites_that_pages_name_exist() -> None:
    """Those of benchmarks/suites, and those that a command of their own records; and each record is of one."""
    own = {part.SUITE for part in (models, outside, overlap, profile, scaling, several, steps)} | {"distributed"}
    known, named = {*suites.available(), *own}, dict[str, str]()
    for page in [*PAGES, ROOT / "benchmarks" / "README.md"]:
        for told, flag, marker in SUITES.findall(page.read_text(encoding="utf-8")):
            of = re.findall(r"[\w-]+", told) if told else [flag or marker]
            named |= {name: page.name for name in of if name not in ("and", "or")}
    assert {"paper", "profile", "ladder"} <= named.keys() | own
    assert {name: page for name, page in named.items() if name not in known} == {}
    assert {f.stem for f in (ROOT / "benchmarks" / "results").rglob("*.jsonl")} - known == set()
