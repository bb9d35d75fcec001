"""Answers, and the best of them for what somebody wants to run."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autotuner.database import Match, Storage
from autotuner.errors import DatabaseError, NotFoundError
from autotuner.ir.records import Environment

Save = Callable[..., int]
EXTENTS = {"b": 8, "l": 128}
XEON, EPYC = Environment("cpu", "Xeon", (("torch", "2.13"),)), Environment("cpu", "EPYC", ())
NEWER = Environment("cpu", "Xeon", (("torch", "2.14"),))
H200 = Environment("cuda", "H200", ())


@pytest.fixture
def save(database: Storage) -> Save:
    """Store a configuration; all that is not given is the same each time."""
    for environment in (XEON, NEWER, EPYC, H200):
        database.remember(environment)

    def saved(
        extents: Mapping[str, int] = EXTENTS,
        where: Environment = XEON,
        *,
        complete: bool = True,
        request: str = "r",
        family: str = "f",
        dtype: str = "float32",
        document: Mapping[str, Any] | None = None,
        measured_us: float | None = None,
    ) -> int:
        return database.configurations.save(
            request_key=request * 64, environment_key=where.key, family_key=family * 64, dtype=dtype, extents=extents,
            complete=complete, document=document or {}, total_us=12.5, measured_us=measured_us,
        )  # fmt: skip

    return saved


@pytest.fixture
def best(database: Storage) -> Callable[..., Match]:
    """Ask for the best, by default for what `save` stores by default."""

    def asked(
        extents: Mapping[str, int] = EXTENTS, device_type: str = "cpu", device_name: str | None = "Xeon"
    ) -> Match:
        return database.configurations.best(
            family_key="f" * 64, dtype="float32", extents=extents, device_type=device_type, device_name=device_name
        )

    return asked


def said(match: Match) -> tuple[str, tuple[str, ...], int | None]:
    return match.status, match.differs, match.stored.id if match.stored else None


# Kept as they were saved


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(document=st.dictionaries(st.text(), json_values))
def test_a_document_comes_back_exactly_as_it_was_saved(
    url: str, database: Storage, save: Save, document: dict[str, Any]
) -> None:
    text = json.dumps(document, separators=(",", ":"))
    if url.startswith("postgresql"):
        assume("\\u0000" not in text)  # PostgreSQL reads no field of JSON that holds a NUL character
    found = database.configurations.get(save(document=document))
    assert found.text == text
    assert json.loads(found.text) == document
    stored = database.configurations.find("r" * 64, XEON.key)
    assert stored is not None
    assert json.dumps(stored[1], separators=(",", ":")) == text


def test_floats_order_and_letters_of_a_document_are_kept(database: Storage, save: Save) -> None:
    number = save(document={"z": 0.1 + 0.2, "a": [1.0, 5e-324, -0.0], "é": None})
    assert database.configurations.get(number).text == (
        '{"z":0.30000000000000004,"a":[1.0,5e-324,-0.0],"\\u00e9":null}'
    )


def test_a_configuration_is_read_with_where_and_when_it_was_made(database: Storage, save: Save) -> None:
    before = datetime.now(UTC)
    found = database.configurations.get(save({"l": 3, "b": 2}, complete=False, dtype="bfloat16", measured_us=0.1))
    assert (found.dtype, found.extents, found.complete) == ("bfloat16", {"l": 3, "b": 2}, False)
    assert (found.device_type, found.device_name, found.environment_key) == ("cpu", "Xeon", XEON.key)
    assert (found.total_us, found.measured_us) == (12.5, 0.1)
    assert before <= found.created_at <= datetime.now(UTC)
    assert found.created_at.utcoffset() == timedelta(0)
    assert database.configurations.get(save()).measured_us is None


def test_an_unknown_number_is_refused(database: Storage) -> None:
    with pytest.raises(NotFoundError, match=r"^database .+ has no configuration 99$"):
        database.configurations.get(99)


def test_saving_in_an_environment_that_was_never_remembered_is_refused(save: Save) -> None:
    with pytest.raises(DatabaseError, match=r"has no environment '[0-9a-f]{64}': `remember` it first"):
        save(where=Environment("cpu", "nowhere", ()))


def test_a_document_that_json_cannot_say_is_refused(save: Save) -> None:
    with pytest.raises(DatabaseError, match="a dict cannot be stored as JSON: Out of range float"):
        save(document={"total_us": float("inf")})


# The answer to a request


def test_the_latest_complete_configuration_is_the_answer_to_its_request(database: Storage, save: Save) -> None:
    find = database.configurations.find
    assert find("r" * 64, XEON.key) is None
    save(complete=False, document={"part": 1})
    assert find("r" * 64, XEON.key) is None
    first = save(document={"whole": 1})
    save(where=EPYC, document={"elsewhere": 1})
    save(where=NEWER, document={"with other versions": 1})
    save(request="q", document={"other request": 1})
    save(complete=False, document={"part": 2})
    assert find("r" * 64, XEON.key) == (first, {"whole": 1})
    second = save(document={"whole": 2})
    assert find("r" * 64, XEON.key) == (second, {"whole": 2})
    assert find("x" * 64, XEON.key) is None
    assert find("r" * 64, "nowhere") is None


# The best for what somebody wants to run


def test_nothing_is_the_best_where_nothing_fits(save: Save, best: Callable[..., Match]) -> None:
    assert best() == Match("none", (), None)
    save(family="g")
    save(dtype="bfloat16")
    save({"b": 8, "x": 128})
    save({"b": 8})
    save({"b": 8, "l": 128, "h": 1})
    save({"b": 8, "l": 64}, EPYC)
    assert best() == Match("none", (), None)


def test_what_was_tuned_for_it_on_the_device_is_exact(
    database: Storage, save: Save, best: Callable[..., Match]
) -> None:
    number = save({"l": 128, "b": 8}, document={"a": 1})
    save(where=EPYC)
    save({"b": 8, "l": 127})
    match = best()
    assert said(match) == ("exact", (), number)
    assert match.stored == database.configurations.get(number)


def test_of_exact_ones_a_complete_one_goes_first_and_then_the_newest(save: Save, best: Callable[..., Match]) -> None:
    for complete in (False, True, True, False):
        number = save(complete=complete)
        save(where=EPYC)
    assert said(best()) == ("exact", (), number - 2)
    newest = save(where=NEWER)
    assert said(best()) == ("exact", (), newest)


def test_an_incomplete_one_is_better_than_none(save: Save, best: Callable[..., Match]) -> None:
    save(complete=False)
    newest = save(complete=False)
    save(where=EPYC)
    assert said(best()) == ("exact", (), newest)


def test_without_a_device_name_any_device_of_the_type_is_exact(save: Save, best: Callable[..., Match]) -> None:
    save()
    newest = save(where=EPYC)
    save(where=H200)
    assert said(best(device_name=None)) == ("exact", (), newest)


def test_failing_that_another_device_is_near_first_one_of_the_type(save: Save, best: Callable[..., Match]) -> None:
    gpu = save(where=H200)
    assert said(best()) == ("near_device", ("device_type", "device_name"), gpu)
    assert said(best(device_name=None)) == ("near_device", ("device_type",), gpu)
    epyc = save(where=EPYC, complete=False)
    save(where=H200)
    assert said(best()) == ("near_device", ("device_name",), epyc)
    save({"b": 8, "l": 127})
    assert said(best()) == ("near_device", ("device_name",), epyc)


def test_failing_that_the_nearest_extents_on_the_device_are_near(save: Save, best: Callable[..., Match]) -> None:
    numbers = {length: save({"b": 8, "l": length}) for length in (64, 100, 512)}
    save({"b": 8, "l": 127}, EPYC)
    assert said(best()) == ("near_shape", ("extents.l",), numbers[100])
    assert said(best({"b": 8, "l": 300})) == ("near_shape", ("extents.l",), numbers[512])
    assert said(best({"b": 16, "l": 64})) == ("near_shape", ("extents.b",), numbers[64])
    assert said(best({"b": 9, "l": 70})) == ("near_shape", ("extents.b", "extents.l"), numbers[64])
    assert said(best({"b": 8, "l": 1000}, device_name="another")) == ("none", (), None)


def test_extents_are_near_by_their_ratios_not_by_their_differences(save: Save, best: Callable[..., Match]) -> None:
    save({"b": 1, "l": 128})
    twice = save({"b": 8, "l": 256})
    assert said(best()) == ("near_shape", ("extents.l",), twice)


def test_of_equally_near_extents_the_newest_are_taken(save: Save, best: Callable[..., Match]) -> None:
    half = save({"b": 8, "l": 64})
    double = save({"b": 8, "l": 256})
    assert said(best()) == ("near_shape", ("extents.l",), double)
    half = save({"b": 8, "l": 64})
    assert said(best()) == ("near_shape", ("extents.l",), half)


def test_of_the_nearest_extents_a_complete_one_goes_first_and_then_the_newest(
    save: Save, best: Callable[..., Match]
) -> None:
    near = {"b": 8, "l": 100}
    save(near)
    complete = save(near)
    save(near, complete=False)
    save(near, where=EPYC)
    save({"b": 8, "l": 64})
    assert said(best()) == ("near_shape", ("extents.l",), complete)


def test_near_extents_are_looked_for_on_any_device_of_the_type_where_that_is_asked(
    save: Save, best: Callable[..., Match]
) -> None:
    epyc = save({"b": 8, "l": 100}, EPYC)
    save({"b": 8, "l": 64})
    save({"b": 8, "l": 127}, H200)
    assert said(best(device_name=None)) == ("near_shape", ("extents.l",), epyc)


def test_the_nearest_of_two_hundred_extents_is_found(save: Save, best: Callable[..., Match]) -> None:
    numbers = {(b, h): save({"b": b, "l": 4 * h}) for b in range(1, 5) for h in range(1, 51)}
    assert said(best({"b": 3, "l": 129})) == ("near_shape", ("extents.l",), numbers[3, 32])


def test_what_is_known_is_listed_once_the_latest_first(database: Storage, save: Save) -> None:
    assert database.configurations.known("f" * 64) == []
    save()
    save(where=EPYC, complete=False)
    save(where=H200)
    save(dtype="bfloat16")
    save({"l": 1, "b": 2})
    save({"b": 2, "l": 1})
    save(family="g")
    assert database.configurations.known("f" * 64) == [
        ("cpu", "float32", {"b": 2, "l": 1}),
        ("cpu", "bfloat16", EXTENTS),
        ("cuda", "float32", EXTENTS),
        ("cpu", "float32", EXTENTS),
    ]


def document(name: str, preset: str | None, **more: Any) -> dict[str, Any]:
    return {
        "model": {"name": name, "preset": preset},
        "certificate": {"proven_gap": None, "default_us": 4.5},
        "memory": {"budget_bytes": 2**33},
        **more,
    }


def test_lists_have_the_newest_first_without_their_documents(database: Storage, save: Save) -> None:
    first = save(document=document("bert-encoder", "tiny"))
    second = save(document=document("mine", None, memory=None, certificate={"proven_gap": 0.25, "default_us": None}))
    found = database.configurations.listed(limit=10)
    assert [each.id for each in found] == [second, first]
    assert [each.model for each in found] == ["mine", "bert-encoder:tiny"]
    assert [(each.proven_gap, each.default_us) for each in found] == [(0.25, None), (None, 4.5)]
    assert [each.budget_bytes for each in found] == [None, 2**33]
    assert [each.id for each in database.configurations.listed(limit=10, before=second)] == [first]
    assert [each.id for each in database.configurations.listed(limit=1)] == [second]


@pytest.mark.parametrize(
    "search, models",
    [
        ("", {"bert-encoder:tiny", "mine"}),
        ("BERT", {"bert-encoder:tiny"}),
        ("encoder:ti", {"bert-encoder:tiny"}),
        ("bert epyc", set()),
        ("mine epyc", {"mine"}),
        ("cpu float32", {"bert-encoder:tiny", "mine"}),
        ("%", set()),
        ("b_rt", set()),
    ],
)
def test_a_search_finds_those_in_which_every_word_occurs(
    database: Storage, save: Save, search: str, models: set[str]
) -> None:
    save(document=document("bert-encoder", "tiny"))
    save(where=EPYC, document=document("mine", None))
    assert {each.model for each in database.configurations.listed(search, limit=10)} == models
