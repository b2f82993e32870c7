"""What an installed Sartor is: light to import, small, complete; and a README that is not stale."""

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from sartor import cli
from sartor.lab.show import report
from sartor.lab.workloads import suites
from sartor.lab.workloads.suites import tomllib

ROOT = suites.checkout()
pytestmark = pytest.mark.skipif(ROOT is None, reason="needs a checkout")


def test_importing_sartor_touches_torch_only() -> None:
    def loaded(module: str) -> str:
        heavy = "('triton', 'matplotlib', 'rich', 'typer', 'cuda')"
        code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert loaded("sartor.ops") == loaded("torch.utils.flop_counter")  # where the FLOP formulas go; it looks for Triton


def test_torch_is_all_that_is_needed() -> None:
    """A call on a CPU works where nothing else can be imported, and the command says in one line what is missing."""
    hidden = "sys.modules.update(dict.fromkeys(['numpy', 'typer', 'rich', 'matplotlib']))"
    call = "import torch, sartor; q = torch.randn(1, 8, 2, 16); print(sartor.attention(q, q, q, causal=True).shape)"
    code = f"import sys; {hidden}; {call}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 8, 2, 16])" in done.stdout


def test_the_command_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "typer" else find_spec(name))
    with pytest.raises(SystemExit, match=r"the command line needs sartor\[lab\]: pip install 'sartor\[lab\]'"):
        cli.main()


def test_no_extra_contradicts_the_triton_that_torch_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [name.split(">")[0] for name in project["dependencies"]] == ["torch"]
    (triton,) = (name for name in project["optional-dependencies"]["gpu"] if name.startswith("triton"))
    assert triton.split(";")[0].strip() == "triton"
    assert set(cli.LAB) <= {name.split(">")[0] for name in project["optional-dependencies"]["lab"]}


@pytest.mark.parametrize("name", report.FILES)
def test_tables_are_those_of_the_records(name: str) -> None:
    assert report.update(ROOT / name, ROOT / "benchmarks" / "results", check=True), "run `sartor report`"


def test_results_of_a_user_are_ignored_and_committed_ones_are_not() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "/results/" in ignored


@pytest.mark.skipif(find_spec("setuptools") is None, reason="needs setuptools")
def test_wheel_is_small_and_carries_suites_and_device_code(tmp_path: Path) -> None:
    code = f"from setuptools import build_meta as b; print(b.build_wheel({str(tmp_path)!r}))"
    command = [sys.executable, "-c", code]
    copy = tmp_path / "source"
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        if name.startswith(("src/", "benchmarks/suites/")) or "/" not in name:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=True)
    wheel = tmp_path / done.stdout.split()[-1]
    assert wheel.stat().st_size < 1 << 20
    with zipfile.ZipFile(wheel) as archive:
        carried = set(archive.namelist())
    wanted = {n.removeprefix("src/") for n in names if n.startswith("src/")}
    wanted |= {f"sartor/suites/{name}.toml" for name in suites.available()}
    assert {n for n in wanted - carried if (copy / "src" / n).is_file()} == set()
    assert "sartor/suites/paper.toml" in carried


@pytest.fixture(scope="module")
def versions() -> Any:
    """`.ci/versions.py`, which CI runs."""
    spec = spec_from_file_location("versions", ROOT / ".ci" / "versions.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("  Downloading torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl (526.6 MB)\n", ("2.13.0", 526.6)),
        ("Downloading torch-2.9.1-cp310-none-macosx_11_0_arm64.whl (74.5 MB)\n", ("2.9.1", 74.5)),
        ("Processing ./torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl\n", ("2.13.0+cpu", 0.0)),
        ("  Downloading torchvision-0.28.0-cp312-cp312-manylinux_2_28_x86_64.whl (8.0 MB)\n", None),
        ("Collecting torch==2.13.0\n", None),
    ],
)
def test_ci_reads_what_pip_begins_to_fetch(versions: Any, line: str, found: Any) -> None:
    assert versions.told(line) == found


def test_ci_says_why_a_version_is_not_tested(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "there", lambda name: name != "python3.12")
    tested = {("3.11", "2.13.0")}
    assert "no wheel" in versions.why_not("3.14", None, tested)
    assert versions.why_not("3.11", ("2.13.0", 190.0), tested) == "tested already"
    assert "527 MB" in versions.why_not("3.11", ("2.12.0", 526.6), tested)
    assert "no python3.12" in versions.why_not("3.12", None, tested)
    assert versions.why_not("3.11", ("2.9.1", 190.0), tested) == ""


def test_ci_asks_pip_nothing_for_a_python_that_is_not_there(versions: Any, monkeypatch, capsys) -> None:
    monkeypatch.setattr(versions, "there", lambda name: False)
    monkeypatch.setattr(versions, "wheel", lambda *pair: pytest.fail("pip is asked"))
    versions.main()
    assert capsys.readouterr().out.count("as there is no python3.") == 10


def test_ci_passes_over_a_command_that_does_not_run(versions: Any, tmp_path: Path, monkeypatch) -> None:
    """As what pyenv puts on the path for every Python that it has."""
    command = tmp_path / "python3.10"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for end, there in ((127, False), (0, True)):
        command.write_text(f"#!/bin/sh\nexit {end}\n")
        command.chmod(0o755)
        assert versions.there("python3.10") is there


def test_ci_tests_the_lowest_and_the_newest_torch_of_every_python(versions: Any, monkeypatch, capsys) -> None:
    """By `make test-torch`, where a small wheel and the Python are there; the rest is said."""
    asked, made = [], []
    monkeypatch.setattr(versions, "there", lambda name: True)
    monkeypatch.setattr(versions, "wheel", lambda *pair: asked.append(pair) or ("9.9", 190.0 + 400 * ("=" in pair[1])))
    monkeypatch.setattr(versions.subprocess, "run", lambda command, **more: made.append(command))
    versions.main()
    assert {python for python, _ in asked} == {f"3.{minor}" for minor in range(10, 15)}
    assert {torch for _, torch in asked} == {"torch==2.9.*", "torch"}
    assert [make[2] for make in made] == [f"PYTHON=python3.{minor}" for minor in range(10, 15)]
    assert capsys.readouterr().out.count("a build for CUDA") == 5
    assert ".ci/versions.py" in (ROOT / ".ci" / "run").read_text()
