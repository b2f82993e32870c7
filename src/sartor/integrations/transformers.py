"""transformers (5.x): `register()`, then `attn_implementation="sartor"`.

Two functions are registered: the attention, and the one that makes its mask. The mask is made once for a forward and
its layers of one kind. It is a `LayerMask`: arguments of `sartor.attention`, of O(seqlen) memory. Masks by a function
that is not known here, and those made while torch.compile compiles by other than the plain causal one, are made pair
by pair, as for PyTorch's SDPA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakIdKeyDictionary

from sartor.api import attention
from sartor.integrations.intervals import Band, Place, hull, mask, of_one, of_pairs
from sartor.mods import packed

if TYPE_CHECKING:
    from sartor.distributed import Sharding

Tensor = torch.Tensor
NAME = "sartor"
# Models that read the mask and take another way if it is no tensor: which of transformers' functions makes theirs
READ_BY_THE_MODEL = {"doge": "sdpa_mask", "deepseek_v4": "eager_mask"}
SELECT_KEYS = "indices", "block_indices"  # keys that a model has chosen for each query


def register(name: str = NAME) -> None:
    """Let transformers know `attn_implementation=name`, of models that exist already too (`set_attn_implementation`).

    Raises:
        ImportError: transformers is missing, or older than its `AttentionMaskInterface` (4.53).
    """
    from transformers import AttentionInterface  # type: ignore[import-not-found]
    from transformers.masking_utils import AttentionMaskInterface  # type: ignore[import-not-found]

    _masking_utils()
    for own in (name, f"paged|{name}"):
        AttentionInterface.register(own, attention_forward)
        AttentionMaskInterface.register(own, layer_mask)
    _let_it_batch_continuously(name)


def _masking_utils() -> Any:
    """`transformers.masking_utils`, which a list keeps: the Dynamo of torch 2.11 traces no import from that package."""
    if not _THEIRS:
        from transformers import masking_utils

        _THEIRS.append(masking_utils)
    return _THEIRS[0]


_THEIRS: list[Any] = []


def _let_it_batch_continuously(name: str) -> None:
    """transformers 5.23 takes SDPA, eager and names with "flash" alone for continuous batching, by a closed list, and
    moves a model to flash-attn where that is installed. A model that asks for ours keeps it."""
    try:
        from transformers.generation.continuous_batching import ContinuousBatchingManager as Manager
    except ImportError:
        return
    theirs = getattr(Manager, "switch_to_cb_friendly_attn", None)
    if theirs is None or name in getattr(theirs, "kept", ()):
        return

    @wraps(theirs)
    def switch(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation not in switch.kept:  # type: ignore[attr-defined]
            theirs(self, model, *args, **kwargs)

    switch.kept = (name, f"paged|{name}", *getattr(theirs, "kept", ()))  # type: ignore[attr-defined]
    Manager.switch_to_cb_friendly_attn = switch


class LayerMask(BlockMask):
    """What `sartor.attention` is told of a mask; by its type, transformers hands it on as it is. For models that read a
    mask themselves it is the bool tensor that it stands for, which is made then.

    Attributes:
        arguments: of `attention`: `causal` and `window`, or `mask`; and where the sequence lies on several ranks, of
            `sartor.distributed.attention`.
        shape: (batch, 1, seqlen_q, seqlen_kv), that of the tensor it stands for.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], arguments: dict[str, Any], pairs: Callable[[], Tensor] | None = None
    ) -> None:  # fmt: skip
        self._shape, self.arguments, self._pairs = shape, arguments, pairs

    def tensor(self) -> Tensor:
        """The bool tensor of its shape. Raises TypeError where the sequence lies on several ranks."""
        if self._pairs is None:
            raise TypeError(f"attention_mask must be a tensor for this model, which reads it, got {self}")
        return self._pairs()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in BlockMask.__annotations__:
            raise AttributeError(f"LayerMask has no attribute {name}")
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.tensor()[index]

    def __invert__(self) -> Tensor:
        return ~self.tensor()

    def __and__(self, other: Tensor) -> Tensor:
        return self.tensor() & other

    def __add__(self, scores: Tensor) -> Tensor:
        """As of the float mask: scores of masked pairs are the least number there is."""
        found: Tensor = scores.masked_fill(~self.tensor(), torch.finfo(scores.dtype).min)
        return found

    __rand__, __radd__ = __and__, __add__

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def ndim(self) -> int:
        """4, as of the tensor."""
        return 4

    def contiguous(self) -> LayerMask:
        """Itself: generation with a static cache asks."""
        return self

    def to(self, device: Any) -> LayerMask:  # type: ignore[override]
        """On a device, for models over several ones."""
        made = self.arguments.get("mask")
        if made is None:
            return self
        moved = {"mask": made.with_tensors([t.to(device) for t in made.tensors])}
        return LayerMask(self._shape, self.arguments | moved, self._pairs and (lambda: self.tensor().to(device)))

    def __repr__(self) -> str:
        return f"LayerMask(shape={self._shape}, {self.arguments})"

    __str__ = __repr__


