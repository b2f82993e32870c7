"""Sartor: exact attention, made to measure."""

from sartor import mods
from sartor.api import attention, explain, merge_states
from sartor.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from sartor.compat.torch_sdpa import scaled_dot_product_attention
from sartor.errors import Unsupported
from sartor.lengths import check

__version__ = "0.1.0"

__all__ = [
    "Unsupported",
    "__version__",
    "attention",
    "check",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_states",
    "mods",
    "scaled_dot_product_attention",
]
