"""Tuning run: from a model to its configuration, through graph, space, measurements and solution."""

from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from time import monotonic

from autotuner.checkpoint import OverError, until
from autotuner.database import Database
from autotuner.errors import ConfigurationError, InfeasibleError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.numerics import allowed_classes
from autotuner.ir.records import digest
from autotuner.kernels import KERNELS
from autotuner.plan.configuration import Configuration
from autotuner.plan.request import Request, family_key
from autotuner.settings import Limits, TuneOptions
from autotuner.space import SpaceFile, build_space
from autotuner.tuner.answer import build_configuration
from autotuner.tuner.costliest import costliest_steps
from autotuner.tuner.likely import likely_compiled
from autotuner.tuner.measuring import measure_missing, open_plan
from autotuner.tuner.policy import DEFAULT_POLICY, TuningPolicy
from autotuner.tuner.priors import shipped_priors
from autotuner.tuner.progress import NOTHING_SPENT, MeasurerProtocol, Progress, Spent, Watch
from autotuner.tuner.searching import cell_counts, with_known_calls
from autotuner.tuner.state import TuningState
from autotuner.tuner.twins import known_twins

NOISE_FLOOR = "noise_floor"
OF_THE_WHOLE = ("wide", "end_to_end")
"""Doubts for which every call of a plan is measured again; the others are of single calls, which the database marks."""


def request_key(request: Request, file: SpaceFile) -> str:
    """Return the key of what is asked for, and may be answered: graph, space, kernels, budget and numerics."""
    tried = {name: KERNELS[name] for name in file.kernels if KERNELS[name].needs in allowed_classes(request.numerics)}
    kernels = sorted((name, kernel.version) for name, kernel in tried.items())
    searched = file.model_copy(update={"kernels": {name: file.kernels[name] for name in tried}}).model_dump()
    allowed = () if request.numerics == "exact" else (request.numerics,)
    return digest([request.model.to_json(), request.options.budget_bytes, searched, kernels, *allowed])


@dataclass(frozen=True)
class Tuned:
    """A stored configuration and its id; `complete` if all that could matter, or was expected to, was measured well."""

    configuration: Configuration
    id: int
    complete: bool


def tune(
    request: Request,
    file: SpaceFile,
    database: Database,
    measurer: MeasurerProtocol,
    *,
    watch: Watch = lambda _: None,
    spent: Spent = NOTHING_SPENT,
    provisional: bool = False,
    unsettled: Configuration | None = None,
    policy: TuningPolicy = DEFAULT_POLICY,
) -> Tuned:
    """Find the best configuration of a model, measuring what the database does not know.

    Args:
        request: what to tune, and how much effort it is worth.
        file: what to try.
        database: where measurements and the answer are kept; an equal request is answered from it.
        measurer: measures calls, one after another.
        watch: called with the progress; an error that it raises ends the run, and what was measured is kept.
        spent: of the request's limits, by earlier runs.
        provisional: the answer is stored as incomplete, because the caller checks it and stores another.
        unsettled: the answer that this request has had so far, where its whole does not take what its calls take: the
            chosen calls are confirmed once more, and what is chosen then. What it counts as measured stays.
        policy: thresholds of the run.

    Returns:
        The configuration; its `measured` is None unless the stored one had been timed end to end.

    Raises:
        InfeasibleError: some operator has no candidate that works, no plan fits into the budget, or the limits were
            reached before there was a plan.
        SpaceError, ProblemError: there is too much to choose from.
        DatabaseError: the database cannot be written.
    """
    began = monotonic()
    model, options, environment = request.model, request.options, measurer.environment
    key = request_key(request, file)
    database.remember(environment)
    if unsettled is not None:
        options = replace(options, again=False, retry=False, remeasure=False)
    elif not (options.again or options.retry or options.remeasure):
        stored = _stored(database, key, environment.key)
        if stored is not None and _is_enough(stored.configuration, options):
            watch(Progress("done", 0, 0, reused=stored.configuration.counts["reused"]))
            return stored
    watch(Progress("space", 0, 0, spent_s=spent.and_since(began).seconds, spent_measurements=spent.measurements))
    limit_s = inf if options.limits.seconds is None else max(policy.space_s, options.limits.seconds - spent.seconds)
    try:
        with until(lambda: monotonic() - began > limit_s):
            space = build_space(
                training_graph(model.graph()), file, saving=options.budget_bytes is not None,
                numerics=request.numerics, vendor=environment.vendor,
            )  # fmt: skip
    except OverError:
        raise InfeasibleError(
            f"the space was not enumerated within {limit_s:g} s: ask again with a higher limit, or tune a smaller model"
        ) from None
    state = TuningState(
        space, watch, options, spent=spent.and_since(began), waited_s=lambda: measurer.waited_s, policy=policy,
        priors=shipped_priors(environment.device_type),
    )  # fmt: skip
    if unsettled is not None:
        state.measured = unsettled.counts["measured"]
        state.rival_rounds = policy.twins_rounds  # rivals were measured: what is chosen is timed once more
    measurer.hear(state.wait)
    with suppress(OverError), state.within("search"):
        state.twins = known_twins(space, database, environment)
    over_s = inf if options.limits.seconds is None else max(spent.seconds, options.limits.seconds) + policy.slack_s
    with likely_compiled(space, database, measurer, state) as compilation:
        limited = options.limits != Limits()
        opened = open_plan(space, database, measurer, state, over_s) if limited else frozenset[str]()
        doubted = _doubted(database, key, environment.key) if unsettled is None else frozenset[str]()
        unconfirmed = opened if unsettled is None else with_known_calls(space, database, environment.key).calls.keys()
        known = measure_missing(
            space, database, measurer, state, unconfirmed=unconfirmed, doubted=doubted, compilation=compilation
        )
    space = state.space
    known = known.with_opened(opened, cell_counts(space, known.measurements))
    if unsettled is not None:
        known = replace(
            known, counts={**known.counts, "measured": state.measured, "reused": unsettled.counts["reused"]}
        )
    if known.fresh and not state.is_over("confirm"):
        with suppress(OverError), state.within("confirm"):
            database.set_fact(environment.key, NOISE_FLOOR, measurer.noise_floor())
    state.tell(Progress("solve", 0, 0))
    noise_floor = database.fact(environment.key, NOISE_FLOOR)
    found = build_configuration(
        model, space, known.measurements, environment, known.counts, noise_floor=noise_floor,
        lower_bound_us=state.bound_us, estimated_us=state.estimated_us, budget_bytes=options.budget_bytes,
        numerics=request.numerics, left_s=state.left_s,
        fresh=None if doubted is None else known.fresh, policy=policy, unpriced=state.space_problem(),
    )  # fmt: skip
    predicted_us, lower_bound_us = found.certificate.predicted_us, found.certificate.lower_bound_us
    state.settle(predicted_us, lower_bound_us, costliest_steps(found.steps, predicted_us))
    complete = known.complete and not found.doubts
    number = save(database, found, key, complete=complete and not provisional)
    state.tell(Progress("done", len(known.fresh), len(known.fresh)))
    return Tuned(found, number, complete)


