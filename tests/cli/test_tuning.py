"""Commands on this machine: what they print, what they refuse, and the exit code of each; nothing here is measured."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotuner.database import open_database
from autotuner.ir.models import Model, search_spaces_dir
from autotuner.plan.configuration import Configuration, load_configuration, save_configuration
from autotuner.plan.explanation import explain_operator, explain_plan, explain_tensor
from autotuner.solve.problem import Factor, Problem
from tests.cli.running import Run
from tests.made_up import HERE, small_model, space_of, times
from tests.plan.explained import explained_configuration
from tests.runtime.plans import in_bfloat16


@pytest.fixture
def measured(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A database that knows every call of the small model in this environment, and the model's reference."""
    monkeypatch.setattr("autotuner.measure.devices.environment", lambda *_, **__: HERE)
    small_model(tmp_path)
    space = space_of(model)
    with open_database(tmp_path / "full.sqlite") as database:
        database.remember(HERE)
        known = times(space.calls)
        database.store(HERE.key, [(call, known[key]) for key, call in space.calls.items()])
    return tmp_path / "full.sqlite", f"{tmp_path / 'small.yaml'}:wide"


# What there is


def test_spaces_are_listed_for_programs(run: Run) -> None:
    ran = run("spaces", "--json")
    assert ran.code == 0
    assert ran.json["models"]["bert-encoder"]["presets"]["tiny"]["l"] == 64
    assert ran.json["kernels"]["cpu"]["kernels"]["torch_matmul"]["covers"] == ["contraction"]


def test_spaces_are_listed_for_people(run: Run) -> None:
    ran = run("spaces")
    assert ran.code == 0
    for text in ("bert-encoder", "large-short", "attention_dropout=0.1", "torch_flash_attention", "connected sets"):
        assert text in ran.out


def test_devices_are_listed(run: Run) -> None:
    (cpu, *_) = run("devices", "--json").json
    assert cpu["device_type"] == "cpu"
    assert cpu["name"] in run("devices").out


# What is refused


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["solve", "bert-encoder:nano"], "no preset 'nano'; known: tiny, base, large, large-short"),
        (["tune", "bert-encoder:nano"], "no preset 'nano'"),
        (["solve", "gpt:tiny"], "no model 'gpt'; known: bert-encoder"),
        (["solve", "bert-encoder:"], "is no model: write"),
        (["solve", "none.yaml:tiny"], "none.yaml: cannot be read"),
        (["tune", "bert-encoder"], "axis without extent: b (batch)"),
        (["solve", "bert-encoder:tiny", "--extent", "l"], "--extent 'l': write name=value, e.g. --extent l=256"),
        (["solve", "bert-encoder:tiny", "--extent", "l=many"], "--extent l=many: write a whole number above 0"),
        (["solve", "bert-encoder:tiny", "--extent", "l=-3"], "--extent l=-3: write a whole number above 0"),
        (["solve", "bert-encoder:tiny", "--extent", "l=0"], "axis 'l' has extent 0; it must be an integer above 0"),
        (["solve", "bert-encoder:tiny", "--extent", "z=3"], "no axis 'z'; known: b (batch)"),
        (["solve", "bert-encoder:tiny", "--option", "activation=swish"], "'swish'; it must be one of gelu_erf"),
        (["solve", "bert-encoder:tiny", "--option", "colour=red"], "no option 'colour'; known: activation"),
        (["solve", "bert-encoder:tiny", "--option", "activation"], "write name=value"),
        (["solve", "bert-encoder:tiny", "--option", "output_dropout=1.5"], "a number from 0 to below 1"),
        (
            ["solve", "bert-encoder:tiny", "--option", "epsilon=[1"],
            "option 'epsilon' is '[1'; it must be a number from",
        ),
        (["solve", "bert-encoder:tiny", "--extent", "l=²"], "--extent l=²: write a whole number above 0"),
        (["solve", "bert-encoder:tiny", "--extent", f"l={'9' * 5000}"], "write a whole number above 0, below 1e18"),
        (["solve", "bert-encoder:tiny", "--budget", "9" * 400], "write a number of bytes"),
        (["solve", "bert-encoder:tiny", "--dtype", "int8"], "no dtype 'int8'; known: float32"),
        (["solve", "bert-encoder:tiny", "--solver", "guess"], "no solver 'guess'; known: exact, shortest_path"),
        (["tune", "bert-encoder:tiny", "--space", "none.yaml"], "none.yaml: no such search space"),
        (["show", "none.json"], "none.json: cannot be read"),
        (["check", "none.json"], "none.json: cannot be read"),
        (["solve", "none.json"], "none.json: cannot be read"),
        (["solve"], "Missing argument"),
        (["tune", "bert-encoder:tiny", "--threads", "two"], "Invalid value for '--threads'"),
    ],
)
def test_bad_input_ends_with_2_and_says_what_would_be_valid(run: Run, arguments: list[str], sentence: str) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert sentence in " ".join(ran.err.split())
    assert ran.out == ""
    assert "Traceback" not in ran.err


