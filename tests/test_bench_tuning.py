"""Benchmark of tunings: failures of single ones, regrets of plans, and the page."""

import sys
from pathlib import Path
from typing import Any

import pytest

from autotuner.database import open_database
from autotuner.ir.records import Call, Candidate, Measurement, Node, Subgraph, TensorType
from autotuner.tuner import Replay
from scripts.bench.tunings import (
    Run,
    TuningError,
    copied,
    copied_as_older,
    database_of,
    measured_apart,
    page,
    rates,
    regrets,
    timings_of,
    tuned_apart,
    tuned_within,
    tunings,
)
from tests.made_up import HERE

MATRIX = TensorType((8, 16), "float32")
ADD = Subgraph((Node("add", "ab,ab->ab", (0, 1), (2,)),), (MATRIX,) * 3, (0, 1), (2,))


def add(block: int, kernel: str = "torch_add") -> Call:
    return Call(ADD, Candidate(kernel, ("ab", "ab", "ab"), (("block", block),)))


def timed(**us: float) -> dict[str, Measurement]:
    """Return timings of calls, by their blocks."""
    return {add(int(name[1:])).key: Measurement("ok", each, each, each) for name, each in us.items()}


def run(seconds: float) -> Run:
    stages = {"search": 10.0, "compile": 20.0, "measure": 30.0, "confirm": 4.0, "solve": 1.25}
    return {
        "seconds": seconds, "seconds_by_stage": stages, "calls": 1000, "failed": 2, "calls_per_s": 1000 / seconds,
        "predicted_us": 700.0, "doubts": [],
    }  # fmt: skip


def test_a_tuning_that_fails_costs_the_others_nothing(tmp_path: Path) -> None:
    limits: list[float] = []

    def tune(stem: Path, limit_s: float) -> Run:
        limits.append(limit_s)
        if stem.name == "2":
            raise TuningError("it broke")
        return run(100.0)

    first, second, third = tunings([tmp_path / name for name in "123"], tune, 60.0)
    assert first == third == run(100.0)
    assert second["failure"] == "it broke"
    assert max(limits) <= 30.0


def test_a_single_tuning_has_all_the_time_that_is_left(tmp_path: Path) -> None:
    limits: list[float] = []

    def tune(_: Path, limit_s: float) -> Run:
        limits.append(limit_s)
        return run(100.0)

    assert tuned_within(tmp_path / "1", tune, 60.0) == run(100.0)
    assert "failure" in tuned_within(tmp_path / "2", tune, -1.0)
    assert limits == [60.0]


def test_what_ends_badly_or_late_is_a_failure_with_its_last_words(tmp_path: Path) -> None:
    stem = tmp_path / "tuning"
    with pytest.raises(TuningError, match="ValueError: no device"):
        tuned_apart([sys.executable, "-c", "raise ValueError('no device')"], stem, 60.0)
    with pytest.raises(TuningError, match="not over after 0 s"):
        tuned_apart([sys.executable, "-c", "import time; time.sleep(60)"], stem, 0.2)
    database_of(stem).touch()
    with pytest.raises(TuningError, match="starts with an empty database"):
        tuned_apart([sys.executable, "-c", ""], stem, 60.0)


def test_a_tuning_begins_with_what_another_one_measured_here_or_under_an_older_driver(tmp_path: Path) -> None:
    first, same, older = (tmp_path / name for name in ("first", "same", "older"))
    with open_database(database_of(first)) as database:
        database.remember(HERE)
        database.store(HERE.key, [(add(1), timed(b1=50.0)[add(1).key])])
    copied(first, same)
    copied_as_older(first, older)
    for stem, is_equal in ((same, True), (older, False)):
        assert [each.median_us for each in timings_of(stem).values()] == [50.0]
        with open_database(database_of(stem)) as database:
            (environment,) = database.environments()
            assert (environment.key == HERE.key) == is_equal
            assert environment.device_name == HERE.device_name
    assert dict(environment.facts)["driver"] == "older"


