"""Host side shared by the Triton kernels: arguments every kernel takes, and a launch that is cheap the second time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from sartor import direct
from sartor.device import Device
from sartor.direct import Direct, version
from sartor.kernels.spec import KernelSpec, Operands, Plan, Saved, Tile, first_of_class, length_class
from sartor.mods.recent import Recent
from sartor.problem import Problem
from sartor.symbols import Symbol, SymbolicTensor

LOG2_E = 1.4426950408889634
RUNTIME = ("batch", "heads_q", "seqlen_q", "seqlen_kv")  # what a kernel is not compiled anew for
EMPTY: Mapping[str, dict[str, Any]] = {}
NOTHING: tuple[Any, Direct | None] = None, None
PLAIN = {"units": (), "ONLY_MARKED": False, "REPAIR": False}  # of a first pass without pairs
TENSOR_COLUMNS = 512  # of tensor memory, of 32 bits


def reasons(p: Problem, dev: Device) -> list[str]:
    """What every Triton kernel needs."""
    why = []
    if not available():
        why.append("needs Triton >= 3.5, which is not installed: pip install triton")
    elif dev.is_cpu and not interpreted():
        why.append("needs an NVIDIA GPU, the tensors are on a CPU")
    elif not dev.is_cpu and dev.arch < 80:
        why.append(f"needs compute capability >= 8.0, {dev.name} has {dev.arch // 10}.{dev.arch % 10}")
    elif p.dtype == torch.bfloat16 and interpreted():
        why.append("needs float16 or float32 in Triton's interpreter, where bfloat16 is wrong")
    return why


def no_tile(spec: KernelSpec, p: Problem, dev: Device) -> list[str]:
    """Why a problem whose kernel has no legal tile cannot run."""
    if first_of_class(spec, length_class(p), dev) is not None:  # type: ignore[arg-type] # kernels are by identity
        return []
    dtype = str(p.dtype).removeprefix("torch.")
    dims = f"dims {p.dim} and {p.dim_v} in {dtype}"
    return [f"needs a tile within {smem_limit(dev)} bytes of shared memory, got none for {dims}"]


def available() -> bool:
    """Whether a Triton this package can use is installed."""
    return version() >= (3, 5)


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def smem_limit(dev: Device) -> int:
    """Shared memory a block may be given: not all of it where the compiler takes more than estimates say. The
    interpreter has no limit worth modelling."""
    size = dev.smem_bytes or 227 << 10
    return size * 7 // 8 if tensor_memory(dev) else size


def tensor_memory(dev: Device) -> bool:
    """Whether products of 64 rows or more are summed up in a memory of their own, as on a B200."""
    return 100 <= dev.arch < 120


def sums_fit(dev: Device, rows: int, columns: int) -> bool:
    """Whether there is room for the sums of a tile's products, `columns` of 32 bits side by side. On compute capability
    10.x those of 64 rows or more lie in tensor memory; others are in registers, which kernels count themselves."""
    return rows < 64 or columns <= TENSOR_COLUMNS or not tensor_memory(dev)


def only_registers(dev: Device) -> bool:
    """Whether products read registers only: where there is neither wgmma nor tensor memory."""
    return dev.arch != 90 and not tensor_memory(dev)


def stage_order(dev: Device, *stages: int) -> tuple[tuple[int, ...], ...]:
    """Counts of pipeline stages in the order to try, one stage last: those of a tuple size by size. Where products read
    registers only, one stage is the last choice of all: what it loads is in registers all the while, and spills."""
    return (stages[:-1], stages[-1:]) if only_registers(dev) else (stages,)


def unit(*tensors: torch.Tensor) -> int:
    """How many elements 16 bytes are, if every row of every tensor starts on 16 bytes, else 1.

    Strides are passed in this unit: the compiler then knows of rows on 16 bytes that are no multiple of 16 elements.
    """
    n, strides, off = 16 // tensors[0].element_size(), list[int](), 0
    for t in tensors:
        strides += t.stride()[:3]
        off |= 0 if t.is_meta else t.data_ptr() % 16
    for stride in strides:
        off = off or stride % n
    return 1 if off else n


def strides(t: torch.Tensor, per: int = 1) -> tuple[int, int, int]:
    """Batch, head and row stride of a (b, s, h, d) tensor, in units of `per` elements."""
    b, s, h, _ = t.stride()
    return b // per, h // per, s // per


def prescaled(p: Problem) -> bool:
    """Whether scores are scaled before anything is done to them: a factor of the exponential comes too late."""
    return p.program.score is not None or p.softmax_scale <= 0


def factor(p: Problem, scale: float) -> float:
    """What scores are multiplied with in the exponent of 2."""
    return LOG2_E if prescaled(p) else scale * LOG2_E


def common(plan: Plan, x: Operands) -> dict[str, Any]:
    """Arguments that every attention kernel takes by the same name."""
    from sartor.kernels.triton import codegen, dropout

    p, mods = plan.problem, codegen.build(plan.problem.program)
    return {
        "aux": codegen.aux_arguments(x.aux, p.program),
        "batch": p.batch,
        "heads_q": p.heads_q,
        "group": p.group,
        "seqlen_q": p.seqlen_q,
        "seqlen_kv": p.seqlen_kv,
        "scale": p.softmax_scale,
        "factor": factor(p, p.softmax_scale),
        "KEEP": mods.keep,
        "SCORE": mods.score,
        "PRESCALE": prescaled(p),
        "PRECISION": p.precision if p.dtype == torch.float32 else "ieee",
        "dropout": dropout.argument(p, x),
        "DROPOUT": p.dropout_numbers if p.dropout_numbers > 1 else p.dropout_p > 0,
    }


class Launch(NamedTuple):
    """One kernel launch: `arguments` in the order of the kernel's signature."""

    name: str
    kernel: Any
    grid: int
    arguments: dict[str, Any]
    tile: Tile

    def changed(self, **arguments: Any) -> Launch:
        """The same launch with some arguments changed."""
        return self._replace(arguments=self.arguments | arguments)

    def over_marked(self, dev: Device, name: str, **arguments: Any) -> Launch:
        """The same kernel over the marked tiles: a few programs, which mostly find no mark."""
        grid = min(self.grid, 2 * (dev.sm_count or 1))
        return Launch(
            f"{self.name} {name}", self.kernel, grid, {**self.arguments, "ONLY_MARKED": True, **arguments}, self.tile
        )

    def repair(self, dev: Device) -> Launch:
        """The NaN repair pass: the tiles that came out non-finite, computed without what the mask hides."""
        return self.over_marked(dev, "repair", REPAIR=True)


