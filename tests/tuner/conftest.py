"""Fixtures for tests of tuning runs: a small model, a database, and what was recorded of an encoder layer."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotuner.database import Database, open_database
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model, load_model
from autotuner.ir.records import Environment, Measurement
from autotuner.measure.roofline import Roofline
from autotuner.space import Space, SpaceFile, build_space
from tests.made_up import CPU, small_model

RECORDED = Path(__file__).parents[1] / "data" / "bert_encoder_tiny_cpu.json.gz"


@dataclass(frozen=True)
class Recorded:
    """A model with everything that was measured of it."""

    model: Model
    file: SpaceFile
    space: Space
    environment: Environment
    measurements: dict[str, Measurement]
    ceilings: Roofline


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    value = json.loads(gzip.decompress(RECORDED.read_bytes()))
    name, _, preset = value["model"].partition(":")
    model = load_model(name).instantiate(preset)
    file = CPU.model_copy(update={"kernels": {kernel: CPU.kernels[kernel] for kernel in value["kernels"]}})
    facts = value["environment"]
    environment = Environment(
        facts["device_type"], facts["device_name"], tuple(facts["facts"].items()), tuple(facts["policy"].items())
    )
    measurements = {
        key: Measurement(status, median, low, high, message="" if status == "ok" else "as recorded")
        for key, (status, median, low, high, *_) in value["measurements"].items()
    }
    space = build_space(training_graph(model.graph()), file)
    unknown = set(space.calls) - set(measurements)
    if unknown:
        pytest.fail(
            f"{RECORDED.name} lacks {len(unknown)} of the {len(space.calls)} calls of {value['model']}: a kernel's "
            "rules, the space or the records have changed; tune it again and write the file with scripts/record_replay"
        )
    measurements = {key: measurements[key] for key in space.calls}  # more was measured than the space has by now
    return Recorded(model, file, space, environment, measurements, Roofline.from_facts(value.get("ceilings", {})))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return small_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with open_database(tmp_path / "tuning.sqlite") as opened:
        yield opened
