"""FlexAttention's function, with its `score_mod`, `mask_mod` and `BlockMask` as they are.

PyTorch compiles these functions; here they are traced, once, to the expressions that every kernel takes its code from
(`sartor.mods`). What they capture is read by kernels where it lies, and gets its gradient. Of a `BlockMask` the
`mask_mod` says which keys count. Its blocks say, where the `mask_mod` itself does not, which tiles need no look.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, noop_mask

from sartor.api import attention
from sartor.mods.capture import Sizes
from sartor.mods.core import Mask, Score, template
from sartor.mods.expr import maximum, minimum
from sartor.mods.intervals import BIG, none_full
from sartor.mods.program import Program

Tensor = torch.Tensor
ENDS = 1 << 20  # block sizes from which a BlockMask is of one block: the one that stands for none
_MASKS: WeakKeyDictionary[BlockMask, dict[Sizes, Mask | None]] = WeakKeyDictionary()


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | Score | None = None,
    block_mask: BlockMask | Callable[..., Any] | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention` by Sartor's kernels, eagerly: there is nothing to compile.

    Args:
        query: (batch, heads_q, seqlen_q, dim); float16, bfloat16, float32 or float64.
        key: (batch or 1, heads_kv, seqlen_kv, dim).
        value: (batch or 1, heads_kv, seqlen_kv, dim_v).
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`, traced at every call; or a `sartor.mods.Score`, which is
            traced once. Tensors that it captures have gradients.
        block_mask: from `create_block_mask`, for these lengths: its `mask_mod`, `(b, h, q_idx, kv_idx) -> bool`, is
            traced once, and kept with it. Or a `mask_mod` itself, traced at every call; or a `sartor.mods.Mask`.
        scale: factor of the scores; 1 / sqrt(dim) by default.
        enable_gqa: whether heads_q may be a multiple of heads_kv; each key head serves
            heads_q / heads_kv query heads that follow one another.
        return_lse: return (out, lse), lse the natural-log logsumexp of the scores, (batch, heads_q, seqlen_q),
            float32 (float64 for float64 inputs).
        kernel_options: taken and not looked at: they choose tiles of PyTorch's kernels.
        return_aux: in place of `return_lse`, with an `AuxOutput` in place of lse.

    Returns:
        out (batch, heads_q, seqlen_q, dim_v). A row that attends to no key is 0, its lse -inf.

    Raises:
        TypeError: a function does what has no meaning for a kernel; the message names the operation, what to write
            instead, and the line of the function.
        ValueError: shapes, lengths or options do not go together.
        NotImplementedError: `return_aux` asks for the largest scores.
        Unsupported: no kernel can run this; with every reason.

    An index into a captured tensor counts from the end where it is negative. One beyond the tensor, for which PyTorch
    has no rule, reads its edge.
    """
    _check_heads(query, key, enable_gqa)
    if return_lse and return_aux is not None:
        raise ValueError("return_lse must be False beside return_aux, got True")
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError("return_aux must not ask for max_scores, which no kernel keeps, got max_scores=True")
    sizes = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    if key.shape[0] == 1 != query.shape[0]:
        key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
    score = score_mod if score_mod is None or isinstance(score_mod, Score) else Score(score_mod, sizes=sizes)
    found = attention(
        query, key, value, layout="bhsd", mask=to_mask(block_mask, sizes), score=score, softmax_scale=scale,
        return_lse=return_lse or return_aux is not None,
    )  # fmt: skip
    return (found[0], AuxOutput(lse=found[1] if return_aux.lse else None)) if return_aux is not None else found


def to_mask(block_mask: Any, sizes: Sizes) -> Mask | None:
    """The mask of a `BlockMask` or a `mask_mod`, for calls of these (batch, heads_q, seqlen_q, seqlen_kv)."""
    if block_mask is None or isinstance(block_mask, Mask):
        return block_mask
    if not isinstance(block_mask, BlockMask):
        return _made(block_mask, sizes)
    if torch.compiler.is_compiling():
        return _of_blocks(block_mask, sizes)
    known = _MASKS.setdefault(block_mask, {})
    if sizes not in known:
        if len(known) > 64:
            known.clear()
        known[sizes] = _of_blocks(block_mask, sizes)
    return known[sizes]


def _check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    for name, t in (("query", query), ("key", key)):
        if not isinstance(t, Tensor) or t.dim() != 4:
            got = f"{t.dim()}: {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(f"{name} must have 4 dims (batch, heads, seqlen, dim), got {got}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"key must have the heads of query, {query.shape[1]}, got {key.shape[1]}: enable_gqa=True lets heads share"
        )


def _made(mask_mod: Any, sizes: Sizes) -> Mask:
    if not callable(mask_mod):
        raise TypeError(f"block_mask must be a BlockMask, a mask_mod or a Mask, got {type(mask_mod).__name__}")
    return Mask(mask_mod, sizes=sizes, name=getattr(mask_mod, "__name__", "mask_mod").strip("<>"))


