"""What needs torch alone is tested on the lowest and the newest torch, by Python 3.10 to 3.14: where there is such a
Python, and pip finds a build of torch for it that is small. Of each it says what is done, or why not.

Run by the Python that `make test` has tested with."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path
from shutil import which

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = [f"3.{minor}" for minor in range(10, 15)]
SMALL = 300  # MB; CPU builds take 200, those for CUDA 500 to 900, and gigabytes of libraries with them
WAIT = 60  # seconds for pip to say what it would fetch
WHEEL = r"(?P<file>\S*torch-(?P<version>[^-]+)-\S+\.whl)"


def wheel(python: str, torch: str) -> tuple[str, float] | None:
    """The version of torch that pip would install for a Python, and its MB; None where there is none. Fetches nothing
    large: pip is stopped as soon as it says what it begins to fetch."""
    with tempfile.TemporaryDirectory() as folder:
        ask = [sys.executable, "-u", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
        ask += ["--python-version", python, "-d", folder, torch]
        with subprocess.Popen(ask, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as pip:
            late = threading.Timer(WAIT, pip.kill)
            late.start()
            assert pip.stdout is not None
            found = next(filter(None, map(told, pip.stdout)), None)
            late.cancel()
            pip.kill()
    return found


def told(line: str) -> tuple[str, float] | None:
    """The version and the MB of torch in a line of pip's, if it is of a wheel."""
    match = re.match(rf"\s*(?:Downloading|Processing)\s+{WHEEL}(?P<rest>.*)", line)
    if match is None:
        return None
    size = re.search(r"\(([0-9.]+) (kB|MB|GB)\)", match["rest"])
    if size is None:  # a file of this machine's
        file = Path(match["file"].removeprefix("file://"))
        return match["version"], file.stat().st_size / 1e6 if file.exists() else 0.0
    return match["version"], float(size[1]) * {"kB": 1e-3, "MB": 1.0, "GB": 1e3}[size[2]]


def why_not(python: str, found: tuple[str, float] | None, tested: set[tuple[str, str]]) -> str:
    """The sentence that says why a pair is not tested, or nothing."""
    if not there(f"python{python}"):
        return f"skipped, as there is no python{python}"
    if found is None:
        return f"skipped, as pip names no wheel within {WAIT} s"
    if (python, found[0]) in tested:
        return "tested already"
    big = f"skipped, as its wheel has {found[1]:.0f} MB, more than {SMALL}: a build for CUDA"
    return big if found[1] > SMALL else ""


def there(python: str) -> bool:
    """Whether this command runs: what pyenv puts on the path for a Python that is not chosen ends with an error."""
    return which(python) is not None and subprocess.run([python, "--version"], capture_output=True).returncode == 0


def main() -> None:
    """Raises CalledProcessError where tests fail."""
    lowest = re.search(r'"torch>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert lowest is not None
    own = f"{sys.version_info[0]}.{sys.version_info[1]}", version("torch")
    tested = {own}
    print(f"Python {own[0]}, torch {own[1]}: tested by `make test`")
    for python in PYTHONS:
        for torch in (f"torch=={lowest[1]}.*", "torch"):
            found = wheel(python, torch) if there(f"python{python}") else None
            sentence = why_not(python, found, tested)
            print(f"Python {python}, {torch}{f' is {found[0]}' if found else ''}: {sentence or 'tests'}", flush=True)
            if found and not sentence:
                tested.add((python, found[0]))
                place = f"{ROOT / '.venv'}-{python}-{found[0]}"
                make = ["make", "test-torch", f"PYTHON=python{python}", f"TORCH=torch=={found[0]}", f"VENV={place}"]
                subprocess.run(make, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
