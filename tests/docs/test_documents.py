"""Each document, read from its first line to its last in a clone with an empty home, does what it says."""

import subprocess
from pathlib import Path
from shutil import copy

import pytest

from tests.docs.blocks import DOCUMENTS, ROOT, RUN, all_blocks, blocks
from tests.docs.clone import Clone, clone, own_network
from tests.docs.not_run import NOT_RUN, STAND_INS
from tests.docs.session import SKIP, commands, stays

WITH_CODE = [path for path in DOCUMENTS if any(block.language in RUN for block in blocks(path))]
UNEXPLAINED = {"README.md", "quickstart.md", "training.md"}
"""Documents that show no explanation of a plan."""
TUNES = {"tuning.md"}
"""Documents that begin with a tuning of bert-encoder:tiny; it has been done before the others are read."""


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What the first tuning leaves behind: `tiny.json` and `autotuner.sqlite`."""
    made = clone(tmp_path_factory.mktemp("tuned") / "clone")
    tune = ["bash", "-c", "autotuner tune bert-encoder:tiny --output tiny.json"]
    subprocess.run(tune, cwd=made.folder, env=made.environment(), check=True, capture_output=True)
    return [made.folder / "tiny.json", made.folder / "autotuner.sqlite"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: path.name)
def test_a_document_does_what_it_says(path: Path, tuned: list[Path], tmp_path: Path) -> None:
    made = clone(tmp_path / "clone")
    if path.name not in TUNES:
        for file in tuned:
            copy(file, made.folder)
    ran = read(path, made)
    if ran.returncode == SKIP:
        pytest.skip(ran.stdout.strip())
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    done = [line.rpartition(": ")[0] for line in ran.stdout.splitlines()]
    assert done == [block.name for block in blocks(path) if block.language in RUN]


def read(path: Path, made: Clone) -> "subprocess.CompletedProcess[str]":
    """Have a document read by the Python of a clone."""
    python = str(made.folder / ".venv" / "bin" / "python")
    session = [python, "-m", "tests.docs.session", str(path.relative_to(ROOT))]
    network = own_network()
    if network is not None:
        session = [*network, *session, "--own-network"]
    elif any(stays(command) for name, command in run_commands() if name == path.name):
        pytest.skip("it starts services: that needs `unshare`, and to be allowed a network of its own")
    environment = made.environment() | ({"DOCUMENT_UNEXPLAINED": "1"} if path.name in UNEXPLAINED else {})
    return subprocess.run(session, cwd=made.folder, env=environment, capture_output=True, text=True, check=False)


def run_commands() -> set[tuple[str, str]]:
    """Return the commands of all blocks, but for those that are not run, with their documents."""
    return all_commands() - set(NOT_RUN)


def all_commands() -> set[tuple[str, str]]:
    found = [block for block in all_blocks() if block.language == "bash"]
    return {(block.path.name, command) for block in found for command in commands(block.text)}


def test_what_is_not_run_is_there() -> None:
    assert set(NOT_RUN) <= all_commands()
    assert [file for file in STAND_INS if not (ROOT / file).exists()] == []
