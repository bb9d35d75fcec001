"""Jobs that wait, run and end: at most one runner, one end, the oldest first."""

import subprocess
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest

from autotuner.database import ENDED, Job, JobState, Queue, Storage, open_database, this_process
from autotuner.errors import DatabaseError, JobStateError, NotFoundError

StartHolding = Callable[..., subprocess.Popen[str]]
ME, OTHER = f"{this_process()}#me", f"{this_process()}#other"
WAIT_S = 120.0


def enqueued(queue: Queue, device_name: str | None = None, device_type: str = "cpu") -> Job:
    return queue.enqueue(model="m:p", request={"gap": None}, device_type=device_type, device_name=device_name)


def claimed(queue: Queue, worker: str = ME) -> Job:
    job = queue.claim(worker, "cpu", "Xeon")
    assert job is not None
    return job


def ended(queue: Queue, state: JobState) -> Job:
    enqueued(queue)
    return queue.finish(claimed(queue).id, ME, state)


def test_a_job_waits_as_it_was_asked_for(queue: Queue) -> None:
    before = datetime.now(UTC)
    request = {"model": {"name": "é", "extents": {"z": 1, "b": 2}}, "gap": 0.1 + 0.2, "limits": None}
    job = queue.enqueue(model="bert:tiny", request=request, device_type="cpu", device_name="Xeon")
    assert job == queue.job(job.id)
    assert (job.model, job.request, job.device_type, job.device_name) == ("bert:tiny", request, "cpu", "Xeon")
    assert (job.state, job.attended, job.cancelling, job.ended) == ("queued", False, False, False)
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
    assert [claimed(queue, f"{ME}{number}").id for number in range(3)] == jobs
    assert queue.claim(ME, "cpu", "Xeon") is None


def test_a_claimed_job_is_running_with_its_worker(queue: Queue) -> None:
    enqueued(queue)
    job = claimed(queue)
    assert job == queue.job(job.id)
    assert (job.state, job.worker, job.attended) == ("running", ME, False)
    assert job.started_at is not None
    assert job.created_at <= job.started_at <= datetime.now(UTC)
    assert job.started_at.utcoffset() == timedelta(0)


def test_a_worker_gets_only_jobs_of_its_device(queue: Queue) -> None:
    cuda = enqueued(queue, device_type="cuda")
    epyc = enqueued(queue, "EPYC")
    any_cpu, xeon = enqueued(queue), enqueued(queue, "Xeon")
    assert [claimed(queue).id, claimed(queue, OTHER).id] == [any_cpu.id, xeon.id]
    assert queue.claim(f"{ME}1", "cpu", "Xeon") is None
    for job, device in ((epyc, ("cpu", "EPYC")), (cuda, ("cuda", "H200"))):
        taken = queue.claim(f"{ME}{job.id}", *device)
        assert taken is not None
        assert taken.id == job.id


def test_threads_that_claim_at_once_never_get_the_same_job(url: str, queue: Queue) -> None:
    jobs = [enqueued(queue).id for _ in range(24)]
    taken: list[list[int]] = [[], [], []]
    barrier = threading.Barrier(len(taken))

    def work(number: int) -> None:
        worker = f"{this_process()}#{number}"
        with open_database(url) as database:
            barrier.wait(WAIT_S)
            while job := database.queue.claim(worker, "cpu", "Xeon"):
                taken[number].append(job.id)
                database.queue.finish(job.id, worker, "finished")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(taken))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(job for mine in taken for job in mine) == jobs
    assert all(mine == sorted(mine) for mine in taken)


@pytest.mark.slow
def test_processes_that_claim_at_once_never_get_the_same_job(queue: Queue, start_holding: StartHolding) -> None:
    jobs = [enqueued(queue).id for _ in range(40)]
    processes = [start_holding("drain") for _ in range(2)]
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
    job = queue.begin(model="m:p", request={"gap": 0.5}, device_type="cpu", device_name="Xeon", worker=ME)
    assert job == queue.job(job.id)
    assert (job.model, job.request, job.device_name) == ("m:p", {"gap": 0.5}, "Xeon")
    assert (job.state, job.worker, job.attended) == ("running", ME, True)
    assert job.started_at is not None
    assert queue.claim(OTHER, "cpu", "Xeon") is None


def test_progress_is_what_was_told_last(queue: Queue) -> None:
    enqueued(queue)
    job = claimed(queue)
    assert queue.renew(job.id, ME, progress={"stage": "measure", "done": 1}) == "go on"
    assert queue.renew(job.id, ME, progress={"stage": "solve"}, advanced=True) == "go on"
    assert queue.renew(job.id, ME) == "go on"
    assert queue.job(job.id).progress == {"stage": "solve"}


def test_a_finished_job_holds_its_answer(queue: Queue, database: Storage) -> None:
    (environment,) = database.environments()
    answer = database.configurations.save(
        request_key="r", environment_key=environment.key, family_key="f", dtype="float32", extents={"b": 1},
        complete=True, document={}, total_us=1.0,
    )  # fmt: skip
    enqueued(queue)
    job = claimed(queue)
    found = queue.finish(job.id, ME, "finished", counts={"measured": 3, "reused": 0}, configuration_id=answer)
    assert found == queue.job(job.id)
    assert (found.state, found.ended, found.worker, found.message) == ("finished", True, ME, "")
    assert (found.counts, found.configuration_id) == ({"measured": 3, "reused": 0}, answer)
    assert found.started_at is not None
    assert found.finished_at is not None
    assert found.finished_at >= found.started_at


