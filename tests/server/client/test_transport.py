"""What is asked again, and what a refusal becomes."""

import json
from pathlib import Path

import httpx2
import pytest

from autotuner.errors import (
    AutotunerError,
    InputError,
    JobStateError,
    ModelError,
    NotFoundError,
    ServiceError,
    SettingsError,
)
from autotuner.server.client import Client
from autotuner.settings import client_token
from tests.server.client.pretended import Pretended, job, problem

REFUSED = httpx2.ConnectError("connection refused")
LOST = httpx2.ReadError("connection lost")


@pytest.mark.parametrize("url", ["", "service", "ftp://service", "http://", "http://a b", "http://h:0", "http://h:x",
                                 "http://h:70000", "http://h/?a=1", "http://h/#a"])  # fmt: skip
def test_what_is_no_url_of_a_service_is_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"is no URL of a service: write http://HOST:PORT, such as http://127"):
        Client(url)


def test_a_password_in_a_url_is_never_shown(service: Pretended) -> None:
    with pytest.raises(InputError) as caught:
        Client("ftp://me:secret@service")
    assert "secret" not in str(caught.value)
    service.on("GET /v1/jobs/3", REFUSED)
    with (
        Client("http://me:secret@service:81", transport=service.transport) as asked,
        pytest.raises(ServiceError, match="http://service:81 ") as lost,
    ):
        asked.job(3)
    assert "secret" not in str(lost.value) + asked.url


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"retries": -1}, {"timeout_s": float("nan")}])
def test_a_client_without_time_or_with_less_than_no_retries_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match="give a time above 0, and retries from 0"):
        Client("http://service", **options)  # type: ignore[arg-type]


def test_the_prefix_of_a_service_behind_a_proxy_is_kept(service: Pretended) -> None:
    service.on("GET /tuning/v1/jobs/3", job())
    with Client("http://service/tuning/", transport=service.transport) as asked:
        assert asked.job(3).id == 3


@pytest.mark.parametrize("passing", [REFUSED, LOST, httpx2.RemoteProtocolError("cut"), problem(503, "busy")])
def test_a_question_that_finds_no_service_is_asked_again_with_growing_pauses(
    service: Pretended, asked: Client, passing: httpx2.Response | Exception
) -> None:
    service.on("GET /v1/jobs/3", passing, passing, passing, job())
    assert asked.job(3).id == 3
    assert len(service.requests) == 4
    assert [0.125 <= service.pauses[0] <= 0.25, 0.5 <= service.pauses[2] <= 1] == [True, True]


def test_what_answers_nothing_is_waited_for_once(service: Pretended, asked: Client) -> None:
    service.on("GET /v1/jobs/3", httpx2.ReadTimeout("slow"))
    with pytest.raises(ServiceError, match="slow"):
        asked.job(3)
    assert len(service.requests) == 1


def test_a_service_that_stays_away_is_given_up_with_its_url_and_what_to_do(service: Pretended, asked: Client) -> None:
    service.on("GET /v1/jobs/3", REFUSED)
    with pytest.raises(ServiceError) as caught:
        asked.job(3)
    assert str(caught.value) == (
        "no service answers at http://service (connection refused): start one with `autotuner serve`, or name another "
        "with --server or AUTOTUNER_SERVER"
    )
    assert (caught.value.exit_code, len(service.requests)) == (8, 4)


def test_a_job_that_cannot_have_arrived_is_submitted_again(service: Pretended, asked: Client) -> None:
    service.on("POST /v1/jobs", REFUSED, httpx2.ConnectTimeout("slow"), httpx2.Response(201, json=job()))
    assert asked.submit("bert-encoder:tiny").id == 3
    assert len(service.requests) == 3


@pytest.mark.parametrize("answer", [LOST, httpx2.ReadTimeout("slow"), problem(503, "busy")])
def test_a_job_that_may_have_arrived_is_submitted_again_under_the_same_key(
    service: Pretended, asked: Client, answer: httpx2.Response | Exception
) -> None:
    service.on("POST /v1/jobs", answer, httpx2.Response(200, json=job()), httpx2.Response(201, json=job()))
    assert asked.submit("bert-encoder:tiny").id == 3
    asked.submit("bert-encoder:tiny")
    first, again, another = (request.headers["Idempotency-Key"] for request in service.requests)
    assert first == again != another


def test_an_idempotency_key_is_sent_as_it_is_given(service: Pretended, asked: Client) -> None:
    service.on("POST /v1/jobs", httpx2.Response(201, json=job()))
    asked.submit("bert-encoder:tiny", idempotency_key="night-7", priority=-5)
    assert service.requests[0].headers["Idempotency-Key"] == "night-7"
    assert json.loads(service.requests[0].content)["priority"] == -5
    with pytest.raises(InputError, match="the idempotency key is 'night 7': give 1 to 200 visible ASCII characters"):
        asked.submit("bert-encoder:tiny", idempotency_key="night 7")


def test_cancelling_twice_is_cancelling_once_so_it_is_asked_again(service: Pretended, asked: Client) -> None:
    service.on("POST /v1/jobs/3/cancel", LOST, job(state="cancelled"))
    assert asked.cancel(3).state == "cancelled"


