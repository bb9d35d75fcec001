import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotuner.database import Database
from autotuner.errors import DatabaseError
from autotuner.records import STATUSES, Call, Environment, Measurement, Status

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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(measurement=st.one_of(measured, failed))
def test_a_measurement_comes_back_exactly_as_it_was_stored(
    database: Database, environment: Environment, make_call: MakeCall, measurement: Measurement
) -> None:
    call = make_call(1)
    assert database.store(environment.key, [(call, measurement)], replace=True) == 1
    assert database.find(environment.key, [call.key]) == {call.key: measurement}
    assert database.measurements() == [(call, measurement)]


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
    database: Database,
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
    assert database.measurements() == [(call, kept)]


@pytest.mark.parametrize("newer", [FASTER, WRONG])
def test_what_was_measured_well_is_replaced_where_that_is_asked(
    database: Database, environment: Environment, make_call: MakeCall, newer: Measurement
) -> None:
    call = make_call(1)
    database.store(environment.key, [(call, OK)])
    assert database.store(environment.key, [(call, newer)], replace=True) == 1
    assert database.measurements() == [(call, newer)]


def test_of_a_call_that_is_given_twice_the_later_measurement_is_the_newer(
    database: Database, environment: Environment, make_call: MakeCall
) -> None:
    database.store(environment.key, [(make_call(1), WRONG), (make_call(2), OK), (make_call(1), TIMEOUT)])
    assert database.find(environment.key, [make_call(1).key]) == {make_call(1).key: TIMEOUT}


def test_a_batch_with_one_measurement_that_cannot_be_stored_is_not_stored_at_all(
    database: Database, environment: Environment, make_call: MakeCall
) -> None:
    unstorable = Measurement("ok", 1.0, samples_us=(float("nan"),))
    with pytest.raises(DatabaseError, match="a tuple cannot be stored as JSON: Out of range float"):
        database.store(environment.key, [(make_call(1), OK), (make_call(2), unstorable)])
    assert database.measurements() == []


def test_a_request_that_json_cannot_say_is_refused(database: Database, environment: Environment) -> None:
    keys = {"model": "m", "graph_key": "g", "request_key": "r", "environment_key": environment.key}
    with pytest.raises(DatabaseError, match="a dict cannot be stored as JSON: Object of type set"):
        database.start_job(**keys, request={"axes": {"b"}})
    assert database.jobs() == []


def test_storing_nothing_writes_nothing(database: Database, environment: Environment) -> None:
    assert database.store(environment.key, []) == 0


def test_a_message_that_no_database_could_keep_is_stored_escaped(
    database: Database, environment: Environment, make_call: MakeCall
) -> None:
    database.store(environment.key, [(make_call(1), Measurement("error", message="a\0b\ud800c"))])
    assert database.measurements()[0][1].message == r"a\x00b\ud800c"


def test_another_environment_is_a_miss(database: Database, environment: Environment, make_call: MakeCall) -> None:
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
    database: Database, environment: Environment, make_call: MakeCall
) -> None:
    database.store(environment.key, [(make_call(block), OK) for block in range(4)])
    keys = [make_call(1).key, make_call(3).key, make_call(9).key]
    assert database.find(environment.key, keys) == {keys[0]: OK, keys[1]: OK}
    assert database.find(environment.key, []) == {}


def test_five_thousand_calls_are_found_in_less_than_a_fifth_of_a_second(
    database: Database, environment: Environment, make_call: MakeCall
) -> None:
    calls = [make_call(block) for block in range(5000)]
    measurement = Measurement("ok", 1.0, 0.9, 1.1, tuple(1.0 + i / 7 for i in range(10)))
    assert database.store(environment.key, ((call, measurement) for call in calls)) == 5000
    keys = [call.key for call in calls]
    took_s = []
    for _ in range(5):
        started_s = time.perf_counter()
        found = database.find(environment.key, keys)
        took_s.append(time.perf_counter() - started_s)
        assert len(found) == 5000
    assert min(took_s) < 0.2


