"""Run-time compilation: what a cubin's name depends on, and a cache that is shared, damaged or closed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from sartor import cache, driver, nvrtc

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


@pytest.mark.parametrize("damage", [b"", b"sartor cubin 2\n", b"x" * 5000])
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
    assert cache.contents() == (1, next(folder.iterdir()).stat().st_size, ())


def test_a_file_under_another_name_is_not_read(folder, monkeypatch):
    """Its checksum is right, but it was compiled for something else."""
    two, three = compiled(2.0), compiled(3.0)
    files = sorted(folder.glob("*.cubin"))
    data = [file.read_bytes() for file in files]
    for file, other in zip(files, reversed(data), strict=True):
        file.write_bytes(other)
    forget(monkeypatch)
    assert (compiled(2.0).cubin, compiled(3.0).cubin) == (two.cubin, three.cubin)
    assert two.cubin != three.cubin


def test_only_the_owner_may_write_the_cache(folder):
    cache.write("k" * 64, b"code")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache.read("k" * 64) == b"code"
    for place in (folder, next(folder.iterdir())):
        mode = place.stat().st_mode
        for loose in (0o020, 0o002):
            place.chmod(mode | loose)
            assert cache.read("k" * 64) is None
            (said,) = cache.contents().ignored
            assert said.startswith(f"{place} is ignored: expected that only its owner may write it, got mode ")
        place.chmod(mode)
    assert cache.read("k" * 64) == b"code"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner here")
def test_what_another_user_owns_is_not_read(folder, monkeypatch):
    cache.write("k" * 64, b"code")
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert cache.read("k" * 64) is None
    assert "as its owner, got" in cache.contents().ignored[0]


def test_a_link_is_not_read(folder, tmp_path):
    cache.write("k" * 64, b"code")
    (file,) = folder.iterdir()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert cache.read("k" * 64) is None
    assert "got a link" in cache.contents().ignored[0]


def test_the_least_recently_used_files_go(folder, monkeypatch):
    for i in range(4):
        cache.write(str(i) * 64, b"x" * 1000)
        os.utime(folder / f"{str(i) * 40}.cubin", (i, i))
    assert cache.read("0" * 64)  # which is in use again
    size = cache.contents().size
    assert cache.bound(size // 2) == 2
    assert [cache.read(str(i) * 64) is not None for i in range(4)] == [True, False, False, True]
    monkeypatch.setattr(cache, "LIMIT", size // 4)
    cache.write("5" * 64, b"x" * 1000)
    assert cache.contents().files == 1


def test_a_full_disk_leaves_nothing(folder):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        cache.write("k" * 64, b"x" * 50000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(folder.iterdir())


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
    frame = driver.Frame([driver.Step(("128s", "P", "i", "f"))])
    frame.write((b"m" * 128, 2**40, -3, 0.5))
    kinds = (ctypes.c_char * 128, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float)
    found = [kind.from_address(at) for kind, at in zip(kinds, frame.pointers[0], strict=True)]
    assert (found[0].raw, found[1].value, found[2].value, found[3].value) == (b"m" * 128, 2**40, -3, 0.5)


def test_fixed_arguments_of_a_launch():
    """A launch writes the others, wherever in the order they stand."""
    frame = driver.Frame([driver.Step("iPfP", {0: 7, 2: 1.5})])
    for addresses in ((2**40, 3), (5, 2**50)):
        frame.write(addresses)
        kinds = (ctypes.c_int32, ctypes.c_uint64, ctypes.c_float, ctypes.c_uint64)
        found = [kind.from_address(at).value for kind, at in zip(kinds, frame.pointers[0], strict=True)]
        assert found == [7, addresses[0], 1.5, addresses[1]]


class Recording:
    """A driver that encodes a tensor map as the address it is given, and keeps what else it is given."""

    def __init__(self, status=0):
        self.status, self.given = status, []

    def cuTensorMapEncodeTiled(self, room, *given):  # the driver's name
        self.given.append(given)
        ctypes.memmove(room, given[2].to_bytes(128, "little"), 128)
        assert room % nvrtc.MAP_ALIGNMENT == 0
        return self.status

    def cuGetErrorName(self, status, name):
        ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_INVALID_VALUE"


def test_what_the_driver_is_told_of_a_tensor_map(monkeypatch):
    """The enumerators are cuda.h's, the arrays last as long as they are used, only the address changes."""
    bindings = pytest.importorskip("cuda.bindings.driver")
    library = Recording()
    monkeypatch.setattr(nvrtc.driver, "library", lambda: library)
    facts = "bfloat16", (64, 100, 8, 2), (1024, 128, 102400), (64, 64, 1, 1), 128
    for address in (4096, 8192):
        assert int.from_bytes(nvrtc.tensor_map(address, *facts), "little") == address
    nvrtc.tensor_map(16, "float32", (36, 4), (144,), (32, 4), 0)
    nvrtc.tensor_map(16, "float16", (40, 4), (80,), (32, 4), 32)
    nvrtc.tensor_map(16, "float16", (64, 4), (128,), (64, 4), 128, 128)
    kinds, swizzles = bindings.CUtensorMapDataType, bindings.CUtensorMapSwizzle
    promotions = bindings.CUtensorMapL2promotion
    first, second, third, fourth, fifth = library.given
    assert (first[1], first[2], second[2]) == (4, 4096, 8192)
    assert [list(array) for array in first[3:7]] == [[64, 100, 8, 2], [1024, 128, 102400], [64, 64, 1, 1], [1] * 4]
    assert first[0] == kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert third[0] == kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32
    assert fourth[0] == kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    assert first[7] == bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    assert first[8] == swizzles.CU_TENSOR_MAP_SWIZZLE_128B
    assert third[8] == swizzles.CU_TENSOR_MAP_SWIZZLE_NONE
    assert fourth[8] == swizzles.CU_TENSOR_MAP_SWIZZLE_32B
    assert first[9] == promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    assert third[9] == promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_64B
    assert fifth[9] == promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_128B
    assert first[10] == bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE


