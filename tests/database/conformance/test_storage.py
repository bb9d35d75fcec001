"""Environments, measurements and facts: values come back as they were stored, and success is never overwritten."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotuner.database import Filter, Statistics, Storage
from autotuner.errors import DatabaseError
from autotuner.ir.records import STATUSES, Call, Environment, Measurement, Status

MakeCall = Callable[..., Call]
OK = Measurement("ok", 2.0, 1.5, 2.5, (2.0, 1.5, 2.5), 64)
FASTER = Measurement("ok", 1.0, 1.0, 1.0, (1.0,))
WRONG = Measurement("wrong", message="element 3 is 0.5, expected 0.25")
TIMEOUT = Measurement("timeout", message="30 s passed")

times = st.floats(min_value=0, allow_infinity=False, allow_nan=False)
messages = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
measured = st.builds(
    Measurement,
    st.just("ok"),
    times,
    st.none() | times,
    st.none() | times,
    st.lists(times).map(tuple),
    st.integers(0, 2**40),
)
failed = st.builds(Measurement, st.sampled_from(STATUSES[1:]), message=messages)


def stored(database: Storage, *where: Filter) -> list[tuple[Call, Measurement]]:
    return [(found.call, found.measurement) for found in database.measurements(*where)]


def test_each_subgraph_of_an_environment_is_there_once(
    database: Storage, environment: Environment, make_call: MakeCall
) -> None:
    first, second = make_call(1), make_call(2)
    other = Environment("cpu", "another processor", ())
    database.remember(other)
    database.store(environment.key, [(first, OK)])
    database.store(environment.key, [(first, FASTER)], replace=True)
    database.store(other.key, [(second, WRONG)])
    assert database.subgraphs(environment.key) == [first.subgraph]
    assert database.subgraphs(other.key) == [second.subgraph]
    assert database.subgraphs("0" * 64) == []
    signatures = [first.subgraph.signature, "0" * 64]
    assert database.times(environment.key, signatures) == [(first, FASTER.median_us)]
    assert database.times(environment.key, ["0" * 64]) == []
    assert database.times(other.key, signatures) == []  # it failed there


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(measurement=st.one_of(measured, failed))
def test_a_measurement_comes_back_exactly_as_it_was_stored(
    database: Storage, environment: Environment, make_call: MakeCall, measurement: Measurement
) -> None:
    call = make_call(1)
    assert database.store(environment.key, [(call, measurement)], replace=True) == 1
    assert database.find(environment.key, [call.key]) == {call.key: measurement}
    assert stored(database) == [(call, measurement)]


@pytest.mark.parametrize(
    "first, second, kept, written",
    [
        (WRONG, OK, OK, 1),
        (WRONG, TIMEOUT, TIMEOUT, 1),
        (OK, WRONG, OK, 0),
        (OK, FASTER, OK, 0),
    ],
)
def test_only_a_failure_gives_way_to_a_newer_measurement(
    database: Storage,
    environment: Environment,
    make_call: MakeCall,
    first: Measurement,
    second: Measurement,
    kept: Measurement,
    written: int,
) -> None:
    call = make_call(1)
    assert database.store(environment.key, [(call, first)]) == 1
    assert database.store(environment.key, [(call, second)]) == written
    assert stored(database) == [(call, kept)]


@pytest.mark.parametrize("newer", [FASTER, WRONG])
def test_what_was_measured_well_is_replaced_where_that_is_asked(
    database: Storage, environment: Environment, make_call: MakeCall, newer: Measurement
) -> None:
    call = make_call(1)
    database.store(environment.key, [(call, OK)])
    assert database.store(environment.key, [(call, newer)], replace=True) == 1
    assert stored(database) == [(call, newer)]


def test_of_a_call_that_is_given_twice_the_later_measurement_is_the_newer(
    database: Storage, environment: Environment, make_call: MakeCall
) -> None:
    database.store(environment.key, [(make_call(1), WRONG), (make_call(2), OK), (make_call(1), TIMEOUT)])
    assert database.find(environment.key, [make_call(1).key]) == {make_call(1).key: TIMEOUT}


def test_a_batch_with_one_measurement_that_cannot_be_stored_is_not_stored_at_all(
    database: Storage, environment: Environment, make_call: MakeCall
) -> None:
    unstorable = Measurement("ok", 1.0, samples_us=(float("nan"),))
    with pytest.raises(DatabaseError, match="a tuple cannot be stored as JSON: Out of range float"):
        database.store(environment.key, [(make_call(1), OK), (make_call(2), unstorable)])
    assert database.measurements() == []


def test_storing_nothing_writes_nothing(database: Storage, environment: Environment) -> None:
    assert database.store(environment.key, []) == 0


def test_a_message_that_no_database_could_keep_is_stored_escaped(
    database: Storage, environment: Environment, make_call: MakeCall
) -> None:
    database.store(environment.key, [(make_call(1), Measurement("error", message="a\0b\ud800c"))])
    assert database.measurements()[0].measurement.message == r"a\x00b\ud800c"


def test_another_environment_is_a_miss(database: Storage, environment: Environment, make_call: MakeCall) -> None:
    other = Environment("cpu", "EPYC", environment.facts, environment.policy)
    database.remember(other)
    call = make_call(1)
    database.store(environment.key, [(call, OK)])
    assert database.find(other.key, [call.key]) == {}
    assert database.find("0" * 64, [call.key]) == {}
    database.store(other.key, [(call, WRONG)])
    assert database.find(environment.key, [call.key]) == {call.key: OK}
    assert database.find(other.key, [call.key]) == {call.key: WRONG}


def test_only_the_calls_that_are_asked_for_are_found(
    database: Storage, environment: Environment, make_call: MakeCall
) -> None:
    database.store(environment.key, [(make_call(block), OK) for block in range(4)])
    keys = [make_call(1).key, make_call(3).key, make_call(9).key]
    assert database.find(environment.key, keys) == {keys[0]: OK, keys[1]: OK}
    assert database.find(environment.key, []) == {}


@pytest.mark.slow
def test_five_thousand_calls_are_found_in_one_look_up(
    database: Storage, environment: Environment, make_call: MakeCall
) -> None:
    calls = [make_call(block) for block in range(5000)]
    measurement = Measurement("ok", 1.0, 0.9, 1.1, tuple(1.0 + i / 7 for i in range(10)))
    assert database.store(environment.key, ((call, measurement) for call in calls)) == 5000
    assert database.find(environment.key, [call.key for call in calls]) == {call.key: measurement for call in calls}


def test_storing_in_an_environment_that_was_never_remembered_is_refused(database: Storage, make_call: MakeCall) -> None:
    with pytest.raises(DatabaseError, match="has no environment 'nowhere': `remember` it first"):
        database.store("nowhere", [(make_call(1), OK)])


def test_environments_come_back_with_the_key_that_they_had(database: Storage, environment: Environment) -> None:
    other = Environment("cuda", "H200", (("z", 1.5), ("a", False), ("driver", "560")))
    database.remember(other)
    database.remember(environment)
    assert database.environments() == [environment, other]
    assert [found.key for found in database.environments()] == [environment.key, other.key]


def test_measurements_are_filtered_by_everything_that_is_given(
    database: Storage, environment: Environment, make_call: MakeCall
) -> None:
    other = Environment("cpu", "EPYC", ())
    database.remember(other)
    softmax, failing = make_call(1), make_call(2)
    fused = make_call(3, "inductor", ("scale", "softmax"))
    database.store(environment.key, [(softmax, OK), (failing, WRONG), (fused, OK)])
    database.store(other.key, [(softmax, FASTER)])

    def found(where: Filter) -> set[tuple[object, Status, float | None]]:
        return {(dict(call.candidate.params)["block"], m.status, m.median_us) for call, m in stored(database, where)}

    everything = {(1, "ok", 2.0), (2, "wrong", None), (3, "ok", 2.0), (1, "ok", 1.0)}
    assert found(Filter()) == everything
    assert found(Filter(environment_key=environment.key)) == everything - {(1, "ok", 1.0)}
    assert found(Filter(device_type="cpu")) == everything
    assert found(Filter(device_type="cuda")) == set()
    assert found(Filter(signature=softmax.subgraph.signature)) == everything - {(3, "ok", 2.0)}
    assert found(Filter(kernel="inductor")) == {(3, "ok", 2.0)}
    assert found(Filter(kinds=("scale", "softmax"))) == {(3, "ok", 2.0)}
    assert found(Filter(kinds=("scale",))) == set()
    assert found(Filter(status="wrong")) == {(2, "wrong", None)}
    assert found(Filter(kernel="softmax", status="ok", environment_key=other.key)) == {(1, "ok", 1.0)}
    assert found(Filter(kernel="inductor", status="wrong")) == set()


def test_a_measurement_is_read_with_its_environment_and_the_time_in_utc(
    database: Storage, environment: Environment, make_call: MakeCall
) -> None:
    before = datetime.now(UTC)
    database.store(environment.key, [(make_call(1), OK)])
    (found,) = database.measurements()
    assert (found.environment_key, found.call, found.measurement) == (environment.key, make_call(1), OK)
    assert before <= found.measured_at <= datetime.now(UTC)
    assert found.measured_at.utcoffset() == timedelta(0)


def test_pages_that_go_on_after_the_last_id_hold_every_measurement_once(
    database: Storage, environment: Environment, make_call: MakeCall
) -> None:
    database.store(environment.key, [(make_call(block), OK if block % 5 else WRONG) for block in range(7)])
    everything = database.measurements()
    assert [found.id for found in everything] == sorted(found.id for found in everything)
    pages, after = [], None
    while page := database.measurements(limit=3, after=after):
        pages.append(page)
        after = page[-1].id
    assert [len(page) for page in pages] == [3, 3, 1]
    assert [found for page in pages for found in page] == everything
    ok = [found for found in everything if found.measurement.status == "ok"]
    assert database.measurements(Filter(status="ok"), limit=2, after=ok[1].id) == ok[2:4]


def test_a_measurement_that_is_replaced_keeps_its_place(
    database: Storage, environment: Environment, make_call: MakeCall
) -> None:
    database.store(environment.key, [(make_call(1), WRONG)])
    (first,) = database.measurements()
    database.store(environment.key, [(make_call(2), OK)])
    database.store(environment.key, [(make_call(1), FASTER)])
    replaced, _ = database.measurements()
    assert (replaced.id, replaced.measurement) == (first.id, FASTER)
    assert replaced.measured_at >= first.measured_at


def test_statistics_name_every_status_and_the_times_of_those_that_have_one(
    database: Storage, environment: Environment, make_call: MakeCall
) -> None:
    other = Environment("cuda", "H200", ())
    database.remember(other)
    database.store(
        environment.key, [(make_call(1), OK), (make_call(2), WRONG), (make_call(3), FASTER), (make_call(4), TIMEOUT)]
    )
    database.store(other.key, [(make_call(1), Measurement("ok", 9.0))])
    nothing = dict.fromkeys(STATUSES, 0)
    counted = {**nothing, "wrong": 1, "timeout": 1}
    assert database.statistics() == Statistics({**counted, "ok": 3}, 1.0, 4.0, 9.0)
    assert database.statistics(Filter(device_type="cpu")) == Statistics({**counted, "ok": 2}, 1.0, 1.5, 2.0)
    assert database.statistics(Filter(environment_key=other.key)) == Statistics({**nothing, "ok": 1}, 9.0, 9.0, 9.0)
    assert database.statistics(Filter(status="wrong")) == Statistics({**nothing, "wrong": 1}, None, None, None)
    assert database.statistics(Filter(environment_key="nowhere")) == Statistics(nothing, None, None, None)


def test_a_fact_is_what_was_measured_last(database: Storage, environment: Environment) -> None:
    assert database.fact(environment.key, "noise_floor_us") is None
    database.set_fact(environment.key, "noise_floor_us", 0.3)
    database.set_fact(environment.key, "entry_us", 1.5)
    database.set_fact(environment.key, "noise_floor_us", 0.1 + 0.2)
    assert database.fact(environment.key, "noise_floor_us") == 0.1 + 0.2
    assert database.facts(environment.key) == {"entry_us": 1.5, "noise_floor_us": 0.1 + 0.2}
    with pytest.raises(DatabaseError, match="fact 'entry_us' is nan: it must be finite"):
        database.set_fact(environment.key, "entry_us", float("nan"))
