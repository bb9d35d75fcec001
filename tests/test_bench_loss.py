"""The page of scripts/bench_loss: what it says of made-up runs."""

from typing import Any

import pytest

from tests.script import script

pytestmark = pytest.mark.slow  # it imports transformers


def run_of(seed: int, eager: float, tuned: float) -> dict[str, Any]:
    sides = {"eager": eager, "tuned": tuned}
    return {"seed": seed} | {
        side: {"losses": [], "end": value, "held_out": value + 0.5, "step": "18 of 20 steps were replayed"}
        for side, value in sides.items()
    }


def test_the_page_compares_sides_with_seeds() -> None:
    bench = script("bench_loss")
    about = {
        "model": "bert", "sizes": {"width": 64}, "dtype": "float32", "steps": 20, "text_bytes": 1000,
        "regions": ["2 of 2"], "device": "a device", "versions": {}, "date": "2026-11-23", "commit": "abc",
        "command": "scripts/bench_loss",
    }  # fmt: skip
    page = bench.page({"about": about, "runs": [run_of(1, 2.0, 2.01), run_of(2, 2.2, 2.17)]})
    assert "| 1 | 2.0000 | 2.0100 | 2.5000 | 2.5100 | +0.0100 |" in page
    assert "the eager runs are 0.2000 apart over the seeds." in page
    assert "The means of both sides are 0.0100 apart, and the runs of one seed 0.0300 at most." in page
    assert len(bench.corpus()) > 1_000_000
