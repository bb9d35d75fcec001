"""Commands that stay: what they start with what, and how they end."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotuner.server import logs
from autotuner.server.client import Client
from autotuner.server.http import Quota, ServiceOptions
from tests.cli.living import PATIENCE_S, gone, until
from tests.cli.running import Run

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the service was started with, and by `beside` what was kept running beside it."""
    seen: dict[str, Any] = {"beside": []}

    class Noted:
        def __init__(self, command: list[str], _: Any) -> None:
            self.command = command

        def __enter__(self) -> None:
            seen["beside"].append(self.command)

        def __exit__(self, *_: object) -> None:
            seen["ended"] = True

    def serve(database: Any, options: ServiceOptions, **given: Any) -> None:
        seen.update(given, database=database, options=options)
        seen.get("then", lambda: None)()

    monkeypatch.setitem(
        sys.modules, "autotuner.server.http", SimpleNamespace(serve=serve, ServiceOptions=ServiceOptions, Quota=Quota)
    )
    monkeypatch.setattr("autotuner.cli.supervisor.Supervisor", Noted)
    return seen


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the worker was started with."""
    seen: dict[str, Any] = {}

    def run(database: Any, **given: Any) -> None:
        seen.update(given, database=database)
        given["log"]("job_taken", job=3, model="bert-encoder:tiny")

    monkeypatch.setattr("autotuner.server.worker.run", run)
    return seen


def test_the_service_is_started_where_it_was_asked_for(run: Run, served: dict[str, Any]) -> None:
    given = ("--host", "0.0.0.0", "--port", "8123", "--allow-host", "a.example", "--allow-host", "b")
    assert run("serve", "--database", "a.sqlite", *given).code == 0
    options = ServiceOptions("0.0.0.0", 8123, ["a.example", "b"], log_format="words")
    assert {**served} == {"beside": [], "database": "a.sqlite", "listener": None, "options": options}


def test_where_the_service_listens_and_its_names_come_from_the_environment_unless_given(
    run: Run, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTUNER_HOST", "0.0.0.0")
    monkeypatch.setenv("AUTOTUNER_ALLOWED_HOSTS", "tuning.example,tuner-1")
    assert run("serve").code == 0
    assert served["options"].host == "0.0.0.0"
    assert served["options"].allowed_hosts == ("tuning.example", "tuner-1")
    assert run("serve", "--host", "127.0.0.1", "--allow-host", "other").code == 0
    assert (served["options"].host, served["options"].allowed_hosts) == ("127.0.0.1", ["other"])


def test_the_database_of_the_settings_is_served_unless_another_is_named(run: Run, served: dict[str, Any]) -> None:
    run("serve")
    assert served["database"] == "sqlite:///" + os.environ["AUTOTUNER_DATABASE"]
    assert (served["options"].host, served["options"].port) == ("127.0.0.1", 8000)


def test_a_worker_beside_the_service_has_its_database_and_dies_with_it(run: Run, served: dict[str, Any]) -> None:
    assert run("serve", "--with-worker", "--database", "a.sqlite").code == 0
    command = [sys.executable, "-m", "autotuner.cli", "worker", "--device", "cpu"]
    last = ["--log-format", "words", "--parent", str(os.getpid())]
    assert served["beside"] == [[*command, "--database", "a.sqlite", *last]]
    assert served["ended"]
    run("serve", "--with-worker")
    assert "--database" not in served["beside"][1], "no password is listed among the processes"


def test_sigterm_ends_the_worker_before_the_service_is_gone(run: Run, served: dict[str, Any]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    served["then"] = lambda: signal.raise_signal(signal.SIGTERM)
    assert run("serve", "--with-worker").code == 0
    assert served["ended"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_a_device_that_is_not_here_is_refused_before_anything_starts(run: Run, served: dict[str, Any]) -> None:
    ran = run("serve", "--with-worker", "--device", "abacus")
    assert ran.code == 3
    assert "no device 'abacus' here" in ran.err
    assert served == {"beside": []}


def test_a_worker_that_could_not_measure_is_refused_before_anything_starts(
    run: Run, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for arguments in (["serve", "--with-worker"], ["worker"]):
        ran = run(*arguments)
        assert ran.code == 10
        assert 'a worker needs torch, which is not installed: install "autotuner[torch]"' in ran.err
    assert served == {"beside": []}
    assert run("serve").code == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_a_worker_beside_a_service_is_started_anew_and_dies_with_a_service_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "autotuner.cli", "serve", "--with-worker", "--port", "0"]
    environment = os.environ | {"AUTOTUNER_DATABASE": str(tmp_path / "served.sqlite")}
    with log.open("w") as file:
        service = subprocess.Popen([*command], env=environment, stdout=file, stderr=file)

    def told(pattern: str, number: int = 1) -> str:
        until(lambda: len(re.findall(pattern, log.read_text())) >= number)
        found: str = re.findall(pattern, log.read_text())[number - 1]
        return found

    try:
        with Client(told(r"serving url='([^']+)'")) as asked:
            first = int(told(r"worker_started worker='[^:]+:(\d+):"))
            os.kill(first, signal.SIGKILL)
            second = int(told(r"worker_started worker='[^:]+:(\d+):", 2))
            assert f"ERROR process_died process={first} end='signal 9' starts_again_in_s=1.0" in log.read_text()
            until(lambda: [w.name.split(":")[1] for d in asked.devices() for w in d.workers] == [str(second)])
    finally:
        service.kill()
        service.wait()
    until(lambda: gone(second))


@pytest.mark.slow
def test_sigterm_ends_service_and_worker_in_order(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = os.environ | {"AUTOTUNER_DATABASE": str(tmp_path / "served.sqlite")}
    command = [sys.executable, "-m", "autotuner.cli", "serve", "--with-worker", "--port", "0"]
    with log.open("w") as file:
        service = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        until(lambda: "worker_started" in log.read_text() and "serving" in log.read_text())
    finally:
        service.terminate()
    assert service.wait(PATIENCE_S) == 0
    events = [line.split()[1] for line in log.read_text().splitlines()]
    assert events[-1] == "worker_ended"
    assert "ended" in events


def test_a_worker_is_started_as_asked_for(run: Run, worked: dict[str, Any]) -> None:
    ran = run("worker", "--database", "a.sqlite", "--threads", "2", "--space", "cpu.yaml", "--once")
    assert (ran.code, ran.out) == (0, "")
    assert isinstance(worked.pop("log"), logs.WorkerLog)
    assert worked == {"database": "a.sqlite", "device": "cpu", "threads": 2, "space": Path("cpu.yaml"), "once": True}


def test_what_a_worker_does_is_one_line_each_on_standard_error(run: Run, worked: dict[str, Any]) -> None:
    (line,) = run("worker").err.splitlines()
    assert line.partition(" ")[2] == "job_taken job=3 model='bert-encoder:tiny'"
    assert worked["database"] is None


@pytest.mark.slow
def test_a_worker_whose_queue_is_empty_ends_where_that_is_asked_for(run: Run) -> None:
    ran = run("worker", "--once")
    assert (ran.code, ran.out) == (0, "")
    assert [line.split()[1] for line in ran.err.splitlines()] == ["worker_started", "worker_ended"]


@pytest.mark.parametrize(
    "arguments, code, sentence",
    [
        (["--device", "abacus"], 3, "no device 'abacus' here"),
        (["--database", "missing/a.sqlite"], 4, "there is no directory"),
        (["--space", "none.yaml"], 2, "none.yaml: no such search space"),
    ],
)
def test_a_worker_that_cannot_start_says_why(run: Run, arguments: list[str], code: int, sentence: str) -> None:
    ran = run("worker", "--once", *arguments)
    assert ran.code == code
    assert sentence in ran.err
