"""Attending: one job from its request to its end, whoever asked for it."""

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import monotonic
from uuid import uuid4

from autotuner import tuner
from autotuner.checkpoint import OverError, checkpoint, until, watched
from autotuner.database import Database, Job, JobState, exit_in_hand
from autotuner.errors import (
    DatabaseError,
    JobStateError,
    MeasureError,
    ModelError,
    NotFoundError,
    UnavailableError,
    stacklevel,
)
from autotuner.extras import require
from autotuner.ir.autodiff import training_graph
from autotuner.ir.cost import largest_end
from autotuner.ir.device import CPU, has_graphs
from autotuner.measure import Measurer, rotate_bytes
from autotuner.measure.devices import device_of, environment
from autotuner.measure.lock import Waiting
from autotuner.plan.configuration import Configuration
from autotuner.plan.request import Request
from autotuner.server.worker.ahead import StartedAhead
from autotuner.server.worker.reporting import Beat, CancelledError, JobLostError, Log, Reporter, Trace
from autotuner.server.worker.timing import TimingProcess, time_apart
from autotuner.settings import Settings
from autotuner.space import SpaceFile
from autotuner.tuner import MeasurerProtocol, Spent, Tuned, TuningPolicy, Watch
from autotuner.tuner.policy import DEFAULT_POLICY

END_TO_END_SAMPLES = 30

Measuring = Callable[[Request], AbstractContextManager[MeasurerProtocol]]
"""Makes the measurer of a request."""

Timing = Callable[[Configuration, int, Waiting], Configuration]
"""Times a configuration end to end, with so many samples; the third is told what is waited for."""


