"""Compile a Triton kernel for any architecture without a GPU, and read what the compiler made of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from sartor.kernels.spec import Tile
from sartor.kernels.triton.launch import compile_options

_TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.bool: "i1", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8", torch.int8: "i8", torch.float64: "fp64",
}  # fmt: skip


@dataclass(frozen=True)
class Resources:
    """Of one compiled kernel: registers a thread, bytes spilled, shared and tensor memory a block, and its SASS."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_columns: int
    sass: str
    ptx: str

    def count(self, opcode: str) -> int:
        """How many instructions start with `opcode`."""
        return len(re.findall(rf"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d\s+)?{opcode}\b", self.sass, re.MULTILINE))


def compile_for(kernel: Any, arguments: dict[str, Any], tile: Tile, arch: int) -> Resources:
    """What becomes of `kernel` on `arch` (80, 90, ...) with the arguments a launch would get; meta tensors will do."""
    return _resources(compiled_for(kernel, arguments, tile, arch))


def compiled_for(kernel: Any, arguments: dict[str, Any], tile: Tile, arch: int) -> Any:
    """The same, as Triton gives it: `asm`, `metadata`."""
    target = GPUTarget("cuda", arch, 32)
    return triton.compile(source_of(kernel, arguments), target=target, options=compile_options(tile))


def settled(compiled: Any, arch: int) -> bytes:
    """The cubin of a compiled kernel as ptxas makes it at addresses that are not random: at those, it gives registers
    other numbers from run to run, of one PTX. As Triton made it where `setarch` (util-linux) can't switch that off, or
    a release of Triton names ptxas otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(compiled.asm["ptx"])
        options = ["-lineinfo", f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}"]
        options += [] if getattr(compiled.metadata, "enable_fp_fusion", True) else ["--fmad=false"]
        try:
            from triton.backends.nvidia.compiler import get_ptxas

            _output("setarch", "-R", get_ptxas(arch).path, *options, ptx, "-o", cubin)
        except (ImportError, AttributeError, OSError, subprocess.CalledProcessError):
            return compiled.asm["cubin"]  # type: ignore[no-any-return]
        return cubin.read_bytes()


def trace(source: ASTSource, tile: Tile, arch: int) -> None:
    """Only the first stage, Triton's own, which says what a kernel's Python is wrong in."""
    backend, context = make_backend(target := GPUTarget("cuda", arch, 32)), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(compile_options(tile))
    given = backend.get_codegen_implementation(options), backend.get_module_map()
    source.make_ir(target, options, *given, context)


def source_of(kernel: Any, arguments: dict[str, Any]) -> ASTSource:
    """The kernel, with what a launch with these arguments compiles it for."""
    names = [p.name for p in kernel.params]
    constexprs = {n for n, p in zip(names, kernel.params, strict=True) if p.is_constexpr}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(names):
        value = arguments[name]
        if name in constexprs:
            signature[name], constants[(i,)] = "constexpr", value
        else:
            known = {} if kernel.params[i].do_not_specialize else attributes
            signature[name] = "i32" if known is not attributes else _type(value, (i,), constants, attributes)
    return ASTSource(kernel, signature, constants, attributes)


def _type(value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    """Triton's signature of an argument, specialised as its launcher does: on 1, and on divisibility by 16."""
    if isinstance(value, tuple):
        return tuple(_type(v, (*path, i), constants, attributes) for i, v in enumerate(value))
    if isinstance(value, torch.Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value == 1:
        constants[path] = 1
        return "constexpr"
    if value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _resources(compiled: Any) -> Resources:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _output(tools / "cuobjdump", "-res-usage", cubin)
        sass = _output(tools / "nvdisasm", "-c", cubin)
    registers = int(re.search(r"REG:(\d+)", usage).group(1))  # type: ignore[union-attr]
    local = re.search(r"STACK:(\d+)", usage)
    spills = int(local.group(1)) if local else 0
    columns = getattr(compiled.metadata, "tmem_size", 0) or 0
    return Resources(registers, spills, int(compiled.metadata.shared), columns, sass, compiled.asm["ptx"])


def _output(*command: Any) -> str:
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout
