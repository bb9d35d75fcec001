"""Sides of the benchmark that run a training step each while a profiler counts; `layer_cuda_dram` starts this program.

python -m scripts.bench.profiled_sides SIDES FAILED
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autotuner.plan.configuration import load_configuration
from autotuner.runtime.drop_in import apply
from autotuner.runtime.framework import MadeUpCall
from autotuner.runtime.peers.stacked_layer import stacked_layer
from autotuner.runtime.peers.training_loop import TrainingLoop
from autotuner.runtime.workspace import Workspace
from scripts.bench.cases import LAYERS

TUNED, EAGER = "tuned", "eager"
STEPS = 1
RANGE = "counted side"
COMPILING: Mapping[str, str | None] = {"torch.compile": None, "max-autotune": "max-autotune-no-cudagraphs"}


@dataclass(frozen=True)
class Side:
    """What is counted: a side of a case. `file` holds the case's configuration, `layer` is a name in `LAYERS`."""

    case: str
    name: str
    layer: str
    file: str


def run(sides_file: Path, failed_file: Path) -> None:
    """Run sides one after the other; the profiler counts the kernels of `STEPS` steps of each."""
    torch.autograd.set_multithreading_enabled(False)  # a range's name is known in its own thread
    failed: dict[int, str] = {}
    for number, side in enumerate(json.loads(sides_file.read_text())):
        try:
            run_side(number, Side(**side))
        except Exception as error:
            failed[number] = str(error).splitlines()[0] if str(error) else type(error).__name__
        failed_file.write_text(json.dumps(failed))
        torch.compiler.reset()
        torch.cuda.empty_cache()


def run_side(number: int, side: Side) -> None:
    found = load_configuration(Path(side.file))
    built = Workspace._built
    if side.name == TUNED:
        Workspace._built = naming(number)  # type: ignore[method-assign]
    try:
        loop = TrainingLoop(layer_of(side, found), MadeUpCall.of(found.model, device="cuda"))
        loop.warm()
    finally:
        Workspace._built = built  # type: ignore[method-assign]
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    with torch.cuda.nvtx.range(f"{RANGE} {number}"):
        for _ in range(STEPS):
            loop.step()
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def naming(side: int) -> Any:
    """Return a way to build steps in workspaces that has each run in a range of its name."""
    built = Workspace._built

    def named(workspace: Any, number: int, views: Any) -> Any:
        call = built(workspace, number, views)

        def run() -> None:
            with torch.cuda.nvtx.range(f"{RANGE} {side} step {number}"):
                call()

        return run

    return named


def layer_of(side: Side, found: Any) -> Any:
    """Return the layer of a side by its name: compiled where that begins with torch.compile or max-autotune."""
    begin = next((way for way in COMPILING if side.name.startswith(way)), "")
    kind = side.name.removeprefix(begin).strip()
    if kind.startswith("sdpa "):
        layer: Any = stacked_layer(found.model, kind.removeprefix("sdpa "))
    else:
        layer = LAYERS[side.layer](found.model, device="cuda")
    if side.name == TUNED:
        return apply(layer, found, graphs=False)
    return torch.compile(layer, mode=COMPILING[begin], dynamic=False) if begin else layer


if __name__ == "__main__":
    run(*(Path(given) for given in sys.argv[1:]))
