"""Parameters of the Hopper kernels: the compiler has put each where Python says that it lies, and is as large there."""

from __future__ import annotations

import struct

import pytest
import torch

from sartor import nvrtc
from sartor.device import ARCHITECTURES
from sartor.kernels.cuda import expressions, host
from sartor.kernels.cuda.params import RECORDS
from sartor.kernels.hopper import backward, forward, fp32_backward, fp32_forward
from sartor.lab.measure import machine_code
from sartor.plan import choose
from sartor.problem import Call, Problem

pytestmark = pytest.mark.skipif(bool(nvrtc.missing()), reason="needs NVRTC")
PARAMETER = 0x17  # the attribute in a kernel's `.nv.info`


def problem(dtype=torch.bfloat16, **options) -> Problem:
    q, k = (torch.empty((1, n, 4, 64), dtype=dtype, device="meta") for n in (5, 9000))
    return Problem.of(Call(q, k, k, alibi_slopes=torch.empty(4, device="meta"), causal=True, **options))


def laid_out(cubin: bytes, kernel: str) -> list[tuple[int, int]]:
    """Offset from the first, and bytes, of each parameter, as the machine code says."""
    info = next(s.data for s in machine_code.sections(cubin) if s.name == f".nv.info.{kernel}")
    found, at = {}, 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:
            if attribute == PARAMETER:
                _, ordinal, offset, facts = struct.unpack_from("<IHHI", info, at)
                found[ordinal] = offset, facts >> 18
            at += size
    return [(found[i][0] - found[0][0], found[i][1]) for i in range(len(found))]


def binaries():
    p, exact = problem(), problem(torch.float32)
    plan = choose(p, ARCHITECTURES[90])
    yield plan.kernel.compile(p, plan.tile), (forward.PARAMS, forward.MERGE_PARAMS), p
    (config,) = backward.Config.all(p)
    yield config.compile(), config.kernels, p
    plan = choose(exact, ARCHITECTURES[90])
    yield plan.kernel.compile(exact, plan.tile), (fp32_forward.PARAMS,), exact
    plain = Problem.of(Call(*(torch.empty((1, 99, 2, 64), device="meta") for _ in "qkv")))
    yield fp32_backward.Config(plain, True).compile(), (fp32_backward.PARAMS,), plain


def test_parameters_lie_where_python_puts_them():
    for binary, (main, *others), p in binaries():
        for params in (main.followed_by(expressions.parameters(p.program)), *others):
            assert laid_out(binary.cubin, params.kernel) == params.places, params.kernel


def test_a_record_of_another_size_does_not_compile(monkeypatch):
    monkeypatch.setitem(RECORDS, "TensorMap", (64, 64))
    host._built.cache_clear()
    with pytest.raises(nvrtc.CompileError, match="says otherwise"):
        backward.Config.all(problem())[0].compile()
