"""All ranks of a group must make the same call. Whether they do is asked once for each configuration: what one rank
finds wrong, or has other than the rest, becomes an error on all of them instead of a wait without end."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sartor.distributed.transport import Transport

# What each group agreed on last. Groups share none of it: a rank of two groups would forget what others still know, and
# ask again while they do not.
_AGREED: WeakKeyDictionary[Any, OrderedDict[str, None]] = WeakKeyDictionary()
_MOST_AGREED = 4096  # of a group
WIDTH = 1024  # bytes of a description that other ranks get to read


class Disagreement(ValueError):
    """Ranks of a group called with arguments that do not go together; the message has each rank's."""


def agree(transport: Transport, *descriptions: str, device: torch.device, error: Exception | None = None) -> None:
    """Raise on every rank unless all have these descriptions, and none has an error.

    One that all agreed on is not asked again; a rank that comes with a new one while others do not waits for them until
    the time limit of the group, or that of the call, is over.
    """
    if error is not None:
        tell(transport, error, device)
        raise error
    if transport.ranks == 1:
        return
    agreed = _AGREED.setdefault(transport.group, OrderedDict())
    new = [one for one in dict.fromkeys(descriptions) if one not in agreed]
    for one in descriptions:  # in the same order on all ranks, or they would forget others
        if one in agreed:
            agreed.move_to_end(one)
    if not new:
        return
    description = "; ".join(new)
    others = _exchange(transport, description, False, device)
    digest = _hash(description)
    wrong = [f"rank {rank}: {text}" for rank, (text, other, bad) in enumerate(others) if bad or other != digest]
    if wrong:
        own = f"rank {transport.rank}: {description[:WIDTH]}"
        raise Disagreement("\n  ".join(["all ranks of the group must make the same call, got", own, *wrong]))
    agreed.update(dict.fromkeys(new))
    while len(agreed) > _MOST_AGREED:
        agreed.popitem(last=False)


def tell(transport: Transport, error: Exception, device: torch.device) -> None:
    """Make `agree` raise on the other ranks, because of an error on this one."""
    if transport.ranks > 1:
        _exchange(transport, f"{type(error).__name__}: {error}", True, device)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _exchange(transport: Transport, said: str, bad: bool, device: torch.device) -> list[tuple[str, bytes, bool]]:
    """What every rank says: the beginning of its text, the digest of the whole, and whether it is an error."""
    text = said.encode()[:WIDTH]
    row = bytes([bad]) + _hash(said) + text + b"\0" * (WIDTH - len(text))
    mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
    rows = transport.gather([mine], [[tuple(mine.shape)]] * transport.ranks)
    found = [bytes(t.cpu().tolist()) for (t,) in rows]
    return [(r[33:].rstrip(b"\0").decode(errors="replace"), r[1:33], bool(r[0])) for r in found]
