"""`kill -9` of worker and service in the middle of a job: started again, they end it; nothing is lost or doubled."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotuner.database import ENDED
from autotuner.errors import ServiceError
from autotuner.server.client import Client
from tests.made_up import small_model, without_compilers
from tests.stored import call_keys, job_states

pytestmark = pytest.mark.slow

SEED = 3
START_S = 120.0


class Processes:
    """A service and a worker on one database, each of which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.database = folder / "killed.sqlite"
        self.url = f"http://127.0.0.1:{port}"
        self._environment = os.environ | {"AUTOTUNER_CACHE": str(folder / "cache")}
        named = ["--database", str(self.database)]
        self._commands = {
            "service": ["serve", *named, "--port", port],
            "worker": ["worker", *named, "--space", str(without_compilers(folder))],
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "autotuner.cli", *self._commands[name]]
        self.running[name] = subprocess.Popen(
            command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if name == "service":
            self._wait_until_it_answers()

    def _wait_until_it_answers(self) -> None:
        until = time.monotonic() + START_S
        while True:
            try:
                with Client(self.url, retries=0) as client:
                    client.health()
                return
            except ServiceError:
                assert time.monotonic() < until, "the service does not answer"
                time.sleep(0.1)

    def kill(self, name: str) -> None:
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def stored(self) -> list[str]:
        return call_keys(self.database)

    def ended(self, job_id: int) -> bool:
        return job_states(self.database)[job_id] in ENDED


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    try:
        yield made
    finally:
        for process in made.running.values():
            process.kill()
            process.wait()


@pytest.mark.timeout(900)
def test_a_job_outlives_the_death_of_its_worker_and_of_the_service(processes: Processes, tmp_path: Path) -> None:
    moments = random.Random(SEED)
    processes.start("service")
    processes.start("worker")
    with Client(processes.url) as client:
        small_model(tmp_path)
        job = client.submit(f"{tmp_path}/small.yaml:wide", end_to_end=False)
    known: set[str] = set()
    killed_midway = 0
    for victim in ("worker", "service"):
        wanted = len(known) + moments.randint(1, 4)
        while len(stored := set(processes.stored())) < wanted and not processes.ended(job.id):
            time.sleep(0.05)
        time.sleep(moments.uniform(0.0, 0.7))
        killed_midway += not processes.ended(job.id)
        processes.kill(victim)
        assert known <= stored <= set(processes.stored())
        known = stored
        processes.start(victim)
    assert killed_midway >= 1, "the job was over too soon for this test to show anything"

    with Client(processes.url) as client:
        finished = client.wait(job.id, timeout_s=600)
        assert finished.state == "finished", finished.message
        assert [found.id for found in client.jobs()] == [job.id]
        best = client.best(family=job.family, extents=job.extents, dtype=job.dtype)
        assert best.match in ("exact", "doubtful")  # other tests run beside it, which is a bad moment for measuring
        assert best.best is not None
        assert best.best.id == finished.configuration_id
    calls = processes.stored()
    assert known <= set(calls)
    assert len(calls) == len(set(calls)) == finished.counts["calls"]
    assert finished.counts["measured"] + finished.counts["reused"] == finished.counts["calls"]
