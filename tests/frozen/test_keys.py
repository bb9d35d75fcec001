"""Keys under which databases hold what was measured and answered, and the tables of a fresh one.

See `tests.frozen.golden` for how a golden value is written anew.
"""

import hashlib
import sqlite3
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from autotuner.database import open_database
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import known_models, load_model, named_model
from autotuner.ir.records import Attributes, Call, Candidate, Environment, Node, Subgraph, TensorType
from autotuner.plan.request import Request, family_key
from autotuner.settings import Limits, TuneOptions
from autotuner.space import build_space, space_file
from autotuner.tuner import request_key
from tests.frozen.golden import assert_same, golden, write_golden

PRESETS = {name: tuple(load_model(name).definition.presets) for name in sorted(known_models())}
# The smallest preset of each model for the CPU, the largest for CUDA.
SPACES = (
    *((f"{name}:{presets[0]}", "cpu", None, ()) for name, presets in PRESETS.items()),
    *((f"{name}:{presets[-1]}", "cuda", None, ()) for name, presets in PRESETS.items()),
    ("bert-encoder:large", "cuda", None, ()),
    ("bert-encoder:base", "cuda", "bfloat16", (("attention_dropout", 0.1), ("attention_mask", True))),
    ("gpt-block:small", "cuda", "bfloat16", ()),
    ("bert-encoder:tiny", "cpu", "float64", (("activation", "relu"),)),
)
ATTRIBUTES: Attributes = (("axis", "b"), ("factor", 0.125))
CALL = Call(
    Subgraph(
        (Node("softmax", "ab->ab,a", (0,), (1, 2), ATTRIBUTES), Node("add", "ab,ab->ab", (1, 0), (3,))),
        (TensorType((4, 6), "float32"), TensorType((4, 6), "float32"), TensorType((4,), "float32"),
         TensorType((4, 6), "float32")),
        (0,), (2, 3),
    ),
    Candidate("torch_softmax", ("ab", "a", "ba"), (("block", 32), ("fast", True)), 2),
)  # fmt: skip
ENVIRONMENT = Environment(
    "cuda", "NVIDIA H200", (("torch", "2.11.0"), ("threads", 8), ("compiler", "absent")), (("samples", 30),)
)


def space_keys(reference: str, device: str, dtype: str | None, options: Attributes) -> dict[str, Any]:
    """Return number and sha256 of a space's sorted call keys, in all and by kernel."""
    space = build_space(training_graph(named_model(reference, dtype=dtype, options=dict(options)).graph()),
                        space_file(device))  # fmt: skip
    kernels = defaultdict(list)
    for key, call in space.calls.items():
        kernels[call.candidate.kernel].append(key)
    return {
        "graph": space.graph.key,
        "calls": [len(space.calls), sha256(space.calls)],
        "kernels": {kernel: [len(keys), sha256(keys)[:16]] for kernel, keys in kernels.items()},
    }


def sha256(keys: Any) -> str:
    return hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()


def title(reference: str, device: str, dtype: str | None, options: Attributes) -> str:
    return " ".join((reference, device, dtype or "", *(f"{name}={value}" for name, value in options))).strip()


def single_keys() -> dict[str, str]:
    """Return keys of fixed values."""
    tiny = named_model("bert-encoder:tiny")
    return {
        "call": CALL.key,
        "signature": CALL.subgraph.signature,
        "environment": ENVIRONMENT.key,
        "environment, no policy": Environment("cpu", "Xeon", ()).key,
        "family": tiny.family,
        "family, budget": family_key(tiny.family, 1 << 20),
        "family, no budget": family_key(tiny.family),
        "request": request_key(Request(tiny), space_file("cpu")),
        "request, cuda": request_key(Request(tiny, "cuda", ENVIRONMENT.device_name), space_file("cuda")),
        "request, budget": request_key(Request(tiny, options=TuneOptions(budget_bytes=3 << 20)), space_file("cpu")),
        "request, effort": request_key(
            Request(
                tiny,
                options=TuneOptions(gap=0.1, exhaustive=True, limits=Limits(10.0, 5), again=True, end_to_end=False),
            ),
            space_file("cpu"),
        ),
    }


def schema(file: Path) -> dict[str, Any]:
    """Return tables with columns, types, keys and indexes, and the SQL that made them, of a fresh database."""
    with open_database(file):
        pass
    connection = sqlite3.connect(file)
    try:
        entries = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY type, name").fetchall()
        tables = [name for kind, name, _ in entries if kind == "table"]
        return {
            "sql": {f"{kind} {name}": " ".join((sql or "").split()) for kind, name, sql in entries},
            "columns": {name: connection.execute(f"PRAGMA table_xinfo({name})").fetchall() for name in tables},
            "references": {name: connection.execute(f"PRAGMA foreign_key_list({name})").fetchall() for name in tables},
            "indexes": {name: sorted(row[1:] for row in connection.execute(f"PRAGMA index_list({name})"))
                        for name in tables},
            "version": connection.execute("SELECT * FROM autotuner_migration").fetchall(),
        }  # fmt: skip
    finally:
        connection.close()


def write() -> None:
    """Write the golden values of this module anew."""
    write_golden("spaces.json", {title(*case): space_keys(*case) for case in SPACES})
    write_golden("keys.json", single_keys())
    with TemporaryDirectory() as folder:
        write_golden("schema.json", schema(Path(folder) / "fresh.sqlite"))


def test_every_model_has_golden_spaces_and_there_are_no_others() -> None:
    assert sorted(golden("spaces.json")) == sorted(title(*case) for case in SPACES)


@pytest.mark.slow
@pytest.mark.parametrize("case", SPACES, ids=lambda case: title(*case))
def test_the_calls_of_a_space_have_the_keys_they_had(case: tuple[str, str, str | None, Attributes]) -> None:
    assert_same(space_keys(*case), golden("spaces.json")[title(*case)])


def test_calls_environments_and_requests_have_the_keys_they_had() -> None:
    assert_same(single_keys(), golden("keys.json"))


def test_a_fresh_database_has_the_tables_it_had(tmp_path: Path) -> None:
    assert_same(schema(tmp_path / "fresh.sqlite"), golden("schema.json"))
