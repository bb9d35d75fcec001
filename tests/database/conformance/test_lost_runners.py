"""Jobs whose runner is lost, and the workers themselves: no job is forgotten, none has two outcomes."""

import subprocess
import threading
import time
from collections.abc import Callable
from itertools import count

import pytest

from autotuner.database import Database, Job, JobState, Queue, Worker, open_database
from autotuner.database.contract import ATTEMPTS
from autotuner.database.session_locks import SessionLocks
from autotuner.errors import JobStateError

StartHolding = Callable[..., subprocess.Popen[str]]
Killed = Callable[[subprocess.Popen[str]], None]
ME, OTHER = "me", "other"
GONE = "gone"
"""A runner whose lock nobody holds."""

XEON = [("cpu", "Xeon")]
WAIT_S = 120.0
NUMBERS = count()


@pytest.fixture(autouse=True)
def runners(alive: Callable[..., None]) -> None:
    alive(ME, OTHER)


def enqueued(queue: Queue, device_name: str | None = None, priority: int = 0) -> int:
    return queue.enqueue(
        model="m:p", request={"seed": next(NUMBERS)}, device_type="cpu", device_name=device_name, priority=priority
    ).id


def claimed(queue: Queue, runner: str) -> Job:
    (job,) = queue.claim(runner, XEON, in_hand=[job.id for job in queue.running(runner)])
    return job