def test_storing_in_an_environment_that_was_never_remembered_is_refused(
    database: Database, make_call: MakeCall
) -> None:
    with pytest.raises(DatabaseError, match="has no environment 'nowhere': `remember` it first"):
        database.store("nowhere", [(make_call(1), OK)])


def test_environments_come_back_with_the_key_that_they_had(database: Database, environment: Environment) -> None:
    other = Environment("cuda", "H200", (("z", 1.5), ("a", False), ("driver", "560")))
    database.remember(other)
    database.remember(environment)
    assert database.environments() == [environment, other]
    assert [found.key for found in database.environments()] == [environment.key, other.key]


def test_measurements_are_filtered_by_everything_that_is_given(
    database: Database, environment: Environment, make_call: MakeCall
) -> None:
    other = Environment("cpu", "EPYC", ())
    database.remember(other)
    softmax, failing = make_call(1), make_call(2)
    fused = make_call(3, "inductor", ("scale", "softmax"))
    database.store(environment.key, [(softmax, OK), (failing, WRONG), (fused, OK)])
    database.store(other.key, [(softmax, FASTER)])

    def found(**filters: object) -> set[tuple[int, Status, float | None]]:
        measurements = database.measurements(**filters)  # type: ignore[arg-type]
        return {(dict(call.candidate.params)["block"], m.status, m.median_us) for call, m in measurements}  # type: ignore[misc]

    everything = {(1, "ok", 2.0), (2, "wrong", None), (3, "ok", 2.0), (1, "ok", 1.0)}
    assert found() == everything
    assert found(environment_key=environment.key) == everything - {(1, "ok", 1.0)}
    assert found(signature=softmax.subgraph.signature) == everything - {(3, "ok", 2.0)}
    assert found(kernel="inductor") == {(3, "ok", 2.0)}
    assert found(kinds=("scale", "softmax")) == {(3, "ok", 2.0)}
    assert found(status="wrong") == {(2, "wrong", None)}
    assert found(kernel="softmax", status="ok", environment_key=other.key) == {(1, "ok", 1.0)}
    assert found(kernel="inductor", status="wrong") == set()


def test_limit_and_offset_page_through_measurements_in_one_order(
    database: Database, environment: Environment, make_call: MakeCall
) -> None:
    database.store(environment.key, [(make_call(block), OK) for block in range(5)])
    pages = [database.measurements(limit=2, offset=offset) for offset in (0, 2, 4)]
    assert [len(page) for page in pages] == [2, 2, 1]
    assert [item for page in pages for item in page] == database.measurements()
    assert database.measurements(offset=3) == database.measurements()[3:]


def test_counts_name_every_status(database: Database, environment: Environment, make_call: MakeCall) -> None:
    database.store(environment.key, [(make_call(1), OK), (make_call(2), WRONG), (make_call(3), OK)])
    nothing = dict.fromkeys(STATUSES, 0)
    assert database.counts(environment.key) == {**nothing, "ok": 2, "wrong": 1}
    assert database.counts("nowhere") == nothing


def test_a_fact_is_what_was_measured_last(database: Database, environment: Environment) -> None:
    assert database.fact(environment.key, "noise_floor_us") is None
    database.set_fact(environment.key, "noise_floor_us", 0.3)
    database.set_fact(environment.key, "entry_us", 1.5)
    database.set_fact(environment.key, "noise_floor_us", 0.1 + 0.2)
    assert database.fact(environment.key, "noise_floor_us") == 0.1 + 0.2
    assert database.facts(environment.key) == {"entry_us": 1.5, "noise_floor_us": 0.1 + 0.2}
    with pytest.raises(DatabaseError, match="fact 'entry_us' is nan: it must be finite"):
        database.set_fact(environment.key, "entry_us", float("nan"))


def start(database: Database, environment: Environment, request: str = "r") -> int:
    return database.start_job(
        model="bert-encoder:tiny",
        graph_key="g" * 64,
        request_key=request * 64,
        request={"budget_s": 2.5, "exhaustive": False},
        environment_key=environment.key,
    )