def test_an_unwritable_problem_file_is_refused(run: Run, measured: tuple[Path, str]) -> None:
    database, reference = measured
    ran = run("solve", reference, "--database", database, "--problem", "missing/problem.json")
    assert ran.code == 2
    assert "missing/problem.json: cannot be written (No such file or directory)" in ran.err


@pytest.mark.parametrize("command", ["tune", "solve"])
def test_a_missing_device_ends_with_3(run: Run, command: str) -> None:
    ran = run(command, "bert-encoder:tiny", "--device", "abacus")
    assert ran.code == 3
    assert "DeviceError: no device 'abacus' here; what is here: cpu (" in ran.err


def test_a_space_for_another_device_ends_with_3(run: Run, tmp_path: Path) -> None:
    space = yaml.safe_load((search_spaces_dir() / "kernels" / "cpu.yaml").read_text())
    (tmp_path / "abacus.yaml").write_text(yaml.safe_dump(space | {"device_type": "abacus"}))
    ran = run("tune", "bert-encoder:tiny", "--space", "abacus.yaml")
    assert ran.code == 3
    assert "abacus.yaml: it is for device type 'abacus', asked for is 'cpu'" in ran.err


@pytest.mark.parametrize("command", ["tune", "solve"])
def test_too_many_threads_end_with_3(run: Run, command: str) -> None:
    ran = run(command, "bert-encoder:tiny", "--threads", "100000")
    assert ran.code == 3
    assert "100000 threads asked for" in ran.err


@pytest.mark.parametrize("command", ["tune", "solve"])
def test_a_database_that_cannot_be_written_ends_with_4(run: Run, command: str, tmp_path: Path) -> None:
    ran = run(command, "bert-encoder:tiny", "--database", tmp_path / "missing" / "a.sqlite")
    assert ran.code == 4
    assert f"there is no directory {tmp_path / 'missing'}" in ran.err
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_text("this is no database, whatever its name says" * 10)
    ran = run(command, "bert-encoder:tiny", "--database", damaged)
    assert ran.code == 4
    assert "is damaged or no SQLite file" in ran.err


def test_a_database_that_is_not_there_is_not_made_by_who_only_reads(run: Run, tmp_path: Path) -> None:
    ran = run("solve", "bert-encoder:tiny", "--database", tmp_path / "typo.sqlite")
    assert ran.code == 4
    assert f"there is no database {tmp_path / 'typo.sqlite'}: give one that" in ran.err
    assert not (tmp_path / "typo.sqlite").exists()


def test_an_extent_that_is_given_twice_ends_with_2(run: Run) -> None:
    ran = run("tune", "bert-encoder:tiny", "--extent", "b=2", "--extent", "b=3")
    assert ran.code == 2
    assert "--extent b is given twice, as 2 and 3: give it once" in ran.err


@pytest.mark.slow
def test_a_database_that_knows_nothing_leaves_no_plan(run: Run, tmp_path: Path) -> None:
    open_database(tmp_path / "empty.sqlite").close()
    ran = run("solve", "bert-encoder:tiny", "--database", tmp_path / "empty.sqlite")
    assert ran.code == 5
    assert "InfeasibleError: operator 'query_projection' has no candidate that works" in ran.err
    assert "`autotuner tune` measures what is missing" in ran.err
    assert ran.out == ""


