"""replay.c, compiled where it is used by the C compiler that is there. Nothing needs it: without, Python launches."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sartor import cache as disk

SOURCE = Path(__file__).with_name("replay.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=c11", "-O2", "-fexceptions", "-shared", "-fPIC")
SECONDS = 30.0  # that a compiler may take


def why_not() -> str:
    """Why Python makes the launches one by one, in a sentence, or an empty string."""
    return str(_loaded()[1])


def loaded() -> Any:
    """What replay.c makes, where `why_not` has nothing to say."""
    return _loaded()[0]


@cache
def _loaded() -> tuple[Any, str]:
    """The library, or why there is none."""
    if os.environ.get("SARTOR_REPLAY", "1") == "0":
        return None, "SARTOR_REPLAY=0 is set"
    if os.name != "posix":
        return None, f"needs a system with a C compiler of Unix, this is {platform.system()}"
    path = next(filter(None, map(shutil.which, COMPILERS)), None)
    if path is None:
        return None, f"needs a C compiler, found none of {', '.join(COMPILERS)}"
    try:
        found = _load(path)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return None, f"{path} made nothing to load of {SOURCE.name}: {_told(error)}"
    found.sartor_replay.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    found.sartor_torch.argtypes, found.sartor_add.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_void_p]
    return found, ""


def _load(path: str) -> Any:
    """The library, compiled by this compiler or kept from an earlier time."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": SECONDS}
    version = subprocess.run([path, "--version"], **options).stdout
    facts = SOURCE.read_text(encoding="utf-8"), path, version, FLAGS, platform.machine()
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    content = disk.read(key)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "replay.so"
        if content is None:
            subprocess.run([path, *FLAGS, str(SOURCE), "-o", str(file)], **options)
            disk.write(key, file.read_bytes())
        else:
            file.write_bytes(content)
        return ctypes.CDLL(str(file))  # which outlives the file


def _told(error: Exception) -> str:
    """The last line of what an error says."""
    text = getattr(error, "stderr", None) or str(error)
    return str(text).strip().splitlines()[-1] if str(text).strip() else type(error).__name__
