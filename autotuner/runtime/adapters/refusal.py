"""Reasons to refuse a framework's module."""

from math import prod
from typing import Any

from torch import nn

from autotuner.runtime.adapters.adapter import Adapter, dtype_name


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
