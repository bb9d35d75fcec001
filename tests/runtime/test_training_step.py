"""A configuration as plain calls: what a backward leaves for another one."""

import pytest
import torch
from torch import Tensor

from autotuner.models import Model
from autotuner.runtime import TrainingStep
from tests.runtime.layers import batch
from tests.runtime.plans import WITH_DROPOUT, configuration, model


def training_step(of: Model) -> TrainingStep:
    found = configuration(of)
    generator = torch.Generator().manual_seed(0)
    graph = found.graph()
    values: dict[str, Tensor] = {
        name: torch.randn(graph.shape(name), generator=generator, dtype=torch.float64)
        for name, tensor in graph.tensors.items()
        if tensor.role == "parameter"
    }
    return TrainingStep(found, values)


def test_a_backward_that_keeps_leaves_all_for_the_next() -> None:
    step = training_step(model(p=WITH_DROPOUT))
    step.forward(batch())
    runs = [{n: g.clone() for n, g in step.backward(batch(1), keeps=keeps).items()} for keeps in (True, True, False)]
    for run in runs[1:]:
        assert all(torch.equal(runs[0][name], grad) for name, grad in run.items())


def test_a_second_backward_is_refused_where_the_first_kept_nothing() -> None:
    step = training_step(model())
    with pytest.raises(RuntimeError, match="run forward again"):
        step.backward(batch(1))
    step.forward(batch())
    step.backward(batch(1))
    with pytest.raises(RuntimeError, match="keeps=True"):
        step.backward(batch(1))
    step.forward(batch())
    assert step.backward(batch(1))
