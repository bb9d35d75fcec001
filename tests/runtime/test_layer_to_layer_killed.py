"""`kill -9` in the middle of steps that run layer after layer: the last checkpoint goes on with the same losses."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STEPS, KILLS = 12, 2
PROGRAM = """
import json, os, sys
from pathlib import Path

import torch

import autotuner
from tests.runtime.test_layer_to_layer import Net, adamw, batch, loss_of

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = Net(rate=0.5)
optimizer = adamw(model)
step = autotuner.layer_to_layer(model, optimizer, loss_of, compiler=None, optimizer_in_backward=True, stash="host")
first = 0
if (folder / "saved.pt").exists():
    saved = torch.load(folder / "saved.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["drawn"])
    first = saved["next"]
for number in range(first, steps):
    loss = float(step(batch(number), batch(100 + number)))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "drawn": torch.get_rng_state()}
    torch.save(saved | {"next": number + 1}, folder / "being_saved.pt")
    with open(folder / "losses.jsonl", "a") as lines:
        print(json.dumps([number, loss]), file=lines)
    os.replace(folder / "being_saved.pt", folder / "saved.pt")
"""


def losses(folder: Path) -> dict[int, float]:
    """Return the last loss that was written of each step."""
    path = folder / "losses.jsonl"
    return dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}


def begun(folder: Path) -> "subprocess.Popen[bytes]":
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(STEPS)], env=os.environ | {"PYTHONPATH": root}
    )


def test_a_training_that_is_killed_goes_on_from_its_checkpoint_with_the_same_losses(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    assert begun(whole).wait() == 0
    moments = random.Random(3)
    for part in range(1, KILLS + 1):
        process = begun(killed)
        while process.poll() is None and len(losses(killed)) < part * STEPS // (KILLS + 1):
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.02))
        assert process.poll() is None, "the training was over too soon for this test to show anything"
        process.kill()
        process.wait()
    assert begun(killed).wait() == 0
    assert losses(killed) == losses(whole)
    assert sorted(losses(whole)) == list(range(STEPS))