def test_a_tensor_map_on_a_thread_without_a_context(monkeypatch):
    """A backward makes its maps before its first launch, on a thread of autograd's that may have no context yet."""
    library = Recording(status=201)

    def bind():
        library.status = 0

    monkeypatch.setattr(nvrtc.driver, "library", lambda: library)
    monkeypatch.setattr(nvrtc.driver, "bind", bind)
    found = nvrtc.tensor_map(16, "float16", (64, 4), (128,), (64, 4), 128)
    assert int.from_bytes(found, "little") == 16
    assert len(library.given) == 2


def test_a_tensor_map_that_the_driver_refuses(monkeypatch):
    monkeypatch.setattr(nvrtc.driver, "library", lambda: Recording(status=1))
    with pytest.raises(nvrtc.LaunchError, match=r"sizes \(64, 4\).*at 0x8: CUDA_ERROR_INVALID_VALUE"):
        nvrtc.tensor_map(8, "float16", (64, 4), (128,), (64, 4), 128)


def test_launches_share_what_they_take():
    """A value is written once for all launches that take it, in whichever order; each has its own fixed ones."""
    steps = driver.Step("PiP", {1: 7}, (2, 0)), driver.Step(("P", "P", "8s"), {2: b"12345678"}, (0, 2))
    frame = driver.Frame(steps, 4)
    frame.write((5, 6, 2**40, 8))
    first, second = frame.pointers
    assert (first[0], first[2]) == (second[1], second[0])
    kinds = ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64
    assert [kind.from_address(at).value for kind, at in zip(kinds, first, strict=True)] == [2**40, 7, 5]
    assert ctypes.string_at(second[2], 8) == b"12345678"
    with pytest.raises(TypeError, match="value 0 cannot be taken as i and as P"):
        driver.Frame([driver.Step("P"), driver.Step("i")])


class Started:
    """A driver that keeps what it was asked to launch: handle, grid, stream, and the first parameter; by turns refused
    with these statuses."""

    def __init__(self, *statuses):
        self.statuses, self.found = list(statuses), []

    def cuLaunchKernelEx(self, config, function, pointers, extra):  # the driver's name
        facts = driver._Config.from_address(config)
        first = ctypes.c_void_p.from_address(pointers).value
        value = ctypes.c_uint64.from_address(first).value
        self.found.append((function, tuple(facts.grid), facts.stream or 0, value))
        return self.statuses.pop(0) if self.statuses else 0


def test_launches_in_order(monkeypatch):
    """On the stream and the grid of each call, by one frame while none is under way."""
    started = Started()
    monkeypatch.setattr(driver, "library", lambda: started)
    first, second = (driver.Step("P", given=(i,), function=10 + i, grid=(4 + i, 1, 1)) for i in range(2))
    launches = driver.Launches(first, second)
    launches.start((1, 2), 0)
    launches.start((3, 4), 9, (8, 1, 1))
    launches.start((5, 6), 0)
    assert started.found == [
        (10, (4, 1, 1), 0, 1), (11, (5, 1, 1), 0, 2), (10, (8, 1, 1), 9, 3), (11, (5, 1, 1), 9, 4),
        (10, (4, 1, 1), 0, 5), (11, (5, 1, 1), 0, 6),
    ]  # fmt: skip
    assert len(launches._frames) == 1


def test_a_thread_without_a_context_gets_one(monkeypatch):
    """The launch that said so is repeated; another refusal is an error that names the kernel and its shape."""
    started, bound = Started(0, 201), []
    monkeypatch.setattr(driver, "library", lambda: started)
    monkeypatch.setattr(driver, "bind", lambda: bound.append(True))
    monkeypatch.setattr(driver, "name_of", str)
    steps = [driver.Step("P", given=(0,), function=i, name=f"f{i}", grid=(1 + i, 1, 1)) for i in range(3)]
    driver.Launches(*steps).start((1,), 0)
    assert [one[0] for one in started.found] == [0, 1, 1, 2]
    assert bound == [True]
    started.statuses = [0, 0, 700]
    with pytest.raises(driver.LaunchError, match=r"f2 \(grid \(3, 1, 1\), block 1, 0 bytes .* did not launch: 700"):
        driver.Launches(*steps).start((1,), 0)


def test_the_config_of_a_launch_is_the_drivers():
    """Each field lies where the driver's header has it."""
    bindings = pytest.importorskip("cuda.bindings.driver")
    theirs = bindings.CUlaunchConfig()
    ours = driver._Config((2, 3, 4), (5, 6, 7), 8, 0, 0, 0)
    for name, value in zip(("gridDimX", "gridDimY", "gridDimZ"), ours.grid, strict=True):
        setattr(theirs, name, value)
    for name, value in zip(("blockDimX", "blockDimY", "blockDimZ"), ours.block, strict=True):
        setattr(theirs, name, value)
    theirs.sharedMemBytes, theirs.hStream, ours.stream = 8, bindings.CUstream(2**40), 2**40
    assert ctypes.string_at(theirs.getPtr(), 40) == bytes(ours)[:40]
    assert ctypes.sizeof(ours) == 56
