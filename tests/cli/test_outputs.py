"""Files that commands write: refused before anything takes time, and never one that the command reads."""

import os
from pathlib import Path
from typing import Any

import pytest

from autotuner.plan.configuration import Configuration, save_configuration
from tests.cli.running import Run
from tests.made_up import small_model

UNWRITABLE = [(".", "Is a directory"), ("missing/found.json", "No such file or directory"),
              ("old.txt/found.json", "Not a directory")]  # fmt: skip


@pytest.fixture
def files(found: Configuration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration, a model file and a text; whatever measures, asks or solves ends the test."""

    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError("what was asked for began before its output was checked")

    for name in (
        "autotuner.api.tuning.tune",
        "autotuner.server.client.Client.best",
        "autotuner.tuner.build_configuration",
        "autotuner.plan.report.render",
    ):
        monkeypatch.setattr(name, too_late)
    save_configuration(found, tmp_path / "found.json")
    save_configuration(found, tmp_path / "page.html")
    small_model(tmp_path)
    (tmp_path / "old.txt").write_text("kept")
    (tmp_path / "linked.json").symlink_to("found.json")
    os.link(tmp_path / "found.json", tmp_path / "hard.json")
    return tmp_path


@pytest.mark.parametrize("output, reason", UNWRITABLE)
@pytest.mark.parametrize(
    "command",
    [["tune", "small.yaml:wide"], ["solve", "small.yaml:wide"], ["report", "found.json"], ["best", "small.yaml:wide"]],
    ids=lambda command: command[0],
)
def test_an_output_that_cannot_be_written_is_refused_first(
    run: Run, files: Path, command: list[str], output: str, reason: str
) -> None:
    before = sorted(files.iterdir())
    ran = run(*command, "--output", output)
    assert (ran.code, ran.out) == (2, "")
    assert f"{output}: cannot be written ({reason}); name a file in a folder that can" in ran.err
    assert sorted(files.iterdir()) == before


@pytest.mark.parametrize(
    "arguments, name",
    [
        (["report", "found.json", "--output", "found.json"], "found.json"),
        (["report", "found.json", "--output", "./linked.json"], "found.json"),
        (["report", "found.json", "--output", "hard.json"], "found.json"),
        (["report", "page.html"], "page.html"),
        (["report", "found.json", "--database", "full.sqlite", "--output", "full.sqlite"], "full.sqlite"),
        (["report", "found.json", "--space", "old.txt", "--output", "old.txt"], "old.txt"),
        (["tune", "small.yaml:wide", "--output", "small.yaml"], "small.yaml:wide"),
        (["tune", "bert-encoder:tiny", "--space", "old.txt", "--output", "old.txt"], "old.txt"),
        (["tune", "bert-encoder:tiny", "--output", "empty.sqlite"], "empty.sqlite"),
        (["solve", "small.yaml:wide", "--output", "small.yaml"], "small.yaml:wide"),
        (["solve", "small.yaml:wide", "--problem", "small.yaml"], "small.yaml:wide"),
        (["solve", "small.yaml:wide", "--problem", "new.json", "--output", "new.json"], "new.json"),
        (["best", "small.yaml:wide", "--output", "small.yaml"], "small.yaml:wide"),
    ],
)
def test_what_a_command_reads_is_never_overwritten(run: Run, files: Path, arguments: list[str], name: str) -> None:
    before = {path: path.read_bytes() for path in files.iterdir()}
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "this file is given to be read" in ran.err
    assert f"{name}); name another one to write" in ran.err
    assert {path: path.read_bytes() for path in files.iterdir()} == before


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("flag, value", [("--output", "new.json"), ("--problem", "new.json"), ("--extent", "l=3"),
                                         ("--option", "a=b"), ("--dtype", "float32"), ("--database", "a.sqlite"),
                                         ("--threads", "1")])  # fmt: skip
def test_a_saved_problem_takes_no_options_of_a_model(run: Run, flag: str, value: str) -> None:
    ran = run("solve", "found.json", flag, value)
    assert (ran.code, f"{flag} with a saved problem: it goes with a model" in ran.err) == (2, True)
