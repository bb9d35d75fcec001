"""Errors of a training step's output and gradients against float64: the tuned layer's, and the framework's own."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from autotuner.errors import ConfigurationError
from autotuner.ir.autodiff import training_graph
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import Port
from autotuner.plan.step import impossible
from autotuner.runtime import DROPOUTS
from autotuner.runtime.adapters import adapter_for
from autotuner.runtime.check import CheckedStep, compare
from autotuner.runtime.framework import MadeUpCall, encoder_layer
from autotuner.runtime.peers.on_gpu import compiled, warn_of_missing
from autotuner.runtime.peers.stacked_layer import stacked_layer
from scripts.bench.cases import Make
from scripts.pages import table

TUNED, EAGER, WITH_DROPOUT = "tuned", "eager", "tuned, with dropout"
LITTLE = 2.0**-16
PROJECTIONS = ("query", "key", "value")

Ports = Iterable[tuple[str, tuple[str, ...]]]  # a parameter's name, and the graph's parameters in it


def measured_errors(
    make: Make, configuration: Configuration, comparison: CheckedStep, backend: str | None
) -> dict[str, dict[str, float]]:
    """Return ||a - r|| / ||r|| by side and tensor; r is the same layer in float64 on the same input.

    The framework's layer, and the stacked one compiled, run without dropout. The plan's kernels run with next to none,
    then with the configuration's own; r has the masks that they drew. A framework's kernels do not tell theirs. A side
    that fails is missing, with a warning.

    Args:
        make: of the framework's layer.
        comparison: of the configuration, with its own dropout.
        backend: the attention kernel of the compiled layer; None for no such side.
    """
    model, device = configuration.model, str(configuration.environment["device_type"])
    without = replace(model, options={**model.options, **dict.fromkeys(DROPOUTS, 0.0)})
    layer, call = make(without, device=device), MadeUpCall.of(without, device=device)
    ports = ports_of(layer)
    reference = gathered(stepped(copy.deepcopy(layer).double(), in_float64(call)), ports)
    plain = encoder_layer(model)

    def of_plan(made: CheckedStep) -> dict[str, float]:
        return differences(*(gathered(side, ports_of(plain)) for side in (made.found, made.wanted)))

    def of_compiled() -> dict[str, float]:
        stacked = stacked_layer(without, backend, device=device)
        own = [(name.removeprefix("self_attn."), members) for name, members in ports_of(plain)]
        return differences(gathered(stepped(compiled(lambda: stacked), call, stacked), own), reference)

    sides: dict[str, Callable[[], dict[str, float]]] = {
        TUNED: lambda: of_plan(compare(with_little_dropout(configuration))),
        EAGER: lambda: differences(gathered(stepped(layer, call), ports), reference),
        **({f"torch.compile sdpa {backend}": of_compiled} if backend else {}),
        WITH_DROPOUT: lambda: of_plan(comparison),
    }
    found = {}
    for name, run in sides.items():
        try:
            found[name] = run()
        except Exception as error:
            warn_of_missing(name, error)
    return found


def with_little_dropout(configuration: Configuration) -> Configuration:
    """Return the same kernels for the same layer with `LITTLE` for each dropout probability above 0.

    At 0 the graph has no operators for dropout, and the plan's steps would be others.

    Raises:
        ConfigurationError: a kernel does not take that.
    """
    options = configuration.model.options
    little = {name: LITTLE for name in DROPOUTS if options[name]}
    model = replace(configuration.model, options={**options, **little})
    graph = training_graph(model.graph())
    for step in configuration.steps:
        reason = impossible(step, graph)
        if reason is not None:
            raise ConfigurationError(f"{step.kernel} does not run with p = {LITTLE:g}: {reason}")
    return replace(configuration, model=model, graph_key=graph.key)


def ports_of(layer: nn.Module) -> list[tuple[str, tuple[str, ...]]]:
    ports: tuple[Port, ...] = adapter_for(layer).ports
    return [(port.name, port.members) for port in ports]


def in_float64(call: MadeUpCall) -> MadeUpCall:
    return MadeUpCall(
        call.x.detach().double().requires_grad_(),
        call.grad_y.double(),
        call.padding,
        None if call.causal is None else call.causal.double(),
    )


def stepped(layer: nn.Module, call: MadeUpCall, owner: nn.Module | None = None) -> dict[str, Tensor | None]:
    """Return output and gradients of one step; parameters are named as the owner does, if one is given."""
    parameters = dict((owner or layer).named_parameters())
    for leaf in (call.x, *parameters.values()):
        leaf.grad = None
    y: Tensor = layer(call.x, **call.masks)
    torch.autograd.backward(y, call.grad_y)
    found: dict[str, Tensor | None] = {"y": y.detach(), "x": call.x.grad}
    found |= {name: parameter.grad for name, parameter in parameters.items()}
    return {name: None if value is None else value.clone() for name, value in found.items()}


def gathered(found: Mapping[str, Tensor | None], ports: Ports) -> dict[str, Tensor]:
    """Return output and gradients under names that all layers share, each in a row.

    Query, key and value are one: without dropout the gradient of the key's bias is 0 but for rounding.
    """
    named: dict[str, list[Tensor]] = {"y": [_given(found, "y")], "grad x": [_given(found, "x")]}
    for name, members in ports:
        first, _, part = members[0].rpartition("_")
        shared = f"query, key, value {part}" if first in PROJECTIONS else f"{first} {part}"
        named.setdefault(f"grad {shared}", []).append(_given(found, name))
    return {name: torch.cat([part.reshape(-1) for part in parts]) for name, parts in named.items()}


def _given(found: Mapping[str, Tensor | None], name: str) -> Tensor:
    value = found[name]
    if value is None:
        raise ValueError(f"{name} has no gradient")
    return value


def differences(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name].detach().double() - r).norm() / r.norm()) for name, r in wanted.items()}


def lines(errors: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the part of a page on errors."""
    sides, first = [*errors], next(iter(errors.values()))
    said = [
        "Errors against float64 on the same input, ||a - r|| / ||r||. Frameworks run without dropout, since their "
        f"kernels do not tell their masks. The plan's kernels run with p = {LITTLE:.1g}, in the last column with the "
        "layer's own; their reference has the masks that they drew.",
        "",
        *table(("tensor", *sides), ((name, *(f"{errors[side][name]:.2e}" for side in sides)) for name in first)),
    ]
    most = over_eager(errors)
    if most is not None:
        said += ["", f"Tuned over eager: {most[1]:.2f} at most ({most[0]})."]
    return said


def over_eager(errors: Mapping[str, Mapping[str, float]]) -> tuple[str, float] | None:
    """Return the tensor whose error is the largest multiple of eager's, and that multiple; None without both sides."""
    tuned, eager = errors.get(TUNED, {}), errors.get(EAGER, {})
    ratios = {name: error / eager[name] for name, error in tuned.items() if eager.get(name)}
    return max(ratios.items(), key=lambda item: item[1], default=None)
