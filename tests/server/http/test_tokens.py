"""Tokens over HTTP: who asks, and for an admin the tokens of all."""

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from autotuner.database import Database
from autotuner.server.http import create_app


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture
def secrets(database: Database) -> dict[str, str]:
    return {role: database.tokens.create(role, role)[1] for role in ("reader", "submitter", "admin")}


@pytest.fixture
def guarded(database: Database, secrets: dict[str, str]) -> Iterator[TestClient]:
    assert secrets
    with TestClient(create_app(database), "http://localhost") as client:
        yield client


def test_a_client_learns_its_name_and_role(guarded: TestClient, secrets: dict[str, str]) -> None:
    found = guarded.get("/v1/caller", headers=bearer(secrets["submitter"])).json()
    assert (found["name"], found["role"], found["needs_token"]) == ("token 2", "submitter", True)


def test_without_tokens_everybody_here_is_an_admin(asked: TestClient) -> None:
    found = asked.get("/v1/caller").json()
    assert (found["role"], found["needs_token"]) == ("admin", False)


@pytest.mark.parametrize("role", ["reader", "submitter"])
def test_only_an_admin_sees_makes_and_revokes_tokens(guarded: TestClient, secrets: dict[str, str], role: str) -> None:
    headers = bearer(secrets[role])
    assert guarded.get("/v1/tokens", headers=headers).status_code == 403
    assert guarded.post("/v1/tokens", headers=headers, json={"role": "admin"}).status_code == 403
    assert guarded.post("/v1/tokens/1/revoke", headers=headers).status_code == 403


def test_a_token_that_is_made_works_and_is_nowhere_else(guarded: TestClient, secrets: dict[str, str]) -> None:
    admin = bearer(secrets["admin"])
    answer = guarded.post("/v1/tokens", headers=admin, json={"name": "ci", "role": "reader", "expires_in_days": 1})
    assert answer.status_code == 201
    assert answer.headers["Cache-Control"] == "no-store"
    secret = answer.json()["token"]
    assert guarded.get("/v1/jobs", headers=bearer(secret)).status_code == 200
    listed = guarded.get("/v1/tokens", headers=admin)
    assert secret not in listed.text
    assert listed.json()[3] == answer.json()["made"]
    assert listed.json()[3]["name"] == "ci"


def test_a_revoked_token_is_refused(guarded: TestClient, database: Database, secrets: dict[str, str]) -> None:
    answer = guarded.post("/v1/tokens/1/revoke", headers=bearer(secrets["admin"]))
    assert answer.json()["state"] == "revoked"
    assert guarded.get("/v1/jobs", headers=bearer(secrets["reader"])).status_code == 401
    assert database.tokens.all()[0].state == "revoked"
    assert guarded.post("/v1/tokens/99/revoke", headers=bearer(secrets["admin"])).status_code == 404


def test_a_token_cannot_revoke_itself(guarded: TestClient, secrets: dict[str, str]) -> None:
    answer = guarded.post("/v1/tokens/3/revoke", headers=bearer(secrets["admin"]))
    assert answer.status_code == 409
    assert "token 3 asks this itself" in answer.json()["detail"]


def test_the_first_token_is_not_made_over_http(asked: TestClient, database: Database) -> None:
    answer = asked.post("/v1/tokens", json={"role": "admin"})
    assert answer.status_code == 409
    assert "autotuner token create" in answer.json()["detail"]
    assert database.tokens.all() == []
