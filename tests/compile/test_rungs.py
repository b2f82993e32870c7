"""What the compilers make of the rungs on a machine without a GPU: they compile, for the oldest GPU they say they run
on and for a Hopper one, without spilling a byte, within the shared memory there is."""

from __future__ import annotations

import pytest

from samples import sample
from sartor import nvrtc
from sartor.device import ARCHITECTURES, Device
from sartor.kernels.triton import launch
from sartor.lab.ladder import catalogue as ladder
from sartor.lab.ladder.compiled import build, mix
from sartor.lab.ladder.rung import Rung

CUDA = [r for r in ladder.load() if r.is_cuda]
BY_DIM = sample([(r, dim) for r in CUDA for dim in r.dims], lambda case: case[1] == max(case[0].dims))
TRITON = [r for r in ladder.load() if not r.is_cuda and not r.kernel]
SHARED = {60: 48 << 10, 75: 64 << 10}  # what a block may have


def ids(value: object) -> str:
    return value.number if isinstance(value, Rung) else str(value)


def room(arch: int) -> int:
    """Bytes of shared memory a block may have."""
    return ARCHITECTURES[arch].smem_bytes if arch in ARCHITECTURES else SHARED[arch]


def oldest() -> int:
    """What the installed NVRTC compiles for at least: sm_75 since CUDA 13."""
    from cuda.bindings import nvrtc as binding

    return min(binding.nvrtcGetSupportedArchs()[-1])


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())
@pytest.mark.parametrize("causal", sample([False, True], lambda causal: causal))
@pytest.mark.parametrize(("r", "dim"), BY_DIM, ids=ids)
def test_cuda_rung_compiles_for_hopper(r, dim, causal):
    made = build(r, ladder.workload(r, (2, 2, 1000), dim, "", causal), 90)
    assert made.spill_bytes == 0
    assert 16 <= made.registers <= 255
    assert made.shared_bytes <= room(90)


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())
@pytest.mark.parametrize(("r", "dim"), BY_DIM, ids=ids)
def test_cuda_rung_compiles_for_the_oldest_gpu_it_names(r, dim):
    """Or for the oldest that the installed NVRTC knows. Where its tile needs more shared memory, it says so."""
    w = ladder.workload(r, (2, 2, 1000), dim, r.dtypes[-1])
    made = build(r, w, max(r.arch, oldest()))
    assert made.spill_bytes == 0
    if made.shared_bytes > room(r.arch):
        assert "shared memory" in r.why_not(w, Device("an old GPU", r.arch, smem_bytes=room(r.arch)))


@pytest.mark.skipif(not launch.available(), reason="needs Triton")
@pytest.mark.parametrize("r", TRITON, ids=ids)
def test_triton_rung_compiles_for_hopper(r):
    made = build(r, ladder.workload(r, (2, 2, 4096), 128), 90)
    assert made.spill_bytes == 0
    assert made.shared_bytes <= room(90)
    assert "HGMMA" in made.sass()


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())
@pytest.mark.parametrize(
    ("number", "opcodes"),
    [("04", ("FFMA", "LDS")), ("09", ("HMMA", "LDSM", "LDGSTS")), ("12", ("HMMA", "LDSM", "LDGSTS"))],
)
def test_machine_code_has_what_the_idea_says(number, opcodes):
    r = ladder.find(number)
    found = mix(build(r, ladder.workload(r, (2, 2, 4096), max(r.dims)), 90).sass())
    assert all(found[opcode] for opcode in opcodes)
