"""Masks and scores: small Python functions from which every kernel takes its code.

The functions here are for those of masks and scores, beside operators; `torch`'s of the same names do as well there.
"""

from sartor.mods.core import TEMPLATES, Mask, Score
from sartor.mods.expr import clamp, exp, exp2, log, maximum, minimum, sigmoid, sqrt, tanh, truncate, where
from sartor.mods.expr import power as pow
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
    "clamp",
    "document",
    "exp",
    "exp2",
    "from_tensor",
    "log",
    "maximum",
    "minimum",
    "packed",
    "packed_alibi",
    "pow",
    "prefix",
    "sigmoid",
    "softcap",
    "sqrt",
    "tanh",
    "truncate",
    "where",
    "window",
]

TEMPLATES.pin()  # those that graphs know from the import on
