"""The contract of storage and queue: the methods that every engine has, and what they guarantee.

Another engine implements these protocols. `tests/database/conformance` states each guarantee as a test and runs over
every engine.

Guarantees of all methods:

- A method is one transaction: it takes effect as a whole or not at all.
- What a method has stored before it returned survives the death of its process.
- Values come back exactly as they were stored, floats and the order of JSON included. Times of day are in UTC.
- Threads may share one `Storage`; processes open their own.
- A method raises `DatabaseError` where the database cannot be read or written.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol

from autotuner.database.locks import Locks
from autotuner.database.values import (
    EVERY,
    Answer,
    Filter,
    Job,
    JobState,
    ListedConfiguration,
    Match,
    Statistics,
    StoredConfiguration,
    StoredMeasurement,
    Worker,
)
from autotuner.ir.records import Call, Environment, Measurement, Subgraph

ATTEMPTS = 5
"""A job whose runner is lost so often in a row, with nothing measured in between, is given up."""

Device = tuple[str, str]
"""Type and name of a device."""


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
    def listed(self, search: str = "", *, limit: int, before: int | None = None) -> list[ListedConfiguration]:
        """Return configurations without their documents, the newest first.

        Args:
            search: words that must occur in model, dtype or device, in any case; "" for all.
            before: only those of a lesser id.
        """

    @abstractmethod
    def known(self, family_key: str) -> list[tuple[str, str, dict[str, int]]]:
        """Return device type, dtype and extents of all that is known for a family of models, for people, each once."""


class Queue(Protocol):
    """Jobs that wait, run and end; and the workers that run them.

    A *runner* takes jobs and runs them. It holds the lock of its name (`Storage.locks`) from before it takes the first
    one until after the last.

    - At most one runner has a job. Each taking is an *attempt* with a number of its own. Whoever speaks of a job gives
      the number: what is said of an earlier attempt changes nothing.
    - A job ends once: by the runner of its latest attempt, by a cancellation while it waits, or by the loss of its
      runner.
    - No job is forgotten. One whose runner is gone goes to the next, with its progress: at once on SQLite, on
      PostgreSQL as soon as the lock was seen free for 10 s. A job that loses `ATTEMPTS` runners in a row has failed.
    - Of the jobs that wait for a device, those of the highest priority are taken first, the oldest of them first.
    - Of the jobs with equal requests, one runs at a time. The others wait, and measure only what it did not.
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
        priority: int = 0,
        idempotency_key: str | None = None,
        client: str = "",
        summary: Mapping[str, Any] | None = None,
    ) -> Job:
        """Store a job that waits for a runner of its device.

        Args:
            idempotency_key: of a job that is stored once, however often this client asks for it; it is returned as it
                is by now, and `is_new` the first time only.
            client: who submits it, as `queued` and `submitted` count.
            summary: what lists tell of the request. With one, a large request is dropped when the job ends.

        Raises:
            KeyReusedError: the client asked for something else under this key.
        """

    @abstractmethod
    def has_key(self, client: str, idempotency_key: str) -> bool:
        """Say whether a client has submitted a job under a key."""

    @abstractmethod
    def begin(
        self,
        *,
        model: str,
        request: Mapping[str, Any],
        device_type: str,
        device_name: str,
        runner: str,
        summary: Mapping[str, Any] | None = None,
    ) -> Job:
        """Store a job that the caller runs itself, from now on. Arguments as those of `enqueue`."""

    @abstractmethod
    def claim(
        self, runner: str, devices: Iterable[Device], *, limit: int = 1, in_hand: Collection[int] = ()
    ) -> list[Job]:
        """Take jobs that wait for one of these devices, or that were left behind on one.

        Args:
            limit: of their number.
            in_hand: ids of the jobs that the runner has; any other one that seems to run under its name was left behind
                by an earlier process of that name.
        """

    @abstractmethod
    def running(self, runner: str) -> list[Job]:
        """Return the jobs that a runner has, or has left behind, the oldest first."""

    @abstractmethod
    def report(
        self, job_id: int, attempt: int, *, progress: Mapping[str, Any] | None = None, advanced: bool = False
    ) -> Answer:
        """Store how far an attempt is, and return whether it is to go on.

        Args:
            progress: replaces what was stored before; None leaves it.
            advanced: something was measured since the job was taken.

        Returns:
            "cancel" where somebody cancelled the job, "lost" where another attempt has it or it has ended.
        """

    @abstractmethod
    def finish(
        self,
        job_id: int,
        attempt: int,
        state: JobState,
        *,
        counts: Mapping[str, int] | None = None,
        configuration_id: int | None = None,
        message: str = "",
    ) -> Job:
        """Store the end of a job by its latest attempt; to store the same end again changes nothing.

        Raises:
            NotFoundError: there is no such job.
            JobStateError: it has ended otherwise, or another attempt has it.
        """

    @abstractmethod
    def release(self, job_id: int, attempt: int, *, lost: bool = False) -> None:
        """Put a job back, for another attempt to go on with; without effect where this attempt does not have it.

        A job that was cancelled meanwhile ends as that.

        Args:
            lost: whoever worked on it died, which counts towards `ATTEMPTS`; otherwise these count anew.
        """

    @abstractmethod
    def cancel(self, job_id: int) -> Job:
        """Cancel a job: one that waits ends at once, one that runs as soon as its runner has heard of it.

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
    def jobs(
        self,
        *,
        state: JobState | None = None,
        limit: int | None = None,
        before: int | None = None,
        brief: bool = False,
    ) -> list[Job]:
        """Return jobs, the newest first; with `before`, only those with a lesser id.

        Args:
            brief: leave out the requests of jobs that have a summary.
        """

    @abstractmethod
    def revisions(self, job_ids: Iterable[int]) -> dict[int, tuple[int, bool]]:
        """Return, of each of these jobs that is there, the revision and whether it is lost, by id."""

    @abstractmethod
    def queued(self, client: str) -> int:
        """Return the number of jobs of a client that wait for a worker."""

    @abstractmethod
    def submitted(self, client: str, since: datetime) -> int:
        """Return the bytes of all jobs that a client has submitted since a time, whatever became of them."""

    @abstractmethod
    def released(self, client: str, since: datetime, wanted: int) -> datetime | None:
        """Return when the oldest jobs of a client since a time, of so many bytes together, were submitted.

        Returns:
            The time of the last of these; None where all together have less.
        """

    @abstractmethod
    def waiting(self) -> dict[JobState, int]:
        """Return the number of jobs in each state that is not an end."""

    @abstractmethod
    def greet(self, worker: str, device_type: str, device_name: str, memory_bytes: int | None = None) -> None:
        """Announce a runner that takes jobs, unless it is known; those that are gone are forgotten when one comes.

        Args:
            memory_bytes: of the device; None where the environment tells it.
        """

    @abstractmethod
    def leave(self, worker: str) -> None:
        """Remove a worker that takes no more jobs."""

    @abstractmethod
    def workers(self) -> list[Worker]:
        """Return those that were announced and hold the lock of their name, in the order in which they came."""


class Storage(Protocol):
    """Environments, what was measured in them, and facts.

    - A measurement belongs to a call and an environment; another environment is a miss.
    - A successful measurement is replaced only on request; a failure gives way to any newer measurement.
    """

    configurations: Configurations
    queue: Queue
    locks: Locks

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
    def times(self, environment_key: str, signatures: Collection[str]) -> list[tuple[Call, float]]:
        """Return calls of some subgraphs that work in an environment, with their medians in microseconds.

        In the order of first storing.
        """

    @abstractmethod
    def subgraphs(self, environment_key: str) -> list[Subgraph]:
        """Return each subgraph of which something was measured in an environment, once."""

    @abstractmethod
    def statistics(self, where: Filter = EVERY) -> Statistics:
        """Return the number of measurements and their times."""

    @abstractmethod
    def set_fact(self, environment_key: str, name: str, value: float) -> None:
        """Store a constant of an environment, such as its noise floor, over an earlier value."""

    @abstractmethod
    def facts(self, environment_key: str) -> dict[str, float]:
        """Return every measured constant of an environment, by name."""

    @abstractmethod
    def fact(self, environment_key: str, name: str) -> float | None:
        """Return a measured constant of an environment, or None where it was never measured."""
