"""Sartor: exact attention, made to measure.

A name is imported when it is first used, so that `sartor --help` need not wait for PyTorch. A process that uses no name
of it, but runs a graph that was exported in another one, imports `sartor.api` for the operators.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sartor import mods
    from sartor.api import attention, explain, merge_states
    from sartor.compat.flash_attn import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
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
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "merge_states",
    "mods",
    "scaled_dot_product_attention",
]

_HOMES = {
    "Unsupported": "errors", "attention": "api", "check": "lengths", "explain": "api", "merge_states": "api",
    "scaled_dot_product_attention": "compat.torch_sdpa",
    **{name: "compat.flash_attn" for name in __all__ if name.startswith("flash_attn_")},
}  # fmt: skip


def _imported(module: str) -> Any:
    """A module whose tensors are real ones, where a tracer that makes fake ones is the first to use a name, too."""
    if "torch" not in sys.modules:
        return import_module(module)
    with sys.modules["torch"].utils._python_dispatch._disable_current_modes():
        return import_module(module)


if not TYPE_CHECKING:  # to a type checker it would say that every name is there

    def __getattr__(name: str) -> Any:
        """A public name, or a module of the package; found once, since it is then in the module's namespace."""
        if name.startswith("__"):
            raise AttributeError(f"module 'sartor' has no attribute {name!r}")
        if name in _HOMES:
            globals()[name] = found = getattr(_imported(f"sartor.{_HOMES[name]}"), name)
            return found
        try:
            return _imported(f"sartor.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"sartor.{name}":
                raise
        raise AttributeError(f"module 'sartor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
