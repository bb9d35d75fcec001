"""Editions: what changes with each configuration that may be an exact answer."""

from typing import Any

from autotuner.database import Database, Edition
from autotuner.ir.records import Environment

EXTENTS = {"b": 8, "l": 128}


def save(database: Database, environment: Environment, **changed: object) -> int:
    given: dict[str, Any] = {"family_key": "f" * 64, "dtype": "float32", "extents": EXTENTS, **changed}
    return database.configurations.save(
        request_key="r" * 64, environment_key=environment.key, complete=True, document={}, total_us=1.0, **given
    )


def test_an_edition_changes_with_configurations_of_its_exact_key_and_with_no_others(
    database: Database, environment: Environment
) -> None:
    key = database.editions.key("f" * 64, "float32", {"l": 128, "b": 8})
    other = database.editions.key("f" * 64, "float32", {"l": 128, "b": 9})
    assert database.editions.of([key, other]) == {key: Edition(0), other: Edition(0)}
    save(database, environment, dtype="bfloat16")
    save(database, environment, family_key="e" * 64)
    assert database.editions.of([key])[key] == Edition(0)
    first = save(database, environment)
    assert database.editions.of([key, other]) == {key: Edition(0, 1, first), other: Edition(0)}
    second = save(database, environment)
    assert database.editions.of([key]) == {key: Edition(0, 2, second)}


def test_a_great_number_of_keys_is_asked_for_at_once(database: Database, environment: Environment) -> None:
    number = save(database, environment)
    keys = [database.editions.key("f" * 64, "float32", {"b": b, "l": 128}) for b in range(1, 300)]
    found = database.editions.of(keys)
    assert {key: edition for key, edition in found.items() if edition.number} == {keys[7]: Edition(0, 1, number)}
