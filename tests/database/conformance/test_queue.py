"""Jobs that wait, run and end: at most one runner, one end, by priority and then the oldest first."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, get_args

import pytest
from sqlalchemy import Connection

from autotuner.database import ENDED, Job, JobState, Queue, Storage, open_database
from autotuner.database.transactions import Transactions
from autotuner.errors import DatabaseError, JobStateError, KeyReusedError, NotFoundError, UnavailableError

StartHolding = Callable[..., subprocess.Popen[str]]
ME, OTHER = "me", "other"
XEON = [("cpu", "Xeon")]
WAIT_S = 120.0
NUMBERS = count()


@pytest.fixture(autouse=True)
def runners(alive: Callable[..., None]) -> None:
    """Both are alive throughout."""
    alive(ME, OTHER)


def enqueued(
    queue: Queue, device_name: str | None = None, device_type: str = "cpu", priority: int = 0, seed: int | None = None
) -> Job:
    """Store a job, with a request that no other one has unless a seed is given."""
    request = {"gap": None, "seed": next(NUMBERS) if seed is None else seed}
    return queue.enqueue(
        model="m:p", request=request, device_type=device_type, device_name=device_name, priority=priority
    )


def claimed(queue: Queue, runner: str = ME) -> Job:
    """Return the next job for a runner, beside those that it has."""
    (job,) = queue.claim(runner, XEON, in_hand=[job.id for job in queue.running(runner)])
    return job


def ended(queue: Queue, state: JobState) -> Job:
    enqueued(queue)
    return queue.finish(claimed(queue).id, 1, state)


def test_a_job_waits_as_it_was_asked_for(queue: Queue) -> None:
    before = datetime.now(UTC)
    request = {"model": {"name": "é", "extents": {"z": 1, "b": 2}}, "gap": 0.1 + 0.2, "limits": None}
    job = queue.enqueue(model="bert:tiny", request=request, device_type="cpu", device_name="Xeon")
    assert job == queue.job(job.id)
    assert (job.model, job.request, job.device_type, job.device_name) == ("bert:tiny", request, "cpu", "Xeon")
    assert (job.state, job.attended, job.cancelling, job.ended) == ("queued", False, False, False)
    assert (job.attempt, job.priority, job.is_new) == (0, 0, True)
    assert (job.worker, job.progress, job.counts, job.configuration_id, job.message) == (None, {}, {}, None, "")
    assert (job.started_at, job.finished_at) == (None, None)
    assert before <= job.created_at <= datetime.now(UTC)
    assert job.created_at.utcoffset() == timedelta(0)


def test_a_request_that_json_cannot_say_is_refused(queue: Queue) -> None:
    with pytest.raises(DatabaseError, match="a dict cannot be stored as JSON: Object of type set"):
        queue.enqueue(model="m", request={"axes": {"b"}}, device_type="cpu")
    assert queue.jobs() == []


def test_the_oldest_job_is_claimed_first(queue: Queue) -> None:
    jobs = [enqueued(queue).id for _ in range(3)]
    assert [claimed(queue).id for _ in range(3)] == jobs
    assert queue.claim(OTHER, XEON) == []


def test_a_higher_priority_goes_first_and_then_the_older_job(queue: Queue) -> None:
    low, first, urgent, second = (enqueued(queue, priority=priority).id for priority in (-1, 0, 5, 0))
    assert [claimed(queue).id for _ in range(4)] == [urgent, first, second, low]
    assert queue.job(urgent).priority == 5


def test_a_runner_may_take_several_jobs_for_several_devices(queue: Queue) -> None:
    cuda, cpu, more, elsewhere = (
        enqueued(queue, device_type="cuda").id, enqueued(queue, priority=1).id, enqueued(queue).id,
        enqueued(queue, "EPYC").id,
    )  # fmt: skip
    taken = queue.claim(ME, [*XEON, ("cuda", "H200")], limit=2)
    assert [job.id for job in taken] == [cpu, cuda]
    assert queue.running(ME) == [queue.job(cuda), queue.job(cpu)]
    assert [job.id for job in queue.claim(ME, XEON, limit=9, in_hand=[cpu, cuda])] == [more]
    assert queue.claim(OTHER, [], limit=9) == []
    assert queue.job(elsewhere).state == "queued"
    assert queue.running("nobody") == []


def test_of_jobs_with_equal_requests_one_runs_at_a_time(queue: Queue) -> None:
    first, twin, other = enqueued(queue, seed=-1).id, enqueued(queue, seed=-1).id, enqueued(queue, seed=-2).id
    assert queue.job(twin).waits_for is None
    assert [job.id for job in queue.claim(ME, XEON, limit=9)] == [first, other]
    assert (queue.job(twin).waits_for, queue.job(first).waits_for) == (first, None)
    assert queue.claim(OTHER, XEON) == []
    queue.release(first, 1)
    assert claimed(queue, OTHER).id == first
    queue.finish(first, 2, "failed")
    assert queue.job(twin).waits_for is None
    assert claimed(queue, OTHER).id == twin


def test_a_job_that_waits_for_its_equal_has_an_end_of_its_own(queue: Queue) -> None:
    first, second, third = (enqueued(queue, seed=-1).id for _ in range(3))
    assert claimed(queue).id == first
    assert queue.cancel(second).state == "cancelled"
    assert queue.cancel(first).cancelling
    assert queue.claim(OTHER, XEON) == []
    queue.finish(first, 1, "cancelled")
    assert claimed(queue, OTHER).id == third
    own = queue.begin(model="m", request={"seed": -3}, device_type="cpu", device_name="Xeon", runner=ME)
    waiting = queue.enqueue(model="m", request={"seed": -3}, device_type="cpu")
    assert (own.attended, waiting.waits_for) == (True, None)
    assert claimed(queue).id == waiting.id


def test_a_claimed_job_is_running_with_its_worker(queue: Queue) -> None:
    enqueued(queue)
    job = claimed(queue)
    assert job == queue.job(job.id)
    assert (job.state, job.worker, job.attempt, job.attended) == ("running", ME, 1, False)
    assert job.started_at is not None
    assert job.created_at <= job.started_at <= datetime.now(UTC)
    assert job.started_at.utcoffset() == timedelta(0)


def test_a_worker_gets_only_jobs_of_its_device(queue: Queue) -> None:
    cuda = enqueued(queue, device_type="cuda")
    epyc = enqueued(queue, "EPYC")
    any_cpu, xeon = enqueued(queue), enqueued(queue, "Xeon")
    assert [claimed(queue).id, claimed(queue, OTHER).id] == [any_cpu.id, xeon.id]
    assert queue.claim(ME, XEON, in_hand=[any_cpu.id]) == []
    for job, device in ((epyc, ("cpu", "EPYC")), (cuda, ("cuda", "H200"))):
        (taken,) = queue.claim(OTHER, [device], in_hand=[job.id for job in queue.running(OTHER)])
        assert taken.id == job.id


def test_threads_that_claim_at_once_never_get_the_same_job_nor_two_equal_ones(url: str, queue: Queue) -> None:
    jobs = [enqueued(queue, seed=-number % 16).id for number in range(24)]
    taken: list[list[int]] = [[], [], []]
    run, twice = set[int](), list[int]()
    barrier = threading.Barrier(len(taken))

    def work(number: int) -> None:
        with open_database(url) as database, database.locks.hold(f"thread {number}"):
            barrier.wait(WAIT_S)
            while jobs := database.queue.claim(f"thread {number}", XEON, limit=2):
                for job in jobs:
                    taken[number].append(job.id)
                    seed = job.request["seed"]
                    twice.extend({seed} & run)
                    run.add(seed)
                for job in jobs:
                    run.discard(job.request["seed"])
                    database.queue.finish(job.id, job.attempt, "finished")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(taken))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(job for mine in taken for job in mine) == jobs
    assert twice == []


@pytest.mark.slow
def test_processes_that_claim_at_once_never_get_the_same_job(queue: Queue, start_holding: StartHolding) -> None:
    jobs = [enqueued(queue).id for _ in range(40)]
    processes = [start_holding(f"process {number}", "drain") for number in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    taken = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        printed, _ = process.communicate(timeout=WAIT_S)
        taken.append([int(line) for line in printed.split()])
    assert sorted(job for mine in taken for job in mine) == jobs
    assert {job.state for job in queue.jobs()} == {"finished"}


def test_a_job_that_the_caller_runs_itself_is_never_queued(queue: Queue) -> None:
    job = queue.begin(model="m:p", request={"gap": 0.5}, device_type="cpu", device_name="Xeon", runner=ME)
    assert job == queue.job(job.id)
    assert (job.model, job.request, job.device_name) == ("m:p", {"gap": 0.5}, "Xeon")
    assert (job.state, job.worker, job.attempt, job.attended) == ("running", ME, 1, True)
    assert job.started_at is not None
    assert queue.claim(OTHER, XEON) == queue.claim(ME, XEON) == []


def test_progress_is_what_was_told_last(queue: Queue) -> None:
    enqueued(queue)
    job = claimed(queue)
    assert queue.report(job.id, 1, progress={"stage": "measure", "done": 1}) == "go on"
    assert queue.report(job.id, 1, progress={"stage": "solve"}, advanced=True) == "go on"
    assert queue.report(job.id, 1, advanced=True) == "go on"
    assert queue.report(job.id, 1) == "go on"
    assert queue.job(job.id).progress == {"stage": "solve"}


def test_a_finished_job_holds_its_answer(queue: Queue, database: Storage) -> None:
    (environment,) = database.environments()
    answer = database.configurations.save(
        request_key="r", environment_key=environment.key, family_key="f", dtype="float32", extents={"b": 1},
        complete=True, document={}, total_us=1.0,
    )  # fmt: skip
    enqueued(queue)
    job = claimed(queue)
    found = queue.finish(job.id, 1, "finished", counts={"measured": 3, "reused": 0}, configuration_id=answer)
    assert found == queue.job(job.id)
    assert (found.state, found.ended, found.worker, found.message) == ("finished", True, ME, "")
    assert (found.counts, found.configuration_id) == ({"measured": 3, "reused": 0}, answer)
    assert found.started_at is not None
    assert found.finished_at is not None
    assert found.finished_at >= found.started_at
    assert queue.finish(job.id, 1, "finished", counts={"measured": 3}, configuration_id=answer) == found


def test_a_job_that_ends_without_an_answer_says_why(queue: Queue) -> None:
    enqueued(queue)
    job = queue.finish(claimed(queue).id, 1, "failed", message="the device is gone\0\ud800")
    assert (job.state, job.message) == ("failed", r"the device is gone\x00\ud800")


def test_a_job_ends_once_in_a_known_way_and_by_who_runs_it(queue: Queue) -> None:
    waiting = enqueued(queue).id

    def refusal(job_id: int, attempt: int, state: JobState = "failed") -> str:
        with pytest.raises(JobStateError) as caught:
            queue.finish(job_id, attempt, state)
        return str(caught.value)

    only = "only who runs a job can end it"
    assert refusal(waiting, 0) == (
        f"attempt 0 of job {waiting} cannot end it: the job is queued, with no worker; {only}"
    )
    job = claimed(queue).id
    assert refusal(job, 2) == f"attempt 2 of job {job} cannot end it: the job is running, at attempt 1; {only}"
    assert refusal(job, 1, "running") == (
        f"job {job} cannot end as 'running': give one of finished, failed, cancelled, interrupted"
    )
    assert queue.job(job).state == "running"
    queue.finish(job, 1, "finished")
    assert refusal(job, 1) == f"attempt 1 of job {job} cannot end it: the job is finished, at attempt 1; {only}"
    with pytest.raises(NotFoundError, match="has no job 99"):
        queue.finish(99, 1, "failed")


def test_a_job_that_does_not_exist_is_named_with_the_database(queue: Queue) -> None:
    for look in (queue.job, queue.cancel):
        with pytest.raises(NotFoundError, match=r"^database .+ has no job 99: `jobs` lists those that exist$"):
            look(99)


@pytest.mark.parametrize("state", ENDED)
def test_who_runs_a_job_that_has_ended_hears_that_it_is_lost(queue: Queue, state: JobState) -> None:
    job = ended(queue, state)
    assert queue.report(job.id, 1, progress={"stage": "measure"}, advanced=True) == "lost"
    assert queue.report(job.id, 1) == "lost"
    assert queue.job(job.id) == job


def test_who_never_had_a_job_hears_that_it_is_lost(queue: Queue) -> None:
    job = enqueued(queue)
    assert queue.report(job.id, 0) == queue.report(job.id, 1) == "lost"
    assert queue.report(99, 1) == "lost"
    job = claimed(queue)
    assert queue.report(job.id, 2, progress={"stage": "measure"}) == "lost"
    assert queue.job(job.id) == job


def test_a_released_job_is_the_first_to_be_claimed_again(queue: Queue) -> None:
    first, second = enqueued(queue), enqueued(queue)
    started_at = claimed(queue).started_at
    queue.report(first.id, 1, progress={"done": 3})
    queue.release(first.id, 1)
    put_back = queue.job(first.id)
    assert (put_back.state, put_back.worker, put_back.progress) == ("queued", None, {"done": 3})
    again = claimed(queue, OTHER)
    assert (again.id, again.worker, again.attempt, again.started_at) == (first.id, OTHER, 2, started_at)
    assert claimed(queue).id == second.id


def test_a_job_of_another_attempt_is_not_released(queue: Queue) -> None:
    waiting = enqueued(queue)
    queue.release(waiting.id, 0)
    assert queue.job(waiting.id) == waiting
    job = claimed(queue)
    queue.release(job.id, 2)
    assert queue.job(job.id) == job
    done = queue.finish(job.id, 1, "finished")
    queue.release(job.id, 1)
    queue.release(99, 1)
    assert queue.job(job.id) == done


def test_a_job_that_waits_is_cancelled_at_once(queue: Queue) -> None:
    job = queue.cancel(enqueued(queue).id)
    assert job == queue.job(job.id)
    assert (job.state, job.cancelling, job.message) == ("cancelled", False, "it was cancelled while it waited")
    assert job.finished_at is not None
    assert queue.claim(ME, XEON) == []


def test_a_job_that_runs_is_cancelled_by_its_worker(queue: Queue) -> None:
    enqueued(queue)
    job = queue.cancel(claimed(queue).id)
    assert (job.state, job.cancelling) == ("running", True)
    assert queue.report(job.id, 2) == "lost"
    assert queue.report(job.id, 1, progress={"done": 1}) == queue.report(job.id, 1) == "cancel"
    ended = queue.finish(job.id, 1, "cancelled", message="it was cancelled")
    assert (ended.state, ended.cancelling, ended.message) == ("cancelled", False, "it was cancelled")


def test_a_job_that_was_cancelled_too_late_is_finished(queue: Queue) -> None:
    enqueued(queue)
    queue.cancel(claimed(queue).id)
    job = queue.finish(1, 1, "finished")
    assert (job.state, job.cancelling) == ("finished", False)


def test_a_job_that_is_released_while_it_is_cancelled_ends(queue: Queue) -> None:
    enqueued(queue)
    job = queue.cancel(claimed(queue).id)
    queue.release(job.id, 1)
    assert queue.job(job.id).state == "cancelled"
    assert queue.job(job.id).message == "it was cancelled; what was measured is kept"
    assert queue.claim(ME, XEON) == []


def test_cancelling_twice_is_cancelling_once(queue: Queue) -> None:
    waiting, running = enqueued(queue), enqueued(queue)
    assert queue.cancel(waiting.id) == queue.cancel(waiting.id)
    claimed(queue)
    assert queue.cancel(running.id) == queue.cancel(running.id)


@pytest.mark.parametrize("state", [state for state in ENDED if state != "cancelled"])
def test_a_job_that_has_ended_is_not_cancelled(queue: Queue, state: JobState) -> None:
    job = ended(queue, state)
    with pytest.raises(JobStateError) as caught:
        queue.cancel(job.id)
    assert str(caught.value) == f"job {job.id} is {state} already: only one that waits or runs is cancelled"
    assert queue.job(job.id) == job


def test_the_revision_rises_with_each_change_and_with_nothing_else(queue: Queue) -> None:
    job_id = enqueued(queue).id
    seen = [queue.job(job_id).revision]

    def rose() -> bool:
        seen.append(queue.job(job_id).revision)
        return seen[-1] > seen[-2]

    assert claimed(queue)
    assert rose()
    queue.report(job_id, 1, progress={"done": 1})
    assert rose()
    queue.report(job_id, 1, advanced=True)
    assert not rose()
    queue.release(job_id, 1)
    assert rose()
    assert queue.claim(OTHER, [("cuda", "H200")]) == []
    assert not rose()
    assert claimed(queue, OTHER)
    assert rose()
    queue.report(job_id, 1, progress={"done": 2})
    assert not rose()
    queue.cancel(job_id)
    assert rose()
    queue.cancel(job_id)
    assert not rose()
    queue.finish(job_id, 2, "cancelled")
    assert rose()


def test_jobs_are_listed_newest_first_by_state_and_in_pages(queue: Queue) -> None:
    first, second, third, fourth = (enqueued(queue).id for _ in range(4))
    queue.cancel(second)
    assert [job.id for job in queue.jobs()] == [fourth, third, second, first]
    assert [job.id for job in queue.jobs(state="queued")] == [fourth, third, first]
    assert [job.id for job in queue.jobs(limit=2)] == [fourth, third]
    assert [job.id for job in queue.jobs(limit=2, before=third)] == [second, first]
    assert [job.id for job in queue.jobs(state="queued", before=third)] == [first]
    assert queue.jobs(before=first) == []


def test_revisions_of_several_jobs_are_read_at_once(queue: Queue) -> None:
    first, second = enqueued(queue), enqueued(queue)
    queue.cancel(second.id)
    assert queue.revisions([first.id, second.id, 99]) == {first.id: (1, False), second.id: (2, False)}
    assert queue.revisions([]) == {}


def test_jobs_that_wait_and_run_are_counted(queue: Queue) -> None:
    assert queue.waiting() == {"queued": 0, "running": 0}
    for _ in range(4):
        enqueued(queue)
    queue.cancel(claimed(queue).id)
    queue.cancel(4)
    assert queue.waiting() == {"queued": 2, "running": 1}


def test_a_state_is_an_end_or_waits_or_runs() -> None:
    assert {*ENDED, "queued", "running"} == set(get_args(JobState))


# Idempotency keys


def keyed(queue: Queue, key: str = "k", **asked: Any) -> Job:
    given = {"model": "m:p", "request": {"gap": 0.1, "axes": ["b"]}, "device_type": "cpu"} | asked
    return queue.enqueue(**given, idempotency_key=key)


def test_a_job_with_a_key_is_stored_once_and_returned_as_it_is_by_now(queue: Queue) -> None:
    first = keyed(queue)
    again = keyed(queue, request={"axes": ("b",), "gap": 0.1})  # the order of names makes no other request
    assert (again, first.is_new, again.is_new) == (first, True, False)
    done = queue.finish(claimed(queue).id, 1, "finished")
    assert keyed(queue) == done
    assert keyed(queue, "another").id != first.id
    assert {enqueued(queue).id, enqueued(queue).id}.isdisjoint({first.id})
    assert len(queue.jobs()) == 4


@pytest.mark.parametrize(
    "asked", [{"model": "m:q"}, {"request": {}}, {"device_type": "cuda"}, {"device_name": "Xeon"}, {"priority": 1}]
)
def test_another_request_under_the_same_key_is_refused(queue: Queue, asked: dict[str, Any]) -> None:
    first = keyed(queue)
    with pytest.raises(KeyReusedError) as caught:
        keyed(queue, **asked)
    assert str(caught.value) == (
        f"the idempotency key 'k' is that of job {first.id}, which differs in {next(iter(asked))}: give another "
        "request another key"
    )
    assert queue.jobs() == [first]


def test_threads_that_submit_one_job_at_once_get_the_same_one(url: str, queue: Queue) -> None:
    found: list[list[Job]] = [[], [], []]
    barrier = threading.Barrier(len(found))

    def submit(number: int) -> None:
        with open_database(url) as database:
            for turn in range(8):
                barrier.wait(WAIT_S)
                found[number].append(keyed(database.queue, f"key {turn}"))

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(queue.jobs()) == 8
    for same in zip(*found, strict=True):
        assert len({job.id for job in same}) == 1
        assert sum(job.is_new for job in same) == 1


def test_a_job_that_begins_is_stored_once_though_the_answer_was_lost(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[bool] = []
    real = Transactions.writing

    @contextmanager
    def forgetful(transactions: Transactions) -> Iterator[Connection]:
        with real(transactions) as connection:
            yield connection
        if not lost:  # it took effect, and the connection broke before the answer came
            lost.append(True)
            raise UnavailableError("the server closed the connection unexpectedly")

    monkeypatch.setattr(Transactions, "writing", forgetful)
    begun = queue.begin(model="m", request={"gap": None}, device_type="cpu", device_name="Xeon", runner=ME)
    assert lost == [True]
    assert [(job.id, job.state, job.attempt) for job in queue.jobs()] == [(begun.id, "running", 1)]
    assert begun == queue.job(begun.id)
    again = queue.begin(model="m", request={"gap": None}, device_type="cpu", device_name="Xeon", runner=ME)
    assert again.id != begun.id, "another one is another job"
