"""Every kernel that needs a GPU was verified on one from exactly its present sources, or is named as pending."""

import json
import re

import pytest

from sartor import kernels
from sartor.lab.report import GPU_KERNELS
from sartor.lab.suites import checkout

ROOT = checkout()
NAMES = [n for n in (*kernels.FORWARD, *kernels.BACKWARD) if n.startswith(GPU_KERNELS)]


def evidence() -> dict[str, set[str]]:
    """Hashes of each kernel for which a machine ran all GPU tests without a failure."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "benchmarks" / "results").glob("*/evidence.json"):
        run = json.loads(path.read_text())
        if run["passed"] and not run["failed"] and not run["over_budget"]:
            for name, digest in run["kernels"].items():
                found.setdefault(name, set()).add(digest)
    return found


def pending() -> set[str]:
    """Kernels named in a pending.md, with a reason."""
    texts = (path.read_text() for path in (ROOT / "benchmarks" / "results").glob("*/pending.md"))
    return {name for text in texts for name in re.findall(r"^- (\w+): \S", text, re.MULTILINE)}


@pytest.mark.skipif(ROOT is None, reason="evidence lies in a checkout")
@pytest.mark.parametrize("name", NAMES)
def test_kernel_has_evidence_or_is_pending(name: str) -> None:
    assert name in pending() or kernels.source_hash(name) in evidence().get(name, set()), (
        f"{name} changed since it was verified: run `sartor verify` on a GPU, or name it in pending.md with the reason"
    )
