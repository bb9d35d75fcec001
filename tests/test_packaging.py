"""What is installed: every file of the package, and every dependency at a stated version."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.wheels import built_wheel, copied_source

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def files_below(folder: Path) -> set[str]:
    """Return the paths of all files of a folder, but for compiled ones, relative to where the folder is."""
    return {
        str(path.relative_to(folder.parent))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


COMPILED = """
import torch
import autotuner

layer = torch.nn.TransformerEncoderLayer(32, 2, 64, activation="gelu", batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
x = torch.randn(2, 8, 32)
compiled = torch.compile(model, backend="autotuner", options={"compiler": "eager"})
compiled(x).sum().backward()
print(autotuner.__file__)
print(autotuner.summary())
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel is built from, as in a clone."""
    return copied_source(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return built_wheel(source)


def test_a_wheel_carries_every_file_of_the_package_and_every_search_space(source: Path, wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        carried = {name for name in archive.namelist() if name.startswith("autotuner/")}
    package = {name for name in files_below(source / "autotuner") if "/search_spaces/" not in name}
    spaces = {f"autotuner/{name}" for name in files_below(source / "search_spaces")}
    assert carried == package | spaces


def test_a_wheel_in_a_clean_environment_compiles_a_model_in_three_lines(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, wheel], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # The dependencies; what lies there for a clone of this project is not looked at, since it is no site folder here.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AUTOTUNER"))}
    (tmp_path / "home").mkdir()
    given |= {"HOME": str(tmp_path / "home")}
    found = subprocess.run(
        [python, "-c", COMPILED], cwd=tmp_path, env=given, check=True, capture_output=True, text=True
    )
    where, *said = found.stdout.splitlines()
    assert Path(where).is_relative_to(packages)
    assert "0 of 2 regions run tuned" in " ".join(said)


def test_every_dependency_is_pinned_to_one_version_that_its_range_admits() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in map(Requirement, asked):
        if requirement.name == "autotuner":  # an extra that takes in another one
            assert requirement.extras <= project["optional-dependencies"].keys()
        else:
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
