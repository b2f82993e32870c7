"""The command `sartor`. It needs the extra `lab`, and says so where that is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec

LAB = ("typer", "rich", "matplotlib", "numpy")


def main() -> None:
    """Run the command line."""
    missing = [name for name in LAB if find_spec(name) is None]
    if missing:
        sys.exit(f"the command line needs sartor[lab]: pip install 'sartor[lab]' (missing: {', '.join(missing)})")
    from sartor.lab.cli.app import app

    app(prog_name="sartor")