def test_a_regret_is_against_the_tunings_own_plan_and_what_it_lacks_is_measured_once_more() -> None:
    plans = [[add(1), add(2)], [add(1), add(3)]]
    known = [timed(b1=50.0, b2=50.0, b3=60.0), timed(b1=40.0, b3=40.0)]
    measurer: Any = Replay(HERE, timed(b2=44.0))
    apart = measured_apart(plans, known, measurer)
    assert apart == timed(b2=44.0)
    assert regrets(plans, known, apart) == [[0.0, pytest.approx(0.05)], [pytest.approx(0.1), 0.0]]
    with pytest.raises(TuningError, match="plan 2 runs torch_add"):
        regrets(plans, [known[0], timed(b1=40.0)], apart)


def test_rates_are_taken_from_some_calls_of_each_library() -> None:
    calls = [add(block) for block in range(300)] + [add(1, "cublas_matmul")]
    measurer: Any = Replay(HERE, {call.key: Measurement("ok", 1.0, 1.0, 1.0) for call in calls})
    found = rates(calls, measurer, 60.0)
    assert {library: rate["calls"] for library, rate in found.items()} == {"cublas": 1, "torch": 100}


def test_the_page_has_a_row_for_each_tuning_library_and_plan() -> None:
    about = {
        "model": "bert-encoder:large", "dtype": "bfloat16", "device": "NVIDIA H200", "versions": {"cuda": "13.0"},
        "date": "2026-11-22", "commit": "abc", "command": "scripts/bench_tuning bert-encoder:large",
    }  # fmt: skip
    found = {
        "about": about,
        "runs": [run(100.0), {"failure": "it broke", "seconds": 3.0}, run(125.0)],
        "known": [
            run(50.0) | {"extents": {"b": 12}, "before": "the model's own shape"},
            {"failure": "it broke", "seconds": 3.0, "extents": {}, "before": "itself, older driver"},
        ],
        "rates": {"cublaslt": {"calls": 100, "seconds": 0.8}, "inductor": {"calls": 20, "seconds": 4.0}},
        "regrets": [[0.0, 0.0012], [0.0034, 0.0]],
        "measured_apart": 3,
    }
    assert (
        page(found)
        == """# Tuning from an empty database

bert-encoder:large bfloat16, NVIDIA H200, cuda 13.0, 2026-11-22, commit abc. `scripts/bench_tuning bert-encoder:large`

| tuning | seconds | search | compile | measure | confirm | solve | calls | failed | calls / s | predicted, us |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| 1 | 100.0 | 10.0 | 20.0 | 30.0 | 4.0 | 1.2 | 1,000 | 2 | 10.0 | 700.0 |
| 3 | 125.0 | 10.0 | 20.0 | 30.0 | 4.0 | 1.2 | 1,000 | 2 | 8.0 | 700.0 |

Database and cache of compiled kernels are empty at first. `search`: sampled cells, compiled and raced. `compile`: while nothing that was compiled was left to be timed.

Tuning 2 failed: it broke.

Once more, each with an empty cache of compiled kernels, and with the time of the whole plan beside the times of its kernels. *Older driver*: all of it was measured before, but not under this driver.

| shape | known before | seconds | calls | predicted, us |
| --- | --- | --- | --- | --- |
| b 12 | the model's own shape | 50.0 | 1,000 | 700.0 |
| the model's own | itself, older driver | 3.0 |  | it broke |

Calls of each library, set up, verified and raced once more:

| library | calls | seconds | calls / s |
| --- | --- | --- | --- |
| cublaslt | 100 | 0.8 | 125 |
| inductor | 20 | 4.0 | 5 |

Regret: by what share a plan takes longer, by a tuning's timings, than that tuning's own plan. 3 calls of plans that not every tuning had timed were measured once more.

| plan of tuning | by timings of 1 | by timings of 3 |
| --- | --- | --- |
| 1 | 0.00% | 0.12% |
| 3 | 0.34% | 0.00% |
"""  # noqa: E501
    )
