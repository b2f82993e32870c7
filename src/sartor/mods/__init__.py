"""Masks and scores: small Python functions from which every kernel takes its code."""

from sartor.mods.core import Mask, Score
from sartor.mods.expr import maximum, minimum, tanh, where
from sartor.mods.masks import cached, causal, document, from_tensor, packed, prefix, window
from sartor.mods.scores import alibi, bias, cached_alibi, packed_alibi, softcap

__all__ = [
    "Mask",
    "Score",
    "alibi",
    "bias",
    "cached",
    "cached_alibi",
    "causal",
    "document",
    "from_tensor",
    "maximum",
    "minimum",
    "packed",
    "packed_alibi",
    "prefix",
    "softcap",
    "tanh",
    "where",
    "window",
]