def test_a_job_is_running_until_it_is_finished(database: Database, environment: Environment) -> None:
    before = datetime.now(UTC)
    job_id = start(database, environment)
    job = database.job(job_id)
    assert (job.id, job.model, job.graph_key, job.request_key) == (job_id, "bert-encoder:tiny", "g" * 64, "r" * 64)
    assert job.request == {"budget_s": 2.5, "exhaustive": False}
    assert (job.environment_key, job.state, job.counts, job.message) == (environment.key, "running", {}, "")
    assert job.finished_at is None
    assert before <= job.started_at <= datetime.now(UTC)
    assert job.started_at.utcoffset() == timedelta(0)

    database.finish_job(job_id, "failed", counts={"measured": 3}, message="the device is gone")
    job = database.job(job_id)
    assert (job.state, job.counts, job.message) == ("failed", {"measured": 3}, "the device is gone")
    assert job.finished_at is not None
    assert job.finished_at >= job.started_at


def test_a_job_ends_once_and_in_a_known_way(database: Database, environment: Environment) -> None:
    job_id = start(database, environment)
    with pytest.raises(DatabaseError, match="cannot end as 'running': give one of finished, failed, interrupted"):
        database.finish_job(job_id, "running", counts={})
    database.finish_job(job_id, "finished", counts={})
    with pytest.raises(DatabaseError, match=f"job {job_id} is finished already"):
        database.finish_job(job_id, "failed", counts={})
    with pytest.raises(DatabaseError, match="there is no job 99"):
        database.finish_job(99, "failed", counts={})
    with pytest.raises(DatabaseError, match="has no job 99"):
        database.job(99)


def test_jobs_are_listed_newest_first_and_by_state(database: Database, environment: Environment) -> None:
    first, second, third = (start(database, environment) for _ in range(3))
    database.finish_job(second, "finished", counts={})
    assert [job.id for job in database.jobs()] == [third, second, first]
    assert [job.id for job in database.jobs(state="running")] == [third, first]
    assert [job.id for job in database.jobs(limit=1, offset=1)] == [second]


def test_jobs_of_a_killed_process_are_interrupted_in_their_environment_only(
    database: Database, environment: Environment
) -> None:
    other = Environment("cpu", "EPYC", ())
    database.remember(other)
    done, killed, elsewhere = start(database, environment), start(database, environment), start(database, other)
    database.finish_job(done, "finished", counts={})
    assert database.interrupt_jobs(environment.key, message="the process ended") == 1
    assert [database.job(job_id).state for job_id in (done, killed, elsewhere)] == [
        "finished",
        "interrupted",
        "running",
    ]
    assert database.job(killed).message == "the process ended"
    assert database.job(killed).finished_at is not None


def test_the_latest_configuration_is_the_answer_to_its_request(database: Database, environment: Environment) -> None:
    other = Environment("cpu", "EPYC", ())
    database.remember(other)

    def save(document: dict[str, object], request: str = "r", where: Environment = environment) -> int:
        return database.save_configuration(
            graph_key="g" * 64,
            request_key=request * 64,
            environment_key=where.key,
            document=document,
            total_us=12.5,
            measured_us=None,
        )

    first = save({"schema": 1, "total_us": 0.1 + 0.2, "steps": [{"z": None, "a": "é"}]})
    save({"elsewhere": True}, where=other)
    save({"other request": True}, request="q")
    assert database.find_configuration("r" * 64, environment.key) == database.configuration(first)
    second = save({"schema": 1, "total_us": 0.25})
    assert database.find_configuration("r" * 64, environment.key) == {"schema": 1, "total_us": 0.25}
    assert database.configuration(second) == {"schema": 1, "total_us": 0.25}
    assert database.configuration(first) == {"schema": 1, "total_us": 0.1 + 0.2, "steps": [{"z": None, "a": "é"}]}
    assert database.find_configuration("x" * 64, environment.key) is None
    with pytest.raises(DatabaseError, match="has no configuration 99"):
        database.configuration(99)
