"""The page of scripts/bench_loss: what it says of made-up runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT
from tests.script import script

pytestmark = pytest.mark.slow  # it imports transformers


ABOUT = {
    "model": "bert", "sizes": {"width": 64, "dropout": 0.1}, "dtype": "float32", "steps": 20, "text_bytes": 1000,
    "regions": ["2 of 2"], "device": "a device", "versions": {}, "date": "2026-11-23", "commit": "abc",
    "command": "scripts/bench_loss",
}  # fmt: skip


def run_of(seed: int, eager: float, ours: float, side: str = "tuned") -> dict[str, Any]:
    sides = {"eager": eager, side: ours}
    return {"seed": seed} | {
        side: {"losses": [5.0, value], "end": value, "held_out": value + 0.5, "step": "18 of 20 steps were replayed"}
        for side, value in sides.items()
    }


def test_the_page_compares_sides_with_seeds() -> None:
    bench = script("bench_loss")
    page = bench.page({"about": ABOUT, "runs": [run_of(1, 2.0, 2.01), run_of(2, 2.2, 2.17)]})
    assert "| 1 | 2.0000 | 2.0100 | 2.5000 | 2.5100 | +0.0100 |" in page
    assert "the eager runs are 0.2000 apart over the seeds." in page
    assert "The means of both sides are 0.0100 apart, and the runs of one seed 0.0300 at most." in page
    assert "Tuned: 18 of 20 steps were replayed; 2 of 2." in page
    assert "losses of one step" not in page  # masks differ
    assert len(bench.corpus()) > 1_000_000


def test_without_dropout_the_page_compares_each_step_with_eager_s() -> None:
    bench = script("bench_loss")
    about = ABOUT | {"sizes": {"dropout": 0.0}}
    page = bench.page({"about": about, "runs": [run_of(1, 2.0, 2.25, "layer to layer")]})
    assert "| 1 | 2.0000 | 2.2500 | 2.5000 | 2.7500 | +0.2500 |" in page
    assert "The losses of one step are 0.2500 apart at most." in page
    assert "Layer to layer: 18 of 20 steps were replayed" in page


@pytest.mark.parametrize(
    ("side", "options"),
    [("layer to layer", ["--micro-batch", "2"]), ("packed", ["--tuning-seconds", "0", "--length", "16"])],
)
def test_other_sides_train_as_eager_does(side: str, options: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/bench_loss"), "--model", "gpt2", "--steps", "4", "--seeds", "1",
               "--width", "32", "--layers", "2", "--length", "8", "--rows", "4", "--dropout", "0", "--compiler",
               "eager", "--side", side, *options, "--output", str(tmp_path)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    (run,) = json.loads((tmp_path / f"bench_loss_gpt2_cpu_{side.replace(' ', '_')}.json").read_text())["runs"]
    assert len(run["eager"]["losses"]) == 4
    assert run[side]["losses"] == pytest.approx(run["eager"]["losses"], abs=2e-4)
