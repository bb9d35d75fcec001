"""Commands that ask a service: what they send, what they print, and the exit code of each."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from autotuner.cli.progress import Followed, note_of, stage_of
from autotuner.plan.configuration import Configuration, load_configuration
from autotuner.server.client import Client
from autotuner.server.wire.responses import JobView
from tests.cli.running import Run
from tests.server.client.pretended import PROGRESS, Pretended, events, job, problem

FINISHED = job(state="finished", revision=5, configuration_id=7, counts={"measured": 12})


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    made = Pretended()
    monkeypatch.setattr("autotuner.server.client.Client", partial(Client, transport=made.transport, clock=made.clock))
    return made


def view(found: Configuration, **changes: Any) -> dict[str, Any]:
    return {
        "id": 7, "dtype": "float32", "extents": {"b": 2, "h": 3, "f": 4}, "complete": True, "device_type": "cpu",
        "device_name": "made up", "environment_key": "e", "predicted_us": 1234.5, "measured_us": None,
        "created_at": "2026-11-20T10:00:00Z", "doubts": [], "configuration": found.to_json(),
    } | changes  # fmt: skip


# submit


def test_a_submitted_job_is_told_with_its_id(run: Run, service: Pretended) -> None:
    service.on("POST /v1/jobs", job())
    ran = run("submit", "bert-encoder:tiny", "--extent", "l=32", "--option", "activation=relu", "--gap", "0.1",
              "--max-seconds", "60", "--max-measurements", "9", "--device-name", "Xeon", "--no-end-to-end",
              "--estimated-gap", "0.01", "--budget", "1.5KiB", "--numerics", "8-bit", "--exhaustive")  # fmt: skip
    assert (ran.code, ran.out) == (0, "job 3: bert-encoder:tiny, queued; `autotuner jobs 3` shows it\n")
    body = service.requests[0].content.decode()
    for text in ('"l":32', '"activation":"relu"', '"gap":0.1', '"seconds":60.0', '"measurements":9', '"name":"Xeon"',
                 '"end_to_end":false', '"again":false', '"estimated_gap":0.01', '"budget_bytes":1536',
                 '"exhaustive":true', '"numerics":"8-bit"'):  # fmt: skip
        assert text in body
    assert run("submit", "bert-encoder:tiny", "--json").json["id"] == 3


def test_the_service_of_the_settings_is_asked_unless_another_is_named(
    run: Run, service: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.on("POST /v1/jobs", job())
    run("submit", "bert-encoder:tiny")
    monkeypatch.setenv("AUTOTUNER_SERVER", "http://tuning:81")
    run("submit", "bert-encoder:tiny")
    run("submit", "bert-encoder:tiny", "--server", "http://other")
    hosts = [str(request.url).partition("/v1")[0] for request in service.requests if request.method == "POST"]
    assert hosts == ["http://127.0.0.1:8000", "http://tuning:81", "http://other"]


@pytest.mark.parametrize("name, workers, said", [("Xeon", 1, False), ("Xeon", 0, True), ("EPYC", 1, True)])
def test_a_job_that_nobody_could_take_is_pointed_out(
    run: Run, service: Pretended, name: str, workers: int, said: bool
) -> None:
    up = {"name": "w", "started_at": "2026-11-20T10:00:00Z"}
    service.on("POST /v1/jobs", job(device_name="Xeon"))
    service.on("GET /v1/devices", [{"type": "cpu", "name": name, "workers": [up] * workers, "environments": []}])
    ran = run("submit", "bert-encoder:tiny", "--device-name", "Xeon")
    assert ran.code == 0
    assert ("job 3 waits: no worker is up for Xeon" in ran.err) is said


def test_waiting_shows_each_stage_and_ends_with_the_result(run: Run, service: Pretended, found: Configuration) -> None:
    running = job(state="running", revision=2, progress=PROGRESS)
    service.on("POST /v1/jobs", job())
    service.on("GET /v1/jobs/3/events", events(job(), running, job(**running | {"revision": 3}), FINISHED))
    service.on("GET /v1/configurations/7", view(found))
    ran = run("submit", "bert-encoder:tiny", "--wait")
    assert ran.code == 0
    assert ran.err.splitlines() == [
        "job 3 waits for a worker",
        "job 3 measuring 5 of 20; 4 measured, 1 reused, 2 failed; best 1,500.0 us, gap 50.0%; 30 s left of this stage",
        "job 3 finished",
    ]
    for text in ("small:wide", "made up", "predicted, kernels of one training step"):
        assert text in ran.out


def test_waiting_for_a_program_prints_only_the_job_as_it_ended(run: Run, service: Pretended) -> None:
    service.on("POST /v1/jobs", job())
    service.on("GET /v1/jobs/3/events", events(job(), FINISHED))
    ran = run("submit", "bert-encoder:tiny", "--wait", "--json")
    assert (ran.code, ran.err, ran.json["state"], ran.json["configuration_id"]) == (0, "", "finished", 7)


@pytest.mark.parametrize("state", ["failed", "cancelled", "interrupted"])
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_waiting_for_a_job_that_ends_without_a_configuration_ends_with_1(
    run: Run, service: Pretended, state: str, flags: list[str]
) -> None:
    service.on("POST /v1/jobs", job())
    service.on("GET /v1/jobs/3/events", events(job(state=state, revision=2, message="no kernel [a] works")))
    ran = run("submit", "bert-encoder:tiny", "--wait", *flags)
    assert ran.code == 1
    assert ran.err.endswith(f"job 3 {state}: no kernel [a] works\n")
    assert "Traceback" not in ran.err


def test_an_interrupt_ends_the_waiting_and_not_the_job(run: Run, service: Pretended) -> None:
    def interrupted(_: httpx2.Request) -> httpx2.Response:
        raise KeyboardInterrupt

    service.on("POST /v1/jobs", job())
    service.on("GET /v1/jobs/3/events", interrupted)
    ran = run("submit", "bert-encoder:tiny", "--wait")
    assert ran.code == 130
    assert "job 3 goes on; `autotuner jobs 3` shows it, `autotuner cancel 3` ends it" in ran.err


def test_progress_on_a_terminal_is_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotuner.cli.console.err._force_terminal", True)
    shown = Followed(quiet=False)
    for told in (job(), job(state="running", progress=PROGRESS, revision=2)):
        shown(JobView.model_validate(told))
    (line,) = shown.bars.tasks
    assert (line.description, line.completed, line.total) == ("job 3 measuring", 5, 20)
    assert line.fields["note"] == note_of(JobView.model_validate(job(progress=PROGRESS)).progress)  # type: ignore[arg-type]


def test_what_is_left_of_a_job_altogether_is_told_where_that_is_known() -> None:
    told = JobView.model_validate(job(state="running", progress=PROGRESS | {"left_s": 90.0}))
    assert told.progress is not None
    assert note_of(told.progress).endswith("; 90 s left until the plan is chosen")


def test_what_is_not_known_of_a_job_yet_is_not_told() -> None:
    bare = PROGRESS | {"best_us": None, "gap": None, "eta_s": None, "reused": 0, "failed": 0}
    told = JobView.model_validate(job(state="running", progress=bare | {"stage": "one of a newer service"}))
    assert told.progress is not None
    assert note_of(told.progress) == "4 measured"
    assert stage_of(told) == "job 3 one of a newer service"
    assert stage_of(told.model_copy(update={"cancelling": True})) == "job 3 is being cancelled"


# jobs, cancel


def test_jobs_are_listed(run: Run, service: Pretended) -> None:
    running = job(id=4, state="running", cancelling=True, progress=PROGRESS, device_name="Xeon")
    service.on("GET /v1/jobs", {"items": [running, FINISHED], "next": None})
    ran = run("jobs")
    assert ran.code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in ran.out.splitlines() if "bert" in line]
    assert rows == [
        ["4", "cancelling", "bert-encoder:tiny float32 b=4", "measure 5/20", "1,500.0", "11-20 10:00"],
        ["3", "finished", "bert-encoder:tiny float32 b=4", "", "", "11-20 10:00"],
    ]  # fmt: skip
    ran = run("jobs", "--state", "running", "--limit", "2", "--json")
    assert [found["id"] for found in ran.json] == [4, 3]
    assert dict(service.requests[-1].url.params) == {"state": "running", "limit": "2"}


def test_a_job_whose_worker_died_is_shown_as_stalled_with_the_reason(run: Run, service: Pretended) -> None:
    stalled = job(state="running", revision=2, progress=PROGRESS, stalled="its worker is gone; the next one goes on")
    service.on("GET /v1/jobs", {"items": [stalled], "next": None})
    service.on("GET /v1/jobs/3", stalled)
    assert " stalled " in run("jobs").out
    assert "its worker is gone; the next one goes on" in run("jobs", "3").out
    told = JobView.model_validate(stalled)
    assert stage_of(told) == "job 3 is stalled: its worker is gone; the next one goes on"


def test_one_job_is_shown_with_all_that_is_known_of_it(run: Run, service: Pretended) -> None:
    limits = {"seconds": 60.0, "measurements": 9}
    service.on("GET /v1/jobs/3", job(state="running", progress=PROGRESS, limits=limits, gap=0.1, worker="host:1"))
    ran = run("jobs", "3")
    assert ran.code == 0
    for text in ("job 3", "running", "b=4", "activation=relu", "cpu, any", "gap 0.1, 60 s, 9 measurements", "host:1",
                 "measure, 5 of 20, 30 s left of this stage",
                 "4 measured, 1 reused, 2 failed", "1,500.0 us, gap 50.0%"):  # fmt: skip
        assert text in ran.out
    assert run("jobs", "3", "--json").json["limits"] == limits


def test_a_job_is_cancelled(run: Run, service: Pretended) -> None:
    service.on("POST /v1/jobs/3/cancel", job(state="cancelled"), job(state="running", cancelling=True))
    assert run("cancel", "3").out == "job 3: cancelled\n"
    assert run("cancel", "3").out == "job 3: running, and about to end\n"
    assert run("cancel", "3", "--json").json["cancelling"] is True


# best


def test_a_doubtful_best_says_why(run: Run, service: Pretended, found: Configuration) -> None:
    doubts = ["7 of 9 times were taken in a bad moment."]
    best = view(found, complete=False, doubts=doubts)
    known = {"match": "doubtful", "differs": [], "message": f"doubtful: {doubts[0]}", "best": best}
    service.on("GET /v1/configurations/best", known)
    ran = run("best", "bert-encoder:tiny")
    assert ran.code == 0
    for text in ("doubtful", "with doubts, see below", doubts[0]):
        assert text in ran.out


def test_the_best_is_shown_with_its_match_and_written(
    run: Run, service: Pretended, found: Configuration, tmp_path: Path
) -> None:
    known = {"match": "near_device", "differs": ["device_name"], "message": "", "best": view(found, measured_us=2000.0)}
    service.on("GET /v1/configurations/best", known)
    ran = run("best", "bert-encoder:tiny", "--output", "best.json")
    assert ran.code == 0
    for text in ("near_device", "device_name", "b=2 h=3 f=4", "made up (cpu)", "1,234.5 us", "2,000.0 us",
                 "all that could matter", "Configuration written to best.json"):  # fmt: skip
        assert text in ran.out
    assert load_configuration(tmp_path / "best.json") == found
    assert run("best", "bert-encoder:tiny", "--json").json == known | {"best": known["best"]}


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_where_no_configuration_is_known_the_exit_code_is_2(run: Run, service: Pretended, flags: list[str]) -> None:
    known: dict[str, Any] = {"match": "none", "differs": [], "message": "nothing is known of this model", "best": None}
    service.on("GET /v1/configurations/best", known)
    ran = run("best", "bert-encoder:tiny", "--output", "best.json", *flags)
    assert (ran.code, ran.err) == (2, "error NotFoundError: nothing is known of this model\n")
    assert not Path("best.json").exists()
    if flags:
        assert ran.json == known


# What is refused


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["submit", "bert-encoder:"], "is no model: write"),
        (["submit", "none.yaml"], "none.yaml: cannot be read"),
        (["submit", "bert-encoder:tiny", "--extent", "l"], "--extent 'l': write name=value"),
        (["submit", "bert-encoder:tiny", "--gap", "-1"], "gap is -1.0: "),
        (["submit", "bert-encoder:tiny", "--budget", "much"], "--budget 'much': write a number of bytes"),
        (["submit", "bert-encoder:tiny", "--numerics", "int8"], "numerics is 'int8': write exact, 8-bit or fp8"),
        (["submit", "bert-encoder:tiny", "--server", "service"], "'service' is no URL of a service: write http://"),
        (["jobs", "--state", "idle"], "--state 'idle': write one of queued, running, finished"),
        (["jobs", "three"], "Invalid value for 'job_id'"),
        (["cancel"], "Missing argument"),
        (["best", "bert-encoder:tiny", "--option", "activation"], "write name=value"),
    ],
)
def test_bad_input_ends_with_2_and_asks_nobody(
    run: Run, service: Pretended, arguments: list[str], sentence: str
) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out, service.requests) == (2, "", [])
    assert sentence in " ".join(ran.err.split())


def test_a_bad_server_in_the_environment_ends_with_2(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNER_SERVER", "tuning:81")
    ran = run("jobs")
    assert ran.code == 2
    assert "SettingsError: AUTOTUNER_SERVER: 'tuning:81' is no URL of a service" in ran.err


def test_what_the_service_refuses_ends_with_2_in_its_words(run: Run, service: Pretended) -> None:
    service.on("GET /v1/jobs/9", problem(404, "there is no job 9"))
    service.on("POST /v1/jobs/3/cancel", problem(409, "job 3 is finished already"))
    assert (run("jobs", "9").code, run("jobs", "9").err) == (2, "error NotFoundError: there is no job 9\n")
    assert (run("cancel", "3").code, run("cancel", "3").err) == (2, "error JobStateError: job 3 is finished already\n")


@pytest.mark.parametrize("command", ["jobs", "submit bert-encoder:tiny", "best bert-encoder:tiny", "cancel 3"])
def test_without_a_service_the_exit_code_is_8_and_the_sentence_says_what_to_do(
    run: Run, service: Pretended, command: str
) -> None:
    for route in ("GET /v1/jobs", "POST /v1/jobs", "GET /v1/configurations/best", "POST /v1/jobs/3/cancel"):
        service.on(route, httpx2.ConnectError("connection refused"))
    ran = run(*command.split())
    assert (ran.code, ran.out) == (8, "")
    assert ran.err == (
        "error ServiceError: no service answers at http://127.0.0.1:8000 (connection refused): start one with "
        "`autotuner serve`, or name another with --server or AUTOTUNER_SERVER\n"
    )


def test_gpus_that_take_no_part_are_listed_with_the_reason(run: Run, service: Pretended) -> None:
    gpu = {"slot": "9f3a/1", "host": "gpu-7", "uuid": "GPU-8f2c", "used": False, "reason": "its host is gone",
           "canary_us": None, "seen_at": "2026-11-20T10:00:00Z"}  # fmt: skip
    device = {"type": "cuda", "name": "NVIDIA H200", "workers": [], "environments": [], "gpus": [gpu]}
    service.on("GET /v1/devices", [device, {**device, "type": "cpu", "name": "Xeon", "gpus": []}])
    (row,) = [line for line in run("gpus").out.splitlines() if "gpu-7" in line]
    assert all(word in row for word in ("9f3a/1", "NVIDIA H200", "no", "its host is gone"))
    assert run("gpus", "--json").json == [{"type": "cuda", "name": "NVIDIA H200", **gpu}]


def test_a_job_says_for_which_one_it_waits(run: Run, service: Pretended) -> None:
    waiting = job(waits_for=2)
    assert stage_of(JobView.model_validate(waiting)) == "job 3 waits for job 2, which has the same request"
    service.on("GET /v1/jobs/3", waiting)
    assert "job 2, which has the same request" in run("jobs", "3").out


def test_priority_and_idempotency_key_of_a_job_are_sent_and_shown(run: Run, service: Pretended) -> None:
    service.on("POST /v1/jobs", httpx2.Response(201, json=job()))
    service.on("GET /v1/devices", [])
    run("submit", "bert-encoder:tiny", "--priority", "5", "--idempotency-key", "k")
    sent = next(request for request in service.requests if request.method == "POST")
    assert (json.loads(sent.content)["priority"], sent.headers["Idempotency-Key"]) == (5, "k")
    service.on("GET /v1/jobs/3", job(state="running", priority=5, attempt=2))
    shown = run("jobs", "3").out
    assert [line for line in shown.splitlines() if "priority" in line and "5" in line]
    assert [line for line in shown.splitlines() if "attempt" in line and "2" in line]
