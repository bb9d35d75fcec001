"""scripts/bench_nanogpt: its table of made-up times, and what it says without a checkout."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.script import SCRIPTS, script

SCRIPT = SCRIPTS / "bench_nanogpt"


@pytest.mark.slow
def test_the_table_compares_sides_of_one_round() -> None:
    bench = script("bench_nanogpt")
    times = {"autotuner": [10.0, 20.0, 10.0], "eager": [15.0, 30.0, 15.0], "torch.compile": [12.0, 26.0, 13.0]}
    losses = {"autotuner": [4.0, 2.002], "eager": [4.0, 2.0], "torch.compile": [4.0, 2.0]}
    _, _, tuned, eager, compiled, _, better = bench.page(times, losses)
    assert tuned == "| autotuner | 10.00 | 10.00 | 10 to 20 |  |  | 2.00200 | 1.0e-03 |"
    assert eager == "| eager | 15.00 | 15.00 | 15 to 30 | 1.500 | 1.5 to 1.5 | 2.00000 | 0.0e+00 |"
    assert compiled == "| torch.compile | 13.00 | 12.00 | 12 to 26 | 1.300 | 1.2 to 1.3 | 2.00000 | 0.0e+00 |"
    assert better == "Against the better of both, torch.compile: 1.300 times."


@pytest.mark.slow
def test_without_a_checkout_it_says_which_file_is_missing(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 2
    assert f"there is no {tmp_path / 'model.py'}: give the folder of a checkout of nanoGPT" in ran.stderr
