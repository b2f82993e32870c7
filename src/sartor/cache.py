"""The disk cache of machine code: files that name what they were compiled for, that only their owner can write.

A file is named by the start of its key, a hash of everything its content depends on, and holds the whole key under its
checksum: one that was renamed, damaged or cut short is not read. What another user owns or may write is not read
either, since it is run as code. Files are written whole and renamed into place, so processes may share the folder. The
least recently used ones go when all together take more than `LIMIT` bytes.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FORMAT = b"sartor cubin 2\n"
SUFFIX = ".cubin"
LIMIT = 1 << 30  # bytes; one kernel takes some 50 KiB
DAY = 86400.0  # seconds after which reading a file says that it is in use


class Contents(NamedTuple):
    """What lies in the folder: files that are read, their bytes, and sentences on what is not."""

    files: int
    size: int
    ignored: tuple[str, ...]


def folder() -> Path:
    """$SARTOR_CACHE, else `sartor` in the user's cache folder. One without a home has `~` for it."""
    chosen = os.environ.get("SARTOR_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "sartor")
    return Path(os.path.expanduser(chosen))


def read(key: str) -> bytes | None:
    """What was written under this key; None where there is nothing, or nothing to trust."""
    file = _file(key)
    try:
        if distrusted(file.parent):
            return None
        with open(os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as opened:
            facts = os.fstat(opened.fileno())
            if _fault(facts):
                return None
            data = opened.read()
    except OSError:
        return None
    if time.time() - facts.st_mtime > DAY:
        with suppress(OSError):
            os.utime(file)
    start = len(FORMAT) + 32
    head = key.encode() + b"\n"
    whole = data.startswith(FORMAT) and hashlib.sha256(data[start:]).digest() == data[len(FORMAT) : start]
    return data[start + len(head) :] if whole and data[start:].startswith(head) else None


def write(key: str, content: bytes) -> None:
    """Keep `content`. A folder that cannot be written is no reason to fail: `sartor doctor` shows it."""
    body = key.encode() + b"\n" + content
    file = _file(key)
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=file.parent)  # of mode 0600
        try:
            with open(descriptor, "wb") as opened:
                opened.write(FORMAT + hashlib.sha256(body).digest() + body)
            os.replace(temporary, file)
        except BaseException:  # a full disk, Ctrl-C
            os.unlink(temporary)
            raise
        bound(LIMIT)


def contents() -> Contents:
    """What is in the folder now."""
    own, ignored = _files()
    found = distrusted(folder())
    return Contents(len(own), sum(facts.st_size for _, facts in own), (found,) if found else tuple(ignored))


def bound(limit: int) -> int:
    """Remove the least recently used files until the others take at most `limit` bytes; how many."""
    own, _ = _files()
    size, removed = sum(facts.st_size for _, facts in own), 0
    for file, facts in sorted(own, key=lambda item: item[1].st_mtime):
        if size <= limit:
            break
        with suppress(OSError):
            file.unlink()
        size, removed = size - facts.st_size, removed + 1
    return removed


def distrusted(path: Path) -> str:
    """Why what lies in a folder is not read, or an empty string: a folder that is not there yet has no fault."""
    try:
        fault = _fault(path.stat())
    except OSError:
        return ""
    return f"{path} is ignored: {fault}" if fault else ""


def _file(key: str) -> Path:
    return folder() / f"{key[:40]}{SUFFIX}"


def _fault(facts: os.stat_result) -> str:
    """What makes a file or folder one that somebody else may have written."""
    if not hasattr(os, "getuid"):
        return ""
    if facts.st_uid != os.getuid():
        return f"expected user {os.getuid()} as its owner, got {facts.st_uid}"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"expected that only its owner may write it, got mode {stat.S_IMODE(facts.st_mode):o}"
    return ""


def _files() -> tuple[list[tuple[Path, os.stat_result]], list[str]]:
    """Files that are read with their facts, and sentences on the others."""
    own, ignored = list[tuple[Path, os.stat_result]](), list[str]()
    with suppress(OSError), os.scandir(folder()) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                with suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    fault = "expected a file, got a link" if stat.S_ISLNK(facts.st_mode) else _fault(facts)
                    if fault:
                        ignored.append(f"{entry.path} is ignored: {fault}")
                    else:
                        own.append((Path(entry.path), facts))
    return own, ignored
