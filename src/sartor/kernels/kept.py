"""What was added to the scores of recent calls, for calls that add the same: bounded over all plans together."""

from __future__ import annotations

from typing import Any

import torch

from sartor.kernels.spec import Plan

DATA = 2**12  # numbers read up to which they are compared from call to call: slopes, lengths, a batch's documents
EACH = 2**21  # elements that one plan may keep
MOST = 2**23  # that all may: 32 MB of float32


class Kept:
    """Values by plan, beside copies of the tensors that they were made of; the oldest make room."""

    def __init__(self) -> None:
        self._found: dict[Plan, tuple[list[torch.Tensor], Any, int]] = {}

    def get(self, plan: Plan, data: list[torch.Tensor]) -> Any:
        """What was made of equal data, or None."""
        found = self._found.get(plan)
        return found[1] if found is not None and all(map(torch.equal, found[0], data)) else None

    def add(self, plan: Plan, data: list[torch.Tensor], value: Any, size: int) -> None:
        """Keep a value of so many elements, none of which lies in `data`."""
        if size > EACH or torch.is_inference_mode_enabled():  # autograd could not save what is made there
            return
        self._found.pop(plan, None)
        for old in list(self._found):
            if sum(s for _, _, s in list(self._found.values())) + size <= MOST:
                break
            self._found.pop(old, None)
        self._found[plan] = [t.clone() for t in data], value, size