# ---- the mask


def layer_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, **options: Any
) -> LayerMask | Tensor | None:
    """The mask of a forward's layers; with the arguments of transformers' mask functions (`masking_utils.sdpa_mask`).

    Of its options the `mask_function`, the bool `attention_mask` (batch, up to kv_offset + kv_length) and
    `allow_is_bidirectional_skip` are read. Returns None only where a model asks for that: no mask at all.

    Outside of torch.compile it waits for the device once where there is an `attention_mask`: one that marks no key as
    padding is no mask, and where padding lies at the ends, intervals say all.
    """
    place = Place(q_length, kv_length, q_offset, kv_offset, options.get("device"))
    padded = options.get("attention_mask")
    shape = (batch_size, 1, q_length, kv_length)
    function = READ_BY_THE_MODEL.get(getattr(options.get("config"), "model_type", ""))
    if function is not None:
        return _pairs(shape, place, options, function)
    pairs = partial(_pairs, shape, place, options)
    try:
        band = _band(options["mask_function"])
    except _Unknown:
        return LayerMask(shape, {"mask": of_pairs(pairs())}, pairs)
    if q_length == 1 and band.is_window and not torch.compiler.is_compiling():
        first = None if padded is None else _first_seen(padded)
        if (first is not None) if padded is not None else isinstance(q_offset, Tensor):
            end = kv_offset + kv_length if padded is None else padded.shape[-1]
            one = of_one(band, place, first, end)
            found = {"causal": False, "window": (None, None)} if one is None else {"mask": one}
            return LayerMask(shape, found, pairs)
    seen, together = _padding(padded, place)
    if seen is None and band.is_everything and options.get("allow_is_bidirectional_skip"):
        return None
    if seen is None and band.is_window:
        left = None if place.reaches_all(band.left) else band.left
        if left is band.right is None or place.last_is_last:
            return LayerMask(shape, {"causal": band.right == 0, "window": (left, band.right)}, pairs)
    return LayerMask(shape, {"mask": mask(band, place, seen, together)}, pairs)


def context_mask(sharding: Sharding, *, causal: bool = True, **options: Any) -> LayerMask:
    """What a model is given as `attention_mask` where its sequence lies on several ranks.

    Shard `input_ids` by `sartor.distributed.shard` and pass `position_ids` made by `positions`. A model of several
    kinds of layers takes a dict of them, as {"full_attention": ..., "sliding_attention": ...}.

    Args:
        sharding: how the sequence lies on ranks.
        causal, **options: of `sartor.distributed.attention`: `group` or `mesh`, `method`, `window`, `mask`, `timeout`;
            positions are those of the whole sequence.
    """
    shape = (1, 1, max(sharding.sizes), sharding.seqlen)
    return LayerMask(shape, {"causal": causal, "layout_of_sequence": sharding, **options})


def _padding(attention_mask: Tensor | None, place: Place) -> tuple[Tensor | None, bool]:
    """Which keys are seen, (batch, seqlen_kv), or None for all; and whether those are known to lie together."""
    if attention_mask is None:
        return None, True
    end = place.kv_offset + place.seqlen_kv
    missing = end - attention_mask.shape[-1]
    seen = torch.nn.functional.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask
    seen = seen[:, place.kv_offset : end].bool()
    if torch.compiler.is_compiling():
        return seen, False
    lo, hi, filled = hull(seen)
    everywhere = filled & (hi - lo == place.seqlen_kv)
    to_the_end = filled & (hi == attention_mask.shape[-1])
    whole, together, at_the_left = torch.stack([everywhere.all(), filled.all(), to_the_end.all()]).tolist()
    if at_the_left and not place.kv_offset and not whole:
        _PROMPT[:] = [(attention_mask.clone(), lo.view(-1, 1, 1, 1))]
    return None if whole else seen, together


_PROMPT: list[tuple[Tensor, Tensor]] = []  # the last mask with padding at the left alone, and the first keys seen


