"""Sides of the benchmark that run a training step each while a profiler counts; `layer_cuda_dram` starts this program.

python -m scripts.bench.profiled_sides SIDES FAILED
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autotuner.ir.device import CUDA
from autotuner.plan.configuration import Configuration, load_configuration
from autotuner.runtime import region
from autotuner.runtime.built_steps import BuiltSteps
from autotuner.runtime.drop_in import apply
from autotuner.runtime.framework import MadeUpCall
from autotuner.runtime.peers.stacked_layer import stacked_layer
from autotuner.runtime.peers.training_loop import TrainingLoop
from autotuner.runtime.pool import Lease
from scripts.bench.all_peers import SDPA, compiled_side
from scripts.bench.cases import LAYERS
from scripts.pages import Stages

TUNED = "tuned"
STEPS = 1
RANGE = "counted side"


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
    stages = Stages()
    for number, side in enumerate(json.loads(sides_file.read_text())):
        try:
            with stages(f"{side['case']}: {side['name']}"):
                run_side(number, Side(**side))
        except Exception as error:
            failed[number] = str(error).splitlines()[0] if str(error) else type(error).__name__
        failed_file.write_text(json.dumps(failed))
        torch.compiler.reset()
        torch.cuda.empty_cache()


def run_side(number: int, side: Side) -> None:
    found = load_configuration(Path(side.file))
    build, is_captured, gives_back = BuiltSteps.build, region.is_captured, Lease.gives_back
    if side.name == TUNED:
        BuiltSteps.build = naming(number)  # type: ignore[method-assign]
        region.is_captured = lambda device: True  # noqa: ARG005  (as in the captured step that is timed)
        Lease.gives_back = property(lambda _: True)  # type: ignore[method-assign, assignment]
    try:
        loop = TrainingLoop(layer_of(side, found), MadeUpCall.of(found.model, device=CUDA))
        loop.warm()
        with copies_as_kernels():
            loop.step()
            count(number, loop)
    finally:
        BuiltSteps.build = build  # type: ignore[method-assign]
        region.is_captured, Lease.gives_back = is_captured, gives_back  # type: ignore[method-assign]


def count(number: int, loop: TrainingLoop) -> None:
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    with torch.cuda.nvtx.range(f"{RANGE} {number}"):
        for _ in range(STEPS):
            loop.step()
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


@contextmanager
def copies_as_kernels() -> Iterator[None]:
    """Have what Python copies run as kernels, which the profiler counts, and not as copies by the driver."""
    copy = torch.Tensor.copy_

    def copied(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        alike = self.is_cuda and source.is_cuda and (self.shape, self.dtype) == (source.shape, source.dtype)
        if alike and self.is_floating_point():
            return torch.mul(source.detach(), 1, out=self)
        return copy(self, source, non_blocking)

    torch.Tensor.copy_ = copied  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.copy_ = copy  # type: ignore[method-assign]


def naming(side: int) -> Any:
    """Return a way to build steps that has each run in a range of its name."""
    build = BuiltSteps.build

    def named(steps: Any, number: int, views: Any) -> Any:
        call = build(steps, number, views)

        def run() -> None:
            with torch.cuda.nvtx.range(f"{RANGE} {side} step {number}"):
                call()

        return run

    return named


def layer_of(side: Side, found: Configuration) -> nn.Module:
    """Return the layer of a side by its name."""
    make = LAYERS[side.layer]
    if side.name == TUNED:
        return apply(make(found.model, device=CUDA), found, graphs=False)
    if side.name.startswith(("torch.compile", "max-autotune")):
        return compiled_side(side.name, make, found.model)
    if side.name.startswith(SDPA):
        return stacked_layer(found.model, side.name.removeprefix(SDPA), device=CUDA)
    return make(found.model, device=CUDA)


if __name__ == "__main__":
    run(*(Path(given) for given in sys.argv[1:]))
