"""`kill -9` in the middle of a tuning: what was stored stays, and the next run goes on from there."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from autotuner.database import open_database
from autotuner.models import search_spaces_dir

KILLS = 10
SEED = 7
EXTENTS = ("b=2", "l=6", "h=8", "n=2", "p=4", "f=12")


def without_compilers(folder: Path) -> Path:
    """Write the CPU's search space without the kernels that compile, which would take most of the time."""
    space = yaml.safe_load((search_spaces_dir() / "kernels" / "cpu.yaml").read_text())
    space["kernels"] = {name: entry for name, entry in space["kernels"].items() if not name.startswith("inductor")}
    path = folder / "cpu.yaml"
    path.write_text(yaml.safe_dump(space))
    return path


def stored(database: Path) -> set[str]:
    if not database.exists():
        return set()
    with open_database(database) as opened:
        return {call.key for call, _ in opened.measurements()}


def test_a_tuning_that_is_killed_ten_times_loses_nothing_and_ends(tmp_path: Path) -> None:
    database, space = tmp_path / "killed.sqlite", without_compilers(tmp_path)
    extents = [word for text in EXTENTS for word in ("--extent", text)]
    command = [
        sys.executable, "-m", "autotuner.cli", "tune", "bert-encoder:tiny", *extents, "--database", str(database),
        "--space", str(space), "--no-end-to-end", "--json",
    ]  # fmt: skip
    environment = os.environ | {"AUTOTUNER_CACHE": str(tmp_path / "cache")}
    moments = random.Random(SEED)
    known: set[str] = set()
    killed = 0
    for _ in range(KILLS):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moments.uniform(1.0, 4.0))
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        now = stored(database)
        assert known <= now
        known = now
    assert killed >= KILLS // 2, "the tuning was over too soon for this test to show anything"

    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert '"solver": "exact"' in finished.stdout
    assert known <= stored(database)
    with open_database(database) as opened:
        calls = [call.key for call, _ in opened.measurements()]
        jobs = opened.jobs()
    assert len(calls) == len(set(calls)), "a call is stored once"
    assert [job.state for job in jobs].count("finished") == 1
    assert {job.state for job in jobs} <= {"finished", "interrupted"}
    assert jobs[0].counts["reused"] == len(known), "what was stored before is not measured again"
