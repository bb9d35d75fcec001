"""Who may ask a service: tokens and roles, and the most that one client may have."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from starlette.testclient import TestClient

from autotuner.database import Database
from autotuner.errors import InputError
from autotuner.server.http import Quota, ServiceOptions, access, create_app, listen
from autotuner.server.http.guard import allowed_origin
from autotuner.server.http.serving import checked
from tests.server.http.filled import enqueue

JOB = {"model": "bert-encoder:tiny"}
OPEN = [
    "/livez",
    "/v1/livez",
    "/healthz",
    "/v1/healthz",
    "/readyz",
    "/v1/readyz",
    "/docs",
    "/openapi.json",
    "/docs/swagger-ui.css",
]
OF_READERS = [
    "/v1/jobs", "/v1/jobs/1", "/v1/configurations", "/v1/caller", "/v1/measurements", "/v1/devices", "/v1/models",
    "/metrics",
]  # fmt: skip
Bearer = Callable[..., dict[str, str]]


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "FRESH_S", -1.0)


@pytest.fixture
def bearer(database: Database) -> Bearer:
    """Makes a token, and returns the header that sends it."""

    def make(role: str = "admin", **given: datetime) -> dict[str, str]:
        return {"Authorization": f"Bearer {database.tokens.create('test', role, **given)[1]}"}  # type: ignore[arg-type]

    return make


@contextmanager
def asking(database: Database, **options: object) -> Iterator[TestClient]:
    app = create_app(database, **options)  # type: ignore[arg-type]
    with TestClient(app, "http://localhost", raise_server_exceptions=False, follow_redirects=False) as client:
        yield client


@pytest.fixture
def remote(database: Database) -> Iterator[TestClient]:
    """Asks a service that others can reach."""
    with asking(database, local=False) as client:
        yield client


@pytest.mark.parametrize("path", OF_READERS)
def test_without_a_token_nothing_is_told(remote: TestClient, database: Database, path: str) -> None:
    enqueue(database)
    refused = remote.get(path)
    assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert refused.headers["Content-Type"] == "application/problem+json"
    assert remote.post("/v1/jobs", json=JOB).status_code == 401
    assert remote.post("/v1/jobs/1/cancel").status_code == 401
    assert [job.state for job in database.queue.jobs()] == ["queued"]


@pytest.mark.parametrize("path", OPEN)
def test_whether_it_lives_and_what_it_offers_everybody_may_ask(remote: TestClient, path: str) -> None:
    assert remote.get(path).status_code == 200


def test_each_role_may_do_what_those_before_it_may(remote: TestClient, database: Database, bearer: Bearer) -> None:
    enqueue(database)
    reader, submitter, admin = (bearer(role) for role in ("reader", "submitter", "admin"))
    for headers in (reader, submitter, admin):
        for path in OF_READERS:
            assert remote.get(path, headers=headers).status_code == 200
    refused = remote.post("/v1/jobs", json=JOB, headers=reader)
    assert refused.status_code == 403
    assert 'scope="submitter"' in refused.headers["WWW-Authenticate"]
    assert "needs a token of role submitter, and token 1 is of role reader" in refused.json()["detail"]
    mine = remote.post("/v1/jobs", json={**JOB, "priority": -5}, headers=submitter).json()
    assert mine["client"] == "token 2"
    assert remote.post("/v1/jobs/1/cancel", headers=submitter).status_code == 403, "nobody submitted it to a service"
    assert remote.post(f"/v1/jobs/{mine['id']}/cancel", headers=bearer("submitter")).status_code == 403
    assert remote.post(f"/v1/jobs/{mine['id']}/cancel", headers=submitter).status_code == 200
    assert remote.post("/v1/jobs/1/cancel", headers=admin).json()["state"] == "cancelled"


def test_only_an_admin_has_its_job_taken_before_those_of_others(
    remote: TestClient, database: Database, bearer: Bearer
) -> None:
    submitter, admin = bearer("submitter"), bearer("admin")
    refused = remote.post("/v1/jobs", json={**JOB, "priority": 1}, headers=submitter)
    assert (refused.status_code, database.queue.jobs()) == (403, [])
    assert refused.json()["detail"] == (
        "priority 1: token 1 is of role submitter, which gives priorities from -100 to 0; a token of role admin gives "
        "up to 100"
    )
    for priority, headers in ((0, submitter), (-100, submitter), (100, admin)):
        assert remote.post("/v1/jobs", json={**JOB, "priority": priority}, headers=headers).status_code == 201


def test_what_is_no_valid_token_is_refused_and_the_answer_says_why(
    remote: TestClient, database: Database, bearer: Bearer
) -> None:
    secret = bearer()["Authorization"].removeprefix("Bearer ")
    digest = database.tokens.all()[0].digest
    for given in [
        "", "Bearer", "Bearer ", f"Basic {secret}", secret, f"Bearer  {secret}", f"Bearer {secret} ",
        f"Bearer {digest}",
        f"Bearer {secret[:-1]}", f"Bearer {secret}x", f"Bearer {secret.lower()}", "Bearer autotuner_" + "é" * 43,
        f"Bearer {secret}, Bearer {secret}", "Bearer null", "Bearer '; DROP TABLE token; --",
    ]:  # fmt: skip
        refused = remote.get("/v1/jobs", headers=[(b"Authorization", given.encode())])
        assert refused.status_code == 401, given
        assert secret not in refused.text
    twice = remote.get("/v1/jobs", headers=[("Authorization", f"Bearer {secret}"), ("Authorization", "Bearer x")])
    assert twice.status_code == 401
    assert remote.get("/v1/jobs", headers={"Authorization": f"bearer {secret}"}).status_code == 200
    assert remote.get("/v1/jobs", headers={"Cookie": f"Authorization=Bearer {secret}"}).status_code == 401
    assert remote.get(f"/v1/jobs?token={secret}").status_code == 401


def test_a_token_ends_when_it_is_revoked_or_its_time_is_over(
    remote: TestClient, database: Database, bearer: Bearer
) -> None:
    headers = bearer(expires_at=datetime.now(UTC) + timedelta(seconds=0.3))
    other = bearer()
    assert remote.get("/v1/jobs", headers=headers).status_code == 200
    database.tokens.revoke(2)
    refused = remote.get("/v1/jobs", headers=other)
    assert (refused.status_code, refused.json()["detail"].partition(":")[0]) == (401, "token 2 is revoked")
    assert refused.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'
    while (refused := remote.get("/v1/jobs", headers=headers)).status_code == 200:
        pass
    assert refused.json()["detail"].startswith("token 1 is expired")


def test_this_machine_needs_no_token_until_there_is_one(asked: TestClient, database: Database, bearer: Bearer) -> None:
    assert asked.get("/v1/jobs").status_code == 200
    refused = asked.get("/v1/jobs", headers={"Authorization": "Bearer autotuner_" + "x" * 43})
    assert (refused.status_code, "no tokens at all" in refused.json()["detail"]) == (401, True)
    headers = bearer()
    assert asked.get("/v1/jobs").status_code == 401
    assert asked.get("/v1/jobs", headers=headers).status_code == 200
    database.tokens.revoke(1)
    assert asked.get("/v1/jobs").status_code == 401, "not open again, once it had tokens"


def test_the_document_says_where_a_token_is_needed(remote: TestClient, asked: TestClient) -> None:
    for client, optional in ((remote, False), (asked, True)):
        document = client.get("/openapi.json").json()
        scheme = document["components"]["securitySchemes"]["token"]
        assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
        operations = {o["operationId"]: o for path in document["paths"].values() for o in path.values()}
        needs = {name for name, operation in operations.items() if "security" in operation}
        assert operations.keys() - needs == {"get_health", "get_liveness", "get_readiness"}
        assert all(
            operations[name]["security"] == ([{"token": []}, {}] if optional else [{"token": []}]) for name in needs
        )


def test_many_unknown_tokens_keep_a_known_one_working(remote: TestClient, bearer: Bearer) -> None:
    headers = bearer()

    def wrong(number: int) -> int:
        return remote.get("/v1/jobs", headers={"Authorization": f"Bearer autotuner_{number:043}"}).status_code

    with ThreadPoolExecutor(4) as pool:
        refused = [pool.submit(wrong, number) for number in range(40)]
        assert [remote.get("/v1/jobs", headers=headers).status_code for _ in range(5)] == [200] * 5
        assert {each.result() for each in refused} == {401}


# Where it listens


@pytest.mark.parametrize(
    "options",
    [
        ServiceOptions("0.0.0.0", 0),
        ServiceOptions(port=0, allowed_hosts=["tuning.example"]),
        ServiceOptions(port=0, trusted_proxies=["127.0.0.1"]),
    ],
)
def test_a_service_that_others_can_reach_does_not_start_without_a_valid_token(
    database: Database, options: ServiceOptions
) -> None:
    with listen(options.host, options.port) as listener:
        for _ in range(2):
            with pytest.raises(InputError, match=r"no valid token: make one with `autotuner token create NAME"):
                checked(options, listener, database)
            database.tokens.revoke(database.tokens.create("old", "admin")[0].id)
        database.tokens.create("new", "reader")
        assert checked(options, listener, database)[1] is False


def test_a_service_of_this_machine_starts_without_a_token(database: Database) -> None:
    for host in ("127.0.0.1", "localhost"):
        with listen(host, 0) as listener:
            assert checked(ServiceOptions(host, 0), listener, database)[1] is True


@pytest.mark.parametrize("given", ["*", "proxy", "10.0.0.7/8", ""])
def test_a_proxy_is_an_address_or_a_network(given: str) -> None:
    with pytest.raises(InputError, match=r"--trusted-proxy .*: write the address or the network of a proxy"):
        ServiceOptions(trusted_proxies=[given])


# The most of one client


def test_one_client_has_so_many_jobs_waiting_and_another_one_is_not_kept(database: Database, bearer: Bearer) -> None:
    with asking(database, quota=Quota(queued=2)) as client:
        first, second = bearer("submitter"), bearer("submitter")
        for _ in range(2):
            assert client.post("/v1/jobs", json=JOB, headers=first).status_code == 201
        refused = client.post("/v1/jobs", json=JOB, headers=first)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "30")
        assert refused.json()["detail"] == "2 jobs of token 1 wait for a worker, and no more may: try again later"
        assert client.post("/v1/jobs", json=JOB, headers=second).status_code == 201
        database.queue.cancel(1)
        assert client.post("/v1/jobs", json=JOB, headers=first).status_code == 201


# Pages of other sites


def test_no_page_of_another_site_reads_unless_it_is_allowed(database: Database) -> None:
    origin = "https://tuning.example"
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with asking(database, origins=[origin]) as client:
        allowed = client.options("/v1/jobs", headers={"Origin": origin, **preflight})
        assert (allowed.status_code, allowed.headers["Access-Control-Allow-Origin"]) == (200, origin)
        assert "Access-Control-Allow-Credentials" not in allowed.headers
        read = client.get("/v1/jobs", headers={"Origin": origin, "Sec-Fetch-Site": "cross-site"})
        assert (read.status_code, read.headers["Access-Control-Allow-Origin"]) == (200, origin)
        assert client.post("/v1/jobs", json=JOB, headers={"Origin": origin}).status_code == 201
        for other in ("https://evil.example", "http://tuning.example", "https://tuning.example.evil.example", "null"):
            assert client.options("/v1/jobs", headers={"Origin": other, **preflight}).status_code == 400
            assert "Access-Control-Allow-Origin" not in client.get("/v1/jobs", headers={"Origin": other}).headers
            assert client.post("/v1/jobs", json=JOB, headers={"Origin": other}).status_code == 403


@pytest.mark.parametrize("given", ["*", "tuning.example", "ftp://tuning.example", "https://tuning.example/path", ""])
def test_an_origin_is_a_scheme_and_a_host(given: str) -> None:
    with pytest.raises(InputError, match="write the scheme and host of a site"):
        allowed_origin(given)


@pytest.mark.parametrize(
    "header",
    ["X-Forwarded-For", "x-forwarded-proto", "X-Forwarded-Host", "Forwarded", "X-Real-IP", "Via", "CF-Connecting-IP"],
)
def test_a_proxy_on_this_machine_makes_nobody_an_administrator(
    asked: TestClient, database: Database, header: str
) -> None:
    """Without tokens, who comes from this machine is an administrator; a proxy comes from there for anybody."""
    enqueue(database)
    sent = {header: "203.0.113.9"}
    for refused in (
        asked.get("/v1/jobs", headers=sent),
        asked.get("/v1/configurations/best?model=bert-encoder:tiny", headers=sent),
        asked.get("/v1/jobs/1/events", headers=sent),
        asked.post("/v1/jobs", json=JOB, headers=sent),
        asked.post("/v1/jobs/1/cancel", headers=sent),
    ):
        assert refused.status_code == 403
        assert header.lower() in refused.json()["detail"]
        assert "--trusted-proxy" in refused.json()["detail"]
    assert [job.state for job in database.queue.jobs()] == ["queued"]
    assert asked.get("/livez", headers=sent).status_code == 200
    assert asked.get("/v1/jobs").status_code == 200


def test_with_a_token_a_proxy_may_forward(asked: TestClient, bearer: Bearer) -> None:
    assert asked.get("/v1/jobs", headers={**bearer(), "X-Forwarded-For": "203.0.113.9"}).status_code == 200
