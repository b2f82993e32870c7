"""What is rehearsed without a GPU is what a GPU is given: the same machine code, grids and shared memory."""

import pytest
import torch

import judged
from sartor import nvrtc
from sartor.device import Device
from sartor.kernels.cuda.row import Row
from sartor.kernels.triton import launch
from sartor.lab.measure import providers
from sartor.lab.measure.machine_code import code_hash
from sartor.lab.measure.planned import planned
from sartor.lab.measure.rehearsal import launches
from sartor.lab.workloads.workload import Inputs, Workload
from sartor.problem import Call

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
CASES = [
    ("auto", Workload(2, 4, 2, 512, 512, 128, 128, "bfloat16", "causal", "fwd")),
    ("auto", Workload(2, 4, 2, 512, 512, 64, 64, "bfloat16", "full", "fwd_bwd")),
    ("auto", Workload(1, 4, 4, 384, 384, 64, 64, "float32", "document3", "fwd")),
    ("triton", Workload(1, 4, 2, 300, 333, 72, 72, "float16", "causal+softcap30", "fwd_bwd")),
]


def of_case(kernel, w):
    about = judged.by(getattr(torch, w.dtype), kernel, w.dim)
    return pytest.param(kernel, w, marks=pytest.mark.judges(*about), id=f"{kernel}-{w}".replace(" ", "-"))


@pytest.mark.parametrize(("kernel", "w"), [of_case(*case) for case in CASES])
def test_what_is_rehearsed_is_what_is_launched(kernel: str, w: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    empty = Inputs.without_data(w)
    name = "sartor" if kernel == "auto" else f"sartor:{kernel}"
    call = Call(empty.q, empty.k, empty.v, kernel=kernel, **providers.options(w, empty))
    wanted = launches(call, *planned(name, w, empty, Device.of(device)), w.mode)

    seen: list[tuple] = []
    start, start_row, run = nvrtc.Kernel.launch, Row.start, launch.run

    def cuda(self, grid, values, stream=None):
        size = (grid, 1, 1) if isinstance(grid, int) else grid
        seen.append((code_hash(self.binary.cubin, self.name), size, self.block, self.shared))
        start(self, grid, values, stream)

    def row(self, values):
        for kernel, grid, _ in self.named(values):
            seen.append((code_hash(kernel.binary.cubin, kernel.name), (grid, 1, 1), kernel.block, kernel.shared))
        start_row(self, values)

    def triton(steps, cache, key=None):
        steps = list(steps)
        run(steps, cache, key)
        for step in steps:
            if step.grid:
                made = step.kernel[(step.grid,)](**step.arguments, **launch.compile_options(step.tile))
                facts = made.metadata
                code = code_hash(made.asm["cubin"], facts.name)
                seen.append((code, (step.grid, 1, 1), 32 * facts.num_warps, facts.shared))

    monkeypatch.setattr(nvrtc.Kernel, "launch", cuda)
    monkeypatch.setattr(Row, "start", row)
    monkeypatch.setattr(launch, "known", lambda steps: None)
    monkeypatch.setattr(launch, "run", triton)
    x = Inputs.make(w, device)
    providers.runner(providers.get(name).make(w, x), w, x)()
    torch.cuda.synchronize()
    assert seen == [(one.code, one.grid, one.block, one.shared) for one in wanted]
