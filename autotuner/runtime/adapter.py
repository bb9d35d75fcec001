"""Adapters: how a framework's module is read as a model, why one is refused, and whether a configuration fits it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from autotuner.errors import ConfigurationError
from autotuner.ir.records import Scalar
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import Port

Parts = tuple[Any, ...]


class Description(NamedTuple):
    """The model that a module is: name of the model file, extents without batch and sequence, options and dtype.

    The option `attention_mask` is not among them: a module takes both calls with a mask and calls without.
    """

    model: str
    extents: Mapping[str, int]
    options: Mapping[str, Scalar]
    dtype: str


@dataclass(frozen=True)
class Adapter:
    """Reader of one framework module.

    Args:
        kinds: by the path of each submodule that the model stands for, the classes that it may be of.
        ports: parameters as the module names them, over the graph's parameters.
        refuses: says in a sentence why a module of these kinds cannot be tuned at all, or None.
        describe: reads extents, options and dtype of a module that is not refused.
        parts: the submodules that a forward uses and its activation: a replaced one shows.
        settings: from the parts, the dropout probabilities in force, by option, and both epsilons.
        batch_first: whether the module's tensors are batch, sequence, hidden.
    """

    kinds: Mapping[str, tuple[type[nn.Module], ...]]
    ports: tuple[Port, ...]
    refuses: Callable[[nn.Module], str | None]
    describe: Callable[[nn.Module], Description]
    parts: Callable[[nn.Module], Parts]
    settings: Callable[[Parts], tuple[float, ...]]
    batch_first: Callable[[nn.Module], bool]


# Order of `Adapter.settings`; both layer norms share the option epsilon.
SETTINGS = (
    "attention_dropout",
    "output_dropout",
    "activation_dropout",
    "feed_forward_dropout",
    "epsilon",
    "epsilon",
)
DROPOUTS = SETTINGS[:4]


def linear(name: str, members: tuple[str, ...], output: str, summed: str) -> tuple[Port, Port]:
    """Return the ports of a linear layer's weight and bias; `members` are the weights' names without "_weight"."""
    return (
        Port(f"{name}weight", tuple(f"{m}_weight" for m in members), (output, summed)),
        Port(f"{name}bias", tuple(f"{m}_bias" for m in members), (output,)),
    )


def norm(name: str, member: str) -> tuple[Port, Port]:
    """Return the ports of a layer norm's weight and bias."""
    return Port(f"{name}.weight", (f"{member}_scale",), ("h",)), Port(f"{name}.bias", (f"{member}_bias",), ("h",))


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def dims_of(adapter: Adapter, module: nn.Module) -> tuple[str, str, str]:
    """Return the axes of a module's input and output, in their order."""
    return ("b", "l", "h") if adapter.batch_first(module) else ("l", "b", "h")


def description_of(adapter: Adapter, module: nn.Module) -> Description:
    """Return which model a framework module is.

    Raises:
        ConfigurationError: it cannot be tuned; the message says what about it.
    """
    refusal = refusal_of(adapter, module)
    if refusal is not None:
        raise ConfigurationError(f"this {type(module).__name__} cannot be tuned: {refusal}")
    return adapter.describe(module)


def check_fit(adapter: Adapter, module: nn.Module, configuration: Configuration, *, or_eval: bool = False) -> None:
    """Check that a configuration was made for modules like this one.

    Args:
        or_eval: it may also be one without any dropout, for calls in eval mode.

    Raises:
        ConfigurationError: the message lists what differs.
    """
    found, model = description_of(adapter, module), configuration.model
    pairs = [("model", found.model, model.name), ("dtype", found.dtype, model.dtype)]
    pairs += [(f"extent {axis}", extent, model.extents.get(axis)) for axis, extent in found.extents.items()]  # type: ignore[misc]
    without = DROPOUTS if or_eval and not any(model.options.get(name) for name in DROPOUTS) else ()
    pairs += [(name, value, model.options.get(name)) for name, value in found.options.items() if name not in without]  # type: ignore[misc]
    wrong = [f"{name} is {given!r}, the configuration's {tuned!r}" for name, given, tuned in pairs if given != tuned]
    if wrong:
        raise ConfigurationError(f"the configuration is of another layer: {'; '.join(wrong)}")
    wanted = configuration.environment["device_type"]
    found_on = sorted({str(parameter.device) for parameter in module.parameters() if parameter.device.type != wanted})
    if found_on:
        raise ConfigurationError(
            f"parameters of the module are on {' and '.join(found_on)}, and the configuration was measured on "
            f"{wanted}: move the module there, with module.to({wanted!r}), or give one that was measured on "
            f"{torch.device(found_on[0]).type}"
        )


def refusal_of(adapter: Adapter, module: nn.Module) -> str | None:
    """Say in a sentence why a module cannot be tuned, or None if it can.

    What `apply` needs is all checked here, so that nothing is measured for a module to which nothing can be applied.
    """
    return _strange_part(adapter, module) or adapter.refuses(module) or _strange_parameter(adapter, module)


def _strange_part(adapter: Adapter, module: nn.Module) -> str | None:
    """Name a submodule that may compute something else than the framework's own."""
    for path, kinds in adapter.kinds.items():
        part = _submodule(module, path)
        if type(part) not in kinds:
            given = "missing" if part is None else f"a {type(part).__module__}.{type(part).__qualname__}"
            again = "; torch.nn.utils.parametrize.remove_parametrizations makes it one" if _parametrized(part) else ""
            return f"its {path} is {given}, and the model has a {kinds[-1].__name__} there{again}"
    return None


def _strange_parameter(adapter: Adapter, module: nn.Module) -> str | None:
    """Name a parameter that is none, or is unlike the others."""
    parameters: dict[str, nn.Parameter] = {}
    for port in adapter.ports:
        path, _, name = port.name.rpartition(".")
        owner = _submodule(module, path)
        found: Any = getattr(owner, name, None)
        sources = [other for other in owner._parameters if other.startswith(f"{name}_")] if owner is not None else []
        if sources:
            return (
                f"{port.name} is computed from {' and '.join(sources)} before each call, as pruning and weight norm "
                "do: make it a parameter again, with torch.nn.utils.prune.remove or what else takes that back"
            )
        if found is None:
            return f"it has no {port.name}: the model has every bias and every weight"
        if type(found) is not nn.Parameter:
            return f"{port.name} is a {type(found).__module__}.{type(found).__qualname__}, no plain parameter"
        parameters[port.name] = found
    extents = adapter.describe(module).extents
    first = adapter.ports[0].name
    names: dict[int, str] = {}
    for port in adapter.ports:
        parameter = parameters[port.name]
        shape = [prod(extents[axis] for axis in axes) for axes in port.dims]
        shape[0] *= len(port.members)
        if list(parameter.shape) != shape:
            return f"{port.name} has shape {tuple(parameter.shape)}, and the model's is {tuple(shape)}"
        if names.setdefault(id(parameter), port.name) != port.name:
            return f"{names[id(parameter)]} and {port.name} are one parameter, and the model has two"
        for one, other in (
            (dtype_name(parameters[first].dtype), dtype_name(parameter.dtype)),
            (parameters[first].device, parameter.device),
        ):
            if one != other:
                return f"{first} is {one} and {port.name} is {other}: make all parameters alike, with module.to"
    return None


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    """Return a submodule that is really there, not what an attribute of a wrapper says."""
    found: nn.Module | None = module
    for name in path.split(".") if path else ():
        found = None if found is None else found._modules.get(name)
    return found


def _parametrized(part: nn.Module | None) -> bool:
    return part is not None and "parametrizations" in part._modules
