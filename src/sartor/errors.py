"""Errors that say what was expected, what came, and what would help."""

from __future__ import annotations

from collections.abc import Mapping


class Unsupported(NotImplementedError):
    """No kernel, or not the kernel asked for, can run a valid problem. The message lists every kernel's reasons."""

    def __init__(self, problem: object, reasons: Mapping[str, list[str]]) -> None:
        self.problem = problem
        self.reasons = dict(reasons)
        lines = [f"no kernel can run {problem}"]
        for name, why in reasons.items():
            lines += [f"  {name} cannot because:"] + [f"    {reason}" for reason in why]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type, tuple[str, dict[str, list[str]]]]:
        """The problem as text, which takes no plan and no program to another process."""
        return type(self), (str(self.problem), self.reasons)
