"""The recorded encoder layer: what was measured, and the problems that it gives."""

import gzip
import json
from pathlib import Path
from typing import Any

from autotuner.graph.autodiff import training_graph
from autotuner.models import Model, load_model
from autotuner.problem import Problem
from autotuner.problem.formulate import formulate
from autotuner.space import build_space, space_file

RECORDED = Path(__file__).resolve().parent.parent / "tests" / "data" / "bert_encoder_tiny_cpu.json.gz"


def recorded() -> tuple[dict[str, Any], dict[str, float]]:
    """Return what was recorded, and the microseconds of each call that could be measured, by its key."""
    value: dict[str, Any] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    return value, {key: us for key, (status, us, *_) in value["measurements"].items() if status == "ok"}


def problem_of(model: Model, *, saving: bool = False) -> Problem:
    """Return the problem of a model's training step at recorded costs; calls that were not recorded are left out.

    Args:
        saving: as in `formulate`.
    """
    value, costs_us = recorded()
    file = space_file("cpu")
    file = file.model_copy(update={"kernels": {kernel: file.kernels[kernel] for kernel in value["kernels"]}})
    return formulate(build_space(training_graph(model.graph()), file), costs_us, saving=saving).problem


def recorded_layer(*, saving: bool = False) -> Problem:
    name, _, preset = recorded()[0]["model"].partition(":")
    return problem_of(load_model(name).instantiate(preset), saving=saving)
