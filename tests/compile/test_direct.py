"""Triton's kernels launched by the driver: the arguments in memory are those that the compiled kernels take."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from samples import sample
from sartor import kernels, mods
from sartor.device import ARCHITECTURES
from sartor.kernels.spec import Operands, Plan, Saved
from sartor.kernels.triton import launch
from sartor.problem import Call, Problem, aux_values

if not launch.available() or launch.interpreted():
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from triton import knobs

from sartor import direct
from sartor.kernels.triton.lower import compiled_for

KINDS = {"P": ctypes.c_uint64, "i": ctypes.c_int32, "q": ctypes.c_int64, "f": ctypes.c_float}
SLOPES = torch.empty(4, dtype=torch.float32, device="meta")
CASES = [
    ("triton_backward", torch.bfloat16, {"causal": True, "window": (300, 0)}),
    ("triton_backward", torch.float16, {"alibi_slopes": SLOPES, "softcap": 30.0}),
    ("fp32_backward", torch.float32, {"causal": True}),
    ("triton_forward", torch.bfloat16, {"mask": mods.document(torch.empty(2, 100, dtype=torch.int64, device="meta"))}),
]


def meta(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def steps_of(name, dtype, options):
    """The launches of one call."""
    q, spec = meta(2, 100, 4, 72, dtype=dtype), kernels.load(name)
    call = Call(q, q, q, **options)
    p, device = Problem.of(call), ARCHITECTURES[90]
    plan = Plan(spec, p, device, next(iter(spec.tiles(p, device))), "test")
    x, lse = Operands(q, q, q, aux=aux_values(call)), meta(2, 4, 100, dtype=torch.float32)
    if name.endswith("forward"):
        return spec.launches(plan, x, q, lse)
    saved = Saved(q, lse, q, lse)
    return spec.launches(plan, x, saved, spec.workspace(p, x, saved))


def flat(value):
    """What an argument holds, tuples taken apart."""
    return [x for part in value for x in flat(part)] if isinstance(value, tuple) else [value]


@pytest.mark.parametrize(
    ("name", "dtype", "options"), sample(CASES, lambda case: torch.bfloat16 in case), ids=lambda x: str(x)[:30]
)
def test_frames(name, dtype, options):
    """Each parameter in the PTX has its value in the frame, pointers those of the call: numbers by their own type."""
    for step in steps_of(name, dtype, options):
        compiled = compiled_for(step.kernel, step.arguments, step.tile, 90)
        assert direct.Direct.serves(compiled, step.arguments, launch.version()), step.name
        found = direct.Direct.of(compiled, step.arguments, 7)
        tensors = [x for value in step.arguments.values() for x in flat(value) if isinstance(x, torch.Tensor)]
        address = {id(t): 2**40 + 16 * i for i, t in enumerate(tensors)}

        def places(value, address=address):
            if isinstance(value, torch.Tensor):
                return address[id(value)]
            return tuple(map(places, value)) if isinstance(value, tuple) else value

        own = found.step
        assert (own.grid, own.block, own.shared) == ((7, 1, 1), 32 * step.tile.warps, compiled.metadata.shared)
        frame = direct.driver.Frame([own])
        frame.write(found.addresses({name: places(value) for name, value in step.arguments.items()}))
        kept = [KINDS[c].from_address(at).value for c, at in zip(own.letters, frame.pointers[0], strict=True)]
        assert [direct.driver.size(c) for c in own.letters] == direct.parameters(compiled.asm["ptx"])
        wanted = [
            leaf.value
            for name, kind in compiled.src.signature.items()
            for leaf in direct.leaves(kind, places(step.arguments[name]), name)
        ]
        assert kept[:-2] == [pytest.approx(x, rel=1e-6) for x in wanted]
        assert kept[-2:] == [0, 0]  # scratch


def compiled_like(**changes):
    """A compiled kernel of two pointers and a float, with something about it changed."""
    facts = {"num_warps": 4, "num_ctas": 1, "shared": 0, "name": "f", "global_scratch_size": 0} | changes
    ptx = ".visible .entry f(\n .param .u64 .ptr .global .align 16 f_0,\n .param .f32 f_1,\n" + ",\n".join(
        f" .param .u64 .ptr .global .align 1 f_{i}" for i in range(2, facts.pop("parameters", 4))
    )
    signature = facts.pop("signature", {"x_ptr": "*bf16", "scale": "fp32", "N": "constexpr"})
    return SimpleNamespace(
        metadata=SimpleNamespace(**facts),
        asm={"ptx": ptx + "\n)"},
        src=SimpleNamespace(signature=signature),
        function=1,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": 3}, {"parameters": 5}, {"global_scratch_size": 4}, {"profile_scratch_size": 4}, {"num_ctas": 2},
        {"launch_pdl": True}, {"launch_cooperative_grid": True}, {"cluster_dims": (2, 1, 1)},
        {"signature": {"x_ptr": "*bf16", "scale": "fp64", "N": "constexpr"}},
        {"signature": {"x_ptr": "*bf16", "other": "fp32", "N": "constexpr"}},
    ],
    ids=str,
)  # fmt: skip
def test_what_triton_launches(changes):
    """Whatever is not as we know it."""
    arguments = {"x_ptr": 2**40, "scale": 1e300, "N": 3}
    assert direct.Direct.serves(compiled_like(), arguments, (3, 6))
    found = direct.Direct.of(compiled_like(), arguments, 1)
    assert found.step.fixed[1] == float("inf")  # as Triton's launcher rounds it
    assert not direct.Direct.serves(compiled_like(**changes), arguments, (3, 6))
    for version in ((3, 4), (3, 8), (4, 0)):
        assert not direct.Direct.serves(compiled_like(), arguments, version)


def ready(calls):
    """A launch that says by whom it was repeated, and with what."""

    def start(*values):
        calls.append(("triton", *values))

    own = SimpleNamespace(start=lambda arguments, stream: calls.append(("driver", stream, arguments["x_ptr"])))
    return launch.Ready("step", None, own, start, [None, (0, 5), 3], {"x_ptr": 0, "aux": 1, "n": 2})


def test_hooks_hear_of_launches(monkeypatch):
    """Who listens to Triton's launches hears of these: they are Triton's then."""
    monkeypatch.setattr(direct, "current_stream", lambda: 11)
    calls: list = []
    cache = {("ready", None): (ready(calls), ready(calls)._replace(direct=None))}
    assert not launch.repeat({}, cache, "another key")
    assert launch.repeat({"x_ptr": 64}, cache)
    assert calls == [("driver", 11, 64), ("triton", 64, (0, 5), 3)]
    calls.clear()
    hook = calls.append
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert launch.repeat({"x_ptr": 64, "aux": (8, 5)}, cache, own={"step": {"x_ptr": 80}})
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert calls == 2 * [("triton", 80, (8, 5), 3)]
