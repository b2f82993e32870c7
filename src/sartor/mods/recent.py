"""A cache of bounded size."""

from __future__ import annotations

from itertools import islice
from typing import Any


class Recent(dict[Any, Any]):
    """What was made lately, by key: the oldest eighth makes room where there are `most`. Threads may share it."""

    def __init__(self, most: int) -> None:
        self.most, self.pinned = most, 0

    def pin(self) -> None:
        """All that is there now stays for good."""
        self.pinned = len(self)

    def add(self, key: Any, value: Any) -> None:
        """Keep a value."""
        if len(self) >= self.most:
            for old in list(islice(self, self.pinned, self.pinned + self.most // 8)):
                self.pop(old, None)
        self[key] = value
