"""Each script of examples/ trains in small with its layers tuned; recorded and made-up times replace measuring."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.clone import STAND_INS

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUN = """
import runpy, sys, autotuner_stand_ins
from autotuner.server.worker.attending import tune_attended
from tests.made_up import UNEXPLAINED
from tests.stack import in_one_piece
tune_attended.__kwdefaults__["policy"] = UNEXPLAINED  # nobody reads why a plan is not better
sys.argv = sys.argv[1:]
in_one_piece(runpy.run_path, sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains_with_all_regions_tuned(path: Path, tmp_path: Path) -> None:
    known = {name: value for name, value in os.environ.items() if not name.startswith("AUTOTUNER_")}
    environment = known | {"PYTHONPATH": f"{ROOT}{os.pathsep}{STAND_INS}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(path), "--small", "--steps", "6"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    graphs = [line for line in ran.stdout.splitlines() if line.startswith("compiled graph")]
    assert graphs
    if path.stem == "layer_to_layer":  # both layers are calls of one graph, and head and loss are in another one
        assert "1 of 1 regions run tuned" in graphs.pop(0)
        assert [line for line in graphs if "none of " not in line] == []
    else:
        assert [line for line in graphs if "2 of 2 regions run tuned" not in line] == []
    assert "step 5: loss" in ran.stdout


def test_every_example_is_named_on_the_first_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert [path.name for path in EXAMPLES if f"](examples/{path.name})" not in text] == []
