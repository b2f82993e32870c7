"""The kernels that make tables of lengths compile for every architecture, once for all lengths."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sartor import direct
from sartor.direct import version
from sartor.driver import Frame
from sartor.lengths import kernels
from sartor.lengths.launches import BLOCK

if knobs.runtime.interpret:
    pytest.skip("needs Triton's compiler", allow_module_level=True)

DATA = dict.fromkeys(("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), "*bf16")
KERNELS = {
    "intervals": (
        kernels.intervals_kernel, {"q_ptr": "*i32", "kv_ptr": "*i64", "rows_ptr": "*i32", "cols_ptr": "*i32"}
    ),
    "places": (kernels.places_kernel, {"q_ptr": "*i64", "kv_ptr": "*u8", "places_ptr": "*i32"}),
    "cached": (kernels.cached_kernel, {"lengths_ptr": "*i32", "table_ptr": "*i32"}),
    "filled": (kernels.filled_kernel, {"lengths_ptr": "*i32", "OVERLAPS": False}),
    "append": (kernels.append_kernel, DATA | {"lengths_ptr": "*i32", "UNIT": tl.int64}),
}  # fmt: skip


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name, arch):
    kernel, given = KERNELS[name]
    signature, constants = {}, {}
    for i, p in enumerate(kernel.params):
        if p.is_constexpr:
            signature[p.name], constants[(i,)] = "constexpr", given.get(p.name, BLOCK)
        else:
            signature[p.name] = given.get(p.name) or p.annotation_type
            assert p.do_not_specialize, f"{p.name} would be compiled anew for 1 and for multiples of 16"
    assert all(signature.values()), signature
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", arch, 32))
    assert compiled.asm["cubin"]
    assert ".local" not in compiled.asm["ptx"]
    if arch == 90:
        loaded = SimpleNamespace(src=compiled.src, metadata=compiled.metadata, asm=compiled.asm, function=1)
        steps = direct.Open.of(loaded, version()).launches.steps
        kinds = [kind for kind in signature.values() if kind != "constexpr"]
        numbers = range(1, len(kinds) + 1)
        frame = Frame(steps)
        frame.write(numbers)
        sizes = [8 if kind[0] == "*" else int(kind[1:]) // 8 for kind in kinds]
        found = [ctypes.string_at(frame.pointers[0][i], size) for i, size in enumerate(sizes)]
        assert [int.from_bytes(value, "little") for value in found] == list(numbers)
        assert direct.Open.of(loaded, (4, 0)) is None
