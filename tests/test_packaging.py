"""What is installed: every file of the package, and every dependency at a stated version."""

import subprocess
import sys
import tomllib
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def files_below(folder: Path) -> set[str]:
    """Return the paths of all files of a folder, but for compiled ones, relative to where the folder is."""
    return {
        str(path.relative_to(folder.parent))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_a_wheel_carries_every_file_of_the_package_and_every_search_space(tmp_path: Path) -> None:
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    for folder in ("autotuner", "search_spaces"):
        copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / file, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", wheels, source], check=True)
    (wheel,) = wheels.glob("autotuner-*.whl")
    with ZipFile(wheel) as archive:
        carried = {name for name in archive.namelist() if name.startswith("autotuner/")}
    package = {name for name in files_below(source / "autotuner") if "/search_spaces/" not in name}
    spaces = {f"autotuner/{name}" for name in files_below(source / "search_spaces")}
    assert carried == package | spaces


def test_every_dependency_is_pinned_to_one_version_that_its_range_admits() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
