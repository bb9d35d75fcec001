"""Look-ups by the short way: they answer as the long way does, and never what is out of date."""

import asyncio
from typing import Any

import httpx2
import pytest
from sqlalchemy import delete
from starlette.testclient import TestClient

from autotuner.database import Database, ExactKey
from autotuner.database.tables import ConfigurationRow, JobRow
from autotuner.plan.configuration import Configuration
from autotuner.server.http import answers, create_app
from autotuner.server.http.answers import Answers
from autotuner.server.http.lookups import Lookups
from autotuner.server.http.submissions import ModelFiles
from tests.server.http.filled import ELSEWHERE, TINY, answer

BEST = "/v1/configurations/best?model=bert-encoder:tiny"


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The targets that were answered by the long way."""
    seen: list[object] = []
    best = Answers.best

    def noted(self: Answers, target: Any) -> Any:
        seen.append(target)
        return best(self, target)

    monkeypatch.setattr(Answers, "best", noted)
    return seen


def shown(response: httpx2.Response) -> tuple[int, dict[str, str], bytes]:
    return response.status_code, dict(response.headers), response.content


@pytest.mark.usefixtures("filled")
def test_the_short_way_answers_as_the_long_one(asked: TestClient, long_ways: list[object]) -> None:
    first = asked.get(BEST)
    assert len(long_ways) == 1
    assert shown(asked.get(BEST)) == shown(first)
    known = {"If-None-Match": f'"other", W/{first.headers["ETag"]}'}
    unchanged = asked.get(BEST, headers=known)
    assert (unchanged.status_code, unchanged.content, unchanged.headers["ETag"]) == (304, b"", first.headers["ETag"])
    assert len(long_ways) == 1
    assert shown(asked.get(f"{BEST}&device_type=cpu", headers=known))[::2] == (304, b"")
    assert len(long_ways) == 2, "another query of the same target"
    assert asked.get(f"{BEST}&nonsense=1").status_code == 422


def test_another_configuration_or_one_that_is_removed_is_seen_at_once(
    asked: TestClient, filled: Database, configuration: Configuration
) -> None:
    for _ in range(2):
        assert asked.get(BEST).json()["best"]["id"] == 1
    second = answer(filled, configuration)
    for _ in range(2):
        assert asked.get(BEST).json()["best"]["id"] == second
    near = f"{BEST}&device_name=EPYC"
    for _ in range(2):
        assert asked.get(near).json()["match"] == "near_device"
    answer(filled, configuration, environment=ELSEWHERE)
    assert asked.get(near).json()["match"] == "exact"
    with filled._transactions.writing() as connection:
        connection.execute(delete(JobRow))
        connection.execute(delete(ConfigurationRow).where(ConfigurationRow.id >= second))
    for _ in range(2):
        assert asked.get(BEST).json()["best"]["id"] == 1


def test_what_nobody_has_tuned_for_is_looked_for_each_time(
    asked: TestClient, database: Database, configuration: Configuration
) -> None:
    for _ in range(2):
        assert asked.get(BEST).json()["match"] == "none"
    database.remember(ELSEWHERE)
    answer(database, configuration, environment=ELSEWHERE)
    assert asked.get(BEST).json()["match"] == "exact"


def test_the_short_way_needs_a_token_where_the_long_one_does(filled: Database) -> None:
    token, secret = filled.tokens.create("", "reader")
    with TestClient(create_app(filled, local=False), "http://localhost") as client:
        for _ in range(3):
            assert client.get(BEST, headers={"Authorization": f"Bearer {secret}"}).status_code == 200
            assert client.get(BEST).status_code == 401
            assert client.get(BEST, headers={"Authorization": f"Bearer {secret}x"}).status_code == 401
            assert client.get(BEST, headers={"Host": "evil.example"}).status_code == 421
        assert token.role == "reader"


def test_answers_in_memory_are_bounded_in_bytes(
    asked: TestClient, filled: Database, monkeypatch: pytest.MonkeyPatch, long_ways: list[object]
) -> None:
    monkeypatch.setattr(answers, "KEPT_BYTES", 0)
    for _ in range(2):
        assert asked.get(BEST).json()["match"] == "exact"
    assert len(long_ways) == 2
    assert filled.configurations.count(TINY.family) == 1


def test_all_who_ask_while_a_query_is_under_way_share_the_next_one(database: Database) -> None:
    asked: list[set[ExactKey]] = []
    of = database.editions.of

    def noted(keys: Any) -> Any:
        asked.append(set(keys))
        return of(keys)

    database.editions.of = noted  # type: ignore[method-assign]
    lookups = Lookups(database, ModelFiles(), Answers(database))
    keys = [database.editions.key("f" * 64, "float32", {"b": b}) for b in range(3)]

    async def ask() -> None:
        first = asyncio.create_task(lookups.edition(keys[0]))
        while not asked:
            await asyncio.sleep(0)
        await asyncio.gather(*(lookups.edition(key) for key in keys for _ in range(9)), first)

    asyncio.run(ask())
    assert asked[0] == {keys[0]}
    assert 2 <= len(asked) <= 3
    assert set().union(*asked[1:]) == set(keys)
