"""Jobs whose worker is lost, and the workers themselves: no job is forgotten, and none runs twice."""

import subprocess
import threading
from collections.abc import Callable

import pytest

from autotuner.database import Job, JobState, Queue, Storage, Worker, open_database, this_process
from autotuner.database.contract import ATTEMPTS
from autotuner.errors import JobStateError

StartHolding = Callable[..., subprocess.Popen[str]]
ME, OTHER = f"{this_process()}#me", f"{this_process()}#other"
FAR = "elsewhere/1:1:1"
WAIT_S = 120.0


def enqueued(queue: Queue, device_name: str | None = None) -> int:
    return queue.enqueue(model="m:p", request={}, device_type="cpu", device_name=device_name).id


def claimed(queue: Queue, worker: str) -> Job:
    job = queue.claim(worker, "cpu", "Xeon")
    assert job is not None
    return job


def said(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


@pytest.mark.slow
def test_the_job_of_a_killed_process_is_claimed_by_the_next_at_once(queue: Queue, start_holding: StartHolding) -> None:
    job_id, next_id = enqueued(queue), enqueued(queue)
    process = start_holding("job")
    name, taken = said(process)
    assert int(taken) == job_id
    queue.renew(job_id, name, progress={"done": 3})
    assert claimed(queue, ME).id == next_id
    process.kill()
    process.wait()
    job = claimed(queue, OTHER)
    assert (job.id, job.worker, job.state, job.progress) == (job_id, OTHER, "running", {"done": 3})
    assert queue.renew(job_id, name) == "lost"
    with pytest.raises(JobStateError, match=f"job {job_id} is running, with worker {OTHER}: only who runs"):
        queue.finish(job_id, name, "finished")


@pytest.mark.slow
def test_a_job_whose_process_was_killed_is_lost_at_once_and_no_more_when_another_has_it(
    queue: Queue, start_holding: StartHolding
) -> None:
    job_id = enqueued(queue)
    assert not queue.job(job_id).is_lost
    process = start_holding("job")
    said(process)
    assert not queue.job(job_id).is_lost
    process.kill()
    process.wait()
    found = queue.job(job_id)
    assert (found.state, found.is_lost) == ("running", True)
    assert [job.is_lost for job in queue.jobs()] == [True]
    assert not claimed(queue, ME).is_lost


def test_a_job_of_another_host_is_lost_when_its_lease_has_run_out(queue: Queue, expire: Callable[..., None]) -> None:
    job_id = enqueued(queue)
    claimed(queue, FAR)
    assert not queue.job(job_id).is_lost
    expire(job_id)
    assert queue.job(job_id).is_lost
    queue.finish(job_id, FAR, "finished")
    assert not queue.job(job_id).is_lost


def test_the_job_of_another_host_is_claimed_when_its_lease_has_run_out(
    queue: Queue, expire: Callable[..., None]
) -> None:
    job_id = enqueued(queue)
    claimed(queue, FAR)
    assert queue.claim(ME, "cpu", "Xeon") is None
    expire(job_id)
    assert queue.renew(job_id, FAR) == "go on"  # late, and nobody was faster
    assert queue.claim(ME, "cpu", "Xeon") is None
    expire(job_id)
    assert claimed(queue, ME).id == job_id
    assert queue.renew(job_id, FAR) == "lost"


def test_what_was_left_behind_goes_before_what_was_asked_for_later_and_only_to_its_device(
    queue: Queue, expire: Callable[..., None]
) -> None:
    left, later = enqueued(queue, "Xeon"), enqueued(queue)
    claimed(queue, FAR)
    expire(left)
    epyc = queue.claim(OTHER, "cpu", "EPYC")
    assert epyc is not None
    assert epyc.id == later
    assert queue.job(left).state == "running"
    assert claimed(queue, ME).id == left


@pytest.mark.slow
def test_threads_that_claim_at_once_never_get_the_same_job_that_was_left_behind(
    url: str, queue: Queue, expire: Callable[..., None]
) -> None:
    jobs = [enqueued(queue) for _ in range(24)]
    for job_id in jobs:
        assert claimed(queue, f"{FAR}#{job_id}").id == job_id
    for job_id in jobs:
        expire(job_id, f"{FAR}#{job_id}")
    taken: list[list[int]] = [[], [], []]
    barrier = threading.Barrier(len(taken))

    def work(number: int) -> None:
        with open_database(url) as database:
            for turn in range(len(jobs)):
                barrier.wait(WAIT_S)
                job = database.queue.claim(f"{this_process()}#{number}.{turn}", "cpu", "Xeon")
                if job is not None:
                    taken[number].append(job.id)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(taken))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(job for mine in taken for job in mine) == jobs