def _of_blocks(blocks: BlockMask, sizes: Sizes) -> Mask | None:
    """Its `mask_mod`, whose rows and columns stay within its blocks."""
    size_q, size_kv = blocks.BLOCK_SIZE
    whole = min(size_q, size_kv) >= ENDS
    if not whole and tuple(blocks.seq_lengths) != sizes[2:]:
        raise ValueError(
            f"block_mask must be made for the lengths of query and key, {sizes[2:]}, got one for"
            f" {tuple(blocks.seq_lengths)}"
        )
    mask_mod = blocks.mask_mod
    if mask_mod is noop_mask:
        return None if whole else _listed(blocks, sizes)
    made = _made(mask_mod, sizes)
    if whole or _is_exact(made) or _is_bounded(made):
        return made
    rows, cols = made.rows, made.cols
    by_row, by_column = _ends(blocks, "kv"), _ends(blocks, "q")
    if torch.compiler.is_compiling():  # there the intervals of `made` are not at hand: those of blocks do
        return _within(mask_mod, blocks, sizes)
    n = len(made.aux)
    return Mask(
        lambda b, h, q, kv, aux: made.keep(b, h, q, kv, aux[:n]),
        made.aux,
        lambda b, h, q, aux: _both(rows(b, h, q, aux[:n]), by_row, (b, h, q // size_q)),  # type: ignore[misc]
        None if by_column is None else lambda b, h, kv, aux: _both(
            cols(b, h, kv, aux[:n]), by_column, (b, h, kv // size_kv)  # type: ignore[misc]
        ),
        made.name,
        sizes,
    )  # fmt: skip


def _is_exact(made: Mask) -> bool:
    """Whether intervals say all of a mask."""
    if torch.compiler.is_compiling():
        return bool(_handle_is_exact(made.handle))
    return bool(Program.of(made, None)[0].is_interval_both_ways)


def _is_bounded(made: Mask) -> bool:
    """Whether a mask reads no tensor and its text has both ends of each row: kernels find the empty tiles themselves
    then, where blocks would be tensors to read."""
    if torch.compiler.is_compiling() or made.tensors:
        return False
    rows = Program.of(made, None)[0].rows
    return rows is not None and rows[0].text() != "0" and rows[1].text() != str(BIG)


@torch.compiler.assume_constant_result
def _handle_is_exact(handle: str) -> bool:
    return bool(Program.of(template(handle), None)[0].is_interval_both_ways)


def _listed(blocks: BlockMask, sizes: Sizes) -> Mask:
    """What is without a `mask_mod` keeps the pairs of its blocks."""
    size_q, size_kv = blocks.BLOCK_SIZE
    keep = blocks.to_dense().bool()  # (batch or 1, heads or 1, blocks of queries, blocks of keys)
    return _within(lambda b, h, q, kv: keep[b, h, q // size_q, kv // size_kv], blocks, sizes)


def _within(keep: Callable[..., Any], blocks: BlockMask, sizes: Sizes) -> Mask:
    """A `mask_mod` of which the blocks say where it keeps none and where all."""
    size_q, size_kv = blocks.BLOCK_SIZE
    by_row, by_column = _ends(blocks, "kv"), _ends(blocks, "q")
    return Mask(
        keep,
        (),
        lambda b, h, q: tuple(t[b, h, q // size_q] for t in by_row),  # type: ignore[union-attr]
        None if by_column is None else lambda b, h, kv: tuple(t[b, h, kv // size_kv] for t in by_column),
        "blocks",
        sizes,
    )  # fmt: skip


def _both(derived: tuple[Any, ...], tables: Any, place: tuple[Any, ...]) -> tuple[Any, ...]:
    """The narrower of two intervals that a predicate stays within; the full one that was derived, if there is any."""
    lo, hi, *full = (t[place] for t in tables)
    return maximum(derived[0], lo), minimum(derived[1], hi), *(full if none_full(derived) else derived[2:])


def _ends(blocks: BlockMask, name: str) -> tuple[Tensor, ...] | None:
    """(lo, hi, full_lo, full_hi) of each row ("kv") or column ("q") of blocks, int32 (batch or 1, heads or 1, blocks),
    in elements. Full ones only where they lie side by side."""
    size = blocks.BLOCK_SIZE[0 if name == "q" else 1]
    counts, indices = getattr(blocks, f"{name}_num_blocks"), getattr(blocks, f"{name}_indices")
    full_counts, full_indices = getattr(blocks, f"full_{name}_num_blocks"), getattr(blocks, f"full_{name}_indices")
    if counts is None:
        return None
    lo, hi = _hull(counts, indices)
    full_lo, full_hi = torch.full_like(lo, BIG), torch.zeros_like(hi)
    if full_counts is not None:
        first, last = _hull(full_counts, full_indices)
        lo, hi = torch.minimum(lo, first), torch.maximum(hi, last)
        together = (last - first == full_counts) & (full_counts > 0)
        full_lo = torch.where(together, first * size, full_lo)
        full_hi = torch.where(together, last * size, full_hi)
    return lo.clamp(max=BIG // size) * size, hi * size, full_lo, full_hi


def _hull(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The first block of each row, and one past the last; (BIG, 0) where there is none."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return torch.where(listed, indices, BIG).amin(-1), torch.where(listed, indices + 1, 0).amax(-1)
