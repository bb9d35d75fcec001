"""Recorded sweeps as measurements and an environment, for tests that solve and tune from them."""

from autotuner.ir.records import Environment, Measurement
from scripts.recorded import LARGE, TINY, Recording

RECORDINGS = {"tiny": TINY, "large": LARGE}


def environment_of(recording: Recording) -> Environment:
    value = recording.value["environment"]
    return Environment(
        value["device_type"], value["device_name"], tuple(value["facts"].items()), tuple(value["policy"].items())
    )


def measurements_of(recording: Recording) -> dict[str, Measurement]:
    """Return the measurements of a recording by key; those that it has no place for have their defaults."""
    return {
        key: Measurement(status, median, low, high, (), workspace or 0, "" if status == "ok" else "as recorded")
        for key, (status, median, low, high, workspace) in recording.value["measurements"].items()
    }
