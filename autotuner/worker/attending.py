"""Attending: one job from its request to its end, whoever asked for it."""

from collections.abc import Callable

from autotuner import tuner
from autotuner.configuration import Configuration
from autotuner.database import Database, Job, JobState, this_process
from autotuner.device import environment
from autotuner.errors import ConfigurationError, JobStateError
from autotuner.graph.autodiff import training_graph
from autotuner.measure import Measurer, lock_path, locked, rotate_bytes
from autotuner.models import Model
from autotuner.request import Request
from autotuner.settings import Settings
from autotuner.space import SpaceFile
from autotuner.tuner import Tuned, Watch
from autotuner.worker.reporting import Beat, CancelledError, Log, LostError, Reporter

END_TO_END_SAMPLES = 30


def silent(event: str, **facts: object) -> None:
    """Log nothing."""


def tune_attended(
    request: Request,
    database: Database,
    file: SpaceFile,
    settings: Settings,
    *,
    threads: int | None = None,
    watch: Watch = lambda _: None,
) -> Configuration:
    """Run a job of one's own here and now, and return its answer. Arguments as those of `run_job`.

    Raises:
        JobStateError: somebody cancelled it meanwhile.
        AutotunerError: the tree in `autotuner.errors` says what.
    """
    here = environment(request.device_type)
    worker = this_process()
    job = database.queue.begin(
        model=request.model.reference, request=request.to_json(), device_type=here.device_type,
        device_name=here.device_name, worker=worker,
    )  # fmt: skip
    found = run_job(job, request, database, file, settings, worker=worker, threads=threads, watch=watch)
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
    worker: str,
    threads: int | None = None,
    watch: Watch = lambda _: None,
    also: Callable[[], None] = lambda: None,
    log: Log = silent,
) -> Configuration | None:
    """Run a job that this worker has taken, and store how it ended.

    Args:
        settings: for timeout, cache and, if not given, threads.
        threads: that a kernel may use.
        watch: called with the progress.
        also: called every few seconds, on a thread of its own.
        log: called with an event and facts.

    Returns:
        The answer; None where the job was cancelled, or was given to another worker.

    Raises:
        AutotunerError: why it failed, which is stored as well.
        BaseException: what interrupted it. An attended job ends as interrupted, another goes back to the queue.
    """
    with Beat(database, job, worker, also, log) as beat:

        def end(state: JobState, message: str = "", tuned: Tuned | None = None) -> bool:
            try:
                database.queue.finish(
                    job.id, worker, state, message=message or (doubts_words(tuned.configuration) if tuned else ""),
                    counts=tuned.configuration.counts if tuned else {}, configuration_id=tuned.id if tuned else None,
                )  # fmt: skip
            except JobStateError as error:
                log("job_lost", job=job.id, error=str(error))
                return False
            return True

        try:
            tuned = _tuned(request, database, file, settings, threads, Reporter(database, job, worker, beat, watch))
        except CancelledError:
            end("cancelled", "it was cancelled; what was measured is kept")
            return None
        except LostError:
            log("job_lost", job=job.id)
            return None
        except Exception as error:
            end("failed", str(error) or type(error).__name__)
            raise
        except BaseException:
            if job.attended:
                end("interrupted", "it was interrupted; what was measured is kept")
            else:
                database.queue.release(job.id, worker)
            raise
        return tuned.configuration if end("finished", tuned=tuned) else None


def doubts_words(found: Configuration) -> str:
    """Return why an answer is doubtful, in sentences; nothing where it is not."""
    return " ".join(doubt.sentence for doubt in found.doubts)


def _tuned(
    request: Request,
    database: Database,
    file: SpaceFile,
    settings: Settings,
    threads: int | None,
    reporter: Reporter,
) -> Tuned:
    threads = threads if threads is not None else settings.threads
    with Measurer(
        threads=threads,
        timeout_s=settings.timeout_s,
        device_type=request.device_type,
        cache_dir=settings.cache_dir,
        rotate_bytes=rotate_bytes(training_graph(request.model.graph()), request.device_type),
    ) as measurer:
        timed = request.end_to_end and _has_peers(request.model)
        tuned = tuner.tune(request, file, database, measurer, watch=reporter, provisional=timed)
    if not timed or tuned.configuration.measured is not None:
        return tuned
    from autotuner.runtime import time_peers

    reporter.stage("end_to_end", END_TO_END_SAMPLES)
    with locked(lock_path(request.device_type), alone=True, waiting=lambda _waited_s, words: reporter.wait(words)):
        measured = time_peers(tuned.configuration, END_TO_END_SAMPLES, threads=threads)
    found = tuned.configuration.with_measured(measured)
    complete = tuned.complete and not found.doubts
    return Tuned(found, tuner.save(database, found, tuner.request_key(request, file), complete=complete), complete)


def _has_peers(model: Model) -> bool:
    from autotuner.runtime import encoder_layer

    try:
        encoder_layer(model)
    except ConfigurationError:
        return False
    return True
