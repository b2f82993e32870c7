"""Settings that users run attention in, and calls to run in each: the same values are wanted as without it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sartor
from sartor import mods, testing

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Results = tuple[torch.Tensor, ...]
LENGTH, HEADS = 96, 4


def calls(device: str) -> dict[str, Call]:
    """By name, attention of q, k and v (2, LENGTH, HEADS, dim)."""
    keep = torch.arange(LENGTH, device=device) % 7 != 3
    ids = (torch.arange(LENGTH, device=device) // 40)[None]
    document = mods.causal() & mods.document(ids)
    softened = mods.Score(lambda s, b, h, q, kv, aux: mods.maximum(s, 0.3) - abs(q - kv) / 3 * 0.1)
    seed = torch.tensor([2**40 + 3], device=device)
    cu = torch.tensor([0, 5, 45, 2 * LENGTH - 7], dtype=torch.int32, device=device)
    filled = torch.tensor([LENGTH, 17], dtype=torch.int32, device=device)

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        flat = (t.reshape(-1, HEADS, t.shape[-1]) for t in (q, k, v))
        return sartor.flash_attn_varlen_func(*flat, cu, cu, LENGTH, LENGTH, causal=True)

    def cached(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sartor.flash_attn_with_kvcache(q[:, :3], k, v, cache_seqlens=filled, causal=True)

    return {
        "full": lambda q, k, v: sartor.attention(q, k, v),
        "causal": lambda q, k, v: sartor.attention(q, k, v, causal=True),
        "mask": lambda q, k, v: sartor.attention(q, k, v, mask=keep),
        "document": lambda q, k, v: sartor.attention(q, k, v, mask=document),
        "score": lambda q, k, v: sartor.attention(q, k, v, score=softened, softcap=20.0),
        "dropout": lambda q, k, v: sartor.attention(q, k, v, causal=True, dropout_p=0.2, dropout_seed=seed),
        "sdpa": lambda q, k, v: sartor.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True
        ).transpose(1, 2),
        "packed": packed,
        "cached": cached,
    }


def inputs(device: str, dtype: torch.dtype, dim: int = 64) -> Results:
    """q, k, v and a gradient that arrives, leaves that require gradients."""
    q, k, v = testing.make_inputs(2, HEADS, HEADS, LENGTH, LENGTH, dim, None, dtype, layout="bshd", device=device)
    return tuple(t.detach().requires_grad_() for t in (q, k, v))


def results(call: Call, leaves: Results) -> Results:
    """out, dq, dk, dv; the gradient that arrives is the output itself."""
    out = call(*leaves)
    gradients = torch.autograd.grad(out, leaves, out.detach().clone()) if out.requires_grad else ()
    return (out.detach(), *gradients)


def same(found: Results, want: Results) -> bool:
    """Whether they agree as two orders of the same sums do; NaN is never right."""
    for x, y in zip(found, want, strict=True):
        scale = 2 * torch.finfo(y.dtype).eps * max(1.0, float(y.abs().max()))
        if x.dtype != y.dtype or x.shape != y.shape or not float((x.double() - y.double()).abs().max()) <= 4 * scale:
            return False
    return True


@contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def moved(t: torch.Tensor) -> torch.Tensor:
    """An equal copy two bytes off what it was, in memory order (dims reversed), as a hook may keep it."""
    order = tuple(reversed(range(t.dim())))
    dense = t.detach().permute(order).contiguous().permute(order)
    room = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:]
    return room.as_strided(t.shape, dense.stride()).copy_(t)


def shifted(t: torch.Tensor) -> torch.Tensor:
    """An equal copy off 16 bytes, dense and in the same order of dims."""
    room = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:]
    return room.view(t.shape).copy_(t)


def hooked(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Any:
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def within(*contexts: Callable[[], Any]) -> Callable[[Call, Results], Results]:
    """A setting that is a context."""

    def run(call: Call, leaves: Results) -> Results:
        for make in contexts:
            with make():
                found = results(call, leaves)
        return found

    return run


def checkpointed(reentrant: bool) -> Callable[[Call, Results], Results]:
    def run(call: Call, leaves: Results) -> Results:
        if not reentrant:
            return results(lambda *t: checkpoint(call, *t, use_reentrant=False), leaves)
        leaves = tuple(t.detach().requires_grad_() for t in leaves)  # which `torch.autograd.grad` does not reach
        out = checkpoint(call, *leaves, use_reentrant=True)
        out.backward(out.detach().clone())
        return (out.detach(), *(t.grad for t in leaves))

    return run


def threaded(call: Call, leaves: Results) -> Results:
    found: list[Any] = [None] * 4

    def work(i: int) -> None:
        found[i] = results(call, tuple(t.detach().requires_grad_() for t in leaves))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(other, found[0]) for other in found[1:])
    return found[0]


def without_gradients(call: Call, leaves: Results) -> Results:
    with torch.inference_mode():
        out = call(*leaves).clone()
    want = results(call, leaves)  # what was planned in inference mode serves gradients too
    return (out, *want[1:])


def cast(call: Call, leaves: Results) -> Results:
    """Under autocast to the dtype that 16-bit inputs have anyway; others to themselves."""
    narrow = leaves[0].dtype in (torch.float16, torch.bfloat16)
    with torch.autocast(leaves[0].device.type, leaves[0].dtype if narrow else torch.bfloat16, enabled=narrow):
        return results(call, leaves)


def selective(call: Call, leaves: Results) -> Results:
    """Checkpointing that keeps what attention gives and computes all else again."""

    def policy(_: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        kept = operator == torch.ops.sartor.attention.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return results(lambda *t: checkpoint(call, *t, use_reentrant=False, context_fn=contexts), leaves)


def compiled(**options: Any) -> Callable[[Call, Results], Results]:
    def run(call: Call, leaves: Results) -> Results:
        torch._dynamo.reset()
        graph = torch.compile(call, fullgraph=True, **options)
        for _ in range(3):  # CUDA graphs are recorded at the second call and replayed at the third
            torch.compiler.cudagraph_mark_step_begin()
            found = tuple(t.clone() for t in results(graph, leaves))
        return found

    return run


SETTINGS: dict[str, Callable[[Call, Results], Results]] = {
    "default_dtype_bf16": within(lambda: default_dtype(torch.bfloat16)),
    "default_dtype_fp16": within(lambda: default_dtype(torch.float16)),
    "default_dtype_fp64": within(lambda: default_dtype(torch.float64)),
    "default_device_meta": within(lambda: torch.device("meta")),
    "deterministic": within(deterministic),
    "autocast": cast,
    "inference_mode": without_gradients,
    "checkpoint": checkpointed(reentrant=False),
    "checkpoint_reentrant": checkpointed(reentrant=True),
    "checkpoint_selective": selective,
    "hooks_other_strides": within(lambda: hooked(moved, lambda t: t)),
    "hooks_off_16_bytes": within(lambda: hooked(lambda t: t, shifted), lambda: hooked(shifted, lambda t: t)),
    "hooks_save_on_cpu": within(torch.autograd.graph.save_on_cpu),
    "threads": threaded,
}


class Layer(torch.nn.Module):
    """Attention with a mask of tensors, as a model's layer may hold it; q, k and v of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(64, 64)
        self.mask = mods.causal() & mods.document((torch.arange(20) // 7)[None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(x).unflatten(-1, (4, 16))
        return sartor.attention(y, y, y, mask=self.mask).flatten(-2) + sartor.attention(y, y, y).flatten(-2)

    def _apply(self, fn: Any, *rest: Any, **options: Any) -> Any:
        self.mask = self.mask.to(fn(torch.empty(0)).device)
        return super()._apply(fn, *rest, **options)


def data_parallel(device: str, backend: str, store: str) -> None:
    """One process of DistributedDataParallel and of FSDP2, which hook into autograd and move parameters about; and a
    DTensor, which gets a sentence."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.distributed.init_process_group(backend, store=torch.distributed.FileStore(store, 1), rank=0, world_size=1)
    try:
        layer, x = Layer().to(device), torch.randn(2, 20, 64, device=device)
        layer(x).sum().backward()
        want = layer.project.weight.grad.clone()
        wrapped = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(layer))
        wrapped.zero_grad()
        wrapped(x).sum().backward()
        assert torch.allclose(wrapped.module.project.weight.grad, want, rtol=1e-5)
        mesh = init_device_mesh(device, (1,))
        sharded = copy.deepcopy(layer)
        sharded.zero_grad()
        fully_shard(sharded, mesh=mesh)
        sharded(x).sum().backward()
        assert torch.allclose(sharded.project.weight.grad.full_tensor(), want, rtol=1e-5)
        q = distribute_tensor(torch.randn(1, 8, 2, 16, device=device), mesh, [Replicate()])
        with pytest.raises(NotImplementedError, match=r"q must be a local tensor, got a DTensor of .*q\.to_local"):
            sartor.attention(q, q, q)
    finally:
        torch.distributed.destroy_process_group()


COMPILED = {"compiled": compiled(dynamic=False), "compiled_dynamic": compiled(dynamic=True)}
