"""scripts/bench_memory: how the largest batch is looked for, and its page."""

from types import ModuleType
from typing import Any

import pytest

from tests.script import script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return script("bench_memory")


@pytest.mark.slow
@pytest.mark.parametrize(("truth", "guess"), [(17, 17), (34, 30), (34, 38), (100, 90), (5, 5), (3, 60)])
def test_the_largest_batch_is_found_near_the_truth_in_few_runs(bench: ModuleType, truth: int, guess: int) -> None:
    tried: list[int] = []

    def runs(batch: int) -> dict[str, Any]:
        tried.append(batch)
        return {"batch": batch, "fits": batch <= truth}

    best, runs_made = bench.largest_batch(runs, guess, tries=6)
    assert len(runs_made) == len(tried) <= 6
    assert len(set(tried)) == len(tried)
    if truth == 3:  # a guess that is far too high finds nothing, and says so
        assert best is None
        return
    assert best is not None
    assert 0.88 * truth <= best["batch"] <= truth


@pytest.mark.slow
def test_a_guess_is_a_line_through_two_batches_and_goes_no_further_than_makes_sense(bench: ModuleType) -> None:
    probes = [{"batch": 4, "bytes": 9 << 30}, {"batch": 8, "bytes": 11 << 30}]
    assert bench.guessed(probes, 16 << 30) == 18
    assert bench.guessed(probes, 8 << 30) == 2
    assert bench.guessed([{"batch": 1, "bytes": 10}, {"batch": 2, "bytes": 10}], 1 << 30) == 2 * bench.FURTHEST


@pytest.mark.slow
def test_the_page_has_a_table_for_each_case_and_cap(bench: ModuleType) -> None:
    about = {"device": "a device", "torch": "2.11", "date": "today", "commit": "abc", "length": 512}
    row = {"case": "bert", "cap": "16GiB", "side": "eager", "batch": 17, "ms": 100.0, "allocated_bytes": 1 << 30}
    rows = [row | {"reserved_bytes": 2 << 30}, row | {"reserved_bytes": 2 << 30, "side": "tuned", "batch": 34}]
    lines = bench.page(about, rows).splitlines()
    assert "## bert, 16GiB" in lines
    assert lines[-2:] == [
        "| eager | 17 | 100.0 | 87,040 | 1024.0 | 2048.0 |",
        "| tuned | 34 | 100.0 | 174,080 | 1024.0 | 2048.0 |",
    ]