def test_a_job_that_its_own_process_ran_is_interrupted(queue: Queue, start_holding: StartHolding) -> None:
    process = start_holding("attended")
    name, begun = said(process)
    assert queue.claim(ME, "cpu", "Xeon") is None
    assert queue.job(int(begun)).state == "running"
    process.kill()
    process.wait()
    assert queue.claim(ME, "cpu", "Xeon") is None
    job = queue.job(int(begun))
    assert (job.state, job.worker, job.ended) == ("interrupted", name, True)
    assert job.message == "its process ended; what it measured is kept"
    assert job.finished_at is not None


def settle_by_claiming(queue: Queue, _job_id: int) -> None:
    assert queue.claim(ME, "cpu", "Xeon") is None


def settle_by_beginning(queue: Queue, _job_id: int) -> None:
    queue.begin(model="m", request={}, device_type="cpu", device_name="Xeon", worker=ME)


def settle_by_cancelling(queue: Queue, job_id: int) -> None:
    with pytest.raises(JobStateError, match=f"job {job_id} is interrupted already"):
        queue.cancel(job_id)


@pytest.mark.parametrize("settle", [settle_by_claiming, settle_by_beginning, settle_by_cancelling])
def test_whoever_looks_next_sees_an_attended_job_as_interrupted(
    queue: Queue, expire: Callable[..., None], settle: Callable[[Queue, int], None]
) -> None:
    job = queue.begin(model="m", request={}, device_type="cpu", device_name="Xeon", worker=FAR)
    expire(job.id)
    settle(queue, job.id)
    assert queue.job(job.id).state == "interrupted"


def test_a_job_that_loses_its_worker_again_and_again_is_given_up(queue: Queue, expire: Callable[..., None]) -> None:
    job_id = enqueued(queue)
    for number in range(ATTEMPTS):
        worker = f"{FAR}#{number}"
        assert claimed(queue, worker).id == job_id
        expire(job_id, worker)
    assert queue.claim(ME, "cpu", "Xeon") is None
    job = queue.job(job_id)
    assert (job.state, job.configuration_id) == ("failed", None)
    assert job.message == f"its worker was lost {ATTEMPTS} times in a row; what was measured is kept"


def test_a_job_that_gets_on_is_not_given_up(queue: Queue, expire: Callable[..., None]) -> None:
    job_id = enqueued(queue)
    for number in range(3 * ATTEMPTS):
        worker = f"{FAR}#{number}"
        assert claimed(queue, worker).id == job_id
        expire(job_id, worker, advanced=number % (ATTEMPTS - 1) == 0)
    assert claimed(queue, ME).id == job_id


def test_a_job_that_was_put_back_was_not_lost(queue: Queue, expire: Callable[..., None]) -> None:
    job_id = enqueued(queue)
    for _ in range(2 * ATTEMPTS):
        claimed(queue, ME)
        queue.release(job_id, ME)
    claimed(queue, FAR)
    expire(job_id)
    assert claimed(queue, ME).id == job_id


def test_a_worker_that_claims_has_nothing_in_hand(queue: Queue) -> None:
    job_id, later = enqueued(queue), enqueued(queue)
    assert claimed(queue, ME).id == job_id
    assert claimed(queue, OTHER).id == later
    again = claimed(queue, ME)
    assert (again.id, again.worker) == (job_id, ME)
    assert queue.renew(job_id, ME) == "go on"