def runner_name() -> str:
    """Return a name that no other runner of jobs ever has; host and process are for people."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"


def silent(event: str, **facts: object) -> None:
    """Log nothing."""


def tune_attended(
    request: Request,
    database: Database,
    file: SpaceFile,
    settings: Settings,
    *,
    watch: Watch = lambda _: None,
    policy: TuningPolicy = DEFAULT_POLICY,
    device_name: str | None = None,
    measuring: Measuring | None = None,
    timing: Timing | None = None,
) -> Configuration:
    """Run a job of one's own here and now, and return its answer. Arguments as those of `run_job`.

    Args:
        device_name: of the device that it runs on; by default that of this host.

    Raises:
        JobStateError: somebody cancelled it meanwhile.
        AutotunerError: the tree in `autotuner.errors` says what.
    """
    name = runner_name()
    with database.locks.hold(name):
        job = database.queue.begin(
            model=request.model.reference, request=request.to_json(), device_type=request.device_type,
            device_name=device_name or environment(request.device_type).device_name, runner=name,
            summary=request.summary(),
        )  # fmt: skip
        found = run_job(
            job, request, database, file, settings, watch=watch, policy=policy, measuring=measuring, timing=timing
        )
    if found is None:
        raise JobStateError(
            f"job {job.id} was cancelled; what was measured is kept, the same command goes on from there"
        )
    return found


def run_job(
    job: Job,
    request: Request,
    database: Database,
    file: SpaceFile,
    settings: Settings,
    *,
    watch: Watch = lambda _: None,
    also: Callable[[], None] = lambda: None,
    log: Log = silent,
    policy: TuningPolicy = DEFAULT_POLICY,
    measuring: Measuring | None = None,
    timing: Timing | None = None,
) -> Configuration | None:
    """Run a job that was taken, and store how it ended: all that is stored of it is said by its attempt.

    The lock of its runner is held meanwhile, by this process or by another.

    Args:
        job: as it was taken.
        settings: for threads, timeout and cache.
        watch: called with the progress.
        also: called every few seconds, on a thread of its own.
        log: called with an event and facts.
        policy: thresholds of the tuning run.
        measuring: by default a measurer of this host.
        timing: by default in a process of its own on this host.

    Returns:
        The answer; None where the job was cancelled, or another attempt has it.

    Raises:
        AutotunerError: why it failed, which is stored as well. A database that stayed away is no failure of a job that
            was claimed: the next one to claim it goes on.
        BaseException: what interrupted it. An attended job ends as interrupted, another goes back to the queue.
    """
    before = exit_in_hand()
    measuring = measuring or partial(_measurer, settings=settings)
    with Beat(database, job, also, log) as beat:
        limited = request.options.limits.seconds is not None
        reporter = Reporter(beat, watch, limited=limited, trace=Trace(job.progress.get("trace", ())))
        try:
            with watched(reporter.look), database.writing_behind():
                spent = Spent.of(job.progress)
                tuned = _tuned(
                    _Run(request, database, file, reporter, policy, measuring, timing, settings.threads), spent
                )
            beat.flush()
        except CancelledError:
            _end(database, job, log, "cancelled", "it was cancelled; what was measured is kept")
            return None
        except JobLostError:
            log("job_lost", job=job.id)
            return None
        except Exception as error:
            leaving = exit_in_hand()
            if leaving is not None and leaving is not before:
                # It was on its way out, and then something failed as well.
                _leave(database, job, log)
                raise leaving from error
            if job.attended or not isinstance(error, UnavailableError):
                _end(database, job, log, "failed", told(error))
            raise
        except BaseException:
            _leave(database, job, log)
            raise
        doubts = doubts_words(tuned.configuration)
        return tuned.configuration if _end(database, job, log, "finished", doubts, tuned) else None


def told(error: Exception) -> str:
    """Return what everybody may read of an error: where the database is stands in the log alone."""
    if isinstance(error, DatabaseError):
        return "the database could not be used, and the log of who ran the job says why; what was stored is kept"
    return str(error) or type(error).__name__


def _end(
    database: Database, job: Job, log: Log, state: JobState, message: str = "", tuned: Tuned | None = None
) -> bool:
    """Store how a job ended, and return whether this attempt had it to the end."""
    counts, number = (tuned.configuration.counts, tuned.id) if tuned else ({}, None)
    try:
        database.queue.finish(job.id, job.attempt, state, message=message, counts=counts, configuration_id=number)
    except (JobStateError, NotFoundError) as error:
        log("job_lost", job=job.id, error=str(error))
        return False
    except DatabaseError as error:
        log("job_end_not_stored", job=job.id, state=state, error=str(error))
        return job.attended
    return True


def _leave(database: Database, job: Job, log: Log) -> None:
    """Put a job back that is not to its end; one without a database stays, until its runner is found to be gone."""
    if job.attended:
        _end(database, job, log, "interrupted", "it was interrupted; what was measured is kept")
        return
    try:
        database.queue.release(job.id, job.attempt)
    except DatabaseError as error:
        log("job_not_put_back", job=job.id, error=str(error))


def doubts_words(found: Configuration) -> str:
    """Return why an answer is doubtful, in sentences; nothing where it is not."""
    return " ".join(doubt.sentence for doubt in found.doubts)


@dataclass(frozen=True)
class _Run:
    """One attempt at a job: what it answers, of what, with whose means, and who hears of it; see `run_job`."""

    request: Request
    database: Database
    file: SpaceFile
    reporter: Reporter
    policy: TuningPolicy
    measuring: Measuring
    timing: Timing | None
    threads: int | None

    @property
    def limit_s(self) -> float:
        """The seconds that the job may take; infinite without a limit."""
        seconds = self.request.options.limits.seconds
        return inf if seconds is None else seconds

    def save(self, found: Configuration, *, complete: bool) -> int:
        return tuner.save(self.database, found, tuner.request_key(self.request, self.file), complete=complete)


def _tuned(run: _Run, spent: Spent) -> Tuned:
    """Tune and time the answer end to end; do both again where the device had another speed in each."""
    began = monotonic()
    tuned, timed_now = _tuned_once(run, spent)
    for _ in range(run.policy.settle_rounds if run.request.device_type == CPU else 0):
        spent_now = spent.and_since(began)
        if not timed_now or _is_settled(tuned.configuration, run.policy) or spent_now.seconds > run.limit_s:
            break
        tuned, timed_now = _tuned_once(run, spent_now, tuned.configuration)
    return tuned


def _is_settled(found: Configuration, policy: TuningPolicy) -> bool:
    """Say whether an answer takes end to end what its calls take, where both are known."""
    if found.measured is None:
        return True
    off = found.measured.predicted_over_measured(found.kernels_us)
    return abs(off) <= policy.settled_share


def _tuned_once(run: _Run, spent: Spent, unsettled: Configuration | None = None) -> tuple[Tuned, bool]:
    """Return an answer, and whether it was timed end to end now.

    Args:
        spent: of the request's limits, before.
        unsettled: the answer so far, as for `autotuner.tuner.tune`.
    """
    began, request = monotonic(), run.request
    samples = END_TO_END_SAMPLES if _is_timed(request) else 0
    timed = request.options.end_to_end and (samples > 0 or has_graphs(request.device_type))
    # A job that may take so long has its last seconds for solving, and may have none for timing end to end.
    ahead = samples if timed and run.timing is None and run.limit_s == inf else None
    with ExitStack() as stack:
        with run.measuring(request) as measurer, _torch_is_needed():
            watch = stack.enter_context(StartedAhead(request, measurer, run.reporter, ahead, run.threads))
            tuned = tuner.tune(
                request, run.file, run.database, measurer, watch=watch, spent=spent, provisional=timed,
                unsettled=unsettled, policy=run.policy,
            )  # fmt: skip
        found = tuned.configuration
        is_known = found.measured is not None if samples else run.database.configurations.get(tuned.id).complete
        if not timed or is_known:
            return tuned, False
        timing = run.timing or partial(_timed_apart, threads=run.threads, started=watch.process)
        return _timed(run, tuned, samples, timing, lambda: spent.and_since(began).seconds - measurer.waited_s)


@contextmanager
def _torch_is_needed() -> Iterator[None]:
    """Say which extra to install where nothing can be measured because torch is missing.

    Raises:
        MissingError: in place of a `MeasureError`.
    """
    try:
        yield
    except MeasureError:
        require("measuring", "torch")
        raise


def _timed(run: _Run, tuned: Tuned, samples: int, timing: Timing, spent_s: Callable[[], float]) -> tuple[Tuned, bool]:
    """Return an answer that is timed end to end, and whether it was; the job may have reached its limit.

    Args:
        spent_s: returns the seconds that the job has taken.
    """
    run.reporter.stage("end_to_end", samples or 1)
    found, waited_s = tuned.configuration, 0.0

    def waiting(seconds: float, words: str) -> None:
        nonlocal waited_s
        waited_s = seconds
        run.reporter.wait(words)

    try:
        with until(lambda: spent_s() - waited_s > run.limit_s):
            checkpoint()  # a process is not even started where the limit was reached before
            found = timing(found, samples, waiting)
    except OverError:
        warnings.warn(
            f"the answer was not timed end to end: the limit of {run.limit_s:g} s was reached", stacklevel=stacklevel()
        )
        return replace(tuned, id=run.save(found, complete=tuned.complete)), False
    complete = tuned.complete and not found.doubts
    return Tuned(found, run.save(found, complete=complete), complete), True


def _measurer(request: Request, settings: Settings) -> Measurer:
    check_memory(request)
    return Measurer(
        threads=settings.threads,
        timeout_s=settings.timeout_s,
        device_type=request.device_type,
        cache_dir=settings.cache_dir,
        rotate_bytes=rotate_bytes(training_graph(request.model.graph()), request.device_type),
    )


def measurer_ahead(device_type: str, settings: Settings) -> Measurer:
    """Return a measurer whose process starts now, before there is a request; `measuring_with` takes it for one."""
    found = Measurer(
        threads=settings.threads, timeout_s=settings.timeout_s, device_type=device_type, cache_dir=settings.cache_dir
    )
    found.begin_measuring()
    return found


@contextmanager
def measuring_with(measurer: Measurer, request: Request) -> Iterator[Measurer]:
    """Yield a measurer as a request needs it, whether its process is begun or not; its processes end behind it.

    What it counts as waited for is of this request alone.
    """
    with measurer:
        measurer.waited_s = 0.0
        check_memory(request)
        measurer.rotate(rotate_bytes(training_graph(request.model.graph()), request.device_type))
        yield measurer


def check_memory(request: Request) -> None:
    """Check that each tensor that goes into a model or comes out of it fits on this host's device.

    Raises:
        ModelError: one does not; a measuring process that tried would be killed for want of memory, or swap.
    """
    device = device_of(request.device_type)
    largest, needed = largest_end(request.model.graph())
    if needed > device.memory_bytes:
        raise ModelError(
            f"tensor {largest!r} takes {needed} bytes, and {device.name} has {device.memory_bytes}: give smaller "
            "extents"
        )


def _timed_apart(
    found: Configuration, samples: int, waiting: Waiting, threads: int | None, started: TimingProcess | None
) -> Configuration:
    return time_apart(found, samples, threads, waiting, started)


def _is_timed(request: Request) -> bool:
    """Say whether a plan is timed end to end: not that of a region, of which a module has many.

    On a CPU, what the framework has no layer for is left to `autotuner check --time`: compiling its operators takes
    longer than tuning them.
    """
    model = request.model
    return model.has_framework_layer or (not model.is_captured and has_graphs(request.device_type))
