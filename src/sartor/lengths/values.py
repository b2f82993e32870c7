"""Values of cu_seqlens and of cache lengths, which are data: when they are looked at, and how a wrong one is told.

On a CPU every call looks at them. Elsewhere looking waits for the device. So a tensor is looked at when it is first
seen, and no more when it is changed in place, as a decode loop does: the kernels clamp what they read, and one of
them tells what is wrong by writing to pinned memory of the host. A later call, or `check`, raises the error.
`SARTOR_CHECKS=0` in the environment spares GPUs both.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from sartor import driver
from sartor.device import capturing

CHECKS = os.environ.get("SARTOR_CHECKS", "1") != "0"
ARGUMENTS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_k", "lengths", "cache_seqlens")  # that kernels tell of
MOST_PLACES = 4096  # of one storage that are remembered


def check_ends(name: str, ends: Sequence[int], length: int) -> None:
    """Raise ValueError unless they are the ends of sequences one after another, of `length` tokens in all or fewer."""
    if ends[0] != 0 or any(b < a for a, b in pairwise(ends)):
        raise ValueError(f"{name} must begin with 0 and never fall, got {list(ends[:20])}")
    if ends[-1] > length:
        raise ValueError(f"{name} must end at the number of tokens, {length}, or before, got {ends[-1]}")


def check_filled(name: str, lengths: Sequence[int], capacity: int, added: int) -> None:
    """Raise ValueError unless they are between 0 and the places there are, with room for those that are added."""
    for n in lengths:
        if added and not 0 <= n <= capacity - added:
            raise ValueError(f"{name} must leave room for {added} more of {capacity} places, got {n}")
        if not 0 <= n <= capacity:
            raise ValueError(f"{name} must be between 0 and the {capacity} places there are, got {n}")


def look(name: str, t: torch.Tensor, check: Callable[..., None], *rest: int) -> None:
    """check(name, values of t, *rest) for t of one dim, where it is on a CPU or not yet seen; if wrong it stays so."""
    if t.device.type == "cpu":
        check(name, t.tolist(), *rest)
    elif CHECKS and not _seen(t) and not capturing(t.device):
        check(name, t.tolist(), *rest)
        _remember(t)


Places = dict[tuple[int, ...], Any]  # in a storage, each with what is known of it
Known = dict[int, tuple[Any, Places]]  # by the address of a storage's object, with what says that it lives
_SEEN: Known = {}
_LOOKED: Known = {}  # in which version and graph a kernel looked


def _of(known: Known, t: torch.Tensor) -> Places:
    """What is known of a tensor's storage while that lives."""
    storage = t.untyped_storage()
    key = id(storage)
    found = known.get(key)
    if found is None or found[0]() is not storage:
        found = known[key] = weakref.ref(storage, lambda _: known.pop(key, None)), {}
    return found[1]


def _add(places: Places, place: tuple[int, ...], state: Any = True) -> None:
    if len(places) >= MOST_PLACES:
        places.clear()
    places[place] = state


def _place(t: torch.Tensor) -> tuple[int, ...]:
    return t.data_ptr(), t.shape[0], t.stride(0)


def _seen(t: torch.Tensor) -> bool:
    return _place(t) in _of(_SEEN, t)


def _remember(t: torch.Tensor) -> None:
    _add(_of(_SEEN, t), _place(t))


def to_look_at(t: torch.Tensor, *rest: int) -> bool:
    """Whether a kernel is to look at t, and compare it with the rest: since none did, it was changed in place, or this
    is another graph. Those of all layers read the same lengths."""
    if not CHECKS:
        return False
    try:
        now = t._version, _graph(t.device)
    except RuntimeError:  # nothing counts the changes of what was made in inference mode
        return True
    places, place = _of(_LOOKED, t), (*_place(t), *rest)
    if places.get(place) == now:
        return False
    _add(places, place, now)
    return True


def _graph(device: torch.device) -> int:
    return driver.capture(torch._C._cuda_getCurrentRawStream(device.index)) if capturing(device) else 0


class Flag:
    """Pinned memory of the host that one device's kernels write to.

    Its first word says whether anything was wrong. Each argument has a word for each of what may be: a wrong value in
    the upper 32 bits, clipped to them, and below what its message has beside it; never 0, which is nothing wrong.
    """

    def __init__(self, device: torch.device, pinned: bool = True) -> None:
        self.device = device
        size = 1 + len(ARGUMENTS) * 5
        with torch.inference_mode(False):  # whose tensors cannot be changed in place outside of it
            self.words = torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.address = self.words.data_ptr()
        self.first = ctypes.c_int64.from_address(self.address)  # which reads in a fraction of a tensor's time

    def errors(self) -> list[str]:
        """What is wrong, and from now on nothing."""
        words = self.words.tolist()
        self.words.zero_()
        return [_text(i - 1, word) for i, word in enumerate(words) if i and word]


def _text(i: int, word: int) -> str:
    name, rule = ARGUMENTS[i // 5], i % 5
    value, beside = word >> 32, (word + 2**31) % 2**32 - 2**31
    return (
        f"{name} must begin with 0 and never fall, got {value} first",
        f"{name} must begin with 0 and never fall, got {value} after {beside}",
        f"{name} must end at the number of tokens, {beside}, or before, got {value}",
        f"{name} must be between 0 and the {beside} places there are, got {value}",
        f"{name} must leave room for the new keys: be between 0 and {beside}, got {value}",
    )[rule]


WORDS = {name: 1 + 5 * i for i, name in enumerate(ARGUMENTS)}  # where an argument's begin


_FLAGS: dict[int, Flag] = {}  # by the number of the device


def flag(device: torch.device) -> int:
    """The address of the device's flag, for its kernels. Raises ValueError where it is set."""
    found = address(device)
    if found and CHECKS and _FLAGS[device.index].first.value and not capturing(device):
        _raise(_FLAGS[device.index])
    return found


def address(device: torch.device) -> int:
    """The address of the device's flag, whether it is set or not.

    0, for none, where a graph is captured before any call outside of one: its memory cannot be allocated then.
    """
    index = device.index
    found = _FLAGS.get(index)
    if found is None:
        if capturing(device):
            return 0
        found = _FLAGS[index] = Flag(device)
    return found.address


def _raise(found: Flag) -> None:
    if found.device.type == "cuda":  # the word that says which may come after the one that says that there is one
        torch.cuda.synchronize(found.device)
    wrong = found.errors()
    if wrong:
        raise ValueError(f"{'; '.join(wrong)} (in an earlier call, whose kernels took the nearest value within bounds)")


def check() -> None:
    """Wait for the GPUs, and raise ValueError if a call found wrong values in `cu_seqlens` or cache lengths.

    Values are looked at when a tensor is first seen, and those on a CPU by every call. What was changed in place since
    then, on a GPU or by a CUDA graph that is replayed, is clamped, so that nothing is read or written out of bounds;
    the error is raised by this function, or by a later call on packed sequences or a cache outside of a graph. Lengths
    of a cache to which nothing is added are looked at again when torch has changed them, and in each graph that reads
    them: what other graphs or kernels do to them is clamped in silence.

    Not to be called while a CUDA graph is captured. Returns None if nothing was wrong since the last time.
    """
    for found in list(_FLAGS.values()):
        _raise(found)
