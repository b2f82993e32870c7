"""What a launch passes to a kernel, declared once: its C++ text, where each value lies, and values by name.

A kernel takes its parameters one after the other, at the places that a struct of them would have. It does not take that
struct: of one, NVRTC keeps members in memory until they are used, and deals out registers otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, cached_property

from sartor import driver
from sartor.problem import Problem

RECORDS = {"TensorMap": (128, 64), "TwoMaps": (256, 64), "Inputs": (96, 8)}  # bytes and alignment, by C++ type
NUMBERS = {"i64": "q", "int": "i", "float": "f"}  # codes of `struct`, by C++ type
DROPOUT = {"seed": "const u64*", "steps": "int", "stay_scale": "float"}  # see dropout.cuh
LENGTHS = dict.fromkeys(("heads_kv", "group", "seqlen_q", "seqlen_kv"), "int")


@cache
def strides(name: str) -> Mapping[str, str]:
    """Parameters for the strides of a (batch, heads, rows, columns) tensor, in elements."""
    return {f"{name}_batch": "i64", f"{name}_head": "i64", f"{name}_row": "i64"}


def of_strides(name: str, values: Iterable[int]) -> dict[str, int]:
    """What `strides` declares, by name, from those of batch, head and row."""
    return dict(zip(strides(name), values, strict=True))


def of_lengths(p: Problem) -> dict[str, int]:
    """What LENGTHS declares, by name."""
    return {"heads_kv": p.heads_kv, "group": p.group, "seqlen_q": p.seqlen_q, "seqlen_kv": p.seqlen_kv}


class Params:
    """The parameters of a kernel: C++ types by name, in their order.

    Args:
        kernel: its `extern "C"` name.
        types: records, numbers, or pointers, as `const float*`.
    """

    def __init__(self, kernel: str, /, **types: str) -> None:
        for name, kind in types.items():
            if kind not in RECORDS and kind not in NUMBERS and "*" not in kind:
                known = ", ".join([*RECORDS, *NUMBERS])
                raise TypeError(f"{name} of {kernel} must be a pointer or one of {known}, got {kind}")
        self.kernel, self.types = kernel, types

    def followed_by(self, more: Mapping[str, str]) -> Params:
        """With other parameters after these."""
        return Params(self.kernel, **self.types, **more)

    @cached_property
    def codes(self) -> tuple[str, ...]:
        """Of each parameter, as `driver.Frame` takes them."""
        return tuple(
            f"{RECORDS[kind][0]}s" if kind in RECORDS else NUMBERS.get(kind, "P") for kind in self.types.values()
        )

    @property
    def places(self) -> list[tuple[int, int]]:
        """Offset and bytes of each parameter, as the compiler lays them out."""
        found, end = [], 0
        for kind, code in zip(self.types.values(), self.codes, strict=True):
            size = driver.size(code)
            align = RECORDS.get(kind, (0, size))[1]
            found.append((-(-end // align) * align, size))
            end = sum(found[-1])
        return found

    def macros(self) -> str:
        """C++: `KERNEL_PARAMETERS`, what stands in the kernel's parentheses."""
        grid = {kind: f"const __grid_constant__ {kind}" for kind in RECORDS}
        given = ", ".join(f"{grid.get(kind, kind)} {name}" for name, kind in self.types.items())
        return f"#define {self.kernel.upper()}_PARAMETERS {given}"

    def source(self) -> str:
        """C++: the struct `Params` by which a kernel's functions name them, and `PARAMS`, its values in the kernel."""
        fields = "".join(
            f"  {f'const {kind}&' if kind in RECORDS else kind} {name};\n" for name, kind in self.types.items()
        )
        records = "".join(f"struct {kind};\n" for kind in RECORDS)
        return f"{records}struct Params {{\n{fields}}};\n#define PARAMS Params{{{', '.join(self.types)}}}"

    def checks(self) -> str:
        """C++, after the records: they are as large here as there."""
        used = [kind for kind in RECORDS if kind in self.types.values()]
        size = 'static_assert(sizeof({0}) == {1} && alignof({0}) == {2}, "kernels/cuda/params.py says otherwise");'
        return "\n".join(size.format(kind, *RECORDS[kind]) for kind in used)
