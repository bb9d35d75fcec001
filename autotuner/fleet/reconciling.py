"""Reconciler: what the queue says is running, and the tasks that run it, made to agree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from autotuner.database import Device, Hold, Job, Queue
from autotuner.fleet.fleet_measurer import Log

STUBBORN_S = 30.0
"""A task whose job was cancelled, or belongs to another attempt, hears so within a second; after this it is killed."""


@dataclass(frozen=True)
class Ended:
    """A task that is over.

    Args:
        died: how its process was lost; "" where it ended by itself, and has stored how its job ended.
    """

    job_id: int
    attempt: int
    died: str = ""


class Tasks(Protocol):
    """Processes that run jobs."""

    def start(self, job: Job) -> None:
        """Start a task for an attempt at a job."""

    def ended(self) -> Sequence[Ended]:
        """Return the tasks that are over since the last time."""

    def kill(self, job_id: int) -> None:
        """End a task's process; it is not among the ended ones then."""


@dataclass
class _InHand:
    job: Job
    stopping_since: float | None = None


class Reconciler:
    """Takes jobs as long as there is room, has each run by a task, and puts back those whose task has died.

    Args:
        held: the lock of the runner; while it is lost, no job is taken.
        devices: returns type and name of each class of GPUs that the cluster has.
        room: returns how many jobs may run at once.
    """

    def __init__(
        self,
        queue: Queue,
        held: Hold,
        tasks: Tasks,
        *,
        devices: Callable[[], Sequence[Device]],
        room: Callable[[], int],
        log: Log,
        clock: Callable[[], float],
    ) -> None:
        self._queue, self._held, self._tasks, self._devices, self._room = queue, held, tasks, devices, room
        self._log, self._clock = log, clock
        self._in_hand: dict[int, _InHand] = {}
        self._ended: list[Ended] = []

    @property
    def in_hand(self) -> list[int]:
        """The ids of the jobs that tasks run."""
        return sorted(self._in_hand)

    def step(self) -> bool:
        """Make both agree once, and return whether anything runs or was taken. What fails is done at the next step.

        Raises:
            DatabaseError: the database is away.
        """
        self._ended += self._tasks.ended()
        while self._ended:
            self._end(self._ended[0])
            self._ended.pop(0)
        self._stop()
        self._take()
        return bool(self._in_hand)

    def _end(self, ended: Ended) -> None:
        """Put a job back whose task has died; one that has ended, or that another attempt has, stays as it is."""
        self._queue.release(ended.job_id, ended.attempt, lost=bool(ended.died))
        self._in_hand.pop(ended.job_id, None)
        event = "task_died" if ended.died else "task_ended"
        self._log(event, job=ended.job_id, attempt=ended.attempt, **({"error": ended.died} if ended.died else {}))

    def _stop(self) -> None:
        """Kill the tasks that do not hear for long that their job is cancelled, or is not theirs."""
        if not self._in_hand:
            return
        going_on = {job.id: job for job in self._queue.running(self._held.name) if not job.cancelling}
        for number, mine in list(self._in_hand.items()):
            if number in going_on and going_on[number].attempt == mine.job.attempt:
                mine.stopping_since = None
                continue
            if mine.stopping_since is None:
                mine.stopping_since = self._clock()
            elif self._clock() - mine.stopping_since > STUBBORN_S:
                self._log("task_killed", job=number, attempt=mine.job.attempt)
                self._tasks.kill(number)
                self._ended.append(Ended(number, mine.job.attempt, "it was killed, since it did not end when told to"))

    def _take(self) -> None:
        devices, room = self._devices(), self._room() - len(self._in_hand)
        if not devices or room <= 0 or not self._held.is_held:
            return
        for job in self._queue.claim(self._held.name, devices, limit=room, in_hand=self.in_hand):
            self._log("job_taken", job=job.id, model=job.model, attempt=job.attempt)
            self._in_hand[job.id] = _InHand(job)
            self._tasks.start(job)
