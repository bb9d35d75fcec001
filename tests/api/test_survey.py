"""Surveys of a model's calls: what they keep, and gradients within a call."""

from typing import Any

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
