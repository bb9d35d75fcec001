"""Several processes of one service on PostgreSQL: what holds over all of them, and how they end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from autotuner.database import Database, open_database
from tests.cli.living import PATIENCE_S, gone, until
from tests.cli.running import Run
from tests.postgresql import schema

JOB = {"model": "bert-encoder:tiny"}


@dataclass
class Served:
    """A service of two processes, its database and its log."""

    process: subprocess.Popen[bytes]
    database: Database
    file: Path

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines() if line.endswith("}")]

    @property
    def pids(self) -> set[int]:
        return {line["pid"] for line in self.log if line["event"] == "serving"} - {self.process.pid}

    def ask(self, method: str, path: str, **given: Any) -> httpx2.Response:
        """Ask on a connection of its own: the kernel chooses the process."""
        url = next(line["url"] for line in self.log if line["event"] == "serving")
        # Reading certificates, which nobody looks at here, takes 30 ms for each connection.
        return httpx2.request(method, url + path, timeout=PATIENCE_S, verify=False, **given)


@pytest.fixture
def served(postgresql: str, tmp_path: Path) -> Iterator[Served]:
    file = tmp_path / "log"
    with schema(postgresql) as url, open_database(url) as database:
        environment = os.environ | {"AUTOTUNER_DATABASE": url, "AUTOTUNER_LOG_FORMAT": "json"}
        options = ["--processes", "2", "--port", "0", "--client-jobs", "5"]
        with file.open("w") as log:
            command = [sys.executable, "-m", "autotuner.cli", "serve", *options]
            process = subprocess.Popen(command, env=environment, stderr=log, stdout=log)
        made = Served(process, database, file)
        try:
            until(lambda: len(made.pids) == 2)
            yield made
        finally:
            process.kill()
            process.wait()
            until(lambda: all(map(gone, made.pids)))


@pytest.mark.slow
def test_two_processes_answer_as_one(served: Served) -> None:
    def submit(_: int) -> int:
        return served.ask("POST", "/v1/jobs", json=JOB).status_code

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(submit, range(24)))
    assert 5 <= answers.count(201) <= 6, "of each process, one may come in the same moment"
    assert answers.count(429) == 24 - answers.count(201)
    assert {line["pid"] for line in served.log if line["event"] == "request"} == served.pids

    with ThreadPoolExecutor(6) as pool:
        followed = [pool.submit(served.ask, "GET", "/v1/jobs/1/events") for _ in range(6)]
        until(
            lambda: "autotuner_event_streams 6.0" in served.ask("GET", "/metrics").text or all(map(is_over, followed))
        )
        served.ask("POST", "/v1/jobs/1/cancel")
        assert {each.result().text.count("event: cancelled") for each in followed} == {1}

    page = served.ask("GET", "/metrics").text
    assert (
        f'autotuner_http_requests_total{{method="POST",route="/v1/jobs",status="201"}} {answers.count(201)}.0' in page
    )

    secret = served.database.tokens.create("", "reader")[1]
    until(lambda: {served.ask("GET", "/v1/jobs").status_code for _ in range(6)} == {401})
    headers = {"Authorization": f"Bearer {secret}"}
    assert {served.ask("GET", "/v1/jobs", headers=headers).status_code for _ in range(6)} == {200}

    first = min(served.pids)
    os.kill(first, signal.SIGKILL)
    until(lambda: len(served.pids) == 3)
    assert served.ask("GET", "/readyz").status_code == 200
    served.process.terminate()
    assert served.process.wait(PATIENCE_S) == 0
    assert [line["event"] for line in served.log if line["pid"] != served.process.pid][-1] == "ended"


def is_over(each: Any) -> bool:
    return bool(each.done())


def test_several_processes_need_a_server_as_their_database(run: Run) -> None:
    ran = run("serve", "--processes", "2")
    assert (ran.code, "--processes needs PostgreSQL" in ran.err) == (2, True)