@pytest.mark.parametrize(
    "status, kind",
    [(400, InputError), (404, NotFoundError), (409, JobStateError), (413, InputError), (422, InputError)],
)
def test_a_refusal_is_an_error_of_the_tree_in_the_services_own_words(
    service: Pretended, asked: Client, status: int, kind: type[AutotunerError]
) -> None:
    service.on("GET /v1/jobs/3", problem(status, "no job 3: `jobs` lists those that exist."))
    with pytest.raises(AutotunerError, match=r"^no job 3: `jobs` lists those that exist$") as caught:
        asked.job(3)
    assert type(caught.value) is kind
    assert len(service.requests) == 1


def test_a_model_that_the_service_does_not_have_is_an_error_of_models(service: Pretended, asked: Client) -> None:
    for route in ("POST /v1/jobs", "GET /v1/configurations/best"):
        service.on(route, problem(409, "no model 'gpt'; known: bert-encoder"))
    for ask in (asked.submit, asked.best):
        with pytest.raises(ModelError, match=r"^no model 'gpt'; known: bert-encoder$"):
            ask("gpt:tiny")


def test_fields_that_the_detail_does_not_name_are_added(service: Pretended, asked: Client) -> None:
    errors = [{"field": "gap", "message": "must be at least 0"}, {"field": "dtype", "message": "no such"}]
    service.on("GET /v1/jobs/3", problem(422, "the dtype is unknown", errors=errors))
    with pytest.raises(InputError, match=r"^the dtype is unknown; gap: must be at least 0$"):
        asked.job(3)


@pytest.mark.parametrize("status, does", [(401, "refuses"), (403, "refuses"), (500, "failed")])
def test_a_failure_of_the_service_is_not_the_users(service: Pretended, asked: Client, status: int, does: str) -> None:
    service.on("GET /v1/jobs/3", problem(status, "it broke"))
    with pytest.raises(ServiceError, match=rf"the service at http://service {does}: it broke.* \(status {status}\)"):
        asked.job(3)
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    "answer, what",
    [
        (httpx2.Response(404, text="<html>"), r"status 404 for /v1/jobs/3, without saying why"),
        (httpx2.Response(301, headers={"Location": "/login"}), "status 301"),
        (httpx2.Response(200, text="<html>"), "Invalid JSON"),
        (httpx2.Response(200, json={"id": 3}), "state: Field required"),
    ],
)
def test_what_is_no_autotuner_service_is_said_to_be_none(
    service: Pretended, asked: Client, answer: httpx2.Response, what: str
) -> None:
    service.on("GET /v1/jobs/3", answer)
    with pytest.raises(ServiceError, match="is no autotuner service of this version") as caught:
        asked.job(3)
    assert what in str(caught.value)


def test_a_field_of_a_newer_service_is_ignored(service: Pretended, asked: Client) -> None:
    service.on("GET /v1/jobs/3", job(priority=9))
    assert asked.job(3).id == 3


# Tokens

SECRET = "autotuner_" + "x" * 43


def sent(service: Pretended, token: str | None = None) -> str | None:
    """The `Authorization` of a request."""
    service.on("GET /v1/jobs/3", problem(404, "none"))
    with Client("http://service", transport=service.transport, token=token) as client, pytest.raises(NotFoundError):
        client.job(3)
    return service.requests[-1].headers.get("Authorization")


def test_a_token_is_sent_that_is_given_or_of_the_environment_or_in_a_file(
    service: Pretended, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert sent(service) is None
    (tmp_path / "token").write_text(f"{SECRET}\n")
    monkeypatch.setenv("AUTOTUNER_TOKEN_FILE", str(tmp_path / "token"))
    assert sent(service) == f"Bearer {SECRET}"
    monkeypatch.setenv("AUTOTUNER_TOKEN", "of-the-environment")
    assert sent(service) == "Bearer of-the-environment"
    assert sent(service, "given") == "Bearer given"


@pytest.mark.parametrize("text", ["a b", "", "a\nb", "ü", "x" * 201])
def test_what_cannot_be_sent_is_refused_without_showing_it(text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    for ask in (lambda: client_token({"AUTOTUNER_TOKEN_FILE": str(file)}), lambda: Client("http://x", token=text)):
        with pytest.raises(SettingsError) as caught:
            ask()
        assert not text or text not in str(caught.value)
    with pytest.raises(SettingsError, match=r"AUTOTUNER_TOKEN_FILE .*none. cannot be read: No such file"):
        client_token({"AUTOTUNER_TOKEN_FILE": str(tmp_path / "none")})


def test_no_token_is_in_errors_or_in_what_a_client_shows_of_itself(service: Pretended) -> None:
    service.on("GET /v1/jobs/3", *[httpx2.ConnectError("refused")] * 4)
    with Client("http://service", transport=service.transport, clock=service.clock, token=SECRET) as client:
        with pytest.raises(ServiceError) as caught:
            client.job(3)
        told = f"{caught.value!r} {caught.value.__cause__!r} {client!r} {vars(client)!r} {vars(client._transport)!r}"
    assert SECRET not in told
