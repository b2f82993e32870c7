"""Fingerprints: what changes them is what the GPU is told to do, and nothing else."""

from __future__ import annotations

import importlib.util
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sartor
from sartor import nvrtc
from sartor.device import ARCHITECTURES
from sartor.kernels import blocks
from sartor.kernels.spec import Tile
from sartor.kernels.triton import launch
from sartor.lab.measure import fingerprint, machine_code, providers, rehearsal
from sartor.lab.measure.planned import planned
from sartor.lab.measure.rehearsal import Launched
from sartor.lab.workloads.workload import Inputs, Workload
from sartor.plan import choose, choose_backward
from sartor.problem import Call, Problem
from sartor.tuning import table

H200 = ARCHITECTURES[90]
SMALL = Workload(1, 2, 2, 96, 96, 32, 32, "float16", "causal")
SOURCE = """#include "shelf.cuh"
extern "C" __global__ void scaled(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] * FACTOR + TABLE[i % 4] + KNOWN[i % 3];
}
"""
SHELF = """constexpr float FACTOR = 3.0f;
__device__ const float TABLE[4] = {1.0f, 2.0f, 3.0f, 5.0f};
__constant__ float KNOWN[3] = {7.0f, 8.0f, 9.0f};
"""
needs_nvrtc = pytest.mark.skipif(bool(nvrtc.missing()), reason="needs NVRTC")
needs_triton = pytest.mark.skipif(not launch.available(), reason="needs Triton")


def compiled(folder: Path, source: str = SOURCE, shelf: str = SHELF, name: str = "scaled", file: str = "a.cu") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shelf.cuh").write_text(shelf)
    return machine_code.code_hash(nvrtc.compile(source, include=folder, name=file).cubin, name)


@needs_nvrtc
def test_names_comments_and_places_are_not_machine_code(tmp_path: Path) -> None:
    own = compiled(tmp_path)
    assert compiled(tmp_path / "elsewhere", file="b.cu") == own
    assert compiled(tmp_path, SOURCE.replace("scaled", "stretched"), name="stretched") == own
    assert compiled(tmp_path, "// a comment\n\n" + SOURCE, SHELF + "// another\n") == own
    assert compiled(tmp_path, re.sub(r"\bi\b", "index", SOURCE)) == own


@needs_nvrtc
@pytest.mark.parametrize(
    ("before", "after"), [("3.0f;", "4.0f;"), ("5.0f}", "6.0f}"), ("9.0f}", "9.5f}")],
    ids=["a constant", "a variable that code reads", "a constant in memory"],
)  # fmt: skip
def test_constants_are_machine_code(tmp_path: Path, before: str, after: str) -> None:
    assert compiled(tmp_path, shelf=SHELF.replace(before, after)) != compiled(tmp_path)


@needs_nvrtc
def test_variables_that_no_code_reads_are_not_machine_code(tmp_path: Path) -> None:
    source, shelf = SOURCE.replace(" + TABLE[i % 4]", ""), SHELF.replace("__device__", "static __device__")
    more = shelf + "constexpr int UNUSED = 17;\n"
    assert compiled(tmp_path, source, more) == compiled(tmp_path, source, shelf)


@needs_nvrtc
def test_registers_and_stack_are_part_of_it(tmp_path: Path) -> None:
    """Of the same instructions too: how many blocks an SM holds hangs on them."""
    (tmp_path / "shelf.cuh").write_text(SHELF)
    binary = nvrtc.compile(SOURCE, include=tmp_path)
    known = binary.resources["scaled"]
    found = {section.name: section for section in machine_code.sections(binary.cubin)}
    assert machine_code._attributes(found, "scaled") == [known.registers, known.stack_bytes]
    assert known.registers > 0


def test_where_registers_are_spilled_does_not_count() -> None:
    """Two outcomes of one run of ptxas and another, as seen of a backward at head dim 192."""
    stored, loaded = "8773000106{}0100000a100000e20100", "8379e60100{}0100000a100000e80e00"
    one, other = (bytes.fromhex((stored + loaded).replace("{}", slot)) for slot in ("38", "40"))
    assert machine_code.without_slots(one) == machine_code.without_slots(other)
    moved = bytes.fromhex(stored.format("38").replace("8773", "8673"))  # no store to the stack
    assert machine_code.without_slots(moved) == moved


def test_a_kernel_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="64-bit ELF"):
        machine_code.code_hash(b"no machine code at all", "scaled")
    if not nvrtc.missing():
        with pytest.raises(ValueError, match=r"which has \.text\.scaled"):
            compiled(tmp_path, name="nothing")


KERNEL = """
import triton
import triton.language as tl

@triton.jit
def {name}(x_ptr, n, FACTOR: tl.constexpr):
    {comment}
    rows = tl.program_id(0) * 64 + tl.arange(0, 64)
    x = tl.load(x_ptr + rows, mask=rows < n, other=0.0)
    tl.store(x_ptr + rows, x * FACTOR, mask=rows < n)
"""


