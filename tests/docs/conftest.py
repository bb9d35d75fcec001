"""The recorded tuning of bert-encoder:tiny, from which the documents take their figures."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from autotuner.database import open_database
from autotuner.ir.records import Environment, Measurement
from autotuner.plan.configuration import Configuration, save_configuration
from autotuner.plan.request import Request
from autotuner.space import Space
from autotuner.tuner import Replay, tune
from scripts.recorded import TINY


@dataclass(frozen=True)
class Tuning:
    """What a tuning of bert-encoder:tiny leaves behind: a folder with `tiny.json` and `autotuner.sqlite`."""

    folder: Path
    configuration: Configuration
    space: Space
    measurements: dict[str, Measurement]


@pytest.fixture(scope="session")
def tuning(tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    """Tune bert-encoder:tiny from recorded measurements in place of a device."""
    folder = tmp_path_factory.mktemp("tuning")
    told = TINY.value["environment"]
    environment = Environment(
        told["device_type"], told["device_name"], tuple(told["facts"].items()), tuple(told["policy"].items())
    )
    space = TINY.space()
    recorded = TINY.value["measurements"]
    measurements = {key: recorded_measurement(*recorded[key]) for key in space.calls}
    with open_database(folder / "autotuner.sqlite") as database:
        replay = Replay(environment, measurements, TINY.ceilings)
        configuration = tune(Request(TINY.model), TINY.file, database, replay).configuration
    save_configuration(configuration, folder / "tiny.json")
    return Tuning(folder, configuration, space, measurements)


def recorded_measurement(
    status: str, median_us: float | None, low_us: float | None, high_us: float | None, workspace_bytes: int
) -> Measurement:
    """Return a measurement as a recording keeps it, without samples."""
    told = {"status": status, "median_us": median_us, "low_us": low_us, "high_us": high_us}
    message = "" if status == "ok" else "as recorded"
    return Measurement.from_json(told | {"workspace_bytes": workspace_bytes, "message": message, "samples_us": ()})
