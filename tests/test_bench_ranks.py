"""The page of scripts/bench_ranks: balance over ranks of drawn lengths and of text."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

SCRIPT = [sys.executable, str(ROOT / "scripts/bench_ranks")]
OURS = "as this sampler batches"


@pytest.mark.slow
def test_the_page_has_balanced_ranks_of_drawn_lengths_and_of_text(tmp_path: Path) -> None:
    options = ["--count", "4000", "--ranks", "8", "--output", str(tmp_path)]
    subprocess.run([*SCRIPT, *options], check=True, capture_output=True)
    found = json.loads((tmp_path / "bench_ranks.json").read_text())
    assert found["about"]["command"] == " ".join(["scripts/bench_ranks", *options])
    assert len(found["balance"]) == 3
    for rows in found["balance"].values():
        unequal = {name: float(last) for _, name, *_, last in rows}
        assert unequal[OURS] <= 1.05 < 1.2 < unequal["padded to the longest of the batch"]
    page = (tmp_path / "bench_ranks.md").read_text()
    assert all(f"## {name}" in page for name in found["balance"])


@pytest.mark.slow
def test_options_that_would_be_ignored_are_refused() -> None:
    run = subprocess.run([*SCRIPT, "--overlap", "--quadratic"], check=False, capture_output=True, text=True)
    assert run.returncode == 2
    assert "--quadratic is of --lengths, --text or drawn lengths" in run.stderr
