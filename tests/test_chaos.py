"""Faults while a fleet tunes, in short: an actor, a task and the runner are killed."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")]

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(240)
def test_jobs_end_with_the_answer_of_a_quiet_machine_whatever_is_killed() -> None:
    ran = subprocess.run(
        [sys.executable, ROOT / "scripts" / "chaos", "--short"],
        capture_output=True,
        text=True,
        check=False,
        timeout=230,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "runner killed" in ran.stdout
