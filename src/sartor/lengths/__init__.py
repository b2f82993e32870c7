"""What `cu_seqlens` and the lengths in a cache say, as tables that masks read."""

from sartor.lengths.values import check

__all__ = ["check"]
