"""Options of the backend of `torch.compile`: which there are, what is valid, and those that a call's arguments mean."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotuner.api.knowledge import Given
from autotuner.errors import InputError
from autotuner.ir.numerics import checked_numerics
from autotuner.settings import TuneOptions, parsed_bytes

if TYPE_CHECKING:
    from autotuner.server.client import Client

OPTIONS = (
    "budget", "budget_bytes", "capture", "compiler", "configurations", "database", "graphs", "inductor",
    "memory_budget", "numerics", "quiet", "server",
)  # fmt: skip
SOURCES = {"server": "a server", "database": "a database", "configurations": "configurations"}
"""Options that say where configurations are known, in words: one of them is given, or none."""
COMPILERS = ("inductor", "aot_eager", "eager")


def chosen(
    database: str | Path | None,
    server: "str | Client | None",
    configurations: Given | None,
    compiler: str,
    tuning: TuneOptions,
) -> dict[str, Any]:
    """Return options of the backend, without those that are not given.

    Args:
        tuning: its budget and its numerics say which plans are looked up.

    Raises:
        InputError: as `checked`.
    """
    where = None if database is None else str(database)
    given = {
        "database": where, "server": server, "configurations": configurations, "compiler": compiler,
        "budget_bytes": tuning.budget_bytes,
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    options |= {} if tuning.numerics == "exact" else {"numerics": tuning.numerics}
    checked(options)
    return options


def check_examples(example_inputs: Any, server: "str | Client | None", configurations: Given | None) -> None:
    """Check that what is tuned here and now is looked up where a tuning leaves it.

    Raises:
        InputError: example inputs beside a server, or beside configurations.
    """
    if example_inputs is not None and server is not None:
        raise InputError("a service tunes on its own machines: give example inputs or a server, one of the two")
    if example_inputs is not None and configurations is not None:
        raise InputError("nothing is tuned beside configurations that are given: give example inputs or them, not both")


def checked(options: Mapping[str, Any]) -> None:
    """Check the backend's options.

    Raises:
        InputError: one is unknown or not valid.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise InputError(f"the backend has no option {unknown[0]!r}; it has {', '.join(OPTIONS)}")
    if options.get("compiler", "inductor") not in COMPILERS:
        raise InputError(f"compiler is {options['compiler']!r}: write one of {', '.join(COMPILERS)}")
    if options.get("capture") not in (None, "step"):
        raise InputError(f'capture is {options["capture"]!r}: write "step", or leave it out')
    checked_numerics(options.get("numerics", "exact"))
    if parsed_bytes(options.get("budget_bytes"), "budget_bytes") == 0:
        raise InputError("budget_bytes is 0: write a number above 0, or leave it out")
    for_loops = parsed_bytes(options.get("memory_budget"), "memory_budget") is not None
    if for_loops and (options.get("budget") or options.get("capture") is not None):
        raise InputError(
            "memory_budget is for a loop of one's own, and capture and budget are for a caller who runs steps: give one"
        )
    sources = [name for name in SOURCES if options.get(name) is not None]
    if len(sources) > 1:
        raise InputError(f"the backend was given {' and '.join(SOURCES[name] for name in sources)}: give one of them")
