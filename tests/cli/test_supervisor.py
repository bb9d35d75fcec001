"""A process that is kept alive: started anew, ended with whoever supervises it, also by kill -9."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotuner.cli.supervisor import Supervisor
from tests.cli.living import gone, until


def written(folder: Path, number: int) -> list[int]:
    """Wait until so many processes have written their number into a folder, and return them, the first first."""

    def files() -> list[Path]:
        return [p for p in folder.glob("*.started") if p.read_text()]

    until(lambda: len(files()) >= number)
    return [int(p.read_text()) for p in sorted(files(), key=lambda p: p.stat().st_mtime_ns)]


def program(folder: Path, then: str) -> list[str]:
    """Return a command that writes its process number into a folder and goes on with some Python."""
    return [sys.executable, "-c", f"""
import os, pathlib, signal, sys, time
def started():
    name = pathlib.Path({str(folder)!r}) / f"{{time.time_ns()}}.started"
    name.with_suffix(".part").write_text(str(os.getpid()))
    name.with_suffix(".part").rename(name)
{then}
"""]  # fmt: skip


def test_a_process_that_dies_is_started_anew_and_what_became_of_it_is_told(tmp_path: Path) -> None:
    told: list[dict[str, object]] = []
    with Supervisor(
        program(tmp_path, "started(); time.sleep(600)"), lambda _, **facts: told.append(facts), first_pause_s=0.01
    ):
        (first,) = written(tmp_path, 1)
        os.kill(first, signal.SIGKILL)
        _, second = written(tmp_path, 2)
        assert gone(first)
    assert gone(second)
    assert told == [{"process": first, "end": "signal 9", "starts_again_in_s": 0.01}]


def test_pauses_before_a_new_start_double(tmp_path: Path) -> None:
    told: list[dict[str, object]] = []
    with Supervisor(
        program(tmp_path, "started(); sys.exit(4)"), lambda _, **facts: told.append(facts), first_pause_s=0.01
    ):
        written(tmp_path, 4)
    assert [(facts["end"], facts["starts_again_in_s"]) for facts in told[:3]] == [
        ("exit code 4", pause_s) for pause_s in (0.01, 0.02, 0.04)
    ]


def test_a_process_is_asked_to_end_and_nothing_starts_after_it(tmp_path: Path) -> None:
    then = "signal.signal(15, lambda *_: sys.exit(0)); started(); time.sleep(600)"
    told: list[dict[str, object]] = []
    with Supervisor(program(tmp_path, then), lambda _, **facts: told.append(facts)):
        (only,) = written(tmp_path, 1)
    assert gone(only)
    assert (told, len(written(tmp_path, 1))) == ([], 1)


def test_a_process_that_does_not_end_when_asked_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotuner.cli.supervisor.GRACE_S", 0.1)
    with Supervisor(program(tmp_path, "signal.signal(15, signal.SIG_IGN); started(); time.sleep(600)"), print):
        (only,) = written(tmp_path, 1)
    assert gone(only)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_a_process_dies_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    child = "from autotuner.cli.supervisor import end_with; end_with(int(sys.argv[1])); started(); time.sleep(600)"
    parent = f"""
import os, time
from autotuner.cli.supervisor import Supervisor
with Supervisor([*{program(tmp_path, child)!r}, str(os.getpid())], print):
    time.sleep(600)
"""
    supervisor = subprocess.Popen([sys.executable, "-c", parent])
    (only,) = written(tmp_path, 1)
    assert not gone(only)
    supervisor.kill()
    supervisor.wait()
    until(lambda: gone(only))


def test_a_process_whose_parent_went_before_it_began_ends(tmp_path: Path) -> None:
    then = "from autotuner.cli.supervisor import end_with; end_with(1 << 22); started()"
    ran = subprocess.run(program(tmp_path, then), check=False)
    assert ran.returncode == 0
    assert not list(tmp_path.glob("*.started"))