def test_a_job_that_ends_without_an_answer_says_why(queue: Queue) -> None:
    enqueued(queue)
    job = queue.finish(claimed(queue).id, ME, "failed", message="the device is gone\0\ud800")
    assert (job.state, job.message) == ("failed", r"the device is gone\x00\ud800")


def test_a_job_ends_once_in_a_known_way_and_by_who_runs_it(queue: Queue) -> None:
    waiting = enqueued(queue).id

    def refusal(job_id: int, worker: str, state: JobState = "failed") -> str:
        with pytest.raises(JobStateError) as caught:
            queue.finish(job_id, worker, state)
        return str(caught.value)

    only = "only who runs a job can end it"
    assert refusal(waiting, ME) == f"job {waiting} is queued, with no worker: {only}"
    job = claimed(queue).id
    assert refusal(job, OTHER) == f"job {job} is running, with worker {ME}: {only}"
    assert refusal(job, ME, "running") == (
        f"job {job} cannot end as 'running': give one of finished, failed, cancelled, interrupted"
    )
    assert queue.job(job).state == "running"
    queue.finish(job, ME, "finished")
    assert refusal(job, ME) == f"job {job} is finished, with worker {ME}: {only}"
    with pytest.raises(NotFoundError, match="has no job 99"):
        queue.finish(99, ME, "failed")


def test_a_job_that_does_not_exist_is_named_with_the_database(queue: Queue) -> None:
    for look in (queue.job, queue.cancel):
        with pytest.raises(NotFoundError, match=r"^database .+ has no job 99: `jobs` lists those that exist$"):
            look(99)


@pytest.mark.parametrize("state", ENDED)
def test_who_runs_a_job_that_has_ended_hears_that_it_is_lost(queue: Queue, state: JobState) -> None:
    job = ended(queue, state)
    assert queue.renew(job.id, ME, progress={"stage": "measure"}, advanced=True) == "lost"
    assert queue.job(job.id) == job


def test_who_never_had_a_job_hears_that_it_is_lost(queue: Queue) -> None:
    job = enqueued(queue)
    assert queue.renew(job.id, ME) == "lost"
    assert queue.renew(99, ME) == "lost"
    job = claimed(queue)
    assert queue.renew(job.id, OTHER, progress={"stage": "measure"}) == "lost"
    assert queue.job(job.id) == job


def test_a_released_job_is_the_first_to_be_claimed_again(queue: Queue) -> None:
    first, second = enqueued(queue), enqueued(queue)
    started_at = claimed(queue).started_at
    queue.renew(first.id, ME, progress={"done": 3})
    queue.release(first.id, ME)
    put_back = queue.job(first.id)
    assert (put_back.state, put_back.worker, put_back.progress) == ("queued", None, {"done": 3})
    again = claimed(queue, OTHER)
    assert (again.id, again.worker, again.started_at) == (first.id, OTHER, started_at)
    assert claimed(queue).id == second.id


def test_a_job_of_another_is_not_released(queue: Queue) -> None:
    waiting = enqueued(queue)
    queue.release(waiting.id, ME)
    assert queue.job(waiting.id) == waiting
    job = claimed(queue)
    queue.release(job.id, OTHER)
    assert queue.job(job.id) == job
    done = queue.finish(job.id, ME, "finished")
    queue.release(job.id, ME)
    queue.release(99, ME)
    assert queue.job(job.id) == done


def test_a_job_that_waits_is_cancelled_at_once(queue: Queue) -> None:
    job = queue.cancel(enqueued(queue).id)
    assert job == queue.job(job.id)
    assert (job.state, job.cancelling, job.message) == ("cancelled", False, "it was cancelled while it waited")
    assert job.finished_at is not None
    assert queue.claim(ME, "cpu", "Xeon") is None


def test_a_job_that_runs_is_cancelled_by_its_worker(queue: Queue) -> None:
    enqueued(queue)
    job = queue.cancel(claimed(queue).id)
    assert (job.state, job.cancelling) == ("running", True)
    assert queue.renew(job.id, OTHER) == "lost"
    assert queue.renew(job.id, ME, progress={"done": 1}) == "cancel"
    ended = queue.finish(job.id, ME, "cancelled", message="it was cancelled")
    assert (ended.state, ended.cancelling, ended.message) == ("cancelled", False, "it was cancelled")


def test_a_job_that_was_cancelled_too_late_is_finished(queue: Queue) -> None:
    enqueued(queue)
    queue.cancel(claimed(queue).id)
    job = queue.finish(1, ME, "finished")
    assert (job.state, job.cancelling) == ("finished", False)


def test_a_job_that_is_released_while_it_is_cancelled_ends(queue: Queue) -> None:
    enqueued(queue)
    job = queue.cancel(claimed(queue).id)
    queue.release(job.id, ME)
    assert queue.job(job.id).state == "cancelled"
    assert queue.job(job.id).message == "it was cancelled; what was measured is kept"
    assert queue.claim(ME, "cpu", "Xeon") is None


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
    queue.renew(job_id, ME, progress={"done": 1})
    assert rose()
    queue.renew(job_id, ME)
    assert not rose()
    queue.release(job_id, ME)
    assert rose()
    assert queue.claim(OTHER, "cuda", "H200") is None
    assert not rose()
    assert claimed(queue, OTHER)
    assert rose()
    queue.renew(job_id, ME, progress={"done": 2})
    assert not rose()
    queue.cancel(job_id)
    assert rose()
    queue.cancel(job_id)
    assert not rose()
    queue.finish(job_id, OTHER, "cancelled")
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
