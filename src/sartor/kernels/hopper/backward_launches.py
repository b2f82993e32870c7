"""The launches of the Hopper backward of float16 and bfloat16: what each takes, and a call's in one row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch

from sartor import direct, nvrtc
from sartor.direct import Direct
from sartor.kernels import blocks, dropout
from sartor.kernels.algebra import sink_gradient
from sartor.kernels.blocks import Blocks
from sartor.kernels.cuda import expressions, host
from sartor.kernels.cuda.params import Params, of_lengths, of_strides
from sartor.kernels.cuda.row import Part, Row
from sartor.kernels.hopper.backward_config import (
    HIGHEST,
    ORDER,
    PREPROCESS,
    ROUND,
    ROUND_PARTS,
    SLICE,
    Config,
    room,
)
from sartor.kernels.hopper.backward_problem import change, dadded, listed, near, parts, reads_sinks
from sartor.kernels.room import Room
from sartor.kernels.spec import Gradients, Operands, Plan, Saved
from sartor.kernels.triton import launch
from sartor.kernels.triton.backward import dense_like, heads, padded_rows, rows
from sartor.problem import Problem, is_copied, rows_on_16_bytes, without_gaps
from sartor.replay.lists import At, Made, Mapped
from sartor.symbols import empty_like

if TYPE_CHECKING:
    from typing_extensions import Self

if launch.available():
    from sartor.kernels.triton import codegen
    from sartor.kernels.triton import dropout as random

Tensor = torch.Tensor
MAPPED = ("held_x", "held_y", "x", "y")  # parameters
CALL = ("q", "k", "v", "dout", "out", "lse", "dlse", "dq", "dk", "dv")  # addresses that come first, in this order


@dataclass
class Step:
    """One launch: a kernel, and by the names of its parameters the tensors that they are of; of some these are maps."""

    kernel: nvrtc.Kernel
    grid: int
    tensors: dict[str, str]
    maps: dict[str, nvrtc.TensorMaps] = field(default_factory=dict)

    @classmethod
    def preprocess(
        cls, m: Config, binary: nvrtc.Binary, out: torch.Tensor, dout: torch.Tensor, params: Params = PREPROCESS
    ) -> Step:
        """delta, lse in the log2 domain, and zeros to add dq and claims to."""
        p, names = m.p, [name for name, kind in params.types.items() if "*" in kind]
        rows = m.block if m.fused else 64
        grid = p.batch * p.heads_q * -(-p.seqlen_q // rows) * (rows // 64)
        fixed = of_strides("out", launch.strides(out)) | of_strides("dout", launch.strides(dout))
        fixed |= {"heads_q": p.heads_q, "seqlen_q": p.seqlen_q}
        return cls(nvrtc.Kernel(binary, params, 128, fixed=fixed), grid, {name: name for name in names})

    @classmethod
    def order(cls, m: Config, binary: nvrtc.Binary, aux: tuple[Any, ...]) -> Step:
        """Of the blocks of a sweep, the longest first."""
        fixed, reads = expressions.split(aux, m.p.program)
        fixed |= of_lengths(m.p) | {"batch": m.p.batch}
        params = expressions.passed(ORDER, m.p.program)
        return cls(nvrtc.Kernel(binary, params, 1024, fixed=fixed), 1, {"order": "order"} | reads)

    @classmethod
    def highest(cls, p: Problem, binary: nvrtc.Binary, x: Operands) -> Step:
        """Of what the weights of rows are relative to, where scores may bury them."""
        fixed, reads = expressions.split(x.aux, p.program)
        fixed |= of_lengths(p) | {"total": padded_rows(p), "scale": p.softmax_scale}
        fixed |= of_strides("q", launch.strides(x.q)) | of_strides("k", launch.strides(x.k))
        fixed |= {} if p.sinks else {"sinks": 0}
        reads |= {name: name for name in ("q", "k", "lse", "gain", "log2_sum", *["sinks"] * p.sinks)}
        grid = p.batch * p.heads_q * -(-p.seqlen_q // 64)
        return cls(nvrtc.Kernel(binary, expressions.passed(HIGHEST, p.program), 128, fixed=fixed), grid, reads)

    @classmethod
    def sweep(
        cls, m: Config, binary: nvrtc.Binary, tensors: dict[str, torch.Tensor], aux: tuple[Any, ...], sms: int,
        found: Blocks | None = None,
    ) -> Step:  # fmt: skip
        """The kernel of a config; `tensors` are like q, k, v, dout and the gradients; `found` is the list it walks."""
        p, (dx, dy) = m.p, m.outputs
        fixed, reads = expressions.split(aux, p.program)
        fixed |= of_lengths(p)
        fixed |= {"factor": launch.LOG2_E * (1 if change(p) else p.softmax_scale), "scale": p.softmax_scale}
        fixed |= dropout.numbers(p.dropout_p) if p.dropout_p else {}
        fixed |= {"blocks": p.batch * m.blocks} if m.ordered else {}
        fixed |= {"rows": padded_rows(p)} if p.program.buries else {}
        fixed |= {} if found is None else found.arguments
        params = expressions.passed(m.kernels[0], p.program)
        heads, shared = p.batch * (p.heads_kv if m.keys else p.heads_q), parts(p)
        grid = heads * m.blocks
        mapped = dict(zip(MAPPED, ("k", "v", "q", "dout") if m.keys else ("q", "dout", "k", "v"), strict=True))
        mapped |= {"dx": dx, "dy": dy}
        rows = dict(zip(MAPPED, (64, 64, m.block, m.block), strict=True))  # a box; of gradients a warp's
        fixed |= {"total": grid} if m.claims else {}
        others = {
            name: name for name, there in (("order", m.ordered), ("claimed", m.claims), ("seed", p.dropout_p)) if there
        }
        others |= {
            "lse": "lse_log2", "delta": "delta",
            "marks": "bad_kv" if m.keys else "bad_q", "sums": "sums",
        }  # fmt: skip
        maps = {at: host.maps(tensors[name], (rows.get(at, 16), 1), m.width) for at, name in mapped.items()}
        if p.program.buries:
            others |= {"gain": "gain", "lse": "log2_sum"}
        fixed |= m.sections(heads * shared, sms) if m.sectioned else {}
        if shared > 1:
            others, fixed, grid = others | {"partial": "partial"}, fixed | {"parts": shared}, grid * shared
        if m.hides is not None:
            others["seen"], (maps["seen"], own) = (
                f"a{m.hides}",
                host.pair_maps(aux[m.hides], 32, 2 * 64, swizzled=False),
            )
            fixed |= {f"seen_{name}": times for name, times in own.items()}
        if m.added is not None:
            others["added"], (maps["added"], own) = f"a{m.added}", host.pair_maps(aux[m.added], m.block)
            fixed |= own
        if dadded(p) == 1:
            others["dadded"], (maps["dadded"], _) = "dbias", host.pair_maps(tensors["dbias"], m.block)
        elif dadded(p) == 2:
            maps["dsums"], own = host.pair_maps(tensors["dbias"], SLICE, 2 * 64, swizzled=False)
            others["dsums"] = "dbias"
            fixed |= {f"dsums_{name}": times for name, times in own.items()}
        kernel = nvrtc.Kernel(binary, params, 32 * m.warps, m.shared_bytes, fixed)
        return cls(kernel, min(grid, sms) if m.persistent else grid, mapped | others | reads, maps)

    @classmethod
    def round(cls, p: Problem, binary: nvrtc.Binary, dq: torch.Tensor) -> Step:
        """Of dq, after a sweep that adds it up."""
        fixed = of_strides("dq", launch.strides(dq)) | {
            "heads_q": p.heads_q,
            "seqlen_q": p.seqlen_q,
            "scale": p.softmax_scale * (dropout.scale(p.dropout_p) if p.dropout_p else 1),
        }
        grid = p.batch * p.heads_q * -(-p.seqlen_q // 64)
        return cls(nvrtc.Kernel(binary, ROUND, 128, fixed=fixed), grid, {"sums": "sums", "dq": "dq", "marks": "bad_q"})

    @classmethod
    def round_parts(cls, p: Problem, binary: nvrtc.Binary, dk: torch.Tensor, dv: torch.Tensor) -> Step:
        """Of dk and dv, where several blocks make them."""
        fixed = of_strides("dk", launch.strides(dk)) | of_strides("dv", launch.strides(dv))
        fixed |= {"heads_kv": p.heads_kv, "seqlen_kv": p.seqlen_kv, "parts": parts(p)}
        grid = p.batch * p.heads_kv * -(-p.seqlen_kv // 64)
        names = {"partial": "partial", "dk": "dk", "dv": "dv", "marks": "bad_kv"}
        return cls(nvrtc.Kernel(binary, ROUND_PARTS, 128, fixed=fixed | {"scale": p.softmax_scale}), grid, names)

    def part(self, number: int) -> Part:
        """As one of several launches, of which it is that one: maps have a name of their own."""
        takes = self.tensors | {at: f"{at} of {number}" for at in self.maps} if self.maps else self.tensors
        return Part(self.kernel, self.grid, takes)


def block_list(p: Problem, x: Operands) -> Blocks | None:
    """The list of query tiles that one sweep walks, if there is to be one."""
    if not listed(p):
        return None
    (m,) = Config.all(p)
    return blocks.of(p, x.aux, blocks.Cut(True, m.block, m.groups), x.q.device)


def _steps(p: Problem, x: Operands, saved: Saved, sms: int) -> list[Step]:
    """The launches but for those of Triton, for operands as kernels read them."""
    found = block_list(p, x)
    tensors = {"q": x.q, "k": x.k, "v": x.v, "dout": saved.dout}
    tensors |= {"dq": like_gradient(x.q), "dk": like_gradient(x.k), "dv": like_gradient(x.v)}
    tensors |= {} if p.bias_shape is None else {"dbias": empty_bias(p, torch.device("meta"))}
    steps: list[Step] = []
    for m in (replace(m, listed=True) if found is not None else m for m in Config.all(p)):
        binary = m.compile()
        if not steps:
            steps.append(Step.preprocess(m, binary, saved.out, saved.dout, m.kernels[1]))
        if m.ordered:
            steps.append(Step.order(m, binary, x.aux))
        if len(steps) == 1 + m.ordered and p.program.buries:
            steps.append(Step.highest(p, binary, x))
        steps.append(Step.sweep(m, binary, tensors, x.aux, sms, found))
        if m.fused:
            steps.append(Step.round(p, binary, tensors["dq"]))
        if parts(p) > 1:
            steps.append(Step.round_parts(p, binary, tensors["dk"], tensors["dv"]))
    return steps


def like_gradient(t: torch.Tensor) -> torch.Tensor:
    """A tensor that lies as the gradient of t will: t itself, but for strides that nothing is multiplied with."""
    return t if without_gaps(t) and 1 not in t.shape else dense_like(t)


def empty_bias(p: Problem, device: torch.device) -> torch.Tensor:
    """Room for the gradient of a bias, in rows of a multiple of 8 keys: zeros where not all of it is stored."""
    assert p.bias_shape is not None
    shape, whole = (*p.bias_shape[:3], -(-p.bias_shape[3] // 8) * 8), dadded(p) == 1 and p.program.keep is None
    make = torch.empty if whole else torch.zeros
    return make(shape, dtype=p.dtype if dadded(p) == 1 else torch.float32, device=device)[..., : p.bias_shape[3]]


@dataclass
class Ready:
    """The launches of one call key: what is the same in every call."""

    problem: Problem
    key: object  # under which the plan keeps the launches of Triton
    room: Room
    space: torch.Tensor  # one number, expanded to all that is in the room: `empty_like` parses less than `empty`
    row: Row  # takes what CALL says, the room, tensors among aux
    tensors: bool  # whether there are tensors among the aux values
    near: tuple[int, ...]  # those that one sweep reads for every pair
    untidy: tuple[bool, bool]  # whether dout and out are copied
    dense: bool  # whether gradients are what `empty_like` makes of q, k and v
    whole: Row | None = None  # with the launches of Triton, where the driver can make these
    asked: bool = False  # whether it was looked for before the first call

    @classmethod
    def of(cls, p: Problem, x: Operands, saved: Saved, key: object, sms: int) -> Self:
        """Everything that the launches of a plan need."""
        dout, out, x = tidy(p, saved.dout), tidy_out(saved.out), host.unexpanded(x, near(p))
        steps, space = _steps(p, x, saved._replace(dout=dout, out=out), sms), room(p)
        return cls.made(p, key, space, steps, x, (dout is not saved.dout, out is not saved.out))

    @classmethod
    def made(
        cls, p: Problem, key: object, space: Room, steps: list[Step], x: Operands, untidy: tuple[bool, bool]
    ) -> Self:  # fmt: skip
        """Of these launches."""
        tensors = expressions.of_tensors(x.aux)
        names = [
            *CALL,
            *["sinks"] * reads_sinks(p),
            *["dbias"] * (p.bias_shape is not None),
            "room",
            *([] if x.seed is None else ["seed"]),
            *tensors,
        ]
        places = {name: i for i, name in enumerate(names)}
        made: dict[str, Made] = {name: At(places["room"], offset) for name, offset in space.places.items()}
        for i, step in enumerate(steps):
            for at, maps in step.maps.items():
                made[f"{at} of {i}"] = Mapped(places[step.tensors[at]], maps)
        dense = all(without_gaps(t) or empty_like(t).stride(3) == 1 for t in (x.q, x.k, x.v))
        row = Row(names, made, [s.part(i) for i, s in enumerate(steps)])
        return cls(p, key, space, host.like((space.length,), x.q.device), row, bool(tensors), near(p), untidy, dense)

    def run(self, plan: Plan, x: Operands, saved: Saved) -> Gradients:
        """The launches of one call, on the current stream."""
        out, lse, dout, dlse = self.tidied(saved)
        x = host.unexpanded(x, self.near) if self.near else x
        q, k, v, new = x.q, x.k, x.v, torch.empty_like if self.dense else dense_like
        room, dq, dk, dv = torch.empty_like(self.space), new(q), new(k), new(v)  # calls may overlap: each has its room
        values = [
            q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr(), out.data_ptr(), lse.data_ptr(),
            0 if dlse is None else dlse.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        ]  # fmt: skip
        if x.sinks is not None and reads_sinks(self.problem):
            values.append(x.sinks.data_ptr())
        dbias = None if self.problem.bias_shape is None else empty_bias(self.problem, q.device)
        if dbias is not None:
            values.append(dbias.data_ptr())
        values.append(room.data_ptr())
        if x.seed is not None:
            values.append(x.seed.data_ptr())
        if self.tensors:
            values += [t.data_ptr() for t in x.aux if isinstance(t, torch.Tensor)]
        if self.problem.program.keep is None:
            self.row.start(values)
        else:
            saved, made = Saved(out, lse, dout, dlse), {"dq": dq, "dk": dk, "dv": dv, "room": room}
            heard = direct.hooked()
            if not self.asked and not heard:
                self.asked, self.whole = True, self.joined(x, self.known(plan, x, saved, made))
            if self.whole is not None and not heard:
                self.whole.start(values)
            else:
                self.row.start(values)
                self.mend(plan, x, saved, made | ({} if dbias is None else {"dbias": dbias}))
        dbias = None if dbias is None else dbias.contiguous()
        return Gradients(dq, dk, dv, dbias, None if x.sinks is None else self.dsinks(x, lse, room))

    @property
    def alone(self) -> bool:
        """Whether a call takes q, k, v, out, lse and dout as they are and nothing else, and one row of launches."""
        mended = self.problem.program.keep is None or self.whole is not None
        return (
            mended
            and self.dense
            and not any(self.untidy)
            and not self.near
            and self.row.names[: self.row.given] == [*CALL, "room"]
        )

    @property
    def numbers(self) -> tuple[Any, ...]:
        """What `Alone` is made of."""
        return bool((self.whole or self.row).more), *self.space.shape

    def dsinks(self, x: Operands, lse: torch.Tensor, room: torch.Tensor) -> Any:
        """The gradient of sinks."""
        p, delta = self.problem, rows(self.room, room, "delta", self.problem)
        if not p.program.buries:
            return sink_gradient(x, lse, delta)
        gain, high = (heads(t, p) for t in self.room.view(room, "gain").split(padded_rows(p)))
        return sink_gradient(x, high, delta, gain)

    def tidied(self, saved: Saved) -> Saved:
        """With copies of what kernels cannot read as it is."""
        of_dout, of_out = self.untidy
        if of_dout:
            saved = saved._replace(dout=tidy(self.problem, saved.dout))
        if of_out:
            saved = saved._replace(out=tidy_out(saved.out))
        if saved.dlse is not None and not saved.dlse.is_contiguous():
            saved = saved._replace(dlse=saved.dlse.contiguous())
        return saved

    def mend(self, plan: Plan, x: Operands, saved: Saved, made: dict[str, torch.Tensor]) -> None:
        """Compute the tiles again that were marked. `made` are the gradients and the workspace."""
        p, room = self.problem, made["room"]
        tensors = {"q": x.q, "k": x.k, "v": x.v, "sinks": x.sinks, **saved._asdict(), **made}
        changed = {f"{name}_ptr": tensors[name] for name in (*CALL, *["sinks"] * reads_sinks(p))} | {
            f"{name}_ptr": address for name, address in self.room.addresses(room).items()
        }
        if x.seed is not None:
            changed["dropout"] = random.argument(p, x)
        if self.tensors:
            changed["aux"] = codegen.aux_arguments(x.aux, p.program)
        if not launch.repeat(changed, plan.cache, self.key):
            work = made | {"dout": saved.dout}
            work |= {name: rows(self.room, room, name, p) for name in ("delta", "lse_log2")}
            work |= {name: self.room.view(room, name, dtype=torch.int32) for name in ("bad_q", "bad_kv")}
            work |= dict.fromkeys(("gain", "sinks", "dlse"), work["delta"])
            work |= {"gain": self.room.view(room, "gain")} if p.program.buries else {}
            work |= {"sinks": x.sinks} if x.sinks is not None and reads_sinks(p) else {}
            kernel: Any = plan.kernel
            launch.run(kernel.repairs(plan, x, saved, work), plan.cache, self.key)
            self.whole = self.joined(x, launch.direct_ones(plan.cache, self.key))

    def known(self, plan: Plan, x: Operands, saved: Saved, made: dict[str, torch.Tensor]) -> list[Direct] | None:
        """The launches of Triton, where their kernels were compiled for another length; else None. What lies in the
        workspace is all alike to them."""
        room, kernel = made["room"], cast(Any, plan.kernel)
        work = dict.fromkeys(("delta", "lse_log2", "gain", "sinks"), room) | made | {"dout": saved.dout}
        work |= dict.fromkeys(("bad_q", "bad_kv"), room.view(torch.int32))
        work |= {"sinks": x.sinks} if x.sinks is not None and reads_sinks(self.problem) else {}
        return launch.known(kernel.repairs(plan, x, saved, work))

    def joined(self, x: Operands, repairs: list[Direct] | None) -> Row | None:
        """All launches in a row; None where Triton has to launch its own."""
        if not repairs:
            return None
        names = self.row.names
        places: dict[Any, int] = {f"{name}_ptr": i for i, name in enumerate(names)}
        places = dict.fromkeys(("gain_ptr", "sinks_ptr"), places["delta_ptr"]) | places  # where these are not read
        if x.seed is not None:
            places["dropout", 0] = names.index("seed")
        for i, value in enumerate(x.aux):
            if isinstance(value, torch.Tensor):
                places["aux", i, 0] = names.index(f"a{i}")
        given, more = names[: self.row.given], [repair.among(places) for repair in repairs]
        return Row(given, self.row.made, self.row.parts, more)


@dataclass
class Alone:
    """The launches of calls that take q, k, v, out, lse and dout as they are and nothing else, on one device."""

    launches: Any
    device: torch.device
    length: int  # of the room
    mends: bool  # whether some are of Triton's kernels

    @cached_property
    def space(self) -> torch.Tensor:
        """As of `Ready`."""
        return host.like((self.length,), self.device)

    def run(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Any:
        """dq, dk, dv; None where something is off 16 bytes, on another device than the current one, or where somebody
        wants to hear of Triton's launches."""
        new, device = torch.empty_like, self.device
        at = q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr(), out.data_ptr(), lse.data_ptr()
        off = (at[0] | at[1] | at[2] | at[3] | at[4] | at[5]) & 15
        if off or not host.current(device) or (self.mends and direct.hooked()):
            return None
        dq, dk, dv, room = new(q), new(k), new(v), new(self.space)
        values = *at, 0, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), room.data_ptr()
        self.launches.start(values, torch._C._cuda_getCurrentRawStream(device.index))
        return dq, dk, dv


def tidy(p: Problem, dout: torch.Tensor) -> torch.Tensor:
    """dout as the copy engine wants it: the inputs' dtype, rows on 16 bytes, none twice. Itself, or a copy."""
    dout = dout.to(p.dtype)
    rows = all(dout.stride(i) % 8 == 0 and dout.stride(i) for i in range(3) if dout.shape[i] > 1)
    fine = rows and dout.data_ptr() % 16 == 0 and not is_copied(dout)
    return dout if fine else dout.clone(memory_format=torch.contiguous_format)


def tidy_out(out: torch.Tensor) -> torch.Tensor:
    """out with rows on 16 bytes: itself, or a copy."""
    return out if rows_on_16_bytes(out) and not is_copied(out) else out.clone(memory_format=torch.contiguous_format)