def _first_seen(attention_mask: Tensor) -> Tensor | None:
    """The first key that each item sees, (batch, 1, 1, 1), where this is the last prompt's mask followed by tokens that
    all see: as in every step of generation."""
    for prompt, first in _PROMPT:
        more = attention_mask.shape[-1] - prompt.shape[-1]
        alike = all(getattr(prompt, a) == getattr(attention_mask, a) for a in ("dtype", "device", "ndim"))
        if not alike or more < 0 or attention_mask.shape[0] != prompt.shape[0]:
            continue
        if torch.equal(torch.nn.functional.pad(prompt, (0, more), value=True), attention_mask):
            return first
    return None


def _pairs(
    shape: tuple[int, int, int, int], place: Place, options: dict[str, Any], function: str = "sdpa_mask"
) -> Tensor:  # fmt: skip
    """The mask of this shape as a function of transformers makes it: a bool tensor for SDPA, by default, or a float."""
    known = {"mask_function", "attention_mask", "use_vmap", "device", "dtype"}
    found: Tensor = getattr(_masking_utils(), function)(
        batch_size=shape[0], q_length=shape[2], kv_length=shape[3], q_offset=place.q_offset, kv_offset=place.kv_offset,
        allow_is_causal_skip=False, **{k: v for k, v in options.items() if k in known},
    )  # fmt: skip
    return found.expand(shape)


class _Unknown(Exception):
    """A mask function that is not among those that `_band` reads."""


def _band(function: Callable[..., Any]) -> Band:
    """What a mask function of transformers says, read from the function and what it closes over."""
    theirs = _masking_utils()
    if function is theirs.causal_mask_function:
        return Band(right=0)
    if function is theirs.bidirectional_mask_function:
        return Band()
    if torch.compiler.is_compiling():  # which cannot look into closures
        raise _Unknown
    maker, _, inner = getattr(function, "__qualname__", "").partition(".<locals>.")
    read = _READERS.get(maker)
    if not inner or read is None or function.__module__ != theirs.__name__:
        raise _Unknown
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return read(dict(zip(function.__code__.co_freevars, cells, strict=True)))


def _all_of(cells: dict[str, Any]) -> Band:
    found = Band()
    for part in map(_band, cells["mask_functions"]):
        found = _meet(found, part)
    return found


def _meet(a: Band, b: Band) -> Band:
    if a.blocks is not None or b.blocks is not None:
        return _cut(a, b)
    if (a.chunk is not None and b.chunk is not None) or (a.documents is not None and b.documents is not None):
        raise _Unknown

    def nearer(x: int | None, y: int | None) -> int | None:
        return x if y is None else y if x is None else min(x, y)

    chunks = a if a.chunk is not None else b
    return Band(
        nearer(a.left, b.left), nearer(a.right, b.right), chunks.chunk, chunks.chunk_start,
        b.documents if a.documents is None else a.documents, chunks.positions,
    )  # fmt: skip


def _cut(a: Band, b: Band) -> Band:
    """A band with blocks, of which only keys so far before the query are left."""
    blocks, cut = (a, b) if a.blocks is not None else (b, a)
    if cut.is_everything:
        return blocks
    if blocks.blocks_are_cut or blocks.left is not None or not cut.is_window or cut.right is not None:
        raise _Unknown
    return replace(blocks, left=cut.left, blocks_are_cut=True)


def _any_of(cells: dict[str, Any]) -> Band:
    parts = [_band(f) for f in cells["mask_functions"]]
    blocks = [p for p in parts if p.blocks is not None]
    others = [p for p in parts if p.blocks is None]
    if not (len(blocks) == len(others) == 1 and blocks[0].left == -1 and others[0].is_window):
        raise _Unknown
    return replace(others[0], blocks=blocks[0].blocks)


def _blocks(cells: dict[str, Any]) -> Band:
    """Alone: no key but those of the own block."""
    return Band(left=-1, right=-1, blocks=cells["block_sequence_ids"])


def _remapped(cells: dict[str, Any]) -> Band:
    """In documents, whose positions rise by 1: distances stay, and chunks are counted from other places."""
    found = _band(cells["mask_function"])
    if found.blocks is not None:
        raise _Unknown
    return found if found.chunk is None else replace(found, positions=cells["position_ids"])


_READERS: dict[str, Callable[[dict[str, Any]], Band]] = {
    "and_masks": _all_of,
    "or_masks": _any_of,
    "sliding_window_overlay": lambda cells: Band(left=cells["sliding_window"] - 1),
    "sliding_window_bidirectional_overlay": lambda cells: Band(cells["sliding_window"], cells["sliding_window"]),
    "chunked_overlay": lambda cells: Band(chunk=cells["chunk_size"], chunk_start=cells["left_padding"]),
    "blockwise_overlay": _blocks,
    "packed_sequence_mask_function": lambda cells: Band(documents=cells["packed_sequence_mask"]),
    "remap_positions_for_packed_sequence": _remapped,
}