@needs_triton
def test_the_same_of_triton(tmp_path: Path) -> None:
    import torch

    from sartor.kernels.triton.lower import compiled_for, settled

    def code(folder: str, factor: float = 3.0, **words: str) -> str:
        file = tmp_path / folder / f"{words['name']}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(KERNEL.format(**words))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, words["name"])
        arguments = {"x_ptr": torch.empty(4096, device="meta"), "n": 4096, "FACTOR": factor}
        made = compiled_for(kernel, arguments, Tile(64, 64, 4, 1), 90)
        found, own = (machine_code.code_hash(x, made.metadata.name) for x in (settled(made, 90), made.asm["cubin"]))
        assert found == own  # few registers are dealt alike at all addresses
        return found

    own = code("here", name="scaled", comment='"""What it does."""')
    assert code("there", name="stretched", comment='"""Otherwise said."""\n    # and more\n') == own
    assert code("here", 4.0, name="scaled", comment="pass") != own


ONE = Launched("forward", "Triton 3.6.0", "abc", (4, 1, 1), 128, 1, 1024, (0, 0, 64, "0x1.8p+1"))


@pytest.mark.parametrize(
    "changed",
    [{"compiler": "Triton 3.7.0"}, {"code": "abd"}, {"grid": (5, 1, 1)}, {"grid": (1, 4, 1)}, {"block": 256},
     {"cluster": 2}, {"shared": 2048}, {"arguments": (0, 64, 0, "0x1.8p+1")}],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_every_part_of_a_launch_counts_but_its_name(changed: dict) -> None:
    own = fingerprint.digest([ONE])
    assert fingerprint.digest([ONE._replace(**changed)]) != own
    assert fingerprint.digest([ONE._replace(name="renamed")]) == own
    assert fingerprint.digest([ONE, ONE]) != own


@needs_triton
def test_a_fingerprint_is_of_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuning row, a grid and swapped arguments change it; a mask that nobody uses does not."""

    def now(w: Workload = SMALL) -> fingerprint.Found:
        found = fingerprint.fingerprint("sartor:triton", w, H200)
        assert found is not None
        return found

    own = now()
    assert own.plan.startswith("triton_forward[")
    sartor.mods.Mask(lambda b, h, q, kv, aux: (q + kv) % 3 == 0, name="unused")
    assert now() == own
    assert now(replace(SMALL, batch=3)).fingerprint != own.fingerprint  # the grid
    common = launch.common
    with monkeypatch.context() as patched:
        patched.setattr(launch, "common", lambda plan, x: swapped(common(plan, x)))
        assert now().fingerprint != own.fingerprint
    with monkeypatch.context() as patched:
        patched.setattr(table, "lookup", lambda spec, p, dev: (Tile(32, 32, 4, 1), "another row"))
        assert now() != own


def swapped(arguments: dict) -> dict:
    return arguments | {"scale": arguments["factor"], "factor": arguments["scale"]}


@needs_nvrtc
@needs_triton
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_hopper_kernels_are_rehearsed_without_a_gpu(mode: str) -> None:
    w = Workload(1, 2, 1, 128, 128, 64, 64, "bfloat16", "full", mode)
    found = fingerprint.fingerprint("sartor:hopper", w, H200)
    assert found is not None
    assert found.plan.startswith("hopper_")
    again = fingerprint.fingerprint("sartor:hopper", w, H200)
    assert again == found
    fewer = fingerprint.fingerprint("sartor:hopper", w, replace(H200, sm_count=1))
    assert mode == "bwd" or (fewer is not None and fewer.fingerprint != found.fingerprint)  # blocks are as many as SMs


@needs_nvrtc
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_a_list_counts_by_what_it_says_and_not_by_its_address(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables have data where nothing else has: what is launched once depended on where they lay."""
    w, kept = Workload(1, 2, 2, 256, 256, 128, 128, "bfloat16", "dilated4", mode), []
    for _ in range(2):
        monkeypatch.setattr(blocks, "_KEPT", {})
        kept.append((fingerprint.fingerprint("sartor", w, H200), blocks._KEPT))  # and so its tables
    assert all(lists for _, lists in kept)
    assert kept[0][0] == kept[1][0]
    monkeypatch.setattr(rehearsal, "_content", lambda table: table.numel())
    assert fingerprint.fingerprint("sartor", w, H200) != kept[0][0]


def test_what_launches_nothing_of_its_own_has_none() -> None:
    assert fingerprint.fingerprint("sdpa", SMALL, H200) is None
    assert fingerprint.fingerprint("sartor:reference", replace(SMALL, dtype="float32"), H200) is None
    rung = fingerprint.fingerprint("rung:01", replace(SMALL, dtype="float32", mask="full"), H200)
    assert rung is not None
    assert len(rung.fingerprint) == 16


def test_many_are_computed_at_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARTOR_CACHE", str(tmp_path))
    w, said = replace(SMALL, dtype="float32", mask="full", dim=64, dim_v=64), list[str]()
    cases = [("rung:01", w), ("sdpa", w), ("sartor:nothing", w)]
    found = fingerprint.every(cases, H200, 1, tell=said.append)
    assert list(found) == [fingerprint.key("rung:01", w)]
    assert len(said) == 1
    assert "sartor:nothing" in said[0]
    assert fingerprint.every(cases[:1], H200, 1, deadline=0.0, tell=said.append) == {}
    assert "too late" in said[-1]
    monkeypatch.setattr(fingerprint, "fingerprint", lambda *_: pytest.fail("it was kept"))
    assert fingerprint.kept("sdpa", w, H200) is None


def test_what_is_kept_is_of_the_same_parts_and_never_of_a_rungs_own_files(tmp_path, monkeypatch) -> None:
    """By SARTOR_PENDING=1 another kernel may be taken; files of rungs are not among the sources."""
    monkeypatch.setenv("SARTOR_CACHE", str(tmp_path))
    monkeypatch.delenv("SARTOR_PENDING", raising=False)
    monkeypatch.setattr(fingerprint.pending, "PARTS", {"some": "some part"})
    made = iter(["first", "second", "third", "fourth"])
    monkeypatch.setattr(fingerprint, "fingerprint", lambda *_: fingerprint.Found("plan", next(made)))
    assert [fingerprint.kept("sartor", SMALL, H200).fingerprint for _ in range(2)] == ["first", "first"]
    monkeypatch.setenv("SARTOR_PENDING", "1")
    assert fingerprint.kept("sartor", SMALL, H200).fingerprint == "second"
    assert [fingerprint.kept("rung:01", SMALL, H200).fingerprint for _ in range(2)] == ["third", "fourth"]


def test_machine_code_lies_beside_a_kept_fingerprint_unless_it_is_tritons(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SARTOR_CACHE", str(tmp_path))
    both = "hopper_forward[128x128]; hopper_backward[64x128]"
    for plan, whole in ((both, True), ("hopper_forward[128x128]; triton_backward[64x64]", False), ("", False)):
        w = replace(SMALL, dim=8 + len(plan))
        assert not fingerprint.on_disk("sartor", w, H200)
        monkeypatch.setattr(
            fingerprint, "fingerprint", lambda *_, p=plan: fingerprint.Found(p, "0" * 16) if p else None
        )
        fingerprint.kept("sartor", w, H200)
        assert fingerprint.on_disk("sartor", w, H200) is whole


def test_kept_fingerprints_are_of_the_bytes_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One changed number in a kernel, in a file of the same name, and what was kept is not found."""
    copy = tmp_path / "sartor"
    shutil.copytree(Path(sartor.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sartor, "__file__", str(copy / "__init__.py"))
    own = fingerprint.sources.__wrapped__()
    kernel = copy / "kernels" / "hopper" / "forward.cuh"
    kernel.write_text(kernel.read_text() + "constexpr int MORE = 1;\n")
    assert fingerprint.sources.__wrapped__() != own


def test_the_backward_of_one_column_compiles():
    """Strides of 1 are constants, which Triton 3.6 loses after a loop where they lie in a group."""
    q, k = (torch.empty((2, 300, heads, 1), dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    call = Call(q, k, k, kernel="triton")
    plans = choose(Problem.of(call), ARCHITECTURES[90]), choose_backward(Problem.of(call), ARCHITECTURES[90])
    assert [x.name for x in rehearsal.launches(call, *plans, "fwd_bwd")] == ["forward", "preprocess", "dkdv", "dq"]


@needs_nvrtc
@needs_triton
@pytest.mark.parametrize(
    "w", [replace(SMALL, dim=64, dim_v=64, mask="causal"), replace(SMALL, heads_kv=1, mask="alibi")], ids=str
)
def test_a_training_step_is_its_forward_and_its_backward(w: Workload) -> None:
    """What each launches alone: a step passed where both did."""
    empty, steps = Inputs.without_data(w), {}
    call = Call(empty.q, empty.k, empty.v, **providers.options(w, empty))
    for mode in ("fwd", "bwd", "fwd_bwd"):
        steps[mode] = rehearsal.launches(call, *planned("sartor", w, empty, H200), mode)
    assert steps["fwd_bwd"] == steps["fwd"] + steps["bwd"]
    parts = [fingerprint.fingerprint("sartor", replace(w, mode=mode), H200) for mode in ("fwd", "bwd")]
    step = fingerprint.fingerprint("sartor", replace(w, mode="fwd_bwd"), H200)
    assert step == tuple(map(fingerprint.JOINS.join, zip(*parts, strict=True)))
