"""Tokens and inventory, over every engine."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from autotuner.database import Database
from autotuner.errors import InputError, NotFoundError
from autotuner.ir.records import Call, Environment, Measurement


def test_a_token_is_found_by_what_its_owner_sends_and_by_nothing_else(database: Database) -> None:
    assert not database.tokens.exist()
    token, secret = database.tokens.create("ci", "reader", datetime.now(UTC) + timedelta(days=1))
    assert database.tokens.find(secret) == token
    for other in (token.digest, secret.upper(), secret[:-1], "", "\x00", "\ud800"):
        assert database.tokens.find(other) is None
    assert database.tokens.exist()
    assert database.tokens.create("ci", "reader")[1] != secret


def test_a_token_is_revoked_once_and_for_all(database: Database) -> None:
    secret = database.tokens.create("", "admin")[1]
    first = database.tokens.revoke(1)
    assert database.tokens.revoke(1) == first == database.tokens.find(secret)
    assert (first.state, database.tokens.exist()) == ("revoked", True)
    with pytest.raises(NotFoundError, match="has no token 2"):
        database.tokens.revoke(2)


@pytest.mark.parametrize("name", ["x" * 101, "a\nb", "\x1b[2J"])
def test_a_name_is_short_and_printable(database: Database, name: str) -> None:
    with pytest.raises(InputError, match="printable characters"):
        database.tokens.create(name, "reader")


def test_the_inventory_counts_and_says_how_long_the_oldest_job_waits(database: Database) -> None:
    assert database.inventory.take().oldest_queued_s == 0.0
    for client in ("token 1", "token 1", ""):
        database.queue.enqueue(model="m", request={}, device_type="cpu", client=client)
    assert [database.queue.queued(client) for client in ("token 1", "token 2", "")] == [2, 0, 1]
    database.queue.cancel(1)
    found = database.inventory.take()
    assert (found.jobs["queued"], found.jobs["cancelled"], found.jobs["running"]) == (2, 1, 0)
    assert 0 <= found.oldest_queued_s < 60
    assert (found.measurements, found.configurations) == (0, 0)
    assert database.queue.job(2).client == "token 1"
    database.inventory.check_schema()


def test_measurements_are_counted_by_environment_and_status(
    database: Database, environment: Environment, make_call: Callable[..., Call]
) -> None:
    other = Environment("cpu", "other", ())
    database.remember(other)
    assert database.inventory.measurements() == {}
    database.store(environment.key, [(make_call(1), Measurement("ok", 1.0)), (make_call(2), Measurement("timeout"))])
    found = database.inventory.measurements()
    assert list(found) == [environment.key]
    assert found[environment.key] == dict(database.statistics().statuses)
    assert found[environment.key]["ok"] == 1