# ---- the attention


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LayerMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    cache: Any = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`sartor.attention` as transformers calls attention.

    Args:
        module: whose `is_causal` counts where there is neither mask nor `is_causal`.
        query, key, value: (batch, heads, seqlen, dim); the key heads are not repeated.
        attention_mask: of `layer_mask`, a bool or float tensor (batch, 1 or heads_q, seqlen_q, seqlen_kv), or a
            FlexAttention `BlockMask`.
        dropout: the probability of attention's, drawn from PyTorch's generator of the device.
        s_aux: (heads_q,) sinks. position_bias: (1 or batch, heads_q, seqlen_q, seqlen_kv), added to the scores.
        sliding_window, cu_seq_lens_q, cu_seq_lens_k: as for flash attention; the window is read with the latter only,
            which otherwise is in the mask.
        cache: the pages of continuous batching. New keys are written to them, and those of the batch's sequences are
            copied from them, one after another, by transformers itself: a read and a write of each for a layer.
        sinks: (batch, heads_q, seqlen_q, 1), one of each query.

    Returns:
        (out (batch, seqlen_q, heads_q, dim_v), None): there are no attention weights.

    Raises:
        NotImplementedError: the model chose keys for each query (`indices`, `block_indices`), or gives a `block_table`.
    """
    for name in SELECT_KEYS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{name} must be None, got keys that the model chose for each query: use attn_implementation='sdpa'"
            )
    if kwargs.get("block_table") is not None:
        raise NotImplementedError("block_table must be None, got a tensor: set max_blocks_per_request to 0")
    if cache is not None:
        key, value, cu_seq_lens_k = _from_pages(module, key, value, cache, {"cu_seq_lens_k": cu_seq_lens_k, **kwargs})
    assert not isinstance(cu_seq_lens_k, dict)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if query.shape[0] != key.shape[0]:
        query = query.expand(key.shape[0], *query.shape[1:])
    lengths = query.shape[2], key.shape[2]
    if cu_seq_lens_q is not None:
        window = (None, None) if sliding_window is None else (sliding_window - 1, sliding_window - 1)
        ends = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        arguments: dict[str, Any] = {"mask": _packed(*ends, *lengths, is_causal, window)}
    elif isinstance(attention_mask, LayerMask):
        arguments = attention_mask.arguments
    elif isinstance(attention_mask, BlockMask):
        from sartor.integrations.flex import to_mask

        arguments = {"mask": to_mask(attention_mask, (*query.shape[:2], *lengths))}
    elif attention_mask is None:
        arguments = {"causal": "top_left" if is_causal and lengths[0] > 1 else False}
    else:
        arguments, position_bias = _of_tensor(attention_mask, position_bias)
    function: Any = attention
    if "layout_of_sequence" in arguments:
        from sartor.distributed import attention as function

    if dropout:
        arguments = arguments | {"dropout_p": dropout}
    out = function(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), softmax_scale=scaling,
        softcap=softcap or 0.0, sinks=s_aux, bias=position_bias, return_lse=sinks is not None, **arguments,
    )  # fmt: skip
    if sinks is not None:  # each adds exp(sink) to its row's sum of exponentials, which lse is the logarithm of
        out, lse = out
        out = out * torch.sigmoid(lse.unsqueeze(-1) - sinks).transpose(1, 2).to(out.dtype)
    assert isinstance(out, Tensor)
    return out.contiguous(), None


def _from_pages(
    module: Any, key: Tensor, value: Tensor, cache: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The keys and values of all sequences of a batch, (1, heads, total, dim), and where each begins."""
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=options)
    return key, value, options["cu_seq_lens_k"]


def _of_tensor(attention_mask: Tensor, position_bias: Tensor | None) -> tuple[dict[str, Any], Tensor | None]:
    """A mask, or what is added to the scores."""
    if attention_mask.dtype == torch.bool:
        return {"mask": attention_mask}, position_bias
    return {}, attention_mask if position_bias is None else position_bias + attention_mask


_PACKED = WeakIdKeyDictionary()  # by cu_seqlens: what else its mask was made of, and the mask, which layers share


def _packed(q: Tensor, kv: Tensor, seqlen_q: int, seqlen_kv: int, causal: bool, window: Any) -> Any:
    if torch.compiler.is_compiling() or q is not kv:
        return packed(q, kv, seqlen_q, seqlen_kv, causal, window)
    key = q._version, seqlen_q, seqlen_kv, causal, window
    found = _PACKED.setdefault(q, {})
    if key not in found:
        found[key] = packed(q, kv, seqlen_q, seqlen_kv, causal, window)
    return found[key]
