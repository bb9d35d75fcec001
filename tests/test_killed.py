"""`kill -9` in the middle of a tuning: what was stored stays, and the next run goes on from there."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotuner.database import open_database
from tests.made_up import small_model, without_compilers
from tests.stored import call_keys

pytestmark = pytest.mark.slow

KILLS = 2
SEED = 7


@pytest.mark.timeout(900)
def test_a_tuning_that_is_killed_several_times_loses_nothing_and_ends(tmp_path: Path) -> None:
    database, space = tmp_path / "killed.sqlite", without_compilers(tmp_path)
    small_model(tmp_path)
    command = [
        sys.executable, "-m", "autotuner.cli", "tune", f"{tmp_path}/small.yaml:wide", "--database", str(database),
        "--space", str(space), "--no-end-to-end", "--json",
    ]  # fmt: skip
    environment = os.environ | {"AUTOTUNER_CACHE": str(tmp_path / "cache")}
    moments = random.Random(SEED)
    known: set[str] = set()
    killed = 0
    for _ in range(KILLS):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wanted = len(known) + moments.randint(0, 3)
        while process.poll() is None and len(call_keys(database)) < wanted:
            time.sleep(0.05)
        time.sleep(moments.uniform(0.0, 1.0))
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        now = set(call_keys(database))
        assert known <= now
        known = now
    assert killed >= 1, "the tuning was over too soon for this test to show anything"

    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert '"solver": "exact"' in finished.stdout
    assert known <= set(call_keys(database))
    with open_database(database) as opened:
        jobs = opened.queue.jobs()
    calls = call_keys(database)
    assert len(calls) == len(set(calls)), "a call is stored once"
    assert jobs[0].state == "finished"
    assert {job.state for job in jobs} <= {"finished", "interrupted"}
    assert jobs[0].counts["reused"] == len(known), "what was stored before is not measured again"
