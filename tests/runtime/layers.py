"""A layer, its tuned twin with the same values, and training steps on them."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from autotuner.ir.models import Model
from autotuner.plan.configuration import Configuration
from autotuner.runtime import TunedModule, apply
from autotuner.runtime.framework import encoder_layer
from tests.runtime.plans import TINY, configuration, model

CUDA = "cuda"


def tuned_layer(
    of: Model | None = None, seed: int = 0, device_type: str = "cpu", graphs: bool = True
) -> tuple[TunedModule, nn.TransformerEncoderLayer]:
    """Return a tuned layer and an untouched copy of the layer that it was made from."""
    of = of or model()
    layer = encoder_layer(of, seed, device_type)
    twin = copy.deepcopy(layer)
    return tuned(layer, configuration(of, seed, device_type), graphs), twin


def on_cuda(of: Model | None = None, seed: int = 0, graphs: bool = True) -> tuple[TunedModule, nn.Module]:
    """Return the same on a CUDA device."""
    return tuned_layer(of, seed, CUDA, graphs)


def x_on(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a random input of the tiny model on a CUDA device."""
    return batch(seed, dtype).to(CUDA)


def tuned(layer: nn.Module, found: Configuration, graphs: bool = True) -> TunedModule:
    made = apply(layer, found, graphs=graphs)
    assert isinstance(made, TunedModule)
    return made


def batch(seed: int = 0, dtype: torch.dtype = torch.float64, sequence_first: bool = False) -> Tensor:
    """Return a random input of the tiny model."""
    shape = (TINY["l"], TINY["b"], TINY["h"]) if sequence_first else (TINY["b"], TINY["l"], TINY["h"])
    return torch.randn(shape, generator=_generator(seed), dtype=dtype)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(module: nn.Module, x: Tensor, **arguments: Any) -> dict[str, Tensor]:
    """Return y, x's gradient and those of all parameters that one step from no gradients gives."""
    for parameter in module.parameters():
        parameter.grad = None
    x = x.detach().clone().requires_grad_()
    y = module(x, **arguments)
    torch.autograd.backward(y, torch.randn(y.shape, generator=_generator(99), dtype=y.dtype).to(y.device))
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"y": y.detach().clone(), "x": x.grad} | found


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        error = float((found[name] - value).abs().max())
        assert error <= tolerance * max(1.0, float(value.abs().max())), (name, error)