class Ready(NamedTuple):
    """A launch as it is repeated: by the driver, or by Triton's launcher with the arguments in their places."""

    name: str
    compiled: Any
    direct: Direct | None
    start: Any  # Triton's launcher
    values: list[Any]
    slots: dict[str, int]

    @classmethod
    def of(cls, step: Launch, compiled: Any, direct: Direct | None) -> Ready:
        """For a launch whose kernel is compiled."""
        slots = {name: i for i, name in enumerate(step.arguments)}
        kept = [_kept(x) for x in step.arguments.values()]
        return cls(step.name, compiled, direct, compiled[(step.grid, 1, 1)], kept, slots)

    def repeat(self, changed: Mapping[str, Any]) -> None:
        """By Triton's launcher, which takes addresses as well as tensors."""
        values = self.values.copy()
        for name, value in changed.items():
            if name in self.slots:
                values[self.slots[name]] = value
        self.start(*values)


def run(steps: Iterable[Launch], cache: dict[object, Any], key: object = None) -> None:
    """Launch on the current stream, compiling what is not compiled; the launches are kept for `repeat`.

    A cache belongs to one call key, which holds what Triton specialises on, so one compiled kernel serves it; `key`
    adds what varies besides (the layout of dout).
    """
    if interpreted():
        for step in steps:
            if step.grid:
                step.kernel[(step.grid,)](**step.arguments)
        return
    wanted = [step for step in steps if step.grid]
    kinds = [specialised(step) for step in wanted]
    compile_together([step for step, kind in zip(wanted, kinds, strict=True) if kind not in _COMPILED])
    cache["ready", key] = tuple(map(_first, wanted, kinds))


def compile_together(steps: Sequence[Launch]) -> None:
    """Have Triton compile these side by side: most of the time is its assembler's, a process of its own for each."""
    if len(steps) < 2:
        return
    import triton

    # what does not compile says so at its own launch: an error here would leave the mode on for every later call
    with ThreadPoolExecutor(len(steps)) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        for step in steps:
            step.kernel.warmup(*step.arguments.values(), grid=(step.grid,), **compile_options(step.tile))


INTEGERS = frozenset({int, Symbol})
_COMPILED = Recent(1024)  # by `specialised`: the compiled kernel, and a launch of it, if the driver may start it


def known(steps: Sequence[Launch]) -> list[Direct] | None:
    """The launches for the driver to make, where all kernels were compiled before; else None."""
    found = []
    for step in steps:
        one = _COMPILED.get(specialised(step), NOTHING)[1]
        if one is None:
            return None
        found.append(one.like(step.arguments, step.grid))
    return found


def _first(step: Launch, kind: tuple[Any, ...]) -> Ready:
    """The first launch of a key; `kind` is what it is `specialised` to. What was compiled for another, Triton looks up
    in a millisecond: it binds each argument anew. Here the driver starts it if it is the same kernel."""
    compiled, one = _COMPILED.get(kind, NOTHING)
    if one is not None and not direct.hooked():
        found = one.like(step.arguments, step.grid)
        found.start(step.arguments, direct.current_stream())
        return Ready.of(step, compiled, found)
    compiled = _by_triton(step)
    serves = Direct.serves(compiled, step.arguments, version())
    found = Direct.of(compiled, step.arguments, step.grid) if serves else None
    _COMPILED.add(kind, (compiled, found))
    return Ready.of(step, compiled, found)


