"""Context parallel: attention over one sequence whose tokens lie on several ranks of torch.distributed.

    out = sartor.distributed.attention(q, k, v, group=group, causal=True, layout_of_sequence="zigzag")

Importing it imports torch.distributed; `import sartor` does not import it.
"""

from sartor.distributed.agreement import Disagreement
from sartor.distributed.api import attention
from sartor.distributed.balance import balanced
from sartor.distributed.decode import decode
from sartor.distributed.explain import explain
from sartor.distributed.sdpa import context_parallel
from sartor.distributed.sharding import Sharding, positions, shard, unshard

__all__ = [
    "Disagreement",
    "Sharding",
    "attention",
    "balanced",
    "context_parallel",
    "decode",
    "explain",
    "positions",
    "shard",
    "unshard",
]
