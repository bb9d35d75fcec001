"""What a step of a benchmark's case takes at least, from a device's ceilings."""

from pathlib import Path
from typing import Any

import pytest

from autotuner.measure.roofline import Ladder, Roofline
from scripts.bench.floors import measured_ceilings, with_floors
from scripts.bench.layer_cuda import rates

CEILINGS = Roofline(
    call_us=1.0,
    moved=Ladder(((1000.0, 2.0), (10_000.0, 10.0))),
    products={"bfloat16": Ladder(((1e6, 4.0), (1e8, 100.0)))},
)


def step(flop: float, counted_bytes: float, predicted_us: float) -> dict[str, Any]:
    return {"flop": flop, "counted_bytes": counted_bytes, "predicted_us": predicted_us}


def case(*steps: dict[str, Any], dtype: str = "bfloat16") -> dict[str, Any]:
    return {"dtype": dtype, "steps": list(steps)}


def test_a_step_takes_at_least_the_greater_of_its_products_and_its_bytes_and_a_case_their_sums() -> None:
    (row,) = with_floors([case(step(5e7, 10_000, 80.0), step(0, 10_000, 12.0), step(0, 0, 3.0))], CEILINGS)
    floors = [(each["compute_floor_us"], each["bytes_floor_us"], each["floor_us"]) for each in row["steps"]]
    assert floors == [(50.0, 10.0, 50.0), (0.0, 10.0, 10.0), (0.0, 0.0, 1.0)]
    assert (row["compute_floor_us"], row["bytes_floor_us"], row["floor_us"]) == (50.0, 20.0, 61.0)


def test_a_step_that_beats_a_ceiling_lowers_it_for_all_cases() -> None:
    rows = with_floors([case(step(1e8, 0, 80.0)), case(step(5e7, 0, 70.0)), case(step(1e8, 0, 110.0))], CEILINGS)
    assert [row["floor_us"] for row in rows] == pytest.approx([80.0, 40.0, 80.0])


def test_products_of_an_element_type_without_ceilings_have_no_floor() -> None:
    (row,) = with_floors([case(step(1e8, 1000, 80.0), dtype="float16")], CEILINGS)
    assert (row["compute_floor_us"], row["floor_us"]) == (0.0, 2.0)


def test_what_is_known_is_not_measured_anew(tmp_path: Path) -> None:
    assert measured_ceilings(CEILINGS, ["bfloat16"], tmp_path) is CEILINGS


def test_a_page_names_the_rates_at_the_largest_amounts() -> None:
    assert rates(CEILINGS.to_facts()) == "bfloat16 1 TFLOP/s, bytes 1 GB/s"
