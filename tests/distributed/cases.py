"""What the ranks of the tests run, and what both sides make from a seed. Imported by the ranks too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import sartor
import sartor.distributed as context
from sartor import mods

HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (4, 1), "odd": (12, 3), "many": (8, 2)}


@dataclass(frozen=True)
class Case:
    """One problem. `ranks` or `mesh` (ring, heads) says how it is spread."""

    feature: str = "full"
    method: str = "ring"
    kind: str = "contiguous"
    ranks: int = 2
    mesh: tuple[int, int] | None = None
    seqlen_q: int = 48
    seqlen_kv: int | None = None
    batch: int = 2
    heads: str = "gqa"
    dim: int = 8
    dim_v: int = 8
    dtype: str = "float64"
    layout: str = "bshd"
    pad: bool = True
    chunk: int | None = None  # of `balanced`, for kind "balanced"
    through_lse: bool = True
    kernel: str = "auto"
    seed: int = 0
    device: str = "cpu"
    extra: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        where = f"{self.mesh[0]}x{self.mesh[1]}" if self.mesh else str(self.ranks)
        return f"{self.feature}-{self.method}-{self.kind}-{where}-{self.heads}-{self.dtype}-{self.seqlen_q}"

    @property
    def lengths(self) -> tuple[int, int]:
        return self.seqlen_q, self.seqlen_q if self.seqlen_kv is None else self.seqlen_kv


def document_ids(batch: int, seqlen: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(batch, seqlen, generator=generator) < 6 / max(seqlen, 1)).int().cumsum(1).int()


def by_distance(table: torch.Tensor) -> mods.Score:
    """A score that adds what a table (heads, distances) holds for how far a query is ahead of a key."""
    middle = table.shape[1] // 2
    return mods.Score(lambda s, b, h, q, kv: s + table[h, q - kv + middle])


def by_block(table: torch.Tensor) -> mods.Mask:
    """A mask that is True where a table (batch, blocks of queries, blocks of keys) is, and on the diagonal."""
    return mods.Mask(lambda b, h, q, kv: table[b, q // 8, kv // 8] | (q == kv))


def inputs(case: Case) -> dict[str, torch.Tensor]:
    """q, k, v, dout (batch, seqlen, heads, dim) and dlse, of the whole sequence."""
    (sq, skv), (hq, hkv), b = case.lengths, HEADS[case.heads], case.batch
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)

    def draw(*shape: int) -> torch.Tensor:
        t = torch.randn(shape, generator=generator, dtype=torch.float64)
        return t.to(dtype).to(case.device)

    return {
        "q": draw(b, sq, hq, case.dim), "k": draw(b, skv, hkv, case.dim), "v": draw(b, skv, hkv, case.dim_v),
        "dout": draw(b, sq, hq, case.dim_v),
        "dlse": draw(b, hq, sq).to(torch.float64 if dtype == torch.float64 else torch.float32),
    }  # fmt: skip


def options(case: Case) -> dict[str, Any]:
    """What `attention` is given for a feature, of the whole sequence."""
    (sq, skv), hq, b, name = case.lengths, HEADS[case.heads][0], case.batch, case.feature
    generator = torch.Generator().manual_seed(case.seed + 1)
    wide = torch.float64 if case.dtype == "float64" else torch.float32

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(wide).to(case.device)

    def ids(t: torch.Tensor) -> torch.Tensor:
        return t.to(case.device)

    cu = torch.tensor([0, sq // 5, sq // 5, sq // 2, sq - 3], dtype=torch.int32)
    made = {
        "full": lambda: {},
        "causal": lambda: {"causal": True},
        "top_left": lambda: {"causal": "top_left"},
        "window": lambda: {"window": (7, 4)},
        "sliding": lambda: {"causal": True, "window": (9, 0)},
        "far": lambda: {"window": (None, 3)},
        "documents": lambda: {"mask": mods.document(ids(document_ids(b, sq, case.seed)))},
        "causal_documents": lambda: {"mask": mods.document(ids(document_ids(1, sq, case.seed))), "causal": True},
        "packed": lambda: {"mask": mods.packed(ids(cu), ids(cu), sq, skv, causal=True)},
        "prefix": lambda: {"mask": mods.prefix(sq // 3) | mods.causal()},
        "per_item": lambda: {"mask": mods.prefix(ids(torch.tensor([sq // 4, sq // 2][:b])))},
        "function": lambda: {
            "mask": mods.Mask(lambda b, h, q, kv, aux: ((q + kv + h + b) % aux[0] != 0) | (q == kv), aux=(3,))
        },
        "table": lambda: {"mask": mods.from_tensor(draw(b, hq, sq, skv) > -0.5)},
        "mask_tensor": lambda: {"mask": draw(b, 1, sq, skv) > -0.5, "causal": True},
        "mask_keys": lambda: {"mask": draw(b, 1, 1, skv) > -0.5},
        "score": lambda: {
            "score": mods.Score(lambda s, b, h, q, kv, aux: s * 0.5 + aux[0] * (q - kv) + 0.01 * h, aux=(0.125,)),
            "causal": True,
        },
        "score_tensor": lambda: {
            "score": mods.Score(lambda s, b, h, q, kv, aux: s + aux[0] * aux[1], aux=(draw(hq, sq, 1), draw(1, skv)))
        },
        "indexed": lambda: {  # tables read by what is computed of positions, heads and batch items
            "score": by_distance(draw(hq, sq + skv)),
            "mask": by_block(ids(torch.arange(b * (sq // 8 + 1) * (skv // 8 + 1)).view(b, sq // 8 + 1, -1) % 3 > 0)),
        },
        "alibi": lambda: {"alibi_slopes": draw(hq).abs(), "causal": True},
        "softcap": lambda: {"softcap": 1.5, "softmax_scale": 0.7},
        "bias": lambda: {"bias": draw(b, hq, sq, skv)},
        "bias_broadcast": lambda: {"bias": draw(hq, 1, skv), "causal": True},
        "bias_rows": lambda: {"bias": draw(1, hq, sq, 1), "window": (9, 9)},
        "sinks": lambda: {"sinks": draw(hq), "window": (5, 0)},
        "dropout": lambda: {"dropout_p": 0.3, "dropout_seed": 2**40 + 5, "causal": True},
        "dropout_full": lambda: {
            "dropout_p": 0.2, "sinks": draw(hq), "softcap": 3.0,
            "dropout_seed": torch.tensor([7, 1, 3, 2, 5], device=case.device),
        },
        "everything": lambda: {
            "sinks": draw(hq), "bias": draw(1, 1, sq, skv), "alibi_slopes": draw(hq).abs(), "softcap": 3.0,
            "mask": mods.document(ids(document_ids(1, sq, case.seed))), "causal": True,
            "score": mods.Score(lambda s, b, h, q, kv, aux: s + 0.1 * h - 0.01 * kv),
        },
    }  # fmt: skip
    return {**made[name](), **case.extra}


def shardings(case: Case) -> Any:
    """What is passed as `layout_of_sequence`, and the two shardings."""
    ranks = case.mesh[0] * case.mesh[1] if case.mesh else case.ranks
    sq, skv = case.lengths
    if case.kind == "balanced":
        made = options(case)
        found = context.balanced(
            sq, ranks, causal=made.get("causal", False), window=made.get("window"), mask=made.get("mask"),
            chunk=case.chunk,
        )  # fmt: skip
        return found, (found, found)
    pair = tuple(context.Sharding.make(case.kind, n, ranks, pad=case.pad) for n in (sq, skv))
    named = case.pad and all(sum(map(p.count, range(ranks))) == sum(p.sizes) for p in pair)
    return case.kind if named else pair, pair


def learned(groups: dict[int, Any], case: Case) -> list[torch.Tensor]:
    """The gradients, summed over ranks, of tensors that a score reads: one that it indexes, one read at the position,
    one that wants none."""
    generator = torch.Generator().manual_seed(case.seed + 2)
    (sq, skv), hq = case.lengths, HEADS[case.heads][0]
    shapes = (hq, sq + skv), (hq, sq, 1), (1, 1, skv)
    table, rows, keys = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    table.requires_grad_()
    rows.requires_grad_()
    at_position = mods.Score(lambda s, b, h, q, kv, aux: s * aux[1] + torch.tanh(aux[0]), aux=(rows, keys))
    given = {"score": by_distance(table).then(at_position), "alibi_slopes": torch.ones(hq), "causal": True}
    data = inputs(case)
    where = {"mesh": mesh_of(case)} if case.mesh else {"group": groups[case.ranks]}
    layout, (queries, of_keys) = shardings(case)
    cut = [context.shard(data[n], s, dist.get_rank()) for n, s in (("q", queries), ("k", of_keys), ("v", of_keys))]
    out = context.attention(*cut, **where, method=case.method, layout_of_sequence=layout, **given)
    dout = context.shard(data["dout"], queries, dist.get_rank())
    found = list(torch.autograd.grad(out, [table, rows], dout))
    alone = sartor.attention(data["q"], data["k"], data["v"], **given)
    found += torch.autograd.grad(alone, [table, rows], data["dout"])
    return found


_MESHES: dict[Any, Any] = {}


def mesh_of(case: Case) -> Any:
    """The mesh of the first ranks; made once by all of them."""
    from torch.distributed.device_mesh import DeviceMesh

    if case.mesh not in _MESHES:
        ring, heads = case.mesh
        kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
        _MESHES[case.mesh] = DeviceMesh(kind, torch.arange(ring * heads).view(ring, heads))
    return _MESHES[case.mesh]


def run(groups: dict[int, Any], case: Case, gradients: bool = True) -> dict[str, torch.Tensor]:
    """This rank's results and gradients."""
    where = {"mesh": mesh_of(case)} if case.mesh else {"group": groups[case.ranks]}
    layout, (queries, keys) = shardings(case)
    rank = dist.get_rank()
    data, given = inputs(case), options(case)
    cut = {n: context.shard(data[n], queries if n in ("q", "dout") else keys, rank) for n in ("q", "k", "v", "dout")}
    for name in ("bias", "mask"):
        t = given.get(name)
        if isinstance(t, torch.Tensor) and t.dim() > 1 and t.shape[-2] != 1:
            given[name] = context.shard(t, queries, rank, dim=-2)
    for name in ("bias", "sinks"):
        if name in given:
            given[name] = given[name].clone().requires_grad_(gradients)
    dlse = context.shard(data["dlse"], queries, rank, dim=2)
    leaves = {n: cut[n].requires_grad_(gradients) for n in ("q", "k", "v")}
    view = {n: t.transpose(1, 2) if case.layout == "bhsd" else t for n, t in leaves.items()}
    out, lse = context.attention(
        view["q"], view["k"], view["v"], **where, method=case.method, layout_of_sequence=layout, layout=case.layout,
        return_lse=True, kernel=case.kernel, **given,
    )  # fmt: skip
    found = {"out": out.transpose(1, 2) if case.layout == "bhsd" else out, "lse": lse}
    if gradients:
        leaves |= {n: given[n] for n in ("bias", "sinks") if n in given}
        ends, starts = [found["out"]], [cut["dout"].to(out.dtype)]
        if case.through_lse:
            ends, starts = [*ends, torch.where(lse == -torch.inf, 0, lse)], [*starts, dlse]
        parts = torch.autograd.grad(ends, list(leaves.values()), starts)
        found |= {f"d{n}": g for n, g in zip(leaves, parts, strict=True)}
    return {n: t.detach().cpu() for n, t in found.items()}
