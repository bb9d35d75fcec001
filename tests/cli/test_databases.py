"""Commands of a database."""

import json
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from autotuner.database import open_database
from autotuner.database.migrations import HEAD
from autotuner.ir.records import Environment, Measurement
from tests.cli.running import Run
from tests.server.http.filled import ELSEWHERE, HERE, call

FILE = "here.sqlite"
LONG_AGO = datetime.now(UTC) - timedelta(days=400)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A database of two environments, one of which was last used long ago, and two jobs that ended."""
    path = tmp_path / FILE
    with open_database(path) as database:
        for environment in (HERE, ELSEWHERE):
            database.remember(environment)
            database.store(environment.key, [(call("softmax"), Measurement("ok", 4.0))])
        database.set_fact(ELSEWHERE.key, "noise_floor", 0.01)
        for _ in range(3):
            database.queue.cancel(database.queue.enqueue(model="m", request={}, device_type="cpu").id)
        database.queue.enqueue(model="m", request={}, device_type="cpu")
    connection = sqlite3.connect(path)
    connection.execute("UPDATE job SET finished_at = ? WHERE id < 3", [LONG_AGO.replace(tzinfo=None)])
    connection.execute(
        "UPDATE measurement SET measured_at = ? WHERE environment_id = 2", [LONG_AGO.replace(tzinfo=None)]
    )
    connection.commit()
    connection.close()
    return str(path)


def keys(file: str) -> list[str]:
    with open_database(file) as database:
        return [found.environment_key for found in database.measurements()]


def test_import_takes_over_measurements_with_their_environments(run: Run, file: str, tmp_path: Path) -> None:
    target = str(tmp_path / "target.sqlite")
    with open_database(target) as database:
        database.remember(HERE)
        database.store(HERE.key, [(call("softmax"), Measurement("ok", 1.0))])
    found = run("db", "import", file, "--database", target, "--json").json
    assert found == {"environments": [{"key": HERE.key, "written": 0}, {"key": ELSEWHERE.key, "written": 1}]}
    with open_database(target) as database:
        assert database.environments() == [HERE, ELSEWHERE]
        assert database.find(HERE.key, [call("softmax").key])[call("softmax").key].median_us == 1.0  # its own stays
        assert database.find(ELSEWHERE.key, [call("softmax").key])[call("softmax").key].median_us == 4.0
        assert database.facts(ELSEWHERE.key) == {"noise_floor": 0.01}
    one = run("db", "import", file, "--database", target, "--environment", ELSEWHERE.key[:8])
    assert ELSEWHERE.device_name in one.out
    assert HERE.device_name not in one.out


@pytest.mark.slow
def test_import_takes_over_what_comes_with_the_package(run: Run, tmp_path: Path) -> None:
    target = str(tmp_path / "target.sqlite")
    (found,) = run("db", "import", "--database", target, "--json").json["environments"]
    assert found["written"] > 5000
    with open_database(target) as database:
        (environment,) = database.environments()
    assert (environment.key, environment.device_name) == (found["key"], "NVIDIA H200")


def test_import_refuses_what_is_no_database(run: Run, tmp_path: Path) -> None:
    missing = run("db", "import", str(tmp_path / "nothing.sqlite"), "--database", str(tmp_path / "t.sqlite"))
    assert missing.code == 4
    assert "nothing.sqlite" in missing.err


def test_prune_says_what_it_would_remove_and_then_removes_it(run: Run, file: str) -> None:
    old = (datetime.now(UTC) - timedelta(days=100)).strftime("%Y-%m-%d")
    command = ["db", "prune", "--database", file, "--jobs-before", "90d", "--unused-since", old, "--json"]
    planned = run(*command, "--dry-run").json
    assert planned["removed"] is False
    assert planned["jobs"] == 2
    assert [(found["key"], found["measurements"]) for found in planned["environments"]] == [(ELSEWHERE.key, 1)]
    assert keys(file) == [HERE.key, ELSEWHERE.key]
    assert run(*command).json == {**planned, "removed": True}
    assert keys(file) == [HERE.key]
    with open_database(file) as database:
        assert database.facts(ELSEWHERE.key) == {}
        assert [(job.id, job.state) for job in database.queue.jobs()] == [(4, "queued"), (3, "cancelled")]
    again = run("db", "prune", "--database", file, "--jobs-before", "90d", "--unused-since", old)
    assert again.out == "0 jobs and 0 measurements of 0 environments removed\n"


def test_prune_removes_a_named_environment_whatever_its_use(run: Run, file: str) -> None:
    shown = run("db", "prune", "--database", file, "--environment", HERE.key[:8], "--dry-run").out
    assert HERE.key[:12] in shown
    assert "0 jobs and 1 measurements of 1 environments would be removed" in shown
    assert run("db", "prune", "--database", file, "--environment", HERE.key[:8]).code == 0
    assert keys(file) == [ELSEWHERE.key]


def test_an_answer_that_was_asked_for_keeps_its_environment(run: Run, file: str) -> None:
    with open_database(file) as database:
        answer = database.configurations.save(
            request_key="r", environment_key=ELSEWHERE.key, family_key="f", dtype="float32", extents={"b": 1},
            complete=True, document={"a": 1}, total_us=1.0,
        )  # fmt: skip
    assert run("db", "prune", "--database", file, "--unused-since", "90d", "--json").json["environments"] == []
    run("db", "prune", "--database", file, "--environment", ELSEWHERE.key)
    with open_database(file) as database:
        assert database.configurations.get(answer).environment_key == ELSEWHERE.key


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["prune"], "give --jobs-before, --unused-since or --environment"),
        (
            ["prune", "--jobs-before", "soon"],
            "--jobs-before 'soon': write a day such as 2026-01-31, or an age such as 90d",
        ),
        (["prune", "--environment", "zz"], "no environment's key begins with 'zz'; known: "),
        (["prune", "--environment", ""], "no environment's key begins with ''"),
        (["export", "--output", "r.json"], "--environment: the database has several, name one: "),
        (["export", "--output", "no/r.json", "--environment", HERE.key], "no/r.json: cannot be written"),
    ],
)
def test_what_cannot_be_done_is_said(run: Run, file: str, arguments: list[str], words: str) -> None:
    ran = run("db", *arguments, "--database", file)
    assert ran.code == 2
    assert words in ran.err.replace("\n", " ")
    assert keys(file) == [HERE.key, ELSEWHERE.key]


def test_upgrade_says_from_which_migration_to_which(run: Run, tmp_path: Path, file: str) -> None:
    assert run("db", "upgrade", "--database", file).out == f"up to date, at migration {HEAD}\n"
    assert run("db", "upgrade", "--database", file, "--json").json == {"was": HEAD, "now": HEAD}
    missing = run("db", "upgrade", "--database", str(tmp_path / "none.sqlite"))
    assert (missing.code, (tmp_path / "none.sqlite").exists()) == (4, False)


# Results files

MEASURED = {
    "type": "object", "required": ["name", "value", "unit"],
    "properties": {
        "name": {"type": "string"}, "value": {"type": ["number", "string", "array"]}, "unit": {"type": "string"},
    },
}  # fmt: skip
RESULT = {
    "type": "object", "required": ["configuration", "times", "invalidity", "correctness"],
    "properties": {
        "timestamp": {"type": "string"}, "configuration": {"type": "object"}, "objectives": {"type": "array"},
        "times": {
            "type": "object",
            "properties": {"runtimes": {"type": "array"}, "compilation_time": {"type": "number"}},
        },
        "invalidity": {"enum": ["timeout", "compile", "runtime", "correctness", "constraints", "correct"]},
        "correctness": {"type": "number"}, "measurements": {"type": "array", "items": MEASURED},
    },
}  # fmt: skip
T4 = {
    "type": "object", "required": ["schema_version", "results"],
    "properties": {
        "schema_version": {"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
        "results": {"type": "array", "items": RESULT},
        "metadata": {
            "type": "object",
            "properties": {
                "hardware": {"type": "object", "properties": {"hardware_description": {"type": "array"}}},
                "environment": {
                    "type": "object",
                    "properties": {"device_query": {"type": "object"}, "requirements": {"type": "array"}},
                },
            },
        },
    },
}  # fmt: skip
"""What the schemas of results and metadata ask for in version 1.0.0 of the format."""


def test_an_exported_file_is_of_the_communitys_format_and_says_what_was_measured(
    run: Run, file: str, tmp_path: Path
) -> None:
    from jsonschema import Draft202012Validator

    results = [
        (call("gelu_erf"), Measurement("ok", 4.0, 3.0, 5.0, (3.1, 4.0, 5.0), 64, marks=("contended",))),
        (call("bias"), Measurement("timeout", message="it took 30 s")),
        (call("bias", "gelu_erf"), Measurement("wrong", message="off by 3")),
        (call("layer_norm"), Measurement("refused", message="the row is too long")),
    ]
    with open_database(file) as database:
        database.store(HERE.key, results)
    written = tmp_path / "results.json"
    ran = run("db", "export", "--database", file, "--environment", HERE.key[:10], "--output", str(written))
    assert "5 measurements on Xeon written to" in ran.err
    document = json.loads(written.read_text())
    Draft202012Validator(T4).validate(document)
    assert document["schema_version"] == "1.0.0"
    query = document["metadata"]["environment"]["device_query"]
    assert (
        Environment(
            query["device_type"], query["device_name"], tuple(query["facts"].items()), tuple(query["policy"].items())
        )
        == HERE
    )
    by_operator = {found["configuration"]["operator"]: found for found in document["results"]}
    first = by_operator["gelu_erf"]
    assert first["times"] == {"runtimes": [0.0031, 0.004, 0.005]}
    values = {each["name"]: (each["value"], each["unit"]) for each in first["measurements"]}
    assert values["time"] == (0.004, "ms")
    assert values["samples"] == ([3.1, 4.0, 5.0], "us")
    assert values["call_key"] == (results[0][0].key, "")
    assert values["marks"] == (["contended"], "")
    assert {operator: (found["invalidity"], found["correctness"]) for operator, found in by_operator.items()} == {
        "softmax": ("correct", 1), "gelu_erf": ("correct", 1), "bias": ("timeout", 0),
        "bias+gelu_erf": ("correctness", 0), "layer_norm": ("constraints", 0),
    }  # fmt: skip
    assert by_operator["bias"]["times"] == {"runtimes": []}


@pytest.mark.parametrize("number", [0, 1, 5])
def test_pages_of_a_results_file_are_one_list(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotuner.database import results_file

    monkeypatch.setattr("autotuner.database.exporting.PAGE", 2)
    with open_database(tmp_path / FILE) as database:
        database.remember(HERE)
        database.store(HERE.key, [(call(*["bias"] * (n + 1)), Measurement("ok", 1.0)) for n in range(number)])
        document = json.loads("".join(results_file(database, HERE)))
    assert len(document["results"]) == number
    assert {found["configuration"]["operator"].count("bias") for found in document["results"]} == set(
        range(1, number + 1)
    )
