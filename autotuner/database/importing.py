"""Import of what another database has measured: with its environments, so nothing passes for what it is not."""

from collections.abc import Callable

from autotuner.database.contract import Storage
from autotuner.database.values import Filter
from autotuner.ir.records import Call, Environment, Measurement

PAGE = 1000


def import_measurements(
    source: Storage,
    target: Storage,
    environment: Environment,
    is_wanted: Callable[[str], bool] = lambda _: True,
    is_kept: Callable[[Call, Measurement], bool] = lambda _call, _measurement: True,
) -> int:
    """Store the measurements and facts of an environment in another database, and return how many were written.

    What the target has itself stays: a successful measurement, and a fact of that name. A failure gives way. What is
    new to it counts as measured now.

    Args:
        is_wanted: says of the name of a fact whether it is imported.
        is_kept: says so of a call and what was measured of it.

    Raises:
        DatabaseError: one of them cannot be read or written; what was stored before stays.
    """
    target.remember(environment)
    written, after = 0, 0
    while page := source.measurements(Filter(environment.key), limit=PAGE, after=after):
        kept = [(found.call, found.measurement) for found in page if is_kept(found.call, found.measurement)]
        written += target.store(environment.key, kept)
        after = page[-1].id
    known = target.facts(environment.key)
    for name, value in source.facts(environment.key).items():
        if name not in known and is_wanted(name):
            target.set_fact(environment.key, name, value)
    return written