@pytest.mark.parametrize("command", ["show", "check"])
@pytest.mark.parametrize(
    "text, sentence", [("{", "it is not JSON"), ('{"schema": 99}', "its schema version is 99; this version reads 2")]
)
def test_a_corrupt_configuration_ends_with_2(run: Run, tmp_path: Path, command: str, text: str, sentence: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    ran = run(command, "broken.json")
    assert ran.code == 2
    assert "ConfigurationError: broken.json: " in ran.err
    assert sentence in ran.err


def test_a_bad_environment_variable_ends_with_2(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNER_THREADS", "several")
    ran = run("solve", "bert-encoder:tiny")
    assert ran.code == 2
    assert "AUTOTUNER_THREADS is 'several': write a whole number from 1" in ran.err


@pytest.mark.parametrize("text, sentence", [("{", "it is not JSON"), ("{}", "this is no problem of schema 3")])
def test_a_corrupt_problem_ends_with_2(run: Run, tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "problem.json").write_text(text)
    ran = run("solve", "problem.json")
    assert ran.code == 2
    assert sentence in ran.err


# What is solved


@pytest.mark.slow
def test_berts_own_epsilon_is_a_number(run: Run, tmp_path: Path) -> None:
    open_database(tmp_path / "empty.sqlite").close()
    ran = run("solve", "bert-encoder:tiny", "--option", "epsilon=1e-12", "--database", tmp_path / "empty.sqlite")
    assert (ran.code, "InfeasibleError" in ran.err) == (5, True)  # nothing is measured, and the model is valid


def test_a_saved_problem_is_solved(run: Run, tmp_path: Path) -> None:
    problem = Problem(
        (
            Factor("first", ("x", "y"), {("ab", "ab"): 1.0, ("ab", "ba"): 2.0}),
            Factor("second", ("y",), {("ab",): 9.0, ("ba",): 3.0}),
        ),
        chain=("x", "y"),
    )
    (tmp_path / "problem.json").write_text(json.dumps(problem.to_json()))
    ran = run("solve", "problem.json", "--json")
    assert ran.code == 0
    assert ran.json == {
        "solver": "exact", "total_us": 5.0, "lower_bound_us": 5.0, "gap": 0.0, "statistics": ran.json["statistics"],
        "states": {"x": "ab", "y": "ba"},
    }  # fmt: skip
    assert ran.json["statistics"].keys() >= {"largest_rows", "largest_bytes", "cases"}
    people = run("solve", "problem.json").out
    assert "exact: 5.0 us, bound 5.0, gap 0.00%" in people
    assert "1 row in the largest table" in people
    shown = run("solve", "problem.json", "--solver", "greedy").out
    assert "greedy: 5.0 us" in shown
    assert "y: ba" in shown


def test_a_problem_without_a_whole_ends_with_5(run: Run, tmp_path: Path) -> None:
    problem = Problem((Factor("first", ("x",), {("ab",): 1.0}), Factor("second", ("x",), {("ba",): 1.0})))
    (tmp_path / "problem.json").write_text(json.dumps(problem.to_json()))
    assert run("solve", "problem.json").code == 5


def test_solving_from_the_database_writes_configuration_and_problem(
    run: Run, measured: tuple[Path, str], tmp_path: Path
) -> None:
    database, reference = measured
    ran = run("solve", reference, "--database", database, "--output", "found.json", "--problem", "p.json", "--json")
    assert ran.code == 0
    written = load_configuration(tmp_path / "found.json")
    assert written.to_json() == ran.json
    assert written.counts["measured"] == written.counts["failed"] == 0
    again = run("solve", "p.json", "--json").json
    assert again["total_us"] == pytest.approx(written.certificate.predicted_us)
    baseline = run("solve", reference, "--database", database, "--solver", "shortest_path", "--json").json
    assert baseline["certificate"]["solver"] == "shortest_path"
    assert baseline["certificate"]["predicted_us"] >= written.certificate.predicted_us


def test_a_configuration_is_shown_for_people_and_for_programs(run: Run, found: Configuration, tmp_path: Path) -> None:
    save_configuration(found, tmp_path / "found.json")
    assert run("show", "found.json", "--json").json == found.to_json()
    ran = run("show", "found.json")
    assert ran.code == 0
    for text in ("small:wide", "made up", "grad_weight", "predicted", "rejected"):
        assert text in ran.out


@pytest.fixture
def explained(model: Model, tmp_path: Path) -> Configuration:
    """A configuration with everything that there is to explain, saved as explained.json."""
    found = explained_configuration(model)
    save_configuration(found, tmp_path / "explained.json")
    return found


def test_a_configuration_says_in_sentences_how_good_it_is(run: Run, explained: Configuration) -> None:
    ran = run("show", "explained.json")
    assert ran.code == 0
    for sentence in explain_plan(explained).words:
        assert sentence in ran.out
    for text in ("38.5 to 46.5 us", "40.0 us (the plan is 5.00% above)", "20.0 KiB", "40.0 KiB", "64.0 KiB",
                 "39.0 KiB", "80.0 KiB", "12 rows in the largest table, 1 case",
                 "what could still overtake"):  # fmt: skip
        assert text in ran.out


def test_an_operator_is_explained_for_people_and_for_programs(run: Run, explained: Configuration) -> None:
    ran = run("show", "explained.json", "--operator", "product")
    assert ran.code == 0
    assert "With product as fb in place of bf: +3.1 us in all, at least -0.4 us within the intervals." in ran.out
    value = run("show", "explained.json", "--operator", "product", "--json").json
    assert value == json.loads(json.dumps(asdict(explain_operator(explained, "product"))))


def test_a_tensor_is_explained_for_people_and_for_programs(run: Run, explained: Configuration) -> None:
    ran = run("show", "explained.json", "--tensor", "grad_biased")
    assert "It is converted: grad_biased from bf to fb for 2.0 us." in ran.out
    value = run("show", "explained.json", "--tensor", "grad_biased", "--json").json
    assert value == json.loads(json.dumps(asdict(explain_tensor(explained, "grad_biased"))))


@pytest.mark.usefixtures("explained")
@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--operator", "prodct"], "NotFoundError: no operator 'prodct' in small:wide: near are product"),
        (["--operator", "weight"], "a tensor has this name"),
        (["--tensor", "grad_weights"], "NotFoundError: no tensor 'grad_weights' in small:wide: near are grad_weight"),
        (["--operator", "y", "--tensor", "y"], "InputError: --operator y and --tensor y: give one of the two"),
    ],
)
def test_a_name_that_cannot_be_explained_ends_with_2(run: Run, arguments: list[str], sentence: str) -> None:
    ran = run("show", "explained.json", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert sentence in ran.err


# What tuning and checking return, with stand-ins for what measures and runs


def test_tuning_prints_and_writes_what_was_found(
    run: Run, found: Configuration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def tune(model: Model, **options: Any) -> Configuration:
        asked.update(options, extents=model.extents, dtype=model.dtype)
        return found

    monkeypatch.setattr("autotuner.api.tuning.tune", tune)
    given = ["tune", "bert-encoder:tiny", "--extent", "l=32", "--dtype", "bfloat16", "--again", "--no-end-to-end"]
    given += ["--gap", "0.05", "--estimated-gap", "0.01", "--budget", "1KiB", "--exhaustive"]
    ran = run(*given, "--threads", "1", "--output", "found.json")
    assert ran.code == 0
    assert "Configuration written to found.json" in ran.out
    assert load_configuration(tmp_path / "found.json") == found
    assert (asked["again"], asked["end_to_end"], asked["threads"]) == (True, False, 1)
    assert (asked["gap"], asked["estimated_gap"], asked["budget_bytes"], asked["exhaustive"]) == (
        0.05,
        0.01,
        1024,
        True,
    )
    assert (asked["extents"]["l"], asked["dtype"]) == (32, "bfloat16")
    assert run(*given, "--json").json == found.to_json()


def test_an_interrupted_tuning_ends_with_130_and_says_that_nothing_is_lost(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autotuner.api.tuning.tune", interrupted)
    ran = run("tune", "bert-encoder:tiny")
    assert ran.code == 130
    assert "what was measured is kept" in ran.err


def test_an_unwritable_output_ends_with_2(run: Run, found: Configuration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotuner.api.tuning.tune", lambda *_, **__: found)
    ran = run("tune", "bert-encoder:tiny", "--output", "missing/found.json")
    assert ran.code == 2
    assert "missing/found.json: cannot be written" in ran.err


@pytest.mark.parametrize("right, code", [(True, 0), (False, 7)])
def test_a_check_ends_with_7_where_results_differ(
    run: Run, found: Configuration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: bool, code: int
) -> None:
    from autotuner.runtime import CheckReport

    save_configuration(found, tmp_path / "found.json")
    report = CheckReport({"y": 1e-16 if right else 1e-2}, 1e-12, {}, 0)
    assert report.ok is right
    monkeypatch.setattr("autotuner.runtime.check", lambda *_: report)
    ran = run("check", "found.json")
    assert ran.code == code
    assert ("results differ" in ran.err) is not right


@pytest.mark.slow
def test_a_check_says_which_errors_the_frameworks_own_layer_has_as_well(run: Run, tmp_path: Path) -> None:
    save_configuration(in_bfloat16("relu"), tmp_path / "relu.json")
    printed = run("check", "relu.json")
    assert printed.code == 0
    (reason,) = (line for line in printed.out.splitlines() if line.startswith("* linear1.weight "))
    assert reason.endswith("so that it is right")
    told = run("check", "relu.json", "--json").json
    assert told["ok"]
    bound = told["own_bounds"]["linear1.weight"]
    assert bound["found"]["largest"] == told["errors"]["linear1.weight"] > told["tolerance"] == told["allowed"]["y"]
    assert bound["allowed"]["largest"] == told["allowed"]["linear1.weight"] == 2 * bound["own"]["largest"]
