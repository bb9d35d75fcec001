"""The walk itself: model, graph, space, what is known, measure the rest, problem, solution, configuration."""

from dataclasses import replace
from typing import Literal

from autotuner.configuration import Configuration
from autotuner.database import Database
from autotuner.errors import ConfigurationError
from autotuner.graph.autodiff import training_graph
from autotuner.kernels import KERNELS
from autotuner.models import Model
from autotuner.records import digest
from autotuner.space import SpaceFile, build_space
from autotuner.tuner.answer import build_configuration
from autotuner.tuner.asked import Asked, Progress, Watch
from autotuner.tuner.measuring import confirm_chosen, measure_missing

NOISE_FLOOR = "noise_floor"


def request_key(model: Model, file: SpaceFile) -> str:
    """Return the key of what is asked for: graph, space and kernels; equal requests have equal answers."""
    kernels = sorted((kernel.name, kernel.version, kernel.runs) for kernel in KERNELS if kernel.name in file.kernels)
    return digest([model.to_json(), file.model_dump(), kernels])


def tune(
    model: Model,
    file: SpaceFile,
    database: Database,
    measurer: Asked,
    *,
    watch: Watch = lambda _: None,
    again: bool = False,
    retry: bool = False,
) -> Configuration:
    """Find the best configuration of a model, measuring what the database does not know.

    Args:
        model: what to tune.
        file: what to try.
        database: where measurements and the answer are kept; an equal request is answered from it.
        measurer: measures calls, one after another.
        watch: called with the progress.
        again: solve anew even if the database holds the answer; measured calls are reused all the same.
        retry: measure once more what has failed; implies `again`.

    Returns:
        The configuration; `measured` is None unless the stored one had been timed end to end.

    Raises:
        InfeasibleError: some operator has no candidate that works.
        DatabaseError: the database cannot be written.
    """
    environment = measurer.environment
    key = request_key(model, file)
    database.remember(environment)
    if not (again or retry):
        stored = _stored(database, key, environment.key)
        if stored is not None:
            watch(Progress("done", 0, 0, reused=stored.counts["reused"]))
            return stored
    database.interrupt_jobs(environment.key, message="a later tuning began")
    watch(Progress("space", 0, 0))
    graph = training_graph(model.graph())
    space = build_space(graph, file)
    job = database.start_job(
        model=model.reference, graph_key=graph.key, request_key=key,
        request={"model": model.to_json()}, environment_key=environment.key,
    )  # fmt: skip
    try:
        known, counts, fresh = measure_missing(space, database, measurer, watch, retry=retry)
        known = confirm_chosen(space, known, fresh, database, measurer, watch)
        if fresh:
            database.set_fact(environment.key, NOISE_FLOOR, measurer.noise_floor())
        watch(Progress("solve", 0, 0))
        configuration = build_configuration(
            model, space, known, environment, counts, noise_floor=database.fact(environment.key, NOISE_FLOOR)
        )
        save(database, configuration, key)
    except BaseException as error:
        state: Literal["interrupted", "failed"] = "failed" if isinstance(error, Exception) else "interrupted"
        database.finish_job(job, state, counts={}, message=str(error) or type(error).__name__)
        raise
    database.finish_job(job, "finished", counts=configuration.counts)
    watch(Progress("done", counts["measured"], counts["measured"], counts["reused"], counts["failed"]))
    return configuration


def _stored(database: Database, key: str, environment_key: str) -> Configuration | None:
    """Return the latest answer to a request, its counts those of this look-up; one that cannot be read is a miss."""
    document = database.find_configuration(key, environment_key)
    if document is None:
        return None
    try:
        found = Configuration.from_json(document, "the stored configuration")
    except ConfigurationError:
        return None
    return replace(found, counts=dict(found.counts) | {"measured": 0, "reused": found.counts["calls"]})


def save(database: Database, configuration: Configuration, key: str) -> None:
    """Store a configuration as the latest answer to a request."""
    database.save_configuration(
        graph_key=configuration.graph_key, request_key=key, environment_key=configuration.environment_key,
        document=configuration.to_json(), total_us=configuration.certificate.predicted_us,
        measured_us=configuration.measured.plan_us if configuration.measured else None,
    )  # fmt: skip
