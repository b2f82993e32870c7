"""Wgmma<N>: `wgmma.mma_async.m64nNk16` for the widths a kernel uses, as CUDA text. N is any multiple of 8 up to 256."""

from __future__ import annotations

from collections.abc import Iterable


def wrappers(widths: Iterable[int], dtype: str) -> str:
    """A struct a width with `ss` (both operands in shared memory) and `rs` (the first in registers).

    `dtype` is `bf16` or `f16`. ZERO says that the accumulator starts from zero, ACROSS that the second operand's rows
    lie along K, FIRST the same of the first.
    """
    return "template <int N> struct Wgmma;\n" + "".join(_struct(n, dtype) for n in sorted(set(widths)))


def _struct(n: int, dtype: str) -> str:
    count = n // 2
    outputs = ",".join(f"%{i}" for i in range(count))
    bound = ",".join(f'"+f"(d[{i}])' for i in range(count))
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype}"
    keep = "{{.reg .pred keep; setp.eq.b32 keep, %{}, 0;".format
    ss = f"{keep(count + 2)} {name} {{{outputs}}}, %{count}, %{count + 1}, keep, 1, 1, %{count + 4}, %{count + 3};}}"
    a = ",".join(f"%{count + i}" for i in range(4))
    rs = f"{keep(count + 5)} {name} {{{outputs}}}, {{{a}}}, %{count + 4}, keep, 1, 1, %{count + 6};}}"
    return f"""template <> struct Wgmma<{n}> {{
  template <bool ZERO, bool ACROSS = false, bool FIRST = false>
  static DEVICE void ss(float (&d)[{count}], u64 a, u64 b) {{
    asm volatile("{ss}" : {bound} : "l"(a), "l"(b), "n"(int(ZERO)), "n"(int(ACROSS)), "n"(int(FIRST)));
  }}
  template <bool ZERO, bool ACROSS> static DEVICE void rs(float (&d)[{count}], const u32* a, u64 b) {{
    asm volatile("{rs}" : {bound}
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ZERO)), "n"(int(ACROSS)));
  }}
}};
"""
