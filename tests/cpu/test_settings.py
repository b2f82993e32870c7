"""Attention gives the same values in every setting that users run it in; what a CPU can show of that."""

from __future__ import annotations

import ast
import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sartor
import settings
from sartor import ops
from sartor.mods.recent import Recent

thorough = pytest.mark.thorough
ROOT = Path(sartor.__file__).parent
CALLS = settings.calls("cpu")
# Allocations that take what they are not told from torch's defaults, which a user may change
DTYPE_AND_DEVICE = {
    "empty",
    "zeros",
    "ones",
    "full",
    "rand",
    "randn",
    "linspace",
    "empty_strided",
    "eye",
    "tensor",
    "scalar_tensor",
}
DEVICE = {"arange", "randint", "randperm", "as_tensor"}  # integers by default, or as what they are given


@pytest.fixture
def plans(monkeypatch):
    """No plan from before: those made in a setting are what is looked at."""
    monkeypatch.setattr(ops, "PREPARED", Recent(2048))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("setting", settings.SETTINGS)
def test_setting(setting, call, dtype, plans):
    leaves = settings.inputs("cpu", dtype, 16)
    found = settings.SETTINGS[setting](CALLS[call], leaves)
    assert settings.same(found, settings.results(CALLS[call], leaves))


@pytest.mark.parametrize(
    "call", ["causal", "packed", *(pytest.param(x, marks=thorough) for x in ("document", "cached"))]
)
@pytest.mark.parametrize("setting", settings.COMPILED)
def test_compiled(setting, call):
    """By the real inductor: another backend hides what it does to what surrounds the operator."""
    leaves = settings.inputs("cpu", torch.float32, 16)
    found = settings.COMPILED[setting](CALLS[call], leaves)
    assert settings.same(found, settings.results(CALLS[call], leaves))


@pytest.mark.parametrize("call", CALLS)
def test_export(call):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return CALLS[call](q, k, v)

    leaves = tuple(t.detach() for t in settings.inputs("cpu", torch.float32, 16))
    exported = torch.export.export(Model(), leaves)
    assert settings.same((exported.module()(*leaves),), (Model()(*leaves),))


def test_export_to_another_process(tmp_path):
    """Which imports what the package says, for the operators of plain calls, which are in strict graphs, and others."""

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return sartor.attention(q, k, v, causal=True) + sartor.attention(q, k, v, return_lse=True)[0]

    leaves = tuple(t.detach() for t in settings.inputs("cpu", torch.float32, 16))
    torch.export.save(torch.export.export(Model(), leaves, strict=True), tmp_path / "graph.pt2")
    torch.save((leaves, Model()(*leaves)), tmp_path / "data.pt")
    (module,) = re.findall(r"imports `(.*)` for the operators", sartor.__doc__)
    (tmp_path / "script.py").write_text(
        f"import torch, {module}\n"
        f"leaves, want = torch.load({str(tmp_path / 'data.pt')!r})\n"
        f"graph = torch.export.load({str(tmp_path / 'graph.pt2')!r})\n"
        "assert torch.allclose(graph.module()(*leaves), want, atol=1e-6)\n"
    )
    found = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("call", CALLS)
def test_autocast(call):
    leaves = settings.inputs("cpu", torch.float32, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = CALLS[call](*leaves)
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out.float().sum(), leaves)
    assert {g.dtype for g in gradients} == {torch.float32}


def allocations(file):
    """(line, function, names of the keywords) of calls `torch.<function>(...)` that allocate."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in DTYPE_AND_DEVICE | DEVICE:
                yield node.lineno, node.func.attr, {k.arg for k in node.keywords}


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_allocations_name_their_dtype_and_device(file):
    for line, function, keywords in allocations(file):
        wanted = {"dtype", "device"} if function in DTYPE_AND_DEVICE else {"device"}
        assert wanted <= keywords, f"{file}:{line}: torch.{function} takes {wanted - keywords} from torch's defaults"


def test_a_module_with_a_mask_is_copied_pickled_and_moved():
    layer, x = settings.Layer(), torch.randn(2, 20, 64)
    want = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to("cpu")):
        assert torch.equal(other(x), want)
    assert {t.device.type for t in copy.deepcopy(layer).to("meta").mask.tensors} == {"meta"}
    assert layer.mask.to("cpu") is layer.mask


def test_data_parallel_modules(tmp_path):
    settings.data_parallel("cpu", "gloo", str(tmp_path / "store"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes(method, tmp_path):
    """A process that has called attention starts another one that does."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, sartor\n"
        "from torch import multiprocessing as mp\n"
        "def work(q, want):\n"
        "    assert torch.equal(sartor.attention(q, q, q, causal=True), want)\n"
        "if __name__ == '__main__':\n"
        "    torch.set_num_threads(1)\n"
        "    q = torch.randn(1, 40, 2, 16)\n"
        "    want = sartor.attention(q, q, q, causal=True)\n"
        f"    process = mp.get_context('{method}').Process(target=work, args=(q, want))\n"
        "    process.start(); process.join(60); raise SystemExit(process.exitcode)\n"
    )
    assert subprocess.run([sys.executable, str(script)], check=False).returncode == 0