def _is_enough(stored: Configuration, options: TuneOptions) -> bool:
    """Say whether a complete answer is as good as a request asks for: twins may have ended it before it was proven."""
    if options.exhaustive:
        return stored.counts.get("unknown", 0) == 0
    if not stored.counts.get("unproven", 0):
        return True
    found = stored.certificate
    pairs = ((options.gap, found.proven_gap), (options.estimated_gap, found.estimated_gap))
    return all(wanted is None or (gap is not None and gap <= wanted) for wanted, gap in pairs)


def _doubted(database: Database, key: str, environment_key: str) -> frozenset[str] | None:
    """Return the keys of what is doubtful of the latest answer as a whole, None where it is not doubtful at all."""
    stored = database.configurations.find(key, environment_key, complete=False)
    if stored is None or not stored[1].get("doubts"):
        return None
    if not any(doubt["reason"] in OF_THE_WHOLE for doubt in stored[1]["doubts"]):
        return frozenset()
    try:
        found = Configuration.from_json(stored[1], "the stored configuration")
    except ConfigurationError:
        return frozenset()
    graph = found.graph()
    return frozenset(step.measured_call(graph).key for step in found.steps)


def _stored(database: Database, key: str, environment_key: str) -> Tuned | None:
    """Return the latest answer to a request, its counts those of this look-up; one that cannot be read is a miss.

    So is one of which the latest made doubtful what it says, and one from when plans could ask for parameters of other
    strides: what copying those costs is in none of its times.
    """
    stored = database.configurations.find(key, environment_key)
    latest = database.configurations.find(key, environment_key, complete=False)
    if stored is None or (latest is not None and latest[1].get("doubts")):
        return None
    number, document = stored
    try:
        found = Configuration.from_json(document, "the stored configuration")
    except ConfigurationError:
        return None
    if not reads_parameters_as_declared(found):
        return None
    if latest is not None and found.counts.get("unproven", 0) and latest[0] > number:
        with suppress(ConfigurationError):  # a request for a gap has measured on
            later = Configuration.from_json(latest[1], "the stored configuration")
            if later.certificate.predicted_us < found.certificate.predicted_us:
                number, found = latest[0], later
    return Tuned(
        replace(found, counts=dict(found.counts) | {"measured": 0, "reused": found.counts["calls"]}), number, True
    )


def reads_parameters_as_declared(configuration: Configuration) -> bool:
    """Say whether every parameter is read as the framework makes it, or converted by a step of the plan."""
    graph, steps = configuration.graph(), configuration.steps
    made = {place for step in steps for place in step.outputs}
    read = {place for step in steps for place in step.inputs if place not in made}
    parameters = {name: tensor.axes for name, tensor in graph.tensors.items() if tensor.role == "parameter"}
    return all(form == parameters.get(name, form) for name, form in read)


def save(database: Database, configuration: Configuration, key: str, *, complete: bool = True) -> int:
    """Store a configuration as the latest answer to a request, and return its id.

    Args:
        complete: whether all that could matter had been measured, and nothing makes the answer doubtful; otherwise a
            later request measures on.
    """
    model = configuration.model
    return database.configurations.save(
        request_key=key, environment_key=configuration.environment_key, dtype=model.dtype,
        family_key=family_key(model.family, configuration.budget_bytes, configuration.numerics),
        extents=model.extents, complete=complete, document=configuration.to_json(),
        total_us=configuration.certificate.predicted_us,
        measured_us=configuration.measured.plan_us if configuration.measured else None,
    )  # fmt: skip
