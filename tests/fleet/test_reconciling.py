"""The reconciler: queue and tasks made to agree, whatever dies."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from autotuner.database import Database, Job, open_database
from autotuner.errors import UnavailableError
from autotuner.fleet.reconciling import STUBBORN_S, Ended, Reconciler
from tests.fleet.calls import Clock

H200 = ("cuda", "NVIDIA H200")
RUNNER = "fleet of the test"


class PlannedTasks:
    """Tasks that end when a test says so."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.over: list[Ended] = []
        self.killed: list[int] = []

    def start(self, job: Job) -> None:
        self.started.append((job.id, job.attempt))

    def ended(self) -> Sequence[Ended]:
        found, self.over = self.over, []
        return found

    def kill(self, job_id: int) -> None:
        self.killed.append(job_id)


class Cluster:
    """A reconciler and what it stands between."""

    def __init__(self, database: Database, held: Any, room: int = 2) -> None:
        self.queue, self.tasks, self.clock = database.queue, PlannedTasks(), Clock()
        self.devices = [H200]
        self.log: list[str] = []
        self.reconciler = Reconciler(
            database.queue, held, self.tasks, devices=lambda: self.devices, room=lambda: room,
            log=lambda event, **_: self.log.append(event), clock=self.clock,
        )  # fmt: skip

    def submit(self, count: int = 1, **options: Any) -> list[int]:
        return [self.queue.enqueue(model="m", request={"n": n}, device_type="cuda", **options).id for n in range(count)]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with open_database(tmp_path / "queue.sqlite") as opened:
        yield opened


@pytest.fixture
def cluster(database: Database) -> Iterator[Cluster]:
    with database.locks.hold(RUNNER) as held:
        yield Cluster(database, held)


def test_jobs_are_taken_as_long_as_there_is_room_and_only_where_there_are_gpus(cluster: Cluster) -> None:
    cluster.devices = []
    first, second, third = cluster.submit(3)
    assert not cluster.reconciler.step()
    cluster.devices = [H200]
    assert cluster.reconciler.step()
    assert cluster.tasks.started == [(first, 1), (second, 1)]
    cluster.queue.finish(first, 1, "finished")
    cluster.tasks.over = [Ended(first, 1)]
    cluster.reconciler.step()
    assert cluster.tasks.started[2:] == [(third, 1)]
    assert cluster.queue.job(first).state == "finished"


def test_a_job_of_higher_priority_goes_first(cluster: Cluster) -> None:
    cluster.submit(2)
    (urgent,) = cluster.submit(1, priority=1)
    cluster.reconciler.step()
    assert cluster.tasks.started[0] == (urgent, 1)


def test_a_task_that_died_is_started_again_as_another_attempt(cluster: Cluster) -> None:
    (job,) = cluster.submit()
    cluster.reconciler.step()
    cluster.tasks.over = [Ended(job, 1, "killed by SIGKILL")]
    cluster.reconciler.step()
    assert cluster.tasks.started == [(job, 1), (job, 2)]
    assert cluster.queue.report(job, 1) == "lost"
    assert cluster.queue.report(job, 2) == "go on"


def test_a_task_that_died_after_it_had_stored_its_end_changes_nothing(cluster: Cluster) -> None:
    (job,) = cluster.submit()
    cluster.reconciler.step()
    cluster.queue.finish(job, 1, "finished")
    cluster.tasks.over = [Ended(job, 1, "killed by SIGKILL")]
    assert not cluster.reconciler.step()
    assert cluster.queue.job(job).state == "finished"


def test_a_task_that_keeps_dying_fails_its_job(cluster: Cluster) -> None:
    (job,) = cluster.submit()
    for _ in range(20):
        cluster.reconciler.step()
        if cluster.queue.job(job).state == "failed":
            break
        cluster.tasks.over = [Ended(job, cluster.queue.job(job).attempt, "killed")]
    assert cluster.queue.job(job).state == "failed"


def test_a_runner_that_starts_again_takes_its_own_jobs_up(database: Database) -> None:
    with database.locks.hold(RUNNER) as held:
        before = Cluster(database, held)
        first, second = before.submit(2)
        before.reconciler.step()
    with database.locks.hold(RUNNER) as held:
        after = Cluster(database, held)
        after.reconciler.step()
    assert after.tasks.started == [(first, 2), (second, 2)]


def test_a_cancelled_task_that_does_not_hear_is_killed(cluster: Cluster) -> None:
    (job,) = cluster.submit()
    cluster.reconciler.step()
    cluster.queue.cancel(job)
    cluster.reconciler.step()
    assert cluster.tasks.killed == []
    cluster.clock.now += STUBBORN_S + 1
    cluster.reconciler.step()
    assert cluster.tasks.killed == [job]
    assert not cluster.reconciler.step()
    assert cluster.queue.job(job).state == "cancelled"


def test_one_that_hears_is_not(cluster: Cluster) -> None:
    (job,) = cluster.submit()
    cluster.reconciler.step()
    cluster.queue.cancel(job)
    cluster.reconciler.step()
    cluster.queue.finish(job, 1, "cancelled")
    cluster.tasks.over = [Ended(job, 1)]
    cluster.clock.now += STUBBORN_S + 1
    cluster.reconciler.step()
    assert cluster.tasks.killed == []


def test_an_end_that_could_not_be_stored_is_stored_at_the_next_step(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = cluster.submit()
    cluster.reconciler.step()
    cluster.tasks.over = [Ended(job, 1, "killed")]

    def away(*_: Any, **__: Any) -> None:
        raise UnavailableError("the database is away")

    with monkeypatch.context() as patched:
        patched.setattr(cluster.reconciler._queue, "release", away)
        with pytest.raises(UnavailableError):
            cluster.reconciler.step()
    cluster.reconciler.step()
    assert cluster.tasks.started == [(job, 1), (job, 2)]


def test_without_its_lock_a_runner_takes_no_job(database: Database) -> None:
    class Lost:
        name, is_held = RUNNER, False

    cluster = Cluster(database, Lost())
    cluster.submit()
    assert not cluster.reconciler.step()
    assert cluster.tasks.started == []