def test_a_worker_that_claims_may_run_a_job_of_its_own_beside(queue: Queue) -> None:
    own = queue.begin(model="m", request={}, device_type="cpu", device_name="Xeon", worker=ME)
    assert queue.claim(ME, "cpu", "Xeon") is None
    assert queue.job(own.id) == own


@pytest.mark.parametrize("first", ["cancelled", "lost"])
def test_a_job_that_is_cancelled_and_loses_its_worker_ends_in_either_order(
    queue: Queue, expire: Callable[..., None], first: str
) -> None:
    job_id = enqueued(queue)
    claimed(queue, FAR)
    if first == "cancelled":
        assert queue.cancel(job_id).state == "running"
        expire(job_id)
        assert queue.claim(ME, "cpu", "Xeon") is None
    else:
        expire(job_id)
        queue.cancel(job_id)
    job = queue.job(job_id)
    assert (job.state, job.cancelling) == ("cancelled", False)
    assert job.message == "it was cancelled, and its worker was lost"
    assert queue.claim(ME, "cpu", "Xeon") is None


def test_every_way_to_be_lost_raises_the_revision(queue: Queue, expire: Callable[..., None]) -> None:
    job_id = enqueued(queue)
    before = claimed(queue, FAR)
    expire(job_id)
    taken = claimed(queue, ME)
    assert taken.revision > before.revision
    attended = queue.begin(model="m", request={}, device_type="cpu", device_name="Xeon", worker=FAR)
    expire(attended.id)
    queue.claim(OTHER, "cpu", "Xeon")
    assert queue.job(attended.id).revision > attended.revision


def test_workers_are_those_that_greeted_the_first_first(queue: Queue) -> None:
    queue.greet(FAR, "cuda", "H200")
    queue.greet(ME, "cpu", "Xeon")
    first, second = queue.workers()
    assert (first.name, first.device_type, first.device_name) == (FAR, "cuda", "H200")
    assert (second.name, second.device_type, second.device_name) == (ME, "cpu", "Xeon")
    queue.greet(FAR, "cuda", "H200")
    again = queue.workers()[0]
    assert (again.name, again.started_at) == (FAR, first.started_at)
    assert again.seen_at > first.seen_at >= first.started_at
    queue.leave(FAR)
    queue.leave("nobody")
    assert queue.workers() == [second]


def names(workers: list[Worker]) -> list[str]:
    return [worker.name for worker in workers]


def test_workers_that_are_gone_are_left_out(queue: Queue, expired: Storage, start_holding: StartHolding) -> None:
    process = start_holding("worker")
    (name,) = said(process)
    queue.greet(FAR, "cpu", "Xeon")
    queue.greet(ME, "cpu", "Xeon")
    assert names(queue.workers()) == [name, FAR, ME]
    process.kill()
    process.wait()
    assert names(queue.workers()) == [FAR, ME]
    assert names(expired.queue.workers()) == [ME]


def test_workers_that_are_gone_are_forgotten_when_a_new_one_comes(queue: Queue, expired: Storage) -> None:
    queue.greet(FAR, "cpu", "Xeon")
    queue.greet(ME, "cpu", "Xeon")
    expired.queue.greet(ME, "cpu", "Xeon")
    expired.queue.greet(OTHER, "cpu", "Xeon")
    assert names(queue.workers()) == [ME, OTHER]


@pytest.mark.parametrize("state", ["finished", "failed", "cancelled", "interrupted"])
def test_who_lost_a_job_changes_nothing_of_it(queue: Queue, expire: Callable[..., None], state: JobState) -> None:
    job_id = enqueued(queue)
    claimed(queue, FAR)
    expire(job_id)
    taken = claimed(queue, ME)
    assert queue.renew(job_id, FAR, progress={"done": 9}, advanced=True) == "lost"
    queue.release(job_id, FAR)
    with pytest.raises(JobStateError, match="only who runs a job can end it"):
        queue.finish(job_id, FAR, state)
    assert queue.job(job_id) == taken
