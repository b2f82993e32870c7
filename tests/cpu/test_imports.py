"""Who may import whom, and what `import sartor` may bring along."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sartor

ROOT = Path(sartor.__file__).parent
# Part of the package: the parts it may import. A part is the first name after `sartor`.
MAY = {
    "errors": set(),
    "device": set(),
    "checks": set(),
    "mods": {"checks"},
    "problem": {"checks", "mods"},
    "kernels": {"problem", "device", "mods", "nvrtc"},
    "nvrtc": set(),
    "tuning": {"kernels", "device", "problem"},
    "plan": {"kernels", "tuning", "problem", "device", "errors"},
    "ops": {"plan", "kernels", "problem", "device", "mods"},
    "api": {"checks", "ops", "plan", "problem", "device", "mods"},
    "testing": {"api", "kernels", "problem", "mods"},
    "compat": {"api", "checks", "mods"},
}


def imports(file):
    """(modules of ours, other top-level names) that a file imports."""
    ours, others = set(), set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"sartor.{a.name}" for a in node.names] if node.module == "sartor" else [node.module]
        for name in names:
            first, _, rest = name.partition(".")
            (ours if first == "sartor" else others).add(rest.split(".")[0] if first == "sartor" else first)
    return ours, others


FILES = sorted(f for f in ROOT.rglob("*.py") if "rungs" not in f.parts)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_directions(file):
    part = file.relative_to(ROOT).parts[0].removesuffix(".py")
    ours, others = imports(file)
    if part in MAY:
        assert ours - {part, "__version__"} <= MAY[part]
    if part not in ("kernels", "lab"):
        assert "triton" not in others
    if part not in ("lab", "cli"):
        assert not others & {"matplotlib", "typer", "rich", "numpy"}
    if part != "lab":
        assert "lab" not in ours or part == "cli"


def test_import_is_light():
    """Nothing but torch; its FLOP counter, for which we register formulas, may bring Triton along."""
    heavy = ("triton", "matplotlib", "typer", "rich", "sartor.lab", "sartor.cli", "sartor.testing")
    code = f"import sys, sartor; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    light = subprocess.run(
        [sys.executable, "-c", code.replace("sartor;", "torch.utils.flop_counter;")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == light.stdout