def said(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


@pytest.fixture
def killed(database: Database) -> Killed:
    """Kill "a process", and wait until its lock is free: PostgreSQL notices a moment later that it is gone."""

    def kill(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        until = time.monotonic() + WAIT_S
        while database.locks.is_held("a process"):
            assert time.monotonic() < until, "the lock of a killed process is held"
            time.sleep(0.01)

    return kill


@pytest.mark.slow
def test_the_job_of_a_killed_process_is_claimed_by_the_next_at_once(
    queue: Queue, start_holding: StartHolding, killed: Killed
) -> None:
    job_id, next_id = enqueued(queue), enqueued(queue)
    process = start_holding("a process", "job")
    assert said(process) == [str(job_id), "1"]
    queue.report(job_id, 1, progress={"done": 3})
    assert claimed(queue, ME).id == next_id
    killed(process)
    job = claimed(queue, OTHER)
    assert (job.id, job.worker, job.state, job.progress) == (job_id, OTHER, "running", {"done": 3})
    assert job.attempt == 2
    assert queue.report(job_id, 1) == "lost"
    with pytest.raises(JobStateError, match=f"attempt 1 of job {job_id} cannot end it: the job is running, at attempt"):
        queue.finish(job_id, 1, "finished")


@pytest.mark.slow
def test_a_job_whose_process_was_killed_is_lost_at_once_and_no_more_when_another_has_it(
    queue: Queue, start_holding: StartHolding, killed: Killed
) -> None:
    job_id = enqueued(queue)
    assert not queue.job(job_id).is_lost
    process = start_holding("a process", "job")
    said(process)
    assert not queue.job(job_id).is_lost
    killed(process)
    found = queue.job(job_id)
    assert (found.state, found.is_lost) == ("running", True)
    assert [job.is_lost for job in queue.jobs()] == [job.is_lost for job in queue.running("a process")] == [True]
    assert queue.revisions([job_id]) == {job_id: (found.revision, True)}
    assert not claimed(queue, ME).is_lost


def test_on_a_server_a_lock_must_be_seen_free_for_a_while(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """One that starts anew drops all sessions, and their holders come back."""
    monkeypatch.setattr(SessionLocks, "patience_s", 0.3)
    job_id = enqueued(queue)
    claimed(queue, GONE)
    taken_at_once = queue.claim(ME, XEON)
    assert bool(taken_at_once) == url.startswith("sqlite")
    while not taken_at_once:
        taken_at_once = queue.claim(ME, XEON)
    assert taken_at_once[0].id == job_id


def test_what_was_left_behind_goes_by_priority_and_age_and_only_to_its_device(queue: Queue) -> None:
    left, later = enqueued(queue, "Xeon"), enqueued(queue)
    claimed(queue, GONE)
    (epyc,) = queue.claim(OTHER, [("cpu", "EPYC")])
    assert epyc.id == later
    assert queue.job(left).state == "running"
    urgent = enqueued(queue, priority=1)
    assert claimed(queue, ME).id == urgent
    assert claimed(queue, ME).id == left


def test_what_was_left_behind_goes_before_its_equals(queue: Queue) -> None:
    twins = [queue.enqueue(model="m", request={}, device_type="cpu", priority=priority).id for priority in (0, 9, 0)]
    assert claimed(queue, GONE).id == twins[1]
    assert queue.claim(OTHER, [("cuda", "H200")]) == []
    assert claimed(queue, ME).id == twins[1]
    assert queue.claim(OTHER, XEON) == []
    queue.finish(twins[1], 2, "finished")
    assert claimed(queue, OTHER).id == twins[0]


@pytest.mark.slow
def test_threads_that_claim_at_once_never_get_the_same_job_that_was_left_behind(url: str, queue: Queue) -> None:
    jobs = [enqueued(queue) for _ in range(24)]
    for job_id in jobs:
        assert claimed(queue, GONE).id == job_id
    taken: list[list[int]] = [[], [], []]
    barrier = threading.Barrier(len(taken))

    def work(number: int) -> None:
        name = f"thread {number}"
        with open_database(url) as database, database.locks.hold(name):
            for _ in jobs:
                barrier.wait(WAIT_S)
                taken[number] += [job.id for job in database.queue.claim(name, XEON, in_hand=taken[number])]
            barrier.wait(WAIT_S)  # the jobs of a thread that ends would go to the others

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(taken))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(job for mine in taken for job in mine) == jobs
    assert {job.attempt for job in queue.jobs()} == {2}


def test_a_job_that_its_own_process_ran_is_interrupted(
    queue: Queue, start_holding: StartHolding, killed: Killed
) -> None:
    process = start_holding("a process", "attended")
    begun, _ = map(int, said(process))
    assert queue.claim(ME, XEON) == []
    assert queue.job(begun).state == "running"
    killed(process)
    assert queue.claim(ME, XEON) == []
    job = queue.job(begun)
    assert (job.state, job.worker, job.ended) == ("interrupted", "a process", True)
    assert job.message == "its process ended; what it measured is kept"
    assert job.finished_at is not None


def settle_by_claiming(queue: Queue, _job_id: int) -> None:
    assert queue.claim(ME, XEON) == []


def settle_by_beginning(queue: Queue, _job_id: int) -> None:
    queue.begin(model="m", request={}, device_type="cpu", device_name="Xeon", runner=ME)


def settle_by_cancelling(queue: Queue, job_id: int) -> None:
    with pytest.raises(JobStateError, match=f"job {job_id} is interrupted already"):
        queue.cancel(job_id)


@pytest.mark.parametrize("settle", [settle_by_claiming, settle_by_beginning, settle_by_cancelling])
def test_whoever_looks_next_sees_an_attended_job_as_interrupted(
    queue: Queue, settle: Callable[[Queue, int], None]
) -> None:
    job = queue.begin(model="m", request={}, device_type="cpu", device_name="Xeon", runner=GONE)
    settle(queue, job.id)
    assert queue.job(job.id).state == "interrupted"


@pytest.mark.parametrize("how", ["by its lock", "as its runner says"])
def test_a_job_that_loses_its_runner_again_and_again_is_given_up(queue: Queue, how: str) -> None:
    job_id = enqueued(queue)
    for number in range(1, ATTEMPTS + 1):
        job = claimed(queue, ME if how == "as its runner says" else f"{GONE} {number}")
        assert (job.id, job.attempt) == (job_id, number)
        if how == "as its runner says":
            queue.release(job_id, number, lost=True)
    assert queue.claim(ME, XEON) == []
    job = queue.job(job_id)
    assert (job.state, job.configuration_id) == ("failed", None)
    assert job.message == f"its worker was lost {ATTEMPTS} times in a row; what was measured is kept"


def test_a_job_that_gets_on_is_not_given_up(queue: Queue) -> None:
    job_id = enqueued(queue)
    for number in range(3 * ATTEMPTS):
        job = claimed(queue, f"{GONE} {number}")
        assert job.id == job_id
        queue.report(job_id, job.attempt, advanced=number % (ATTEMPTS - 1) == 0)
    assert claimed(queue, ME).id == job_id


def test_a_job_that_was_put_back_was_not_lost(queue: Queue) -> None:
    job_id = enqueued(queue)
    for number in range(1, 2 * ATTEMPTS):
        claimed(queue, ME)
        queue.release(job_id, number)
    claimed(queue, GONE)
    assert claimed(queue, ME).id == job_id


def test_a_runner_that_claims_gets_what_an_earlier_one_of_its_name_left_behind(queue: Queue) -> None:
    job_id, later = enqueued(queue), enqueued(queue)
    assert claimed(queue, ME).id == job_id
    assert claimed(queue, OTHER).id == later
    (again,) = queue.claim(ME, XEON)
    assert (again.id, again.worker, again.attempt) == (job_id, ME, 2)
    assert (queue.report(job_id, 1), queue.report(job_id, 2)) == ("lost", "go on")
    assert queue.claim(ME, XEON, in_hand=[job_id]) == []


def test_a_runner_keeps_what_it_has_in_hand_though_its_lock_was_lost(queue: Queue) -> None:
    job_id = enqueued(queue)
    claimed(queue, GONE)
    assert queue.claim(GONE, XEON, in_hand=[job_id]) == []
    assert queue.report(job_id, 1) == "go on"


def test_a_runner_that_claims_may_run_a_job_of_its_own_beside(queue: Queue) -> None:
    own = queue.begin(model="m", request={}, device_type="cpu", device_name="Xeon", runner=ME)
    assert queue.claim(ME, XEON) == []
    assert queue.job(own.id) == own


@pytest.mark.parametrize("first", ["cancelled", "lost"])
def test_a_job_that_is_cancelled_and_loses_its_runner_ends_in_either_order(
    queue: Queue, database: Database, first: str
) -> None:
    job_id = enqueued(queue)
    with database.locks.hold(GONE):
        claimed(queue, GONE)
        if first == "cancelled":
            assert queue.cancel(job_id).state == "running"
    if first == "cancelled":
        assert queue.claim(ME, XEON) == []
    else:
        queue.cancel(job_id)
    job = queue.job(job_id)
    assert (job.state, job.cancelling) == ("cancelled", False)
    assert job.message == "it was cancelled, and its worker was lost"
    assert queue.claim(ME, XEON) == []


def test_every_way_to_be_lost_raises_the_revision(queue: Queue) -> None:
    enqueued(queue)
    before = claimed(queue, GONE)
    taken = claimed(queue, ME)
    assert taken.revision > before.revision
    attended = queue.begin(model="m", request={}, device_type="cpu", device_name="Xeon", runner=GONE)
    queue.claim(OTHER, XEON)
    assert queue.job(attended.id).revision > attended.revision


def names(workers: list[Worker]) -> list[str]:
    return [worker.name for worker in workers]


def test_workers_are_those_that_greeted_the_first_first(queue: Queue) -> None:
    queue.greet(OTHER, "cuda", "H200")
    queue.greet(ME, "cpu", "Xeon")
    first, second = queue.workers()
    assert (first.name, first.device_type, first.device_name) == (OTHER, "cuda", "H200")
    assert (second.name, second.device_type, second.device_name) == (ME, "cpu", "Xeon")
    queue.greet(OTHER, "cuda", "H200")
    assert queue.workers() == [first, second]
    queue.leave(OTHER)
    queue.leave("nobody")
    assert queue.workers() == [second]


def test_a_worker_that_is_killed_is_left_out_and_forgotten_when_a_new_one_comes(
    queue: Queue, start_holding: StartHolding, killed: Killed
) -> None:
    process = start_holding("a process", "worker")
    assert said(process) == ["a", "process"]
    queue.greet(ME, "cpu", "Xeon")
    assert names(queue.workers()) == ["a process", ME]
    killed(process)
    assert names(queue.workers()) == [ME]
    queue.greet(OTHER, "cpu", "Xeon")
    restarted = start_holding("a process", "lock")
    said(restarted)
    assert names(queue.workers()) == [ME, OTHER, "a process"]


@pytest.mark.parametrize("state", ["finished", "failed", "cancelled", "interrupted"])
def test_an_attempt_that_lost_its_job_changes_nothing_of_it(queue: Queue, state: JobState) -> None:
    job_id = enqueued(queue)
    claimed(queue, GONE)
    taken = claimed(queue, ME)
    assert queue.report(job_id, 1, progress={"done": 9}, advanced=True) == "lost"
    queue.release(job_id, 1)
    queue.release(job_id, 1, lost=True)
    with pytest.raises(JobStateError, match="only who runs a job can end it"):
        queue.finish(job_id, 1, state)
    assert queue.job(job_id) == taken
    queue.finish(job_id, 2, state)
    assert queue.report(job_id, 1) == queue.report(job_id, 2) == "lost"
