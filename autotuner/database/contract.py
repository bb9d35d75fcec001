"""The contract of storage and queue: the methods that every engine has, and what they guarantee.

Another engine implements these protocols. `tests/database/conformance` states each guarantee as a test and runs over
every engine.

Guarantees of all methods:

- A method is one transaction: it takes effect as a whole or not at all.
- What a method has stored before it returned survives the death of its process.
- Values come back exactly as they were stored, floats and the order of JSON included. Times of day are in UTC.
- Threads may share one `Storage`; processes open their own.
- A method raises `DatabaseError` where the database cannot be read or written.

Owners and workers are named by `this_process()`, followed by "#" and a word where one process has several.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from autotuner.database.values import (
    EVERY,
    Filter,
    Job,
    JobState,
    Match,
    Renewal,
    Statistics,
    StoredConfiguration,
    StoredMeasurement,
    Worker,
)
from autotuner.ir.records import Call, Environment, Measurement

ATTEMPTS = 5
"""A job whose worker is lost so often in a row, with nothing measured in between, is given up."""


class Configurations(Protocol):
    """Answers. They are added, and never changed or removed; their ids rise."""

    @abstractmethod
    def save(
        self,
        *,
        request_key: str,
        environment_key: str,
        family_key: str,
        dtype: str,
        extents: Mapping[str, int],
        complete: bool,
        document: Mapping[str, Any],
        total_us: float,
        measured_us: float | None = None,
    ) -> int:
        """Store a configuration and return its id; it is the answer to its request in its environment from now on.

        Args:
            family_key: of models that differ in extents and dtype only.
            complete: whether all that could matter had been measured.
            document: the configuration as JSON.
            total_us: predicted, for one step.
            measured_us: measured end to end, where it was.
        """

    @abstractmethod
    def find(
        self, request_key: str, environment_key: str, *, complete: bool = True
    ) -> tuple[int, dict[str, Any]] | None:
        """Return id and document of the latest answer to a request in an environment, None without one.

        Args:
            complete: only of those that are.
        """

    @abstractmethod
    def get(self, configuration_id: int) -> StoredConfiguration:
        """Return a configuration by its id.

        Raises:
            NotFoundError: there is none.
        """

    @abstractmethod
    def best(
        self, *, family_key: str, dtype: str, extents: Mapping[str, int], device_type: str, device_name: str | None
    ) -> Match:
        """Return the best configuration known for a model on a device.

        A complete one goes before one that is not, a later one before an earlier. Failing an exact match, it is one
        for the same extents from another device (of the same type, if there is one), which runs but may not be the
        fastest; failing that, the one whose extents are nearest, by the sum of |log| of their ratios.

        Args:
            device_name: None for any device of the type.
        """

    @abstractmethod
    def count(self, family_key: str) -> int:
        """Return the number for a family of models: while it stays, so do `best` and `known` of that family."""

    @abstractmethod
    def known(self, family_key: str) -> list[tuple[str, str, dict[str, int]]]:
        """Return device type, dtype and extents of all that is known for a family of models, for people, each once."""


class Queue(Protocol):
    """Jobs that wait, run and end; and the workers that run them.

    - At most one worker runs a job. A worker that has lost a job hears so, and changes nothing of it.
    - A job ends once, and only by the worker that runs it, by a cancellation while it waits, or by the loss of its
      worker.
    - No job is forgotten. One that its worker leaves behind goes to the next worker, before all later jobs and with
      its progress: on the host of that worker as soon as its process is gone, elsewhere when its lease has run out, by
      clocks that are taken to agree. A job that loses `ATTEMPTS` workers in a row has failed.
    - A job that its own process runs (`attended`) is given to nobody else: without that process, it is interrupted.
    - A job's revision rises with each change of the job, and with nothing else.
    """

    @abstractmethod
    def enqueue(
        self,
        *,
        model: str,
        request: Mapping[str, Any],
        device_type: str,
        device_name: str | None = None,
        client: str = "",
    ) -> Job:
        """Store a job that waits for a worker of its device.

        Args:
            client: who submits it, as `queued` counts.
        """

    @abstractmethod
    def begin(self, *, model: str, request: Mapping[str, Any], device_type: str, device_name: str, worker: str) -> Job:
        """Store a job that the caller runs itself, from now on."""

    @abstractmethod
    def claim(self, worker: str, device_type: str, device_name: str) -> Job | None:
        """Take the oldest job that waits for this device, or that was left behind on one; None where there is none.

        A worker that claims has no job in hand: one that it seems to run still, it gets again.
        """

    @abstractmethod
    def renew(
        self, job_id: int, worker: str, *, progress: Mapping[str, Any] | None = None, advanced: bool = False
    ) -> Renewal:
        """Extend the lease of a job that its worker still runs, and store its progress.

        Args:
            progress: replaces what was stored before; None leaves it.
            advanced: something was measured since the job was taken.

        Returns:
            "cancel" where somebody cancelled it, "lost" where another worker has it or it has ended.
        """

    @abstractmethod
    def finish(
        self,
        job_id: int,
        worker: str,
        state: JobState,
        *,
        counts: Mapping[str, int] | None = None,
        configuration_id: int | None = None,
        message: str = "",
    ) -> Job:
        """Store the end of a job that this worker runs.

        Raises:
            NotFoundError: there is no such job.
            JobStateError: it has ended already, or another worker has it.
        """

    @abstractmethod
    def release(self, job_id: int, worker: str) -> None:
        """Put a job back that this worker runs, for another to go on with; one that is not its own stays as it is.

        A job that was cancelled meanwhile ends as that. What is put back was not lost, so attempts count anew.
        """

    @abstractmethod
    def cancel(self, job_id: int) -> Job:
        """Cancel a job: one that waits ends at once, one that runs as soon as its worker has heard of it.

        Raises:
            NotFoundError: there is no such job.
            JobStateError: it has ended otherwise.
        """

    @abstractmethod
    def job(self, job_id: int) -> Job:
        """Return a job.

        Raises:
            NotFoundError: there is none with this id.
        """

    @abstractmethod
    def jobs(self, *, state: JobState | None = None, limit: int | None = None, before: int | None = None) -> list[Job]:
        """Return jobs, the newest first; with `before`, only those with a lesser id."""

    @abstractmethod
    def revisions(self, job_ids: Iterable[int]) -> dict[int, tuple[int, bool]]:
        """Return, of each of these jobs that is there, the revision and whether it is lost, by id."""

    @abstractmethod
    def queued(self, client: str) -> int:
        """Return the number of jobs of a client that wait for a worker."""

    @abstractmethod
    def waiting(self) -> dict[JobState, int]:
        """Return the number of jobs in each state that is not an end."""

    @abstractmethod
    def greet(self, worker: str, device_type: str, device_name: str) -> None:
        """Announce a worker that takes jobs; those that are gone are forgotten when a new one comes."""

    @abstractmethod
    def leave(self, worker: str) -> None:
        """Remove a worker that takes no more jobs."""

    @abstractmethod
    def workers(self) -> list[Worker]:
        """Return the workers that are not gone, in the order in which they came."""


class Storage(Protocol):
    """Environments, what was measured in them, and facts.

    - A measurement belongs to a call and an environment; another environment is a miss.
    - A successful measurement is replaced only on request; a failure gives way to any newer measurement.
    - At most one owner holds a call of an environment. A claim ends by `release_calls`, with its owner's process, or on
      another host with its lease.
    """

    configurations: Configurations
    queue: Queue

    @abstractmethod
    def remember(self, environment: Environment) -> None:
        """Store an environment; one that is known stays as it is."""

    @abstractmethod
    def environments(self) -> list[Environment]:
        """Return every known environment, the first one remembered first."""

    @abstractmethod
    def store(self, environment_key: str, results: Iterable[tuple[Call, Measurement]], *, replace: bool = False) -> int:
        """Store measurements, all or none, and return how many rows were written.

        Args:
            environment_key: of an environment that was remembered.
            results: of one call given twice, the later one counts as the newer.
            replace: also replace what was measured well; otherwise only a failure gives way to a newer measurement.
        """

    @abstractmethod
    def find(self, environment_key: str, call_keys: Collection[str]) -> dict[str, Measurement]:
        """Return the measurement of each call that has one in this environment, failures included, by call key."""

    @abstractmethod
    def measurements(
        self, where: Filter = EVERY, *, limit: int | None = None, after: int | None = None
    ) -> list[StoredMeasurement]:
        """Return measurements in the order of first storing; with `after`, only those with a greater id."""

    @abstractmethod
    def statistics(self, where: Filter = EVERY) -> Statistics:
        """Return the number of measurements and their times."""

    @abstractmethod
    def claim_calls(self, environment_key: str, owner: str, call_keys: Collection[str]) -> set[str]:
        """Claim calls for measuring, and return the keys of those that nobody else has claimed.

        Look up what is measured after claiming: whoever held a call before has stored it by then.
        """

    @abstractmethod
    def release_calls(self, owner: str) -> None:
        """End all claims of an owner; where the database is away, they end before the next ones."""

    @abstractmethod
    def set_fact(self, environment_key: str, name: str, value: float) -> None:
        """Store a constant of an environment, such as its noise floor, over an earlier value."""

    @abstractmethod
    def facts(self, environment_key: str) -> dict[str, float]:
        """Return every measured constant of an environment, by name."""

    @abstractmethod
    def fact(self, environment_key: str, name: str) -> float | None:
        """Return a measured constant of an environment, or None where it was never measured."""
