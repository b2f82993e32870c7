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
    "lengths": {"checks", "device", "direct", "driver"},
    "mods": {"checks", "lengths", "symbols"},
    "symbols": set(),
    "problem": {"checks", "mods"},
    "features": {"problem"},
    "kernels": {"features", "problem", "device", "mods", "nvrtc", "direct", "driver", "pending", "replay", "symbols"},
    "cache": set(),
    "pending": set(),
    "driver": set(),
    "direct": {"driver"},
    "nvrtc": {"cache", "driver"},
    "replay": {"cache", "driver", "nvrtc"},
    "tuning": {"kernels", "device", "problem"},
    "plan": {"features", "kernels", "nvrtc", "tuning", "problem", "device", "errors", "replay"},
    "ops": {"plan", "kernels", "problem", "device", "mods"},
    "dynamic_shapes": {"device", "kernels", "mods", "plan", "problem", "replay", "symbols"},
    "node": {"device", "dynamic_shapes", "problem", "direct", "guards", "kernels", "ops", "replay"},
    "guards": set(),
    "front": {"checks", "guards", "kernels", "node", "ops", "problem"},
    "lengths_front": {"checks", "device", "direct", "guards", "kernels", "lengths", "mods", "ops", "problem"},
    "compiled": {"checks", "guards", "kernels", "node", "ops", "problem"},
    "api": {"checks", "compiled", "front", "ops", "plan", "problem", "device", "mods"},
    "testing": {"api", "kernels", "problem", "mods"},
    "compat": {"api", "checks", "mods", "lengths", "lengths_front"},
    "distributed": {"api", "cache", "checks", "compat", "kernels", "mods", "ops", "plan", "problem"},
    "integrations": {"api", "checks", "compat", "distributed", "mods", "ops", "problem"},
    "nn": {"api", "checks", "lengths", "mods"},
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
    if part not in ("kernels", "lengths", "direct", "lab"):
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


def run(code):
    """What a fresh process prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("command", ["", "bench", "explain", "ladder run"])
def test_help_does_not_wait_for_torch(command):
    given = ["sartor", *command.split(), "--help"]
    code = f"""
import sys
from sartor.cli import main
sys.argv = {given}
try:
    main()
except SystemExit as done:
    print("exit code", done.code, [m for m in ("torch", "numpy", "matplotlib") if m in sys.modules])
"""
    said = run(code)
    assert "Usage: sartor" in said
    assert "exit code 0 []" in said


def test_the_package_is_a_command():
    done = subprocess.run([sys.executable, "-m", "sartor", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"sartor {sartor.__version__}\n"


def test_names_are_imported_when_they_are_used():
    """All that are public, the modules, by `from sartor import *` too; and what is not there is said to be missing."""
    said = run("import sys, sartor; print('torch' in sys.modules, set(sartor.__all__) <= set(dir(sartor)))")
    assert said == "False True\n"
    said = run("""
import sartor, pickle
assert sartor.device.ARCHITECTURES and sartor.mods.causal()
assert pickle.loads(pickle.dumps(sartor.attention)) is sartor.api.attention
from sartor import *
print(all(globals()[name] is getattr(sartor, name) for name in sartor.__all__), hasattr(sartor, "nothing"))
""")
    assert said == "True False\n"


def test_a_graph_may_be_the_first_to_use_a_name():
    said = run("""
import torch, sartor
graph = torch.compile(lambda q: sartor.attention(q, q, q, causal=True), fullgraph=True, backend="aot_eager")
q = torch.randn(1, 5, 2, 8)
print("attention" in vars(sartor), torch.equal(graph(q), sartor.attention(q, q, q, causal=True)))
""")
    assert said == "False True\n"


def test_fake_tensors_may_be_the_first_to_use_a_name():
    """What modules keep are real ones: later calls read them."""
    said = run("""
import torch, sartor
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    q = torch.randn(1, 5, 2, 8)
    sartor.attention(q, q, q, causal=True)
q = torch.randn(1, 5, 2, 8)
print(sartor.attention(q, q, q, mask=sartor.mods.causal(), alibi_slopes=torch.rand(2)).isfinite().all().item())
""")
    assert said == "True\n"


def test_a_call_brings_no_compiler():
    """Dynamo takes a second to import, which every process would wait for at its first call."""
    said = run("""
import sys, torch, sartor
q = torch.randn(1, 5, 2, 8, requires_grad=True)
sartor.attention(q, q, q, causal=True).sum().backward()
sartor.attention(q, q, q, mask=sartor.mods.window(3, 0), softcap=30.0)
print([m for m in ("torch._dynamo", "torch._inductor") if m in sys.modules])
""")
    assert said == "[]\n"


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
    code = f"import sys, sartor; sartor.attention; sartor.mods; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    light = subprocess.run(
        [sys.executable, "-c", code.replace("sartor; sartor.attention; sartor.mods;", "torch.utils.flop_counter;")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == light.stdout
