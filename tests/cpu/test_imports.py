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
    "lengths": {"checks"},
    "mods": {"checks", "lengths"},
    "problem": {"checks", "mods"},
    "features": {"problem"},
    "kernels": {"features", "problem", "device", "mods", "nvrtc", "driver"},
    "cache": set(),
    "driver": set(),
    "nvrtc": {"cache", "driver"},
    "tuning": {"kernels", "device", "problem"},
    "plan": {"features", "kernels", "tuning", "problem", "device", "errors"},
    "ops": {"plan", "kernels", "problem", "device", "mods"},
    "api": {"checks", "ops", "plan", "problem", "device", "mods"},
    "testing": {"api", "kernels", "problem", "mods"},
    "compat": {"api", "checks", "mods", "lengths"},
    "distributed": {"api", "cache", "checks", "compat", "kernels", "mods", "ops", "plan", "problem"},
    "integrations": {"api", "checks", "compat", "mods", "ops", "problem"},
    "nn": {"api", "mods"},
}


# Folders of the lab, in the same way: from what is measured to what is shown of it
LAB_MAY = {
    "workloads": set(),
    "ladder": {"workloads"},
    "measure": {"workloads", "ladder"},
    "evidence": {"workloads", "ladder", "measure"},
    "show": {"workloads", "ladder", "measure", "evidence"},
    "cli": {"workloads", "ladder", "measure", "evidence", "show"},
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
    if part not in ("kernels", "lengths", "lab"):
        assert "triton" not in others
    if part != "lab":
        assert not others & {"matplotlib", "typer", "rich", "numpy"}
    if part != "lab":
        assert "lab" not in ours or part == "cli"


LAB = {
    ".".join(f.relative_to(ROOT.parent).with_suffix("").parts): f for f in FILES if "lab" in f.relative_to(ROOT).parts
}


def lab_imports(file):
    """Modules of the lab that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{a.name}" for a in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return found & set(LAB)


@pytest.mark.parametrize("module", LAB)
def test_directions_in_the_lab(module):
    folder = module.split(".")[2:3]
    if folder and folder[0] != "__init__":
        others = {m.split(".")[2] for m in lab_imports(LAB[module])} - set(folder)
        assert others <= LAB_MAY[folder[0]]


def test_no_circle_in_the_lab():
    """Not even by an import inside a function: modules can be put in an order in which each needs only earlier ones."""
    left = {module: lab_imports(file) - {module} for module, file in LAB.items()}
    while left:
        ready = {module for module, needs in left.items() if not needs & set(left)}
        assert ready, f"these need each other: {sorted(left)}"
        left = {module: needs for module, needs in left.items() if module not in ready}


def test_import_is_light():
    """Nothing but torch; its FLOP counter, for which we register formulas, may bring Triton along."""
    heavy = (
        "triton",
        "matplotlib",
        "typer",
        "rich",
        "sartor.lab",
        "sartor.cli",
        "sartor.testing",
        "sartor.distributed",
    )
    code = f"import sys, sartor; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    light = subprocess.run(
        [sys.executable, "-c", code.replace("sartor;", "torch.utils.flop_counter;")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == light.stdout
