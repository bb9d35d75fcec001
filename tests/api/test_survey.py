"""Surveys of a model's calls: what they keep, and gradients within a call."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autotuner.api.survey import region_calls
from autotuner.runtime.devices import device_runtime

LAYERS, WIDTH = 6, 64
ROWS = (64, 128)
MIDDLE_BYTES = 4 * 64 * 128 * 4 * WIDTH
"""Of one layer's widest tensor."""


def layers() -> nn.Sequential:
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        for _ in range(LAYERS)
    ]
    return nn.Sequential(*blocks)


def peak_bytes(called: Any, *arguments: Any) -> int:
    meter = device_runtime(torch.device("cpu")).meter()
    found = called(*arguments)
    (peak,), _ = meter.stop()
    del found
    return peak


def test_a_survey_keeps_nothing_for_backward() -> None:
    module, x = layers(), torch.randn(*ROWS, WIDTH)
    region_calls(module, [x])  # what dynamo keeps of its own comes with the first one
    plain, surveyed = peak_bytes(module, x), peak_bytes(region_calls, module, [x])
    assert plain > 2 * LAYERS * MIDDLE_BYTES
    assert 2 * MIDDLE_BYTES <= surveyed < 2.5 * MIDDLE_BYTES


class Forces(nn.Module):
    """Returns, beside what its layers compute, its gradient by what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        energy = self.layers(x).pow(2).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, force


def test_gradients_may_be_taken_within_a_call() -> None:
    module, x = Forces(), torch.randn(2, 8, WIDTH)
    calls = region_calls(module, [x, x.clone()])
    (runs,) = calls.runs.values()
    assert (runs, calls.batches) == (2 * LAYERS, 2)


class Noisy(nn.Module):
    """Draws numbers of two generators, and keeps running means and a count, one of them in a new tensor."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = layers(), nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        x = x + torch.rand(()) + float(np.random.rand())
        found: Tensor = self.norm(self.layers(x))
        return found


def test_a_survey_leaves_buffers_and_generators_as_they_were() -> None:
    module, x = Noisy(), torch.randn(8, WIDTH)
    count, before = module.count, {name: each.clone() for name, each in module.state_dict().items()}
    drawn = list[tuple[float, float]]()
    for _ in range(2):
        torch.manual_seed(1)
        np.random.seed(1)
        if drawn:
            assert region_calls(module, [x]).models
        drawn.append((float(torch.rand(())), float(np.random.rand())))
    assert drawn[0] == drawn[1]
    assert module.count is count
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0.0, atol=0.0)


def test_a_survey_of_a_function_leaves_the_buffers_of_its_model() -> None:
    module, x = Noisy(), torch.randn(8, WIDTH)
    before = {name: each.clone() for name, each in module.state_dict().items()}
    assert region_calls(lambda given: module(given).sum(), [x], module).models
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0.0, atol=0.0)
