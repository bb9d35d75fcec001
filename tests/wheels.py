"""A wheel of this package, built as in a clone."""

import subprocess
import sys
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

ROOT = Path(__file__).parents[1]


def copied_source(folder: Path) -> Path:
    """Copy what a wheel is built from, as a clone has it."""
    source = folder / "source"
    for name in ("autotuner", "search_spaces"):
        copytree(ROOT / name, source / name, symlinks=True, ignore=ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / file, source)
    return source


def built_wheel(source: Path) -> Path:
    """Build a wheel beside its source."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", source.parent, source], check=True)
    (wheel,) = source.parent.glob("autotuner-*.whl")
    return wheel


def made_wheel(folder: Path) -> Path:
    return built_wheel(copied_source(folder))
