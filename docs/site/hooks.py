"""Pages link to files of the repository as a reader on GitHub follows them; the site carries these files along.

A page of docs/ may name a plot of benchmarks/results or an example, and CONTRIBUTING.md and CHANGELOG.md at the root
are pages as well. Links are resolved against the repository; what they name outside of docs/ becomes a file of the
site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")  # at the root
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)(#[^)]*)?(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages at the root and every file that a page links to."""
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for page in list(files.documentation_pages()):
        for match in LINK.finditer(page.content_string):
            target = _target(page.src_uri, match[2])
            if not target.startswith("docs/") and target not in PAGES and (ROOT / target).is_file():
                known = files.get_file_from_path(target)
                if known is None:
                    files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are in the site."""

    def moved(match: re.Match[str]) -> str:
        target = _target(page.file.src_uri, match[2]).removeprefix("docs/")
        relative = posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")
        return f"{match[1]}{relative}{match[3] or ''}{match[4]}"

    return LINK.sub(moved, markdown)


def _target(uri: str, link: str) -> str:
    """The path in the repository that a link of a page names."""
    folder = posixpath.dirname(uri if uri in PAGES else f"docs/{uri}")
    return posixpath.normpath(posixpath.join(folder, link))