def _by_triton(step: Launch) -> Any:
    """Launch by Triton, which gives back what it compiled or found."""
    return step.kernel[(step.grid,)](**step.arguments, **compile_options(step.tile))


def specialised(step: Launch) -> tuple[Any, ...]:
    """What Triton compiles a kernel for, and at least that: equal launches take one compiled kernel of a device."""
    given = zip(step.arguments.values(), step.kernel.params, strict=True)
    kinds = [x if p.is_constexpr else _wide(x) if p.do_not_specialize else _kind(x) for x, p in given]
    return torch._C._cuda_getDevice(), step.kernel, step.tile.warps, step.tile.stages, *kinds


def _wide(value: Any) -> int:
    """Which type an integer has: 32 bits, 64, or 64 without a sign."""
    return 32 if -(2**31) <= value < 2**31 else 64 if value < 2**63 else 0


def _kind(value: Any) -> Any:
    """Of an argument: integers are told apart by 1, multiples of 16 and their width, tensors by dtype and alignment."""
    if value.__class__ is tuple:  # of strides above all
        return tuple([
            (x == 1, x % 16 == 0, 32) if x.__class__ in INTEGERS and -(2**31) <= x < 2**31 else _kind(x) for x in value
        ])  # fmt: skip
    if isinstance(value, (torch.Tensor, SymbolicTensor)):
        return value.dtype, value.data_ptr() % 16 == 0
    if value.__class__ in INTEGERS:
        return value == 1, value % 16 == 0, _wide(value)
    return value.__class__


def direct_ones(cache: dict[object, Any], key: object) -> list[Direct] | None:
    """What `run` kept for a key, where the driver starts all of it."""
    found = [step.direct for step in cache.get(("ready", key), ())]
    return None if None in found else found


def _kept(value: Any) -> Any:
    """An argument as it waits for the next call, which brings tensors of its own: kept ones would stay allocated."""
    if isinstance(value, torch.Tensor):
        return None
    return tuple(map(_kept, value)) if isinstance(value, tuple) else value


def repeat(
    changed: Mapping[str, Any], cache: dict[object, Any], key: object = None, own: Mapping[str, dict[str, Any]] = EMPTY
) -> bool:
    """Launch as `run` did for this key, with other tensors; False when it did not yet.

    `changed` holds tensors, or their addresses, by the names of arguments; numbers are the same in every launch. `own`
    holds those of single launches, by the launch's name; they come before those that all share.
    """
    ready = cache.get(("ready", key))
    if ready is None:
        return False
    stream = None if direct.hooked() else direct.current_stream()
    for step in ready:
        arguments = {**changed, **own[step.name]} if step.name in own else changed
        if step.direct is None or stream is None:
            step.repeat(arguments)
        else:
            step.direct.start(arguments, stream)
    return True


def own(tensors: dict[str, torch.Tensor], pairs: dict[str, Any], *steps: str) -> dict[str, dict[str, Any]]:
    """For `repeat`: what the splits of `tensors` take, and the launches on pairs, named `steps`; see split.py."""
    if not pairs:
        return {}
    found = {
        f"split {name}": {"x_ptr": tensors[name], "pairs_ptr": pair.data, "units_ptr": pair.units}
        for name, pair in pairs.items()
    }
    halves = {f"{name}_ptr": pair.data for name, pair in pairs.items()}
    return found | dict.fromkeys(steps, halves | {"units": tuple(pair.units for pair in pairs.values())})


def key(saved: Saved) -> tuple[Any, ...]:
    """What the launches of a backward depend on besides the plan's problem: how the tensors of `saved` lie."""
    out, lse, dout, dlse = saved
    at = out.data_ptr(), lse.data_ptr(), dout.data_ptr(), 0 if dlse is None else dlse.data_ptr()
    off = (at[0] | at[1] | at[2] | at[3]) & 15
    return out.stride(), dout.stride(), dout.dtype, dlse is None, off and tuple([address & 15 for address in at])


def compile_options(tile: Tile) -> dict[str, Any]:
    """Triton's compile options. Fusing a*b+c is said aloud because Triton 3.10 changes its default."""
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}


def in_order(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments in the order of the kernel's signature, which the direct launch needs; extra ones are an error."""
    missing = set(kernel.arg_names) ^ set(arguments)
    if missing:
        raise TypeError(f"{kernel.__name__} and its launcher disagree on {sorted(missing)}")
    return {name: arguments[name] for name in kernel.arg_names}
