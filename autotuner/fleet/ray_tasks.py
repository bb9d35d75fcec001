"""Tuning tasks on a Ray cluster."""

from collections.abc import Callable, Sequence
from typing import Any

from autotuner.database import Job
from autotuner.fleet.importing import imported
from autotuner.fleet.reconciling import Ended


class RayTasks:
    """Tasks on this host, which sees the database: one per attempt at a job. Ray retries none, for each has a number.

    Args:
        run: takes text, runs an attempt, and returns how it went.
        arguments: returns the text of a job.
    """

    def __init__(self, run: Callable[[str], str], arguments: Callable[[Job], str]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray, self._arguments = imported(), arguments
        own = self._ray.get_runtime_context().get_node_id()
        strategy = NodeAffinitySchedulingStrategy(own, soft=False)
        self._run = self._ray.remote(num_cpus=1, max_retries=0, max_calls=1, scheduling_strategy=strategy)(run)
        self._out: dict[Any, tuple[int, int]] = {}

    def start(self, job: Job) -> None:
        self._out[self._run.remote(self._arguments(job))] = job.id, job.attempt

    def ended(self) -> Sequence[Ended]:
        if not self._out:
            return []
        ready, _ = self._ray.wait(list(self._out), num_returns=len(self._out), timeout=0)
        found = []
        for reference in ready:
            number, attempt = self._out.pop(reference)
            try:
                self._ray.get(reference)
                found.append(Ended(number, attempt))
            except self._ray.exceptions.RayError as error:
                found.append(Ended(number, attempt, str(error).strip().splitlines()[-1]))
        return found

    def kill(self, job_id: int) -> None:
        for reference in [reference for reference, (number, _) in self._out.items() if number == job_id]:
            self._ray.cancel(reference, force=True)
            del self._out[reference]

    def kill_all(self) -> None:
        """End all tasks."""
        for number, _ in list(self._out.values()):
            self.kill(number)
