"""The command line in this process, and a configuration that nobody measured."""

import sys
from pathlib import Path

import pytest

from autotuner import cli
from autotuner.cli import console
from autotuner.ir.models import Model
from autotuner.plan.configuration import Configuration
from tests.cli.running import Ran, Run
from tests.made_up import made_up_configuration, small_model


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run the command line in this process, in an empty folder, with a database that is not there yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOTUNER_DATABASE", str(tmp_path / "empty.sqlite"))
    monkeypatch.setattr(console.out, "width", 200)

    def command(*arguments: str | Path) -> Ran:
        monkeypatch.setattr(sys, "argv", ["autotuner", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        code = ended.value.code
        return Ran(code if isinstance(code, int) else 0 if code is None else 1, captured.out, captured.err)

    return command


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return small_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def found(model: Model) -> Configuration:
    return made_up_configuration(model)
