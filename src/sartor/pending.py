"""What no GPU has run yet: parts of GPU kernels that were written since their tests last ran on one.

A kernel refuses them in words, so that none is taken before its tests have passed; those tests take them by
SARTOR_PENDING=1. Once `sartor verify` has passed, the entry goes, here and in benchmarks/results/h200/pending.md.
"""

from __future__ import annotations

import os

PARTS: dict[str, str] = {}  # by name, in words


def refused(*names: str) -> list[str]:
    """A sentence for each of these parts, unless they are asked for all the same."""
    if os.environ.get("SARTOR_PENDING") == "1":
        return []
    return [f"{PARTS[name]}: no GPU has run its tests yet (SARTOR_PENDING=1 takes it all the same)" for name in names]
