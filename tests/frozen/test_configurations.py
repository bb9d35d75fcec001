"""Configurations solved from the recorded sweeps, as JSON, and files of earlier versions, which are read as ever.

See `tests.frozen.golden` for how a golden value is written anew.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter

from autotuner.ir.records import Doubt
from autotuner.plan.configuration import Configuration, json_schema, load_configuration, save_configuration
from autotuner.plan.document import read
from autotuner.plan.parts import Measured, Memory, Overlap
from autotuner.tuner import TuningPolicy, build_configuration, solving
from tests.frozen.golden import FROZEN, RECORDINGS, assert_same, golden, write_golden
from tests.made_up import small_model
from tests.plan.explained import explained_configuration, with_again

NAMES = ("tiny", "large")
FILES = (
    *(FROZEN / f"configuration_{name}{version}.json.gz" for name in NAMES for version in ("_fewer_sets", "")),
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
def test_a_recorded_sweep_gives_the_configuration_that_it_gave(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "LEAN_LIMIT_S", 1000.0)  # a busy machine finds fewer leaner plans in its time
    found, expected = solved(name).to_json(), golden(f"configuration_{name}.json.gz")
    assert found.keys() == expected.keys()
    assert found["versions"].keys() == expected["versions"].keys()
    assert_same(lasting(found), lasting(expected))


VALUES: tuple[Any, ...] = (None, True, -1, 1.0, 0.5, "x", [], [["x", "y"]], ["x", {}], {"x": 1}, {"x": -0.5})
OF_THE_MODEL = (("model", "options"), ("model", "extents"), ("model", "definition"))
"""Parts that the model checks more closely."""


def changed(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Change each part of a document in turn, and yield where while it is so: taken away, then of other values."""
    for name, part in list(value.items() if isinstance(value, dict) else enumerate(value[:1])):
        if (*place, name) in OF_THE_MODEL:
            continue
        if isinstance(value, dict):
            del value[name]
            yield *place, name, "taken away"
        for other in VALUES:
            value[name] = other
            yield *place, name, other
        value[name] = part
        if isinstance(part, dict | list):
            yield from changed(part, (*place, name))


@pytest.mark.slow
def test_documents_are_accepted_and_refused_as_by_the_schema_that_was_written_by_hand(tmp_path: Path) -> None:
    full = replace(
        with_again(explained_configuration(small_model(tmp_path))), memory=Memory(5, 1, 2), doubts=(Doubt("a", "b"),),
        measured=Measured(100.0, 10.0, {"eager": 1.0}, 30, 5, {"eager": None}),
        overlap=Overlap(((0,),), 3.0, 2.5, 3.5),
    )  # fmt: skip
    value, reader = json.loads(json.dumps(full.to_json())), TypeAdapter(Configuration)
    value["steps"] = [step for step in value["steps"] if step["alternative"]][:1]
    value["fusions"], value["overtaking"] = value["fusions"][:1], value["overtaking"][:1]
    by_hand, made = (Draft202012Validator(schema) for schema in (golden("configuration.schema.json"), json_schema()))
    accepted = 0
    for place in changed(value):
        try:
            read(reader, value)
            is_read = True
        except ValueError:
            is_read = False
        assert by_hand.is_valid(value) == made.is_valid(value) == is_read, place
        accepted += is_read
    assert accepted > 100


@pytest.mark.parametrize("packed", FILES, ids=lambda path: path.name)
def test_a_file_of_an_earlier_version_is_read_and_written_back_as_it_is(packed: Path, tmp_path: Path) -> None:
    given, again = tmp_path / "given.json", tmp_path / "again.json"
    given.write_bytes(gzip.decompress(packed.read_bytes()))
    save_configuration(load_configuration(given), again)
    assert json.dumps(json.loads(again.read_text())) == json.dumps(json.loads(given.read_text()))
