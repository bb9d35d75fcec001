"""Modules that are timed end to end: a plan, and what it is timed beside; and the call that all of these get."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from autotuner.ir.models import Model
from autotuner.plan.configuration import Configuration
from autotuner.runtime.drop_in import apply
from autotuner.runtime.framework import MadeUpCall, encoder_layer
from autotuner.runtime.made_up_region import MadeUpModelCall
from autotuner.runtime.model_module import ModelModule, ModelOperators

Layer = Callable[[], nn.Module]
StepCall = MadeUpCall | MadeUpModelCall


def plan_of(configuration: Configuration, *, graphs: bool = True) -> nn.Module:
    """Return a module that runs a configuration: the framework's layer where it has one, with `apply`."""
    model = configuration.model
    if not model.has_framework_layer:
        return ModelModule([configuration], graphs=graphs)
    layer = encoder_layer(model, device=configuration.device_type)
    return apply(layer, configuration, graphs=graphs)


def call_of(model: Model, device: str) -> StepCall:
    """Return a made-up call of a module of a model."""
    return (MadeUpCall if model.has_framework_layer else MadeUpModelCall).of(model, device=device)


def layers_of(model: Model, device: str) -> Mapping[str, tuple[str, Layer]]:
    """Return what makes a model's modules in plain torch, by name, each with its name where it is compiled.

    A region that was captured has none: the module that it was read from is its peer, and is not known here.
    """
    if model.has_framework_layer:
        return {"eager": ("torch.compile", partial(encoder_layer, model, device=device))}
    if model.is_captured:
        return {}
    return {"eager operators": ("compiled operators", partial(ModelOperators, model, device))}
