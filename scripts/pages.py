"""What the pages of benchmarks share: tables, and the commit that results are of."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """Return the commit that git says, or that it says none."""
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return asked.stdout.strip() or "unknown"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    names = list(heads)
    return [
        f"| {' | '.join(names)} |",
        "| --- " * len(names) + "|",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]
