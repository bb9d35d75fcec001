"""Configurations solved from the recorded sweeps, as JSON, and files of earlier versions, which are read as ever.

See `tests.frozen.golden` for how a golden value is written anew.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from autotuner.plan.configuration import Configuration, load_configuration, save_configuration
from autotuner.tuner import TuningPolicy, build_configuration
from tests.frozen.golden import FROZEN, RECORDINGS, assert_same, golden, write_golden

NAMES = ("tiny", "large")
FILES = (
    *(FROZEN / f"configuration_{name}.json.gz" for name in NAMES),
    FROZEN.parent / "configuration_interleaved_weights.json.gz",
)
PATIENT = TuningPolicy(explaining_s=1000.0)
"""Leaves out no alternative on a busy machine."""
VOLATILE = ("created_at", "versions")
EFFORT = ("statistics",)
"""Fields of the certificate: what solving took, which is the solver's own affair."""


def solved(name: str) -> Configuration:
    recording = RECORDINGS[name]
    space, known = recording.space(), recording.measurements
    return build_configuration(
        recording.model, space, {key: known[key] for key in space.calls}, recording.environment,
        {"calls": len(space.calls), "measured": 0, "reused": len(space.calls)}, noise_floor=0.01, policy=PATIENT,
    )  # fmt: skip


def lasting(value: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's JSON without what is another each time."""
    certificate = {name: part for name, part in value["certificate"].items() if name not in EFFORT}
    return {name: part for name, part in value.items() if name not in VOLATILE} | {"certificate": certificate}


def write() -> None:
    """Write the golden values of this module anew."""
    for name in NAMES:
        write_golden(f"configuration_{name}.json.gz", solved(name).to_json())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_sweep_gives_the_configuration_that_it_gave(name: str) -> None:
    found, expected = solved(name).to_json(), golden(f"configuration_{name}.json.gz")
    assert found.keys() == expected.keys()
    assert found["versions"].keys() == expected["versions"].keys()
    assert_same(lasting(found), lasting(expected))


@pytest.mark.parametrize("packed", FILES, ids=lambda path: path.name)
def test_a_file_of_an_earlier_version_is_read_and_written_back_as_it_is(packed: Path, tmp_path: Path) -> None:
    given, again = tmp_path / "given.json", tmp_path / "again.json"
    given.write_bytes(gzip.decompress(packed.read_bytes()))
    save_configuration(load_configuration(given), again)
    assert json.dumps(json.loads(again.read_text())) == json.dumps(json.loads(given.read_text()))
