"""Triton's interpreter without work whose result it has already, or throws away: it computes the same in a third of the
time. Its parts are those of Triton 3.6; with other releases it runs as it comes.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import cache

import triton
import triton.language as tl
from triton.language.core import constexpr, is_builtin
from triton.runtime import interpreter

NAMES, DTYPES, BLOCKS, PATCH = {}, {}, {}, interpreter._patch_lang


def _patch_builtin(package, builder, scope):
    """Only a patch changes what Triton's modules hold, and a patch is of a name that was a built-in function before."""
    if package not in NAMES:
        NAMES[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
    for name in NAMES[package]:
        if is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, builder, scope)


@cache
def _languages(fn):
    return [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]


def _patch_lang(fn):
    """What a kernel's launch has patched is there for the functions that it calls."""
    found = _languages(fn)
    if found and not any(map(is_builtin, (tl.tensor.__add__, *(language.load for language in found)))):
        return interpreter._LangPatchScope()
    return PATCH(fn)


def _get_np_dtype(dtype, ask=interpreter._get_np_dtype):
    name = "pointer" if dtype.scalar.is_ptr() else dtype.scalar.name
    if name not in DTYPES:
        DTYPES[name] = ask(dtype)
    return DTYPES[name]


@cache
def _sizes(*shape):
    return constexpr(math.prod(shape)), tl.tuple([constexpr(n) for n in shape])


def _tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _sizes(*(type.shape.values if type.is_block() else ()))


def _block(self, element_ty, shape, init=tl.block_type.__init__):
    key = tuple(n.value if isinstance(n, constexpr) else n for n in shape)
    if key not in BLOCKS:
        init(self, element_ty, shape)
        BLOCKS[key] = self.shape, self.numel, str(self.shape)
    self.element_ty = element_ty
    self.shape, self.numel, text = BLOCKS[key]
    self.name = f"<{text}, {element_ty}>"


def hasten():
    if not triton.__version__.startswith("3.6."):
        return
    interpreter._patch_builtin, interpreter._patch_lang = _patch_builtin, _patch_lang
    interpreter._get_np_dtype = _get_np_dtype
    tl.tensor.__init__, tl.block_type.__init__ = _tensor, _block
    # It computes whether each sum of integers overflows, but asserts that it does not only where it debugs
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
