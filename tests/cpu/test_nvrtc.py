"""Run-time compilation: what a cubin's name depends on, and a cache that is shared, damaged or closed."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from sartor import nvrtc

if nvrtc.missing():
    pytest.skip(nvrtc.missing(), allow_module_level=True)

SOURCE = 'extern "C" __global__ void twice(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= FACTOR; }'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache of its own for every test, and nothing in memory."""
    monkeypatch.setenv("SARTOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "_BINARIES", {})
    return tmp_path / "cache"


def compiled(factor=2.0, arch="sm_90a", source=SOURCE, **rest):
    return nvrtc.compile(source, arch=arch, defines={"FACTOR": f"{factor}f"}, **rest)


def forget(monkeypatch):
    monkeypatch.setattr(nvrtc, "_BINARIES", {})


def test_resources_and_log():
    found = compiled()
    assert found.arch == "sm_90a"
    assert found.resources["twice"].registers > 0
    assert found.resources["twice"].spill_bytes == 0


def test_machine_code_and_its_resources():
    try:
        nvrtc.disassembler()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    binary = compiled(3.0)
    assert "FMUL" in binary.sass("twice")
    assert nvrtc._resources_of(binary.cubin)["twice"].registers == binary.resources["twice"].registers


def test_disk(folder, monkeypatch):
    first = compiled()
    assert len(list(folder.glob("*.cubin"))) == 1
    forget(monkeypatch)
    monkeypatch.setattr(nvrtc, "_compile", None)  # not called again
    again = compiled()
    assert (again.cubin, again.resources, again.log) == (first.cubin, first.resources, first.log)


def test_everything_it_depends_on_is_in_the_name(folder, tmp_path):
    header = tmp_path / "scale.cuh"
    source = '#include "scale.cuh"\n' + SOURCE
    header.write_text("// one\n")
    for arguments in ({}, {"factor": 3.0}, {"arch": "sm_80"}, {"source": SOURCE + "\n"}):
        compiled(**arguments)
    compiled(source=source, include=tmp_path)
    header.write_text("// two\n")
    compiled(source=source, include=tmp_path)
    assert len(list(folder.glob("*.cubin"))) == 6


@pytest.mark.parametrize("damage", [b"", b"sartor cubin 1\n", b"x" * 5000])
def test_damaged_file_is_made_again(folder, monkeypatch, damage):
    first = compiled()
    (file,) = folder.glob("*.cubin")
    for spoilt in (damage, file.read_bytes()[:-7]):
        file.write_bytes(spoilt)
        forget(monkeypatch)
        assert compiled().cubin == first.cubin
        assert len(file.read_bytes()) > 5000 or file.read_bytes() != spoilt


def test_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SARTOR_CACHE", str(tmp_path / "file" / "cache"))
    assert compiled().cubin


def test_threads(folder):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: compiled(), range(16)))
    assert all(f is found[0] for f in found)
    assert len(list(folder.glob("*"))) == 1


def test_processes(folder):
    """Four at once leave one whole file and nothing else."""
    text = f"from sartor import nvrtc; nvrtc.compile({SOURCE!r}, defines={{'FACTOR': '2.0f'}})"
    runs = [subprocess.Popen([sys.executable, "-c", text], env=os.environ.copy()) for _ in range(4)]
    assert [run.wait() for run in runs] == [0] * 4
    assert [file.suffix for file in folder.iterdir()] == [".cubin"]
    assert nvrtc._read(next(folder.iterdir())) is not None


def test_error_holds_the_log():
    with pytest.raises(nvrtc.CompileError, match=r"kernel\.cu for sm_90a .*(?s:.*)FACTORY"):
        compiled(source=SOURCE.replace("FACTOR", "FACTORY"))


def test_missing_header():
    with pytest.raises(nvrtc.CompileError, match=r"nowhere\.cuh"):
        compiled(source='#include "nowhere.cuh"\n' + SOURCE)


def test_missing_compiler_is_a_reason(monkeypatch):
    nvrtc.missing.cache_clear()
    monkeypatch.setattr(nvrtc, "compiler", lambda: (_ for _ in ()).throw(RuntimeError("no libnvrtc.so")))
    try:
        assert "no libnvrtc.so" in nvrtc.missing()
        with pytest.raises(nvrtc.CompileError, match=r"no libnvrtc\.so"):
            compiled()
    finally:
        nvrtc.missing.cache_clear()


def test_arguments_of_a_launch():
    """Values lie where the pointers say, in the order and size of the signature."""
    import ctypes

    frame = nvrtc._Frame("MPif")
    frame.packer.pack_into(frame.values, 0, b"m" * 128, 2**40, -3, 0.5)
    kinds = (ctypes.c_char * 128, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float)
    found = [kind.from_address(at) for kind, at in zip(kinds, frame.pointers, strict=True)]
    assert (found[0].raw, found[1].value, found[2].value, found[3].value) == (b"m" * 128, 2**40, -3, 0.5)
