"""Software of a host, as far as it decides what is measured: this package's version, and a digest of its sources."""

from functools import cache
from hashlib import sha256
from pathlib import Path

from autotuner.settings import package_version

ROOT = Path(__file__).parents[1]
MEASURING = ("ir", "kernels", "measure")
"""The packages that say what a call is, what runs it, and how it is timed."""

SUFFIXES = (".py", ".cuh", ".cpp", ".h")
DIGITS = 12


@cache
def own_software() -> str:
    """Return this host's version and digest, as "0.5.0 (3f1c09a2b7de)": equal where the same call is timed alike.

    The sources are read once, when this is first called: what is installed over them later is another process's.
    """
    return f"{package_version()} ({digest(ROOT)})"


def digest(root: Path) -> str:
    """Return the first digits of the SHA-256 of a package's measuring and kernel sources, with their paths."""
    found = sha256()
    for path in sorted(path for name in MEASURING for path in (root / name).rglob("*") if path.suffix in SUFFIXES):
        content = path.read_bytes()
        found.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()[:DIGITS]


def difference(theirs: str) -> str:
    """Return in what another host's software differs from this one's, "" where it does not."""
    if theirs == own_software():
        return ""
    return (
        f"another autotuner: its version and sources are {theirs or 'of before this was told'}, "
        f"and those of the tuning are {own_software()}; install the same on all hosts"
    )
