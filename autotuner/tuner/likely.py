"""Compilation of what a run with a limit of seconds is likely to time, while its first plan is measured."""

from collections.abc import Iterator
from contextlib import contextmanager

from autotuner.checkpoint import OverError
from autotuner.database import Database
from autotuner.measure.roofline import Roofline, work_of
from autotuner.space import Space
from autotuner.tuner.compiling import Compilation
from autotuner.tuner.progress import MeasurerProtocol, Progress
from autotuner.tuner.state import TuningState

LIKELY = 48
"""Calls that are expected to be wanted first, about. With twice as many, plans of recorded layers were no better."""


@contextmanager
def likely_compiled(
    space: Space, database: Database, measurer: MeasurerProtocol, state: TuningState
) -> Iterator[Compilation]:
    """Have likely calls compiled beside what is done inside; what is not compiled in the end is given up.

    What is likely follows from what the database knows of this shape and of others, from priors, and from the device's
    ceilings, which are measured now where the run will need them anyway. Without a limit of seconds, where a plan is
    known already, or where all is going to be measured, nothing is compiled yet.
    """
    compilation = Compilation(measurer, state)
    try:
        if state.options.limits.seconds is not None and compilation.is_beside and not state.is_exhaustive:
            _begin(compilation, space, database, measurer, state)
        yield compilation
    finally:
        compilation.give_up()


def _begin(
    compilation: Compilation, space: Space, database: Database, measurer: MeasurerProtocol, state: TuningState
) -> None:
    environment_key = measurer.environment.key
    known = database.find(environment_key, list(space.calls))
    ceilings = Roofline.from_facts(database.facts(environment_key))
    missing = len(space.calls.keys() - known.keys())
    is_small = missing < state.policy.few_calls and not ceilings.moved.rungs  # all of it is measured
    if not missing or is_small or state.has_plan(known):
        return
    state.ceilings = with_ceilings(space, database, measurer, state, ceilings)
    likely = (space.calls[key] for key in state.likely_keys(known, LIKELY) if key in space.calls)
    compilation.beside(call for call in likely if call.key not in known)


def with_ceilings(
    space: Space, database: Database, measurer: MeasurerProtocol, state: TuningState, known: Roofline
) -> Roofline:
    """Return what a database knows of the device's ceilings, with what it lacks measured and stored."""
    lacking = known.lacking({dtype for call in space.calls.values() for dtype in work_of(call).flop})
    if known.moved.rungs and not lacking:
        return known
    state.tell(Progress("ceilings", 0, 0))
    try:
        with state.within("ceilings"):
            found = known.with_products(measurer.ceilings(lacking))
    except OverError:
        return known
    for name, us in found.to_facts().items():
        database.set_fact(measurer.environment.key, name, us)
    return found
