"""What `docs/architecture.md` names is what there is: packages, vendors of kernels, tables, solvers."""

import re
import subprocess
import sys
from pathlib import Path

import autotuner
from autotuner.database.tables import Tables
from autotuner.kernels import KERNELS
from autotuner.measure.child import load_modules
from autotuner.solve import SOLVERS

PACKAGE = Path(autotuner.__file__).parent
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def rows(head: str) -> dict[str, list[str]]:
    """Return the cells of the one table that begins so, by the name in the first."""
    _, _, rest = TEXT.partition(f"\n| {head} |")
    assert rest, f"no table begins with {head!r}"
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {first.strip(" `"): others for first, *others in cells}


def test_the_tables_of_the_database_are_those_that_there_are() -> None:
    assert rows("table").keys() == Tables.metadata.tables.keys()


def test_the_packages_are_those_that_there_are() -> None:
    known = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    named = rows("package").keys()
    assert known == named


def test_the_files_to_open_for_what_is_added_are_there() -> None:
    for added, (_, files) in rows("to add").items():
        named = [name for name in re.findall(r"`([^`]+)`", files) if "/" in name]
        assert named or "](#" in files, added
        assert [name for name in named if not (ROOT / name).is_file()] == []


def test_what_runs_a_configuration_is_about_as_many_modules_as_it_says() -> None:
    program = """
import sys
before = set(sys.modules)
import autotuner
autotuner.apply
print(*(set(sys.modules) - before))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    own = [name for name in found if name.partition(".")[0] == "autotuner"]
    (said,) = re.findall(r"`autotuner.apply` imports (\d+) modules \((\d+) of this package", TEXT)
    assert len(found) < int(said[0]) + 20  # those of Python and pydantic differ with their versions
    assert int(said[1]) - 5 < len(own) < int(said[1]) + 5
    assert not {name.split(".")[1] for name in own if "." in name} & {"database", "fleet", "server", "solve", "tuner"}


def test_the_vendors_of_kernels_are_those_that_are_registered() -> None:
    load_modules(["autotuner.kernels.rules"])
    registered = {kernel.runs.split(":")[0].split(".")[2] for kernel in KERNELS}
    said = rows("package")["kernels"][0]
    named = re.findall(r"`([a-z]+)`", said.partition("implementations by vendor:")[2])
    assert set(named) == registered


def test_the_solvers_are_those_that_there_are() -> None:
    assert rows("name").keys() == SOLVERS.keys()
