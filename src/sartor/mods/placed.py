"""Captured tensors that are read at the position, as kernels read every aux value: by the strides of a view."""

from __future__ import annotations

from typing import Any

import torch

from sartor.checks import needs_operator

POSITIONS = "b", "h", "q", "kv"
Indices = tuple[tuple[str, Any], ...]  # of each dim of a tensor ("sym", name) or ("const", number)


class Placed:
    """A tensor, and the indices that it is read by. The view is made anew where the tensor holds other data than
    before: `module.to` and `p.data = ` leave earlier views behind."""

    def __init__(self, tensor: torch.Tensor, indices: Indices) -> None:
        self.tensor, self.indices = tensor, indices
        self.varies = [n != 1 for n in tensor.shape]
        self.made: tuple[Any, Any] = None, None  # what the tensor was, and the view of that

    def __reduce__(self) -> tuple[Any, ...]:
        return Placed, (self.tensor, self.indices)

    def view(self) -> torch.Tensor:
        """Of what the tensor holds now. It has a gradient where the tensor wants one, wherever it is made."""
        t = self.tensor
        if needs_operator(t):  # it may have no address
            return at_positions(t, self.indices)
        was, view = self.made
        now = t.data_ptr(), t.dtype, t.device, t.shape, t.stride(), t.requires_grad
        if now != was:
            if [n != 1 for n in t.shape] != self.varies:  # which the mod's text and intervals depend on
                raise ValueError(
                    "a tensor that a mask or score captured must have size 1 along the same dims as when that was made,"
                    f" got shape {tuple(t.shape)}: make the mask or score anew"
                )
            with torch.inference_mode(False):
                view = at_positions(t, self.indices)
            self.made = now, view
        return view  # type: ignore[no-any-return]


def at_positions(t: torch.Tensor, indices: Indices) -> torch.Tensor:
    """A view of four dims (b, h, q, kv), of size 1 where no index names one."""
    t = t[tuple(value if op == "const" else slice(None) for op, value in indices)]
    names = [value for op, value in indices if op == "sym"]
    t = t.permute([names.index(n) for n in POSITIONS if n in names])
    return t[tuple(slice(None) if n in names else None for n in POSITIONS)]
