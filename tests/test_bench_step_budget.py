"""scripts/bench_step_budget: where its budgets lie, and its page."""

from types import ModuleType

import pytest

from tests.script import script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return script("bench_step_budget")


def test_budgets_are_spread_evenly_from_the_least_to_the_most(bench: ModuleType) -> None:
    assert bench.spread(1000, 2000, 5) == [1000, 1250, 1500, 1750, 2000]


def test_the_page_has_a_row_for_each_budget_and_says_how_far_the_peak_is_from_it(bench: ModuleType) -> None:
    about = {"device": "a device", "torch": "2.11", "date": "today", "commit": "abc", "length": 512}
    row = {"case": "bert", "batch": 16, "budget_bytes": 100 << 20, "predicted_bytes": 98 << 20, "regions": 24}
    row |= {"allocated_bytes": 97 << 20, "reserved_bytes": 102 << 20, "bytes": 102 << 20, "ms": 10.0, "repeating": 3}
    rows = [row | {"fits": True, "note": ""}, row | {"fits": False, "note": "it needs 3 GiB at least", "batch": 32}]
    lines = bench.page(about, rows).splitlines()
    assert "| 100.0 | 98.0 | 97.0 | 102.0 | +2.0% | 10.0 | 3 of 24 |" in lines
    assert lines[-1] == "| 100.0 | it needs 3 GiB at least |  |  |  |  |  |"
    assert [line for line in lines if line.startswith("## ")] == ["## bert, batch 16", "## bert, batch 32"]
