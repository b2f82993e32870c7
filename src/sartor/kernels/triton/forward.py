"""The portable forward: FlashAttention-2's loop order in Triton, for the exact head dim.

One program computes BLOCK_M rows of one head. Its mainloop visits the key tiles that the mask leaves; a uniform branch
skips the mask in full tiles, which is cheaper than a loop of their own that would fill its pipeline anew. Softmax is
online, in the log2 domain; the epilogue normalises the output once (Dao 2023, section 3.1).

A masked key whose value is NaN would reach its row through 0 * NaN. Checking every value tile would cost every call, so
a program marks its tile when the result is not finite, and a second launch, the NaN repair pass, computes the marked
tiles again. In one kernel the code of the repair would take registers from the code of the first pass.

fp32_forward.py launches the same kernel on pairs of float16 (PRECISION "pairs"), and again on the tiles they do not do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from sartor.device import Device
from sartor.features import BF16, DROPOUT, DROPOUT_PART, DROPOUT_STEPS, F16, F32, GENERAL, GRADIENTS, TF32, WIDE_OUT
from sartor.kernels.spec import KernelSpec, Operands, Plan, Tile, allocate_out
from sartor.kernels.triton import launch
from sartor.problem import Problem

if launch.available():
    import triton
    import triton.language as tl

    from sartor.kernels.triton import codegen, marks, products, tiles
    from sartor.kernels.triton.bounds import tile_bounds, valid
    from sartor.kernels.triton.dropout import seed_of, stays
    from sartor.kernels.triton.groups import Config, Numbers, Tensors
    from sartor.kernels.triton.maths import LN_2, LOG2_E

    @triton.jit
    def _mainloop(state, bounds, i_m, queries, keys, values, b, h, n, c):
        """Fold the key tiles in [lo, hi) into state = (m, l, acc): running maximum (without factor), sum, output.

        `bounds` are those of `tile_bounds`: only tiles outside [full_lo, full_hi) evaluate the mask.
        """
        m, l, acc = state
        lo, hi, full_lo, full_hi = bounds
        q_base, q_stride, q_unit = queries
        k_base, k_stride, k_units = keys
        v_base, v_stride, v_units = values
        o_m, o_kv = tl.arange(0, c.BLOCK_M), tl.arange(0, c.BLOCK_N)
        q_rows = tl.minimum(i_m * c.BLOCK_M + o_m, n.seqlen_q - 1)  # for the mods
        own = n.seqlen_q - i_m * c.BLOCK_M
        seed = seed_of(n.dropout, c.DROPOUT)
        q = products.load_queries(q_base, o_m, q_stride, own, c.DIM, c.DIM_V, c.CHUNKS, c.PRECISION)
        for start in tl.range(lo, hi, c.BLOCK_N, num_stages=1 if c.REPAIR else None):
            k_rows = k_base + tl.cast(start, tl.int64) * k_stride
            v_rows = v_base + tl.cast(start, tl.int64) * v_stride
            kv = start + o_kv
            left = n.seqlen_kv - start
            key = valid(kv, n.seqlen_kv, c.BOUNDED)
            k = products.load(k_rows, o_kv, k_stride, left, c.DIM, c.CHUNKS, c.BOUNDED, c.PRECISION)
            s = products.dot_nt(q, k, c.CHUNKS, c.PRECISION)  # [M, D] @ [D, N] -> [M, N]
            s = products.times(s, q_unit, products.unit_of(k_units, start, c.PRECISION), c.PRECISION)
            if c.PRESCALE:
                s = s * n.scale
            if c.SCORE is not None:
                s = c.SCORE(s, b, h, q_rows[:, None], key[None, :], n.aux)
            if c.MASKED:
                if (start < full_lo) | (start + c.BLOCK_N > full_hi) | (c.MASKED == 2):
                    keep = kv[None, :] < n.seqlen_kv
                    if c.KEEP is not None:
                        keep = keep & c.KEEP(b, h, q_rows[:, None], key[None, :], n.aux)
                    s = tl.where(keep, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            base = tl.where(m_new == float("-inf"), 0.0, m_new)  # rows without a key so far
            # difference first: s * factor - m * factor, fused, leaves a remainder beyond exp2 where scores are huge
            w = tl.exp2((s - base[:, None]) * n.factor)
            alpha = tl.exp2((m - base) * n.factor)
            l = l * alpha + tl.sum(w, 1)
            acc = tiles.scale_tile(acc, alpha[:, None], c.CHUNKS_V)
            if c.DROPOUT:
                start_q = i_m * c.BLOCK_M
                stay = stays(seed, n.dropout, b, h, start_q, start, c.BLOCK_M, c.BLOCK_N, False, c.DROPOUT)
                w = tl.where(stay, w, 0.0)
            if c.REPAIR:
                keep = tl.broadcast_to(kv[None, :] < n.seqlen_kv, w.shape)
                keep = keep & c.KEEP(b, h, q_rows[:, None], key[None, :], n.aux)
                acc = tiles.add_attended(
                    acc, w, keep, v_base, start, v_stride, n.seqlen_kv, c.BLOCK_N, c.DIM_V, c.CHUNKS_V
                )  # fmt: skip
            else:
                v = products.load(v_rows, o_kv, v_stride, left, c.DIM_V, c.CHUNKS_V, c.BOUNDED, c.PRECISION)
                v_unit = products.unit_of(v_units, start, c.PRECISION)
                acc = products.add_dot(acc, w, v, v_unit, c.CHUNKS_V, c.PRECISION, True)  # [M, N] @ [N, DV] -> [M, DV]
            m = m_new
        return m, l, acc

    @triton.jit
    def _epilogue(state, sink, n, c):
        """Normalised output tile and lse, to which the scale comes as one rounding; `sink` is a logit of the row."""
        m, l, acc = state
        if not c.PRESCALE:
            m = m * n.scale
        if c.SINKS:
            top = tl.maximum(m, sink)
            base = tl.where(top == float("-inf"), 0.0, top)
            alpha = tl.exp2((m - base) * LOG2_E)
            l = l * alpha + tl.exp2((sink - base) * LOG2_E)
            acc = tiles.scale_tile(acc, alpha[:, None], c.CHUNKS_V)
            m = top
        inverse = tl.where(l == 0.0, 0.0, 1.0 / l)
        if c.DROPOUT:
            inverse *= n.dropout[2]
        return tiles.scale_tile(acc, inverse[:, None], c.CHUNKS_V), m + tl.log2(l) * LN_2

    @triton.jit
    def _forward_tile(tile, x, n, c):
        """One q tile of one head. Tiles of a head are neighbours in launch order, so its keys stay in L2; the last
        tile, which a causal mask makes the longest, goes first."""
        n_tiles = tl.cdiv(n.seqlen_q, c.BLOCK_M)
        i_m = n_tiles - 1 - tile % n_tiles
        head = tile // n_tiles
        b, h = head // n.heads_q, head % n.heads_q
        b64, h64, first = tl.cast(b, tl.int64), tl.cast(h, tl.int64), tl.cast(i_m * c.BLOCK_M, tl.int64)
        k_base = x.k + (b64 * x.k_strides[0] + (h64 // n.group) * x.k_strides[1]) * c.UNIT
        v_base = x.v + (b64 * x.v_strides[0] + (h64 // n.group) * x.v_strides[1]) * c.UNIT
        q_base = x.q + (b64 * x.q_strides[0] + h64 * x.q_strides[1] + first * x.q_strides[2]) * c.UNIT
        out_base = x.out + (b64 * x.out_strides[0] + h64 * x.out_strides[1] + first * x.out_strides[2]) * c.OUT_UNIT
        q_stride = products.row_stride(x.q_strides, c.UNIT, c.DIM, c.PRECISION)
        k_stride = products.row_stride(x.k_strides, c.UNIT, c.DIM, c.PRECISION)
        v_stride = products.row_stride(x.v_strides, c.UNIT, c.DIM_V, c.PRECISION)

        o_m = tl.arange(0, c.BLOCK_M)
        q_rows = i_m * c.BLOCK_M + o_m
        present = tl.minimum(q_rows, n.seqlen_q - 1)
        bounds = tile_bounds(c.SPANS, b, h, present, n.aux, n.seqlen_kv, c.BLOCK_N)
        head_kv = b * (n.heads_q // n.group) + h // n.group
        q_units = products.head_units(x.units, 0, head, n.seqlen_q, c.PRECISION)
        k_units = products.head_units(x.units, 1, head_kv, n.seqlen_kv, c.PRECISION)
        v_units = products.head_units(x.units, 2, head_kv, n.seqlen_kv, c.PRECISION)
        q_unit = products.unit_of(q_units, i_m * c.BLOCK_M, c.PRECISION)
        state = (
            tl.full((c.BLOCK_M,), float("-inf"), tl.float32), tl.zeros((c.BLOCK_M,), tl.float32),
            tiles.zeros(c.BLOCK_M, c.CHUNKS_V),
        )  # fmt: skip
        state = _mainloop(
            state, bounds, i_m, (q_base, q_stride, q_unit), (k_base, k_stride, k_units),
            (v_base, v_stride, v_units), b, h, n, c,
        )  # fmt: skip
        sink = 0.0
        if c.SINKS:
            sink = tl.load(x.sinks + h).to(tl.float32)
        out, lse = _epilogue(state, sink, n, c)
        left = n.seqlen_q - i_m * c.BLOCK_M
        tiles.store_tile(out_base, o_m, x.out_strides[2] * c.OUT_UNIT, left, out, c.DIM_V, c.CHUNKS_V)
        tl.store(x.lse + tl.cast(head, tl.int64) * n.seqlen_q + q_rows, lse, mask=q_rows < n.seqlen_q)
        if c.PRECISION == "pairs":
            lo, hi, _, _ = bounds
            k_unit = products.largest_unit(k_units, lo, hi)
            top = state[0] * n.factor
            lost = products.unresolved(top, q_unit, k_unit, n.scale, c.DIM) | products.huge(top)
            tl.store(x.bad + tile, tiles.has_nonfinite(out, c.CHUNKS_V) | tl.max(lost.to(tl.int32), 0))
        elif c.KEEP is not None and not c.REPAIR:
            tl.store(x.bad + tile, tiles.has_nonfinite(out, c.CHUNKS_V))

    @triton.jit(do_not_specialize=launch.RUNTIME)
    def forward_kernel(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, bad_ptr, units, aux, dropout,
        q_strides, k_strides, v_strides, out_strides,
        batch, heads_q, group, seqlen_q, seqlen_kv,
        scale, factor,
        KEEP: tl.constexpr, ROWS: tl.constexpr, SCORE: tl.constexpr, PRESCALE: tl.constexpr, SINKS: tl.constexpr,
        PRECISION: tl.constexpr, MASKED: tl.constexpr, BOUNDED: tl.constexpr,
        DIM: tl.constexpr, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
        UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        ONLY_MARKED: tl.constexpr, REPAIR: tl.constexpr, DROPOUT: tl.constexpr,
    ):  # fmt: skip
        """One program per tile; with ONLY_MARKED a few programs, which compute the marked tiles again."""
        base, begin, end, step = marks.share(tl.cdiv(seqlen_q, BLOCK_M), heads_q * batch, ONLY_MARKED, 0)
        for first in tl.range(begin, end, step * marks.ROUND, num_stages=1):
            for i in tl.range(first, marks.last(bad_ptr, first, end, step, ONLY_MARKED), step, num_stages=1):
                if marks.wanted(bad_ptr + base + i, ONLY_MARKED):
                    _forward_tile(
                        base + i,
                        Tensors(q=q_ptr, k=k_ptr, v=v_ptr, out=out_ptr, lse=lse_ptr, sinks=sinks_ptr, bad=bad_ptr,
                                units=units, q_strides=q_strides, k_strides=k_strides, v_strides=v_strides,
                                out_strides=out_strides),
                        Numbers(heads_q=heads_q, group=group, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, scale=scale,
                                factor=factor, aux=aux, dropout=dropout),
                        Config(KEEP=KEEP, SPANS=ROWS, SCORE=SCORE, PRESCALE=PRESCALE, PRECISION=PRECISION,
                               MASKED=MASKED, BOUNDED=BOUNDED, DIM=DIM, DIM_V=DIM_V, CHUNKS=CHUNKS, CHUNKS_V=CHUNKS_V,
                               UNIT=UNIT, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, REPAIR=REPAIR, SINKS=SINKS,
                               OUT_UNIT=OUT_UNIT, DROPOUT=DROPOUT),
                    )  # fmt: skip


class Results(NamedTuple):
    """What a forward fills."""

    out: torch.Tensor  # (b, sq, hq, dv)
    lse: torch.Tensor  # (b, hq, sq) float32
    bad: torch.Tensor  # int32, one mark a tile; lse where there are none

    def addresses(self) -> dict[str, Any]:
        """By the names of arguments."""
        return {"out_ptr": self.out.data_ptr(), "lse_ptr": self.lse.data_ptr(), "bad_ptr": self.bad.data_ptr()}


OF_PRODUCTS = GENERAL | {WIDE_OUT, DROPOUT, DROPOUT_PART, DROPOUT_STEPS}  # whatever is multiplied


class TritonForward(KernelSpec):
    """See the module."""

    name = "triton_forward"
    family = "triton"
    backwards = ("triton_backward",)
    features = OF_PRODUCTS | GRADIENTS | {F16, BF16, F32, TF32}

    def why_not(self, p: Problem, dev: Device) -> list[str]:
        """What every Triton kernel needs; this one serves every dense problem."""
        return launch.reasons(p, dev) or launch.no_tile(self, p, dev)

    def tiles(self, p: Problem, dev: Device) -> Iterable[Tile]:
        """Tiles that fit shared memory and registers, best guess first."""
        wide = 16 * -(-max(p.dim, p.dim_v) // 16)
        small = p.dtype == torch.float32
        sizes = (128, 64, 32, 16), (64, 128, 32, 16), (8, 4)
        for some, block_m, block_n, warps in itertools.product(launch.stage_order(dev, 3, 2, 4, 1), *sizes):
            accumulators = block_m * (wide + block_n) // (32 * warps)  # float32 registers a thread
            if accumulators > (100 if small else 168) or (small and block_m * block_n > 4096):
                continue
            if block_m < (4 if small else 8) * warps:
                continue  # a warp multiplies 16 rows, or shares them with others
            if dev.arch == 90 and not small and block_m < 64 and wide <= 256:
                continue  # wgmma multiplies 64 rows at a time
            if not launch.sums_fit(dev, block_m, self.columns(p, block_n)):
                continue
            for stages in some:
                if self.smem_bytes(p, block_m, block_n, stages, warps) <= launch.smem_limit(dev):
                    yield Tile(block_m, block_n, warps, stages)

    def columns(self, p: Problem, block_n: int) -> int:
        """Of 32 bits, of all that products sum up, chunk by chunk, and of the weights."""
        output = sum(width for _, width in tiles.wide_chunks(p.dim_v))
        return len(tiles.chunks(p.dim)) * block_n + output + block_n * p.dtype.itemsize // 4

    def smem_bytes(self, p: Problem, block_m: int, block_n: int, stages: int, warps: int = 4) -> int:
        """Upper estimate of shared memory: the q tile, and for every stage key and value tiles and what mods read; the
        weights, where a warp multiplies values with weights that others computed."""
        size = p.dtype.itemsize
        d, dv = (sum(widths) for widths in (tiles.chunks(p.dim)[-1], tiles.wide_chunks(p.dim_v)[-1]))
        mods = stages * codegen.tile_bytes(p.program, block_m, block_n)
        masked = p.program.keep is not None or p.seqlen_kv % block_n > 0
        exchanged = stages == 1 or (masked and 16 * warps > block_m)
        weights = block_m * block_n * size if exchanged else 0
        return size * (block_m * d + stages * block_n * (d + dv)) + weights + mods

    def shared_bytes(self, plan: Plan) -> int:
        """Shared memory that a block takes, as `smem_bytes` counts it."""
        t = plan.tile
        assert t is not None
        return self.smem_bytes(plan.problem, t.block_m, t.block_n, t.stages, t.warps)

    def launches(self, plan: Plan, x: Operands, out: torch.Tensor, lse: torch.Tensor) -> list[launch.Launch]:
        """The launches of one call; tensors may be meta tensors, for compiling without a GPU."""
        return self.steps(plan, x, self.results(plan, out, lse), self.pairs(x))

    def steps(self, plan: Plan, x: Operands, results: Results, pairs: dict[str, Any]) -> list[launch.Launch]:
        """`launches` into given results; `pairs` are (hi, lo) copies of the operands, for kernels that take them so."""
        assert plan.tile is not None
        step = self.step("forward", plan, plan.tile, x, results)
        return [step, step.repair(plan.device)] if self.marked(plan.problem) else [step]

    def step(
        self, name: str, plan: Plan, tile: Tile, x: Operands, results: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> launch.Launch:
        """One launch of the kernel over every tile; `results` are `Results`."""
        p, (out, lse, bad) = plan.problem, results
        per, out_per = launch.unit(x.q, x.k, x.v), launch.unit(out)
        uneven = p.seqlen_kv % tile.block_n != 0
        arguments = launch.PLAIN | launch.common(plan, x) | {
            "q_ptr": x.q, "k_ptr": x.k, "v_ptr": x.v, "out_ptr": out, "lse_ptr": lse, "bad_ptr": bad,
            "sinks_ptr": lse if x.sinks is None else x.sinks,
            "q_strides": launch.strides(x.q, per), "k_strides": launch.strides(x.k, per),
            "v_strides": launch.strides(x.v, per), "out_strides": launch.strides(out, out_per),
            "ROWS": codegen.build(p.program).rows, "SINKS": x.sinks is not None,
            "MASKED": codegen.masking(p.program, p.program.rows, uneven), "BOUNDED": uneven,
            "DIM": p.dim, "DIM_V": p.dim_v, "CHUNKS": tiles.chunks(p.dim), "CHUNKS_V": tiles.wide_chunks(p.dim_v),
            "UNIT": per, "OUT_UNIT": out_per, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        }  # fmt: skip
        grid = -(-p.seqlen_q // tile.block_m) * p.heads_q * p.batch
        return launch.Launch(name, forward_kernel, grid, launch.in_order(forward_kernel, arguments), tile)

    def run(self, plan: Plan, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """out (b, sq, hq, dv) and lse (b, hq, sq)."""
        p, pairs = plan.problem, self.pairs(x)
        lse = torch.empty((p.batch, p.heads_q, p.seqlen_q), dtype=torch.float32, device=x.q.device)
        results = self.results(plan, allocate_out(p, x.q), lse)
        changed = codegen.of_call(p, x) | results.addresses()
        if not launch.repeat(changed, plan.cache, own=launch.own({"q": x.q, "k": x.k, "v": x.v}, pairs, "forward")):
            launch.run(self.steps(plan, x, results, pairs), plan.cache)
        return results.out, lse

    def results(self, plan: Plan, out: torch.Tensor, lse: torch.Tensor) -> Results:
        """With room for one mark a tile, where tiles are marked to be computed again."""
        p, tile = plan.problem, plan.tile
        assert tile is not None
        if not self.marked(p):
            return Results(out, lse, lse)
        n = -(-p.seqlen_q // tile.block_m) * p.heads_q * p.batch
        return Results(out, lse, torch.empty(n, dtype=torch.int32, device=out.device))

    def marked(self, p: Problem) -> bool:
        """Whether the kernel marks tiles that a second launch computes again."""
        return p.program.keep is not None

    def pairs(self, x: Operands) -> dict[str, Any]:
        """Room for operands as (hi, lo) pairs, by name; none here."""
        return {}


SPEC = TritonForward()
