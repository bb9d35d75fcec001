"""Parts that the pages of benchmarks share: tables, cases and bytes as text, and the commit that results are of."""

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class Stages:
    """Seconds of a benchmark's stages by name, printed as they end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            took = perf_counter() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + took
            print(f"  {name}: {took:.1f} s", flush=True)


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


def first_sentence(error: Exception) -> str:
    """Return what an error begins with; that of torch for memory goes on with all that the device has."""
    return str(error).splitlines()[0].partition(". GPU")[0]


def title(row: dict[str, Any]) -> str:
    """Return what tells a case of an encoder layer from the others."""
    return f"{row['preset']} {row['dtype']} dropout {row['dropout']:g}"


def mib(size_bytes: float | None, digits: int = 1) -> str:
    """Write bytes in MiB; nothing where they are not known."""
    return "" if size_bytes is None else f"{size_bytes / 2**20:.{digits}f}"
